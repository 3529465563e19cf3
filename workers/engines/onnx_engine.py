"""The ONNX engine: the model as a graph, run by ONNX Runtime with the best of its providers that is there.

The graph is exported once from the torch model, with what is read off it (network.py) inside, and kept in the cache
folder by model, precision, opset and library versions. For a GPU it is exported in float16; `int8` on a CPU is dynamic
quantisation of the float32 graph. Micro-batches are padded.

TensorRT is asked for through the options that ONNX Runtime documents, and has not been run by us.
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

import numpy as np
import torch

from shared.errors import ModelError, SettingsError, clause
from shared.messages import digest
from shared.settings import Settings
from workers.device import CORES, Device
from workers.engines.network import Network, filler, read_config
from workers.tokenizer import Tokens
from workers.weights import Weights

try:
    import onnx
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic
except ModuleNotFoundError as missing:
    raise SettingsError(
        f"FEEDMILL_ENGINE=onnx needs {missing.name}, which `pip install 'feedmill[onnx]'` brings "
        "(onnxruntime-gpu instead of onnxruntime for a GPU)."
    ) from None

logger = logging.getLogger(__name__)

#: Version of the operators that a graph is written in.
OPSET = 18
#: Raised whenever what is exported, or how, changes: graphs of another version are not used.
GRAPH_VERSION = 1
#: Providers in the order in which they are wanted, by the kind of device.
PROVIDERS = {
    "cuda": ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"),
    "cpu": ("CPUExecutionProvider",),
}
#: The graph's file in its folder; weights of more than 2 GB lie beside it.
GRAPH = "model.onnx"


class OnnxEngine:
    """A model as a graph. reads, pad_id: see TorchEngine. Raises ModelError where the model cannot be exported."""

    #: Where `forward` leaves its tensors: on the host.
    home = torch.device("cpu")
    packed = False

    def __init__(self, weights: Weights, device: Device, reads: Sequence[str], pad_id: int, settings: Settings) -> None:
        self.device = device
        self._pad_id = filler(read_config(weights, settings.trust_remote_code), pad_id)
        graph = exported(weights, device.dtype, reads, pad_id, settings)
        options = onnxruntime.SessionOptions()
        # Lanes run side by side, each on a core of its own.
        options.intra_op_num_threads = max(1, CORES // device.lanes)
        options.log_severity_level = 3
        wanted = PROVIDERS[device.torch.type]
        there = [name for name in wanted if name in onnxruntime.get_available_providers()]
        try:
            self._session: Any = onnxruntime.InferenceSession(
                str(graph), options, providers=[(name, self._options(name, graph.parent)) for name in there]
            )
        except Exception as error:
            raise ModelError(
                f"ONNX Runtime cannot load {graph}: {clause(error)}. Delete its folder to export it anew."
            ) from error
        self.provider: str = self._session.get_providers()[0]
        if device.torch.type == "cuda" and self.provider == "CPUExecutionProvider":
            raise ModelError(
                f"ONNX Runtime has no working provider for {device.name} here, only the CPU's: install onnxruntime-gpu "
                "in place of onnxruntime, for the CUDA version that is here; or set FEEDMILL_DEVICE=cpu, or the engine "
                "torch."
            )
        self._takes_types = any(given.name == "token_type_ids" for given in self._session.get_inputs())
        logger.info("ONNX Runtime %s with %s", onnxruntime.__version__, self.provider)

    def _options(self, provider: str, folder: Path) -> dict[str, Any]:
        """As https://onnxruntime.ai/docs/execution-providers/ has them."""
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

    def forward(self, rows: Sequence[Tokens]) -> torch.Tensor:
        longest = max(len(row.ids) for row in rows)
        feed = {
            "input_ids": _filled([row.ids for row in rows], longest, self._pad_id),
            "mask": _filled([[1] * len(row.ids) for row in rows], longest, 0),
        }
        if self._takes_types:
            feed["token_type_ids"] = _filled([row.types or () for row in rows], longest, 0)
        try:
            (read,) = self._session.run(None, feed)
        except Exception as error:
            # ONNX Runtime's own classes are no RuntimeErrors; what they say is told apart outside.
            raise RuntimeError(str(error)) from error
        return torch.from_numpy(read)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def _filled(rows: Sequence[Sequence[int]], longest: int, filler: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[rows, longest]."""
    values = np.full((len(rows), longest), filler, np.int64)
    for index, row in enumerate(rows):
        values[index, : len(row)] = row
    return values


class _Graph(torch.nn.Module):
    """What is exported: a network with one mask, which is told to the model in the form that it takes."""

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
    """The graph's file, exported first where it is not in the cache. Raises ModelError."""
    precision = str(dtype).removeprefix("torch.")
    config = (weights.folder / "config.json").read_text()
    versions = (version(name) for name in ("torch", "transformers", "onnx", "onnxscript", "onnxruntime"))
    kind = f"{precision} {','.join(reads)} {pad_id} {OPSET} {GRAPH_VERSION}"
    identity = (weights.sha256, config, kind, *versions)
    folder = settings.cache_folder / "onnx" / digest(*identity)
    if (folder / GRAPH).is_file():
        return folder / GRAPH
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another worker of this machine may be at it
            if not (folder / GRAPH).is_file():
                logger.info(
                    "exporting %s to ONNX in %s, once for this model; this takes a while …", weights.name, precision
                )
                began = time.monotonic()
                for left in folder.parent.glob(f"{folder.name}?*/"):  # of an export that was killed
                    shutil.rmtree(left, ignore_errors=True)
                fresh = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
                try:
                    _export(weights, dtype, reads, pad_id, fresh, settings.trust_remote_code)
                    shutil.rmtree(folder, ignore_errors=True)  # what is left of one without a graph
                    fresh.replace(folder)
                finally:
                    shutil.rmtree(fresh, ignore_errors=True)
                logger.info("exported in %.0f s to %s", time.monotonic() - began, folder)
    except OSError as error:
        raise ModelError(f"The ONNX graph of {weights.name} cannot be kept in {folder.parent}: {error}") from error
    return folder / GRAPH


def _export(
    weights: Weights, dtype: torch.dtype, reads: Sequence[str], pad_id: int, folder: Path, remote_code: bool
) -> None:
    """Write the graph into the folder."""
    quantised = dtype == torch.int8
    network = Network(weights, torch.float32 if quantised else dtype, reads, pad_id, remote_code=remote_code)
    config = read_config(weights, remote_code)
    typed = getattr(config, "type_vocab_size", 0) > 1
    example = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])
    inputs = {"input_ids": example, "mask": torch.ones_like(example)}
    if typed:
        inputs["token_type_ids"] = torch.zeros_like(example)
    rows, tokens = torch.export.Dim("rows"), torch.export.Dim("tokens")
    target = folder / ("float.onnx" if quantised else GRAPH)
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
            _quantise(target, folder / GRAPH)
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise ModelError(
            f"{weights.name} cannot be exported to ONNX ({first:.300}); FEEDMILL_ENGINE=torch runs it."
        ) from error


def _quantise(source: Path, target: Path) -> None:
    """Dynamic quantisation of the weights to int8; the activations are quantised as they come. Takes `source` away."""
    graph = onnx.load(source)
    # The exporter notes shapes of transposed weights that the quantiser's own inference then contradicts.
    del graph.graph.value_info[:]
    with _quiet():
        # One scale for each channel: with one for each tensor twice as many posts got another label.
        quantize_dynamic(graph, target, per_channel=True, weight_type=QuantType.QInt8, use_external_data_format=True)
    for path in source.parent.iterdir():
        if not path.name.startswith(target.name):
            path.unlink()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the exporter's and the quantiser's remarks on their own work out of the worker's log."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(previous)
