"""Print a training's plan, progress and result, as text or as JSON lines."""

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from feedmill.evaluation.report import models_table
from shared.errors import printable
from workers.training.examples import Dataset
from workers.training.run import Plan, Point, TrainingProgress

#: Width of a sparkline in characters, and its characters from low to high.
SPARKLINE_WIDTH, SPARKLINE_CHARACTERS = 60, "▁▂▃▄▅▆▇█"
#: Seconds between progress lines if there is no progress bar.
PROGRESS_INTERVAL_S = 10.0


class TrainingReport:
    """The output of one training: text or, with as_json, JSON lines with the key `plan`, `progress` or `trained`.

    quiet: print nothing; set in every process of a distributed training except the first.
    """

    def __init__(self, notes: Console, as_json: bool, quiet: bool) -> None:
        self._json, self._quiet = as_json, quiet
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._notes = notes
        self._bar = Bar(*columns, console=notes, transient=True, disable=not notes.is_terminal or as_json or quiet)
        self._task: Any = None
        #: Time of the last progress line, by time.monotonic.
        self._printed_at = time.monotonic()

    def data(self, dataset: Dataset) -> None:
        """Print the sizes and labels of the dataset."""
        if self._quiet or self._json:
            return
        labels = ", ".join(f"{printable(label)} {count:,}" for label, count in dataset.counts.items())
        typer.echo(
            f"{len(dataset.train):,} posts for training, {len(dataset.test):,} for testing"
            + (f", {len(dataset.validation):,} for validation" if dataset.validation else "")
        )
        typer.echo(f"{len(dataset.labels)} labels: {labels}")
        if dataset.left_out:
            typer.echo("Left out: " + ", ".join(f"{count:,} {why}" for why, count in dataset.left_out.items()))

    def planned(self, plan: Plan) -> None:
        """Print the plan and show the progress bar."""
        if self._json:
            self._line("plan", plan._asdict() | {"effective_batch": plan.effective_batch})
            return
        typer.echo(
            f"Effective batch {plan.effective_batch} = {plan.batch_size} per device × {plan.accumulation} accumulated "
            f"× {plan.devices} devices; {plan.device} in {plan.precision}"
        )
        about = "" if plan.seconds is None else f", about {_duration(plan.seconds)}"
        typer.echo(f"{plan.steps:,} optimization steps, {plan.epochs:.3g} epochs{about}")
        self._bar.stop()
        self._bar.start()
        self._task = self._bar.add_task("training", total=plan.steps)

    def progress(self, now: TrainingProgress) -> None:
        """Report an optimization step."""
        loss = "" if now.loss is None else f"loss {now.loss:.3f}"
        if self._task is not None:
            self._bar.update(self._task, completed=now.step, description=loss or "training")
        since_last = time.monotonic() - self._printed_at
        if self._bar.disable and (since_last > PROGRESS_INTERVAL_S or now.step == now.steps):
            self._printed_at = time.monotonic()
            if self._json:
                self._line("progress", now._asdict())
            else:
                self._notes.print(f"step {now.step:,} of {now.steps:,}, epoch {now.epoch:.2f} {loss}")

    def stop(self) -> None:
        """Remove the progress bar after the training has ended or failed."""
        self._bar.stop()

    def finished(self, console: Console, record: Mapping[str, Any], curve: Sequence[Point], folder: Path) -> None:
        """Print the training time, the curves and the metrics of the finished model."""
        if self._json:
            self._line("trained", {"folder": str(folder), **record})
            return
        typer.echo(f"Trained in {_duration(record['seconds'])}, {record['samples_per_s']:.1f} posts/s")
        for name, values in (("loss", [p.loss for p in curve]), ("rate", [p.rate for p in curve])):
            known = [value for value in values if value is not None]
            if known:
                typer.echo(f"{name:<5}{sparkline(known)} {known[0]:.3g} → {known[-1]:.3g}")
        if record["metrics"]:
            measured = ((str(folder), record["metrics"]), ("its base, zero-shot", record["zero_shot"]))
            console.print(models_table("", measured))
        where = printable(shlex.quote(str(folder)))
        typer.echo(f"Next, switch running workers to this model:\n  feedmill deploy {where}")
        typer.echo(f"Or start a worker with it:\n  feedmill worker --model {where}")

    def _line(self, key: str, value: Mapping[str, Any]) -> None:
        typer.echo(json.dumps({key: value}, ensure_ascii=False))


def sparkline(values: Sequence[float]) -> str:
    """Return a line of block characters, scaled from 0 to the greatest value. Long series are sampled."""
    most = max(values) or 1.0
    width, characters = SPARKLINE_WIDTH, SPARKLINE_CHARACTERS
    shown = values if len(values) <= width else [values[place * len(values) // width] for place in range(width)]
    return "".join(
        characters[min(int(max(value, 0.0) / most * len(characters)), len(characters) - 1)] for value in shown
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
