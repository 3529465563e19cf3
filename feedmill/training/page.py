"""The page of a training: the curves of its losses and evaluations, and a table by epoch, readable
on paper.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from feedmill.console import number_text, span
from feedmill.pages import Chart, Point, TitledChart, render

EPOCH_COLUMNS = (
    "epoch",
    "step",
    "posts",
    "loss",
    "evaluation loss",
    "accuracy",
    "seconds",
    "posts/s",
)
TEST_COLUMNS = ("", "accuracy", "macro-F1", "calibration error", "posts/s")


def page(name: str, record: Mapping[str, Any]) -> str:
    """Return the complete HTML page of a training. record: the content of training.json."""
    return render(
        "training.html",
        name=name,
        record=record,
        facts=_facts(record),
        charts=_charts(record),
        epoch_columns=EPOCH_COLUMNS,
        epoch_rows=[_epoch_cells(epoch) for epoch in record["epochs"]],
        test_columns=TEST_COLUMNS,
        test_rows=_test_rows(record),
        sentences=_sentences(record),
    )


def _facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the figures at the top: each with its name."""
    evaluated = record["evaluated_on"]
    learnt = record["train"] - evaluated
    facts = [("posts for training", f"{learnt:,}")]
    if evaluated:
        facts.append(("posts for evaluations", f"{evaluated:,}"))
    facts += [
        ("optimization steps", f"{record['steps']:,}"),
        ("posts per step", f"{record['plan']['effective_batch']:,}"),
        ("posts/s", number_text(record["samples_per_s"], ",.1f")),
        ("training", span(record["training_seconds"])),
    ]
    if record["peak_memory_bytes"]:
        megabytes = record["peak_memory_bytes"] / 1e6
        facts.append(("MB of memory at most", f"{megabytes:,.0f}"))
    if record["metrics"]:
        accuracy = record["metrics"]["accuracy"]
        facts.append(("accuracy of the test", f"{accuracy:.3f}"))
    return facts


def _charts(record: Mapping[str, Any]) -> list[TitledChart]:
    losses = []
    rates = []
    for point in record["curve"]:
        step = point["step"]
        losses.append((step, point["loss"]))
        if "learning_rate" in point:
            rates.append((step, point["learning_rate"]))
    evaluation_losses = []
    accuracies = []
    for epoch in record["epochs"]:
        evaluation = epoch["evaluation"]
        if evaluation:
            number = epoch["epoch"]
            evaluation_losses.append((number, evaluation["loss"]))
            accuracies.append((number, evaluation["accuracy"]))
    charts = [
        _chart("loss", "step", losses),
        _chart("evaluation loss", "epoch", evaluation_losses),
        _chart("accuracy of the evaluation", "epoch", accuracies),
        _chart("learning rate", "step", rates),
    ]
    return [chart for chart in charts if chart.chart.points]


def _chart(
    title: str, unit: str, figures: Sequence[tuple[float, float]]
) -> TitledChart:
    points = []
    for x, y in figures:
        caption = f"{unit} {x:,.4g}: {title} {y:,.4g}"
        points.append(Point(x, y, caption))
    return TitledChart(
        title=title,
        unit=unit,
        chart=Chart(points),
    )


def _epoch_cells(epoch: Mapping[str, Any]) -> list[str]:
    evaluation = epoch["evaluation"] or {}
    return [
        f"{epoch['epoch']:,.3g}",
        f"{epoch['step']:,}",
        f"{epoch['posts']:,}",
        number_text(epoch["loss"], ".3f"),
        number_text(evaluation.get("loss"), ".3f"),
        number_text(evaluation.get("accuracy"), ".3f"),
        f"{epoch['seconds']:,.1f}",
        number_text(epoch["posts_per_s"], ",.1f"),
    ]


def _test_rows(record: Mapping[str, Any]) -> list[list[str]]:
    metrics_by_name = {
        "this model": record["metrics"],
        "its base, zero-shot": record["zero_shot"],
    }
    rows = []
    for name, metrics in metrics_by_name.items():
        if not metrics:
            continue
        cells = [
            name,
            f"{metrics['accuracy']:.3f}",
            f"{metrics['macro_f1']:.3f}",
            f"{metrics['calibration_error']:.3f}",
            f"{metrics['posts_per_s']:,.1f}",
        ]
        rows.append(cells)
    return rows


def _sentences(record: Mapping[str, Any]) -> list[str]:
    """Return what the curves do not show."""
    plan = record["plan"]
    sentences = []
    if plan["out_of_memory"]:
        sizes = [f"{rows:,}" for rows in plan["out_of_memory"]]
        sentences.append(
            f"Batches of {', '.join(sizes)} rows ran out of memory; {plan['batch_size']:,} rows × "
            f"{plan['accumulation']:,} accumulated did not."
        )
    if record["stopped_early"]:
        sentences.append(
            f"Stopped early: the evaluation was best after step {record['kept_step']:,}."
        )
    if record["resumed_at_step"]:
        sentences.append(
            f"Continued from the checkpoint of step {record['resumed_at_step']:,}."
        )
    return sentences
