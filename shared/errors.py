"""Every error that Feedmill raises on purpose. Depends on nothing of Feedmill's.

FeedmillError
 ├─ UserError            a mistake that a person can mend; shown as its sentence, never as a traceback
 │   ├─ SettingsError    a setting has a bad value; names the variable
 │   ├─ InputError       a file cannot be read as posts
 │   ├─ ModelError       the model's files are missing, damaged or of an unknown kind
 │   ├─ StackError       a process of the embedded stack could not be started
 │   ├─ RedisError       Redis does not answer, or refuses
 │   ├─ CredentialsError Reddit's credentials are missing, or wrong
 │   └─ QueueFull        no more messages may wait; whoever sends wants to be told, not to wait
 ├─ RequestRefused       a message's options are wrong; the message fails with this reason
 ├─ PostRefused          one post is bad; the others of its message go on
 ├─ DeviceFull           the device has no memory for this batch; a smaller one may fit
 ├─ DeviceLost           the device's context is broken; the worker ends without acknowledging
 ├─ ForwardHangs         a forward pass takes longer than it may; the worker ends without acknowledging
 └─ MessageFailed        every post of a message failed, or any did with strict=true
"""

import json
import re
from collections.abc import Sequence
from json import JSONDecodeError

from pydantic import ValidationError


class FeedmillError(Exception):
    """Base of all the errors below."""


class UserError(FeedmillError):
    """A mistake that a person can mend. Its text says what happened, what it means and what to do.

    A command shows it after `feedmill:` on standard error, and ends with status 2. `feedmill.results()` raises it.
    """


class SettingsError(UserError):
    """A setting has a value that it cannot have, or one that does not go with another.

    A command ends with status 2 before it does anything; a worker whose device or model does not go with the settings
    tells so in its log and ends with status 1.
    """


class InputError(UserError):
    """A file, or standard input, cannot be read as posts.

    Posts before the place where it broke off are sent. A bad record is no such error: it is named, and others go on.
    """


class ModelError(UserError):
    """The model cannot be loaded, or does not run on the device.

    A worker tells it in its log and ends with status 1, before it takes a message; other commands end with status 2.
    """


class StackError(UserError):
    """The embedded stack could not start one of its processes, or one of them ended.

    `feedmill up` and `feedmill demo` stop what they started, and end with status 2.
    """


class RedisError(UserError):
    """Redis does not answer, or does not let us in, or refuses.

    A command ends with status 2; what was counted as sent is in the queue. Workers and the Reddit daemon wait for Redis
    instead, and end only where no waiting helps.
    """


class CredentialsError(UserError):
    """Reddit's credentials are missing, or Reddit refuses them. Says where to get them.

    The daemon ends where they were never right; where they were, it waits until they are again.
    """


class QueueFull(UserError):  # noqa: N818 - named after what happened
    """No more messages may wait in the queue, and whoever sends wants to be told (`when_full`).

    What was sent before is in the queue; a command ends with status 2.
    """

    def __init__(self, limit: int, sent: int) -> None:
        super().__init__(
            f"The queue is full: {limit:,} messages wait, as many as FEEDMILL_QUEUE_LIMIT lets. {sent:,} posts were "
            "sent before. Send the rest later, by the same command, or let it wait with FEEDMILL_WHEN_FULL=wait."
        )


class RequestRefused(FeedmillError):  # noqa: N818 - named after what happened, like Celery's Retry and Reject
    """A message's options (labels, template, ...) are wrong.

    The message fails with it, and each of its posts is a dead letter with the reason. In a command the same words are
    those of a UserError.
    """


class PostRefused(FeedmillError):  # noqa: N818
    """One post is bad. It alone fails, its outcome and its dead letter have the reason; others of its message go on.

    field: the name of the field that is at fault, "" where it is no single one; reason: what is wrong with it.
    """

    def __init__(self, post_id: str | None, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}" if field else reason)
        self.post_id = post_id
        self.field = field
        self.reason = reason


class DeviceFull(FeedmillError):  # noqa: N818 - named after what happened
    """The device has not enough memory for what it was asked to compute.

    Nobody sees it but the log: the batch is halved and tried again, and later ones are smaller.
    """


class DeviceLost(FeedmillError):  # noqa: N818
    """The device computes nothing more in this process.

    The worker ends with status 1 without acknowledging: its messages go back to the queue.
    """


class ForwardHangs(FeedmillError):  # noqa: N818 - named after what happened
    """A forward pass has not ended within the setting `forward_timeout`.

    The same holds for other calls of a classifier, for the trial of a deployed model, and for an application's own task
    that has not ended within its time limit.
    The worker ends with status 1 without acknowledging: its messages go back to the queue.
    """


class MessageFailed(FeedmillError):  # noqa: N818
    """A message as a whole failed: all of its posts did, or any with `strict`.

    Its text names how many posts failed and the first few reasons. Whoever waits for the Celery result gets it; the
    posts that were good are stored all the same.
    """

    #: Reasons quoted in the text; a message may hold a thousand bad posts, an error is read by a person.
    QUOTED = 3

    @classmethod
    def of(cls, reasons: Sequence[str], posts: int) -> "MessageFailed":
        """The error of a message of `posts` posts of which one failed for each of `reasons`."""
        quoted = "; ".join(reasons[: cls.QUOTED])
        more = f"; and {len(reasons) - cls.QUOTED} more" if len(reasons) > cls.QUOTED else ""
        return cls(f"{len(reasons)} of {posts} posts failed: {quoted}{more}")


#: Characters of somebody else's value that an error quotes, and of a field's or an option's name in one.
QUOTED_CHARACTERS = 80
#: Names on the way to a nested field, at most; and characters of the reason why something was refused.
LONGEST_PATH, LONGEST_REASON = 5, 1000


def cut(text: str, limit: int = QUOTED_CHARACTERS) -> str:
    """Return the text, shortened to `limit` characters; "…" marks where it was cut."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def first_problem(error: ValidationError) -> tuple[str, str]:
    """Return the first problem of a pydantic error as (field, reason), both of bounded length, for a person to read.

    The field may contain names that the sender chose: unknown options, labels, keys of `extra`.
    """
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # pydantic marks what is wrong with a mapping's key by "[key]".
    field = ".".join(cut(str(part)) for part in problem["loc"][:LONGEST_PATH] if part != "[key]") or "the object"
    reason = problem["msg"].removeprefix("Value error, ")
    return field, cut(reason[0].lower() + reason[1:], LONGEST_REASON)


def json_problem(error: ValueError | RecursionError, unit: str = "column") -> str:
    """Why a text is no JSON, for a person to read. unit: what its characters are counted as."""
    if isinstance(error, JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at {unit} {error.pos + 1}"
    return str(error)


def clause(error: BaseException) -> str:
    """What an error says, to stand within a sentence: without the full stop that some end with."""
    return str(error).removesuffix(".")


#: Characters that move a terminal's cursor, change its state, end a line or turn the direction of what follows; and
#: halves of characters, which cannot be printed.
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Somebody else's words, safe to show in a terminal, on one line: control characters as their escapes."""
    return UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], text)


def printable_lines(text: str) -> str:
    """Return a text of several lines of ours, each as `printable` returns it."""
    return "\n".join(map(printable, text.split("\n")))


def json_line(value: object) -> str:
    """Return JSON on one line that is safe to show in a terminal: the same value, with escapes as JSON has them."""
    written = json.dumps(value, ensure_ascii=False)
    return UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", written)
