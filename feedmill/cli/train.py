"""The commands that make a model: `feedmill train` fine-tunes one, or fits a head on embeddings; `feedmill label` asks
for the labels of a few posts in the terminal, and fits a head to them.

Beside the weights are README.md for people, and training.json for programs. Neither quotes a post, because a purge of
the training posts does not reach them.
"""

import csv
import json
import platform
import random
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from heapq import nsmallest
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from feedmill import __version__
from feedmill.cli.options import AsJson, FileFlags, JsonSummary, excludes, with_settings
from feedmill.console import Report, notes_console, output_console, span
from feedmill.local_model import load_model
from feedmill.producers.files import FileReading
from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import (
    DeviceFull,
    DeviceLost,
    InputError,
    ModelError,
    PostRefused,
    UserError,
    clause,
    explain_missing,
    explain_refusals,
    explain_unwritable,
    json_line,
    printable,
    printable_lines,
)
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.settings import Settings
from feedmill.training.data import CHECKPOINTS, OF_FINE_TUNING, Dataset, TrainOptions, collect, make_dataset, purged_ids

if TYPE_CHECKING:
    from feedmill.training.active import Answer, Measured, Session
    from feedmill.training.head import Embedder, HeadModel

#: Packages whose versions are recorded.
LIBRARIES = ("torch", "transformers", "tokenizers")
#: Template of the model card, README.md.
CARD = Path(__file__).with_name("model_card.jinja")
#: Names in the output folder: the answers, which `feedmill train --from` reads, too; and the model.
LABELS_FILE, MODEL_FOLDER = "labels.csv", "model"
#: Columns of LABELS_FILE. A skipped post has an empty label.
ANSWER_COLUMNS = ("id", "title", "body", "label", "picked")
#: Keys for commands, and keys for labels, in order.
UNDO, SKIP, QUIT = "u", "s", "q"
LABEL_KEYS = "123456789abcdefghijklmnoprtvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
#: Characters of a body to show.
MAX_BODY_SHOWN = 1000
#: Posts to choose from: embedding them takes a minute on two cores, and 10 MB of memory besides the posts' texts.
USUAL_POOL, MAX_POOL = 2000, 100_000
#: Defaults of `feedmill train`.
BASE, MAX_TOKENS, SEED = TrainOptions.base, TrainOptions.max_tokens, TrainOptions.seed

#: A post with its label, empty if it was skipped, and why it was picked.
AnsweredPost = tuple[Post, str, str]


@excludes("--head", *OF_FINE_TUNING)
@with_settings("labels", "device", "redis_url", plain_logs=True)
def train(
    settings: Settings,
    options: TrainOptions,
    file: FileFlags,
    as_json: AsJson = False,
) -> None:
    """Switch running workers to the trained model with `feedmill deploy OUT`, or start one with `feedmill worker
    --model OUT`. See docs/training.md.
    """
    folder = Path(options.out).expanduser().absolute()
    try:
        record = _train(replace(options, out=str(folder)), file, settings)
    except (DeviceFull, DeviceLost) as error:
        raise ModelError(
            f"The device failed: {clause(error)}. If it is out of memory, set a smaller --batch-size and a larger "
            "--accumulation, or lower --max-tokens; else run the same command again to continue."
        ) from error
    finally:
        with suppress(OSError):  # only an empty folder: a model and an interrupted training stay
            folder.rmdir()
    if as_json:
        typer.echo(json_line({"folder": str(folder), **record}))
    else:
        show_trained(record, str(folder))


def _train(options: TrainOptions, file: FileFlags, settings: Settings) -> dict[str, Any]:
    """Collect the posts, train, write the model, and return its record."""
    notes, folder = notes_console(), Path(options.out)
    held = make_folder(folder)
    if held and (options.head or CHECKPOINTS not in held):
        raise UserError(f"{folder} is not empty. Choose a new or empty folder.")
    train = _trainer(options)
    collected = collect(options, file, settings, notes)
    dataset = make_dataset(collected.examples, options, collected.unlabelled, tuple(settings.labels or ()))
    report = Report(notes)
    for line in dataset.summary():
        report.print(line)
    try:
        trained = train(dataset, options, settings, report)
        trained.save(folder)
        tested = _tested(options, dataset, settings, report)
    finally:
        report.stop()
    record = {
        "trained_at": time.time(),
        "options": asdict(options) | asdict(file),
        "labels": list(dataset.labels),
        "train": len(dataset.train),
        "test": len(dataset.test),
        "train_by_label": dataset.counts,
        "posts": collected.counts | {"left_out": dataset.left_out},
        **trained.record,
        **tested,
        "versions": {"feedmill": __version__, "python": platform.python_version()}
        | {name: version(name) for name in LIBRARIES},
    }
    _write(folder, options, record)
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)  # until here, the same command continues
    return record


def _trainer(options: TrainOptions) -> Callable[[Dataset, TrainOptions, Settings, Report], Any]:
    """Return the function that trains. Raises UserError if a package is missing."""
    # Imported late: needs torch, which only workers have and which loads slowly.
    with explain_missing("Training", "worker" if options.head else "worker,train"):
        if options.head:
            from feedmill.training.head import train_head  # noqa: PLC0415

            return train_head
        import accelerate  # noqa: F401, PLC0415 - the Trainer needs it

        from feedmill.training.finetune import Training  # noqa: PLC0415
    return lambda *given: Training(*given).run()


def _write(folder: Path, options: TrainOptions, record: Mapping[str, Any]) -> None:
    """Write the record of a training, and its model card. Raises OSError."""
    content = json.dumps(record, ensure_ascii=False, indent=1) + "\n"
    for name, text in (("README.md", _card(folder, options, record)), ("training.json", content)):
        with replacing(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _card(folder: Path, options: TrainOptions, record: Mapping[str, Any]) -> str:
    """Return the model card of a training with this record, in Markdown."""
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415 - few commands need it

    templates = Environment(  # noqa: S701 - Markdown, whose values are made printable
        undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True,
        finalize=lambda value: printable(value) if isinstance(value, str) else value,
    )  # fmt: skip
    templates.filters["number"] = "{:,}".format
    card = templates.from_string(CARD.read_text("utf-8"))
    return card.render(record=record, posts=record["posts"], options=options, name=folder.name)


def make_folder(folder: Path) -> set[str]:
    """Create a folder, unless it exists, and return the names of what it contains. Raises UserError."""
    with explain_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return {path.name for path in folder.iterdir()}


def _tested(options: TrainOptions, dataset: Dataset, settings: Settings, report: Report) -> dict[str, Any]:
    """Evaluate the trained model and its untrained base on the test posts, as a worker would classify them."""
    # Imported late: needs torch, which only workers have.
    from feedmill.evaluation import measure  # noqa: PLC0415
    from feedmill.training.head import described  # noqa: PLC0415
    from feedmill.workers.models.classifiers.registry import WITH_FIXED_LABELS, kind_of, usable_settings  # noqa: PLC0415

    known = [(example.post, example.label) for example in dataset.test]

    def summary(what: str, changes: dict[str, Any]) -> dict[str, Any]:
        report.phase(f"loading {what} and measuring its token budget")
        chosen = usable_settings(settings.model_copy(update=changes))
        return measure(known, load_model(chosen), chosen, report).summary

    tested: dict[str, Any] = {"metrics": None, "zero_shot": None}
    if not known:
        return tested
    own = {"model": options.out, "classifier": "auto", "revision": None}
    tested["metrics"] = summary("the trained model", own)
    base, kind = {"model": options.base, "classifier": "auto"}, ""
    with suppress(UserError):  # not a classifier without training
        kind = kind_of(settings.model_copy(update=base))
    if options.compare and kind and kind not in WITH_FIXED_LABELS:
        labels = described(dataset.labels, settings) if kind == "similarity" or settings.labels else {}
        labels = labels or {label: (label,) for label in dataset.labels}
        tested["zero_shot"] = summary("its base", base | {"labels": labels})
    return tested


def show_trained(record: Mapping[str, Any], folder: str) -> None:
    """Print the training time and the metrics of the finished model, and what to do next."""
    typer.echo(f"Trained in {span(record['seconds'])}, {record['samples_per_s']:.1f} posts/s")
    if losses := [point["loss"] for point in record["curve"] if "loss" in point]:
        typer.echo(f"loss {losses[0]:.3g} → {losses[-1]:.3g}")
    tested, zero_shot = record["metrics"], record["zero_shot"]
    if tested:
        from feedmill.evaluation import models_table  # noqa: PLC0415 - needs torch, which only workers have

        output_console().print(models_table("", ((folder, tested), ("its base, zero-shot", zero_shot))))
    if not (tested and zero_shot and tested["accuracy"] <= zero_shot["accuracy"]):
        advise(folder)
        return
    helps = "more posts (`feedmill label` asks for the most useful ones), or all weights, without --head"
    typer.echo(
        f"Do not deploy this model: it is no more accurate ({tested['accuracy']:.3f}) than its base zero-shot "
        f"({zero_shot['accuracy']:.3f}) on the same {tested['posts']:,} posts. What helps: "
        + (helps if record["options"]["head"] else "more posts or --epochs")
    )


def advise(folder: str) -> None:
    """Print how to serve a model."""
    where = printable(shlex.quote(folder))
    typer.echo(f"Next, switch running workers to the model:\n  feedmill deploy {where}")
    typer.echo(f"Or start a worker with it:\n  feedmill worker --model {where}")


@with_settings("labels", "template", "device", "redis_url")
def label(
    settings: Settings,
    posts: Annotated[str, Argument(metavar="FILE", help="File of posts (JSONL, a JSON array or CSV).")],
    out: Annotated[Path, Option(help="Folder for the labels and the model; one with labels is resumed.")],
    file: FileFlags,
    base: Annotated[str, Option(help="Embedding model: a folder or a Hugging Face Hub name.")] = BASE,
    pool: Annotated[
        int, Option(metavar="N", min=10, max=MAX_POOL, help="Posts to choose from: a random sample of the file.")
    ] = USUAL_POOL,
    as_json: JsonSummary = False,
) -> None:
    """Shows one post at a time and saves each answer. Writes OUT/labels.csv and the model OUT/model, for `feedmill
    worker --model` and `feedmill deploy`. The same command resumes. Answers can be piped, one per line: keys or labels.
    """
    names = tuple(settings.labels or ())
    if not 2 <= len(names) <= len(LABEL_KEYS):
        raise UserError(
            f"--labels: give 2 to {len(LABEL_KEYS)} labels, such as delivery,refund; these are {len(names)}."
        )
    if posts == "-":
        raise UserError("Standard input has the answers. Give a file of posts.")
    notes, folder = notes_console(), out.expanduser().absolute()
    answered = _begun(folder, names)
    with explain_missing("Labelling", "worker"):
        from feedmill.training import active, head  # noqa: PLC0415 - needs torch
    reading = FileReading(posts, notes, columns=file.columns(), encoding=file.encoding, text_only=True)
    sample = _read_sample(reading, pool, settings, notes)
    places = {post.id: place for place, post in enumerate(sample)}
    done = []
    for post, name, why in answered:
        if places.setdefault(post.id, len(sample)) == len(sample):  # not in the sample
            sample.append(post)
        done.append(active.Answer(places[post.id], why, names.index(name) if name else None))
    embedder, session = _begin(base, sample, done, settings, Report(notes))
    _ask(session, sample, names, folder / LABELS_FILE, notes)
    summary = _session_summary(session, names) | {"base": base, "max_tokens": MAX_TOKENS, "seed": SEED}
    model = str(folder / MODEL_FOLDER) if session.labelled else None
    if model:
        _write_model(Path(model), head.HeadModel(embedder, names, session.fit().head, summary))
    summary |= {"model": model, "labels_file": str(folder / LABELS_FILE)}
    if as_json:
        typer.echo(json_line(summary))
    else:
        _show_session(summary, session.measured)


def _begin(
    base: str, posts: Sequence[Post], answers: "Sequence[Answer]", settings: Settings, report: Report
) -> "tuple[Embedder, Session]":
    """Load the model, and embed the posts and the sentences of the labels. Raises UserError."""
    from feedmill.training import active, head  # noqa: PLC0415 - needs torch

    try:
        report.phase(f"loading {base}")
        embedder = head.Embedder(base, settings, MAX_TOKENS)
        with explain_refusals(settings.model):
            vectors = embedder.embed([post.text for post in posts], report)
            described = ClassifyOptions(labels=settings.labels, template=settings.template)
            return embedder, active.Session(vectors, embedder.label_vectors(described), SEED, answers)
    finally:
        report.stop()


def _show_session(summary: Mapping[str, Any], measured: "Measured | None") -> None:
    """Print the number of answers and the accuracy, and what to do next."""
    typer.echo(
        printable(f"{summary['labelled']:,} labels, {summary['skipped']:,} skipped, in {summary['labels_file']}")
    )
    if measured is not None:
        typer.echo(f"By cross-validation on {measured.measured_on:,} random posts: {measured}")
    if measured is not None and measured.accuracy <= measured.zero_shot_accuracy:
        typer.echo("Do not deploy this model yet. The same command asks for more posts.")
    elif summary["model"]:
        advise(summary["model"])


def _begun(folder: Path, names: Sequence[str]) -> list[AnsweredPost]:
    """Create the folder, or return its answers, in order. Raises UserError if it is another's, or has other labels."""
    path = folder / LABELS_FILE
    if make_folder(folder) - {LABELS_FILE, MODEL_FOLDER}:
        raise UserError(f"{printable(str(folder))} is not empty. Choose a new or empty folder.")
    if not path.exists():
        return []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            answered = [
                (Post.parse({name: row[name] or "" for name in ANSWER_COLUMNS[:3]}), row["label"], row["picked"])
                for row in csv.DictReader(file, strict=True)
            ]
    except (OSError, ValueError, KeyError, TypeError, csv.Error, PostRefused) as error:
        raise UserError(
            f"Cannot resume: {printable(str(path))} is not a list of answers of `feedmill label` "
            f"({printable(str(error))}). Restore it, or give another --out."
        ) from None
    if unknown := {name for _, name, _ in answered if name} - set(names):
        raise UserError(
            f"{printable(str(path))} has the label {printable(min(unknown))!r}, which --labels lacks. Give the same "
            "labels, or another --out."
        )
    return answered


def _read_sample(reading: FileReading, count: int, settings: Settings, notes: Console) -> list[Post]:
    """Return a random sample of the file's posts, without repeated texts and purged posts.

    Holds no more than the sample in memory. Raises InputError if there are no posts.
    """
    source = random.Random(SEED)
    sample = nsmallest(count, (post for post in reading.posts() if post.text), key=lambda _: source.random())
    reading.end()
    if reading.records > len(sample) == count:
        notes.print(f"Choosing from {count:,} of {reading.records:,} posts, sampled at random. --pool takes more.")
    gone = purged_ids((post.id for post in sample), settings, notes) or ()
    by_text = {" ".join(post.text.casefold().split()): post for post in sample if post.id not in gone}
    if not by_text:
        raise InputError(f"{reading.name} contains no valid post. Give another file.")
    return list(by_text.values())


def _ask(session: "Session", posts: Sequence[Post], names: Sequence[str], path: Path, notes: Console) -> None:
    """Ask for labels until the user quits, more would hardly help, or no post is left. Saves after each answer."""
    by_name = {name: number for number, name in enumerate(names)}
    # Labels such as 1 to 5 are their own keys.
    keys = by_name if set(names) <= set(LABEL_KEYS) else dict(zip(LABEL_KEYS, range(len(names)), strict=False))
    choices = "  ".join(f"{key} {printable(names[number])}" for key, number in keys.items())
    try:
        while (pick := session.next()) is not None:
            if session.settled:
                notes.print("The last 50 answers changed at most 4% of the posts' labels: more would hardly help.")
                notes.print("The same command asks for 50 more.")
                return
            _show_post(posts[pick.place], session, notes)
            notes.print(Text(f"{choices}\n{UNDO} undo  {SKIP} skip  {QUIT} quit", style="bold"))
            given = _answer()
            if given in (QUIT, ""):
                return
            number = keys.get(given, by_name.get(given))
            if given == UNDO:
                session.undo()
            elif given == SKIP or number is not None:
                session.answer(None if given == SKIP else number)
            else:
                notes.print(Text(f"Unknown key {given!r}. Type one of those above."))
                continue
            _save_answers(session, posts, names, path)
        notes.print("Every post has an answer.")
    except KeyboardInterrupt:
        notes.print(Text(f"Interrupted. {printable(str(path))} has all answers; the same command resumes."))
        raise


def _save_answers(session: "Session", posts: Sequence[Post], names: Sequence[str], path: Path) -> None:
    """Replace the file of answers. Raises UserError."""
    with (
        explain_unwritable(path), replacing(path) as temporary,
        temporary.open("w", encoding="utf-8", newline="") as file,
    ):  # fmt: skip
        writer = csv.writer(file)
        writer.writerow(ANSWER_COLUMNS)
        for place, why, number in session.answers:
            post = posts[place]
            writer.writerow((post.id, post.title, post.body, "" if number is None else names[number], why))


def _show_post(post: Post, session: "Session", notes: Console) -> None:
    """Show a post, below the accuracy so far."""
    notes.rule(style="dim")
    so_far = f"answers: {len(session.labelled):,}"
    if session.measured is not None:
        so_far += f"; {session.measured}"
    notes.print(Text(so_far, style="dim"))
    body = post.body.replace("\r\n", "\n")
    body = body if len(body) <= MAX_BODY_SHOWN else f"{body[:MAX_BODY_SHOWN]} …"
    if post.title:
        notes.print(Text(printable(post.title), style="bold"))
    if body.strip():
        notes.print(Text(printable_lines(body)))


def _answer() -> str:
    """Return a key press on a terminal, else the next line that is not blank, stripped; "" at the end."""
    if sys.stdin.isatty():
        try:
            return typer.getchar()
        except EOFError:  # Ctrl-D
            return ""
    return next((line.strip() for line in sys.stdin if line.strip()), "")


def _session_summary(session: "Session", names: Sequence[str]) -> dict[str, Any]:
    given = [answer.label for answer in session.answers]
    last = session.measured
    return {
        "labels": {name: given.count(number) for number, name in enumerate(names)},
        "labelled": len(session.labelled),
        "skipped": given.count(None),
        "measured_on": last.measured_on if last else 0,
        "accuracy": last.accuracy if last else None,
        "accuracy_error": last.accuracy_error if last else None,
        "zero_shot_accuracy": last.zero_shot_accuracy if last else None,
    }


def _write_model(folder: Path, model: "HeadModel") -> None:
    """Write the model's folder, replacing that of an earlier run once it is complete."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    with explain_unwritable(folder):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        (temporary / "training.json").write_text(json.dumps(model.record, ensure_ascii=False, indent=1) + "\n")
        model.save(temporary)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
