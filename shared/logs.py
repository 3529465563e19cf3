"""How every process logs: one line an event, for people or as JSON, to standard error."""

import logging
import sys
from datetime import UTC, datetime

from shared.errors import json_line, printable_lines
from shared.settings import Settings

#: Characters of a record that are kept, of its beginning and of its end: a traceback stands there.
BEGINNING, END = 20_000, 10_000


class TextFormatter(logging.Formatter):
    """One record a line, without control characters; further lines, such as a traceback's, are indented.

    So no words of a sender can reach the terminal, or pass for a record of their own.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if len(text) > BEGINNING + END:
            text = f"{text[:BEGINNING]}…{text[-END:]}"
        return printable_lines(text).replace("\n", "\n    ")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json_line(entry)


def configure(settings: Settings) -> None:
    """Send every logger's records to standard error in the chosen format, once."""
    handler = logging.StreamHandler(sys.stderr)
    if settings.log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    # One line for each message received and succeeded is Flower's to show, not the log's.
    for chatty in ("celery.worker.strategy", "celery.app.trace"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
