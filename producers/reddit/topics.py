"""The topics that are read, and the subreddits of each: a TOML file; topics.toml beside this one is the default."""

import re
import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from shared.errors import SettingsError, first_problem

DEFAULT = Path(__file__).with_name("topics.toml")


def _bare(name: object) -> object:
    return re.sub(r"^/?r/", "", name) if isinstance(name, str) else name


Subreddit = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:]{1,20}$"), BeforeValidator(_bare)]
Topic = Annotated[str, StringConstraints(min_length=1, max_length=200, strip_whitespace=True)]


class Topics(BaseModel):
    """What is read.

    active: subreddits of a topic that are read at a time; those after them stand in when one cannot be read.
    topics: name -> its subreddits, best first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    active: Annotated[int, Field(ge=1, le=25)] = 3
    topics: Annotated[
        dict[Topic, Annotated[tuple[Subreddit, ...], Field(min_length=1, max_length=100)]],
        Field(min_length=1, max_length=200),
    ]

    @model_validator(mode="after")
    def _each_once(self) -> "Topics":
        found: dict[str, str] = {}
        for topic, names in self.topics.items():
            for name in names:
                if name.lower() in found:
                    raise ValueError(f"r/{name} stands under {found[name.lower()]!r} and {topic!r}; once is enough")
                found[name.lower()] = topic
        return self

    @property
    def subreddits(self) -> list[str]:
        """The names of all, those that stand in included."""
        return [name for names in self.topics.values() for name in names]

    @property
    def topic_of(self) -> dict[str, str]:
        """The topic of each subreddit, by its name in lower case."""
        return {name.lower(): topic for topic, names in self.topics.items() for name in names}


def read(path: Path | None) -> Topics:
    """The topics of a file; None is the default. Raises SettingsError."""
    path = path or DEFAULT
    try:
        return Topics.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise SettingsError(f"The topics in {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}.") from None
    except ValidationError as error:
        field, reason = first_problem(error)
        raise SettingsError(
            f"{path}: {field}: {reason}. `feedmill ingest topics` prints a file to start from."
        ) from None
