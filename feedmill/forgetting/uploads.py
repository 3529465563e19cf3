"""Files that people dropped on the web server's page of runs, which keeps them for some hours."""

import json
import re
import tempfile
from collections.abc import Callable, Collection
from os import getuid
from pathlib import Path

from feedmill.outcomes.post_forms import COMMENT_PREFIX, POST_PREFIX
from feedmill.shared.label_files import UTF16_MARKS

#: Start of the name of a web server's private folder, among the temporary files.
UPLOADS_PREFIX = "feedmill-web-"
#: First bytes of files whose content cannot be searched: gzip, zstd, Parquet, .xlsx, UTF-16.
PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1", b"PK\x03\x04", *UTF16_MARKS)
CHUNK_BYTES = 2**20
#: Shortest id that is searched for anywhere: shorter ones occur in others, and are compared with
#: whole words.
MIN_SEARCHED = 4
WORD = re.compile(rb"[\w\x80-\xff-]+")
#: The escape of a character in JSON.
ESCAPE = re.compile(r"\\u[0-9a-f]{4}")


def remove_uploads(ids: Collection[str], note: Callable[[str], None]) -> int:
    """Delete the files that may contain one of these posts; return their number.

    note: is called with a sentence about each place that was not searched. A file that cannot be
    searched is deleted: its sender can drop it again. A server that is reading a file finishes.
    """
    needles = Needles(ids)
    removed = 0
    root = Path(tempfile.gettempdir())
    for folder in root.glob(f"{UPLOADS_PREFIX}*"):
        for path in _files_in(folder, note):
            try:
                if path.is_file() and needles.may_be_in(path):
                    path.unlink()
                    removed += 1
            except FileNotFoundError:  # the server has deleted it
                continue
            except OSError as error:
                note(f"{path} was not searched: {error.strerror}")
    return removed


def _files_in(folder: Path, note: Callable[[str], None]) -> list[Path]:
    """Return what a server's folder contains; nothing if it may not be searched."""
    try:
        if folder.is_symlink() or not folder.is_dir():
            return []
        if folder.stat().st_uid == getuid():
            return list(folder.iterdir())
        note(
            f"{folder} belongs to another user and was not searched: run `feedmill forget "
            "--replay` as that user, or delete the folder if no server uses it"
        )
    except FileNotFoundError:
        pass  # the server has deleted it
    except OSError as error:
        note(f"{folder} was not searched: {error.strerror}")
    return []


class Needles:
    """The ids to search files for, in the forms that CSV and JSON have."""

    def __init__(self, ids: Collection[str]) -> None:
        self._parts: set[bytes] = set()
        self._words: set[bytes] = set()
        for post_id in ids:
            bare_id = post_id.removeprefix(POST_PREFIX).removeprefix(COMMENT_PREFIX)
            for text in (post_id, bare_id):
                for form in _forms(text):
                    self._add(form.encode("utf-8", "replace"))
        lengths = map(len, [*self._parts, *self._words])
        self._overlap = max(lengths, default=0) + 1

    def _add(self, form: bytes) -> None:
        is_word = WORD.fullmatch(form) is not None
        if is_word and len(form) < MIN_SEARCHED:
            self._words.add(form)
        elif form:
            self._parts.add(form)

    def may_be_in(self, path: Path) -> bool:
        """Return whether a file may contain one of the ids. Raises OSError."""
        with path.open("rb") as file:
            data = file.read(CHUNK_BYTES)
            if data.startswith(PACKED):
                return True
            while data:
                if self._are_in(data):
                    return True
                following = file.read(CHUNK_BYTES)
                if not following:
                    return False
                data = data[-self._overlap :] + following
        return False

    def _are_in(self, data: bytes) -> bool:
        if any(part in data for part in self._parts):
            return True
        if not self._words:
            return False
        words = WORD.findall(data)
        return not self._words.isdisjoint(words)


def _forms(text: str) -> set[str]:
    """Return an id as files write it: plain, with CSV's quotes, and with JSON's escapes."""
    forms = {text, text.replace('"', '""')}
    for is_ascii in (True, False):
        in_json = json.dumps(text, ensure_ascii=is_ascii)[1:-1]
        in_capitals = ESCAPE.sub(_with_capitals, in_json)
        for form in (in_json, in_capitals):
            forms.add(form)
            forms.add(form.replace("/", "\\/"))
    return forms


def _with_capitals(escape: re.Match[str]) -> str:
    digits = escape[0][2:].upper()
    return f"\\u{digits}"
