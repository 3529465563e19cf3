"""Models on the Hugging Face hub: download one commit of a repository into the hub's cache.

huggingface_hub reads HF_ENDPOINT, HF_HOME and HF_TOKEN, downloads files, and manages the cache, which all programs that
use the library share. This module turns the library's errors into ModelError and its progress bars into log lines. The
caller chooses the files to download.
"""

import errno
import glob
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, get_cached_repo_tree, is_offline_mode, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.utils import tqdm, validate_repo_id  # type: ignore[attr-defined]

from shared.errors import ModelError, printable

logger = logging.getLogger(__name__)

#: Minimum seconds between two progress lines of a download. A slow download logs one line per tenth of its size.
LOG_INTERVAL_S = 5.0
#: Maximum seconds between two progress lines.
MAX_LOG_INTERVAL_S = 60.0
#: Secrets that the library's errors may quote: tokens, passwords in URLs, signatures.
SECRET_PATTERN = re.compile(r"(?i:bearer)\s+\S+|\bhf_\w+|(?<=://)[^/@\s]+@|(?<=\w)\?\S+")
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")


class _Relay(logging.Handler):
    """Repeat each of the library's log records in one line, without secrets.

    The library's own handler prints several lines per event, with signed URLs.
    """

    def emit(self, record: logging.LogRecord) -> None:
        logger.log(record.levelno, "%s", _without_secrets(" ".join(record.getMessage().split())))


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
        if revision is not None and ".." in revision:  # impossible in git, and the cache uses it in a path
            raise ModelError(self._no_revision())
        if not self._offline:
            _refuse_unreadable_token()
            logger.info("requesting the model %s from %s", name, self._endpoint)
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
        progress = DownloadProgress(self.name, f"{branch}commit {self.commit}", total)
        self._download(files, progress)
        progress.end()

    def _download(self, files: Collection[str], progress: "DownloadProgress | None") -> Path:
        with self._explained():
            # A commit never changes, so files in the cache need no request.
            return self._snapshot(files, self._offline or self._is_there(files), progress)

    def _is_there(self, files: Collection[str]) -> bool:
        try:
            get_cached_repo_tree(self.name, revision=self.commit)  # without the list, missing files go unnoticed
            self._snapshot(files, True, None)
        except (CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
            return False
        return True

    def _snapshot(self, files: Collection[str], local: bool, progress: "DownloadProgress | None") -> Path:
        folder = snapshot_download(
            self.name,
            revision=self.commit,
            local_files_only=local,
            allow_patterns=[glob.escape(file) for file in files],
            tqdm_class=_silent_bar(progress),
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
            raise ModelError(self._explain(error)) from None

    def _explain(self, error: Exception) -> str:
        name, hub = self.name, f"The hub at {self._endpoint}"
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        match error:
            case GatedRepoError():
                sentence = (
                    f"The model {name} is gated: its authors grant access on request. Request it at "
                    f"{self._endpoint}/{name} and set HF_TOKEN to a token of the account that has access."
                )
            case RepositoryNotFoundError():
                sentence = (
                    f"{hub} has no public model {name}. Set FEEDMILL_MODEL to owner/name, such as "
                    "facebook/bart-large-mnli, or to an existing folder, and HF_TOKEN if the model is private or gated."
                )
            case RevisionNotFoundError():
                sentence = self._no_revision()
            case RevisionResolutionError() | LocalEntryNotFoundError() if self._offline:
                at_revision = f" at revision {self._revision}" if self._revision else ""
                sentence = (
                    f"The model {name}{at_revision} is not completely in the cache {constants.HF_HUB_CACHE}, "
                    "and downloads are off. Start once without FEEDMILL_OFFLINE and HF_HUB_OFFLINE, or copy the cache "
                    "from a machine that has the model."
                )
            case RevisionResolutionError() | LocalEntryNotFoundError():
                sentence = (
                    f"{hub} is unreachable ({_reason(error.__cause__ or error)}), and the model {name} is not "
                    "completely in the cache. Check the network, HF_ENDPOINT and the proxy variables; with "
                    "FEEDMILL_OFFLINE=true, only the cache is used."
                )
            case HfHubHTTPError() if status in (401, 403):
                sentence = (
                    f"{hub} denies access to the model {name} ({status}). Set HF_TOKEN to a valid token of an account "
                    "with access; a public model needs no token."
                )
            case HfHubHTTPError() if status == 429:
                sentence = (
                    f"{hub} limits the requests from this address (429). Wait some minutes, set HF_TOKEN for a higher "
                    "limit, or set FEEDMILL_OFFLINE=true to use only the cache."
                )
            case _ if _is_full_disk(error):
                sentence = (
                    f"The disk is full: the model {name} does not fit in the cache {constants.HF_HUB_CACHE}. Free some "
                    "space, or set HF_HOME to a folder on a larger disk."
                )
            case PermissionError() | OSError(errno=errno.EROFS):
                sentence = (
                    f"Cannot write the model {name} to the cache {constants.HF_HUB_CACHE} ({_reason(error)}). Set "
                    "HF_HOME to a folder that this user can write to."
                )
            case _:
                # This includes broken connections and incomplete files.
                sentence = (
                    f"Cannot download the model {name} from {self._endpoint} ({_reason(error)}). Complete files stay "
                    "in the cache: start again to download the rest."
                )
        return sentence

    def _no_revision(self) -> str:
        return (
            f"The model {self.name} at {self._endpoint} has no revision {self._revision or 'main'!r}. Set "
            "FEEDMILL_REVISION to a branch, tag or commit of it, or unset it for the main branch."
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


class DownloadProgress:
    """Log the start, progress and end of a download. detail: its revision. total: its size in bytes."""

    def __init__(self, name: str, detail: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._total = total
        self._clock = clock
        self._lock = Lock()
        self._done = 0
        self._logged = 0
        self._began = self._logged_at = clock()
        logger.info("downloading %s (%s): %s MB", name, detail, _megabytes(total))

    def reached(self, done: int) -> None:
        """Record the bytes downloaded so far. Thread-safe."""
        with self._lock:
            self._done = max(self._done, done)
            seconds = self._clock() - self._logged_at
            gained = self._done - self._logged
            little = gained < self._total / 10 and seconds < MAX_LOG_INTERVAL_S
            if seconds < LOG_INTERVAL_S or little or self._done >= self._total:
                return
            share, speed = self._done / self._total, gained / seconds
            self._logged, self._logged_at = self._done, self._logged_at + seconds
        whole = _megabytes(self._total)
        logger.info("downloading %s: %.0f%% of %s MB, %s MB/s", self._name, 100 * share, whole, _megabytes(speed))

    def end(self) -> None:
        """Log that the download is complete."""
        seconds = self._clock() - self._began
        logger.info("downloaded %s: %s MB in %.0f s", self._name, _megabytes(self._done), seconds)


def _silent_bar(progress: DownloadProgress | None) -> type[Any]:
    """Return a progress bar class for snapshot_download that shows nothing and counts bytes.

    Two bars count bytes, one from the network and one to disk; compression makes them differ. The higher count is
    reported.
    """

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **kwargs | {"disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            with self.get_lock():
                self.n += n or 0
                done = self.n
            if progress is not None and self._counts_bytes:
                progress.reached(int(done))

    return Bar


def _refuse_unreadable_token() -> None:
    """Raise ModelError for a malformed HF_TOKEN. The library's errors and log would quote the token."""
    token = os.environ.get("HF_TOKEN", "").strip()
    if not (token.isascii() and token.isprintable()):
        raise ModelError(
            "HF_TOKEN contains characters that are invalid in a token, such as a line break. Copy it again from your "
            "account on the hub, or unset it for a public model."
        )


def _is_full_disk(error: Exception) -> bool:
    full = (errno.ENOSPC, errno.EDQUOT)
    return (isinstance(error, OSError) and error.errno in full) or "No space left" in str(error)


def _reason(error: BaseException) -> str:
    """Return the first line of a library's error, without secrets."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return _without_secrets(lines[0])[:300].rstrip(".") if lines else type(error).__name__


def _without_secrets(text: str) -> str:
    if token := os.environ.get("HF_TOKEN", "").strip():
        text = text.replace(token, "***")
    return printable(SECRET_PATTERN.sub("***", text))


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _megabytes(size: float) -> str:
    megabytes = size / 1e6
    return f"{megabytes:,.0f}" if megabytes >= 10 else f"{megabytes:.1f}"
