"""Encode and decode message bodies: JSON, optionally compressed, compatible with any Celery application.

`limit_bodies` replaces kombu's decoders, and is for worker processes only. kombu decompresses bodies of any
size: one megabyte of gzip can expand to a gigabyte. kombu's JSON reader is also slow, because it checks every object
for kombu's own types.
"""

import json
import zlib
from base64 import b64decode
from functools import partial
from typing import Any

from kombu import compression as _compression
from kombu import serialization as _serialization
from kombu.utils.json import dumps, loads, object_hook
from pydantic import TypeAdapter
from pydantic_core import from_json

try:
    from isal.isal_zlib import compress
except ImportError:  # isal has no wheel for this platform
    from zlib import compress

#: Typed as Any: kombu's type stubs are wrong about registered codecs and lack a name.
compression: Any = _compression
serialization: Any = _serialization
#: Content type and encoding of JSON.
JSON = ("application/json", "utf-8")
#: Value of the header `compression` in messages whose body is compressed.
GZIP = "application/x-gzip"
#: Value of `body_encoding` in kombu's messages. Without the field, the body is plain text.
BASE64 = "base64"
#: Characters of text per message above which compression pays: it saves an eighth of a one-post message, and half of
#: a message of many posts.
MIN_COMPRESSED_CHARACTERS = 1000
#: Compression level, valid in isal (0 to 3) and zlib (0 to 9). Output is 10% larger than at the best level, in 1/7 of
#: its time.
COMPRESSION_LEVEL = 2
#: Maximum bytes of one message, in its list and decompressed: enough for a thousand of the longest posts that Reddit
#: allows.
MAX_MESSAGE = 64 * 2**20
#: Maximum occurrences of `{`, `[` and `,` in a message. They bound the number of objects: 64 MiB of `{}` would take
#: 1.6 GB of memory. A thousand of the longest posts have fewer.
MAX_SEPARATORS = 2**22
#: Serializes any body, with pydantic's fast path for posts: a fifth of the time.
BODY_ADAPTER: TypeAdapter[Any] = TypeAdapter(Any)


def write(body: Any) -> bytes:
    """Serialize a body that may contain Post objects to JSON."""
    return BODY_ADAPTER.dump_json(body, exclude_defaults=True)


def check_size(text: bytes) -> None:
    """Raise ValueError for a JSON text that is too long, or has too many values, to be decoded safely."""
    if len(text) > MAX_MESSAGE or (len(text) > MAX_SEPARATORS and sum(map(text.count, b"{[,")) > MAX_SEPARATORS):
        raise ValueError(f"{len(text):,} bytes: more than {MAX_MESSAGE:,}, or {MAX_SEPARATORS:,} values")


def read(data: Any) -> Any:
    """Parse JSON, including kombu's extended types. data: a string, or any UTF-8 buffer.

    Raises ValueError for JSON that is malformed or too large.
    """
    raw = data.encode() if isinstance(data, str) else bytes(data)
    check_size(raw)
    if b'"__type__"' in raw:
        return loads(raw.decode(), object_hook=_typed)
    try:
        return from_json(raw)  # takes 0.4 of the time of the standard library
    except ValueError:  # malformed, or with lone surrogates
        return json.loads(raw.decode())


def _typed(value: dict[str, Any]) -> Any:
    """Decode kombu's extended types. pandas' NaT, a missing date, is a datetime to kombu, which writes it as "NaT"."""
    return None if value == {"__type__": "datetime", "__value__": "NaT"} else object_hook(value)


def pack(data: bytes) -> bytes:
    """Compress data in zlib format."""
    packed: bytes = compress(data, COMPRESSION_LEVEL)
    return packed


def limit_bodies(limit: int = MAX_MESSAGE) -> None:
    """Replace kombu's decoders, in the whole process, with decoders that reject bodies too large to decode safely.

    limit: maximum bytes of a decompressed body. Other content types than JSON, and compressions other than gzip, are
    rejected as well: a purge could not find posts in them.
    """
    for kind in serialization.TRUSTED_CONTENT:  # kombu decodes these without `accept_content`, by any Python codec
        serialization.register(f"refused {kind}", _refuse_kind, _refuse_kind, kind, "binary")
    serialization.register("json", dumps, read, *JSON)
    for kind in compression.encoders():
        packs, _ = compression.get_encoder(kind)
        compression.register(packs, partial(unpack, limit) if kind == GZIP else _refuse, kind)


def unpack(limit: int, packed: bytes) -> bytes:
    """Decompress a body. Raises ValueError if it is truncated or exceeds `limit` bytes, and zlib.error if damaged."""
    unpacker = zlib.decompressobj()
    unpacked: bytes = unpacker.decompress(packed, limit)
    if not unpacker.eof:
        raise ValueError(f"the compressed body is truncated, or expands to more than {limit:,} bytes")
    return unpacked


def is_base64(message: dict[str, Any]) -> bool:
    """Return whether the body of a message in a Redis list is base64. Without a declaration, only JSON is plain."""
    declared = (message.get("properties") or {}).get("body_encoding")
    return declared == BASE64 or not message["body"].startswith("[")


def stored_body(message: dict[str, Any]) -> Any:
    """Decode the body of a message in a Redis list: arguments, keyword arguments and Celery's options.

    Raises ValueError, zlib.error, AttributeError, KeyError, TypeError or RecursionError for a malformed message.
    """
    data = b64decode(message["body"]) if is_base64(message) else message["body"].encode()
    packed = message["headers"].get("compression") == GZIP
    return json.loads(unpack(MAX_MESSAGE, data) if packed else data)


def _refuse(_: bytes) -> bytes:
    raise ValueError("the body's compression is not gzip")


def _refuse_kind(_: Any) -> Any:
    raise ValueError("the body is not JSON")
