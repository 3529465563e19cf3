"""Lessons for the workers: the process that fits a head, its progress, and the models it leaves.

One process runs at a time, of a lesson or of a measurement, which a lesson ends. Its time is
bounded, and it ends with this process.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from celery import Celery
from redis import Redis

from feedmill.shared import model_routing
from feedmill.shared.errors import (
    UserError,
    printable,
    require_packages,
)
from feedmill.shared.linux import die_with
from feedmill.shared.none_of_these import NO_LABEL
from feedmill.shared.settings import Settings, variables
from feedmill.stack.processes import environment
from feedmill.teaching.answer_file import AnsweredPost
from feedmill.teaching.candidates import DIGEST_CHARACTERS, Candidate
from feedmill.teaching.models import TaughtModels
from feedmill.teaching.plan import Example, Plan, StreamPost
from feedmill.teaching.review import ReviewQueue

logger = logging.getLogger(__name__)

#: Seconds for a lesson, and for a measurement.
LESSON_TIMEOUT_S = 1800.0
MEASURE_TIMEOUT_S = 300.0
#: Seconds that a process has to end before it is killed.
KILL_S = 5.0
#: Fewest answers that teach for a lesson, and answers between two measurements.
MIN_ANSWERS = 10
MEASURE_EVERY = 10
#: Posts without an answer that a lesson, and a measurement, learn from.
LESSON_POOL = 2000
MEASURE_POOL = 300
#: Newest results that show which model serves the queue.
NEWEST = 50
#: Module that the process runs.
LESSON = "feedmill.teaching.lesson"
#: Packages of workers that a lesson needs.
PACKAGES = ("torch", "transformers")
#: Folder of the taught models in that of the answers, unless workers may load models only from
#: another one.
MODELS_FOLDER = "models"
#: Characters of the log of a process that failed.
MAX_LOG = 4000


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of a lesson or a measurement.

    state: idle, running, done, failed or cancelled. report: see lesson.py.
    """

    state: str = "idle"
    phase: str = ""
    done: int = 0
    total: int | None = None
    began: float = 0.0
    seconds: float = 0.0
    message: str = ""
    report: dict[str, Any] | None = None
    #: The model's folder.
    model: str | None = None


class Run:
    """A process of a lesson or of a measurement.

    is_cancelled: whether somebody ended it. is_late: whether its time was over.
    """

    def __init__(self, plan: Plan, settings: Settings) -> None:
        self.plan = plan
        self._settings = settings
        self.is_measuring = plan.out is None
        self.timeout_s = MEASURE_TIMEOUT_S if self.is_measuring else LESSON_TIMEOUT_S
        self.is_cancelled = False
        self.is_late = False
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def start(self, folder: Path, log: IO[str]) -> "subprocess.Popen[str]":
        """Start the process. It ends with the calling thread."""
        file = folder / "plan.json"
        file.write_text(self.plan.model_dump_json(), encoding="utf-8")
        with self._lock:
            command = [sys.executable, "-P", "-m", LESSON, str(file)]
            # It needs no secret: it does not connect to Redis.
            settings_variables = environment(None) | variables(self._settings)
            end_with_this = partial(die_with, os.getpid())
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                env=settings_variables,
                start_new_session=True,
                preexec_fn=end_with_this,  # noqa: PLW1509
            )
            self._process = process
            if self.is_cancelled:
                process.kill()
        return process

    def cancel(self) -> None:
        with self._lock:
            self.is_cancelled = True
            self._kill()

    def time_out(self) -> None:
        with self._lock:
            self.is_late = True
            self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()


class Classroom:
    """Teaches the workers of the settings' queue. Thread-safe.

    Methods raise UserError, and redis.exceptions.RedisError.
    """

    def __init__(
        self, redis: Redis, celery: Celery, settings: Settings, queue: ReviewQueue
    ) -> None:
        self._redis = redis
        self._settings = settings
        self._queue = queue
        self._lock = threading.RLock()
        #: The runs of a lesson and of a measurement.
        self._lesson_run: Run | None = None
        self._measure_run: Run | None = None
        self._is_stopping = False
        self._threads: list[threading.Thread] = []
        self.lesson = Progress()
        self.measured = Progress()
        #: Number of tens of answers at the latest measurement.
        self._measured_rounds = 0
        folder = queue.file.folder / MODELS_FOLDER
        if settings.models_folder is not None:
            folder = settings.models_folder
        self.models = TaughtModels(
            redis, celery, settings, folder, self._forget_measurement
        )

    def stop(self) -> None:
        """End the process, and wait for the threads."""
        self._is_stopping = True
        with self._lock:
            runs = (self._lesson_run, self._measure_run)
        for run in runs:
            if run is not None:
                run.cancel()
        for thread in self._threads:
            thread.join(KILL_S)

    @property
    def missing(self) -> str:
        """Return why this machine cannot teach, else ""."""
        try:
            require_packages("Teaching", "worker", PACKAGES)
        except UserError as error:
            return str(error)
        return ""

    # Lessons.

    def teach(self) -> None:
        """Begin a lesson with all answers. Raises UserError if one runs or answers are missing."""
        require_packages("Teaching", "worker", PACKAGES)
        self._queue.refresh()
        plan = self._plan(LESSON_POOL)
        count = len(plan.examples)
        if count < MIN_ANSWERS:
            raise UserError(
                f"There are {count:,} answers with one of today's labels. Teach with at least "
                f"{MIN_ANSWERS}: answer more on the page Review."
            )
        with self._lock:
            if self._lesson_run is not None:
                raise UserError(
                    "A lesson runs already. Wait for its end, or cancel it."
                )
            if self._measure_run is not None:
                self._measure_run.cancel()
            folder = self.models.new_folder()
            self.lesson = Progress(
                state="running",
                phase="starting",
                began=time.time(),
            )
            plan.out = str(folder)
            self._lesson_run = Run(plan, self._settings)
            self._start(self._lesson_run)

    def measure_if_due(self) -> None:
        """Begin to measure the accuracy after MEASURE_EVERY answers, unless a process runs."""
        answers = self._queue.file.snapshot().answers.values()
        count = sum(answer.teaches for answer in answers)
        rounds = count // MEASURE_EVERY
        with self._lock:
            is_due = count >= MIN_ANSWERS and rounds != self._measured_rounds
            is_busy = self._lesson_run is not None or self._measure_run is not None
            if not is_due or is_busy or self._is_stopping or self.missing:
                return
            plan = self._plan(MEASURE_POOL)
            self._measured_rounds = rounds
            if len(plan.examples) < MIN_ANSWERS:
                return
            self.measured = replace(
                self.measured,
                state="running",
                began=time.time(),
            )
            self._measure_run = Run(plan, self._settings)
            self._start(self._measure_run)

    def cancel(self) -> None:
        """End the lesson that runs, if any."""
        with self._lock:
            if self._lesson_run is not None:
                self._lesson_run.cancel()

    def _forget_measurement(self) -> None:
        """Forget the accuracy: it was measured beside another model than today's."""
        with self._lock:
            if self._measure_run is not None:
                self._measure_run.cancel()
            self.measured = Progress()
            self._measured_rounds = 0

    def _plan(self, pool_size: int) -> Plan:
        names = list(self._queue.names)
        candidates = self._queue.candidates
        today = self._today(candidates)
        outcomes = {*names, NO_LABEL}
        snapshot = self._queue.file.snapshot()
        examples: list[Example] = []
        for answer in snapshot.answers.values():
            is_usable = answer.label in names or answer.fits_none
            if is_usable:
                example = _example(answer, today, outcomes)
                examples.append(example)
        pool: list[StreamPost] = []
        for candidate in candidates:
            if candidate.key.text not in snapshot.texts:
                post = _stream_post(candidate, today, outcomes)
                pool.append(post)
        return Plan(
            names=names,
            labels=self._queue.labels,
            template=self._settings.template,
            base=self._settings.model,
            examples=examples,
            pool=pool[:pool_size],
        )

    def _today(self, candidates: Sequence[Candidate]) -> str:
        """Return the digest of the model that serves the queue now: the deployed one, else the one
        of most of the newest results.
        """
        weights = model_routing.deployed_weights(self._redis, self._settings.queue)
        if weights:
            return weights[:DIGEST_CHARACTERS]
        newest = Counter(candidate.weights for candidate in candidates[:NEWEST])
        for digest, _ in newest.most_common(1):
            return digest
        return ""

    def _start(self, run: Run) -> None:
        """Attend to a run on a thread of its own."""
        thread = threading.Thread(
            target=self._supervise,
            args=(run,),
            name="lesson",
            daemon=True,
        )
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _supervise(self, run: Run) -> None:
        """Run a process, and note how it ends."""
        try:
            with tempfile.TemporaryDirectory(prefix="feedmill-lesson-") as folder:
                changes = self._attend(run, Path(folder))
        except Exception:
            logger.exception("a lesson failed")
            changes = _failed("The lesson failed. The server's log has the reason.")
        out = run.plan.out
        if changes["state"] != "done" and out is not None:
            shutil.rmtree(out, ignore_errors=True)
        with self._lock:
            self._note(run, **changes)
            if run.is_measuring:
                self._measure_run = None
                if run.is_cancelled:
                    self._measured_rounds = 0
                return
            self._lesson_run = None
            if changes["state"] == "done":
                self.measured = replace(self.lesson, model=None)
        self.models.prune()

    def _attend(self, run: Run, folder: Path) -> dict[str, Any]:
        """Start a process, and note its progress. Return how it ended, as fields of Progress."""
        with (folder / "log").open(
            "w+",
            encoding="utf-8",
            errors="replace",
        ) as log:
            process = run.start(folder, log)
            began = time.monotonic()
            timer = threading.Timer(run.timeout_s, run.time_out)
            timer.daemon = True
            timer.start()
            try:
                last = self._listen(run, process)
                status = process.wait()
            finally:
                timer.cancel()
                process.kill()
            seconds = time.monotonic() - began
            log.seek(0)
            text = log.read()[-MAX_LOG:]
        if "report" in last and status == 0:
            return {
                "state": "done",
                "report": last["report"],
                "seconds": seconds,
                "model": run.plan.out,
                "message": "",
            }
        if run.is_cancelled:
            return {"state": "cancelled", "message": "Cancelled."}
        if "error" in last:
            return _failed(str(last["error"]))
        if run.is_late:
            return _failed(
                f"It took more than {run.timeout_s:,.0f} s. Teach on a faster machine, or with "
                "fewer answers."
            )
        logger.error("a lesson ended with status %s: %s", status, printable(text))
        return _failed("The process failed. The server's log has the reason.")

    def _listen(self, run: Run, process: "subprocess.Popen[str]") -> dict[str, Any]:
        """Note the progress that a process prints. Return its last line."""
        last: dict[str, Any] = {}
        lines: Any = process.stdout
        with lines:
            for line in lines:
                last = json.loads(line)
                if "phase" in last:
                    self._note(
                        run,
                        phase=last["phase"],
                        done=last["done"],
                        total=last["total"],
                    )
        return last

    def _note(self, run: Run, **changes: Any) -> None:
        with self._lock:
            if run.is_measuring:
                self.measured = replace(self.measured, **changes)
            else:
                self.lesson = replace(self.lesson, **changes)


def _example(answer: AnsweredPost, today: str, outcomes: set[str]) -> Example:
    """Return an answer. Its label before counts if today's model gave it, and people could."""
    was: str | None = None
    if answer.was in outcomes and answer.was_by == today:
        was = answer.was
    return Example(
        id=answer.post.id,
        title=answer.post.title,
        body=answer.post.body,
        label=answer.label,
        why=answer.why,
        was=was,
    )


def _stream_post(candidate: Candidate, today: str, outcomes: set[str]) -> StreamPost:
    was: str | None = None
    if candidate.label in outcomes and candidate.weights == today:
        was = candidate.label
    return StreamPost(
        id=candidate.post.id,
        title=candidate.post.title,
        body=candidate.post.body,
        was=was,
    )


def _failed(message: str) -> dict[str, Any]:
    """Return the end of a run that failed, as fields of Progress."""
    return {"state": "failed", "message": message}
