"""feedmill/stack/filler.py, shared/worker_load.py and the summary of GPUs: what the supervisor
reads, and what it makes of it.
"""

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ConnectionError as ConnectionFault

from feedmill.cli import running
from feedmill.monitoring.dashboard import WorkerInspector
from feedmill.monitoring.gpus import gpu_lines, gpus_of
from feedmill.shared import worker_load
from feedmill.shared.broker import DEVICE_POOL, QueueDepth, make_app
from feedmill.shared.settings import Settings
from feedmill.shared.worker_load import WorkerLoad, read_note
from feedmill.stack import filler, supervisor
from feedmill.stack.filler import Filler
from feedmill.stack.processes import Child, Service
from feedmill.stack.supervisor import Share, Worker
from tests.support import wait_until

#: A GPU whose host takes several times as long for a post.
LOAD = WorkerLoad(100.0, 50.0, 1e9, 80e9, posts_per_s=1000.0, device_busy=0.2)


class Clock:
    """Seconds that pass when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Machine:
    """A machine with two GPUs, and workers that are ready at once and report LOAD."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, settings: Settings | None = None
    ) -> None:
        cores = [frozenset({number}) for number in range(16)]
        monkeypatch.setattr(supervisor, "cores_by_package", lambda: cores)
        monkeypatch.setattr(filler, "queue_depth", self._depth)
        for name in supervisor.THREAD_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        self.waiting: int | None = 0
        self.clock = Clock()
        self.filler = Filler(settings or Settings(), ["4", "GPU-7"], self.clock)
        self.load: WorkerLoad | None = LOAD
        self.shares = self.filler.first_shares()

    def _depth(self, *_: Any) -> QueueDepth:
        if self.waiting is None:
            raise ConnectionFault("away")
        return QueueDepth(waiting=self.waiting, held=0, delayed=0)

    def after(self, seconds: float) -> list[Share]:
        """Let time pass, with a look every two seconds; return the workers that were added."""
        added: list[Share] = []
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += 2.0
            workers: Any = [_ReadyWorker(share, self.load) for share in self.shares]
            more = self.filler.more(workers)
            self.shares += more
            added += more
        return added


class _ReadyWorker:
    def __init__(self, share: Share, load: WorkerLoad | None) -> None:
        self.share = share
        self._load = load

    def is_up(self) -> bool:
        return True

    def load(self) -> WorkerLoad | None:
        return self._load


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_begins_with_a_worker_per_gpu_that_reports(machine: Machine) -> None:
    assert [share.name for share in machine.shares] == ["cuda:4", "cuda:GPU-7"]
    for share in machine.shares:
        assert share.device == "cuda"
        assert share.environment[worker_load.VARIABLE] == "1"
        assert "FEEDMILL_DEVICE_MEMORY" not in share.environment
        assert share.environment["RAYON_NUM_THREADS"] == "4"
    first, second = (share.processors for share in machine.shares)
    assert not first & second
    assert first | second == set(range(16))


def test_adds_workers_by_the_measurement(machine: Machine) -> None:
    added = machine.after(2)
    names = [share.name for share in added]
    assert names == [
        *(f"cuda:4-{number}" for number in (1, 2, 3)),
        *(f"cuda:GPU-7-{number}" for number in (1, 2, 3)),
    ]
    for share in added:
        assert share.processors in [first.processors for first in machine.shares[:2]]
        assert share.environment["RAYON_NUM_THREADS"] == "2"
        # seven of eight cores limit them: each may have a seventh of nine tenths
        assert share.environment["FEEDMILL_DEVICE_MEMORY"] == "0.129"


def test_users_limit_is_for_all_workers_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another program may use the rest of the memory."""
    limited = Machine(monkeypatch, Settings(device_memory=0.3))
    for share in limited.shares:
        assert "FEEDMILL_DEVICE_MEMORY" not in share.environment, "it is inherited"
    added = limited.after(2)
    assert added
    for share in added:
        # seven of eight cores limit them
        assert share.environment["FEEDMILL_DEVICE_MEMORY"] == f"{0.3 / 7:.3f}"
    tight = Machine(monkeypatch, Settings(device_memory=0.03))
    assert tight.after(60) == [], "2.4 GB are for one worker"


def test_adds_none_before_the_first_has_measured(machine: Machine) -> None:
    machine.load = None
    assert machine.after(60) == []


def test_adds_workers_while_devices_idle_and_messages_wait(machine: Machine) -> None:
    machine.after(2)
    assert machine.after(60) == []
    machine.waiting = 5
    assert machine.after(60)
    assert {share.environment["CUDA_VISIBLE_DEVICES"] for share in machine.shares} == {
        "4",
        "GPU-7",
    }
    assert len(machine.shares) == 10, "five each report a device busy all the time"


def test_messages_that_wait_for_a_moment_add_none(machine: Machine) -> None:
    machine.after(60)
    count = len(machine.shares)
    for _ in range(30):
        machine.waiting = 1
        machine.after(4)
        machine.waiting = 0
        machine.after(2)
    assert len(machine.shares) == count


def test_an_unreachable_redis_adds_none(machine: Machine) -> None:
    machine.after(60)
    count = len(machine.shares)
    machine.waiting = None
    machine.after(60)
    assert len(machine.shares) == count


@pytest.mark.parametrize(
    "note",
    [
        "READY=1",
        "X_FEEDMILL_LOAD=",
        "X_FEEDMILL_LOAD={}",
        "X_FEEDMILL_LOAD=[1, 2]",
        "X_FEEDMILL_LOAD=[1, 2, 3, 4, 5, -1]",
        "X_FEEDMILL_LOAD=[1, 2, 3, 4, 5, NaN]",
        'X_FEEDMILL_LOAD=[1, 2, 3, 4, 5, "x"]',
        "X_FEEDMILL_LOAD=[1, 2, 3, 4, 5, 6, 7]",
        f"X_FEEDMILL_LOAD=[1, 2, 3, 4, 5, {'9' * 5000}]",
    ],
)
def test_ignores_notes_without_valid_figures(note: str) -> None:
    assert read_note(note) is None


def test_figures_survive_a_note() -> None:
    assert read_note(LOAD.as_note()) == LOAD
    assert len(LOAD._replace(host_us=math.pi * 1e9).as_note()) < 500


@pytest.fixture
def reporting(tmp_path: Path) -> Iterator[Service]:
    """A child that is ready, and sends its figures."""
    script = f"""
import signal
from feedmill.shared import worker_load
from feedmill.shared.linux import notify
notify("READY=1")
for _ in range(10_000):
    worker_load.send(worker_load.WorkerLoad(*{tuple(LOAD)}))
notify("READY=1")
signal.pause()
"""
    command = [sys.executable, "-c", script]

    def launch(variables: dict[str, str]) -> Child:
        environment = dict(os.environ)
        return Child("worker", command, tmp_path, environment | variables)

    service = Service(launch)
    service.start()
    yield service
    service.close()


def test_a_supervisor_that_does_not_read_holds_no_worker_up(reporting: Service) -> None:
    """The worker sends far more notes than the socket holds, and then waits for a reader."""
    worker = Worker(Share("cuda", "cuda:0", {}), reporting)
    wait_until(lambda: worker.load() == LOAD, "the figures arrive")
    assert worker.is_up(), "figures do not count as not being ready"


# Where `auto` is not a number of workers.


def test_auto_is_the_single_device_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filler, "DRIVERS", ())
    settings = running._fill_gpus(Settings(devices="auto"), None)
    assert (settings.device, settings.devices) == ("auto", None)


def test_engines_without_a_limit_of_memory_get_one_worker_per_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filler, "gpus_to_fill", lambda: ["0"])
    settings = running._fill_gpus(Settings(devices="auto", engine="onnx"), None)
    assert settings.devices == "all"


def test_a_device_overrides_auto() -> None:
    settings = Settings(device="cpu", devices="auto")
    assert (settings.device, settings.devices) == ("cpu", None)
    assert Settings(devices="auto").named_devices is None
    assert Settings(devices="cpu:2").named_devices == "cpu:2"


# Summaries.


def pool(device: str, busy: float, queue: str = "feedmill") -> dict[str, Any]:
    return {
        "device": device,
        "queues": [queue],
        "recent": {"device_busy": busy, "posts_per_second": 10.0},
    }


WORKERS = {
    "a@one": pool("cuda:0 in float16: H200; as set", 0.3),
    "b@one": pool("cuda:0 in float16: H200; as set", 0.2),
    "c@one": pool("cuda:2+3 in float16: H200; as set", 0.99, "large"),
    "d@one": pool("cpu in float32: no GPU found", 0.5),
}


def test_summarizes_the_workers_of_each_gpu() -> None:
    assert gpu_lines(gpus_of(WORKERS, ["feedmill", "large"])) == [
        "GPU 0: 2 workers, device busy 0.50, host-bound: yes",
        "GPU 2+3: 1 worker, device busy 0.99, host-bound: no",
    ]
    assert gpu_lines(gpus_of(WORKERS, []))[0].endswith("host-bound: no")


def test_lists_gpus_by_number() -> None:
    names = ["10", "2", "0", "2+10", "2+3", "11", "1"]
    workers = {f"{name}@one": pool(f"cuda:{name} in float16", 0.5) for name in names}
    numbers = [gpu.number for gpu in gpus_of(workers, [])]
    assert numbers == ["0", "1", "2", "2+3", "2+10", "10", "11"]


def test_names_the_machine_where_there_are_several() -> None:
    workers = WORKERS | {"e@two": pool("cuda:0 in float16", 0.8)}
    lines = gpu_lines(gpus_of(workers, []))
    assert lines[0].startswith("GPU 0 of one: 2 workers")
    assert lines[-1].startswith("GPU 0 of two: 1 worker,")


def test_flower_shows_the_summary_at_each_worker() -> None:
    inspector = WorkerInspector(io_loop=None, capp=make_app(Settings()), timeout=1)
    inspector._waiting_queues = ("feedmill",)
    for node, statistics in WORKERS.items():
        own = statistics | {"implementation": DEVICE_POOL}
        inspector._on_update(node, "stats", {"pool": own})
    inspector._on_update("stock@one", "stats", {"pool": {"max-concurrency": 2}})
    lines = {
        node: information["stats"]["pool"].get("gpu")
        for node, information in inspector.workers.items()
    }
    shared = "GPU 0: 2 workers, device busy 0.50, host-bound: yes"
    assert lines == {
        "a@one": shared,
        "b@one": shared,
        "c@one": "GPU 2+3: 1 worker, device busy 0.99, host-bound: no",
        "d@one": None,
        "stock@one": None,
    }
