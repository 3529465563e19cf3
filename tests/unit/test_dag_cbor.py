"""DAG-CBOR: valid records, and bytes of strangers."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedmill.producers.bluesky import time_of_key
from feedmill.producers.dag_cbor import MAX_DEPTH, decode
from tests.fakes.jetstream_archive import encode_cbor

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda each: st.lists(each) | st.dictionaries(st.text(), each),
    max_leaves=20,
)


@given(VALUES)
def test_decodes_what_was_encoded(value: Any) -> None:
    assert decode(encode_cbor(value)) == value


def test_a_link_becomes_its_bytes() -> None:
    assert decode(b"\xa1\x61a\xd8\x2a\x43\x00\x01\x02") == {"a": b"\x00\x01\x02"}


@given(st.binary(max_size=200))
def test_other_bytes_raise_nothing_but_value_errors(data: bytes) -> None:
    try:
        decode(data)
    except ValueError:
        return


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\x00",
        b"\x5f\x41a\xff",
        b"\x9b\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\xbb\x7f\xff\xff\xff\xff\xff\xff\xff",
        b"\x7b\x7f\xff\xff\xff\xff\xff\xff\xff",
        b"\x63\xff\xff\xff",
        b"\xa1\x01\x02",
        b"\xa1\xa0\x02",
        b"\xc1\x00",
        b"\xf7",
        b"\xf9\x00\x00",
        b"\x81" * (MAX_DEPTH + 1) + b"\x00",
        b"\xd8\x2a" * 100_000 + b"\x00",
    ],
)
def test_invalid_values_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        decode(data)


def test_a_records_key_has_a_time() -> None:
    assert time_of_key("3l3qo2vutsw2b") == pytest.approx(1_725_911_162, abs=2)
    assert time_of_key("self") is None
    assert time_of_key("0000000000000") is None
