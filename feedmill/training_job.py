"""The task `feedmill.train`: what `feedmill train` does, for whoever asks through the queue.

A training is the command itself, as a process: what it took of memory is free afterwards, and its errors are the same
sentences. How far it is becomes the task's state, PROGRESS, in Celery's results and in Flower. It is registered with
the trainer's application alone, which takes messages from its own queue alone: no worker that classifies ever trains.

A trainer that ends gives an unfinished training back to the queue; the next one goes on at its last checkpoint.

What it leans on in Celery 5.7: a custom event `task-progress` makes the state PROGRESS, and its field `result` is shown
(celery/events/state.py).
"""

import json
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from celery import Task
from celery.exceptions import Reject
from celery.signals import worker_shutting_down

from feedmill.processes import die_with, python_command
from shared.broker import CLASSIFY_TASK, Application, make_app, reserve
from shared.errors import UserError, printable
from shared.settings import PREFIX, Settings
from shared.training import CHECKPOINTS, RESULTS, TRAIN_QUEUE, TRAIN_TASK, TrainOptions
from workers.run import run
from workers.weights import EMBEDDED

logger = logging.getLogger(__name__)

#: The state of a training that runs.
PROGRESS = "PROGRESS"
#: Of its metrics, what the task's result tells; training.json in its folder has the others.
TOLD = ("accuracy", "macro_f1", "calibration_error", "posts_per_s", "posts")


def make_trainer_app(settings: Settings) -> Application:
    """The application of a trainer: one task, one queue, one training at a time."""
    app = make_app(settings)
    reserve(app)
    app.conf.update(
        task_default_queue=TRAIN_QUEUE,
        task_track_started=True,
        # A thread, so that the trainer answers meanwhile; the training itself is a process.
        worker_pool="threads",
        worker_concurrency=1,
        worker_prefetch_multiplier=1,
        # Ours: what is no training is a dead letter, and no log shows what it says.
        worker_consumer="workers.consumer:Consumer",
    )
    trainings = Trainings(settings)
    worker_shutting_down.connect(trainings.end, weak=False)

    @app.task(bind=True, name=TRAIN_TASK, throws=(UserError,))
    def train(self: "Task[Any, Any]", /, **given: Any) -> dict[str, Any]:
        return trainings.run(self, given)

    app.finalize()
    # A shared task, which every application has: sent here it is a dead letter.
    app.tasks.unregister(CLASSIFY_TASK)
    return app


def run_trainer(settings: Settings, name: str | None) -> int:
    """Run until SIGTERM; returns the exit status. name: the node name."""
    return run(make_trainer_app(settings), name or f"feedmill-trainer-{os.getpid()}", queues=[TRAIN_QUEUE])


class Trainings:
    """Runs the command for each message."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[str] | None = None
        self._ending = threading.Event()

    def run(self, task: "Task[Any, Any]", given: Mapping[str, Any]) -> dict[str, Any]:
        """Train; where the model is, and how good. Raises UserError, and Reject where the trainer ends meanwhile."""
        options = within(TrainOptions.parse(dict(given)), self._settings)
        options = _going_on(options)
        settings = self._settings
        environment = {f"{PREFIX}REDIS_URL": settings.broker_url, f"{PREFIX}DEVICE": settings.device}
        parent = os.getpid()
        with subprocess.Popen(
            [*python_command(), "train", *options.flags(), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | environment,
            preexec_fn=lambda: die_with(parent),  # noqa: PLW1509 - it takes no lock: two system calls
        ) as process:
            self._process = process
            if self._ending.is_set():
                process.terminate()
            found, last = self._follow(task, process)
        self._process = None
        if self._ending.is_set() and process.returncode:
            raise Reject("the trainer ends", requeue=True)
        if found is None:
            said = last.removeprefix("feedmill: ")
            raise UserError(said if process.returncode == 2 else f"The training failed, see the trainer's log: {said}")
        return found

    def end(self, **_: Any) -> None:
        """The trainer is asked to end: so is its training."""
        self._ending.set()
        if self._process:
            self._process.terminate()

    def _follow(self, task: "Task[Any, Any]", process: "subprocess.Popen[str]") -> tuple[dict[str, Any] | None, str]:
        """(what came of it, the last line it said), while its progress is told."""
        found, last = None, ""
        for line in process.stdout or ():
            if not line.startswith("{"):
                last = line.strip() or last
                logger.info("training %s: %s", task.request.id, printable(line.rstrip()))
                continue
            said = json.loads(line)
            if trained := said.get("trained"):
                metrics = trained["metrics"] and {name: trained["metrics"][name] for name in TOLD}
                found = {name: trained[name] for name in ("folder", "labels", "train", "test", "seconds")}
                found["metrics"] = metrics
            elif now := said.get("progress") or said.get("plan"):
                meta = {"step": now.get("step", 0), "steps": now["steps"], "loss": now.get("loss")}
                task.update_state(state=PROGRESS, meta=meta)
                task.send_event("task-progress", result=f"step {meta['step']} of {meta['steps']}, loss {meta['loss']}")
        return found, last


def within(options: TrainOptions, settings: Settings) -> TrainOptions:
    """The options with paths in the folder for trainings. Raises UserError for those that lead out of it."""
    folder = settings.training_folder
    changed: dict[str, Any] = {"out": _inside(folder, options.out, "out")}
    if options.source != RESULTS:
        changed["source"] = _inside(folder, options.source, "from")
    if options.test is not None:
        changed["test"] = _inside(folder, options.test, "test")
    if options.base not in (EMBEDDED, settings.model):
        if options.base.startswith(("/", ".", "~")) or ".." in Path(options.base).parts:
            raise UserError(f"base: {printable(options.base)!r:.200} leads out of the folder for trainings.")
        if (folder / options.base).is_dir():
            changed["base"] = _inside(folder, options.base, "base")
    return options.model_copy(update=changed)


def _inside(folder: Path, name: str, option: str) -> str:
    path = (folder / name).resolve()
    if path == folder.resolve() or not path.is_relative_to(folder.resolve()):
        raise UserError(
            f"{option}: {printable(name)!r:.200} is not within the folder for trainings; name what is in it, such as "
            "topics-1."
        )
    return str(path)


def _going_on(options: TrainOptions) -> TrainOptions:
    """What an earlier trainer has begun is gone on with; from a stream that has moved on since, begun anew."""
    begun = Path(options.out) / CHECKPOINTS
    if not begun.is_dir():
        return options
    if options.source == RESULTS:
        shutil.rmtree(begun)
        return options.model_copy(update={"resume": False})
    return options.model_copy(update={"resume": True})
