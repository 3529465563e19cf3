"""shared/schema: the files accept what the models read, neither more nor less.

What JSON Schema cannot say is named here by pydantic's own error types (`beyond`), and in the schema's descriptions.
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
from workers.message import Message

SCHEMAS = {path.name: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
REQUEST, RESULT = (Draft202012Validator(SCHEMAS[name]) for name in ("request.json", "result.json"))
DOCS = Path(__file__).parent.parent.parent / "docs"
GOOD: dict[str, Any] = {"id": "1", "title": "x"}

NO_TEXT = "neither title nor body holds any text"
#: Errors over numbers that the schema cannot foresee where they are written as text, or with many digits.
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


def refusals(message: dict[str, Any]) -> list[Any]:
    """What the models have against it."""
    try:
        Request.model_validate(message)
    except ValidationError as error:
        return error.errors()
    except PostRefused:
        return [{"type": NO_TEXT, "msg": NO_TEXT, "input": message["posts"], "loc": ("posts",)}]
    return []


def agree(message: dict[str, Any]) -> None:
    """Models and schema say the same of it; where the models alone refuse, it is beyond the schema."""
    refused = refusals(message)
    found = [f"{problem.json_path}: {problem.message[:200]}" for problem in REQUEST.iter_errors(message)]
    if not refused:
        assert not found, found
    elif not found:
        assert all(beyond(problem, message) for problem in refused), refused


def beyond(problem: Any, message: dict[str, Any]) -> bool:
    """Whether that is named in the schema's descriptions as what it does not see."""
    kind, said, value, where = problem["type"], problem["msg"], problem["input"], problem["loc"]
    if kind == NO_TEXT:
        texts = [post.get(field) for post in value for field in ("title", "body")]
        return any("&" in text for text in texts if isinstance(text, str))
    if where[0] == "labels":
        separated = isinstance(message["labels"], str)
        return separated or "named twice" in said or "descriptions; at most" in said
    if where[-1] == "extra":
        return "bytes of JSON" in said or "read back" in said
    if isinstance(value, str):
        return where[0] == "version" or kind in LIMITS - {"string_too_long"}
    return kind in LIMITS and abs(value) >= 2**63


def test_the_schemas_are_valid_self_contained_and_described() -> None:
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


def test_every_limit_beyond_the_schema_is_in_its_description() -> None:
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
def test_one_field_of_a_post(field: str, value: Any) -> None:
    agree({"posts": [GOOD | {field: value}]})


@given(st.dictionaries(st.sampled_from([*sorted(Post.model_fields), "author"]), values, max_size=4), plain, plain)
def test_whole_posts(fields: dict[str, Any], title: Any, body: Any) -> None:
    agree({"posts": [{"id": "1", "title": title, "body": body} | fields]})
    agree({"posts": [{"id": "1"} | fields]})


@given(values)
def test_posts_that_are_none(value: Any) -> None:
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
def test_one_option(option: str, value: Any) -> None:
    agree({"posts": [GOOD], option: value})


@given(st.floats(0, 253_402_300_799) | st.integers(0, 253_402_300_799))
def test_times_as_numbers_and_as_texts(time: UnixTime) -> None:
    for value in (time, str(time), f" {time}\n"):
        message = {"posts": [GOOD | {"created_utc": value, "edited_utc": value}]}
        assert not refusals(message)
        assert REQUEST.is_valid(message)


@pytest.mark.parametrize(("count", "valid"), [(0, False), (1, True), (1000, True), (1001, False)])
def test_how_many_posts(count: int, valid: bool) -> None:
    assert REQUEST.is_valid({"posts": [GOOD] * count}) == valid
    assert (not refusals({"posts": [GOOD] * count})) == valid


def test_what_the_producers_send() -> None:
    options = ClassifyOptions.parse({"labels": {"tea": ["tea", "a cup"], "cars": "cars"}, "template": "On {}."})
    posts = [post.model_dump(mode="json", exclude_defaults=True) for post in make_posts(50)]
    REQUEST.validate({"posts": posts, "version": MESSAGE_VERSION, **options.arguments()})


def documented() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every message that is spelled out in the documentation."""
    page = (DOCS / "messages.md").read_text()
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.keyword) and node.arg == "kwargs":
                with suppress(ValueError):  # it holds variables
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


def test_what_the_documentation_sends() -> None:
    """All of it is valid but the posts that are there to show what becomes of a bad one."""
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
def test_any_result(found: list[Classification | PostError], top_k: int | None) -> None:
    message = Message({"posts": [GOOD] * len(found), "top_k": top_k}, None)
    message.read()
    for index, outcome in enumerate(found):
        message.settle(index, outcome)
    if len(message.errors()) < len(found):
        RESULT.validate(message.result())
    RESULT.validate([outcome.model_dump() for outcome in found])


@pytest.mark.parametrize("outcome", [{}, {"id": "1"}, {"id": 1, "error": "x"}, {"id": "1", "label": "x"}, None, "x"])
def test_no_result(outcome: Any) -> None:
    assert not RESULT.is_valid([outcome])
    assert not RESULT.is_valid([])
