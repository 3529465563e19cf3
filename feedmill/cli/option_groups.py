"""Decorators for commands: flags of settings, groups of options, and rules for flags that exclude or need each other.

typer reads a command's flags from its signature. `with_settings` adds the flags of settings and of groups to it:

    @app.command()
    @excludes("--run", "--watch")
    @needs("--table", "--database")
    @with_settings("redis_url")
    def command(settings: Settings, ...) -> None:
"""

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args

from typer import Option
from typer.models import ArgumentInfo, OptionInfo

from feedmill.cli.options import SETTING_HELP, settings_of
from feedmill.shared.broker import user_errors
from feedmill.shared.errors import UserError, printable
from feedmill.shared.settings import Settings

Command = Callable[..., None]
Flags = list[inspect.Parameter]


def with_settings(*names: str, plain_logs: bool = False, explains_redis: bool = True) -> Callable[[Command], Command]:
    """Add the flags of these settings to a command, and pass it the Settings as `settings`.

    Parameters whose type is a dataclass are groups: the command's flags are their fields. A parameter
    or a group's field with the name of one of the settings receives the flag's value, None if it was not given.

    plain_logs: see `settings_of`. explains_redis: convert Redis' errors to UserError.
    """

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = {name: parameter for name, parameter in signature.parameters.items() if name != "settings"}
        groups = {name: flags for name, one in own.items() if (flags := _flags(one.annotation))}
        shown = {flag.name: flag for name, parameter in own.items() for flag in groups.get(name, [parameter])}
        shown |= {name: _flag(name) for name in names}
        parameters = [flag.replace(kind=inspect.Parameter.KEYWORD_ONLY) for flag in shown.values()]

        @wraps(command)
        def expanded(**given: Any) -> None:
            settings = settings_of(plain_logs=plain_logs, **{name: given.get(name) for name in names})
            passed = {name: given[name] for name in own if name in given}
            for name, members in groups.items():
                values = {flag.name: given[flag.name] for flag in members if flag.name in given}
                passed[name] = own[name].annotation(**values)
            if not explains_redis:
                return command(settings=settings, **passed)
            with user_errors(settings):
                return command(settings=settings, **passed)

        expanded.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        expanded.__annotations__ = {flag.name: flag.annotation for flag in parameters}
        return expanded

    return decorate


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
    if isinstance(kind, type) and is_dataclass(kind):
        return list(inspect.signature(kind, eval_str=True).parameters.values())
    return []


def _flag(name: str) -> inspect.Parameter:
    """Return the flag of a setting. Its default is None; the setting's own default applies."""
    kind: Any = Settings.model_fields[name].annotation
    while get_args(kind):
        kind = get_args(kind)[0]  # unwrap an optional or constrained type; a Literal ends at its first choice
    parsed = kind if kind in (int, float, Path) else str
    annotation: Any = Annotated[parsed | None, Option(f"--{name.replace('_', '-')}", help=SETTING_HELP[name])]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=None)
