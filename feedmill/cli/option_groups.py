"""Decorators for commands: groups of options, and rules for flags that exclude or need each other.

typer reads a command's flags from its signature. `with_groups` replaces each group in the signature with its flags, and
passes the values of the flags to the command as one object of the group's type. `excludes` and `needs` stand above it:

    @app.command()
    @excludes("--run", "--watch")
    @needs("--table", "--database")
    @with_groups
    def command(...) -> None:
"""

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from typing import Annotated, Any, get_args

import typer
from pydantic.fields import FieldInfo
from typer.models import ArgumentInfo, OptionInfo

from feedmill.shared.errors import UserError, printable
from feedmill.workers.training.options import SWITCH, TrainOptions

Command = Callable[..., None]
Flags = list[inspect.Parameter]


def with_groups(command: Command) -> Command:
    """Expand a command's groups: parameters whose type is TrainOptions, or a dataclass with options as annotations."""
    signature = inspect.signature(command, eval_str=True)
    kinds = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    groups = {name: flags for name, kind in kinds.items() if (flags := _flags(kind))}
    parameters = [
        flag.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        for flag in groups.get(name, [parameter])
    ]

    @wraps(command)
    def expanded(**given: Any) -> None:
        for name, flags in groups.items():
            values = {flag.name: given.pop(flag.name) for flag in flags if flag.name in given}
            given[name] = TrainOptions.parse(values) if kinds[name] is TrainOptions else kinds[name](**values)
        command(**given)

    expanded.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {flag.name: flag.annotation for flag in parameters}
    return expanded


def excludes(flag: str, *others: str) -> Callable[[Command], Command]:
    """Refuse a command line that has `flag` and one of `others`. Arguments are named as in the help, such as FILE."""

    def problem(typed: set[str]) -> str | None:
        other = next((other for other in others if {flag, other} <= typed), None)
        return other and f"{flag} cannot be combined with {other.removesuffix('...')}. Leave out one of them."

    return _rule(problem, {flag, *others})


def needs(flag: str, *others: str) -> Callable[[Command], Command]:
    """Refuse a command line that has `flag` without any of `others`."""

    def problem(typed: set[str]) -> str | None:
        if flag not in typed or typed.intersection(others):
            return None
        return f"{flag} needs {' or '.join(others)}."

    return _rule(problem, {flag, *others})


def refuse(*rules: tuple[bool, str]) -> None:
    """Raise UserError for the first rule about values that applies. Each rule says whether it does, and the error."""
    for applies, message in rules:
        if applies:
            raise UserError(printable(message))


def _rule(problem: Callable[[set[str]], str | None], named: set[str]) -> Callable[[Command], Command]:
    """Return a decorator that raises UserError with the problem of the typed flags, those with other than default
    values. Raises ValueError if the command lacks one of the named flags.
    """

    def decorate(command: Command) -> Command:
        parameters = inspect.signature(command, eval_str=True).parameters
        names = {name: _shown_name(parameter) for name, parameter in parameters.items()}
        if unknown := named.difference(names.values()):
            raise ValueError(f"the command has no {', '.join(unknown)}")

        @wraps(command)
        def checked(**given: Any) -> None:
            typed = {names[name] for name, value in given.items() if value not in (parameters[name].default, None, [])}
            if text := problem(typed):
                raise UserError(text)
            command(**given)

        return checked

    return decorate


def _shown_name(parameter: inspect.Parameter) -> str:
    """Return the name of a flag, such as --run, or of an argument, such as FILE, as the help shows it."""
    for option in getattr(parameter.annotation, "__metadata__", ()):
        if isinstance(option, ArgumentInfo):
            return option.metavar or parameter.name.upper()
        # In an annotation, typer takes a name that comes first for the default.
        if isinstance(option, OptionInfo) and isinstance(name := option.default, str):
            return name.partition("/")[0]
    return f"--{parameter.name.replace('_', '-')}"


def _flags(kind: Any) -> Flags:
    """Return the flags of a group; none for any other type."""
    if kind is TrainOptions:
        return [_flag(name, field) for name, field in TrainOptions.model_fields.items()]
    if isinstance(kind, type) and is_dataclass(kind):
        return list(inspect.signature(kind, eval_str=True).parameters.values())
    return []


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return the flag of a pydantic model's field. Its default is None; the model applies the field's own default."""
    flag, description = f"--{(field.alias or name).replace('_', '-')}", field.description or ""
    is_switch = SWITCH in field.metadata
    kind: Any = field.annotation
    while get_args(kind):
        kind = get_args(kind)[0]  # unwrap an optional or constrained type; a Literal ends at its first choice
    if kind is bool and not is_switch:
        flag = f"{flag}/{flag.replace('--', '--no-')}"
    if not (field.is_required() or field.default is None or "(default: " in description):
        description = f"{description.removesuffix('.')} (default: {_shown(field.default)})."
    parsed = kind if isinstance(kind, type) else str
    annotation: Any = Annotated[parsed | None, typer.Option(flag, help=description)]
    default = inspect.Parameter.empty if field.is_required() else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _shown(default: bool | float | str) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return default if isinstance(default, str) else f"{default:,g}"
