"""Run the experiment of `feedmill tune` and gather its findings, as a table of one row per
measurement.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from feedmill.console import Report
from feedmill.local_model import load_model
from feedmill.shared.errors import DeviceFull, UserError, explain_refusals
from feedmill.shared.messages import Post
from feedmill.shared.settings import Settings
from feedmill.tuning.curve import Curve
from feedmill.tuning.ladder import Ladder, Rung, climb
from feedmill.tuning.precisions import Precision, compare
from feedmill.tuning.profile import Operation, profile_batches
from feedmill.tuning.sizes import ARRIVAL_SIZES
from feedmill.tuning.trials import (
    ROUNDS,
    Bench,
    Size,
    Trial,
    Unmeasured,
    budgets_of,
    in_megabytes,
    sampled,
)
from feedmill.workers.models.classifiers import Classifier
from feedmill.workers.pipeline.calibration import remember

#: Columns of the table of findings, in order.
COLUMNS = (
    "experiment", "name", "size", "posts", "seconds_per_batch", "posts_per_s", "tokens_per_s",
    "padding_efficiency",
    "memory_mb", "gain", "same_labels", "largest_difference", "accuracy", "reason",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Measurements besides token budgets."""

    sizes: Sequence[int] = ARRIVAL_SIZES
    ladder: bool = False
    dtypes: Sequence[str] = ()
    profile_folder: Path | None = None


@dataclass
class Findings:
    """The figures of one run. posts: in the file; sample_posts: those that each trial computed."""

    model: str
    device: str
    lanes: int
    is_packed: bool
    posts: int
    sample_posts: int
    tokens_per_post: float
    budgets: Curve
    arrival: Curve
    #: True if workers now start with the best budget; otherwise why not.
    stored: bool = False
    not_stored_because: str = ""
    ladder: Ladder | None = None
    precisions: list[Precision] = field(default_factory=list)
    unmeasured_precisions: list[Unmeasured] = field(default_factory=list)
    operations: Sequence[Operation] = field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row of COLUMNS for each measurement and for each that was not possible."""
        rows = [
            *_curve_rows("budget", self.budgets),
            *_curve_rows("arrival", self.arrival),
        ]
        if self.ladder is not None:
            rows += _ladder_rows(self.ladder)
        rows += [_precision_row(precision) for precision in self.precisions]
        rows += _unmeasured_rows("dtype", self.unmeasured_precisions)
        return rows


def run(
    settings: Settings,
    posts: Sequence[Post],
    plan: Plan,
    notes: Console,
    report: Report,
    keep: Callable[[Findings], object] | None = None,
) -> Findings:
    """Measure the model of the settings on these posts.

    keep: called with the figures so far if a further experiment fails or is interrupted. Raises
    UserError if the model cannot be loaded or serves no such labels, or if the plan asks for
    unknown types.
    """
    classifier = load_model(settings)
    with explain_refusals(settings.model):
        findings, bench = _sweeps(
            classifier,
            settings,
            posts,
            plan,
            report,
        )
        _store(findings, classifier, settings, bench)
    try:
        _run_others(findings, bench, settings, posts, plan, notes, report)
        del classifier, bench  # before the same model is loaded in other precisions
        if plan.dtypes:
            compare(settings, plan.dtypes, posts, report.phase, findings)
    except BaseException:
        report.stop()
        if keep is not None:
            keep(findings)
        raise
    report.stop()
    return findings


def _run_others(
    findings: Findings,
    bench: Bench,
    settings: Settings,
    posts: Sequence[Post],
    plan: Plan,
    notes: Console,
    report: Report,
) -> None:
    """Run the experiments after the sweeps with the same model."""
    classifier = bench.classifier
    with explain_refusals(settings.model):
        size = _budget_for_more(findings, classifier)
        if plan.profile_folder is not None:
            report.phase("profiling ten micro-batches")
            findings.operations = profile_batches(bench, size, plan.profile_folder)
        if plan.ladder:
            findings.ladder = climb(
                classifier,
                settings,
                size.number,
                posts,
                notes,
                report.phase,
            )
        report.stop()


def _budget_for_more(findings: Findings, classifier: Classifier) -> Size:
    """Return the token budget of further experiments: the best, or the smallest if the posts were
    too few to tell.
    """
    if findings.budgets.trials:
        return findings.budgets.knee.size
    return budgets_of(classifier)[0]


def _sweeps(
    classifier: Classifier,
    settings: Settings,
    posts: Sequence[Post],
    plan: Plan,
    report: Report,
) -> tuple[Findings, Bench]:
    texts = [post.text for post in posts]
    bench = Bench(classifier, settings, sampled(texts))
    budgets = budgets_of(classifier)
    arrival_sizes = [Size("arrival", number) for number in plan.sizes]
    report.phase("preparing posts")
    try:
        bench.prepare([*budgets, *arrival_sizes])
    except DeviceFull:
        raise UserError(
            f"{classifier.device.name} has too little memory for {classifier.weights.name}. Use a "
            "smaller model, fewer labels, or half precision (FEEDMILL_DTYPE)."
        ) from None
    findings = Findings(
        model=classifier.weights.name,
        device=str(classifier.device),
        lanes=bench.lanes,
        is_packed=classifier.packed,
        posts=len(posts),
        sample_posts=len(bench.sample.posts),
        tokens_per_post=bench.sample.tokens_per_post,
        budgets=sweep(bench, budgets, "token budgets", report),
        arrival=sweep(bench, arrival_sizes, "batches in arrival order", report),
    )
    return findings, bench


def sweep(bench: Bench, sizes: Sequence[Size], what: str, report: Report) -> Curve:
    """Measure sizes in growing order, ROUNDS times, and keep each one's best round.

    A size that runs out of memory ends the series; one that the sample cannot fill is left out.
    """
    report.phase(what, ROUNDS * len(sizes))
    best: dict[Size, Trial] = {}
    unmeasured: list[Unmeasured] = []
    possible: list[Size] = []
    for size in sizes:
        if bench.is_enough(size):
            possible.append(size)
        else:
            unmeasured.append(_too_large(size, bench))
    done = 0
    for _ in range(ROUNDS):
        for index, size in enumerate(possible):
            try:
                trial = bench.measure(size)
            except DeviceFull:
                best.pop(size, None)
                unmeasured += _beyond_memory(possible[index:])
                possible = possible[:index]
                break
            earlier = best.get(size)
            if earlier is None or trial.rate > earlier.rate:
                best[size] = _with_first_memory(trial, earlier)
            done += 1
            report.advance(done, f", {trial.posts_per_s:,.1f} posts/s with {size}")
    report.stop()
    return Curve(
        trials=[best[size] for size in possible],
        unmeasured=sorted(unmeasured, key=_number),
    )


def _too_large(size: Size, bench: Bench) -> Unmeasured:
    needed = bench.posts_needed(size)
    count = len(bench.sample.posts)
    return Unmeasured(
        what=str(size),
        reason=f"needs about {needed:,} posts, the file has {count:,}",
        size=size,
    )


def _beyond_memory(sizes: Sequence[Size]) -> list[Unmeasured]:
    first, *larger = sizes
    out_of_memory = Unmeasured(
        what=str(first),
        reason="out of memory",
        size=first,
        is_out_of_memory=True,
    )
    unmeasured = [out_of_memory]
    for size in larger:
        reason = f"not tried: memory ran out at {first}"
        unmeasured.append(Unmeasured(str(size), reason, size))
    return unmeasured


def _with_first_memory(trial: Trial, earlier: Trial | None) -> Trial:
    """Return the trial with the first round's memory: later ones find blocks that larger sizes
    have left.
    """
    if earlier is None:
        return trial
    return replace(trial, memory_bytes=earlier.memory_bytes)


def _number(unmeasured: Unmeasured) -> int:
    if unmeasured.size is None:
        return 0
    return unmeasured.size.number


def _store(
    findings: Findings, classifier: Classifier, settings: Settings, bench: Bench
) -> None:
    """Store the best token budget for workers, unless the sample is too small to tell."""
    budgets = findings.budgets
    if not budgets.trials:
        findings.not_stored_because = "no budget was measured"
        return
    needed_posts = []
    for unmeasured in budgets.unmeasured:
        size = unmeasured.size
        if size is not None and not bench.is_enough(size):
            needed_posts.append(bench.posts_needed(size))
    if needed_posts and budgets.out_of_memory is None:
        needed = max(needed_posts)
        findings.not_stored_because = (
            f"the file has {findings.posts:,} posts, and all budgets need about {needed:,} like "
            "these"
        )
        return
    rates = {trial.size.number: trial.rate for trial in budgets.trials}
    findings.stored = remember(classifier, settings, rates)


def _row(experiment: str, name: str, **figures: Any) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row["experiment"] = experiment
    row["name"] = name
    return row | figures


def _curve_rows(experiment: str, curve: Curve) -> list[dict[str, Any]]:
    rows = [_trial_row(experiment, trial) for trial in curve.trials]
    return rows + _unmeasured_rows(experiment, curve.unmeasured)


def _unmeasured_rows(
    experiment: str, unmeasured: Iterable[Unmeasured]
) -> list[dict[str, Any]]:
    rows = []
    for trial in unmeasured:
        row = _row(experiment, trial.what, reason=trial.reason)
        if trial.size is not None:
            row["size"] = trial.size.number
        rows.append(row)
    return rows


def _trial_row(experiment: str, trial: Trial) -> dict[str, Any]:
    return _row(
        experiment,
        str(trial.size),
        size=trial.size.number,
        posts=trial.posts,
        seconds_per_batch=trial.seconds_per_batch,
        posts_per_s=trial.posts_per_s,
        tokens_per_s=trial.tokens_per_s,
        padding_efficiency=trial.padding_efficiency,
        memory_mb=trial.memory_mb,
    )


def _ladder_rows(ladder: Ladder) -> list[dict[str, Any]]:
    rows = [_rung_row(ladder, rung) for rung in ladder.rungs]
    return rows + _unmeasured_rows("ladder", ladder.unmeasured)


def _rung_row(ladder: Ladder, rung: Rung) -> dict[str, Any]:
    return _row(
        "ladder",
        rung.name,
        posts=rung.posts,
        posts_per_s=rung.posts_per_s,
        gain=ladder.gain(rung),
        same_labels=rung.same_labels(ladder.reference),
    )


def _precision_row(precision: Precision) -> dict[str, Any]:
    same_labels = None
    if precision.changed_labels is not None:
        same_labels = 1 - precision.changed_labels
    return _row(
        "dtype",
        precision.name,
        posts=precision.posts,
        posts_per_s=precision.posts_per_s,
        memory_mb=in_megabytes(precision.memory_bytes),
        same_labels=same_labels,
        largest_difference=precision.largest_difference,
        accuracy=precision.accuracy,
    )
