"""Read the results stream as raw rows, for exports of a hundred thousand results and more.

Per chunk, one script fetches about five hundred rows and another checks them for purged posts.
Rows are plain dicts: building pydantic models would be slow. Ids of entries are
`<milliseconds>-<sequence number>`, by Redis' clock.

Redis trims entries whether or not they were read, and a reader would silently continue at the
oldest entry left. So each entry carries its number, and a reader compares the next one with that
of its place. XREAD is used only to wait, because it cannot tell what was trimmed.
"""

import json
import logging
import math
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from pydantic_core import from_json
from redis import Redis
from redis.exceptions import ResponseError

from feedmill.shared import runs
from feedmill.shared.batches import batched
from feedmill.shared.errors import UserError, printable
from feedmill.shared.keys import COUNTERS, RESULTS_STREAM
from feedmill.shared.messages import Classification, Post, further_fields
from feedmill.shared.results import Result
from feedmill.shared.scripts import call

logger = logging.getLogger(__name__)

#: Approximate bytes of entries per fetch. A fetch blocks Redis for one or two milliseconds.
FETCH_BYTES = 2**19
#: Entries per page of the newest rows.
ROWS_PER_PAGE = 500
#: Posts per call of the script that checks for purged posts.
POSTS_PER_CHECK = 1000
#: Recent runs that a message about an unknown one names.
MAX_RUNS = 5
#: Largest sequence number of an entry's id.
MAX_SEQUENCE = 2**64 - 1
#: The id of an entry, as stored positions have it.
#: Redis takes numbers of 64 bits.
ENTRY_ID = re.compile(r"[0-9]{1,19}-[0-9]{1,19}")


#: A value that no entry has.
MISSING: Final = object()
NUMBERS = frozenset({int, float})
#: Seconds since 1970 of the year 9999.
MAX_TIME = 253_402_300_800.0


class Place(NamedTuple):
    """A reader's place in the stream."""

    #: Id of the last entry that was read.
    cursor: str
    #: Its number; None if unknown.
    number: int | None = None


def parse_place(fields: Any) -> Place:
    """Return a place that was stored as JSON. Raises ValueError if it is damaged."""
    if not isinstance(fields, dict):
        raise ValueError("not a place in the stream")
    if not fields.keys() <= set(Place._fields):
        raise ValueError("not a place in the stream")

    cursor = fields.get("cursor")
    if not isinstance(cursor, str) or not ENTRY_ID.fullmatch(cursor):
        raise ValueError("not the id of an entry")
    milliseconds, sequence = order(cursor)
    if max(milliseconds, sequence) > MAX_SEQUENCE:
        raise ValueError("not the id of an entry")
    if milliseconds == sequence == MAX_SEQUENCE:
        raise ValueError("no entry can follow")  # Redis refuses to read after it

    number = fields.get("number")
    if number is not None and (type(number) is not int or number < 0):
        raise ValueError("not the number of an entry")
    return Place(cursor, number)


def order(entry_id: str) -> tuple[int, ...]:
    """Return the sort key of an entry's id."""
    parts = entry_id.split("-")
    return tuple(map(int, parts))


def id_before(since: float) -> str:
    """Return the largest id before a time in seconds since 1970, so that reading after it starts
    at that time.
    """
    milliseconds = int(since * 1000)
    if milliseconds <= 0:
        return "0-0"
    return f"{milliseconds - 1}-{MAX_SEQUENCE}"


def seconds_of(entry_id: str) -> float:
    """Return the time at which an entry was written, in seconds since 1970."""
    milliseconds, _, _ = entry_id.partition("-")
    return int(milliseconds) / 1000


@dataclass(frozen=True)
class Missed:
    """Results that were trimmed before they were read. Times are seconds since 1970."""

    #: Number of results, with those among them that had been purged before; None if unknown.
    count: int | None
    #: The results were written between these times.
    since: float
    until: float


class ResultRow(NamedTuple):
    """A result as stored: the fields of Classification and Post (shared/messages.py) as dicts.

    The post's body is truncated, fields with default values are absent, and the Reddit score is
    the latest one known.
    """

    entry: str
    found: dict[str, Any]
    post: dict[str, Any]

    @property
    def result(self) -> Result:
        """The row as models, which are not validated again: the body may be truncated."""
        post = Post.model_construct(**self.post)
        classification = Classification.model_construct(**self.found)
        return Result(post, classification)


class Chunk(NamedTuple):
    """Consecutive rows in stream order."""

    rows: list[ResultRow]
    #: Place after the rows, including the omitted rows of purged posts.
    place: Place
    ended: bool
    #: Results that were trimmed before they could be read, if any.
    missed: Missed | None = None
    #: Approximate number of entries after the rows; None if unknown.
    left: int | None = None
    #: True if the stream has lost the entries up to the place, and new ones come before it.
    lost: bool = False


class RowReader:
    """A reader of the results stream. Every method raises redis.exceptions.RedisError."""

    def __init__(self, redis: Redis, until: float | None = None) -> None:
        """Create a reader. until: stop before entries written at or after this time, in seconds
        since 1970.
        """
        self.redis = redis
        self._until = math.inf
        if until is not None:
            # in whole milliseconds, as ids have
            self._until = int(until * 1000) / 1000

    def fetch(self, place: Place) -> Chunk:
        """Return the next rows after `place`, without those of purged posts."""
        redis = self.redis
        until = self._until
        if seconds_of(place.cursor) >= until:
            lost = is_lost(redis, place)
            return Chunk(
                [],
                place,
                ended=True,
                lost=lost,
            )
        ended, first_number, last_number, *texts = call(
            redis,
            "fetch_rows",
            place.cursor,
            FETCH_BYTES,
        )
        if not texts:
            lost = is_lost(redis, place)
            return Chunk(
                [],
                place,
                bool(ended),
                lost=lost,
            )

        left: int | None = None
        if last_number and math.isinf(until):
            newest_number = counter(redis, "stored")
            left = max(0, newest_number - last_number)
        first_id = texts[0]
        last_id = texts[-3]
        missed = missed_between(redis, place, first_id, first_number or None)
        rows = self.parse(texts)
        # the first entry after the end tells what was trimmed before it
        if seconds_of(last_id) >= until:
            rows = [row for row in rows if seconds_of(row.entry) < until]
        return Chunk(
            rows=rows,
            place=Place(last_id, last_number or None),
            ended=bool(ended),
            missed=missed,
            left=left,
        )

    def chunks(self, place: Place) -> Generator[Chunk]:
        """Yield all rows present after `place`, fetching the next chunk while the caller works on
        the current one.
        """
        with ThreadPoolExecutor(1, "fetch") as ahead:
            coming = ahead.submit(self.fetch, place)
            while True:
                chunk = coming.result()
                if not chunk.ended:
                    coming = ahead.submit(self.fetch, chunk.place)
                yield chunk
                if chunk.ended:
                    return

    def wait(self, place: Place, seconds: float) -> None:
        """Block until there is an entry after `place`, or until `seconds` have passed."""
        milliseconds = math.ceil(seconds * 1000)
        self.redis.xread(
            {RESULTS_STREAM: place.cursor},
            count=1,
            block=max(1, milliseconds),  # Redis treats 0 as forever
        )

    def parse(self, texts: list[str]) -> list[ResultRow]:
        """Parse (id, classification, post, id, …) into rows, drop those of purged posts and update
        the others' scores.

        Logs and skips unreadable entries.
        """
        rows = _read(texts)
        ids = (row.post["id"] for row in rows)
        notes = self._notes(ids)
        checked: list[ResultRow] = []
        for row, (_, note) in zip(rows, notes, strict=True):
            if note is False:  # purged
                continue
            if note is not None:
                row.post["score"] = note["score"]
            checked.append(row)
        return checked

    def newest(self, count: int) -> list[ResultRow]:
        """Return the newest rows, the newest first: those of at most `count` entries."""
        newest: list[ResultRow] = []
        end = "+"
        for start in range(0, count, ROWS_PER_PAGE):
            page_size = min(ROWS_PER_PAGE, count - start)
            entries: Any = self.redis.xrevrange(
                RESULTS_STREAM,
                max=end,
                count=page_size,
            )
            texts: list[str] = []
            for entry_id, fields in entries:
                texts += texts_of(entry_id, fields)
                end = f"({entry_id}"
            newest += self.parse(texts)
            if len(entries) < page_size:
                break
        return newest

    def gone(self, ids: Iterable[str]) -> set[str]:
        """Return the ids of the posts that were purged."""
        purged: set[str] = set()
        for post_id, note in self._notes(ids):
            if note is False:
                purged.add(post_id)
        return purged

    def _notes(self, ids: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Yield each post's id with False if it was purged, else its latest score as a dict, or
        None.
        """
        for batch in batched(ids, POSTS_PER_CHECK):
            arguments = json.dumps(batch)
            answer = call(self.redis, "check_posts", arguments)
            notes = from_json(answer)
            yield from zip(batch, notes, strict=True)


def check_run(redis: Redis, run: str) -> None:
    """Raise UserError if there is no such run. Its results may outlive its counts."""
    if runs.progress(redis, run) is not None:
        return
    beginning = Place("0-0")
    reader = RowReader(redis)
    with closing(reader.chunks(beginning)) as chunks:
        for chunk in chunks:
            for row in chunk.rows:
                if row.post.get("run") == run:
                    return
    raise UserError(unknown_run(redis, run))


def unknown_run(redis: Redis, run: str) -> str:
    """Return a message about a run that does not exist."""
    recent = runs.recent(redis, MAX_RUNS)
    names = ", ".join(progress.run for progress in recent)
    return printable(
        f"There is no run {run!r}, or its posts were sent too long ago. Recent runs: "
        f"{names or 'none'}."
    )


def texts_of(entry_id: str, fields: Mapping[str, str]) -> list[str]:
    """Return an entry's id, classification and post."""
    classification = fields.get("classification", "")
    post = fields.get("post", "")
    return [entry_id, classification, post]


def counter(redis: Redis, name: str) -> int:
    """Return a counter of the stream: entries ever `stored`, the newest one's number, or
    `trimmed`.
    """
    count: Any = redis.hget(COUNTERS, name)
    return int(count or 0)


def missed_between(
    redis: Redis, place: Place, entry_id: str, number: int | None
) -> Missed | None:
    """Return the results that were trimmed between a place and the next entry, if any. number:
    that entry's.

    If an entry is left up to the place, missing ones were purged, because trimming removes the
    oldest. From the beginning, nothing can have been missed.
    """
    count: int | None = None
    if number is not None and place.number is not None:
        count = number - place.number - 1
        if count <= 0:
            return None
    elif place.cursor == "0-0":
        return None
    if not counter(redis, "trimmed"):
        return None
    if redis.xrange(RESULTS_STREAM, max=place.cursor, count=1):
        return None
    return Missed(
        count=count,
        since=seconds_of(place.cursor),
        until=seconds_of(entry_id),
    )


def is_lost(redis: Redis, place: Place) -> bool:
    """Return whether Redis has lost the entry at a place that has been read, and the stream's ids
    went back.
    """
    if place.number is None:
        return False
    try:
        info: Any = redis.xinfo_stream(RESULTS_STREAM)
    except ResponseError:  # there is no stream
        return False
    last_id = info["last-generated-id"]
    return order(last_id) < order(place.cursor)


def _read(texts: list[str]) -> list[ResultRow]:
    """Parse rows, and skip unreadable ones.

    Parsing one joined JSON array is faster than two per row, and by a fifth faster if only keys
    are cached.
    """
    ids = texts[::3]
    del texts[::3]
    joined = ",".join(texts)
    values = _from_json(f"[{joined}]")
    if values is None or len(values) != len(texts):
        values = [_from_json(text) for text in texts]
    classifications = values[::2]
    posts = values[1::2]
    rows = map(ResultRow, ids, classifications, posts)
    return [row for row in rows if _is_readable(row)]


def _from_json(text: str) -> Any:
    """Parse a value; None for invalid JSON."""
    try:
        return from_json(text, cache_strings="keys")
    except ValueError:
        return None


def best_label(classification: Mapping[str, Any]) -> str:
    """Return the best label of a classification as a dict, also if its post fits none."""
    label: str | None = classification["label"]
    if label is None:
        label = next(iter(classification["scores"]))
    return label


def label_score(found: Mapping[str, Any]) -> float:
    """Return the score of the best label of a classification as a dict."""
    scores: dict[str, float] = found["scores"]
    return scores[best_label(found)]


def result_as_json(classification: Classification, post: Post | None) -> dict[str, Any]:
    """Return a result as an object: its post (None once the stream has dropped it), then the
    classification, with what its readers need of some results only.
    """
    fields: dict[str, Any] = {"post": None}
    if post is not None:
        fields["post"] = post.model_dump(mode="json", exclude_defaults=True)
    fields |= classification.model_dump(mode="json")
    return fields | further_fields(classification)


def _has_label(classification: dict[str, Any]) -> bool:
    """Return whether a classification has scores, one for its label unless it has none, and a
    time.
    """
    label = classification.get("label", MISSING)
    scores = classification.get("scores")
    if not isinstance(scores, dict) or not scores:
        return False
    score_types = map(type, scores.values())
    if not NUMBERS.issuperset(score_types):
        return False
    classified_at = classification.get("classified_at", 0)
    if type(classified_at) not in NUMBERS or not -MAX_TIME < classified_at < MAX_TIME:
        return False
    if label is None:
        return True
    return isinstance(label, str) and label in scores


def _is_post(post: dict[str, Any]) -> bool:
    """Return whether a post has an id, and texts and a time of their types."""
    post_id = post.get("id")
    title = post.get("title", "")
    body = post.get("body", "")
    for text in (post_id, title, body):
        if not isinstance(text, str):
            return False
    created_at = post.get("created_utc")
    return created_at is None or type(created_at) in NUMBERS


def _is_readable(row: ResultRow) -> bool:
    """Return whether an entry has what every reader needs; log a warning if not."""
    entry_id, classification, post = row
    are_objects = isinstance(classification, dict) and isinstance(post, dict)
    if are_objects and _has_label(classification) and _is_post(post):
        return True
    logger.warning("skipping unreadable entry %s of %s", entry_id, RESULTS_STREAM)
    return False
