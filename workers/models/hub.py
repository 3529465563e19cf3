"""Models on the Hugging Face hub: download one commit of a repository into the hub's cache.

huggingface_hub reads HF_ENDPOINT, HF_HOME and HF_TOKEN, downloads files, and manages the cache, which all programs that
use the library share. This module turns the library's errors into ModelError and its progress bars into log lines. The
caller chooses the files to download.
"""

import logging
import os
import re
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from huggingface_hub import constants, get_cached_repo_tree, is_offline_mode, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm, validate_repo_id  # type: ignore[attr-defined]

from feedmill.shared.errors import ModelError, printable

logger = logging.getLogger(__name__)

#: Seconds between two progress lines of a download.
LOG_INTERVAL_S = 10.0
#: Maximum characters of a library's error in ours.
MAX_REASON = 300
#: Secrets that the library's errors may quote: tokens, passwords in URLs, signatures.
SECRET_PATTERN = re.compile(r"(?i:bearer)\s+\S+|\bhf_\w+|(?<=://)[^/@\s]+@|(?<=\w)\?\S+")
#: Pattern of files in folders that hold no part of a sentence-transformers model, such as onnx.
OTHER_FOLDERS = "[!0-9]*/*"
SET_REVISION = "Set FEEDMILL_REVISION to a branch, tag or commit of the model, or unset it for the main branch."
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


def download(model: str, revision: str | None, offline: bool, patterns: Sequence[str]) -> Download:
    """Download the files of a model that match the patterns, and not those in other folders than modules'.

    revision: branch, tag or commit; None is the main branch. offline: use only what is in the cache. Raises ModelError.
    """
    offline = offline or is_offline_mode()
    if revision is not None and ".." in revision:  # the cache uses it in a path
        raise ModelError(f"{revision!r} cannot be a revision in git. {SET_REVISION}")
    if not offline:
        logger.info("requesting the model %s from %s", model, _without_password(constants.ENDPOINT))
    began, bar = time.monotonic(), _log_bar(model)
    try:
        folder = Path(
            snapshot_download(
                model,
                revision=revision,
                local_files_only=offline,
                allow_patterns=list(patterns),
                ignore_patterns=[OTHER_FOLDERS],
                tqdm_class=bar,
            )
        )
    except Exception as error:  # the library does not wrap every error
        raise ModelError(_explained(error, model, revision, offline)) from None
    if bar.done:
        logger.info(
            "downloaded %s (%scommit %s): %s in %.0f s",
            model,
            f"{revision}, " if revision not in (None, folder.name) else "",
            folder.name,
            _megabytes(bar.done),
            time.monotonic() - began,
        )
    try:
        names = [file.path for file in get_cached_repo_tree(model, revision=folder.name)]
    except CachedRepoTreeNotFoundError:  # other programs may have filled the cache without storing the list of files
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return Download(folder, folder.name, names)


def _explained(error: Exception, model: str, revision: str | None, offline: bool) -> str:
    at_revision = f" at revision {revision!r}" if revision else ""
    where = f"from {_without_password(constants.ENDPOINT)} to {constants.HF_HUB_CACHE}"
    if offline:
        where = f"in {constants.HF_HUB_CACHE}, and downloads are off"
        advice = "Start once without FEEDMILL_OFFLINE and HF_HUB_OFFLINE, or copy the cache from another machine."
    elif isinstance(error, RevisionNotFoundError):
        advice = SET_REVISION
    elif isinstance(error, HfHubHTTPError):
        advice = (
            "Set FEEDMILL_MODEL to owner/name, such as facebook/bart-large-mnli, and HF_TOKEN to a token of an account "
            "with access if the model is private or gated."
        )
    else:
        advice = (
            "Check the network, HF_ENDPOINT, HF_TOKEN and the space in HF_HOME, and start again: complete files stay "
            "in the cache. FEEDMILL_OFFLINE=true uses only the cache."
        )
    reason = _without_secrets(str(error.__cause__ or error)) or type(error).__name__
    return f"Cannot find the model {model}{at_revision} {where}: {reason[:MAX_REASON].rstrip(' .')}. {advice}"


def announced_sha256(file: Path) -> str | None:
    """Return the SHA-256 that the hub announced for a file in its cache, or None.

    In the cache, each file is a link to a file that is named by its SHA-256.
    """
    try:
        content = file.readlink().name
    except OSError:
        return None
    return content if SHA256_PATTERN.fullmatch(content) else None


def _log_bar(model: str) -> Any:
    """Return a progress bar class for snapshot_download that logs instead. Its `done` is the number of bytes so far.

    Two bars count bytes, one from the network and one to disk. Compression makes them differ; the higher one counts.
    """

    class Bar(tqdm):
        done = 0.0
        logged_at = time.monotonic()

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **kwargs | {"disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            with self.get_lock():
                self.n += n or 0
                if not self._counts_bytes:
                    return
                Bar.done = max(Bar.done, self.n)
                if time.monotonic() - Bar.logged_at < LOG_INTERVAL_S:
                    return
                Bar.logged_at = time.monotonic()
            logger.info("downloading %s: %s", model, _megabytes(Bar.done))

    return Bar


def _without_secrets(text: str) -> str:
    if token := os.environ.get("HF_TOKEN", "").strip():
        text = text.replace(token, "***")
    return printable(SECRET_PATTERN.sub("***", " ".join(text.split())))


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _megabytes(size: float) -> str:
    megabytes = size / 1e6
    return f"{megabytes:,.0f} MB" if megabytes >= 10 else f"{megabytes:.1f} MB"
