"""Classification of pairs: one row for each post and label, the post beside the label's sentence.

The common part of `nli.py` and `rerank.py`. Each post is tokenized once, each sentence once per label set, and the rows
of a post may run in different micro-batches.
"""

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
from workers.models.engines.network import LOGITS
from workers.models.engines.outputs import TensorOutputs, device_errors, rounded
from workers.models.tokenizer import Tokens
from workers.models.weights import Weights


class Sentence(NamedTuple):
    """A label's sentence and its token ids, without special tokens."""

    text: str
    ids: list[int]


@dataclass(eq=False, slots=True)
class Pairs:
    """Logits of one post's rows: [labels, logits of a pair], filled row by row. Writer thread only."""

    logits: np.ndarray[tuple[int, int], np.dtype[np.float32]]
    missing: int


@dataclass(eq=False, slots=True, kw_only=True)
class PairRow(Row):
    """The pair of a post and one label's sentence, with the pair's place in the post's shared logits."""

    place: int
    pairs: Pairs


class PairClassifier(Classifier):
    """A classifier that computes logits for each pair. Raises ModelError if the folder does not hold one.

    Subclasses call `_serve` at the end of their constructor, and turn logits into scores in `_scores`.
    """

    #: Number of logits that a pair keeps.
    width = 1
    default_template: str
    #: Prefix of each post.
    prompt = ""
    lower_case = False

    def __init__(self, weights: Weights, device: Device, settings: Settings, max_tokens: int) -> None:
        self.weights = weights
        self.device = device
        self._engine, self._tokenizer = create_engine(weights, device, settings, LOGITS, max_tokens)
        self.packed = self._engine.packed

    def _serve(self, settings: Settings, *identity: object) -> None:
        """Accept label sets. identity: everything else that determines a pair's scores."""
        self._label_sets = LabelSets(
            self.kind,
            " ".join(map(str, (self.weights.sha256, self._tokenizer.max_tokens, *identity))),
            settings.labels or {topic: (topic,) for topic in TOPICS},
            settings.template or self.default_template,
            self._sentences,
            row_each=True,
        )

    def label_set(self, options: ClassifyOptions) -> LabelSet:
        return self._label_sets.of(options)

    def _sentences(self, described: Sequence[Sequence[str]]) -> list[Sentence]:
        """Tokenize the sentences. Raises RequestRefused if one leaves no room for a post, or a label has several."""
        if several := [texts for texts in described if len(texts) > 1]:
            raise RequestRefused(
                f"labels: a label has {len(several[0])} descriptions, but the worker's {self.kind} model takes one per "
                "label"
            )
        texts = self._cased([of_label[0] for of_label in described])
        parts = self._tokenizer.parts(texts)
        special = self._tokenizer.pair_size
        for text, part in zip(texts, parts, strict=True):
            if len(part) + special >= self._tokenizer.max_tokens:
                raise RequestRefused(
                    f"labels: {text!r:.200} takes {len(part)} of {self._tokenizer.max_tokens} tokens, leaving no room "
                    "for a post; shorten the label or the template"
                )
        return [Sentence(text, part) for text, part in zip(texts, parts, strict=True)]

    def _cased(self, texts: Sequence[str]) -> list[str]:
        return [text.lower() for text in texts] if self.lower_case else list(texts)

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        rows: list[list[Row]] = []
        for tokens in self._pairs(self._cased([self.prompt + text for text in texts]), label_set.prepared):
            pairs = Pairs(np.empty((len(tokens), self.width), np.float32), len(tokens))
            rows.append([PairRow(pair, label_set, place=place, pairs=pairs) for place, pair in enumerate(tokens)])
        return rows

    def _pairs(self, texts: Sequence[str], sentences: Sequence[Sentence]) -> list[list[Tokens]]:
        """Pair each text with each sentence."""
        tokenizer, frame = self._tokenizer, self._tokenizer.frame
        if frame is None:
            return [tokenizer.encode([(text, sentence.text) for sentence in sentences]) for text in texts]
        room = tokenizer.max_tokens - tokenizer.pair_size
        return [
            [frame.pair(tokenizer.cut(post, room - len(ids)), ids) for _, ids in sentences]
            for post in tokenizer.parts(texts, room)
        ]

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> TensorOutputs:
        """Return the logits that `_scores` needs: [rows, width] in float32."""
        with device_errors():
            began = self._engine.begin()
            return TensorOutputs(self._wanted(self._engine.forward([row.tokens for row in rows])), began)

    def _wanted(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def finish(self, rows: Sequence[Row], outputs: TensorOutputs) -> list[tuple[Row, Scores]]:
        finished: list[tuple[Row, Scores]] = []
        for row, logits in zip(rows, outputs.wait().numpy(), strict=True):
            if not isinstance(row, PairRow):
                raise TypeError("not a row from prepare()")
            row.pairs.logits[row.place] = logits
            row.pairs.missing -= 1
            if not row.pairs.missing:
                labels = row.label_set.labels
                independent = row.label_set.multi_label or len(labels) == 1
                scores = self._scores(torch.from_numpy(row.pairs.logits), independent)
                finished.append((row, dict(zip(labels, rounded(scores), strict=True))))
        return finished

    def _scores(self, logits: torch.Tensor, independent: bool) -> torch.Tensor:
        """Return the scores of a post whose logits are complete: [labels]. independent: score each label by itself."""
        raise NotImplementedError
