"""Stand-ins on this machine, to try Feedmill and to test applications of it: a worker that answers
without a model, and servers of Reddit and Arctic Shift.

`feedmill.testing.FakeWorker` answers an application's messages (docs/testing.md).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feedmill.testing.worker import FakeWorker as FakeWorker

#: Public names, each with the module that defines it. The servers need no Celery.
_LAZY_NAMES = {"FakeWorker": "feedmill.testing.worker"}
__all__ = ["FakeWorker"]


def __getattr__(name: str) -> Any:
    """Import a public name's module on first use."""
    if name in _LAZY_NAMES:
        return getattr(import_module(_LAZY_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
