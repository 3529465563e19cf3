"""Run a call once per bytecode step, with a change by another thread made before that step by a tracer."""

import sys
from collections.abc import Callable, Iterator
from itertools import count
from types import FrameType
from typing import Any, TypeVar

import workers

T = TypeVar("T")
#: Only steps in this package's code count; logging's, for example, are the same before and after.
TRACED = workers.__path__[0]


def interleavings(make: Callable[[], tuple[Callable[[], T], Callable[[], object]]]) -> Iterator[T]:
    """Yield what the call returns for each of its bytecode steps before which the change is made.

    make: returns the call and the change, on objects of their own each time.
    """
    for number in count():
        call, change = make()
        steps = count()

        def step(frame: FrameType, event: str, argument: object) -> Any:  # noqa: ARG001 - sys.settrace's signature
            if not frame.f_code.co_filename.startswith(TRACED):
                return None
            frame.f_trace_opcodes = True
            if next(steps) == number:  # noqa: B023 - called within this round
                change()  # noqa: B023
            return step

        tracer = sys.gettrace()
        sys.settrace(step)
        try:
            found = call()
        finally:
            sys.settrace(tracer)
        if next(steps) <= number:
            return
        yield found
