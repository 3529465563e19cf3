"""Choose the worker's device and precision, and say why."""

import os
import platform
from pathlib import Path
from typing import NamedTuple

import torch

from shared.errors import SettingsError, UserError
from workers.models.shapes import EXACT, FEW, Shapes

#: Number of cores that torch uses. OMP_NUM_THREADS overrides the default.
TORCH_THREADS = torch.get_num_threads()
#: Maximum parallel forward passes on a CPU. Each needs Python's global interpreter lock between operations.
MAX_LANES = 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
#: Precisions that ONNX Runtime supports, by device type; the default first.
ONNX_DTYPES = {"cpu": ("float32", "int8"), "cuda": ("float16", "float32")}


class Device(NamedTuple):
    """A torch device and its precision. `reason` says how both were chosen."""

    torch: torch.device
    dtype: torch.dtype
    reason: str

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
        processor = proc_field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()
        return f"{processor}, {TORCH_THREADS} threads"

    def __str__(self) -> str:
        return f"{self.name} in {str(self.dtype).removeprefix('torch.')}: {self.reason}"


def select_device(device: str = "auto", dtype: str = "auto", engine: str = "torch") -> Device:
    """Return the device for the settings `device`, `dtype` and `engine`.

    Raises SettingsError if the machine lacks the device, or the engine does not support the precision.
    """
    found, why_device = _device(device)
    if engine == "onnx":
        precision, why_dtype = _onnx_precision(found, dtype)
    elif dtype == "int8":
        raise SettingsError(
            "FEEDMILL_DTYPE: int8 requires ONNX Runtime on a CPU. Set FEEDMILL_ENGINE=onnx and FEEDMILL_DEVICE=cpu."
        )
    elif dtype == "auto":
        precision, why_dtype = _half_precision(found)
    else:
        precision, why_dtype = DTYPES[dtype], "precision as set"
    return Device(found, precision, f"{why_device}; {why_dtype}")


def for_training(device: Device, wanted: str = "auto") -> tuple[torch.dtype, str]:
    """Return the precision of the forward and backward passes, and the reason.

    Weights and their updates are always float32. float16 needs loss scaling, bfloat16 does not. Raises UserError if the
    device does not support training in the wanted precision.
    """
    if wanted == "float16" and device.torch.type != "cuda":
        raise UserError(f"--precision: float16 needs a CUDA GPU for loss scaling. Use bfloat16 on {device.name}.")
    if wanted != "auto":
        return DTYPES[wanted], "precision as set"
    if device.torch.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
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


def proc_field(path: Path, name: str) -> str | None:
    """Return the first field of this name in a file of Linux's /proc, such as "1024 kB"; None if absent."""
    lines = path.read_text().splitlines() if path.is_file() else ()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _onnx_precision(device: torch.device, dtype: str) -> tuple[torch.dtype, str]:
    possible = ONNX_DTYPES.get(device.type)
    if possible is None:
        raise SettingsError(
            f"FEEDMILL_ENGINE: onnx does not support {device}. Set FEEDMILL_ENGINE=torch, or FEEDMILL_DEVICE=cpu."
        )
    if dtype not in ("auto", *possible):
        raise SettingsError(
            f"FEEDMILL_DTYPE: ONNX Runtime does not support {dtype} on {device}. Set {' or '.join(possible)}."
        )
    return (DTYPES[possible[0]], "ONNX Runtime") if dtype == "auto" else (DTYPES[dtype], "precision as set")


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
