"""The message format: posts, the options of a request, and one outcome per post.

These models are the public contract. Other applications send `feedmill.classify` with these fields
as JSON, and read the outcomes. The models define what is valid; they do not depend on Celery,
Redis or the classification model.
"""

import html
import math
import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime
from datetime import time as time_of_day
from decimal import Decimal
from functools import cached_property
from hashlib import blake2b
from html import entities
from itertools import islice
from json.encoder import encode_basestring_ascii
from numbers import Real
from typing import Annotated, Any, Literal
from uuid import UUID

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
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import from_json, to_json

from feedmill.shared import errors
from feedmill.shared.errors import PostRefused, RequestRefused, UserError

#: Incremented only if an older worker would misread a message. Workers read this version and all
#: earlier ones. New optional fields do not change the version. See docs/messages.md and
#: shared/schema/.
MESSAGE_VERSION = 1
#: Incremented when `clean` returns a different text for most posts. Results of other versions are
#: not reused; neither are those of a post whose text has changed.
CLEANING_VERSION = 2
#: Maximum levels of HTML escaping that `clean` reverses. Reddit's API has none or one, dumps one
#: or two; a limit, because a text could have thousands.
MAX_ESCAPING = 4
#: Maximum posts per message. Limits how long one message can occupy a worker.
MAX_POSTS_PER_MESSAGE = 1000
#: Characters. Reddit allows 300 in a title and 40,000 in a body; other sources may need more.
MAX_TITLE = 4_000
MAX_BODY = 100_000
#: Maximum bytes of JSON in `extra`, the data that an application attaches to a post.
MAX_EXTRA_BYTES = 4096
#: Maximum bytes of JSON kept in a dead letter: for the post (nearly all valid posts are smaller);
#: for its options; and for all complete dead letters of one message together.
MAX_DEAD_POST_BYTES = 2**19
MAX_DEAD_OPTIONS_BYTES = 2**14
MAX_DEAD_MESSAGE_BYTES = 2**23
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
#: An HTML entity, such as `&amp;` or `&#x200B;`. The longest name has 31 letters.
ENTITY = re.compile(
    r"&(?:[A-Za-z][A-Za-z0-9]{1,31}|#[0-9]{1,7}|#[xX][0-9A-Fa-f]{1,6});"
)
#: `kind` of a comment. Posts have none.
COMMENT_KIND = "comment"
#: Texts that Reddit and its archives show in place of removed or deleted bodies and titles, in
#: lower case and without the spaces inside the outer brackets.
PLACEHOLDERS = frozenset(
    {
        "[removed]",
        "[deleted]",
        "[deleted by user]",
        "[removed by moderator]",
        "[removed by reddit]",
        "[removed by reddit in response to a copyright notice.]",
        "[removed by reddit on account of violating the content policy.]",
    }
)
#: The link in the last one.
POLICY_LINK = re.compile(r"\[content policy\]\([^()\s]*\)")
#: Maximum characters of a placeholder.
MAX_PLACEHOLDER = 200
#: The forms of placeholders that the published schema excludes. `is_placeholder` knows more.
SCHEMA_PLACEHOLDERS = ("[deleted]", "[removed]")


def clean(title: str, body: str) -> str:
    """Return the text to classify: HTML-unescaped title, a blank line, HTML-unescaped body.

    Returns only the title if the body is missing, removed or deleted, and only the body if there
    is no title. A post has the same text whether its source escapes HTML or not.
    """
    title = clean_title(title)
    body = clean_body(body)
    if title and body:
        return f"{title}\n\n{body}"
    return title or body


def clean_title(title: str) -> str:
    """Return the HTML-unescaped title, without white space around it; "" if it was removed or
    deleted.
    """
    if is_placeholder(title):
        return ""
    return _unescape(title).strip()


def clean_body(body: str) -> str:
    """Return the HTML-unescaped body, without white space around it; "" if it was removed or
    deleted.
    """
    if is_placeholder(body):
        return ""
    return _unescape(body).strip()


def is_placeholder(text: str) -> bool:
    """Return whether a text stands in place of a removed or deleted one."""
    words = text.strip()
    if not words.startswith("[") or len(words) > MAX_PLACEHOLDER:
        return False
    words = POLICY_LINK.sub("content policy", words.lower())
    inner = words.removeprefix("[").removesuffix("]").strip()
    return f"[{inner}]" in PLACEHOLDERS and words.endswith("]")


def _unescape(text: str) -> str:
    """Reverse HTML escaping, also if it was applied repeatedly.

    Escaping writes a semicolon behind each entity. Browsers also read some without: in texts that
    were never escaped, they are parts of addresses and programs (`?id=1&region=eu`).
    """
    for _ in range(MAX_ESCAPING):
        plain = ENTITY.sub(_character, text)
        if plain == text:
            break
        text = plain
    return text


def _character(entity: re.Match[str]) -> str:
    """Return what an entity stands for; itself if its name is unknown."""
    text = entity[0]
    name = text[1:]
    if name.startswith("#") or name in entities.html5:
        return html.unescape(text)
    return text


def _normalize_text(value: object) -> object:
    """Normalize text: None becomes "", a UUID or a time its text, and lone surrogates, valid in
    JSON, are replaced.
    """
    if value is None:
        return ""
    if isinstance(value, UUID | date | time_of_day):  # as Celery's JSON can hold them
        return as_text(value)
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode("utf-8", "replace").decode()


def as_text(value: object) -> str:
    """Return the text of a value of the types that Celery's JSON has in addition to JSON's own.

    Raises TypeError for other types.
    """
    if isinstance(value, UUID | Decimal):
        return str(value)
    if isinstance(value, date | time_of_day):
        return value.isoformat()
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} is not a type of Celery's JSON")


def id_text(value: object) -> str:
    """Return the text of a post's id as it was sent, which may be invalid, shortened to the
    maximum length.
    """
    try:
        return as_text(value)[:MAX_ID]
    except TypeError:
        return str(value)[:MAX_ID]


def _as_json_object(value: object, validate: Callable[[object], Any]) -> Any:
    """Validate a JSON object.

    If it is not plain JSON, replace values of Celery's further types by their texts.
    """
    try:
        return validate(value)
    except ValidationError:
        try:
            plain = _without_types(value)
        except (TypeError, RecursionError):
            plain = value
        return validate(plain)


def _without_types(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_types(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_types(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return as_text(value)


def is_missing(value: object) -> bool:
    """Return True for None, NaN, and pandas' NaT and NA. Without this check, a missing text would
    become "nan".
    """
    # The common cases first: most of a post's values are looked at.
    if type(value) in _PRESENT:
        return False
    if type(value) is float:
        return value != value  # noqa: PLR0124 - only NaN differs from itself
    if value is None or type(value).__name__ in ("NaTType", "NAType"):
        return True
    if isinstance(value, Decimal):
        return value.is_nan()
    is_number = isinstance(value, Real)
    return is_number and value != value  # noqa: PLR0124


#: Types without a missing value.
_PRESENT = frozenset({str, int, bool, dict, list})


def as_seconds(value: object) -> object:
    """Convert a datetime, UTC if it has no zone, or a date to seconds since 1970.

    Return other values unchanged.
    """
    if isinstance(value, datetime):
        return in_utc(value)
    if isinstance(value, date):
        midnight = datetime(
            value.year,
            value.month,
            value.day,
            tzinfo=UTC,
        )
        return in_utc(midnight)
    return value


def in_utc(date: datetime) -> float:
    """Return seconds since 1970; UTC if the date has no zone."""
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return date.timestamp()


#: Place this last in an annotation. pydantic runs before-validators right to left, so limits apply
#: to repaired text.
Repaired = BeforeValidator(_normalize_text)


def _parse_kind(value: object) -> object:
    """Return "comment", or None for any other value: earlier messages could have a field `kind` of
    their own, which was ignored.
    """
    if value == COMMENT_KIND:
        return value
    return None


def _check_run(run: str) -> str:
    if errors.UNPRINTABLE_CHARACTERS.search(run):
        raise ValueError("unprintable characters are not allowed in the name of a run")
    return run


#: Name of a run: one enqueued file, or any other set of posts that its sender names.
Run = Annotated[
    str,
    StringConstraints(
        min_length=1,
        max_length=MAX_RUN,
        strip_whitespace=True,
    ),
    AfterValidator(_check_run),
    Repaired,
]
#: Seconds since 1970, UTC, up to the year 9999.
UnixTime = Annotated[
    float, Field(ge=0, le=253_402_300_799), BeforeValidator(as_seconds)
]
#: Fields of a post with such times.
TIME_FIELDS = frozenset({"created_utc", "edited_utc"})
#: Id of a post.
PostId = Annotated[
    str,
    StringConstraints(
        min_length=1,
        max_length=MAX_ID,
        strip_whitespace=True,
    ),
    Repaired,
]
#: "comment", or None for a post.
Kind = Annotated[
    Literal["comment"] | None,
    BeforeValidator(_parse_kind, json_schema_input_type=Any),
]
#: An object of JSON; values of the further types of Celery's JSON become text.
JsonObject = Annotated[dict[str, JsonValue], WrapValidator(_as_json_object)]


class Post(BaseModel):
    """One post.

    Requires `id` and a title or a body. Unknown fields are dropped, so authors are never stored.
    """

    model_config = ConfigDict(
        extra="ignore",
        frozen=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        json_schema_extra={
            "anyOf": [
                {
                    "required": ["title"],
                    "properties": {
                        "title": {
                            "minLength": 1,
                            "not": {"enum": [*SCHEMA_PLACEHOLDERS]},
                        }
                    },
                },
                {
                    "required": ["body"],
                    "properties": {
                        "body": {
                            "minLength": 1,
                            "not": {"enum": [*SCHEMA_PLACEHOLDERS]},
                        }
                    },
                },
            ]
        },
    )

    id: PostId
    topic: Annotated[str, StringConstraints(max_length=200), Repaired] | None = None
    title: Annotated[str, StringConstraints(max_length=MAX_TITLE), Repaired] = ""
    body: Annotated[str, StringConstraints(max_length=MAX_BODY), Repaired] = ""
    subreddit: Annotated[str, StringConstraints(max_length=100), Repaired] | None = None
    score: Annotated[int, Field(ge=-(2**53), le=2**53)] | None = None
    #: URL that the post links to.
    url: Annotated[str, StringConstraints(max_length=4096), Repaired] | None = None
    #: URL of the post itself.
    permalink: Annotated[str, StringConstraints(max_length=4096), Repaired] | None = (
        None
    )
    created_utc: UnixTime | None = None
    #: Time of the last edit of the post's text.
    edited_utc: UnixTime | None = None
    #: True if the post is pinned to the top of its subreddit.
    stickied: bool = False
    nsfw: bool = False
    spoiler: bool = False
    extra: JsonObject | None = None
    #: Run that the post belongs to. Ids are unique within their run.
    run: Run | None = None
    #: "comment" for a comment, whose title is that of its post, if any. Any other value is a post.
    kind: Kind = None

    @model_validator(mode="before")
    @classmethod
    def _drop_missing(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        if not any(map(is_missing, raw.values())):
            return raw
        return {name: value for name, value in raw.items() if not is_missing(value)}

    @field_validator("extra")
    @classmethod
    def _extra_is_small(
        cls, value: dict[str, JsonValue] | None
    ) -> dict[str, JsonValue] | None:
        if value is None:
            return None
        try:
            # The extra brackets simulate the nesting depth at which the value is stored.
            written = to_json([[[[value]]]])
            from_json(written)
        except ValueError:
            raise ValueError(
                "must be UTF-8 JSON: it contains a lone surrogate or is nested too deeply"
            ) from None
        size = len(written) - len("[[[[]]]]")
        if size > MAX_EXTRA_BYTES:
            raise ValueError(
                f"{size} bytes of JSON; at most {MAX_EXTRA_BYTES} are allowed"
            )
        return value

    @model_validator(mode="after")
    def _has_text(self) -> "Post":
        text = clean(self.title, self.body)
        if not text:
            raise PostRefused(self.id, "", "title or body must contain text")
        self.__dict__["text"] = (
            text  # where `cached_property` keeps it, but without its lock
        )
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
            field, reason = errors.first_problem(error)
            raw_id = raw.get("id")
            has_id = raw_id and not is_missing(raw_id)
            post_id = id_text(raw_id) if has_id else None
            raise PostRefused(post_id, field, reason) from None


def _parse_labels(value: object) -> object:
    """Return labels as a mapping to their descriptions.

    A label without a description is its own description.

    Splits a string on commas, like transformers' zero-shot pipeline. List items are not split.
    """
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
        value = [part for part in parts if part]
    if not isinstance(value, dict | list | tuple):
        # Do not quote the value: it may be a post in the wrong field, and reasons appear in logs
        # and in Flower.
        kind = type(value).__name__
        raise ValueError(
            f"expected a list, names separated by commas, or an object of descriptions; got {kind}"
        )
    descriptions: dict[str, object] = {}
    for label in islice(value, MAX_LABELS + 1):
        if not isinstance(label, str):
            raise ValueError(f"each label must be text, not {type(label).__name__}")
        name = label.strip()
        if not name:
            raise ValueError(EMPTY_LABEL)
        if name in descriptions:
            quoted = errors.truncate(name)
            raise ValueError(f"the label {quoted!r} is named twice")
        descriptions[name] = value[label] if isinstance(value, dict) else (name,)
    return descriptions


def _as_tuple(value: object) -> object:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple):
        raise ValueError("expected a description, or a list of them")
    return value


def _check_label_count(
    labels: dict[str, tuple[str, ...]],
) -> dict[str, tuple[str, ...]]:
    if not 1 <= len(labels) <= MAX_LABELS:
        raise ValueError(f"name at least one label, and at most {MAX_LABELS}")
    count = sum(map(len, labels.values()))
    if count > MAX_ALL_DESCRIPTIONS:
        raise ValueError(
            f"{count} descriptions; at most {MAX_ALL_DESCRIPTIONS} for all labels together"
        )
    return labels


def _check_placeholder(template: str) -> str:
    if "{}" not in template:
        raise ValueError(
            f"must contain {{}} for the label, as in 'This is about {{}}.', not "
            f"{errors.truncate(template)!r}"
        )
    return template


def _parse_none(value: object) -> object:
    """Return true, false, None or a threshold. Raises ValueError for anything else."""
    if value is None or isinstance(value, bool):
        return value
    threshold = math.nan
    if isinstance(value, int | float | str):
        with suppress(ValueError):
            threshold = float(value)
    if not 0 <= threshold <= 1:
        raise ValueError(
            "must be a number from 0 to 1, true for the model's default, or false, not "
            f"{errors.truncate(repr(value))}"
        )
    return threshold


def _check_version(version: int) -> int:
    if version > MESSAGE_VERSION:
        raise ValueError(
            f"version {version} is not supported; this worker reads versions up to "
            f"{MESSAGE_VERSION}. Update the worker, or send version {MESSAGE_VERSION}"
        )
    return version


Label = Annotated[
    str,
    StringConstraints(
        min_length=1,
        max_length=200,
        strip_whitespace=True,
    ),
    Repaired,
]
Description = Annotated[
    str,
    StringConstraints(
        min_length=1,
        max_length=500,
        strip_whitespace=True,
    ),
    Repaired,
]
Descriptions = Annotated[
    tuple[Description, ...],
    Field(min_length=1, max_length=MAX_DESCRIPTIONS),
    BeforeValidator(_as_tuple),
]
#: Labels as senders write them: names separated by commas, a list of names, or the descriptions of
#: each name.
_LabelsAsSent = (
    Annotated[str, Field(pattern="[^, ]")]
    | Annotated[list[Label], Field(min_length=1, max_length=MAX_LABELS)]
    | Annotated[
        dict[
            Label,
            Description
            | Annotated[
                list[Description], Field(min_length=1, max_length=MAX_DESCRIPTIONS)
            ],
        ],
        Field(min_length=1, max_length=MAX_LABELS),
    ]
)
#: Label -> the texts that replace `{}` in the template: the label itself, or one or more
#: descriptions.
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
_Probability = Annotated[float, Field(ge=0, le=1)]
#: Score below which a post has no label. True selects the model's default, false gives each post a
#: label.
NoneThreshold = Annotated[
    bool | float | None,
    BeforeValidator(_parse_none, json_schema_input_type=bool | _Probability | None),
]
#: Message version. Never serialized: it controls how options are read and is not itself an option.
Version = Annotated[
    int,
    Field(
        ge=1,
        exclude=True,
        json_schema_extra={"maximum": MESSAGE_VERSION},
    ),
    AfterValidator(_check_version),
]


class ClassifyOptions(BaseModel):
    """Options for classifying the posts of one message. None selects the worker's setting."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Message version; 1 if absent. Newer versions than the worker's are rejected before other
    #: options are validated.
    version: Version = 1
    labels: Labels | None = None
    template: Template | None = None
    multi_label: bool = False
    #: Fail the message if any post fails. Results of the valid posts are stored anyway.
    strict: bool = False
    #: Number of scores in the reply, best first. Stored results contain all scores.
    top_k: Annotated[int, Field(ge=1)] | None = None
    #: Score below which a post has no label, because it fits none; true selects the model's
    #: default.
    none: NoneThreshold = None

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> "ClassifyOptions":
        """Parse a message's options. Raises RequestRefused with the option and the reason."""
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            option, reason = errors.first_problem(error)
            raise RequestRefused(f"{option}: {reason}") from None

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `feedmill.classify` for these options, without
        defaults.
        """
        return self.model_dump(mode="json", exclude_defaults=True)


#: Least score of the labels that apply, where each label is scored by itself, unless the model has
#: a threshold of its own.
MIN_LABELS_SCORE = 0.5


def labels_above(scores: Mapping[str, float], min_score: float) -> list[str]:
    """Return the labels with at least this score, in the order of the scores."""
    labels: list[str] = []
    for label, score in scores.items():
        if score >= min_score:
            labels.append(label)
    return labels


def applying_labels(
    label: str | None, scores: Mapping[str, float], threshold: float | None
) -> list[str]:
    """Return the labels that apply to a post, best first.

    threshold: score from which a label applies; None if only `label` does.
    """
    if label is None:
        return []
    if threshold is None:
        return [label]
    return labels_above(scores, threshold)


def _is_absent(value: object) -> bool:
    return value is None


class Classification(BaseModel):
    """The classification of one post: label and scores, with the model, worker and time that
    produced them.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    #: The best label; None if the post fits none, which the option `none` allows, or if it is in a
    #: language that the model was not made for.
    label: str | None
    #: Score of every label, best first. With `none`, those of an embedding model sum to less than
    #: 1: the rest is the probability that none of them fits.
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
    #: Language of the post, as an ISO 639 code, such as en. Absent if the worker detects none
    #: (FEEDMILL_LANGUAGES), or if it is uncertain.
    language: str | None = Field(default=None, exclude_if=_is_absent)
    #: Score from which a label applies, where each label is scored by itself, as with
    #: `multi_label`. Absent where only the best label applies.
    labels_threshold: float | None = Field(default=None, exclude_if=_is_absent)

    @property
    def labels(self) -> list[str]:
        """The labels that apply, best first: with `multi_label`, any number of them."""
        return applying_labels(self.label, self.scores, self.labels_threshold)

    @property
    def best_label(self) -> str:
        """The label with the highest score, also if the post has no label."""
        if self.label is not None:
            return self.label
        return next(iter(self.scores))

    @property
    def label_score(self) -> float:
        """The score of the best label."""
        return self.scores[self.best_label]


def further_fields(classification: Classification) -> dict[str, Any]:
    """Return what JSON for readers has of some results only: the language, the labels that apply
    if there may be several and, without a label, the best one and its score.
    """
    fields: dict[str, Any] = {}
    if classification.label is None:
        fields["best_label"] = classification.best_label
        fields["label_score"] = classification.label_score
    if classification.language is not None:
        fields["language"] = classification.language
    if classification.labels_threshold is not None:
        fields["labels"] = classification.labels
    return fields


#: Truncated types for values from senders and libraries, because each post of a message gets a
#: copy.
Id = Annotated[str, AfterValidator(lambda text: text[:MAX_ID]), Repaired]
Reason = Annotated[
    str,
    AfterValidator(lambda text: errors.truncate(text, errors.LONGEST_REASON)),
    Repaired,
]


class PostError(BaseModel):
    """The reason why one post has no classification."""

    model_config = ConfigDict(frozen=True)

    id: Id | None
    error: Reason


#: One outcome per post of a message, in the message's order.
Outcome = Classification | PostError
_OUTCOMES: TypeAdapter[list[Outcome]] = TypeAdapter(list[Outcome])


def parse_outcomes(raw: object) -> list[Classification | PostError]:
    """Return the outcomes in the Celery result of `feedmill.classify`: one per post, in order.

    Unknown fields, of later versions, are dropped. Raises UserError for what is no result.
    """
    try:
        return _OUTCOMES.validate_python(raw)
    except ValidationError as error:
        place, reason = errors.first_problem(error)
        raise UserError(
            f"These are no outcomes of feedmill.classify ({place}: {reason}). Pass the value of "
            "the task's result."
        ) from None


class DeadLetter(BaseModel):
    """A post that could not be classified, with everything needed to diagnose the failure and to
    retry.

    A message whose posts could not be read is a dead letter with `payload` instead of `post`.
    """

    model_config = ConfigDict(frozen=True)

    id: Id | None
    reason: Reason
    #: The post's fields as sent, as JSON; None if longer than MAX_DEAD_POST_BYTES.
    post: str | None
    #: The message's other arguments (labels, template, …) as JSON; None if longer than
    #: MAX_DEAD_OPTIONS_BYTES.
    options: str | None
    #: Id of the Celery message; None if there was none.
    message: Id | None
    worker: str
    #: Seconds since 1970, UTC.
    failed_at: float
    #: Files, lines and types of the error, without any post's text; None if no exception was
    #: raised.
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
    """Return a 128-bit hash of the parts, in hex.

    Parts are framed: ("ab", "c") and ("a", "bc") differ.
    """
    quoted = [
        "null" if part is None else encode_basestring_ascii(part) for part in parts
    ]
    framed = f"[{','.join(quoted)}]"
    return blake2b(framed.encode("ascii"), digest_size=16).hexdigest()


def fingerprint(post: Post, recipe: str) -> str:
    """Return the identity of a classification: a digest of the post, its text and the recipe.

    recipe: digest of model, weights, label set, template, multi-label flag and truncation length.
    """
    cleaning = str(CLEANING_VERSION)
    scope = scope_of(post)
    return digest(post.id, post.text, cleaning, recipe, *scope)


def scope_of(post: Post) -> tuple[str, ...]:
    """Return the run within which the post's id is unique, as parts of a digest; none without a
    run.
    """
    if post.run is None:
        return ()
    return (post.run,)


def parse_run(name: str) -> str:
    """Return the name of a run in the form of `Post.run`.

    Raises UserError, also for values other than text.
    """
    if not isinstance(name, str):
        quoted = errors.truncate(repr(name))
        raise UserError(f"The name of a run must be text, not {quoted}.")
    try:
        run: str = _RUN.validate_python(name)
    except ValidationError as error:
        quoted = errors.printable(errors.truncate(name))
        _, reason = errors.first_problem(error)
        raise UserError(
            f"'{quoted}' is not the name of a run: {reason}. Use 1 to {MAX_RUN} printable "
            "characters."
        ) from None
    return run


def parse_id(value: object) -> str | None:
    """Return an id of a post as `Post.id` has it, such as "7" for 7; None for a value that is not
    an id.
    """
    try:
        return str(_ID.validate_python(value))
    except ValidationError:
        return None


_ID: TypeAdapter[str] = TypeAdapter(
    PostId, config=ConfigDict(coerce_numbers_to_str=True)
)


def run_of(raw: object) -> str | None:
    """Return the run of a raw post; None if it has none, or an invalid one."""
    run = raw.get("run") if isinstance(raw, dict) else None
    if run is None:
        return None
    try:
        return str(_RUN.validate_python(run))
    except ValidationError:
        return None


_RUN: TypeAdapter[str] = TypeAdapter(Run, config=ConfigDict(coerce_numbers_to_str=True))


_POSTS: TypeAdapter[list[Post]] = TypeAdapter(list[Post])


def parse_posts(raw: Sequence[object]) -> Sequence[Post | PostError]:
    """Parse each post, in order. A post that is refused becomes a PostError with the reason."""
    if all(type(item) is dict for item in raw):
        # One validation of all posts takes two thirds of the time of one per post, but its error
        # does not say enough.
        try:
            return _POSTS.validate_python(raw)
        except (ValidationError, PostRefused):
            pass  # one post or more: each is parsed below

    def parse(item: object) -> Post | PostError:
        try:
            return Post.parse(item)
        except PostRefused as refused:
            return PostError(
                id=refused.post_id,
                error=str(refused),
            )

    return [parse(item) for item in raw]
