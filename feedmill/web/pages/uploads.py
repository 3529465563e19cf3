"""Files that people drop on the page of runs, kept in a private folder for some hours.

Nothing of a request becomes part of a path: a file's name is only shown.
"""

import re
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

from starlette.concurrency import run_in_threadpool

from feedmill.forgetting.uploads import UPLOADS_PREFIX
from feedmill.producers.files import TEXT_FILE
from feedmill.shared.errors import UserError, printable
from feedmill.web.failures import Failure

#: Most files, and their bytes together.
MAX_FILES = 20
MAX_TOTAL_BYTES = 2 * 2**30
#: Seconds after which a file is deleted.
TTL_S = 6 * 3600.0
#: Most files that are being received at once.
MAX_RECEIVING = 4
#: Characters of a name to show.
MAX_NAME = 100
IDENTITY = re.compile(r"[0-9a-f]{32}")
#: Name of a file in the folder, if its own name says that each line is a text.
TEXT_SUFFIX = ".txt"


@dataclass(eq=False)
class Upload:
    """A file that was received. name: as its sender calls it, for display."""

    identity: str
    name: str
    path: Path
    received_at: float
    size: int = 0
    is_complete: bool = False
    #: Users of the file, which is not deleted meanwhile.
    users: int = 0

    def hide_path(self, text: str) -> str:
        """Return a text with the file's name in place of where the server keeps it."""
        return text.replace(str(self.path), self.name)


class Uploads:
    """The files of one server. Safe for use by several threads."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=UPLOADS_PREFIX))
        self._lock = threading.Lock()
        self._uploads: dict[str, Upload] = {}

    def close(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def folder(self) -> Path:
        """The private folder, for other files of the pages, too."""
        return self._folder

    def get(self, identity: str) -> Upload:
        """Return a file. Raises Failure."""
        self._forget_old()
        upload = self._uploads.get(identity)
        if upload is None or not upload.is_complete:
            raise Failure(
                404,
                "not_found",
                "This file is no longer here. Drop it on the page of runs again.",
            )
        return upload

    async def receive(self, name: str, chunks: AsyncIterator[bytes]) -> Upload:
        """Keep a file. Raises Failure."""
        upload = self._begin(name)
        try:
            with upload.path.open("xb") as file:
                async for chunk in chunks:
                    self._reserve(upload, len(chunk))
                    await run_in_threadpool(file.write, chunk)
            if not upload.size:
                raise Failure(422, "invalid", "The file is empty.")
            upload.is_complete = True
        except OSError as error:
            raise Failure(
                507, "no_space", f"The server cannot keep the file: {error.strerror}."
            ) from None
        finally:
            if not upload.is_complete:
                self.delete(upload)
        return upload

    def _begin(self, name: str) -> Upload:
        self._forget_old()
        suffix = ""
        if TEXT_FILE.search(name):
            suffix = TEXT_SUFFIX
        identity = token_hex(16)
        upload = Upload(
            identity=identity,
            name=shown_name(name),
            path=self._folder / f"{identity}{suffix}",
            received_at=time.monotonic(),
        )
        with self._lock:
            uploads = self._uploads.values()
            receiving = [other for other in uploads if not other.is_complete]
            if len(receiving) >= MAX_RECEIVING:
                raise Failure(503, "busy", "Other files are being sent. Try again.")
            self._uploads[identity] = upload
            while len(self._uploads) > MAX_FILES:
                self._forget_oldest()
        return upload

    def _reserve(self, upload: Upload, size: int) -> None:
        """Count bytes of a file; delete older files if there is no room. Raises Failure."""
        with self._lock:
            upload.size += size
            while self._total() > MAX_TOTAL_BYTES:
                self._forget_oldest()

    def _total(self) -> int:
        return sum(upload.size for upload in self._uploads.values())

    def _forget_oldest(self) -> None:
        """Delete the oldest file that nobody uses. Raises Failure if there is none."""
        for upload in list(self._uploads.values()):
            if upload.is_complete and not upload.users:
                self._delete(upload)
                return
        raise Failure(503, "busy", "The server keeps too many files. Try again later.")

    def _forget_old(self) -> None:
        with self._lock:
            oldest = time.monotonic() - TTL_S
            for upload in list(self._uploads.values()):
                is_old = upload.received_at < oldest and upload.is_complete
                if is_old and not upload.users:
                    self._delete(upload)

    def delete(self, upload: Upload) -> None:
        with self._lock:
            self._delete(upload)

    def _delete(self, upload: Upload) -> None:
        self._uploads.pop(upload.identity, None)
        with suppress(OSError):
            upload.path.unlink()

    def temporary_file(self) -> tuple[BinaryIO, Path]:
        """Return a new empty file of the folder. Raises UserError."""
        path = self._folder / token_hex(16)
        try:
            return path.open("xb"), path
        except OSError as error:
            raise UserError(
                f"The server cannot write a file: {error.strerror}."
            ) from None


def shown_name(name: str) -> str:
    """Return a file's name as it is shown: without folders and what cannot be printed."""
    last = re.split(r"[/\\]", name)[-1]
    return printable(last).strip()[:MAX_NAME] or "file"
