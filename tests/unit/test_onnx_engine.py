"""workers/engines/onnx_engine.py: the graph gives the scores that torch gives; it is exported once."""

import importlib
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch

from feedmill.demo import sample_posts
from shared.errors import ModelError, SettingsError
from shared.messages import ClassifyOptions
from shared.settings import Settings
from tests.fakes.models import NLI, make_model
from workers.classifiers import Classifier
from workers.classifiers.choose import load_classifier
from workers.device import Device, choose
from workers.engines import onnx_engine
from workers.engines.network import LOGITS
from workers.engines.onnx_engine import PROVIDERS, OnnxEngine, exported
from workers.weights import EMBEDDED, locate

LABELS = ["sports", "technology", "food"]
TEXTS = ["The match ended in a draw.", "x", "My laptop will not boot. " * 30, "😀 </s> [SEP]"]


def loaded(model: object, cache: Path, **settings: Any) -> Classifier:
    chosen = Settings(model=str(model), cache_folder=cache, device="cpu", **settings)
    return load_classifier(chosen, choose("cpu", chosen.dtype, chosen.engine))


def scores(classifier: Classifier, texts: list[str], **options: Any) -> list[dict[str, float]]:
    """Scores of all texts, out of one forward pass."""
    rows = []
    for number, of_text in enumerate(classifier.prepare(texts, classifier.label_set(ClassifyOptions.parse(options)))):
        for row in of_text:
            row.owner = number
            rows.append(row)
    found = {row.owner: scores for row, scores in classifier.finish(rows, classifier.forward(rows))}
    return [found[number] for number in range(len(texts))]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Graphs of all tests: the same small model, made by several, is exported once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def posts() -> list[str]:
    return [post.text[:200] for post in sample_posts()[::5]]


@pytest.fixture(scope="module")
def exact(cache: Path, posts: list[str]) -> list[dict[str, float]]:
    """The embedded model's scores by torch."""
    return scores(loaded(EMBEDDED, cache, dtype="float32"), posts)


@pytest.mark.parametrize("architecture", ["bart", "bert", "deberta-v2"])
def test_scores_are_those_of_torch(tmp_path: Path, cache: Path, architecture: str) -> None:
    folder = make_model(architecture, tmp_path, NLI)
    for options in ({"labels": LABELS}, {"labels": LABELS, "multi_label": True}):
        exact = scores(loaded(folder, cache, dtype="float32"), TEXTS, **options)
        graph = loaded(folder, cache, engine="onnx")
        for ours, expected in zip(scores(graph, TEXTS, **options), exact, strict=True):
            assert ours == pytest.approx(expected, abs=1e-3)
        (alone,) = scores(graph, TEXTS[:1], **options)
        assert alone == pytest.approx(exact[0], abs=1e-3)


def test_the_embedded_model(
    cache: Path, posts: list[str], exact: list[dict[str, float]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for ours, expected in zip(scores(loaded(EMBEDDED, cache, engine="onnx"), posts), exact, strict=True):
        assert ours == pytest.approx(expected, abs=1e-3)
    assert "exporting sentence-transformers/all-MiniLM-L6-v2 to ONNX in float32, once" in caplog.text
    assert "with CPUExecutionProvider" in caplog.text
    caplog.clear()
    loaded(EMBEDDED, cache, engine="onnx")
    assert "exporting" not in caplog.text


def test_int8_labels_most_posts_as_float32_does(cache: Path, posts: list[str], exact: list[dict[str, float]]) -> None:
    quantised = scores(loaded(EMBEDDED, cache, engine="onnx", dtype="int8"), posts)
    same = sum(max(a, key=a.__getitem__) == max(b, key=b.__getitem__) for a, b in zip(exact, quantised, strict=True))
    assert same / len(posts) >= 0.9
    assert quantised != exact


def test_a_graph_for_gpus_is_in_half_precision(tmp_path: Path, cache: Path) -> None:
    """Run here on the CPU, to see that it computes what it should."""
    weights = locate(str(make_model("bert", tmp_path, NLI)))
    settings = Settings(cache_folder=cache)
    path = exported(weights, torch.float16, LOGITS, 0, settings)
    kinds = Counter(tensor.data_type for tensor in onnx.load(str(path)).graph.initializer)
    assert kinds[onnx.TensorProto.FLOAT16] > 20
    assert kinds[onnx.TensorProto.FLOAT] <= 2
    whole = exported(weights, torch.float32, LOGITS, 0, settings)
    ids = torch.randint(5, 60, (3, 20)).numpy()
    feed = {"input_ids": ids, "mask": torch.ones(3, 20, dtype=torch.long).numpy(), "token_type_ids": ids * 0}
    half, full = (
        onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"]).run(None, feed)[0]
        for graph in (path, whole)
    )
    assert abs(half - full).max() < 5e-2 * abs(full).max()


def test_a_model_that_cannot_be_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("an operator is missing\nand a page of text")

    monkeypatch.setattr(torch.onnx, "export", fail)
    folder = make_model("bert", tmp_path / "model", NLI)
    with pytest.raises(
        ModelError, match=r"cannot be exported to ONNX \(an operator is missing\); FEEDMILL_ENGINE=torch"
    ):
        loaded(folder, tmp_path / "cache", engine="onnx")
    assert not list((tmp_path / "cache" / "onnx").glob("*/")), "nothing half-made is left"


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    weights = locate(str(make_model("bert", tmp_path / "model", NLI)))
    (tmp_path / "cache").write_text("no folder")
    with pytest.raises(ModelError, match="^The ONNX graph of .* cannot be kept in .*: .*Not a directory"):
        exported(weights, torch.float32, LOGITS, 0, Settings(cache_folder=tmp_path / "cache"))


def test_without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, onnx_engine.__name__)
    with pytest.raises(SettingsError, match="^FEEDMILL_ENGINE=onnx needs onnxruntime, which `pip install"):
        importlib.import_module(onnx_engine.__name__)


def test_a_graph_that_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model("bert", tmp_path / "model", NLI)
    broken = tmp_path / "graph" / "model.onnx"
    broken.parent.mkdir()
    broken.write_bytes(b"not a graph")
    monkeypatch.setattr(onnx_engine, "exported", lambda *_: broken)
    with pytest.raises(ModelError, match="ONNX Runtime cannot load .* Delete its folder"):
        loaded(folder, tmp_path / "cache", engine="onnx")


def test_a_gpu_without_a_provider_for_it_is_not_taken_for_the_cpu(tmp_path: Path, cache: Path) -> None:
    weights = locate(str(make_model("bert", tmp_path, NLI)))
    gpu = Device(torch.device("cuda:0"), torch.float32, "for a test")
    with pytest.raises(ModelError, match="no working provider for cuda:0 here, only the CPU's: install"):
        OnnxEngine(weights, gpu, LOGITS, 0, Settings(cache_folder=cache))


def test_tensorrt_is_asked_for_by_documented_options(tmp_path: Path, cache: Path) -> None:
    """It cannot be run here: what is asked of it is looked at, and that it comes first."""
    engine = loaded(make_model("bert", tmp_path, NLI), cache, engine="onnx")._engine  # type: ignore[attr-defined]
    assert PROVIDERS["cuda"][0] == "TensorrtExecutionProvider"
    options = engine._options("TensorrtExecutionProvider", cache)
    assert options["trt_engine_cache_enable"]
    assert options["trt_engine_cache_path"] == str(cache / "tensorrt")


@pytest.mark.parametrize(
    ("dtype", "engine", "words"),
    [
        ("int8", "torch", "FEEDMILL_DTYPE: int8 requires FEEDMILL_ENGINE=onnx"),
        ("bfloat16", "onnx", "FEEDMILL_DTYPE: ONNX Runtime supports float32 or int8 on cpu, not bfloat16"),
    ],
)
def test_precisions_that_an_engine_does_not_have(dtype: str, engine: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        choose("cpu", dtype, engine)
