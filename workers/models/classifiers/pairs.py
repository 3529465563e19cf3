"""Classification of pairs: one row for each post and label, the post beside the label's sentence.

Each post is tokenized once, each sentence once per label set, and the rows of a post may run in
different micro-batches.

`nli`: does the post (premise) entail the hypothesis "This example is food."? Works with any
sequence classifier trained on natural language inference. Scores equal those of transformers'
zero-shot pipeline (pipelines/zero_shot_classification.py):

- single-label, several labels: softmax of the entailment logits over the labels;
- `multi_label`, `none`, or only one label: softmax of contradiction and entailment, separately for
  each label.

`rerank`: how relevant is the sentence "This post is about food." to the post? Works with
cross-encoders of one logit. The post is the pair's first text (the query of a reranker). Logits
equal those of sentence-transformers' CrossEncoder:

- single-label, several labels: softmax of the logits over the labels;
- `multi_label`, or only one label: the activation in the model's configuration, by default the
  sigmoid, as in `CrossEncoder.predict`;
- `none`: always the sigmoid, which a threshold from 0 to 1 can be compared with.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from feedmill.shared.errors import ModelError, RequestRefused
from feedmill.shared.settings import TOPICS, Settings
from feedmill.workers.models.classifiers import (
    LabelSet,
    LabelSets,
    ModelClassifier,
    Row,
    Scores,
    single_texts,
)
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
    """Logits of one post's rows: [labels, logits of a pair], filled row by row.

    Writer thread only.
    """

    logits: np.ndarray[tuple[int, int], np.dtype[np.float32]]
    missing: int


@dataclass(
    eq=False,
    slots=True,
    kw_only=True,
)
class PairRow(Row):
    """The pair of a post and one label's sentence, with the pair's place in the post's shared
    logits.
    """

    place: int
    pairs: Pairs


class PairClassifier(ModelClassifier):
    """A classifier that computes logits for each pair.

    Raises ModelError if the folder does not hold one.

    Subclasses call `_set_label_sets` in their constructor, and turn logits into scores in
    `_scores`.
    """

    #: Number of logits that a pair keeps.
    width = 1
    default_template: str
    #: Prefix of each post.
    prompt = ""
    lower_case = False

    def _set_label_sets(self, settings: Settings, *identity: object) -> None:
        """Set the label sets that the model serves.

        identity: everything else that determines a pair's scores.
        """
        parts = [
            self.weights.sha256,
            self._tokenizer.max_tokens,
            *identity,
        ]
        self._label_sets = LabelSets(
            kind=self.kind,
            model=" ".join(map(str, parts)),
            labels=settings.labels or {topic: (topic,) for topic in TOPICS},
            template=settings.template or self.default_template,
            prepare=self._sentences,
            row_each=True,
        )

    def _sentences(self, described: Sequence[Sequence[str]]) -> list[Any]:
        """Tokenize the sentences.

        Raises RequestRefused if one leaves no room for a post, or a label has several.
        """
        tokenizer = self._tokenizer
        max_tokens = tokenizer.max_tokens
        texts = single_texts(described, self.kind)
        cased_texts = self._apply_case(texts)
        sentences: list[Any] = tokenizer.parts(cased_texts)
        for text, sentence in zip(cased_texts, sentences, strict=True):
            tokens = len(sentence)
            pair_tokens = tokens + tokenizer.pair_size
            if pair_tokens >= max_tokens:
                raise RequestRefused(
                    f"labels: {text!r:.200} takes {tokens} of {max_tokens} "
                    "tokens, leaving no room for a post; shorten the label or the template"
                )
        return sentences

    def _apply_case(self, texts: Sequence[str]) -> list[str]:
        if self.lower_case:
            return [text.lower() for text in texts]
        return list(texts)

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        prompted = [self.prompt + text for text in texts]
        cased_texts = self._apply_case(prompted)
        posts = self._tokenizer.parts(cased_texts)
        return [self._post_rows(post, label_set) for post in posts]

    def _post_rows(self, post: Any, label_set: LabelSet) -> list[Row]:
        """Return a post's rows, one for each label. post: the post's encoding."""
        sentences = label_set.prepared
        label_count = len(sentences)
        shape = (label_count, self.width)
        pairs = Pairs(
            logits=np.empty(shape, np.float32),
            missing=label_count,
        )
        rows: list[Row] = []
        for index, sentence in enumerate(sentences):
            row = PairRow(
                tokens=self._tokenizer.pair(post, sentence),
                label_set=label_set,
                place=index,
                pairs=pairs,
            )
            rows.append(row)
        return rows

    def _outputs(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return the logits that `_scores` needs: [rows, width] in float32."""
        token_rows = [row.tokens for row in rows]
        return self._engine.forward(token_rows)

    def finish(
        self, rows: Sequence[Row], outputs: TensorOutputs
    ) -> list[tuple[Row, Scores]]:
        finished: list[tuple[Row, Scores]] = []
        batch_logits = outputs.wait().numpy()  # [rows, width]
        for row, row_logits in zip(rows, batch_logits, strict=True):
            if not isinstance(row, PairRow):
                raise TypeError("not a row from prepare()")
            pairs = row.pairs
            pairs.logits[row.place] = row_logits
            pairs.missing -= 1
            if pairs.missing:
                continue
            label_set = row.label_set
            scores = self._scores(torch.from_numpy(pairs.logits), label_set)
            numbers = rounded(scores)
            scores_by_label = dict(zip(label_set.labels, numbers, strict=True))
            finished.append((row, scores_by_label))
        return finished

    def _scores(self, logits: torch.Tensor, label_set: LabelSet) -> torch.Tensor:
        """Return the scores of a post whose logits are complete: [labels]."""
        raise NotImplementedError


class Entailment(PairClassifier):
    """Classify with a natural-language-inference model.

    Raises ModelError if the folder does not hold one.
    """

    kind = "nli"
    #: Contradiction and entailment.
    width = 2
    #: As in transformers' pipeline.
    default_template = "This example is {}."

    def __init__(self, weights: Weights, device: Device, settings: Settings) -> None:
        super().__init__(
            weights,
            device,
            settings,
            LOGITS,
            settings.max_tokens,
        )
        config = read_config(weights)
        label2id = {}
        for name, number in config.label2id.items():
            label2id[name] = int(number)
        last = len(label2id) - 1
        self._entailment = entailment_class(label2id)
        if self._entailment is None:
            self._entailment = last
            logger.warning(
                "no label of %s starts with 'entail': using the model's last label as "
                "entailment; check id2label in config.json",
                weights.name,
            )
        if self._entailment > last:
            raise ModelError(
                f"label2id in config.json of {weights.name} gives entailment the number "
                f"{self._entailment}, but there are {len(label2id)} labels, counted from 0. Give "
                "each label the number that it has in id2label."
            )
        self._contradiction = 0
        if self._entailment == 0:
            self._contradiction = last
        self._set_label_sets(
            settings,
            self._entailment,
            self._contradiction,
        )

    def _outputs(self, rows: Sequence[Row]) -> torch.Tensor:
        logits = super()._outputs(rows)
        # Slices, since indexing with a list would first copy the list to the device.
        contradiction = logits[:, self._contradiction]
        entailment = logits[:, self._entailment]
        return torch.stack((contradiction, entailment), dim=1)

    def _scores(self, logits: torch.Tensor, label_set: LabelSet) -> torch.Tensor:
        if label_set.independent:
            shares = logits.softmax(1)  # [labels, contradiction and entailment]
            return shares[:, 1]
        entailment = logits[:, 1]
        return entailment.softmax(0)


def entailment_class(label2id: dict[str, int]) -> int | None:
    """Return the index of the first class whose name starts with "entail", as transformers'
    pipeline does, or None.
    """
    for label, number in label2id.items():
        name = label.lower()
        if name.startswith("entail"):
            return number
    return None


class Reranker(PairClassifier):
    """Classify with a reranker. Raises ModelError if the folder does not hold one."""

    kind = "rerank"
    default_template = "This post is about {}."

    def __init__(self, weights: Weights, device: Device, settings: Settings) -> None:
        texts = read_text_settings(weights, settings)
        max_tokens = settings.max_tokens
        if texts.max_tokens is not None:
            max_tokens = min(max_tokens, texts.max_tokens)
        super().__init__(weights, device, settings, LOGITS, max_tokens)
        config = read_config(weights)
        if config.num_labels != 1:
            raise ModelError(
                f"{weights.name} has {config.num_labels} labels, but a reranker has one. Set "
                "another FEEDMILL_CLASSIFIER, or use another model."
            )
        if self._tokenizer.has_chat_template:
            raise ModelError(
                f"{weights.name} formats pairs with a chat template, which is not supported. Use "
                "another model."
            )
        self.prompt = texts.post_prompt
        self.lower_case = texts.lower_case
        path = _activation(texts.config, config.to_dict())
        self._activate = activation(path, weights.folder)
        self._set_label_sets(
            settings,
            path,
            texts.lower_case,
            repr(texts.post_prompt),
        )

    def _scores(self, logits: torch.Tensor, label_set: LabelSet) -> torch.Tensor:
        relevance = logits[:, 0]
        if not label_set.independent:
            return relevance.softmax(0)
        if label_set.none is not None:
            # The model's activation may leave logits as they are.
            return relevance.sigmoid()
        scores: torch.Tensor = self._activate(relevance)
        return scores


def is_reranker(config: Mapping[str, Any], sentence_config: Mapping[str, Any]) -> bool:
    """Return whether a sequence classifier is a reranker: has one label, and this label no
    meaning.

    config: its config.json. sentence_config: its config_sentence_transformers.json, if any. A
    model that was saved by CrossEncoder is a reranker whatever its label is called. A regression
    model predicts a number about a single text.
    """
    id2label = config.get("id2label") or {}
    names = list(id2label.values())
    label_count = len(names) or config.get("num_labels")
    if label_count != 1:
        return False
    if config.get("sentence_transformers"):
        return True
    if config.get("sbert_ce_default_activation_function"):
        return True
    if sentence_config.get("model_type") == "CrossEncoder":
        return True
    is_unnamed = names in ([], [UNNAMED_LABEL])
    return is_unnamed and config.get("problem_type") != "regression"


def _activation(sentence_config: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the path of the activation's class, from the first place in which CrossEncoder would
    find one.
    """
    own_settings = config.get("sentence_transformers") or {}
    return str(
        sentence_config.get("activation_fn")
        or own_settings.get("activation_fn")
        or config.get("sbert_ce_default_activation_function")
        or "torch.nn.modules.activation.Sigmoid"
    )
