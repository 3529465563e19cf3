"""How every process logs: one line an event, for people or as JSON, to standard error."""

import json
import logging
import sys
from datetime import UTC, datetime

from shared.settings import Settings


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
        return json.dumps(entry, ensure_ascii=False)


def configure(settings: Settings) -> None:
    """Send every logger's records to standard error in the chosen format, once."""
    handler = logging.StreamHandler(sys.stderr)
    if settings.log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    # One line for each message received and succeeded is Flower's to show, not the log's.
    for chatty in ("celery.worker.strategy", "celery.app.trace"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
