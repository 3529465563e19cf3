"""The ONNX engine: an exported graph, run by ONNX Runtime with its best available provider.

The graph is exported once from the torch model, pooling included, and cached by model, precision, opset and library
versions. For GPUs it is exported in float16; `int8` on a CPU is dynamic quantisation of the float32 graph, also cached.
"""

import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from feedmill.shared.errors import ModelError, explain_missing
from feedmill.shared.messages import digest
from feedmill.shared.settings import Settings
from feedmill.workers.models.device import TORCH_THREADS, Device
from feedmill.workers.models.engines.network import Network, padding_token
from feedmill.workers.models.tokenizer import Tokens, padded
from feedmill.workers.models.weights import Weights, loading, max_row_tokens, read_config

with explain_missing("FEEDMILL_ENGINE=onnx", "onnx"):  # with a GPU, onnxruntime-gpu replaces onnxruntime
    import onnx
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

logger = logging.getLogger(__name__)

#: ONNX operator set version of exported graphs.
OPSET = 18
#: Increase this whenever the export changes: cached graphs of another version are ignored.
GRAPH_VERSION = 1
CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
#: File name of the graph. Weights of more than 2 GB are in a separate file beside it.
GRAPH_FILE = "model.onnx"


class OnnxEngine:
    """A model as an ONNX graph. reads, pad_id: see TorchEngine. Raises ModelError if export or loading fails."""

    home = torch.device("cpu")
    packed = False

    def __init__(self, weights: Weights, device: Device, reads: Sequence[str], pad_id: int, settings: Settings) -> None:
        self.device = device
        config = read_config(weights)
        self._pad_id = padding_token(config, pad_id)
        self._most = max_row_tokens(config) or sys.maxsize
        graph = exported(weights, device.dtype, reads, pad_id, settings)
        options = onnxruntime.SessionOptions()
        # Lanes run in parallel and share the cores.
        options.intra_op_num_threads = max(1, TORCH_THREADS // device.lanes)
        options.log_severity_level = 3
        providers: list[Any] = [CPU]
        if device.torch.type == "cuda" and CUDA in onnxruntime.get_available_providers():
            providers = [(CUDA, {"device_id": str(device.torch.index or 0)}), CPU]
        with loading(f"the graph {graph}", f"Delete the folder {graph.parent} to export the model again."):
            self._session: Any = onnxruntime.InferenceSession(str(graph), options, providers=providers)
        self.provider: str = self._session.get_providers()[0]
        if device.torch.type == "cuda" and self.provider == CPU:
            raise ModelError(
                f"ONNX Runtime has no working provider for {device.name}, only for the CPU. Replace onnxruntime by "
                "onnxruntime-gpu for your CUDA version, or set FEEDMILL_DEVICE=cpu or FEEDMILL_ENGINE=torch."
            )
        self._takes_types = any(given.name == "token_type_ids" for given in self._session.get_inputs())
        logger.info("using ONNX Runtime %s with %s", onnxruntime.__version__, self.provider)

    def forward(self, rows: Sequence[Tokens]) -> torch.Tensor:
        ids, mask, types = padded(rows, self._pad_id, self._most, self.device.shapes)
        feed = {"input_ids": ids, "mask": mask.long()}
        if self._takes_types:
            feed["token_type_ids"] = torch.zeros_like(ids) if types is None else types
        try:
            (read,) = self._session.run(None, {name: tensor.numpy() for name, tensor in feed.items()})
        except Exception as error:
            # ONNX Runtime raises its own types; `device_errors` classifies RuntimeErrors by their text.
            raise RuntimeError(str(error)) from error
        return torch.from_numpy(read)[: len(rows)]


class _Graph(torch.nn.Module):
    """The exported graph: a network that takes a single mask."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(
        self, input_ids: torch.Tensor, mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        read: torch.Tensor = self.network(input_ids, mask.bool(), token_type_ids, mask)
        return read


def exported(weights: Weights, dtype: torch.dtype, reads: Sequence[str], pad_id: int, settings: Settings) -> Path:
    """Return the path of the graph, exporting it first if it is not cached. Raises ModelError."""
    precision = str(dtype).removeprefix("torch.")
    config = (weights.folder / "config.json").read_text()
    versions = (version(name) for name in ("torch", "transformers", "onnx", "onnxscript", "onnxruntime"))
    kind = f"{precision} {','.join(reads)} {pad_id} {OPSET} {GRAPH_VERSION}"
    identity = (weights.sha256, config, kind, *versions)
    folder = settings.cache_folder / "onnx" / digest(*identity)
    if (folder / GRAPH_FILE).is_file():
        return folder / GRAPH_FILE
    logger.info("exporting %s to ONNX in %s; this takes a while, once per model", weights.name, precision)
    began = time.monotonic()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=folder.name, dir=folder.parent) as temporary:
            made = Path(temporary) / "graph"
            made.mkdir()
            with loading(f"{weights.name} into ONNX", "Set FEEDMILL_ENGINE=torch."), _quiet():
                if dtype == torch.int8:
                    _quantise(exported(weights, torch.float32, reads, pad_id, settings), made / GRAPH_FILE)
                else:
                    _export(Network(weights, dtype, reads, pad_id), made / GRAPH_FILE)
            try:
                made.rename(folder)
            except OSError:
                if not (folder / GRAPH_FILE).is_file():  # else another worker on this machine was faster
                    raise
    except OSError as error:
        raise ModelError(
            f"Cannot store the ONNX graph of {weights.name} in {folder.parent}: {error}. Set "
            "FEEDMILL_CACHE_FOLDER to a writable folder."
        ) from error
    logger.info("exported the ONNX graph in %.0f s to %s", time.monotonic() - began, folder)
    return folder / GRAPH_FILE


@torch.inference_mode()
def _export(network: Network, target: Path) -> None:
    example = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])
    inputs = {"input_ids": example, "mask": torch.ones_like(example)}
    if getattr(network.config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = torch.zeros_like(example)
    rows, tokens = torch.export.Dim("rows"), torch.export.Dim("tokens")
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


def _quantise(source: Path, target: Path) -> None:
    """Quantise weights to int8. Activations are quantised at run time."""
    graph = onnx.load(source)
    # The exporter records shapes of transposed weights that contradict the quantiser's shape inference.
    del graph.graph.value_info[:]
    # A scale per channel: a single scale per tensor changed the label of twice as many posts.
    quantize_dynamic(graph, target, per_channel=True, weight_type=QuantType.QInt8, use_external_data_format=True)


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
