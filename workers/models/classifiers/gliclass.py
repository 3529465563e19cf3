"""Zero-shot classification with GLiClass: one row holds all labels and the post, and gives the scores of all labels.

The row is "<<LABEL>>food<<LABEL>>sports<<SEP>>post", or the post first if the checkpoint was trained so. The package
gliclass loads and runs the model. Rows are assembled here: labels are tokenized once, a long post never displaces a
label, and markers in a post are left out. Scores equal those of the package's pipeline for a row by itself:

- single-label, several labels: softmax of the logits over the labels;
- `multi_label`, or only one label: the sigmoid, separately for each label.

The package pools padding with most poolings, so that rows of different lengths would change each other's scores: such
checkpoints run rows of equal length together.
"""

import json
from collections.abc import Sequence
from itertools import accumulate, chain, groupby
from typing import Any

import torch

from feedmill.shared.errors import ModelError, RequestRefused, SettingsError, explain_missing
from feedmill.shared.settings import PREFIX, TOPICS, Settings
from feedmill.workers.models.classifiers import LabelSet, LabelSets, ModelClassifier, Row, single_texts
from feedmill.workers.models.device import Device
from feedmill.workers.models.engines import to_device
from feedmill.workers.models.engines.torch_engine import (
    REORDERED_TYPES,
    can_reorder,
    reorder_linear_layers,
    use_attention_without_plans,
)
from feedmill.workers.models.tokenizer import Tokenizer, Tokens, padded
from feedmill.workers.models.weights import Weights, loading, max_row_tokens, read_config_file

#: Markers before each label, and after the last one.
LABEL, SEPARATOR = "<<LABEL>>", "<<SEP>>"
#: Maximum tokens of a row: labels, post and special tokens. The default of the package's pipeline.
MAX_ROW_TOKENS = 1024
#: Labels must leave room for at least this many tokens of a post.
MIN_POST_TOKENS = 16
#: Poolings that leave padding out, and scorers whose scores depend on the number of labels in the batch.
MASKED_POOLINGS, SCORERS_BY_COUNT = ("first", "pass"), ("hopfield",)


class Gliclass(ModelClassifier):
    """Classify with a GLiClass uni-encoder. Raises ModelError if the folder does not hold one.

    Raises SettingsError for another engine than torch, UserError without the package.
    """

    kind = "gliclass"
    packed = False

    def __init__(self, weights: Weights, device: Device, settings: Settings) -> None:
        self.weights, self.device, self._home = weights, device, device.torch
        if settings.engine != "torch":
            raise SettingsError(
                f"{PREFIX}ENGINE={settings.engine} does not run GLiClass models: set {PREFIX}ENGINE=torch."
            )
        self._model = _load(weights, device)
        config = self._model.config
        self._by_length = config.pooling_strategy not in MASKED_POOLINGS or config.use_lstm
        self._by_count = config.scorer_type in SCORERS_BY_COUNT
        self._prompt_first = bool(config.prompt_first)
        positions = max_row_tokens(config.encoder_config) or MAX_ROW_TOKENS
        self._tokenizer = Tokenizer(weights, min(positions, MAX_ROW_TOKENS))
        self._markers = [config.class_token_index, config.text_token_index]
        self._before, self._after = self._special_tokens()
        self._post_tokens = settings.max_tokens - len(self._before) - len(self._after)
        written = json.dumps(read_config_file(weights), sort_keys=True)
        self._label_sets = LabelSets(
            self.kind,
            json.dumps([weights.sha256, self._tokenizer.max_tokens, settings.max_tokens, written]),
            settings.labels or {topic: (topic,) for topic in TOPICS},
            settings.template or "{}",
            self._prompt,
        )

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """Return the tokens before and after a row. Raises ModelError if the tokenizer has other markers."""
        (row,) = self._tokenizer.encode([LABEL + SEPARATOR])
        at = next((at for at in range(len(row.ids)) if row.ids[at : at + 2] == self._markers), None)
        if at is None:
            raise ModelError(
                f"The tokenizer of {self.weights.name} reads {LABEL}{SEPARATOR} as {row.ids}, but config.json names "
                f"the tokens {self._markers}. Use the tokenizer that belongs to the model."
            )
        return row.ids[:at], row.ids[at + 2 :]

    def _prompt(self, described: Sequence[Sequence[str]]) -> list[int]:
        """Return the labels' tokens with their markers, the separator last.

        Raises RequestRefused if they leave no room for a post, or a label has several texts.
        """
        texts = single_texts(described, self.kind)
        labels = [part.ids[:-1] for part in self._tokenizer.parts([f"{LABEL}{text}{SEPARATOR}" for text in texts])]
        if any(token in self._markers for ids in labels for token in ids[1:]):
            raise RequestRefused(f"labels: a label contains {LABEL} or {SEPARATOR}, which separate labels; remove it")
        ends = list(accumulate(map(len, labels)))
        room = self._room(1) - MIN_POST_TOKENS
        if ends[-1] > room:
            raise RequestRefused(
                f"labels: {sum(end <= room for end in ends)} of the {len(texts)} labels fit in the "
                f"{self._tokenizer.max_tokens:,} tokens that the worker's model reads beside a post; send fewer or "
                "shorter labels"
            )
        return [*chain.from_iterable(labels), self._markers[1]]

    def _room(self, prompt_tokens: int) -> int:
        """Return how many tokens of a row are left beside the prompt."""
        row_tokens: int = self._tokenizer.max_tokens
        return row_tokens - len(self._before) - len(self._after) - prompt_tokens

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        prompt: list[int] = label_set.prepared
        room = min(self._post_tokens, self._room(len(prompt)))
        rows = []
        for tokens in self._posts(texts):
            post = [token for token in tokens if token not in self._markers]
            post = post[-room:] if self._tokenizer.cuts_left else post[:room]
            ids = [*self._before, *(prompt + post if self._prompt_first else post + prompt), *self._after]
            rows.append([Row(Tokens(ids), label_set)])
        return rows

    def _posts(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize posts as in a row, where a tokenizer may treat a text beside a marker differently."""
        if self._prompt_first:
            return [part.ids[1:] for part in self._tokenizer.parts([SEPARATOR + text for text in texts])]
        return [part.ids[:-1] for part in self._tokenizer.parts([text + LABEL for text in texts])]

    def _outputs(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return scores in float32: [rows, labels of the largest label set]."""
        counts = torch.tensor([[_count(row)] for row in rows])
        most = int(counts.max())
        groups = groupby(rows, lambda row: (self._by_length and row.length, self._by_count and _count(row)))
        logits = torch.cat([self._logits(list(members), most) for _, members in groups])
        independent = to_device(torch.tensor([[row.label_set.independent] for row in rows]), self._home)
        logits = logits.masked_fill(to_device(torch.arange(most) >= counts, self._home), float("-inf"))
        return torch.where(independent, logits.sigmoid(), logits.softmax(-1))

    def _logits(self, rows: Sequence[Row], most: int) -> torch.Tensor:
        """Run rows that do not change each other's logits: [rows, most]."""
        labels = max(map(_count, rows))
        ids, mask, _ = padded([row.tokens for row in rows], self._tokenizer.pad_id, self._tokenizer.max_tokens)
        ids, mask = (to_device(tensor, self._home) for tensor in (ids, mask.long()))
        logits: torch.Tensor = self._model(input_ids=ids, attention_mask=mask, max_num_classes=labels).logits
        return torch.nn.functional.pad(logits, (0, most - labels))


def _count(row: Row) -> int:
    return len(row.label_set.labels)


def _load(weights: Weights, device: Device) -> Any:
    """Load the package's model: its encoder in the device's precision, the rest in float32."""
    if (kind := read_config_file(weights).get("architecture_type") or "uni-encoder") != "uni-encoder":
        raise ModelError(
            f"{weights.name} is a GLiClass {kind}, but only a uni-encoder is supported. Use another model."
        )
    with explain_missing(f"{weights.name}, a GLiClass model,", "gliclass"):
        from gliclass import GLiClassModel  # noqa: PLC0415 - optional, and its imports take seconds
    with loading(f"the GLiClass model {weights.name}"):
        model, report = GLiClassModel.from_pretrained(
            weights.folder, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
        if absent := report["missing_keys"]:  # transformers leaves them at random
            raise ValueError(f"no weights for {', '.join(sorted(absent)[:3])}")
    use_attention_without_plans(device)
    encoder = model.model.encoder_model
    segments = getattr(model.model, "segment_embeddings", None)  # added to the encoder's inputs
    model.float().to(device.torch).eval().requires_grad_(False)
    for part in filter(None, (encoder, segments)):
        part.to(device.dtype)
    if can_reorder(device) and encoder.config.model_type in REORDERED_TYPES:
        reorder_linear_layers(encoder)
    encoder.register_forward_hook(_in_float32)
    return model


def _in_float32(_module: Any, _inputs: Any, outputs: Any) -> Any:
    outputs.last_hidden_state = outputs.last_hidden_state.float()
    return outputs
