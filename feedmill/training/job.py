"""Run trainings as Celery tasks: `feedmill.train` is the counterpart of the command `feedmill train`.

Each training runs the command as a child process, whose memory is released when it exits and whose error message
becomes the task's error. Progress is published as the task state PROGRESS, in Celery's result backend and in Flower.
The task is registered only in the trainer's application, which consumes only the training queue, so workers that
classify never train.

A trainer that shuts down returns an unfinished training to the queue; the next trainer resumes at the last checkpoint.

Relies on Celery 5.7 (celery/events/state.py): the custom event `task-progress` sets the state PROGRESS, and Flower
shows the event's field `result`.
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

from feedmill.stack.processes import python_command
from shared.broker import CLASSIFY_TASK, Application, make_app
from shared.errors import UserError, printable
from shared.linux import die_with
from shared.settings import PREFIX, Settings
from shared.training import CHECKPOINTS, RESULTS, TRAIN_QUEUE, TRAIN_TASK, TrainOptions
from workers.models.weights import EMBEDDED_MODEL
from workers.run import run
from workers.transport.redis_transport import use_leases

logger = logging.getLogger(__name__)

#: Task state of a running training.
PROGRESS = "PROGRESS"
#: Metrics in the task's result. training.json in the model's folder has all of them.
RESULT_METRICS = ("accuracy", "macro_f1", "calibration_error", "posts_per_s", "posts")


def make_trainer_app(settings: Settings) -> Application:
    """Create the trainer's Celery application: one task, one queue, one training at a time."""
    app = make_app(settings)
    use_leases(app)
    app.conf.update(
        task_default_queue=TRAIN_QUEUE,
        task_track_started=True,
        # A thread lets the trainer answer remote control while the training's process runs.
        worker_pool="threads",
        worker_concurrency=1,
        worker_prefetch_multiplier=1,
        # Feedmill's consumer turns other messages into dead letters and keeps their content out of the log.
        worker_consumer="workers.runtime.consumer:Consumer",
    )
    trainings = Trainings(settings)
    worker_shutting_down.connect(trainings.end, weak=False)

    @app.task(bind=True, name=TRAIN_TASK, throws=(UserError,))
    def train(self: "Task[Any, Any]", /, **given: Any) -> dict[str, Any]:
        return trainings.run(self, given)

    app.finalize()
    # Every application has this shared task. Unregistered, a post sent to this queue becomes a dead letter.
    app.tasks.unregister(CLASSIFY_TASK)
    return app


def run_trainer(settings: Settings, name: str | None) -> int:
    """Run a trainer until SIGTERM and return the exit status. name: node name."""
    return run(make_trainer_app(settings), name or f"feedmill-trainer-{os.getpid()}", queues=[TRAIN_QUEUE])


class Trainings:
    """A runner that executes `feedmill train` for each message, one at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[str] | None = None
        self._ending = threading.Event()

    def run(self, task: "Task[Any, Any]", given: Mapping[str, Any]) -> dict[str, Any]:
        """Train a model and return its folder and metrics.

        Raises UserError, and Reject (which requeues the message) if the trainer shuts down meanwhile.
        """
        options = within(TrainOptions.parse(dict(given)), self._settings)
        options = _resumed(options)
        settings = self._settings
        environment = {f"{PREFIX}REDIS_URL": settings.broker_url, f"{PREFIX}DEVICE": settings.device}
        parent = os.getpid()
        with subprocess.Popen(
            [*python_command(), "train", *options.flags(), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | environment,
            preexec_fn=lambda: die_with(parent),  # noqa: PLW1509 - takes no lock: two system calls
        ) as process:
            self._process = process
            if self._ending.is_set():
                process.terminate()
            found, last = self._follow(task, process)
        self._process = None
        if self._ending.is_set() and process.returncode:
            raise Reject("the trainer is shutting down", requeue=True)
        if found is None:
            message = last.removeprefix("feedmill: ")
            raise UserError(
                message
                if process.returncode == 2
                else f"The training failed: {message.rstrip('.')}. See the trainer's log."
            )
        return found

    def end(self, **_: Any) -> None:
        """Terminate the training when the trainer begins to shut down."""
        self._ending.set()
        if self._process:
            self._process.terminate()

    def _follow(self, task: "Task[Any, Any]", process: "subprocess.Popen[str]") -> tuple[dict[str, Any] | None, str]:
        """Publish the training's progress until it ends; return its result, or None, and its last log line."""
        found, last = None, ""
        for line in process.stdout or ():
            if not line.startswith("{"):
                last = line.strip() or last
                logger.info("training %s: %s", task.request.id, printable(line.rstrip()))
                continue
            event = json.loads(line)
            if trained := event.get("trained"):
                metrics = trained["metrics"] and {name: trained["metrics"][name] for name in RESULT_METRICS}
                found = {name: trained[name] for name in ("folder", "labels", "train", "test", "seconds")}
                found["metrics"] = metrics
            elif now := event.get("progress") or event.get("plan"):
                meta = {"step": now.get("step", 0), "steps": now["steps"], "loss": now.get("loss")}
                task.update_state(state=PROGRESS, meta=meta)
                task.send_event("task-progress", result=f"step {meta['step']} of {meta['steps']}, loss {meta['loss']}")
        return found, last


def within(options: TrainOptions, settings: Settings) -> TrainOptions:
    """Resolve the options' paths inside the training folder. Raises UserError for a path outside of it."""
    folder = settings.training_folder
    changed: dict[str, Any] = {"out": _inside(folder, options.out, "out")}
    if options.source != RESULTS:
        changed["source"] = _inside(folder, options.source, "from")
    if options.test is not None:
        changed["test"] = _inside(folder, options.test, "test")
    if options.base not in (EMBEDDED_MODEL, settings.model):
        if options.base.startswith(("/", ".", "~")) or ".." in Path(options.base).parts:
            raise UserError(
                f"base: {printable(options.base)!r:.200} is outside the trainer's FEEDMILL_TRAINING_FOLDER. Give a "
                "path inside it."
            )
        if (folder / options.base).is_dir():
            changed["base"] = _inside(folder, options.base, "base")
    return options.model_copy(update=changed)


def _inside(folder: Path, name: str, option: str) -> str:
    path = (folder / name).resolve()
    if path == folder.resolve() or not path.is_relative_to(folder.resolve()):
        raise UserError(
            f"{option}: {printable(name)!r:.200} is outside the trainer's FEEDMILL_TRAINING_FOLDER. Give a path inside "
            "it, such as topics-1."
        )
    return str(path)


def _resumed(options: TrainOptions) -> TrainOptions:
    """Resume an unfinished training. With the results stream as source, start over, because the stream has changed."""
    begun = Path(options.out) / CHECKPOINTS
    if not begun.is_dir():
        return options
    if options.source == RESULTS:
        shutil.rmtree(begun)
        return options.model_copy(update={"resume": False})
    return options.model_copy(update={"resume": True})
