"""JSON Schema of the message format, for other applications: `request.json` and `result.json`.

The schemas describe the format that senders should use. Workers accept more, such as numbers in strings and null for
optional fields. pydantic derives both from shared/messages.py, and `make docs` writes them; a test fails if they are
outdated.
"""

import inspect
import json
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from feedmill.shared.messages import MAX_POSTS_PER_MESSAGE, MESSAGE_VERSION, ClassifyOptions, Outcome, Post

FOLDER = Path(__file__).parent
DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Request(ClassifyOptions):
    """The arguments of the Celery task `feedmill.classify`, by name.

    Positional order: posts, labels, template, multi_label, strict, top_k. An invalid option fails the whole message. An
    invalid post fails alone, and its outcome gives the reason. Not expressed here: names of labels must differ after
    trimming, and text that consists only of whitespace or HTML entities for it counts as empty.
    """

    posts: Annotated[list[Post], Field(min_length=1, max_length=MAX_POSTS_PER_MESSAGE)]


Result = Annotated[
    list[Outcome],
    Field(
        min_length=1,
        max_length=MAX_POSTS_PER_MESSAGE,
        title="Result",
        description="The result of the Celery task `feedmill.classify`: one outcome per post, in the message's order. "
        "New fields do not change the message version.",
    ),
]


class _Described(GenerateJsonSchema):
    """Take the `#:` comments above fields as their descriptions. pydantic would read docstrings at each import."""

    def model_schema(self, schema: Any) -> dict[str, Any]:
        written = super().model_schema(schema)
        for field, comment in _comments(schema["cls"]).items():
            if field in written["properties"]:
                written["properties"][field]["description"] = comment
        return written

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002 - pydantic's signature
        return False


def _comments(model: type[BaseModel]) -> dict[str, str]:
    source = "".join(inspect.getsource(base) for base in model.__mro__ if base.__module__ == ClassifyOptions.__module__)
    matches = re.finditer(r"((?: *#: .*\n)+) *(\w+): ", source)
    return {match[2]: " ".join(re.findall(r"#: (.*)", match[1])) for match in matches}


def written() -> dict[str, str]:
    """Return the content of both files by file name."""
    schemas = {
        "request": Request.model_json_schema(schema_generator=_Described),
        "result": TypeAdapter(Result).json_schema(schema_generator=_Described, mode="serialization"),
    }
    return {
        f"{name}.json": json.dumps(
            {"$schema": DIALECT, "$id": f"urn:feedmill:classify:{MESSAGE_VERSION}:{name}"} | schema, indent=2
        )
        + "\n"
        for name, schema in schemas.items()
    }
