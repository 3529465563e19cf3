"""Logging for every process: one line per event to standard error, as text or as JSON."""

import logging
import sys
from datetime import UTC, datetime

from feedmill.shared.errors import json_line, printable_lines
from feedmill.shared.settings import Settings

#: Maximum characters kept from a record's beginning and from its end, where tracebacks are.
MAX_START_CHARACTERS = 20_000
MAX_END_CHARACTERS = 10_000


class TextFormatter(logging.Formatter):
    """Format a record as one line without control characters.

    Further lines, such as tracebacks, are indented.

    Untrusted text in a message can neither control the terminal nor imitate another record.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if len(text) > MAX_START_CHARACTERS + MAX_END_CHARACTERS:
            start = text[:MAX_START_CHARACTERS]
            end = text[-MAX_END_CHARACTERS:]
            text = f"{start}…{end}"
        lines = printable_lines(text)
        return lines.replace("\n", "\n    ")


class JsonFormatter(logging.Formatter):
    """Format a record as a JSON object on one line: time, level, logger, message, and the
    traceback if there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(
                timespec="milliseconds"
            ),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
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
