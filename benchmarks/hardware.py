"""Describe the machine and measure its ceiling, its peak rate of matrix products.

Benchmarks print both first.
"""

import platform
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from feedmill.workers.models.device import Device

#: Number of attentions in each layer, by BART's stacks.
BART_STACKS = {"encoder": 1, "decoder": 2}


def describe(device: Device) -> str:
    """Return one line with the processor, threads, device and versions of the installed
    libraries.
    """
    cpuinfo = (
        Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    )
    names = [
        line.partition(":")[2].strip()
        for line in cpuinfo.splitlines()
        if line.startswith("model name")
    ]
    versions = []
    for name in ("torch", "transformers", "celery", "kombu", "redis"):
        with suppress(PackageNotFoundError):  # benchmarks.gpu needs only the first two
            versions.append(f"{name} {version(name)}")
    return (
        f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads, "
        f"{device}; "
        f"Python {platform.python_version()}, {' '.join(versions)}"
    )


def matrix_ceiling(
    device: Device,
    size: int | None = None,
    rounds: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the GFLOP/s of a large square matrix product, an upper bound for forward passes in
    the same precision.

    size: rows and columns; default: 2,048 on a CPU. A GPU computes that in less time than starting
    it takes, so there the default is 8,192.
    """
    size = size or (2048 if device.torch.type == "cpu" else 8192)
    left = torch.randn(size, size, dtype=device.dtype, device=device.torch)
    right = torch.randn(size, size, dtype=device.dtype, device=device.torch)

    def seconds() -> float:
        began = clock()
        product = left @ right
        float(product[0, 0])  # waits for the device
        return clock() - began

    seconds()
    return 2 * size**3 / median(seconds() for _ in range(rounds)) / 1e9


def forward_flops(config: Mapping[str, Any], lengths: Iterable[int]) -> float:
    """Return the floating-point operations of a model's forward pass over rows of these lengths,
    without padding.

    config: the sizes in a config.json of BERT's kind, DistilBERT or BART. lengths: tokens of each
    row. With hidden size h, feed-forward size f and a row of n tokens, a layer's matrix products
    are

    - the projections of queries, keys, values and the attention output: 4 products of [n, h] with
      [h, h], 8·n·h²;
    - the feed-forward network: [n, h] with [h, f] and back, 4·n·h·f;
    - attention: queries with keys, and the attention weights with values, 2·n²·h each.

    A decoder's layer has attention and its projections twice: to its own row and to the encoder's.

    A product of [a, b] with [b, c] counts 2·a·b·c. Embeddings, norms, softmax and pooling are not
    matrix products and make up well below 1% of the operations, so they are left out. ModernBERT's
    feed-forward network has three products, and its local attention counts as global.
    """
    if config.get("model_type") == "bart":
        hidden = config["d_model"]
        stacks = [
            (config[f"{stack}_layers"], config[f"{stack}_ffn_dim"], attentions)
            for stack, attentions in BART_STACKS.items()
        ]
    elif config.get("model_type") == "distilbert":
        hidden, stacks = config["dim"], [(config["n_layers"], config["hidden_dim"], 1)]
    else:
        inner = config["intermediate_size"] * (
            1.5 if config.get("model_type") == "modernbert" else 1
        )
        hidden, stacks = (
            config["hidden_size"],
            [(config["num_hidden_layers"], inner, 1)],
        )
    each = [
        (
            layers * (8 * attentions * hidden**2 + 4 * hidden * inner),
            layers * 4 * attentions * hidden,
        )
        for layers, inner, attentions in stacks
    ]
    return float(
        sum(
            linear * length + attention * length**2
            for length in lengths
            for linear, attention in each
        )
    )
