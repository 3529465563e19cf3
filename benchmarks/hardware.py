"""Describe the machine and measure its ceiling, its peak rate of matrix products. Benchmarks print both first."""

import platform
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch

from workers.models.device import Device


def describe(device: Device) -> str:
    """Return one line with the processor, threads, device and versions."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    versions = " ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "celery", "kombu", "redis"))
    return (
        f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads, {device}; "
        f"Python {platform.python_version()}, {versions}"
    )


def matrix_ceiling(device: Device, size: int = 2048, rounds: int = 7) -> float:
    """Return the GFLOP/s of a large square matrix product, an upper bound for forward passes in the same precision."""
    left = torch.randn(size, size, dtype=device.dtype, device=device.torch)
    right = torch.randn(size, size, dtype=device.dtype, device=device.torch)

    def seconds() -> float:
        began = time.perf_counter()
        product = left @ right
        float(product[0, 0])  # waits for the device
        return time.perf_counter() - began

    seconds()
    return 2 * size**3 / median(seconds() for _ in range(rounds)) / 1e9


def forward_flops(config: Mapping[str, int], lengths: Iterable[int]) -> float:
    """Return the floating-point operations of an encoder's forward pass over rows of these lengths, without padding.

    config: `hidden_size`, `intermediate_size` and `num_hidden_layers` of a BERT-like model's config.json. lengths:
    tokens of each row. With hidden size h, feed-forward size f and a row of n tokens, a layer's matrix products are

    - the projections of queries, keys, values and the attention output: 4 products of [n, h] with [h, h], 8·n·h²;
    - the feed-forward network: [n, h] with [h, f] and back, 4·n·h·f;
    - attention: queries with keys, and the attention weights with values, 2·n²·h each.

    A product of [a, b] with [b, c] counts 2·a·b·c. Embeddings, norms, softmax and pooling are not matrix products and
    make up well below 1% of the operations, so they are left out.
    """
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    linear = 8 * hidden**2 + 4 * hidden * inner
    return float(layers * sum(linear * length + 4 * hidden * length**2 for length in lengths))
