"""Turn items from Python code (texts, dictionaries, posts, rows of frames) into posts.

NaN, NaT, pandas.NA and None are missing text. Numbers are converted to text. An item that cannot be classified becomes
an Item with the reason, and does not affect the others.
"""

from collections.abc import Iterable, Mapping
from numbers import Number
from typing import Any, NamedTuple, Protocol, TypeVar

from feedmill.producers.records import Columns, cut, normalize_column, plain_id
from feedmill.shared.errors import PostRefused, truncate
from feedmill.shared.messages import Post, is_missing

#: Names of labels, or a dictionary from each name to its description or descriptions.
Labels = Iterable[str] | Mapping[str, Any]
#: A single item: a text, a dictionary with title and body, or a post.
OneItem = str | Mapping[str, Any] | Post

#: Fields that are read of an item: those of its text, and its id.
TEXT_FIELDS = ("title", "body")
FIELDS = (*TEXT_FIELDS, "id")
#: The reason why an item without text has no label.
NO_TEXT = "no text"
#: Keys of a dictionary that a reason names.
MAX_KEYS_NAMED = 5


class Frame(Protocol):
    """A DataFrame of pandas or polars, or a table of pyarrow."""

    @property
    def columns(self) -> Any: ...


class Series(Protocol):
    """A Series of pandas or polars."""

    @property
    def to_frame(self) -> Any: ...


FrameT = TypeVar("FrameT", bound=Frame)


class Item(NamedTuple):
    """An item to classify.

    post: None if it cannot be classified, because of `reason`. id: the caller's, if any. given: the dictionary, if it
    was one.
    """

    post: Post | None
    reason: str = ""
    id: str | None = None
    given: Mapping[Any, Any] | None = None


def columns_of(title: object, body: object, id: object) -> Columns:  # noqa: A002 - the name of the field
    """Return the caller's choice of keys or columns, which pandas may name by numbers."""
    own_id, title, body = (None if name is None else str(name) for name in (id, title, body))
    return Columns.of(own_id, title, body)


def item_of(value: object, position: int, columns: Columns) -> Item:
    """Return the item for a text, a dictionary or a post. Its post's id is the position."""
    if isinstance(value, Post):
        return Item(value, "", value.id)
    if not isinstance(value, Mapping):
        return _make_item(position, {"body": [value]}, None)
    by_name = {normalize_column(str(key)): field for key, field in value.items()}
    found = {field: [by_name[name] for name in columns.names_of(field) if name in by_name] for field in FIELDS}
    if missing := [name for name in columns.text.values() if name is not None and name not in by_name]:
        return Item(None, f"no key {truncate(repr(missing[0]))}")
    if not (found["title"] or found["body"]):
        keys = ", ".join(truncate(str(key), 40) for key in list(value)[:MAX_KEYS_NAMED])
        return Item(None, f"no title or body among its keys ({keys}); name the key with title= or body=")
    return _make_item(position, found, value)


def _make_item(position: int, found: Mapping[str, Iterable[object]], given: Mapping[Any, Any] | None) -> Item:
    """Return the item with the first text among each field's values."""
    own_id = next((str(plain_id(value)) for value in found.get("id", ()) if not is_missing(value)), None)
    try:
        texts = {field: cut(field, _first_text(found.get(field, ()))) for field in TEXT_FIELDS}
        return Item(Post.parse({"id": str(position), **texts}), "", own_id, given)
    except PostRefused as refused:
        return Item(None, str(refused) if refused.field else NO_TEXT, own_id)
    except ValueError as error:
        return Item(None, str(error), own_id)


def _first_text(values: Iterable[object]) -> str:
    """Return the first value with text, or "". Raises ValueError for a value that is not text."""
    return next((text for text in map(_as_text, values) if text.strip()), "")


def _as_text(value: object) -> str:
    """Return a value as text; "" if it is missing. Raises ValueError for values that are neither text nor numbers."""
    if isinstance(value, str):
        return value
    if is_missing(value):
        return ""
    if isinstance(value, Number) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"expected text, not {type(value).__name__}")
