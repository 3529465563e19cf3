"""Find the ids of posts in text that is not valid JSON: messages that no worker can read, as dead
letters keep them.

Such text may be cut off, damaged, or nested deeper than a parser goes. It is searched, not parsed.
"""

import json
import re
import zlib
from base64 import b64decode
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from uuid import UUID

from feedmill.shared.messages import parse_id

#: A key `id` and its value: a string, a number, or one of Celery's types, an object of at most two
#: levels.
_ID = re.compile(
    r'"id"\s{0,20}:\s{0,20}'
    r'("(?:[^"\\]|\\.){0,800}"|-?\d[\d.eE+-]{0,40}|\{[^{}]{0,100}(?:\{[^{}]{0,100}\}[^{}]{0,20})?\})',
    re.DOTALL,
)
#: The start of a message's body: Base64, or escaped JSON.
_BODY = re.compile(r'"body"\s{0,20}:\s{0,20}"((?:[^"\\]|\\.)*)', re.DOTALL)
#: Characters of an escape that the end of the text may cut off.
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?$")
#: Characters that count for nothing where Base64 is decoded (`decode_base64`).
_NOT_BASE64 = re.compile(r"[^A-Za-z0-9+/=]")
#: Maximum bytes of decompressed text to search, and maximum ids to return.
MAX_SEARCHED = 2**24
MAX_MENTIONS = 10_000


def mentioned_ids(*texts: str | None) -> set[str] | None:
    """Return the ids of posts in these texts; None for more than MAX_MENTIONS.

    A text may also be a stored message, with a body that is encoded and compressed.
    """
    ids: set[str] = set()
    for text in texts:
        for part in _parts(text or ""):
            for match in _ID.finditer(part):
                post_id = _parse_id(match[1])
                if post_id is not None:
                    ids.add(post_id)
                if len(ids) > MAX_MENTIONS:
                    return None
    return ids


def _parts(text: str) -> Iterator[str]:
    """Yield the text itself, and the text of the first message body in it."""
    yield text
    match = _BODY.search(text)
    if match is None:
        return
    body = _CUT_ESCAPE.sub("", match[1])
    with suppress(ValueError):
        body = json.loads(f'"{body}"', strict=False)
        yield body
    with suppress(ValueError):
        digits = _NOT_BASE64.sub("", body)
        whole = len(digits) - len(digits) % 4
        data = b64decode(digits[:whole])
        with suppress(zlib.error):
            data = zlib.decompressobj().decompress(data, MAX_SEARCHED)
        yield data.decode("utf-8", "replace")


def _parse_id(text: str) -> str | None:
    """Return the id that a value in JSON stands for."""
    try:
        value: Any = json.loads(text, strict=False)
        if isinstance(value, dict):
            value = _of_type(value)
        return parse_id(value)
    except (ValueError, TypeError, AttributeError):
        return None


def _of_type(value: dict[str, Any]) -> Any:
    """Return a value of Celery's JSON: of a UUID, or as the text that it is written as."""
    content = value.get("__value__")
    if isinstance(content, dict):
        return UUID(content["hex"])
    return content
