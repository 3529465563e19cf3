"""shared/schema: whatever the JSON schemas accept, the models accept; and documented and sent
messages fit the schemas.

The exceptions, which JSON Schema cannot express, are listed in `beyond_schema`.
"""

import ast
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from feedmill.shared.errors import PostRefused
from feedmill.shared.messages import (
    MESSAGE_VERSION,
    Classification,
    ClassifyOptions,
    Post,
    PostError,
)
from feedmill.workers.pipeline.message import Message
from tests.generated import SCHEMAS as FOLDER
from tests.generated import Request

SCHEMAS = {path.name: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
REQUEST, RESULT = (
    Draft202012Validator(SCHEMAS[name]) for name in ("request.json", "result.json")
)
DOCS = Path(__file__).parent.parent.parent / "docs"
GOOD: dict[str, Any] = {"id": "1", "title": "x"}

texts = st.text(max_size=12) | st.sampled_from(
    ["[removed]", "{}", "a, b,,", "a,a", " , ", "x" * 129, "x" * 4001]
)
plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
values = (
    plain
    | st.lists(plain, max_size=3)
    | st.dictionaries(texts, plain | st.lists(plain), max_size=3)
)


def model_errors(message: dict[str, Any]) -> list[Any]:
    """Return the models' validation errors."""
    try:
        Request.model_validate(message)
    except ValidationError as error:
        return error.errors()
    except PostRefused:
        return [{"type": "no_text", "input": None, "loc": ("posts",)}]
    return []


def check_accepted(message: dict[str, Any]) -> None:
    """Check that the models accept a message that the schema accepts, except for what a schema
    cannot express.
    """
    if REQUEST.is_valid(message):
        assert all(beyond_schema(error) for error in model_errors(message))


def beyond_schema(error: Any) -> bool:
    """Return whether an error is about white space, equal names, sizes of JSON, or floats beyond
    64 bits.
    """
    kind, value, where = error["type"], error["input"], error["loc"]
    if (
        kind in ("no_text", "string_too_short")
        or where[0] == "labels"
        or where[-1] in ("extra", "run")
    ):
        return True
    return isinstance(value, float) and abs(value) >= 2**53


def test_schemas_are_valid_self_contained_and_described() -> None:
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)
        assert schema["title"]
        assert schema["description"]
        references = [
            part.split('"')[0] for part in json.dumps(schema).split('"$ref": "')[1:]
        ]
        assert {reference.removeprefix("#/$defs/") for reference in references} <= set(
            schema["$defs"]
        )
    assert SCHEMAS["request.json"]["properties"].keys() == {
        "posts",
        *ClassifyOptions.model_fields,
    }
    assert SCHEMAS["result.json"]["$defs"].keys() == {"Classification", "PostError"}
    assert (
        SCHEMAS["request.json"]["$id"]
        == f"urn:feedmill:classify:{MESSAGE_VERSION}:request"
    )


@given(
    st.dictionaries(
        st.sampled_from([*sorted(Post.model_fields), "author"]), values, max_size=4
    ),
    plain,
    plain,
)
@example({"extra": {"note": [{"deep": None}]}, "created_utc": 1e10}, "a", "b")
def test_models_accept_posts_that_the_schema_accepts(
    fields: dict[str, Any], title: Any, body: Any
) -> None:
    check_accepted({"posts": [{"id": "1", "title": title, "body": body} | fields]})
    check_accepted({"posts": [{"id": "1"} | fields]})


@pytest.mark.parametrize(
    "wrong",
    [
        {"labels": []}, {"labels": [""]}, {"labels": [str(number) for number in range(257)]},
        {"labels": {"a": []}},
        {"template": "no place"}, {"version": 2}, {"top_k": 0}, {"lables": ["a"]}, {"posts": []},
        {"posts": [GOOD] * 1001}, {"posts": [{"id": "1"}]}, {"posts": [{"title": "x"}]},
        {"posts": [GOOD | {"score": "x"}]},
    ],
)  # fmt: skip
def test_schema_refuses_what_models_refuse(wrong: dict[str, Any]) -> None:
    assert model_errors({"posts": [GOOD]} | wrong)
    assert not REQUEST.is_valid({"posts": [GOOD]} | wrong)


def documented() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (page, message) for every complete message in the documentation."""
    page = (DOCS / "messages.md").read_text()
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.keyword) and node.arg == "kwargs":
                with suppress(ValueError):  # arguments that contain variables
                    yield "messages.md", ast.literal_eval(node.value)
    for path in (DOCS / "examples").glob("*.*"):
        for text in re.findall(r"'(\{.*\})'", path.read_text()):
            yield path.name, json.loads(text)
    constants = {
        ast.unparse(node.targets[0]): node.value
        for node in ast.parse((DOCS / "examples" / "plain_python.py").read_text()).body
        if isinstance(node, ast.Assign)
    }
    posts, labels = (ast.literal_eval(constants[name]) for name in ("POSTS", "LABELS"))
    yield "plain_python.py", {"posts": posts, "labels": labels}


def test_documented_messages_are_valid() -> None:
    """Only posts that demonstrate errors may be invalid."""
    wrong = {"a3", "a4"}
    pages = []
    for page, message in documented():
        pages.append(page)
        for post in message["posts"]:
            check_accepted(message | {"posts": [post]})
            assert REQUEST.is_valid(message | {"posts": [post]}) == (
                post["id"] not in wrong
            ), page
    assert sorted(pages) == [
        "fastapi_endpoint.py",
        "flower_curl.sh",
        "messages.md",
        "messages.md",
        "plain_python.py",
    ]


outcomes = st.one_of(
    st.builds(PostError),
    st.builds(Classification, scores=st.dictionaries(st.text(), st.floats(0, 1))),
)


@given(st.lists(outcomes, min_size=1), st.none() | st.integers(1, 3))
def test_accepts_any_result(
    found: list[Classification | PostError], top_k: int | None
) -> None:
    message = Message({"posts": [GOOD] * len(found), "top_k": top_k}, None)
    message.read()
    for index, outcome in enumerate(found):
        message.set_outcome(index, outcome)
    if len(message.errors()) < len(found):
        RESULT.validate(message.result())
    RESULT.validate([outcome.model_dump() for outcome in found])


@pytest.mark.parametrize(
    "outcome",
    [{}, {"id": "1"}, {"id": 1, "error": "x"}, {"id": "1", "label": "x"}, None, "x"],
)
def test_rejects_invalid_results(outcome: Any) -> None:
    assert not RESULT.is_valid([outcome])
    assert not RESULT.is_valid([])
