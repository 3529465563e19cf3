"""The ONNX engine: an exported graph, run by ONNX Runtime with its best available provider.

The graph is exported once from the torch model, pooling included, and cached by model, precision, opset and library
versions. For GPUs it is exported in float16; `int8` on a CPU is dynamic quantisation of the float32 graph.
Micro-batches are padded.

TensorRT is configured as ONNX Runtime documents it; Feedmill has not been tested with TensorRT.
"""

import fcntl
import logging
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from feedmill.shared.errors import ModelError, SettingsError, clause
from feedmill.shared.messages import digest
from feedmill.shared.settings import Settings
from feedmill.workers.models.device import TORCH_THREADS, Device
from feedmill.workers.models.engines.network import Network, max_row_tokens, padding_token, read_config
from feedmill.workers.models.tokenizer import Tokens, filled, padded
from feedmill.workers.models.weights import Weights

try:
    import onnx
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic
except ModuleNotFoundError as missing:
    raise SettingsError(
        f"FEEDMILL_ENGINE=onnx requires the package {missing.name}: run `pip install 'feedmill[onnx]'` "
        "(with a GPU, replace onnxruntime by onnxruntime-gpu)."
    ) from None

logger = logging.getLogger(__name__)

#: ONNX operator set version of exported graphs.
OPSET = 18
#: Increase this whenever the export changes: cached graphs of another version are ignored.
GRAPH_VERSION = 1
#: Providers by device type, best first.
PROVIDERS = {
    "cuda": ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"),
    "cpu": ("CPUExecutionProvider",),
}
#: File name of the graph. Weights of more than 2 GB are in a separate file beside it.
GRAPH_FILE = "model.onnx"


class OnnxEngine:
    """A model as an ONNX graph. reads, pad_id: see TorchEngine. Raises ModelError if export or loading fails."""

    home = torch.device("cpu")
    packed = False

    def __init__(self, weights: Weights, device: Device, reads: Sequence[str], pad_id: int, settings: Settings) -> None:
        self.device = device
        config = read_config(weights, settings.trust_remote_code)
        self._pad_id = padding_token(config, pad_id)
        self._most = max_row_tokens(config)
        graph = exported(weights, device.dtype, reads, pad_id, settings)
        options = onnxruntime.SessionOptions()
        # Lanes run in parallel and share the cores.
        options.intra_op_num_threads = max(1, TORCH_THREADS // device.lanes)
        options.log_severity_level = 3
        wanted = PROVIDERS[device.torch.type]
        available = [name for name in wanted if name in onnxruntime.get_available_providers()]
        try:
            self._session: Any = onnxruntime.InferenceSession(
                str(graph), options, providers=[(name, self._options(name, graph.parent)) for name in available]
            )
        except Exception as error:
            raise ModelError(
                f"ONNX Runtime cannot load {graph}: {clause(error)}. Delete the folder {graph.parent} to export the "
                "model again."
            ) from error
        self.provider: str = self._session.get_providers()[0]
        if device.torch.type == "cuda" and self.provider == "CPUExecutionProvider":
            raise ModelError(
                f"ONNX Runtime has no working provider for {device.name}, only for the CPU. Replace onnxruntime by "
                "onnxruntime-gpu for your CUDA version, or set FEEDMILL_DEVICE=cpu or FEEDMILL_ENGINE=torch."
            )
        self._takes_types = any(given.name == "token_type_ids" for given in self._session.get_inputs())
        logger.info("using ONNX Runtime %s with %s", onnxruntime.__version__, self.provider)

    def _options(self, provider: str, folder: Path) -> dict[str, Any]:
        """Return provider options, as documented at https://onnxruntime.ai/docs/execution-providers/."""
        index = str(self.device.torch.index or 0)
        if provider == "TensorrtExecutionProvider":
            return {
                "device_id": index,
                "trt_fp16_enable": self.device.dtype == torch.float16,
                "trt_engine_cache_enable": True,
                "trt_engine_cache_path": str(folder / "tensorrt"),
                "trt_timing_cache_enable": True,
            }
        return {"device_id": index} if provider == "CUDAExecutionProvider" else {}

    def begin(self) -> float:
        return time.perf_counter()

    def forward(self, given_rows: Sequence[Tokens]) -> torch.Tensor:
        rows = filled(given_rows, self.device.shapes.rows(len(given_rows)))
        longest = max(len(row.ids) for row in rows)
        length = self.device.shapes.length(longest)
        longest = max(longest, min(length, self._most or length))
        feed = {
            "input_ids": padded([row.ids for row in rows], longest, self._pad_id),
            "mask": padded([[1] * len(row.ids) for row in rows], longest, 0),
        }
        if self._takes_types:
            feed["token_type_ids"] = padded([row.types or () for row in rows], longest, 0)
        try:
            (read,) = self._session.run(None, {name: tensor.numpy() for name, tensor in feed.items()})
        except Exception as error:
            # ONNX Runtime raises its own types; `device_errors` classifies RuntimeErrors by their text.
            raise RuntimeError(str(error)) from error
        return torch.from_numpy(read)[: len(given_rows)]

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class _Graph(torch.nn.Module):
    """The exported graph: a network that takes a single mask and derives the model's attention mask from it."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(
        self, input_ids: torch.Tensor, mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        real = mask.bool()
        given = real[:, None, None, :] if self.network.takes_ready_mask else mask
        read: torch.Tensor = self.network(input_ids, real, token_type_ids, given)
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
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another worker on this machine may be exporting
            if not (folder / GRAPH_FILE).is_file():
                logger.info("exporting %s to ONNX in %s; this takes a while, once per model", weights.name, precision)
                began = time.monotonic()
                for stale in folder.parent.glob(f"{folder.name}?*/"):  # left by an export that was killed
                    shutil.rmtree(stale, ignore_errors=True)
                temporary = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
                try:
                    _export(weights, dtype, reads, pad_id, temporary, settings.trust_remote_code)
                    shutil.rmtree(folder, ignore_errors=True)  # an incomplete folder without a graph
                    temporary.replace(folder)
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
                logger.info("exported the ONNX graph in %.0f s to %s", time.monotonic() - began, folder)
    except OSError as error:
        raise ModelError(
            f"Cannot store the ONNX graph of {weights.name} in {folder.parent}: {error}. Set "
            "FEEDMILL_CACHE_FOLDER to a writable folder."
        ) from error
    return folder / GRAPH_FILE


def _export(
    weights: Weights, dtype: torch.dtype, reads: Sequence[str], pad_id: int, folder: Path, remote_code: bool
) -> None:
    """Export the model and write the graph to the folder."""
    quantised = dtype == torch.int8
    network = Network(weights, torch.float32 if quantised else dtype, reads, pad_id, remote_code=remote_code)
    example = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])
    inputs = {"input_ids": example, "mask": torch.ones_like(example)}
    if getattr(network.config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = torch.zeros_like(example)
    rows, tokens = torch.export.Dim("rows"), torch.export.Dim("tokens")
    target = folder / ("float.onnx" if quantised else GRAPH_FILE)
    try:
        with torch.inference_mode(), _quiet():
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
        if quantised:
            _quantise(target, folder / GRAPH_FILE)
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise ModelError(
            f"{weights.name} cannot be exported to ONNX ({first:.300}). Set FEEDMILL_ENGINE=torch."
        ) from error


def _quantise(source: Path, target: Path) -> None:
    """Quantise weights to int8 and delete `source`. Activations are quantised at run time."""
    graph = onnx.load(source)
    # The exporter records shapes of transposed weights that contradict the quantiser's shape inference.
    del graph.graph.value_info[:]
    with _quiet():
        # A scale per channel: a single scale per tensor changed the label of twice as many posts.
        quantize_dynamic(graph, target, per_channel=True, weight_type=QuantType.QInt8, use_external_data_format=True)
    for path in source.parent.iterdir():
        if not path.name.startswith(target.name):
            path.unlink()


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
