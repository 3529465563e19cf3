"""Zero-shot classification by entailment: does the post (premise) entail the hypothesis "This example is food."?

Works with any sequence classifier trained on natural language inference. A post has one row per label: the pair of
premise and hypothesis. Each premise is tokenized once, each hypothesis once per label set. Scores equal those of
transformers' zero-shot pipeline (pipelines/zero_shot_classification.py):

- single-label, several labels: softmax of the entailment logits over the labels;
- `multi_label`, or only one label: softmax of contradiction and entailment, separately for each label.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from shared.errors import RequestRefused
from shared.messages import ClassifyOptions
from shared.settings import Settings
from shared.topics import TOPICS
from workers.models.classifiers import Classifier, LabelSet, LabelSets, Row, Scores
from workers.models.device import Device
from workers.models.engines.factory import create_engine
from workers.models.engines.network import LOGITS, read_config
from workers.models.engines.outputs import TensorOutputs, device_errors, rounded
from workers.models.tokenizer import Tokens
from workers.models.weights import Weights

logger = logging.getLogger(__name__)

#: Default template, as in transformers' pipeline.
DEFAULT_TEMPLATE = "This example is {}."


class Hypothesis(NamedTuple):
    """A label's sentence and its token ids, without special tokens."""

    text: str
    ids: list[int]


@dataclass(eq=False, slots=True)
class Pairs:
    """Logits of one post's rows: [labels, (contradiction, entailment)], filled row by row. Writer thread only."""

    logits: np.ndarray[tuple[int, int], np.dtype[np.float32]]
    missing: int


@dataclass(eq=False, slots=True, kw_only=True)
class PairRow(Row):
    """The pair of a post and one label's hypothesis, with the label's index and the post's shared logits."""

    place: int
    pairs: Pairs


class Entailment(Classifier):
    """Classify with a natural-language-inference model. Raises ModelError if the folder does not hold one."""

    kind = "nli"

    def __init__(self, weights: Weights, device: Device, settings: Settings) -> None:
        self.weights = weights
        self.device = device
        self._engine, self._tokenizer = create_engine(weights, device, settings, LOGITS, settings.max_tokens)
        self.packed = self._engine.packed
        label2id = read_config(weights, settings.trust_remote_code).label2id
        self._entailment = entailment_class(label2id)
        if self._entailment is None:
            self._entailment = len(label2id) - 1
            logger.warning(
                "no label of %s starts with 'entail': using the model's last label as entailment; check id2label in "
                "config.json",
                weights.name,
            )
        self._contradiction = len(label2id) - 1 if self._entailment == 0 else 0
        self._label_sets = LabelSets(
            self.kind,
            f"{weights.sha256} {self._tokenizer.max_tokens} {self._entailment} {self._contradiction}",
            settings.labels or {topic: (topic,) for topic in TOPICS},
            settings.template or DEFAULT_TEMPLATE,
            self._hypotheses,
            row_each=True,
        )

    def label_set(self, options: ClassifyOptions) -> LabelSet:
        return self._label_sets.of(options)

    def _hypotheses(self, sentences: Sequence[Sequence[str]]) -> list[Hypothesis]:
        """Tokenize the hypotheses. Raises RequestRefused if one leaves no room for a post, or a label has several."""
        if several := [described for described in sentences if len(described) > 1]:
            raise RequestRefused(
                f"labels: a label has {len(several[0])} descriptions, but the worker's NLI model takes one per label"
            )
        texts = [described[0] for described in sentences]
        parts = self._tokenizer.parts(texts)
        special = self._tokenizer.pair_size
        for text, part in zip(texts, parts, strict=True):
            if len(part) + special >= self._tokenizer.max_tokens:
                raise RequestRefused(
                    f"labels: {text!r:.200} takes {len(part)} of {self._tokenizer.max_tokens} tokens, leaving no room "
                    "for a post; shorten the label or the template"
                )
        return [Hypothesis(text, part) for text, part in zip(texts, parts, strict=True)]

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        rows: list[list[Row]] = []
        for tokens in self._pairs(texts, label_set.prepared):
            pairs = Pairs(np.empty((len(tokens), 2), np.float32), len(tokens))
            rows.append([PairRow(pair, label_set, place=place, pairs=pairs) for place, pair in enumerate(tokens)])
        return rows

    def _pairs(self, texts: Sequence[str], hypotheses: Sequence[Hypothesis]) -> list[list[Tokens]]:
        """Pair each text with each hypothesis."""
        tokenizer, frame = self._tokenizer, self._tokenizer.frame
        if frame is None:
            return [tokenizer.encode([(text, hypothesis.text) for hypothesis in hypotheses]) for text in texts]
        room = tokenizer.max_tokens - tokenizer.pair_size
        return [
            [frame.pair(tokenizer.cut(premise, room - len(ids)), ids) for _, ids in hypotheses]
            for premise in tokenizer.parts(texts)
        ]

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> TensorOutputs:
        """Return logits of contradiction and entailment: [rows, 2] in float32."""
        with device_errors():
            began = self._engine.begin()
            logits = self._engine.forward([row.tokens for row in rows])
            # Slices, since indexing with a list would first copy the list to the device.
            wanted = torch.stack((logits[:, self._contradiction], logits[:, self._entailment]), dim=1)
            return TensorOutputs(wanted, began)

    def finish(self, rows: Sequence[Row], outputs: TensorOutputs) -> list[tuple[Row, Scores]]:
        finished: list[tuple[Row, Scores]] = []
        for row, logits in zip(rows, outputs.wait().numpy(), strict=True):
            if not isinstance(row, PairRow):
                raise TypeError("not a row from prepare()")
            row.pairs.logits[row.place] = logits
            row.pairs.missing -= 1
            if not row.pairs.missing:
                finished.append((row, self._scores(row)))
        return finished

    def _scores(self, row: PairRow) -> Scores:
        """Return the scores of a post whose logits are complete."""
        label_set, logits = row.label_set, torch.from_numpy(row.pairs.logits)
        independent = label_set.multi_label or len(label_set.labels) == 1
        scores = logits.softmax(1)[:, 1] if independent else logits[:, 1].softmax(0)
        return dict(zip(label_set.labels, rounded(scores), strict=True))


def entailment_class(label2id: dict[str, int]) -> int | None:
    """Return the index of the first class whose name starts with "entail", as transformers' pipeline does, or None."""
    return next((number for label, number in label2id.items() if label.lower().startswith("entail")), None)
