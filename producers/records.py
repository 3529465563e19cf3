"""What a record of somebody's file says: whether it is wanted, and the post that it holds. Knows nothing of files.

The names of fields are those that people's files have, and those of Reddit's API, which its dumps (Pushshift, Arctic
Shift) keep.
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import Enum
from typing import Any, NamedTuple

from shared.errors import PostRefused, printable
from shared.messages import GONE, Post, digest

#: The names that people's files have for a post's fields, in the order in which they are tried.
NAMES: dict[str, tuple[str, ...]] = {
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
#: All of them.
FIELD_NAMES = frozenset(name for names in NAMES.values() for name in names)
#: Where dumps have a post's fullname. In other people's files these are somebody's names, and many posts have the same.
FULLNAMES = ("name", "fullname")
#: Fields that a post can do without.
DISPENSABLE = frozenset(NAMES) - {"id", "title", "body"}
#: Times, as people write them in many ways.
TIMES = frozenset({"created_utc", "edited_utc"})
#: What Reddit says of `edited` where it does not say when.
FLAGS = frozenset({"false", "true", "0", "1"})
#: A post's id as Reddit's addresses bear it, as its API gives it, and with the mark of a post before it.
REDDIT_ADDRESS = re.compile(r"/comments/([a-z0-9]+)", re.IGNORECASE)
REDDIT_ID = re.compile(r"[a-z0-9]+")
REDDIT_FULLNAME = re.compile(r"t3_[a-z0-9]+")
#: Reddit gives a post's own address without the host.
REDDIT_PATH = re.compile(r"/(r|u|user)/[^/]+/comments/")
#: What stands for a title that is gone from Reddit.
GONE_TITLE = re.compile(r"\[ ?(deleted|removed)( by [a-z -]+)? ?\]", re.IGNORECASE)
#: Keys of records that are written as `NAMES` are, found out once: a dump has the same hundred in each record.
PLAIN_KEYS: set[str] = set()
#: How many of them are remembered, and how long they may be; records may have any.
MAX_PLAIN_KEYS, MAX_KEY = 10_000, 100
#: What a line of a dump says of its subreddit, and of those of the posts within it; the line in lower case.
SUBREDDIT_IN_LINE = re.compile(rb'subreddit(?:[ _]name)?\s*"\s*:\s*"([^"]*)"')


class BadRecord(NamedTuple):
    """What is wrong with a record, and `where` it stands: file:line, and which element of an array it is.

    `skipped`: there is no post in it. Else the post follows, without the field that could not be read.
    """

    where: str
    reason: str
    skipped: bool = True


class LeftOut(Enum):
    """Why there is nothing of a record, although nothing is wrong with it."""

    BY_FILTERS = 1
    #: Its author deleted it, or a moderator or Reddit removed it: it is not to be processed.
    REMOVED = 2


#: Every record gives one of these; one that is kept without a field gives a `BadRecord` before.
Item = Post | BadRecord | LeftOut


class Filters(NamedTuple):
    """Which records are wanted. One that does not say its subreddit, or its date, is not when that is asked for.

    subreddits: as `subreddit_name` gives them; none: all. since, until: seconds since 1970; `until` itself is out.
    """

    subreddits: frozenset[str] = frozenset()
    since: float | None = None
    until: float | None = None

    def admit(self, record: dict[str, Any]) -> bool:
        """Whether a record is wanted. Its keys are written as `NAMES` are."""
        if self.subreddits:
            subreddit = _first(record, "subreddit")
            if subreddit is None or subreddit_name(str(subreddit)) not in self.subreddits:
                return False
        if self.since is None and self.until is None:
            return True
        created = _seconds(_first(record, "created_utc"))
        return (
            isinstance(created, int | float)
            and (self.since is None or created >= self.since)
            and (self.until is None or created < self.until)
        )

    def reject_line(self, line: bytes) -> bool:
        """Whether a line of JSON cannot be wanted: told without reading it, which costs several times as much.

        True only of an object that names subreddits, all of them others, in its own right or of posts within it.
        """
        if not self.subreddits or not line.startswith(b"{") or not line.rstrip().endswith(b"}"):
            return False
        named = set(SUBREDDIT_IN_LINE.findall(line.lower()))
        return bool(named) and not any(
            b"\\" in name or subreddit_name(name.decode(errors="replace")) in self.subreddits for name in named
        )


EVERYTHING = Filters()


def subreddit_name(text: str) -> str:
    """A subreddit's name in the one form that names are compared in: "/r/Python" is "python"."""
    return text.strip().lower().removeprefix("/").removeprefix("r/").removesuffix("/")


def plain_key(name: str) -> str:
    """A column's name, written as `NAMES` are: "Created UTC" is "created_utc"."""
    return name.strip().lower().replace(" ", "_")


def with_plain_keys(record: dict[str, Any]) -> dict[str, Any]:
    """The record with its keys written as `NAMES` are."""
    if not record.keys() <= PLAIN_KEYS:
        named = {plain_key(key): value for key, value in record.items()}
        if named.keys() != record.keys():
            return named
        if len(PLAIN_KEYS) < MAX_PLAIN_KEYS:
            PLAIN_KEYS.update(key for key in record if len(key) <= MAX_KEY)
    return record


def _first(record: dict[str, Any], field: str) -> Any:
    """What a record holds under the first of a field's names that it has; None where it has none."""
    for name in NAMES[field]:
        value = record.get(name)
        if value is not None and value != "":
            return value
    return None


def is_removed(record: dict[str, Any]) -> bool:
    """Whether the post is gone from Reddit. A dump may hold its text all the same: Arctic Shift looks twice."""
    looked = record.get("_meta")
    if isinstance(looked, dict) and looked.get("was_deleted_later"):
        return True
    by = record.get("removed_by_category")
    if by and str(by).strip().lower() not in ("none", "null", "nan"):  # as some scripts write nothing
        return True
    title, text = record.get("title"), record.get("selftext")
    return (isinstance(title, str) and GONE_TITLE.fullmatch(title.strip()) is not None) or (
        isinstance(text, str) and text.strip() in GONE
    )


def has_id(record: dict[str, Any]) -> bool:
    """Whether a record has an id of its own, or a place for one; else `post_of` makes it of the text."""
    return any(name in record for name in NAMES["id"]) or _own_id(record) is not None


def post_of(record: dict[str, Any], where: str, id_column: str | None = None) -> Iterator[Post | BadRecord]:
    """The post of a record, after what is wrong with it. Text is what counts: no post is lost for its score.

    id_column: the key of the id, whatever others the record has, written as `NAMES` are; None finds it.
    """
    if _is_comment(record):
        yield BadRecord(where, "a comment; only posts are read")
        return
    if id_column is None:
        own_id = _own_id(record)
    elif (own_id := record.get(id_column)) is None or own_id == "":
        own_id = None
        reason = f"nothing stands under {printable(id_column)}, so its id is made of its text"
        yield BadRecord(where, reason, skipped=False)
    fields = _fields(record, own_id)
    while True:
        try:
            post = Post.parse(fields)
        except PostRefused as refused:
            field = refused.field.split(".")[0]
            reason = printable(str(refused))  # it may name a key of `extra`
            if field in TIMES:
                reason = f"{field}: {fields[field]!r:.40} is neither seconds since 1970 nor a date such as 2026-11-20"
            dispensable = field in DISPENSABLE and fields.pop(field, None) is not None
            yield BadRecord(where, reason, skipped=not dispensable)
            if not dispensable:
                return
        else:
            yield post
            return


def _is_comment(record: dict[str, Any]) -> bool:
    """What Reddit's comments have and posts have not: a post that they belong to, and no title."""
    parent = record.get("link_id") or record.get("parent_id")
    return isinstance(parent, str) and parent.startswith(("t1_", "t3_")) and _first(record, "title") is None


def _fields(record: dict[str, Any], own_id: Any) -> dict[str, Any]:
    """A record under a post's own names. Without an id of its own it gets one that is the same each time it is read."""
    fields = {field: value for field in NAMES if (value := _first(record, field)) is not None}
    if str(fields.get("edited_utc")).strip().lower() in FLAGS:
        del fields["edited_utc"]
    for field in TIMES & fields.keys():
        fields[field] = _seconds(fields[field])
    if isinstance(address := fields.get("permalink"), str) and REDDIT_PATH.match(address):
        fields["permalink"] = f"https://www.reddit.com{address}"
    if own_id is None:
        own_id = f"text-{digest(str(fields.get('title', '')), str(fields.get('body', '')))}"
    fields["id"] = own_id
    return fields


def _own_id(record: dict[str, Any]) -> Any:
    """The id that a record has: of a post from Reddit its fullname, whatever the file it is in; else as it stands.

    None where it has none.
    """
    for name in FULLNAMES:
        if isinstance(fullname := record.get(name), str) and REDDIT_FULLNAME.fullmatch(fullname):
            return fullname
    if (given := _first(record, "id")) is not None:
        # `selftext` is what Reddit's API alone calls a body.
        return f"t3_{given}" if "selftext" in record and REDDIT_ID.fullmatch(str(given)) else given
    for address in ("permalink", "url"):
        if found := REDDIT_ADDRESS.search(str(_first(record, address))):
            return f"t3_{found[1].lower()}"
    return None


def _seconds(value: object) -> object:
    """Seconds since 1970 from a date, or from milliseconds; anything else is the model's to refuse.

    Dates are ISO, or 12/31/2021, 23:59:59, which many scraping scripts write; UTC where they name no zone.
    """
    if isinstance(value, str):
        text = value.strip()
        for convert in (float, seconds_of_date, _american):
            try:
                value = convert(text)
                break
            except ValueError:
                continue
    # Seconds reach this in the year 5138, milliseconds did in 1973.
    return value / 1000 if isinstance(value, int | float) and 1e11 < value < 1e15 else value


def seconds_of_date(text: str) -> float:
    """Seconds since 1970 of an ISO date, with or without a time; UTC where it names no zone. Raises ValueError."""
    date = datetime.fromisoformat(text)
    return date.replace(tzinfo=date.tzinfo or UTC).timestamp()


def _american(text: str) -> float:
    return datetime.strptime(text, "%m/%d/%Y, %H:%M:%S").replace(tzinfo=UTC).timestamp()
