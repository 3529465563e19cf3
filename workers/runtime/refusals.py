"""Tell the callers of a message that no task can process: its sender, its chord, its chain and its
errbacks.

Celery's tracer does this for each message that starts. A refused message never starts: its task is
unknown, its body cannot be decoded, or it has killed workers. So the worker makes the request's
context from what can be read of it, and lets Celery's result backend do what it does for a failed
task.

A message that has killed workers is decoded in a process of its own. If a body cannot be decoded
safely, but is JSON, its links are found at its end. Otherwise they are unknown: the sender has its
failure, and the other members of its chord find it as failed, but the chord's body is told only if
one of them ends later.

Nothing here is trusted: the fields and links of a refused message have any type.

Relies on these internals of Celery 5.7: `Backend.mark_as_failure` and `on_chord_part_return`
(celery/backends/base.py) read `id`, `group`, `group_index`, `chord`, `chain`, `errbacks`,
`root_id` and `delivery_info` of a context.
"""

import json
import re
import subprocess
import sys
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from celery.app.task import Context
from celery.states import FAILURE

from feedmill.shared import encoding
from feedmill.shared.encoding import UnreadableError
from feedmill.workers.runtime.request import is_signature, read_task_id, uses_own_keys

#: Errors that a malformed message causes in Celery, as opposed to errors of Redis or its
#: connection.
MALFORMED_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

#: Names of a message's links, in the body's third part of protocol 2 and in the body of protocol
#: 1.
LINKS = ("callbacks", "errbacks", "chain", "chord")
#: Fields of a request that its callers depend on, in the headers of protocol 2 and in the body of
#: protocol 1.
FIELDS = ("group", "group_index", "root_id", "parent_id", "ignore_result")
#: Seconds and bytes of memory for decoding a body that has killed workers.
DECODING_S = 20
DECODING_BYTES = 2**31
#: Bytes at the end of a body in which links are searched, and places that are tried, last ones
#: first. A chord's body and its errbacks take less.
MAX_LINKS_BYTES = 2**18
MAX_PLACES = 64
#: The beginning of the links in a body.
LINKS_START = re.compile(r'\{\s*"(?:callbacks|errbacks|chain|chord)"\s*:')

Links = dict[str, Any]


def tell_failed(
    backend: Any, message: Any, error: Exception, unread: bool
) -> str | None:
    """Store a refused message's failure, and end its chord, its chain and its errbacks as Celery
    does for a failed one.

    Returns the task id whose failure was stored, None without one.

    unread: do not decode the body in this process. Raises what the backend and malformed links
    raise.
    """
    links = _links_apart(message) if unread else _links(message)
    readable_links = links or {}
    task_id = read_task_id(message, unread)
    if unread:
        id_in_body = _id_found_apart(message, readable_links)
        task_id = id_in_body or task_id
    if not task_id:
        return None
    context = _context(message, task_id, readable_links)
    backend.mark_as_failure(
        task_id,
        error,
        request=context,
        store_result=not context.ignore_result,
    )
    if links is None and context.group:
        # The last one of its chord would call the callback, which its body names.
        with suppress(*MALFORMED_ERRORS):
            backend.on_chord_part_return(context, FAILURE, error)
    return task_id


def _id_found_apart(message: Any, links: Links) -> str | None:
    """Return the id in a body of protocol 1 that another process decoded; None for protocol 2."""
    if "task" in _headers(message):
        return None
    task_id = links.get("id")
    if not isinstance(task_id, str):
        return None
    return task_id[:128]


def _headers(message: Any) -> dict[str, Any]:
    """Return a message's headers; empty if they are no object."""
    headers = message.headers
    return headers if isinstance(headers, dict) else {}


def _context(message: Any, task_id: str, links: Links) -> Context:
    headers = _headers(message)
    fields = {}
    for name in FIELDS:
        body_field = links.get(name)
        fields[name] = headers.get(name, body_field)
    properties = message.properties
    return Context(
        fields,
        id=task_id,
        reply_to=properties.get("reply_to"),
        correlation_id=properties.get("correlation_id"),
        delivery_info={},
        **{name: links.get(name) for name in LINKS},
    )


def _links(message: Any) -> Links | None:
    """Return a message's links that can be used; None if its body cannot be decoded."""
    try:
        body = message.payload
    except Exception:  # a serializer may raise anything
        return find_links(message.body)
    links = _part_with_links(body)
    return usable_links(links)


def _part_with_links(body: Any) -> Any:
    """Return the part of a body that contains the links: the third one in protocol 2, everything
    in protocol 1.
    """
    if isinstance(body, list | tuple) and len(body) == 3:
        return body[2]
    return body


def find_links(body: object) -> Links | None:
    """Find the links at the end of a body of protocol 2 without decoding the rest; None if there
    are none.
    """
    if not isinstance(body, str | bytes):
        return None
    end = body[-MAX_LINKS_BYTES:]
    text = end.decode(errors="replace") if isinstance(end, bytes) else end
    places = [match.start() for match in LINKS_START.finditer(text)]
    last_places = places[-MAX_PLACES:]
    for place in reversed(last_places):
        decoder = json.JSONDecoder()
        try:
            links, after = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            continue
        rest = text[after:]
        if rest.strip() == "]":
            return usable_links(links)
    return None


def usable_links(links: Any) -> Links:
    """Return a message's fields with the links that Celery can read and that write to no key of
    Feedmill's own.

    A failed message sends its errbacks, and those of its chord's body: other links need not be
    safe.
    """
    if not isinstance(links, dict):
        return {}
    usable = dict(links)
    for name in ("callbacks", "errbacks", "chain"):
        safe_links = _safe(links.get(name))
        usable[name] = [_complete(link) for link in _signatures(safe_links)]
    errbacks = usable["errbacks"]
    usable["errbacks"] = [link for link in errbacks if not uses_own_keys(link)]
    usable["chord"] = None
    chord = _safe(links.get("chord"))
    if is_signature(chord):
        usable["chord"] = _complete(chord)
    return usable


def _safe(value: Any) -> Any:
    """Return a copy without errbacks, at any depth, that would be sent to Feedmill's own keys."""
    if isinstance(value, list | tuple):
        return [_safe(item) for item in value]
    if not isinstance(value, dict):
        return value
    copy = {}
    for name, item in value.items():
        if name not in ("errbacks", "link_error"):
            copy[name] = _safe(item)
            continue
        links = [item] if isinstance(item, dict) else item
        errbacks = _signatures(links)
        copy[name] = [_safe(link) for link in errbacks if not uses_own_keys(link)]
    return copy


def _signatures(links: Any) -> Sequence[Any]:
    """Return the links that are signatures."""
    if isinstance(links, list | tuple):
        return [link for link in links if is_signature(link)]
    return []


def _complete(link: dict[str, Any]) -> dict[str, Any]:
    """Return a signature with the fields that Celery reads."""
    return {
        "args": [],
        **link,
        "kwargs": link.get("kwargs") or {},
        "options": link.get("options") or {},
    }


def _links_apart(message: Any) -> Links | None:
    """Return a message's links as `_links` does, decoded in another process, which it may kill."""
    body = message.body
    if not isinstance(body, bytes):
        body = str(body).encode()
    headers = message.headers or {}
    envelope = {
        "body": b64encode(body).decode(),
        "headers": {"compression": headers.get("compression")},
        "properties": {"body_encoding": encoding.BASE64},
    }
    command = [sys.executable, "-P", "-m", "feedmill.workers.runtime.refusals"]
    try:
        answer = subprocess.run(
            command,
            input=json.dumps(envelope).encode(),
            capture_output=True,
            timeout=DECODING_S,
            check=True,
        )
        links = json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return find_links(message.body)
    return usable_links(links)


def main() -> None:
    """Print the links of the message on standard input: the other process of `_links_apart`."""
    import resource  # noqa: PLC0415 - exists on POSIX systems alone

    limits = (DECODING_BYTES, DECODING_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, limits)
    message = sys.stdin.buffer.read()
    try:
        envelope = encoding.open_message(message)
        text = encoding.body_text(envelope)
        body = encoding.parse(text)
    except UnreadableError:
        sys.exit(1)
    links = _part_with_links(body)
    if not isinstance(links, dict):
        links = {}
    names = (*LINKS, *FIELDS, "id")
    answer = {name: links.get(name) for name in names}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
