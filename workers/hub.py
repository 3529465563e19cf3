"""Models on the Hugging Face hub: one commit of a repository, downloaded into the hub's cache.

huggingface_hub reads HF_ENDPOINT, HF_HOME and HF_TOKEN, downloads, and keeps the cache, which every program shares that
uses it. Here its errors become sentences, its progress lines of the log. Knows nothing of what files a model needs.
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

#: Seconds between two lines on a download, at least; more where it is slow: a line then comes with each tenth of it,
#: or after PATIENCE.
QUIET = 5.0
#: Seconds after which a download that moves slowly is heard of all the same.
PATIENCE = 60.0
#: What an error of the library may quote and nobody else should read: tokens, passwords in addresses, signatures.
SECRETS = re.compile(r"(?i:bearer)\s+\S+|\bhf_\w+|(?<=://)[^/@\s]+@|(?<=\w)\?\S+")
SHA256 = re.compile(r"[0-9a-f]{64}")


class _Relay(logging.Handler):
    """The library's own log as lines of ours: it would print several to an event, with addresses that are signed."""

    def emit(self, record: logging.LogRecord) -> None:
        logger.log(record.levelno, "%s", _without_secrets(" ".join(record.getMessage().split())))


_library = logging.getLogger("huggingface_hub")
_library.handlers = [_Relay()]
_library.propagate = False
logging.getLogger("httpx2").setLevel(logging.WARNING)  # the library's HTTP client: a line for each request


def is_name(model: str) -> bool:
    """Whether a model on the hub can have this name: owner/name, or one of the few old ones without an owner."""
    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return True


class Repository:
    """One commit of a model's repository: its files' sizes in bytes by path, and the folder in the cache they go to.

    revision: branch, tag or commit; None is the main branch. offline: never ask the hub, take what was downloaded
    before. first: small files that are downloaded at once, where there are such. Raises ModelError, as `fetch` does.
    """

    def __init__(self, name: str, revision: str | None, offline: bool, first: Collection[str]) -> None:
        self.name = name
        self._revision = revision
        self._offline = offline or is_offline_mode()
        self._endpoint = _without_password(constants.ENDPOINT)
        if revision is not None and ".." in revision:  # no name in git has that, and the cache makes a path of it
            raise ModelError(self._no_revision())
        if not self._offline:
            _refuse_unreadable_token()
            logger.info("asking %s for the model %s", self._endpoint, name)
        with self._explained():
            found = HfApi().resolve_revision(name, revision=revision, local_files_only=self._offline)
        self.commit: str = found.resolved
        self.folder = self._download(first, None)
        self.sizes = self._list()

    def fetch(self, files: Collection[str]) -> None:
        """Bring these files of the repository into `folder`, as far as they are not there."""
        total = sum(self.sizes[file] for file in files if not (self.folder / file).exists())
        if self._offline or not total:
            self._download(files, None)  # which looks whether they are all there
            return
        branch = f"{self._revision}, " if self._revision not in (None, self.commit) else ""
        progress = Progress(self.name, f"{branch}commit {self.commit}", total)
        self._download(files, progress)
        progress.end()

    def _download(self, files: Collection[str], progress: "Progress | None") -> Path:
        with self._explained():
            # A commit never changes, so that the hub need not be asked for what is there.
            return self._snapshot(files, self._offline or self._is_there(files), progress)

    def _is_there(self, files: Collection[str]) -> bool:
        try:
            get_cached_repo_tree(self.name, revision=self.commit)  # without it nobody knows what is missing
            self._snapshot(files, True, None)
        except (CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
            return False
        return True

    def _snapshot(self, files: Collection[str], local: bool, progress: "Progress | None") -> Path:
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
            # Other programs fill the cache without the list of what could be in it.
            files = [path for path in self.folder.rglob("*") if path.is_file()]
            return {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in files}

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # networks, disks and servers fail in more ways than the library has classes for
            raise ModelError(self._explain(error)) from None

    def _explain(self, error: Exception) -> str:
        name, hub = self.name, f"The hub at {self._endpoint}"
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        from_cache = "FEEDMILL_OFFLINE=true uses what was downloaded before, without asking the hub."
        match error:
            case GatedRepoError():
                sentence = (
                    f"The model {name} is gated: its authors give access on request. Ask for it at "
                    f"{self._endpoint}/{name}, and set HF_TOKEN to a token of the account that was given it."
                )
            case RepositoryNotFoundError():
                sentence = (
                    f"{hub} has no model {name}, or does not show it. Check the spelling: FEEDMILL_MODEL is owner/name "
                    "for a model of the hub, such as facebook/bart-large-mnli, and the path of an existing folder for "
                    "one of yours. A private or gated model needs HF_TOKEN, a token of an account that may read it."
                )
            case RevisionNotFoundError():
                sentence = self._no_revision()
            case RevisionResolutionError() | LocalEntryNotFoundError() if self._offline:
                sentence = (
                    f"The model {name}{self._at_revision()} was not downloaded before, or not all of it, and offline "
                    "nothing is downloaded. Start once without FEEDMILL_OFFLINE (and HF_HUB_OFFLINE), or copy the "
                    f"cache {constants.HF_HUB_CACHE} from a machine that has the model."
                )
            case RevisionResolutionError() | LocalEntryNotFoundError():
                sentence = (
                    f"{hub} cannot be reached ({_reason(error.__cause__ or error)}), and the model {name} was not "
                    "downloaded before, or not all of it. Check the network, HF_ENDPOINT and the proxy's variables. "
                    + from_cache
                )
            case HfHubHTTPError() if status in (401, 403):
                sentence = (
                    f"{hub} does not let us read the model {name} ({status}). Set HF_TOKEN to a valid token of an "
                    "account that may read it; a public model needs none."
                )
            case HfHubHTTPError() if status == 429:
                sentence = (
                    f"{hub} takes no more requests from here for now (429). Wait some minutes, or set HF_TOKEN: with "
                    f"an account more are allowed. {from_cache}"
                )
            case _ if _is_full_disk(error):
                sentence = (
                    f"The disk is full: the model {name} does not fit into the cache {constants.HF_HUB_CACHE}. Make "
                    "room there, or set HF_HOME to a folder on a larger disk."
                )
            case PermissionError() | OSError(errno=errno.EROFS):
                sentence = (
                    f"The model {name} cannot be written into the cache {constants.HF_HUB_CACHE} ({_reason(error)}). "
                    "Set HF_HOME to a folder that this user can write to."
                )
            case _:
                # Among them connections that break, and files that come incomplete.
                sentence = (
                    f"The model {name} could not be downloaded from {self._endpoint} ({_reason(error)}). Files that "
                    f"came whole are kept: start again for the others, now or later. {from_cache}"
                )
        return sentence

    def _no_revision(self) -> str:
        return (
            f"The model {self.name} at {self._endpoint} has no revision {self._revision or 'main'!r}. Set "
            "FEEDMILL_REVISION to one of its branches, tags or commits, or unset it for the main branch."
        )

    def _at_revision(self) -> str:
        return f" at revision {self._revision}" if self._revision else ""


def announced_sha256(file: Path) -> str | None:
    """The SHA-256 that the hub announced for a file in its cache, where links to contents named by it; else None."""
    try:
        content = file.readlink().name
    except OSError:
        return None
    return content if SHA256.fullmatch(content) else None


class Progress:
    """A download's lines in the log: at its start, from time to time, at its end. name: what is downloaded; detail: of
    which revision; total: bytes.
    """

    def __init__(self, name: str, detail: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._total = total
        self._clock = clock
        self._lock = Lock()
        self._done = 0
        self._told = 0
        self._began = self._told_at = clock()
        logger.info("downloading %s (%s): %s MB", name, detail, _megabytes(total))

    def reached(self, done: int) -> None:
        """So many bytes are there. Called from the threads that download."""
        with self._lock:
            self._done = max(self._done, done)
            seconds = self._clock() - self._told_at
            gained = self._done - self._told
            little = gained < self._total / 10 and seconds < PATIENCE
            if seconds < QUIET or little or self._done >= self._total:
                return
            share, speed = self._done / self._total, gained / seconds
            self._told, self._told_at = self._done, self._told_at + seconds
        whole = _megabytes(self._total)
        logger.info("downloading %s: %.0f%% of %s MB, %s MB/s", self._name, 100 * share, whole, _megabytes(speed))

    def end(self) -> None:
        """All is there."""
        seconds = self._clock() - self._began
        logger.info("downloaded %s: %s MB in %.0f s", self._name, _megabytes(self._done), seconds)


def _silent_bar(progress: Progress | None) -> type[Any]:
    """The class of progress bars that snapshot_download is to use: nothing is shown, what arrives is counted.

    There are two that count bytes, off the network and onto the disk; with compression they differ. The one that is
    ahead is told.
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
    """A token that is none would be quoted by errors, and by the library's own log, when it is made a header."""
    token = os.environ.get("HF_TOKEN", "").strip()
    if not (token.isascii() and token.isprintable()):
        raise ModelError(
            "HF_TOKEN holds characters that no token has, such as a line break. Copy it again from your account at "
            "the hub, or unset it for a public model."
        )


def _is_full_disk(error: Exception) -> bool:
    full = (errno.ENOSPC, errno.EDQUOT)
    return (isinstance(error, OSError) and error.errno in full) or "No space left" in str(error)


def _reason(error: BaseException) -> str:
    """The first line of what a library's error says, for a person to read."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return _without_secrets(lines[0])[:300].rstrip(".") if lines else type(error).__name__


def _without_secrets(text: str) -> str:
    if token := os.environ.get("HF_TOKEN", "").strip():
        text = text.replace(token, "***")
    return printable(SECRETS.sub("***", text))


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _megabytes(size: float) -> str:
    megabytes = size / 1e6
    return f"{megabytes:,.0f}" if megabytes >= 10 else f"{megabytes:.1f}"
