"""What travels: a post, the options of a request, and one outcome per post.

The models here are the public contract: other applications send `feedmill.classify` with these fields as
JSON and read these outcomes. They say what is valid; they know nothing of Celery, Redis or the model.
"""

import html
from collections.abc import Iterable
from functools import cached_property
from hashlib import blake2b
from json.encoder import encode_basestring_ascii
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import from_json, to_json

from shared.errors import LONGEST_REASON, PostRefused, RequestRefused, cut, first_problem

#: Raised only when an older worker would read a message wrongly; a worker reads this version and all below it. Within a
#: version only optional fields are added. Docs: docs/messages.md; schema: shared/schema/.
MESSAGE_VERSION = 1
#: Raised whenever `clean` gives another text for the same post: results of another version are not reused.
CLEANING_VERSION = 1
#: Posts in one message, at most: bounds what one message can hold a worker up with.
MAX_POSTS_PER_MESSAGE = 1000
#: Characters. Reddit allows 300 in a title and 40,000 in a body; other sources get some room.
MAX_TITLE, MAX_BODY = 4_000, 100_000
#: Bytes of JSON that another application may attach to a post.
MAX_EXTRA_BYTES = 4096
#: Bytes of JSON that are kept with a dead letter, at most: of the post (nearly any valid one is shorter), of its
#: options; and of all dead letters of one message together, whole. Characters of a traceback, and of an id.
MAX_DEAD_POST_BYTES, MAX_DEAD_OPTIONS_BYTES, MAX_DEAD_MESSAGE_BYTES = 2**19, 2**14, 2**23
MAX_DEAD_TRACEBACK = 8_000
MAX_ID = 128
#: Labels that one message may choose from, at most; descriptions of one label, and of all together.
MAX_LABELS = 256
MAX_DESCRIPTIONS = 16
MAX_ALL_DESCRIPTIONS = 512
#: What Reddit puts in place of a body that is gone.
GONE = frozenset({"[removed]", "[deleted]"})


def clean(title: str, body: str) -> str:
    """The text that is classified: unescaped title, a blank line, unescaped body.

    The title alone when the body is missing or gone; the body alone when there is no title.
    """
    title = html.unescape(title).strip()
    body = "" if body.strip() in GONE else html.unescape(body).strip()
    return f"{title}\n\n{body}" if title and body else title or body


def _text(value: object) -> object:
    """None means no text; lone surrogates, which JSON can carry and UTF-8 cannot, are replaced."""
    if value is None:
        return ""
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode("utf-8", "replace").decode()


#: Last in an annotation, since pydantic runs validators from the right: the limits then see repaired text.
Repaired = BeforeValidator(_text)


#: Seconds since 1970, UTC, until the year 9999.
UnixTime = Annotated[float, Field(ge=0, le=253_402_300_799)]


class Post(BaseModel):
    """One post. Only `id` and a title or a body are required. Authors are never kept: unknown fields drop."""

    model_config = ConfigDict(extra="ignore", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False)

    id: Annotated[str, StringConstraints(min_length=1, max_length=MAX_ID, strip_whitespace=True), Repaired]
    topic: Annotated[str, StringConstraints(max_length=200), Repaired] | None = None
    title: Annotated[str, StringConstraints(max_length=MAX_TITLE), Repaired] = ""
    body: Annotated[str, StringConstraints(max_length=MAX_BODY), Repaired] = ""
    subreddit: Annotated[str, StringConstraints(max_length=100), Repaired] | None = None
    score: Annotated[int, Field(ge=-(2**53), le=2**53)] | None = None
    #: What the post links to.
    url: Annotated[str, StringConstraints(max_length=4096), Repaired] | None = None
    #: Where the post itself is.
    permalink: Annotated[str, StringConstraints(max_length=4096), Repaired] | None = None
    created_utc: UnixTime | None = None
    #: When its text was last changed.
    edited_utc: UnixTime | None = None
    #: Pinned to the top of its subreddit.
    stickied: bool = False
    nsfw: bool = False
    spoiler: bool = False
    extra: dict[str, JsonValue] | None = None

    @field_validator("extra")
    @classmethod
    def _extra_is_small(cls, value: dict[str, JsonValue] | None) -> dict[str, JsonValue] | None:
        if value is None:
            return None
        try:
            # Brackets around it stand for what it is stored within: there it lies deeper.
            written = to_json([[[[value]]]])
            from_json(written)
        except ValueError:  # a lone surrogate, or nested too deeply: it could not be stored, or not be read again
            raise ValueError("cannot be written as JSON in UTF-8 and read again") from None
        size = len(written) - len("[[[[]]]]")
        if size > MAX_EXTRA_BYTES:
            raise ValueError(f"{size} bytes of JSON; at most {MAX_EXTRA_BYTES} are kept")
        return value

    @model_validator(mode="after")
    def _has_text(self) -> "Post":
        if not self.text:
            raise PostRefused(self.id, "", "neither title nor body holds any text")
        return self

    @cached_property
    def text(self) -> str:
        """What is classified; see `clean`."""
        return clean(self.title, self.body)

    @classmethod
    def parse(cls, raw: object) -> "Post":
        """Read one post. Raises PostRefused with the field and the reason."""
        if not isinstance(raw, dict):
            raise PostRefused(None, "", "a post must be a JSON object")
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            post_id = raw.get("id")
            raise PostRefused(str(post_id)[:MAX_ID] if post_id else None, *first_problem(error)) from None


def _described(value: object) -> object:
    """Labels with their descriptions, from a mapping, or from names that describe themselves.

    A string is split on commas, as in transformers' zero-shot pipeline; a list is left as it is.
    """
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, dict):
        return value
    if not isinstance(value, list | tuple):
        # Posts that were sent in the labels' place are not quoted: reasons are logged, and shown in Flower.
        kind = type(value).__name__
        raise ValueError(f"expected a list, names separated by commas, or an object of descriptions; got {kind}")
    described: dict[str, tuple[str]] = {}
    for label in value[: MAX_LABELS + 1]:
        name = label.strip() if isinstance(label, str) else label
        if not isinstance(name, str):
            raise ValueError(f"expected names, got {type(label).__name__}")
        if name in described:
            raise ValueError(f"the label {cut(name)!r} is named twice")
        described[name] = (name,)
    return described


def _one_or_more(value: object) -> object:
    if not isinstance(value, str | list | tuple):
        raise ValueError("expected a description, or a list of them")
    return (value,) if isinstance(value, str) else value


def _some(labels: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    if not 1 <= len(labels) <= MAX_LABELS:
        raise ValueError(f"name at least one label, and at most {MAX_LABELS}")
    if (described := sum(map(len, labels.values()))) > MAX_ALL_DESCRIPTIONS:
        raise ValueError(f"{described} descriptions; at most {MAX_ALL_DESCRIPTIONS} for all labels together")
    return labels


def _has_a_place(template: str) -> str:
    if "{}" not in template:
        raise ValueError(f"no {{}} in {cut(template)!r}; it marks where the label goes, as in 'This is about {{}}.'")
    return template


def _is_read_here(version: int) -> int:
    if version > MESSAGE_VERSION:
        raise ValueError(
            f"the message is of version {version}, and this worker reads none above {MESSAGE_VERSION}; "
            f"update the worker, or send version {MESSAGE_VERSION}"
        )
    return version


Label = Annotated[str, StringConstraints(min_length=1, max_length=200, strip_whitespace=True), Repaired]
Description = Annotated[str, StringConstraints(min_length=1, max_length=500, strip_whitespace=True), Repaired]
Descriptions = Annotated[
    tuple[Description, ...], Field(min_length=1, max_length=MAX_DESCRIPTIONS), BeforeValidator(_one_or_more)
]
#: Label -> what stands for it in the template: the label itself, a description, or several.
Labels = Annotated[dict[Label, Descriptions], AfterValidator(_some), BeforeValidator(_described)]
#: The sentence that a label is put into.
Template = Annotated[str, StringConstraints(max_length=500), AfterValidator(_has_a_place), Repaired]
#: What a message was written for. Never dumped: it says how to read the options, and is none of them.
Version = Annotated[int, Field(ge=1, exclude=True), AfterValidator(_is_read_here)]


class ClassifyOptions(BaseModel):
    """How the posts of one message are to be classified; None means what the worker is set to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Of the message; absent means 1. A newer one is refused before anything else that may be wrong with it.
    version: Version = 1
    labels: Labels | None = None
    template: Template | None = None
    multi_label: bool = False
    #: The message fails when any of its posts does; the good ones are stored all the same.
    strict: bool = False
    #: How many of the scores the reply carries, the best first; what is stored has all of them.
    top_k: Annotated[int, Field(ge=1)] | None = None

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> "ClassifyOptions":
        """Read a message's options. Raises RequestRefused with the option and the reason."""
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            option, reason = first_problem(error)
            raise RequestRefused(f"{option}: {reason}") from None

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `feedmill.classify` that ask for this; defaults are left out."""
        return self.model_dump(mode="json", exclude_defaults=True)


class Classification(BaseModel):
    """What one post was found to be, by which model, where and when."""

    model_config = ConfigDict(frozen=True)

    id: str
    label: str
    #: Every label's score, best first.
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
    #: Seconds from sending to the result; None where the sender gave no `sent_at` header.
    queued_seconds: float | None


#: Cuts what senders and libraries may have made long: it is copied for each post of a message.
Id = Annotated[str, AfterValidator(lambda text: text[:MAX_ID]), Repaired]
Reason = Annotated[str, AfterValidator(lambda text: cut(text, LONGEST_REASON)), Repaired]


class PostError(BaseModel):
    """Why one post has no classification."""

    model_config = ConfigDict(frozen=True)

    id: Id | None
    error: Reason

    @classmethod
    def of(cls, refused: PostRefused) -> "PostError":
        return cls(id=refused.post_id, error=str(refused))


#: One per post of a message, in the message's order.
Outcome = Classification | PostError


class DeadLetter(BaseModel):
    """A post that could not be classified, with all that it takes to find out why, and to try again.

    Or a message in which no posts could be made out: then it has a `payload`, and no `post`.
    """

    model_config = ConfigDict(frozen=True)

    id: Id | None
    reason: Reason
    #: The post's fields as they were sent, in JSON; None where that is too long (MAX_DEAD_POST_BYTES and below).
    post: str | None
    #: The message's other arguments (labels, template, ...), likewise.
    options: str | None
    #: Id of the Celery message; None where there was none.
    message: Id | None
    worker: str
    #: Seconds since 1970, UTC.
    failed_at: float
    #: Where the error came from: files, lines and kinds of errors, no post's words; None where nothing was raised.
    traceback: Annotated[str, Repaired] | None = None
    #: How many times it was tried: deliveries of its message, where nothing else counts.
    attempts: int = 1
    #: The queue that the message came out of: there it is sent again. None where there was none, or it is not known.
    queue: Annotated[str, Repaired] | None = None
    #: Of a message in which no posts could be made out: its body as it came, cut at MAX_DEAD_POST_BYTES.
    payload: Annotated[str, Repaired] | None = None


def digest(*parts: str | None) -> str:
    """128 bits over the parts, in hex. Parts are framed, so that ("ab", "c") differs from ("a", "bc")."""
    framed = ",".join(["null" if part is None else encode_basestring_ascii(part) for part in parts])
    return blake2b(f"[{framed}]".encode(), digest_size=16).hexdigest()


def fingerprint(post: Post, recipe: str) -> str:
    """What makes two classifications the same: the post, its text, and the recipe.

    recipe: digest of model, weights, label set, template, multi-label flag and truncation.
    """
    return digest(post.id, post.text, str(CLEANING_VERSION), recipe)


def parse_posts(raw: Iterable[object]) -> list[Post | PostError]:
    """Each post, or why it was refused, in order."""

    def parse(item: object) -> Post | PostError:
        try:
            return Post.parse(item)
        except PostRefused as refused:
            return PostError.of(refused)

    return [parse(item) for item in raw]
