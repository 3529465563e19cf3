"""shared/replay.py: what is repeated, in which order, and for how long it is kept."""

from collections.abc import Callable
from functools import partial
from unittest.mock import Mock

import pytest
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import ResponseError

from shared import replay
from shared.replay import LOSABLE_S, Connections, Replay


class Server:
    """Notes what is written; a new connection of its client is `connect`'s."""

    def __init__(self) -> None:
        self.now = 0.0
        self.connections = Connections()
        self.written: list[str] = []
        #: Before each write.
        self.before: Callable[[], object] = lambda: None
        client = Mock()
        client.connection_pool.connection_kwargs = {"redis_connect_func": self.connections}
        client.info.return_value = {"run_id": "first"}
        self.servers = 0
        self.replay = Replay(client, lambda: self.now)

    def connect(self, run_id: str | None = None) -> None:
        """To a new server, or to one of this `run_id`."""
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
        """What a new connection has written again."""
        self.written.clear()
        self.connect()
        self.replay.check()
        return self.written


@pytest.fixture
def server() -> Server:
    return Server()


def test_repeats_all_writes_in_order_over_a_new_connection(server: Server) -> None:
    server.write("a", "b")
    assert server.written == ["a", "b"]
    server.connect()
    server.write("c")
    assert server.written == ["a", "b", "c", "a", "b", "c"]
    server.replay.check()
    assert len(server.written) == 6
    assert server.repeated() == ["a", "b", "c"]


def test_repeats_once_more_where_the_connection_is_lost_meanwhile(server: Server) -> None:
    server.write("a", "b")
    times = iter([server.connect])
    server.before = lambda: [connect() for connect in times]
    assert server.repeated() == ["a", "b", "a", "b"]


def test_a_repetition_that_fails_is_made_good_by_the_next(server: Server) -> None:
    server.write("a", "b")
    server.before = Mock(side_effect=[None, ConnectionFault("away")])
    with pytest.raises(ConnectionFault):
        server.repeated()
    assert server.written == ["a"]
    server.before = lambda: None
    server.replay.check()
    assert sorted(server.written[1:]) == ["a", "b"]


def test_keeps_a_write_for_as_long_as_redis_may_lose_it(server: Server) -> None:
    server.write("a")
    server.now += LOSABLE_S
    server.write("b")
    assert server.repeated() == ["a", "b"]
    # Repeated, they can be lost once more.
    server.now += LOSABLE_S
    assert server.repeated() == ["a", "b"]
    server.now += LOSABLE_S + 1
    server.write("c")
    assert server.repeated() == ["c"]


def test_forgets_nothing_while_redis_is_away(server: Server) -> None:
    server.write("a")
    server.now += 1000
    assert server.repeated() == ["a"]


def test_keeps_a_bounded_number_of_bytes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_KEPT_BYTES", 10)
    server.write("1234", "5678", "90")
    assert server.repeated() == ["1234", "5678", "90"]
    server.write("x")
    assert server.repeated() == ["5678", "90", "x"]


def test_keeps_nothing_over_a_client_that_does_not_tell_of_connections() -> None:
    client = Mock()
    client.connection_pool.connection_kwargs = {}
    written: list[int] = []
    made = Replay(client)
    made.write(lambda: written.append(1), 1)
    made.check()
    assert not made._kept
    assert written == [1]


def test_repeats_nothing_over_another_connection_to_the_same_server(server: Server) -> None:
    server.write("a")
    server.written.clear()
    server.connect("first")
    server.write("b")
    assert server.written == ["b"]


def test_asks_for_the_server_only_when_something_is_written() -> None:
    connections, connection = Connections(), Mock()
    connections(connection)
    connection.send_command.assert_not_called()


def test_repeats_over_each_connection_where_the_server_may_not_be_asked(server: Server) -> None:
    server.write("a")
    server.written.clear()
    refusing = Mock()
    refusing.read_response.side_effect = ResponseError("NOPERM")
    for _ in range(2):
        server.connections(refusing)
        server.replay.check()
    assert server.written == ["a", "a"]


def test_forgets_what_was_written_long_before_redis_was_last_there(server: Server) -> None:
    """A server that dies now has lost nothing of that, however late a new one is found."""
    server.write("old")
    server.now += LOSABLE_S + 1
    server.write("new")
    server.now += 1000
    assert server.repeated() == ["new"]
