"""Turn items from Python code (texts, dictionaries, posts) into posts.

NaN, NaT, pandas.NA and None are missing text. Numbers among texts are converted to text. An item that cannot be
classified becomes an Item with the reason, and does not affect the others; but items of which none is text are an
error.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from numbers import Number
from typing import Any, NamedTuple

from feedmill.producers.records import Columns, cut, normalize_column, plain_id
from feedmill.shared.errors import InputError, PostRefused, truncate
from feedmill.shared.messages import Post, is_missing

#: Fields that make up a post's text.
TEXT_FIELDS = ("title", "body")
#: The reason why an item without text has no label.
NO_TEXT = "no text"
#: Keys of a dictionary that a reason names.
MAX_KEYS_NAMED = 5
#: Items without text at the beginning after which a wrong type of all items is reported.
MAX_CHECKED_ITEMS = 1000


def columns_of(title: object, body: object, id: object) -> Columns:  # noqa: A002 - the name of the field
    """Return the caller's choice of keys or columns. Raises InputError for values that cannot be a name."""
    for argument, name in (("title", title), ("body", body), ("id", id)):
        if not isinstance(name, str | int | tuple | None):
            raise InputError(
                f"{argument}= must be the name of one key or column, not a {type_of(name)}. For text in two columns, "
                "give title= and body=."
            )
    id, title, body = (None if name is None else str(name) for name in (id, title, body))  # noqa: A001
    return Columns.of(id, title, body)


def check_text(item: object, columns: Columns) -> None:
    """Raise InputError if a key or column is named, but the item is a text."""
    if isinstance(item, str) and (given := [name for name in ("title", "body", "id") if getattr(columns, name)]):
        raise InputError(
            f"{given[0]}= names a key of dictionaries or a column of a DataFrame, but the items are texts. Omit "
            f"{given[0]}=."
        )


class Item(NamedTuple):
    """An item to classify.

    post: None if it cannot be classified, because of `reason`. id: the caller's, if any. given: the dictionary, if it
    was one. kind: type of its value, if that is not text: a number, or a type that cannot be classified.
    """

    post: Post | None
    reason: str = ""
    id: str | None = None
    given: Mapping[Any, Any] | None = None
    kind: str = ""


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
    given = next((str(plain_id(each)) for each in ids if not is_missing(each)), None)
    kind = _kind_of((*title, *body))
    try:
        fields = {"title": cut("title", _first_text(title)), "body": cut("body", _first_text(body))}
        return Item(Post.parse({"id": str(position), **fields}), "", given, kind=kind)
    except PostRefused as refused:
        return Item(None, str(refused) if refused.field else NO_TEXT, given, kind=kind)
    except ValueError as error:
        return Item(None, str(error), given, kind=kind)


def items_of(given: Iterable[object], columns: Columns) -> Iterator[Item]:
    """Yield an item for each text, dictionary or post. Raises InputError for texts, if columns are named."""
    is_checked = False
    for position, value in enumerate(given):
        if not (is_checked or is_missing(value)):
            check_text(value, columns)
            is_checked = True
        yield item_of(value, position, columns)


def check_types(items: Iterator[Item], unit: str) -> Iterator[Item]:
    """Yield the items. Raises InputError, before the first one, if none is text and some have a wrong type or no
    key with text.

    Reads on until the first text. unit: the word for an item.
    """
    head: list[Item] = []
    for item in islice(items, MAX_CHECKED_ITEMS):
        head.append(item)
        if item.post is not None and not item.kind:
            break
    else:
        for at, item in enumerate(head):
            if item.kind:
                raise InputError(
                    f"No {unit} is text: {unit} {at} is of type {item.kind}. Give texts or dictionaries with title "
                    "and body, or convert the values to text first."
                )
            if item.post is None and item.reason != NO_TEXT:
                raise InputError(f"No {unit} has a text, such as {unit} {at}: {item.reason}.")
    yield from head
    yield from items


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


def _kind_of(values: Iterable[object]) -> str:
    """Return the type of the first value that is neither text nor missing; "" if there is none, or a text."""
    kind = ""
    for value in values:
        if isinstance(value, str):
            if value.strip():
                return ""
        elif not (kind or is_missing(value)):
            kind = type_of(value)
    return kind


def _first_text(values: Iterable[object]) -> str:
    """Return the first value with text, or "". Raises ValueError for a value that is not text."""
    return next((text for text in map(as_text, values) if text.strip()), "")
