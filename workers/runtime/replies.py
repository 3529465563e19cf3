"""Let replies expire that a killed client never reads: results by rpc, and answers to remote
commands.

Both are messages in a list of the client, which only the client empties. kombu lets a queue expire
only in the process that declared it: the client.

Relies on kombu's `_publish_reply`, which sends the answer to a remote command.
"""

import logging
from functools import wraps
from typing import Any
from uuid import UUID

from celery.app import control
from celery.backends.rpc import RPCBackend
from redis.exceptions import RedisError

from feedmill.shared.broker import Application

logger = logging.getLogger(__name__)

#: Seconds for which an answer to a remote command is kept. Who waits for it reads it at once.
ANSWER_TTL_S = 60
#: Typed as Any: the stubs declare few internals.
RpcBackend: Any = RPCBackend
BaseControl: Any = control.Control
BaseMailbox: Any = control.Control.Mailbox


def expire_replies(backend: Any, app: Application) -> Any:
    """Let the lists of a result backend's replies expire as results do (`result_expires`), and
    return the backend.

    Each reply starts the time again. A sender that reads its replies empties the list, which then
    does not exist.
    """
    if not isinstance(backend, RpcBackend) or not backend.expires:
        return backend
    store = backend.store_result

    @wraps(store)
    def store_result(
        task_id: str,
        result: Any,
        state: str,
        traceback: Any = None,
        request: Any = None,
        **options: Any,
    ) -> Any:
        stored = store(
            task_id, result, state, traceback=traceback, request=request, **options
        )
        reply_to, _ = backend.destination_for(task_id, request)
        # Senders may name any list, such as a queue, whose messages must not expire.
        if is_client_id(reply_to):
            _expire(app, reply_to, backend.expires)
        return stored

    backend.store_result = store_result
    return backend


class Mailbox(BaseMailbox):  # type: ignore[misc]  # see BaseMailbox
    """A mailbox for remote commands whose answers expire."""

    app: Application

    def _publish_reply(
        self, reply: Any, exchange: Any, routing_key: Any, ticket: Any, **options: Any
    ) -> None:
        super()._publish_reply(
            reply,
            exchange,
            routing_key,
            ticket,
            **options,
        )
        is_answer = exchange == self.reply_exchange.name
        if is_answer and is_client_id(routing_key):
            queue = f"{routing_key}.{exchange}"
            _expire(self.app, queue, ANSWER_TTL_S)


class Control(BaseControl):  # type: ignore[misc]  # see BaseControl
    """Celery's remote control, with this mailbox."""

    Mailbox = Mailbox

    def __init__(self, app: Application) -> None:
        super().__init__(app)
        self.mailbox.app = app


def is_client_id(name: Any) -> bool:
    """Return whether this is an id that Celery gives clients: a UUID."""
    try:
        identity = str(UUID(name))
    except (ValueError, AttributeError, TypeError):
        return False
    return bool(identity == name)


def _expire(app: Application, key: str, seconds: int) -> None:
    """Let a list expire. If Redis fails, the next reply to this client does."""
    try:
        app.redis.expire(key, seconds)
    except RedisError as fault:
        logger.debug("cannot set the expiry of replies %s: %s", key, fault)
