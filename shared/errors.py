"""Every error that Feedmill raises on purpose. Imports nothing else from Feedmill."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from json import JSONDecodeError
from pathlib import Path
from typing import Any


class FeedmillError(Exception):
    """Base class of all errors that Feedmill raises on purpose."""


class UserError(FeedmillError):
    """A mistake that the user can fix. The text says what failed, why, and what to do.

    Commands print it to standard error after `feedmill:` and exit with status 2. `feedmill.results()` raises it.
    """

    def _render_traceback_(self) -> list[str]:
        """Return the lines that notebooks show in place of the traceback."""
        return [f"{type(self).__name__}: {self}"]


class SettingsError(UserError):
    """A setting has an invalid value, or one that conflicts with another setting.

    Commands exit with status 2 before doing any work. A worker whose device or model does not match its settings logs
    the error and exits with status 1.
    """


class InputError(UserError):
    """A file, standard input, or an argument of a Python function cannot be read as posts.

    Posts read before the failure are sent. A single bad record does not raise this error: it is reported and skipped.
    """


class ModelError(UserError):
    """The model cannot be loaded, or does not run on the device.

    A worker logs the error and exits with status 1 before it takes a message. Other commands exit with status 2.
    """


class StackError(UserError):
    """A process of the embedded stack did not start, or ended during the demo.

    `feedmill up` and `feedmill demo` stop the processes that they started and exit with status 2.
    """


class RedisUnavailable(UserError):  # noqa: N818 - named after the event
    """Redis is unreachable, rejects the credentials, or refuses a command.

    Commands exit with status 2; posts reported as sent are in the queue. Workers and daemons of `feedmill ingest` wait
    for Redis instead, and exit only if waiting cannot help.
    """


class DatabaseUnavailable(UserError):  # noqa: N818 - named after the event
    """PostgreSQL is unreachable, full or restarting, or another export writes to the table.

    `feedmill export` exits with status 2; with `--follow`, it retries once it has started.
    """


class CredentialsError(UserError):
    """Reddit's credentials are missing, or Reddit rejects them. The text says where to get them.

    The daemon exits if the credentials never worked. If they worked before, it waits until they work again.
    """


class RequestRefused(FeedmillError):  # noqa: N818 - named after what happened, like Celery's Retry and Reject
    """A message's options (labels, template, …) are invalid.

    The message fails with this reason, and each of its posts becomes a dead letter. Commands raise a UserError with the
    same text.
    """


class PostRefused(FeedmillError):  # noqa: N818
    """One post is invalid. Its outcome and its dead letter carry the reason; the message's other posts are classified.

    field: the invalid field's name, or "" if the problem is not in a single field. reason: what is wrong with it.
    """

    def __init__(self, post_id: str | None, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}" if field else reason)
        self.post_id = post_id
        self.field = field
        self.reason = reason


class DeviceFull(FeedmillError):  # noqa: N818 - named after what happened
    """The device ran out of memory.

    Visible only in the log: the worker splits the micro-batch in half, retries, and forms smaller ones from then on.
    """


class DeviceLost(FeedmillError):  # noqa: N818
    """The device cannot compute anything more in this process.

    The worker exits with status 1 without acknowledging, so its messages return to the queue.
    """


class ForwardTimeout(FeedmillError):  # noqa: N818 - named after what happened
    """A forward pass did not finish within the setting `forward_timeout`.

    Also raised for other classifier calls, for the trial of a deployed model, and for an application's own task that
    exceeds its time limit. The worker exits with status 1 without acknowledging, so its messages return to the queue.
    """


class MessageFailed(FeedmillError):  # noqa: N818
    """A message failed as a whole: all of its posts failed, or any post failed with `strict`.

    The text gives the number of failed posts and the first few reasons. Callers that wait for the Celery result receive
    this error. Results of the valid posts are stored anyway.
    """

    #: Reasons quoted in the text. A message can contain a thousand invalid posts.
    QUOTED = 3

    @classmethod
    def of(cls, reasons: Sequence[str], posts: int) -> "MessageFailed":
        """Build the error for a message of `posts` posts, given one reason per failed post."""
        quoted = "; ".join(reasons[: cls.QUOTED])
        more = f"; and {len(reasons) - cls.QUOTED} more" if len(reasons) > cls.QUOTED else ""
        return cls(f"{len(reasons)} of {posts} posts failed: {quoted}{more}")


#: Maximum characters of an untrusted value, or of a field's or option's name, quoted in an error.
QUOTED_CHARACTERS = 80
#: Maximum names in the path to a nested field; and maximum characters of a reason.
LONGEST_PATH, LONGEST_REASON = 5, 1000


def truncate(text: str, limit: int = QUOTED_CHARACTERS) -> str:
    """Return the text, truncated to `limit` characters including a final "…"."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def first_problem(error: Any) -> tuple[str, str]:
    """Return the first problem of a pydantic error as (field, reason), both of bounded length.

    The field may contain names chosen by the sender: unknown options, labels, keys of `extra`.
    """
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # pydantic appends "[key]" to the path if a mapping's key is invalid.
    field = ".".join(truncate(str(part)) for part in problem["loc"][:LONGEST_PATH] if part != "[key]") or "the object"
    reason = (
        "unknown argument" if problem["type"] == "extra_forbidden" else problem["msg"].removeprefix("Value error, ")
    )
    return field, truncate(reason[0].lower() + reason[1:], LONGEST_REASON)


def sentence(text: str) -> str:
    """Return a reason with the full stop that ends it, unless it ends with a question."""
    return text if text.endswith((".", "?")) else f"{text}."


def json_problem(error: ValueError | RecursionError, unit: str = "column") -> str:
    """Return why JSON parsing failed. unit: the word for a character's position in the text."""
    if isinstance(error, JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at {unit} {error.pos + 1}"
    return str(error)


#: redis-py's text before the error of a command in a pipeline.
PIPELINE_COMMAND = re.compile(r"^Command # \d+ \(.*\) of pipeline caused error: ", re.DOTALL)


def clause(error: BaseException) -> str:
    """Return an error's text for use within a sentence: without its final full stop, and without a pipeline's command,
    which redis-py puts before Redis' answer and which may contain posts.
    """
    return PIPELINE_COMMAND.sub("", str(error)).removesuffix(".")


#: Characters that move the cursor, change the terminal's state, end a line or change the text's direction; and lone
#: surrogates, which cannot be encoded.
UNPRINTABLE_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@contextmanager
def explain_missing(purpose: str, extra: str) -> Iterator[None]:
    """Convert the failed import of an optional package inside the block into UserError. extra: what installs it."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise UserError(
            f"{purpose} requires the package {missing.name}: run `pip install 'feedmill[{extra}]'`."
        ) from None


@contextmanager
def explain_unwritable(place: Path) -> Iterator[None]:
    """Convert an OSError inside the block to UserError. place: what is written."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        where = printable(str(place))
        raise UserError(f"Cannot write {where}: {error.strerror or error}. Give another place.") from None


def printable(text: str) -> str:
    """Escape control characters in untrusted text, so that it is safe to print on one line of a terminal."""
    return UNPRINTABLE_CHARACTERS.sub(lambda found: repr(found[0])[1:-1], text)


def printable_lines(text: str) -> str:
    """Escape control characters in each line of a text and keep its line breaks."""
    return "\n".join(map(printable, text.split("\n")))


def json_line(value: object) -> str:
    """Return a value as one line of JSON, with control characters escaped for safe display in a terminal."""
    written = json.dumps(value, ensure_ascii=False)
    return UNPRINTABLE_CHARACTERS.sub(lambda found: f"\\u{ord(found[0]):04x}", written)


@contextmanager
def explain_refusals(model: str) -> Iterator[None]:
    """Convert the model's refusals and device failures inside the block into UserError."""
    try:
        yield
    except RequestRefused as refused:
        raise UserError(
            f"{model} cannot serve this request: {sentence(str(refused))} Correct the option, or use another model."
        ) from None
    except (DeviceFull, DeviceLost) as error:
        raise ModelError(
            f"The device failed: {clause(error)}. Try again; if the device is out of memory, lower "
            "FEEDMILL_TOKEN_BUDGET."
        ) from None
