"""Report the results of a benchmark: a table per round, a chart, and a line of JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

#: Minimum share of posts with the ideal's label. A variant with a lower share does different work
#: and is left out.
MIN_AGREEMENT = 0.97
#: Chart colours of Feedmill and the ideal, and of the other variants.
OURS, RIVALS = "#c2571a", "#8a8f98"


class VariantResult(NamedTuple):
    """The throughput and the labels of one variant in one round."""

    posts_per_s: float
    labels: Sequence[str]
    #: CPU time of all processes per post, in µs.
    cpu_us: float


#: Measurements of each round by variant; None for a round in which the variant failed.
VariantResults = dict[str, list[VariantResult | None]]


def agreement(labels: Sequence[str], ideal: Sequence[str]) -> float:
    """Return the share of posts with the same label."""
    return sum(
        mine == theirs for mine, theirs in zip(labels, ideal, strict=True)
    ) / len(ideal)


def rates(record: VariantResults, name: str) -> list[float]:
    """Return the variant's posts/s in the rounds in which it did not fail."""
    return [measured.posts_per_s for measured in record.get(name, ()) if measured]


def shares(record: VariantResults, name: str) -> list[float]:
    """Return the ratio of the variant's rate to the ideal's in each round, in which the machine's
    drift cancels out.
    """
    pairs = zip(record.get(name, ()), record.get("ideal", ()), strict=False)
    return [
        mine.posts_per_s / ideal.posts_per_s for mine, ideal in pairs if mine and ideal
    ]


def agreements(record: VariantResults, name: str) -> list[float]:
    """Return the variant's agreement with the ideal in each round."""
    pairs = zip(record.get(name, ()), record.get("ideal", ()), strict=False)
    return [
        agreement(mine.labels, ideal.labels) for mine, ideal in pairs if mine and ideal
    ]


def middle(values: Sequence[float], digits: int) -> float | None:
    """Return the rounded median; None without values."""
    return round(median(values), digits) if values else None


def disagreeing(record: VariantResults) -> dict[str, str]:
    """Return the variants below MIN_AGREEMENT, each with the reason for leaving it out."""
    shares = {name: middle(agreements(record, name), 4) for name in record}
    return {
        name: (
            f"does different work: only {share:.1%} of the posts have the ideal's label, below "
            f"{MIN_AGREEMENT:.0%}"
        )
        for name, share in shares.items()
        if share is not None and share < MIN_AGREEMENT
    }


def comparable(record: VariantResults) -> VariantResults:
    """Return the record without the variants whose labels differ from the ideal's."""
    left_out = disagreeing(record)
    return {name: rounds for name, rounds in record.items() if name not in left_out}


def print_round(
    console: Console, record: VariantResults, number: int, rounds: int
) -> None:
    """Print the table of the last round, with a warning for each variant whose labels differ from
    the ideal's.
    """
    table = Table(title=f"round {number} of {rounds}", title_justify="left")
    table.add_column("variant")
    for column in (
        "posts/s",
        "share of ideal",
        "CPU µs per post",
        "agreement with ideal",
    ):
        table.add_column(column, justify="right")
    ideal = record["ideal"][-1] if record.get("ideal") else None
    warnings = []
    for name, measured in ((name, found[-1]) for name, found in record.items()):
        if measured is None:
            table.add_row(name, "failed", "", "", "")
            continue
        same = agreement(measured.labels, ideal.labels) if ideal else None
        share = f"{measured.posts_per_s / ideal.posts_per_s:.3f}" if ideal else "—"
        spent = f"{measured.cpu_us:,.0f}"
        table.add_row(
            name,
            f"{measured.posts_per_s:.1f}",
            share,
            spent,
            "—" if same is None else f"{same:.4f}",
        )
        if same is not None and same < MIN_AGREEMENT:
            warnings.append(
                f"warning: {name} labels {1 - same:.1%} of the posts differently and "
                "may be left out"
            )
    console.print(table)
    for warning in warnings:
        console.print(warning, style="yellow", highlight=False, soft_wrap=True)


def summary(record: VariantResults, names: Sequence[str]) -> dict[str, object]:
    """Return the JSON figures of each variant: medians of the rates and of the ratios to the
    ideal.

    A variant whose labels differ from the ideal's has no figures; `left_out` holds the reason.
    """
    compared = comparable(record)
    found: dict[str, object] = {
        name: middle(rates(compared, name), 1) for name in names
    }
    return found | {
        "share_of_ideal": {name: middle(shares(compared, name), 3) for name in names},
        "shares_by_round": {
            name: [round(share, 3) for share in shares(compared, name)]
            for name in names
        },
        "cpu_us_per_post": {
            name: middle([each.cpu_us for each in compared.get(name, ()) if each], 0)
            for name in names
        },
        "left_out": disagreeing(record),
        "agreement": {name: middle(agreements(record, name), 4) for name in names},
    }


def draw(path: Path, by_variant: Mapping[str, Sequence[float]], title: str) -> None:
    """Draw horizontal bars of the medians, fastest first, with whiskers from the slowest to the
    fastest round.

    Raises ModuleNotFoundError if matplotlib is missing.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    order = sorted(
        (name for name, values in by_variant.items() if values),
        key=lambda name: median(by_variant[name]),
    )
    medians = [median(by_variant[name]) for name in order]
    below = [
        middle - min(by_variant[name])
        for name, middle in zip(order, medians, strict=True)
    ]
    above = [
        max(by_variant[name]) - middle
        for name, middle in zip(order, medians, strict=True)
    ]
    figure = Figure(figsize=(8, 0.45 * len(order) + 1.4), layout="constrained")
    axes = figure.subplots()
    colours = [
        OURS if name.startswith(("ideal", "feedmill")) else RIVALS for name in order
    ]
    axes.barh(
        order, medians, color=colours, xerr=[below, above], ecolor="#333333", capsize=3
    )
    for row, value in enumerate(medians):
        axes.annotate(
            f"{value:.0f}",
            (0, row),
            (4, 0),
            textcoords="offset points",
            va="center",
            color="white",
        )
    axes.set_xlabel("posts/s: median, slowest and fastest round")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
