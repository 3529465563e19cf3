"""The endpoint's requests and answers as models: the types of its OpenAPI description."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, create_model

from feedmill.shared.messages import (
    MAX_POSTS_PER_MESSAGE,
    Classification,
    Labels,
    Post,
    PostError,
    Template,
)

#: Most seconds that a caller may wait for labels.
MAX_TIMEOUT_S = 600.0
#: Most results of one page.
MAX_PAGE = 1000

Text = Annotated[str, Field(max_length=200_000)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_POSTS_PER_MESSAGE)]


class GivenPost(BaseModel):
    """A post to classify. A title or a body is required; other fields are kept with the result.

    Without an id, one is derived from the text. Names of fields are read as in files.
    """

    model_config = ConfigDict(extra="allow")

    id: str | int | None = None
    title: str | None = None
    body: str | None = None
    subreddit: str | None = None
    url: str | None = None
    created_utc: float | str | None = None
    extra: dict[str, JsonValue] | None = None


GivenPosts = Annotated[
    list[GivenPost], Field(min_length=1, max_length=MAX_POSTS_PER_MESSAGE)
]


class Options(BaseModel):
    """Options of a request. Absent: the worker's own."""

    model_config = ConfigDict(extra="forbid")

    texts: Texts | None = None
    posts: GivenPosts | None = None
    #: Names of the labels, or each with its description.
    labels: Labels | None = None
    #: Sentence with {} in place of the label.
    template: Template | None = None
    #: Score each label by itself.
    multi_label: bool = False
    #: Score below which a post has no label; "on" selects the model's default.
    none: Annotated[float, Field(ge=0, le=1)] | Literal["on", "off"] | None = None


class ClassifyRequest(Options):
    """Texts or posts to classify now: exactly one of `texts` and `posts`."""

    #: Seconds to wait for the labels.
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] = 30.0


class RunRequest(Options):
    """Texts or posts to classify later, as one run: exactly one of `texts` and `posts`."""

    #: Name of the run; a new one with the time if absent.
    run: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    #: Also send posts that were sent before.
    again: bool = False
    #: Address that gets a signed notice when the run has finished. Its host must be allowed.
    webhook: Annotated[str, Field(max_length=2000)] | None = None


def _with_fields(name: str, text: str, **more: Any) -> Any:
    """Return a model of a classification's fields and more, as `result_as_json` writes them."""
    fields: dict[str, Any] = {}
    for field_name, field in Classification.model_fields.items():
        fields[field_name] = (field.annotation, field)
    return create_model(
        name,
        __doc__=text,
        **fields,
        **more,
    )


#: Fields of some outcomes (`further_fields`): without a label, the best one and its score; where
#: each label is scored by itself, those that apply.
FURTHER_FIELDS = {
    "best_label": (str | None, None),
    "label_score": (float | None, None),
    "labels": (list[str] | None, None),
}
LabelledPost = _with_fields(
    "LabelledPost", "The classification of one post.", **FURTHER_FIELDS
)
StoredResult = _with_fields(
    "StoredResult",
    "A stored result with its post; null once the stream has dropped it.",
    post=(Post | None, ...),
    **FURTHER_FIELDS,
)


class ClassifyAnswer(BaseModel):
    """One outcome per text or post, in order."""

    results: list[LabelledPost | PostError]  # type: ignore[valid-type]


class Sent(BaseModel):
    """A run whose posts were sent."""

    run: str
    #: Posts in the queue; posts that were sent before; purged posts, which are never sent.
    sent: int
    skipped: int
    purged: int
    #: Reasons why posts could not be sent, the first hundred.
    refused: list[PostError]


class RunProgress(BaseModel):
    """The progress of a run. Times are seconds since 1970."""

    run: str
    sent: int
    stored: int
    failed: int
    pending: int
    began: float
    latest: float
    used: float
    columns: list[str]
    rate: float | None
    seconds_left: float | None


class Runs(BaseModel):
    """The most recently active runs, newest first."""

    runs: list[RunProgress]


class MissedResults(BaseModel):
    """Results that were trimmed from the stream before they were read."""

    count: int | None
    since: float
    until: float


class ResultPage(BaseModel):
    """Results in the order in which they were stored."""

    results: list[StoredResult]  # type: ignore[valid-type]
    #: Pass it as `after` for the next page.
    cursor: str
    #: True if there was nothing behind this page.
    ended: bool
    missed: MissedResults | None


class PostResults(BaseModel):
    """The results of one post that have not expired, oldest first."""

    results: list[StoredResult]  # type: ignore[valid-type]


class Purge(BaseModel):
    """Numbers of removed items, as `feedmill purge --json` prints them."""

    counts: dict[str, int]


class ErrorText(BaseModel):
    """type: a word for programs. message: what is wrong, where, and what to do."""

    type: str
    message: str


class ErrorAnswer(BaseModel):
    """The answer to a request that failed."""

    error: ErrorText


#: Descriptions of the errors that any request can have, for OpenAPI.
ERRORS: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorAnswer, "description": "No valid token"},
    403: {"model": ErrorAnswer, "description": "The token lacks the scope"},
    422: {"model": ErrorAnswer, "description": "The request is invalid"},
    503: {
        "model": ErrorAnswer,
        "description": "Redis is unreachable, or too many wait",
    },
}
