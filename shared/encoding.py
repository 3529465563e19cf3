"""Encode and decode message bodies: JSON, optionally compressed, compatible with any Celery
application.

Everything that senders write is decoded here, within the same bounds of bytes and values: by
workers, by purges and by readers of dead letters and runs. One megabyte of gzip can expand to a
gigabyte, and 64 MiB of `{}` take 1.6 GB of memory as objects.

`limit_bodies` replaces kombu's decoders, and is for worker processes only. kombu has no such
bounds, and its JSON reader is slow, because it checks every object for kombu's own types.
"""

import json
import zlib
from base64 import b64decode, b64encode
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
#: All values that select it: the content type, and kombu's short names, which other clients write.
GZIP_NAMES = frozenset({GZIP, "gzip", "zlib"})
#: Value of `body_encoding` in kombu's messages. Without the field, the body is plain text.
BASE64 = "base64"
#: Characters of text per message above which compression pays: it saves an eighth of a one-post
#: message, and half of a message of many posts.
MIN_COMPRESSED_CHARACTERS = 1000
#: Compression level, valid in isal (0 to 3) and zlib (0 to 9). Output is 10% larger than at the
#: best level, in 1/7 of its time.
COMPRESSION_LEVEL = 2
#: Maximum bytes of one message, in its list and decompressed: enough for a thousand of the longest
#: posts that Reddit allows.
MAX_MESSAGE = 64 * 2**20
#: Maximum occurrences of `{`, `[` and `,` in a message. They bound the number of objects: 64 MiB
#: of `{}` would take 1.6 GB of memory. A thousand of the longest posts have fewer.
MAX_SEPARATORS = 2**22
#: Bytes that are decompressed before their values are counted.
UNPACKED_AT_ONCE = 2**20
#: Serializes any body, with pydantic's fast path for posts: a fifth of the time.
BODY_ADAPTER: TypeAdapter[Any] = TypeAdapter(Any)


class UnreadableError(ValueError):
    """A stored message, or a JSON text, that cannot be decoded safely.

    The text gives the reason.
    """


def write(body: Any) -> bytes:
    """Serialize a body that may contain Post objects to JSON."""
    return BODY_ADAPTER.dump_json(body, exclude_defaults=True)


def check_size(text: bytes) -> None:
    """Raise UnreadableError for a JSON text that is too long, or has too many values, to be
    decoded safely.
    """
    size = len(text)
    if size > MAX_MESSAGE:
        raise _too_large(size)
    # A shorter text need not be counted.
    if size > MAX_SEPARATORS and _separators(text) > MAX_SEPARATORS:
        raise _too_large(size)


def _separators(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[") + text.count(b",")


def _too_large(size: int) -> UnreadableError:
    return UnreadableError(
        f"{size:,} bytes: more than {MAX_MESSAGE:,}, or {MAX_SEPARATORS:,} values"
    )


def read(data: Any) -> Any:
    """Parse JSON, including kombu's extended types. data: a string, or any UTF-8 buffer.

    Raises ValueError for JSON that is malformed or too large, and other errors for invalid values
    of extended types.
    """
    raw = data.encode() if isinstance(data, str) else bytes(data)
    check_size(raw)
    if b'"__type__"' in raw:
        return loads(raw.decode(), object_hook=typed)
    return _parse_bytes(raw)


def parse(data: str | bytes) -> Any:
    """Parse JSON as it is written, so that it can be written again: extended types stay objects.

    Raises UnreadableError for JSON that is malformed, too large or too deep.
    """
    try:
        raw = data.encode() if isinstance(data, str) else data
        check_size(raw)
        return _parse_bytes(raw)
    except UnreadableError:
        raise
    # Only the type: the error's text quotes the sender's.
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"not JSON ({type(error).__name__})") from None


def _parse_bytes(raw: bytes) -> Any:
    try:
        return from_json(raw)  # takes 0.4 of the time of the standard library
    except ValueError:  # malformed, or with lone surrogates
        return json.loads(raw.decode())


def typed(value: dict[str, Any]) -> Any:
    """Decode an object of one of kombu's extended types; return other objects unchanged.

    pandas' NaT, a missing date, is a datetime to kombu, which writes it as "NaT".
    """
    if value == {"__type__": "datetime", "__value__": "NaT"}:
        return None
    return object_hook(value)


def pack(data: bytes) -> bytes:
    """Compress data in zlib format."""
    packed: bytes = compress(data, COMPRESSION_LEVEL)
    return packed


def limit_bodies(limit: int = MAX_MESSAGE) -> None:
    """Replace kombu's decoders, in the whole process, with decoders that reject bodies too large
    to decode safely.

    limit: maximum bytes of a decompressed body. Other content types than JSON, and compressions
    other than gzip, are rejected as well: a purge could not find posts in them.
    """
    # kombu decodes these without `accept_content`, by any Python codec
    for kind in serialization.TRUSTED_CONTENT:
        serialization.register(
            f"refused {kind}", _refuse_kind, _refuse_kind, kind, "binary"
        )
    serialization.register("json", dumps, read, *JSON)
    for kind in compression.encoders():
        encoder, _ = compression.get_encoder(kind)
        decoder = partial(unpack, limit) if kind == GZIP else _refuse
        compression.register(encoder, decoder, kind)


def unpack(limit: int, packed: bytes) -> bytes:
    """Decompress a body of JSON.

    Raises UnreadableError if it is truncated, expands to more than `limit` bytes or has too many
    values to be decoded; and zlib.error if it is damaged.
    """
    unpacker = zlib.decompressobj()
    parts: list[bytes] = []
    size = 0
    separators = 0
    while not unpacker.eof:
        rest = limit - size + 1
        part = unpacker.decompress(packed, min(UNPACKED_AT_ONCE, rest))
        packed = unpacker.unconsumed_tail
        parts.append(part)
        size += len(part)
        separators += _separators(part)
        is_truncated = not part and not unpacker.eof
        if size > limit or is_truncated:
            raise UnreadableError(
                f"the compressed body is truncated, or expands to more than {limit:,} bytes"
            )
        if separators > MAX_SEPARATORS:
            raise _too_large(size)
    return b"".join(parts)


def open_message(message: bytes) -> dict[str, Any]:
    """Parse a message of a Redis list, in whichever of Celery's protocols. Its body stays encoded.

    Raises UnreadableError.
    """
    envelope = parse(message)
    if not isinstance(envelope, dict):
        raise UnreadableError("not a message: no JSON object")
    if not isinstance(envelope.get("body"), str):
        raise UnreadableError("not a message: its body is not a string")
    return envelope


def headers_of(envelope: dict[str, Any]) -> dict[str, Any]:
    """Return a message's headers, none for clients that leave them out.

    Changing them changes the message.
    """
    headers = envelope.get("headers")
    return headers if isinstance(headers, dict) else {}


def is_base64(envelope: dict[str, Any]) -> bool:
    """Return whether a message's body is Base64. If that is not declared, only JSON is plain."""
    properties = envelope.get("properties")
    if isinstance(properties, dict) and properties.get("body_encoding") == BASE64:
        return True
    is_json = envelope["body"].lstrip().startswith(("[", "{"))
    return not is_json


def is_packed(envelope: dict[str, Any]) -> bool:
    """Return whether a message's body is compressed with gzip.

    Raises UnreadableError for other compressions.
    """
    compression = headers_of(envelope).get("compression")
    if not compression:
        return False
    if not isinstance(compression, str) or compression not in GZIP_NAMES:
        raise UnreadableError("the body's compression is not gzip")
    return True


def decode_base64(text: str) -> bytes:
    """Decode a body as kombu does for workers: other characters than Base64's, damaged ones too,
    count for nothing. Raises ValueError.
    """
    return b64decode(text.encode("ascii", "replace"))


def body_text(envelope: dict[str, Any]) -> bytes:
    """Return the JSON text of a message's body. Raises UnreadableError."""
    try:
        body = envelope["body"]
        data = decode_base64(body) if is_base64(envelope) else body.encode()
        if is_packed(envelope):
            data = unpack(MAX_MESSAGE, data)
    except UnreadableError:
        raise
    except (ValueError, zlib.error) as error:
        raise UnreadableError(
            f"the body cannot be decoded ({type(error).__name__})"
        ) from None
    return data


def with_body(envelope: dict[str, Any], body: Any) -> str:
    """Return a message with another body, encoded and compressed as before.

    Raises UnreadableError if it is too deep.

    body: JSON values.
    """
    try:
        data = json.dumps(body).encode()
        if is_packed(envelope):
            data = pack(data)
        if is_base64(envelope):
            data = b64encode(data)
        return json.dumps(envelope | {"body": data.decode()})
    except RecursionError:
        raise UnreadableError("nested too deeply to be written") from None


def _refuse(_: bytes) -> bytes:
    raise ValueError("the body's compression is not gzip")


def _refuse_kind(_: Any) -> Any:
    raise ValueError("the body is not JSON")
