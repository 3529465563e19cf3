"""Convert records of any origin to posts, and filter them. Independent of file formats.

Recognizes common field names, and those of Reddit's API, which dumps (Pushshift, Arctic Shift)
also use.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

from feedmill.shared.errors import InputError, PostRefused, printable
from feedmill.shared.language import is_foreign
from feedmill.shared.messages import (
    COMMENT_KIND,
    MAX_BODY,
    MAX_TITLE,
    TIME_FIELDS,
    Post,
    clean_body,
    digest,
    in_utc,
    is_missing,
    is_placeholder,
)

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
#: Keys that hold a post's fullname in dumps. In other files they hold other names, shared by many
#: posts.
FULLNAME_FIELDS = ("name", "fullname")
#: Optional fields whose column can be chosen, and their names in the flags that do so.
OPTIONAL_COLUMNS = {"topic": "label", "created_utc": "date", "subreddit": "subreddit"}
#: Optional fields: an invalid value drops the field, not the post.
OPTIONAL_FIELDS = frozenset(FIELD_ALIASES) - {"id", "title", "body"}
#: Values of Reddit's `edited` that carry no time.
EDITED_FLAGS = frozenset({"false", "true", "0", "1"})
#: A post's id in a Reddit URL, bare as in the API, and as a fullname with the prefix t3_.
REDDIT_ADDRESS = re.compile(r"/comments/([a-z0-9]+)", re.IGNORECASE)
REDDIT_ID = re.compile(r"[a-z0-9]+")
#: Kinds of records to read, as people name them.
POSTS = "posts"
COMMENTS = "comments"
KINDS = (POSTS, COMMENTS)
#: Prefix of a comment's fullname on Reddit, and of its post's.
COMMENT_PREFIX = "t1_"
POST_PREFIX = "t3_"
#: A comment's fullname. Ids are letters and digits; since 2025, in no order.
COMMENT_FULLNAME = re.compile(r"t1_[A-Za-z0-9]+")
#: Reasons for rejecting a record.
COMMENT = "a comment; only posts are read, unless --kind posts,comments is given"
NO_COMMENT = "a post; only comments are read"
NO_TEXT = "title or body must contain text"
REMOVED = "deleted or removed on Reddit"
#: Maximum characters of each text field. Models read less than that.
MAX_TEXT = {"title": MAX_TITLE, "body": MAX_BODY}
#: Reddit's permalinks, which lack the host.
REDDIT_PATH = re.compile(r"/(r|u|user)/[^/]+/comments/")
#: Placeholder titles of deleted and removed posts.
DELETED_TITLE = re.compile(r"\[ ?(deleted|removed)( by [a-z -]+)? ?\]", re.IGNORECASE)
#: Keys, besides those of texts, that say whether a record is a comment or was removed, and where a
#: post has more text.
MARKS = (
    "selftext", "title", "crosspost_parent_list", "poll_data", "gallery_data", "_meta",
    "removed_by_category",
    "link_id", "parent_id", "body",
)  # fmt: skip
#: Why the text of a post on Reddit must not be used: "deleted" by its author or for legal reasons,
#: which is final; "removed" by moderators or filters, who may approve the post later; "" if it may
#: be used.
Removal = Literal["", "deleted", "removed"]
#: Values of Reddit's `removed_by_category`, and of `removal_type` in Arctic Shift's data, that can
#: be undone.
REVERSIBLE_REMOVALS = frozenset({"moderator", "automod_filtered", "reddit", "removed"})
#: A `removed_by_category` of posts that were not removed: null values as some scripts write them.
NO_CATEGORY = frozenset({"", "none", "null", "nan"})
#: Post field -> its column in exports. There, `label` is a model's prediction, not a topic, and
#: `permalink` not `url`.
POST_COLUMNS = {
    "id": "id",
    "topic": "topic",
    "title": "title",
    "body": "body",
    "subreddit": "subreddit",
    "score": "score",
    "url": "url",
    "created_utc": "date",
    "permalink": "permalink",
    "edited_utc": "edited",
    "stickied": "stickied",
    "nsfw": "nsfw",
    "spoiler": "spoiler",
    "extra": "extra",
    "run": "run",
}
#: Columns, in lower case, that together identify an export.
EXPORT_COLUMNS = frozenset({"id", "label", "scores", "fingerprint", "classified_at"})
#: Columns of a table of posts that `feedmill ingest reddit --out` writes, in this order.
SNAPSHOT_COLUMNS = tuple(
    column
    for field, column in POST_COLUMNS.items()
    if field not in ("stickied", "extra", "run")
)
#: Pattern of the start of a cell that a spreadsheet would run as a formula, plain or escaped
#: (possibly more than once). Python and Arrow (feedmill/tables/writing.py) read it alike.
FORMULA = r"'*[=+\-@\t\r\n＝＋－＠]"


class Labelled(NamedTuple):
    """A post with the label and scores that a model assigned, or with its topic, which has no
    model.
    """

    post: Post
    #: "" if the post has none.
    label: str = ""
    scores: dict[str, float] = {}  # noqa: RUF012 - never changed
    model: str = ""


class BadRecord(NamedTuple):
    """A problem with a record. where: file:line, and the element's number in an array.

    skipped: true if the record yields no post. Otherwise its post follows, without the invalid
    field. column: key of the invalid value, if the post is kept; "" if a text was cut.
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
    """Keys of a record that the user chose, in the form of `normalize_key`; None detects a field
    by its names.

    If a title or a body is chosen, the text consists of the chosen ones only. topic: the true
    label. date_format: format of dates, as for `strptime`, tried before the known ones. keep: keys
    of values to keep in the post's `extra`, each with its name there. mark: a key of such a value,
    which a file may lack.
    """

    id: str | None = None
    title: str | None = None
    body: str | None = None
    topic: str | None = None
    created_utc: str | None = None
    subreddit: str | None = None
    date_format: str | None = None
    keep: Sequence[tuple[str, str]] = ()
    mark: str | None = None

    @classmethod
    def of(
        cls,
        id: str | None = None,  # noqa: A002 - the field's name
        title: str | None = None,
        body: str | None = None,
        date_format: str | None = None,
        keep: Sequence[str] = (),
        *,
        label: str | None = None,
        date: str | None = None,
        subreddit: str | None = None,
    ) -> "Columns":
        """Return the choice for names as written by the user."""

        def key(name: str | None) -> str | None:
            if name is None:
                return None
            return normalize_key(name)

        keep_keys = [(normalize_key(name), name) for name in keep]
        return cls(
            id=key(id),
            title=key(title),
            body=key(body),
            topic=key(label),
            created_utc=key(date),
            subreddit=key(subreddit),
            date_format=date_format,
            keep=tuple(keep_keys),
        )

    @property
    def text(self) -> dict[str, str | None]:
        """The keys of title and body, if any was chosen."""
        if self.title is None and self.body is None:
            return {}
        return {"title": self.title, "body": self.body}

    def names_of(self, field: str) -> Sequence[str]:
        """Return the keys that may hold a field of a post, in order of preference."""
        name = getattr(self, field, None)
        if name is not None:
            return [name]
        if field in MAX_TEXT and self.text:  # only the other of the two was chosen
            return []
        return FIELD_ALIASES[field]

    def text_names(self) -> list[str]:
        """Return the keys that may hold a title or a body, in order of preference."""
        titles = self.names_of("title")
        bodies = self.names_of("body")
        return [*titles, *bodies]

    def texts_among(self, keys: Iterable[str]) -> list[str]:
        """Return the keys that may hold a title or a body."""
        names = self.text_names()
        return [key for key in keys if key in names]


DETECTED = Columns()


@dataclass(frozen=True)
class FileOptions:
    """Options of reading posts from a file: names of its columns, and its encoding.

    None detects a column by its name, and UTF-8, or UTF-16 with its mark. date_format: as for
    `Columns`.
    """

    id_column: str | None = None
    title_column: str | None = None
    body_column: str | None = None
    encoding: str | None = None
    label_column: str | None = None
    date_column: str | None = None
    subreddit_column: str | None = None
    date_format: str | None = None

    def columns(self, keep: Sequence[str] = ()) -> Columns:
        """Return the chosen columns. keep: columns that the posts carry along."""
        return Columns.of(
            self.id_column,
            self.title_column,
            self.body_column,
            date_format=self.date_format,
            keep=keep,
            label=self.label_column,
            date=self.date_column,
            subreddit=self.subreddit_column,
        )


def check_columns(
    table: str,
    names: Sequence[Any],
    columns: Columns,
    needs_text: bool = True,
    flag: str = "--{}-column",
) -> None:
    """Raise InputError if a chosen column is missing, a column to read occurs twice, or none has
    text.

    table: name of the table in errors. names: its columns. needs_text: false for an object of
    JSON, which may lack the title, the body or both. flag: how a column is chosen.
    """
    keys = [normalize_key(str(name)) for name in names]
    names_note = f"Its columns: {listed(names)}."
    has_text = bool(columns.texts_among(keys))
    choices: dict[str, str | None] = {"id": columns.id}
    if needs_text or not has_text:
        choices |= columns.text
    if needs_text:
        for field, option in OPTIONAL_COLUMNS.items():
            choices[option] = getattr(columns, field)
    chosen: list[tuple[str, str]] = []
    for option, chosen_key in choices.items():
        if chosen_key is not None:
            chosen.append((chosen_key, flag.format(option)))
    for key, _ in columns.keep:
        chosen.append((key, "--keep"))
    for key, option in chosen:
        if key not in keys:
            raise InputError(
                f"{table} has no column {printable(key)} ({option}). {names_note}"
            )
    chosen_keys = [key for key, _ in chosen]
    to_read = {
        *columns.names_of("id"),
        *columns.text_names(),
        *chosen_keys,
    }
    for key in keys:
        # Columns without a name may be repeated.
        if not key or key not in to_read:
            continue
        count = keys.count(key)
        if count > 1:
            raise InputError(
                f"{table} has {count} columns {printable(key)}. Rename all but one of them."
            )
    if needs_text and not has_text:
        text_names = ", ".join(TEXT_NAMES)
        body_flag = flag.format("body")
        raise InputError(
            f"{table} has no column that is known to hold text ({text_names}). Name it with "
            f"{body_flag}; a file without a header needs one. {names_note}"
        )


def listed(names: Sequence[Any]) -> str:
    """Return columns for a message, names with commas in quotes."""
    texts: list[str] = []
    for name in names:
        text = str(name)
        if "," in text:
            text = json.dumps(text, ensure_ascii=False)
        texts.append(text)
    joined = printable(", ".join(texts))
    return joined[:200]


def keys_of_texts(columns: Columns) -> frozenset[str]:
    """Return the keys that `parse_text` reads."""
    names = columns.text_names()
    return frozenset([*names, *MARKS])


def keys_of_items(columns: Columns) -> frozenset[str]:
    """Return the keys that are read of a record for a post, its filters, or a row of an export."""
    kept_keys = [key for key, _ in columns.keep]
    return keys_of_texts(columns).union(
        *FIELD_ALIASES.values(),
        kept_keys,
        columns.names_of("id"),
        columns.names_of("topic"),
        columns.names_of("created_utc"),
        columns.names_of("subreddit"),
        FULLNAME_FIELDS,
        POST_COLUMNS.values(),
        EXPORT_COLUMNS,
        ["model", "kind", "author"],
    )


def is_optional(key: str, columns: Columns) -> bool:
    """Return whether a record can be a post without the value of a key."""
    if key in columns.names_of("id"):
        return False
    return key not in columns.text_names()


class Filters(NamedTuple):
    """Filters by subreddit, author, time, kind, words and language. A record without the field
    that a filter needs is rejected.

    subreddits: names in the form of `subreddit_name`; empty for all. since, until: seconds since
    1970; `until` is exclusive. languages: codes, as of `language.parse_languages`; empty for all.
    kinds: some of KINDS. authors: in the form of `author_name`; empty for all. words: whole words
    or phrases, of which a text must have one, in any case; empty for all.
    """

    subreddits: frozenset[str] = frozenset()
    since: float | None = None
    until: float | None = None
    languages: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset({POSTS})
    authors: frozenset[str] = frozenset()
    words: tuple[str, ...] = ()

    def admit_text(self, text: str) -> bool:
        """Return true if a text has one of the words, and is in one of the languages or may be.

        Raises UserError.
        """
        if self.words and not _pattern_of(self.words).search(text):
            return False
        if not self.languages:
            return True
        return not is_foreign(text, self.languages)

    def _admit_origin(self, record: dict[str, Any], columns: Columns) -> bool:
        """Return true if the author and the subreddit pass the filters."""
        if self.authors:
            author = author_name(str(record.get("author") or ""))
            if author not in self.authors:
                return False
        if not self.subreddits:
            return True
        subreddit = _first(record, "subreddit", columns)
        if subreddit is None:
            return False
        return subreddit_name(str(subreddit)) in self.subreddits

    @property
    def reads_comments(self) -> bool:
        return COMMENTS in self.kinds

    def admit(self, record: dict[str, Any], columns: Columns = DETECTED) -> bool:
        """Return true if the record passes the filters.

        Its keys must be in the form of `normalize_key`.
        """
        if POSTS not in self.kinds and not is_comment(record):
            return False
        if not self._admit_origin(record, columns):
            return False
        if self.since is None and self.until is None:
            return True
        date = _first(record, "created_utc", columns)
        created = _seconds(date, columns.date_format)
        if not isinstance(created, int | float):
            return False
        if self.since is not None and not created >= self.since:  # or NaN
            return False
        if self.until is None:
            return True
        return created < self.until


NO_FILTERS = Filters()


@lru_cache(16)
def _pattern_of(words: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that finds one of these words or phrases, as whole words."""
    phrases: list[str] = []
    for word in words:
        parts = map(re.escape, word.split())
        phrases.append(r"\s+".join(parts))
    choices = "|".join(phrases)
    return re.compile(rf"(?<!\w)(?:{choices})(?!\w)", re.IGNORECASE)


def parse_kinds(text: str) -> frozenset[str]:
    """Parse kinds of records to read, such as "posts,comments". Raises InputError."""
    kinds: set[str] = set()
    for part in text.split(","):
        kind = part.strip().lower()
        if not kind:
            continue
        if kind not in KINDS:
            raise InputError(
                f"--kind: {printable(kind):.80} is unknown. Give posts, comments or "
                "posts,comments."
            )
        kinds.add(kind)
    if not kinds:
        raise InputError(
            "--kind names nothing. Give posts, comments or posts,comments."
        )
    return frozenset(kinds)


def subreddit_name(text: str) -> str:
    """Normalize a subreddit's name for comparison: "/r/Python" becomes "python"."""
    name = text.strip().lower()
    name = name.removeprefix("/")
    name = name.removeprefix("r/")
    return name.removesuffix("/")


def author_name(text: str) -> str:
    """Normalize an author's name for comparison: "/u/Ann" becomes "ann"."""
    name = text.strip().lower()
    name = name.removeprefix("/")
    return name.removeprefix("u/")


def normalize_key(name: str) -> str:
    """Normalize a key or a column to the form used in `FIELD_ALIASES`: "Created  UTC" becomes
    "created_utc".
    """
    words = name.lower().split()
    return "_".join(words)


def normalize_keys(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with normalized keys (`normalize_key`)."""
    names = tuple(record)
    keys = _normalize_all(names)
    return dict(zip(keys, record.values(), strict=True))


@lru_cache(16)  # most records of a file have the same keys
def _normalize_all(keys: tuple[str, ...]) -> list[str]:
    return [normalize_key(key) for key in keys]


def _first(record: Mapping[str, Any], field: str, columns: Columns = DETECTED) -> Any:
    """Return the value under the first of a field's names that the record has; None if it has
    none.
    """
    for name in columns.names_of(field):
        value = record.get(name)
        if value is None or is_missing(value):
            continue
        if value != "":
            return value
    return None


def removal_of(record: Mapping[str, Any]) -> Removal:
    """Return whether the post was deleted or removed on Reddit.

    Dumps may still contain its text.
    """
    metadata = record.get("_meta")
    if isinstance(metadata, dict) and metadata.get("was_deleted_later"):
        if metadata.get("removal_type") in REVERSIBLE_REMOVALS:
            return "removed"
        return "deleted"
    category = str(record.get("removed_by_category") or "")
    category = category.strip().lower()
    if category not in NO_CATEGORY:
        if category in REVERSIBLE_REMOVALS:
            return "removed"
        return "deleted"
    title = record.get("title")
    if isinstance(title, str):
        is_deleted = DELETED_TITLE.fullmatch(title.strip()) is not None
        if is_deleted or is_placeholder(title):
            return _removal_by(title)
    text = record.get("selftext")
    if text is None and is_comment(record):
        text = record.get("body")
    if isinstance(text, str) and is_placeholder(text):
        return _removal_by(text)
    return ""


def _removal_by(placeholder: str) -> Removal:
    """Return what a placeholder says of its post."""
    words = placeholder.strip(" []\n\r\t").lower()
    if words in ("removed", "removed by moderator"):
        return "removed"
    return "deleted"


def reddit_body(record: Mapping[str, Any]) -> str:
    """Return the text below the title of a post in the form of Reddit's API.

    Crossposts carry the text of the original post; polls and galleries have their text in options
    and captions.
    """
    text = record.get("selftext")
    parts: list[str] = []
    if isinstance(text, str) and text.strip():
        if is_placeholder(text):
            return text
        parts.append(text)
    else:
        parents = record.get("crosspost_parent_list")
        parent = None
        if isinstance(parents, list) and parents:
            parent = parents[0]
        if isinstance(parent, dict) and not removal_of(parent):
            record = parent
            text = record.get("selftext")
            if isinstance(text, str):
                parts.append(text)
    parts += _texts_within(record, "poll_data", "options", "text")
    parts += _texts_within(record, "gallery_data", "items", "caption")
    body = ""
    for part in parts:
        longer_body = part
        if body:
            longer_body = f"{body}\n\n{part}"
        if body and len(longer_body) > MAX_BODY:
            break
        body = longer_body
    return body


def _texts_within(
    record: Mapping[str, Any], field: str, items_key: str, text_key: str
) -> list[str]:
    """Return the texts of the items in a part of a post: the options of a poll, or the captions
    of a gallery.
    """
    data = record.get(field)
    if not isinstance(data, dict):
        return []
    items = data.get(items_key)
    if not isinstance(items, list):
        return []
    texts: list[str] = []
    for item in items:
        if not isinstance(item, dict):
            continue
        text = item.get(text_key)
        if isinstance(text, str) and text.strip():
            texts.append(text)
    return texts


def plain_label(value: object) -> object:
    """Return true and false as JSON writes them: labels may be booleans, as in spam detection.

    Others are unchanged.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    return value


def plain_id(given: object) -> object:
    """Return an id without the decimal point of a column with missing values: pandas reads 1 as
    1.0 there.
    """
    if isinstance(given, float) and given.is_integer():
        return int(given)
    return given


def id_of_text(title: object, body: object) -> str:
    """Return an id for a post without one: the same for the same text."""
    text_digest = digest(str(title), str(body))
    return f"text-{text_digest}"


def has_id(record: dict[str, Any]) -> bool:
    """Return true if the record has an id or a field for one; otherwise `parse_post` derives an id
    from the text.
    """
    if any(name in record for name in FIELD_ALIASES["id"]):
        return True
    return _own_id(record) is not None


def parse_post(
    record: dict[str, Any],
    where: str,
    columns: Columns = DETECTED,
    reads_comments: bool = False,
    context: str = "",
) -> Iterator[Post | BadRecord | LeftOut]:
    """Yield the record's post, preceded by its problems.

    Invalid optional fields are dropped; the post is kept.

    columns: keys chosen by the user; a chosen id takes precedence over other ids. reads_comments:
    comments are posts as well. context: title of a comment's post, "" for none.
    """
    comment = is_comment(record)
    if comment:
        reason = _why_no_comment(record, columns, reads_comments)
        if reason:
            yield BadRecord(where, reason)
            return
    if columns.id is None:
        own_id = _own_id(record)
    else:
        own_id = record.get(columns.id)
        if own_id == "" or is_missing(own_id):
            own_id = None
            column = printable(columns.id)
            reason = f"{column} is empty; the post's id is derived from its text"
            yield BadRecord(
                where,
                reason,
                skipped=False,
                column=columns.id,
            )
    fields = _fields(record, own_id, columns)
    if comment:
        fields["kind"] = COMMENT_KIND
        fields["title"] = context
    for field, limit in MAX_TEXT.items():
        text = fields.get(field)
        if isinstance(text, str) and len(text) > limit:
            reason = f"{field}: only the first {limit:,} characters are used"
            yield BadRecord(where, reason, skipped=False)
            fields[field] = text[:limit]
    if columns.keep or columns.mark in record:
        extra = fields.get("extra")
        if not isinstance(extra, dict):
            extra = {}
        values = _values_to_keep(record, columns)
        fields["extra"] = extra | values
    yield from _parsed(fields, record, where, columns)


def _parsed(
    fields: dict[str, Any], record: dict[str, Any], where: str, columns: Columns
) -> Iterator[Post | BadRecord | LeftOut]:
    """Yield the post of these fields, without optional ones that are invalid."""
    while True:
        try:
            post = Post.parse(fields)
        except PostRefused as refusal:
            field = refusal.field.split(".")[0]
            reason = _reason(refusal, fields)
            has_value = fields.get(field) is not None
            is_dispensable = has_value and field in OPTIONAL_FIELDS
            column = ""
            if is_dispensable:
                del fields[field]
                names = columns.names_of(field)
                column = next((name for name in names if name in record), field)
            if reason == REMOVED:
                yield LeftOut.REMOVED
            else:
                yield BadRecord(
                    where,
                    reason,
                    skipped=not is_dispensable,
                    column=column,
                )
            if not is_dispensable:
                return
        else:
            yield post
            return


def _values_to_keep(record: dict[str, Any], columns: Columns) -> dict[str, Any]:
    """Return the values for the post's `extra` that the user chose."""
    values: dict[str, Any] = {}
    for key, name in columns.keep:
        value = record.get(key)
        if value != "" and not is_missing(value):
            values[name] = value
    mark = columns.mark
    if mark is not None and isinstance(record.get(mark), str):
        values[mark] = record[mark]
    return values


def parse_text(
    record: dict[str, Any],
    row: str,
    columns: Columns = DETECTED,
    kinds: Collection[str] = (POSTS,),
    context: str = "",
) -> Post | str:
    """Return a post with the record's text only, or the reason why it has none.

    Other fields are not read.

    row: the post's id. kinds: see `Filters`. context: title of a comment's post, "" for none.
    """
    if removal_of(record):
        return REMOVED
    fields: dict[str, Any] = {"id": row}
    comment = is_comment(record)
    if comment:
        reason = _why_no_comment(record, columns, COMMENTS in kinds)
        if reason:
            return reason
    elif POSTS not in kinds:
        return NO_COMMENT
    for field, limit in MAX_TEXT.items():
        text = _text(record, field, columns)
        if isinstance(text, str):
            text = text[:limit]
        fields[field] = text
    if comment:
        fields["title"] = context[:MAX_TITLE]
    try:
        return Post.parse(fields)
    except PostRefused as refusal:
        return _reason(refusal, fields)


def _reason(refusal: PostRefused, fields: dict[str, Any]) -> str:
    """Return the reason why a record cannot be a post."""
    field = refusal.field.split(".")[0]
    if field in TIME_FIELDS:
        return (
            f"{field}: {fields[field]!r:.40} is neither seconds since 1970 nor a date such as "
            "2026-11-20; for other dates give --date-format"
        )
    if refusal.field:
        return printable(str(refusal))  # may quote a key of `extra`
    for name in ("title", "body"):
        text = fields.get(name)
        if isinstance(text, str) and is_placeholder(text):
            return REMOVED
    return NO_TEXT


def _text(record: dict[str, Any], field: str, columns: Columns) -> Any:
    """Return the value of title or body, from the column that the user chose if any was chosen."""
    if columns.title is None and columns.body is None:
        detected = _first(record, field)
        # Only Reddit's API calls a body `selftext`.
        if (
            field == "body"
            and "selftext" in record
            and detected in (None, record["selftext"])
        ):
            return reddit_body(record) or detected
        return detected
    name = columns.text[field]
    if name is None:
        return None
    value = record.get(name)
    if is_missing(value):
        return None
    return value


def is_comment(record: Mapping[str, Any]) -> bool:
    """Return true for Reddit comments, which have a parent and no title."""
    parent = record.get("link_id") or record.get("parent_id")
    if not isinstance(parent, str):
        return False
    if not parent.startswith((COMMENT_PREFIX, POST_PREFIX)):
        return False
    return _first(record, "title") is None


def _why_no_comment(
    record: dict[str, Any], columns: Columns, reads_comments: bool
) -> str:
    """Return why a comment is not read; "" if it is.

    One without a text is not: its context alone says nothing about it.
    """
    if not reads_comments:
        return COMMENT
    body = _text(record, "body", columns)
    if body is None or not clean_body(str(body)):
        return NO_TEXT
    return ""


def parent_post(record: Mapping[str, Any]) -> str:
    """Return the fullname of a comment's post; "" if the record does not tell it."""
    for field in ("link_id", "parent_id"):
        parent = record.get(field)
        if isinstance(parent, str) and parent.startswith(POST_PREFIX):
            return parent
    return ""


def _fields(record: dict[str, Any], own_id: Any, columns: Columns) -> dict[str, Any]:
    """Return the record's values by post field.

    A missing id is derived from the text, so it is the same every time.
    """
    fields: dict[str, Any] = {}
    for field in FIELD_ALIASES:
        value = _first(record, field, columns)
        if value is not None:
            fields[field] = value
    for field in columns.text or ("body",):
        fields.pop(field, None)
        value = _text(record, field, columns)
        if value is not None:
            fields[field] = value
    if "topic" in fields:
        fields["topic"] = plain_label(fields["topic"])
    edited = str(fields.get("edited_utc"))
    edited = edited.strip().lower()
    if edited in EDITED_FLAGS:
        del fields["edited_utc"]
    for field in TIME_FIELDS & fields.keys():
        date = fields[field]
        fields[field] = _seconds(date, columns.date_format)
    address = fields.get("permalink")
    if isinstance(address, str) and REDDIT_PATH.match(address):
        fields["permalink"] = f"https://www.reddit.com{address}"
    if own_id is None:
        title = fields.get("title", "")
        body = fields.get("body", "")
        fields["id"] = id_of_text(title, body)
    else:
        fields["id"] = plain_id(own_id)
    return fields


def _own_id(record: dict[str, Any]) -> Any:
    """Return the record's id: the fullname for a post from Reddit, otherwise the id as given; None
    if there is none.
    """
    if is_comment(record):
        return _comment_id(record)
    for name in FULLNAME_FIELDS:
        fullname = record.get(name)
        if isinstance(fullname, str) and REDDIT_FULLNAME.fullmatch(fullname):
            return fullname
    value = _first(record, "id")
    if value is not None:
        # Only Reddit's API calls a body `selftext`.
        if "selftext" in record and REDDIT_ID.fullmatch(str(value)):
            return f"t3_{value}"
        return value
    for field in ("permalink", "url"):
        address = _first(record, field)
        match = REDDIT_ADDRESS.search(str(address))
        if match:
            reddit_id = match[1].lower()
            return f"t3_{reddit_id}"
    return None


def _comment_id(record: dict[str, Any]) -> Any:
    """Return a comment's fullname; None if it has no id. Its addresses name its post."""
    for name in (*FULLNAME_FIELDS, "id"):
        value = record.get(name)
        if isinstance(value, str) and COMMENT_FULLNAME.fullmatch(value):
            return value
    value = _first(record, "id")
    if value is None:
        return None
    comment_id = plain_id(value)
    return f"{COMMENT_PREFIX}{comment_id}"


def _seconds(value: object, date_format: str | None = None) -> object:
    """Convert a date or milliseconds to seconds since 1970.

    Other values are returned unchanged for Post to reject.

    Dates are in ISO 8601; UTC without a time zone.
    date_format: format to try first, as for `strptime`.
    """
    if isinstance(value, str):
        text = value.strip()
        if date_format is not None:
            try:
                date = datetime.strptime(text, date_format)
                return in_utc(date)
            except ValueError:
                pass  # other forms follow
        for convert in (float, seconds_of_date):
            try:
                value = convert(text)
                break
            except ValueError:
                continue
    # Above 1e11: as seconds, the year 5138 or later; as milliseconds, 1973 or later.
    if isinstance(value, int | float) and 1e11 < value < 1e15:
        return value / 1000
    return value


def seconds_of_date(text: str) -> float:
    """Parse an ISO date, with or without a time, to seconds since 1970.

    UTC if it has no zone. Raises ValueError.
    """
    date = datetime.fromisoformat(text)
    return in_utc(date)


def unescape_formula(cell: str) -> str:
    """Remove the apostrophe that an export puts before a formula (feedmill/tables/writing.py)."""
    if cell.startswith("'") and re.match(FORMULA, cell):
        return cell[1:]
    return cell


def is_escaped_export(columns: Sequence[str]) -> bool:
    """Return whether a table with these columns (lower case, in order) was written by Feedmill,
    which escapes formulas.
    """
    if is_export_row(columns):
        return True
    return tuple(columns) == SNAPSHOT_COLUMNS


def is_export_row(columns: Collection[str]) -> bool:
    """Return true if the columns, in lower case, include those that identify an export."""
    return EXPORT_COLUMNS.issubset(columns)


def parse_export(
    record: dict[str, Any],
    where: str,
    labelled: bool = False,
    columns: Columns = DETECTED,
) -> Post | Labelled | BadRecord:
    """Return the row's post, with its label if `labelled`, or why it has none.

    Keys must be in lower case.
    """
    fields = _export_fields(record, columns)
    try:
        post = Post.parse(fields)
    except PostRefused as refusal:
        reason = printable(str(refusal))
        return BadRecord(where, reason)
    if labelled:
        return _labelled(post, record, where)
    return post


def _export_fields(record: dict[str, Any], columns: Columns) -> dict[str, Any]:
    """Return the values of an export's row by post field, without empty cells."""
    fields: dict[str, Any] = {}
    for field, export_column in POST_COLUMNS.items():
        column = export_column
        if field in OPTIONAL_COLUMNS:
            chosen_column = getattr(columns, field)
            column = chosen_column or export_column
        value = record.get(column)
        if value is not None and value != "":
            fields[field] = value
    if record.get("kind") == COMMENT_KIND:
        fields["kind"] = COMMENT_KIND
    for field in TIME_FIELDS & fields.keys():
        date = str(fields[field])
        fields[field] = _seconds(date, columns.date_format)
    extra = fields.get("extra")
    if isinstance(extra, str):
        # other texts stay, and Post refuses them
        with suppress(ValueError):
            fields["extra"] = from_json(extra)
    return fields


def _labelled(post: Post, record: dict[str, Any], where: str) -> Labelled | BadRecord:
    scores = record["scores"]
    label = record["label"]
    if label is None:  # the post fits none
        label = ""
    if not isinstance(label, str):
        return BadRecord(where, "label: expected text")
    with suppress(TypeError, ValueError):
        if isinstance(scores, str):
            scores = from_json(scores)
        scores = dict(scores)  # pairs, as of a map in Parquet
    if not _are_scores(scores) or (label and label not in scores):
        reason = "scores: expected an object with a score for each label"
        return BadRecord(where, reason)
    return Labelled(
        post,
        label=label,
        scores=scores,
        model=str(record.get("model")),
    )


def _are_scores(value: object) -> bool:
    """Return whether a value is a dictionary of numbers."""
    if not isinstance(value, dict):
        return False
    return all(isinstance(score, float | int) for score in value.values())
