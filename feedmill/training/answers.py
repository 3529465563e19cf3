"""Label a few posts by hand: choose them, keep the answers, and fit a head to them.

The caller shows `LabelSession.next` and passes on the answers; `feedmill label` does so in the
terminal. Imports torch once the file of posts was read.
"""

import json
import random
import shutil
from collections.abc import Sequence
from heapq import nsmallest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from feedmill.console import Report
from feedmill.outcomes.copies import Copy, note_copy
from feedmill.producers.files import FileReading
from feedmill.producers.records import FileOptions
from feedmill.shared.atomic_files import final_path, temporary_path
from feedmill.shared.errors import (
    InputError,
    UserError,
    explain_missing,
    explain_refusals,
    explain_unwritable,
    printable,
    require_packages,
)
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.settings import Settings
from feedmill.teaching.answer_file import LABELS_FILE, AnsweredPost, AnswerFile, key_of
from feedmill.training import learnt
from feedmill.training.data import purged_ids
from feedmill.training.options import TrainOptions
from feedmill.training.picked import NONE_OF_THESE
from feedmill.training.run import HEAD_PACKAGES, make_folder

if TYPE_CHECKING:
    from feedmill.training.active import Answer, ExpectedAccuracy, Session
    from feedmill.training.head import Embedder, HeadModel

#: Names in the output folder, beside the answers: the model of `feedmill label`, and the folder of
#: models that were taught on the web page.
MODEL_FOLDER = "model"
MODELS_FOLDER = "models"
MAX_TOKENS = TrainOptions.max_tokens
SEED = TrainOptions.seed


class LabelSession:
    """Labels of a few posts, given one by one.

    posts: a random sample of a file, and the posts that were answered before.
    """

    def __init__(
        self,
        folder: Path,
        posts: Sequence[Post],
        names: Sequence[str],
        base: str,
        session: "Session",
        embedder: "Embedder",
    ) -> None:
        self._folder = folder
        self._file = AnswerFile(folder)
        self._posts = posts
        self._base = base
        self._session = session
        self._embedder = embedder
        #: The labels.
        self.names = names

    def next(self) -> Post | None:
        """Return the post whose label would help most; None if every post has an answer."""
        pick = self._session.next()
        return None if pick is None else self._posts[pick.place]

    @property
    def is_settled(self) -> bool:
        """True if more labels would hardly help."""
        return self._session.settled

    @property
    def answer_count(self) -> int:
        """Number of answers that teach."""
        return len(self._session.labelled)

    @property
    def measured(self) -> "ExpectedAccuracy | None":
        """The accuracy so far, if there are enough labels."""
        return self._session.measured

    def answer(self, label: int | None) -> None:
        """Label the post that `next` returned, and save.

        label: place in `names`, or NONE_OF_THESE; None to skip.

        Raises UserError if the answers cannot be written.
        """
        self._session.answer(label)
        place, why, number = self._session.answers[-1]
        name = ""
        if number is not None and number != NONE_OF_THESE:
            name = self.names[number]
        answered = AnsweredPost(
            post=self._posts[place],
            label=name,
            why=why,
            fits_none=number == NONE_OF_THESE,
        )
        self._file.put([answered])

    def undo(self) -> None:
        """Take the latest answer back, and save. Raises as `answer` does."""
        answers = self._session.answers
        if answers:
            post = self._posts[answers[-1].place]
            self._session.undo()
            self._file.remove([key_of(post)])

    def _labelled_posts(self) -> list[Post]:
        answers = self._session.answers
        labelled = [answer for answer in answers if answer.label is not None]
        return [self._posts[answer.place] for answer in labelled]

    def finish(self) -> dict[str, Any]:
        """Fit the head, write the model unless nothing was labelled, and return the summary.

        Raises UserError.
        """
        from feedmill.training import head  # noqa: PLC0415 - needs torch

        summary = _session_summary(self._session, self.names)
        summary["none_class"] = None
        summary |= {"base": self._base, "max_tokens": MAX_TOKENS, "seed": SEED}
        labels_file = str(self._folder / LABELS_FILE)
        summary["options"] = {"source": labels_file, "out": str(self._folder)}
        model: str | None = None
        if self._session.labelled:
            model = str(self._folder / MODEL_FOLDER)
            fitted = self._session.fit()
            if fitted.none is not None:
                summary["none_class"] = fitted.none.promise
            head_model = head.HeadModel(
                embedder=self._embedder,
                labels=tuple(self.names),
                head=fitted.head,
                record=summary,
                none=fitted.none,
            )
            write_model(Path(model), head_model, self._labelled_posts())
        return summary | {
            "model": model,
            "labels_file": str(self._folder / LABELS_FILE),
        }


def begin_session(
    posts_file: str,
    folder: Path,
    base: str,
    pool: int,
    *,
    file: FileOptions,
    settings: Settings,
    notes: Console,
) -> LabelSession:
    """Read the posts and the earlier answers, and load the model. The labels are in the settings.

    pool: number of posts to choose from. Raises UserError.
    """
    names = tuple(settings.labels or ())
    stored_answers = _read_answers(folder, names)
    require_packages("Labelling", "worker", HEAD_PACKAGES)
    reading = FileReading(
        posts_file,
        notes,
        columns=file.columns(),
        encoding=file.encoding,
        text_only=True,
    )
    sample = _read_sample(reading, pool, settings, notes)
    # After the file was read, because it imports torch, which takes seconds.
    with explain_missing("Labelling", "worker"):
        from feedmill.training import active  # noqa: PLC0415 - needs torch
    index_of = {key_of(post): index for index, post in enumerate(sample)}
    answers: list[Answer] = []
    for stored in stored_answers:
        if stored.key not in index_of:  # not in the sample
            index_of[stored.key] = len(sample)
            sample.append(stored.post)
        answer = active.Answer(
            place=index_of[stored.key],
            why=stored.why,
            label=_label_number(stored, names),
        )
        answers.append(answer)
    note_copy(settings, Copy(kind="answers", place=str(folder)))
    embedder, session = _begin(base, sample, answers, settings, Report(notes))
    return LabelSession(folder, sample, names, base, session, embedder)


def _label_number(answer: AnsweredPost, names: Sequence[str]) -> int | None:
    """Return the number of an answer's label, NONE_OF_THESE, or None for a skipped post."""
    if answer.label:
        return names.index(answer.label)
    if answer.fits_none:
        return NONE_OF_THESE
    return None


def _begin(
    base: str,
    posts: Sequence[Post],
    answers: "Sequence[Answer]",
    settings: Settings,
    report: Report,
) -> "tuple[Embedder, Session]":
    """Load the model, and embed the posts and the sentences of the labels. Raises UserError."""
    from feedmill.training import active, head  # noqa: PLC0415 - needs torch
    from feedmill.workers.models.classifiers.none_of_these import (  # noqa: PLC0415
        read_subjects,
    )

    try:
        report.phase(f"loading {base}")
        embedder = head.Embedder(base, settings, MAX_TOKENS)
        with explain_refusals(settings.model):
            vectors = embedder.embed([post.text for post in posts], report)
            described = ClassifyOptions(
                labels=settings.labels, template=settings.template
            )
            subjects = ClassifyOptions(
                labels=read_subjects(), template=settings.template
            )
            session = active.Session(
                vectors,
                embedder.label_vectors(described),
                SEED,
                answers,
                embedder.label_vectors(subjects),
            )
            return embedder, session
    finally:
        report.stop()


def _read_answers(folder: Path, names: Sequence[str]) -> list[AnsweredPost]:
    """Create the folder, or return its answers, in order.

    Raises UserError if it is another's, or has other labels.
    """
    path = folder / LABELS_FILE
    names_in_use = {LABELS_FILE, MODEL_FOLDER, MODELS_FOLDER}
    # of a killed run
    leftovers = {temporary_path(folder / name).name for name in names_in_use}
    if make_folder(folder) - names_in_use - leftovers:
        raise UserError(
            f"{printable(str(folder))} is not empty. Choose a new or empty folder."
        )
    answered = AnswerFile(folder).read()
    unknown = {answer.label for answer in answered if answer.label} - set(names)
    if unknown:
        raise UserError(
            f"{printable(str(path))} has the label {printable(min(unknown))!r}, which --labels "
            "lacks. Give the same labels, or another --out."
        )
    return answered


def _read_sample(
    reading: FileReading, count: int, settings: Settings, notes: Console
) -> list[Post]:
    """Return a random sample of the file's posts, without repeated texts and purged posts.

    Holds no more than the sample in memory. Raises InputError if there are no posts.
    """
    source = random.Random(SEED)
    sample = nsmallest(
        count,
        (post for post in reading.posts() if post.text),
        key=lambda _: source.random(),
    )
    reading.end()
    if reading.records > len(sample) == count:
        notes.print(
            f"Choosing from {count:,} of {reading.records:,} posts, sampled at random. "
            "--pool takes more."
        )
    gone = purged_ids((post.id for post in sample), settings, notes) or ()
    by_text = {
        " ".join(post.text.casefold().split()): post
        for post in sample
        if post.id not in gone
    }
    if not by_text:
        raise InputError(f"{reading.name} contains no valid post. Give another file.")
    return list(by_text.values())


def _session_summary(session: "Session", names: Sequence[str]) -> dict[str, Any]:
    labels = [answer.label for answer in session.answers]
    last = session.measured
    return {
        "labels": {name: labels.count(number) for number, name in enumerate(names)},
        "none": labels.count(NONE_OF_THESE),
        "labelled": len(session.labelled),
        "skipped": labels.count(None),
        "measured_on": last.measured_on if last else 0,
        "accuracy": last.accuracy if last else None,
        "accuracy_error": last.accuracy_error if last else None,
        "zero_shot_accuracy": last.zero_shot_accuracy if last else None,
    }


def write_model(
    folder: Path, model: "HeadModel", labelled_posts: Sequence[Post]
) -> None:
    """Write the model's folder, replacing that of an earlier run once it is complete.

    Raises UserError.
    """
    target = final_path(folder)  # a symbolic link stays
    temporary = temporary_path(folder)
    with explain_unwritable(folder):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            record = (
                json.dumps(
                    model.record,
                    ensure_ascii=False,
                    indent=1,
                )
                + "\n"
            )
            (temporary / "training.json").write_text(record, encoding="utf-8")
            model.save(temporary)
            learnt.save(temporary, labelled_posts)
            if target.exists():
                shutil.rmtree(target)
            temporary.rename(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
