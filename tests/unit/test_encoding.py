"""shared/encoding.py: what is written is read everywhere; what senders compress is unpacked within a bound."""

import bz2
import json
import lzma
import random
import tracemalloc
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from kombu import compression as kombu_compression
from kombu import serialization as kombu_serialization
from kombu.utils import json as kombu_json

from shared import encoding
from shared.messages import Post

LIMIT = 1000
kombu: Any = kombu_compression
serialization: Any = kombu_serialization


@pytest.fixture(autouse=True)
def _kombu_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_encoders", "_decoders"):
        monkeypatch.setattr(kombu, name, dict(getattr(kombu, name)))
    monkeypatch.setattr(encoding, "_memory_limit", encoding._memory_limit)
    registry = serialization.registry
    for name in ("_encoders", "_decoders", "type_to_name", "name_to_type"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))


@pytest.mark.parametrize(
    ("pack", "name"),
    [(zlib.compress, "zlib"), (zlib.compress, "gzip"), (bz2.compress, "bzip2"), (lzma.compress, "lzma")],
)
def test_a_body_is_unpacked_up_to_the_limit(pack: Callable[[bytes], bytes], name: str) -> None:
    encoding.bound(LIMIT, LIMIT)
    assert kombu.decompress(pack(b"x" * LIMIT), name) == b"x" * LIMIT
    for bad in (pack(b"x" * (LIMIT + 1)), pack(b"x" * 10**7), pack(b"x" * 10)[:-3]):
        with pytest.raises(ValueError, match="1,000 bytes"):
            kombu.decompress(bad, name)


def test_a_body_of_a_type_that_cannot_be_bounded_is_refused() -> None:
    kombu.register(lambda body: body, lambda body: body, "application/x-odd", ["odd"])
    encoding.bound(LIMIT, LIMIT)
    with pytest.raises(ValueError, match="gzip, bzip2 or lzma"):
        kombu.decompress(b"x", "application/x-odd")


@pytest.mark.parametrize("size", [0, 1, 1000, 10**6])
def test_what_is_packed_is_gzip_as_kombu_unpacks_it(size: int) -> None:
    unpack = kombu.get_decoder("gzip")
    encoding.register()
    data = random.Random(size).randbytes(size // 2) + b"x" * (size - size // 2)
    packed, name = kombu.compress(data, "gzip")
    assert unpack(packed) == kombu.decompress(packed, "gzip") == zlib.decompress(packed) == data
    assert name == "application/x-gzip"


def test_posts_are_written_as_other_json_is() -> None:
    encoding.register()
    body = [
        [],
        {"posts": [Post(id="1", title="ä 🙂", extra={"x": [1.5, None]}, score=3)], "version": 1},
        {"chain": None},
    ]
    written = serialization.dumps(body, encoding.POSTS)
    assert written[:2] == encoding.JSON
    plain = [
        [],
        {"posts": [{"id": "1", "title": "ä 🙂", "score": 3, "extra": {"x": [1.5, None]}}], "version": 1},
        {"chain": None},
    ]
    content, coded, data = written
    assert json.loads(data) == kombu_json.loads(data) == serialization.loads(data, content, coded) == plain


@pytest.mark.parametrize(
    "kind", [str, str.encode, lambda text: bytearray(text.encode()), lambda text: memoryview(text.encode())]
)
def test_json_is_read_with_kombus_own_types(kind: Callable[[str], Any]) -> None:
    value = {"at": datetime(2026, 1, 1, tzinfo=UTC), "x": [1, "ä"]}
    assert encoding.read(kind(kombu_json.dumps(value))) == value
    assert encoding.read(kind('{"x": 1}')) == {"x": 1}


@pytest.mark.parametrize(
    "body",
    [b"[" + b"{}," * 400 + b"{}]", b"[" + b'"a",' * 400 + b"1]", b"[" * 400 + b"]" * 400, b"[0" + b",0" * 400 + b"]"],
)
def test_refuses_json_whose_objects_take_too_much_memory(body: bytes) -> None:
    encoding.bound(10**6, 20_000)
    with pytest.raises(ValueError, match="20,000 bytes"):
        encoding.read(body)
    assert encoding.read(body[:1] + body[-1:]) == []


def test_estimating_takes_little_memory_itself() -> None:
    body = b'["' + b"," * 10**6 + b"\\n" * 10**6 + b'"]'
    tracemalloc.start()
    assert not encoding.is_too_large(body, 20 * 10**6)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * len(body)


@pytest.mark.parametrize("kind", ["application/data", "application/text"])
def test_a_body_that_kombu_would_decode_by_any_codec_is_refused(kind: str) -> None:
    encoding.bound(LIMIT, LIMIT)
    with pytest.raises(Exception, match="not JSON"):
        serialization.loads(zlib.compress(b"x" * 10**6), kind, "zlib_codec", accept=["json"])


def test_separators_within_strings_are_text() -> None:
    encoding.bound(10**6, 20_000)
    body = json.dumps({"title": '{"a": [1, 2], ' * 300 + "\\", "body": ","})
    assert encoding.memory_of(body) > 20_000
    assert encoding.read(body) == json.loads(body)


@pytest.mark.parametrize(
    "body", ["[" + ",".join(["{}"] * 10_000) + "]", json.dumps([{"a": 1, "b": "é"}] * 5000), "[" * 900 + "]" * 900]
)
def test_estimates_no_less_memory_than_objects_take(body: str) -> None:
    tracemalloc.start()
    found = json.loads(body)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found
    assert encoding.memory_of(body) >= taken
