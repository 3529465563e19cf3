"""Zero-shot classification with GLiClass: one row holds all labels and the post, and gives the
scores of all labels.

The row is "<<LABEL>>food<<LABEL>>sports<<SEP>>post", or the post first if the checkpoint was
trained so. The package gliclass loads and runs the model. Rows are assembled here: labels are
tokenized once, a long post never displaces a label, and markers in a post are left out. Scores
equal those of the package's pipeline for a row by itself:

- single-label, several labels: softmax of the logits over the labels;
- `multi_label`, `none`, or only one label: the sigmoid, separately for each label.

The package pools padding with most poolings, and some encoders let padding change the states of
real tokens, so that rows of different lengths would change each other's scores: such checkpoints
run rows of equal length together.
"""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch

from feedmill.shared.errors import (
    ModelError,
    RequestRefused,
    SettingsError,
    explain_missing,
)
from feedmill.shared.settings import PREFIX, TOPICS, Settings
from feedmill.workers.models.bounds import blank_model, check_shapes
from feedmill.workers.models.classifiers import (
    LabelSet,
    LabelSets,
    ModelClassifier,
    Row,
    single_texts,
)
from feedmill.workers.models.device import Device
from feedmill.workers.models.engines import to_device
from feedmill.workers.models.engines.network import max_row_tokens, separates_rows
from feedmill.workers.models.engines.torch_engine import (
    REORDERED_TYPES,
    can_reorder,
    reorder_linear_layers,
    use_attention_without_plans,
)
from feedmill.workers.models.files import CONFIG_FILE, loading
from feedmill.workers.models.tensors import lazy_tensors
from feedmill.workers.models.tokenizer import Tokenizer, Tokens, padded
from feedmill.workers.models.weights import Weights, read_config_file, transformer_files

#: Markers before each label, and after the last one.
LABEL = "<<LABEL>>"
SEPARATOR = "<<SEP>>"
#: Maximum tokens of a row: labels, post and special tokens. The default of the package's pipeline.
MAX_ROW_TOKENS = 1024
#: Labels must leave room for at least this many tokens of a post.
MIN_POST_TOKENS = 16
#: The package's default type of an encoder.
DEFAULT_ENCODER = "deberta-v2"
#: Options of the scorer that repeat it, and how often they may.
STEP_OPTIONS = (
    "recurrent_steps",
    "recurrent_min_steps",
    "recurrent_inference_max_steps",
)
MAX_RECURRENT_STEPS = 100
#: Poolings that leave padding out, and scorers whose scores depend on the number of labels in the
#: batch.
MASKED_POOLINGS = ("first", "pass")
SCORERS_BY_COUNT = ("hopfield",)


class Gliclass(ModelClassifier):
    """Classify with a GLiClass uni-encoder. Raises ModelError if the folder does not hold one.

    Raises SettingsError for another engine than torch, UserError without the package.
    """

    kind = "gliclass"
    packed = False

    def __init__(self, weights: Weights, device: Device, settings: Settings) -> None:
        self.weights = weights
        self.device = device
        self._home = device.torch
        if settings.engine != "torch":
            raise SettingsError(
                f"{PREFIX}ENGINE={settings.engine} does not run GLiClass models: set "
                f"{PREFIX}ENGINE=torch."
            )
        if device.others:
            raise SettingsError(
                f"{PREFIX}DEVICE: a GLiClass model runs on one GPU, not on "
                f"{device.name}. Name one."
            )
        self._model = _load(weights, device)
        config = self._model.config
        leaves_padding_out = (
            config.pooling_strategy in MASKED_POOLINGS and not config.use_lstm
        )
        # In encoders that tests have not compared row by row, padding may change the states of
        # real tokens.
        is_separate = leaves_padding_out and separates_rows(
            weights, config.encoder_config
        )
        self._by_length = not is_separate
        self._by_count = config.scorer_type in SCORERS_BY_COUNT
        self._prompt_first = bool(config.prompt_first)
        encoder = self._model.model.encoder_model
        embeddings = encoder.get_input_embeddings()
        self._tokenizer = Tokenizer(
            weights,
            max_tokens=max_row_tokens(weights, MAX_ROW_TOKENS, config.encoder_config),
            vocabulary=embeddings.num_embeddings,
        )
        self._markers = [
            config.class_token_index,
            config.text_token_index,
        ]
        before, after = self._special_tokens()
        self._before = before
        self._after = after
        self._special_count = len(before) + len(after)
        self._post_tokens = settings.max_tokens - self._special_count
        model_config = read_config_file(weights)
        identity = [
            weights.sha256,
            self._tokenizer.max_tokens,
            settings.max_tokens,
            json.dumps(model_config, sort_keys=True),
        ]
        self._label_sets = LabelSets(
            self.kind,
            json.dumps(identity),
            settings.labels or {topic: (topic,) for topic in TOPICS},
            settings.template or "{}",
            self._prompt,
        )

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """Return the tokens before and after a row.

        Raises ModelError if the tokenizer has other markers.
        """
        text = LABEL + SEPARATOR
        markers = self._markers
        (row,) = self._tokenizer.encode([text])
        ids = row.ids
        for start in range(len(ids)):
            end = start + len(markers)
            if ids[start:end] == markers:
                before = ids[:start]
                after = ids[end:]
                return before, after
        raise ModelError(
            f"The tokenizer of {self.weights.name} reads {text} as {ids}, but "
            f"config.json names the tokens {markers}. Use the tokenizer that belongs to the "
            "model."
        )

    def _prompt(self, described: Sequence[Sequence[str]]) -> list[int]:
        """Return the labels' tokens with their markers, the separator last.

        Raises RequestRefused if they leave no room for a post, or a label has several texts.
        """
        prompt: list[int] = []
        ends = []
        texts = single_texts(described, self.kind)
        marked = [f"{LABEL}{text}{SEPARATOR}" for text in texts]
        for part in self._tokenizer.parts(marked):
            label = part.ids[:-1]
            own_tokens = label[1:]
            if any(token in self._markers for token in own_tokens):
                raise RequestRefused(
                    f"labels: a label contains {LABEL} or {SEPARATOR}, which "
                    "separate labels; remove it"
                )
            prompt += label
            ends.append(len(prompt))
        room = self._room(1) - MIN_POST_TOKENS
        if len(prompt) > room:
            fitting = [end for end in ends if end <= room]
            max_tokens = self._tokenizer.max_tokens
            raise RequestRefused(
                f"labels: {len(fitting)} of the {len(texts)} labels fit in the "
                f"{max_tokens:,} tokens that the worker's model reads beside a "
                "post; send fewer or shorter labels"
            )
        _, separator = self._markers
        return [*prompt, separator]

    def _room(self, prompt_tokens: int) -> int:
        """Return how many tokens of a row are left beside the prompt."""
        row_tokens: int = self._tokenizer.max_tokens
        return row_tokens - self._special_count - prompt_tokens

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        prompt: list[int] = label_set.prepared
        room_beside_prompt = self._room(len(prompt))
        room = min(self._post_tokens, room_beside_prompt)
        markers = self._markers
        rows = []
        for tokens in self._posts(texts):
            post = [token for token in tokens if token not in markers]
            if self._tokenizer.cuts_left:
                post = post[-room:]
            else:
                post = post[:room]
            first = post
            second = prompt
            if self._prompt_first:
                first = prompt
                second = post
            ids = [
                *self._before,
                *first,
                *second,
                *self._after,
            ]
            row = Row(Tokens(ids), label_set)
            rows.append([row])
        return rows

    def _posts(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize posts as in a row, where a tokenizer may treat a text beside a marker
        differently.
        """
        if self._prompt_first:
            marked = [SEPARATOR + text for text in texts]
            own_tokens = slice(1, None)
        else:
            marked = [text + LABEL for text in texts]
            own_tokens = slice(None, -1)
        parts = self._tokenizer.parts(marked)
        return [part.ids[own_tokens] for part in parts]

    def _outputs(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return scores in float32: [rows, labels of the largest label set]."""
        counts = [_count(row) for row in rows]
        most = max(counts)
        parts = []
        for _, members in groupby(rows, self._group_key):
            group = list(members)
            part = self._logits(group, most)
            parts.append(part)
        logits = torch.cat(parts)  # [rows, most]

        label_counts = torch.tensor(counts)
        has_no_label = torch.arange(most) >= label_counts[:, None]  # [rows, most]
        has_no_label = to_device(has_no_label, self._home)
        logits = logits.masked_fill(has_no_label, float("-inf"))
        choices = [row.label_set.independent for row in rows]
        independent = torch.tensor(choices)[:, None]  # [rows, 1]
        independent = to_device(independent, self._home)
        return torch.where(
            independent,
            logits.sigmoid(),
            logits.softmax(-1),
        )

    def _group_key(self, row: Row) -> tuple[int, int]:
        """Return what rows of one forward pass must have in common; 0 for what may differ."""
        length = 0
        count = 0
        if self._by_length:
            length = row.length
        if self._by_count:
            count = _count(row)
        return length, count

    def _logits(self, rows: Sequence[Row], most: int) -> torch.Tensor:
        """Run rows that do not change each other's logits: [rows, most]."""
        labels = max(map(_count, rows))
        ids, mask, _ = padded(
            [row.tokens for row in rows],
            pad_id=self._tokenizer.pad_id,
            max_tokens=self._tokenizer.max_tokens,
        )
        outputs = self._model(
            input_ids=to_device(ids, self._home),
            attention_mask=to_device(mask.long(), self._home),
            max_num_classes=labels,
        )
        logits: torch.Tensor = outputs.logits  # [rows, labels]
        missing = most - labels
        return torch.nn.functional.pad(logits, (0, missing))


def _count(row: Row) -> int:
    return len(row.label_set.labels)


def _load(weights: Weights, device: Device) -> Any:
    """Load the package's model: its encoder in the device's precision, the rest in float32."""
    with explain_missing(f"{weights.name}, a GLiClass model,", "gliclass"):
        # Optional; its imports take seconds.
        from gliclass import GLiClassModel, GLiClassModelConfig  # noqa: PLC0415
    _check_config(weights)
    files = transformer_files(weights)
    with loading(f"the GLiClass model {weights.name}"):
        config = GLiClassModelConfig.from_pretrained(
            weights.folder, local_files_only=True
        )
        # The package looks for an adapter in the folder of this name, which may be anywhere.
        config.encoder_model_name = str(weights.folder)
    blank = blank_model(
        GLiClassModel,
        config=config,
        file=weights.folder / CONFIG_FILE,
    )
    check_shapes(blank, files, exact=True)
    with loading(f"the GLiClass model {weights.name}"):
        model, report = GLiClassModel.from_pretrained(
            None,
            config=config,
            state_dict=lazy_tensors(files),
            output_loading_info=True,
        )
        missing = sorted(report["missing_keys"])
        if missing:  # transformers leaves them at random
            names = ", ".join(missing[:3])
            raise ValueError(f"no weights for {names}")
    use_attention_without_plans(device)
    encoder = model.model.encoder_model
    model.float()
    model.to(device.torch)
    model.eval()
    model.requires_grad_(False)
    encoder.to(device.dtype)
    # Added to the encoder's inputs.
    segments = getattr(model.model, "segment_embeddings", None)
    if segments is not None:
        segments.to(device.dtype)
    if can_reorder(device) and encoder.config.model_type in REORDERED_TYPES:
        reorder_linear_layers(encoder)
    encoder.register_forward_hook(_in_float32)
    return model


def _check_config(weights: Weights) -> None:
    """Raise ModelError if the package would load another model than the one in the folder, or loop
    for long.

    For an encoder whose type transformers does not know, the package loads the configuration that
    `encoder_model` names, from the hub or any folder, and runs the code that comes with it.
    """
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 - takes a second

    config = read_config_file(weights)
    kind = config.get("architecture_type") or "uni-encoder"
    if kind != "uni-encoder":
        raise ModelError(
            f"{weights.name} is a GLiClass {kind}, but only a uni-encoder is supported. Use "
            "another model."
        )
    encoder_type = DEFAULT_ENCODER
    encoder = config.get("encoder_config")
    if isinstance(encoder, dict):
        encoder_type = encoder.get("model_type", DEFAULT_ENCODER)
    if encoder_type not in CONFIG_MAPPING or config.get("label_model_name") is not None:
        raise ModelError(
            f"{weights.folder / CONFIG_FILE} describes a second model, or an encoder of the type "
            f"{encoder_type!r:.100}, which transformers does not know. Use another model."
        )
    for name in STEP_OPTIONS:
        steps = config.get(name) or 0
        if not isinstance(steps, int) or steps > MAX_RECURRENT_STEPS:
            raise ModelError(
                f"{weights.folder / CONFIG_FILE} asks for more than {MAX_RECURRENT_STEPS:,} "
                "recurrent steps. Use another model."
            )


def _in_float32(_module: Any, _inputs: Any, outputs: Any) -> Any:
    states = outputs.last_hidden_state
    outputs.last_hidden_state = states.float()
    return outputs
