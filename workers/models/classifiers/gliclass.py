"""Zero-shot classification with GLiClass: one row holds all labels and the post, and gives the scores of all labels.

The row is "<<LABEL>>food<<LABEL>>sports<<SEP>>post", or the post first if the checkpoint was trained so. The encoder
reads labels and post together; `gliclass_head.py` turns its hidden states into a logit per label. Scores equal those of
the package gliclass:

- single-label, several labels: softmax of the logits over the labels;
- `multi_label`, or only one label: the sigmoid, separately for each label.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from feedmill.shared.errors import ModelError, RequestRefused, SettingsError
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import PREFIX, Settings
from feedmill.shared.topics import TOPICS
from feedmill.workers.models.classifiers import Classifier, LabelSet, LabelSets, Row, Scores
from feedmill.workers.models.classifiers.gliclass_head import Head, Spans
from feedmill.workers.models.device import Device
from feedmill.workers.models.engines import TensorOutputs, device_errors, rounded
from feedmill.workers.models.engines.factory import create_engine
from feedmill.workers.models.engines.network import GLICLASS_ENCODERS, STATES, read_config
from feedmill.workers.models.tokenizer import PROBE_TEXTS, Tokens
from feedmill.workers.models.weights import Weights, read_config_file

#: Markers before each label, and after the last one.
LABEL, SEPARATOR = "<<LABEL>>", "<<SEP>>"
#: Maximum tokens of a row: labels, post and special tokens. The default of the package's pipeline.
MAX_ROW_TOKENS = 1024
#: Labels must leave room for at least this many tokens of a post.
MIN_POST_TOKENS = 16
#: Options in config.json that change scores, and that the shapes of the weights do not show.
IDENTITY = (
    "prompt_first", "use_segment_embeddings", "embed_class_token", "class_token_pooling", "extract_text_features",
    "pooling_strategy", "normalize_features", "projector_hidden_act", "scorer_type", "scorer_num_heads",
)  # fmt: skip


class Prompt(NamedTuple):
    """The tokens of a label set: labels with their markers, and the separator, which is the last token."""

    ids: list[int]
    #: Place of each label's marker, and of the separator.
    places: list[int]


@dataclass(eq=False, slots=True, kw_only=True)
class PromptRow(Row):
    """A row with the place of its prompt's first token."""

    start: int


class Gliclass(Classifier):
    """Classify with a GLiClass uni-encoder. Raises ModelError if the folder does not hold one.

    Raises SettingsError for an engine that does not return hidden states.
    """

    kind = "gliclass"

    def __init__(self, weights: Weights, device: Device, settings: Settings) -> None:
        self.weights = weights
        self.device = device
        if settings.engine == "onnx":
            raise SettingsError(f"{PREFIX}ENGINE=onnx does not run GLiClass models: set {PREFIX}ENGINE=torch.")
        config = read_config_file(weights)
        encoder = read_config(weights)
        if encoder.model_type not in GLICLASS_ENCODERS:
            raise ModelError(
                f"{weights.name} has an encoder of type {encoder.model_type}. Use a GLiClass model with one of: "
                f"{', '.join(GLICLASS_ENCODERS)}."
            )
        head = Head(weights, config, encoder.hidden_size)
        self._engine, self._tokenizer = create_engine(weights, device, settings, STATES, MAX_ROW_TOKENS)
        self.packed = self._engine.packed
        with device_errors():
            self._head = head.to(self._engine.home)
        self._prompt_first = bool(config.get("prompt_first"))
        self._has_segments = bool(config.get("use_segment_embeddings"))
        self._markers = (config.get("class_token_index"), config.get("text_token_index"))
        if (found := self._tokenizer.parts([LABEL, SEPARATOR])) != [[marker] for marker in self._markers]:
            raise ModelError(
                f"The tokenizer of {weights.name} reads {LABEL} and {SEPARATOR} as {found}, but config.json names the "
                f"tokens {self._markers}. Use the tokenizer that belongs to the model."
            )
        self._before, self._after = self._special_tokens()
        self._post_tokens = settings.max_tokens - len(self._before) - len(self._after)
        self._label_sets = LabelSets(
            self.kind,
            json.dumps([weights.sha256, self._tokenizer.max_tokens, settings.max_tokens, *map(config.get, IDENTITY)]),
            settings.labels or {topic: (topic,) for topic in TOPICS},
            settings.template or "{}",
            self._prompt,
        )

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """Return the tokens before and after a row. Raises ModelError if rows cannot be assembled from their parts."""
        (part,), whole = self._tokenizer.parts(["a"]), self._tokenizer.encode(["a"])[0].ids
        at = next((at for at in range(len(whole)) if whole[at : at + len(part)] == part), 0)
        prompt = f"{LABEL}a b{LABEL}c{SEPARATOR}"
        (ids,) = self._tokenizer.parts([prompt])
        texts = [prompt + text if self._prompt_first else text + prompt for text in PROBE_TEXTS]
        assembled = [ids + post if self._prompt_first else post + ids for post in self._posts(PROBE_TEXTS)]
        if self._tokenizer.parts(texts) != assembled:
            raise ModelError(
                f"The tokenizer of {self.weights.name} reads a post beside labels differently than alone, which is not "
                "supported. Use another model."
            )
        return whole[:at], whole[at + len(part) :]

    def label_set(self, options: ClassifyOptions) -> LabelSet:
        return self._label_sets.of(options)

    def _prompt(self, described: Sequence[Sequence[str]]) -> Prompt:
        """Tokenize the labels. Raises RequestRefused if they leave no room for a post, or a label has several texts."""
        if several := [texts for texts in described if len(texts) > 1]:
            raise RequestRefused(
                f"labels: a label has {len(several[0])} descriptions, but the worker's {self.kind} model takes one per "
                "label"
            )
        (ids,) = self._tokenizer.parts(["".join(f"{LABEL}{text}" for (text,) in described) + SEPARATOR])
        places = [place for place, token in enumerate(ids) if token in self._markers]
        if len(places) != len(described) + 1:
            raise RequestRefused(f"labels: a label contains {LABEL} or {SEPARATOR}, which separate labels; remove it")
        room = self._tokenizer.max_tokens - len(self._before) - len(self._after) - MIN_POST_TOKENS
        if len(ids) > room:
            fitting = sum(end < room for end in places[1:])
            raise RequestRefused(
                f"labels: {fitting} of the {len(described)} labels fit in the {self._tokenizer.max_tokens:,} tokens "
                "that the worker's model reads beside a post; send fewer or shorter labels"
            )
        return Prompt(ids, places)

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        prompt: Prompt = label_set.prepared
        taken = len(self._before) + len(prompt.ids) + len(self._after)
        room = min(self._post_tokens, self._tokenizer.max_tokens - taken)
        return [[self._row(self._tokenizer.cut(post, room), prompt, label_set)] for post in self._posts(texts)]

    def _posts(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize posts as in a row, where a tokenizer may treat a text beside a marker differently."""
        if self._prompt_first:
            return [part[1:] for part in self._tokenizer.parts([SEPARATOR + text for text in texts])]
        return [part[:-1] for part in self._tokenizer.parts([text + LABEL for text in texts])]

    def _row(self, post: list[int], prompt: Prompt, label_set: LabelSet) -> PromptRow:
        start = len(self._before) + (0 if self._prompt_first else len(post))
        ids = [*self._before, *(prompt.ids + post if self._prompt_first else post + prompt.ids), *self._after]
        types = None
        if self._has_segments:  # 0 up to the separator, 1 from there on
            text = start + prompt.places[-1]
            types = [0] * text + [1] * (len(ids) - text)
        return PromptRow(Tokens(ids, types), label_set, start=start)

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> TensorOutputs:
        """Return logits in float32: [rows, labels of the largest label set]."""
        with device_errors():
            began = self._engine.begin()
            states = self._engine.forward([row.tokens for row in rows])
            return TensorOutputs(self._head(states, self._spans(rows)), began)

    def _spans(self, rows: Sequence[Row]) -> Spans:
        """Return where labels and posts are, on the engine's device, copied there at once."""
        most = max(len(row.label_set.labels) for row in rows)
        table = []
        for row in rows:
            if not isinstance(row, PromptRow):
                raise TypeError("not a row from prepare()")
            places = [row.start + place for place in row.label_set.prepared.places]
            padding = [places[-1]] * (most + 1 - len(places))
            table.append([*places, *padding, len(places) - 1, places[-1], row.length])
        on_device = self._engine.to_device(torch.tensor(table))
        return Spans(on_device[:, :-3], on_device[:, -3], on_device[:, -2], on_device[:, -1])

    def finish(self, rows: Sequence[Row], outputs: TensorOutputs) -> list[tuple[Row, Scores]]:
        finished: list[tuple[Row, Scores]] = []
        for row, of_row in zip(rows, outputs.wait(), strict=True):
            labels = row.label_set.labels
            logits = of_row[: len(labels)]
            independent = row.label_set.multi_label or len(labels) == 1
            scores = logits.sigmoid() if independent else logits.softmax(0)
            finished.append((row, dict(zip(labels, rounded(scores), strict=True))))
        return finished
