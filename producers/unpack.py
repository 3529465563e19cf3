"""Bytes of files that are packed with gzip or zstd, whatever their names. Knows nothing of what is in them."""

import gzip
from collections.abc import Iterator
from contextlib import ExitStack
from io import BufferedIOBase, BufferedReader, FileIO, RawIOBase
from typing import TYPE_CHECKING, cast

from shared.errors import UserError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
#: After its first byte, 0x50 to 0x5f: a frame of zstd's that holds no data, but a note of whoever packed the file.
ZSTD_NOTE = b"\x2a\x4d\x18"
#: Bytes of the longest window that zstd packs with; those of dumps have 128 MiB to 2 GiB. It is held in memory.
MAX_WINDOW = 2**31
#: Bytes read at a time; zstd's blocks have twice as many, at most.
CHUNK = 1 << 16
BROKEN_OFF = "it breaks off"


class CountedFile(FileIO):
    """A file that counts what was read of it, in bytes."""

    done = 0

    def readinto(self, buffer: "WriteableBuffer") -> int | None:
        size = super().readinto(buffer)
        self.done += size or 0
        return size


def unpacked(packed: BufferedReader, name: str, opened: ExitStack) -> BufferedReader:
    """What is packed in these bytes, or themselves. name: the file's. opened: closes what is opened here.

    Reading it raises OSError, EOFError and zlib.error; UserError where zstandard is missing.
    """
    begins = packed.peek(4)[:4]
    stream: BufferedIOBase = packed
    if begins.startswith(GZIP):
        stream = opened.enter_context(gzip.GzipFile(fileobj=packed))
    elif begins == ZSTD or _is_note(begins):
        stream = opened.enter_context(BufferedReader(_Stream(_unzstd(packed, name)), CHUNK))
    return cast(BufferedReader, stream)


class _Stream(RawIOBase):
    """Pieces of bytes as a stream. What was good is given before what comes after it raises."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._held = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        while not self._held:
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
    """In pieces of 128 KiB at most.

    zstandard's own stream takes a file that breaks off for one that ends. So it is fed block by block here.
    """
    try:
        import zstandard  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        raise UserError(f"{name} is packed with zstd: `pip install 'feedmill[dumps]'` brings what reads it.") from None
    unpacker = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompressobj(read_across_frames=True)
    for block in _zstd_blocks(packed):
        try:
            yield unpacker.decompress(block)
        except zstandard.ZstdError as error:
            raise OSError(f"it cannot be unpacked ({error})") from None


def _zstd_blocks(packed: BufferedReader) -> Iterator[bytes]:
    """The frames of a zstd file, each as its header, its blocks and its checksum. The format: RFC 8878, 3.1."""

    def take(size: int) -> bytes:
        taken = packed.read(size)
        if len(taken) < size:
            raise EOFError(BROKEN_OFF)
        return taken

    while begins := packed.read(4):
        if _is_note(begins):
            left = int.from_bytes(take(4), "little")
            while left:
                left -= len(take(min(left, CHUNK)))
            continue
        if begins != ZSTD:
            raise EOFError(BROKEN_OFF) if len(begins) < 4 else OSError("what follows is not packed with zstd")
        described = take(1)
        single_segment = described[0] >> 5 & 1
        dictionary_id = (0, 1, 2, 4)[described[0] & 3]
        content_size = (single_segment, 2, 4, 8)[described[0] >> 6]
        yield begins + described + take(1 - single_segment + dictionary_id + content_size)
        is_last = False
        while not is_last:
            header = take(3)
            bits = int.from_bytes(header, "little")
            is_last, is_repeated, size = bool(bits & 1), bits >> 1 & 3 == 1, bits >> 3
            yield header + take(1 if is_repeated else size)
        if described[0] >> 2 & 1:
            yield take(4)


def _is_note(begins: bytes) -> bool:
    return begins[1:] == ZSTD_NOTE and begins[0] >> 4 == 5
