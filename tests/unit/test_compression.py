"""shared/compression.py: what senders compress is unpacked within a bound."""

import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from kombu import compression as kombu_compression

from shared import compression

LIMIT = 1000
kombu: Any = kombu_compression


@pytest.fixture(autouse=True)
def _kombu_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kombu, "_decoders", dict(kombu._decoders))


@pytest.mark.parametrize(
    ("pack", "name"),
    [(zlib.compress, "zlib"), (zlib.compress, "gzip"), (bz2.compress, "bzip2"), (lzma.compress, "lzma")],
)
def test_a_body_is_unpacked_up_to_the_limit(pack: Callable[[bytes], bytes], name: str) -> None:
    compression.bound(LIMIT)
    assert kombu.decompress(pack(b"x" * LIMIT), name) == b"x" * LIMIT
    for bad in (pack(b"x" * (LIMIT + 1)), pack(b"x" * 10**7), pack(b"x" * 10)[:-3]):
        with pytest.raises(ValueError, match="more than 1,000 bytes, or breaks off"):
            kombu.decompress(bad, name)


def test_a_body_of_a_type_that_cannot_be_bounded_is_refused() -> None:
    kombu.register(lambda body: body, lambda body: body, "application/x-odd", ["odd"])
    compression.bound(LIMIT)
    with pytest.raises(ValueError, match="not compressed with gzip, bzip2 or lzma"):
        kombu.decompress(b"x", "application/x-odd")
