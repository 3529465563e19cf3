"""Models as their users run them without Feedmill: transformers' pipeline, and a forward pass of
one's own.

The rungs below Feedmill on the ladder (ladder.py). A model of another kind has none:
`UnsupportedKindError` says why.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch.nn.functional import normalize

from feedmill.shared.settings import DESCRIBED_TOPICS, TOPICS, Settings
from feedmill.workers.models.classifiers import Classifier
from feedmill.workers.models.classifiers.layout import read_layout
from feedmill.workers.models.classifiers.pairs import Entailment, entailment_class
from feedmill.workers.models.classifiers.similarity import DEFAULT_TEMPLATE
from feedmill.workers.models.tokenizer import Tokenizer, Tokens, padded

Labels = list[str | None]


class UnsupportedKindError(Exception):
    """The model has no counterpart in plain transformers."""


class PlainModel:
    """A transformers model, its rows and its labels. has_pipeline: transformers has a pipeline for
    this kind.
    """

    has_pipeline = True
    #: Class of transformers that loads the model.
    model_class = "AutoModelForSequenceClassification"

    def __init__(self, classifier: Classifier, settings: Settings) -> None:
        import transformers  # noqa: PLC0415 - takes seconds

        self._transformers: Any = transformers
        self._weights = classifier.weights
        self._device = classifier.device
        self._tokenizer = Tokenizer(self._weights, settings.max_tokens)
        loader = getattr(transformers, self.model_class)
        model = loader.from_pretrained(
            self._weights.folder,
            dtype=self._device.dtype,
            local_files_only=True,
            trust_remote_code=self._weights.remote_code,
        )
        model = model.to(self._device.torch)
        self._model: Any = model.eval()

    def pipeline(self) -> Any:
        """Return transformers' pipeline for this model."""
        tokenizer = self._transformers.AutoTokenizer.from_pretrained(
            self._weights.folder,
            local_files_only=True,
        )
        tokenizer.model_max_length = self._tokenizer.max_tokens
        return self._transformers.pipeline(
            self._task,
            model=self._model,
            tokenizer=tokenizer,
            device=self._device.torch,
        )

    @property
    def _task(self) -> str:
        raise NotImplementedError

    def pipeline_labels(
        self, pipeline: Any, texts: Sequence[str], batch_size: int
    ) -> Labels:
        raise NotImplementedError

    def rows(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the rows of all texts."""
        return self._tokenizer.encode(texts)

    def outputs(self, rows: Sequence[Tokens]) -> torch.Tensor:
        """Run one padded batch; return each row's logits or embedding: [rows, …] in float32 on the
        host.
        """
        ids, mask, types = padded(
            rows,
            self._tokenizer.pad_id,
            self._tokenizer.max_tokens,
        )
        device = self._device.torch
        inputs = {
            "input_ids": ids.to(device),
            "attention_mask": mask.long().to(device),
        }
        if types is not None:
            inputs["token_type_ids"] = types.to(device)
        with torch.inference_mode():
            output = self._model(**inputs)
            rows_read = self._read(output, mask.to(device))
            return rows_read.float().cpu()

    # Pooling needs the mask.
    def _read(self, output: Any, mask: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        logits: torch.Tensor = output.logits
        return logits

    def labels(self, outputs: torch.Tensor) -> Labels:
        """Return the best label of each text. outputs: of all rows, [rows, …]."""
        raise NotImplementedError


class PlainSequence(PlainModel):
    """A fine-tuned classifier."""

    @property
    def _task(self) -> str:
        return "text-classification"

    def pipeline_labels(
        self, pipeline: Any, texts: Sequence[str], batch_size: int
    ) -> Labels:
        answers = pipeline(
            list(texts),
            batch_size=batch_size,
            truncation=True,
        )
        return [answer["label"] for answer in answers]

    def labels(self, outputs: torch.Tensor) -> Labels:
        names = self._model.config.id2label
        best = outputs.argmax(-1)
        return [names[index] for index in best.tolist()]


class PlainEntailment(PlainModel):
    """Zero-shot classification by entailment: a row for each text and label."""

    def __init__(self, classifier: Classifier, settings: Settings) -> None:
        super().__init__(classifier, settings)
        descriptions: Mapping[str, Sequence[str]] | None = settings.labels
        if not descriptions:
            descriptions = {topic: [topic] for topic in TOPICS}
        self._names = list(descriptions)
        self._texts = [texts[0] for texts in descriptions.values()]
        self._template = settings.template or Entailment.default_template
        classes = self._model.config.label2id
        entailment = entailment_class(classes)
        if entailment is None:
            entailment = len(classes) - 1
        self._entailment = entailment

    @property
    def _task(self) -> str:
        return "zero-shot-classification"

    def pipeline_labels(
        self, pipeline: Any, texts: Sequence[str], batch_size: int
    ) -> Labels:
        answers = pipeline(
            list(texts),
            candidate_labels=self._texts,
            hypothesis_template=self._template,
            batch_size=batch_size,
        )
        name_of = dict(zip(self._texts, self._names, strict=True))
        return [name_of[answer["labels"][0]] for answer in answers]

    def rows(self, texts: Sequence[str]) -> list[Tokens]:
        sentences = [self._template.replace("{}", text) for text in self._texts]
        hypotheses = self._tokenizer.parts(sentences)
        premises = self._tokenizer.parts(texts)
        pairs = product(premises, hypotheses)
        return [
            self._tokenizer.pair(premise, hypothesis) for premise, hypothesis in pairs
        ]

    def labels(self, outputs: torch.Tensor) -> Labels:
        names = self._names
        logits = outputs[:, self._entailment]
        best = logits.view(-1, len(names)).argmax(-1)
        return [names[index] for index in best.tolist()]


class PlainSimilarity(PlainModel):
    """Zero-shot classification by embedding, with pooling by hand. transformers has no pipeline
    for it.
    """

    has_pipeline = False
    model_class = "AutoModel"

    def __init__(self, classifier: Classifier, settings: Settings) -> None:
        layout = read_layout(classifier.weights, settings)
        if layout.static or layout.steps or layout.pooling not in (("mean",), ("cls",)):
            raise UnsupportedKindError(
                "the model's folder has other parts than a transformer with mean or cls pooling; "
                "run by hand, it would take the code of sentence-transformers"
            )
        self._pools_mean = layout.pooling == ("mean",)
        self._prompt = layout.texts.post_prompt
        self._label_prompt = layout.texts.label_prompt
        self._is_lower_case = layout.texts.lower_case
        limit = settings.max_tokens
        if layout.texts.max_tokens:
            limit = min(limit, layout.texts.max_tokens)
        limited = settings.model_copy(update={"max_tokens": limit})
        super().__init__(classifier, limited)
        descriptions = settings.labels or DESCRIBED_TOPICS
        template = settings.template or DEFAULT_TEMPLATE
        self._names = list(descriptions)
        vectors = [
            self._label_vector(template, texts) for texts in descriptions.values()
        ]
        self._vectors = torch.stack(vectors)

    def _label_vector(self, template: str, descriptions: Sequence[str]) -> torch.Tensor:
        sentences = [template.replace("{}", text) for text in descriptions]
        rows = self._encode(sentences, self._label_prompt)
        vectors = self.outputs(rows)
        return normalize(vectors.mean(0), dim=-1)

    def rows(self, texts: Sequence[str]) -> list[Tokens]:
        return self._encode(texts, self._prompt)

    def _encode(self, texts: Sequence[str], prompt: str) -> list[Tokens]:
        inputs = [prompt + text for text in texts]
        if self._is_lower_case:
            inputs = [text.lower() for text in inputs]
        return self._tokenizer.encode(inputs)

    def _read(self, output: Any, mask: torch.Tensor) -> torch.Tensor:
        states = output.last_hidden_state.float()
        if not self._pools_mean:
            return normalize(states[:, 0], dim=-1)
        weights = mask.float()[..., None]
        weighted_states = states * weights
        sums = weighted_states.sum(1)
        means = sums / weights.sum(1)
        return normalize(means, dim=-1)

    def labels(self, outputs: torch.Tensor) -> Labels:
        cosines = outputs @ self._vectors.T
        best = cosines.argmax(-1)
        return [self._names[index] for index in best.tolist()]


KINDS: dict[str, type[PlainModel]] = {
    "nli": PlainEntailment,
    "sequence": PlainSequence,
    "similarity": PlainSimilarity,
}


def plain_model(classifier: Classifier, settings: Settings) -> PlainModel:
    """Load the classifier's model with transformers. Raises UnsupportedKindError."""
    if classifier.kind not in KINDS:
        raise UnsupportedKindError(
            f"transformers has no pipeline for the classifier {classifier.kind}"
        )
    if settings.engine != "torch":
        raise UnsupportedKindError(
            f"the engine is {settings.engine}: compare with FEEDMILL_ENGINE=torch"
        )
    return KINDS[classifier.kind](classifier, settings)
