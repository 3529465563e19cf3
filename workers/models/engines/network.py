"""A transformers model together with the outputs that Feedmill needs from it.

Classifiers return logits; sentence encoders return a vector pooled from the last hidden states. Differences between
architectures belong here (attention masks and workarounds) and in packing.py.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoModelForSequenceClassification
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from feedmill.shared.errors import ModelError
from feedmill.workers.models.engines.packing import LOGITS, Group, last_tokens, packed_attention, packed_head, pool
from feedmill.workers.models.weights import Weights, loading, read_config

#: Names under which attention is registered with transformers: within packed rows; and torch's with `padding_mask`.
PACKED, PADDED = "feedmill_packed", "feedmill_padded"
#: Architectures that use PADDED. Tests check that their padded forward passes read nothing on the host.
PADDED_TYPES = frozenset(
    {
        "bart", "bert", "camembert", "distilbert", "electra", "gpt2", "gte", "modernbert", "nomic_bert", "qwen3",
        "roberta", "xlm-roberta",
    }
)  # fmt: skip
#: Sequence-to-sequence models, and the class that loads only the encoder: embeddings do not need the decoder.
ENCODER_CLASSES = {
    name: f"{kind}EncoderModel" for name, kind in (("t5", "T5"), ("mt5", "MT5"), ("umt5", "UMT5"), ("longt5", "LongT5"))
}
#: Architectures whose scores depend on padding, and therefore on the other rows of the batch.
PADDING_SENSITIVE_TYPES = frozenset({"fnet", "xlnet"})


class Network(torch.nn.Module):
    """A model that returns logits or pooled embeddings. Stays on the CPU until it is moved.

    reads: LOGITS, or pooling modes. pad_id: padding token if the model's configuration names none. attention:
    name of the attention implementation; None selects the library's default.
    Raises ModelError if the folder does not hold such a model.
    """

    def __init__(
        self,
        weights: Weights,
        dtype: torch.dtype,
        reads: Sequence[str],
        pad_id: int,
        attention: str | None = None,
    ) -> None:
        super().__init__()
        self.reads = tuple(reads)
        self.classifies = self.reads == LOGITS
        config = read_config(weights)
        self.kind: str = config.model_type
        architecture: Any = AutoModelForSequenceClassification if self.classifies else AutoModel
        if self.kind in ENCODER_CLASSES and not self.classifies:
            architecture = getattr(transformers, ENCODER_CLASSES[self.kind])
        model, loading = load_pretrained(architecture, weights, dtype=dtype, attn_implementation=attention)
        # transformers initializes missing weights at random, so the model would run but return noise.
        if missing := [key for key in loading["missing_keys"] if "pooler" not in key or self.classifies]:
            raise ModelError(
                f"The model in {weights.folder} has no weights for {', '.join(sorted(missing)[:3])}: it was not "
                f"trained for {'classification' if self.classifies else 'embedding'}. Use a model that was."
            )
        self.model: Any = model
        self.config: Any = model.config
        # Decoders use this token to find a row's last real token.
        self.pad_id = padding_token(self.config, pad_id)
        self.config.pad_token_id = self.config.get_text_config().pad_token_id = self.pad_id
        if self.kind == "bart":
            for layer in self.model.base_model.encoder.layers:
                layer.forward = MethodType(_bart_layer, layer)
        self.config.use_cache = self.config.get_text_config().use_cache = False
        self.eval()

    def forward(
        self,
        input_ids: torch.Tensor,
        mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return each row's outputs: [rows, …] in float32.

        input_ids, token_type_ids: [rows, tokens]. mask: [rows, tokens], true for real tokens. attention_mask: the same
        as integers; None if no row is padded.
        """
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids
        if not self.classifies:
            return pool(self.model(**inputs).last_hidden_state, mask, self.reads)
        if self.kind == "bart":
            # transformers' own head looks for the last end-of-sequence token, always a row's last token here, and
            # rejects batches whose rows contain different numbers of them.
            states = self.model.model(**inputs).last_hidden_state
            logits: torch.Tensor = self.model.classification_head(last_tokens(states, mask))
        else:
            logits = self.model(**inputs).logits
        return logits.float()

    def packed(
        self,
        groups: Sequence[Group],
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the outputs of `forward` for packed rows: inputs of shape [1, tokens], divided into rows by `groups`.

        Supports only PACKABLE_TYPES.
        """
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        encoder = self.model.base_model
        states = encoder(input_ids=input_ids, position_ids=position_ids, groups=groups, **types).last_hidden_state[0]
        ways = (getattr(self.config, "classifier_pooling", "cls"),) if self.classifies else self.reads
        pooled = torch.cat([pool(group.batch(states), group.real, ways) for group in groups])
        return packed_head(self.model, pooled.to(states.dtype)).float() if self.classifies else pooled


def padding_mask(mask_function: Any, attention_mask: torch.Tensor | None, **options: Any) -> torch.Tensor | None:
    """Return a mask of rows that are padded on the right, for transformers' AttentionMaskInterface.

    transformers' own function reads on the host whether any token is masked, and so waits for the device. In causal
    attention, real tokens precede the padding and need no mask.
    """
    if mask_function is causal_mask_function and options["allow_is_causal_skip"]:
        return None
    if attention_mask is not None:
        if mask_function is bidirectional_mask_function:
            return attention_mask[:, None, None, :]
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: torch.Tensor | None = sdpa_mask(mask_function=mask_function, attention_mask=attention_mask, **options)
    return mask


AttentionInterface.register(PACKED, packed_attention)
AttentionInterface.register(PADDED, sdpa_attention_forward)
AttentionMaskInterface.register(PADDED, padding_mask)


def load_pretrained(architecture: Any, weights: Weights, **options: Any) -> tuple[Any, Any]:
    """Load a model of transformers; return it, and transformers' report of the weights that it lacked.

    options: arguments of `from_pretrained`. Raises ModelError.
    """
    if (kind := read_config(weights).model_type) in PADDING_SENSITIVE_TYPES:
        raise ModelError(
            f"{weights.name} has the unsupported model type {kind}: its scores depend on padding. Use another model."
        )
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with loading(f"the model in {weights.folder}"):
        return architecture.from_pretrained(  # type: ignore[no-any-return]
            weights.folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=weights.remote_code,
            output_loading_info=True,
            **options,
        )


def padding_token(config: Any, pad_id: int) -> int:
    """Return the padding token: the model's, or else the tokenizer's."""
    own = getattr(config.get_text_config(), "pad_token_id", None)
    return pad_id if own is None else int(own)


def _bart_layer(layer: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Run BART's encoder layer without waiting for the device.

    In float16, transformers' BartEncoderLayer.forward tests on the host whether all values are finite, which blocks
    the host in every layer. Here the device decides whether to clamp.
    """
    attended, _ = layer.self_attn(hidden_states, attention_mask=attention_mask, **kwargs)
    hidden_states = layer.self_attn_layer_norm(hidden_states + attended)
    expanded = layer.fc2(layer.activation_fn(layer.fc1(hidden_states)))
    hidden_states = layer.final_layer_norm(hidden_states + expanded)
    if hidden_states.dtype == torch.float16:
        limit = torch.finfo(torch.float16).max - 1000
        clamped = hidden_states.clamp(min=-limit, max=limit)
        hidden_states = torch.where(torch.isfinite(hidden_states).all(), hidden_states, clamped)
    return hidden_states
