"""The archive of a Jetstream server of version 2: all events of Bluesky's network, in blocks.

Segments list the times of their events; their blocks are downloaded one by one. A block is a zstd
frame of columns. Deletions are applied to the archive every few hours: until then, a deleted
post's creation is still there, before its deletion. Sources: bluesky-social/jetstream, sections
3.1 to 3.3 of its design document, and its lexicons listSegments and getBlock.
"""

import struct
import sys
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError

from feedmill.producers.live.http import HttpClient, user_agent
from feedmill.producers.live.source import Clock, RequestBudget, RequestFailed
from feedmill.shared.errors import first_problem, printable

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    # Not from backports, which exists if another of its packages is installed.
    import backports.zstd as zstd  # noqa: PLR0402

#: Own limit of requests. The servers' are not published.
REQUESTS_PER_MINUTE = 120
#: Timeout in seconds for the first byte of an answer and between two reads. The live stream waits
#: during a request: at most twice as long for the headers, and four times as long for the body.
READ_TIMEOUT_S = 5.0
#: Maximum bytes of an answer, and of a decompressed block. A block of 4,096 events has a few MiB.
MAX_ANSWER_BYTES = 2**25
MAX_BLOCK_BYTES = 2**27
#: Maximum events of a block.
MAX_EVENTS = 2**17
#: Segments per request, and the logarithm of the largest zstd window in bytes.
SEGMENTS_AT_ONCE = 1000
MAX_WINDOW_LOG = 27
#: Columns of numbers, in their order, as struct reads them.
COLUMNS = {
    "seq": "Q", "witnessed_at": "q", "indexed_at": "q", "kind": "B", "collection_len": "B",
    "did_len": "H", "rkey_len": "B", "rev_len": "B", "event_len": "I",
}  # fmt: skip
#: Columns of bytes, in their order.
TEXTS = ("collection", "did", "rkey", "rev", "event")


class Segment(BaseModel):
    """A part of the archive. Times are in microseconds since 1970."""

    name: Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9_.-]+$")]
    events: Annotated[int, Field(ge=0, lt=2**40, alias="eventCount")]
    begin_us: Annotated[int, Field(ge=0, lt=2**63, alias="minWitnessedAt")]
    end_us: Annotated[int, Field(ge=0, lt=2**63, alias="maxWitnessedAt")]


class SegmentPage(BaseModel):
    """An answer to listSegments. cursor: of the next page; None if this is the last one."""

    segments: Annotated[list[Segment], Field(max_length=SEGMENTS_AT_ONCE)]
    cursor: Annotated[str, Field(max_length=200)] | None = None


class ArchivedEvent(NamedTuple):
    """A row of a block. at_us: when the server saw it, in microseconds since 1970. kind: see
    section 3.2. payload: the record, or the account's state, in DAG-CBOR.
    """

    at_us: int
    kind: int
    collection: bytes
    did: bytes
    rkey: bytes
    payload: bytes


class JetstreamArchive:
    """A client. url: of the server. key: sent as a bearer token; "" for none.

    Raises SourceFailed.
    """

    def __init__(self, url: str, key: str, clock: Clock) -> None:
        self._url = f"{url}/xrpc/network.bsky.jetstream"
        self.budget = RequestBudget(clock, REQUESTS_PER_MINUTE)
        host = urlsplit(url).netloc
        self._http = HttpClient(
            host,
            self.budget,
            MAX_ANSWER_BYTES,
            READ_TIMEOUT_S,
        )
        headers = self._http.session.headers
        headers["User-Agent"] = user_agent()
        if key:
            headers["Authorization"] = f"Bearer {key}"

    def segments(self, cursor: str) -> SegmentPage:
        """Return the segments from this cursor on, oldest first; "" for all."""
        query: dict[str, Any] = {"limit": SEGMENTS_AT_ONCE}
        if cursor:
            query["cursor"] = cursor
        status, body = self._get("listSegments", query)
        if status != 200:
            raise RequestFailed(f"the archive returned status {status}")
        try:
            return SegmentPage.model_validate_json(body)
        except ValidationError as error:
            problem = ": ".join(first_problem(error))
            problem = printable(problem)
            raise RequestFailed(
                f"the archive's list of segments is invalid ({problem:.100})"
            ) from None

    def block(self, segment: str, index: int) -> list[ArchivedEvent] | None:
        """Return the events of a block; None if the segment has fewer blocks."""
        query = {"segment": segment, "blockIndex": index}
        status, body = self._get("getBlock", query)
        is_after_last = status == 404 and b"BlockNotFound" in body
        if is_after_last:
            return None
        if status != 200:
            raise RequestFailed(f"the archive returned status {status}")
        try:
            return list(decode_block(body))
        except (ValueError, zstd.ZstdError):
            raise RequestFailed(
                f"block {index} of {segment} in the archive is invalid"
            ) from None

    def _get(self, name: str, query: dict[str, Any]) -> tuple[int, bytes]:
        url = f"{self._url}.{name}"
        response = self._http.request("GET", url, params=query)
        if response.status_code in (401, 403):
            raise RequestFailed(
                f"the archive refused the key with status {response.status_code}; check "
                "FEEDMILL_BLUESKY_ARCHIVE_KEY"
            )
        return response.status_code, response.content


def decode_block(frame: bytes) -> Iterator[ArchivedEvent]:
    """Yield the events of a block. Raises ValueError and zstd.ZstdError."""
    options: dict[int, int] = {
        zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG
    }
    decompressor = zstd.ZstdDecompressor(options=options)
    data = decompressor.decompress(frame, max_length=MAX_BLOCK_BYTES)
    if not decompressor.eof:
        raise ValueError("the block is cut or too large")
    count = int.from_bytes(data[:4], "little")
    row_form = "<" + "".join(COLUMNS.values())
    row_bytes = struct.calcsize(row_form)
    least_bytes = 4 + count * row_bytes
    if count > MAX_EVENTS or len(data) < least_bytes:
        raise ValueError("the block has fewer events than it says")
    columns: dict[str, tuple[int, ...]] = {}
    position = 4
    for name, form in COLUMNS.items():
        column = struct.Struct(f"<{count}{form}")
        columns[name] = column.unpack_from(data, position)
        position += column.size
    texts: dict[str, list[bytes]] = {}
    for name in TEXTS:
        texts[name] = parts = []
        for length in columns[f"{name}_len"]:
            end = position + length
            part = data[position:end]
            parts.append(part)
            position = end
    if position != len(data):
        raise ValueError("the block's lengths are wrong")
    for row in range(count):
        yield ArchivedEvent(
            at_us=columns["witnessed_at"][row],
            kind=columns["kind"][row],
            collection=texts["collection"][row],
            did=texts["did"][row],
            rkey=texts["rkey"][row],
            payload=texts["event"][row],
        )
