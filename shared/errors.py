"""Every error that Feedmill raises on purpose. Imports nothing else from Feedmill."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from json import JSONDecodeError
from pathlib import Path
from typing import Any


class FeedmillError(Exception):
    """Base class of all errors that Feedmill raises on purpose."""


class UserError(FeedmillError):
    """A mistake that the user can fix. The text says what failed, why, and what to do.

    Commands print it to standard error after `feedmill:` and exit with status 2.
    `feedmill.results()` raises it.
    """

    def _render_traceback_(self) -> list[str]:
        """Return the lines that notebooks show in place of the traceback."""
        name = type(self).__name__
        return [f"{name}: {self}"]


class SettingsError(UserError):
    """A setting has an invalid value, or one that conflicts with another setting.

    Commands exit with status 2 before doing any work. A worker whose device or model does not
    match its settings logs the error and exits with status 1.
    """


class InputError(UserError):
    """A file, standard input, or an argument of a Python function cannot be read as posts.

    Posts read before the failure are sent. A single bad record does not raise this error: it is
    reported and skipped.
    """


class ModelError(UserError):
    """The model cannot be loaded, or does not run on the device.

    A worker logs the error and exits with status 1 before it takes a message. Other commands exit
    with status 2.
    """


class StackError(UserError):
    """A process of the embedded stack did not start, or ended during the demo.

    `feedmill up` and `feedmill demo` stop the processes that they started and exit with status 2.
    """


class RedisUnavailable(UserError):  # noqa: N818 - named after the event
    """Redis is unreachable, rejects the credentials, or refuses a command.

    Commands exit with status 2; posts reported as sent are in the queue. Workers and daemons of
    `feedmill ingest` wait for Redis instead, and exit only if waiting cannot help.
    """


class DatabaseUnavailable(UserError):  # noqa: N818 - named after the event
    """PostgreSQL is unreachable, full or restarting, or another export writes to the table.

    `feedmill export` exits with status 2; with `--follow`, it retries once it has started.
    """


class CredentialsError(UserError):
    """Reddit's credentials are missing, or Reddit rejects them. The text says where to get them.

    The daemon exits if the credentials never worked. If they worked before, it waits until they
    work again.
    """


class ServerError(UserError):
    """The server of `feedmill web` did not answer a request of `feedmill.Client`, or refused it.

    status: the status of HTTP; None without an answer. kind: the server's word for the error.
    request_id: its id in the server's log. retry_after: seconds after which to try again, if the
    server says so.
    """

    def __init__(
        self,
        message: str,
        status: int | None = None,
        kind: str = "",
        request_id: str = "",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.request_id = request_id
        self.retry_after = retry_after


class AccessRefused(ServerError):  # noqa: N818 - named after the event
    """The server does not know the token, or the token lacks the scope."""


class NotFound(ServerError):  # noqa: N818
    """The server has no such run or post."""


class ServerBusy(ServerError):  # noqa: N818
    """The server takes no more requests now, also after the client's retries."""


class ServerUnreachable(ServerError):  # noqa: N818
    """The server cannot be reached, or the connection is lost, also after the client's retries."""


class NoAnswerInTime(ServerError):  # noqa: N818
    """There were no labels within the request's timeout. The posts may be classified later."""


# Named after what happened, like Celery's Retry and Reject.
class RequestRefused(FeedmillError):  # noqa: N818
    """A message's options (labels, template, …) are invalid.

    The message fails with this reason, and each of its posts becomes a dead letter. Commands raise
    a UserError with the same text.
    """


class PostRefused(FeedmillError):  # noqa: N818
    """One post is invalid.

    Its outcome and its dead letter carry the reason; the message's other posts are classified.

    field: the invalid field's name, or "" if the problem is not in a single field. reason: what is
    wrong with it.
    """

    def __init__(self, post_id: str | None, field: str, reason: str) -> None:
        text = f"{field}: {reason}" if field else reason
        super().__init__(text)
        self.post_id = post_id
        self.field = field
        self.reason = reason


class DeviceFull(FeedmillError):  # noqa: N818 - named after what happened
    """The device ran out of memory.

    Visible only in the log: the worker splits the micro-batch in half, retries, and forms smaller
    ones from then on.
    """


class DeviceLost(FeedmillError):  # noqa: N818
    """The device cannot compute anything more in this process.

    The worker exits with status 1 without acknowledging, so its messages return to the queue.
    """


class ForwardTimeout(FeedmillError):  # noqa: N818 - named after what happened
    """A forward pass did not finish within the setting `forward_timeout`.

    Also raised for other classifier calls, for the trial of a deployed model, and for an
    application's own task that exceeds its time limit. The worker exits with status 1 without
    acknowledging, so its messages return to the queue.
    """


class MessageFailed(FeedmillError):  # noqa: N818
    """A message failed as a whole: all of its posts failed, or any post failed with `strict`.

    The text gives the number of failed posts and the first few reasons. Callers that wait for the
    Celery result receive this error. Results of the valid posts are stored anyway.
    """

    #: Reasons quoted in the text. A message can contain a thousand invalid posts.
    QUOTED = 3

    @classmethod
    def of(cls, reasons: Sequence[str], posts: int) -> "MessageFailed":
        """Build the error for a message of `posts` posts, given one reason per failed post."""
        failed = len(reasons)
        quoted = "; ".join(reasons[: cls.QUOTED])
        if failed > cls.QUOTED:
            quoted += f"; and {failed - cls.QUOTED} more"
        return cls(f"{failed} of {posts} posts failed: {quoted}")


#: Maximum characters of an untrusted value, or of a field's or option's name, quoted in an error.
QUOTED_CHARACTERS = 80
#: Maximum names in the path to a nested field; and maximum characters of a reason.
LONGEST_PATH = 5
LONGEST_REASON = 1000


def truncate(text: str, limit: int = QUOTED_CHARACTERS) -> str:
    """Return the text, truncated to `limit` characters including a final "…"."""
    if len(text) <= limit:
        return text
    return f"{text[: limit - 1]}…"


def first_problem(error: Any) -> tuple[str, str]:
    """Return the first problem of a pydantic error as (field, reason), both of bounded length.

    The field may contain names chosen by the sender: unknown options, labels, keys of `extra`.
    """
    problems = error.errors(
        include_url=False,
        include_context=False,
        include_input=False,
    )
    problem = problems[0]
    path = problem["loc"][:LONGEST_PATH]
    # pydantic appends "[key]" to the path if a mapping's key is invalid.
    names = [truncate(str(part)) for part in path if part != "[key]"]
    field = ".".join(names) or "the object"
    if problem["type"] == "extra_forbidden":
        reason = "unknown argument"
    else:
        reason = problem["msg"].removeprefix("Value error, ")
    uncapitalized = reason[0].lower() + reason[1:]
    return field, truncate(uncapitalized, LONGEST_REASON)


def sentence(text: str) -> str:
    """Return a reason with the full stop that ends it, unless it ends with a question."""
    if text.endswith((".", "?")):
        return text
    return f"{text}."


def json_problem(error: ValueError | RecursionError, unit: str = "column") -> str:
    """Return why JSON parsing failed. unit: the word for a character's position in the text."""
    if not isinstance(error, JSONDecodeError):
        return str(error)
    problem = error.msg.removesuffix(" at")
    position = error.pos + 1
    return f"{problem} at {unit} {position}"


#: redis-py's text before the error of a command in a pipeline.
PIPELINE_COMMAND = re.compile(
    r"^Command # \d+ \(.*\) of pipeline caused error: ", re.DOTALL
)


def clause(error: BaseException) -> str:
    """Return an error's text for use within a sentence: without its final full stop, and without a
    pipeline's command, which redis-py puts before Redis' answer and which may contain posts.
    """
    text = PIPELINE_COMMAND.sub("", str(error))
    return text.removesuffix(".")


#: Characters that print nothing, or that change what other characters look like: control
#: characters and line ends, lone surrogates, characters of Unicode's category Cf (direction, tags,
#: zero width, soft hyphens) and its other characters with the property
#: Default_Ignorable_Code_Point (fillers, variation selectors).
UNPRINTABLE = (
    r"\x00-\x1f\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5"
    r"\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0"
    r"\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    r"\U000e0000-\U000e0fff"
)
#: Symbols and emoji, which U+FE0E, U+FE0F and U+200D display as text, in colour, and joined.
SYMBOLS = r"[\xa9\xae\u203c-\u3299\U0001f000-\U0001faff]"
#: Letters of Arabic, Syriac and the Indic scripts, whose words are spelled with U+200C and U+200D.
JOINED_LETTERS = r"[\u0620-\u06d3\u06fa-\u06fc\u0710-\u07ff\u08a0-\u08c9\u0904-\u0df3]"
#: Unprintable characters, except the ones that emoji and words are spelled with, at places where
#: they belong.
UNPRINTABLE_CHARACTERS = re.compile(
    rf"[{UNPRINTABLE}]"
    rf"(?<!{SYMBOLS}[\ufe0e\ufe0f])"
    rf"(?!(?<=[0-9#*]\ufe0f)\u20e3)"
    rf"(?!(?<={SYMBOLS}\u200d){SYMBOLS})"
    rf"(?!(?<={SYMBOLS}\ufe0f\u200d){SYMBOLS})"
    rf"(?!(?<={JOINED_LETTERS}[\u200c\u200d]){JOINED_LETTERS})"
)


@contextmanager
def explain_missing(purpose: str, extra: str) -> Iterator[None]:
    """Convert the failed import of an optional package inside the block into UserError. extra:
    what installs it.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        raise UserError(
            f"{purpose} requires the package {missing.name}: run `pip install "
            f"'feedmill[{extra}]'`."
        ) from None


def require_packages(purpose: str, extra: str, packages: Sequence[str]) -> None:
    """Raise UserError if a package is not installed. Imports none of them: torch takes seconds.

    extra: what installs them.
    """
    with explain_missing(purpose, extra):
        for package in packages:
            if find_spec(package) is None:
                raise ModuleNotFoundError(name=package)


@contextmanager
def explain_unwritable(path: Path) -> Iterator[None]:
    """Convert an OSError inside the block to UserError. path: what is written."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        where = printable(str(path))
        raise UserError(
            f"Cannot write {where}: {error.strerror or error}. Give another place."
        ) from None


def printable(text: str) -> str:
    """Escape unprintable characters in untrusted text, so that it is safe to print on one line of
    a terminal.
    """
    if text.isascii() and text.isprintable():  # most texts, and 20 times as fast
        return text
    return UNPRINTABLE_CHARACTERS.sub(_python_escape, text)


def _python_escape(match: re.Match[str]) -> str:
    """Return Python's escape of a character."""
    quoted = ascii(match[0])
    return quoted[1:-1]


def printable_lines(text: str) -> str:
    """Escape unprintable characters in each line of a text and keep its line breaks."""
    lines = text.split("\n")
    return "\n".join(map(printable, lines))


def json_line(value: object) -> str:
    """Return a value as one line of JSON, with unprintable characters escaped for safe display in
    a terminal.
    """
    text = json.dumps(value, ensure_ascii=False)
    return UNPRINTABLE_CHARACTERS.sub(_json_escape, text)


def _json_escape(match: re.Match[str]) -> str:
    """Return JSON's escape of a character: a pair of surrogates beyond U+FFFF."""
    data = match[0].encode("utf-16-be", "surrogatepass")
    units = data.hex(" ", 2).split()
    return "".join(f"\\u{unit}" for unit in units)


@contextmanager
def explain_refusals(model: str) -> Iterator[None]:
    """Convert the model's refusals and device failures inside the block into UserError."""
    try:
        yield
    except RequestRefused as refused:
        raise UserError(
            f"{model} cannot serve this request: {sentence(str(refused))} Correct the option, or "
            "use another model."
        ) from None
    except (DeviceFull, DeviceLost) as error:
        raise ModelError(
            f"The device failed: {clause(error)}. Try again; if the device is out of memory, "
            "lower FEEDMILL_TOKEN_BUDGET."
        ) from None
