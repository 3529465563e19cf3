"""Parse dates given as options, and format times."""

import math
from contextlib import suppress
from datetime import UTC, datetime

from feedmill.producers.records import seconds_of_date
from feedmill.shared.errors import UserError


def utc(seconds: float) -> str:
    """Format seconds since 1970 as date and time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds")


def parse_period(
    since: str | None, until: str | None, earliest: float = -math.inf
) -> tuple[float | None, float | None]:
    """Parse the options `--since` and `--until` to seconds since 1970; None if not given.

    earliest: dates before this time are invalid. Raises UserError for an invalid date or an empty period.
    """
    begins, ends = _seconds("--since", since, earliest), _seconds("--until", until, earliest)
    if begins is not None and ends is not None and begins >= ends:
        raise UserError(f"--since {since} must be before --until {until}.")
    return begins, ends


def check_date_format(date_format: str | None) -> str | None:
    """Return the value of `--date-format`. Raises UserError if it is not a format with at least a year."""
    if date_format is None:
        return None
    with suppress(ValueError):
        day = datetime(2003, 12, 31, tzinfo=UTC)
        if datetime.strptime(day.strftime(date_format), date_format).date() == day.date():
            return date_format
    raise UserError(
        f"--date-format: {date_format!r:.80} is not a format with year, month and day. Write %d.%m.%Y for 31.12.2003, "
        "or %m/%d/%Y for 12/31/2003."
    )


def _seconds(flag: str, date: str | None, earliest: float) -> float | None:
    if date is None:
        return None
    try:
        if (seconds := seconds_of_date(date.strip())) >= earliest:
            return seconds
    except ValueError:
        pass
    raise UserError(f"{flag}: {date!r:.80} is not a date. Write 2026-01-31, or 2026-01-31T12:30 (UTC).")
