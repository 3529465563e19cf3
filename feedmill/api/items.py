"""Turn items from Python code (texts, dictionaries, posts) into posts.

NaN, NaT, pandas.NA and None are missing text. Numbers are converted to text. An item that cannot be classified becomes
an Item with the reason, and does not affect the others.
"""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple

from feedmill.producers.records import Columns, cut, normalize_column, plain_id
from feedmill.shared.errors import PostRefused, truncate
from feedmill.shared.messages import Post, is_missing

#: Fields that make up a post's text.
TEXT_FIELDS = ("title", "body")
#: The reason why an item without text has no label.
NO_TEXT = "no text"
#: Keys of a dictionary that a reason names.
MAX_KEYS_NAMED = 5


def columns_of(title: object, body: object, id: object) -> Columns:  # noqa: A002 - the name of the field
    """Return the caller's choice of keys or columns, which pandas may name by numbers."""
    id, title, body = (None if name is None else str(name) for name in (id, title, body))  # noqa: A001
    return Columns.of(id, title, body)


class Item(NamedTuple):
    """An item to classify.

    post: None if it cannot be classified, because of `reason`. id: the caller's, if any. given: the dictionary, if it
    was one.
    """

    post: Post | None
    reason: str = ""
    id: str | None = None
    given: Mapping[Any, Any] | None = None


def type_of(value: object) -> str:
    """Return the name of a value's type, with the package of a type that is not built in."""
    package, name = type(value).__module__.partition(".")[0], type(value).__name__
    return name if package == "builtins" else f"{package}.{name}"


def as_text(value: object) -> str:
    """Return a value as text; "" if it is missing. Raises ValueError for values that are neither text nor numbers."""
    if isinstance(value, str):
        return value
    if is_missing(value):
        return ""
    if isinstance(value, Number) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"expected text, not {type(value).__name__}")


def make_item(position: int, title: Sequence[object], body: Sequence[object], ids: Iterable[object] = ()) -> Item:
    """Return the item with the first text among each field's values. Its post's id is the position."""
    own_id = next((str(plain_id(value)) for value in ids if not is_missing(value)), None)
    try:
        fields = {"title": cut("title", _first_text(title)), "body": cut("body", _first_text(body))}
        return Item(Post.parse({"id": str(position), **fields}), "", own_id)
    except PostRefused as refused:
        return Item(None, str(refused) if refused.field else NO_TEXT, own_id)
    except ValueError as error:
        return Item(None, str(error), own_id)


def item_of(value: object, position: int, columns: Columns) -> Item:
    """Return the item for a text, a dictionary or a post."""
    if isinstance(value, Post):
        return Item(value, "", value.id)
    if not isinstance(value, Mapping):
        return make_item(position, (), (value,))
    by_name = {normalize_column(str(key)): field for key, field in value.items()}
    title, body, ids = (
        [by_name[name] for name in columns.names_of(field) if name in by_name] for field in (*TEXT_FIELDS, "id")
    )
    if missing := [name for name in columns.text.values() if name and name not in by_name]:
        return Item(None, f"no key {truncate(repr(missing[0]))}")
    if not (title or body):
        keys = ", ".join(truncate(str(key), 40) for key in list(value)[:MAX_KEYS_NAMED])
        return Item(None, f"no title or body among its keys ({keys}); name the key with title= or body=")
    return make_item(position, title, body, ids)._replace(given=value)


def _first_text(values: Iterable[object]) -> str:
    """Return the first value with text, or "". Raises ValueError for a value that is not text."""
    return next((text for text in map(as_text, values) if text.strip()), "")
