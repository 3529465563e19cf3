"""Bodies that senders compress, unpacked within a bound: a megabyte of gzip may hold a gigabyte of nothing.

kombu's own decoders unpack whatever comes. `bound` puts others in their place, for the whole process.
"""

import bz2
import lzma
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

from kombu import compression as _compression

#: The stubs take a pair for a function.
compression: Any = _compression
#: Bytes that lzma may take for itself: what packs with its highest setting asks for half as many, a hostile header for
#: gigabytes.
LZMA_MEMORY = 2**27
#: What unpacks each type, and what kombu calls it besides.
UNPACKERS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "application/x-gzip": (zlib.decompressobj, ["gzip", "zlib"]),
    "application/x-bz2": (bz2.BZ2Decompressor, ["bzip2", "bzip"]),
    "application/x-lzma": (partial(lzma.LZMADecompressor, memlimit=LZMA_MEMORY), ["lzma", "xz"]),
}


def bound(limit: int) -> None:
    """From now on a body of more than `limit` bytes is refused, and so is one of a type that cannot be bounded."""
    for kind in compression.encoders():
        make, aliases = UNPACKERS.get(kind, (None, []))
        pack, _ = compression.get_encoder(kind)
        compression.register(pack, _unpacker(make, limit) if make else _refuse, kind, aliases)


def _unpacker(make: Callable[[], Any], limit: int) -> Callable[[bytes], bytes]:
    def unpack(packed: bytes) -> bytes:
        unpacker = make()
        unpacked: bytes = unpacker.decompress(packed, limit)
        if not unpacker.eof:
            raise ValueError(f"a body that holds more than {limit:,} bytes, or breaks off")
        return unpacked

    return unpack


def _refuse(_: bytes) -> bytes:
    raise ValueError("a body that is not compressed with gzip, bzip2 or lzma")
