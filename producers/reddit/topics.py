"""The topics and their subreddits, from a TOML file. Default: topics.toml in this folder."""

import re
import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from feedmill.shared.errors import SettingsError, first_problem

DEFAULT_TOPICS_FILE = Path(__file__).with_name("topics.toml")


def _strip_prefix(name: object) -> object:
    return re.sub(r"^/?r/", "", name) if isinstance(name, str) else name


Subreddit = Annotated[
    str,
    # A profile's name is u_ and the user's name.
    StringConstraints(pattern=r"^([A-Za-z0-9][A-Za-z0-9_.:]{1,20}|u_[A-Za-z0-9_-]{3,20})$"),
    BeforeValidator(_strip_prefix),
]
Topic = Annotated[str, StringConstraints(min_length=1, max_length=200, strip_whitespace=True)]


class Topics(BaseModel):
    """The contents of a topics file.

    active: subreddits read per topic at a time; the following ones are substitutes.
    topics: name -> subreddits, best first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    active: Annotated[int, Field(ge=1, le=25)] = 3
    topics: Annotated[
        dict[Topic, Annotated[tuple[Subreddit, ...], Field(min_length=1, max_length=100)]],
        Field(min_length=1, max_length=200),
    ]

    @model_validator(mode="after")
    def _reject_duplicates(self) -> "Topics":
        found: dict[str, str] = {}
        for topic, names in self.topics.items():
            for name in names:
                if name.lower() in found:
                    raise ValueError(
                        f"r/{name} is listed under {found[name.lower()]!r} and {topic!r}; list each subreddit once"
                    )
                found[name.lower()] = topic
        return self

    @property
    def subreddits(self) -> list[str]:
        """Return the names of all subreddits, substitutes included."""
        return [name for names in self.topics.values() for name in names]

    @property
    def topic_of(self) -> dict[str, str]:
        """Return the topic by the subreddit's name in lower case."""
        return {name.lower(): topic for topic, names in self.topics.items() for name in names}


def read(path: Path | None) -> Topics:
    """Read a topics file; None reads the default. Raises SettingsError."""
    path = path or DEFAULT_TOPICS_FILE
    try:
        return Topics.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        reason = error.strerror
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        reason = f"it is not valid TOML ({error})"
    except ValidationError as error:
        reason = ": ".join(first_problem(error))
    raise SettingsError(
        f"Cannot read the topics file {path}: {reason}. Run `feedmill ingest topics --template` for a valid example."
    )
