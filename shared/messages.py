"""The message format: posts, the options of a request, and one outcome per post.

These models are the public contract. Other applications send `feedmill.classify` with these fields as JSON, and read
the outcomes. The models define what is valid; they do not depend on Celery, Redis or the classification model.
"""

import html
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from json.encoder import encode_basestring_ascii
from numbers import Real
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import from_json, to_json

from feedmill.shared import errors
from feedmill.shared.errors import PostRefused, RequestRefused, UserError

#: Incremented only if an older worker would misread a message. Workers read this version and all earlier ones. New
#: optional fields do not change the version. See docs/messages.md and shared/schema/.
MESSAGE_VERSION = 1
#: Incremented when `clean` returns a different text for the same post. Results of other versions are not reused.
CLEANING_VERSION = 2
#: Maximum levels of HTML escaping that `clean` reverses. Reddit's API has none or one, dumps one or two; a limit,
#: because a text could have thousands.
MAX_ESCAPING = 4
#: Maximum posts per message. Limits how long one message can occupy a worker.
MAX_POSTS_PER_MESSAGE = 1000
#: Characters. Reddit allows 300 in a title and 40,000 in a body; other sources may need more.
MAX_TITLE, MAX_BODY = 4_000, 100_000
#: Maximum bytes of JSON in `extra`, the data that an application attaches to a post.
MAX_EXTRA_BYTES = 4096
#: Maximum bytes of JSON kept in a dead letter: for the post (nearly all valid posts are smaller); for its options; and
#: for all complete dead letters of one message together.
MAX_DEAD_POST_BYTES, MAX_DEAD_OPTIONS_BYTES, MAX_DEAD_MESSAGE_BYTES = 2**19, 2**14, 2**23
#: Maximum characters of a dead letter's traceback.
MAX_DEAD_TRACEBACK = 8_000
#: Maximum characters of an id.
MAX_ID = 128
#: Maximum characters of a run's name.
MAX_RUN = 100
#: Maximum labels per message; descriptions per label; and descriptions of all labels together.
MAX_LABELS = 256
MAX_DESCRIPTIONS = 16
MAX_ALL_DESCRIPTIONS = 512
#: Reason for rejecting labels of which one has no name.
EMPTY_LABEL = "a label is empty; name each label"
#: Body texts that Reddit shows in place of removed or deleted bodies.
REMOVED_BODIES = frozenset({"[removed]", "[deleted]"})


def clean(title: str, body: str) -> str:
    """Return the text to classify: HTML-unescaped title, a blank line, HTML-unescaped body.

    Returns only the title if the body is missing, removed or deleted, and only the body if there is no title. A post
    has the same text whether its source escapes HTML or not.
    """
    title = _unescape(title).strip()
    body = "" if body.strip() in REMOVED_BODIES else _unescape(body).strip()
    return f"{title}\n\n{body}" if title and body else title or body


def _unescape(text: str) -> str:
    """Reverse HTML escaping, also if it was applied repeatedly."""
    for _ in range(MAX_ESCAPING):
        if "&" not in text or (plain := html.unescape(text)) == text:
            break
        text = plain
    return text


def _normalize_text(value: object) -> object:
    """Normalize text: None becomes "", and lone surrogates, valid in JSON but not in UTF-8, are replaced."""
    if value is None:
        return ""
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode("utf-8", "replace").decode()


def is_missing(value: object) -> bool:
    """Return True for None, NaN, and pandas' NaT and NA. Without this check, a missing text would become "nan"."""
    if type(value) in _PRESENT:  # the common cases first: most of a post's values are looked at
        return False
    if type(value) is float:
        return value != value  # noqa: PLR0124 - only NaN differs from itself
    if value is None or type(value).__name__ in ("NaTType", "NAType"):
        return True
    if isinstance(value, Decimal):
        return value.is_nan()
    return isinstance(value, Real) and value != value  # noqa: PLR0124


#: Types without a missing value.
_PRESENT = frozenset({str, int, bool, dict, list})


def _as_seconds(value: object) -> object:
    """Convert a datetime to seconds since 1970; UTC if it has no zone."""
    return in_utc(value) if isinstance(value, datetime) else value


def in_utc(date: datetime) -> float:
    """Return seconds since 1970; UTC if the date has no zone."""
    return date.replace(tzinfo=date.tzinfo or UTC).timestamp()


#: Place this last in an annotation. pydantic runs before-validators right to left, so limits apply to repaired text.
Repaired = BeforeValidator(_normalize_text)


def _check_run(run: str) -> str:
    if errors.UNPRINTABLE_CHARACTERS.search(run):
        raise ValueError("control characters are not allowed in the name of a run")
    return run


#: Name of a run: one enqueued file, or any other set of posts that its sender names.
Run = Annotated[
    str,
    StringConstraints(min_length=1, max_length=MAX_RUN, strip_whitespace=True),
    AfterValidator(_check_run),
    Repaired,
]
#: Seconds since 1970, UTC, up to the year 9999.
UnixTime = Annotated[float, Field(ge=0, le=253_402_300_799), BeforeValidator(_as_seconds)]


class Post(BaseModel):
    """One post. Requires `id` and a title or a body. Unknown fields are dropped, so authors are never stored."""

    model_config = ConfigDict(
        extra="ignore",
        frozen=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        json_schema_extra={
            "anyOf": [
                {"required": ["title"], "properties": {"title": {"minLength": 1}}},
                {
                    "required": ["body"],
                    "properties": {"body": {"minLength": 1, "not": {"enum": [*sorted(REMOVED_BODIES)]}}},
                },
            ]
        },
    )

    id: Annotated[str, StringConstraints(min_length=1, max_length=MAX_ID, strip_whitespace=True), Repaired]
    topic: Annotated[str, StringConstraints(max_length=200), Repaired] | None = None
    title: Annotated[str, StringConstraints(max_length=MAX_TITLE), Repaired] = ""
    body: Annotated[str, StringConstraints(max_length=MAX_BODY), Repaired] = ""
    subreddit: Annotated[str, StringConstraints(max_length=100), Repaired] | None = None
    score: Annotated[int, Field(ge=-(2**53), le=2**53)] | None = None
    #: URL that the post links to.
    url: Annotated[str, StringConstraints(max_length=4096), Repaired] | None = None
    #: URL of the post itself.
    permalink: Annotated[str, StringConstraints(max_length=4096), Repaired] | None = None
    created_utc: UnixTime | None = None
    #: Time of the last edit of the post's text.
    edited_utc: UnixTime | None = None
    #: True if the post is pinned to the top of its subreddit.
    stickied: bool = False
    nsfw: bool = False
    spoiler: bool = False
    extra: dict[str, JsonValue] | None = None
    #: Run that the post belongs to. Ids are unique within their run.
    run: Run | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_missing(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and any(map(is_missing, raw.values())):
            return {name: value for name, value in raw.items() if not is_missing(value)}
        return raw

    @field_validator("extra")
    @classmethod
    def _extra_is_small(cls, value: dict[str, JsonValue] | None) -> dict[str, JsonValue] | None:
        if value is None:
            return None
        try:
            # The extra brackets simulate the nesting depth at which the value is stored.
            written = to_json([[[[value]]]])
            from_json(written)
        except ValueError:
            raise ValueError("must be UTF-8 JSON: it contains a lone surrogate or is nested too deeply") from None
        size = len(written) - len("[[[[]]]]")
        if size > MAX_EXTRA_BYTES:
            raise ValueError(f"{size} bytes of JSON; at most {MAX_EXTRA_BYTES} are allowed")
        return value

    @model_validator(mode="after")
    def _has_text(self) -> "Post":
        text = clean(self.title, self.body)
        if not text:
            raise PostRefused(self.id, "", "title or body must contain text")
        self.__dict__["text"] = text  # where `cached_property` keeps it, but without its lock
        return self

    @cached_property
    def text(self) -> str:
        """The text to classify; see `clean`."""
        return clean(self.title, self.body)

    @classmethod
    def parse(cls, raw: object) -> "Post":
        """Parse one post. Raises PostRefused with the field and the reason."""
        if not isinstance(raw, dict):
            raise PostRefused(None, "", "a post must be a JSON object")
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            post_id = raw.get("id")
            known = post_id and not is_missing(post_id)
            raise PostRefused(str(post_id)[:MAX_ID] if known else None, *errors.first_problem(error)) from None


def _parse_labels(value: object) -> object:
    """Return labels as a mapping to their descriptions. A label without a description is its own description.

    Splits a string on commas, like transformers' zero-shot pipeline. List items are not split.
    """
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, dict | list | tuple):
        # Do not quote the value: it may be a post in the wrong field, and reasons appear in logs and in Flower.
        kind = type(value).__name__
        raise ValueError(f"expected a list, names separated by commas, or an object of descriptions; got {kind}")
    described: dict[str, object] = {}
    for label in islice(value, MAX_LABELS + 1):
        if not isinstance(label, str):
            raise ValueError(f"each label must be text, not {type(label).__name__}")
        name = label.strip()
        if not name:
            raise ValueError(EMPTY_LABEL)
        if name in described:
            raise ValueError(f"the label {errors.truncate(name)!r} is named twice")
        described[name] = value[label] if isinstance(value, dict) else (name,)
    return described


def _as_tuple(value: object) -> object:
    if not isinstance(value, str | list | tuple):
        raise ValueError("expected a description, or a list of them")
    return (value,) if isinstance(value, str) else value


def _check_label_count(labels: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    if not 1 <= len(labels) <= MAX_LABELS:
        raise ValueError(f"name at least one label, and at most {MAX_LABELS}")
    if (described := sum(map(len, labels.values()))) > MAX_ALL_DESCRIPTIONS:
        raise ValueError(f"{described} descriptions; at most {MAX_ALL_DESCRIPTIONS} for all labels together")
    return labels


def _check_placeholder(template: str) -> str:
    if "{}" not in template:
        raise ValueError(
            f"must contain {{}} for the label, as in 'This is about {{}}.', not {errors.truncate(template)!r}"
        )
    return template


def _check_version(version: int) -> int:
    if version > MESSAGE_VERSION:
        raise ValueError(
            f"version {version} is not supported; this worker reads versions up to {MESSAGE_VERSION}. Update the "
            f"worker, or send version {MESSAGE_VERSION}"
        )
    return version


Label = Annotated[str, StringConstraints(min_length=1, max_length=200, strip_whitespace=True), Repaired]
Description = Annotated[str, StringConstraints(min_length=1, max_length=500, strip_whitespace=True), Repaired]
Descriptions = Annotated[
    tuple[Description, ...], Field(min_length=1, max_length=MAX_DESCRIPTIONS), BeforeValidator(_as_tuple)
]
#: Labels as senders write them: names separated by commas, a list of names, or the descriptions of each name.
_LabelsAsSent = (
    Annotated[str, Field(pattern="[^, ]")]
    | Annotated[list[Label], Field(min_length=1, max_length=MAX_LABELS)]
    | Annotated[
        dict[Label, Description | Annotated[list[Description], Field(min_length=1, max_length=MAX_DESCRIPTIONS)]],
        Field(min_length=1, max_length=MAX_LABELS),
    ]
)
#: Label -> the texts that replace `{}` in the template: the label itself, or one or more descriptions.
Labels = Annotated[
    dict[Label, Descriptions],
    AfterValidator(_check_label_count),
    BeforeValidator(_parse_labels, json_schema_input_type=_LabelsAsSent),
]
#: Hypothesis template: a sentence with `{}` in place of the label.
Template = Annotated[
    str,
    StringConstraints(max_length=500),
    Field(json_schema_extra={"pattern": r"\{\}"}),
    AfterValidator(_check_placeholder),
    Repaired,
]
#: Message version. Never serialized: it controls how options are read and is not itself an option.
Version = Annotated[
    int,
    Field(ge=1, exclude=True, json_schema_extra={"maximum": MESSAGE_VERSION}),
    AfterValidator(_check_version),
]


class ClassifyOptions(BaseModel):
    """Options for classifying the posts of one message. None selects the worker's setting."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Message version; 1 if absent. Newer versions than the worker's are rejected before other options are validated.
    version: Version = 1
    labels: Labels | None = None
    template: Template | None = None
    multi_label: bool = False
    #: Fail the message if any post fails. Results of the valid posts are stored anyway.
    strict: bool = False
    #: Number of scores in the reply, best first. Stored results contain all scores.
    top_k: Annotated[int, Field(ge=1)] | None = None

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> "ClassifyOptions":
        """Parse a message's options. Raises RequestRefused with the option and the reason."""
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise RequestRefused(": ".join(errors.first_problem(error))) from None

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `feedmill.classify` for these options, without defaults."""
        return self.model_dump(mode="json", exclude_defaults=True)


class Classification(BaseModel):
    """The classification of one post: label and scores, with the model, worker and time that produced them."""

    model_config = ConfigDict(frozen=True)

    id: str
    label: str
    #: Score of every label, best first.
    scores: dict[str, float]
    model: str
    revision: str | None
    #: SHA-256 of the weights file, in hex.
    weights: str
    fingerprint: str
    #: Seconds since 1970, UTC.
    classified_at: float
    worker: str
    device: str
    #: Seconds from sending to result; None if the sender set no `sent_at` header.
    queued_seconds: float | None


#: Truncated types for values from senders and libraries, because each post of a message gets a copy.
Id = Annotated[str, AfterValidator(lambda text: text[:MAX_ID]), Repaired]
Reason = Annotated[str, AfterValidator(lambda text: errors.truncate(text, errors.LONGEST_REASON)), Repaired]


class PostError(BaseModel):
    """The reason why one post has no classification."""

    model_config = ConfigDict(frozen=True)

    id: Id | None
    error: Reason


#: One outcome per post of a message, in the message's order.
Outcome = Classification | PostError


class DeadLetter(BaseModel):
    """A post that could not be classified, with everything needed to diagnose the failure and to retry.

    A message whose posts could not be read is a dead letter with `payload` instead of `post`.
    """

    model_config = ConfigDict(frozen=True)

    id: Id | None
    reason: Reason
    #: The post's fields as sent, as JSON; None if longer than MAX_DEAD_POST_BYTES.
    post: str | None
    #: The message's other arguments (labels, template, …) as JSON; None if longer than MAX_DEAD_OPTIONS_BYTES.
    options: str | None
    #: Id of the Celery message; None if there was none.
    message: Id | None
    worker: str
    #: Seconds since 1970, UTC.
    failed_at: float
    #: Files, lines and types of the error, without any post's text; None if no exception was raised.
    traceback: Annotated[str, Repaired] | None = None
    #: Number of attempts: deliveries of the message, unless attempts were counted per post.
    attempts: int = 1
    #: Queue that the message came from, used for retries; None if unknown.
    queue: Annotated[str, Repaired] | None = None
    #: Body of a message whose posts could not be read, truncated to MAX_DEAD_POST_BYTES.
    payload: Annotated[str, Repaired] | None = None
    #: Run of the post; None if it has none, or an invalid one.
    run: str | None = None


def digest(*parts: str | None) -> str:
    """Return a 128-bit hash of the parts, in hex. Parts are framed: ("ab", "c") and ("a", "bc") differ."""
    framed = ",".join(["null" if part is None else encode_basestring_ascii(part) for part in parts])
    return blake2b(f"[{framed}]".encode("ascii"), digest_size=16).hexdigest()


def fingerprint(post: Post, recipe: str) -> str:
    """Return the identity of a classification: a digest of the post, its text and the recipe.

    recipe: digest of model, weights, label set, template, multi-label flag and truncation length.
    """
    return digest(post.id, post.text, str(CLEANING_VERSION), recipe, *scope_of(post))


def scope_of(post: Post) -> tuple[str, ...]:
    """Return the run within which the post's id is unique, as parts of a digest; none without a run."""
    return () if post.run is None else (post.run,)


def parse_run(name: str) -> str:
    """Return the name of a run in the form of `Post.run`. Raises UserError, also for values other than text."""
    if not isinstance(name, str):
        raise UserError(f"The name of a run must be text, not {errors.truncate(repr(name))}.")
    try:
        run: str = _RUN.validate_python(name)
    except ValidationError as error:
        raise UserError(
            f"'{errors.printable(errors.truncate(name))}' is not the name of a run: {errors.first_problem(error)[1]}. "
            f"Use 1 to {MAX_RUN} printable characters."
        ) from None
    return run


def run_of(raw: object) -> str | None:
    """Return the run of a raw post; None if it has none, or an invalid one."""
    run = raw.get("run") if isinstance(raw, dict) else None
    try:
        return None if run is None else str(_RUN.validate_python(run))
    except ValidationError:
        return None


_RUN: TypeAdapter[str] = TypeAdapter(Run, config=ConfigDict(coerce_numbers_to_str=True))


_POSTS: TypeAdapter[list[Post]] = TypeAdapter(list[Post])


def parse_posts(raw: Sequence[object]) -> Sequence[Post | PostError]:
    """Parse each post, in order. A post that is refused becomes a PostError with the reason."""
    if all(type(item) is dict for item in raw):
        # One validation of all posts takes two thirds of the time of one per post, but its error does not say enough.
        with suppress(ValidationError, PostRefused):
            return _POSTS.validate_python(raw)

    def parse(item: object) -> Post | PostError:
        try:
            return Post.parse(item)
        except PostRefused as refused:
            return PostError(id=refused.post_id, error=str(refused))

    return [parse(item) for item in raw]
