"""workers/models/device.py: choosing a device and a precision, with reasons."""

import os
import platform
import subprocess
import sys
from typing import Any

import pytest
import torch

from feedmill.shared.errors import SettingsError
from feedmill.workers.models.device import Device, limit_memory, select_device


def capabilities(monkeypatch: pytest.MonkeyPatch, **found: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    monkeypatch.setattr(
        "feedmill.workers.models.device.onednn_has_bfloat16", lambda: True
    )


@pytest.mark.parametrize("feature", ["avx512_bf16", "amx_bf16", "bf16"])
def test_chooses_bfloat16_if_the_cpu_supports_it(
    monkeypatch: pytest.MonkeyPatch, feature: str
) -> None:
    capabilities(monkeypatch, **{feature: True})
    chosen = select_device()
    assert chosen.dtype == torch.bfloat16
    assert str(chosen).startswith("cpu in bfloat16")
    assert feature in str(chosen)


def test_chooses_half_precision_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda index: f"GPU number {index}"
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    chosen = select_device()
    assert (chosen.torch, chosen.dtype) == (torch.device("cuda", 0), torch.float16)
    assert "GPU number 0" in chosen.reason
    assert select_device("cuda:1").name == "cuda:1"
    with pytest.raises(SettingsError, match="cuda:2"):
        select_device("cuda:2")


@pytest.mark.parametrize(
    ("config", "capability", "dtype"),
    [
        ({}, (9, 0), torch.float16),
        ({"dtype": "float32"}, (9, 0), torch.float16),
        ({"torch_dtype": "float16"}, (9, 0), torch.float16),
        ({"dtype": "bfloat16"}, (9, 0), torch.bfloat16),
        ({"torch_dtype": "torch.bfloat16"}, (8, 0), torch.bfloat16),
        ({"dtype": "bfloat16"}, (7, 5), torch.float32),
        (
            {"model_type": "gemma3", "text_config": {"torch_dtype": "bfloat16"}},
            (9, 0),
            torch.bfloat16,
        ),
        ({"model_type": "gemma3_text", "dtype": "float32"}, (9, 0), torch.bfloat16),
    ],
)
def test_gpu_precision_follows_the_models_configuration(
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    capability: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    default = Device(torch.device("cuda", 0), torch.float16, "a GPU", automatic=True)
    chosen = default.for_model(config, "torch")
    assert chosen.dtype == dtype
    assert chosen.for_model({}, "torch").dtype == torch.float16, (
        "the next model gets the default again"
    )
    if dtype != torch.float16:
        assert "bfloat16" in str(chosen).partition("; ")[2]
        assert default.for_model(config, "onnx").dtype == torch.float32
    as_set = Device(torch.device("cuda", 0), torch.float16, "a GPU")
    assert as_set.for_model(config, "torch") == as_set


def test_limits_the_memory_of_workers_that_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limited: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda *limit: limited.append(limit),
    )
    for kind in ("cuda", "cpu"):
        limit_memory(torch.device(kind), 0.45)
        limit_memory(torch.device(kind), 1.0)
    assert limited == [(0.45, torch.device("cuda"))]


#: Prints how many pages the system had to provide while memory was allocated and freed repeatedly.
REPEATED_ALLOCATION = """
import resource, sys, torch
from feedmill.workers.models.device import keep_freed_memory
for device in sys.argv[1:]:
    keep_freed_memory(torch.device(device))
    for repetition in range(20):
        torch.ones(8 * 2**20), torch.ones(8 * 2**20)
        if repetition == 9:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


#: Prints the device of a CPU that could compute in bfloat16.
CHOICE = """
from feedmill.workers.models.device import select_device
torch.cuda.is_available = lambda: False
torch.cpu.get_capabilities = lambda: {"amx_bf16": True}
print(select_device())
"""


def printed(code: str, *devices: str, **variables: str) -> list[str]:
    """Run code in a process with these variables, which glibc and oneDNN read once.

    Return the lines that it prints.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_"))
    }
    command = [sys.executable, "-c", code, *devices]
    done = subprocess.run(
        command, env=inherited | variables, check=True, capture_output=True, text=True
    )
    return done.stdout.splitlines()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc")
def test_keeps_freed_memory_on_a_cpu() -> None:
    on_gpu, on_cpu = printed(REPEATED_ALLOCATION, "cuda", "cpu")
    assert int(on_cpu) < 1000 <= int(on_gpu)


def test_variables_of_glibc_and_onednn_count() -> None:
    faults, chosen = printed(
        REPEATED_ALLOCATION + CHOICE,
        "cpu",
        MALLOC_ARENA_MAX="8",
        ONEDNN_MAX_CPU_ISA="AVX2",
    )
    assert int(faults) >= 1000
    assert chosen.startswith("cpu in float32")
    assert "ONEDNN_MAX_CPU_ISA" in chosen
