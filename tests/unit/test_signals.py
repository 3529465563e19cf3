"""feedmill/stack/signals.py: handlers inside a block."""

import signal
from collections.abc import Iterator

import pytest

from feedmill.stack.signals import end_service_on_signals, exit_on_signals, handle_signals, not_ignored

NUMBERS = signal.SIGUSR1, signal.SIGUSR2


@pytest.fixture(autouse=True)
def _handlers_as_they_were() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (*NUMBERS, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _receive(*numbers: signal.Signals, error: Exception | None = None) -> None:
    for number in numbers:
        signal.raise_signal(number)
    if error:
        raise error


def test_restores_the_previous_handlers_after_an_error() -> None:
    outside: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: outside.append(number))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    inside: list[int] = []
    with pytest.raises(KeyError), handle_signals(lambda number, _: inside.append(number), *NUMBERS):
        _receive(*NUMBERS, error=KeyError())
    _receive(*NUMBERS)
    assert inside == [*NUMBERS]
    assert outside == [signal.SIGUSR1]


def test_ignored_signals_stay_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert not_ignored(signal.SIGTERM, signal.SIGHUP) == [signal.SIGTERM]
    with pytest.raises(SystemExit) as left, exit_on_signals():
        _receive(signal.SIGHUP, signal.SIGTERM)
    assert left.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_only_the_first_signal_is_a_services_normal_end(first: signal.Signals) -> None:
    with end_service_on_signals():
        with pytest.raises(SystemExit) as normal:
            _receive(first)
        with pytest.raises(SystemExit) as interrupted:
            _receive(signal.SIGINT)
    assert (normal.value.code, interrupted.value.code) == (0, 130)
