"""An observer of a labelling. Imports no pyarrow, unlike the labelling."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from feedmill.offline.labelling import Labelling


class LabellingObserver:
    """Receives the events of a labelling. This one ignores them."""

    def note(self, message: str) -> None:
        """Something about the file is worth knowing."""

    def working(self, _what: str) -> AbstractContextManager[object]:
        """Return a block that lasts while something takes seconds, such as loading the model."""
        return nullcontext()

    def watching(self, _labelling: "Labelling") -> AbstractContextManager[object]:
        """Return a block that lasts while rows are labelled, such as a progress bar."""
        return nullcontext()

    def finished(self, labelling: "Labelling") -> None:
        """The output is complete, or ends where reading the input failed."""
