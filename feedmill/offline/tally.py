"""Counts of labelled rows."""

import time
from collections import Counter
from typing import Any

from feedmill.producers.files import FileRow, Place
from feedmill.producers.records import NO_COMMENT, NO_TEXT, REMOVED
from feedmill.shared.language import is_in_another
from feedmill.shared.messages import Classification, Outcome

#: Reasons of a row that fits none of the labels, and of a row in a language that the model was not
#: made for.
NO_FIT = "fits none of the labels"
FOREIGN = "in another language"
#: Reasons for which a row without a label is no failure.
NO_FAILURES = frozenset({NO_TEXT, REMOVED, NO_FIT, FOREIGN, NO_COMMENT})


class Tally:
    """Counts of labelled rows. languages: those of rows that get a label; empty for all."""

    def __init__(self, languages: frozenset[str] = frozenset()) -> None:
        self._languages = languages
        self._began = time.monotonic()
        self.rows = 0
        #: Rows of each label.
        self.labels: Counter[str] = Counter()
        #: Rows without a label, by reason.
        self.unlabelled: Counter[str] = Counter()
        #: Rows that the output lacks, because they could not be parsed, by reason.
        self.left_out: Counter[str] = Counter()
        #: Place of the first row with a reason.
        self.first: dict[str, Place] = {}
        #: Columns of Parquet with cells that are empty in the output, and why.
        self.lost: dict[str, str] = {}

    def add(self, row: FileRow, outcome: Outcome | None) -> None:
        """Count a row. outcome: None if the row has no text."""
        self.rows += 1
        if isinstance(outcome, Classification) and outcome.label is not None:
            self.labels[outcome.label] += 1
            return
        if outcome is None:
            reason = str(row.post)
        elif isinstance(outcome, Classification):
            reason = self._reason(outcome)
        else:
            reason = outcome.error
        if row.values is None:
            self.left_out[reason] += 1
        else:
            self.unlabelled[reason] += 1
        self.first.setdefault(reason, row.place)

    def _reason(self, unlabelled: Classification) -> str:
        """Return why a row with a text has no label."""
        if is_in_another(unlabelled.language, self._languages):
            return FOREIGN
        return NO_FIT

    @property
    def written(self) -> int:
        """Number of rows in the output."""
        left_out = self.left_out.total()
        return self.rows - left_out

    @property
    def has_failures(self) -> bool:
        """True if a row was left out, or has a text and no label, if no row has a text, or if
        cells were lost.
        """
        if self.left_out or self.lost:
            return True
        failures = self.unlabelled.keys() - NO_FAILURES
        if failures:
            return True
        has_no_text = self.unlabelled[NO_TEXT] > 0
        has_text = self.labels or self.unlabelled[NO_FIT] or self.unlabelled[FOREIGN]
        return has_no_text and not has_text

    @property
    def seconds(self) -> float:
        """Seconds since the labelling began."""
        return time.monotonic() - self._began

    def counts(self) -> dict[str, Any]:
        """Return the counts for JSON."""
        return {
            "rows": self.rows,
            "labels": dict(self.labels.most_common()),
            "unlabelled": self.unlabelled,
            "left_out": self.left_out,
            "seconds": round(self.seconds, 3),
        }
