"""The torch engine: run a transformers model on micro-batches of token rows.

`create_engine` creates it or another.

A micro-batch has one of two layouts:

- padded: [rows, longest row], with a mask. Works on GPUs and for every model. On CUDA, rows and
  lengths are padded further, to one of a few shapes (shapes.py).
- packed: the rows concatenated into a single sequence in which each row attends only to itself
  (packing.py). Nothing is computed for padding, and attention needs no mask (on a CPU in half
  precision, a mask costs a quarter of the forward pass). Requires an architecture of
  PACKABLE_TYPES, and a CPU or a GPU with a kernel for it (`_runs`).

Relies on torch's private operators `_reorder_linear_weight` and `_linear_pointwise`. Without them,
weights keep their order.
"""

import logging
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from feedmill.shared.errors import DeviceFull
from feedmill.shared.settings import PREFIX, Settings
from feedmill.workers.models.device import GRAPH_DTYPES, Device, onednn_has_bfloat16
from feedmill.workers.models.engines import Engine, device_errors, to_device
from feedmill.workers.models.engines.bert import WORD_EMBEDDINGS, Bert, read_bert
from feedmill.workers.models.engines.packing import (
    LENGTH_STEP,
    LOGITS,
    PACKABLE_TYPES,
    TOKEN_STEP,
    groups_of,
    single_group,
)
from feedmill.workers.models.engines.separation import check_rows, in_float32
from feedmill.workers.models.engines.spreading import DeviceMapper, device_mapper
from feedmill.workers.models.engines.static_engine import create_static_engine
from feedmill.workers.models.files import WEIGHTS_FILE
from feedmill.workers.models.plugins import load_plugin
from feedmill.workers.models.tensors import TensorFile
from feedmill.workers.models.tokenizer import Tokenizer, Tokens, padded
from feedmill.workers.models.weights import Weights, read_config

logger = logging.getLogger(__name__)

#: Architectures whose linear layers are replaced: those that call the layers and never read their
#: weights. Tests compare each with transformers' own model.
REORDERED_TYPES = PACKABLE_TYPES | {"bart", "deberta-v2", "mpnet"}


def use_attention_without_plans(device: Device) -> None:
    """Exclude cuDNN from torch's implementations of attention in this process, if the device is a
    CUDA GPU.

    On Hopper and Blackwell (sm90, sm100) torch tries cuDNN first, even with a padding mask. cuDNN
    builds an execution plan for each new combination of rows and length, which takes tens to
    hundreds of milliseconds and blocks the device thread. The other implementations (flash,
    memory-efficient) need no plans.
    """
    if device.torch.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


class TorchEngine:
    """A transformers model on its device.

    reads: outputs to return, LOGITS or pooling modes (network.py). pad_id: padding token if the
    model names
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
        half = device.dtype != torch.float32
        device_type = device.torch.type
        on_gpu = device_type == "cuda"
        self._token_step = 1
        self._length_step = 1
        if half:
            self._token_step = TOKEN_STEP
            self._length_step = LENGTH_STEP
        self._most = most
        map_devices = device_mapper(device)
        suits_packing = device_type == "cpu"
        if on_gpu:
            suits_packing = half
        load = partial(
            self._load,
            weights=weights,
            reads=reads,
            pad_id=pad_id,
            reorders=reordered and can_reorder(device),
            map_devices=map_devices,
        )
        load(packs=packed and map_devices is None and suits_packing)
        if self.packed and on_gpu and not self._runs():
            load(packs=False)

    def _load(
        self,
        weights: Weights,
        reads: Sequence[str],
        pad_id: int,
        *,
        packs: bool,
        reorders: bool,
        map_devices: DeviceMapper | None,
    ) -> None:
        """Load the model. packs, reorders: do so where it is possible. map_devices: see
        `load_pretrained`.
        """
        config = None
        embeds = tuple(reads) != LOGITS
        if packs and embeds:
            config = read_bert(weights)
        if config is not None:
            self.network = Bert(
                weights=weights,
                config=config,
                device=self.device,
                reads=reads,
                reordered=reorders,
            )
            self.packed = True
            self.separates_rows = True
        else:
            self._load_network(
                weights=weights,
                reads=reads,
                pad_id=pad_id,
                packs=packs,
                reorders=reorders,
                map_devices=map_devices,
            )
        self._first_position: int = self.network.first_position
        self._pad_id: int = self.network.pad_id

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Compute in float32 within the block. Raises DeviceFull."""
        with device_errors(), in_float32(self.network):
            yield

    def _runs(self) -> bool:
        """Return whether torch attends within rows of any length on this GPU, in this precision
        and head size.
        """
        row = Tokens([0])
        try:
            self.forward([row])
        # Torch before 2.11 has another function, or none.
        except (RuntimeError, TypeError, ImportError):
            return False
        return True

    def _load_network(
        self,
        weights: Weights,
        reads: Sequence[str],
        pad_id: int,
        *,
        packs: bool,
        reorders: bool,
        map_devices: DeviceMapper | None,
    ) -> None:
        """Load the model with transformers."""
        from feedmill.workers.models.engines import network  # noqa: PLC0415 - takes seconds

        config = read_config(weights)
        # Remote code may claim a known model type and behave differently.
        has_own_code = weights.remote_code and getattr(config, "auto_map", None)
        is_library_code = not has_own_code
        # An encoder that is configured as a decoder attends to earlier tokens alone, which packing
        # does not.
        is_causal = getattr(config, "is_decoder", False)
        model_type = config.model_type
        self.packed = (
            packs and is_library_code and model_type in PACKABLE_TYPES and not is_causal
        )
        #: True if tests have shown that rows do not change each other's outputs; else they are to
        #: be measured.
        self.separates_rows = network.separates_rows(weights, config)
        attention = None
        if self.packed:
            attention = network.PACKED
        elif is_library_code and model_type in network.PADDED_TYPES:
            attention = network.PADDED
        self.network = network.Network(
            weights=weights,
            dtype=self.device.dtype,
            reads=reads,
            pad_id=pad_id,
            attention=attention,
            map_devices=map_devices,
        )
        if map_devices is None:
            self.network.to(self.home)
        # Reordered layers cannot compute in float32, as the measurement does.
        is_reorderable = self.separates_rows and model_type in REORDERED_TYPES
        if reorders and is_reorderable:
            reorder_linear_layers(self.network)

    @torch.inference_mode()
    def forward(self, rows: Sequence[Tokens]) -> torch.Tensor:
        """Run one micro-batch; return each row's outputs, [rows, …] in float32, on the device.

        Fastest for rows sorted by length.
        """
        if self.packed:
            return self._packed_forward(rows)
        return self._padded_forward(rows)

    def _packed_forward(self, rows: Sequence[Tokens]) -> torch.Tensor:
        row_ids = []
        lengths = []
        for row in rows:
            row_ids.append(row.ids)
            lengths.append(len(row.ids))
        rest = -sum(lengths) % self._token_step
        padding = [self._pad_id] * rest
        ids = _join(row_ids, padding)
        # Each token after all rows is a row by itself.
        row_lengths = lengths + [1] * rest
        positions = self._positions(ids, row_lengths)
        inputs = [ids, positions]
        if any(row.types for row in rows):
            types = []
            for row in rows:
                no_types = [0] * len(row.ids)
                types.append(row.types or no_types)
            padding_types = [0] * rest
            inputs.append(_join(types, padding_types))
        home = self.device.torch
        put = partial(to_device, device=home)
        if home.type == "cpu":
            groups = groups_of(
                lengths,
                self._length_step,
                self.device.dtype,
            )
        else:
            group = single_group(lengths, rest, put)
            groups = [group]
        tensors = []
        for numbers in inputs:
            tensor = torch.from_numpy(numbers)
            batch = tensor[None]  # [1, tokens]
            tensors.append(put(batch))
        outputs: torch.Tensor = self.network.packed(groups, *tensors)
        return outputs

    def _positions(self, ids: Any, lengths: Sequence[int]) -> Any:
        """Return the position of each token of rows that follow each other, [tokens]. ids:
        likewise.

        Models whose positions start after the padding token's id count only real tokens: a padding
        token that occurs in a text gets its own id as its position.
        """
        padding = self._first_position - 1
        real = ids != padding
        counted = real.cumsum()
        starts = np.cumsum([0, *lengths[:-1]])
        counted_before = np.append(0, counted)
        before_rows = counted_before[starts]  # [rows]
        before_tokens = before_rows.repeat(lengths)  # [tokens]
        counted_in_row = counted - before_tokens
        return counted_in_row * real + padding

    def _padded_forward(self, rows: Sequence[Tokens]) -> torch.Tensor:
        ids, mask, types = padded(
            rows,
            pad_id=self._pad_id,
            max_tokens=self._most,
            shapes=self._shapes,
        )
        # Rows of equal length need no mask; where shapes are few, each has one, so that a shape is
        # a single program.
        masked = self._shapes.few or not mask.all()
        home = self.device.torch
        ids = to_device(ids, home)
        mask = to_device(mask, home)
        if types is not None:
            types = to_device(types, home)
        attention_mask = None
        if masked:
            attention_mask = mask.long()
        outputs: torch.Tensor = self.network(
            ids,
            mask,
            types,
            attention_mask,
        )
        row_count = len(rows)
        return outputs[:row_count]


def _join(rows: Sequence[Sequence[int]], rest: Sequence[int]) -> Any:
    """Return the numbers of rows that follow each other, and then the rest: [tokens]."""
    numbers = chain(*rows, rest)
    return np.fromiter(numbers, np.int64)


class ReorderedLinear(torch.nn.Module):
    """A linear layer for inference. Its weights have no gradients and belong to no state_dict."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.bias: torch.Tensor | None = None
        if linear.bias is not None:
            self.bias = linear.bias.detach()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            states,
            self.weight,
            self.bias,
            "none",
            [],
            "",
        )
        return product


def can_reorder(device: Device) -> bool:
    """Return whether this machine's oneDNN gains from reordered weights in the device's
    precision.
    """
    if device.torch.type != "cpu" or device.dtype != torch.bfloat16:
        return False
    machine = platform.machine()
    if machine.lower() not in ("x86_64", "amd64"):
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    operators = torch.ops.mkldnn
    return (
        onednn_has_bfloat16()
        and hasattr(operators, "_reorder_linear_weight")
        and hasattr(operators, "_linear_pointwise")
    )


def reorder_linear_layers(module: torch.nn.Module) -> None:
    """Replace the linear layers within a module, one by one, so that no more than one has its
    weights twice.
    """
    for name, child in module.named_children():
        if type(child) is torch.nn.Linear:  # subclasses may be read by their owners
            reordered = ReorderedLinear(child)
            setattr(module, name, reordered)
        else:
            reorder_linear_layers(child)


def create_engine(
    weights: Weights,
    device: Device,
    settings: Settings,
    reads: Sequence[str] | Path,
    most: int,
) -> tuple[Engine, Any]:
    """Load a model into the configured engine. Return the engine and the model's tokenizer.

    reads: outputs to return, LOGITS or pooling modes (network.py); or the folder of static
    embeddings. most: maximum tokens per row; the model's own limit applies if it is lower.
    Raises ModelError, or UserError if the engine is not installed.
    """
    if isinstance(reads, Path):
        return create_static_engine(weights, device, settings, reads, most)
    tokenizer = Tokenizer(
        weights,
        max_tokens=_max_row_tokens(weights, most),
        vocabulary=_vocabulary(weights),
    )
    if settings.engine in GRAPH_DTYPES:
        onnx_engine = _create_onnx_engine(
            weights=weights,
            device=device,
            settings=settings,
            reads=reads,
            tokenizer=tokenizer,
        )
        return onnx_engine, tokenizer
    if settings.engine != "torch":
        create_plugin = load_plugin(settings.engine, f"{PREFIX}ENGINE")
        plugin: Engine = create_plugin(
            weights,
            device,
            reads,
            tokenizer.pad_id,
            settings,
        )
        if not _is_separate(weights, reads):
            _check_other_engine(
                weights=weights,
                engine=plugin,
                device=device,
                reads=reads,
                tokenizer=tokenizer,
            )
        return plugin, tokenizer
    engine = TorchEngine(
        weights=weights,
        device=device,
        reads=reads,
        pad_id=tokenizer.pad_id,
        most=tokenizer.max_tokens,
    )
    if not engine.separates_rows:
        _check_rows(weights, engine, tokenizer)
    return engine, tokenizer


def _create_onnx_engine(
    weights: Weights,
    device: Device,
    settings: Settings,
    reads: Sequence[str],
    tokenizer: Tokenizer,
) -> Engine:
    """Load a model into ONNX Runtime, and check that its rows do not change each other's
    outputs.
    """
    # Imported here because ONNX Runtime is optional.
    from feedmill.workers.models.engines.onnx_engine import OnnxEngine  # noqa: PLC0415

    engine = OnnxEngine(
        weights,
        device,
        reads,
        tokenizer.pad_id,
        settings,
        tokenizer.max_tokens,
    )
    if not engine.separates_rows:
        _check_other_engine(
            weights=weights,
            engine=engine,
            device=device,
            reads=reads,
            tokenizer=tokenizer,
        )
    return engine


def _is_separate(weights: Weights, reads: Sequence[str]) -> bool:
    """Return whether tests have shown that the model's rows do not change each other's outputs."""
    embeds = tuple(reads) != LOGITS
    if embeds and read_bert(weights) is not None:
        return True
    from feedmill.workers.models.engines import network  # noqa: PLC0415 - takes seconds

    config = read_config(weights)
    return network.separates_rows(weights, config)


def _check_other_engine(
    weights: Weights,
    engine: Engine,
    device: Device,
    reads: Sequence[str],
    tokenizer: Tokenizer,
) -> None:
    """Raise ModelError if rows change each other's outputs in an engine that cannot change its
    precision.
    """
    exact = engine
    max_tokens = tokenizer.max_tokens
    # The engine of another precision computes the same network.
    if device.dtype != torch.float32:
        on_cpu = Device(torch.device("cpu"), torch.float32, "for comparison")
        exact = TorchEngine(
            weights=weights,
            device=on_cpu,
            reads=reads,
            pad_id=tokenizer.pad_id,
            most=max_tokens,
        )
    check_rows(
        weights.name,
        exact.forward,
        tokenizer.encode,
        max_tokens,
    )


def _check_rows(weights: Weights, engine: TorchEngine, tokenizer: Tokenizer) -> None:
    """Raise ModelError if rows change each other's outputs.

    Logs a warning if the device lacks the memory to see it.
    """
    try:
        with engine.in_float32():
            check_rows(
                weights.name,
                engine.forward,
                tokenizer.encode,
                tokenizer.max_tokens,
            )
    except DeviceFull:
        engine.device.give_back()
        logger.warning(
            "cannot check whether other posts change a post's scores with %s: the device lacks "
            "the memory for it in float32",
            weights.name,
        )


def _vocabulary(weights: Weights) -> int | None:
    """Return for how many tokens the model has a vector; None if its configuration does
    not say.
    """
    # its table may have another size than the configuration says
    if read_bert(weights) is not None:
        file = TensorFile(weights.folder / WEIGHTS_FILE)
        table = file.places[WORD_EMBEDDINGS]  # [tokens, dimensions]
        return table.shape[0]
    text_config = read_config(weights).get_text_config()
    vocabulary = getattr(text_config, "vocab_size", None)
    if isinstance(vocabulary, int):
        return vocabulary
    return None


def _max_row_tokens(weights: Weights, most: int) -> int:
    """Return how many tokens of a row the model reads, up to `most`."""
    bert = read_bert(weights)
    if bert is not None:
        positions: int = bert.max_position_embeddings
        return min(most, positions)
    from feedmill.workers.models.engines import network  # noqa: PLC0415 - takes seconds

    return network.max_row_tokens(weights, most)
