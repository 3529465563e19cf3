"""Find race conditions: run a call repeatedly, and simulate another thread's change before each bytecode step."""

import sys
from collections.abc import Callable, Iterator
from itertools import count
from types import FrameType
from typing import Any, TypeVar

from feedmill import workers

T = TypeVar("T")
#: Folder of the code whose steps are traced. Libraries, such as logging, are not.
TRACED = workers.__path__[0]


def interleavings(make: Callable[[], tuple[Callable[[], T], Callable[[], object]]]) -> Iterator[T]:
    """Run the call with the change before its first bytecode step, its second, and so on. Yield each run's result.

    make: returns a call and a change that share new objects.
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
