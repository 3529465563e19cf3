"""JSON Schema of the message format, for other applications: `request.json` and `result.json`.

pydantic's own schema describes parsed models. These schemas describe accepted input, such as numbers in strings and
comma-separated labels. `make docs` generates both files from shared/messages.py; a test fails if they are outdated.
Each validator of shared/messages.py needs a method of the same name in `Reads`. Rules that JSON Schema cannot express
are added to the descriptions (`BEYOND`).

Patterns use only syntax that Python's `re` and ECMA-262 interpret alike: whitespace is spelled out, and `END` replaces
`$`.
"""

import inspect
import json
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from shared.messages import (
    MAX_ALL_DESCRIPTIONS,
    MAX_EXTRA_BYTES,
    MAX_LABELS,
    MAX_POSTS_PER_MESSAGE,
    MAX_RUN,
    MESSAGE_VERSION,
    REMOVED_BODIES,
    ClassifyOptions,
    Outcome,
    Post,
)

FOLDER = Path(__file__).parent
DIALECT = "https://json-schema.org/draft/2020-12/schema"
#: Characters that pydantic trims: Unicode's White_Space. Python's `str.strip` trims four control characters more.
SPACE = r"\t-\r \u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
PYTHON_SPACE = rf"\u001c-\u001f{SPACE}"
#: Control characters that a name must not contain: shared.errors.UNPRINTABLE_CHARACTERS without lone surrogates, which
#: are replaced before.
UNPRINTABLE = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
#: End of text. Python's `$` also matches before a final line break.
END = r"(?![\s\S])"
WHOLE_NUMBER = rf"^[{SPACE}]*[+-]?[0-9]+(?:_[0-9]+)*(?:\.0+)?[{SPACE}]*{END}"
#: A number: either trimmed, or with single underscores anywhere inside.
NUMBER = (
    rf"^(?:[{SPACE}]*[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[{SPACE}]*"
    r"|(?!_|[\s\S]*__|[\s\S]*_(?![\s\S]))[+-]?_?(?:[0-9][_0-9]*(?:\.[_0-9]*)?|\._?[0-9][_0-9]*)"
    rf"(?:[eE]_?[+-]?_?[0-9][_0-9]*)?){END}"
)
YES_OR_NO = ("true", "t", "yes", "y", "on", "1", "false", "f", "no", "n", "off", "0")


def _trimmed(longest: int, space: str, forbidden: str = "") -> str:
    """Return a pattern for text of 1 to `longest` characters, not counting surrounding whitespace."""
    inside = f"[^{forbidden}]" if forbidden else r"[\s\S]"
    return rf"^[{space}]*[^{space}{forbidden}](?:{inside}{{0,{longest - 2}}}[^{space}{forbidden}])?[{space}]*{END}"


def _in_any_case(words: tuple[str, ...]) -> str:
    spelled = ("".join(f"[{a}{a.upper()}]" if a.isalpha() else a for a in word) for word in words)
    return f"^(?:{'|'.join(spelled)}){END}"


#: Text schemas that several fields share, by their names in `$defs`.
TEXTS = {
    "WholeNumber": {"description": "An integer as text. The field's limits apply.", "pattern": WHOLE_NUMBER},
    "Number": {"description": "A number as text. The field's limits apply.", "pattern": NUMBER},
    "YesOrNo": {"description": f"One of {', '.join(YES_OR_NO)}; case-insensitive.", "pattern": _in_any_case(YES_OR_NO)},
    "Label": {"description": "1 to 200 characters after trimming.", "pattern": _trimmed(200, PYTHON_SPACE)},
    "Description": {"description": "1 to 500 characters after trimming.", "pattern": _trimmed(500, SPACE)},
}
#: Rules that the schema cannot express, by model and field.
BEYOND = {
    "Post": "Not expressed in this schema: text that consists only of whitespace as HTML entities counts as empty.",
    "Post.id": "A number is converted to text.",
    "Post.extra": f"Not expressed in this schema: at most {MAX_EXTRA_BYTES} bytes of JSON and about 250 nested levels.",
    "Request.labels": (
        "A list of names, a comma-separated string, or an object that maps each name to its descriptions. Not "
        f"expressed in this schema: names must differ after trimming; a string contains at most {MAX_LABELS} names of "
        f"200 characters; all labels together have at most {MAX_ALL_DESCRIPTIONS} descriptions."
    ),
    "Request.top_k": "Not expressed in this schema: below 2^63 if written with an exponent or a decimal point.",
}


class Request(ClassifyOptions):
    """The arguments of the Celery task `feedmill.classify`, by name.

    Positional order: posts, labels, template, multi_label, strict, top_k. An invalid option fails the whole message. An
    invalid post fails alone, and its outcome gives the reason.
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


class Described(GenerateJsonSchema):
    """Schema generator for serialized models, with `#:` comments and `BEYOND` as descriptions."""

    def model_schema(self, schema: Any) -> dict[str, Any]:
        written = super().model_schema(schema)
        model = schema["cls"]
        comments = _comments(model)
        for field, field_schema in written["properties"].items():
            words = [comments.get(field, ""), BEYOND.get(f"{model.__name__}.{field}", "")]
            if any(words):
                field_schema["description"] = " ".join(filter(None, words))
        if beyond := BEYOND.get(model.__name__):
            written["description"] += f" {beyond}"
        return written

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002 - pydantic's signature
        return False


class Reads(Described):
    """Schema generator for accepted input, before pydantic converts it."""

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
        """Apply the method named after a validator. Raises AttributeError if there is none."""
        read: dict[str, Any] = getattr(self, schema["function"]["function"].__name__)(
            self.generate_inner(schema["schema"])
        )
        return read

    # One method per validator of shared/messages.py, with its name.

    def _normalize_text(self, inner: dict[str, Any]) -> dict[str, Any]:
        """Allow None where empty text is allowed: it becomes empty text."""
        refused = any("pattern" in each for each in inner.get("anyOf", [inner]))
        return inner if refused else _any_of(inner, {"type": "null"})

    def _check_run(self, inner: dict[str, Any]) -> dict[str, Any]:
        return _any_of(_text_of(_trimmed(MAX_RUN, SPACE, UNPRINTABLE)), *inner["anyOf"][1:])

    def _drop_missing(self, post: dict[str, Any]) -> dict[str, Any]:
        """Allow null for every optional field."""
        for name, field in post["properties"].items():
            if name not in post["required"]:
                field |= _any_of(field, {"type": "null"})  # noqa: PLW2901 - extends the property in place
        return post

    def _as_seconds(self, inner: dict[str, Any]) -> dict[str, Any]:
        return inner

    def _has_text(self, post: dict[str, Any]) -> dict[str, Any]:
        gone = "|".join(re.escape(words) for words in sorted(REMOVED_BODIES))
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

    def _parse_labels(self, described: dict[str, Any]) -> dict[str, Any]:
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

    def _check_label_count(self, inner: dict[str, Any]) -> dict[str, Any]:
        (values,) = inner["patternProperties"].values()
        keys = {"propertyNames": _text_of(_trimmed(200, PYTHON_SPACE)), "additionalProperties": values}
        return {"type": "object", "minProperties": 1, "maxProperties": MAX_LABELS} | keys

    def _as_tuple(self, several: dict[str, Any]) -> dict[str, Any]:
        return _any_of(several["items"], several)

    def _check_placeholder(self, inner: dict[str, Any]) -> dict[str, Any]:
        return inner | {"pattern": r"\{\}"}

    def _check_version(self, inner: dict[str, Any]) -> dict[str, Any]:
        number, *others = inner["anyOf"]
        return _any_of(number | {"maximum": MESSAGE_VERSION}, *others)


def _text_of(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


def _shared(node: Any) -> Any:
    """Replace the schemas of `TEXTS` with references to `$defs`."""
    if isinstance(node, list):
        return [_shared(each) for each in node]
    if not isinstance(node, dict):
        return node
    for name, text in TEXTS.items():
        if node == _text_of(text["pattern"]):
            return {"$ref": f"#/$defs/{name}"}
    return {key: _shared(value) for key, value in node.items()}


def _any_of(*schemas: dict[str, Any]) -> dict[str, Any]:
    """Combine schemas into one `anyOf` without nesting and duplicates."""
    either: list[dict[str, Any]] = []
    for schema in schemas:
        either += [each for each in schema.get("anyOf", [schema]) if each not in either]
    return {"anyOf": either}


def _comments(model: type[BaseModel]) -> dict[str, str]:
    """Return the `#:` comments above the fields of a model and of its base classes."""
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
    """Return both schemas by file name."""
    request = _shared(Request.model_json_schema(schema_generator=Reads))
    request["$defs"] |= {name: {"type": "string"} | text for name, text in TEXTS.items()}
    result = TypeAdapter(Result).json_schema(schema_generator=Described, mode="serialization")
    found = {"request": request, "result": result}
    return {
        f"{name}.json": {"$schema": DIALECT, "$id": f"urn:feedmill:classify:{MESSAGE_VERSION}:{name}"} | schema
        for name, schema in found.items()
    }


def written() -> dict[str, str]:
    """Return the content of both files by file name."""
    return {name: json.dumps(schema, indent=2) + "\n" for name, schema in schemas().items()}
