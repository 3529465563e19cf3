"""Redis addresses: accepted forms, the settings derived from them, and errors that name the
setting.
"""

import ssl
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import redis as redis_py
from redis import Redis
from redis.exceptions import InvalidResponse, ReadOnlyError, RedisError, ResponseError

from feedmill.shared.broker import connect, make_app
from feedmill.shared.errors import RedisUnavailable, SettingsError
from feedmill.shared.redis_errors import user_errors
from feedmill.shared.settings import Settings, load
from feedmill.stack.embedded import Stack
from feedmill.workers.transport.redis_transport import lease_options

SENTINELS = "sentinel://u:s3cret@a:1/2;sentinel://u:s3cret@b/2"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://host", "redis://"),
        ("amqp://u:s3cret@host//", "redis://"),
        ("s3cret", "redis://"),
        ("redis://:s3/cret@host", "[Pp]ercent"),
        ("redis://:s3cret@", "redis://"),
        ("redis://host/a", "redis://"),
        ("redis://a;redis://b", "sentinel://"),
        ("redis://:s3;cret@host", "redis://"),
        ("redis://host?ssl_cert_reqs=none", r"\?options"),
        ("sentinel://:s3cret@a;sentinel://b", "Sentinel"),
        ("sentinel://a,b:26379", "redis://"),
    ],
)
def test_rejects_unusable_redis_addresses(url: str, words: str) -> None:
    with pytest.raises(SettingsError, match=f"^--redis-url: .*{words}") as told:
        load(
            redis_url=url, redis_master="posts" if url.startswith("sentinel") else None
        )
    assert "cret" not in str(told.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"redis_url": "sentinel://a"}, "^FEEDMILL_REDIS_MASTER: "),
        (
            {"redis_url": "redis://a", "redis_master": "m"},
            "^--redis-master: .*sentinel://",
        ),
        (
            {"redis_url": "redis://a", "redis_sentinel_password": "s3cret"},
            "^--redis-sentinel-password: .*sentinel://",
        ),
        (
            {"redis_url": "sentinel://a", "redis_master": "m", "redis_ca_file": "x"},
            "^--redis-ca-file: .*rediss://",
        ),
    ],
)
def test_rejects_settings_for_another_address_scheme(
    flags: dict[str, str], words: str
) -> None:
    with pytest.raises(SettingsError, match=words) as told:
        load(**flags)
    assert "s3cret" not in str(told.value)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            ReadOnlyError("You can't write against a read only replica."),
            "replica.*FEEDMILL_REDIS_URL",
        ),
        (ResponseError("MISCONF Errors writing to the AOF file"), "MISCONF"),
        (
            ResponseError("WRONGTYPE Operation against a key"),
            "another application.*FEEDMILL_REDIS_URL",
        ),
        (ResponseError("NOREPLICAS Not enough good replicas"), "NOREPLICAS"),
        (
            InvalidResponse('Protocol error, got "<" as reply type byte'),
            "Protocol error.*FEEDMILL_REDIS_URL",
        ),
    ],
)
def test_explains_why_redis_rejects_commands(fault: RedisError, words: str) -> None:
    with (
        pytest.raises(RedisUnavailable, match=f"^Redis at host:6379/0 .*{words}"),
        user_errors(load(redis_url="redis://host")),
    ):
        raise fault


def test_sentinel_settings_reach_every_connection() -> None:
    settings = load(
        redis_url=SENTINELS, redis_master="posts", redis_sentinel_password="theirs"
    )
    assert all(
        part in settings.redis_address for part in ("posts", "2", "a:1", "b:26379")
    )
    assert "s3cret" not in repr(settings) + repr(settings.redis) + str(settings.redis)
    assert "theirs" not in repr(settings)
    pool = connect(settings).connection_pool
    assert (pool.service_name, pool.connection_kwargs["db"]) == ("posts", 2)  # type: ignore[attr-defined]
    app = make_app(settings)
    for options in (
        app.conf.broker_transport_options,
        app.conf.result_backend_transport_options,
    ):
        assert options["master_name"] == "posts"
        assert options["sentinel_kwargs"]["password"] == "theirs"
    leased: Any = app.connection_for_read(**lease_options(settings))
    assert (
        leased.transport_cls
        == "feedmill.workers.transport.redis_transport:SentinelTransport"
    )
    assert leased.transport_options["master_name"] == "posts"
    assert leased.transport_options["reserved_key"] == "feedmill:reserved"


def test_every_rediss_connection_verifies_certificates() -> None:
    settings = load(redis_url="rediss://:s3cret@h/1")
    assert settings.redis_address == "h:6379/1"
    app = make_app(settings)
    assert (
        app.conf.broker_use_ssl
        == app.conf.redis_backend_use_ssl
        == {"ssl_cert_reqs": ssl.CERT_REQUIRED}
    )
    leased = app.connection_for_read(**lease_options(settings))
    assert leased.ssl == {"ssl_cert_reqs": ssl.CERT_REQUIRED}
    assert (
        leased.transport_cls == "feedmill.workers.transport.redis_transport:Transport"
    )
    assert (
        connect(settings).connection_pool.connection_kwargs["ssl_cert_reqs"]
        == ssl.CERT_REQUIRED
    )


def test_embedded_stack_uses_its_own_redis(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The stack ignores another Redis that the settings configure."""
    outside = load(
        redis_url=SENTINELS, redis_master="posts", redis_sentinel_password="theirs"
    )
    stack = Stack(outside, tmp_path_factory.mktemp("stack"), durable=False)
    assert stack.settings.redis.scheme == "redis"
    assert not stack.settings.redis_master
    assert not stack.settings.redis_sentinel_password
    stack.stop()


# Some of the lines are in finalizers, which drop the interrupt.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["command", "pipeline", "transaction"])
def test_clients_read_their_own_replies_after_a_signal_at_any_line(
    settings: Settings, kind: str
) -> None:
    """Signal handlers may raise between sending a command and reading its reply: raise at each
    line in turn.
    """
    folder = str(Path(redis_py.__file__).parent)

    def interrupted_at(line: int) -> bool:
        """Interrupt redis-py at this line; return False if it has fewer lines."""
        client = connect(settings)
        assert _echo(client, kind, "first") == ["first", "first"]
        passed = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal passed
            if not frame.f_code.co_filename.startswith(folder):
                return None
            if event == "line":
                passed += 1
                if passed == line:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            _echo(client, kind, "interrupted")
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        replies = [_echo(client, kind, "next"), _echo(client, kind, "last")]
        assert replies == [["next", "next"], ["last", "last"]], f"after line {line}"
        client.close()
        return passed >= line

    line = 1
    while interrupted_at(line):
        line += 1
    assert line > 20


def _echo(client: Redis, kind: str, text: str) -> list[Any]:
    """Send the text to Redis twice, and return the replies."""
    if kind == "command":
        return [client.echo(text), client.echo(text)]
    with client.pipeline(transaction=kind == "transaction") as pipe:
        pipe.echo(text)
        pipe.echo(text)
        replies: list[Any] = pipe.execute()
        return replies
