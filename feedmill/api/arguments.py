"""Types of the arguments that the functions of the Python API share, and errors that name them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar

from feedmill.shared.errors import UserError, truncate
from feedmill.shared.messages import Post
from feedmill.shared.settings import PREFIX

#: Names of labels, or a dictionary from each name to its description or descriptions.
Labels = Iterable[str] | Mapping[str, Any]
#: A single item: a text, a dictionary with title and body, or a post.
OneItem = str | Mapping[str, Any] | Post


class Frame(Protocol):
    """A DataFrame of pandas or polars, or a table of pyarrow."""

    @property
    def columns(self) -> Any: ...


class Series(Protocol):
    """A Series of pandas or polars."""

    @property
    def to_frame(self) -> Any: ...


FrameT = TypeVar("FrameT", bound=Frame)


class Options(TypedDict, total=False):
    """The named arguments of `Classifier.classify`."""

    title: Any
    body: Any
    id: Any
    template: str | None
    multi_label: bool
    scores: bool
    prefix: str
    progress: bool


class ModelOptions(Options, total=False):
    """The named arguments of `feedmill.classify`."""

    model: str | Path | None
    device: str | None


@contextmanager
def naming_arguments(**given: object) -> Iterator[None]:
    """Name arguments in a UserError of the block, instead of the variables that they override.

    given: arguments by the name of their setting; None: not given.
    """
    try:
        yield
    except UserError as error:
        text = str(error)
        for name, value in given.items():
            if value is not None:
                variable = rf"\b{PREFIX}{name.upper()}\b"
                text = re.sub(rf"{variable}=?", f"{name}=", re.sub(rf"{variable}:", f"{name}:", text))
        error.args = (text,)
        raise


def check_switch(argument: str, given: object) -> None:
    """Raise UserError for a value that is not a bool: "no" would count as true."""
    if not isinstance(given, bool):
        raise UserError(f"{argument}= must be True or False, not {truncate(repr(given))}.")


def check_text(argument: str, given: object) -> None:
    """Raise UserError for a value that is neither text nor None."""
    if not isinstance(given, str | None):
        raise UserError(f"{argument}= must be text, not {truncate(repr(given))}.")
