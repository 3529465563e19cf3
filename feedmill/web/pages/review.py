"""The page Review: one post at a time, and a key for each label."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from feedmill.shared.messages import Post
from feedmill.shared.none_of_these import NO_LABEL
from feedmill.shared.redis_errors import user_errors
from feedmill.teaching.label_keys import Keys, assign_keys
from feedmill.teaching.review import NotShown, Pick
from feedmill.web.access import Caller
from feedmill.web.answers import Teaching, accuracy_text, teaching_of
from feedmill.web.failures import Failure
from feedmill.web.pages.frame import page, page_router, person
from feedmill.web.resources import Resources, resources, scope

#: Characters of a body that are shown.
MAX_BODY = 4000
#: Why a post is asked about, for people.
REASONS = {
    "first": "drawn at random",
    "random": "drawn at random, to measure the accuracy",
    "uncertain": "the model is uncertain",
    "disagreement": "two models disagree",
    "unlabelled": "the model found no label",
}
#: Actions of the keys that are no label's.
COMMANDS = {
    "none": "none of these",
    "skip": "skip",
    "undo": "undo",
    "quit": "to the page Teach",
}

router = page_router()
#: Routes of scripts: their errors are JSON.
scripts = APIRouter(prefix="/review", include_in_schema=False)
Shared = Annotated[Resources, Depends(resources)]
Reviewer = Annotated[Caller, Depends(scope("teach"))]


@router.get("/review")
def show(
    request: Request, shared: Shared, _: Annotated[Caller, Depends(person("teach"))]
) -> Response:
    teaching = teaching_of(shared)
    with user_errors(shared.settings):
        names = teaching.queue.names
    keys = assign_keys(names)
    return page(
        request,
        "review.html",
        answers=_answers(names, keys),
        commands=_commands(keys),
        missing=teaching.classroom.missing,
    )


def _answers(names: tuple[str, ...], keys: Keys) -> list[dict[str, str]]:
    """Return each label with its key."""
    answers: list[dict[str, str]] = []
    for key, place in keys.labels.items():
        answer = {
            "key": key,
            "label": names[place],
        }
        answers.append(answer)
    return answers


def _commands(keys: Keys) -> list[dict[str, str]]:
    commands: list[dict[str, str]] = []
    for name, text in COMMANDS.items():
        command = {
            "key": getattr(keys, name),
            "what": name,
            "text": text,
        }
        commands.append(command)
    return commands


class Browser(BaseModel):
    """Who asks: a name that a browser's tab gave itself."""

    model_config = ConfigDict(extra="forbid")

    reviewer: Annotated[str, Field(min_length=8, max_length=64)]

    def identity(self, caller: Caller) -> str:
        return f"{caller.name}\0{self.reviewer}"


class Answered(Browser):
    """An answer to the post of a token: its label, none of these, or a skip."""

    token: Annotated[str, Field(max_length=64)]
    label: Annotated[str, Field(max_length=200)] | None = None
    skip: bool = False


@scripts.post("/next")
def show_next(body: Browser, shared: Shared, caller: Reviewer) -> dict[str, Any]:
    """Return the post that this reviewer sees now."""
    return _state(shared, body.identity(caller))


@scripts.post("/answer")
def answer(body: Answered, shared: Shared, caller: Reviewer) -> dict[str, Any]:
    """Store an answer; return the next post."""
    teaching = teaching_of(shared)
    reviewer = body.identity(caller)
    with user_errors(shared.settings):
        try:
            label = None if body.skip else body.label
            teaching.queue.answer(
                reviewer,
                caller.name,
                body.token,
                label,
                skips=body.skip,
            )
        except NotShown as error:
            raise Failure(409, "not_shown", str(error)) from None
        teaching.classroom.measure_if_due()
    return _state(shared, reviewer)


@scripts.post("/undo")
def undo(body: Browser, shared: Shared, caller: Reviewer) -> dict[str, Any]:
    """Take the latest answer back; return its post."""
    reviewer = body.identity(caller)
    with user_errors(shared.settings):
        is_undone = teaching_of(shared).queue.undo(reviewer)
    return _state(shared, reviewer) | {"undone": is_undone}


def _state(shared: Resources, reviewer: str) -> dict[str, Any]:
    teaching = teaching_of(shared)
    with user_errors(shared.settings):
        pick = teaching.queue.next(reviewer)
    post: dict[str, Any] | None = None
    if pick is not None:
        post = _post_of(pick)
    progress = _progress(teaching)
    return {"post": post, "progress": progress}


def _post_of(pick: Pick) -> dict[str, Any]:
    candidate = pick.candidate
    post = candidate.post
    body = post.body[:MAX_BODY]
    if len(post.body) > MAX_BODY:
        body += " …"
    label = candidate.label
    if label != NO_LABEL:
        label += f" {candidate.score:.2f}"
    other: str | None = None
    if candidate.other_label is not None:
        other = candidate.other_label
        other += f" ({candidate.other_model})"
    origin = post.subreddit or post.run
    return {
        "token": candidate.token,
        "title": post.title,
        "body": body,
        "label": label,
        "other": other,
        "why": REASONS[pick.why],
        "from": origin,
        "link": link_of(post),
    }


def link_of(post: Post) -> str | None:
    """Return the post's address on the web, if it is one that a browser may open."""
    for address in (post.permalink, post.url):
        if address is None:
            continue
        if address.startswith(("http://", "https://")):
            return address
    return None


def _progress(teaching: Teaching) -> dict[str, Any]:
    answers = teaching.queue.file.snapshot().answers.values()
    measured = teaching.classroom.measured
    text = ""
    if measured.report is not None:
        text = accuracy_text(measured.report)
    if measured.state == "failed":
        text = f"The accuracy could not be measured: {measured.message}"
    answer_count = sum(answer.teaches for answer in answers)
    return {
        "answers": answer_count,
        "skipped": len(answers) - answer_count,
        "accuracy": text,
        "measuring": measured.state == "running",
    }


@scripts.post("/progress")
def show_progress(shared: Shared, _: Reviewer) -> dict[str, Any]:
    return {"progress": _progress(teaching_of(shared))}
