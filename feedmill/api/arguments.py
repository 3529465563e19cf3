"""Types of the arguments that `feedmill.classify`, `Classifier.classify` and `feedmill.submit` share."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar

from shared.messages import Post

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
