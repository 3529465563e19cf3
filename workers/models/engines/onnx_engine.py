"""The ONNX engine: an exported graph, run by ONNX Runtime with its best available provider, or by
TensorRT through it.

The graph is exported once from the torch model, pooling included, and cached by model, precision,
opset and library versions. For GPUs it is exported in float16; `int8` on a CPU is dynamic
quantisation of the float32 graph, also cached. TensorRT builds an engine from the same graph,
which ONNX Runtime caches beside it.
"""

import logging
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from feedmill.shared.errors import ModelError, explain_missing
from feedmill.shared.messages import digest
from feedmill.shared.settings import Settings
from feedmill.workers.models.device import Device
from feedmill.workers.models.engines.network import (
    Network,
    max_row_tokens,
    padding_token,
    separates_rows,
)
from feedmill.workers.models.engines.separation import TOLERANCE, relative_difference
from feedmill.workers.models.engines.tensorrt import (
    TENSORRT,
    check_available,
    provider_options,
)
from feedmill.workers.models.files import loading
from feedmill.workers.models.tokenizer import Tokens, padded
from feedmill.workers.models.weights import Weights, read_config

# with a GPU, onnxruntime-gpu replaces onnxruntime
with explain_missing("FEEDMILL_ENGINE=onnx", "onnx"):
    import onnx
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

logger = logging.getLogger(__name__)

#: ONNX operator set version of exported graphs.
OPSET = 18
#: Increase this whenever the export changes: cached graphs of another version are ignored.
GRAPH_VERSION = 2
#: Packages on which an exported graph depends.
EXPORT_PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")
#: Lengths of the rows that a new graph is checked with, as shares of the maximum.
CHECKED_SHARES = (1, 0.5, 0.02)
CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"
#: File name of the graph. Weights of more than 2 GB are in a separate file beside it.
GRAPH_FILE = "model.onnx"


class OnnxEngine:
    """A model as an ONNX graph.

    reads, pad_id: see TorchEngine. max_tokens: maximum tokens per row. Raises ModelError if export
    or loading fails, and SettingsError if ONNX Runtime lacks TensorRT, but the settings ask for
    it.
    """

    home = torch.device("cpu")
    packed = False

    def __init__(
        self,
        weights: Weights,
        device: Device,
        reads: Sequence[str],
        pad_id: int,
        settings: Settings,
        max_tokens: int,
    ) -> None:
        available = onnxruntime.get_available_providers()
        if settings.engine == "tensorrt":
            check_available(available)
        config = read_config(weights)
        #: See TorchEngine.
        self.separates_rows = separates_rows(weights, config)
        self._pad_id = padding_token(config, pad_id)
        self._max_tokens = max_row_tokens(weights, settings.max_tokens)
        graph = exported(
            weights,
            device.dtype,
            reads,
            pad_id,
            settings,
        )
        providers: list[Any] = [CPU]
        if device.torch.type == "cuda" and CUDA in available:
            number = device.torch.index or 0
            cuda_options = {"device_id": str(number)}
            providers.insert(0, (CUDA, cuda_options))
        if settings.engine == "tensorrt":
            rounded_length = device.shapes.length(max_tokens)
            allowed_length = min(rounded_length, self._max_tokens)
            tensorrt_options = provider_options(
                device,
                graph.parent,
                input_names(graph),
                settings.batch_rows,
                max(max_tokens, allowed_length),
            )
            providers.insert(0, (TENSORRT, tensorrt_options))
            logger.info(
                "TensorRT builds an engine in %s, or loads it; this takes minutes, once per GPU",
                graph.parent,
            )
        began = time.monotonic()
        advice = f"Delete the folder {graph.parent} to export the model again."
        with loading(f"the graph {graph}", advice):
            self._session: Any = onnxruntime.InferenceSession(
                str(graph),
                _session_options(device),
                providers=providers,
            )
        seconds = time.monotonic() - began
        self.provider: str = self._session.get_providers()[0]
        _check_provider(self.provider, weights, device, settings)
        #: Says the provider, too, which `feedmill status` then shows.
        self.device = device._replace(
            reason=(f"{device.reason}, {self.provider} ready in {seconds:.0f} s")
        )
        self._takes_types = _takes_types(self._session)
        logger.info(
            "using ONNX Runtime %s with %s, ready in %.1f s",
            onnxruntime.__version__,
            self.provider,
            seconds,
        )

    def forward(self, rows: Sequence[Tokens]) -> torch.Tensor:
        ids, mask, types = padded(
            rows,
            pad_id=self._pad_id,
            max_tokens=self._max_tokens,
            shapes=self.device.shapes,
        )
        feed = {
            "input_ids": ids,
            "mask": mask.long(),
        }
        if self._takes_types:
            if types is None:
                types = torch.zeros_like(ids)
            feed["token_type_ids"] = types
        try:
            outputs = _run(self._session, feed)
        except Exception as error:
            # ONNX Runtime raises its own types; `device_errors` classifies RuntimeErrors by their
            # text.
            raise RuntimeError(str(error)) from error
        return outputs[: len(rows)]


def _takes_types(session: Any) -> bool:
    """Return whether a graph reads token types."""
    names = [graph_input.name for graph_input in session.get_inputs()]
    return "token_type_ids" in names


def _run(session: Any, feed: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the outputs of a graph. feed: its inputs by name."""
    arrays = {name: tensor.numpy() for name, tensor in feed.items()}
    (outputs,) = session.run(None, arrays)
    return torch.from_numpy(outputs)


def input_names(graph: Path) -> list[str]:
    """Return the names of a graph's inputs."""
    model = onnx.load(graph, load_external_data=False)
    return [graph_input.name for graph_input in model.graph.input]


class _Graph(torch.nn.Module):
    """The exported graph: a network that takes a single mask."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(
        self,
        input_ids: torch.Tensor,
        mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        outputs: torch.Tensor = self.network(
            input_ids,
            mask.bool(),
            token_type_ids,
            mask,
        )
        return outputs


def _session_options(device: Device) -> Any:
    options = onnxruntime.SessionOptions()
    # Lanes run in parallel and share the cores.
    threads = device.threads // device.lanes
    options.intra_op_num_threads = max(1, threads)
    options.log_severity_level = 3
    return options


def _check_provider(
    provider: str, weights: Weights, device: Device, settings: Settings
) -> None:
    """Raise ModelError if ONNX Runtime fell back to another provider than the one asked for."""
    if settings.engine == "tensorrt" and provider != TENSORRT:
        raise ModelError(
            f"ONNX Runtime could not start TensorRT for {weights.name} and chose "
            f"{provider}; the log above says why. Install the TensorRT libraries of its "
            "version, or set FEEDMILL_ENGINE=onnx."
        )
    if device.torch.type == "cuda" and provider == CPU:
        raise ModelError(
            f"ONNX Runtime has no working provider for {device.name}, only for the CPU. "
            "Replace onnxruntime by onnxruntime-gpu for your CUDA version, or set "
            "FEEDMILL_DEVICE=cpu or FEEDMILL_ENGINE=torch."
        )


def exported(
    weights: Weights,
    dtype: torch.dtype,
    reads: Sequence[str],
    pad_id: int,
    settings: Settings,
) -> Path:
    """Return the path of the graph, exporting it first if it is not cached. Raises ModelError."""
    precision = str(dtype).removeprefix("torch.")
    config_file = weights.folder / "config.json"
    versions = map(version, EXPORT_PACKAGES)
    outputs = ",".join(reads)
    identity = digest(
        weights.sha256,
        config_file.read_text(),
        f"{precision} {outputs} {pad_id} {OPSET} {GRAPH_VERSION}",
        *versions,
    )
    folder = settings.cache_folder / "onnx" / identity
    graph = folder / GRAPH_FILE
    if graph.is_file():
        return graph
    logger.info(
        "exporting %s to ONNX in %s; this takes a while, once per model",
        weights.name,
        precision,
    )
    began = time.monotonic()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=folder.name, dir=folder.parent
        ) as temporary:
            new_folder = Path(temporary) / "graph"
            new_folder.mkdir()
            new_graph = new_folder / GRAPH_FILE
            _write_graph(
                new_graph,
                weights,
                dtype,
                reads,
                pad_id,
                settings,
            )
            try:
                new_folder.rename(folder)
            except OSError:
                # else another worker on this machine was faster
                if not graph.is_file():
                    raise
    except OSError as error:
        raise ModelError(
            f"Cannot store the ONNX graph of {weights.name} in {folder.parent}: {error}. Set "
            "FEEDMILL_CACHE_FOLDER to a writable folder."
        ) from error
    seconds = time.monotonic() - began
    logger.info("exported the ONNX graph in %.0f s to %s", seconds, folder)
    return graph


def _write_graph(
    graph: Path,
    weights: Weights,
    dtype: torch.dtype,
    reads: Sequence[str],
    pad_id: int,
    settings: Settings,
) -> None:
    """Export the model to the file `graph`, and check the graph. Raises ModelError."""
    with loading(f"{weights.name} into ONNX", "Set FEEDMILL_ENGINE=torch."), _quiet():
        if dtype == torch.int8:
            source = exported(
                weights,
                torch.float32,
                reads,
                pad_id,
                settings,
            )
            _quantise(source, graph)
            return
        network = Network(weights, dtype, reads, pad_id)
        _export(network, graph)
        if dtype == torch.float32:
            most = max_row_tokens(weights, settings.max_tokens)
            _check_graph(network, graph, most)


@torch.inference_mode()
def _export(network: Network, target: Path) -> None:
    example = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])
    inputs = {
        "input_ids": example,
        "mask": torch.ones_like(example),
    }
    type_count = getattr(network.config, "type_vocab_size", 0)
    if type_count > 1:
        inputs["token_type_ids"] = torch.zeros_like(example)
    rows = torch.export.Dim("rows")
    tokens = torch.export.Dim("tokens")
    torch.onnx.export(
        _Graph(network).eval(),
        kwargs=inputs,
        f=target,
        dynamo=True,
        opset_version=OPSET,
        input_names=list(inputs),
        output_names=["read"],
        dynamic_shapes={name: {0: rows, 1: tokens} for name in inputs},
        verbose=False,
    )


@torch.inference_mode()
def _check_graph(network: Network, file: Path, most: int) -> None:
    """Raise ValueError unless the graph's outputs are the network's for rows of up to `most`
    tokens.

    The exporter follows the network's code for the few tokens of its example. Code that decides by
    the number of tokens may do something else for more of them.
    """
    session: Any = onnxruntime.InferenceSession(str(file), providers=[CPU])
    text_config = network.config.get_text_config()
    vocabulary = getattr(text_config, "vocab_size", most)
    numbers = torch.arange(1, most + 1)
    tokens = numbers.remainder(vocabulary)
    row_count = len(CHECKED_SHARES)
    ids = tokens.expand(row_count, -1)  # [rows, most]
    lengths = []
    for share in CHECKED_SHARES:
        length = int(most * share)
        lengths.append(max(1, length))
    row_lengths = torch.tensor(lengths)
    mask = torch.arange(most) < row_lengths[:, None]  # [rows, most]
    attention_mask = mask.long()
    feed = {
        "input_ids": ids,
        "mask": attention_mask,
    }
    types = None
    if _takes_types(session):
        types = torch.zeros_like(ids)
        feed["token_type_ids"] = types
    outputs = _run(session, feed)
    expected = network(ids, mask, types, attention_mask)
    difference = relative_difference(outputs, expected)
    if not difference <= TOLERANCE:
        raise ValueError(
            f"for rows of up to {most} tokens, the graph's outputs differ from the model's by "
            f"{difference:.1%}"
        )


def _quantise(source: Path, target: Path) -> None:
    """Quantise weights to int8. Activations are quantised at run time."""
    graph = onnx.load(source)
    # The exporter records shapes of transposed weights that contradict the quantiser's shape
    # inference.
    del graph.graph.value_info[:]
    # A scale per channel: a single scale per tensor changed the label of twice as many posts.
    quantize_dynamic(
        graph,
        target,
        per_channel=True,
        weight_type=QuantType.QInt8,
        use_external_data_format=True,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress log messages and warnings of the exporter and the quantiser."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(previous)
