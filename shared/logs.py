"""Logging for every process: one line per event to standard error, as text or as JSON.

A record about a message names it: by `extra=fields_of(…)`, or because it was logged while
`CURRENT_FIELDS` was set, as by a task's own code. Celery's records of a task name it in `data`.
"""

import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from feedmill.shared.errors import json_line, printable_lines
from feedmill.shared.log_secrets import Secrets
from feedmill.shared.settings import Settings
from feedmill.shared.trace_context import TraceContext

#: Maximum characters kept from a record's beginning and from its end, where tracebacks are.
MAX_START_CHARACTERS = 20_000
MAX_END_CHARACTERS = 10_000
#: Maximum characters of a message's id in the fields of a record. Senders choose it.
MAX_ID_CHARACTERS = 128
#: Attribute of a record with the fields of its message.
FIELDS = "feedmill"
#: Returns the fields of the message whose task runs in this context.
CURRENT_FIELDS: ContextVar[Callable[[], dict[str, Any]] | None] = ContextVar(
    "CURRENT_FIELDS", default=None
)


def fields_of(
    message_id: str | None, run: str | None, trace: TraceContext | None
) -> dict[str, Any]:
    """Return the argument `extra` of a log record about a message."""
    fields: dict[str, str] = {}
    if message_id is not None:
        fields["message_id"] = message_id[:MAX_ID_CHARACTERS]
    if run is not None:
        fields["run"] = run
    if trace is not None:
        fields["trace_id"] = trace.trace_id
        fields["span_id"] = trace.span_id
    return {FIELDS: fields}


def fields_in(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of the message that a record is about; none for others."""
    own = getattr(record, FIELDS, None)
    if isinstance(own, dict):
        return own
    fields: dict[str, Any] = {}
    current_fields = CURRENT_FIELDS.get()
    data = getattr(record, "data", None)
    if current_fields is not None:
        fields = current_fields()[FIELDS]
    elif isinstance(data, dict) and isinstance(data.get("id"), str):
        fields = fields_of(data["id"], None, None)[FIELDS]
    return fields


def cut(text: str) -> str:
    """Return a text without its middle if it is long."""
    if len(text) <= MAX_START_CHARACTERS + MAX_END_CHARACTERS:
        return text
    start = text[:MAX_START_CHARACTERS]
    end = text[-MAX_END_CHARACTERS:]
    return f"{start}…{end}"


class TextFormatter(logging.Formatter):
    """Format a record as one line without control characters.

    Further lines, such as tracebacks, are indented. A record about a traced message ends with its
    trace id.

    Untrusted text in a message can neither control the terminal nor imitate another record.
    """

    def __init__(self, form: str) -> None:
        super().__init__(form)
        self._secrets = Secrets()

    def format(self, record: logging.LogRecord) -> str:
        text = self._secrets.hide(super().format(record))
        trace_id = fields_in(record).get("trace_id")
        if trace_id is not None:
            first, line_break, rest = text.partition("\n")
            text = f"{first} (trace {trace_id}){line_break}{rest}"
        lines = printable_lines(cut(text))
        return lines.replace("\n", "\n    ")


class JsonFormatter(logging.Formatter):
    """Format a record as a JSON object on one line: time, level, logger, message, the fields of
    the message that it is about, and the traceback if there is one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._secrets = Secrets()

    def format(self, record: logging.LogRecord) -> str:
        message = self._secrets.hide(record.getMessage())
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(
                timespec="milliseconds"
            ),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": cut(message),
            **fields_in(record),
        }
        traceback = record.exc_text
        if record.exc_info:
            traceback = self.formatException(record.exc_info)
        if traceback:
            traceback = self._secrets.hide(traceback)
            entry["traceback"] = cut(traceback)
        return json_line(entry)


def configure(settings: Settings, plain: bool = False) -> None:
    """Send all log records to standard error in the configured format. Replaces earlier handlers.

    plain: print messages alone as text, for commands that a person waits for.
    """
    formatter: logging.Formatter
    if settings.log_format == "json":
        formatter = JsonFormatter()
    elif plain:
        formatter = TextFormatter("%(message)s")
    else:
        formatter = TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    level = settings.log_level.upper()
    logging.basicConfig(
        level=level,
        handlers=[handler],
        force=True,
    )
    # Celery logs two lines per message at INFO. Flower shows these events instead. torch logs its
    # caches at the exit if Ctrl-C came while it was imported.
    for name in ("celery.worker.strategy", "celery.app.trace", "torch"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.WARNING)
