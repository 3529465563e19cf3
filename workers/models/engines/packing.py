"""Packed micro-batches: rows that follow each other in one sequence, [1, tokens], each attending
only to itself.

Only attention and pooling see rows. On a CPU: in groups of adjacent rows of equal length, as
ordinary batches. Nothing is computed for padding; in half precision, attention alone pads rows. On
a GPU: in one group, whose attention is one kernel for rows of any length, and whose pooling alone
pads rows.
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
POOLINGS = frozenset(
    {"cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"}
)
#: Architectures that can be packed: encoders that take token positions as an argument, and whose
#: attention is called through transformers' interface. DeBERTa's and MPNet's depends on the
#: distances between all tokens of the sequence.
PACKABLE_TYPES = frozenset(
    {
        "bert",
        "distilbert",
        "electra",
        "gte",
        "modernbert",
        "nomic_bert",
        "roberta",
        "xlm-roberta",
    }
)
#: In half precision, rows of up to MAX_PADDED_LENGTH tokens are padded to a multiple of
#: LENGTH_STEP for attention on a CPU: torch's softmax computes the rest of a length divided by 16
#: one by one, up to half of the time of attention.
LENGTH_STEP = 16
MAX_PADDED_LENGTH = 256
#: In half precision, packed micro-batches are padded to a multiple of this many tokens: oneDNN
#: prepares each linear layer for each new number of tokens, which takes 2 to 6 ms, and cuBLAS
#: chooses a kernel for it.
TOKEN_STEP = 64


class Group(NamedTuple):
    """Adjacent rows in a packed micro-batch, padded to equal length."""

    #: Tokens per row, padding included.
    width: int
    #: The token at each place, [rows * width]. Behind a row, its last token is repeated.
    tokens: slice | torch.Tensor
    #: True at the rows' own tokens: [rows, width]. None without padding on a CPU.
    real: torch.Tensor | None
    #: Places of the rows' own tokens: [tokens of all rows]. None without padding and on a GPU,
    #: like the mask.
    own_places: torch.Tensor | None
    #: Added to the scores: [rows, 1, 1, width]. As numbers, since torch converts a mask of truth
    #: values in each layer.
    mask: torch.Tensor | None
    #: On a GPU: the first token of each row and of those after all rows, and their end. Else None.
    starts: Any = None

    def batch(self, states: torch.Tensor) -> torch.Tensor:
        """Return the rows' states: [rows, width, …]. states: [tokens, …]."""
        if isinstance(self.tokens, slice):
            places = states[self.tokens]
        else:
            places = states.index_select(0, self.tokens)
        dimensions = places.shape[1:]
        return places.view(-1, self.width, *dimensions)

    def own(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the states of the rows' own tokens: [tokens of all rows, …]. batch: [rows, width,
        …].
        """
        places = batch.flatten(0, 1)
        if self.own_places is None:
            return places
        return places.index_select(0, self.own_places)

    def attend(
        self,
        query: Any,
        key: Any,
        value: Any,
        scale: float | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return attention within each row on a GPU: [tokens, heads, dimensions of a head], as
        query, key and value.
        """
        # Imports torch's compiler.
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415

        most = max(self.width, TOKEN_STEP)
        side = -1
        if window is not None:
            side = window - 1
        # Another argument would make it return a tuple.
        attended = varlen_attn(
            query,
            key,
            value,
            self.starts,
            self.starts,
            most,
            most,
            scale=scale,
            window_size=(side, side),
        )
        return cast(torch.Tensor, attended)


def groups_of(lengths: Sequence[int], step: int, dtype: torch.dtype) -> list[Group]:
    """Divide packed rows into groups. step: rows of up to MAX_PADDED_LENGTH tokens are padded to a
    multiple of it.

    dtype: precision of the scores.
    """
    groups = []
    start = 0
    rows_by_width = groupby(
        lengths,
        key=lambda length: _padded_length(length, step),
    )
    for width, members in rows_by_width:
        own_lengths = np.fromiter(members, np.int64)
        own_tokens = int(own_lengths.sum())
        end = start + own_tokens
        places = len(own_lengths) * width
        if own_tokens == places:
            group = Group(
                width=width,
                tokens=slice(start, end),
                real=None,
                own_places=None,
                mask=None,
            )
        else:
            group = _padded_group(
                own_lengths,
                width=width,
                start=start,
                dtype=dtype,
            )
        groups.append(group)
        start = end
    return groups


def _padded_group(
    own_lengths: Any, width: int, start: int, dtype: torch.dtype
) -> Group:
    """Return adjacent packed rows as a group on a CPU. start: place of the first token."""
    lengths = own_lengths[:, None]  # [rows, 1]
    cumulated = lengths.cumsum()
    row_ends = start + cumulated[:, None]
    row_starts = row_ends - lengths
    places = np.arange(width)  # [width]
    last_places = lengths - 1
    places_in_row = np.minimum(places, last_places)  # [rows, width]
    tokens = row_starts + places_in_row
    real = torch.from_numpy(places < lengths)
    own_places = real.flatten().nonzero()  # [tokens of all rows, 1]
    mask = torch.zeros(real.shape, dtype=dtype)
    mask.masked_fill_(~real, float("-inf"))
    return Group(
        width=width,
        tokens=torch.from_numpy(tokens.ravel()),
        real=real,
        own_places=own_places.flatten(),
        mask=mask[:, None, None, :],
    )


def _padded_length(length: int, step: int) -> int:
    if length > MAX_PADDED_LENGTH:
        return length
    steps = -(-length // step)
    return steps * step


def single_group(
    lengths: Sequence[int], rest: int, put: Callable[[torch.Tensor], torch.Tensor]
) -> Group:
    """Return all packed rows as one group on a GPU.

    rest: tokens after all rows, fewer than TOKEN_STEP, which attend to each other. put: copies a
    tensor to the GPU.
    """
    row_count = len(lengths)
    row_lengths = np.array(lengths)
    own_lengths = row_lengths[:, None]  # [rows, 1]
    longest = own_lengths.max()
    places = np.arange(longest)  # [width]
    sequences = [0, *lengths]
    if rest:
        sequences.append(rest)
    starts = np.cumsum(sequences, dtype=np.int32)
    row_starts = starts[:row_count, None]  # [rows, 1]
    last_places = own_lengths - 1
    places_in_row = np.minimum(places, last_places)  # [rows, width]
    tokens = row_starts + places_in_row
    real = places < own_lengths

    def tensor(numbers: Any) -> torch.Tensor:
        return put(torch.from_numpy(numbers))

    return Group(
        width=len(places),
        tokens=tensor(tokens.ravel()),
        real=tensor(real),
        own_places=None,
        mask=None,
        starts=tensor(starts),
    )


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

    query, key, value: [1, heads, tokens, dimensions of a head]. sliding_window: attend only to
    tokens that are less than this far away. Returns [1, tokens, heads, dimensions of a head]; on a
    CPU, tokens after all rows get zeros.
    """
    # [tokens, heads, dimensions of a head]
    queries = query[0].transpose(0, 1)
    keys = key[0].transpose(0, 1)
    values = value[0].transpose(0, 1)
    first_group = groups[0]
    if first_group.starts is not None:
        attended = first_group.attend(
            queries,
            keys,
            values,
            scale=scaling,
            window=sliding_window,
        )
        return attended.unsqueeze(0), None
    _batch, heads, tokens, head_dimensions = query.shape
    parts = []
    rest = tokens
    for group in groups:
        mask = group.mask
        if sliding_window is not None and group.width > sliding_window:
            far = _mask_of_far(group.width, sliding_window, query.dtype)
            if mask is None:
                mask = far
            else:
                mask = far + mask
        # Each: [rows, heads, width, dimensions of a head]
        rows = scaled_dot_product_attention(
            group.batch(queries).transpose(1, 2),
            group.batch(keys).transpose(1, 2),
            group.batch(values).transpose(1, 2),
            attn_mask=mask,
            scale=scaling,
        )
        batch = rows.transpose(1, 2)
        own = group.own(batch)
        parts.append(own)
        rest -= len(own)
    zeros = query.new_zeros(rest, heads, head_dimensions)
    parts.append(zeros)
    attended = torch.cat(parts)
    return attended.unsqueeze(0), None


def _mask_of_far(width: int, window: int, dtype: torch.dtype) -> torch.Tensor:
    """Return -inf for each pair of tokens that are `window` or more apart: [width, width]."""
    reach = window - 1
    near = torch.ones(width, width, dtype=torch.bool)
    near = near.triu(-reach)
    near = near.tril(reach)
    mask = torch.zeros(width, width, dtype=dtype)
    return mask.masked_fill_(~near, float("-inf"))


def pool(
    states: torch.Tensor, mask: torch.Tensor | None, ways: Sequence[str]
) -> torch.Tensor:
    """Pool hidden states into [rows, modes * dimensions], in float32.

    states: [rows, tokens, dimensions]. mask: [rows, tokens], true for real tokens; None if no row
    is padded. ways: pooling modes. For rows padded on the right, the result equals that of
    sentence-transformers' Pooling.
    """
    real = mask
    if real is None:
        rows, tokens, _ = states.shape
        real = torch.ones(rows, tokens, dtype=torch.bool, device=states.device)
    pooled = []
    for way in ways:
        vectors = _pool(states, real, way)
        pooled.append(vectors)
    return torch.cat(pooled, dim=-1)


def _pool(states: torch.Tensor, real: torch.Tensor, way: str) -> torch.Tensor:
    if way == "cls":
        first = states[:, 0]
        return first.float()
    if way == "lasttoken":
        last = last_tokens(states, real)
        return last.float()
    if way == "max":
        is_padding = ~real.unsqueeze(-1)
        masked = states.masked_fill(is_padding, float("-inf"))
        maxima = masked.amax(1)
        return maxima.float()
    weights = real  # [rows, tokens]
    if way == "weightedmean":
        tokens = states.shape[1]
        numbers = torch.arange(
            1,
            tokens + 1,
            device=states.device,
            dtype=torch.float32,
        )
        weights = real * numbers
    weighted = states * weights.unsqueeze(-1)  # [rows, tokens, dimensions]
    sums = weighted.sum(1, dtype=torch.float32)  # [rows, dimensions]
    total = weights.sum(1, keepdim=True)  # [rows, 1]
    if way == "mean_sqrt_len_tokens":
        total = total.sqrt()
    return sums / total


def last_tokens(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the hidden state of each row's last real token: [rows, dimensions]."""
    row_count = states.shape[0]
    rows = torch.arange(row_count, device=states.device)
    tokens = mask.sum(1)
    last = tokens - 1
    return states[rows, last]


def last_marked_tokens(
    states: torch.Tensor, marks: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return the hidden state of each row's last marked token, or last real token if none is
    marked.

    states: [rows, tokens, dimensions]. marks, mask: [rows, tokens], true for marked and for real
    tokens.
    """
    row_count, token_count, _ = states.shape
    rows = torch.arange(row_count, device=states.device)
    places = torch.arange(token_count, device=states.device)
    real_places = torch.where(mask, places, -1)
    last_real = real_places.amax(1)
    marked_places = torch.where(marks & mask, places, -1)
    last_marked = marked_places.amax(1)
    lacks_marks = last_marked < 0
    last = torch.where(lacks_marks, last_real, last_marked)
    return states[rows, last]


def packed_head(model: Any, first: torch.Tensor) -> torch.Tensor:
    """Return the logits of a classifier of PACKABLE_TYPES: [rows, labels].

    first: the state that the head reads of each row, [rows, dimensions].
    """
    kind = model.config.model_type
    if kind == "modernbert":
        hidden = model.head(first)
        return model.classifier(hidden)  # type: ignore[no-any-return]
    if kind == "distilbert":
        hidden = model.pre_classifier(first).relu()
        return model.classifier(hidden)  # type: ignore[no-any-return]
    # the other heads read the first token of [rows, tokens, dimensions]
    tokens = first.unsqueeze(1)
    if kind in ("bert", "gte", "nomic_bert"):
        tokens = model.base_model.pooler(tokens)
    return model.classifier(tokens)  # type: ignore[no-any-return]
