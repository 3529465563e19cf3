"""Posts from files: JSONL, a JSON array, or CSV; plain or gzip; a path or standard input.

Every record gives a post or a `BadRecord` that says where it stands and what is wrong with it: a bad line never
costs a good one. Files are read as a stream, and no line or record is read without a bound.
"""

import codecs
import csv
import gzip
import json
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple, cast

from shared.errors import InputError, PostRefused, json_problem, printable
from shared.messages import Post, digest

#: Characters of one record, at most. The longest post there can be, escaped, is well below.
MAX_RECORD = 2_000_000
#: Characters read at a time.
CHUNK = 1 << 16
#: A file is no text when more than this share of its beginning are control characters or bytes that are not UTF-8.
#: Random bytes and UTF-16 have half; Latin-1, of which letters with accents alone are lost, a fifth at most.
NO_TEXT = 0.3
#: Characters that no text has, and the one that stands for bytes that are none.
UNKNOWN = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f\ufffd]")

#: The names that people's files have for a post's fields, in the order in which they are tried.
NAMES: dict[str, tuple[str, ...]] = {
    "id": ("id", "post_id", "name", "fullname"),
    "topic": ("topic", "label", "category"),
    "title": ("title", "headline", "subject"),
    "body": ("body", "selftext", "text", "description", "content"),
    "subreddit": ("subreddit", "subreddit_name"),
    "score": ("score", "ups", "upvotes"),
    "url": ("url", "permalink", "link"),
    "created_utc": ("created_utc", "created", "created_at", "date", "timestamp"),
    "extra": ("extra",),
}
#: Fields that a post can do without.
DISPENSABLE = frozenset(NAMES) - {"id", "title", "body"}
#: A post's id as Reddit's addresses bear it.
REDDIT_ID = re.compile(r"/comments/([a-z0-9]+)", re.IGNORECASE)


class BadRecord(NamedTuple):
    """What is wrong with a record, and `where` it stands: file:line, and which element of an array it is.

    `skipped`: there is no post in it. Else the post follows, without the field that could not be read.
    """

    where: str
    reason: str
    skipped: bool = True


def read(path: str) -> Iterator[Post | BadRecord]:
    """The posts of a file, in order; "-" is standard input.

    Raises InputError when the file as a whole cannot be read.
    """
    name = "stdin" if path == "-" else printable(path)
    try:
        with _open(path) as text:
            for place, record in _records(text, name):
                yield from _post(record, f"{name}:{place}")
    except FileNotFoundError:
        raise InputError(f"There is no file {path}.") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{name} cannot be read to its end: {error}.") from None


#: A record as it was read, or why it could not be.
Record = dict[str, Any] | str
#: A record's line, and in an array which element it is.
Place = int | str


def _post(record: Record, where: str) -> Iterator[Post | BadRecord]:
    """The post of a record, after what is wrong with it. Text is what counts: no post is lost for its score."""
    if isinstance(record, str):
        yield BadRecord(where, record)
        return
    fields = _fields(record)
    while True:
        try:
            post = Post.parse(fields)
        except PostRefused as refused:
            field = refused.field.split(".")[0]
            reason = printable(str(refused))  # it may name a key of `extra`
            if field == "created_utc":
                reason = (
                    f"created_utc: {fields[field]!r:.40} is neither seconds since 1970 nor a date such as 2026-11-20"
                )
            dispensable = field in DISPENSABLE and fields.pop(field, None) is not None
            yield BadRecord(where, reason, skipped=not dispensable)
            if not dispensable:
                return
        else:
            yield post
            return


@contextmanager
def _open(path: str) -> Iterator[TextIOWrapper]:
    """The file as text, unpacked where it begins as gzip does, whatever its name. Bad bytes become U+FFFD."""
    with ExitStack() as opened:
        raw = sys.stdin.buffer if path == "-" else opened.enter_context(Path(path).open("rb"))
        binary = cast(BufferedReader, raw)
        if binary.peek(2)[:2] == b"\x1f\x8b":
            binary = cast(BufferedReader, opened.enter_context(gzip.GzipFile(fileobj=binary)))
        yield opened.enter_context(TextIOWrapper(binary, encoding="utf-8-sig", errors="replace"))


def _records(text: TextIOWrapper, name: str) -> Iterator[tuple[Place, Record]]:
    """(place, record) for each record, in the format that the file's first character tells."""
    head = cast(BufferedReader, text.buffer).peek(CHUNK).removeprefix(codecs.BOM_UTF8).lstrip()
    if head.startswith(b"["):
        return _json_array(text)
    if head.startswith(b"{"):
        return _json_lines(text)
    beginning = head.decode(errors="replace")
    if len(UNKNOWN.findall(beginning)) > NO_TEXT * len(beginning):
        raise InputError(
            f"{name} holds no text in UTF-8: an archive, a spreadsheet, or text in another encoding, such as UTF-16? "
            "Give it as JSONL, a JSON array or CSV, in UTF-8."
        )
    # A damaged first line must not cost the lines after it.
    if b"\n{" in head and not _posts_columns(beginning.partition("\n")[0]):
        return _json_lines(text)
    return _csv(text, name)


def _json_lines(text: TextIOWrapper) -> Iterator[tuple[int, Record]]:
    number = 0
    while line := text.readline(MAX_RECORD):
        number += 1
        if len(line) == MAX_RECORD and not line.endswith("\n"):
            while (rest := text.readline(CHUNK)) and not rest.endswith("\n"):
                pass
            yield number, f"the line is longer than {MAX_RECORD:,} characters"
        elif line.strip():
            try:
                yield number, _object(json.loads(line))
            except (ValueError, RecursionError) as error:
                yield number, f"not JSON: {json_problem(error)}"


def _json_array(text: TextIOWrapper) -> Iterator[tuple[str, Record]]:
    """The array's elements, one at a time: an array may be larger than memory."""
    decode = json.JSONDecoder().raw_decode
    held, line, element = "", 1, 1
    while (character := text.read(1)) != "[":  # what stands before the bracket is white space
        line += character == "\n"
    while True:
        separators = len(held) - len(held.lstrip(" \t\r\n,"))
        line += held.count("\n", 0, separators)
        held = held[separators:]
        if held.startswith("]"):
            return
        place = f"{line} (element {element})"
        try:
            value, end = decode(held)
        except (ValueError, RecursionError) as error:
            # Not whole yet? Doubling what is held keeps the cost of trying again in proportion.
            more = text.read(max(CHUNK, len(held))) if len(held) < MAX_RECORD else ""
            if not more:
                problem = json_problem(error, "the element's character")
                yield place, f"not JSON, and the rest of the array cannot be read: {problem}"
                return
            held += more
            continue
        yield place, _object(value)
        element += 1
        line += held.count("\n", 0, end)
        held = held[end:]


def _object(value: object) -> Record:
    return value if isinstance(value, dict) else f"expected an object with a post's fields, got {value!r:.80}"


def _csv(text: TextIOWrapper, name: str) -> Iterator[tuple[int, Record]]:
    header_line = text.readline(CHUNK)
    if not header_line.strip():
        raise InputError(f"{name} is empty.")
    delimiter, header = _columns(header_line)
    if not _posts_columns(header_line):
        raise InputError(
            f"{name} is no JSON, and as CSV it has no column for a title or a body. Its columns: "
            f"{printable(', '.join(header)):.200}. Name one of them {' or '.join(NAMES['title'] + NAMES['body'])}."
        )
    csv.field_size_limit(MAX_RECORD)
    # Strict: else a quotation mark that is never closed would swallow every row after it, and say nothing.
    rows = csv.reader(iter(lambda: text.readline(MAX_RECORD), ""), delimiter=delimiter, strict=True)
    while True:
        line = rows.line_num + 2  # the header was line 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            ended = "a quotation mark is opened here and never closed; the rest of the file is not read"
            yield line, ended if "unexpected end" in str(error) else f"not CSV: {error}"
            continue
        if len(row) > len(header):
            yield line, f"{len(row)} fields under {len(header)} columns; is a quotation mark missing?"
        elif row:
            yield line, dict(zip(header, row, strict=False))


def _columns(header_line: str) -> tuple[str, list[str]]:
    """(delimiter, column names) of a CSV file's first line."""
    delimiter = max(",;\t", key=header_line.count)
    names = next(csv.reader([header_line], delimiter=delimiter), [])
    return delimiter, [name.strip().lower().replace(" ", "_") for name in names]


def _posts_columns(header_line: str) -> bool:
    """Whether a CSV file with this first line holds posts."""
    return any(column in NAMES["title"] + NAMES["body"] for column in _columns(header_line)[1])


def _fields(record: dict[str, Any]) -> dict[str, Any]:
    """A record under a post's own names. Without an id it gets one that is the same each time it is read."""
    named = {key.strip().lower().replace(" ", "_"): value for key, value in record.items()}
    fields = {}
    for field, names in NAMES.items():
        value = next((named[name] for name in names if named.get(name) not in (None, "")), None)
        if value is not None:
            fields[field] = value
    if "created_utc" in fields:
        fields["created_utc"] = _seconds(fields["created_utc"])
    if "id" not in fields:
        reddit = REDDIT_ID.search(str(fields.get("url", "")))
        texts = (str(fields.get("title", "")), str(fields.get("body", "")))
        fields["id"] = reddit[1] if reddit else f"text-{digest(*texts)}"
    return fields


def _seconds(value: object) -> object:
    """Seconds since 1970 from a date, or from milliseconds; anything else is the model's to refuse.

    Dates are ISO, or 12/31/2021, 23:59:59, which many scraping scripts write; UTC where they name no zone.
    """
    if isinstance(value, str):
        text = value.strip()
        for convert in (float, _iso, _american):
            try:
                value = convert(text)
                break
            except ValueError:
                continue
    # Seconds reach this in the year 5138, milliseconds did in 1973.
    return value / 1000 if isinstance(value, int | float) and 1e11 < value < 1e15 else value


def _iso(text: str) -> float:
    date = datetime.fromisoformat(text)
    return date.replace(tzinfo=date.tzinfo or UTC).timestamp()


def _american(text: str) -> float:
    return datetime.strptime(text, "%m/%d/%Y, %H:%M:%S").replace(tzinfo=UTC).timestamp()
