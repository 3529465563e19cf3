"""Fit a head to answers, in a process of its own: `python -m feedmill.teaching.lesson PLAN`.

PLAN is a file with a `Plan` as JSON. The process prints lines of JSON: its progress, then a report
or an error. classroom.py starts it.
"""

import json
import math
import os
import random
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from feedmill.console import Report
from feedmill.shared.errors import (
    DeviceFull,
    DeviceLost,
    RequestRefused,
    UserError,
    clause,
    explain_missing,
    require_packages,
    sentence,
)
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.none_of_these import NO_LABEL
from feedmill.shared.settings import Settings
from feedmill.teaching.plan import Example, Plan, StreamPost
from feedmill.training.answers import MAX_TOKENS, SEED, write_model
from feedmill.training.picked import MEASURING, NONE_OF_THESE
from feedmill.training.run import HEAD_PACKAGES

if TYPE_CHECKING:
    import torch

    from feedmill.training.active import Session
    from feedmill.training.head import Embedder, Fit, HeadModel

#: Seconds between two lines about the progress of a phase.
INTERVAL_S = 0.2
#: Changed labels that a report lists, and characters of their titles.
MAX_CHANGES = 50
MAX_TITLE = 200
#: Politeness towards workers on the same machine.
NICENESS = 10


class LineReport(Report):
    """Prints the progress as lines of JSON."""

    def __init__(self, output: IO[str]) -> None:
        super().__init__()
        self._output = output
        self._phase: dict[str, Any] = {}
        self._sent_at = 0.0

    def phase(self, what: str, total: int | None = None) -> None:
        self._phase = {"phase": what, "done": 0, "total": total}
        self._send()

    def advance(self, done: int, note: str = "") -> None:
        self._phase["done"] = done
        self._phase["phase"] += note
        if time.monotonic() - self._sent_at >= INTERVAL_S:
            self._send()

    def _send(self) -> None:
        self._sent_at = time.monotonic()
        send(self._output, self._phase)


def send(output: IO[str], content: dict[str, Any]) -> None:
    output.write(json.dumps(content) + "\n")
    output.flush()


def learn(plan: Plan, settings: Settings, report: Report) -> dict[str, Any]:
    """Fit a head, write the model if the plan has a folder, and return the report.

    Raises UserError, RequestRefused, DeviceFull or DeviceLost.
    """
    require_packages("Teaching", "worker", HEAD_PACKAGES)
    with explain_missing("Teaching", "worker"):
        from feedmill.training import head  # noqa: PLC0415 - needs torch
    report.phase(f"loading {plan.base}")
    embedder = head.Embedder(plan.base, settings, MAX_TOKENS)
    rows: list[Example | StreamPost] = [*plan.examples, *plan.pool]
    posts = [_post_of(row) for row in rows]
    texts = [post.text for post in posts]
    vectors = embedder.embed(texts, report)
    session = _session(plan, embedder, vectors, settings)
    report.phase("fitting the head")
    fitted = session.fit()
    figures = _figures(plan, session, fitted)
    if plan.out is None:
        return figures
    report.phase("comparing labels")
    count = len(plan.examples)
    changes = _changes(plan, session, fitted, vectors[count:])
    report.phase("writing the model")
    model = _model(plan, embedder, fitted, figures)
    folder = Path(plan.out)
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_model(folder, model, posts[:count])
    return figures | changes


def _session(
    plan: Plan, embedder: "Embedder", vectors: "torch.Tensor", settings: Settings
) -> "Session":
    """Return a session with the plan's answers. vectors: of its examples, then of its pool."""
    from feedmill.training import active, head  # noqa: PLC0415 - need torch
    from feedmill.workers.models.classifiers.none_of_these import (  # noqa: PLC0415
        read_subjects,
    )

    answers: list[active.Answer] = []
    for place, example in enumerate(plan.examples):
        number = NONE_OF_THESE
        if example.label:
            number = plan.names.index(example.label)
        answers.append(active.Answer(place, example.why, number))
    descriptions = head.described(plan.names, settings)
    described = ClassifyOptions(labels=descriptions, template=plan.template)
    subjects = ClassifyOptions(labels=read_subjects(), template=plan.template)
    label_vectors = embedder.label_vectors(described)
    subject_vectors = embedder.label_vectors(subjects)
    return active.Session(
        vectors,
        label_vectors,
        SEED,
        answers,
        subject_vectors,
    )


def _figures(plan: Plan, session: "Session", fitted: "Fit") -> dict[str, Any]:
    """Return the number of answers, and what to expect of the head."""
    measured = session.measure(fitted)
    expected: dict[str, Any] | None = None
    if measured is not None:
        expected = measured._asdict()
    promise: dict[str, Any] | None = None
    if fitted.none is not None:
        promise = fitted.none.promise
    figures: dict[str, Any] = {
        "answers": len(plan.examples),
        "expected": expected,
        "none": promise,
    }
    return figures | _compared(plan, fitted)


def _model(
    plan: Plan, embedder: "Embedder", fitted: "Fit", figures: dict[str, Any]
) -> "HeadModel":
    """Return the model to write, with a record of how it was taught."""
    from feedmill.training import head  # noqa: PLC0415 - needs torch

    record = {
        "trained_at": time.time(),
        "base": plan.base,
        "labels": plan.names,
        "max_tokens": MAX_TOKENS,
        "seed": SEED,
        "taught": figures,
    }
    return head.HeadModel(
        embedder=embedder,
        labels=tuple(plan.names),
        head=fitted.head,
        record=record,
        none=fitted.none,
    )


def _post_of(row: Example | StreamPost) -> Post:
    # Unchecked: bodies of the stream may be truncated.
    return Post.model_construct(
        id=row.id,
        title=row.title,
        body=row.body,
    )


def uses_none(plan: Plan) -> bool:
    """Return whether posts are sent with `none`: some have no label."""
    rows: list[Example | StreamPost] = [*plan.examples, *plan.pool]
    return any(row.was == NO_LABEL for row in rows)


def _compared(plan: Plan, fitted: "Fit") -> dict[str, Any]:
    """Return the accuracy before and after, on the answers that a head and today's model had not
    seen: on random posts, and on all.
    """
    right_with_none = fitted.right.tolist()
    right = right_with_none
    if fitted.best_right is not None and not uses_none(plan):
        right = fitted.best_right.tolist()
    random_posts = Comparison()
    all_posts = Comparison()
    for index, example in enumerate(plan.examples):
        if example.was is None or math.isnan(right[index]):  # NaN: never held out
            continue
        label = example.label or NO_LABEL
        was_right = example.was == label
        counts = (was_right, right[index], right_with_none[index])
        all_posts.add(*counts)
        if example.why in MEASURING:
            random_posts.add(*counts)
    return {
        "random": random_posts.as_json(),
        "all": all_posts.as_json(),
        "uses_none": uses_none(plan),
    }


class Comparison:
    """The numbers of right labels on the same posts: before, after, and after if they are sent
    with `none`.
    """

    def __init__(self) -> None:
        self._posts = 0
        self._before = 0
        self._after = 0
        self._with_none = 0

    def add(self, was_right: bool, is_right: float, is_right_with_none: float) -> None:
        """Count a post."""
        self._posts += 1
        self._before += int(was_right)
        self._after += int(is_right)
        self._with_none += int(is_right_with_none)

    def as_json(self) -> dict[str, Any] | None:
        """Return shares with their standard errors; None without posts."""
        count = self._posts
        if not count:
            return None
        return {
            "posts": count,
            "before": self._before / count,
            "before_error": standard_error(self._before, count),
            "after": self._after / count,
            "after_error": standard_error(self._after, count),
            "with_none": self._with_none / count,
            "with_none_error": standard_error(self._with_none, count),
        }


def standard_error(right: int, count: int) -> float:
    """Return the standard error of a share, with a right and a wrong one more: else that of a few
    right ones would be 0.
    """
    right_posts = right + 1
    posts = count + 2
    share = right_posts / posts
    other_share = 1 - share
    variance = share * other_share / count
    return math.sqrt(variance)


def _changes(
    plan: Plan, session: "Session", fitted: "Fit", vectors: Any
) -> dict[str, Any]:
    """Return how many posts of the stream would have another label, and a sample of them."""
    if not plan.pool:
        return {"compared": 0, "changed": 0, "changes": []}
    threshold = 0.0
    if uses_none(plan) and fitted.none is not None:
        threshold = fitted.none.threshold
    outcomes = session.outcomes(fitted, vectors)
    label_scores = outcomes[:, : len(plan.names)]
    best_scores, best = label_scores.max(1)
    compared = 0
    changes: list[dict[str, Any]] = []
    rows = zip(
        plan.pool,
        best.tolist(),
        best_scores.tolist(),
        strict=True,
    )
    for post, number, score in rows:
        if post.was is None:
            continue
        compared += 1
        label = plan.names[number]
        if score < threshold:
            label = NO_LABEL
        if label != post.was:
            text = post.title or post.body
            change = {
                "text": text[:MAX_TITLE],
                "was": post.was,
                "now": label,
            }
            changes.append(change)
    sample = changes
    if len(changes) > MAX_CHANGES:
        sample = random.Random(SEED).sample(changes, MAX_CHANGES)
    return {
        "compared": compared,
        "changed": len(changes),
        "changes": sample,
    }


def main() -> int:
    """Run the plan that the command names. Return the exit status."""
    os.nice(NICENESS)
    # Libraries may print to standard output, too.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    path = Path(sys.argv[1])
    plan = Plan.model_validate_json(path.read_text("utf-8"))
    path.unlink()  # it quotes posts
    with output:
        try:
            changes = {"labels": plan.labels, "template": plan.template}
            settings = Settings().model_copy(update=changes)
            report = learn(plan, settings, LineReport(output))
        except UserError as error:
            send(output, {"error": str(error)})
            return 1
        except RequestRefused as error:
            send(output, {"error": sentence(str(error))})
            return 1
        except (DeviceFull, DeviceLost) as error:
            send(output, {"error": f"The device failed: {clause(error)}."})
            return 1
        send(output, {"report": report})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
