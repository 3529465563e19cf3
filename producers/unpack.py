"""Decompress gzip and zstd streams, detected by content rather than file name."""

import gzip
from collections.abc import Iterator
from contextlib import ExitStack
from io import BufferedIOBase, BufferedReader, FileIO, RawIOBase
from typing import TYPE_CHECKING, cast

from feedmill.shared.errors import explain_missing

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
#: Bytes 2 to 4 of a zstd skippable frame, which holds metadata; its first byte is 0x50 to 0x5f.
ZSTD_SKIPPABLE = b"\x2a\x4d\x18"
#: Maximum zstd window in bytes, held in memory. Dumps use windows of 128 MiB to 2 GiB.
MAX_WINDOW = 2**31
#: Bytes per read. A zstd block is at most twice as large.
CHUNK_BYTES = 1 << 16
TRUNCATED = "the file is truncated"


class CountedFile(FileIO):
    """A file that counts the bytes read from it."""

    done = 0

    def readinto(self, buffer: "WriteableBuffer") -> int | None:
        size = super().readinto(buffer)
        self.done += size or 0
        return size


def decompressed(packed: BufferedReader, name: str, opened: ExitStack) -> BufferedReader:
    """Return a reader of the decompressed bytes, or `packed` itself if it is not compressed.

    name: file name for errors. opened: exit stack that closes the readers.
    Reading raises OSError, EOFError and zlib.error, or UserError if zstandard is not installed.
    """
    magic = packed.peek(4)[:4]
    stream: BufferedIOBase = packed
    if magic.startswith(GZIP):
        stream = opened.enter_context(gzip.GzipFile(fileobj=packed))
    elif magic == ZSTD or _is_skippable(magic):
        stream = opened.enter_context(BufferedReader(ChunkStream(_unzstd(packed, name)), CHUNK_BYTES))
    return cast(BufferedReader, stream)


class ChunkStream(RawIOBase):
    """A stream over chunks of bytes. Valid bytes are returned before a later chunk's error is raised."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._held = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        while not self._held:  # a chunk may be empty
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._held = memoryview(piece)
        target = memoryview(buffer)
        size = min(len(target), len(self._held))
        target[:size] = self._held[:size]
        self._held = self._held[size:]
        return size


def _unzstd(packed: BufferedReader, name: str) -> Iterator[bytes]:
    """Yield decompressed chunks of at most 128 KiB.

    Feeds zstandard block by block, because its own stream reader accepts a truncated file without an error.
    """
    with explain_missing(f"Reading {name}", "dumps"):
        import zstandard  # noqa: PLC0415 - optional dependency
    unpacker = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompressobj(read_across_frames=True)
    for block in _zstd_blocks(packed):
        try:
            yield unpacker.decompress(block)
        except zstandard.ZstdError as error:
            raise OSError(f"zstd cannot decompress it: {error}") from None


def _zstd_blocks(packed: BufferedReader) -> Iterator[bytes]:
    """Yield a zstd file's frames in parts: header, blocks, checksum. Format: RFC 8878, section 3.1."""

    def take(size: int) -> bytes:
        taken = packed.read(size)
        if len(taken) < size:
            raise EOFError(TRUNCATED)
        return taken

    while magic := packed.read(4):
        if _is_skippable(magic):
            remaining = int.from_bytes(take(4), "little")
            while remaining:
                remaining -= len(take(min(remaining, CHUNK_BYTES)))
            continue
        if magic != ZSTD:
            raise EOFError(TRUNCATED) if len(magic) < 4 else OSError("zstd data is followed by other data")
        descriptor = take(1)
        single_segment = descriptor[0] >> 5 & 1
        dictionary_id = (0, 1, 2, 4)[descriptor[0] & 3]
        content_size = (single_segment, 2, 4, 8)[descriptor[0] >> 6]
        yield magic + descriptor + take(1 - single_segment + dictionary_id + content_size)
        is_last = False
        while not is_last:
            header = take(3)
            bits = int.from_bytes(header, "little")
            is_last, is_repeated, size = bool(bits & 1), bits >> 1 & 3 == 1, bits >> 3
            yield header + take(1 if is_repeated else size)
        if descriptor[0] >> 2 & 1:
            yield take(4)


def _is_skippable(magic: bytes) -> bool:
    return magic[1:] == ZSTD_SKIPPABLE and magic[0] >> 4 == 5
