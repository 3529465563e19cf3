"""The feeds to read, from a TOML or an OPML file; and OPML for other readers.

Feeds have names of their own, which are part of their posts' ids: a feed's address may change.
OPML needs lxml, an optional package.
"""

import re
import tomllib
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
)

from feedmill.shared.errors import SettingsError, UserError, clause, first_problem
from feedmill.shared.label_files import decoded

#: Maximum feeds in a file, its size in bytes, and characters of an address.
MAX_FEEDS = 10_000
MAX_FILE_BYTES = 16 * 2**20
MAX_URL = 4_096
#: Maximum characters of a name. It is part of the ids of posts.
MAX_NAME = 64
#: Maximum characters of a topic.
MAX_TOPIC = 200
#: Endings of OPML files.
OPML_ENDINGS = frozenset({".opml", ".xml"})

Name = Annotated[
    str, StringConstraints(pattern=rf"^[A-Za-z0-9][A-Za-z0-9_.-]{{0,{MAX_NAME - 1}}}$")
]


class Feed(BaseModel):
    """A feed. topic: the topic of its posts; its name if None. interval: seconds between two
    reads; learnt from the feed if None.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    topic: (
        Annotated[str, StringConstraints(min_length=1, max_length=MAX_TOPIC)] | None
    ) = None
    interval: Annotated[float, Field(ge=60, le=7 * 86_400)] | None = None

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        split_http(url)
        return url


def split_http(url: str) -> SplitResult:
    """Return the parts of an address. Raises ValueError unless it is one of HTTP, with a host."""
    parts = urlsplit(url)
    is_http = parts.scheme.lower() in ("http", "https")
    if not is_http or not parts.hostname or len(url) > MAX_URL:
        raise ValueError("write an address such as https://example.org/feed.xml")
    _ = parts.port  # raises if it is no number
    return parts


class Server(NamedTuple):
    """A server: scheme, host and port of an address."""

    scheme: str
    host: str
    port: int


def server_of(url: str) -> Server:
    """Return the server of an address. Raises ValueError as `split_http` does."""
    parts = split_http(url)
    scheme = parts.scheme.lower()
    port = parts.port
    if port is None:
        port = 443 if scheme == "https" else 80
    return Server(
        scheme=scheme,
        host=(parts.hostname or "").lower(),
        port=port,
    )


def _as_fields(value: object) -> object:
    if isinstance(value, str):
        return {"url": value}
    return value


class FeedsFile(BaseModel):
    """The contents of a feeds file: name -> feed, or its address."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    feeds: Annotated[
        dict[Name, Annotated[Feed, BeforeValidator(_as_fields)]],
        Field(min_length=1, max_length=MAX_FEEDS),
    ]


def read(path: Path) -> dict[str, Feed]:
    """Return the feeds of a file, by name. Raises UserError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read ({clause(error)}).") from error
    if len(content) > MAX_FILE_BYTES:
        raise SettingsError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB.")
    if path.suffix.lower() in OPML_ENDINGS:
        return _read_opml(path, content)
    try:
        document = tomllib.loads(decoded(content))
        return FeedsFile.model_validate(document).feeds
    except ValidationError as error:
        reason = ": ".join(first_problem(error))
    except ValueError as error:
        reason = f"it is not valid TOML ({error})"
    raise SettingsError(
        f"Cannot read the feeds file {path}: {reason}. docs/feeds.md shows an example."
    )


def _read_opml(path: Path, content: bytes) -> dict[str, Feed]:
    """Return the feeds of an OPML file. Folders are topics; a repeated address counts once."""
    from lxml import etree  # noqa: PLC0415 - an optional package

    parser = etree.XMLParser(resolve_entities=False, no_network=True)
    try:
        root = etree.fromstring(content, parser)
    except etree.XMLSyntaxError as error:
        raise SettingsError(f"{path} is not valid OPML: {clause(error)}.") from error
    feeds: dict[str, Feed] = {}
    addresses: set[str] = set()
    for outline in root.iter("outline"):
        if outline.get("xmlUrl") is None:
            continue
        url = outline.get("xmlUrl").strip()
        if url in addresses:
            continue
        addresses.add(url)
        title = outline.get("title") or outline.get("text") or ""
        try:
            feed = Feed(url=url, topic=_folder(outline))
        except ValidationError as error:
            reason = ": ".join(first_problem(error))
            raise SettingsError(
                f"{path}, line {outline.sourceline}: {reason}. Correct or remove the feed."
            ) from error
        name = _new_name(title, feed.url, feeds)
        feeds[name] = feed
        if len(feeds) > MAX_FEEDS:
            raise SettingsError(f"{path} has more than {MAX_FEEDS:,} feeds.")
    if not feeds:
        raise SettingsError(f"{path} lists no feeds: no outline has an xmlUrl.")
    return feeds


def _folder(outline: Any) -> str | None:
    """Return the title of the folder that contains a feed; None if it has none."""
    parent = outline.getparent()
    if parent is None or parent.tag != "outline":
        return None
    title = parent.get("title", "").strip()
    text = parent.get("text", "").strip()
    topic = title or text
    return topic[:MAX_TOPIC] or None


def _new_name(title: str, url: str, taken: Mapping[str, Feed]) -> str:
    """Return a name for a feed of an OPML file: from its title, or its address' host and path.

    A password and a query may be secret, and names are public: they are parts of posts' ids.
    """
    name = _slug(title)
    if not name:
        parts = split_http(url)
        host = parts.netloc.rpartition("@")[2]
        name = _slug(host + parts.path) or "feed"
    if name not in taken:
        return name
    numbers = count(2)
    return next(
        numbered
        for number in numbers
        if (numbered := f"{name[: MAX_NAME - 6]}-{number}") not in taken
    )


def _slug(text: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", text.lower())
    return words[:MAX_NAME].strip("-")


def as_opml(feeds: Mapping[str, Feed]) -> bytes:
    """Return feeds as OPML, which other readers import."""
    from lxml import etree  # noqa: PLC0415 - an optional package

    root = etree.Element("opml", version="2.0")
    head = etree.SubElement(root, "head")
    etree.SubElement(head, "title").text = "Feeds of Feedmill"
    body = etree.SubElement(root, "body")
    folders: dict[str, Any] = {}
    for name, feed in feeds.items():
        parent = body
        if feed.topic:
            if feed.topic not in folders:
                folder = etree.SubElement(
                    body,
                    "outline",
                    text=feed.topic,
                    title=feed.topic,
                )
                folders[feed.topic] = folder
            parent = folders[feed.topic]
        etree.SubElement(
            parent,
            "outline",
            type="rss",
            text=name,
            title=name,
            xmlUrl=feed.url,
        )
    text: bytes = etree.tostring(
        root,
        xml_declaration=True,
        encoding="UTF-8",
        pretty_print=True,
    )
    return text


def write_opml(path: Path, feeds: Mapping[str, Feed]) -> None:
    """Write feeds to an OPML file. Raises UserError."""
    try:
        path.write_bytes(as_opml(feeds))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({clause(error)}).") from error
