"""Print a training's plan, progress and result, as text or as JSON lines."""

import json
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from feedmill.evaluation.report import models_table
from feedmill.shared.errors import printable
from feedmill.workers.training import Report
from feedmill.workers.training.examples import Dataset

Counted = TypeVar("Counted")

#: Seconds between progress lines if there is no progress bar.
PROGRESS_INTERVAL_S = 10.0


class TrainingReport(Report):
    """The output of one training: text or, with as_json, JSON lines with the key `plan`, `progress` or `trained`.

    quiet: print nothing; set in every process of a distributed training except the first.
    """

    def __init__(self, notes: Console, as_json: bool = False, quiet: bool = False) -> None:
        self._json, self._quiet = as_json, quiet
        self._notes = notes
        self._bar: Bar | None = None
        #: Time of the last progress line, and of the first step, by time.monotonic.
        self._printed_at = self._began = time.monotonic()
        #: The first step; not 1 in a resumed training.
        self._first: int | None = None

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

    def phase(self, what: str, total: int | None = None) -> None:
        """Say what is done now, in a line or in a bar, whose spinner also moves while a step takes long."""
        self.stop()
        if self._json or self._quiet:
            return
        if not self._notes.is_terminal:
            self._notes.print(escape(printable(what)))
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        self._bar = Bar(*columns, TimeElapsedColumn(), console=self._notes, transient=True)
        self._bar.add_task(printable(what), total=total)
        self._bar.start()

    def planned(self, plan: Mapping[str, Any]) -> None:
        """Print the plan."""
        self._began, self._first = time.monotonic(), None
        if self._json:
            self._line("plan", plan)
            return
        typer.echo(
            f"Effective batch {plan['effective_batch']} = {plan['batch_size']} per device × {plan['accumulation']} "
            f"accumulated × {plan['devices']} devices; {plan['device']} in {plan['precision']}"
        )
        typer.echo(f"{plan['steps']:,} optimization steps, {plan['epochs']:.3g} epochs")
        if self._notes.is_terminal:
            self.phase("training", plan["steps"])

    def progress(self, step: int, steps: int, loss: float | None) -> None:
        """Report an optimization step, and the time left at the pace of the steps so far."""
        self._first = self._first or step
        left = (time.monotonic() - self._began) / (step - self._first + 1) * (steps - step)
        is_due = step == steps or self._is_due()
        if self._json and is_due:
            self._line("progress", {"step": step, "steps": steps, "loss": loss, "seconds_left": left})
        shown = ("" if loss is None else f" loss {loss:.3f}") + (f", about {_duration(left)} left" if left else "")
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, description=f"training{shown}")
        elif is_due and not self._json:
            self._notes.print(f"step {step:,} of {steps:,}{shown}")

    def counting(self, what: str, found: Iterable[Counted], total: int) -> Iterator[Counted]:
        """Yield what was found for each post, reporting for how many. what: what is done with the posts."""
        self.phase(f"{what} {total:,} posts", total)
        for done, each in enumerate(found, 1):
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=done)
            elif not (self._json or self._quiet) and self._is_due():
                self._notes.print(f"{done:,} of {total:,} posts")
            yield each
        self.stop()

    def _is_due(self) -> bool:
        """Return whether to print a progress line now."""
        is_due = time.monotonic() - self._printed_at > PROGRESS_INTERVAL_S
        if is_due:
            self._printed_at = time.monotonic()
        return is_due

    def stop(self) -> None:
        """Remove the progress bar after a phase has ended or failed."""
        if self._bar is not None:
            self._bar.stop()
        self._bar, self._printed_at = None, time.monotonic()

    def finished(self, console: Console, record: Mapping[str, Any], folder: Path) -> None:
        """Print the training time and the metrics of the finished model, and what to do next."""
        if self._json:
            self._line("trained", {"folder": str(folder), **record})
            return
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

    def _line(self, key: str, value: Mapping[str, Any]) -> None:
        typer.echo(json.dumps({key: value}, ensure_ascii=False))


def advise(folder: str) -> None:
    """Print how to serve a model."""
    where = printable(shlex.quote(folder))
    typer.echo(f"Next, switch running workers to the model:\n  feedmill deploy {where}")
    typer.echo(f"Or start a worker with it:\n  feedmill worker --model {where}")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
