"""The tables of `feedmill tune`, as cells of text: for a terminal and for the page."""

from feedmill.console import number_text
from feedmill.tuning.ladder import Ladder, Rung
from feedmill.tuning.precisions import Precision
from feedmill.tuning.profile import Operation
from feedmill.tuning.trials import Trial, in_megabytes

CURVE_COLUMNS = (
    "size",
    "s a batch",
    "posts/s",
    "tokens/s",
    "padding efficiency",
    "memory MB",
)
LADDER_COLUMNS = ("way", "posts/s", "gain", "same labels", "posts")
PRECISION_COLUMNS = (
    "dtype", "posts/s", "memory MB", "largest score difference", "changed labels", "accuracy",
    "posts",
)  # fmt: skip
OPERATION_COLUMNS = ("operation", "calls", "seconds", "share")


def curve_cells(trial: Trial) -> list[str]:
    return [
        f"{trial.size.number:,}",
        f"{trial.seconds_per_batch:.4f}",
        f"{trial.posts_per_s:,.1f}",
        f"{trial.tokens_per_s:,.0f}",
        f"{trial.padding_efficiency:.3f}",
        number_text(trial.memory_mb, ",.0f"),
    ]


def rung_cells(ladder: Ladder, rung: Rung) -> list[str]:
    gain = ladder.gain(rung)
    same_labels = rung.same_labels(ladder.reference)
    return [
        rung.name,
        f"{rung.posts_per_s:,.1f}",
        "" if gain is None else f"× {gain:.2f}",
        f"{same_labels:.1%}",
        f"{rung.posts:,}",
    ]


def rung_note(ladder: Ladder, rung: Rung) -> str:
    """Return what the step brought, and whether the labels are the same."""
    same_labels = rung.same_labels(ladder.reference)
    note = f"{same_labels:.1%} of {rung.posts:,} labels the same"
    gain = ladder.gain(rung)
    if gain is None:
        return note
    return f"{gain:.2f} times the way above; {note}"


def precision_cells(precision: Precision) -> list[str]:
    return [
        precision.name,
        f"{precision.posts_per_s:,.1f}",
        number_text(in_megabytes(precision.memory_bytes), ",.0f"),
        number_text(precision.largest_difference, ".4f"),
        number_text(precision.changed_labels, ".2%"),
        number_text(precision.accuracy, ".3f"),
        f"{precision.posts:,}",
    ]


def operation_cells(operation: Operation) -> list[str]:
    return [
        operation.name,
        f"{operation.calls:,}",
        f"{operation.seconds:.4f}",
        f"{operation.share:.1%}",
    ]
