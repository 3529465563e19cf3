"""feedmill/stack/signals.py: handlers inside a block."""

import signal
from collections.abc import Iterator

import pytest

from feedmill.stack.signals import exit_on_signals, handle_signals, interrupt, not_ignored, note_signals

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


def test_notes_signals_and_interrupts_later() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with note_signals() as received:
        _receive(signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
    assert received == [signal.SIGTERM, signal.SIGINT]
    with pytest.raises(SystemExit) as ended:
        interrupt(signal.SIGTERM)
    assert ended.value.code == 143
    with pytest.raises(KeyboardInterrupt):
        interrupt(signal.SIGINT)
