"""`Replay` in shared/results.py: repeating recent writes to a new server."""

from collections.abc import Callable
from functools import partial
from unittest.mock import Mock

import pytest
from redis.exceptions import ConnectionError as ConnectionFault

from feedmill.shared import results
from feedmill.shared.results import LOSABLE_S, Replay


class Server:
    """A server that records writes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.number = 0
        self.written: list[str] = []
        #: Called before each write.
        self.before: Callable[[], object] = lambda: None
        self.replay = Replay(lambda: str(self.number), lambda: self.now)

    def restart(self) -> None:
        self.number += 1

    def write(self, *names: str) -> None:
        for name in names:
            self.replay.write(partial(self._write, name), len(name))

    def _write(self, name: str) -> tuple[str, None]:
        self.before()
        self.written.append(name)
        return str(self.number), None

    def repeated(self) -> list[str]:
        """Restart the server and return the writes repeated there."""
        self.written.clear()
        self.restart()
        self.replay.check()
        return self.written


@pytest.fixture
def server() -> Server:
    return Server()


def test_repeats_again_if_the_server_changes_meanwhile(server: Server) -> None:
    server.write("a", "b")
    times = iter([server.restart])
    server.before = lambda: [restart() for restart in times]
    assert server.repeated() == ["a", "b", "a", "b"]


def test_next_check_completes_a_failed_repetition(server: Server) -> None:
    server.write("a", "b")
    server.before = Mock(side_effect=[None, ConnectionFault("unreachable")])
    with pytest.raises(ConnectionFault):
        server.repeated()
    assert server.written == ["a"]
    server.before = lambda: None
    server.replay.check()
    assert server.written[1:] == ["a", "b"]


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


def test_keeps_a_bounded_number_of_bytes(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "MAX_KEPT_BYTES", 10)
    server.write("1234", "5678", "90")
    assert server.repeated() == ["1234", "5678", "90"]
    server.write("x")
    assert server.repeated() == ["5678", "90", "x"]


def test_keeps_writes_whose_repetition_took_long(server: Server) -> None:
    """Each counts from when it was repeated: the server can lose the last second of them."""
    server.write("a", "b")

    def slow() -> None:
        server.now += LOSABLE_S

    server.before = slow
    assert server.repeated() == ["a", "b"]
    server.before = lambda: None
    assert server.repeated() == ["a", "b"]
