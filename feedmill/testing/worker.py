"""A stand-in for a Feedmill worker in a thread of the test's process: no torch, Redis or network.

Requests, revocation, expiry, links and results are Celery's own; reading messages, refusing them
and forming outcomes is the worker's code. Only the broker, the result backend and the model are
replaced (memory.py, answers.py).

Relies on these internals of Celery 5.7: `Request.execute` runs a request on the calling thread,
and ends it if it was revoked or has expired. A mailbox's `Node` takes remote commands, whose
handlers are in `Panel.data`.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from operator import itemgetter
from typing import Any, Self

import kombu
from celery import Celery
from celery.app import app_or_default
from celery.exceptions import InvalidTaskError, NotRegistered
from celery.utils.collections import AttributeDict
from celery.worker.control import Panel
from celery.worker.strategy import proto1_to_proto2  # type: ignore[attr-defined]

from feedmill.shared.broker import Application, make_app
from feedmill.shared.errors import RequestRefused, UserError
from feedmill.shared.messages import ClassifyOptions, NoneThreshold, Post, parse_posts
from feedmill.shared.settings import DEFAULT_QUEUE, Settings
from feedmill.testing.answers import Answer, Answers
from feedmill.testing.memory import Memory
from feedmill.workers.pipeline.message import Message
from feedmill.workers.runtime.refusals import tell_failed
from feedmill.workers.runtime.request import (
    ClassifyRequest,
    check,
    ends_wait_in,
    read_name,
)
from feedmill.workers.runtime.task import ClassifyTask

logger = logging.getLogger(__name__)

#: Seconds for which the thread waits for a message before it looks at what is due.
TURN_S = 0.01
#: Seconds to wait for the thread's start and end.
PATIENCE_S = 30.0
#: Errors of a malformed message.
MALFORMED_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class FakeWorker:
    """Answer the messages that an application sends, until the `with` block ends.

        with FakeWorker(app, answer={"Where is my parcel?": "delivery"}) as worker:
            ...  # the code under test sends `feedmill.classify`, and waits for its result
            assert worker.posts[0].title == "Where is my parcel?"

    Inside the block, the application has a broker and a result backend in memory, whatever address
    it names, and its direct calls of `feedmill.classify_task` are answered, too.

    app: the Celery application that sends. Default: the process' current one.
    answer: a function of the post and the names of its labels, labels by a post's id, title or
        text, or the label of every post. A label is a name, several names, a score for each label,
        or None for a post that fits none. An error that the function raises fails the post.
        Default: the first label whose name is in the text, else the first label. It can be set
        again at any time.
    queues: names of the queues of which messages are answered.
    labels, none: the worker's own, for messages that name none. Default: the sixteen topics, and
        each post has a label.
    """

    def __init__(
        self,
        app: Celery | None = None,
        answer: Answer | None = None,
        *,
        queues: Sequence[str] = (DEFAULT_QUEUE,),
        labels: Any = None,
        none: NoneThreshold = None,
    ) -> None:
        options = ClassifyOptions.parse({"labels": labels, "none": none})
        self._app: Any = app_or_default(app)
        self._queues = tuple(queues)
        self.name = f"fake@{self._queues[0]}"
        self._answers = Answers(answer, options.labels, options.none, self.name)
        #: Arguments of each message that was answered or refused, as sent.
        self.messages: list[dict[str, Any]] = []
        self._memory = Memory()
        self._worker_app: Application
        self._thread: threading.Thread | None = None
        self._exit = ExitStack()
        self._ready = threading.Event()
        self._stopping = threading.Event()
        self._paused = False
        #: Messages that wait while the worker is paused.
        self._waiting: list[Any] = []
        #: Messages that are due later, each with the time at which it is to be looked at.
        self._delayed: list[tuple[float, Any]] = []
        self._failure: BaseException | None = None

    @property
    def answer(self) -> Answer | None:
        """The source of the posts' answers."""
        return self._answers.answer

    @answer.setter
    def answer(self, answer: Answer | None) -> None:
        self._answers.answer = answer

    @property
    def posts(self) -> list[Post]:
        """The valid posts of all messages, in the order of the messages."""
        posts = []
        for message in self.messages:
            sent = message.get("posts")
            if isinstance(sent, list):
                posts += [post for post in parse_posts(sent) if isinstance(post, Post)]
        return posts

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Connect the application to memory, and answer its messages."""
        if self._thread is not None:
            raise UserError("The worker runs already. Start another FakeWorker.")
        self._worker_app = make_app(Settings(redis_url="redis://in-memory:1/0"))
        with ExitStack() as exits:
            exits.enter_context(self._memory.serve(self._worker_app))
            exits.enter_context(self._memory.serve(self._app))
            for app in (self._worker_app, self._app):
                exits.enter_context(self._answering(app))
            self._thread = threading.Thread(
                target=self._run,
                name="fake feedmill worker",
                daemon=True,
            )
            self._thread.start()
            self._ready.wait(PATIENCE_S)
            self._exit = exits.pop_all()
        self._check()

    def stop(self) -> None:
        """End the thread, and connect the application as it was before."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(PATIENCE_S)
        self._exit.close()
        self._check()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let messages wait inside the block, as with a busy worker: to revoke them, or to let
        them expire.
        """
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def _answering(self, app: Any) -> Iterator[None]:
        """Have an application's tasks answered instead of computed."""
        tasks = [task for task in app.tasks.values() if isinstance(task, ClassifyTask)]
        for task in tasks:
            task.answer = self._set_outcomes
        try:
            yield
        finally:
            for task in tasks:
                del task.answer

    def _set_outcomes(self, message: Message) -> None:
        posts = {"posts": message.raw_posts}
        self.messages.append(posts | message.arguments)
        self._answers.set_outcomes(message)

    # On the worker's thread.

    def _run(self) -> None:
        try:
            with self._memory.connection() as connection, self._listening(connection):
                self._ready.set()
                while not self._stopping.is_set():
                    try:
                        connection.drain_events(timeout=TURN_S)
                    except TimeoutError:
                        # Remote commands that came before are handled now.
                        self._take_waiting()
        except BaseException as failure:
            # raised on the test's thread
            self._failure = failure
        finally:
            self._ready.set()

    @contextmanager
    def _listening(self, connection: kombu.Connection) -> Iterator[None]:
        """Consume the queues and take remote commands."""
        state = AttributeDict(
            app=self._worker_app,
            hostname=self.name,
            consumer=self,
            tset=set,
        )
        control: Any = self._worker_app.control
        node = control.mailbox.Node(
            self.name,
            channel=connection.channel(),
            handlers=Panel.data,
            state=state,
        )
        node.listen(callback=node.handle_message)
        queues = []
        for name in self._queues:
            exchange = kombu.Exchange(name)
            queues.append(kombu.Queue(name, exchange, routing_key=name))
        consumer = kombu.Consumer(
            connection.channel(),
            queues,
            on_message=self._take,
            accept=["json"],
        )
        with consumer:
            yield

    def _take(self, message: Any) -> None:
        if self._paused or self._waiting:
            self._waiting.append(message)
        else:
            self._handle(message)

    def _take_waiting(self) -> None:
        """Handle the messages that waited, and those that are due."""
        now = time.monotonic()
        due = [message for at, message in self._delayed if at <= now]
        self._delayed = [item for item in self._delayed if item[0] > now]
        if not self._paused:
            due = self._waiting + due
            self._waiting = []
        for message in due:
            self._handle(message)

    def _handle(self, message: Any) -> None:
        """Answer a message, or refuse it as a worker does."""
        try:
            body = message.payload
        except Exception as error:  # a serializer may raise anything
            self._refuse(message, error)
            return
        try:
            check(message)
            name = read_name(message)
            if name is None:
                raise RequestRefused(
                    "not a Celery message: neither its headers nor its body name a task"
                )
            task = self._worker_app.tasks.get(name)
            if not isinstance(task, ClassifyTask) and not str(name).startswith(
                "celery."
            ):
                raise NotRegistered(repr(name))
            wait = ends_wait_in(message)
            if wait > 0:
                self._delayed.append((time.monotonic() + wait, message))
                self._delayed.sort(key=itemgetter(0))
                return
            request = self._request(message, body, task)
        except (
            InvalidTaskError,
            NotRegistered,
            RequestRefused,
            *MALFORMED_ERRORS,
        ) as error:
            self._refuse(message, error)
            return
        request.execute()

    def _request(self, message: Any, body: Any, task: Any) -> Any:
        options: dict[str, Any] = {}
        if "task" not in message.headers:
            body, headers, decoded, utc = proto1_to_proto2(message, body)
            options = {"body": body, "headers": headers, "decoded": decoded, "utc": utc}
        return ClassifyRequest(
            message,
            app=self._worker_app,
            hostname=self.name,
            task=task,
            on_ack=message.ack_log_error,
            on_reject=message.reject_log_error,
            **options,
        )

    def _refuse(self, message: Any, error: Exception) -> None:
        """Tell the sender that no task can process its message."""
        with suppress(*MALFORMED_ERRORS):
            tell_failed(
                self._worker_app.backend,
                message,
                error,
                unread=False,
            )
        message.reject_log_error(logger, ())
