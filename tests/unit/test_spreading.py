"""workers/models/engines/spreading.py and several devices without a queue, on a CPU with a made
map of devices.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from transformers import AutoConfig, AutoModel

import feedmill
from feedmill.shared.errors import ModelError, SettingsError
from feedmill.shared.settings import Settings
from feedmill.workers.models import device as devices
from feedmill.workers.models.device import select_device, select_devices
from feedmill.workers.models.engines.network import Network
from feedmill.workers.models.engines.packing import LOGITS
from feedmill.workers.models.engines.spreading import map_devices
from feedmill.workers.models.weights import locate
from tests.fakes.models import make_model

TEXTS = ["The keeper saved two penalties", "How long do dried beans keep?", "It rains"]


def blank(folder: Path) -> Any:
    """Return a model without weights, as `map_devices` gets it."""
    with torch.device("meta"):
        return AutoModel.from_config(AutoConfig.from_pretrained(folder))  # type: ignore[no-untyped-call]


def size(model: Any, prefix: str = "") -> int:
    return sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in model.named_parameters()
        if name.startswith(prefix)
    )


def test_divides_a_model_between_its_layers(tmp_path: Path) -> None:
    model = blank(make_model("bert", tmp_path, num_hidden_layers=4))
    half = size(model, "embeddings") + 3 * size(model, "encoder.layer.0")
    found = map_devices(model, {0: half, 1: size(model)}, torch.float32)
    assert set(found.values()) == {0, 1}
    for name, _ in model.named_parameters():
        # Each parameter has one device: no layer is divided.
        assert (
            sum(name == module or name.startswith(f"{module}.") for module in found)
            == 1
        ), name
    on_first = [module for module, where in found.items() if where == 0]
    assert sum(size(model, module) for module in on_first) <= half


def test_refuses_a_model_that_does_not_fit(tmp_path: Path) -> None:
    model = blank(make_model("bert", tmp_path))
    with pytest.raises(ModelError, match="does not fit its 2 devices"):
        map_devices(model, {0: size(model) // 4, 1: size(model) // 4}, torch.float32)


def outputs(network: Network, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    longest = max(map(len, rows))
    ids = torch.tensor(
        [[*row, *[network.pad_id] * (longest - len(row))] for row in rows]
    )
    mask = torch.tensor(
        [[True] * len(row) + [False] * (longest - len(row)) for row in rows]
    )
    with torch.inference_mode():
        output: torch.Tensor = network(ids, mask, None, mask.long())
    return output


CLASSIFIERS = [
    (architecture, LOGITS) for architecture in ("bert", "bart", "deberta-v2", "qwen3")
]
ENCODERS = [
    (architecture, ("mean",)) for architecture in ("bert", "deberta-v2", "qwen3")
]


@pytest.mark.parametrize(("architecture", "reads"), [*CLASSIFIERS, *ENCODERS])
def test_a_spread_model_has_the_same_outputs(
    tmp_path: Path, architecture: str, reads: tuple[str, ...]
) -> None:
    """The hooks that move values between devices run around each module; here all of them are on
    the CPU.
    """
    labels = {0: "sports", 1: "food", 2: "weather"} if reads == LOGITS else None
    weights = locate(str(make_model(architecture, tmp_path, labels)), None, False, None)
    modules: dict[str, Any] = {}

    def on_cpu(model: Any) -> dict[str, Any]:
        # less does not fit: accelerate keeps room for the largest layer
        half = size(model) * 9 // 10
        modules.update(
            dict.fromkeys(map_devices(model, {0: half, 1: half}, torch.float32), "cpu")
        )
        return modules

    rows = [[5, 6, 7, 8, 2], [9, 2], [5, 9, 2]]
    alone = Network(weights, torch.float32, reads, 1)
    spread = Network(weights, torch.float32, reads, 1, map_devices=on_cpu)
    dispatch_model(spread.model, modules, force_hooks=True)
    assert len(modules) > 1
    assert all(
        hasattr(spread.model.get_submodule(name), "_hf_hook") for name in modules
    )
    torch.testing.assert_close(
        outputs(spread, rows), outputs(alone, rows), rtol=1e-5, atol=1e-5
    )


class Cuda:
    """Stands in for torch.cuda, of which select_device reads the number and names of the GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: f"GPU {gpu}")


def test_selects_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch, 3)

    def names(wanted: str | None, device: str = "auto") -> list[str]:
        return [
            device.name for device in select_devices(wanted, device, "auto", "torch")
        ]

    assert names("all") == ["cuda:0", "cuda:1", "cuda:2"]
    assert names("2,0+1") == ["cuda:2", "cuda:0+1"]
    assert names(None, "cuda:1+2") == ["cuda:1+2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,9")
    assert names("0+2") == ["cuda:4+9"]
    Cuda(monkeypatch, 0)
    assert names("all") == ["cpu"]


@pytest.mark.parametrize(
    ("engine", "device"),
    [("onnx", "cuda:0+1"), ("torch", "cuda:0+7"), ("torch", "cuda:1+1")],
)
def test_refuses_gpus_that_cannot_share_a_model(
    monkeypatch: pytest.MonkeyPatch, engine: str, device: str
) -> None:
    Cuda(monkeypatch, 2)
    with pytest.raises(SettingsError, match="FEEDMILL_"):
        select_device(device, "auto", engine)


@pytest.mark.parametrize("setting", ["0+7", "0,7", "1+1"])
def test_errors_about_devices_name_the_setting_that_was_given(
    monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    Cuda(monkeypatch, 2)
    with pytest.raises(SettingsError, match="FEEDMILL_DEVICES: "):
        select_devices(setting, "auto", "auto", "torch")


def test_parts_of_a_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "TORCH_THREADS", 6)
    found = select_devices("cpu:3", "auto", "auto", "torch")
    assert [(device.threads, device.lanes) for device in found] == [(2, 2)] * 3
    with pytest.raises(SettingsError, match="cpu:7"):
        select_devices("cpu:7", "auto", "auto", "torch")


@pytest.mark.parametrize(
    "value", ["0+", "+1", "0++1", "cpu:1+2", "all+0", "0+1,", "mps+0"]
)
def test_rejects_malformed_devices(value: str) -> None:
    with pytest.raises(ValueError, match="devices"):
        Settings(devices=value)


def test_several_devices_share_the_items_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "TORCH_THREADS", 2)
    monkeypatch.setenv("FEEDMILL_TOKEN_BUDGET", "2048")  # a calibration takes seconds
    texts = [f"{text} {number}" for number in range(50) for text in TEXTS]
    with feedmill.Classifier(device="cpu", dtype="float32") as alone:
        expected = alone(texts, labels=["sports", "food", "weather"])
    with feedmill.Classifier(devices="cpu:2", dtype="float32") as both:
        assert both.device == "cpu,cpu"
        found = both(texts, labels=["sports", "food", "weather"])
        pipelines = both._pipeline._pipelines  # type: ignore[union-attr]
        counts = [pipeline.statistics.totals.rows for pipeline in pipelines]
    assert [prediction.label for prediction in found] == [
        prediction.label for prediction in expected
    ]
    for prediction, other in zip(found, expected, strict=True):
        assert prediction.scores == pytest.approx(other.scores, abs=1e-5)
    assert all(counts), "a device had nothing to do"
