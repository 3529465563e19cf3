"""What of the documentation is written by the code: `make docs` writes it, and tests/unit/test_generated.py holds it.

A page's generated part stands between two comments; what is around them is written by hand. Each function of a page
returns its part. The JSON Schema is generated as well, as whole files.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, SecretStr
from pydantic.fields import FieldInfo
from typer.main import get_command

from feedmill.cli import app
from producers.reddit import metrics as reddit_metrics
from shared import keys, schema
from shared.metrics import REDIS_FIGURES
from shared.settings import DAY, PREFIX, Settings
from tests.sentences import CLASSES, sentences
from workers import metrics as worker_metrics

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- Written by `make docs`. -->\n\n", "\n<!-- Its end. -->\n"
#: The README's folders, with a line for each that is no package.
FOLDERS = {
    "feedmill": "",
    "producers": "",
    "workers": "",
    "shared": "",
    "tests": "",
    "benchmarks": "",
    "docs": "How it works, and a page for each subject; runnable examples",
    "docker": "Images, compose file, Kubernetes, systemd, Redis' configuration, Prometheus and Grafana",
}
#: In the order in which a post comes through them; then the command, which is around them.
PACKAGES = ("producers", "shared", "workers", "feedmill")
#: By who serves them.
FIGURES = {
    "Every process that serves metrics, read off Redis": REDIS_FIGURES,
    "Workers": worker_metrics.FIGURES,
    "The Reddit daemon": reddit_metrics.FIGURES,
}
#: What a setting of a type takes.
TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    Path: "a path",
    SecretStr: "text, a secret",
}


def tree() -> str:
    """The folders of the project: of a package the first sentence of its docstring."""
    lines = [
        f"{folder + '/':<12} {line or docstring(ROOT / folder / '__init__.py').partition('. ')[0].rstrip('.')}\n"
        for folder, line in FOLDERS.items()
    ]
    return f"```\n{''.join(lines)}```\n"


def modules() -> str:
    """Each module of the packages with the first paragraph of its docstring."""
    return "\n".join(
        f"## {package}/\n\n{docstring(ROOT / package / '__init__.py')}\n\n"
        + table(
            ("file", "what it does"),
            (
                (f"[{path.relative_to(ROOT / package)}](../{path.relative_to(ROOT)})", docstring(path))
                for path in sorted((ROOT / package).rglob("*.py"))
                if path.parent != ROOT / package or path.name != "__init__.py"
            ),
        )
        for package in PACKAGES
    )


def commands() -> str:
    """Each command with its arguments and flags, in the order of `feedmill --help`."""
    parts = list(described(get_command(app), "feedmill"))
    rows = [(f"[`{name}`](#{name.replace(' ', '-')})", said.partition("\n")[0]) for name, said, _ in parts[1:]]
    return table(("command", "what it does"), rows) + "".join(
        f"\n## {name}\n\n{said}\n" + (flags and f"\n{flags}") for name, said, flags in parts
    )


def described(command: Any, name: str, parent: Any = None) -> Iterator[tuple[str, str, str]]:
    """(name, what it does, table of its arguments and flags) of a command, and of those below it.

    command: click's, or that of the click that typer brings along.
    """
    with command.context_class(command, info_name=name, parent=parent) as context:
        records = [parameter.get_help_record(context) for parameter in command.params]
        rows = []
        for record in filter(None, records):
            said, _, rest = record[1].partition("  [")
            shown = re.sub(r" <(list\[)?(.*?)\]?( range)?>", r" <\2>", record[0])
            rows.append((f"`{shown}`", said.replace("\\[", "["), rest.removesuffix("]").replace("default: ", "")))
        yield name, command.help, table(("argument or flag", "what it says", "default, bounds"), rows) if rows else ""
        for word, below in getattr(command, "commands", {}).items():
            yield from described(below, f"{name} {word}", context)


def settings() -> str:
    """Each setting with its default, under the headings of its class."""
    hints = get_type_hints(Settings, include_extras=True)
    rows: dict[str, list[tuple[str, ...]]] = {}
    for heading, name, comment in commented(Settings):
        row = (f"`{PREFIX}{name.upper()}`", default(Settings.model_fields[name].default), taken(hints[name]), comment)
        rows.setdefault(heading, []).append(row)
    columns = ("variable", "default", "takes", "what it is")
    return "\n".join(f"## {heading}\n\n{table(columns, found)}" for heading, found in rows.items())


def default(value: Any) -> str:
    """As it is written in the environment."""
    if value is None or value == ():
        return ""
    if isinstance(value, int) and value and value % DAY == 0:
        return f"`{value}` ({value // DAY} days)"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def taken(hint: Any) -> str:
    """What a setting of this type takes, in words."""
    kind, of = get_origin(hint), get_args(hint)
    if kind is Literal:
        return ", ".join(of)
    if kind in (Union, UnionType):
        return taken(of[0])
    if kind is not Annotated:
        return TYPES.get(hint, "text")
    for said in of[1:]:
        if isinstance(said, AfterValidator) and "words" in (known := inspect.getclosurevars(said.func).nonlocals):
            return str(known["words"])
    return ", ".join([taken(of[0]), *(bounds(said) for said in of[1:] if isinstance(said, FieldInfo))])


def bounds(field: FieldInfo) -> str:
    """A number's, in words."""
    match field.metadata:
        case [Gt(gt=above)]:
            return f"more than {above}"
        case [Ge(ge=least)]:
            return f"{least} or more"
        case [Ge(ge=least), Le(le=most)]:
            return f"{least} to {most}"
    raise AssertionError(f"say in words what {field.metadata} means")


def metrics() -> str:
    """Each figure that is served, by who serves it."""
    columns = ("metric", "type", "labels", "what it tells")
    return "\n".join(
        f"### {title}\n\n"
        + table(
            columns,
            ((f"`{one.name}`", one.kind, ", ".join(f"`{label}`" for label in one.labels), one.help) for one in figures),
        )
        for title, figures in FIGURES.items()
    )


def redis_keys() -> str:
    """Each key in Redis, with what its comment or its function's docstring says that it holds."""
    holds = {getattr(keys, name): comment for _, name, comment in commented(keys)}
    holds |= {make("*"): inspect.getdoc(make) for name, make in vars(keys).items() if name.endswith("_key")}
    rows = []
    for key in keys.TABLE:
        writer, _, rest = key.writer.partition(", ")
        pattern = repr(key.pattern)[1:-1]
        rows.append((f"`{pattern}`", key.type, holds.get(key.pattern, rest), writer, limit(key.bound, writer)))
    return table(("key", "type", "what it holds", "written by", "bound"), rows)


def limit(bound: str, writer: str) -> str:
    """A key's bound with its settings as variables, and with the values of its writer's constants."""
    module = import_module(writer.removesuffix(".py").replace("/", ".")) if writer.endswith(".py") else None
    bound = re.sub(r"\b[A-Z_]{4,}\b", lambda name: f"{name[0]} ({getattr(module, name[0]):,})", bound)
    return re.sub(
        r"\b[a-z]+(_[a-z]+)+\b",
        lambda name: f"`{PREFIX}{name[0].upper()}`" if name[0] in Settings.model_fields else name[0],
        bound,
    )


def errors() -> str:
    """Each error, with the sentences that are raised as it."""
    parts = []
    for name, error in CLASSES.items():
        rows = [
            (sentence.words, ", ".join(f"`{path}`" for path in sentence.files))
            for sentence in sentences()
            if sentence.error == name
        ]
        found = "\n" + table(("sentence", "raised in"), rows) if rows else ""
        parts.append(f"## {name}\n\n{inspect.getdoc(error)}\n{found}")
    return "\n".join(parts)


def docstring(path: Path) -> str:
    """The first paragraph of a module's."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split())


def commented(declared: ModuleType | type) -> Iterator[tuple[str, str, str]]:
    """(heading, name, comment) of what is declared under a comment with a colon: `#: Seconds that …`."""
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
    """A table in Markdown. Cells may hold code and links; what else means something there is shown as it is."""
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(plain(cell) for cell in row)} |" for row in rows]
    return "".join(f"{line}\n" for line in lines)


def plain(cell: str) -> str:
    return re.sub("(`[^`]*`)|<", lambda found: found[1] or "&lt;", cell).replace("|", r"\|")


PARTS: dict[str, Callable[[], str]] = {
    "README.md": tree,
    "docs/commands.md": commands,
    "docs/errors.md": errors,
    "docs/keys.md": redis_keys,
    "docs/metrics.md": metrics,
    "docs/modules.md": modules,
    "docs/settings.md": settings,
}


def files() -> Iterator[tuple[Path, str]]:
    """Each file that is generated, or has a part that is, with its text as it should be."""
    for page, part in PARTS.items():
        before, _, rest = (ROOT / page).read_text().partition(BEGIN)
        yield ROOT / page, before + BEGIN + part() + END + rest.partition(END)[2]
    for name, text in schema.written().items():
        yield schema.FOLDER / name, text


if __name__ == "__main__":
    for path, text in files():
        path.write_text(text)
