"""Write the findings of `feedmill tune`: a table in a file, a page, JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import explain_unwritable
from feedmill.tables import format_of, save_page
from feedmill.tuning.curve import Curve
from feedmill.tuning.experiment import COLUMNS, Findings
from feedmill.tuning.trials import Trial

#: Columns of text; all others hold numbers.
TEXT_COLUMNS = ("experiment", "name", "reason")


def write_table(findings: Findings, out: str) -> None:
    """Write a row for each measurement. Raises UserError if the file cannot be written."""
    import pyarrow as pa  # noqa: PLC0415 - an extra

    from feedmill.tables.writing import writer_to  # noqa: PLC0415 - pyarrow, too

    types = dict.fromkeys(COLUMNS, pa.float64())
    types |= dict.fromkeys(TEXT_COLUMNS, pa.string())
    batch = pa.RecordBatch.from_pylist(
        findings.rows(),
        schema=pa.schema(types),
    )
    path = Path(out)
    compression = ""
    if path.suffix in (".gz", ".zst"):
        compression = path.suffix
    with (
        explain_unwritable(path),
        replacing(path) as temporary,
        temporary.open("wb") as file,
    ):
        writer = writer_to(
            file,
            format_of(out) or "csv",
            batch.schema,
            compression,
        )
        writer.write(batch)
        writer.close()


def write_page(findings: Findings, path: Path) -> None:
    """Write the page. Raises UserError if the file cannot be written."""
    from feedmill.tuning.page import page  # noqa: PLC0415 - jinja, which a table does not need

    save_page(path, page(findings))


def as_json(findings: Findings) -> dict[str, Any]:
    """Return the findings as in docs/reference/json.md."""
    summary: dict[str, Any] = {
        "posts": findings.posts,
        "sample_posts": findings.sample_posts,
        "lanes": findings.lanes,
        "token_budget": _curve_as_json(findings.budgets, "budget"),
        "arrival": _curve_as_json(findings.arrival, "posts"),
        "stored": findings.stored,
    }
    for row in findings.rows():
        figures = _without_none(row)
        if row["experiment"] == "ladder":
            summary.setdefault("ladder", []).append(figures)
        elif row["experiment"] == "dtype":
            summary.setdefault("dtypes", []).append(figures)
    return summary


def _curve_as_json(curve: Curve, size_key: str) -> dict[str, Any]:
    knee = None
    if curve.trials:
        knee = curve.knee.size.number
    points = []
    for trial in curve.trials:
        point = {size_key: trial.size.number}
        points.append(point | _figures(trial))
    return {
        "knee": knee,
        "points": points,
        **_not_measured(curve),
    }


def _figures(trial: Trial) -> dict[str, Any]:
    return {
        "seconds_per_batch": trial.seconds_per_batch,
        "posts_per_s": trial.posts_per_s,
        "tokens_per_s": trial.tokens_per_s,
        "padding_efficiency": trial.padding_efficiency,
        "memory_mb": trial.memory_mb,
    }


def _not_measured(curve: Curve) -> dict[str, Any]:
    out_of_memory = None
    first_oversized = curve.out_of_memory
    if first_oversized is not None and first_oversized.size is not None:
        out_of_memory = first_oversized.size.number
    return {
        "out_of_memory": out_of_memory,
        "unmeasured": {size.what: size.reason for size in curve.unmeasured},
    }


def _without_none(row: dict[str, Any]) -> dict[str, Any]:
    figures = row.copy()
    del figures["experiment"]
    return {name: figure for name, figure in figures.items() if figure is not None}


def columns(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the table by column, for a frame."""
    table = {}
    for name in COLUMNS:
        table[name] = [row[name] for row in rows]
    return table
