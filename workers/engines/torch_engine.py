"""The torch engine: a transformers model, loaded once, run on micro-batches of token rows.

A micro-batch is laid out in one of two ways:

- padded: [rows, longest row], with a mask. What GPUs, `torch.compile` and any model can take.
- packed: the rows one after the other in a single sequence, in which each row attends to itself alone. Nothing is
  computed for padding, and attention, which is slower with a mask, needs none (on a CPU in half precision a mask
  costs a quarter of the forward pass). For encoders that take the positions of their tokens as an argument, on a CPU.

The hidden states are the same either way, to rounding; tests hold that for each architecture that is packed.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, AutoModel, AutoTokenizer

from shared.errors import DeviceFull, DeviceLost, ModelError
from workers.device import Device
from workers.weights import Weights

#: The name under which transformers finds `packed_attention`.
PACKED = "feedmill_packed"
#: Architectures that can be packed.
PACKABLE = frozenset({"bert", "electra", "roberta", "xlm-roberta"})
#: Those whose positions start behind the padding token's id, instead of at 0.
SHIFTED = frozenset({"camembert", "mpnet", "roberta", "xlm-roberta"})
#: What torch, its CPU allocator and cuBLAS say when there is no memory.
NO_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
#: Lengths are padded up to multiples of this where the model is compiled: few shapes are compiled, many are run.
LENGTH_BUCKET = 32


class Run(NamedTuple):
    """Rows of one length that lie next to each other in a packed micro-batch."""

    start: int
    rows: int
    length: int


class Hidden(Protocol):
    """The last hidden states of a micro-batch."""

    def sums(self) -> torch.Tensor:
        """The sum over each row's tokens: [rows, dimensions] in float32."""

    def first(self) -> torch.Tensor:
        """That of each row's first token: [rows, dimensions] in float32."""


class Padded(NamedTuple):
    """states: [rows, longest, dimensions]; mask: [rows, longest], true where a token is real."""

    states: torch.Tensor
    mask: torch.Tensor

    def sums(self) -> torch.Tensor:
        return (self.states * self.mask.unsqueeze(-1)).sum(1, dtype=torch.float32)

    def first(self) -> torch.Tensor:
        return self.states[:, 0].float()


class Packed(NamedTuple):
    """states: [tokens, dimensions], row after row, as `runs` say."""

    states: torch.Tensor
    runs: Sequence[Run]

    def _rows(self) -> Iterator[torch.Tensor]:
        """Each run as [rows, length, dimensions]."""
        for start, rows, length in self.runs:
            yield self.states[start : start + rows * length].view(rows, length, -1)

    def sums(self) -> torch.Tensor:
        return torch.cat([run.sum(1, dtype=torch.float32) for run in self._rows()])

    def first(self) -> torch.Tensor:
        return torch.cat([run[:, 0] for run in self._rows()]).float()


def packed_attention(
    module: torch.nn.Module,  # noqa: ARG001 - transformers' signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,  # noqa: ARG001 - rows of one length need none
    *,
    runs: Sequence[Run],
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within each row. query, key, value: [1, heads, tokens, dimensions of a head]; returns
    [1, tokens, heads, dimensions of a head]. An implementation for transformers' AttentionInterface.
    """
    heads = query.shape[1]
    attended = []
    for start, rows, length in runs:
        of_run = slice(start, start + rows * length)
        q, k, v = (states[0, :, of_run].view(heads, rows, length, -1).transpose(0, 1) for states in (query, key, value))
        attended.append(scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2).flatten(0, 1))
    return torch.cat(attended).unsqueeze(0), None


AttentionInterface.register(PACKED, packed_attention)


class Outputs:
    """Outputs of one micro-batch on their way from the device to the host: one copy, which nobody waits for yet."""

    def __init__(self, tensor: torch.Tensor, began: Any) -> None:
        self._began = began
        self._done: Any = None
        if tensor.is_cuda:
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(tensor.device))
        else:
            self._tensor = tensor.cpu()
            self._seconds = time.perf_counter() - began

    def ready(self) -> bool:
        """Whether the device is done."""
        return self._done is None or bool(self._done.query())

    def wait(self) -> torch.Tensor:
        """The outputs, on the host. Raises DeviceLost."""
        if self._done is not None:
            with device_errors():
                self._done.synchronize()
        return self._tensor

    @property
    def seconds(self) -> float:
        """For how long the device was at it; to be asked after `wait`."""
        return self._seconds if self._done is None else float(self._began.elapsed_time(self._done)) / 1000


@contextmanager
def device_errors() -> Iterator[None]:
    """Turns what torch raises for a device without memory, or with a broken context, into our own errors."""
    try:
        yield
    except RuntimeError as error:  # torch's classes for both are its children, but not all is raised as one of them
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError) or any(words in text for words in NO_MEMORY):
            raise DeviceFull(text) from None
        if isinstance(error, torch.AcceleratorError) or text.startswith("CUDA error"):
            raise DeviceLost(text) from error  # after this every further call fails as well
        raise


class TorchEngine:
    """A model on its device. `architecture` is the transformers class that says what its outputs are.

    compiled: run it through torch.compile. packed: pack micro-batches where that can be done.
    Raises ModelError when the folder does not hold such a model.
    """

    def __init__(
        self,
        weights: Weights,
        device: Device,
        architecture: type[Any] = AutoModel,
        compiled: bool = False,
        packed: bool = True,
    ) -> None:
        self.device = device
        self._cuda = device.torch.type == "cuda"
        self._copies = torch.cuda.Stream(device.torch) if self._cuda else None  # type: ignore[no-untyped-call]
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            kind = AutoConfig.from_pretrained(weights.folder, local_files_only=True).model_type
            self.packed = packed and device.torch.type == "cpu" and kind in PACKABLE and not compiled
            self.model = architecture.from_pretrained(
                weights.folder,
                dtype=device.dtype,
                attn_implementation=PACKED if self.packed else None,
                local_files_only=True,
                use_safetensors=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(weights.folder, local_files_only=True)
            #: The Rust tokenizer itself: it releases the GIL, which the Python one around it does not.
            self.tokenizer = tokenizer.backend_tokenizer
            config = self.model.config
            self._first_position = config.pad_token_id + 1 if kind in SHIFTED else 0
            self.max_tokens: int = config.max_position_embeddings - self._first_position
        except Exception as error:  # a broken folder fails in as many ways as it has files
            raise ModelError(f"The model in {weights.folder} cannot be loaded by transformers: {error}") from error
        if architecture is AutoModel and getattr(self.model, "pooler", None) is not None:
            self.model.pooler = None  # one more layer, whose output nobody reads
        self.model.to(device.torch).eval()
        # A tokenizer.json may pad every row to one length; rows here keep their own.
        self.tokenizer.no_padding()
        self._pad_id = tokenizer.pad_token_id or 0
        # Models that hand their mask to torch's attention take it ready-made; others build theirs.
        self._ready_made_mask = self.model.config._attn_implementation == "sdpa"
        self._length_bucket = LENGTH_BUCKET if compiled else 1
        self._run = torch.compile(self.model, dynamic=True) if compiled else self.model

    def begin(self) -> Any:
        """Mark the begin of a micro-batch, for `to_host`."""
        if not self._cuda:
            return time.perf_counter()
        began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        began.record(torch.cuda.current_stream(self.device.torch))
        return began

    @torch.inference_mode()
    def forward(self, rows: Sequence[Sequence[int]]) -> Hidden:
        """Run one micro-batch. rows: token ids of each row; most is had from rows that are sorted by length."""
        return self._packed_forward(rows) if self.packed else self._padded_forward(rows)

    def _packed_forward(self, rows: Sequence[Sequence[int]]) -> Packed:
        runs, start = [], 0
        for length, members in groupby(map(len, rows)):
            runs.append(Run(start, len(list(members)), length))
            start += runs[-1].rows * length
        ids = np.fromiter(chain.from_iterable(rows), np.int64, start)
        row_positions = [np.tile(np.arange(length), count) for _, count, length in runs]
        positions = np.concatenate(row_positions) + self._first_position
        output = self._run(
            input_ids=torch.from_numpy(ids).unsqueeze(0),
            position_ids=torch.from_numpy(positions).unsqueeze(0),
            runs=runs,
        )
        return Packed(output.last_hidden_state[0], runs)

    def _padded_forward(self, rows: Sequence[Sequence[int]]) -> Padded:
        lengths = torch.tensor([len(row) for row in rows], pin_memory=self._cuda)
        longest = int(lengths.max())
        padding = bool(lengths.min() < longest)  # a batch without any needs no mask
        if self._length_bucket > 1:
            padding, longest = True, min(-(-longest // self._length_bucket) * self._length_bucket, self.max_tokens)
        ids = torch.full((len(rows), longest), self._pad_id, pin_memory=self._cuda)
        filled = ids.numpy()
        for index, row in enumerate(rows):
            filled[index, : len(row)] = row
        mask = torch.arange(longest, device=self.device.torch) < self.to_device(lengths).unsqueeze(1)
        # Made from [rows, longest] by the model, a mask would first be read back from the device.
        given = (mask[:, None, None, :] if self._ready_made_mask else mask) if padding else None
        output = self._run(input_ids=self.to_device(ids), attention_mask=given)
        return Padded(output.last_hidden_state, mask)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device. To a GPU it travels on a stream of its own, beside the batch that is computed."""
        if self._copies is None:
            return tensor.to(self.device.torch)
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        with torch.cuda.stream(self._copies):
            copy = pinned.to(self.device.torch, non_blocking=True)
        computing = torch.cuda.current_stream(self.device.torch)
        computing.wait_stream(self._copies)
        copy.record_stream(computing)
        return copy
