"""Packed micro-batches: rows that follow each other in one sequence, [1, tokens], each attending only to itself.

Only attention and pooling see rows. On a CPU: in groups of adjacent rows of equal length, as ordinary batches. Nothing
is computed for padding; in half precision, attention alone pads rows. On a GPU: in one group, whose attention is one
kernel for rows of any length, and whose pooling alone pads rows.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

#: Value of `reads` for classifiers; sentence encoders list pooling modes instead.
LOGITS = ("logits",)
#: Supported pooling modes for token embeddings, named as in sentence-transformers.
POOLINGS = frozenset({"cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"})
#: Architectures that can be packed: encoders that take token positions as an argument, and whose attention is called
#: through transformers' interface. DeBERTa's and MPNet's depends on the distances between all tokens of the sequence.
PACKABLE_TYPES = frozenset(
    {"bert", "distilbert", "electra", "gte", "modernbert", "nomic_bert", "roberta", "xlm-roberta"}
)
#: In half precision, rows of up to MAX_PADDED_LENGTH tokens are padded to a multiple of LENGTH_STEP for attention on a
#: CPU: torch's softmax computes the rest of a length divided by 16 one by one, up to half of the time of attention.
LENGTH_STEP, MAX_PADDED_LENGTH = 16, 256
#: In half precision, packed micro-batches are padded to a multiple of this many tokens: oneDNN prepares each linear
#: layer for each new number of tokens, which takes 2 to 6 ms, and cuBLAS chooses a kernel for it.
TOKEN_STEP = 64


class Group(NamedTuple):
    """Adjacent rows in a packed micro-batch, padded to equal length."""

    #: Tokens per row, padding included.
    width: int
    #: The token at each place, [rows * width]. Behind a row, its last token is repeated.
    tokens: slice | torch.Tensor
    #: True at the rows' own tokens: [rows, width]. None without padding on a CPU.
    real: torch.Tensor | None
    #: Places of the rows' own tokens: [tokens of all rows]. None without padding and on a GPU, like the mask.
    kept: torch.Tensor | None
    #: Added to the scores: [rows, 1, 1, width]. As numbers, since torch converts a mask of truth values in each layer.
    mask: torch.Tensor | None
    #: On a GPU: the first token of each row and of those after all rows, and their end. Else None.
    starts: Any = None

    def batch(self, states: torch.Tensor) -> torch.Tensor:
        """Return the rows' states: [rows, width, …]. states: [tokens, …]."""
        places = states[self.tokens] if isinstance(self.tokens, slice) else states.index_select(0, self.tokens)
        return places.view(-1, self.width, *places.shape[1:])

    def own(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the states of the rows' own tokens: [tokens of all rows, …]. batch: [rows, width, …]."""
        places = batch.flatten(0, 1)
        return places if self.kept is None else places.index_select(0, self.kept)

    def attend(
        self, query: Any, key: Any, value: Any, scale: float | None = None, window: int | None = None
    ) -> torch.Tensor:
        """Return attention within each row on a GPU: [tokens, heads, dimensions of a head], as query, key and value."""
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - imports torch's compiler

        most, side = max(self.width, TOKEN_STEP), -1 if window is None else window - 1
        given = query, key, value, self.starts, self.starts, most, most
        # Another argument would make it return a tuple.
        return cast(torch.Tensor, varlen_attn(*given, scale=scale, window_size=(side, side)))


def groups_of(lengths: Sequence[int], step: int, dtype: torch.dtype) -> list[Group]:
    """Divide packed rows into groups. step: rows of up to MAX_PADDED_LENGTH tokens are padded to a multiple of it.

    dtype: precision of the scores.
    """
    groups, start = [], 0
    for width, members in groupby(lengths, lambda length: _padded_length(length, step)):
        own = np.fromiter(members, np.int64)[:, None]
        place = np.arange(width)
        size = int(own.sum())
        tokens = start + own.cumsum()[:, None] - own + np.minimum(place, own - 1)
        if size == tokens.size:
            groups.append(Group(width, slice(start, start + size), None, None, None))
        else:
            real = torch.from_numpy(place < own)
            kept = real.flatten().nonzero().flatten()
            mask = torch.zeros(real.shape, dtype=dtype).masked_fill_(~real, float("-inf"))[:, None, None, :]
            groups.append(Group(width, torch.from_numpy(tokens.ravel()), real, kept, mask))
        start += size
    return groups


def _padded_length(length: int, step: int) -> int:
    return length if length > MAX_PADDED_LENGTH else -(-length // step) * step


def single_group(lengths: Sequence[int], rest: int, put: Callable[[torch.Tensor], torch.Tensor]) -> Group:
    """Return all packed rows as one group on a GPU.

    rest: tokens after all rows, fewer than TOKEN_STEP, which attend to each other. put: copies a tensor to the GPU.
    """
    own = np.array(lengths)[:, None]
    place = np.arange(own.max())
    starts = np.cumsum([0, *lengths, *[rest] * bool(rest)], dtype=np.int32)
    tokens = starts[: len(own), None] + np.minimum(place, own - 1)
    copies = [put(torch.from_numpy(array)) for array in (tokens.ravel(), place < own, starts)]
    return Group(len(place), copies[0], copies[1], None, None, copies[2])


def packed_attention(
    module: torch.nn.Module,  # noqa: ARG001 - transformers' signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,  # noqa: ARG001 - a group has its own
    *,
    groups: Sequence[Group],
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention within each row, for transformers' AttentionInterface.

    query, key, value: [1, heads, tokens, dimensions of a head]. sliding_window: attend only to tokens that are less
    than this far away. Returns [1, tokens, heads, dimensions of a head]; on a CPU, tokens after all rows get zeros.
    """
    if groups[0].starts is not None:
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        return groups[0].attend(q, k, v, scaling, sliding_window).unsqueeze(0), None
    attended = []
    for group in groups:
        q, k, v = (group.batch(states[0].transpose(0, 1)).transpose(1, 2) for states in (query, key, value))
        mask = group.mask
        if sliding_window is not None and group.width > sliding_window:
            near = torch.ones(group.width, group.width, dtype=torch.bool).triu(1 - sliding_window)
            near = near.tril(sliding_window - 1)
            far = torch.zeros(near.shape, dtype=query.dtype).masked_fill_(~near, float("-inf"))
            mask = far if mask is None else far + mask
        rows = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        attended.append(group.own(rows.transpose(1, 2)))
    rest = query.shape[2] - sum(map(len, attended))
    attended.append(query.new_zeros(rest, query.shape[1], query.shape[3]))
    return torch.cat(attended).unsqueeze(0), None


def pool(states: torch.Tensor, mask: torch.Tensor | None, ways: Sequence[str]) -> torch.Tensor:
    """Pool hidden states into [rows, modes * dimensions], in float32.

    states: [rows, tokens, dimensions]. mask: [rows, tokens], true for real tokens; None if no row is padded. ways:
    pooling modes. For rows padded on the right, the result equals that of sentence-transformers' Pooling.
    """
    real = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device) if mask is None else mask
    return torch.cat([_pooled(states, real, way) for way in ways], dim=-1)


def _pooled(states: torch.Tensor, real: torch.Tensor, way: str) -> torch.Tensor:
    if way == "cls":
        return states[:, 0].float()
    if way == "lasttoken":
        return last_tokens(states, real).float()
    if way == "max":
        return states.masked_fill(~real.unsqueeze(-1), float("-inf")).amax(1).float()
    weights = real
    if way == "weightedmean":
        weights = real * torch.arange(1, states.shape[1] + 1, device=states.device, dtype=torch.float32)
    sums = (states * weights.unsqueeze(-1)).sum(1, dtype=torch.float32)
    total = weights.sum(1, keepdim=True)
    return sums / (total.sqrt() if way == "mean_sqrt_len_tokens" else total)


def last_tokens(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the hidden state of each row's last real token: [rows, dimensions]."""
    last = mask.sum(1) - 1
    return states[torch.arange(states.shape[0], device=states.device), last]


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
