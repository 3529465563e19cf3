"""workers/models/engines/onnx_engine.py: the graph's scores equal torch's, and a graph is exported
once.
"""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from feedmill.shared.errors import ModelError
from feedmill.shared.settings import EMBEDDED_MODEL, Settings
from feedmill.stack.demo import sample_posts
from feedmill.workers.models.classifiers import Classifier
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.device import Device, select_device
from feedmill.workers.models.engines.onnx_engine import OnnxEngine
from feedmill.workers.models.engines.packing import LOGITS
from feedmill.workers.models.shapes import FEW, Shapes
from feedmill.workers.models.weights import locate
from tests.fakes.graphs import ExportedModel
from tests.fakes.models import NLI, make_model, scores_of

LABELS = ["sports", "technology", "food"]
#: An export takes seconds per layer.
ONE_LAYER: dict[str, Any] = {
    "num_hidden_layers": 1,
    "encoder_layers": 1,
    "decoder_layers": 1,
}
TEXTS = [
    "The match ended in a draw.",
    "x",
    "My laptop will not boot. " * 30,
    "😀 </s> [SEP]",
]


def loaded(model: object, cache: Path, **settings: Any) -> Classifier:
    chosen = Settings(model=str(model), cache_folder=cache, device="cpu", **settings)
    return load_classifier(chosen, select_device("cpu", chosen.dtype, chosen.engine))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for models other than the one that all tests share."""
    return tmp_path_factory.mktemp("cache")


def canary_scores(folder: Path, cache: Path) -> None:
    """Check that the graph's scores equal torch's."""
    for options in ({"labels": LABELS}, {"labels": LABELS, "multi_label": True}):
        exact = scores_of(loaded(folder, cache, dtype="float32"), TEXTS, **options)
        graph = loaded(folder, cache, engine="onnx")
        for ours, expected in zip(
            scores_of(graph, TEXTS, **options), exact, strict=True
        ):
            assert ours == pytest.approx(expected, abs=1e-3)
        (alone,) = scores_of(graph, TEXTS[:1], **options)
        assert alone == pytest.approx(exact[0], abs=1e-3)


def test_scores_match_torch(exported_bert: ExportedModel) -> None:
    canary_scores(*exported_bert)


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["bart", "deberta-v2"])
def test_scores_of_other_architectures_match_torch(
    tmp_path: Path, cache: Path, architecture: str
) -> None:
    canary_scores(make_model(architecture, tmp_path, NLI, **ONE_LAYER), cache)


class FewShapes(Device):
    """A CPU that pads to few shapes, as a GPU does."""

    @property
    def shapes(self) -> Shapes:
        return FEW


def test_padding_to_few_shapes_does_not_change_scores(
    exported_bert: ExportedModel,
) -> None:
    folder, cache = exported_bert
    exact = scores_of(loaded(folder, cache, engine="onnx"), TEXTS, labels=LABELS)
    settings = Settings(model=str(folder), cache_folder=cache, engine="onnx")
    few = load_classifier(
        settings, FewShapes(torch.device("cpu"), torch.float32, "for a test")
    )
    for ours, expected in zip(scores_of(few, TEXTS, labels=LABELS), exact, strict=True):
        assert ours == pytest.approx(expected, abs=1e-3)


def test_trained_model_matches_torch_and_is_exported_once(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its scores are torch's in float32, and nearly in int8, quantised from the same graph.

    How nearly, and so which of two close labels comes first, depends on the processor.

    The model is the first layer of the embedded one.
    """
    caplog.set_level(logging.INFO)
    model = tmp_path / "minilm"
    shutil.copytree(locate(EMBEDDED_MODEL).folder, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    posts = [post.text[:200] for post in sample_posts()[::5]]
    exact = scores_of(loaded(model, cache, dtype="float32"), posts)
    for ours, expected in zip(
        scores_of(loaded(model, cache, engine="onnx"), posts), exact, strict=True
    ):
        assert ours == pytest.approx(expected, abs=1e-3)
    assert re.search("export.*minilm.*float32", caplog.text)
    assert "CPUExecutionProvider" in caplog.text
    caplog.clear()
    loaded(model, cache, engine="onnx")
    assert not re.search("export.*minilm", caplog.text)
    quantised = scores_of(loaded(model, cache, engine="onnx", dtype="int8"), posts)
    for ours, expected in zip(quantised, exact, strict=True):
        assert ours == pytest.approx(expected, abs=0.05)
    assert quantised != exact
    assert not re.search("export.*minilm.*float32", caplog.text)


def test_gpu_without_provider_does_not_fall_back_to_cpu(
    exported_bert: ExportedModel,
) -> None:
    folder, cache = exported_bert
    weights = locate(str(folder))
    gpu = Device(torch.device("cuda:0"), torch.float32, "for a test")
    with pytest.raises(ModelError, match="cuda:0"):
        OnnxEngine(weights, gpu, LOGITS, 0, Settings(cache_folder=cache), 128)
