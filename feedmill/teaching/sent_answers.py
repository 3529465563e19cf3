"""Answers that applications send, beside those of the page Review."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from feedmill.shared.errors import PostRefused
from feedmill.shared.messages import Post
from feedmill.teaching.answer_file import (
    AnsweredPost,
    AnswerKey,
    folded,
    key_of,
    now_text,
)
from feedmill.teaching.candidates import Candidate
from feedmill.teaching.review import ReviewQueue

#: Why their posts were picked: nobody knows, so they do not measure the accuracy.
SENT = "sent"


class SentAnswer(NamedTuple):
    """An answer of an application. label: None for none of these; text: of a post that the results
    may not have.
    """

    id: str
    label: str | None
    text: str | None = None


def store_sent(
    queue: ReviewQueue,
    find: Callable[[str], Candidate | None],
    person: str,
    sent: Sequence[SentAnswer],
) -> list[tuple[str, str]]:
    """Store answers of an application. Return the ids of those that cannot be stored, and why.

    find: returns the newest result of a post by its id. Raises UserError.
    """
    names = queue.names
    purged = queue.purged({answer.id for answer in sent})
    earlier_answers = _newest_by_id(queue.file.snapshot().answers)
    answers: list[AnsweredPost] = []
    refusals: list[tuple[str, str]] = []
    for answer in sent:
        if answer.label is not None and answer.label not in names:
            reason = (
                f"{answer.label!r:.80} is none of the labels ({', '.join(names):.500})"
            )
            if not names:
                reason = "there are no results and no labels yet"
            refusals.append((answer.id, reason))
            continue
        if answer.id in purged:
            refusals.append((answer.id, "the post was purged"))
            continue
        candidate = find(answer.id)
        earlier = earlier_answers.get(answer.id)
        try:
            post = _post_of(answer, candidate, earlier)
        except PostRefused as error:
            refusals.append((answer.id, str(error)))
            continue
        answers.append(_sent_answer(post, person, answer.label, candidate, earlier))
    if answers:
        queue.file.put(answers)
    return refusals


def _post_of(
    answer: SentAnswer, candidate: Candidate | None, earlier: AnsweredPost | None
) -> Post:
    """Return the post of an answer: as sent, as in the results, or as answered before.

    Raises PostRefused.
    """
    posts: list[Post] = []
    if candidate is not None:
        posts.append(candidate.post)
    if earlier is not None:
        posts.append(earlier.post)
    for post in posts:
        if answer.text is None or folded(answer.text) == folded(post.text):
            return post
    if answer.text is None:
        raise PostRefused(
            answer.id, "text", "no result has the post's text any more: send it"
        )
    return Post.parse({"id": answer.id, "body": answer.text})


def _newest_by_id(
    answers: Mapping[AnswerKey, AnsweredPost],
) -> dict[str, AnsweredPost]:
    newest: dict[str, AnsweredPost] = {}
    for key, answer in answers.items():
        newest[key.id] = answer
    return newest


def _sent_answer(
    post: Post,
    person: str,
    label: str | None,
    candidate: Candidate | None,
    earlier: AnsweredPost | None,
) -> AnsweredPost:
    """Return an answer with what the label was before people changed it."""
    why = SENT
    was = ""
    was_by = ""
    if candidate is not None:
        was = candidate.label
        was_by = candidate.weights
    if earlier is not None and earlier.key == key_of(post):
        why = earlier.why
        was = earlier.was or was
        was_by = earlier.was_by or was_by
    return AnsweredPost(
        post=post,
        label=label or "",
        why=why,
        fits_none=label is None,
        by=person,
        at=now_text(),
        was=was,
        was_by=was_by,
    )
