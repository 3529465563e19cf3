"""Bodies of messages: posts to JSON, packed, and back, as any Celery application writes and reads them, but faster.

kombu's own packer takes six times as long as isal's for the same format; its reader of JSON looks at every object for
types that JSON has not; and its unpackers unpack whatever comes: a megabyte of gzip may hold a gigabyte of nothing.
`register` and `bound` put others in their place, for the whole process. Once bound, JSON is refused as well, before it
is read, if its objects would take too much memory: 64 MiB of `{}` are 1.6 GB of Python objects.
"""

import bz2
import json
import lzma
import math
import re
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

from kombu import compression as _compression
from kombu import serialization as _serialization
from kombu.utils.json import dumps, loads
from pydantic import TypeAdapter

try:
    from isal.isal_zlib import compress
except ImportError:  # no wheel for this machine
    from zlib import compress

#: The stubs take a pair for a function, and lack a name.
compression: Any = _compression
serialization: Any = _serialization
#: Name of the serializer that takes posts as they are, and what it writes is called as other JSON is.
POSTS, JSON = "posts", ("application/json", "utf-8")
GZIP = "application/x-gzip"
#: Characters of posts from which on packing is worth its time: an eighth of a single one's message is saved, and of
#: many posts' half.
PACKED_FROM = 1000
#: Of isal's four, and zlib's ten: a tenth more bytes than the best of them, in a seventh of its time.
LEVEL = 2
#: Bytes that lzma may take for itself: what packs with its highest setting asks for half as many, a hostile header for
#: gigabytes.
LZMA_MEMORY = 2**27
#: By type.
UNPACKERS: dict[str, Callable[[], Any]] = {
    GZIP: zlib.decompressobj,
    "application/x-bz2": bz2.BZ2Decompressor,
    "application/x-lzma": partial(lzma.LZMADecompressor, memlimit=LZMA_MEMORY),
}
#: Estimated bytes of memory of an object, a list, any other value in JSON, and a name in an object; from measurements
#: with Python 3.11.
OBJECT, LIST, VALUE, KEY = 200, 96, 56, 120
#: What a character of JSON takes at most; and those that are no separators.
MOST_EACH = OBJECT + 5
OTHERS = bytes(set(range(256)) - set(b"{[,:"))
#: A string in JSON. What looks like more objects within a string is text. Possessive, or each escape would be kept, to
#: be tried again, in a hundred bytes.
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
#: Whatever a body holds, with posts as pydantic writes them, in a fifth of the time.
BODY: TypeAdapter[Any] = TypeAdapter(Any)


def register() -> None:
    """From now on JSON is read, and gzip packed, the fast way; and POSTS is a serializer."""
    write: Any = partial(BODY.dump_json, exclude_defaults=True)  # bytes, where the stub wants a string
    serialization.register(POSTS, write, read, *JSON)
    serialization.register("json", dumps, read, *JSON)
    compression.register(pack, compression.get_decoder(GZIP), GZIP)


#: Bytes of memory that the objects of one JSON text may take, by `memory_of`; set by `bound`.
_memory_limit = math.inf


def memory_of(body: Any) -> int:
    """Estimate the bytes of memory that a body of JSON takes, decoded, from the separators in it; rather too many.

    body: a string, or any buffer.
    """
    text = _as_bytes(body)
    return _characters(text) + _separators(text)


def _as_bytes(body: Any) -> bytes:
    return body.encode("utf-8", "replace") if isinstance(body, str) else bytes(body or b"")


def _characters(text: bytes) -> int:
    """Bytes of the text itself: a character beyond ASCII makes all of its string take four bytes each."""
    return (2 if text.isascii() and not (b"\\" in text and b"\\u" in text) else 5) * len(text)


def _separators(text: bytes) -> int:
    found = text.translate(None, OTHERS)  # one pass over the text, where counting each takes four
    return OBJECT * found.count(b"{") + LIST * found.count(b"[") + VALUE * found.count(b",") + KEY * found.count(b":")


def is_too_large(body: Any, limit: float) -> bool:
    """Return whether a body of JSON takes more than `limit` bytes of memory, decoded.

    Where separators within strings may be the reason, they are left out of the count, which ends at the limit.
    """
    if not body or len(body) * MOST_EACH <= limit:  # nearly always: without a look at it
        return False
    text = _as_bytes(body)
    if _characters(text) + _separators(text) <= limit:
        return False
    size, end = _characters(text), 0
    for string in STRING.finditer(text):
        size += _separators(text[end : string.start()])
        end = string.end()
        if size > limit:
            return True
    return size + _separators(text[end:]) > limit


def read(data: Any) -> Any:
    """JSON, with kombu's own types in it where they are there. data: a string, or any buffer of UTF-8.

    Raises ValueError, before anything is read, where it is too large for `bound`.
    """
    if is_too_large(data, _memory_limit):
        raise ValueError(f"a body whose objects would take more than {_memory_limit:,} bytes of memory")
    text = data if isinstance(data, str) else bytes(data).decode()
    return loads(text) if '"__type__"' in text else json.loads(text)


def pack(data: bytes) -> bytes:
    """As zlib does."""
    packed: bytes = compress(data, LEVEL)
    return packed


def bound(limit: int, memory: int) -> None:
    """From now on a body of more than `limit` bytes is refused, one whose objects would take more than `memory` bytes,
    and one of a type that cannot be bounded.
    """
    for kind in serialization.TRUSTED_CONTENT:  # which kombu decodes unasked, by any codec of Python's, zlib among them
        serialization.register(f"refused {kind}", _refuse_kind, _refuse_kind, kind, "binary")
    global _memory_limit  # noqa: PLW0603 - kombu's registry of serializers is as global
    _memory_limit = memory
    for kind in compression.encoders():
        packs, _ = compression.get_encoder(kind)
        compression.register(packs, partial(unpack, kind, limit) if kind in UNPACKERS else _refuse, kind)


def unpack(kind: str, limit: int, packed: bytes) -> bytes:
    """Raises ValueError where it is too long, and what the unpacker of this kind raises where it is damaged."""
    unpacker = UNPACKERS[kind]()
    unpacked: bytes = unpacker.decompress(packed, limit)
    if not unpacker.eof:
        raise ValueError(f"a body that holds more than {limit:,} bytes, or breaks off")
    return unpacked


def _refuse(_: bytes) -> bytes:
    raise ValueError("a body that is not compressed with gzip, bzip2 or lzma")


def _refuse_kind(_: Any) -> Any:
    raise ValueError("a body that is not JSON")
