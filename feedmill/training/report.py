"""Print a training's plan and progress on standard error, and its result on standard output."""

import shlex
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from feedmill.evaluation.report import models_table
from feedmill.shared.errors import printable
from feedmill.workers.training import Report
from feedmill.workers.training.examples import Dataset

Counted = TypeVar("Counted")

#: Seconds between progress lines if there is no progress bar.
PROGRESS_INTERVAL_S = 10.0


class TrainingReport(Report):
    """The output of one training. notes: a quiet console in every process of a distributed training but the first."""

    def __init__(self, notes: Console) -> None:
        self._notes = notes
        self._bar: Progress | None = None
        #: Time of the last progress line, and of the first step, by time.monotonic.
        self._printed_at = self._began = time.monotonic()
        #: The first step; not 1 in a resumed training.
        self._first: int | None = None

    def data(self, dataset: Dataset) -> None:
        """Print the sizes and labels of the dataset."""
        labels = ", ".join(f"{label} {count:,}" for label, count in dataset.counts.items())
        self._print(
            f"{len(dataset.train):,} posts for training, {len(dataset.test):,} for testing"
            + (f", {len(dataset.validation):,} for validation" if dataset.validation else "")
        )
        self._print(f"{len(dataset.labels)} labels: {labels}")
        if dataset.left_out:
            self._print("Left out: " + ", ".join(f"{count:,} {why}" for why, count in dataset.left_out.items()))

    def _print(self, line: str) -> None:
        self._notes.print(escape(printable(line)))

    def phase(self, what: str, total: int | None = None) -> None:
        """Say what is done now, in a line or in a bar, whose spinner also moves while a step takes long."""
        self.stop()
        if not self._notes.is_terminal:
            self._print(what)
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(*columns, TimeElapsedColumn(), console=self._notes, transient=True)
        self._bar.add_task(printable(what), total=total)
        self._bar.start()

    def planned(self, plan: Mapping[str, Any]) -> None:
        """Print the plan."""
        self._began, self._first = time.monotonic(), None
        self._print(
            f"Effective batch {plan['effective_batch']} = {plan['batch_size']} per device × {plan['accumulation']} "
            f"accumulated × {plan['devices']} devices; {plan['device']} in {plan['precision']}"
        )
        self._print(f"{plan['steps']:,} optimization steps, {plan['epochs']:.3g} epochs")
        if self._notes.is_terminal:
            self.phase("training", plan["steps"])

    def progress(self, step: int, steps: int, loss: float | None) -> None:
        """Report an optimization step, and the time left at the pace of the steps so far."""
        self._first = self._first or step
        left = (time.monotonic() - self._began) / (step - self._first + 1) * (steps - step)
        shown = ("" if loss is None else f" loss {loss:.3f}") + (f", about {_duration(left)} left" if left else "")
        self._advance(step, f"training{shown}", f"step {step:,} of {steps:,}{shown}", step == steps)

    def counting(self, what: str, found: Iterable[Counted], total: int) -> Iterator[Counted]:
        """Yield what was found for each post, reporting for how many. what: what is done with the posts."""
        self.phase(f"{what} {total:,} posts", total)
        for done, each in enumerate(found, 1):
            self._advance(done, f"{what} {total:,} posts", f"{done:,} of {total:,} posts")
            yield each
        self.stop()

    def _advance(self, done: int, description: str, line: str, is_last: bool = False) -> None:
        """Move the bar; without one, print the line if the last one was PROGRESS_INTERVAL_S ago."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, description=description)
        elif is_last or time.monotonic() - self._printed_at > PROGRESS_INTERVAL_S:
            self._print(line)
            self._printed_at = time.monotonic()

    def stop(self) -> None:
        """Remove the progress bar after a phase has ended or failed."""
        if self._bar is not None:
            self._bar.stop()
        self._bar, self._printed_at = None, time.monotonic()


def show_trained(console: Console, record: Mapping[str, Any], folder: Path) -> None:
    """Print the training time and the metrics of the finished model, and what to do next."""
    typer.echo(f"Trained in {_duration(record['seconds'])}, {record['samples_per_s']:.1f} posts/s")
    if losses := [point["loss"] for point in record["curve"] if "loss" in point]:
        typer.echo(f"loss {losses[0]:.3g} → {losses[-1]:.3g}")
    tested, zero_shot = record["metrics"], record["zero_shot"]
    if tested:
        console.print(models_table("", ((str(folder), tested), ("its base, zero-shot", zero_shot))))
    if tested and zero_shot and tested["accuracy"] <= zero_shot["accuracy"]:
        helps = "more posts (`feedmill label` asks for the most useful ones), or all weights, without --head"
        typer.echo(
            f"Do not deploy this model: it is no more accurate ({tested['accuracy']:.3f}) than its base zero-shot "
            f"({zero_shot['accuracy']:.3f}) on the same {tested['posts']:,} posts. What helps: "
            + (helps if record["options"]["head"] else "more posts or --epochs")
        )
        return
    advise(str(folder))


def advise(folder: str) -> None:
    """Print how to serve a model."""
    where = printable(shlex.quote(folder))
    typer.echo(f"Next, switch running workers to the model:\n  feedmill deploy {where}")
    typer.echo(f"Or start a worker with it:\n  feedmill worker --model {where}")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
