"""The `feedmill label` command: label a few posts in the terminal, and make a model of them."""

import csv
import json
import random
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from feedmill.cli.file_reading import FileReading
from feedmill.cli.option_groups import with_groups
from feedmill.cli.options import (
    DeviceOption,
    FileFlags,
    JsonSummary,
    LabelsOption,
    RedisUrl,
    TemplateOption,
    settings_of,
)
from feedmill.local_model import explain_refusals
from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import InputError, PostRefused, UserError, explain_missing, printable, printable_lines
from feedmill.shared.messages import ClassifyOptions, Post, digest
from feedmill.shared.settings import Settings
from feedmill.training.data import purged_ids
from feedmill.workers.training.options import TrainOptions

if TYPE_CHECKING:
    from feedmill.workers.training.active import Session
    from feedmill.workers.training.head import HeadModel

app = typer.Typer()

#: Names in the output folder: the answers, which `feedmill train --from` reads, too; the model; and the embeddings of
#: the posts for the next start.
LABELS_FILE, MODEL_FOLDER, EMBEDDINGS_FILE = "labels.csv", "model", "embeddings.safetensors"
#: Columns of LABELS_FILE. A skipped post has an empty label.
COLUMNS = ("id", "title", "body", "label", "picked")
#: Keys for commands, and keys for labels, in order.
UNDO, SKIP, QUIT = "u", "s", "q"
LABEL_KEYS = "123456789abcdefghijklmnoprtvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
#: Characters of a body to show.
MAX_BODY_SHOWN = 1000
#: Posts to choose from: embedding them takes a minute on two cores, and 10 MB of memory besides the posts' texts.
USUAL_POOL, MAX_POOL = 2000, 100_000
#: Defaults that `feedmill train` has, too.
DEFAULTS = {name: field.default for name, field in TrainOptions.model_fields.items()}


class AnsweredPost(NamedTuple):
    """A post with its label; None if it was skipped. picked: why it was picked."""

    post: Post
    label: str | None
    picked: str


@app.command()
@with_groups
def label(
    *,
    posts: Annotated[str, typer.Argument(metavar="FILE", help="File of posts (JSONL, a JSON array or CSV).")],
    out: Annotated[Path, typer.Option(help="Folder for the labels and the model; one with labels is resumed.")],
    labels: LabelsOption = None,
    template: TemplateOption = None,
    base: Annotated[
        str, typer.Option(help="Embedding model: a folder, package:NAME or a Hugging Face Hub name.")
    ] = DEFAULTS["base"],
    pool: Annotated[
        int, typer.Option(metavar="N", min=10, max=MAX_POOL, help="Posts to choose from: a random sample of the file.")
    ] = USUAL_POOL,
    max_tokens: Annotated[int, typer.Option(min=8, max=8192, help="Maximum tokens to read of a post.")] = DEFAULTS[
        "max_tokens"
    ],
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = DEFAULTS["seed"],
    file: FileFlags,
    device: DeviceOption = None,
    redis_url: RedisUrl = None,
    as_json: JsonSummary = False,
) -> None:
    """Label the posts that teach most, with a key per post, and make a model of them.

    Shows one post at a time and saves each answer. Writes OUT/labels.csv and the model OUT/model, for `feedmill worker
    --model` and `feedmill deploy`. The same command resumes. Answers can be piped, one per line: keys or labels.
    """
    settings = settings_of(labels=labels, template=template, device=device, redis_url=redis_url)
    names = _label_names(settings)
    if posts == "-":
        raise UserError("Standard input has the answers. Give a file of posts.")
    notes = Console(stderr=True, soft_wrap=True, highlight=False)
    folder = out.expanduser().absolute()
    answered = _begun(folder, names)
    with explain_missing("Labelling", "worker"):
        from feedmill.training.report import TrainingReport  # noqa: PLC0415 - needs torch, which only workers have
        from feedmill.workers.training import active, head  # noqa: PLC0415
    reading = FileReading(posts, notes, columns=file.columns(), encoding=file.encoding, text_only=True)
    sample, done = _with_answered(_read(reading, pool, seed, settings, notes), answered, names, active)
    report = TrainingReport(notes, as_json=False, quiet=False)
    try:
        report.phase(f"loading {base}")
        embedder, layout = head.load_embedder(base, settings, max_tokens)
        texts = [post.text for post in sample]
        key = digest(embedder.weights.sha256, layout.digest, str(max_tokens), *texts)
        vectors = head.read_vectors(folder / EMBEDDINGS_FILE, key)
        if vectors is None:
            vectors = head.embed_all(embedder, texts, report.counting)
            head.write_vectors(folder / EMBEDDINGS_FILE, vectors, key)
        with explain_refusals(settings):
            described = ClassifyOptions(labels=settings.labels, template=settings.template)
            label_vectors = head.label_vectors(embedder, described)
    finally:
        report.stop()
    session = active.Session(active.Pool(vectors, label_vectors), len(names), seed, done)
    _ask(session, sample, names, folder / LABELS_FILE, notes)
    summary = _summary(session, names, base, seed, max_tokens)
    if session.labelled:
        model = head.HeadModel(embedder.weights, layout, max_tokens, names, *session.head())
        _write_model(folder / MODEL_FOLDER, model, settings, summary)
    summary["model"] = str(folder / MODEL_FOLDER) if session.labelled else None
    summary["labels_file"] = str(folder / LABELS_FILE)
    _print_summary(summary, as_json)


def _print_summary(summary: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(summary, ensure_ascii=False))
        return
    skipped = f", {summary['skipped']:,} skipped" if summary["skipped"] else ""
    typer.echo(printable(f"{summary['labelled']:,} labels{skipped} in {summary['labels_file']}"))
    accuracy, zero_shot = summary["accuracy"], summary["zero_shot_accuracy"]
    if accuracy is not None:
        typer.echo(f"Accuracy on the held-back posts: {accuracy:.2f}; zero-shot: {zero_shot:.2f}")
        if accuracy <= zero_shot:
            typer.echo("Do not deploy this model yet. The same command asks for more posts.")
            return
    if summary["model"]:
        where = printable(shlex.quote(summary["model"]))
        typer.echo(f"Next, switch running workers to the model:\n  feedmill deploy {where}")
        typer.echo(f"Or start a worker with it:\n  feedmill worker --model {where}")


def _label_names(settings: Settings) -> tuple[str, ...]:
    names = tuple(settings.labels or ())
    if len(names) < 2:
        raise UserError("--labels must name at least two labels, such as delivery,refund.")
    if len(names) > len(LABEL_KEYS):
        raise UserError(f"--labels names {len(names)} labels, but there are keys for {len(LABEL_KEYS)}. Give fewer.")
    return names


def _begun(folder: Path, names: Sequence[str]) -> list[AnsweredPost]:
    """Create the folder, or return its answers. Raises UserError if they have other labels, or it is another's."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise UserError(f"Cannot create {printable(str(folder))}: {error.strerror}. Set another --out.") from None
    if held - {LABELS_FILE, MODEL_FOLDER, EMBEDDINGS_FILE}:
        raise UserError(f"{printable(str(folder))} is not empty. Choose a new or empty folder.")
    found = read_answers(folder / LABELS_FILE)
    if unknown := {answer.label for answer in found if answer.label} - set(names):
        raise UserError(
            f"{printable(str(folder / LABELS_FILE))} has the label {printable(min(unknown))!r}, which --labels lacks. "
            "Give the same labels, or another --out."
        )
    return found


def _read(reading: FileReading, count: int, seed: int, settings: Settings, notes: Console) -> list[Post]:
    """Return a sample of the file's posts, without purged ones. Raises InputError if there are none."""
    sample, read = _sample(reading.posts(), count, seed)
    reading.end()
    if read > len(sample):
        notes.print(f"Choosing from {len(sample):,} of {read:,} posts, sampled at random. --pool takes more.")
    gone = purged_ids((post.id for post in sample), settings, notes)
    sample = [post for post in sample if not gone or post.id not in gone]
    if not sample:
        raise InputError(f"{reading.source.name} contains no valid post. Give another file.")
    return sample


def _sample(posts: Iterable[Post], count: int, seed: int) -> tuple[list[Post], int]:
    """Return a random sample, without repeated texts, and the number of posts in the file.

    Holds no more than the sample in memory.
    """
    source, read = random.Random(seed), 0
    kept: dict[int, Post] = {}
    for read, post in enumerate((post for post in posts if post.text), 1):
        place = len(kept) if len(kept) < count else source.randrange(read)
        if place < count:
            kept[place] = post
    return list({" ".join(post.text.casefold().split()): post for post in kept.values()}.values()), read


def _with_answered(
    sample: Sequence[Post], answered: Sequence[AnsweredPost], names: Sequence[str], active: Any
) -> tuple[list[Post], list[Any]]:
    """Return the posts, with those answered that the sample lacks, and the answers."""
    posts = list(sample)
    places = {post.id: place for place, post in enumerate(posts)}
    answers = []
    for post, name, why in answered:
        if post.id not in places:
            places[post.id] = len(posts)
            posts.append(post)
        answers.append(active.Answer(active.Pick(places[post.id], why), None if name is None else names.index(name)))
    return posts, answers


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
            if given == SKIP:
                session.answer(None)
            elif given == UNDO:
                session.undo()
            elif number is not None:
                session.answer(number)
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
    try:
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            for pick, number in session.answers:
                post = posts[pick.place]
                writer.writerow((post.id, post.title, post.body, "" if number is None else names[number], pick.why))
    except OSError as error:
        raise UserError(f"Cannot write {printable(str(path))}: {error.strerror}.") from None


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


def read_answers(path: Path) -> list[AnsweredPost]:
    """Read the answers, in order; none if there is no file. Raises UserError if the file has another form."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [
                AnsweredPost(
                    Post.parse({name: row[name] or "" for name in COLUMNS[:3]}), row["label"] or None, row["picked"]
                )
                for row in csv.DictReader(file, strict=True)
            ]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, csv.Error, PostRefused) as error:
        raise UserError(
            f"Cannot resume: {printable(str(path))} is not a list of answers of `feedmill label` "
            f"({printable(str(error))}). Restore it, or give another --out."
        ) from None


def _summary(session: "Session", names: Sequence[str], base: str, seed: int, max_tokens: int) -> dict[str, Any]:
    counts = [sum(answer.label == number for answer in session.answers) for number in range(len(names))]
    last = session.measured
    return {
        "labels": dict(zip(names, counts, strict=True)),
        "labelled": session.labelled,
        "skipped": len(session.answers) - session.labelled,
        "held_back": last.held_back if last else 0,
        "accuracy": last.accuracy if last else None,
        "zero_shot_accuracy": last.zero_shot if last else None,
        "base": base,
        "max_tokens": max_tokens,
        "seed": seed,
    }


def _write_model(folder: Path, model: "HeadModel", settings: Settings, summary: Mapping[str, Any]) -> None:
    """Write the model's folder, replacing that of an earlier run once it is complete."""
    from feedmill.workers.training import head  # noqa: PLC0415 - needs torch, which only workers have

    temporary = folder.with_name(f".{folder.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        (temporary / "training.json").write_text(json.dumps(summary, ensure_ascii=False, indent=1) + "\n")
        head.save(model, temporary, settings)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    except OSError as error:
        raise UserError(f"Cannot write {printable(str(folder))}: {error.strerror or error}.") from None
