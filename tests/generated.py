"""Generate the parts of the documentation that repeat the code. `make docs` runs it.

The generated part of a page stands between the comments BEGIN and END; the text around it is
written by hand. The JSON Schema files are generated as a whole. tests/unit/test_generated.py fails
when a page differs from the code.
"""

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from types import ModuleType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from typer.main import get_command

from feedmill.cli.main import application
from feedmill.producers.live import daemon as live_metrics
from feedmill.shared.messages import (
    MAX_POSTS_PER_MESSAGE,
    MESSAGE_VERSION,
    ClassifyOptions,
    Outcome,
    Post,
)
from feedmill.shared.metrics import REDIS_METRICS, SYSTEM_METRICS, Metric
from feedmill.shared.settings import DAY_S, PREFIX, Settings
from feedmill.workers.runtime import metrics as worker_metrics

ROOT = Path(__file__).parent.parent
SCHEMAS = ROOT / "shared/schema"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
BEGIN, END = (
    "<!-- Written by `make docs`. -->\n\n",
    "\n<!-- End of the generated part. -->\n",
)
#: The README's folders. A package's line is the first sentence of its docstring; other folders
#: have theirs here.
FOLDERS = {
    "feedmill": "",
    "producers": "",
    "workers": "",
    "shared": "",
    "tests": "",
    "benchmarks": "",
    "docs": "How it works, a page for each subject, a reference, runnable examples",
    "docker": (
        "Images, compose file, Kubernetes, systemd, Redis' configuration, Prometheus and Grafana"
    ),
}
#: Metrics by the process that serves them.
FIGURES = {
    "Every process that serves metrics (read from Redis)": REDIS_METRICS,
    "`feedmill metrics`": SYSTEM_METRICS,
    "Workers": worker_metrics.METRICS,
    "Daemons of `feedmill ingest`": live_metrics.METRICS,
}
#: The values that a setting of each type takes.
TYPES = {
    bool: "true or false",
    int: "integer",
    float: "number",
    Path: "path",
    SecretStr: "text, secret",
}


def tree() -> str:
    """Return the project's folders with a line for each."""
    lines = [
        f"{folder + '/':<12} {line or first_sentence(ROOT / folder / '__init__.py').rstrip('.')}\n"
        for folder, line in FOLDERS.items()
    ]
    return f"```\n{''.join(lines)}```\n"


def commands() -> str:
    """Return each command with the first paragraph of its help and the names of its arguments and
    flags.
    """
    return table(
        ("command", "does", "arguments and flags"),
        described(get_command(application()), "feedmill"),
    )


def described(command: Any, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield the row of a command, and those of its subcommands.

    command: an object of click, or of the copy of click in typer.
    """
    named = (
        parameter.opts[0]
        if parameter.param_type_name == "option"
        else parameter.metavar or parameter.name.upper()
        for parameter in command.params
        if not getattr(parameter, "hidden", False)
    )
    does = " ".join(command.help.partition("\n\n")[0].split())
    yield f"`{name}`", does, " ".join(f"`{flag}`" for flag in named)
    for word, found in getattr(command, "commands", {}).items():
        yield from described(found, f"{name} {word}")


def settings() -> str:
    """Return each setting with its default and description, under the headings in its class."""
    hints = get_type_hints(Settings, include_extras=True)
    fields = Settings.model_fields
    lines: dict[str, list[str]] = {}
    for heading, name, comment in commented(Settings):
        unset = default(fields[name].default)
        value = f" = {unset}" if unset else ""
        kind = taken(hints[name])
        # The help of a flag names the values that the type names, too.
        flag_help = (fields[name].description or "").replace(f": {kind}.", ".")
        text = f"{flag_help} {comment}".strip()
        lines.setdefault(heading, []).append(
            f"- `{PREFIX}{name.upper()}`{value}: {plain(kind)}. {plain(text)}\n"
        )
    return "\n".join(
        f"## {heading}\n\n{''.join(found)}" for heading, found in lines.items()
    )


def default(value: Any) -> str:
    """Format a default value as in an environment variable."""
    if value is None or value == ():
        return ""
    if isinstance(value, int) and value and value % DAY_S == 0:
        return f"`{value}` ({value // DAY_S} days)"
    if isinstance(value, int) and value and value % 10**8 == 0:
        return f"`{value}` ({value // 10**6:,} MB)"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def taken(hint: Any) -> str:
    """Describe the values that a setting of this type takes."""
    kind, of = get_origin(hint), get_args(hint)
    if kind is Literal:
        return ", ".join(of)
    if kind in (Union, UnionType):
        return taken(of[0])
    if kind is not Annotated:
        return TYPES.get(hint, "text")
    for part in of[1:]:
        if isinstance(part, AfterValidator | BeforeValidator) and "words" in (
            known := inspect.getclosurevars(part.func).nonlocals
        ):
            return f"{known['words']}{', secret' * (of[0] is SecretStr)}"
    return ", ".join(
        [
            taken(of[0]),
            *(
                bounds(part)
                for part in of[1:]
                if isinstance(part, FieldInfo) and part.metadata
            ),
        ]
    )


def bounds(field: FieldInfo) -> str:
    """Describe a number's bounds."""
    match field.metadata:
        case [Gt(gt=above)]:
            return f"more than {above}"
        case [Ge(ge=least)]:
            return f"{least} or more"
        case [Ge(ge=least), Le(le=most)]:
            return f"{least} to {most}"
        case [Gt(gt=above), Le(le=most)]:
            return f"more than {above}, up to {most}"
    raise AssertionError(f"describe {field.metadata} here")


def metrics() -> str:
    """Return each metric by the process that serves it."""
    return "\n".join(
        f"### {title}\n\n{''.join(map(metric, figures))}"
        for title, figures in FIGURES.items()
    )


def metric(declared: Metric) -> str:
    """Return a metric's line.

    Its labels follow its name, as in Prometheus; names of counters end with _total.
    """
    labels = f"{{{','.join(declared.labels)}}}" if declared.labels else ""
    kind = f" ({declared.kind})" if declared.kind in ("histogram", "summary") else ""
    return f"- `{declared.name}{labels}`{kind}: {plain(declared.help)}\n"


def docstring(path: Path) -> str:
    """Return the first paragraph of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split())


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    paragraph = docstring(path)
    found = re.match(r".*?[.?](?= |$)", paragraph)
    return found[0] if found else paragraph


def commented(declared: ModuleType | type) -> Iterator[tuple[str, str, str]]:
    """Yield (heading, name, comment) of each name declared under a `#: …` comment.

    A `# …` comment is a heading.
    """
    heading, comment = "", ""
    for line in map(str.strip, inspect.getsource(declared).splitlines()):
        if line.startswith("#: "):
            comment += f" {line[3:]}"
        elif line.startswith("# "):
            heading = line[2:].rstrip(".")
        elif comment and (name := re.match(r"\w+", line)):
            yield heading, name[0], comment.strip()
            comment = ""


def table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table. Cells may hold code and links; other markup is escaped."""
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [
        f"| {' | '.join(cells)} |"
        for cells in ([plain(cell).replace("|", r"\|") for cell in row] for row in rows)
    ]
    return "".join(f"{line}\n" for line in lines)


def plain(text: str) -> str:
    """Escape HTML outside of code."""
    return re.sub("(`[^`]*`)|<", lambda found: found[1] or "&lt;", text)


class Request(ClassifyOptions):
    """The arguments of the Celery task `feedmill.classify`, by name.

    Positional order: posts, labels, template, multi_label, strict, top_k. An invalid option fails
    the whole message. An invalid post fails alone, and its outcome gives the reason. Not expressed
    here: names of labels must differ after trimming, and text that consists only of whitespace or
    HTML entities for it counts as empty.
    """

    posts: Annotated[list[Post], Field(min_length=1, max_length=MAX_POSTS_PER_MESSAGE)]


Result = Annotated[
    list[Outcome],
    Field(
        min_length=1,
        max_length=MAX_POSTS_PER_MESSAGE,
        title="Result",
        description="The result of the Celery task `feedmill.classify`: one outcome per post, in "
        "the message's order. "
        "New fields do not change the message version.",
    ),
]


class _Described(GenerateJsonSchema):
    """Take the `#:` comments above fields as their descriptions. pydantic would read docstrings at
    each import.
    """

    def model_schema(self, schema: Any) -> dict[str, Any]:
        written = super().model_schema(schema)
        bases = [
            base
            for base in schema["cls"].__mro__
            if base.__module__ == ClassifyOptions.__module__
        ]
        for _, field, comment in chain.from_iterable(map(commented, bases)):
            if field in written["properties"]:
                written["properties"][field]["description"] = comment
        return written

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002 - pydantic's signature
        return False


def schemas() -> dict[str, str]:
    """Return the JSON Schema of the message format, for other applications, by file name.

    It describes what senders should use. Workers accept more, such as numbers in strings and null
    for optional fields.
    """
    made = {
        "request": Request.model_json_schema(schema_generator=_Described),
        "result": TypeAdapter(Result).json_schema(
            schema_generator=_Described, mode="serialization"
        ),
    }
    return {
        f"{name}.json": json.dumps(
            {
                "$schema": DIALECT,
                "$id": f"urn:feedmill:classify:{MESSAGE_VERSION}:{name}",
            }
            | schema,
            indent=2,
        )
        + "\n"
        for name, schema in made.items()
    }


PARTS: dict[str, Callable[[], str]] = {
    "README.md": tree,
    "docs/reference/commands.md": commands,
    "docs/reference/metrics.md": metrics,
    "docs/reference/settings.md": settings,
}


def files() -> Iterator[tuple[Path, str]]:
    """Yield each generated or partly generated file with the text it should have."""
    for page, part in PARTS.items():
        before, _, rest = (ROOT / page).read_text().partition(BEGIN)
        yield ROOT / page, before + BEGIN + part() + END + rest.partition(END)[2]
    for name, text in schemas().items():
        yield SCHEMAS / name, text


if __name__ == "__main__":
    for path, text in files():
        path.write_text(text)
