"""Find every file that loading a model reads, check it before it is read, and identify all of them
by one digest.

A model's folder may come from anyone, and a worker that serves another model loads it. So only
regular files within the folder count, each of a bounded size; links may lead out of it only into
the hub's own cache. The digest covers every file, since a configuration, a tokenizer or a dense
layer decides a label as much as the weights do. Weights are hashed before they are loaded, and
`check_unchanged` compares afterwards: what was loaded is what was hashed.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from feedmill.shared.errors import FeedmillError, ModelError, clause, printable

CONFIG_FILE = "config.json"
#: Pattern of a model's configurations: transformers reads another one if the first names it for
#: its version.
CONFIG_PATTERN = "config*.json"
WEIGHTS_FILE = "model.safetensors"
#: Lists the weight files of a model that is split into several.
INDEX_FILE = "model.safetensors.index.json"
#: The head of a model that `feedmill train --head` or `feedmill label` wrote
#: (classifiers/fixed_labels.py).
HEAD_FILE = "head.safetensors"
#: Lists the modules of a sentence-transformers model.
MODULES_FILE = "modules.json"
#: Names a base model somewhere else, whose weights the adapter in the same folder changes.
ADAPTER_FILE = "adapter_config.json"
#: Suffix of files with weights.
WEIGHTS_SUFFIX = ".safetensors"
#: Names and patterns of the files that transformers, tokenizers and this package read in a model's
#: folder: the configuration, the tokenizer with its vocabulary, merges and special tokens, and
#: sentence-transformers' own. The vocabularies are those that transformers' tokenizers name
#: (vocab_files_names).
CONFIGURATION_PATTERNS = (
    CONFIG_FILE, "config.*.json", "generation_config.json", INDEX_FILE, MODULES_FILE,
    "config_setfit.json",
    "config_sentence_transformers.json", "sentence_*_config.json", "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json", "chat_template.jin*", "chat_template.json", "processor_config.json",
    "preprocessor_config.json",
)  # fmt: skip
TOKENIZER_PATTERNS = (
    "tokenizer.json", "tokenizer.*.json", "vocab.json", "vocab.txt", "vocab-*.json",
    "*_vocab.json", "merges.txt",
    "sentencepiece*.model", "spiece.model", "spm*.model", "tokenizer.model*", "tiktoken.model",
    "source.spm",
    "target.spm", "bpe.codes", "dict.txt", "tekken.json", "emoji.json", "normalizer.json",
    "byte_maps.json",
    "word_shape.json", "word_pronunciation.json", "prophetnet.tokenizer",
)  # fmt: skip
#: Files read in a module's folder. Static embeddings have their tokenizer there.
MODULE_PATTERNS = (CONFIG_FILE, WEIGHTS_FILE, "tokenizer.json")
#: Python code, read only if the settings allow it. Such code may read any other configuration.
CODE_PATTERNS = ("*.py", "*.json", "*.txt")
#: Maximum bytes of a configuration, and of a vocabulary. The largest tokenizer.json known has 60
#: MB.
MAX_CONFIGURATION_BYTES = 2**24
MAX_TOKENIZER_BYTES = 2**27
#: Maximum entries of a model's folder, and maximum modules in its modules.json.
MAX_ENTRIES = 10_000
MAX_MODULES = 64
#: A weights file with fewer bytes on the disk than one in this many consists of holes. No file
#: system compresses so.
MAX_SPARSENESS = 16
#: Maximum characters of a name, and of a library's error, in ours.
MAX_NAME = 100
MAX_REASON = 600
#: Bytes to read at once when hashing.
CHUNK_BYTES = 2**20


class Written(NamedTuple):
    """The identity of a file's content on its file system. Times are in nanoseconds."""

    device: int
    inode: int
    size: int
    modified_at: int


class Stamp(NamedTuple):
    """The state of a file, as its file system tells it."""

    written: Written
    #: Time of the last change of content or status, in nanoseconds.
    status_changed_at: int


class ModelFile(NamedTuple):
    """A file that a load reads."""

    #: Path relative to the model's folder, with slashes.
    name: str
    path: Path
    stamp: Stamp
    #: SHA-256 in hex; "" until it is computed.
    sha256: str = ""


@contextmanager
def loading(
    what: object, advice: str = "Download the model again, or use another one."
) -> Iterator[None]:
    """Raise ModelError for any other error inside the block: broken files raise many kinds. what:
    what is loaded.

    The tokenizers' Rust code panics at some files. pyo3 raises that as PanicException, which is no
    Exception.
    """
    try:
        yield
    except FeedmillError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        reason = printable(clause(error)).strip()[:MAX_REASON]
        if not reason:
            reason = type(error).__name__
        raise ModelError(f"Cannot load {what}: {reason}. {advice}") from error


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of Rust code. pyo3 makes its class when it is first
    raised.
    """
    return type(error).__name__ == "PanicException"


def read_json(file: Path, kind: type = dict) -> Any:
    """Return the content of a JSON file, of this kind. Raises ModelError."""
    with loading(file), open_regular(file) as opened:
        status = os.fstat(opened.fileno())
        if status.st_size > MAX_CONFIGURATION_BYTES:
            raise ValueError(f"it has more than {MAX_CONFIGURATION_BYTES:,} bytes")
        text = opened.read(MAX_CONFIGURATION_BYTES)
        content = json.loads(text)
        if not isinstance(content, kind):
            raise TypeError(f"it must contain a {kind.__name__}")
        return content


@contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """Open a regular file for reading.

    A pipe without a writer does not block. Raises ModelError, OSError.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    with os.fdopen(descriptor, "rb") as opened:
        _check_kind(path, os.fstat(descriptor))
        yield opened


def _check_kind(path: Path, status: os.stat_result) -> None:
    """Raise ModelError for anything but a regular file: pipes never end, devices have no size."""
    if stat.S_ISREG(status.st_mode):
        return
    kind = "special file"
    for is_kind, name in FILE_KINDS:
        if is_kind(status.st_mode):
            kind = name
    raise ModelError(
        f"{path} is a {kind}, not a file. Copy the model's own file to that path."
    )


FILE_KINDS = (
    (stat.S_ISDIR, "folder"),
    (stat.S_ISFIFO, "named pipe"),
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
)


def model_files(
    folder: Path, shards: Sequence[str], *, remote_code: bool, linked: bool = False
) -> tuple[ModelFile, ...]:
    """Return every file that loading the model in a folder reads, sorted by name and without
    digests.

    shards: names of its weight files. remote_code: Python code that comes with the model is
    loaded, too. linked: allow links to any file. Raises ModelError for a file that may not be
    read.
    """
    patterns = [
        *CONFIGURATION_PATTERNS,
        *TOKENIZER_PATTERNS,
        HEAD_FILE,
        *shards,
    ]
    if remote_code:
        patterns += CODE_PATTERNS
    names = matching(folder, patterns)
    for module in module_folders(folder):
        for name in matching(folder / module, MODULE_PATTERNS):
            names.add(f"{module}/{name}")
    roots = _allowed_roots(folder)
    if linked:
        roots = (Path("/"),)
    files = []
    for name in sorted(names):
        file = _model_file(folder, name, roots)
        files.append(file)
    return tuple(files)


def matching(folder: Path, patterns: Sequence[str]) -> set[str]:
    """Return the names in a folder that match a pattern; none if it is no folder.

    Raises ModelError.
    """
    if not folder.is_dir():
        return set()
    names = set()
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number == MAX_ENTRIES:
                raise ModelError(
                    f"{folder} has more than {MAX_ENTRIES:,} entries, so it is not a model's "
                    "folder. Name the folder that contains the model alone."
                )
            if any(fnmatch(entry.name, pattern) for pattern in patterns):
                names.add(entry.name)
    return names


def module_folders(folder: Path) -> list[str]:
    """Return the folders of a sentence-transformers model's modules, relative to its own and other
    than that.

    Raises ModelError for a folder that is not below the model's.
    """
    folders: dict[str, None] = {}
    for _, path in read_modules(folder):
        if path:
            folders[path] = None
    return list(folders)


def read_modules(folder: Path) -> list[tuple[str, str]]:
    """Return the class, without its package, and the folder, relative to the model's, of each
    module in modules.json.

    Empty without that file. Raises ModelError.
    """
    file = folder / MODULES_FILE
    if not file.exists():
        return []
    content: list[Any] = read_json(file, list)
    if len(content) > MAX_MODULES:
        raise ModelError(
            f"{file} lists {len(content):,} modules; {MAX_MODULES} are supported. "
            "Use another model."
        )
    modules = []
    for module in content:
        if not isinstance(module, dict):
            raise ModelError(
                f"{file} must list objects with a type and a path. Download it again."
            )
        class_path = str(module.get("type", ""))
        _, _, kind = class_path.rpartition(".")
        kind = printable(kind)[:MAX_NAME]
        path = module_path(file, module.get("path", ""))
        modules.append((kind, path))
    return modules


def module_path(file: Path, path: object) -> str:
    """Return a module's folder relative to the model's, "" for the same folder. file: names it,
    for errors.

    Raises ModelError if it is not below the model's folder.
    """
    pure = PurePosixPath(str(path))
    if (
        not isinstance(path, str)
        or pure.is_absolute()
        or ".." in pure.parts
        or "\0" in path
    ):
        raise ModelError(
            f"{file} names the module folder {printable(str(path)):.200}, which is not in the "
            "model's own folder. Copy that module into the folder and correct its path."
        )
    if pure == PurePosixPath():
        return ""
    return str(pure)


def _allowed_roots(folder: Path) -> tuple[Path, ...]:
    """Return the folders in which the files of a model may be, after links are resolved.

    In the hub's cache, the files of a snapshot are links to blobs of the same repository, and
    those may be links to blobs that several repositories share.
    """
    real = folder.resolve()
    repository = real.parent.parent
    in_snapshot = real.parent.name == "snapshots"
    if in_snapshot and repository.name.startswith("models--"):
        return (
            real,
            repository / "blobs",
            repository.parent / "blobs",
        )
    return (real,)


def _model_file(folder: Path, name: str, roots: Sequence[Path]) -> ModelFile:
    """Return a file of a model after checking its place, kind and size.

    Raises ModelError, OSError.
    """
    path = folder / name
    real = path.resolve()
    if not any(real.is_relative_to(root) for root in roots):
        raise ModelError(
            f"{path} is a link to {real}, outside the model's folder. Copy that file into the "
            "folder instead."
        )
    if not path.exists():
        raise ModelError(
            f"{path} is a link to a file that does not exist. Download or copy the model again."
        )
    status = path.stat()
    _check_kind(path, status)
    limit = _size_limit(path.name)
    if limit is not None and status.st_size > limit:
        raise ModelError(
            f"{path} has {status.st_size:,} bytes; a model's {path.name} may have {limit:,}. Use "
            "another model."
        )
    return ModelFile(name, path, _stamp(status))


def _size_limit(name: str) -> int | None:
    """Return the maximum bytes of a file; None for weights, which must fit the device."""
    if name.endswith(WEIGHTS_SUFFIX):
        return None
    if any(fnmatch(name, pattern) for pattern in TOKENIZER_PATTERNS):
        return MAX_TOKENIZER_BYTES
    return MAX_CONFIGURATION_BYTES


def _stamp(status: os.stat_result) -> Stamp:
    written = Written(
        device=status.st_dev,
        inode=status.st_ino,
        size=status.st_size,
        modified_at=status.st_mtime_ns,
    )
    return Stamp(written, status_changed_at=status.st_ctime_ns)


def with_digests(files: Sequence[ModelFile]) -> tuple[ModelFile, ...]:
    """Return the files with their SHA-256. Raises ModelError, OSError."""
    hashed = []
    for file in files:
        sha256 = sha256_of(file.path)
        hashed.append(file._replace(sha256=sha256))
    return tuple(hashed)


def digest_of(files: Sequence[ModelFile]) -> str:
    """Return the digest of a model: the SHA-256 of what `sha256sum` prints for its files in the
    order of their names.

    A model's folder may have any path, so the names are relative to it.
    """
    lines = [f"{file.sha256}  {file.name}\n" for file in sorted(files)]
    text = "".join(lines)
    content = text.encode("utf-8", "surrogateescape")
    return hashlib.sha256(content).hexdigest()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file in hex. Raises ModelError, OSError.

    Reads as many bytes as the file has now: a file that grows does not keep the worker.
    """
    digest = hashlib.sha256()
    with open_regular(path) as opened:
        status = os.fstat(opened.fileno())
        _check_holes(path, opened, status)
        rest = status.st_size
        while rest and (chunk := opened.read(min(rest, CHUNK_BYTES))):
            digest.update(chunk)
            rest -= len(chunk)
    if rest:
        raise ModelError(
            f"{path} shrank while it was read. Copy the model completely, then load it."
        )
    return digest.hexdigest()


def _check_holes(path: Path, opened: BufferedReader, status: os.stat_result) -> None:
    """Raise ModelError for a file that consists of holes: a download that reserved its space and
    never finished.
    """
    stored_bytes = status.st_blocks * 512
    if stored_bytes * MAX_SPARSENESS >= status.st_size or not hasattr(os, "SEEK_HOLE"):
        return
    descriptor = opened.fileno()
    # the end of the file, where file systems have no holes
    hole = os.lseek(descriptor, 0, os.SEEK_HOLE)
    os.lseek(descriptor, 0, os.SEEK_SET)
    if hole < status.st_size:
        raise ModelError(
            f"{path} has {status.st_size:,} bytes, of which the disk holds {stored_bytes:,}: the "
            "rest was never written. Download it again."
        )


def check_unchanged(
    folder: Path, files: Sequence[ModelFile], listed: Sequence[ModelFile]
) -> None:
    """Raise ModelError if the files of a model changed since they were hashed. listed: the files
    that are there now.

    Files without weights are hashed again: a change within one tick of the file system's clock
    leaves its times alone. So are weights of which only the status changed: hard links, which
    installers and backups make, change nothing else.
    """
    before = {file.name: file for file in files}
    now = {file.name: file for file in listed}
    added_or_removed = before.keys() ^ now.keys()
    common = before.keys() & now.keys()
    changed = sorted(added_or_removed)
    for name in sorted(common):
        if _has_changed(before[name], now[name]):
            changed.append(name)
    if changed:
        path = folder / changed[0]
        raise ModelError(
            f"{path} changed while the model was loaded. Copy the model "
            "completely, then load it."
        )


def _has_changed(before: ModelFile, now: ModelFile) -> bool:
    """Return whether a file has another content than when it was hashed."""
    if before.stamp.written != now.stamp.written:
        return True
    has_weights = now.name.endswith(WEIGHTS_SUFFIX)
    if has_weights and before.stamp == now.stamp:
        return False
    return sha256_of(now.path) != before.sha256
