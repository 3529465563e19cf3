"""Classification of pairs: one row for each post and label, the post beside the label's sentence.

Each post is tokenized once, each sentence once per label set, and the rows of a post may run in different
micro-batches.

`nli`: does the post (premise) entail the hypothesis "This example is food."? Works with any sequence classifier trained
on natural language inference. Scores equal those of transformers' zero-shot pipeline
(pipelines/zero_shot_classification.py):

- single-label, several labels: softmax of the entailment logits over the labels;
- `multi_label`, or only one label: softmax of contradiction and entailment, separately for each label.

`rerank`: how relevant is the sentence "This post is about food." to the post? Works with cross-encoders of one logit.
The post is the pair's first text (the query of a reranker). Logits equal those of sentence-transformers' CrossEncoder:

- single-label, several labels: softmax of the logits over the labels;
- `multi_label`, or only one label: the activation in the model's configuration, by default the sigmoid, as in
  `CrossEncoder.predict`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from feedmill.shared.errors import ModelError, RequestRefused
from feedmill.shared.settings import TOPICS, Settings
from feedmill.workers.models.classifiers import LabelSet, LabelSets, ModelClassifier, Row, Scores, single_texts
from feedmill.workers.models.classifiers.layout import activation, read_text_settings
from feedmill.workers.models.device import Device
from feedmill.workers.models.engines import TensorOutputs, rounded
from feedmill.workers.models.engines.packing import LOGITS
from feedmill.workers.models.weights import Weights, read_config

logger = logging.getLogger(__name__)
#: Label that transformers gives the only class of a model without named labels.
UNNAMED_LABEL = "LABEL_0"


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


class PairClassifier(ModelClassifier):
    """A classifier that computes logits for each pair. Raises ModelError if the folder does not hold one.

    Subclasses call `_serve` at the end of their constructor, and turn logits into scores in `_scores`.
    """

    #: Number of logits that a pair keeps.
    width = 1
    default_template: str
    #: Prefix of each post.
    prompt = ""
    lower_case = False

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

    def _sentences(self, described: Sequence[Sequence[str]]) -> list[Any]:
        """Tokenize the sentences. Raises RequestRefused if one leaves no room for a post, or a label has several."""
        texts = self._cased(single_texts(described, self.kind))
        sentences: list[Any] = self._tokenizer.parts(texts)
        for text, sentence in zip(texts, sentences, strict=True):
            if len(sentence) + self._tokenizer.pair_size >= self._tokenizer.max_tokens:
                raise RequestRefused(
                    f"labels: {text!r:.200} takes {len(sentence)} of {self._tokenizer.max_tokens} tokens, leaving no "
                    "room for a post; shorten the label or the template"
                )
        return sentences

    def _cased(self, texts: Sequence[str]) -> list[str]:
        return [text.lower() for text in texts] if self.lower_case else list(texts)

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        rows: list[list[Row]] = []
        for post in self._tokenizer.parts(self._cased([self.prompt + text for text in texts])):
            tokens = [self._tokenizer.pair(post, sentence) for sentence in label_set.prepared]
            pairs = Pairs(np.empty((len(tokens), self.width), np.float32), len(tokens))
            rows.append([PairRow(pair, label_set, place=place, pairs=pairs) for place, pair in enumerate(tokens)])
        return rows

    def _outputs(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return the logits that `_scores` needs: [rows, width] in float32."""
        return self._engine.forward([row.tokens for row in rows])

    def finish(self, rows: Sequence[Row], outputs: TensorOutputs) -> list[tuple[Row, Scores]]:
        finished: list[tuple[Row, Scores]] = []
        for row, logits in zip(rows, outputs.wait().numpy(), strict=True):
            if not isinstance(row, PairRow):
                raise TypeError("not a row from prepare()")
            row.pairs.logits[row.place] = logits
            row.pairs.missing -= 1
            if not row.pairs.missing:
                scores = self._scores(torch.from_numpy(row.pairs.logits), row.label_set.independent)
                finished.append((row, dict(zip(row.label_set.labels, rounded(scores), strict=True))))
        return finished

    def _scores(self, logits: torch.Tensor, independent: bool) -> torch.Tensor:
        """Return the scores of a post whose logits are complete: [labels]. independent: score each label by itself."""
        raise NotImplementedError


class Entailment(PairClassifier):
    """Classify with a natural-language-inference model. Raises ModelError if the folder does not hold one."""

    kind = "nli"
    #: Contradiction and entailment.
    width = 2
    #: As in transformers' pipeline.
    default_template = "This example is {}."

    def __init__(self, weights: Weights, device: Device, settings: Settings) -> None:
        super().__init__(weights, device, settings, LOGITS, settings.max_tokens)
        label2id = read_config(weights).label2id
        self._entailment = entailment_class(label2id)
        if self._entailment is None:
            self._entailment = len(label2id) - 1
            logger.warning(
                "no label of %s starts with 'entail': using the model's last label as entailment; check id2label in "
                "config.json",
                weights.name,
            )
        self._contradiction = len(label2id) - 1 if self._entailment == 0 else 0
        self._serve(settings, self._entailment, self._contradiction)

    def _outputs(self, rows: Sequence[Row]) -> torch.Tensor:
        logits = super()._outputs(rows)
        # Slices, since indexing with a list would first copy the list to the device.
        return torch.stack((logits[:, self._contradiction], logits[:, self._entailment]), dim=1)

    def _scores(self, logits: torch.Tensor, independent: bool) -> torch.Tensor:
        return logits.softmax(1)[:, 1] if independent else logits[:, 1].softmax(0)


def entailment_class(label2id: dict[str, int]) -> int | None:
    """Return the index of the first class whose name starts with "entail", as transformers' pipeline does, or None."""
    return next((number for label, number in label2id.items() if label.lower().startswith("entail")), None)


class Reranker(PairClassifier):
    """Classify with a reranker. Raises ModelError if the folder does not hold one."""

    kind = "rerank"
    default_template = "This post is about {}."

    def __init__(self, weights: Weights, device: Device, settings: Settings) -> None:
        texts = read_text_settings(weights, settings)
        limit = min(settings.max_tokens, texts.max_tokens or settings.max_tokens)
        super().__init__(weights, device, settings, LOGITS, limit)
        config = read_config(weights)
        if config.num_labels != 1:
            raise ModelError(
                f"{weights.name} has {config.num_labels} labels, but a reranker has one. Set another "
                "FEEDMILL_CLASSIFIER, or use another model."
            )
        if self._tokenizer.has_chat_template:
            raise ModelError(
                f"{weights.name} formats pairs with a chat template, which is not supported. Use another model."
            )
        self.prompt, self.lower_case = texts.post_prompt, texts.lower_case
        path = _activation(texts.config, config.to_dict())
        self._activate = activation(path, weights.folder)
        self._serve(settings, path, texts.lower_case, repr(texts.post_prompt))

    def _scores(self, logits: torch.Tensor, independent: bool) -> torch.Tensor:
        scores: torch.Tensor = self._activate(logits[:, 0]) if independent else logits[:, 0].softmax(0)
        return scores


def is_reranker(config: Mapping[str, Any], sentence_config: Mapping[str, Any]) -> bool:
    """Return whether a sequence classifier is a reranker: has one label, and this label no meaning.

    config: its config.json. sentence_config: its config_sentence_transformers.json, if any. A model that was saved by
    CrossEncoder is a reranker whatever its label is called. A regression model predicts a number about a single text.
    """
    names = list((config.get("id2label") or {}).values())
    if (len(names) or config.get("num_labels")) != 1:
        return False
    saved_by = (config.get("sentence_transformers"), config.get("sbert_ce_default_activation_function"))
    if any(saved_by) or sentence_config.get("model_type") == "CrossEncoder":
        return True
    return names in ([], [UNNAMED_LABEL]) and config.get("problem_type") != "regression"


def _activation(sentence_config: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the path of the activation's class, from the first place in which CrossEncoder would find one."""
    return str(
        sentence_config.get("activation_fn")
        or (config.get("sentence_transformers") or {}).get("activation_fn")
        or config.get("sbert_ce_default_activation_function")
        or "torch.nn.modules.activation.Sigmoid"
    )
