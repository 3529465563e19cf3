"""shared/schema: the JSON schemas accept exactly the messages that the models accept.

The exceptions, which JSON Schema cannot express, are listed in `beyond_schema` and in the schema's descriptions.
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

from shared.errors import PostRefused
from shared.messages import (
    MAX_ALL_DESCRIPTIONS,
    MAX_DESCRIPTIONS,
    MESSAGE_VERSION,
    Classification,
    ClassifyOptions,
    Post,
    PostError,
    UnixTime,
)
from shared.schema import BEYOND, FOLDER, Request
from tests.support import make_posts
from workers.pipeline.message import Message

SCHEMAS = {path.name: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
REQUEST, RESULT = (Draft202012Validator(SCHEMAS[name]) for name in ("request.json", "result.json"))
DOCS = Path(__file__).parent.parent.parent / "docs"
GOOD: dict[str, Any] = {"id": "1", "title": "x"}

NO_TEXT = "no_text"
#: Errors of numbers that the schema cannot check if written as text or with many digits.
LIMITS = {"greater_than_equal", "less_than_equal", "finite_number", "int_parsing_size", "string_too_long"}

numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
spaces = st.text("\t\n\x1c\x1f \x85\xa0\u200b\ufeff", max_size=3)
texts = st.one_of(
    st.text(max_size=12),
    st.tuples(spaces, st.text(max_size=8), spaces).map("".join),
    st.text("+-_.eE0123456789 \n\x1c\xa0", max_size=12),
    st.tuples(spaces, numbers.map(str), spaces).map("".join),
    st.sampled_from(["[removed]", " [deleted]\n", "[removed] x", "{}", "a, b,,", "a,a", " , ", "x" * 129, "x" * 4001]),
    st.sampled_from(["true", "YES", "On", "off", "F", "yes\n", " no", "t", "1", "0", "2"]),
)
plain = st.one_of(st.none(), st.booleans(), numbers, st.sampled_from([0, 1, 1.0, -1, 3.0, 2**53, 10**130]), texts)
values = st.one_of(plain, st.lists(plain, max_size=3), st.dictionaries(texts, plain | st.lists(plain), max_size=3))


def model_errors(message: dict[str, Any]) -> list[Any]:
    """Return the models' validation errors."""
    try:
        Request.model_validate(message)
    except ValidationError as error:
        return error.errors()
    except PostRefused:
        return [{"type": NO_TEXT, "input": message["posts"], "loc": ("posts",)}]
    return []


def agree(message: dict[str, Any]) -> None:
    """Check that models and schema agree, except for errors that the schema cannot express."""
    errors = model_errors(message)
    found = [f"{problem.json_path}: {problem.message[:200]}" for problem in REQUEST.iter_errors(message)]
    if not errors:
        assert not found, found
    elif not found:
        assert all(beyond_schema(error, message) for error in errors), errors


def beyond_schema(error: Any, message: dict[str, Any]) -> bool:
    """Return whether the schema's descriptions name this error as one that the schema misses."""
    kind, value, where = error["type"], error["input"], error["loc"]
    if kind == NO_TEXT:
        texts = [post.get(field) for post in value for field in ("title", "body")]
        return any("&" in text for text in texts if isinstance(text, str))
    if where[0] == "labels":
        return beyond_label_schema(message["labels"])
    if where[-1] == "extra":
        return bool(kind == "value_error")  # the size of `extra`, or a value that is not JSON
    if isinstance(value, str):
        return where[0] == "version" or kind in LIMITS - {"string_too_long"}
    return kind in LIMITS and abs(value) >= 2**63


def beyond_label_schema(labels: Any) -> bool:
    """Return whether labels are comma-separated, duplicated, or have too many descriptions in total."""
    if isinstance(labels, str):
        return True
    names = [name.strip() for name in labels]
    descriptions = [labels[name] for name in labels] if isinstance(labels, dict) else []
    total = sum(len(each) if isinstance(each, list) else 1 for each in descriptions)
    return len(set(names)) < len(names) or total > MAX_ALL_DESCRIPTIONS


def test_schemas_are_valid_self_contained_and_described() -> None:
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)
        assert schema["title"]
        assert schema["description"]
        references = [part.split('"')[0] for part in json.dumps(schema).split('"$ref": "')[1:]]
        assert references
        assert {reference.removeprefix("#/$defs/") for reference in references} <= set(schema["$defs"])
    assert SCHEMAS["request.json"]["$defs"]["Post"]["description"].startswith(Post.__doc__ or "?")
    assert SCHEMAS["request.json"]["properties"].keys() == {"posts", *ClassifyOptions.model_fields}
    assert SCHEMAS["result.json"]["$defs"].keys() == {"Classification", "PostError"}
    assert SCHEMAS["request.json"]["$id"] == f"urn:feedmill:classify:{MESSAGE_VERSION}:request"


def test_descriptions_name_what_the_schema_misses() -> None:
    text = (FOLDER / "request.json").read_text()
    assert all(json.dumps(words)[1:-1] in text for words in BEYOND.values())


@given(st.sampled_from(sorted(Post.model_fields)), values)
@example("title", "&nbsp;")
@example("body", "&#32;\n")
@example("created_utc", "1_e1")
@example("created_utc", " 1_0.5")
@example("score", "0_1.0")
@example("score", "9" * 17)
@example("id", 10**130)
@example("id", "x" * 128 + "\u3000")
@example("id", "\x1c")
@example("extra", {"note": [{"deep": None}]})
def test_models_and_schema_agree_on_post_fields(field: str, value: Any) -> None:
    agree({"posts": [GOOD | {field: value}]})


@given(st.dictionaries(st.sampled_from([*sorted(Post.model_fields), "author"]), values, max_size=4), plain, plain)
def test_models_and_schema_agree_on_posts(fields: dict[str, Any], title: Any, body: Any) -> None:
    agree({"posts": [{"id": "1", "title": title, "body": body} | fields]})
    agree({"posts": [{"id": "1"} | fields]})


@given(values)
def test_models_and_schema_agree_on_invalid_posts(value: Any) -> None:
    agree({"posts": value})
    agree({"posts": [GOOD, value]})


@given(st.sampled_from([*sorted(ClassifyOptions.model_fields), "lables"]), values)
@example("labels", "a, b ,")
@example("labels", "a,a")
@example("labels", ["a", "a "])
@example("labels", ["x" * 200 + " "])
@example("labels", ["x" * 201])
@example("labels", [str(number) for number in range(257)])
@example("labels", ",".join(map(str, range(257))))
@example("labels", {str(number): "x" for number in range(257)})
@example("labels", {"a": ["x"] * (MAX_DESCRIPTIONS + 1)})
@example("labels", {str(number): ["x"] * 3 for number in range(200)})
@example("labels", {"\x1c": " x" + 499 * "y"})
@example("labels", {"a": " " * 600 + 500 * "y"})
@example("labels", {"a": {"b": "c"}})
@example("template", "On {}." + "x" * 495)
@example("template", "no place")
@example("top_k", 1e19)
@example("top_k", "0")
@example("version", 2)
@example("version", "2")
@example("version", True)
def test_models_and_schema_agree_on_options(option: str, value: Any) -> None:
    agree({"posts": [GOOD], option: value})


@given(st.floats(0, 253_402_300_799) | st.integers(0, 253_402_300_799))
def test_accepts_times_as_numbers_and_text(time: UnixTime) -> None:
    for value in (time, str(time), f" {time}\n"):
        message = {"posts": [GOOD | {"created_utc": value, "edited_utc": value}]}
        assert not model_errors(message)
        assert REQUEST.is_valid(message)


@pytest.mark.parametrize(("count", "valid"), [(0, False), (1, True), (1000, True), (1001, False)])
def test_limits_the_number_of_posts(count: int, valid: bool) -> None:
    assert REQUEST.is_valid({"posts": [GOOD] * count}) == valid
    assert (not model_errors({"posts": [GOOD] * count})) == valid


def test_accepts_messages_of_producers() -> None:
    options = ClassifyOptions.parse({"labels": {"tea": ["tea", "a cup"], "cars": "cars"}, "template": "On {}."})
    posts = [post.model_dump(mode="json", exclude_defaults=True) for post in make_posts(50)]
    REQUEST.validate({"posts": posts, "version": MESSAGE_VERSION, **options.arguments()})


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
            agree(message | {"posts": [post]})
            assert REQUEST.is_valid(message | {"posts": [post]}) == (post["id"] not in wrong), page
    assert sorted(pages) == ["fastapi_endpoint.py", "flower_curl.sh", "messages.md", "messages.md", "plain_python.py"]


outcomes = st.one_of(
    st.builds(PostError),
    st.builds(Classification, scores=st.dictionaries(st.text(), st.floats(0, 1))),
)


@given(st.lists(outcomes, min_size=1), st.none() | st.integers(1, 3))
def test_accepts_any_result(found: list[Classification | PostError], top_k: int | None) -> None:
    message = Message({"posts": [GOOD] * len(found), "top_k": top_k}, None)
    message.read()
    for index, outcome in enumerate(found):
        message.set_outcome(index, outcome)
    if len(message.errors()) < len(found):
        RESULT.validate(message.result())
    RESULT.validate([outcome.model_dump() for outcome in found])


@pytest.mark.parametrize("outcome", [{}, {"id": "1"}, {"id": 1, "error": "x"}, {"id": "1", "label": "x"}, None, "x"])
def test_rejects_invalid_results(outcome: Any) -> None:
    assert not RESULT.is_valid([outcome])
    assert not RESULT.is_valid([])
