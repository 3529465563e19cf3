"""A training as a person follows it: what will be done, how far it is, its curves; or each as a line of JSON."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from shared.errors import printable
from workers.training.examples import Dataset
from workers.training.run import Plan, Point, Progress

#: Cells of a curve in the terminal, and its heights.
CELLS, HEIGHTS = 60, "▁▂▃▄▅▆▇█"
#: Seconds between two lines where no terminal shows a bar.
PAUSE = 10.0


class Report:
    """Tells of one training: to people, or (as_json) as one object a line with the key `plan`, `progress` or `trained`.

    Quiet in all processes of a training but the first.
    """

    def __init__(self, notes: Console, as_json: bool, quiet: bool) -> None:
        self._json, self._quiet = as_json, quiet
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._notes = notes
        self._bar = Bar(*columns, console=notes, transient=True, disable=not notes.is_terminal or as_json or quiet)
        self._task: Any = None
        self._told = time.monotonic()

    def data(self, dataset: Dataset) -> None:
        """What is trained on."""
        if self._quiet or self._json:
            return
        labels = ", ".join(f"{printable(label)} {count:,}" for label, count in dataset.counts.items())
        typer.echo(
            f"{len(dataset.train):,} posts to train on, {len(dataset.test):,} to test on"
            + (f", {len(dataset.validation):,} held back" if dataset.validation else "")
        )
        typer.echo(f"{len(dataset.labels)} labels: {labels}")
        if dataset.left_out:
            typer.echo("Left out: " + ", ".join(f"{count:,} {why}" for why, count in dataset.left_out.items()))

    def planned(self, plan: Plan) -> None:
        """Before the first step."""
        if self._json:
            self._line("plan", plan._asdict() | {"effective_batch": plan.effective_batch})
            return
        typer.echo(
            f"Effective batch {plan.effective_batch} = {plan.batch_size} a device × {plan.accumulation} accumulated × "
            f"{plan.devices} devices; {plan.device} in {plan.precision}"
        )
        about = "" if plan.seconds is None else f", about {_duration(plan.seconds)}"
        typer.echo(f"{plan.steps:,} optimization steps, {plan.epochs:.3g} epochs{about}")
        self._bar.stop()
        self._bar.start()
        self._task = self._bar.add_task("training", total=plan.steps)

    def progress(self, now: Progress) -> None:
        """After each optimization step."""
        loss = "" if now.loss is None else f"loss {now.loss:.3f}"
        if self._task is not None:
            self._bar.update(self._task, completed=now.step, description=loss or "training")
        if self._bar.disable and (time.monotonic() - self._told > PAUSE or now.step == now.steps):
            self._told = time.monotonic()
            if self._json:
                self._line("progress", now._asdict())
            else:
                self._notes.print(f"step {now.step:,} of {now.steps:,}, epoch {now.epoch:.2f} {loss}")

    def stop(self) -> None:
        """The bar is done, however it came to that."""
        self._bar.stop()

    def finished(self, console: Console, record: Mapping[str, Any], curve: Sequence[Point], folder: Path) -> None:
        """The end."""
        if self._json:
            self._line("trained", {"folder": str(folder), **record})
            return
        typer.echo(f"Trained in {_duration(record['seconds'])}, {record['samples_per_s']:.1f} posts/s")
        for name, values in (("loss", [p.loss for p in curve]), ("rate", [p.rate for p in curve])):
            known = [value for value in values if value is not None]
            if known:
                typer.echo(f"{name:<5}{sparkline(known)} {known[0]:.3g} → {known[-1]:.3g}")
        table = Table("", box=None, header_style="dim", padding=(0, 2, 0, 0))
        for column in ("accuracy", "macro-F1", "calibration error", "posts/s"):
            table.add_column(column, justify="right")
        for name, found in ((str(folder), record["metrics"]), ("its base, zero-shot", record["zero_shot"])):
            if found:
                figures = [f"{found[key]:.3f}" for key in ("accuracy", "macro_f1", "calibration_error")]
                table.add_row(escape(printable(name)), *figures, f"{found['posts_per_s']:,.1f}")
        if record["metrics"]:
            console.print(table)
        typer.echo(f"`feedmill worker --model {printable(str(folder))}` serves it.")

    def _line(self, key: str, value: Mapping[str, Any]) -> None:
        typer.echo(json.dumps({key: value}, ensure_ascii=False))


def sparkline(values: Sequence[float]) -> str:
    """One row of blocks, from nothing to the greatest."""
    most = max(values) or 1.0
    shown = values if len(values) <= CELLS else [values[place * len(values) // CELLS] for place in range(CELLS)]
    return "".join(HEIGHTS[min(int(max(value, 0.0) / most * len(HEIGHTS)), len(HEIGHTS) - 1)] for value in shown)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
