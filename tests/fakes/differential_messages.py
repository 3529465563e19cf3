"""Random messages for the differential test (tests/differential.py).

They are drawn from a seed as plain data, so that both workers get the same messages with the same
ids. No outcome depends on timing: messages are revoked before they can start, expired messages
expire before they arrive or before their ETA, and time limits are never reached. Other tests cover
timeouts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, Literal

from celery import Celery, chain, chord, group
from celery.canvas import Signature

from feedmill.shared.broker import CLASSIFY_TASK, SENT_AT
from tests.fakes.models import WORDS

#: Tasks based on ClassifyTask, and the weights with which they are drawn.
TASKS = {
    CLASSIFY_TASK: 40,
    "differential.early": 8,
    "differential.unacked": 8,
    "differential.autoretry": 8,
    "differential.retry": 8,
    "differential.reject": 4,
    "differential.early_reject": 3,
    "differential.requeue": 5,
    "differential.ignore": 3,
    "differential.unlucky": 3,
    "differential.unserializable": 2,
    "differential.own_state": 2,
    "differential.request": 8,
    "differential.sends": 4,
    "differential.handlers": 6,
}
#: Fates of a message before it starts; "" means that it starts. The last two occur while it waits
#: for its ETA.
Fate = Literal[
    "", "expired", "revoked", "revoked by stamp", "expired waiting", "revoked waiting"
]
FATES: dict[Fate, int] = {
    "": 180,
    "expired": 5,
    "revoked": 5,
    "revoked by stamp": 4,
    "expired waiting": 3,
    "revoked waiting": 3,
}
WAITING: tuple[Fate, ...] = ("expired waiting", "revoked waiting")
#: The stamp, as (header, value), by which messages are revoked.
REVOKED_STAMP = ("tenant", "gone")
LABELS = (
    ["sports", "food"],
    "travel, music, books",
    {"money": "savings and interest", "health": ["medicine"], "rest": "anything else"},
    ["one"],
    {"sport": "sports", "bread": "baking"},
)
REFUSED: tuple[dict[str, Any], ...] = (
    {"labels": ""},
    {"labels": ["twice", "twice"]},
    {"labels": 7},
    {"labels": {"two": ["descriptions", "of one label"]}},
    {"template": "without a place"},
    {"top_k": 0},
    {"multi_label": "perhaps"},
    {"version": 2},
    {"bogus": 1},
)
BAD_POSTS: tuple[object, ...] = (
    {"id": "no-text"},
    {"id": "blank", "title": " ", "body": "[removed]"},
    {"id": "x" * 129, "title": "Its id is too long"},
    {"id": "", "title": "Its id is empty"},
    {"title": "It has no id"},
    {"id": "odd-title", "title": ["a list"]},
    {"id": "odd-score", "title": "A score", "score": "high"},
    {"id": "long-title", "title": "word " * 900},
    {"id": "large-extra", "title": "Extra", "extra": {"blob": "x" * 5000}},
    {"id": "half", "title": "\ud800", "extra": {"half": "\ud800"}},
    ["no", "object"],
    "text",
    None,
    7,
)


@dataclass(frozen=True, slots=True)
class Call:
    """One task to send. link, errbacks: calls that Celery makes when the task succeeds and when it
    fails.
    """

    id: str
    task: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    stamps: dict[str, str] = field(default_factory=dict)
    link: tuple["Call", ...] = ()
    errbacks: tuple["Call", ...] = ()
    fate: Fate = ""

    def signature(self, app: Celery, eta: datetime) -> Signature[Any]:
        """Return the Celery signature. eta: the ETA of messages that expire or are revoked while
        they wait.
        """
        options: dict[str, Any] = dict(self.options)
        if self.fate in WAITING:
            options.pop("countdown", None)
            options["eta"] = eta.isoformat()
        if self.fate == "expired":
            options["expires"] = (datetime.now(UTC) - timedelta(minutes=1)).isoformat()
        if self.fate == "expired waiting":
            options["expires"] = (eta - timedelta(seconds=1)).isoformat()
        made: Signature[Any] = app.signature(
            self.task, args=self.args, kwargs=self.kwargs, app=app
        )
        made = made.set(task_id=self.id, **options)
        for callback in self.link:
            made.link(callback.signature(app, eta))
        for errback in self.errbacks:
            made.link_error(errback.signature(app, eta))
        if self.stamps:
            made.stamp(visitor=None, append_stamps=False, **self.stamps)
        return made


@dataclass(frozen=True, slots=True)
class Sending:
    """Tasks that are sent together.

    In a chord, `calls` is the header, and `body` runs after it.
    """

    id: str
    kind: Literal["single", "chain", "group", "chord"]
    calls: tuple[Call, ...]
    body: Call | None = None
    #: Celery's message protocol. 1 is what gocelery, celery.node and `task_protocol=1` send.
    protocol: Literal[1, 2] = 2

    def waits(self) -> bool:
        return any(call.fate in WAITING for call in self.calls)

    def send(self, app: Celery, eta: datetime) -> None:
        made = [call.signature(app, eta) for call in self.calls]
        if self.kind == "single":
            made[0].apply_async()
        elif self.kind == "chain":
            chain(*made, app=app).apply_async()
        elif self.body:
            header = group(made, app=app, task_id=self.id)
            chord(header, self.body.signature(app, eta), app=app).apply_async()
        else:
            group(made, app=app, task_id=self.id).apply_async()


class Draw:
    """A seeded random source of sendings with `messages` messages in total, of 1 to `largest`
    posts each.
    """

    def __init__(self, seed: int, messages: int, largest: int) -> None:
        self._random = Random(seed)
        self._messages = messages
        self._largest = largest
        self._ids = 0
        self._sent_posts: list[dict[str, Any]] = []
        #: Number of posts in the messages so far.
        self.posts = 0

    def sendings(self) -> Iterator[Sending]:
        left = self._messages
        number = 0
        while left:
            number += 1
            drawn = self._sending(f"s{number}", left)
            if self._chance(0.2):
                drawn = replace(drawn, protocol=1)
            left -= sum(is_message(call) for call in drawn.calls)
            yield drawn

    def _sending(self, name: str, left: int) -> Sending:
        kind = self._random.choices(
            ("single", "chain", "group", "chord"), (70, 14, 6, 10)
        )[0]
        several = min(left, self._random.randint(2, 5))
        if kind == "chain":
            return Sending(name, "chain", self._chain(left))
        if kind == "group":
            return Sending(
                name, "group", tuple(self._message() for _ in range(several))
            )
        if kind == "chord":
            body = self._callback(f"{name}-body")
            if self._chance(0.5):
                body = replace(
                    body, errbacks=(Call(f"{name}-body-error", "differential.failed"),)
                )
            return Sending(
                name, "chord", tuple(self._message() for _ in range(several)), body
            )
        return Sending(name, "single", (self._message(),))

    def _chain(self, left: int) -> tuple[Call, ...]:
        first = self._message()
        after = self._callback(f"{first.id}-after")
        match self._random.randrange(4):
            case 0:  # the previous task supplies the posts
                first = replace(
                    first,
                    args=(),
                    kwargs={n: v for n, v in first.kwargs.items() if n != "posts"},
                    fate="",
                )
                before = Call(
                    f"{first.id}-before",
                    "differential.posts",
                    (self._random.randrange(500), 3),
                )
                return before, first, after
            case 1 if (
                left > 1
            ):  # the second message gets outcomes as posts, which have no text
                second = Call(
                    f"{first.id}-then",
                    CLASSIFY_TASK,
                    (),
                    {"labels": self._random.choice(LABELS)},
                )
                return first, second, after
            case 2:
                return first, after, self._callback(f"{first.id}-last")
        return first, after

    def _callback(self, name: str) -> Call:
        return Call(
            name, "differential.breaks" if self._chance(0.05) else "differential.record"
        )

    def _message(self) -> Call:
        random = self._random
        self._ids += 1
        name = f"m{self._ids}"
        task = random.choices(list(TASKS), list(TASKS.values()))[0]
        fate = random.choices(list(FATES), list(FATES.values()))[0]
        kwargs = self._arguments()
        args: tuple[Any, ...] = ()
        if self._chance(0.15) and "labels" in kwargs:  # as positional arguments
            args = (kwargs.pop("posts"), kwargs.pop("labels"))
        elif self._chance(0.1):
            args = (kwargs.pop("posts"),)
        links, errbacks = self._callbacks(name)
        stamps = {}
        if self._chance(0.1):
            stamps = {"tenant": random.choice("abc"), "tier": "gold"}
        if fate == "revoked by stamp":
            stamps = dict([REVOKED_STAMP])
        return Call(
            name, task, args, kwargs, self._options(task), stamps, links, errbacks, fate
        )

    def _callbacks(self, name: str) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
        links = tuple(
            self._callback(f"{name}-link{n}")
            for n in range(self._random.choice((0, 0, 0, 1, 2)))
        )
        errbacks: list[Call] = []
        if self._chance(0.3):
            errbacks.append(Call(f"{name}-error", "differential.failed"))
        if self._chance(0.2):
            errbacks.append(
                Call(
                    f"{name}-error-here",
                    "differential.failed_here",
                    kwargs={"about": f"{name}-error"},
                )
            )
        return links, tuple(errbacks)

    def _options(self, task: str) -> dict[str, Any]:
        random = self._random
        options: dict[str, Any] = {}
        headers: dict[str, Any] = {}
        if self._chance(0.3):
            options["ignore_result"] = True
        if self._chance(0.3):
            options["priority"] = random.randrange(10)
        if self._chance(0.15):
            options |= random.choice(
                ({"time_limit": 3000}, {"soft_time_limit": 2000, "time_limit": 3000})
            )
        if self._chance(0.06):
            options["countdown"] = random.choice((0, 0.5, 1, 2))
        if self._chance(0.1):
            options["expires"] = 7200
        if self._chance(0.05):
            options["shadow"] = "in-disguise"
        if self._chance(0.1):
            options["compression"] = random.choice(("gzip", "application/x-gzip"))
        if self._chance(0.5):
            headers[SENT_AT] = 1_700_000_000.5
        if self._chance(0.2):
            headers["campaign"] = {"name": random.choice(WORDS), "tries": [1, None]}
        if task == "differential.retry":
            headers |= {
                "wanted_retries": random.choice((0, 1, 1, 2, 3, 4)),
                "pause": random.choice((0, 0, 0, 0.3)),
            }
        return options | ({"headers": headers} if headers else {})

    def _arguments(self) -> dict[str, Any]:
        random = self._random
        kwargs: dict[str, Any] = {"posts": self._posts()}
        if self._chance(0.03):
            kwargs["posts"] = random.choice(
                ([], None, "posts", {"id": "1", "title": "no list"})
            )
        if self._chance(0.3):
            kwargs["labels"] = random.choice(LABELS)
        if self._chance(0.15):
            kwargs["template"] = random.choice(("This text is about {}.", "{}?"))
        if self._chance(0.15):
            kwargs["multi_label"] = random.choice((True, "true", False))
        if self._chance(0.2):
            kwargs["strict"] = True
        if self._chance(0.2):
            kwargs["top_k"] = random.choice((1, 2, "3", 100))
        if self._chance(0.1):
            kwargs["version"] = 1
        if self._chance(0.05):
            kwargs |= random.choice(REFUSED)
        return kwargs

    def _posts(self) -> list[object]:
        """Draw mostly valid posts.

        A few messages have only invalid ones; some posts repeat earlier ones.
        """
        random = self._random
        count = random.randint(1, self._largest)
        self.posts += count
        if self._chance(0.06):
            return [random.choice(BAD_POSTS) for _ in range(count)]
        bad = random.choice((0, 0, 0, 0.02, 0.2))
        return [
            random.choice(BAD_POSTS) if self._chance(bad) else self._post()
            for _ in range(count)
        ]

    def _post(self) -> dict[str, Any]:
        random = self._random
        if self._sent_posts and self._chance(0.1):
            return random.choice(
                self._sent_posts[-1000:] if self._chance(0.5) else self._sent_posts
            )
        words = " ".join(random.choices(WORDS, k=random.choice((2, 4, 8, 12, 30))))
        post: dict[str, Any] = {
            "id": f"p{self.posts}-{len(self._sent_posts)}",
            "title": words,
        }
        if self._chance(0.2):
            post["body"] = " ".join(random.choices(WORDS, k=random.choice((3, 20, 80))))
        if self._chance(0.1):
            post |= {
                "topic": "sports",
                "score": random.choice((3, "4")),
                "extra": {"row": len(words)},
            }
        self._sent_posts.append(post)
        return post

    def _chance(self, share: float) -> bool:
        return self._random.random() < share


def is_message(call: Call) -> bool:
    """Return whether the call classifies posts, rather than being a callback."""
    return call.task in TASKS


def everything(sendings: Sequence[Sending]) -> Iterator[Call]:
    """Yield every call of the sendings, including callbacks."""
    for sending in sendings:
        for call in (*sending.calls, *([sending.body] if sending.body else [])):
            yield from (call, *call.link, *call.errbacks)
