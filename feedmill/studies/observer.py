"""An observer of a study. Imports no pyarrow, unlike the study."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from feedmill.studies.run import Study


class StudyObserver:
    """Receives the events of a study. This one ignores them. notes: gets bad records."""

    notes = Console(quiet=True)

    def note(self, message: str) -> None:
        """Something is worth knowing."""

    def watching(self, _study: "Study") -> AbstractContextManager[object]:
        """Return a block that lasts while dumps are read, such as a progress bar."""
        return nullcontext()
