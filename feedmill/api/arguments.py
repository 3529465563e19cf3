"""Types of the arguments that the functions of the Python API share."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar

from feedmill.shared.messages import Post

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
