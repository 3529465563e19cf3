"""Packed micro-batches: rows that follow each other in one sequence, [1, tokens], each attending only to itself.

Nothing is computed for padding, and most attention needs no mask: rows of equal length form a run, whose attention is
that of an ordinary batch. Depends on transformers' attention interface, and for MPNet on its layers.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

#: Name under which `packed_attention` is registered with transformers.
PACKED = "feedmill_packed"
#: Architectures that can be packed: encoders that take token positions as an argument, and whose attention is called
#: through transformers' interface or (MPNet) replaced here. DeBERTa computes attention from the distances between all
#: tokens of the sequence, outside the interface.
PACKABLE_TYPES = frozenset(
    {"bert", "distilbert", "electra", "gte", "modernbert", "mpnet", "nomic_bert", "roberta", "xlm-roberta"}
)

#: Longest rows whose scores are computed as a matrix if they are masked. In bfloat16 that takes a third of the time of
#: torch's attention with a mask, and memory by the square of the length.
MAX_SCORES_LENGTH = 512


class Run(NamedTuple):
    """Adjacent rows of equal length in a packed micro-batch. start and length are in tokens."""

    start: int
    rows: int
    length: int


def packed_attention(
    module: torch.nn.Module,  # noqa: ARG001 - transformers' signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,  # noqa: ARG001 - rows of one length need none
    *,
    runs: Sequence[Run],
    scaling: float | None = None,
    sliding_window: int | None = None,
    window: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention within each row, for transformers' AttentionInterface.

    query, key, value: [1, heads, tokens, dimensions of a head]. sliding_window: set in layers that attend only to
    tokens nearby. window: zero for those and negative infinity for others, [longest row, longest row]; None if all
    rows are shorter.
    Returns [1, tokens, heads, dimensions of a head].
    """
    if sliding_window is None:
        return attend(query, key, value, runs, scaling), None
    return attend(query, key, value, runs, scaling, window, sliding_window), None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    runs: Sequence[Run],
    scaling: float | None = None,
    mask: torch.Tensor | None = None,
    unmasked_length: int = 0,
) -> torch.Tensor:
    """Compute attention within each row.

    mask: added to the scores of rows of more than `unmasked_length` tokens, [longest row, longest row] or [heads,
    longest row, longest row]. Other shapes as in `packed_attention`.
    """
    heads = query.shape[1]
    attended = []
    for start, rows, length in runs:
        of_run = slice(start, start + rows * length)
        q, k, v = (states[0, :, of_run].view(heads, rows, length, -1).transpose(0, 1) for states in (query, key, value))
        of_row = None if mask is None or length <= unmasked_length else mask[..., :length, :length]
        if of_row is None or length > MAX_SCORES_LENGTH:
            run = scaled_dot_product_attention(q, k, v, attn_mask=of_row, scale=scaling)
        else:
            scores = q @ k.transpose(-1, -2) * (scaling or q.shape[-1] ** -0.5)
            run = (scores + of_row).softmax(-1) @ v
        attended.append(run.transpose(1, 2).flatten(0, 1))
    return torch.cat(attended).unsqueeze(0)


AttentionInterface.register(PACKED, packed_attention)


def prepare(model: Any) -> None:
    """Make a loaded model of PACKABLE_TYPES ready for `packed_states`."""
    if model.config.model_type == "mpnet":
        for layer in model.base_model.encoder.layer:
            layer.attention.attn.forward = MethodType(_mpnet_attention, layer.attention.attn)


def packed_states(
    encoder: Any,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    token_type_ids: torch.Tensor | None,
    runs: Sequence[Run],
) -> torch.Tensor:
    """Return the last hidden states of packed rows: [tokens, dimensions]. The inputs have shape [1, tokens]."""
    longest = max(run.length for run in runs)
    if encoder.config.model_type == "mpnet":
        states = encoder.embeddings(input_ids=input_ids, position_ids=position_ids)
        bias = encoder.encoder.compute_position_bias(states[:, :longest])[0]
        for layer in encoder.encoder.layer:
            (states,) = layer(states, runs, bias)
        return states[0]  # type: ignore[no-any-return]
    extra: dict[str, Any] = {"token_type_ids": token_type_ids} if token_type_ids is not None else {}
    if encoder.config.model_type == "modernbert" and longest > encoder.config.sliding_window + 1:
        near = encoder.config.sliding_window
        near_tokens = torch.ones(longest, longest, dtype=torch.bool).triu(-near).tril(near)
        extra["window"] = torch.zeros(longest, longest, dtype=encoder.dtype).masked_fill(~near_tokens, float("-inf"))
    states = encoder(input_ids=input_ids, position_ids=position_ids, runs=runs, **extra).last_hidden_state
    return states[0]  # type: ignore[no-any-return]


def _mpnet_attention(
    attention: Any, hidden_states: torch.Tensor, runs: Sequence[Run], position_bias: torch.Tensor, **_: Any
) -> tuple[torch.Tensor]:
    """Run MPNet's self-attention on packed rows: its layers do not use transformers' attention interface.

    position_bias: [heads, longest row, longest row].
    """
    shape = (*hidden_states.shape[:-1], -1, attention.attention_head_size)
    query, key, value = (
        project(hidden_states).view(shape).transpose(1, 2) for project in (attention.q, attention.k, attention.v)
    )
    attended = attend(query, key, value, runs, mask=position_bias)
    return (attention.o(attended.flatten(2)),)


def packed_head(model: Any, first: torch.Tensor) -> torch.Tensor:
    """Return the logits of a classifier of PACKABLE_TYPES: [rows, labels].

    first: the state that the head reads of each row, [rows, dimensions].
    """
    kind = model.config.model_type
    if kind == "modernbert":
        return model.classifier(model.head(first))  # type: ignore[no-any-return]
    if kind == "distilbert":
        return model.classifier(model.pre_classifier(first).relu())  # type: ignore[no-any-return]
    tokens = first.unsqueeze(1)  # the other heads read the first token of [rows, tokens, dimensions]
    if kind in ("bert", "gte", "nomic_bert"):
        tokens = model.base_model.pooler(tokens)
    return model.classifier(tokens)  # type: ignore[no-any-return]
