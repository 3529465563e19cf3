"""Read safetensors files: first the header, then single tensors, each into memory of its own.

The safetensors library maps a file into memory and returns tensors that are views of the map:
whoever overwrites the file changes the labels of a worker that runs, and whoever shortens it ends
the worker with a bus error. Here tensors are copies. A header is small, so that shapes are known,
and checked, before memory is taken for a tensor.

The format: 8 bytes with the header's length N, little-endian; N bytes of JSON that give each
tensor a type, a shape and the place of its bytes; the bytes.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from feedmill.workers.models.files import loading, open_regular

# imported when a tensor is read: headers are read by commands that do without torch
if TYPE_CHECKING:
    import torch

#: The format's types that models use: torch's name, and bytes per number.
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
#: Bytes of the header's length, and maximum bytes of a header. A tensor takes about 100; models
#: have some thousand.
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 2**24
#: Maximum dimensions of a tensor.
MAX_DIMENSIONS = 16
#: Key of the header that holds texts instead of a tensor.
METADATA_KEY = "__metadata__"
#: Advice for damaged files. A clone without git-lfs has small text files in place of the weights.
ADVICE = "Download it again; in a clone, run `git lfs pull`."


class TensorPlace(NamedTuple):
    """A tensor's type, by the format's name, and shape; where its bytes begin and end, from the
    start of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def numbers(self) -> int:
        """Number of the tensor's elements."""
        return math.prod(self.shape)


class TensorFile:
    """The header of a safetensors file, and its tensors.

    Raises ModelError if the file is damaged or truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with (
            loading(f"the safetensors file {path}", ADVICE),
            open_regular(path) as file,
        ):
            status = os.fstat(file.fileno())
            size = status.st_size
            length_bytes = file.read(LENGTH_BYTES)
            header_size = int.from_bytes(length_bytes, "little")
            data_start = LENGTH_BYTES + header_size
            is_allowed = 0 < header_size <= MAX_HEADER_BYTES
            if size < data_start or not is_allowed:
                raise ValueError(
                    f"its first bytes give a header of {header_size:,} bytes; the "
                    f"file has {size:,}"
                )
            content = file.read(header_size)
            header = json.loads(content)
            if not isinstance(header, dict):
                raise TypeError("its header is no JSON object")
            #: The header's texts, of any kind.
            self.metadata: dict[str, Any] = _metadata(header)
            #: The tensors by name.
            self.places: dict[str, TensorPlace] = {}
            for name, entry in header.items():
                self.places[name] = _place(name, entry, data_start)
            _check_ends(self.places, data_start, size)

    def __contains__(self, name: str) -> bool:
        return name in self.places

    def read(self, name: str) -> "torch.Tensor":
        """Return a tensor on the CPU, in memory that belongs to it alone.

        Raises ModelError if there is none.
        """
        import torch  # noqa: PLC0415

        with (
            loading(f"the tensor {name} in {self.path}", ADVICE),
            open_regular(self.path) as file,
        ):
            if name not in self.places:
                raise ValueError("the file has none of this name")
            place = self.places[name]
            byte_count = place.end - place.start
            content = torch.empty(byte_count, dtype=torch.uint8)
            file.seek(place.start)
            buffer: Any = content.numpy()
            bytes_read = file.readinto(buffer)
            if bytes_read != len(buffer):
                raise ValueError("the file ends before it")
            dtype = torch_dtype(place)
            numbers = content.view(dtype)
            return numbers.reshape(place.shape)


def torch_dtype(place: TensorPlace) -> "torch.dtype":
    """Return torch's type of a tensor."""
    import torch  # noqa: PLC0415

    name, _ = DTYPES[place.dtype]
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class LazyTensor:
    """A tensor of a file that is read when it is indexed, as transformers does with each tensor of
    a state_dict.

    So a model in half precision never holds all its weights in the file's precision.
    """

    def __init__(self, file: TensorFile, name: str) -> None:
        self._file = file
        self._name = name
        place = file.places[name]
        self.shape = place.shape
        self.dtype = torch_dtype(place)

    def __getitem__(self, index: Any) -> "torch.Tensor":
        tensor = self._file.read(self._name)
        return tensor[index]

    def get_shape(self) -> list[int]:
        """Return the shape, as a slice of the safetensors library does."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return the format's name of the type, as a slice of the safetensors library does."""
        place = self._file.places[self._name]
        return place.dtype


def lazy_tensors(paths: Sequence[Path]) -> dict[str, LazyTensor]:
    """Return the tensors of several files. Raises ModelError."""
    tensors = {}
    for path in paths:
        file = TensorFile(path)
        for name in file.places:
            tensors[name] = LazyTensor(file, name)
    return tensors


def _metadata(header: dict[str, Any]) -> dict[str, Any]:
    """Remove and return the texts of a header."""
    metadata = header.pop(METADATA_KEY, None)
    if isinstance(metadata, dict):
        return metadata
    return {}


def _place(name: str, entry: Any, data_start: int) -> TensorPlace:
    """Return what a header says of a tensor. Raises ValueError, KeyError, TypeError."""
    dtype = entry["dtype"]
    _, item_bytes = DTYPES[dtype]
    shape = tuple(entry["shape"])
    start, end = entry["data_offsets"]
    numbers = (*shape, start, end)
    are_whole = all(map(_is_whole, numbers))
    if not are_whole or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"the shape or place of {name!r:.100} is invalid")
    byte_count = end - start
    item_count = math.prod(shape)
    if byte_count != item_count * item_bytes:
        raise ValueError(
            f"{name!r:.100} has the shape {list(shape)!s:.100}, but {byte_count:,} bytes"
        )
    return TensorPlace(
        dtype=dtype,
        shape=shape,
        start=data_start + start,
        end=data_start + end,
    )


def _is_whole(number: Any) -> bool:
    """Return whether a value of a header is a whole number, not below 0."""
    return type(number) is int and number >= 0


def _check_ends(places: dict[str, TensorPlace], data_start: int, size: int) -> None:
    """Raise ValueError unless the tensors' bytes follow each other up to the end of the file."""
    ordered = sorted(
        places.values(),
        key=lambda place: (place.start, place.end),
    )
    data_end = data_start
    for place in ordered:
        if place.start != data_end:
            raise ValueError("its tensors overlap or leave gaps")
        data_end = place.end
    if data_end != size:
        raise ValueError(f"its tensors end at {data_end:,}, the file at {size:,}")
