"""People's answers on the web server: what the pages Review and Teach share, and the endpoint for
answers of applications.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from feedmill.console import counted
from feedmill.shared.broker import make_app
from feedmill.shared.messages import (
    MAX_ID,
    MAX_POSTS_PER_MESSAGE,
    Classification,
    PostError,
)
from feedmill.shared.redis_errors import user_errors
from feedmill.shared.results import Result, ResultsStore
from feedmill.teaching.answer_file import AnswerFile
from feedmill.teaching.candidates import Candidate, describe
from feedmill.teaching.classroom import Classroom
from feedmill.teaching.review import ReviewQueue
from feedmill.teaching.sent_answers import SentAnswer, store_sent
from feedmill.web import schema
from feedmill.web.access import Caller
from feedmill.web.resources import Resources, resources, scope

#: Folder of the answers in the data folder, if no other one is set.
ANSWERS_FOLDER = "answers"
#: Key of `Resources.pages`.
TEACHING = "teaching"

router = APIRouter(prefix="/v1", responses=schema.ERRORS)


@dataclass(frozen=True)
class Teaching:
    """The posts to review, and what is learnt from the answers."""

    queue: ReviewQueue
    classroom: Classroom


def teaching_of(shared: Resources) -> Teaching:
    """Return a server's one `Teaching`."""
    with shared.pages_lock:
        teaching: Teaching | None = shared.pages.get(TEACHING)
        if teaching is None:
            settings = shared.settings
            folder = settings.answers or settings.data_folder / ANSWERS_FOLDER
            file = AnswerFile(folder.expanduser().absolute())
            queue = ReviewQueue(shared.redis, settings, file)
            celery = make_app(settings, current=False)
            classroom = Classroom(shared.redis, celery, settings, queue)
            teaching = Teaching(queue, classroom)
            shared.pages[TEACHING] = teaching
            shared.endings.append(classroom.stop)
        return teaching


def forget(shared: Resources, ids: Sequence[str]) -> int:
    """Remove the answers to posts with these ids. Return their number. Raises UserError."""
    file = teaching_of(shared).queue.file
    gone = set(ids)
    keys = [key for key in file.snapshot().answers if key.id in gone]
    if keys:
        file.remove(keys)
    return len(keys)


class GivenAnswer(BaseModel):
    """A person's answer to a post. label: null if it fits none of the labels."""

    model_config = ConfigDict(extra="forbid")

    id: Annotated[str, Field(min_length=1, max_length=MAX_ID)] | int
    label: Annotated[str, Field(min_length=1, max_length=200)] | None
    #: The post's text, if the results no longer have it.
    text: schema.Text | None = None


class AnswersRequest(BaseModel):
    """Answers to store beside those of the page Review."""

    model_config = ConfigDict(extra="forbid")

    answers: Annotated[
        list[GivenAnswer], Field(min_length=1, max_length=MAX_POSTS_PER_MESSAGE)
    ]


class StoredAnswers(BaseModel):
    """The number of stored answers, and reasons why others could not be stored."""

    stored: int
    refused: list[PostError]


@router.post("/answers", response_model=StoredAnswers)
def store_answers(
    body: AnswersRequest,
    shared: Annotated[Resources, Depends(resources)],
    caller: Annotated[Caller, Depends(scope("teach"))],
) -> StoredAnswers:
    """Store people's answers to posts, from which the page Teach makes a model.

    One to a post that has an answer replaces it. Answers that cannot be stored are named; the
    others are stored.
    """
    teaching = teaching_of(shared)
    store = ResultsStore(shared.redis, shared.settings)

    def find(post_id: str) -> Candidate | None:
        newest: Classification | None = None
        for classification in store.get(post_id):
            newest = classification
        if newest is None or not newest.scores:
            return None
        post = store.post_of(newest)
        if post is None:
            return None
        return describe(Result(post, newest))

    sent: list[SentAnswer] = []
    for row in body.answers:
        post_id = str(row.id)
        answer = SentAnswer(post_id, row.label, row.text)
        sent.append(answer)
    with user_errors(shared.settings):
        refusals = store_sent(teaching.queue, find, caller.name, sent)
        teaching.classroom.measure_if_due()
    errors: list[PostError] = []
    for post_id, reason in refusals:
        error = PostError(id=post_id, error=reason)
        errors.append(error)
    return StoredAnswers(
        stored=len(sent) - len(errors),
        refused=errors,
    )


def accuracy_text(report: dict[str, Any]) -> str:
    """Return the expected accuracy of a measurement, beside that of today's model."""
    if report["random"] is not None:
        return _comparison_text(report)
    expected = report["expected"]
    if expected is None:
        return "too few random posts to measure the accuracy"
    accuracy = _share_text(expected, "accuracy")
    posts = counted(expected["measured_on"], "random post")
    return f"expected accuracy {accuracy} after a lesson, on {posts}"


def _comparison_text(report: dict[str, Any]) -> str:
    """Return the accuracy after a lesson and today's, on the same random posts."""
    comparison = report["random"]
    after = _share_text(comparison, "after")
    before = _share_text(comparison, "before")
    text = f"expected accuracy {after} after a lesson, today's model {before}"
    learnt_none = report["none"] is not None
    if learnt_none and not report["uses_none"]:
        with_none = _share_text(comparison, "with_none")
        text += f"; {with_none} if posts are sent with --none"
    posts = counted(comparison["posts"], "random post")
    return f"{text}; on {posts}"


def _share_text(figures: dict[str, Any], name: str) -> str:
    """Return a share with its standard error, such as "0.81 ± 0.04"."""
    share = figures[name]
    error = figures[f"{name}_error"]
    return f"{share:.2f} ± {error:.2f}"
