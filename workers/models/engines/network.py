"""A transformers model together with the outputs that Feedmill needs from it.

Classifiers return logits; sentence encoders return a vector pooled from the last hidden states.
Differences between architectures belong here (attention masks and workarounds) and in packing.py.

Relies on `_shift_right` of transformers' T5.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
import transformers
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoModelForSequenceClassification,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)

from feedmill.shared.errors import ModelError
from feedmill.workers.models.bounds import blank_model, check_shapes
from feedmill.workers.models.engines.packing import (
    LOGITS,
    PACKABLE_TYPES,
    Group,
    last_marked_tokens,
    packed_attention,
    packed_head,
    pool,
)
from feedmill.workers.models.engines.spreading import DeviceMapper
from feedmill.workers.models.files import CONFIG_FILE, loading
from feedmill.workers.models.tensors import lazy_tensors
from feedmill.workers.models.weights import (
    Weights,
    max_positions,
    read_config,
    transformer_files,
)

#: Names under which attention is registered with transformers: within packed rows; and torch's
#: with `padding_mask`.
PACKED = "feedmill_packed"
PADDED = "feedmill_padded"
#: Architectures that use PADDED. Tests check that their padded forward passes read nothing on the
#: host.
PADDED_TYPES = frozenset(
    {
        "bart", "bert", "camembert", "distilbert", "electra", "gpt2", "gte", "modernbert",
        "nomic_bert", "qwen3",
        "roberta", "xlm-roberta",
    }
)  # fmt: skip
#: Sequence-to-sequence models, and the class that loads only the encoder: embeddings do not need
#: the decoder.
ENCODER_CLASSES = {
    "t5": "T5EncoderModel",
    "mt5": "MT5EncoderModel",
    "umt5": "UMT5EncoderModel",
    "longt5": "LongT5EncoderModel",
}
#: Causal decoders, in which padding follows all tokens that attend to others.
DECODER_TYPES = frozenset(
    {
        "bloom", "falcon", "gemma", "gemma2", "gemma3_text", "gpt_neo", "gpt_neox", "gptj",
        "llama", "mistral", "olmo",
        "olmo2", "opt", "phi", "phi3", "qwen2", "starcoder2",
    }
)  # fmt: skip
#: End of the names of tables of positions.
POSITION_TABLE = "position_embeddings"
#: Architectures whose rows do not change each other's outputs. Tests compare each with
#: transformers, row by row. They are not measured when they are loaded (separation.py); all others
#: are.
SEPARATE_TYPES = PADDED_TYPES | PACKABLE_TYPES | DECODER_TYPES | {"deberta-v2", "mpnet"}
#: Rotary positions that do not depend on the length of the longest row.
STATIC_ROTARY_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
#: Stands for padding in the ids of a model whose configuration names no padding token. No token
#: has this id.
PADDING = -1


def separates_rows(weights: Weights, config: Any) -> bool:
    """Return whether tests have shown that rows of models of this architecture do not change each
    other's outputs.
    """
    # may claim a known type and behave differently
    if weights.remote_code and getattr(config, "auto_map", None):
        return False
    if config.model_type not in SEPARATE_TYPES:
        return False
    parameters = getattr(config, "rope_parameters", None)
    rotary_types = _rotary_types(parameters)
    return rotary_types <= STATIC_ROTARY_TYPES


def _rotary_types(parameters: Any) -> set[str]:
    """Return the types of rotary positions in a configuration, which may have parameters for each
    type of layer.
    """
    if not isinstance(parameters, dict):
        return set()
    types = set()
    if "rope_type" in parameters:
        rotary_type = parameters["rope_type"]
        types.add(str(rotary_type))
    for part in parameters.values():
        types |= _rotary_types(part)
    return types


class Network(torch.nn.Module):
    """A model that returns logits or pooled embeddings. Stays on the CPU until it is moved.

    reads: LOGITS, or pooling modes. pad_id: padding token if the model's configuration names none.
    attention: name of the attention implementation; None selects the library's default.
    map_devices: see `load_pretrained`. Raises ModelError if the folder does not hold such a model.
    """

    def __init__(
        self,
        weights: Weights,
        dtype: torch.dtype,
        reads: Sequence[str],
        pad_id: int,
        attention: str | None = None,
        map_devices: DeviceMapper | None = None,
    ) -> None:
        super().__init__()
        self.reads = tuple(reads)
        self.classifies = self.reads == LOGITS
        self.kind: str = read_config(weights).model_type
        model, missing_keys = load_pretrained(
            self._architecture(),
            weights,
            map_devices=map_devices,
            dtype=dtype,
            attn_implementation=attention,
        )
        self._refuse_missing_weights(missing_keys, weights)
        self.model: Any = model
        self.config: Any = model.config
        self.pad_id = padding_token(self.config, pad_id)
        #: Position of a row's first token.
        self.first_position = first_position(self.model)
        self._marks_padding = self.classifies and own_padding_token(self.config) is None
        #: True for heads that read the last end-of-sequence token.
        self._reads_end = (
            self.classifies
            and self.config.is_encoder_decoder
            and hasattr(model, "classification_head")
        )
        self._name_padding()
        # Layers on several devices have a forward function of their own.
        if self.kind == "bart" and map_devices is None:
            self._patch_bart()
        self._disable_cache()
        self.eval()

    def _architecture(self) -> Any:
        """Return the class of transformers that loads the model."""
        if self.classifies:
            return AutoModelForSequenceClassification
        if self.kind in ENCODER_CLASSES:
            return getattr(transformers, ENCODER_CLASSES[self.kind])
        return AutoModel

    def _refuse_missing_weights(self, missing: Iterable[str], weights: Weights) -> None:
        """Raise ModelError if the files lack weights that the outputs depend on.

        transformers initializes missing weights at random, so the model would run but return
        noise.
        """
        task = "classification"
        keys = sorted(missing)
        if not self.classifies:
            task = "embedding"
            keys = [key for key in keys if "pooler" not in key]
        if keys:
            names = ", ".join(keys[:3])
            raise ModelError(
                f"The model in {weights.folder} has no weights for {names}: it "
                f"was not trained for {task}. Use a model that was."
            )

    def _patch_bart(self) -> None:
        for layer in self.model.base_model.encoder.layers:
            layer.forward = MethodType(_bart_layer, layer)

    def _disable_cache(self) -> None:
        self.config.use_cache = False
        self.config.get_text_config().use_cache = False

    def _name_padding(self) -> None:
        """Let the head of a decoder find the last token of each row, as it does for a row without
        padding.

        It reads the last token that is not the padding token of the configuration. Without one, it
        reads the last token of all, whatever it is: a tokenizer may end texts with the token that
        it pads with, and so may an author. Therefore the head gets ids in which no token, but all
        padding, has the id PADDING.
        """
        named = self.pad_id
        if self._marks_padding:
            named = PADDING
        self.config.pad_token_id = named
        self.config.get_text_config().pad_token_id = named
        if self._marks_padding:
            body = self.model.base_model
            body.register_forward_pre_hook(
                self._with_padding_tokens,
                with_kwargs=True,
            )

    def _with_padding_tokens(
        self, _module: Any, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Replace PADDING by the padding token in the arguments of the model's body, which looks
        ids up in a table.
        """
        own_arguments = tuple(map(self._without_marks, arguments))
        own_options = {}
        for name, value in options.items():
            own_options[name] = self._without_marks(value)
        return own_arguments, own_options

    def _without_marks(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.long:
            return value
        is_padding = value == PADDING
        return value.masked_fill(is_padding, self.pad_id)

    def forward(
        self,
        input_ids: torch.Tensor,
        mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return each row's outputs: [rows, …] in float32.

        input_ids, token_type_ids: [rows, tokens]. mask: [rows, tokens], true for real tokens.
        attention_mask: the same as integers; None if no row is padded.
        """
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids
        home = mask.device
        if not self.classifies:
            states = self.model(**inputs).last_hidden_state
            # A model on several devices may leave its output on the last of them.
            return pool(states.to(home), mask, self.reads)
        if self._reads_end:
            end_logits = self._logits_at_end(inputs, mask)
            return end_logits.to(home).float()
        if self._marks_padding:
            inputs["input_ids"] = input_ids.masked_fill(~mask, PADDING)
        logits: torch.Tensor = self.model(**inputs).logits
        return logits.to(home).float()

    def _logits_at_end(
        self, inputs: dict[str, Any], mask: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits of an encoder-decoder, which reads the last end-of-sequence token of
        each row.

        transformers' own head rejects batches whose rows contain different numbers of them, as
        texts may, and counts them on the host.
        """
        ids: torch.Tensor = inputs["input_ids"]
        # the others shift the decoder's tokens in the model's body
        if hasattr(self.model, "_shift_right"):
            decoder_ids = self.model._shift_right(ids)
            inputs = inputs | {"decoder_input_ids": decoder_ids}
        outputs = self.model.base_model(**inputs)
        states = outputs.last_hidden_state.to(mask.device)
        ends = ids == self.config.eos_token_id
        last = last_marked_tokens(states, ends, mask)
        logits: torch.Tensor = self.model.classification_head(last)
        return logits

    def packed(
        self,
        groups: Sequence[Group],
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the outputs of `forward` for packed rows: inputs of shape [1, tokens], divided
        into rows by `groups`.

        Supports only PACKABLE_TYPES.
        """
        inputs: dict[str, Any] = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "groups": groups,
        }
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids
        outputs = self.model.base_model(**inputs)
        states = outputs.last_hidden_state[0]
        ways = self.reads
        if self.classifies:
            ways = (getattr(self.config, "classifier_pooling", "cls"),)
        parts = []
        for group in groups:
            rows = group.batch(states)
            part = pool(rows, group.real, ways)
            parts.append(part)
        pooled = torch.cat(parts)
        if self.classifies:
            first = pooled.to(states.dtype)
            logits = packed_head(self.model, first)
            return logits.float()
        return pooled


def padding_mask(
    mask_function: Any, attention_mask: torch.Tensor | None, **options: Any
) -> torch.Tensor | None:
    """Return a mask of rows that are padded on the right, for transformers'
    AttentionMaskInterface.

    transformers' own function reads on the host whether any token is masked, and so waits for the
    device. In causal attention, real tokens precede the padding and need no mask.
    """
    if mask_function is causal_mask_function and options["allow_is_causal_skip"]:
        return None
    if attention_mask is not None:
        if mask_function is bidirectional_mask_function:
            return attention_mask[:, None, None, :]
        options["allow_is_causal_skip"] = False
        options["allow_is_bidirectional_skip"] = False
    mask: torch.Tensor | None = sdpa_mask(
        mask_function=mask_function,
        attention_mask=attention_mask,
        **options,
    )
    return mask


AttentionInterface.register(PACKED, packed_attention)
AttentionInterface.register(PADDED, sdpa_attention_forward)
AttentionMaskInterface.register(PADDED, padding_mask)


class LoadedModel(NamedTuple):
    """A model of transformers, and the names of the weights that its files lacked."""

    model: Any
    missing_keys: Collection[str]


def load_pretrained(
    architecture: Any,
    weights: Weights,
    *,
    changes: dict[str, Any] | None = None,
    map_devices: DeviceMapper | None = None,
    **options: Any,
) -> LoadedModel:
    """Load a model of transformers, by its own code if it comes with trusted code. Turns off
    transformers' progress bars.

    changes: options to set in the model's configuration. map_devices: returns the device of each
    module, for a model on several devices. options: arguments of `from_pretrained`. Raises
    ModelError.
    """
    # Models that were saved for TorchScript return tuples without names.
    all_changes = {"return_dict": True}
    all_changes.update(changes or {})
    config = read_config(weights, **all_changes)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if not weights.remote_code or not getattr(config, "auto_map", None):
        return _load_verified(
            architecture,
            weights,
            config,
            map_devices,
            options,
        )
    if map_devices is not None:
        raise ModelError(
            f"{weights.name} comes with its own code, which runs on one device "
            "only. Name one GPU."
        )
    return _load_by_own_code(architecture, weights, config, options)


def _load_by_own_code(
    architecture: Any, weights: Weights, config: Any, options: Mapping[str, Any]
) -> LoadedModel:
    """Load a model by the code that comes with it, which the user trusts."""
    with loading(f"the model in {weights.folder}"):
        model, report = architecture.from_pretrained(
            weights.folder,
            config=config,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=True,
            output_loading_info=True,
            **options,
        )
    return LoadedModel(model, report["missing_keys"])


def _load_verified(
    architecture: Any,
    weights: Weights,
    config: Any,
    map_devices: DeviceMapper | None,
    options: Mapping[str, Any],
) -> LoadedModel:
    """Load a model by transformers' code, from tensors whose shapes fit its configuration."""
    # names code that comes with the model; without it, transformers uses its own
    if hasattr(config, "auto_map"):
        del config.auto_map
    files = transformer_files(weights)
    blank = blank_model(
        architecture,
        config=config,
        file=weights.folder / CONFIG_FILE,
    )
    check_shapes(
        blank,
        files=files,
        exact=not options.get("ignore_mismatched_sizes"),
    )
    own_options = dict(options)
    if map_devices is not None:
        own_options["device_map"] = map_devices(blank)
    with loading(f"the model in {weights.folder}"):
        # Without the folder, transformers reads nothing but these tensors.
        model, report = type(blank).from_pretrained(
            None,
            config=blank.config,
            state_dict=lazy_tensors(files),
            output_loading_info=True,
            **own_options,
        )
    return LoadedModel(model, report["missing_keys"])


def padding_token(config: Any, pad_id: int) -> int:
    """Return the padding token: the model's, or else the tokenizer's, or else 0, if the model has
    no vector for it.
    """
    own = own_padding_token(config)
    if own is not None:
        return own
    if _has_vector(config, pad_id):
        return pad_id
    return 0


def own_padding_token(config: Any) -> int | None:
    """Return the padding token that the model's configuration names; None if it names none that is
    a token.

    Early models of the Llama family name -1.
    """
    text_config = config.get_text_config()
    own = getattr(text_config, "pad_token_id", None)
    if own is None or not _has_vector(config, own):
        return None
    return int(own)


def _has_vector(config: Any, token: int) -> bool:
    if token < 0:
        return False
    text_config = config.get_text_config()
    tokens = getattr(text_config, "vocab_size", None)
    if not isinstance(tokens, int):
        return True
    return token < tokens


def first_position(model: Any) -> int:
    """Return the position of a row's first token.

    In models of the RoBERTa family it follows the padding token's id, which is a position of its
    own in their tables.
    """
    reserved = [0]
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if name.endswith(POSITION_TABLE) and padding is not None:
            reserved.append(padding + 1)
    return max(reserved)


def max_row_tokens(weights: Weights, most: int, config: Any = None) -> int:
    """Return how many tokens of a row the model's positions allow, up to `most`.

    config: the configuration of a part of the model; None for the model's own. Raises ModelError.
    """
    if config is None:
        config = read_config(weights)
    positions = max_positions(config)
    if positions is None:
        return most
    # the measurement runs the longest row, too
    if weights.remote_code and getattr(config, "auto_map", None):
        return min(most, positions)
    model = blank_model(
        AutoModel,
        config=config,
        file=weights.folder / CONFIG_FILE,
    )
    row_positions = positions - first_position(model)
    return min(most, row_positions)


def _bart_layer(
    layer: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    """Run BART's encoder layer without waiting for the device.

    In float16, transformers' BartEncoderLayer.forward tests on the host whether all values are
    finite, which blocks the host in every layer. Here the device decides whether to clamp.
    """
    attended, _ = layer.self_attn(
        hidden_states,
        attention_mask=attention_mask,
        **kwargs,
    )
    states = layer.self_attn_layer_norm(hidden_states + attended)
    expanded = layer.activation_fn(layer.fc1(states))
    states = layer.final_layer_norm(states + layer.fc2(expanded))
    if states.dtype != torch.float16:
        return states  # type: ignore[no-any-return]
    limit = torch.finfo(torch.float16).max - 1000
    clamped = states.clamp(min=-limit, max=limit)
    is_finite = torch.isfinite(states).all()
    return torch.where(is_finite, states, clamped)
