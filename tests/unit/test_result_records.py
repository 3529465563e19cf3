"""shared/results.py: packing results into records."""

from typing import Any

import pytest

from feedmill.shared.messages import Classification
from feedmill.shared.results import (
    JSON,
    PACKED,
    fingerprint_key,
    pack,
    parse_context,
    split,
    unpack,
)
from tests.support import make_classification

FINGERPRINT = "f0443d56baefed70ea7db12a3a34028e"


def classification(**changed: Any) -> Classification:
    values: dict[str, Any] = {
        "scores": {"food": 0.7, "travel": 0.2, "art": 0.1}, "fingerprint": FINGERPRINT,
        "classified_at": 1_700_000_000.123456, "queued_seconds": 0.25,
    }  # fmt: skip
    return make_classification("t3_x", **values | changed)


def unpacked_from(found: Classification) -> Classification | None:
    """Pack a result, and unpack it."""
    record, context = pack(found)
    (read,) = split(record)
    assert read.kind == PACKED
    assert context
    return unpack("t3_x", read, {context.id: context}.get)


def test_unpacks_what_was_packed() -> None:
    found = classification()
    record, context = pack(found)
    (read,) = split(record)
    assert (read.kind, read.key.hex(), len(record)) == (
        PACKED,
        FINGERPRINT,
        21 + 26 + 6,
    )
    unpacked = unpacked_from(found)
    assert unpacked
    assert list(unpacked.scores) == ["food", "travel", "art"]
    assert unpacked.scores == pytest.approx(found.scores, abs=1e-5)
    assert unpacked.model_copy(update={"scores": found.scores}) == found
    assert Classification.model_validate_json(unpacked.model_dump_json()) == unpacked
    assert context
    (stored,) = split(context.record)
    parsed = parse_context(stored.content)
    assert (parsed.labels, parsed.origin) == (
        ("art", "food", "travel"),
        ("m", None, "00", "w", "cpu"),
    )
    assert parsed == context
    assert unpack("t3_x", read, lambda _: None) is None


def test_packs_negative_cosines_and_writes_few_digits() -> None:
    scores = {"food": 1.0, "art": -0.0512345, "tea": -0.3106, "travel": 0.0}
    unpacked = unpacked_from(classification(scores=scores))
    assert unpacked
    assert unpacked.scores == pytest.approx(scores, abs=1e-5)
    assert [str(score) for score in unpacked.scores.values()] == [
        "1.0",
        "0.0",
        "-0.05124",
        "-0.3106",
    ]


@pytest.mark.parametrize(
    "scores",
    [{"food": 0.5, "art": 0.5}, {"food": 1.0, "art": 1.0}, {"food": 0.0, "art": 0.0}],
)
def test_the_label_is_first_among_equals(scores: dict[str, float]) -> None:
    unpacked = unpacked_from(classification(scores=scores))
    assert unpacked
    assert list(unpacked.scores) == ["food", "art"]


@pytest.mark.parametrize(
    "changed",
    [
        {"scores": {"food": 1.5, "art": 0.1}},
        {"scores": {"food": 0.5, "art": -0.5}},
        {"scores": {"art": 0.1}},
        {"fingerprint": "not hexadecimal"},
        {"fingerprint": FINGERPRINT.upper()},
        {"fingerprint": "00"},
    ],
)
def test_results_of_another_form_are_stored_as_json(changed: dict[str, object]) -> None:
    found = classification(**changed)
    record, context = pack(found)
    (read,) = split(record)
    assert (read.kind, read.key, context) == (
        JSON,
        fingerprint_key(found.fingerprint),
        None,
    )
    unpacked = unpack("t3_x", read, lambda _: None)
    assert unpacked
    assert unpacked.model_dump_json() == found.model_dump_json()
