"""JSON Schema of what travels, for applications that know nothing of Feedmill: `request.json` and `result.json`.

pydantic's own schema says what a model holds in the end. These say what it *reads*: a number in a string, labels
separated by commas. `make docs` writes both files anew from shared/messages.py; a test fails where
they differ. A validator that is new in shared/messages.py has to be named in `Reads` first. What JSON Schema cannot
say stands in the descriptions (`BEYOND`).

Patterns are within what Python's `re` and ECMA-262 read alike: white space is spelled out, and `END` is the end.
"""

import inspect
import json
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from shared.messages import (
    GONE,
    MAX_ALL_DESCRIPTIONS,
    MAX_EXTRA_BYTES,
    MAX_LABELS,
    MAX_POSTS_PER_MESSAGE,
    MESSAGE_VERSION,
    ClassifyOptions,
    Outcome,
    Post,
)

FOLDER = Path(__file__).parent
DIALECT = "https://json-schema.org/draft/2020-12/schema"
#: What pydantic trims, Unicode's White_Space; and what Python trims, which is four control characters more.
SPACE = r"\t-\r \u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
PYTHON_SPACE = rf"\u001c-\u001f{SPACE}"
#: `$` would do in ECMA-262; in Python it matches before a last line break as well.
END = r"(?![\s\S])"
WHOLE_NUMBER = rf"^[{SPACE}]*[+-]?[0-9]+(?:_[0-9]+)*(?:\.0+)?[{SPACE}]*{END}"
#: Trimmed, or with single underscores anywhere within.
NUMBER = (
    rf"^(?:[{SPACE}]*[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[{SPACE}]*"
    r"|(?!_|[\s\S]*__|[\s\S]*_(?![\s\S]))[+-]?_?(?:[0-9][_0-9]*(?:\.[_0-9]*)?|\._?[0-9][_0-9]*)"
    rf"(?:[eE]_?[+-]?_?[0-9][_0-9]*)?){END}"
)
YES_OR_NO = ("true", "t", "yes", "y", "on", "1", "false", "f", "no", "n", "off", "0")


def _trimmed(longest: int, space: str) -> str:
    """Text of 1 to so many characters, and white space around it, which does not count."""
    return rf"^[{space}]*[^{space}](?:[\s\S]{{0,{longest - 2}}}[^{space}])?[{space}]*{END}"


def _in_any_case(words: tuple[str, ...]) -> str:
    spelled = ("".join(f"[{a}{a.upper()}]" if a.isalpha() else a for a in word) for word in words)
    return f"^(?:{'|'.join(spelled)}){END}"


#: Texts that several fields read, by the names that they have in `$defs`.
TEXTS = {
    "WholeNumber": {"description": "A whole number as text; the field's limits hold.", "pattern": WHOLE_NUMBER},
    "Number": {"description": "A number as text; the field's limits hold.", "pattern": NUMBER},
    "YesOrNo": {"description": f"{', '.join(YES_OR_NO)}; in any case.", "pattern": _in_any_case(YES_OR_NO)},
    "Label": {"description": "1 to 200 characters after trimming.", "pattern": _trimmed(200, PYTHON_SPACE)},
    "Description": {"description": "1 to 500 characters after trimming.", "pattern": _trimmed(500, SPACE)},
}
#: What the schema cannot say, by model and field.
BEYOND = {
    "Post": "Beyond this schema: a text of nothing but white space that is written as HTML entities is no text.",
    "Post.id": "A number counts with its digits.",
    "Post.extra": f"Beyond this schema: {MAX_EXTRA_BYTES} bytes of JSON, nested some 250 levels deep at most.",
    "Request.labels": (
        "Names, as a list or separated by commas; or an object, name -> what a model reads for it. Beyond this schema:"
        f" names differ after trimming; with commas, {MAX_LABELS} at most, of 200 characters each; in all, "
        f"{MAX_ALL_DESCRIPTIONS} descriptions at most."
    ),
    "Request.top_k": "Beyond this schema: below 2^63 where it has an exponent or a decimal point.",
}


class Request(ClassifyOptions):
    """The arguments of the Celery task `feedmill.classify`, by name.

    By position they are posts, labels, template, multi_label, strict, top_k. What is wrong with an option fails the
    whole message; a post that does not fit fails alone, and its outcome says why.
    """

    posts: Annotated[list[Post], Field(min_length=1, max_length=MAX_POSTS_PER_MESSAGE)]


Result = Annotated[
    list[Outcome],
    Field(
        min_length=1,
        max_length=MAX_POSTS_PER_MESSAGE,
        title="Result",
        description="The result of the Celery task `feedmill.classify`: one outcome per post, in the message's order. "
        "Fields may be added within a version of the message.",
    ),
]


class Described(GenerateJsonSchema):
    """With the `#:` comments of a model's fields as their descriptions, and what the schema cannot say."""

    def model_schema(self, schema: Any) -> dict[str, Any]:
        written = super().model_schema(schema)
        model = schema["cls"]
        comments = _comments(model)
        for field, said in written["properties"].items():
            words = [comments.get(field, ""), BEYOND.get(f"{model.__name__}.{field}", "")]
            if any(words):
                said["description"] = " ".join(filter(None, words))
        if beyond := BEYOND.get(model.__name__):
            written["description"] += f" {beyond}"
        return written

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002 - a field's name says it
        return False


class Reads(Described):
    """What pydantic reads, rather than what it makes of it."""

    def str_schema(self, schema: Any) -> dict[str, Any]:
        text = super().str_schema(schema)
        if schema.get("strip_whitespace"):
            text = _text_of(_trimmed(text["maxLength"], SPACE))
        return _any_of(text, {"type": "number"}) if self._config.coerce_numbers_to_str else text

    def int_schema(self, schema: Any) -> dict[str, Any]:
        return self._number(super().int_schema(schema), _text_of(WHOLE_NUMBER))

    def float_schema(self, schema: Any) -> dict[str, Any]:
        return self._number(super().float_schema(schema), _text_of(NUMBER))

    def _number(self, number: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
        truths = [truth for truth in (False, True) if number.get("minimum", truth) <= truth]
        return _any_of(number, text, {"enum": truths})

    def bool_schema(self, schema: Any) -> dict[str, Any]:
        return _any_of(super().bool_schema(schema), {"enum": [0, 1]}, _text_of(_in_any_case(YES_OR_NO)))

    def nullable_schema(self, schema: Any) -> dict[str, Any]:
        return _any_of(self.generate_inner(schema["schema"]), {"type": "null"})

    def function_before_schema(self, schema: Any) -> dict[str, Any]:
        return self._validated(schema)

    def function_after_schema(self, schema: Any) -> dict[str, Any]:
        return self._validated(schema)

    def _validated(self, schema: Any) -> dict[str, Any]:
        """What the inner schema becomes by a validator's function. Raises AttributeError for one without a method."""
        read: dict[str, Any] = getattr(self, schema["function"]["function"].__name__)(
            self.generate_inner(schema["schema"])
        )
        return read

    # One for each validator of shared/messages.py, by its name.

    def _text(self, inner: dict[str, Any]) -> dict[str, Any]:
        """None is no text, where no text is allowed."""
        refused = any("pattern" in each for each in inner.get("anyOf", [inner]))
        return inner if refused else _any_of(inner, {"type": "null"})

    def _has_text(self, post: dict[str, Any]) -> dict[str, Any]:
        gone = "|".join(re.escape(words) for words in sorted(GONE))
        texts = {
            "title": f"[^{PYTHON_SPACE}]",
            "body": rf"^(?![{PYTHON_SPACE}]*(?:{gone})[{PYTHON_SPACE}]*{END})[\s\S]*[^{PYTHON_SPACE}]",
        }
        has = [
            {"required": [name], "properties": {name: {"type": ["string", "number"], "pattern": pattern}}}
            for name, pattern in texts.items()
        ]
        return post | {"anyOf": has}

    def _extra_is_small(self, inner: dict[str, Any]) -> dict[str, Any]:
        return inner

    def _described(self, described: dict[str, Any]) -> dict[str, Any]:
        return _any_of(
            _text_of(f"[^,{PYTHON_SPACE}]"),
            {
                "type": "array",
                "items": _text_of(_trimmed(200, PYTHON_SPACE)),
                "minItems": 1,
                "maxItems": MAX_LABELS,
                "uniqueItems": True,
            },
            described,
        )

    def _some(self, inner: dict[str, Any]) -> dict[str, Any]:
        ((pattern, values),) = inner["patternProperties"].items()
        keys = {"propertyNames": {"pattern": pattern}, "additionalProperties": values}
        return {"type": "object", "minProperties": 1, "maxProperties": MAX_LABELS} | keys

    def _one_or_more(self, several: dict[str, Any]) -> dict[str, Any]:
        return _any_of(several["items"], several)

    def _has_a_place(self, inner: dict[str, Any]) -> dict[str, Any]:
        return inner | {"pattern": r"\{\}"}

    def _is_read_here(self, inner: dict[str, Any]) -> dict[str, Any]:
        number, *others = inner["anyOf"]
        return _any_of(number | {"maximum": MESSAGE_VERSION}, *others)


def _text_of(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


def _shared(node: Any) -> Any:
    """The schema with its texts by their names in `$defs`, where they have one."""
    if isinstance(node, list):
        return [_shared(each) for each in node]
    if not isinstance(node, dict):
        return node
    for name, text in TEXTS.items():
        if node == _text_of(text["pattern"]):
            return {"$ref": f"#/$defs/{name}"}
    return {key: _shared(value) for key, value in node.items()}


def _any_of(*schemas: dict[str, Any]) -> dict[str, Any]:
    """Either of them; those that say so themselves are taken apart."""
    either: list[dict[str, Any]] = []
    for schema in schemas:
        either += [each for each in schema.get("anyOf", [schema]) if each not in either]
    return {"anyOf": either}


def _comments(model: type[BaseModel]) -> dict[str, str]:
    """The `#:` comments above the fields of a model, and of those it is made from."""
    found: dict[str, str] = {}
    for each in reversed([each for each in model.__mro__ if issubclass(each, BaseModel) and each is not BaseModel]):
        above: list[str] = []
        for line in map(str.strip, inspect.getsource(each).splitlines()):
            if line.startswith("#:"):
                above.append(line.removeprefix("#:").strip())
                continue
            if above and (field := re.match(r"(\w+): ", line)):
                found[field[1]] = " ".join(above)
            above = []
    return found


def schemas() -> dict[str, dict[str, Any]]:
    """Both schemas, by the names of their files."""
    request = _shared(Request.model_json_schema(schema_generator=Reads))
    request["$defs"] |= {name: {"type": "string"} | text for name, text in TEXTS.items()}
    result = TypeAdapter(Result).json_schema(schema_generator=Described, mode="serialization")
    found = {"request": request, "result": result}
    return {
        f"{name}.json": {"$schema": DIALECT, "$id": f"urn:feedmill:classify:{MESSAGE_VERSION}:{name}"} | schema
        for name, schema in found.items()
    }


def written() -> dict[str, str]:
    """What both files have to hold, by their names."""
    return {name: json.dumps(schema, indent=2) + "\n" for name, schema in schemas().items()}
