"""TensorRT for the ONNX engine: the options of ONNX Runtime's provider for it.

TensorRT compiles a graph for one GPU and a range of shapes, which takes minutes. ONNX Runtime
caches the result, and the times that TensorRT has measured, in the folder of the exported graph,
whose name depends on all that the graph depends on. The files' names contain the GPU's compute
capability, TensorRT's version and the range.

Untested: no GPU with TensorRT was at hand. The options, their shapes and the refusals are tested
without one.
"""

from collections.abc import Sequence
from pathlib import Path

from feedmill.shared.errors import SettingsError
from feedmill.workers.models.device import Device
from feedmill.workers.models.shapes import FEW

TENSORRT = "TensorrtExecutionProvider"
#: Folder beside the graph for engines and measured times.
CACHE_FOLDER = "tensorrt"
#: Rows of a micro-batch of labels (classifiers/similarity.py), whatever the limit of posts.
LABEL_ROWS = 32
#: Rows and tokens of the shape that TensorRT optimises for, if they are in range.
TYPICAL_ROWS = 64
TYPICAL_TOKENS = 64


def check_available(providers: Sequence[str]) -> None:
    """Raise SettingsError unless TensorRT is among the providers of this ONNX Runtime."""
    if TENSORRT not in providers:
        raise SettingsError(
            f"FEEDMILL_ENGINE: this ONNX Runtime has no TensorRT, only {', '.join(providers)}. "
            "Install onnxruntime-gpu and the TensorRT libraries of its version, or set onnx or "
            "torch."
        )


def provider_options(
    device: Device, graph_folder: Path, inputs: Sequence[str], rows: int, tokens: int
) -> dict[str, str]:
    """Return the provider's options for a graph.

    inputs: names of its inputs, each [rows, tokens]. rows: maximum rows of a micro-batch. tokens:
    maximum length to which they are padded.
    """
    cache = graph_folder / CACHE_FOLDER
    cache.mkdir(exist_ok=True)
    # Each: (rows, tokens of a row).
    max_rows = FEW.rows(max(rows, LABEL_ROWS))
    smallest = (
        FEW.rows(1),
        min(FEW.length(1), tokens),
    )
    typical = (
        min(TYPICAL_ROWS, max_rows),
        min(TYPICAL_TOKENS, tokens),
    )
    largest = (max_rows, tokens)
    return {
        "device_id": str(device.torch.index or 0),
        "trt_fp16_enable": str(device.precision == "float16"),
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": str(cache),
        "trt_timing_cache_enable": "True",
        "trt_timing_cache_path": str(cache),
        # One profile for all shapes, so that no micro-batch builds an engine: shapes.py rounds up
        # to these.
        "trt_profile_min_shapes": _profile(inputs, smallest),
        "trt_profile_opt_shapes": _profile(inputs, typical),
        "trt_profile_max_shapes": _profile(inputs, largest),
    }


def _profile(inputs: Sequence[str], shape: tuple[int, int]) -> str:
    rows, tokens = shape
    return ",".join(f"{name}:{rows}x{tokens}" for name in inputs)
