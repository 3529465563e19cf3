"""kombu's bindings of queues to exchanges, whatever producers have written there
(docker/users.conf).

A key of another type would keep every worker from connecting, and `feedmill status` from asking
the workers. A member that is not a binding would keep workers from answering remote commands.

Relies on these internals of kombu's Redis channel: `_queue_bind` writes a binding, and
`_active_queues` has the queues that are consumed.
"""

from typing import Any

from kombu.transport import redis as _kombu_redis
from redis.exceptions import ResponseError

from feedmill.shared.redis_errors import is_wrong_type

#: Typed as Any: kombu's stubs cover few internals.
kombu_redis: Any = _kombu_redis

#: Parts of a binding: routing key, pattern and queue.
PARTS = 3


class BindingsChannel(kombu_redis.Channel):  # type: ignore[misc]  # see kombu_redis
    """A channel that ignores what is not a binding, and deletes keys of bindings that have another
    type.
    """

    def _queue_bind(self, exchange: str, *args: Any) -> None:
        try:
            super()._queue_bind(exchange, *args)
        except ResponseError as error:
            if not is_wrong_type(error):
                raise
            self._delete_other_types(exchange)
            super()._queue_bind(exchange, *args)

    def get_table(self, exchange: str) -> list[tuple[str, ...]]:
        try:
            table = super().get_table(exchange)
        except ResponseError as error:
            if not is_wrong_type(error):
                raise
            self._delete_other_types(exchange)
            return []
        return [binding for binding in table if len(binding) == PARTS]

    def maybe_refresh_binding_expiry(self) -> None:
        try:
            super().maybe_refresh_binding_expiry()
        except ResponseError as error:
            if not is_wrong_type(error):
                raise
            for queue in self._active_queues:
                for exchange, *_ in self.state.queue_bindings(queue):
                    self._delete_other_types(exchange)
            super().maybe_refresh_binding_expiry()

    def _delete_other_types(self, exchange: str) -> None:
        types = {
            self.keyprefix_queue % exchange: "set",
            self.keyprefix_binding_permanent % exchange: "set",
            self.keyprefix_binding_deadlines: "zset",
        }
        with self.conn_or_acquire() as client:
            for key, kind in types.items():
                actual_kind = client.type(key).decode()
                if actual_kind not in (kind, "none"):
                    client.delete(key)


class BindingsTransport(kombu_redis.Transport):  # type: ignore[misc]  # see kombu_redis
    """kombu's transport for redis:// and rediss:// URLs that tolerates odd bindings."""

    Channel = BindingsChannel


# See kombu_redis.
class SentinelBindingsChannel(BindingsChannel, kombu_redis.SentinelChannel):  # type: ignore[misc]
    """The same, to the master that Redis Sentinel reports."""


# See kombu_redis.
class SentinelBindingsTransport(kombu_redis.SentinelTransport):  # type: ignore[misc]
    """kombu's transport for sentinel:// URLs that tolerates odd bindings."""

    Channel = SentinelBindingsChannel


def tolerant(kind: Any) -> Any:
    """Return the transport to use instead of kombu's for Redis; any other as it is."""
    replacements = {
        kombu_redis.Transport: BindingsTransport,
        kombu_redis.SentinelTransport: SentinelBindingsTransport,
    }
    return replacements.get(kind, kind)
