"""Measure a machine with a GPU end to end, in about fifteen minutes, and print the record.

`python -m benchmarks.gpu --all` runs it. Parts:

    waits       CPU time per post of one and six workers that spin, or sleep, while they wait for
                the GPU
    workers     posts/s, tokens/s, device busy and cores of 1, 2, 4, 6 and 8 workers by hand, and
                of `--devices auto`: MiniLM and BERT-base, 50 tokens per text, 64 posts per message
    modernbert  share of the ceiling that ModernBERT-base reaches
    precision   benchmarks/gpu_precision.py, on the embedded model
    tests       `make test-gpu`

Workers are real, with Redis, Celery and models of random weights. A part that fails, or that needs
a GPU, says so in the record; the others go on.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks import gpu_precision
from benchmarks.gpu_worker import WAITS, python_command
from benchmarks.hardware import describe
from benchmarks.random_models import save_bert_base, save_minilm
from benchmarks.running import cpu_seconds, family, run_folder
from benchmarks.scaling import Installation
from benchmarks.traffic import texts
from feedmill.monitoring.watch import worker_statistics
from feedmill.producers.files import FileSource
from feedmill.shared.errors import StackError, UserError
from feedmill.shared.messages import Post
from feedmill.shared.settings import PREFIX, Settings, variables
from feedmill.stack.processes import Child
from feedmill.workers.models.device import Device

MODELS: dict[str, Callable[[Path, Sequence[str], bool], None]] = {
    "MiniLM": save_minilm,
    "BERT-base": save_bert_base,
}
#: Words of a text: with the two special tokens, 50 tokens.
WORDS = 48
POSTS_PER_MESSAGE = 64
#: Rows of a micro-batch: more than a worker's default, which is made for CPUs as well.
BATCH_ROWS = 1024
#: Values of `--devices`: of the waits, and of the workers.
WAIT_DEVICES = ("0", "0,0,0,0,0,0")
WORKER_DEVICES = (
    "0",
    "0,0",
    "0,0,0,0",
    "0,0,0,0,0,0",
    "0,0,0,0,0,0,0,0",
    "auto",
)
CPU_DEVICES = ("cpu", "cpu:2", "auto")
#: Seconds until all workers are ready, or the number of workers of `auto` stays the same.
START_S = 180.0
#: Seconds of posts before a measurement, during which `auto` adds workers.
WARM_UP_S = 5.0
AUTO_WARM_UP_S = 75.0
#: Seconds between two looks at a run.
POLL_S = 0.25


class Size(NamedTuple):
    """The amount to measure."""

    #: Posts per second that a worker, and all of them, have at most; and seconds of a measurement.
    worker_rate: int
    most_rate: int
    seconds: float
    precision_posts: int
    is_tiny: bool


FULL = Size(9000, 60_000, 6.0, 4000, is_tiny=False)
TINY = Size(300, 600, 1.0, 40, is_tiny=True)


class Run(NamedTuple):
    """The workers' figures in a measurement."""

    devices: str
    workers: int
    posts_per_s: int
    tokens_per_s: int
    #: Share of the time that the GPU computed: by the workers' account, and by the driver's.
    device_busy: float
    driver_busy: float | None
    cores: float
    cpu_us_per_post: float


def record(arguments: Namespace, device: Device, console: Console) -> dict[str, Any]:
    """Measure the parts and return the record."""
    on_gpu = device.torch.type == "cuda"
    size = TINY if arguments.quick else FULL
    measured: dict[str, Any] = {
        "hardware": device.hardware,
        "machine": describe(device),
        "cores": len(os.sched_getaffinity(0)),
        "quick": arguments.quick,
    }
    with run_folder() as folder:
        machine = Machine(folder, size, on_gpu, console)
        parts: dict[str, Callable[[], Any]] = {
            "waits": machine.waits,
            "workers": machine.workers,
            "modernbert": lambda: modernbert(arguments),
            "precision": lambda: precision(arguments, device, size, console),
            "tests": lambda: tests(on_gpu),
        }
        for part in arguments.only:
            began = time.monotonic()
            console.print(f"[bold]{part}[/]")
            try:
                measured[part] = parts[part]()
            except (UserError, StackError, OSError, RuntimeError) as error:
                measured[part] = {"failed": str(error)}
            except SystemExit as error:
                if not isinstance(error.code, str):
                    raise  # a signal
                measured[part] = {"failed": error.code}
            seconds = time.monotonic() - began
            console.print(f"{part}: {measured[part]} in {seconds:.0f} s", markup=False)
    return measured


class Machine:
    """A machine whose workers are measured."""

    def __init__(
        self, folder: Path, size: Size, on_gpu: bool, console: Console
    ) -> None:
        self._folder = folder
        self._size = size
        self._on_gpu = on_gpu
        self._console = console
        words = " ".join(texts(2000, 256)).split()
        self._posts = [
            Post(id=f"p{start}", title=" ".join(words[start : start + WORDS]))
            for start in range(0, len(words) - WORDS, WORDS)
        ]

    def waits(self) -> Any:
        """Measure one and six workers of MiniLM that spin and that sleep."""
        if not self._on_gpu:
            return "not measured: needs a GPU"
        found: dict[str, Any] = {}
        for devices in WAIT_DEVICES:
            for waits in ("spin", "sleep"):
                run = self._run("MiniLM", devices, waits)
                found[f"{run.workers} workers, {waits}"] = run._asdict()
        return found

    def workers(self) -> Any:
        """Measure each number of workers, with each model."""
        chosen = WORKER_DEVICES if self._on_gpu else CPU_DEVICES
        found: dict[str, Any] = {}
        for model in MODELS:
            runs = [self._run(model, devices, "sleep") for devices in chosen]
            found[model] = [run._asdict() for run in runs]
        return found

    def _run(self, model: str, devices: str, waits: str) -> Run:
        """Measure workers on these devices."""
        folder = self._model_folder(model)
        number = len(list(self._folder.glob("house-*")))
        house = Installation(
            self._folder / f"house-{number}",
            self._posts,
            model=str(folder),
            batch_rows=BATCH_ROWS,
            cache_folder=self._folder / "cache",
        )
        try:
            posts = self._posts_for(devices)
            house.fill(posts, POSTS_PER_MESSAGE)
            with _workers(house, devices, waits) as child:
                _wait_for_workers(house, child, devices)
                house.begin()
                run = self._measure(house, child, devices)
        finally:
            house.close()
        self._console.print(f"{model}, {waits}: {run}", markup=False)
        return run

    def _model_folder(self, model: str) -> Path:
        folder = self._folder / model
        if not folder.exists():
            folder.mkdir()
            training = [post.title for post in self._posts]
            MODELS[model](folder, training, self._size.is_tiny)
        return folder

    def _posts_for(self, devices: str) -> int:
        """Return how many posts the workers need for their warm-up and the measurement."""
        size = self._size
        rate = min(size.most_rate, size.worker_rate * len(devices.split(",")))
        seconds = WARM_UP_S + 2 * size.seconds
        if devices == "auto":
            rate = size.most_rate
            if self._on_gpu:
                seconds += AUTO_WARM_UP_S
        return int(rate * seconds)

    def _measure(self, house: Installation, child: Child, devices: str) -> Run:
        warm_up_s = min(WARM_UP_S, self._size.seconds)
        if devices == "auto" and self._on_gpu:
            warm_up_s = AUTO_WARM_UP_S
        house.wait_for(1)
        _wait(house, warm_up_s)
        before = _state(house, child)
        _wait(house, self._size.seconds)
        driver_busy = _driver_busy()
        after = _state(house, child)
        seconds = after.at - before.at
        posts = max(1, after.posts - before.posts)
        cpu_s = after.cpu_s - before.cpu_s
        return Run(
            devices=devices,
            workers=after.workers,
            posts_per_s=round(posts / seconds),
            tokens_per_s=round((after.tokens - before.tokens) / seconds),
            device_busy=round(min(1.0, after.busy), 3),
            driver_busy=driver_busy,
            cores=round(cpu_s / seconds, 2),
            cpu_us_per_post=round(1e6 * cpu_s / posts, 1),
        )


class _State(NamedTuple):
    at: float
    posts: int
    tokens: int
    busy: float
    workers: int
    cpu_s: float


def _state(house: Installation, child: Child) -> _State:
    """Return what the workers have done so far."""
    pools = list(worker_statistics(house.app).values())
    cpu_s = 0.0
    for pid in family(child.process.pid):
        with suppress(OSError):  # it has ended
            cpu_s += cpu_seconds(pid)
    return _State(
        at=time.monotonic(),
        posts=sum(int(pool["posts"]) for pool in pools),
        tokens=sum(int(pool["tokens"]) for pool in pools),
        busy=sum(float(pool["recent"]["device_busy"]) for pool in pools),
        workers=len(pools),
        cpu_s=cpu_s,
    )


def _wait(house: Installation, seconds: float) -> None:
    """Wait, or until no message waits: a rate without messages would be too low."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and house.redis.llen(house.settings.queue):
        time.sleep(POLL_S)


@contextmanager
def _workers(house: Installation, devices: str, waits: str) -> Iterator[Child]:
    """Run workers on these devices, and stop them afterwards."""
    environment = (
        os.environ
        | variables(house.settings)
        | {
            f"{PREFIX}REDIS_URL": house.settings.broker_url,
            f"{PREFIX}DEVICES": devices,
            "PYTHONPATH": str(Path(__file__).parent.parent),
            WAITS: waits,
        }
    )
    folder = house.settings.data_folder
    child = Child("workers", [*python_command(), "worker"], folder, environment)
    try:
        yield child
    finally:
        child.process.send_signal(
            signal.SIGQUIT
        )  # the rest of the messages is not needed
        child.stop(20)


def _wait_for_workers(house: Installation, child: Child, devices: str) -> None:
    """Wait until all workers answer; of `auto`, the first."""
    expected = len(devices.split(","))
    kind, _, number = devices.partition(":")
    if kind == "cpu":
        expected = int(number or 1)
    end = time.monotonic() + START_S
    while len(worker_statistics(house.app)) < expected:
        child.check()
        if time.monotonic() > end:
            raise StackError(
                f"{expected} workers did not answer within {START_S:.0f} s"
            )


def _driver_busy() -> float | None:
    """Return the share of the time that the first GPU computed, by NVIDIA's driver."""
    command = [
        "nvidia-smi",
        "--query-gpu=utilization.gpu",
        "--format=csv,noheader,nounits",
    ]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20
        )
        first, *_ = answer.stdout.split()
        return float(first) / 100
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def modernbert(arguments: Namespace) -> Any:
    """Measure ModernBERT-base with benchmarks.gpu, in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--models",
        "modernbert-base",
        "--device",
        arguments.device,
    ]
    if arguments.quick:
        command.append("--quick")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(done.stderr[-500:])
    lines = done.stdout.splitlines()
    return json.loads(lines[-1])["models"]["modernbert-base"]


def precision(
    arguments: Namespace, device: Device, size: Size, console: Console
) -> Any:
    """Compare data types with the embedded model."""
    settings = Settings(device=arguments.device)
    posts = _read_posts(arguments.posts, size.precision_posts)
    return gpu_precision.measure(settings, device.torch.type, posts, console)


def _read_posts(path: str | None, count: int) -> list[Post]:
    """Return posts of a file, or generated ones."""
    if path is None:
        generated = texts(count, 256)
        return [Post(id=f"g{n}", title=text) for n, text in enumerate(generated)]
    posts: list[Post] = []
    for item in FileSource(path).items():
        if isinstance(item, Post):
            posts.append(item)
        if len(posts) == count:
            break
    return posts


def tests(on_gpu: bool) -> Any:
    """Run the tests that need a GPU; return pytest's last line."""
    if not on_gpu:
        return "not run: needs a GPU"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "-n",
        "0",
        "tests/gpu",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or [done.stderr[-500:]]
    failures = [line for line in lines if re.match("FAILED|ERROR", line)]
    return {"last_line": lines[-1], "failures": failures}
