"""Convert text in other encodings to UTF-8 while it is read."""

import codecs
from collections.abc import Iterator
from contextlib import ExitStack
from io import BufferedReader
from typing import cast

from feedmill.producers.unpack import CHUNK_BYTES, ChunkStream
from feedmill.shared.errors import InputError

#: Byte order marks of UTF-16.
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def check_encoding(name: str) -> str:
    """Return Python's name of an encoding. Raises InputError if there is no such text encoding."""
    try:
        "".encode(name)
        return codecs.lookup(name).name
    except (LookupError, ValueError):
        raise InputError(
            f"--encoding: unknown encoding {name!r:.40}. Excel on Windows writes cp1252; others are latin-1, utf-16 "
            "and shift_jis."
        ) from None


def transcoded(binary: BufferedReader, encoding: str | None, opened: ExitStack) -> BufferedReader:
    """Return a reader of the text in UTF-8, or `binary` itself if it has no other encoding.

    encoding: name in the form of `check_encoding`; None detects UTF-16 by its byte order mark. opened: exit stack that
    closes the reader. Bytes that are invalid in the encoding are passed through, so that they are invalid UTF-8.
    """
    if encoding is None and binary.peek(2)[:2] in UTF16_MARKS:
        encoding = "utf-16"
    if encoding is None or encoding == "utf-8":
        return binary
    return cast(BufferedReader, opened.enter_context(BufferedReader(ChunkStream(_utf8(binary, encoding)), CHUNK_BYTES)))


def _utf8(binary: BufferedReader, encoding: str) -> Iterator[bytes]:
    # UTF-16 and UTF-32 have no invalid bytes to pass through.
    errors = "replace" if encoding.startswith(("utf-16", "utf-32")) else "surrogateescape"
    decoder = codecs.getincrementaldecoder(encoding)(errors)
    while piece := binary.read(CHUNK_BYTES):
        yield decoder.decode(piece).encode("utf-8", "surrogateescape")
    yield decoder.decode(b"", final=True).encode("utf-8", "surrogateescape")
