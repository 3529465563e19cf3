"""Convert records of any origin to posts, and filter them. Independent of file formats.

Recognizes common field names, and those of Reddit's API, which dumps (Pushshift, Arctic Shift) also use.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from enum import Enum
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

from feedmill.shared.errors import InputError, PostRefused, printable
from feedmill.shared.messages import MAX_BODY, MAX_TITLE, REMOVED_BODIES, Post, digest, in_utc, is_missing

#: Post field -> names it may have in a record, in order of preference.
FIELD_ALIASES: dict[str, tuple[str, ...]] = {
    "id": ("id", "post_id"),
    "topic": ("topic", "label", "category"),
    "title": ("title", "headline", "subject"),
    "body": ("body", "selftext", "text", "description", "content"),
    "subreddit": ("subreddit", "subreddit_name"),
    "score": ("score", "ups", "upvotes"),
    "url": ("url", "permalink", "link"),
    "permalink": ("permalink",),
    "created_utc": ("created_utc", "created", "created_at", "date", "timestamp"),
    "edited_utc": ("edited_utc", "edited"),
    "stickied": ("stickied",),
    "nsfw": ("nsfw", "over_18"),
    "spoiler": ("spoiler",),
    "extra": ("extra",),
}
#: Names of the fields that make up a post's text.
TEXT_NAMES = FIELD_ALIASES["title"] + FIELD_ALIASES["body"]
#: A post's fullname on Reddit.
REDDIT_FULLNAME = re.compile(r"t3_[a-z0-9]+")
#: Keys that hold a post's fullname in dumps. In other files they hold other names, shared by many posts.
FULLNAME_FIELDS = ("name", "fullname")
#: Optional fields: an invalid value drops the field, not the post.
OPTIONAL_FIELDS = frozenset(FIELD_ALIASES) - {"id", "title", "body"}
#: Fields with times, which occur in several formats.
TIME_FIELDS = frozenset({"created_utc", "edited_utc"})
#: Values of Reddit's `edited` that carry no time.
EDITED_FLAGS = frozenset({"false", "true", "0", "1"})
#: A post's id in a Reddit URL, bare as in the API, and as a fullname with the prefix t3_.
REDDIT_ADDRESS = re.compile(r"/comments/([a-z0-9]+)", re.IGNORECASE)
REDDIT_ID = re.compile(r"[a-z0-9]+")
#: Reasons for rejecting a record.
COMMENT, NO_TEXT = "a comment; only posts are read", "title or body must contain text"
REMOVED = "deleted or removed on Reddit"
#: Maximum characters of each text field. Models read less than that.
MAX_TEXT = {"title": MAX_TITLE, "body": MAX_BODY}
#: Reddit's permalinks, which lack the host.
REDDIT_PATH = re.compile(r"/(r|u|user)/[^/]+/comments/")
#: Placeholder titles of deleted and removed posts.
DELETED_TITLE = re.compile(r"\[ ?(deleted|removed)( by [a-z -]+)? ?\]", re.IGNORECASE)
#: Why the text of a post on Reddit must not be used: "deleted" by its author or for legal reasons, which is final;
#: "removed" by moderators or filters, who may approve the post later; "" if it may be used.
Removal = Literal["", "deleted", "removed"]
#: Values of Reddit's `removed_by_category`, and of `removal_type` in Arctic Shift's data, that can be undone.
REVERSIBLE_REMOVALS = frozenset({"moderator", "automod_filtered", "reddit", "removed"})
#: Post field -> its column in exports. There, `label` is a model's prediction, not a topic, and `permalink` not `url`.
POST_COLUMNS = {field: {"created_utc": "date", "edited_utc": "edited"}.get(field, field) for field in (
    "id", "topic", "title", "body", "subreddit", "score", "url", "created_utc", "permalink", "edited_utc", "stickied",
    "nsfw", "spoiler", "extra", "run",
)}  # fmt: skip
#: Columns, in lower case, that together identify an export.
EXPORT_COLUMNS = frozenset({"id", "label", "scores", "fingerprint", "classified_at"})
#: A cell that a spreadsheet would run as a formula, plain or escaped (possibly more than once).
FORMULA_START = re.compile("'*[=+\\-@\\t\\r\\n\uff1d\uff0b\uff0d\uff20]")


class Labelled(NamedTuple):
    """A post with the label and scores that a model assigned, or with its topic, which has no model."""

    post: Post
    label: str = ""
    scores: dict[str, float] = {}  # noqa: RUF012 - never changed
    model: str = ""


class BadRecord(NamedTuple):
    """A problem with a record. where: file:line, and the element's number in an array.

    skipped: true if the record yields no post. Otherwise its post follows, without the invalid field. column: key of
    the invalid value, if the post is kept; "" if a text was cut.
    """

    where: str
    reason: str
    skipped: bool = True
    column: str = ""


class LeftOut(Enum):
    """Reasons for skipping a valid record."""

    BY_FILTERS = 1
    #: Deleted by its author, or removed by a moderator or Reddit: it must not be processed.
    REMOVED = 2
    #: A row of a spreadsheet without any value.
    BLANK = 3


class Columns(NamedTuple):
    """Keys of a record that the user chose, in the form of `normalize_key`; None detects a field by its names.

    If a title or a body is chosen, the text consists of the chosen ones only. date_format: format of dates, as for
    `strptime`, tried before the known ones. keep: keys of values to keep in the post's `extra`, each with its name
    there.
    """

    id: str | None = None
    title: str | None = None
    body: str | None = None
    date_format: str | None = None
    keep: Sequence[tuple[str, str]] = ()

    @classmethod
    def of(
        cls,
        id: str | None = None,  # noqa: A002 - the field's name
        title: str | None = None,
        body: str | None = None,
        date_format: str | None = None,
        keep: Sequence[str] = (),
    ) -> "Columns":
        """Return the choice for names as written by the user."""
        id, title, body = (None if name is None else normalize_key(name) for name in (id, title, body))  # noqa: A001
        return cls(id, title, body, date_format, tuple((normalize_key(name), name) for name in keep))

    @property
    def text(self) -> dict[str, str | None]:
        """The keys of title and body, if any was chosen."""
        return {} if self.title is None and self.body is None else {"title": self.title, "body": self.body}

    def names_of(self, field: str) -> Sequence[str]:
        """Return the keys that may hold the id, the title or the body, in order of preference."""
        chosen = {"id": self.id} if field == "id" and self.id is not None else {} if field == "id" else self.text
        return [name for name in (chosen[field],) if name is not None] if chosen else FIELD_ALIASES[field]

    def texts_among(self, keys: Iterable[str]) -> list[str]:
        """Return the keys that may hold a title or a body."""
        return [key for key in keys if key in self.names_of("title") or key in self.names_of("body")]


DETECTED = Columns()


def check_columns(
    table: str, names: Sequence[Any], columns: Columns, needs_text: bool = True, flag: str = "--{}-column"
) -> None:
    """Raise InputError if a chosen column is missing, a column to read occurs twice, or none has text.

    table: name of the table in errors. names: its columns. needs_text: false for an object of JSON, which may lack the
    title, the body or both. flag: how a column is chosen.
    """
    keys, shown = [normalize_key(str(name)) for name in names], f"Its columns: {listed(names)}."
    has_text = bool(columns.texts_among(keys))
    chosen = {"id": columns.id} | (columns.text if needs_text or not has_text else {})
    flags = [(key, flag.format(field)) for field, key in chosen.items() if key is not None]
    for key, given in [*flags, *((key, "--keep") for key, _ in columns.keep)]:
        if key not in keys:
            raise InputError(f"{table} has no column {printable(key)} ({given}). {shown}")
    read = {name for field in ("id", "title", "body") for name in columns.names_of(field)}
    read.update(key for key, _ in columns.keep)
    if twice := next((key for key in keys if key in read and keys.count(key) > 1), None):
        raise InputError(f"{table} has {keys.count(twice)} columns {printable(twice)}. Rename all but one of them.")
    if needs_text and not has_text:
        raise InputError(
            f"{table} has no column that is known to hold text ({', '.join(TEXT_NAMES)}). Name it with "
            f"{flag.format('body')}; a file without a header needs one. {shown}"
        )


def listed(names: Sequence[Any]) -> str:
    """Return columns for a message, names with commas in quotes."""
    quoted = (json.dumps(name, ensure_ascii=False) if "," in name else name for name in map(str, names))
    return f"{printable(', '.join(quoted)):.200}"


class Filters(NamedTuple):
    """Filters by subreddit and time. A record without the field that a filter needs is rejected.

    subreddits: names in the form of `subreddit_name`; empty for all. since, until: seconds since 1970; `until` is
    exclusive.
    """

    subreddits: frozenset[str] = frozenset()
    since: float | None = None
    until: float | None = None

    def admit(self, record: dict[str, Any], date_format: str | None = None) -> bool:
        """Return true if the record passes the filters. Its keys must be in the form of `normalize_key`.

        date_format: see `Columns`.
        """
        if self.subreddits:
            subreddit = _first(record, "subreddit")
            if subreddit is None or subreddit_name(str(subreddit)) not in self.subreddits:
                return False
        if self.since is None and self.until is None:
            return True
        created = _seconds(_first(record, "created_utc"), date_format)
        return (
            isinstance(created, int | float)
            and (self.since is None or created >= self.since)
            and (self.until is None or created < self.until)
        )


NO_FILTERS = Filters()


def subreddit_name(text: str) -> str:
    """Normalize a subreddit's name for comparison: "/r/Python" becomes "python"."""
    return text.strip().lower().removeprefix("/").removeprefix("r/").removesuffix("/")


def normalize_key(name: str) -> str:
    """Normalize a key or a column to the form used in `FIELD_ALIASES`: "Created  UTC" becomes "created_utc"."""
    return "_".join(name.lower().split())


def normalize_keys(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with normalized keys (`normalize_key`)."""
    return dict(zip(_normalized(tuple(record)), record.values(), strict=True))


@lru_cache(16)  # most records of a file have the same keys
def _normalized(keys: tuple[str, ...]) -> list[str]:
    return [normalize_key(key) for key in keys]


def _first(record: dict[str, Any], field: str) -> Any:
    """Return the value under the first of a field's names that the record has; None if it has none."""
    for name in FIELD_ALIASES[field]:
        value = record.get(name)
        if value is not None and not is_missing(value) and value != "":
            return value
    return None


def removal_of(record: Mapping[str, Any]) -> Removal:
    """Return whether the post was deleted or removed on Reddit. Dumps may still contain its text."""
    metadata = record.get("_meta")
    if isinstance(metadata, dict) and metadata.get("was_deleted_later"):
        return "removed" if metadata.get("removal_type") in REVERSIBLE_REMOVALS else "deleted"
    by = str(record.get("removed_by_category") or "").strip().lower()
    if by not in ("", "none", "null", "nan"):  # null values as some scripts write them
        return "removed" if by in REVERSIBLE_REMOVALS else "deleted"
    title, text = record.get("title"), record.get("selftext")
    if isinstance(title, str) and DELETED_TITLE.fullmatch(title.strip()):
        return "removed" if title.strip(" []").lower() in ("removed", "removed by moderator") else "deleted"
    if isinstance(text, str) and text.strip() in REMOVED_BODIES:
        return "removed" if text.strip() == "[removed]" else "deleted"
    return ""


def reddit_body(record: Mapping[str, Any]) -> str:
    """Return the text below the title of a post in the form of Reddit's API.

    Crossposts carry the text of the original post; polls and galleries have their text in options and captions.
    """
    text, parents = record.get("selftext"), record.get("crosspost_parent_list")
    if isinstance(text, str) and text.strip():
        if text.strip() in REMOVED_BODIES:
            return text
        parts = [text]
    else:
        parts = []
        if isinstance(parents, list) and parents and isinstance(parents[0], dict) and not removal_of(parents[0]):
            record = {**parents[0], "crosspost_parent_list": None}
            parts = [record["selftext"]] if isinstance(record.get("selftext"), str) else []
    for field, items, key in (("poll_data", "options", "text"), ("gallery_data", "items", "caption")):
        data = record.get(field)
        listed = data.get(items) if isinstance(data, dict) else None
        found = [item.get(key) for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
        parts += [part for part in found if isinstance(part, str) and part.strip()]
    body = ""
    for part in parts:
        if body and len(body) + len(part) + 2 > MAX_BODY:
            break
        body = f"{body}\n\n{part}" if body else part
    return body


def plain_id(given: object) -> object:
    """Return an id without the decimal point of a column with missing values: pandas reads 1 as 1.0 there."""
    return int(given) if isinstance(given, float) and given.is_integer() else given


def id_of_text(title: object, body: object) -> str:
    """Return an id for a post without one: the same for the same text."""
    return f"text-{digest(str(title), str(body))}"


def has_id(record: dict[str, Any]) -> bool:
    """Return true if the record has an id or a field for one; otherwise `parse_post` derives an id from the text."""
    return any(name in record for name in FIELD_ALIASES["id"]) or _own_id(record) is not None


def parse_post(record: dict[str, Any], where: str, columns: Columns = DETECTED) -> Iterator[Post | BadRecord | LeftOut]:
    """Yield the record's post, preceded by its problems. Invalid optional fields are dropped; the post is kept.

    columns: keys chosen by the user; a chosen id takes precedence over other ids.
    """
    if _is_comment(record):
        yield BadRecord(where, COMMENT)
        return
    if columns.id is None:
        own_id = _own_id(record)
    elif (own_id := record.get(columns.id)) == "" or is_missing(own_id):
        own_id = None
        reason = f"{printable(columns.id)} is empty; the post's id is derived from its text"
        yield BadRecord(where, reason, skipped=False, column=columns.id)
    fields = _fields(record, own_id, columns)
    for field, limit in MAX_TEXT.items():
        if isinstance(text := fields.get(field), str) and len(text) > limit:
            yield BadRecord(where, f"{field}: only the first {limit:,} characters are used", skipped=False)
            fields[field] = text[:limit]
    if columns.keep:
        kept = {name: value for key, name in columns.keep if (value := record.get(key)) != "" and not is_missing(value)}
        fields["extra"] = (extra if isinstance(extra := fields.get("extra"), dict) else {}) | kept
    while True:
        try:
            post = Post.parse(fields)
        except PostRefused as refused:
            field = refused.field.split(".")[0]
            reason = _reason(refused, fields)
            if field in TIME_FIELDS:
                reason = (
                    f"{field}: {fields[field]!r:.40} is neither seconds since 1970 nor a date such as 2026-11-20; for "
                    "other dates give --date-format"
                )
            dispensable = field in OPTIONAL_FIELDS and fields.pop(field, None) is not None
            column = next((name for name in FIELD_ALIASES[field] if name in record), field) if dispensable else ""
            yield LeftOut.REMOVED if reason == REMOVED else BadRecord(where, reason, not dispensable, column)
            if not dispensable:
                return
        else:
            yield post
            return


def parse_text(record: dict[str, Any], row: str, columns: Columns = DETECTED) -> Post | str:
    """Return a post with the record's text only, or the reason why it has none. Other fields are not read.

    row: the post's id.
    """
    if removal_of(record):
        return REMOVED
    if _is_comment(record):
        return COMMENT
    texts = {field: _text(record, field, columns) for field in MAX_TEXT}
    fields = {field: text[: MAX_TEXT[field]] if isinstance(text, str) else text for field, text in texts.items()}
    try:
        return Post.parse(fields | {"id": row})
    except PostRefused as refused:
        return _reason(refused, fields)


def _reason(refused: PostRefused, fields: dict[str, Any]) -> str:
    """Return the reason why a record cannot be a post."""
    if refused.field:
        return printable(str(refused))  # may quote a key of `extra`
    body = fields.get("body")
    return REMOVED if isinstance(body, str) and body.strip() in REMOVED_BODIES else NO_TEXT


def _text(record: dict[str, Any], field: str, columns: Columns) -> Any:
    """Return the value of title or body, from the column that the user chose if any was chosen."""
    if columns.title is None and columns.body is None:
        found = _first(record, field)
        # Only Reddit's API calls a body `selftext`.
        if field == "body" and "selftext" in record and found in (None, record["selftext"]):
            return reddit_body(record) or found
        return found
    name = columns.text[field]
    value = None if name is None else record.get(name)
    return None if is_missing(value) else value


def _is_comment(record: dict[str, Any]) -> bool:
    """Return true for Reddit comments, which have a parent and no title."""
    parent = record.get("link_id") or record.get("parent_id")
    return isinstance(parent, str) and parent.startswith(("t1_", "t3_")) and _first(record, "title") is None


def _fields(record: dict[str, Any], own_id: Any, columns: Columns) -> dict[str, Any]:
    """Return the record's values by post field. A missing id is derived from the text, so it is the same every time."""
    fields = {field: value for field in FIELD_ALIASES if (value := _first(record, field)) is not None}
    for field in columns.text or ("body",):
        fields.pop(field, None)
        if (value := _text(record, field, columns)) is not None:
            fields[field] = value
    if str(fields.get("edited_utc")).strip().lower() in EDITED_FLAGS:
        del fields["edited_utc"]
    for field in TIME_FIELDS & fields.keys():
        fields[field] = _seconds(fields[field], columns.date_format)
    if isinstance(address := fields.get("permalink"), str) and REDDIT_PATH.match(address):
        fields["permalink"] = f"https://www.reddit.com{address}"
    fields["id"] = id_of_text(fields.get("title", ""), fields.get("body", "")) if own_id is None else plain_id(own_id)
    return fields


def _own_id(record: dict[str, Any]) -> Any:
    """Return the record's id: the fullname for a post from Reddit, otherwise the id as given; None if there is none."""
    for name in FULLNAME_FIELDS:
        if isinstance(fullname := record.get(name), str) and REDDIT_FULLNAME.fullmatch(fullname):
            return fullname
    if (given := _first(record, "id")) is not None:
        # Only Reddit's API calls a body `selftext`.
        return f"t3_{given}" if "selftext" in record and REDDIT_ID.fullmatch(str(given)) else given
    for address in ("permalink", "url"):
        if found := REDDIT_ADDRESS.search(str(_first(record, address))):
            return f"t3_{found[1].lower()}"
    return None


def _seconds(value: object, date_format: str | None = None) -> object:
    """Convert a date or milliseconds to seconds since 1970. Other values are returned unchanged for Post to reject.

    Dates are in ISO 8601; UTC without a time zone.
    date_format: format to try first, as for `strptime`.
    """
    if isinstance(value, str):
        text = value.strip()
        if date_format is not None:
            with suppress(ValueError):
                return in_utc(datetime.strptime(text, date_format))
        for convert in (float, seconds_of_date):
            try:
                value = convert(text)
                break
            except ValueError:
                continue
    # Above 1e11: as seconds, the year 5138 or later; as milliseconds, 1973 or later.
    return value / 1000 if isinstance(value, int | float) and 1e11 < value < 1e15 else value


def seconds_of_date(text: str) -> float:
    """Parse an ISO date, with or without a time, to seconds since 1970. UTC if it has no zone. Raises ValueError."""
    return in_utc(datetime.fromisoformat(text))


def unescape_formula(cell: str) -> str:
    """Remove the apostrophe that an export puts before a formula (feedmill/tables/writing.py)."""
    return cell[1:] if cell.startswith("'") and FORMULA_START.match(cell) else cell


def is_export_row(columns: Collection[str]) -> bool:
    """Return true if the columns, in lower case, include those that identify an export."""
    return all(mark in columns for mark in EXPORT_COLUMNS)


def parse_export(record: dict[str, Any], where: str, labelled: bool = False) -> Iterator[Post | Labelled | BadRecord]:
    """Yield the row's post, with its label if `labelled`, or a BadRecord. Keys must be in lower case."""
    cells = ((field, record.get(column)) for field, column in POST_COLUMNS.items())
    fields = {field: value for field, value in cells if value is not None and value != ""}
    for field in {"created_utc", "edited_utc"} & fields.keys():
        with suppress(ValueError):  # Post.parse rejects values that are not dates
            fields[field] = seconds_of_date(str(fields[field]))
    if isinstance(extra := fields.get("extra"), str):
        with suppress(ValueError):
            fields["extra"] = from_json(extra)
    try:
        post = Post.parse(fields)
    except PostRefused as refused:
        yield BadRecord(where, printable(str(refused)))
    else:
        yield _labelled(post, record, where) if labelled else post


def _labelled(post: Post, record: dict[str, Any], where: str) -> Labelled | BadRecord:
    scores, label = record["scores"], record["label"]
    with suppress(ValueError):
        scores = dict(from_json(scores) if isinstance(scores, str) else scores)
    if isinstance(scores, dict) and label in scores and all(isinstance(each, float | int) for each in scores.values()):
        return Labelled(post, label, scores, str(record.get("model")))
    return BadRecord(where, "scores: expected an object with a score for each label")
