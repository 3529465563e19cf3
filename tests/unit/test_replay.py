"""shared/replay.py: repeating recent writes over a new connection."""

from collections.abc import Callable
from functools import partial
from unittest.mock import Mock

import pytest
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import ResponseError

from feedmill.shared import replay
from feedmill.shared.replay import LOSABLE_S, Connections, Replay


class Server:
    """A server that records writes, and its client. `connect` opens a new connection."""

    def __init__(self) -> None:
        self.now = 0.0
        self.connections = Connections()
        self.written: list[str] = []
        #: Called before each write.
        self.before: Callable[[], object] = lambda: None
        client = Mock()
        client.connection_pool.connection_kwargs = {"redis_connect_func": self.connections}
        client.info.return_value = {"run_id": "first"}
        self.servers = 0
        self.replay = Replay(client, lambda: self.now)

    def connect(self, run_id: str | None = None) -> None:
        """Connect to the server with this `run_id`, by default to a new server."""
        self.servers += 1
        connection = Mock()
        connection.read_response.return_value = f"# Server\r\nrun_id:{run_id or self.servers}\r\n"
        self.connections(connection)

    def write(self, *names: str) -> None:
        for name in names:
            self.replay.write(partial(self._write, name), len(name))

    def _write(self, name: str) -> None:
        self.before()
        self.written.append(name)

    def repeated(self) -> list[str]:
        """Connect to a new server and return the writes repeated there."""
        self.written.clear()
        self.connect()
        self.replay.check()
        return self.written


@pytest.fixture
def server() -> Server:
    return Server()


def test_repeats_writes_in_order_over_a_new_connection(server: Server) -> None:
    server.write("a", "b")
    assert server.written == ["a", "b"]
    server.connect()
    server.write("c")
    assert server.written == ["a", "b", "c", "a", "b", "c"]
    server.replay.check()
    assert len(server.written) == 6
    assert server.repeated() == ["a", "b", "c"]


def test_repeats_again_if_the_connection_is_lost_meanwhile(server: Server) -> None:
    server.write("a", "b")
    times = iter([server.connect])
    server.before = lambda: [connect() for connect in times]
    assert server.repeated() == ["a", "b", "a", "b"]


def test_next_check_completes_a_failed_repetition(server: Server) -> None:
    server.write("a", "b")
    server.before = Mock(side_effect=[None, ConnectionFault("unreachable")])
    with pytest.raises(ConnectionFault):
        server.repeated()
    assert server.written == ["a"]
    server.before = lambda: None
    server.replay.check()
    assert sorted(server.written[1:]) == ["a", "b"]


def test_keeps_writes_while_redis_may_lose_them(server: Server) -> None:
    server.write("a")
    server.now += LOSABLE_S
    server.write("b")
    assert server.repeated() == ["a", "b"]
    # Repeated writes can be lost again.
    server.now += LOSABLE_S
    assert server.repeated() == ["a", "b"]
    server.now += LOSABLE_S + 1
    server.write("c")
    assert server.repeated() == ["c"]


def test_forgets_nothing_while_redis_is_unreachable(server: Server) -> None:
    server.write("a")
    server.now += 1000
    assert server.repeated() == ["a"]


def test_keeps_a_bounded_number_of_bytes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_KEPT_BYTES", 10)
    server.write("1234", "5678", "90")
    assert server.repeated() == ["1234", "5678", "90"]
    server.write("x")
    assert server.repeated() == ["5678", "90", "x"]


def test_repeats_nothing_to_the_same_server(server: Server) -> None:
    server.write("a")
    server.written.clear()
    server.connect("first")
    server.write("b")
    assert server.written == ["b"]


def test_always_repeats_if_the_server_is_unidentified(server: Server) -> None:
    server.write("a")
    server.written.clear()
    refusing = Mock()
    refusing.read_response.side_effect = ResponseError("NOPERM")
    for _ in range(2):
        server.connections(refusing)
        server.replay.check()
    assert server.written == ["a", "a"]


def test_forgets_writes_older_than_redis_can_lose(server: Server) -> None:
    """A server has saved such writes before it dies, so they are not repeated, however late its successor is found."""
    server.write("old")
    server.now += LOSABLE_S + 1
    server.write("new")
    server.now += 1000
    assert server.repeated() == ["new"]
