"""Measure whether a row's outputs depend on the other rows of its micro-batch, and refuse a model
whose outputs do.

Rows of a micro-batch are padded to its longest. Some architectures let padding change the outputs
of real tokens (convolutions, Fourier transforms, hashing), compute differently from some length
on, or do so for good after one short batch. A post's scores would then depend on which posts
arrive beside it. No list of architectures is complete, so a model of any but the tested ones is
measured when it is loaded: short rows alone and beside longer ones, up to the maximum. In float32,
because in half precision rounding hides the differences.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from feedmill.shared.errors import DeviceLost, ModelError, clause, printable
from feedmill.workers.models.engines import device_errors
from feedmill.workers.models.tokenizer import Tokens

#: The rows are the start and the end of this text's, repeated.
SENTENCE = (
    "The keeper saved two penalties, and nobody in the stadium could believe it. "
)
WORDS = len(SENTENCE.split())
#: Tokens of the short rows. Both are prime, because blocks of a model's computation hide padding.
SHORT_LENGTHS = (7, 13)
#: Tokens of further short rows, each another part of the text, beside the shortest of the longer
#: rows: padding may leave a row alone by chance, as if all attention is on the first token.
FURTHER_LENGTHS = (5, 11, 17, 23)
#: Short rows whose outputs may change: in a mixture of experts, rounding may send a token to
#: another expert.
MAX_CHANGED = 1
#: Tokens of the shortest of the longer rows, and the ratio of a row's tokens to those of the next
#: shorter one.
LONGER_TOKENS = 37
RATIO = 4
#: Maximum difference of outputs, relative to the largest of them. Rounding in float32 makes up to
#: 1e-5.
TOLERANCE = 1e-3
#: The same for the longest row: in a mixture of experts, rounding may send one of its many tokens
#: to another expert.
LONG_TOLERANCE = 1e-2
#: Outputs below this count as this large: logits may be close to 0 by chance.
MIN_SCALE = 0.1

#: Runs one micro-batch: see `Engine.forward`.
Forward = Callable[[Sequence[Tokens]], torch.Tensor]


def check_rows(
    name: str,
    forward: Forward,
    encode: Callable[[Sequence[str]], Sequence[Tokens]],
    max_tokens: int,
) -> None:
    """Raise ModelError if the outputs of a row depend on the rows beside it, or the model cannot
    run the longest row.

    name: the model, in the error. forward: runs a micro-batch, in float32. encode: returns the row
    of each text, up to `max_tokens` tokens.
    """
    repeats = max_tokens // WORDS + 1
    text = SENTENCE * repeats
    (longest,) = encode([text])
    max_length = len(longest.ids)
    # Before any short row, because some models compute long rows differently after the first short
    # one.
    longest_alone = _run_longest(name, forward, longest)
    short_rows = []
    for length in SHORT_LENGTHS:
        if length < max_length:
            row = _cut(longest, length)
            short_rows.append(row)
    if not short_rows:
        return
    short_alone = [_run_alone(forward, row) for row in short_rows]
    _check_further(
        name,
        forward=forward,
        longest=longest,
        beside=min(LONGER_TOKENS, max_length),
    )
    for length in _lengths(max_length):
        longer = _cut(longest, length)
        outputs = _run(forward, [*short_rows, longer])
        differences = []
        for alone, together in zip(short_alone, outputs, strict=False):
            difference = relative_difference(together, alone)
            differences.append(difference)
        # The smallest, since a mixture of experts may send a token to another expert because of
        # rounding.
        smallest = min(differences)
        if not smallest <= TOLERANCE:
            _check_repeats(
                name,
                forward=forward,
                row=short_rows[0],
                alone=short_alone[0],
            )
            raise _refusal(
                name,
                tokens=SHORT_LENGTHS[0],
                beside=length,
                difference=smallest,
            )
    longest_together = outputs[-1]
    difference = relative_difference(longest_together, longest_alone)
    if not difference <= LONG_TOLERANCE:
        raise _refusal(
            name,
            tokens=max_length,
            beside=SHORT_LENGTHS[0],
            difference=difference,
        )


def _check_further(name: str, forward: Forward, longest: Tokens, beside: int) -> None:
    """Raise ModelError if more than MAX_CHANGED of several short rows change beside one of
    `beside` tokens.
    """
    rows: list[Tokens] = []
    for length in (*SHORT_LENGTHS, *FURTHER_LENGTHS):
        if length < beside:
            row = _cut(longest, length, start=len(rows))
            rows.append(row)
    longer = _cut(longest, beside)
    outputs = _run(forward, [*rows, longer])
    changed = []
    for row, together in zip(rows, outputs, strict=False):
        alone = _run_alone(forward, row)
        difference = relative_difference(together, alone)
        if not difference <= TOLERANCE:
            changed.append((row, alone, difference))
    if len(changed) <= MAX_CHANGED:
        return
    row, alone, difference = changed[0]
    _check_repeats(name, forward, row, alone)
    raise _refusal(
        name,
        tokens=len(row.ids),
        beside=beside,
        difference=difference,
    )


def _check_repeats(
    name: str, forward: Forward, row: Tokens, alone: torch.Tensor
) -> None:
    """Raise ModelError if a row by itself has other outputs than before."""
    again = _run_alone(forward, row)
    if relative_difference(again, alone) > TOLERANCE:
        raise ModelError(
            f"{name} computes with random numbers: it gives the same text other scores in each "
            "run. Use a model of another architecture."
        )


def _run_longest(name: str, forward: Forward, longest: Tokens) -> torch.Tensor:
    """Return the outputs of the longest row.

    Raises ModelError if the model fails, as for want of positions.
    """
    tokens = len(longest.ids)
    try:
        return _run_alone(forward, longest)
    except (IndexError, RuntimeError, ValueError, DeviceLost) as error:
        raise ModelError(
            f"{name} fails with {tokens} tokens, the maximum of its configuration and "
            f"FEEDMILL_MAX_TOKENS: {printable(clause(error))}. If the model takes fewer tokens, "
            "set FEEDMILL_MAX_TOKENS to their number; else use another model."
        ) from error


def _run(forward: Forward, rows: Sequence[Tokens]) -> torch.Tensor:
    """Return the outputs on the host, where a GPU's errors appear.

    Raises DeviceFull, DeviceLost.
    """
    with device_errors():
        outputs = forward(rows)
        return outputs.cpu()


def _run_alone(forward: Forward, row: Tokens) -> torch.Tensor:
    """Return the outputs of a micro-batch of one row, on the host."""
    outputs = _run(forward, [row])
    return outputs[0]


def _lengths(max_length: int) -> list[int]:
    """Return the tokens of the longer rows, `max_length` last."""
    lengths = []
    length = LONGER_TOKENS
    while length < max_length:
        lengths.append(length)
        length *= RATIO
    return [*lengths, max_length]


def _cut(row: Tokens, length: int, start: int = 0) -> Tokens:
    """Return `length` tokens of a row: its first and its last, which may be special ones, and
    those after the first.

    start: how many tokens after the first to leave out.
    """
    last = length - 1
    middle = range(1 + start, last + start)
    indexes = [0, *middle, -1]
    ids = [row.ids[index] for index in indexes]
    types = None
    if row.types is not None:
        types = [row.types[index] for index in indexes]
    return Tokens(ids, types)


def _refusal(name: str, tokens: int, beside: int, difference: float) -> ModelError:
    return ModelError(
        f"{name} gives a text of {tokens} tokens other scores beside one of {beside} tokens than "
        f"alone (by {difference:.1%}), so that a post's scores would depend on other posts. Use a "
        "model of another architecture."
    )


def relative_difference(outputs: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference between two tensors as a share of the largest expected
    value.
    """
    differences = (outputs - expected).abs()
    sizes = expected.abs()
    difference = float(differences.max())
    largest = float(sizes.max())
    scale = max(MIN_SCALE, largest)
    return difference / scale


@contextmanager
def in_float32(module: torch.nn.Module) -> Iterator[None]:
    """Let a module compute in float32 within the block, with the values that its
    parameters have.
    """
    tensors = []
    dtypes = []
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.is_floating_point():
            tensors.append(tensor)
            dtypes.append(tensor.dtype)
    float32 = [torch.float32] * len(tensors)
    try:
        _convert(tensors, float32)
        # On a GPU, convolutions in float32 round more than products do.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            yield
    finally:
        _convert(tensors, dtypes)


def _convert(tensors: Sequence[Any], dtypes: Sequence[torch.dtype]) -> None:
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        tensor.data = tensor.data.to(dtype)
