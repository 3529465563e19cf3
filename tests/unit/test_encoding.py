"""shared/encoding.py: JSON that any Celery client reads, and bounded decompression of message
bodies.
"""

import json
import random
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from kombu import compression as kombu_compression
from kombu import serialization as kombu_serialization
from kombu.exceptions import DecodeError
from kombu.utils import json as kombu_json

from feedmill.shared import encoding
from feedmill.shared.messages import Post

LIMIT = 1000
kombu: Any = kombu_compression
serialization: Any = kombu_serialization


@pytest.fixture(autouse=True)
def _kombu_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_encoders", "_decoders"):
        monkeypatch.setattr(kombu, name, dict(getattr(kombu, name)))
    registry = serialization.registry
    for name in ("_encoders", "_decoders", "type_to_name", "name_to_type"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))


@pytest.mark.parametrize("name", ["zlib", "gzip"])
def test_decompresses_up_to_the_limit(name: str) -> None:
    encoding.limit_bodies(LIMIT)
    pack = zlib.compress
    assert kombu.decompress(pack(b"x" * LIMIT), name) == b"x" * LIMIT
    for bad in (pack(b"x" * (LIMIT + 1)), pack(b"x" * 10**7), pack(b"x" * 10)[:-3]):
        with pytest.raises(ValueError, match=r"1,000"):
            kombu.decompress(bad, name)


def test_refuses_unbounded_compression_types() -> None:
    kombu.register(lambda body: body, lambda body: body, "application/x-odd", ["odd"])
    encoding.limit_bodies(LIMIT)
    with pytest.raises(ValueError, match="not gzip"):
        kombu.decompress(b"x", "application/x-odd")


@pytest.mark.parametrize("size", [0, 1, 1000, 10**6])
def test_kombu_decompresses_our_gzip(size: int) -> None:
    data = random.Random(size).randbytes(size // 2) + b"x" * (size - size // 2)
    packed = encoding.pack(data)
    assert kombu.decompress(packed, encoding.GZIP) == zlib.decompress(packed) == data
    encoding.limit_bodies(LIMIT + size)
    assert kombu.decompress(packed, encoding.GZIP) == data


@pytest.mark.parametrize("limited", [False, True], ids=["stock", "limited"])
def test_serializes_posts_as_plain_json(limited: bool) -> None:
    if limited:
        encoding.limit_bodies()
    body = [
        [],
        {
            "posts": [Post(id="1", title="ä 🙂", extra={"x": [1.5, None]}, score=3)],
            "version": 1,
        },
        {"chain": None},
    ]
    data = encoding.write(body)
    plain = [
        [],
        {
            "posts": [
                {"id": "1", "title": "ä 🙂", "score": 3, "extra": {"x": [1.5, None]}}
            ],
            "version": 1,
        },
        {"chain": None},
    ]
    assert (
        json.loads(data)
        == kombu_json.loads(data)
        == serialization.loads(data, *encoding.JSON)
        == plain
    )
    assert kombu.decompress(encoding.pack(data), encoding.GZIP) == data


@pytest.mark.parametrize(
    "kind",
    [
        str,
        str.encode,
        lambda text: bytearray(text.encode()),
        lambda text: memoryview(text.encode()),
    ],
)
def test_reads_kombus_json_types(kind: Callable[[str], Any]) -> None:
    value = {"at": datetime(2026, 1, 1, tzinfo=UTC), "x": [1, "ä"]}
    assert encoding.read(kind(kombu_json.dumps(value))) == value
    assert encoding.read(kind('{"x": 1}')) == {"x": 1}


def test_refuses_json_with_too_many_values() -> None:
    encoding.limit_bodies()
    body = f"[{','.join(['{}'] * (encoding.MAX_SEPARATORS // 2 + 1))}]".encode()
    with pytest.raises(DecodeError, match="4,194,304 values"):
        serialization.loads(body, *encoding.JSON)
    assert serialization.loads(b"[]", *encoding.JSON) == []


@pytest.mark.parametrize("kind", ["application/data", "application/text"])
def test_refuses_bodies_decoded_by_arbitrary_codecs(kind: str) -> None:
    encoding.limit_bodies(LIMIT)
    with pytest.raises(Exception, match="JSON"):
        serialization.loads(
            zlib.compress(b"x" * 10**6), kind, "zlib_codec", accept=["json"]
        )
