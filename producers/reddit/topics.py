"""Topics, from a TOML file (default: topics.toml in this folder), and the subreddits that are read
for them.

The first subreddits of a topic that can be read and are active are read. A subreddit that cannot
be read is replaced by the next in the list; this is logged and stored in Redis. The daily check
tries the original again.
"""

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from redis import Redis

from feedmill.shared.errors import SettingsError, first_problem
from feedmill.shared.keys import REDDIT_SUBSTITUTES
from feedmill.shared.label_files import decoded

DEFAULT_TOPICS_FILE = Path(__file__).with_name("topics.toml")
#: Reason for not reading a subreddit without a new post for a month.
ASLEEP = "asleep"


def _strip_prefix(name: object) -> object:
    if isinstance(name, str):
        return re.sub(r"^/?r/", "", name)
    return name


Subreddit = Annotated[
    str,
    # A profile's name is u_ and the user's name.
    StringConstraints(
        pattern=r"^([A-Za-z0-9][A-Za-z0-9_.:]{1,20}|u_[A-Za-z0-9_-]{3,20})$"
    ),
    BeforeValidator(_strip_prefix),
]
Topic = Annotated[
    str,
    StringConstraints(
        min_length=1,
        max_length=200,
        strip_whitespace=True,
    ),
]


class Topics(BaseModel):
    """The contents of a topics file.

    active: subreddits read per topic at a time; the following ones are substitutes.
    topics: name -> subreddits, best first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    active: Annotated[int, Field(ge=1, le=25)] = 3
    topics: Annotated[
        dict[
            Topic, Annotated[tuple[Subreddit, ...], Field(min_length=1, max_length=100)]
        ],
        Field(min_length=1, max_length=200),
    ]

    @model_validator(mode="after")
    def _reject_duplicates(self) -> "Topics":
        topic_of: dict[str, str] = {}
        for topic, names in self.topics.items():
            for name in names:
                key = name.lower()
                if key in topic_of:
                    raise ValueError(
                        f"r/{name} is listed under {topic_of[key]!r} and {topic!r}; list "
                        "each subreddit once"
                    )
                topic_of[key] = topic
        return self

    @property
    def topic_of(self) -> dict[str, str]:
        """Return the topic by the subreddit's name in lower case."""
        topic_of: dict[str, str] = {}
        for topic, names in self.topics.items():
            for name in names:
                topic_of[name.lower()] = topic
        return topic_of


def read(path: Path | None) -> Topics:
    """Read a topics file; None reads the default. Raises SettingsError."""
    path = path or DEFAULT_TOPICS_FILE
    try:
        text = decoded(path.read_bytes())
        return Topics.model_validate(tomllib.loads(text))
    except OSError as error:
        reason = error.strerror
    except ValidationError as error:
        reason = ": ".join(first_problem(error))
    except ValueError as error:
        reason = f"it is not valid TOML ({error})"
    raise SettingsError(
        f"Cannot read the topics file {path}: {reason}. Run `feedmill ingest topics` for a valid "
        "example."
    )


class ReplacedSubreddit(NamedTuple):
    """A subreddit that is not read, the reason, since when (seconds since 1970), and its
    substitute.
    """

    subreddit: str
    reason: str
    since: float
    by: str | None


def describe_replaced(topic: str, entry: ReplacedSubreddit) -> str:
    """Return in a sentence why a subreddit is not read, and which one is read instead."""
    instead = f"reading r/{entry.by} instead" if entry.by else "no substitute is left"
    return f"topic {topic}: not reading r/{entry.subreddit} ({entry.reason}); {instead}"


class Choice(NamedTuple):
    """A topic's subreddits to read, and those that are not read."""

    active: list[str]
    replaced: list[ReplacedSubreddit]


def choose(
    topics: Topics,
    topic: str,
    problem: Callable[[str], str],
    before: Mapping[str, ReplacedSubreddit],
    now: float,
) -> Choice:
    """Choose a topic's subreddits.

    problem: returns why a subreddit cannot be read, ASLEEP if it is inactive, or "". before: those
    that were not read.
    """
    names = topics.topics[topic]
    best = names[: topics.active]
    awake: list[str] = []
    reasons: dict[str, str] = {}
    for name in names:
        if len(awake) < topics.active:
            reason = problem(name)
            if reason:
                reasons[name] = reason
            else:
                awake.append(name)
    # Inactive subreddits are chosen last.
    asleep = [name for name, reason in reasons.items() if reason == ASLEEP]
    free_places = topics.active - len(awake)
    chosen = {*awake, *asleep[:free_places]}
    active = [name for name in names if name in chosen]
    substitutes = [name for name in active if name not in best]
    not_read: list[ReplacedSubreddit] = []
    for name, reason in reasons.items():
        if name in chosen:
            continue
        substitute = None
        if name in best and substitutes:
            substitute = substitutes.pop(0)
        since = now
        previous = before.get(name)
        if previous is not None and previous.reason == reason:
            since = previous.since
        entry = ReplacedSubreddit(
            subreddit=name,
            reason=reason,
            since=since,
            by=substitute,
        )
        not_read.append(entry)
    return Choice(active=active, replaced=not_read)


def replaced(redis: Redis) -> dict[str, list[ReplacedSubreddit]]:
    """Return the subreddits that are not read, by topic. Raises redis.exceptions.RedisError."""
    texts: Any = redis.hgetall(REDDIT_SUBSTITUTES)
    entries: dict[str, list[ReplacedSubreddit]] = {}
    for topic, text in texts.items():
        entries[topic] = [ReplacedSubreddit(*values) for values in json.loads(text)]
    return entries


def store_replaced(
    redis: Redis, topic: str, entries: Sequence[ReplacedSubreddit]
) -> None:
    """Store which of a topic's subreddits are not read. Raises redis.exceptions.RedisError."""
    redis.hset(REDDIT_SUBSTITUTES, topic, json.dumps(entries))
