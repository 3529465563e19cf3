"""registry.py: models whose scores are wrong in half precision are refused at their start."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from feedmill.shared.errors import ModelError
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers import registry
from feedmill.workers.models.classifiers.fixed_labels import SequenceClassifier
from feedmill.workers.models.classifiers.registry import load_classifier
from tests.fakes.models import NLI, fp, make_model, make_sentence_model
from tests.support import naming

LABELS = {0: "NEGATIVE", 1: "POSITIVE"}


def change(folder: Path, changes: dict[str, Any]) -> Path:
    """Apply functions to tensors of a model's weights file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(
        tensors | {name: changed(tensors[name]) for name, changed in changes.items()},
        file,
    )
    return folder


def overflowing(folder: Path) -> Path:
    """Save a model whose activations exceed the maximum of float16, but not that of bfloat16."""
    make_model("bert", folder, LABELS)
    return change(
        folder,
        {"bert.encoder.layer.1.output.LayerNorm.weight": lambda weight: weight * 1e5},
    )


def saturated(folder: Path) -> Path:
    """Save a model whose logits differ in float32 only: half precision rounds their differences
    off.
    """
    make_model("bert", folder, LABELS)
    return change(
        folder,
        {
            "classifier.bias": lambda bias: bias + 3000,
            "classifier.weight": lambda weight: weight / 50,
        },
    )


def constant(folder: Path) -> Path:
    """Save a model that gives all posts the same scores."""
    make_model("bert", folder, LABELS)
    return change(folder, {"classifier.weight": torch.zeros_like})


def test_refuses_scores_that_are_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(model=str(overflowing(tmp_path)))
    for available, advice in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(registry, "has_bfloat16", lambda _, found=available: found)
        with pytest.raises(
            ModelError, match=naming(tmp_path, "float16", f"FEEDMILL_DTYPE={advice}")
        ):
            load_classifier(settings, fp(torch.float16))
    for dtype in (torch.bfloat16, torch.float32):
        assert load_classifier(settings, fp(dtype)).kind == "sequence"


def test_refuses_scores_that_are_alike_in_half_precision_only(tmp_path: Path) -> None:
    settings = Settings(model=str(saturated(tmp_path)))
    with pytest.raises(
        ModelError, match=naming(tmp_path, "bfloat16", "FEEDMILL_DTYPE=float32")
    ):
        load_classifier(settings, fp(torch.bfloat16))
    assert load_classifier(settings, fp(torch.float32)).kind == "sequence"


def test_refuses_scores_that_are_alike_if_float32_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, needed = Settings(model=str(constant(tmp_path))), 10**6
    monkeypatch.setattr(registry, "parameters", lambda _: needed)
    monkeypatch.setattr(registry, "_memory", lambda _: 3 * needed)
    with pytest.raises(ModelError, match="FEEDMILL_DTYPE=float32"):
        load_classifier(settings, fp(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accepts_scores_that_are_alike_in_every_precision(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    """A model may legitimately have the same scores for the canary posts, such as 0 for everything
    that is rare.
    """
    assert (
        load_classifier(Settings(model=str(constant(tmp_path))), fp(dtype)).kind
        == "sequence"
    )
    assert [
        record.levelname
        for record in caplog.records
        if record.name == registry.__name__
    ] == ["WARNING"]


def test_scores_few_labels_if_each_is_a_row(tmp_path: Path) -> None:
    folder = make_model("bert", tmp_path / "nli", NLI)
    names = [f"label {number}" for number in range(200)]
    loaded = load_classifier(
        Settings(model=str(folder), labels=names), fp(torch.float32)
    )
    assert [list(scores) for scores in registry.canary_scores(loaded)] == [
        names[:2]
    ] * len(registry.CANARY_POSTS)
    folder = make_sentence_model(tmp_path / "similarity")
    loaded = load_classifier(
        Settings(model=str(folder), labels=names), fp(torch.float32)
    )
    assert [list(scores) for scores in registry.canary_scores(loaded)] == [names] * len(
        registry.CANARY_POSTS
    )


def test_refuses_a_classifier_that_leaves_out_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model("bert", tmp_path, LABELS)
    finish = SequenceClassifier.finish

    def without_first(self: SequenceClassifier, *found: Any) -> Any:
        return [
            (row, {"POSITIVE": scores["POSITIVE"]})
            for row, scores in finish(self, *found)
        ]

    monkeypatch.setattr(SequenceClassifier, "finish", without_first)
    with pytest.raises(ModelError, match=naming(folder, "POSITIVE")):
        load_classifier(Settings(model=str(folder)), fp(torch.float32))
