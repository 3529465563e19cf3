"""Decode DAG-CBOR, the encoding of records on Bluesky's network: a subset of CBOR (RFC 8949).

Links to other records (tag 42) become their bytes: nothing here follows them.
"""

import struct
from typing import Any

#: Maximum depth of nested values. Records of posts have about eight.
MAX_DEPTH = 64
#: The tag of links.
LINK_TAG = 42
#: Values of major type 7 by their additional information.
SIMPLE_VALUES = {20: False, 21: True, 22: None}
#: Additional information of a float of 64 bits, the only one allowed.
FLOAT64 = 27


def decode(data: bytes) -> Any:
    """Return the value. Raises ValueError if the bytes are no single valid value."""
    reader = _Reader(data)
    value = reader.value(depth=0)
    if reader.position != len(data):
        raise ValueError("bytes follow the value")
    return value


class _Reader:
    """Reads values from bytes, one after another."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("the value is nested too deeply")
        (first,) = self._take(1)
        major_type = first >> 5
        information = first & 31
        if major_type == 7:
            return self._simple(information)
        number = self._number(information)
        if major_type == 0:
            return number
        if major_type == 1:
            return -1 - number
        if major_type == 2:
            return self._take(number)
        if major_type == 3:
            text = self._take(number)
            return text.decode("utf-8")
        if major_type == 4:
            return self._array(number, depth)
        if major_type == 5:
            return self._map(number, depth)
        if number != LINK_TAG:
            raise ValueError(f"unknown tag {number}")
        return self.value(depth + 1)

    def _array(self, count: int, depth: int) -> list[Any]:
        values = []
        for _ in range(self._possible(count)):
            value = self.value(depth + 1)
            values.append(value)
        return values

    def _map(self, count: int, depth: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for _ in range(self._possible(count)):
            name = self.value(depth + 1)
            if not isinstance(name, str):
                raise ValueError("the name of a field is not a text")
            entries[name] = self.value(depth + 1)
        return entries

    def _possible(self, count: int) -> int:
        """Return the count of values, each of which has at least a byte."""
        bytes_left = len(self._data) - self.position
        if count > bytes_left:
            raise ValueError("the value is cut")
        return count

    def _simple(self, information: int) -> Any:
        if information == FLOAT64:
            digits = self._take(8)
            (number,) = struct.unpack(">d", digits)
            return number
        if information not in SIMPLE_VALUES:
            raise ValueError(f"unknown simple value {information}")
        return SIMPLE_VALUES[information]

    def _number(self, information: int) -> int:
        if information < 24:
            return information
        if information > 27:
            raise ValueError("lengths must be given")
        size = 1 << (information - 24)
        digits = self._take(size)
        return int.from_bytes(digits)

    def _take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self._data):
            raise ValueError("the value is cut")
        part = self._data[self.position : end]
        self.position = end
        return part
