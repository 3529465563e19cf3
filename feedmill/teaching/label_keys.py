"""The keys of `feedmill label` and of the page Review: one for each label and for each command.

A label's own name is always one of its answers, so no key means anything but the label with that
name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from string import punctuation

#: Keys of labels, by their place, and of commands.
LABEL_KEYS = "123456789abcdefghijklmnoprtvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
NONE = "0"
UNDO = "u"
SKIP = "s"
QUIT = "q"


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The keys of a session. labels: the place of each label, by its key, in order of places."""

    labels: dict[str, int]
    none: str
    undo: str
    skip: str
    quit: str


def assign_keys(names: Sequence[str]) -> Keys:
    """Return the keys for these labels, at most as many as LABEL_KEYS.

    A label has the key of its place. If that key is the name of another label, it has the first
    free one. A label whose name is a key in use has that key. A command whose key is the name of a
    label has a punctuation mark.
    """
    place_keys = LABEL_KEYS[: len(names)]
    keys_in_use = {*place_keys, NONE, UNDO, SKIP, QUIT}
    used_keys = {name for name in names if len(name) == 1}
    by_place = {index: name for index, name in enumerate(names) if name in keys_in_use}
    for index, key in enumerate(place_keys):
        if index not in by_place and key not in used_keys:
            by_place[index] = key
    used_keys.update(by_place.values())
    for index in range(len(names)):
        if index not in by_place:
            by_place[index] = _take_key(LABEL_KEYS, used_keys)
    return Keys(
        labels={by_place[index]: index for index in range(len(names))},
        none=_take_key(NONE + punctuation, used_keys),
        undo=_take_key(UNDO + punctuation, used_keys),
        skip=_take_key(SKIP + punctuation, used_keys),
        quit=_take_key(QUIT + punctuation, used_keys),
    )


def _take_key(candidates: str, used_keys: set[str]) -> str:
    """Take the first candidate that is not in use: add it to the used keys, and return it."""
    key = next(key for key in candidates if key not in used_keys)
    used_keys.add(key)
    return key
