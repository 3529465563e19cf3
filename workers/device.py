"""Which device this worker is, in which precision it computes, and why."""

import os
import platform
from pathlib import Path
from typing import NamedTuple

import torch

from shared.errors import SettingsError, UserError

#: Cores that torch computes with, unless OMP_NUM_THREADS says otherwise.
CORES = torch.get_num_threads()
#: Forward passes side by side on a CPU, at most: each needs Python's lock between its operations.
MOST_LANES = 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
#: Precisions that ONNX Runtime is given, by the kind of device; the first is its own choice.
ONNX_DTYPES = {"cpu": ("float32", "int8"), "cuda": ("float16", "float32")}


class Device(NamedTuple):
    """A torch device with its precision; `reason` says how it was chosen."""

    torch: torch.device
    dtype: torch.dtype
    reason: str

    @property
    def name(self) -> str:
        """As results bear it: cpu, mps, cuda:2; a GPU as CUDA_VISIBLE_DEVICES names it, where that is set.

        torch counts those that it is shown, and of several workers on one machine each is shown one.
        """
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        index = self.torch.index or 0
        if self.torch.type != "cuda" or not any(shown[index : index + 1]):
            return str(self.torch)
        return f"cuda:{shown[index].strip()}"

    @property
    def lanes(self) -> int:
        """Forward passes that run side by side: on a CPU one a core, since two cores that share one wait for each
        other at the end of each of its operations, and for whatever else a core is given to do.
        """
        return min(CORES, MOST_LANES) if self.torch.type == "cpu" else 1

    def take_share(self, passes: int) -> None:
        """From now on the calling thread's operations use the cores that one of so many forward passes has."""
        if self.torch.type == "cpu":
            torch.set_num_threads(max(1, CORES // passes))

    def give_back(self) -> None:
        """Let others have the memory that no tensor uses any more."""
        if self.torch.type == "cuda":
            torch.cuda.empty_cache()
        elif self.torch.type == "mps":
            torch.mps.empty_cache()

    @property
    def hardware(self) -> str:
        """What it is made of: the processor's or the GPU's name, and a CPU's threads."""
        if self.torch.type == "cuda":
            return torch.cuda.get_device_name(self.torch)
        if self.torch.type == "mps":
            return "Apple GPU"
        return f"{_processor()}, {CORES} threads"

    def __str__(self) -> str:
        return f"{self.name} in {str(self.dtype).removeprefix('torch.')}: {self.reason}"


def choose(device: str = "auto", dtype: str = "auto", engine: str = "torch") -> Device:
    """The device for the settings `device`, `dtype` and `engine`.

    Raises SettingsError where the machine does not have it, or the engine does not compute in that precision.
    """
    found, why_device = _device(device)
    if engine == "onnx":
        precision, why_dtype = _onnx_precision(found, dtype)
    elif dtype == "int8":
        raise SettingsError("FEEDMILL_DTYPE: int8 is for FEEDMILL_ENGINE=onnx on a CPU.")
    elif dtype == "auto":
        precision, why_dtype = _half_precision(found)
    else:
        precision, why_dtype = DTYPES[dtype], "precision as set"
    return Device(found, precision, f"{why_device}; {why_dtype}")


def for_training(device: Device, wanted: str = "auto") -> tuple[torch.dtype, str]:
    """(precision of the forward and backward passes, why); weights and their changes are float32 in any case.

    Half precision without bfloat16 takes loss scaling, which float16 needs. Raises UserError where the device does not
    train in what is wanted.
    """
    if wanted == "float16" and device.torch.type != "cuda":
        raise UserError(f"--precision: float16 trains on a GPU alone, with loss scaling; {device.name} takes bfloat16.")
    if wanted != "auto":
        return DTYPES[wanted], "precision as set"
    if device.torch.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "this GPU has bfloat16 in hardware"
        return torch.float16, "this GPU has no bfloat16; the loss is scaled"
    if device.torch.type == "cpu":
        return _half_precision(device.torch)
    return torch.float32, "mixed precision was not tried on Apple GPUs"


def _device(wanted: str) -> tuple[torch.device, str]:
    if wanted.startswith("cuda") or (wanted == "auto" and torch.cuda.is_available()):
        count = torch.cuda.device_count()
        index = int(wanted.partition(":")[2] or 0)
        if index >= count:
            raise SettingsError(f"FEEDMILL_DEVICE: {wanted} is wanted, but torch sees {count} CUDA devices here.")
        return torch.device("cuda", index), torch.cuda.get_device_name(index)
    if wanted == "mps" or (wanted == "auto" and torch.backends.mps.is_available()):
        if not torch.backends.mps.is_available():
            raise SettingsError("FEEDMILL_DEVICE: mps is wanted, but torch finds no Apple GPU here.")
        return torch.device("mps"), "Apple GPU"
    return torch.device("cpu"), "as set" if wanted == "cpu" else "no GPU found"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _onnx_precision(device: torch.device, dtype: str) -> tuple[torch.dtype, str]:
    possible = ONNX_DTYPES.get(device.type)
    if possible is None:
        raise SettingsError(f"FEEDMILL_ENGINE: onnx runs on CUDA or on the CPU, not on {device}.")
    if dtype not in ("auto", *possible):
        raise SettingsError(f"FEEDMILL_DTYPE: ONNX Runtime takes {' or '.join(possible)} on {device}, not {dtype}.")
    return (DTYPES[possible[0]], "ONNX Runtime") if dtype == "auto" else (DTYPES[dtype], "precision as set")


def _half_precision(device: torch.device) -> tuple[torch.dtype, str]:
    """Half precision where the hardware computes in it; emulated it would be slower than float32."""
    if device.type != "cpu":
        return torch.float16, "GPUs compute in half precision"
    capabilities = torch.cpu.get_capabilities()
    for feature in ("amx_bf16", "avx512_bf16", "bf16"):
        if capabilities.get(feature):
            return torch.bfloat16, f"this CPU has {feature}"
    return torch.float32, "this CPU has no bfloat16 in hardware"
