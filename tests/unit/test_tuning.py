"""feedmill/tuning: measuring sizes, naming what the curve shows, comparing ways and data types."""

import csv
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from feedmill.cli.main import application
from feedmill.cli.tune import parse_sizes
from feedmill.console import Report, notes_console
from feedmill.shared.errors import DeviceFull, UserError
from feedmill.shared.messages import Classification, Outcome, Post, PostError
from feedmill.shared.settings import Settings
from feedmill.tables import check_output, check_page
from feedmill.tuning import experiment, output, precisions
from feedmill.tuning.curve import Curve
from feedmill.tuning.experiment import COLUMNS, Findings, _store, sweep
from feedmill.tuning.ladder import OFFLINE, Ladder, Rung
from feedmill.tuning.page import page
from feedmill.tuning.trials import (
    Bench,
    Size,
    Trial,
    Unmeasured,
    budgets_of,
    compute,
    sampled,
)
from feedmill.workers.models.device import Device
from tests.support import naming
from tests.unit.test_pipeline import StandIn

CPU = Device(torch.device("cpu"), torch.float32, "for a test")
TEXTS = ["word " * (1 + number % 40) for number in range(1000)]


class OnCpu(StandIn):
    """A classifier on a CPU whose memory holds so many tokens."""

    device = CPU

    def __init__(self, tokens: int = 10**9) -> None:
        super().__init__()
        self._tokens = tokens
        self.sizes: list[int] = []

    def forward(self, rows: Any) -> Any:
        tokens = len(rows) * max(row.length for row in rows)
        if tokens > self._tokens:
            raise DeviceFull("out of memory")
        self.sizes.append(tokens)
        return None

    def finish(self, rows: Any, outputs: Any) -> Any:  # noqa: ARG002
        return []


def bench(settings: Settings, classifier: OnCpu, texts: Sequence[str] = TEXTS) -> Bench:
    return Bench(classifier, settings, sampled(texts))


def trial(
    number: int, seconds: float, memory_mb: int | None = 100, order: Any = "length"
) -> Trial:
    return Trial(
        size=Size(order, number),
        posts=1000,
        batches=10,
        tokens=50_000,
        padded_tokens=60_000,
        seconds=seconds,
        lanes=2,
        busy_seconds=seconds,
        memory_bytes=None if memory_mb is None else memory_mb * 2**20,
    )


def findings(budgets: Curve, arrival: Curve, **more: Any) -> Findings:
    return Findings(
        model="a <model>",
        device="cpu",
        lanes=2,
        is_packed=True,
        posts=1000,
        sample_posts=500,
        tokens_per_post=50.0,
        budgets=budgets,
        arrival=arrival,
        **more,
    )


# Measuring.


def test_measures_each_size_on_the_same_posts(settings: Settings) -> None:
    measured = bench(settings, OnCpu())
    sizes = [
        Size("arrival", 5),
        Size("arrival", 40),
        Size("length", 512),
        Size("length", 2048),
    ]
    measured.prepare(sizes)
    trials = [measured.measure(size) for size in sizes]
    assert len({(each.posts, each.tokens) for each in trials}) == 1
    assert trials[0].batches == -(-trials[0].posts // 5)
    # Sorted by length, less is padded than in arrival order.
    assert (
        trials[2].padding_efficiency
        > 0.8
        > trials[0].padding_efficiency
        > trials[1].padding_efficiency
    )
    assert all(each.memory_mb for each in trials)


def test_no_batch_exceeds_its_size(settings: Settings) -> None:
    classifier = OnCpu()
    measured = bench(settings, classifier)
    measured.prepare([Size("length", 512)])
    classifier.sizes.clear()
    measured.measure(Size("length", 512))
    assert max(classifier.sizes) <= 512


def test_names_the_size_at_which_memory_runs_out(settings: Settings) -> None:
    measured = bench(settings, OnCpu(tokens=1500))
    sizes = budgets_of(measured.classifier)
    measured.prepare(sizes)
    curve = sweep(measured, sizes, "token budgets", Report())
    assert [each.size.number for each in curve.trials] == [512, 1024]
    assert curve.out_of_memory is not None
    assert curve.out_of_memory.size == Size("length", 2048)
    assert [each.size.number for each in curve.unmeasured if each.size] == [
        2048,
        4096,
        8192,
    ]
    assert any(
        "Memory runs out at 2,048 tokens" in sentence for sentence in curve.sentences()
    )


def test_stores_nothing_from_too_few_posts(settings: Settings) -> None:
    measured = bench(settings, OnCpu(), TEXTS[:80])
    sizes = budgets_of(measured.classifier)
    measured.prepare(sizes)
    curve = sweep(measured, sizes, "token budgets", Report())
    assert curve.trials
    assert all("posts, the file has 80" in each.reason for each in curve.unmeasured)
    found = findings(curve, Curve([]))
    found.posts = 80
    _store(found, measured.classifier, settings, measured)
    assert not found.stored
    assert "80 posts" in found.not_stored_because


def test_an_error_in_one_lane_ends_all(settings: Settings) -> None:
    classifier = OnCpu(tokens=10)
    measured = bench(settings, classifier)
    measured.sample.extend(100)
    with pytest.raises(DeviceFull):
        compute(classifier, iter(measured.batches(Size("arrival", 50))), lanes=2)


# What a curve shows.


def test_knee_is_the_smallest_size_near_the_best() -> None:
    curve = Curve(
        [
            trial(512, 4.0),
            trial(1024, 2.02),
            trial(2048, 2.0),
            trial(4096, 2.05),
            trial(8192, 3.0),
        ]
    )
    assert curve.knee.size.number == 1024
    first, last = curve.plateau
    assert (first.size.number, last.size.number) == (1024, 4096)
    text = " ".join(curve.sentences())
    assert "1,024 tokens a batch is the smallest size within 2%" in text
    assert "flat from 1,024 to 4,096" in text
    assert "falls beyond 4,096" in text


def test_says_that_other_processes_disturbed_the_rates() -> None:
    """Otherwise the sentence would contradict the table, whose rates are by the clock."""
    by_cpu_time = [trial(5, 2.1, order="arrival"), trial(10, 2.0, order="arrival")]
    assert "CPU time" not in Curve(by_cpu_time).sentences()[0]
    disturbed = [by_cpu_time[0], replace(by_cpu_time[1], seconds=5.0)]
    assert Curve(disturbed).knee.size.number == 10
    assert "compared by CPU time" in Curve(disturbed).sentences()[0]


def test_a_series_without_a_measurement_says_why() -> None:
    curve = Curve(
        [],
        [
            Unmeasured(
                "512 tokens",
                "out of memory",
                Size("length", 512),
                is_out_of_memory=True,
            )
        ],
    )
    assert curve.sentences() == ["No size was measured: out of memory."]


# The ladder and the data types.


def test_each_step_of_the_ladder_is_compared_with_the_one_before() -> None:
    rungs = [
        Rung("pipeline, row by row", 2, 2.0, ["a", "b"]),
        Rung("direct pass", 4, 2.0, ["a", "b", "c", "x"]),
        Rung(OFFLINE, 4, 1.0, ["a", "b", "c", "d"]),
    ]
    ladder = Ladder(rungs, [])
    assert [ladder.gain(rung) for rung in rungs] == [None, 2.0, 2.0]
    assert [rung.same_labels(ladder.reference) for rung in rungs] == [1.0, 0.75, 1.0]


def classification(label: str | None, **scores: float) -> Classification:
    return Classification(
        id="1", label=label, scores=scores, model="m", revision=None, weights="", fingerprint="",
        classified_at=0.0,
        worker="", device="", queued_seconds=None,
    )  # fmt: skip


def test_data_types_are_compared_with_float32() -> None:
    failed = PostError(id="1", error="no text")
    exact: list[Outcome] = [
        classification("a", a=0.6, b=0.4),
        classification("b", a=0.4, b=0.6),
        failed,
    ]
    coarse: list[Outcome] = [
        classification("a", a=0.7, b=0.3),
        classification("a", a=0.52, b=0.48),
        failed,
    ]
    assert precisions.largest_difference(coarse, exact) == pytest.approx(0.12)
    assert precisions.changed_labels(coarse, exact) == 0.5


def test_posts_without_a_label_are_compared_by_their_best_label() -> None:
    """FEEDMILL_LANGUAGES and FEEDMILL_NONE leave posts without a label."""
    posts = [Post(id="1", title="x", topic="a"), Post(id="2", title="y", topic="b")]
    exact: list[Outcome] = [
        classification(None, a=0.6, b=0.4),
        classification(None, b=0.6, a=0.4),
    ]
    coarse: list[Outcome] = [
        classification("a", a=0.7, b=0.3),
        classification(None, a=0.52, b=0.48),
    ]
    assert precisions.accuracy(posts, exact, ("a", "b")) == 1
    assert precisions.accuracy(posts, coarse, ("a", "b")) == 0.5
    assert precisions.changed_labels(coarse, exact) == 0.5


def test_few_posts_are_profiled_and_climbed_without_a_budget(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token budget can be measured on four posts; the other experiments take the
    smallest one.
    """
    budgets: list[int] = []

    def climb(_classifier: Any, _settings: Any, budget: int, *_: Any) -> Ladder:
        budgets.append(budget)
        return Ladder([], [])

    monkeypatch.setattr(experiment, "load_model", lambda _: OnCpu())
    monkeypatch.setattr(experiment, "climb", climb)
    plan = experiment.Plan(
        [1, 2], ladder=True, dtypes=(), profile_folder=tmp_path / "profile"
    )
    posts = [Post(id=str(number), title=text) for number, text in enumerate(TEXTS[:4])]
    found = experiment.run(settings, posts, plan, notes_console(), Report())
    assert not found.budgets.trials
    assert budgets == [512]
    assert (tmp_path / "profile" / "trace.json").is_file()


# Output.


def test_table_has_a_row_for_each_measurement_and_each_missing_one(
    tmp_path: Path,
) -> None:
    missing = Unmeasured(
        "2,048 tokens a batch",
        "out of memory",
        Size("length", 2048),
        is_out_of_memory=True,
    )
    ladder = Ladder(
        [Rung(OFFLINE, 4, 1.0, ["a"] * 4)], [Unmeasured("pipeline", "no such pipeline")]
    )
    found = findings(
        Curve([trial(512, 2.0), trial(1024, 1.0)], [missing]),
        Curve([trial(5, 2.0, order="arrival")]),
        ladder=ladder,
        unmeasured_precisions=[Unmeasured("float16", "not on this CPU")],
    )
    output.write_table(found, str(tmp_path / "tune.csv"))
    with (tmp_path / "tune.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(COLUMNS)
    assert [row["experiment"] for row in rows] == ["budget"] * 3 + ["arrival"] + [
        "ladder"
    ] * 2 + ["dtype"]
    assert rows[2]["reason"] == "out of memory"
    assert float(rows[1]["posts_per_s"]) == 1000
    as_json = output.as_json(found)
    assert as_json["token_budget"]["out_of_memory"] == 2048
    assert as_json["token_budget"]["knee"] == 1024


def test_page_draws_the_curves_and_escapes_names() -> None:
    missing = Unmeasured(
        "4,096 tokens a batch",
        "out of memory",
        Size("length", 4096),
        is_out_of_memory=True,
    )
    found = findings(
        Curve([trial(512, 2.0), trial(1024, 1.0)], [missing]),
        Curve([trial(5, 2.0, order="arrival"), trial(10, 1.0, order="arrival")]),
    )
    text = page(found)
    assert "a &lt;model&gt;" in text
    assert text.count("<polyline") == 6
    assert text.count("out of memory</title>") == 3
    assert "script" not in text.replace("script-src", "")


def test_refuses_an_output_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="format"):
        check_output(tmp_path / "tune.txt")
    with pytest.raises(UserError, match="folder"):
        check_output(tmp_path / "none" / "tune.csv")


POSTS = "id,title\n1,x\n"


@pytest.mark.parametrize("name", ["posts.csv", "posts", "html"])
def test_a_page_replaces_nothing_but_a_page(tmp_path: Path, name: str) -> None:
    """--page with the name of the posts, or of any other file, leaves the file as it is."""
    file = tmp_path / name
    file.write_text(POSTS)
    with pytest.raises(UserError, match=naming(file)):
        check_page(file)
    assert file.read_text() == POSTS
    for allowed in ("", "<!DOCTYPE html>\n<p>", "\ufeff <html lang=en>"):
        file.write_text(allowed)
        check_page(file)
    check_page(tmp_path / "new.html")


def test_a_page_and_a_table_need_two_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--out"):
        check_page(tmp_path / "a.csv", table=f"{tmp_path}/../{tmp_path.name}/a.csv")


def test_tune_keeps_its_input(tmp_path: Path) -> None:
    posts = tmp_path / "posts.csv"
    posts.write_text(POSTS)
    for flags in (
        ["--page", str(posts)],
        ["--profile", str(posts)],
        ["--profile", str(posts / "profile")],
    ):
        with pytest.raises(UserError, match="posts.csv"):
            CliRunner().invoke(
                application(), ["tune", str(posts), *flags], catch_exceptions=False
            )
    assert posts.read_text() == POSTS


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("classify", "--out"),
        ("evaluate", "--out"),
        ("tune", "--out"),
        ("tune", "--page"),
        ("train", "--page"),
    ],
)
def test_no_command_replaces_its_labels(
    tmp_path: Path, command: str, flag: str
) -> None:
    posts = tmp_path / "posts.csv"
    posts.write_text(POSTS)
    labels = tmp_path / ("labels.html" if flag == "--page" else "labels.csv")
    labels.write_text("food\nsports\n")
    arguments = ["--from", str(posts), "--out", str(tmp_path / "m")]
    if command != "train":
        arguments = [str(posts)]
    link = tmp_path / "link.csv"
    link.symlink_to(labels)
    for given in (f"@{labels}", f"@{link}"):
        with pytest.raises(UserError, match="--labels"):
            CliRunner().invoke(
                application(),
                [command, *arguments, "--labels", given, flag, str(labels)],
                catch_exceptions=False,
            )
    assert labels.read_text() == "food\nsports\n"


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("train", ["--out", "model", "--page", "model"]),
        ("train", ["--out", "model", "--page", "model/model.safetensors"]),
        ("tune", ["--profile", "model", "--page", "model/trace.json"]),
        ("tune", ["--profile", "new", "--page", "new"]),
        ("tune", ["--profile", "new.csv", "--out", "new.csv"]),
        ("tune", ["--page", "new.csv", "--out", "new.csv"]),
    ],
)
def test_outputs_of_one_command_have_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, flags: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("posts.csv").write_text(POSTS)
    Path("model").mkdir()
    source = ["--from", "posts.csv"] if command == "train" else ["posts.csv"]
    with pytest.raises(UserError, match="Give"):
        CliRunner().invoke(
            application(), [command, *source, *flags], catch_exceptions=False
        )
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["model", "posts.csv"]


@pytest.mark.parametrize(
    "fault", [UserError("no"), RuntimeError("no"), KeyboardInterrupt()]
)
def test_a_failing_experiment_keeps_the_figures_before_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    kept: list[Any] = []

    def climb(*_: Any) -> Ladder:
        raise fault

    monkeypatch.setattr(experiment, "load_model", lambda _: OnCpu())
    monkeypatch.setattr(experiment, "climb", climb)
    posts = [Post(id=str(number), title=text) for number, text in enumerate(TEXTS[:4])]
    plan = experiment.Plan([1, 2], ladder=True)
    with pytest.raises(type(fault)):
        experiment.run(settings, posts, plan, notes_console(), Report(), kept.append)
    (findings,) = kept
    assert len(findings.arrival.trials) == 2


def test_a_failing_data_type_keeps_the_others(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Run:
        def __init__(self, _: Settings, name: str) -> None:
            self._name = name

        def enough(self, posts: Sequence[Post]) -> Sequence[Post]:
            return posts

        def measure(self, *_: Any) -> Any:
            if self._name == "float16":
                raise RuntimeError("not implemented for 'Half'")
            return self._name, []

    monkeypatch.setattr(precisions, "_Run", Run)
    comparison = SimpleNamespace(precisions=[], unmeasured_precisions=[])
    names = ["float32", "float16", "bfloat16"]
    precisions.compare(settings, names, [], lambda _: None, comparison)
    assert comparison.precisions == ["float32", "bfloat16"]
    (unmeasured,) = comparison.unmeasured_precisions
    assert (unmeasured.what, unmeasured.reason) == (
        "float16",
        "not implemented for 'Half'",
    )


@pytest.mark.parametrize("text", [f"1:{10**9}:1", f"1:{10**30}:1"])
def test_refuses_more_sizes_than_fit_in_memory(text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="are no sizes"):
            parse_sizes(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20
