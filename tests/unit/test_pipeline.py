"""The pipeline on a stand-in classifier and store: order, isolation, retries and failing
threads.
"""

import json
import math
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import NoPermissionError, ResponseError

from feedmill.shared.errors import (
    DeviceFull,
    DeviceLost,
    ForwardTimeout,
    MessageFailed,
    RequestRefused,
)
from feedmill.shared.messages import (
    Classification,
    ClassifyOptions,
    DeadLetter,
    PostError,
)
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers import LabelSet, Row, Scores
from feedmill.workers.models.device import Device
from feedmill.workers.models.shapes import EXACT, Shapes
from feedmill.workers.models.tokenizer import Tokens
from feedmill.workers.models.weights import Weights
from feedmill.workers.pipeline import context
from feedmill.workers.pipeline.message import Message, State
from feedmill.workers.pipeline.offline import NullStore, pipeline_error
from feedmill.workers.pipeline.pipeline import Pipeline
from feedmill.workers.pipeline.preparation import POSTS_TOGETHER, POSTS_TOGETHER_AHEAD
from tests.support import wait_until

LABELS = LabelSet(("good", "bad"), False, "recipe")


class Done:
    """Outputs of a finished forward pass."""

    seconds = 0.001

    def __init__(self, values: list[float]) -> None:
        self.values = values


class StandIn:
    """A stand-in classifier: one row per post, one token per word.

    Posts that contain "poison" fail a forward pass.
    """

    kind = "stand-in"
    packed = False
    weights = Weights("stand-in", None, None, "00")  # type: ignore[arg-type]
    #: A device other than a CPU has one lane.
    device = Device(torch.device("meta"), torch.float32, "for a test")

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        #: Rows that fit in the device's memory.
        self.memory = 10_000

    def label_set(self, options: ClassifyOptions) -> LabelSet:
        if options.labels == {"unservable": ("unservable",)}:
            raise RequestRefused("labels: this model cannot serve them")
        if options.labels == {"unreadable": ("unreadable",)}:
            raise RuntimeError("a bug")
        return LABELS

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        if any("explode" in text for text in texts):
            raise RuntimeError("the tokenizer is broken")
        return [
            [Row(Tokens(list(range(len(text.split())))), label_set)] for text in texts
        ]

    def forward(self, rows: Sequence[Row]) -> Any:
        self.gate.wait()
        if len(rows) > self.memory:
            raise DeviceFull("out of memory")
        self.batches.append(len(rows))
        if any("lose the device" in row.owner.post.text for row in rows):
            raise DeviceLost("the device is gone")
        if any("poison" in row.owner.post.text for row in rows):
            raise ValueError("cannot read this")
        return Done(
            [
                float("nan") if "overflow" in row.owner.post.text else 0.75
                for row in rows
            ]
        )

    def finish(self, rows: Sequence[Row], outputs: Any) -> list[tuple[Row, Scores]]:
        if any("kill the writer" in row.owner.post.text for row in rows):
            raise AssertionError("a bug")
        return [
            (row, {"good": output, "bad": 0.25})
            for row, output in zip(rows, outputs.values, strict=True)
        ]


class Store(NullStore):
    """A store in memory. Raises a connection error `refusals` times."""

    def __init__(self) -> None:
        self.written: list[Result] = []
        self.dead: list[DeadLetter] = []
        self.refusals = 0

    def find(self, wanted: Sequence[tuple[str, str]]) -> list[Classification | None]:
        if self.refusals:
            raise ConnectionFault("Redis is away")
        there = {
            (result.post.id, result.classification.fingerprint): result.classification
            for result in self.written
        }
        return [there.get(each) for each in wanted]

    def write(self, results: Sequence[Result], dead: Sequence[DeadLetter] = ()) -> int:
        if self.refusals:
            self.refusals -= 1
            raise ConnectionFault("Redis is away")
        self.written += results
        self.dead += dead
        return len(results)


class Calls(context.Owner):
    """Record the pipeline's calls in an `Owner`."""

    def __init__(self, owner: "Owner") -> None:
        self._owner = owner

    def admit(self, message: Message) -> bool:
        return message not in self._owner.unwanted

    def started(self, message: Message) -> None:
        self._owner.started.append(message)

    def computing(self, message: Message, posts: Sequence[int]) -> None:
        self._owner.computed.append((message, tuple(posts)))

    def finished(self, message: Message) -> None:
        self._owner.finishing(message)

    def recorded(self, message: Message) -> None:
        self._owner.finished.append(message)

    def failed(self) -> None:
        self._owner.failures += 1


class Owner:
    """A pipeline and the calls that it made."""

    def __init__(
        self,
        classifier: StandIn | None = None,
        store: ResultsStore | None = None,
        **settings: Any,
    ) -> None:
        self.classifier, self.store = classifier or StandIn(), Store()
        self.started: list[Message] = []
        self.finished: list[Message] = []
        #: Posts of isolated messages that entered a forward pass; none at its end.
        self.computed: list[tuple[Message, tuple[int, ...]]] = []
        self.failures = 0
        self.unwanted: list[Message] = []
        #: Called when a message has its outcomes, before its dead letters are stored.
        self.finishing: Callable[[Message], None] = lambda _: None
        self.pipeline = Pipeline(
            self.classifier,
            store or self.store,
            Settings(**settings),
            2048,
            "worker",
            Calls(self),
        )
        self.pipeline.start()

    def waiting(self) -> int:
        """Return the number of rows in the window."""
        return len(self.pipeline.backlog)

    def send(self, *titles: str, **options: Any) -> Message:
        posts = [
            {"id": str(number), "title": title} for number, title in enumerate(titles)
        ]
        message = Message({"posts": posts, **options}, None)
        self.pipeline.submit(message)
        return message

    def results(self, *titles: str, **options: Any) -> list[dict[str, Any]]:
        message = self.send(*titles, **options)
        wait_until(lambda: message in self.finished, "the message is finished")
        return message.result()


@pytest.fixture
def owner() -> Any:
    made = Owner()
    yield made
    made.classifier.gate.set()
    made.pipeline.stop()


class SlowStore(Store):
    """A store that records the sizes of its calls, and answers while its gates are open."""

    def __init__(self) -> None:
        super().__init__()
        self.finds: list[int] = []
        self.writes: list[int] = []
        self.finding, self.writing = threading.Event(), threading.Event()

    def find(self, wanted: Sequence[tuple[str, str]]) -> list[Classification | None]:
        self.finds.append(len(wanted))
        self.finding.wait()
        return super().find(wanted)

    def write(self, results: Sequence[Result], dead: Sequence[DeadLetter] = ()) -> int:
        self.writes.append(len(results) + len(dead))
        self.writing.wait()
        return super().write(results, dead)


@pytest.fixture
def slow() -> Any:
    """A pipeline with a slow store and micro-batches of one row."""
    made = Owner(store=SlowStore(), batch_rows=1)
    made.store = made.pipeline.recording._context.store  # type: ignore[assignment]
    yield made
    made.store.finding.set()  # type: ignore[attr-defined]
    made.store.writing.set()  # type: ignore[attr-defined]
    made.pipeline.stop()


def test_looks_up_waiting_messages_together(slow: Any) -> None:
    slow.store.writing.set()
    slow.send("the first")
    wait_until(lambda: slow.store.finds == [1], "the tokenizer waits for Redis")
    messages = [slow.send("short", "") for _ in range(6)]
    refused = slow.send("x", labels=["unservable"])
    broken = slow.send("x", labels=["unreadable"])
    large = slow.send(*map(str, range(65)))
    slow.store.finding.set()
    wait_until(lambda: len(slow.finished) == 10, "all are finished")
    assert slow.store.finds[-1] == 65
    assert [
        [type(outcome) for outcome in message.outcomes] for message in messages
    ] == [[Classification, PostError]] * 6
    assert "cannot serve" in str(refused.refused)
    assert "a bug" in str(broken.refused)
    assert large.missing_outcomes == 0


@pytest.mark.parametrize(
    ("device_waits", "posts"), [(True, POSTS_TOGETHER), (False, POSTS_TOGETHER_AHEAD)]
)
def test_prepares_more_together_while_the_device_has_rows(
    slow: Any, device_waits: bool, posts: int
) -> None:
    """A device without rows gets some soon; otherwise fewer look-ups cost less."""
    slow.store.writing.set()
    if not device_waits:
        slow.classifier.gate.clear()
        slow.store.finding.set()
        slow.send("computed", "waits")
        wait_until(lambda: slow.waiting() == 1, "a row waits for the device")
        slow.store.finding.clear()
    first = slow.send("")  # has no row
    wait_until(lambda: 0 in slow.store.finds, "a look-up waits")
    messages = [slow.send(*["short"] * 16) for _ in range(40)]
    slow.store.finding.set()
    wait_until(lambda: slow.store.finds[-1] > 0, "the messages are looked up")
    slow.classifier.gate.set()
    wait_until(
        lambda: {*messages, first} <= {*slow.finished}, "all are finished", seconds=60
    )
    _, *finds = slow.store.finds[slow.store.finds.index(0) :]
    assert finds[0] == posts
    assert sum(finds) == 16 * len(messages)


def test_stores_waiting_micro_batches_together(slow: Any) -> None:
    slow.store.finding.set()
    slow.send("the first")
    wait_until(lambda: slow.store.writes == [1], "the writer waits for Redis")
    for _ in range(6):
        slow.send("short")
    wait_until(
        lambda: slow.pipeline.recording._finished._waiting.qsize() == 6,
        "six micro-batches wait",
    )
    slow.store.writing.set()
    wait_until(lambda: len(slow.finished) == 7, "all are finished")
    assert slow.store.writes == [1, 6]
    assert len(slow.store.written) == 7


def test_the_device_waits_when_too_much_is_unwritten(slow: Any) -> None:
    slow.store.finding.set()
    slow.send("the first")
    wait_until(lambda: slow.store.writes == [1], "the writer waits for Redis")
    slow.send(*["short"] * 30)
    wait_until(
        lambda: len(slow.classifier.batches) == 18,
        ("sixteen wait, and the device holds one"),
    )
    assert slow.waiting() == 13
    slow.store.writing.set()
    wait_until(lambda: slow.finished, "the message is finished")


def test_messages_share_a_forward_pass(owner: Owner) -> None:
    owner.classifier.gate.clear()
    first = owner.send("it keeps the device busy")
    wait_until(lambda: first.state is State.STARTED, "the device is busy")
    for _ in range(10):
        owner.send("one", "two words")
    wait_until(lambda: owner.waiting() == 20, "the window fills")
    owner.classifier.gate.set()
    wait_until(lambda: len(owner.finished) == 11, "all are finished")
    assert owner.classifier.batches == [1, 20]


class TwoCores(StandIn):
    """A stand-in with two lanes.

    It records each pass's share of the device; passes of several rows run in parallel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shares: list[int] = []
        self.together = threading.Barrier(2, timeout=120)
        recorder = self

        class Cpu(NamedTuple):
            name: str = "cpu"
            lanes: int = 2
            shapes: Shapes = EXACT

            def take_share(self, passes: int) -> None:
                recorder.shares.append(passes)

        self.device = Cpu()  # type: ignore[assignment]

    def forward(self, rows: Sequence[Row]) -> Any:
        if len(rows) > 1:
            self.together.wait()
        return super().forward(rows)


def test_cpu_runs_concurrent_forward_passes() -> None:
    """A single pass gets all cores; two passes share them."""
    cores = TwoCores()
    owner = Owner(cores)
    owner.results("a single post")
    assert cores.shares == [1]
    owner.pipeline.backlog.loaded.budget = 40
    found = owner.results(*["one two three four"] * 40)
    assert [outcome["label"] for outcome in found] == ["good"] * 40
    assert cores.batches == [1, 10, 10, 10, 10]
    assert cores.shares[1:4] == [2, 2, 2]
    assert owner.pipeline.statistics.totals.batches == 5
    owner.pipeline.stop()


class ThreeRows(StandIn):
    """A stand-in with three rows per post, as for three labels. The last row finishes the post."""

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        self.missing: dict[int, int] = {}
        return [
            [Row(tokens, label_set) for tokens in [Tokens([0] * len(text.split()))] * 3]
            for text in texts
        ]

    def finish(self, rows: Sequence[Row], outputs: Any) -> list[tuple[Row, Scores]]:  # noqa: ARG002
        finished = []
        for row in rows:
            left = self.missing[id(row.owner)] = self.missing.get(id(row.owner), 3) - 1
            if not left:
                finished.append((row, {"good": 0.75, "bad": 0.25}))
        return finished


@pytest.mark.parametrize("batch_rows", [1, 2, 256])
def test_post_of_many_rows_has_one_outcome(batch_rows: int) -> None:
    """A post has one outcome however its rows are batched, even the poison post, whose rows all
    fail.
    """
    owner = Owner(ThreeRows(), batch_rows=batch_rows)
    try:
        found = owner.results("a good one", "poison", "another good one of some length")
        assert [outcome.get("label", "failed") for outcome in found] == [
            "good",
            "failed",
            "good",
        ]
        wait_until(
            lambda: owner.pipeline.statistics.totals.failed == 1,
            "the failure is counted",
        )
        assert len(owner.finished) == 1
        assert [result.post.id for result in owner.store.written] == ["0", "2"]
        assert [letter.id for letter in owner.store.dead] == ["1"]
        assert owner.results("the next post")[0]["label"] == "good"
    finally:
        owner.pipeline.stop()


def test_error_text_is_in_the_reply_but_not_in_the_log(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    def quote(rows: Sequence[Row]) -> Any:
        raise ValueError(f"cannot read {rows[0].owner.post.text}")

    owner.classifier.forward = quote  # type: ignore[method-assign]
    with pytest.raises(MessageFailed, match="cannot read private text"):
        owner.results("private text")
    wait_until(lambda: "ValueError" in caplog.text, "the failure is logged")
    assert "private text" not in caplog.text


class Panic(BaseException):
    """A stand-in for PyO3's exception of a Rust panic."""


def test_tokenizer_panic_fails_one_post(owner: Owner) -> None:
    prepare = owner.classifier.prepare

    def panicking(texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        if "panic" in texts:
            raise Panic("index out of bounds")
        return prepare(texts, label_set)

    owner.classifier.prepare = panicking  # type: ignore[method-assign]
    found = owner.results("fine", "panic", "fine")
    assert ["error" in outcome for outcome in found] == [False, True, False]
    assert "Panic: index out of bounds" in found[1]["error"]
    assert owner.failures == 0


def test_poison_among_256_posts_is_the_only_dead_letter(owner: Owner) -> None:
    titles = ["fine"] * 255
    titles.insert(100, "poison")
    found = owner.results(*titles, labels=["good", "bad"])
    assert [outcome["id"] for outcome in found if "error" in outcome] == ["100"]
    assert sorted(int(result.post.id) for result in owner.store.written) == [
        n for n in range(256) if n != 100
    ]
    (letter,) = owner.store.dead
    assert (letter.id, letter.reason, letter.worker) == (
        "100",
        "ValueError: cannot read this",
        "worker",
    )
    assert json.loads(letter.post or "") == {"id": "100", "title": "poison"}
    assert json.loads(letter.options or "") == {"labels": ["good", "bad"]}


def test_out_of_memory_halves_this_and_later_batches(owner: Owner) -> None:
    owner.classifier.memory = 16
    assert len(owner.results(*["three words each"] * 100)) == 100
    assert owner.store.dead == []
    assert max(owner.classifier.batches) <= 16
    assert owner.pipeline.backlog.loaded.budget <= 3 * 100 // 4
    tried = owner.pipeline.backlog.loaded.budget
    owner.results(*["three words each"] * 100)
    assert owner.pipeline.backlog.loaded.budget <= tried


def test_no_memory_for_a_single_row_ends_the_worker(owner: Owner) -> None:
    owner.classifier.memory = 0
    message = owner.send("fine", "fine")
    wait_until(lambda: owner.failures == 1, "the failure is reported")
    assert isinstance(owner.pipeline.failure, DeviceLost)
    assert message not in owner.finished
    assert owner.store.dead == []
    assert owner.pipeline.backlog.loaded.budget == 2048, (
        "the failure does not show what would fit"
    )
    assert str(owner.pipeline.failure) in str(pipeline_error(owner.pipeline.failure))


@pytest.mark.parametrize(
    ("step", "named"),
    [
        ("label_set", "label"),
        ("prepare", "post"),
        ("forward", "pass"),
        ("finish", "scor"),
    ],
)
def test_hung_classifier_call_ends_the_worker(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    step: str,
    named: str,
) -> None:
    owner, gate = Owner(forward_timeout=0.2), threading.Event()
    called = getattr(owner.classifier, step)
    monkeypatch.setattr(
        owner.classifier, step, lambda *arguments: gate.wait() and called(*arguments)
    )
    message = owner.send("it hangs")
    wait_until(lambda: owner.failures == 1, "the failure is reported")
    assert isinstance(owner.pipeline.failure, ForwardTimeout)
    assert re.search(rf"{named}.*FEEDMILL_FORWARD_TIMEOUT", caplog.text)
    assert "gate.wait()" in caplog.text, "the stack of the hung thread"
    assert message not in owner.finished
    gate.set()
    owner.pipeline.stop()


def test_waiting_for_redis_is_not_a_hung_device() -> None:
    # A busy machine needs a part of a second for the forward pass itself.
    owner = Owner(forward_timeout=2.5)
    owner.store.refusals = 5  # with pauses of 0.1, 0.2, 0.4, 0.8 and 1.6 s
    assert owner.results("fine")[0]["label"] == "good"
    assert owner.pipeline.failure is None
    owner.pipeline.stop()


def test_lost_device_ends_the_worker(owner: Owner) -> None:
    message = owner.send("fine", "lose the device", "fine")
    wait_until(lambda: owner.failures == 1, "the failure is reported")
    assert isinstance(owner.pipeline.failure, DeviceLost)
    assert message not in owner.finished


def test_non_finite_scores_are_an_error(owner: Owner) -> None:
    found = owner.results("overflow", "fine")
    assert "finite" in found[0]["error"]
    assert found[1]["label"] == "good"


def test_strict_message_fails_but_stores_good_posts(owner: Owner) -> None:
    with pytest.raises(MessageFailed, match="1 of 3"):
        owner.results("fine", "", "fine", strict=True)
    assert len(owner.store.written) == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "^posts: "),
        ({"posts": [{"id": "1", "title": "x"}] * 1001}, "^posts: .*1,?001"),
        (
            {"posts": [{"id": "1", "title": "x"}], "labels": ["unservable"]},
            "^labels: this model",
        ),
        (
            {"posts": [{"id": "1", "title": "x"}], "labels": ["unreadable"]},
            "RuntimeError.*a bug",
        ),
    ],
)
def test_rejected_message_names_the_field(
    owner: Owner, arguments: dict[str, Any], named: str
) -> None:
    message = Message(arguments, "no number")
    owner.pipeline.submit(message)
    wait_until(lambda: message in owner.finished, "the message is finished")
    with pytest.raises(RequestRefused, match=named):
        message.result()
    assert owner.results("the next one is served")[0]["label"] == "good"


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (
            NoPermissionError("no permissions to access a key"),
            "no permissions to access a key",
        ),
        (ResponseError("-WRONGTYPE Operation against a key script: f_x"), r"\bkeys?\b"),
    ],
)
def test_permanent_redis_error_ends_the_worker(
    owner: Owner, caplog: pytest.LogCaptureFixture, fault: Exception, named: str
) -> None:
    owner.store.write = Mock(side_effect=fault)  # type: ignore[method-assign]
    message = owner.send("fine")
    wait_until(lambda: owner.failures == 1, "the failure is reported")
    assert message not in owner.finished
    (record,) = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert re.search(f"Redis.*{named}", record.getMessage())
    assert not record.exc_info


def test_drops_revoked_messages(owner: Owner) -> None:
    owner.classifier.gate.clear()
    first = owner.send("it keeps the device busy")
    wait_until(lambda: first.state is State.STARTED, "the device is busy")
    revoked, wanted = owner.send("revoked meanwhile"), owner.send("wanted")
    answered = Message(
        {"posts": [{"id": "0", "title": ""}]}, None
    )  # needs no forward pass
    owner.unwanted += [revoked, answered]
    owner.pipeline.submit(answered)
    owner.classifier.gate.set()
    wait_until(
        lambda: wanted in owner.finished and answered.state is State.ENDED,
        "the other messages are done",
    )
    assert revoked.state is State.ENDED
    assert owner.started == [first, wanted]
    assert owner.classifier.batches == [1, 1]
    assert len(owner.store.written) == 2
    assert not owner.store.dead


def test_timed_out_message_on_the_device_is_not_stored(owner: Owner) -> None:
    owner.classifier.gate.clear()
    slow = owner.send("in a long forward pass")
    wait_until(lambda: slow.state is State.STARTED, "the device has it")
    assert owner.pipeline.recording.give_up(
        slow, TimeoutError("too slow"), "took too long"
    )
    assert not owner.pipeline.recording.give_up(
        slow, TimeoutError("too slow"), "once more"
    )
    wait_until(lambda: slow in owner.finished, "the message is finished")
    with pytest.raises(TimeoutError, match="too slow"):
        slow.result()
    owner.classifier.gate.set()
    owner.results("the next one")
    assert [result.post.title for result in owner.store.written] == ["the next one"]
    assert [letter.reason for letter in owner.store.dead] == ["took too long"]
    assert owner.finished.count(slow) == 1


def test_retried_message_has_no_dead_letters_yet(owner: Owner) -> None:
    def send_again(message: Message) -> None:
        message.sent_again = True

    owner.finishing = send_again
    first = owner.send("fine", "")
    wait_until(lambda: first in owner.finished, "the message is finished")
    assert (len(owner.store.written), len(owner.store.dead)) == (1, 0)
    owner.finishing = lambda _: None
    again = owner.send("fine", "")
    wait_until(lambda: again in owner.finished, "the message is finished")
    assert (len(owner.store.written), len(owner.store.dead)) == (1, 1)


def test_stored_posts_are_answered_without_the_device(owner: Owner) -> None:
    first = owner.results("one", "two")
    computed = owner.pipeline.statistics.totals.rows
    again = owner.send("one", "another", "two")
    # In this test, a post's id is its index in the message, so only the first post is the same in
    # all messages.
    wait_until(lambda: again in owner.finished, "the second message is finished")
    assert again.result()[0] == first[0]
    assert owner.pipeline.statistics.totals.rows - computed == 2
    whole = owner.send("one", "two")
    wait_until(lambda: whole in owner.finished, "the third message is finished")
    assert whole.result() == first
    assert owner.pipeline.statistics.totals.rows - computed == 2
    assert owner.pipeline.statistics.totals.answered == 3
    assert len(owner.store.written) == 4


@pytest.mark.parametrize(
    ("rows_per_second", "most"), [(None, 64), (math.inf, 1000), (100, 200), (0.2, 1)]
)
def test_prefetch_is_bounded_by_the_device_speed(
    rows_per_second: float | None, most: int
) -> None:
    owner = Owner(window_rows=1000)
    owner.pipeline.statistics.speed.rows_per_second = rows_per_second
    assert owner.pipeline.max_waiting() == most
    owner.pipeline.stop()
