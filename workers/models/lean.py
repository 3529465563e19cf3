"""Use transformers without importing torch's compiler and distributed tensors, which take a third of a start.

transformers imports both with every model, to mark functions and to compare types. Nothing here compiles a model or
divides one among processes. Both can still be imported later.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

COMPILER = "torch._dynamo"
#: Modules of Feedmill's own processes. A program that uses Feedmill as a library may compile or divide its models.
OWN = frozenset({"feedmill.cli.main", "feedmill.workers.app"})


class Placeholder(ModuleType):
    """A stand-in for the compiler's package, which is imported if more of it is used than marks on functions."""

    def __init__(self) -> None:
        super().__init__(COMPILER)
        spec = find_spec(COMPILER)
        self.__path__ = (spec and spec.submodule_search_locations) or []  # its modules are imported as usual
        self.allow_in_graph = self.assume_constant_result = self.disable = _unmarked

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.remove()
        return getattr(import_module(COMPILER), name)

    def remove(self) -> None:
        """Let the next import find the package."""
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]


def _unmarked(function: Any = None, *_: Any, **__: Any) -> Any:
    """Return the function that one of the compiler's decorators would mark. None: return a decorator."""
    return function or _unmarked


@contextmanager
def without_compiler() -> Iterator[None]:
    """Avoid the import of torch's compiler inside the block, unless it is used or this is another program's process."""
    if COMPILER in sys.modules or OWN.isdisjoint(sys.modules):
        yield
        return
    placeholder = sys.modules[COMPILER] = Placeholder()
    try:
        yield
    finally:
        placeholder.remove()


def import_models() -> None:
    """Import the embedded model's module, and with it what all models share; nothing in another program's process."""
    if OWN.isdisjoint(sys.modules):
        return
    is_available, torch.distributed.is_available = torch.distributed.is_available, lambda: False
    try:
        with without_compiler():
            import_module("transformers.models.bert.modeling_bert")
    finally:
        torch.distributed.is_available = is_available
