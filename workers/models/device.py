"""Choose the worker's device and precision, and say why."""

import os
import platform
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from feedmill.shared import linux
from feedmill.shared.errors import SettingsError
from feedmill.workers.models.shapes import EXACT, FEW, Shapes

#: True in a process of Ray whose OMP_NUM_THREADS is 1: Ray sets it for tasks of one CPU, the default.
HAS_RAYS_DEFAULT = os.environ.get("OMP_NUM_THREADS") == "1" and "RAY_RAYLET_PID" in os.environ
#: Number of cores that torch uses. OMP_NUM_THREADS overrides the default, except for Ray's.
TORCH_THREADS = len(linux.allowed_cpus()) if HAS_RAYS_DEFAULT else torch.get_num_threads()
#: Maximum parallel forward passes on a CPU. Each needs Python's global interpreter lock between operations.
MAX_LANES = 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
#: Model types that overflow in float16 whatever their configuration says: gte-Qwen2 and EmbeddingGemma are stored in
#: float32, but their base models were trained in bfloat16. vLLM refuses all of these but qwen2 in float16.
BFLOAT16_TYPES = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4", "plamo2", "qwen2"})
#: Options of glibc's `mallopt` (malloc.h) and their values: return memory at the end of the heap to the system only
#: beyond 2 GiB, take up to 1 GiB from the heap, and use one heap for all threads, from which little is returned.
MALLOC_OPTIONS = {-1: 2**31 - 1, -3: 2**30, -8: 1}
#: Precisions that ONNX Runtime supports, by device type; the default first.
ONNX_DTYPES = {"cpu": ("float32", "int8"), "cuda": ("float16", "float32")}


class Device(NamedTuple):
    """A torch device and its precision. `reason` and `dtype_reason` say how they were chosen."""

    torch: torch.device
    dtype: torch.dtype
    reason: str
    dtype_reason: str = "precision as set"
    #: True if the setting `dtype` is auto, so that the model may need another precision.
    automatic: bool = False

    @property
    def name(self) -> str:
        """The device's name in results: cpu, mps or cuda:2.

        If CUDA_VISIBLE_DEVICES is set, a GPU's number is taken from that variable. torch numbers the visible GPUs from
        0, so workers with one visible GPU each would all report cuda:0.
        """
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        index = self.torch.index or 0
        if self.torch.type != "cuda" or not any(shown[index : index + 1]):
            return str(self.torch)
        return f"cuda:{shown[index].strip()}"

    @property
    def lanes(self) -> int:
        """Number of parallel forward passes: up to one per core on a CPU, otherwise one.

        Parallel passes use the cores better than one pass on all cores, because cores that share a pass wait for the
        slowest one after every operation.
        """
        return min(TORCH_THREADS, MAX_LANES) if self.torch.type == "cpu" else 1

    @property
    def shapes(self) -> Shapes:
        """The shapes to which engines pad micro-batches on this device."""
        return FEW if self.torch.type == "cuda" else EXACT

    def take_share(self, passes: int) -> None:
        """Limit the calling thread to its share of the cores while `passes` forward passes run in parallel."""
        if self.torch.type == "cpu":
            torch.set_num_threads(max(1, TORCH_THREADS // passes))

    def give_back(self) -> None:
        """Release cached memory that no tensor uses."""
        if self.torch.type == "cuda":
            torch.cuda.empty_cache()
        elif self.torch.type == "mps":
            torch.mps.empty_cache()

    @property
    def hardware(self) -> str:
        """The name of the processor or GPU; for a CPU, with its number of threads."""
        if self.torch.type == "cuda":
            return torch.cuda.get_device_name(self.torch)
        if self.torch.type == "mps":
            return "Apple GPU"
        processor = linux.processor() or platform.processor() or platform.machine()
        return f"{processor}, {TORCH_THREADS} threads"

    @property
    def precision(self) -> str:
        """The name of the precision, as in the setting `dtype`."""
        return str(self.dtype).removeprefix("torch.")

    def for_model(self, config: Mapping[str, Any], engine: str) -> "Device":
        """Return this device in the precision that a model needs, unless the setting `dtype` determines it.

        config: the model's config.json. Values of a model that was trained in bfloat16 may exceed 65,504, the maximum
        of float16; scores can then be wrong without being infinite. Every other default suits every model.
        """
        if not self.automatic:
            return self
        default, why = _default_precision(self.torch, engine)
        needed = _bfloat16_reason(config) if default == torch.float16 else None
        if needed is None:
            return self._replace(dtype=default, dtype_reason=why)
        lacks = "ONNX Runtime" if engine == "onnx" else None if has_bfloat16(self.torch) else "this GPU"
        if lacks:
            return self._replace(dtype=torch.float32, dtype_reason=f"{needed}, which {lacks} lacks")
        return self._replace(dtype=torch.bfloat16, dtype_reason=needed)

    def __str__(self) -> str:
        return f"{self.name} in {self.precision}: {self.reason}; {self.dtype_reason}"


def select_device(device: str = "auto", dtype: str = "auto", engine: str = "torch") -> Device:
    """Return the device for the settings `device`, `dtype` and `engine`.

    Raises SettingsError if the machine lacks the device, or the engine does not support the precision.
    """
    found, reason = _device(device)
    possible = ONNX_DTYPES.get(found.type, ()) if engine == "onnx" else ("float32", "bfloat16", "float16")
    if not possible:
        raise SettingsError(f"FEEDMILL_ENGINE: onnx does not support {found}. Set torch, or FEEDMILL_DEVICE=cpu.")
    if dtype not in ("auto", *possible):
        raise SettingsError(
            f"FEEDMILL_DTYPE: {engine} does not support {dtype} on {found}. Set {' or '.join(possible)}; int8 needs "
            "FEEDMILL_ENGINE=onnx and FEEDMILL_DEVICE=cpu."
        )
    if dtype == "auto":
        precision, why = _default_precision(found, engine)
        return Device(found, precision, reason, why, automatic=True)
    return Device(found, DTYPES[dtype], reason)


def for_training(device: Device, wanted: str = "auto") -> tuple[torch.dtype, str]:
    """Return the precision of the forward and backward passes, and the reason.

    Weights and their updates are always float32. float16 needs loss scaling, bfloat16 does not. wanted: the setting
    `dtype`. Raises SettingsError if the device does not support training in this precision.
    """
    if wanted == "int8" or (wanted == "float16" and device.torch.type != "cuda"):
        raise SettingsError(f"FEEDMILL_DTYPE: {device.name} does not train in {wanted}. Set auto, bfloat16 or float32.")
    if wanted != "auto":
        return DTYPES[wanted], "precision as set"
    if device.torch.type == "cuda":
        if has_bfloat16(device.torch):
            return torch.bfloat16, "this GPU has bfloat16 in hardware"
        return torch.float16, "this GPU has no bfloat16; the loss is scaled"
    if device.torch.type == "cpu":
        return _half_precision(device.torch)
    return torch.float32, "mixed precision is untested on Apple GPUs"


def _device(wanted: str) -> tuple[torch.device, str]:
    if wanted.startswith("cuda") or (wanted == "auto" and torch.cuda.is_available()):
        count = torch.cuda.device_count()
        index = int(wanted.partition(":")[2] or 0)
        if index >= count:
            raise SettingsError(
                f"FEEDMILL_DEVICE: {wanted} is not available: torch finds {count} CUDA devices. Set auto or cpu."
            )
        return torch.device("cuda", index), torch.cuda.get_device_name(index)
    if wanted == "mps" or (wanted == "auto" and torch.backends.mps.is_available()):
        if not torch.backends.mps.is_available():
            raise SettingsError("FEEDMILL_DEVICE: mps is not available: torch finds no Apple GPU. Set auto or cpu.")
        return torch.device("mps"), "Apple GPU"
    return torch.device("cpu"), "as set" if wanted == "cpu" else "no GPU found"


def limit_memory(device: torch.device, share: float) -> None:
    """Let this process use at most a share of the GPU's memory. Beyond it, torch raises OutOfMemoryError."""
    if device.type == "cuda" and share < 1:
        torch.cuda.set_per_process_memory_fraction(share, device)


def keep_freed_memory(device: torch.device) -> None:
    """Let this process keep memory that a micro-batch on a CPU has freed, for the next one.

    glibc returns the largest blocks to the system, which clears each page when it is used again: 6% of the time with
    all-MiniLM-L6-v2 in bfloat16. Does nothing with another C library, or if the environment sets glibc's options.
    """
    is_set = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)
    if device.type != "cpu" or is_set:
        return
    linux.set_malloc_options(MALLOC_OPTIONS)


def _default_precision(device: torch.device, engine: str) -> tuple[torch.dtype, str]:
    """Return the precision that suits most models, and the reason."""
    return (DTYPES[ONNX_DTYPES[device.type][0]], "ONNX Runtime") if engine == "onnx" else _half_precision(device)


def _bfloat16_reason(config: Mapping[str, Any]) -> str | None:
    """Return why a model needs bfloat16's range, by its config.json; None if float16 suffices."""
    text = config.get("text_config")  # of a model that reads images, too
    parts = [config, text] if isinstance(text, Mapping) else [config]
    for part in parts:
        stored = part.get("dtype") or part.get("torch_dtype")
        if str(stored).removeprefix("torch.") == "bfloat16":
            return "the model's configuration asks for bfloat16"
        if part.get("model_type") in BFLOAT16_TYPES:
            return f"{part['model_type']} models need bfloat16"
    return None


def has_bfloat16(device: torch.device) -> bool:
    """Return whether the hardware computes in bfloat16, without emulation."""
    if device.type == "cuda":
        return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "mps":
        return torch.backends.mps.is_macos_or_newer(14, 0)
    return _half_precision(device)[0] == torch.bfloat16


def _half_precision(device: torch.device) -> tuple[torch.dtype, str]:
    """Return half precision if the hardware supports it, otherwise float32, and the reason. Emulation is slower."""
    if device.type != "cpu":
        return torch.float16, "GPUs compute in half precision"
    capabilities = torch.cpu.get_capabilities()
    for feature in ("amx_bf16", "avx512_bf16", "bf16"):
        if capabilities.get(feature):
            if not onednn_has_bfloat16():
                return torch.float32, f"this CPU has {feature}, but oneDNN does not use it (see ONEDNN_MAX_CPU_ISA)"
            return torch.bfloat16, f"this CPU has {feature}"
    return torch.float32, "this CPU has no bfloat16 in hardware"


def onednn_has_bfloat16() -> bool:
    """Return whether oneDNN multiplies in bfloat16. ONEDNN_MAX_CPU_ISA can exclude the instructions for it."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is None or bool(supported())
