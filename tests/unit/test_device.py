"""workers/device.py: a device and a precision, each with its reason."""

import pytest
import torch

from shared.errors import SettingsError
from workers.device import Device, choose, for_training


def capabilities(monkeypatch: pytest.MonkeyPatch, **found: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)


@pytest.mark.parametrize("feature", ["avx512_bf16", "amx_bf16", "bf16"])
def test_bfloat16_where_the_cpu_has_it(monkeypatch: pytest.MonkeyPatch, feature: str) -> None:
    capabilities(monkeypatch, **{feature: True})
    chosen = choose()
    assert chosen.dtype == torch.bfloat16
    assert str(chosen) == f"cpu in bfloat16: no GPU found; this CPU has {feature}"


def test_float32_where_it_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities(monkeypatch, avx512_f=True)
    assert choose().dtype == torch.float32


def test_what_is_set_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities(monkeypatch, avx512_bf16=True)
    assert choose("cpu", "float32") == Device(torch.device("cpu"), torch.float32, "as set; precision as set")


def test_half_precision_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU number {index}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert choose() == Device(torch.device("cuda", 0), torch.float16, "GPU number 0; GPUs compute in half precision")
    assert choose("cuda:1").name == "cuda:1"
    with pytest.raises(
        SettingsError, match="FEEDMILL_DEVICE: cuda:2 is not available, torch finds 2 CUDA devices. Set auto"
    ):
        choose("cuda:2")


def test_a_gpu_is_named_as_the_machine_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (Device(torch.device("cuda", index), torch.float16, "") for index in range(2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-8f2a")
    assert (first.name, second.name) == ("cuda:4", "cuda:GPU-8f2a")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (first.name, second.name) == ("cuda:0", "cuda:1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    assert Device(torch.device("cpu"), torch.float32, "").name == "cpu"


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(SettingsError, match="FEEDMILL_DEVICE: cuda is not available, torch finds 0 "):
        choose("cuda")
    with pytest.raises(SettingsError, match="FEEDMILL_DEVICE: mps is not available"):
        choose("mps")


def test_an_engine_that_does_not_run_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(SettingsError, match="FEEDMILL_ENGINE: onnx supports .* not mps"):
        choose(engine="onnx")


def test_half_precision_is_not_trained_in_where_it_was_not_tried() -> None:
    apple = Device(torch.device("mps"), torch.float32, "for a test")
    assert for_training(apple) == (torch.float32, "mixed precision is untested on Apple GPUs")
    assert for_training(apple, "bfloat16") == (torch.bfloat16, "precision as set")
