"""Models on the Hugging Face hub: download one commit of a repository into the hub's cache.

huggingface_hub reads HF_ENDPOINT, HF_HOME and HF_TOKEN, downloads files, and manages the cache, which all programs that
use the library share. This module turns the library's errors into ModelError and its progress bars into log lines. The
caller chooses the files to download.
"""

import glob
import logging
import os
import re
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, get_cached_repo_tree, is_offline_mode, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.utils import tqdm, validate_repo_id  # type: ignore[attr-defined]

from shared.errors import ModelError, printable

logger = logging.getLogger(__name__)

#: Seconds between two progress lines of a download.
LOG_INTERVAL_S = 10.0
#: Maximum characters of a library's error in ours.
MAX_REASON = 300
#: Secrets that the library's errors may quote: tokens, passwords in URLs, signatures.
SECRET_PATTERN = re.compile(r"(?i:bearer)\s+\S+|\bhf_\w+|(?<=://)[^/@\s]+@|(?<=\w)\?\S+")
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


class Repository:
    """One commit of a model's repository: its file sizes in bytes by path, and its folder in the cache.

    revision: branch, tag or commit; None is the main branch. offline: use only what is in the cache. first: small files
    that the constructor downloads, if they exist. Raises ModelError, as `fetch` does.
    """

    def __init__(self, name: str, revision: str | None, offline: bool, first: Collection[str]) -> None:
        self.name = name
        self._revision = revision
        self._offline = offline or is_offline_mode()
        self._endpoint = _without_password(constants.ENDPOINT)
        if not self._offline:
            logger.info("requesting the model %s from %s", name, self._endpoint)
        if revision is not None and ".." in revision:  # the cache uses it in a path
            raise ModelError(f"{revision!r} cannot be a revision in git. {SET_REVISION}")
        with self._explained():
            found = HfApi().resolve_revision(name, revision=revision, local_files_only=self._offline)
        self.commit: str = found.resolved
        self.folder = self._download(first, None)
        self.sizes = self._list()

    def fetch(self, files: Collection[str]) -> None:
        """Download the files that `folder` lacks."""
        total = sum(self.sizes[file] for file in files if not (self.folder / file).exists())
        if self._offline or not total:
            self._download(files, None)  # raises ModelError if one is missing
            return
        branch = f"{self._revision}, " if self._revision not in (None, self.commit) else ""
        logger.info("downloading %s (%scommit %s): %s MB", self.name, branch, self.commit, _megabytes(total))
        began = time.monotonic()
        self._download(files, total)
        logger.info("downloaded %s: %s MB in %.0f s", self.name, _megabytes(total), time.monotonic() - began)

    def _download(self, files: Collection[str], total: int | None) -> Path:
        with self._explained():
            # A commit never changes, so files in the cache need no request.
            return self._snapshot(files, self._offline or self._is_there(files), total)

    def _is_there(self, files: Collection[str]) -> bool:
        try:
            get_cached_repo_tree(self.name, revision=self.commit)  # without the list, missing files go unnoticed
            self._snapshot(files, True, None)
        except (CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
            return False
        return True

    def _snapshot(self, files: Collection[str], local: bool, total: int | None) -> Path:
        folder = snapshot_download(
            self.name,
            revision=self.commit,
            local_files_only=local,
            allow_patterns=[glob.escape(file) for file in files],
            tqdm_class=_log_bar(self.name, total),
        )
        return Path(folder)

    def _list(self) -> dict[str, int]:
        try:
            return {file.path: file.size for file in get_cached_repo_tree(self.name, revision=self.commit)}
        except CachedRepoTreeNotFoundError:
            # Other programs may have filled the cache without storing the list of files.
            files = [path for path in self.folder.rglob("*") if path.is_file()]
            return {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in files}

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the library does not wrap every error
            at_revision = f" at revision {self._revision!r}" if self._revision else ""
            where = f"from {self._endpoint} to {constants.HF_HUB_CACHE}"
            if self._offline:
                where = f"in {constants.HF_HUB_CACHE}, and downloads are off"
            raise ModelError(
                f"Cannot find the model {self.name}{at_revision} {where}: {_reason(error)}. {self._advice(error)}"
            ) from None

    def _advice(self, error: Exception) -> str:
        if self._offline:
            return "Start once without FEEDMILL_OFFLINE and HF_HUB_OFFLINE, or copy the cache from another machine."
        if isinstance(error, RevisionNotFoundError):
            return SET_REVISION
        if isinstance(error, HfHubHTTPError):
            return (
                "Set FEEDMILL_MODEL to owner/name, such as facebook/bart-large-mnli, and HF_TOKEN to a token of an "
                "account with access if the model is private or gated."
            )
        return (
            "Check the network, HF_ENDPOINT, HF_TOKEN and the space in HF_HOME, and start again: complete files stay "
            "in the cache. FEEDMILL_OFFLINE=true uses only the cache."
        )


def announced_sha256(file: Path) -> str | None:
    """Return the SHA-256 that the hub announced for a file in its cache, or None.

    In the cache, each file is a link to a file that is named by its SHA-256.
    """
    try:
        content = file.readlink().name
    except OSError:
        return None
    return content if SHA256_PATTERN.fullmatch(content) else None


def _log_bar(name: str, total: int | None) -> type[Any]:
    """Return a progress bar class for snapshot_download that logs instead. total: bytes; None to log nothing.

    Two bars count bytes, one from the network and one to disk. Compression makes them differ; either may log.
    """
    logged_at = time.monotonic()

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **kwargs | {"disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            nonlocal logged_at
            with self.get_lock():
                self.n += n or 0
                is_due = time.monotonic() - logged_at >= LOG_INTERVAL_S
                if not (total and self._counts_bytes and is_due and self.n < total):
                    return
                logged_at = time.monotonic()
            logger.info("downloading %s: %.0f%% of %s MB", name, 100 * self.n / total, _megabytes(total))

    return Bar


def _reason(error: BaseException) -> str:
    """Return a library's error in one line, without secrets."""
    cause = error.__cause__ if isinstance(error, RevisionResolutionError) else None
    text = _without_secrets(str(cause or error)) or type(error).__name__
    return text[:MAX_REASON].rstrip(" .")


def _without_secrets(text: str) -> str:
    if token := os.environ.get("HF_TOKEN", "").strip():
        text = text.replace(token, "***")
    return printable(SECRET_PATTERN.sub("***", " ".join(text.split())))


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _megabytes(size: float) -> str:
    megabytes = size / 1e6
    return f"{megabytes:,.0f}" if megabytes >= 10 else f"{megabytes:.1f}"
