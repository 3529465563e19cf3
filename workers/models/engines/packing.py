"""Packed micro-batches: rows that follow each other in one sequence, [1, tokens], each attending only to itself.

Nothing is computed for padding, and most attention needs no mask: rows of equal length form a run, whose attention is
that of an ordinary batch. In bfloat16, attention alone pads rows (`padded_for_attention`). Depends on transformers'
attention interface, and for MPNet on its layers.
"""

from collections.abc import Sequence
from itertools import groupby
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
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
#: Rows of up to MAX_PADDED_LENGTH tokens are padded to a multiple of LENGTH_STEP for attention in bfloat16: torch's
#: softmax computes the rest of a length divided by 16 one by one, which takes up to half of the time of attention.
LENGTH_STEP, MAX_PADDED_LENGTH = 16, 256
#: Very short rows share the BLOCK_LENGTH tokens of a block, so that padding does not cost more than it saves.
SHORT_LENGTHS, BLOCK_LENGTH = (8, 16), 32


class Run(NamedTuple):
    """Adjacent rows of equal length in a packed micro-batch. start and length are in tokens."""

    start: int
    rows: int
    length: int


class Blocks(NamedTuple):
    """Adjacent rows in blocks of equal length, for attention: one row each, or several short ones."""

    #: Tokens per block.
    length: int
    #: Index of the token at each place: [blocks * length]. Behind a row, its last token is repeated.
    tokens: torch.Tensor
    #: Added to the scores: [blocks, 1, 1 or length, length].
    mask: torch.Tensor
    #: Places of the rows' own tokens: [tokens of all rows].
    kept: torch.Tensor


def padded_for_attention(runs: Sequence[Run], dtype: torch.dtype) -> list[Run | Blocks]:
    """Return runs whose attention is fast, and the other rows in blocks. dtype: precision of the scores."""
    found: list[Run | Blocks] = []
    for width, members in groupby(runs, lambda run: _padded_length(run.length)):
        alike = list(members)
        if [run.length for run in alike] == [width] and width >= LENGTH_STEP:
            found += alike
        else:
            found.append(_in_blocks(alike, width, dtype))
    return found


def _padded_length(length: int) -> int:
    if length > MAX_PADDED_LENGTH:
        return length
    return next((short for short in SHORT_LENGTHS if length <= short), -(-length // LENGTH_STEP) * LENGTH_STEP)


def _in_blocks(runs: Sequence[Run], width: int, dtype: torch.dtype) -> Blocks:
    """Pad rows to `width` tokens each."""
    each = BLOCK_LENGTH // width if width in SHORT_LENGTHS else 1  # rows per block
    lengths = np.repeat([run.length for run in runs], [run.rows for run in runs])
    starts = runs[0].start + np.cumsum(lengths) - lengths
    number = len(lengths)
    fill = -number % each  # the last row is repeated in the rest of its block
    lengths, starts = (np.pad(values, (0, fill), mode="edge")[:, None] for values in (lengths, starts))
    place = np.arange(width)
    is_real = place < lengths  # [rows, width]
    tokens = starts + np.minimum(place, lengths - 1)
    if each > 1:
        # [block, row in it, 1, row in it, token]: a row sees its own tokens only.
        own = np.eye(each, dtype=bool)[None, :, None, :, None] & is_real.reshape(-1, 1, 1, each, width)
        visible = np.repeat(own, width, axis=2).reshape(-1, 1, each * width, each * width)
    else:
        visible = is_real[:, None, None, :]
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(torch.from_numpy(~visible), float("-inf"))
    kept = np.flatnonzero(is_real[:number])
    return Blocks(each * width, torch.from_numpy(tokens.ravel()), mask, torch.from_numpy(kept))


def packed_attention(
    module: torch.nn.Module,  # noqa: ARG001 - transformers' signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,  # noqa: ARG001 - rows of one length need none
    *,
    runs: Sequence[Run | Blocks],
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
    runs: Sequence[Run | Blocks],
    scaling: float | None = None,
    mask: torch.Tensor | None = None,
    unmasked_length: int = 0,
) -> torch.Tensor:
    """Compute attention within each row.

    mask: added to the scores of rows of more than `unmasked_length` tokens, [longest row, longest row] or [heads,
    longest row, longest row]; not with blocks. Other shapes as in `packed_attention`. Tokens after all rows get zeros.
    """
    heads = query.shape[1]
    attended = []
    for each in runs:
        if isinstance(each, Blocks):
            attended.append(_attend_in_blocks(query, key, value, each, scaling))
            continue
        start, rows, length = each
        of_run = slice(start, start + rows * length)
        q, k, v = (states[0, :, of_run].view(heads, rows, length, -1).transpose(0, 1) for states in (query, key, value))
        of_row = None if mask is None or length <= unmasked_length else mask[..., :length, :length]
        if of_row is None or length > MAX_SCORES_LENGTH:
            run = scaled_dot_product_attention(q, k, v, attn_mask=of_row, scale=scaling)
        else:
            scores = q @ k.transpose(-1, -2) * (scaling or q.shape[-1] ** -0.5)
            run = (scores + of_row).softmax(-1) @ v
        attended.append(run.transpose(1, 2).flatten(0, 1))
    if rest := query.shape[2] - sum(len(each) for each in attended):
        attended.append(query.new_zeros(rest, heads, query.shape[3]))
    return torch.cat(attended).unsqueeze(0)


def _attend_in_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Blocks, scaling: float | None
) -> torch.Tensor:
    """Return [tokens of the blocks' rows, heads, dimensions of a head]. Other shapes as in `packed_attention`."""
    heads = query.shape[1]
    q, k, v = (
        states[0]
        .transpose(0, 1)
        .index_select(0, blocks.tokens)
        .view(-1, blocks.length, heads, states.shape[3])
        .transpose(1, 2)
        for states in (query, key, value)
    )
    padded = scaled_dot_product_attention(q, k, v, attn_mask=blocks.mask, scale=scaling)
    return padded.transpose(1, 2).flatten(0, 1).index_select(0, blocks.kept)


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
    """Return the last hidden states of packed rows: [tokens, dimensions]. The inputs have shape [1, tokens].

    Tokens after all rows are padding.
    """
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
    elif encoder.dtype == torch.bfloat16:
        extra["runs"] = padded_for_attention(runs, encoder.dtype)
    states = encoder(input_ids=input_ids, position_ids=position_ids, **{"runs": runs} | extra).last_hidden_state
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
