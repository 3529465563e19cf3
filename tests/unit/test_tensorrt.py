"""workers/models/engines/tensorrt.py: the options for TensorRT, and its refusals.

No test here needs a GPU.
"""

from itertools import product
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch

from feedmill.shared.errors import ModelError, SettingsError
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.device import Device, select_device
from feedmill.workers.models.engines.onnx_engine import (
    OnnxEngine,
    exported,
    input_names,
)
from feedmill.workers.models.engines.packing import LOGITS
from feedmill.workers.models.engines.tensorrt import TENSORRT, provider_options
from feedmill.workers.models.shapes import FEW
from feedmill.workers.models.tokenizer import Tokens, padded
from feedmill.workers.models.weights import locate
from tests.fakes.graphs import ExportedModel

ROWS, TOKENS = 100, 200
GPU = Device(torch.device("cuda:1"), torch.float16, "a GPU of a test")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs without bfloat16, as far as the choice of a device can see."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU of a test")


def shapes(options: dict[str, str], which: str) -> dict[str, tuple[int, ...]]:
    parts = [
        part.split(":") for part in options[f"trt_profile_{which}_shapes"].split(",")
    ]
    return {
        name: tuple(int(size) for size in shape.split("x")) for name, shape in parts
    }


def test_profiles_cover_every_shape_of_a_micro_batch(tmp_path: Path) -> None:
    options = provider_options(GPU, tmp_path, ["input_ids", "mask"], ROWS, TOKENS)
    smallest, typical, largest = (
        shapes(options, which) for which in ("min", "opt", "max")
    )
    assert smallest.keys() == typical.keys() == largest.keys() == {"input_ids", "mask"}
    for name in smallest:
        for low, middle, high in zip(
            smallest[name], typical[name], largest[name], strict=True
        ):
            assert low <= middle <= high
    numbers = (1, 2, 3, 50, 96, ROWS)
    lengths = (1, 7, 8, 9, 100, 193, TOKENS)
    for rows, tokens in product(numbers, lengths):
        ids, _, _ = padded([Tokens([5] * tokens)] * rows, 0, TOKENS, FEW)
        for low, size, high in zip(
            smallest["input_ids"], ids.shape, largest["input_ids"], strict=True
        ):
            assert low <= size <= high, (rows, tokens)


@pytest.mark.parametrize("tokens", [4, 8, 512])
def test_profiles_are_ordered_for_any_limit(tmp_path: Path, tokens: int) -> None:
    options = provider_options(GPU, tmp_path, ["input_ids"], 1, tokens)
    low, middle, high = (
        shapes(options, which)["input_ids"] for which in ("min", "opt", "max")
    )
    assert low <= middle <= high
    assert high[1] == tokens


@pytest.mark.parametrize(
    ("dtype", "enabled"), [(torch.float16, "True"), (torch.float32, "False")]
)
def test_options_name_the_gpu_its_precision_and_a_cache(
    tmp_path: Path, dtype: torch.dtype, enabled: str
) -> None:
    options = provider_options(
        GPU._replace(dtype=dtype), tmp_path, ["input_ids"], ROWS, TOKENS
    )
    assert options["device_id"] == "1"
    assert options["trt_fp16_enable"] == enabled
    for name in ("engine", "timing"):
        assert options[f"trt_{name}_cache_enable"] == "True"
        folder = Path(options[f"trt_{name}_cache_path"])
        assert folder.is_dir()
        assert folder.parent == tmp_path


@pytest.mark.usefixtures("gpus")
def test_computes_in_float16_on_a_gpu_only() -> None:
    chosen = select_device("auto", "auto", "tensorrt")
    assert (chosen.torch.type, chosen.dtype) == ("cuda", torch.float16)
    wide = chosen.for_model({"dtype": "bfloat16"}, "tensorrt")
    assert wide.dtype == torch.float32
    assert "TensorRT" in wide.dtype_reason
    with pytest.raises(SettingsError, match="bfloat16"):
        select_device("cuda", "bfloat16", "tensorrt")
    with pytest.raises(SettingsError, match="tensorrt does not support cpu"):
        select_device("cpu", "auto", "tensorrt")
    with pytest.raises(SettingsError, match="one device"):
        select_device("cuda:0+1", "auto", "tensorrt")


@pytest.fixture
def graph(exported_bert: ExportedModel) -> dict[str, Any]:
    """Arguments of an engine for a small model."""
    folder, cache = exported_bert
    settings = Settings(model=str(folder), engine="tensorrt", cache_folder=cache)
    device = GPU._replace(dtype=torch.float32)
    return {
        "weights": locate(str(folder)), "device": device, "reads": LOGITS, "pad_id": 0,
        "settings": settings, "max_tokens": 64
    }  # fmt: skip


def test_is_refused_without_the_library(graph: dict[str, Any], tmp_path: Path) -> None:
    """With a sentence, and before the model is exported."""
    cache = tmp_path / "cache"
    graph["settings"] = graph["settings"].model_copy(update={"cache_folder": cache})
    with pytest.raises(
        SettingsError,
        match=r"no TensorRT, only .*CPUExecutionProvider.*onnxruntime-gpu",
    ):
        OnnxEngine(**graph)
    assert not cache.exists()


def test_a_worker_refuses_it_without_a_gpu() -> None:
    settings = Settings(engine="tensorrt", device="cpu")
    with pytest.raises(SettingsError, match="tensorrt does not support cpu"):
        load_classifier(
            settings, select_device(settings.device, settings.dtype, settings.engine)
        )


@pytest.mark.filterwarnings("ignore:Specified provider:UserWarning")
def test_never_falls_back_in_silence(
    monkeypatch: pytest.MonkeyPatch, graph: dict[str, Any]
) -> None:
    """An installed provider may fail to start; ONNX Runtime then takes the next one."""
    monkeypatch.setattr(
        onnxruntime,
        "get_available_providers",
        lambda: [TENSORRT, "CPUExecutionProvider"],
    )
    with pytest.raises(
        ModelError, match="could not start TensorRT.*CPUExecutionProvider"
    ):
        OnnxEngine(**graph)


def test_names_the_inputs_of_the_graph(graph: dict[str, Any]) -> None:
    file = exported(graph["weights"], torch.float32, LOGITS, 0, graph["settings"])
    session = onnxruntime.InferenceSession(
        str(file), providers=["CPUExecutionProvider"]
    )
    assert input_names(file) == [given.name for given in session.get_inputs()]
