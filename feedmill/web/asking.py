"""Ask the queue, and wait for the answers without a thread for each question.

A question is a Celery message of one task. All questions of a server have task ids with one
beginning, so that a single subscription receives every answer: Celery's result backend publishes
each result under the key that keeps it. A thread reads the subscription; another publishes
questions, all that came in the meantime at once.
"""

import asyncio
import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from feedmill.shared.backoff import Backoff
from feedmill.shared.broker import Application, connect, make_app, publish, queue_depth
from feedmill.shared.errors import SettingsError
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.model_routing import missing_worker
from feedmill.shared.redis_errors import trouble, user_message
from feedmill.shared.settings import PREFIX, Settings
from feedmill.shared.trace_context import TraceContext
from feedmill.web.failures import Failure

logger = logging.getLogger(__name__)

#: Most questions that wait for an answer, over all callers.
MAX_WAITING = 2000
#: Start of the keys that keep Celery's results.
RESULT_KEY = "celery-task-meta-"
#: Seconds between two looks for answers that the subscription missed.
CHECK_INTERVAL_S = 5.0
#: Seconds between two looks at the queue's depth.
DEPTH_INTERVAL_S = 1.0
#: Pauses before each attempt to subscribe again.
RECONNECTIONS = Backoff(first_s=0.1, max_s=5.0)


@dataclass(eq=False)
class Question:
    """Posts whose labels a caller waits for."""

    task_id: str
    posts: Sequence[Post]
    options: ClassifyOptions
    answer: "asyncio.Future[Any]" = field(repr=False)
    #: The caller's span.
    trace: TraceContext | None = None


class Asker:
    """Sends questions to the queue of the settings, and receives the answers.

    Use it on one event loop, between `start` and `stop`.
    """

    def __init__(self, settings: Settings, priority: int = 0) -> None:
        if settings.celery_results != "redis":
            raise SettingsError(
                f"{PREFIX}CELERY_RESULTS must be redis, also for the workers: the web server "
                "reads answers from Redis."
            )
        self._settings = settings
        self._priority = priority
        self._app: Application = make_app(settings, current=False)
        self._redis = connect(settings)
        self._beginning = _task_id_beginning()
        self._count = 0
        #: Questions without an answer, by task id.
        self._waiting: dict[str, Question] = {}
        #: Questions that are not published yet.
        self._unsent: list[Question] = []
        self._has_unsent = threading.Event()
        self._lock = threading.Lock()
        self._is_stopping = False
        self._is_full = False
        self._depth_at = 0.0
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads. Call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        for work in (self._listen, self._publish_unsent):
            thread = threading.Thread(
                target=work,
                name=work.__name__,
                daemon=True,
            )
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """End the threads, and fail what still waits."""
        self._is_stopping = True
        self._has_unsent.set()
        for question in list(self._waiting.values()):
            # Futures belong to the event loop's thread; this is another one.
            self._loop.call_soon_threadsafe(
                self._fail,
                question,
                Failure(503, "stopping", "The server stops. Ask again."),
            )
        for thread in self._threads:
            thread.join(CHECK_INTERVAL_S)
        self._redis.close()

    async def ask(
        self,
        posts: Sequence[Post],
        options: ClassifyOptions,
        timeout_s: float,
        trace: TraceContext | None = None,
    ) -> list[dict[str, Any]]:
        """Return one outcome per post, in order, as the task returns them. trace: the caller's
        span.

        The message is revoked if the caller leaves or the time is over. Raises Failure; and what
        the task raised, such as RequestRefused or MessageFailed.
        """
        if len(self._waiting) >= MAX_WAITING or self._is_full:
            raise Failure(
                503, "busy", "Too many posts wait already. Ask again in some seconds."
            )
        self._count += 1
        question = Question(
            task_id=f"{self._beginning}{self._count:012x}",
            posts=posts,
            options=options,
            answer=self._loop.create_future(),
            trace=trace,
        )
        self._waiting[question.task_id] = question
        with self._lock:
            self._unsent.append(question)
        self._has_unsent.set()
        try:
            async with asyncio.timeout(timeout_s):
                outcomes = await question.answer
        except TimeoutError:
            await asyncio.to_thread(self._withdraw, question)
            reason = await asyncio.to_thread(self._why_late)
            raise Failure(
                504, "timeout", f"There is no answer after {timeout_s:g} s: {reason}."
            ) from None
        except asyncio.CancelledError:
            # The caller has left: nobody waits for this thread.
            self._loop.run_in_executor(None, self._withdraw, question)
            raise
        finally:
            self._waiting.pop(question.task_id, None)
        if isinstance(outcomes, Exception):
            raise outcomes
        return list(outcomes)

    def _why_late(self) -> str:
        """Return a clause about an answer that did not come in time."""
        try:
            missing = missing_worker(self._redis, self._settings)
            depth = queue_depth(self._redis, self._settings.queue)
        except RedisError as fault:
            return f"Redis does not answer ({trouble(fault)})"
        if missing:
            return missing
        return f"{depth.waiting:,} messages wait in queue {self._settings.queue}"

    def _withdraw(self, question: Question) -> None:
        """Revoke a message; forget its result. A worker that has started it may finish it."""
        control: Any = self._app.control
        with suppress(RedisError, OSError, OperationalError):
            control.revoke(question.task_id)
            self._redis.unlink(RESULT_KEY + question.task_id)

    # Publishing, on its own thread.

    def _publish_unsent(self) -> None:
        while not self._is_stopping:
            self._has_unsent.wait()
            self._has_unsent.clear()
            with self._lock:
                questions = self._unsent
                self._unsent = []
            by_options: dict[str, list[Question]] = defaultdict(list)
            for question in questions:
                key = question.options.model_dump_json()
                by_options[key].append(question)
            for group in by_options.values():
                self._publish(group)

    def _publish(self, questions: Sequence[Question]) -> None:
        """Publish questions with the same options as one batch."""
        try:
            self._look_at_depth()
            publish(
                self._app,
                [question.posts for question in questions],
                questions[0].options,
                self._priority,
                [question.task_id for question in questions],
                [question.trace for question in questions],
            )
        except RedisError as fault:
            text = user_message(fault, self._settings)
            failure = Failure(503, "redis_unavailable", text)
        except Exception:
            logger.exception("cannot publish")
            failure = Failure(500, "internal", "The message could not be published.")
        else:
            return
        for question in questions:
            self._loop.call_soon_threadsafe(self._fail, question, failure)

    def _look_at_depth(self) -> None:
        """Note from time to time whether the queue is full."""
        now = time.monotonic()
        if now < self._depth_at:
            return
        self._depth_at = now + DEPTH_INTERVAL_S
        depth = queue_depth(self._redis, self._settings.queue)
        self._is_full = depth.waiting >= self._settings.queue_limit

    def _fail(self, question: Question, failure: Exception) -> None:
        if not question.answer.done():
            question.answer.set_exception(failure)

    # Receiving, on its own thread.

    def _listen(self) -> None:
        failures = 0
        redis: Any = self._redis
        pattern = f"{RESULT_KEY}{self._beginning}*"
        while not self._is_stopping:
            subscription = redis.pubsub(ignore_subscribe_messages=True)
            try:
                subscription.psubscribe(pattern)
                self._receive(subscription)
                failures = 0
            except RedisError as fault:
                if failures == 0 and not self._is_stopping:
                    text = user_message(fault, self._settings)
                    logger.warning("%s Retrying.", text)
                time.sleep(RECONNECTIONS.pause_s(failures))
                failures += 1
            finally:
                with suppress(RedisError):
                    subscription.close()

    def _receive(self, subscription: Any) -> None:
        """Deliver answers until the server stops."""
        self._collect_missed()
        check_at = time.monotonic() + CHECK_INTERVAL_S
        while not self._is_stopping:
            message = subscription.get_message(timeout=1.0)
            received: dict[str, Any] = {}
            while message is not None:
                if message["type"] == "pmessage":
                    received[message["channel"]] = message["data"]
                message = subscription.get_message(timeout=0.0)
            if received:
                self._deliver(received)
            now = time.monotonic()
            if now >= check_at:
                self._collect_missed()
                check_at = now + CHECK_INTERVAL_S

    def _collect_missed(self) -> None:
        """Deliver answers that were published while nobody was subscribed."""
        task_ids = list(self._waiting)
        if not task_ids:
            return
        keys = [RESULT_KEY + task_id for task_id in task_ids]
        texts: Any = self._redis.mget(keys)
        received = {key: text for key, text in zip(keys, texts, strict=True) if text}
        if received:
            self._deliver(received)

    def _deliver(self, received: dict[str, Any]) -> None:
        """Hand results to those who wait for them, and delete them."""
        backend: Any = self._app.backend
        settled: list[tuple[str, Any]] = []
        for key, text in received.items():
            meta = backend.meta_from_decoded(json.loads(text))
            if meta["status"] in backend.READY_STATES:
                settled.append((key, meta["result"]))
        if not settled:
            return
        self._loop.call_soon_threadsafe(self._settle, settled)
        self._redis.unlink(*(key for key, _ in settled))

    def _settle(self, settled: Sequence[tuple[str, Any]]) -> None:
        for key, result in settled:
            question = self._waiting.get(key.removeprefix(RESULT_KEY))
            if question is not None and not question.answer.done():
                question.answer.set_result(result)


def _task_id_beginning() -> str:
    """Return the first 24 characters of ids that look like UUIDs; twelve digits are left."""
    digits = token_hex(10)
    return f"{digits[:8]}-{digits[8:12]}-4{digits[12:15]}-a{digits[15:18]}-"
