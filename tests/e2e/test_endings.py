"""Every way in which a message can end, at every place in a canvas: its callers learn the same as
on a stock worker.

A stock prefork worker and Feedmill's worker get the same messages. For each, the test compares
what remains: states and results of all tasks, calls of errbacks, keys of chords, and events. A
message that is refused before its task runs must end as one whose task fails on the stock worker,
which itself deletes such messages in silence. Differences on purpose are named with their way, and
in docs/celery.md. `make long` tries every way at every place.
"""

import json
import os
import pickle
import re
import sys
import zlib
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
from celery import Celery, chain, chord, group
from celery.canvas import Signature

from feedmill.shared.broker import queue_depth
from feedmill.shared.purge import purge
from feedmill.shared.settings import Settings
from tests.differential import END_EVENTS, RANDOM_ID, EventLog, listening, revoke
from tests.fakes import endings_tasks
from tests.fakes.differential_tasks import TOLD
from tests.support import (
    ROOT,
    RedisServer,
    _environment,
    application,
    executing,
    redis_servers,
    standing_in,
    wait_for_replies,
    wait_until,
)

# Celery itself causes these warnings: about a default that may change, and about a Redis command.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:task_allow_error_cb_on_chord_header:PendingDeprecationWarning"
    ),
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),
]

#: The queue in which messages wait until the test has changed them and passes them on.
HELD = "held"
TITLE = "The keeper saved two penalties in the final"
#: Seconds without an event after which a worker without messages counts as done.
QUIET_S = 5.0
#: Seconds until messages with an ETA are due. They must have arrived, and be revoked or purged,
#: before.
DUE_S = 30.0
#: The stamp, as (header, value), by which messages are revoked.
STAMP = ("tenant", "gone")

#: Changes a message in its list. Gets the message and its decoded body; returns another body, or
#: None to keep it.
Change = Callable[[dict[str, Any], Any], bytes | None]


# Changes.


def of_unknown_task(message: dict[str, Any], body: Any) -> None:
    (message["headers"] if isinstance(body, list) else body)["task"] = "no.such"


def with_header(name: str, value: object) -> Change:
    def change(message: dict[str, Any], _: Any) -> None:
        message["headers"][name] = value

    return change


def with_links_of(name: str, *links: object) -> Change:
    """Add links."""

    def change(_: dict[str, Any], body: Any) -> None:
        body[2][name] = [*(body[2].get(name) or ()), *links]

    return change


def nested(_: dict[str, Any], body: Any) -> bytes:
    """Nest an argument more deeply than any parser allows."""
    deep = "[" * 5000 + "]" * 5000
    return json.dumps(body).replace(f'"{TITLE}"', deep).encode()


def of_many_values(_: dict[str, Any], body: Any) -> None:
    body[1]["posts"][0]["extra"] = {
        "values": [0] * endings_tasks.LIMITS["feedmill.shared.encoding.MAX_SEPARATORS"]
    }


def too_large(_: dict[str, Any], body: Any) -> None:
    body[1]["posts"][0]["body"] = (
        "x" * endings_tasks.LIMITS["feedmill.shared.encoding.MAX_MESSAGE"]
    )


def pickled(message: dict[str, Any], body: Any) -> bytes:
    message["content-type"], message["content-encoding"] = (
        "application/x-python-serialize",
        "binary",
    )
    return pickle.dumps(body)


def in_other_compression(message: dict[str, Any], body: Any) -> bytes:
    message["headers"]["compression"] = "application/x-bz2"
    return json.dumps(body).encode()[::-1]


def garbled(_: dict[str, Any], __: Any) -> bytes:
    return b"\xff no JSON"


def bomb(message: dict[str, Any], body: Any) -> bytes:
    message["headers"]["compression"] = "application/x-gzip"
    too_large({}, body)
    return zlib.compress(json.dumps(body).encode())


def that_killed_workers(message: dict[str, Any], _: Any) -> None:
    """Let it look as if three workers had died while they prepared the message alone."""
    message["properties"]["delivery_info"] |= {
        "delivery_count": 5,
        "lapse_count": 5,
        "deaths": [-1, -1, -1],
    }


OWN_KEY = {
    "task": "differential.failed",
    "args": [],
    "kwargs": {},
    "options": {"queue": "feedmill:results"},
}


def _in(link: dict[str, Any]) -> dict[str, Any]:
    """Return a signature that has the link as its errback."""
    options = {"link_error": [link], "task_id": "inner"}
    return {
        "task": "differential.record",
        "args": [],
        "kwargs": {},
        "options": options,
        "subtask_type": None,
    }


# Ways.


@dataclass(frozen=True)
class Way:
    """A way in which a message ends. like: the way that ends alike on the stock worker; by
    default, the same.
    """

    task: str = "feedmill.classify"
    posts: tuple[dict[str, Any], ...] = ({"title": TITLE},)
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    change: Change | None = None
    like: str = ""
    protocol: int = 2
    #: What happens to the message before it starts.
    fate: Literal["", "expired", "revoked", "stamped", "purged"] = ""
    #: True for an ETA. The fate then overtakes the message while it waits.
    waits: bool = False
    #: True if nothing of the body can be read.
    unreadable: bool = False
    #: What differs from the stock worker on purpose (docs/celery.md).
    differs: Sequence[str] = ()
    #: True if the stock worker takes seconds for each.
    slow: bool = False


#: What the body tells: where it cannot be read, callers other than sender and chord learn nothing.
KNOWN_FROM_BODY = (
    "errbacks called here",
    "error",
    "ends of error",
    "after",
    "ends of after",
    "last",
    "ends of last",
)
#: What else only the body tells, by place. A chord's callback stands in the bodies of its header:
#: another message has to end later, and a group looks like a chord. Of a chain's members, only the
#: last one names the chord.
KNOWN_FROM_BODY_AT = {
    "in a group": ("keys of chords",),
    "alone in a chord": ("keys of chords", "body", "body error", "ends of body error"),
    "in a chain in a chord": (
        "keys of chords",
        "body",
        "body error",
        "ends of body error",
    ),
}
#: A post that fails.
BAD: tuple[dict[str, Any], ...] = ({},)


def refused(change: Change, protocol: int = 2) -> Way:
    like = "fails" if protocol == 2 else "fails, in protocol 1"
    return Way(change=change, like=like, protocol=protocol)


#: A post whose forward pass takes longer than its message's time limit.
SLOW: tuple[dict[str, Any], ...] = ({"title": f"{endings_tasks.SLOW}{TITLE}"},)

WAYS = {
    # With a body that runs.
    "succeeds": Way(),
    "succeeds in part": Way(posts=({"title": TITLE}, {})),
    "succeeds, due later": Way(waits=True),
    "fails": Way(posts=BAD),
    "fails, in protocol 1": Way(posts=BAD, protocol=1),
    "fails strictly": Way(posts=({"title": TITLE}, {}), kwargs={"strict": True}),
    "invalid option": Way(kwargs={"labels": 7}),
    "argument given twice": Way(kwargs={"version": 2, "bogus": 1}),
    "rejects": Way("differential.reject"),
    "rejects early": Way("differential.early_reject"),
    "requeues": Way("differential.requeue"),
    "ignores": Way("differential.ignore"),
    "retries": Way("differential.retry", options={"headers": {"wanted_retries": 1}}),
    "retries after a pause": Way(
        "differential.retry",
        options={"headers": {"wanted_retries": 1, "pause": 1}},
        slow=True,
    ),
    "exhausts its retries": Way("differential.autoretry", posts=BAD),
    "raises oddly": Way("differential.unlucky", slow=True),
    "returns oddly": Way("differential.unserializable"),
    # The error names the exit status of a child process on the stock worker, which has none here.
    "exits": Way("differential.exits", slow=True, differs=("errors",)),
    # Without one.
    "expired": Way(fate="expired"),
    "expired while it waits": Way(fate="expired", waits=True),
    "revoked": Way(fate="revoked"),
    "revoked while it waits": Way(fate="revoked", waits=True),
    "revoked by a stamp": Way(fate="stamped"),
    "purged": Way(like="fails", fate="purged"),
    "purged while it waits": Way(like="fails", fate="purged", waits=True),
    "exceeds its soft limit": Way(
        "differential.slow", SLOW, options={"soft_time_limit": 1}, slow=True
    ),
    # The stock worker fails such a message twice: for its limit, and for the loss of its child
    # process.
    "exceeds its hard limit": Way(
        "differential.slow",
        SLOW,
        options={"time_limit": 1},
        slow=True,
        differs=("events of it", "ends of it", "ends of error", "errbacks called here"),
    ),
    # Refused.
    "unknown task": refused(of_unknown_task),
    "unknown task, in protocol 1": refused(of_unknown_task, protocol=1),
    "header of a wrong type": refused(with_header("retries", "many")),
    "invalid ETA": refused(with_header("eta", "soon")),
    "link that is no signature": refused(with_links_of("callbacks", "link")),
    "link to our keys": refused(with_links_of("callbacks", OWN_KEY)),
    "errback to our keys": refused(with_links_of("errbacks", OWN_KEY)),
    "errback to our keys, in a link": refused(with_links_of("callbacks", _in(OWN_KEY))),
    "nested": refused(nested),
    "too many values": refused(of_many_values),
    "killed workers": refused(that_killed_workers),
    "pickled": Way(
        change=pickled, like="fails", unreadable=True, differs=KNOWN_FROM_BODY
    ),
    "in another compression": Way(
        change=in_other_compression,
        like="fails",
        unreadable=True,
        differs=KNOWN_FROM_BODY,
    ),
    "garbled": Way(
        change=garbled, like="fails", unreadable=True, differs=KNOWN_FROM_BODY
    ),
    "bomb": Way(change=bomb, like="fails", unreadable=True, differs=KNOWN_FROM_BODY),
    "too large": Way(
        change=too_large, like="fails", unreadable=True, differs=KNOWN_FROM_BODY
    ),
}


# Places.


class Cell:
    """A way and a place, with the signatures of its tasks."""

    def __init__(self, app: Celery, way: str, place: str) -> None:
        self.app, self.way, self.place = app, WAYS[way], place
        self.name = f"{way} / {place}"
        #: ETA of a message that waits, and expiry of one that expires.
        self.eta: datetime
        self.expires = datetime.now(UTC) - timedelta(minutes=1)

    def id(self, role: str) -> str:
        return f"{self.name}: {role}"

    def subject(self, **options: Any) -> Signature[Any]:
        """Return the message that ends this way."""
        posts = [
            {"id": self.id(f"post {number}"), **post}
            for number, post in enumerate(self.way.posts)
        ]
        made: Any = self.app.signature(
            self.way.task, kwargs={"posts": posts, **self.way.kwargs}
        )
        made.set(task_id=self.id("it"), queue=HELD, **self.way.options, **options)
        if self.way.waits:
            made.set(eta=self.eta)
        if self.way.fate == "expired":
            made.set(expires=self.expires)
        if self.way.fate == "stamped":
            header, value = STAMP
            made.stamp(visitor=None, append_stamps=False, **{header: value})
        made.link_error(self.task("failed", "error"))
        made.link_error(
            self.app.signature(
                "differential.failed_here", kwargs={"about": self.id("told")}
            )
        )
        return made  # type: ignore[no-any-return]

    def task(self, name: str, role: str) -> Signature[Any]:
        made: Any = self.app.signature(f"differential.{name}")
        return made.set(task_id=self.id(role))  # type: ignore[no-any-return]

    def other(self, role: str = "other") -> Signature[Any]:
        """Return a message that succeeds."""
        posts = [{"id": self.id(role), "title": TITLE}]
        made: Any = self.app.signature("feedmill.classify", kwargs={"posts": posts})
        return made.set(task_id=self.id(role), queue=HELD)  # type: ignore[no-any-return]

    def body(self) -> Signature[Any]:
        made: Any = self.task("record", "body")
        made.link_error(self.task("failed", "body error"))
        return made  # type: ignore[no-any-return]

    def group(self, *members: Any, role: str = "group") -> Any:
        return group(members, app=self.app, task_id=self.id(role))

    def chord(self, body: Any, *header: Any, role: str = "group") -> Any:
        return chord(self.group(*header, role=role), body, app=self.app)

    def send(self) -> None:
        PLACES[self.place](self).apply_async()


def alone(cell: Cell) -> Any:
    made = cell.subject()
    made.link(cell.task("record", "link"))
    return made


PLACES: dict[str, Callable[[Cell], Any]] = {
    "alone": alone,
    "with an ignored result": lambda cell: cell.subject(ignore_result=True),
    "first of a chain": lambda cell: chain(
        cell.subject(),
        cell.task("record", "after"),
        cell.task("record", "last"),
        app=cell.app,
    ),
    "in a group": lambda cell: cell.group(cell.other(), cell.subject()),
    "in a chord": lambda cell: cell.chord(cell.body(), cell.other(), cell.subject()),
    "alone in a chord": lambda cell: cell.chord(cell.body(), cell.subject()),
    "in a chain in a chord": lambda cell: cell.chord(
        cell.body(),
        cell.other(),
        chain(cell.subject(), cell.task("record", "after"), app=cell.app),
    ),
    "in a chord in a chord": lambda cell: cell.chord(
        cell.body(),
        cell.other(),
        cell.chord(
            cell.task("record", "inner"),
            cell.other("second"),
            cell.subject(),
            role="inner group",
        ),
    ),
    "in a chord with a group": lambda cell: cell.chord(
        group([cell.task("record", "one"), cell.task("record", "two")], app=cell.app),
        cell.other(),
        cell.subject(),
    ),
    "body of a chord": lambda cell: cell.chord(
        cell.subject(), cell.other(), cell.other("second")
    ),
}

#: Protocol 1 has no chains, and stores no fields of groups.
PLACES_OF_PROTOCOL_1 = ("alone", "in a group", "in a chord")
#: Environment variable with which every way is tried at every place (`make long`).
EVERYWHERE = "ENDINGS_EVERYWHERE"
#: Ways that are tried at every place in any case: one of each kind.
WAYS_EVERYWHERE = ("succeeds", "fails", "expired", "unknown task", "garbled")
#: Places of the others, and of those that take seconds.
FEW_PLACES = ("alone", "first of a chain", "in a chord", "body of a chord")
PLACES_OF_SLOW_WAYS = ("alone", "first of a chain", "in a chord")


def places(name: str) -> Sequence[str]:
    """Return the places at which a way is tried."""
    way = WAYS[name]
    if way.protocol == 1:
        return PLACES_OF_PROTOCOL_1
    if way.slow or way.waits:
        return PLACES_OF_SLOW_WAYS
    if name in WAYS_EVERYWHERE or EVERYWHERE in os.environ:
        return tuple(PLACES)
    return FEW_PLACES


CELLS = [(name, place) for name in WAYS for place in places(name)]


# Two workers.


class Side:
    """A worker, and what its messages leave behind."""

    def __init__(self, redis: RedisServer, ways: list[str]) -> None:
        self.redis: Any = redis.client
        self.apps = {protocol: application(redis) for protocol in (1, 2)}
        self.settings = Settings(redis_url=redis.url, queue=HELD)
        for protocol, app in self.apps.items():
            app.conf.task_protocol = protocol
            # Do not subscribe to results, because this process never waits for one.
            app.backend.result_consumer.consume_from = lambda _: None  # type: ignore[attr-defined]  # not in the stub
        self.cells = {
            cell.name: cell
            for cell in (
                Cell(self.apps[WAYS[way].protocol], way, place)
                for way, place in CELLS
                if way in ways
            )
        }
        self.log: EventLog
        #: Ids of the groups to which messages of each cell belong.
        self.groups: defaultdict[str, set[str]] = defaultdict(set)
        #: Messages of the cell that wait until its subject has ended.
        self._later: list[tuple[Cell, str]] = []

    def run(self) -> None:
        """Send all messages, and wait until the worker is done."""
        cells = list(self.cells.values())
        wait_for_replies(self.apps[2])
        with listening(self.apps[2], []) as self.log:
            revoke(
                self.apps[2],
                [
                    cell.id("it")
                    for cell in cells
                    if cell.way.fate == "revoked" and not cell.way.waits
                ],
            )
            header, value = STAMP
            stamps: Any = {header: [value]}
            self.apps[2].control.revoke_by_stamped_headers(
                stamps, reply=True, limit=1, timeout=60
            )
            self._send_waiting([cell for cell in cells if cell.way.waits])
            for cell in cells:
                if not cell.way.waits:
                    cell.send()
            wait_until(self._is_done, "the worker is done", 300)

    def _send_waiting(self, cells: Sequence[Cell]) -> None:
        """Send messages with an ETA, and revoke or purge some of them once they have arrived."""
        eta = datetime.now(UTC) + timedelta(seconds=DUE_S)
        for cell in cells:
            cell.eta = eta
            cell.expires = eta - timedelta(seconds=1)
            cell.send()
        wait_until(
            lambda: self._have_arrived(cells), "the worker has the messages that wait"
        )
        revoke(
            self.apps[2],
            [cell.id("it") for cell in cells if cell.way.fate == "revoked"],
        )
        purge(
            self.redis,
            self.settings,
            [cell.id("post 0") for cell in cells if cell.way.fate == "purged"],
        )
        if datetime.now(UTC) > eta:
            raise RuntimeError(
                "this machine is too slow: messages may have started before their fate. Try again."
            )

    def _have_arrived(self, cells: Sequence[Cell]) -> bool:
        self._pass_on_all()
        return all(self.log.received(cell.id("it")) for cell in cells)

    def _is_done(self) -> bool:
        self._pass_on_all()
        later = self._later
        self._later = []
        for cell, element in later:
            if self.meta(cell.id("it")):
                self.redis.lpush("feedmill", element)
            else:
                self._later.append((cell, element))
        is_busy = (
            self._later
            or sum(queue_depth(self.redis, "feedmill"))
            or self.redis.hlen("unacked")
        )
        return not is_busy and self.log.is_quiet(QUIET_S)

    def _pass_on_all(self) -> None:
        while element := self.redis.rpop(HELD):
            self._pass_on(element)

    def _pass_on(self, element: str) -> None:
        """Change a held message as its cell says, and pass it on to the worker."""
        message = json.loads(element)
        body = json.loads(b64decode(message["body"]))
        task_id = message["properties"]["correlation_id"]
        cell = self.cells[task_id.rpartition(": ")[0]]
        for fields in (message["headers"], body):
            group_id = isinstance(fields, dict) and (
                fields.get("group") or fields.get("taskset")
            )
            if group_id:
                self.groups[cell.name].add(group_id)
        if task_id != cell.id("it"):
            # Its chord knows of an unreadable message only if another one ends later.
            if cell.way.unreadable and cell.place != "body of a chord":
                self._later.append((cell, element))
                return
        elif cell.way.change:
            written = cell.way.change(message, body)
            message["body"] = b64encode(
                json.dumps(body).encode() if written is None else written
            ).decode()
            element = json.dumps(message)
        elif cell.way.fate == "purged" and not cell.way.waits:
            self.redis.rpush(HELD, element)
            purge(self.redis, self.settings, [cell.id("post 0")])
            element = self.redis.rpop(HELD)
        self.redis.lpush("feedmill", element)

    def meta(self, task_id: str) -> Any:
        stored = self.redis.get(f"celery-task-meta-{task_id}")
        return stored and json.loads(stored)

    def remains(self, cell: Cell, exact: bool) -> dict[str, Any]:
        """Return what the cell's messages left behind. exact: with the errors, and not only that
        there is one.
        """
        remains: dict[str, Any] = {}
        prefix = "celery-task-meta-"
        for key in self.redis.scan_iter(
            f"{prefix}{glob_escape(cell.name)}: *", count=1000
        ):
            task_id = str(key).removeprefix(prefix)
            _, _, role = task_id.rpartition(": ")
            remains[role] = shape(cell, role, self.meta(task_id), exact)
        told = [
            json.loads(words)
            for words in self.redis.lrange(f"{TOLD}{cell.id('told')}", 0, -1)
        ]
        remains["errbacks called here"] = [
            words if exact else words[:1] for words in told
        ]
        remains["keys of chords"] = self._chord_keys(cell)
        if exact:
            remains["arrivals of it"] = len(self.log.arrivals(cell.id("it")))
            remains["events of it"] = [
                event["type"] for event in self.log.others(cell.id("it"))
            ]
        for role in (
            "it",
            "error",
            "body error",
            "after",
            "last",
            "body",
            "inner",
            "one",
            "two",
        ):
            remains[f"ends of {role}"] = self.ends(cell.id(role))
        return remains

    def _chord_keys(self, cell: Cell) -> list[str]:
        """Return the suffixes of the keys of the cell's chords."""
        suffixes = []
        for key in self.redis.scan_iter("celery-taskset-meta-*", count=1000):
            group_id, _, suffix = (
                str(key).removeprefix("celery-taskset-meta-").rpartition(".")
            )
            # Suffix c is a lock, which expires after some seconds.
            if group_id in self.groups[cell.name] and suffix != "c":
                suffixes.append(suffix)
        return sorted(suffixes)

    def ends(self, task_id: str) -> list[str]:
        """Return the events of a task's ends."""
        return [
            event["type"]
            for event in self.log.events.get(task_id, ())
            if event["type"] in END_EVENTS
        ]


def glob_escape(text: str) -> str:
    return re.sub(r"([\[\]*?\\])", r"\\\1", text)


#: The text of a chord's error, without the error of its header.
DEPENDENCY = re.compile(r"(Dependency .*?) raised .*", re.DOTALL)
#: Roles whose parent is the message that happens to end last, and for a failed body, whose
#: children are that message's.
BODIES = ("body", "body error", "inner", "one", "two")


def shape(
    cell: Cell, role: str, meta: Mapping[str, Any], exact: bool
) -> dict[str, Any]:
    """Return what matters of a stored result.

    Values are compared by another test (tests/differential.py).
    """
    result = meta["result"]
    if meta["status"] == "SUCCESS":
        result = "<value>"
    elif isinstance(result, dict) and not exact:
        is_chord = result["exc_type"] == "ChordError"
        result = (
            DEPENDENCY.sub(r"\1", result["exc_message"][0]) if is_chord else "<error>"
        )
    shaped = {
        name: meta.get(name) for name in ("status", "group_id", "parent_id", "children")
    }
    shaped["result"] = result
    is_body = role in BODIES or (role == "it" and cell.place == "body of a chord")
    if is_body or (role == "it" and not exact):
        del shaped["parent_id"], shaped["children"]
    return shaped


@contextmanager
def stock_worker(folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    program = str(Path(sys.executable).parent / "celery")
    command = [
        program,
        "-A",
        "tests.fakes.stock_app",
        "worker",
        "-P",
        "prefork",
        "-c",
        "3",
        "--loglevel",
        "INFO",
    ]
    with executing(command, ROOT, environment, folder / "stock.log") as worker:
        wait_until(lambda: worker.says(" ready."), "the stock worker is ready")
        yield


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Side, Side]]:
    """The stock worker's side and ours, both done."""
    server = next(iter(redis_servers().values()))
    folder = tmp_path_factory.mktemp("endings")
    given = {
        "FEEDMILL_INCLUDE": endings_tasks.__name__,
        "FEEDMILL_LABELS": "good, bad",
    }
    servers = []
    for name in ("stock", "ours"):
        (folder / name).mkdir()
        servers.append(RedisServer(server, folder / name))
    theirs, ours = servers
    stock = Side(theirs, [way for way in WAYS if not WAYS[way].like])
    feedmill = Side(ours, list(WAYS))
    stock_environment = _environment(folder, FEEDMILL_REDIS_URL=theirs.url, **given) | {
        endings_tasks.STOCK: "1"
    }
    try:
        with (
            stock_worker(folder, stock_environment),
            standing_in(ours, folder, "ours", **given) as worker,
            ThreadPoolExecutor(2) as threads,
        ):
            wait_until(lambda: worker.says(" ready."), "Feedmill's worker is ready")
            for running in [threads.submit(stock.run), threads.submit(feedmill.run)]:
                running.result()
            assert worker.lives()
        yield stock, feedmill
    finally:
        for redis in servers:
            redis.stop()


@pytest.mark.parametrize(
    ("name", "place"), CELLS, ids=[f"{name} / {place}" for name, place in CELLS]
)
def test_callers_learn_the_same_as_on_a_stock_worker(
    sides: tuple[Side, Side], name: str, place: str
) -> None:
    stock, ours = sides
    way = WAYS[name]
    like = way.like or name
    exact = like == name and "errors" not in way.differs
    expected = stock.remains(stock.cells[f"{like} / {place}"], exact)
    remains = ours.remains(ours.cells[f"{name} / {place}"], exact)
    differences = [*way.differs]
    if way.unreadable:
        differences += KNOWN_FROM_BODY_AT.get(place, ())
    for difference in differences:
        expected.pop(difference, None)
        remains.pop(difference, None)
    assert plain(remains, name, like) == plain(expected, like, like)


@pytest.mark.parametrize("place", PLACES_OF_SLOW_WAYS)
def test_a_hard_time_limit_fails_a_message_once(
    sides: tuple[Side, Side], place: str
) -> None:
    _, ours = sides
    cell = ours.cells[f"exceeds its hard limit / {place}"]
    assert ours.ends(cell.id("it")) == ["task-failed"]
    assert ours.ends(cell.id("error")) == ["task-succeeded"]


def plain(remains: dict[str, Any], name: str, like: str) -> Any:
    """Return a comparable copy: with the ids of the other way, and without random ids."""
    text = json.dumps(remains).replace(f"{name} / ", f"{like} / ")
    return json.loads(RANDOM_ID.sub("<id>", text))
