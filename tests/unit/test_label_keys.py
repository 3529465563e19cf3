"""feedmill.teaching.label_keys.py: which key means what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedmill.teaching.label_keys import LABEL_KEYS, NONE, QUIT, SKIP, UNDO, assign_keys

NAMES = st.one_of(
    st.sampled_from([*LABEL_KEYS, NONE, UNDO, SKIP, QUIT, "!", '"', "ä", "-"]),
    st.text("abc01", min_size=2, max_size=4),
)


@given(st.lists(NAMES, min_size=2, max_size=len(LABEL_KEYS), unique=True))
def test_no_key_means_two_things(names: list[str]) -> None:
    """Each label and command has one key, which no other label has as its name."""
    keys = assign_keys(names)
    commands = [keys.none, keys.undo, keys.skip, keys.quit]
    assert list(keys.labels.values()) == list(range(len(names)))
    assert len({*keys.labels, *commands}) == len(names) + len(commands)
    for key, place in keys.labels.items():
        assert key not in names or key == names[place]
        if names[place] not in keys.labels and LABEL_KEYS[place] not in names:
            assert key == LABEL_KEYS[place]
    assert not set(commands) & set(names)


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ("delivery,refund", "12"),
        ("x,refund", "12"),
        ("5,4,3,2,1", "54321"),
        ("refund,1", "21"),
        ("refund,2,delivery", "123"),
        ("refund,delivery,1", "321"),
        ("0,1", "01"),
        ("s,u,q", "suq"),
    ],
)
def test_names_that_are_keys_keep_their_meaning(names: str, shown: str) -> None:
    assert "".join(assign_keys(names.split(",")).labels) == shown
