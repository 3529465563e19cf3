"""Types of the arguments that the functions of the Python API share, and errors about misspelt arguments."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypedDict, TypeVar

from shared.errors import UserError, similar_name, truncate
from shared.messages import Post
from shared.settings import PREFIX

P = ParamSpec("P")
R = TypeVar("R")
#: Likely guesses at the name of the argument `body`.
BODY_GUESSES = ("text", "column", "text_column", "body_column")

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


def explain_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function, so that the TypeError for an unknown keyword suggests the one that was meant."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    shown = f"feedmill.{function.__qualname__.removesuffix('.__init__')}()"

    @wraps(function)
    def explained(*args: P.args, **kwargs: P.kwargs) -> R:
        if unknown := next((name for name in kwargs if name not in names), None):
            raise TypeError(f"{shown} has no argument {unknown!r}{_hint(unknown, names)}")
        return function(*args, **kwargs)

    return explained


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


def _hint(unknown: str, names: list[str]) -> str:
    """Return the end of an error about an unknown keyword."""
    if unknown in BODY_GUESSES and "body" in names:
        return ": name the text's column with body=."
    if unknown == "posts" and "items" in names:  # the Celery task had this name before
        return (
            ": items come first. The Celery task is feedmill.classify_task: send posts to a worker with "
            "feedmill.classify_task.delay(posts=posts)."
        )
    meant = similar_name(unknown, names)
    return f". Its arguments are: {', '.join(names)}." if meant is None else f". Did you mean {meant}=?"
