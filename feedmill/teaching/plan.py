"""The input of a lesson's process: answers, posts without one, and the model's folder."""

from pydantic import BaseModel

from feedmill.shared.messages import Labels


class Example(BaseModel):
    """An answer that teaches, to a post.

    label: empty for none of these. was: the label of the model that serves the stream now; None if
    it gave the post none before the answer.
    """

    id: str
    title: str
    body: str
    label: str
    why: str
    was: str | None = None


class StreamPost(BaseModel):
    """A post without an answer. was: its label now; None if another model gave it."""

    id: str
    title: str
    body: str
    was: str | None


class Plan(BaseModel):
    """The posts to learn from. out: the model's folder; None only measures the accuracy."""

    names: list[str]
    labels: Labels | None
    template: str | None
    base: str
    examples: list[Example]
    pool: list[StreamPost]
    out: str | None = None
