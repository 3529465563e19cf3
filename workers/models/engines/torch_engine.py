"""The torch engine: run a transformers model on micro-batches of token rows. `create_engine` creates it or another.

A micro-batch has one of two layouts:

- padded: [rows, longest row], with a mask. Works on GPUs and for every model. On CUDA, rows and
  lengths are padded further, to one of a few shapes (shapes.py).
- packed: the rows concatenated into a single sequence in which each row attends only to itself (packing.py). Nothing is
  computed for padding, and attention needs no mask (on a CPU in half precision, a mask costs a quarter of the forward
  pass). Requires an architecture of PACKABLE_TYPES, and a CPU or a GPU with a kernel for it (`_runs`).
"""

import platform
from collections.abc import Sequence
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch

from feedmill.shared.settings import PREFIX, Settings
from feedmill.workers.models.device import Device, onednn_has_bfloat16
from feedmill.workers.models.engines import Engine, to_device
from feedmill.workers.models.engines.bert import Bert, read_bert
from feedmill.workers.models.engines.packing import (
    LENGTH_STEP,
    LOGITS,
    PACKABLE_TYPES,
    TOKEN_STEP,
    groups_of,
    single_group,
)
from feedmill.workers.models.engines.static_engine import create_static_engine
from feedmill.workers.models.plugins import load_plugin
from feedmill.workers.models.tokenizer import Tokenizer, Tokens, padded
from feedmill.workers.models.weights import Weights, first_position, max_row_tokens, read_config

#: Architectures whose linear layers are replaced: those that call the layers and never read their weights. Tests
#: compare each with transformers' own model.
REORDERED_TYPES = PACKABLE_TYPES | {"bart", "deberta-v2", "mpnet"}


def use_attention_without_plans(device: Device) -> None:
    """Exclude cuDNN from torch's implementations of attention in this process, if the device is a CUDA GPU.

    On Hopper and Blackwell (sm90, sm100) torch tries cuDNN first, even with a padding mask. cuDNN builds an execution
    plan for each new combination of rows and length, which takes tens to hundreds of milliseconds and blocks the device
    thread. The other implementations (flash, memory-efficient) need no plans.
    """
    if device.torch.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


class TorchEngine:
    """A transformers model on its device.

    reads: outputs to return, LOGITS or pooling modes (network.py). pad_id: padding token if the model names
    none. most: maximum tokens per row. packed: pack micro-batches where supported.
    reordered: give linear layers weights in oneDNN's layout where supported.
    Raises ModelError if the folder does not hold such a model.
    """

    def __init__(
        self,
        weights: Weights,
        device: Device,
        reads: Sequence[str],
        pad_id: int,
        most: int,
        *,
        packed: bool = True,
        reordered: bool = True,
    ) -> None:
        self.device = device
        self.network: Any
        self._shapes = device.shapes
        self.home = device.torch
        use_attention_without_plans(device)
        half, on_gpu = device.dtype != torch.float32, device.torch.type == "cuda"
        self._token_step, self._length_step = (TOKEN_STEP, LENGTH_STEP) if half else (1, 1)
        self._most = most
        packs, reorders = packed and (half if on_gpu else device.torch.type == "cpu"), reordered and can_reorder(device)
        self._load(weights, reads, pad_id, packs, reorders)
        if self.packed and on_gpu and not self._runs():
            self._load(weights, reads, pad_id, False, reorders)

    def _load(self, weights: Weights, reads: Sequence[str], pad_id: int, packs: bool, reorders: bool) -> None:
        """Load the model. packs, reorders: do so where it is possible."""
        if packs and tuple(reads) != LOGITS and (config := read_bert(weights)):
            self.packed, self.network = True, Bert(weights, config, self.device, reads, reorders)
        else:
            config = self._load_network(weights, reads, pad_id, packs, reorders)
        self._first_position, self._pad_id = first_position(config), self.network.pad_id

    def _runs(self) -> bool:
        """Return whether torch attends within rows of any length on this GPU, in this precision and head size."""
        try:
            self.forward([Tokens([0])])
        except (
            RuntimeError,
            TypeError,
            ImportError,
        ):  # torch before 2.11 has another function, or none
            return False
        return True

    def _load_network(self, weights: Weights, reads: Sequence[str], pad_id: int, packs: bool, reorders: bool) -> Any:
        """Load the model with transformers; return its configuration."""
        from feedmill.workers.models.engines import network  # noqa: PLC0415 - takes seconds

        config = read_config(weights)
        # Remote code may claim a known model type and behave differently.
        own = not (weights.remote_code and getattr(config, "auto_map", None))
        self.packed = packs and own and config.model_type in PACKABLE_TYPES
        padded = network.PADDED if own and config.model_type in network.PADDED_TYPES else None
        attention = network.PACKED if self.packed else padded
        self.network = network.Network(weights, self.device.dtype, reads, pad_id, attention).to(self.home)
        if reorders and own and config.model_type in REORDERED_TYPES:
            reorder_linear_layers(self.network)
        return config

    @torch.inference_mode()
    def forward(self, rows: Sequence[Tokens]) -> torch.Tensor:
        """Run one micro-batch; return each row's outputs, [rows, …] in float32, on the device.

        Fastest for rows sorted by length.
        """
        return self._packed_forward(rows) if self.packed else self._padded_forward(rows)

    def _packed_forward(self, rows: Sequence[Tokens]) -> torch.Tensor:
        lengths = [len(row.ids) for row in rows]
        rest = -sum(lengths) % self._token_step
        ids = np.fromiter(chain(chain.from_iterable(row.ids for row in rows), repeat(self._pad_id, rest)), np.int64)
        inputs = [ids, self._positions(ids, [*lengths, *repeat(1, rest)])]
        if any(row.types for row in rows):
            each = (row.types or repeat(0, len(row.ids)) for row in rows)
            inputs.append(np.fromiter(chain(*each, repeat(0, rest)), np.int64))
        put = partial(to_device, device=self.device.torch)
        if self.device.torch.type == "cpu":
            groups = groups_of(lengths, self._length_step, self.device.dtype)
        else:
            groups = [single_group(lengths, rest, put)]
        outputs: torch.Tensor = self.network.packed(groups, *(put(torch.from_numpy(each)[None]) for each in inputs))
        return outputs

    def _positions(self, ids: Any, lengths: Sequence[int]) -> Any:
        """Return the position of each token of rows that follow each other, [tokens]. ids: likewise.

        Models whose positions start after the padding token's id count only real tokens: a padding token that occurs in
        a text gets its own id as its position.
        """
        padding = self._first_position - 1
        real = ids != padding
        counted = real.cumsum()
        before = np.append(0, counted)[np.cumsum([0, *lengths[:-1]])]
        return (counted - before.repeat(lengths)) * real + padding

    def _padded_forward(self, rows: Sequence[Tokens]) -> torch.Tensor:
        ids, mask, types = padded(rows, self._pad_id, self._most, self._shapes)
        # Rows of equal length need no mask; where shapes are few, each has one, so that a shape is a single program.
        masked = self._shapes.few or not mask.all()
        ids, mask = to_device(ids, self.device.torch), to_device(mask, self.device.torch)
        types = None if types is None else to_device(types, self.device.torch)
        read: torch.Tensor = self.network(ids, mask, types, mask.long() if masked else None)
        return read[: len(rows)]


class ReorderedLinear(torch.nn.Module):
    """A linear layer for inference. Its weights have no gradients and belong to no state_dict."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(states, self.weight, self.bias, "none", [], "")
        return product


def can_reorder(device: Device) -> bool:
    """Return whether this machine's oneDNN gains from reordered weights in the device's precision."""
    return (
        device.torch.type == "cpu"
        and device.dtype == torch.bfloat16
        and platform.machine().lower() in ("x86_64", "amd64")
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and onednn_has_bfloat16()
    )


def reorder_linear_layers(module: torch.nn.Module) -> None:
    """Replace the linear layers within a module, one by one, so that no more than one has its weights twice."""
    for name, child in module.named_children():
        if type(child) is torch.nn.Linear:  # subclasses may be read by their owners
            setattr(module, name, ReorderedLinear(child))
        else:
            reorder_linear_layers(child)


def create_engine(
    weights: Weights, device: Device, settings: Settings, reads: Sequence[str] | Path, most: int
) -> tuple[Engine, Any]:
    """Load a model into the configured engine. Return the engine and the model's tokenizer.

    reads: outputs to return, LOGITS or pooling modes (network.py); or the folder of static embeddings. most: maximum
    tokens per row; the model's own limit applies if it is lower.
    Raises ModelError, or UserError if the engine is not installed.
    """
    if isinstance(reads, Path):
        return create_static_engine(weights, device, settings, reads, most)
    config = read_bert(weights) or read_config(weights)
    tokenizer = Tokenizer(weights, min(most, max_row_tokens(config) or most))
    if settings.engine == "onnx":
        # Imported here because ONNX Runtime is optional.
        from feedmill.workers.models.engines.onnx_engine import OnnxEngine  # noqa: PLC0415

        return OnnxEngine(weights, device, reads, tokenizer.pad_id, settings), tokenizer
    if settings.engine != "torch":
        make = load_plugin(settings.engine, f"{PREFIX}ENGINE")
        return make(weights, device, reads, tokenizer.pad_id, settings), tokenizer
    engine = TorchEngine(weights, device, reads, tokenizer.pad_id, tokenizer.max_tokens)
    return engine, tokenizer
