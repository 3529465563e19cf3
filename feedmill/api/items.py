"""Turn items from Python code (texts, dictionaries, posts) into posts.

NaN, NaT, pandas.NA and None are missing text. Numbers among texts are converted to text. An item that cannot be
classified becomes an Item with the reason, and does not affect the others; but items of which none is text are an
error.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from numbers import Number
from typing import Any, NamedTuple

from feedmill.producers.records import FIELD_ALIASES, cut, normalize_key, plain_id
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


class Columns(NamedTuple):
    """Names of keys or columns given by the caller; None finds them by the names that files use (docs/files.md).

    With a title or a body, only the named ones are read as text.
    """

    title: Any = None
    body: Any = None
    id: Any = None

    @property
    def names_text(self) -> bool:
        return self.title is not None or self.body is not None

    def check(self) -> None:
        """Raise InputError for a value that no key or column can have as its name."""
        for argument, name in self._asdict().items():
            try:
                hash(name)
            except TypeError:
                raise InputError(
                    f"{argument}= must be the name of one key or column, not a {type_of(name)}. For text in two "
                    "columns, give title= and body=."
                ) from None

    def check_text(self, item: object) -> None:
        """Raise InputError if a key or column is named, but the item is a text."""
        if isinstance(item, str) and (given := [argument for argument, name in self._asdict().items() if name]):
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


def make_item(position: int, title: Sequence[object], body: Sequence[object], own_id: object = None) -> Item:
    """Return the item with the first text among each field's values. Its post's id is the position."""
    given = None if is_missing(own_id) else str(plain_id(own_id))
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
            columns.check_text(value)
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
    try:
        found = _Fields(value, columns)
    except ValueError as error:
        return Item(None, str(error))
    return make_item(position, found.of("title"), found.of("body"), found.id())._replace(given=value)


class _Fields:
    """The fields of a dictionary. Raises ValueError if it has none with text."""

    def __init__(self, given: Mapping[Any, Any], columns: Columns) -> None:
        self._given, self._columns = given, columns
        self._by_name = {normalize_key(str(key)): value for key, value in given.items()}
        if columns.names_text:
            for name in (columns.title, columns.body):
                if name is not None and name not in given:
                    raise ValueError(f"no key {truncate(repr(name))}")
        elif not any(name in self._by_name for field in TEXT_FIELDS for name in FIELD_ALIASES[field]):
            keys = ", ".join(truncate(str(key), 40) for key in list(given)[:MAX_KEYS_NAMED])
            raise ValueError(f"no title or body among its keys ({keys}); name the key with title= or body=")

    def of(self, field: str) -> list[Any]:
        """Return the values that may hold a field's text, in order of preference."""
        named = getattr(self._columns, field)
        if self._columns.names_text:
            return [] if named is None else [self._given[named]]
        return [self._by_name[name] for name in FIELD_ALIASES[field] if name in self._by_name]

    def id(self) -> object:
        if self._columns.id is not None:
            return self._given.get(self._columns.id)
        values = (self._by_name.get(name) for name in FIELD_ALIASES["id"])
        return next((value for value in values if not is_missing(value)), None)


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
