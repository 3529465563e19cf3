"""The pipeline on a stand-in classifier and store: order, isolation, retries, and threads that die."""

import json
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import NoPermissionError, ResponseError

from shared.errors import DeviceFull, DeviceLost, ForwardHangs, MessageFailed, RequestRefused
from shared.messages import Classification, ClassifyOptions, DeadLetter, Post, PostError
from shared.results import Result, ResultsStore
from shared.settings import Settings
from tests.fakes.interleaving import interleavings
from tests.support import wait_until
from workers.calibration import TokenBudget
from workers.classifiers import LabelSet, Row, Scores
from workers.device import Device
from workers.message import Message
from workers.offline import classify, lost
from workers.pipeline import Pipeline
from workers.preparation import MAX_ROWS_PER_MESSAGE
from workers.suspects import Suspects
from workers.tokenizer import Tokens
from workers.watch import Step
from workers.weights import Weights

LABELS = LabelSet(("good", "bad"), False, "recipe")


class Done:
    """Outputs that are there at once."""

    seconds = 0.001

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def ready(self) -> bool:
        return True


class StandIn:
    """One row a post, of one token a word; posts with "poison" in them fail their forward pass."""

    kind = "stand-in"
    packed = False
    weights = Weights("stand-in", None, None, "00")  # type: ignore[arg-type]
    #: No CPU: one lane.
    device = Device(torch.device("meta"), torch.float32, "for a test")

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        #: Rows that the device has memory for.
        self.memory = 10_000

    def warm_up(self) -> None: ...

    def label_set(self, options: ClassifyOptions) -> LabelSet:
        if options.labels == {"unservable": ("unservable",)}:
            raise RequestRefused("labels: this model cannot serve them")
        if options.labels == {"unreadable": ("unreadable",)}:
            raise RuntimeError("a bug")
        return LABELS

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        if any("explode" in text for text in texts):
            raise RuntimeError("the tokenizer is broken")
        return [[Row(Tokens(list(range(len(text.split())))), label_set)] for text in texts]

    def forward(self, rows: Sequence[Row]) -> Any:
        self.gate.wait()
        if len(rows) > self.memory:
            raise DeviceFull("out of memory")
        self.batches.append(len(rows))
        if any("lose the device" in row.owner.post.text for row in rows):
            raise DeviceLost("the device is gone")
        if any("poison" in row.owner.post.text for row in rows):
            raise ValueError("cannot read this")
        return Done([float("nan") if "overflow" in row.owner.post.text else 0.75 for row in rows])

    def finish(self, rows: Sequence[Row], outputs: Any) -> list[tuple[Row, Scores]]:
        if any("kill the writer" in row.owner.post.text for row in rows):
            raise AssertionError("a bug")
        return [(row, {"good": output, "bad": 0.25}) for row, output in zip(rows, outputs.values, strict=True)]


class Store:
    """Keeps what is written; refuses as often as `refusals` says."""

    def __init__(self) -> None:
        self.written: list[Result] = []
        self.dead: list[DeadLetter] = []
        self.refusals = 0

    def find(self, wanted: Sequence[tuple[str, str]]) -> list[Classification | None]:
        if self.refusals:
            raise ConnectionFault("Redis is away")
        there = {(result.post.id, result.classification.fingerprint): result.classification for result in self.written}
        return [there.get(each) for each in wanted]

    def write(self, results: Sequence[Result], dead: Sequence[DeadLetter] = ()) -> int:
        if self.refusals:
            self.refusals -= 1
            raise ConnectionFault("Redis is away")
        self.written += results
        self.dead += dead
        return len(results)

    def keep(self, found: Sequence[Result]) -> None: ...

    def catch_up(self) -> None: ...


class Owner:
    """A pipeline with what it told its owner."""

    def __init__(
        self,
        classifier: StandIn | None = None,
        suspects: Suspects | None = None,
        store: ResultsStore | None = None,
        **settings: Any,
    ) -> None:
        self.classifier, self.store, self.budget = classifier or StandIn(), Store(), TokenBudget(2048)
        self.started: list[Message] = []
        self.finished: list[Message] = []
        self.failures = 0
        self.unwanted: list[Message] = []
        #: What happens when a message has its outcomes, before its dead letters are stored.
        self.finishing: Callable[[Message], None] = lambda _: None
        self.pipeline = Pipeline(
            self.classifier,
            store or self.store,
            Settings(**settings),
            self.budget,
            "worker",
            suspects=suspects,
            admits=lambda message: message not in self.unwanted,
            on_started=self.started.append,
            on_finished=self._finish,
            on_recorded=self.finished.append,
            on_failure=self._failed,
        )
        self.pipeline.start()

    def waiting(self) -> int:
        """Rows that have come as far as the window."""
        return len(self.pipeline._backlog)

    def _finish(self, message: Message) -> None:
        self.finishing(message)

    def _failed(self) -> None:
        self.failures += 1

    def send(self, *titles: str, **options: Any) -> Message:
        posts = [{"id": str(number), "title": title} for number, title in enumerate(titles)]
        message = Message({"posts": posts, **options}, None)
        self.pipeline.submit(message)
        return message

    def results(self, *titles: str, **options: Any) -> list[dict[str, Any]]:
        message = self.send(*titles, **options)
        wait_until(lambda: message in self.finished, "the message is finished", 10)
        return message.result()


@pytest.fixture
def owner() -> Any:
    made = Owner()
    yield made
    made.classifier.gate.set()
    made.pipeline.stop()


def test_one_outcome_a_post_in_order(owner: Owner) -> None:
    found = owner.results("short", "a much longer title", "", "middle length")
    assert [outcome["id"] for outcome in found] == ["0", "1", "2", "3"]
    assert found[1]["label"] == "good"
    assert found[1]["scores"] == {"good": 0.75, "bad": 0.25}
    assert found[2] == {"id": "2", "error": "neither title nor body holds any text"}
    assert sorted(result.post.id for result in owner.store.written) == ["0", "1", "3"]
    assert [(letter.id, letter.reason) for letter in owner.store.dead] == [("2", found[2]["error"])]


def test_a_dead_letter_says_where_the_error_came_from_and_nobodys_words(owner: Owner) -> None:
    assert owner.results("fine", "this is poison")[1] == {"id": "1", "error": "ValueError: cannot read this"}
    (letter,) = owner.store.dead
    assert letter.traceback
    assert f'File "{__file__}", line ' in letter.traceback
    assert letter.traceback.endswith("ValueError\n")
    assert (letter.attempts, letter.payload) == (1, None)
    owner.results("fine", "")
    assert owner.store.dead[1].traceback is None
    owner.send("explode")
    wait_until(lambda: len(owner.store.dead) == 3, "it is a dead letter", 10)
    assert (owner.store.dead[2].traceback or "").endswith("RuntimeError\n")


def test_every_message_is_started_once_before_it_is_finished(owner: Owner) -> None:
    messages = [owner.send("a", "b c d") for _ in range(20)] + [owner.send("")]
    wait_until(lambda: len(owner.finished) == 21, "all are finished", 10)
    assert sorted(map(id, owner.started)) == sorted(map(id, messages)) == sorted(map(id, owner.finished))


def test_rows_of_many_messages_share_a_forward_pass(owner: Owner) -> None:
    owner.classifier.gate.clear()
    first = owner.send("it keeps the device busy")
    wait_until(lambda: first.started, "the device is busy")
    for _ in range(10):
        owner.send("one", "two words")
    wait_until(lambda: owner.waiting() == 20, "the window fills")
    owner.classifier.gate.set()
    wait_until(lambda: len(owner.finished) == 11, "all are finished", 10)
    assert owner.classifier.batches == [1, 20]


class TwoCores(StandIn):
    """Keeps what share of the device each forward pass had, and waits in it for another beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.shares: list[int] = []
        self.together = threading.Barrier(2, timeout=10)
        recorder = self

        class Cpu(NamedTuple):
            name: str = "cpu"
            lanes: int = 2

            def take_share(self, passes: int) -> None:
                recorder.shares.append(passes)

        self.device = Cpu()  # type: ignore[assignment]

    def forward(self, rows: Sequence[Row]) -> Any:
        if len(rows) > 1:
            self.together.wait()
        return super().forward(rows)


def test_on_a_cpu_forward_passes_run_side_by_side_and_a_lone_one_gets_all_cores() -> None:
    cores = TwoCores()
    owner = Owner(cores)
    owner.results("a single post")
    assert cores.shares == [1]
    owner.budget.tokens = 40
    found = owner.results(*["one two three four"] * 40)
    assert [outcome["label"] for outcome in found] == ["good"] * 40
    assert cores.batches == [1, 10, 10, 10, 10]
    assert cores.shares[1:4] == [2, 2, 2]
    assert owner.pipeline.statistics.totals.batches == 5
    owner.pipeline.stop()


def test_one_poison_post_fails_alone(owner: Owner) -> None:
    found = owner.results(*["fine"] * 20, "poison", *["fine"] * 20)
    assert [outcome["id"] for outcome in found if "error" in outcome] == ["20"]
    assert found[20]["error"] == "ValueError: cannot read this"
    assert len(owner.store.written) == 40


class ThreeRows(StandIn):
    """Three rows a post, as for three labels; finished with the last of them."""

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        self.missing: dict[int, int] = {}
        return [[Row(tokens, label_set) for tokens in [Tokens([0] * len(text.split()))] * 3] for text in texts]

    def finish(self, rows: Sequence[Row], outputs: Any) -> list[tuple[Row, Scores]]:  # noqa: ARG002
        finished = []
        for row in rows:
            left = self.missing[id(row.owner)] = self.missing.get(id(row.owner), 3) - 1
            if not left:
                finished.append((row, {"good": 0.75, "bad": 0.25}))
        return finished


@pytest.mark.parametrize("batch_rows", [1, 2, 256])
def test_a_post_of_many_rows_is_settled_once(batch_rows: int) -> None:
    """However its rows fall into batches, and though each of a poison post's rows fails."""
    owner = Owner(ThreeRows(), batch_rows=batch_rows)
    try:
        found = owner.results("a good one", "poison", "another good one of some length")
        assert [outcome.get("label", "failed") for outcome in found] == ["good", "failed", "good"]
        wait_until(lambda: owner.pipeline.statistics.totals.failed == 1, "the failure is counted", 10)
        assert len(owner.finished) == 1
        assert [result.post.id for result in owner.store.written] == ["0", "2"]
        assert [letter.id for letter in owner.store.dead] == ["1"]
        assert owner.results("and on it goes")[0]["label"] == "good"
    finally:
        owner.pipeline.stop()


def test_a_message_of_too_many_rows_is_refused() -> None:
    owner = Owner(ThreeRows())
    many = LabelSet(LABELS.labels, False, "recipe", rows=MAX_ROWS_PER_MESSAGE)
    owner.classifier.label_set = Mock(return_value=many)  # type: ignore[method-assign]
    try:
        with pytest.raises(RequestRefused, match=r"posts: 2 of 32000 rows each are 64,000 rows; at most 32,000"):
            owner.results("one", "two")
    finally:
        owner.pipeline.stop()


def test_offline_a_post_that_cannot_be_prepared_fails_alone() -> None:
    posts = [Post(id="a", title="explode"), Post(id="b", title="fine")]
    (_, failed), (_, good) = classify(posts, StandIn(), Settings(), TokenBudget(64))
    assert failed == PostError(id="a", error="it cannot be prepared: RuntimeError: the tokenizer is broken")
    assert isinstance(good, Classification)


def test_an_errors_words_are_in_the_reply_and_not_in_the_log(owner: Owner, caplog: pytest.LogCaptureFixture) -> None:
    def quote(rows: Sequence[Row]) -> Any:
        raise ValueError(f"cannot read {rows[0].owner.post.text}")

    owner.classifier.forward = quote  # type: ignore[method-assign]
    with pytest.raises(MessageFailed, match="cannot read whose words these are"):
        owner.results("whose words these are")
    wait_until(lambda: "posts failed" in caplog.text, "it is logged", 10)
    assert "ValueError" in caplog.text
    assert "whose words" not in caplog.text


class Panic(BaseException):
    """What a panic in Rust becomes."""


def test_a_panic_of_the_tokenizer_is_one_posts_affair(owner: Owner) -> None:
    prepare = owner.classifier.prepare

    def panicking(texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        if "panic" in texts:
            raise Panic("index out of bounds")
        return prepare(texts, label_set)

    owner.classifier.prepare = panicking  # type: ignore[method-assign]
    found = owner.results("fine", "panic", "fine")
    assert [outcome.get("error", "good") for outcome in found] == [
        "good",
        "it cannot be prepared: Panic: index out of bounds",
        "good",
    ]
    assert owner.failures == 0


def test_poison_among_255_good_ones_is_the_only_dead_letter(owner: Owner) -> None:
    titles = ["fine"] * 255
    titles.insert(100, "poison")
    found = owner.results(*titles, labels=["good", "bad"])
    assert [outcome["id"] for outcome in found if "error" in outcome] == ["100"]
    assert sorted(int(result.post.id) for result in owner.store.written) == [n for n in range(256) if n != 100]
    (letter,) = owner.store.dead
    assert (letter.id, letter.reason, letter.worker) == ("100", "ValueError: cannot read this", "worker")
    assert json.loads(letter.post or "") == {"id": "100", "title": "poison"}
    assert json.loads(letter.options or "") == {"labels": ["good", "bad"]}


def test_a_batch_too_large_for_the_memory_is_halved_and_so_are_the_next(owner: Owner) -> None:
    owner.classifier.memory = 16
    assert len(owner.results(*["three words each"] * 100)) == 100
    assert owner.store.dead == []
    assert max(owner.classifier.batches) <= 16
    assert owner.budget.tokens <= 3 * 100 // 4
    tried = owner.budget.tokens
    owner.results(*["three words each"] * 100)
    assert owner.budget.tokens <= tried


@pytest.mark.parametrize("comes", [True, False], ids=["comes", "goes"])
def test_a_second_model_that_comes_or_goes_during_a_pass_lowers_no_budget(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    forward, began = owner.classifier.forward, threading.Event()

    def full_at_first(rows: Any) -> Any:
        if began.is_set():
            return forward(rows)
        began.set()
        owner.classifier.gate.wait()
        raise DeviceFull("out of memory")

    monkeypatch.setattr(owner.classifier, "forward", full_at_first)
    owner.classifier.gate.clear()
    if not comes:
        owner.budget.share(2048)
    message = owner.send(*["three words each"] * 100)
    assert began.wait(10)
    if comes:
        owner.budget.share(2048)
    else:
        owner.budget.end_sharing()
    owner.classifier.gate.set()
    wait_until(lambda: message in owner.finished, "the message is finished", 10)
    assert len(owner.classifier.batches) == 2, "halves"
    owner.budget.end_sharing()
    assert owner.budget.tokens == 2048


def test_a_device_without_memory_for_a_single_row_ends_the_worker(owner: Owner) -> None:
    owner.classifier.memory = 0
    message = owner.send("fine", "fine")
    wait_until(lambda: owner.failures == 1, "the failure is told", 10)
    assert isinstance(owner.pipeline.failure, DeviceLost)
    assert message not in owner.finished
    assert owner.store.dead == []
    assert owner.budget.tokens == 2048, "what failed tells nothing of what would fit"
    assert str(lost(owner.pipeline)) == (
        "The device failed: the device has no memory for a single row. See the log above."
    )


def test_a_forward_pass_that_hangs_is_told() -> None:
    owner = Owner(forward_timeout=0.2)
    owner.classifier.gate.clear()
    message = owner.send("it hangs")
    wait_until(lambda: owner.failures == 1, "the failure is told", 10)
    assert isinstance(owner.pipeline.failure, ForwardHangs)
    assert message not in owner.finished
    owner.classifier.gate.set()
    owner.pipeline.stop()


@pytest.mark.parametrize(("step", "what"), [
    ("label_set", "the preparation of labels"), ("prepare", "the preparation of posts"),
    ("finish", "the scoring of a micro-batch"),
])  # fmt: skip
def test_a_hung_call_of_a_classifier_ends_the_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str, what: str
) -> None:
    owner, gate = Owner(forward_timeout=0.2), threading.Event()
    called = getattr(owner.classifier, step)
    monkeypatch.setattr(owner.classifier, step, lambda *arguments: gate.wait() and called(*arguments))
    message = owner.send("it hangs")
    wait_until(lambda: owner.failures == 1, "the failure is told", 10)
    assert isinstance(owner.pipeline.failure, ForwardHangs)
    assert f"{what} has hung for 0 s (FEEDMILL_FORWARD_TIMEOUT)" in caplog.text
    assert "gate.wait()" in caplog.text, "the stack of the thread that hangs"
    assert message not in owner.finished
    gate.set()
    owner.pipeline.stop()


def waiting_for(gate: threading.Event) -> Callable[[], None]:
    def wait() -> None:
        gate.wait()

    return wait


def test_a_hung_job_ends_the_worker_at_its_limit() -> None:
    owner, gate = Owner(forward_timeout=0.2), threading.Event()
    owner.pipeline.run_on_device_thread(waiting_for(gate), "a trial", 0.2)
    wait_until(lambda: owner.failures == 1, "the failure is told", 10)
    assert str(owner.pipeline.failure) == "a trial has hung for 0 s (FEEDMILL_FORWARD_TIMEOUT)"
    gate.set()
    owner.pipeline.stop()


def test_a_job_without_a_limit_is_logged_once_and_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, gate = Owner(forward_timeout=0.2), threading.Event()
    longer_than, found = owner.pipeline._watch.longer_than, []

    def counted(seconds: float) -> list[Step]:
        steps = longer_than(seconds)
        found.extend(steps)
        return steps

    monkeypatch.setattr(owner.pipeline._watch, "longer_than", counted)
    owner.pipeline.run_on_device_thread(waiting_for(gate), "task own.long[1]")
    wait_until(lambda: len(found) > 2, "the watcher looked again", 10)
    assert caplog.text.count("task own.long[1] has kept the device thread for 0 s") == 1
    gate.set()
    assert owner.results("fine")[0]["label"] == "good"
    assert owner.pipeline.failure is None
    owner.pipeline.stop()


def test_a_device_that_is_done_does_not_hang_while_redis_is_away() -> None:
    owner = Owner(forward_timeout=0.5)
    owner.store.refusals = 4  # with pauses of 0.1, 0.2, 0.4 and 0.8 s
    assert owner.results("fine")[0]["label"] == "good"
    assert owner.pipeline.failure is None
    owner.pipeline.stop()


def test_statistics_are_logged_at_their_interval(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    owner = Owner(statistics_interval=0.1, forward_timeout=0.4)
    owner.results("one", "two words")
    wait_until(lambda: "posts/s; " in caplog.text, "the line is logged", 10)
    owner.pipeline.stop()


def test_a_reply_of_the_best_scores_and_a_store_of_all(owner: Owner) -> None:
    (found,) = owner.results("fine", top_k=1)
    assert found["scores"] == {"good": 0.75}
    assert owner.store.written[0].classification.scores == {"good": 0.75, "bad": 0.25}


def test_a_post_of_odd_characters_that_is_refused_is_a_dead_letter_all_the_same(owner: Owner) -> None:
    message = Message({"posts": [{"id": "a\ud800", "title": 5 * [1]}], "template": "x"}, None, "the task's id")
    owner.pipeline.submit(message)
    wait_until(lambda: message in owner.finished, "the message is finished", 10)
    (letter,) = owner.store.dead
    assert letter.model_dump_json()
    assert (letter.id, letter.message) == ("a?", "the task's id")
    assert letter.reason.startswith("template: ")


def test_a_lost_device_ends_the_worker_rather_than_failing_the_queue(owner: Owner) -> None:
    message = owner.send("fine", "lose the device", "fine")
    wait_until(lambda: owner.failures == 1, "the failure is told", 10)
    assert isinstance(owner.pipeline.failure, DeviceLost)
    assert message not in owner.finished


@pytest.mark.parametrize("sent_at", [None, "now", 10**400, float("nan"), -1.0, [1.0]])
def test_a_time_of_sending_that_is_none(sent_at: object) -> None:
    assert Message({}, sent_at).sent_at is None


def test_scores_that_are_not_finite_are_an_error(owner: Owner) -> None:
    found = owner.results("overflow", "fine")
    assert "not finite" in found[0]["error"]
    assert found[1]["label"] == "good"


def test_a_message_fails_when_all_of_its_posts_do(owner: Owner) -> None:
    with pytest.raises(MessageFailed, match="2 of 2 posts failed: 0: "):
        owner.results("", "poison")


def test_a_strict_message_fails_when_any_does_and_the_good_are_stored(owner: Owner) -> None:
    with pytest.raises(MessageFailed, match="1 of 3 posts failed: 1: "):
        owner.results("fine", "", "fine", strict=True)
    assert len(owner.store.written) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "posts: expected a list"),
        ({"posts": []}, "posts: expected a list"),
        ({"posts": "text"}, "posts: expected a list"),
        ({"posts": [{"id": "1", "title": "x"}] * 1001}, "posts: 1001 in one message"),
        ({"posts": [{"id": "1", "title": "x"}], "template": "no place"}, "template: "),
        ({"posts": [{"id": "1", "title": "x"}], "labels": ["unservable"]}, "labels: this model"),
        (
            {"posts": [{"id": "1", "title": "x"}], "labels": ["unreadable"]},
            "its posts cannot be prepared: RuntimeError",
        ),
        ({"posts": [{"id": "1", "title": "x"}], "top_k": 0}, "top_k: "),
    ],
)
def test_a_message_that_cannot_be_served_says_why(owner: Owner, arguments: dict[str, Any], words: str) -> None:
    message = Message(arguments, "no number")
    owner.pipeline.submit(message)
    wait_until(lambda: message in owner.finished, "the message is finished", 10)
    with pytest.raises(RequestRefused) as refused:
        message.result()
    assert str(refused.value).startswith(words)
    assert owner.results("the next one is served")[0]["label"] == "good"


def test_results_wait_for_redis(owner: Owner) -> None:
    owner.store.refusals = 3
    assert owner.results("fine")[0]["label"] == "good"
    assert len(owner.store.written) == 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            NoPermissionError("no permissions to access a key"),
            "no permissions to access a key",
        ),
        (
            ResponseError("-WRONGTYPE Operation against a key script: f_x"),
            "another application uses one of Feedmill's keys",
        ),
    ],
)
def test_what_no_waiting_mends_ends_the_worker_with_a_sentence(
    owner: Owner, caplog: pytest.LogCaptureFixture, fault: Exception, words: str
) -> None:
    owner.store.write = Mock(side_effect=fault)  # type: ignore[method-assign]
    message = owner.send("fine")
    wait_until(lambda: owner.failures == 1, "the failure is told", 10)
    assert message not in owner.finished
    (said,) = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert words in said.getMessage()
    assert said.getMessage().endswith("; this worker ends, its messages go back to the queue")
    assert not said.exc_info


def test_jobs_run_between_batches_on_the_device_thread(owner: Owner) -> None:
    names: list[str] = []
    owner.pipeline.run_on_device_thread(lambda: names.append(threading.current_thread().name), "a job")
    wait_until(lambda: names == ["device-0"], "the job ran", 10)


def test_a_message_that_is_no_longer_wanted_is_not_computed(owner: Owner) -> None:
    owner.classifier.gate.clear()
    first = owner.send("it keeps the device busy")
    wait_until(lambda: first.started, "the device is busy")
    revoked, wanted = owner.send("withdrawn in the meantime"), owner.send("wanted")
    answered = owner.send("")  # needs no forward pass
    owner.unwanted += [revoked, answered]
    owner.classifier.gate.set()
    wait_until(lambda: wanted in owner.finished and answered.dropped, "the others are dealt with", 10)
    assert revoked.dropped
    assert owner.started == [first, wanted]
    assert owner.classifier.batches == [1, 1]
    assert len(owner.store.written) == 2
    assert not owner.store.dead


def test_a_message_that_takes_too_long_fails_and_its_batch_goes_on(owner: Owner) -> None:
    owner.classifier.gate.clear()
    first = owner.send("it keeps the device busy")
    wait_until(lambda: first.started, "the device is busy")
    slow, other = owner.send("a post", ""), owner.send("its neighbour")
    wait_until(lambda: owner.waiting() == 2, "they wait together")
    assert owner.pipeline.give_up(slow, TimeoutError("too slow"), "took too long")
    assert not owner.pipeline.give_up(slow, TimeoutError("too slow"), "once more")
    wait_until(lambda: slow in owner.finished, "it is finished while the device is busy", 10)
    with pytest.raises(TimeoutError, match="too slow"):
        slow.result()
    assert [(letter.id, letter.reason) for letter in owner.store.dead] == [
        ("0", "took too long"),
        ("1", "neither title nor body holds any text"),
    ]
    owner.classifier.gate.set()
    wait_until(lambda: other in owner.finished, "the neighbour is finished", 10)
    assert owner.finished.count(slow) == 1
    assert not owner.pipeline.give_up(other, TimeoutError("too slow"), "too late")
    assert other.result()[0]["label"] == "good"


def test_what_is_on_the_device_when_its_message_is_given_up_is_a_dead_letter_only(owner: Owner) -> None:
    owner.classifier.gate.clear()
    slow = owner.send("in a forward pass that takes long")
    wait_until(lambda: slow.started, "the device has it")
    assert owner.pipeline.give_up(slow, TimeoutError("too slow"), "took too long")
    wait_until(lambda: slow in owner.finished, "it is finished", 10)
    owner.classifier.gate.set()
    owner.results("the next one")
    assert [result.post.title for result in owner.store.written] == ["the next one"]
    assert len(owner.store.dead) == 1


def test_a_message_that_is_sent_again_has_no_dead_letters_yet(owner: Owner) -> None:
    def send_again(message: Message) -> None:
        message.sent_again = True

    owner.finishing = send_again
    first = owner.send("fine", "")
    wait_until(lambda: first in owner.finished, "it is finished", 10)
    assert (len(owner.store.written), len(owner.store.dead)) == (1, 0)
    owner.finishing = lambda _: None
    again = owner.send("fine", "")
    wait_until(lambda: again in owner.finished, "it is finished", 10)
    assert (len(owner.store.written), len(owner.store.dead)) == (1, 1)


def test_dead_letters_are_stored_before_the_owner_lets_go(owner: Owner) -> None:
    stored: list[tuple[int, int]] = []
    owner.finishing = lambda _: stored.append((len(owner.store.written), len(owner.store.dead)))
    owner.results("fine", "")
    assert stored == [(1, 0)]
    assert len(owner.store.dead) == 1


def test_jobs_and_micro_batches_take_turns(owner: Owner) -> None:
    owner.classifier.gate.clear()
    first = owner.send("it keeps the device busy")
    wait_until(lambda: first.started, "the device is busy")
    batches_before_job: list[int] = []
    for _ in range(5):
        owner.pipeline.run_on_device_thread(lambda: batches_before_job.append(len(owner.classifier.batches)), "a job")
    owner.budget.tokens = 2
    for _ in range(5):
        owner.send("two words")
    wait_until(lambda: owner.waiting() == 5, "the window fills")
    owner.classifier.gate.set()
    wait_until(lambda: len(owner.finished) == 6 and len(batches_before_job) == 5, "all is done", 10)
    assert batches_before_job == [1, 2, 3, 4, 5]


def test_urgent_messages_overtake(owner: Owner) -> None:
    owner.classifier.gate.clear()
    owner.send("it keeps the device busy")
    wait_until(lambda: owner.started, "the device is busy")
    owner.budget.tokens = 2
    sent = []
    for priority in (9, 3, 0, 9):
        sent.append(Message({"posts": [{"id": str(priority), "title": "two words"}]}, None, priority=priority))
        owner.pipeline.submit(sent[-1])
    wait_until(lambda: owner.waiting() == 4, "the window fills")
    owner.classifier.gate.set()
    wait_until(lambda: len(owner.finished) == 5, "all are finished", 10)
    assert owner.started[1:] == [sent[2], sent[1], sent[0], sent[3]]


def test_a_thread_that_dies_is_told(owner: Owner) -> None:
    message = owner.send("kill the writer")
    wait_until(lambda: owner.failures == 1, "the failure is told", 10)
    assert isinstance(owner.pipeline.failure, AssertionError)
    assert message not in owner.finished


def test_statistics(owner: Owner) -> None:
    owner.results("one two three", "one")
    totals = owner.pipeline.statistics.totals
    assert (totals.posts, totals.rows, totals.tokens, totals.device_seconds) == (2, 2, 4, 0.001 * totals.batches)
    assert 4 <= totals.padded_tokens <= 6


def test_what_is_stored_is_answered_without_the_device(owner: Owner) -> None:
    first = owner.results("one", "two")
    computed = owner.pipeline.statistics.totals.rows
    again = owner.send("one", "another", "two")
    # The same post has its place in the message for an id here: only the first is the same in all.
    wait_until(lambda: again in owner.finished, "the second message is finished", 10)
    assert again.result()[0] == first[0]
    assert owner.pipeline.statistics.totals.rows - computed == 2
    whole = owner.send("one", "two")
    wait_until(lambda: whole in owner.finished, "the third message is finished", 10)
    assert whole.result() == first
    assert owner.pipeline.statistics.totals.rows - computed == 2
    assert owner.pipeline.statistics.totals.answered == 3
    assert len(owner.store.written) == 4


def test_a_store_that_cannot_say_what_is_there_costs_no_post(owner: Owner) -> None:
    owner.results("one")
    owner.store.refusals = 3
    assert owner.results("one")[0]["label"] == "good"


@pytest.mark.parametrize(("rows_per_second", "most"), [(None, 64), (math.inf, 1000), (100, 300), (0.2, 1)])
def test_a_slow_device_holds_what_it_computes_in_so_many_seconds(rows_per_second: float | None, most: int) -> None:
    owner = Owner(window_rows=1000, prefetch_seconds=3.0)
    owner.pipeline.statistics.speed.rows_per_second = rows_per_second
    assert owner.pipeline.most_waiting() == most
    owner.pipeline.stop()


def test_posts_waiting_are_never_negative_while_a_message_is_prepared(owner: Owner) -> None:
    """The metrics thread reads both counts while the consumer adds to one and the tokenizer to the other."""
    preparation = owner.pipeline._preparation

    def prepare() -> None:
        preparation._posts_in += 1
        preparation._posts_prepared += 1

    assert min(interleavings(lambda: (preparation.posts_waiting, prepare))) == 0
