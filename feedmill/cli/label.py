"""The `feedmill label` command: label a few posts in the terminal, and make a model of them."""

import csv
import json
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from heapq import nsmallest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from feedmill.cli.options import FileFlags, JsonSummary, with_settings
from feedmill.cli.train import advise, make_folder
from feedmill.console import Report, notes_console
from feedmill.local_model import explain_refusals
from feedmill.producers.files import FileReading
from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import (
    InputError,
    PostRefused,
    UserError,
    explain_missing,
    explain_unwritable,
    json_line,
    printable,
    printable_lines,
)
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.settings import Settings
from feedmill.training.data import TrainOptions, purged_ids

if TYPE_CHECKING:
    from feedmill.training.active import Pool, Session
    from feedmill.training.head import Embedder, HeadModel

#: Names in the output folder: the answers, which `feedmill train --from` reads, too; and the model.
LABELS_FILE, MODEL_FOLDER = "labels.csv", "model"
#: Columns of LABELS_FILE. A skipped post has an empty label.
COLUMNS = ("id", "title", "body", "label", "picked")
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
    """Label the posts that teach most, with a key per post, and make a model of them.

    Shows one post at a time and saves each answer. Writes OUT/labels.csv and the model OUT/model, for `feedmill worker
    --model` and `feedmill deploy`. The same command resumes. Answers can be piped, one per line: keys or labels.
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
    sample = _read(reading, pool, settings, notes)
    places = {post.id: place for place, post in enumerate(sample)}
    done = []
    for post, name, why in answered:
        if places.setdefault(post.id, len(sample)) == len(sample):  # not in the sample
            sample.append(post)
        done.append(active.Answer(places[post.id], why, names.index(name) if name else None))
    embedder, embedded = _embed(base, sample, settings, Report(notes))
    session = active.Session(embedded, len(names), SEED, done)
    _ask(session, sample, names, folder / LABELS_FILE, notes)
    summary = _summary(session, names) | {"base": base, "max_tokens": MAX_TOKENS, "seed": SEED}
    model = str(folder / MODEL_FOLDER) if session.labelled else None
    if model:
        _write_model(Path(model), head.HeadModel(embedder, names, session.head(), summary))
    summary |= {"model": model, "labels_file": str(folder / LABELS_FILE)}
    if as_json:
        typer.echo(json_line(summary))
    else:
        _conclude(summary)


def _embed(base: str, posts: Sequence[Post], settings: Settings, report: Report) -> "tuple[Embedder, Pool]":
    """Load the model, and embed the posts and the sentences of the labels. Raises UserError."""
    from feedmill.training import active, head  # noqa: PLC0415 - needs torch

    try:
        report.phase(f"loading {base}")
        embedder = head.Embedder(base, settings, MAX_TOKENS)
        with explain_refusals(settings):
            vectors = embedder.embed([post.text for post in posts], report)
            described = ClassifyOptions(labels=settings.labels, template=settings.template)
            return embedder, active.Pool(vectors, embedder.label_vectors(described))
    finally:
        report.stop()


def _conclude(summary: Mapping[str, Any]) -> None:
    """Print the number of answers and the accuracy, and what to do next."""
    accuracy, zero_shot = summary["accuracy"], summary["zero_shot_accuracy"]
    typer.echo(
        printable(f"{summary['labelled']:,} labels, {summary['skipped']:,} skipped, in {summary['labels_file']}")
    )
    if accuracy is not None:
        typer.echo(f"Accuracy on the held-back posts: {accuracy:.2f}; zero-shot: {zero_shot:.2f}")
    if accuracy is not None and accuracy <= zero_shot:
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
                (Post.parse({name: row[name] or "" for name in COLUMNS[:3]}), row["label"], row["picked"])
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


def _read(reading: FileReading, count: int, settings: Settings, notes: Console) -> list[Post]:
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
    """Ask for labels until the user quits or no post is left. Saves after each answer."""
    by_name = {name: number for number, name in enumerate(names)}
    # Labels such as 1 to 5 are their own keys.
    keys = by_name if set(names) <= set(LABEL_KEYS) else dict(zip(LABEL_KEYS, range(len(names)), strict=False))
    choices = "  ".join(f"{key} {printable(names[number])}" for key, number in keys.items())
    try:
        while (pick := session.next()) is not None:
            _show(posts[pick.place], session, notes)
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
            _save(session, posts, names, path)
        notes.print("Every post has an answer.")
    except KeyboardInterrupt:
        notes.print(Text(f"Interrupted. {printable(str(path))} has all answers; the same command resumes."))
        raise


def _save(session: "Session", posts: Sequence[Post], names: Sequence[str], path: Path) -> None:
    """Replace the file of answers. Raises UserError."""
    with (
        explain_unwritable(path), replacing(path) as temporary,
        temporary.open("w", encoding="utf-8", newline="") as file,
    ):  # fmt: skip
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for place, why, number in session.answers:
            post = posts[place]
            writer.writerow((post.id, post.title, post.body, "" if number is None else names[number], why))


def _show(post: Post, session: "Session", notes: Console) -> None:
    """Show a post, below the accuracy so far."""
    notes.rule(style="dim")
    so_far = f"answers: {session.labelled:,}"
    if (now := session.measured) is not None:
        so_far += f"; accuracy on {now.held_back} held-back posts {now.accuracy:.2f}, zero-shot {now.zero_shot:.2f}"
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


def _summary(session: "Session", names: Sequence[str]) -> dict[str, Any]:
    given = [answer.label for answer in session.answers]
    last = session.measured
    return {
        "labels": {name: given.count(number) for number, name in enumerate(names)},
        "labelled": session.labelled,
        "skipped": given.count(None),
        "held_back": last.held_back if last else 0,
        "accuracy": last.accuracy if last else None,
        "zero_shot_accuracy": last.zero_shot if last else None,
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
