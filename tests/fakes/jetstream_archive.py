"""A fake archive of Jetstream on loopback: the paths listSegments and getBlock of a server of
version 2.

    with Jetstream() as jetstream, JetstreamArchive() as archive:
        jetstream.post("a text")
        archive.seal(jetstream.texts())

`seal` appends events to the archive, in segments of a few blocks. `key` is the one that it wants;
`answers` replace the next ones; `bodies` replace those of blocks, by index. Sources:
bluesky-social/jetstream, section 3.2 of its design document, and its lexicons.
"""

import json
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from feedmill.testing.loopback import Handler, Loopback

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    import backports.zstd as zstd  # noqa: PLR0402

PREFIX = "/xrpc/network.bsky.jetstream."
KINDS = {"create": 1, "update": 2, "delete": 3}
#: Segments per page of listSegments.
PAGE = 2


class JetstreamArchive(Loopback):
    """The server. events: per block; blocks: per segment."""

    def __init__(self, events: int = 4, blocks: int = 3) -> None:
        super().__init__(Answers)
        self._events_per_block = events
        self.blocks_per_segment = blocks
        #: Segments, each a list of blocks, each a list of live events.
        self.segments: list[list[list[dict[str, Any]]]] = []
        self.key: str | None = None
        #: Statuses and bodies of the next answers, with their headers.
        self.answers: list[tuple[int, bytes, Mapping[str, str]]] = []
        self.bodies: dict[int, bytes] = {}
        #: Numbers of segments that are listed and have no blocks.
        self.missing: set[int] = set()
        #: Seconds until answers begin.
        self.delay_s = 0.0
        #: Paths that were asked for.
        self.asked: list[str] = []

    def seal(self, texts: Sequence[str]) -> None:
        events = [json.loads(text) for text in texts]
        size = self._events_per_block
        blocks = [events[start : start + size] for start in range(0, len(events), size)]
        size = self.blocks_per_segment
        for start in range(0, len(blocks), size):
            self.segments.append(blocks[start : start + size])

    def forget(self, post_id: str) -> None:
        """Apply a deletion, as compaction does."""
        for segment in self.segments:
            for block in segment:
                block[:] = [event for event in block if _id_of(event) != post_id]

    def respond_to(self, path: str, query: dict[str, list[str]]) -> tuple[int, bytes]:
        if path == f"{PREFIX}listSegments":
            first = int(query.get("cursor", ["0"])[0])
            return 200, json.dumps(self._list(first)).encode()
        number = int(query["segment"][0].split("_")[1].split(".")[0])
        segment = [] if number in self.missing else self.segments[number]
        index = int(query["blockIndex"][0])
        if index in self.bodies:
            return 200, self.bodies[index]
        if index >= len(segment):
            return 404, b'{"error": "BlockNotFound", "message": "out of range"}'
        return 200, encode_block([_row(event) for event in segment[index]])

    def _list(self, first: int) -> dict[str, Any]:
        listed = []
        for number, segment in list(enumerate(self.segments))[first : first + PAGE]:
            times = [event["time_us"] for block in segment for event in block]
            listed.append(
                {
                    "name": f"seg_{number}.jss",
                    "index": number,
                    "eventCount": len(times),
                    "minWitnessedAt": min(times),
                    "maxWitnessedAt": max(times),
                }
            )
        page: dict[str, Any] = {"segments": listed}
        if first + PAGE < len(self.segments):
            page["cursor"] = str(first + PAGE)
        return page


class Answers(Handler):
    server: JetstreamArchive

    def respond(self) -> None:
        url = urlsplit(self.path)
        archive = self.server
        archive.asked.append(self.path)
        time.sleep(archive.delay_s)
        headers: Mapping[str, str] = {}
        if archive.answers:
            status, body, headers = archive.answers.pop(0)
        elif archive.key and self.headers["Authorization"] != f"Bearer {archive.key}":
            status, body = 401, b'{"error": "AuthRequired"}'
        else:
            status, body = archive.respond_to(url.path, parse_qs(url.query))
        self.send(status, headers, len(body))
        self.wfile.write(body)


def _id_of(event: dict[str, Any]) -> str:
    commit = event.get("commit")
    if not commit:
        return ""
    return f"at://{event['did']}/{commit['collection']}/{commit['rkey']}"


def _row(event: dict[str, Any]) -> tuple[int, int, str, str, str, bytes]:
    """Return an event's time, kind, collection, account, key and payload."""
    if event["kind"] != "commit":
        kind = 5 if event["kind"] == "account" else 4
        payload = encode_cbor(event.get(event["kind"]))
        return event["time_us"], kind, "", event["did"], "", payload
    commit = event["commit"]
    record = commit.get("record")
    payload = b"" if record is None else encode_cbor(record)
    return (
        event["time_us"],
        KINDS[commit["operation"]],
        commit["collection"],
        event["did"],
        commit["rkey"],
        payload,
    )


def encode_block(rows: Sequence[tuple[int, int, str, str, str, bytes]]) -> bytes:
    """Return the block of these rows, compressed."""
    count = len(rows)
    times, kinds, collections, dids, keys, payloads = (
        zip(*rows, strict=True) if rows else ((),) * 6
    )
    texts = [[text.encode() for text in column] for column in (collections, dids, keys)]
    parts = [
        struct.pack("<I", count),
        struct.pack(f"<{count}Q", *range(count)),
        struct.pack(f"<{count}q", *times),
        struct.pack(f"<{count}q", *[0] * count),
        struct.pack(f"<{count}B", *kinds),
        struct.pack(f"<{count}B", *map(len, texts[0])),
        struct.pack(f"<{count}H", *map(len, texts[1])),
        struct.pack(f"<{count}B", *map(len, texts[2])),
        struct.pack(f"<{count}B", *[0] * count),
        struct.pack(f"<{count}I", *map(len, payloads)),
    ]
    parts += [b"".join(column) for column in (*texts, [], payloads)]
    return compress(b"".join(parts))


def compress(data: bytes) -> bytes:
    """Return the data as a zstd frame."""
    return zstd.compress(data)


def encode_cbor(value: Any) -> bytes:
    """Return a value in DAG-CBOR."""
    if value is None or isinstance(value, bool):
        return bytes([{False: 0xF4, True: 0xF5, None: 0xF6}[value]])
    if isinstance(value, int):
        return _head(0, value) if value >= 0 else _head(1, -1 - value)
    if isinstance(value, float):
        return b"\xfb" + struct.pack(">d", value)
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _head(3, len(text)) + text
    if isinstance(value, list):
        return _head(4, len(value)) + b"".join(map(encode_cbor, value))
    items = [encode_cbor(key) + encode_cbor(each) for key, each in value.items()]
    return _head(5, len(value)) + b"".join(items)


def _head(major_type: int, number: int) -> bytes:
    if number < 24:
        return bytes([major_type << 5 | number])
    for information, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << 8 * size:
            return bytes([major_type << 5 | information]) + number.to_bytes(size)
    raise ValueError(number)
