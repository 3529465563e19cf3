"""Models on the Hugging Face hub: download one commit of a repository into the hub's cache.

huggingface_hub reads HF_ENDPOINT, HF_HOME and HF_TOKEN, downloads files, and manages the cache, which all programs that
use the library share. This module turns the library's errors into ModelError without secrets. The caller chooses the
files to download.
"""

import logging
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import constants, get_cached_repo_tree, is_offline_mode, snapshot_download
from huggingface_hub.errors import CachedRepoTreeNotFoundError, HFValidationError
from huggingface_hub.utils import tqdm, validate_repo_id  # type: ignore[attr-defined]

from feedmill.shared.errors import ModelError, printable

logger = logging.getLogger(__name__)

#: Maximum characters of a library's error in ours.
MAX_REASON = 300
#: Secrets that the library's errors may quote: tokens, passwords in URLs, signatures.
SECRET_PATTERN = re.compile(r"(?i:bearer)\s+\S+|\bhf_\w+|(?<=://)[^/@\s]+@|(?<=\w)\?\S+")
#: Pattern of files in folders that hold no part of a sentence-transformers model, such as onnx.
OTHER_FOLDERS = "[!0-9]*/*"
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")


class _Relay(logging.Handler):
    """Repeat each of the library's log records in one line, without secrets.

    The library's own handler prints several lines per event, with signed URLs.
    """

    def emit(self, record: logging.LogRecord) -> None:
        logger.log(record.levelno, "%s", _without_secrets(record.getMessage()))


_library = logging.getLogger("huggingface_hub")
_library.handlers = [_Relay()]
_library.propagate = False
logging.getLogger("httpx2").setLevel(logging.WARNING)  # the library's HTTP client logs every request


class _Bar(tqdm):
    """A progress bar, on terminals only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"disable": None})  # type: ignore[no-untyped-call]


def is_name(model: str) -> bool:
    """Return whether a hub model can have this name: owner/name, or a name alone for a few old models."""
    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return True


class Download(NamedTuple):
    """One commit of a repository: its folder in the cache, and the paths of all its files, downloaded or not."""

    folder: Path
    commit: str
    names: Collection[str]


def download(model: str, revision: str | None, patterns: Sequence[str]) -> Download:
    """Download the files of a model that match the patterns, and not those in other folders than modules'.

    revision: branch, tag or commit; None is the main branch. Raises ModelError.
    """
    offline = is_offline_mode()
    wanted = model if revision is None else f"{model} at revision {revision!r}"
    source = f"the cache {constants.HF_HUB_CACHE}" if offline else _without_secrets(constants.ENDPOINT)
    if not offline:
        logger.info("requesting the model %s from %s", wanted, source)
    try:
        if revision is not None and ".." in revision:  # the cache uses it in a path
            raise ValueError("git has no such revisions")
        folder = Path(
            snapshot_download(
                model,
                revision=revision,
                local_files_only=offline,
                allow_patterns=list(patterns),
                ignore_patterns=[OTHER_FOLDERS],
                tqdm_class=_Bar,
            )
        )
    except Exception as error:  # the library does not wrap every error
        reason = _without_secrets(str(error.__cause__ or error)) or type(error).__name__
        advice = (
            "Start once without HF_HUB_OFFLINE, or copy the cache from another machine."
            if offline
            else "Check FEEDMILL_MODEL (owner/name, such as facebook/bart-large-mnli), FEEDMILL_REVISION, the network, "
            "HF_ENDPOINT, HF_TOKEN (for private and gated models) and the space in HF_HOME. HF_HUB_OFFLINE=1 uses "
            "only the cache."
        )
        raise ModelError(
            f"Cannot find the model {wanted} in {source}: {reason[:MAX_REASON].rstrip(' .')}. {advice}"
        ) from None
    logger.info("the model %s is at commit %s", wanted, folder.name)
    try:
        names = [file.path for file in get_cached_repo_tree(model, revision=folder.name)]
    except CachedRepoTreeNotFoundError:  # other programs may have filled the cache without storing the list of files
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return Download(folder, folder.name, names)


def announced_sha256(file: Path) -> str | None:
    """Return the SHA-256 that the hub announced for a file in its cache, or None.

    In the cache, each file is a link to a file that is named by its SHA-256.
    """
    content = file.readlink().name if file.is_symlink() else ""
    return content if SHA256_PATTERN.fullmatch(content) else None


def _without_secrets(text: str) -> str:
    if token := os.environ.get("HF_TOKEN", "").strip():
        text = text.replace(token, "***")
    return printable(SECRET_PATTERN.sub("***", " ".join(text.split())))
