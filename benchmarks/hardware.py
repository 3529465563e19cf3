"""The machine that a benchmark ran on, and its measured ceiling: printed first, so that figures can be read."""

import platform
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch

from workers.device import Device


def describe(device: Device) -> str:
    """One line: processor, cores, device, versions."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    versions = " ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "celery", "kombu", "redis"))
    return (
        f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads, {device}; "
        f"Python {platform.python_version()}, {versions}"
    )


def matrix_ceiling(device: Device, size: int = 2048, rounds: int = 7) -> float:
    """GFLOP/s of a large square matrix product in the device's precision: no forward pass can be faster."""
    left = torch.randn(size, size, dtype=device.dtype, device=device.torch)
    right = torch.randn(size, size, dtype=device.dtype, device=device.torch)

    def seconds() -> float:
        began = time.perf_counter()
        product = left @ right
        float(product[0, 0])  # waits for the device
        return time.perf_counter() - began

    seconds()
    return 2 * size**3 / median(seconds() for _ in range(rounds)) / 1e9
