"""Options shared by several commands, the settings that a command loads from its flags, and rules for flags.

typer reads a command's flags from its signature. `with_settings` adds the flags of settings and of groups to it:

    @app.command()
    @excludes("--run", "--watch")
    @needs("--table", "--database")
    @with_settings("redis_url")
    def command(settings: Settings, ...) -> None:
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from redis import Redis
from typer import Argument, Option
from typer.models import ArgumentInfo, OptionInfo

from feedmill.producers.records import Columns, seconds_of_date
from feedmill.shared import logs
from feedmill.shared.errors import UserError, printable
from feedmill.shared.messages import ClassifyOptions, parse_run
from feedmill.shared.redis_errors import user_errors
from feedmill.shared.settings import CLASSIFIER_CHOICES, Settings, load, unknown_variables

logger = logging.getLogger(__name__)

Command = Callable[..., None]
Flags = list[inspect.Parameter]

#: Help of each flag that overrides the setting of its name.
SETTING_HELP = {
    "redis_url": "Redis URL: redis://:password@host:6379/0 (default: the running `feedmill up`, else localhost).",
    "data_folder": "Folder for data and logs of `feedmill up` (default: ~/.local/share/feedmill).",
    "queue": "Queue name (default: feedmill).",
    "priority": "Message priority, 0 (first) to 9 (last) (default: 0).",
    "posts_per_message": "Posts per message (default: 32).",
    "reddit_topics": "Topics file in TOML (default: built in).",
    "bluesky_languages": "Read only posts that declare one of these languages: en,pt.",
    "bluesky_min_characters": "Read only posts with at least this many characters (default: 1).",
    "model": "Model: a folder or a Hugging Face Hub name (default: the bundled all-MiniLM-L6-v2).",
    "revision": "Branch, tag or commit of a Hub model (default: main).",
    "classifier": f"Classifier: {CLASSIFIER_CHOICES} (default: auto).",
    "engine": "Inference engine: torch, onnx or module:Class (default: torch).",
    "device": "Device: auto, cpu, cuda, cuda:N or mps (default: auto).",
    "devices": "Devices, one worker each: all, GPUs such as 0,2, cpu or cpu:N (default: --device).",
    "dtype": "Data type: auto, float32, bfloat16, float16 or int8 (default: auto).",
    "labels": 'Candidate labels: a,b,c; JSON such as \\["a", "b"] or {"a": "description"}; or a file: labels.json, '
    "labels.csv, labels.txt.",
    "template": "Sentence with {} in place of the label, such as 'This post is about {}.'",
    "token_budget": "Maximum tokens per micro-batch, with padding (default: measured once).",
    "include": "Modules with your own Celery tasks to load: a,b.c.",
    "metrics_port": "Port for Prometheus metrics.",
}
#: Settings of commands that classify, and of commands that send posts.
MODEL = ("model", "labels", "template", "classifier", "engine", "device", "dtype")
SENDING = ("labels", "template", "queue", "priority", "redis_url")

AsJson = Annotated[bool, Option("--json", help="Print JSON, one object per line.")]
JsonSummary = Annotated[bool, Option("--json", help="Print the summary as a JSON line.")]
RunName = Annotated[
    str | None, Option("--run", metavar="NAME", parser=parse_run, help="Run, as `feedmill status` lists it.")
]
Limit = Annotated[int | None, Option(metavar="N", help="Maximum number of posts to read (default: all).", min=1)]
MultiLabelOption = Annotated[bool, Option("--multi-label", help="Score each label independently.")]
Yes = Annotated[bool, Option("--yes", help="Do not ask for confirmation.")]
File = Annotated[
    str,
    Argument(
        metavar="FILE",
        help="Posts as CSV, JSONL, a JSON array, Parquet or .txt; plain, gzip or zstd; - is standard input.",
    ),
]


def parse_date(date: str) -> float:
    """Parse the date of an option to seconds since 1970."""
    with suppress(ValueError):
        return seconds_of_date(date.strip())
    raise typer.BadParameter(f"{date!r:.80} is not a date. Write 2026-01-31, or 2026-01-31T12:30 (UTC).")


Since = Annotated[
    float | None,
    Option(
        metavar="DATE", parser=parse_date, help="Only from this date on, such as 2026-01-31 or 2026-01-31T12:30 (UTC)."
    ),
]


@dataclass(frozen=True)
class Period:
    """Flags of a period, as seconds since 1970. Raises UserError if it is empty."""

    since: Since = None
    until: Annotated[float | None, Option(metavar="DATE", parser=parse_date, help="Only before this date (UTC).")] = (
        None
    )

    def __post_init__(self) -> None:
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise UserError(f"--since {utc(self.since)} must be before --until {utc(self.until)}.")


def utc(seconds: float) -> str:
    """Format seconds since 1970 as date and time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds")


def settings_of(*, plain_logs: bool = False, **flags: Any) -> Settings:
    """Load the settings with these option values, configure logging and warn about unknown variables.

    flags: option values by setting name; None means that the option was not given. plain_logs: see `logs.configure`.
    Raises SettingsError for a value that is out of range or malformed.
    """
    settings = load(**flags)
    logs.configure(settings, plain=plain_logs)
    for warning in unknown_variables():
        logger.warning(warning)
    if flags.get("labels") is not None and len(settings.labels or ()) == 1:
        typer.echo("--labels names only one label, which every post gets. Separate labels by commas.", err=True)
    return settings


@dataclass(frozen=True)
class FileFlags:
    """Flags of commands that read posts from a file: its columns and its encoding."""

    id_column: Annotated[
        str | None, Option(metavar="NAME", help="Column or JSON key with the post id (default: id or post_id).")
    ] = None
    title_column: Annotated[
        str | None, Option(metavar="NAME", help="Column or JSON key with the title (default: found by its name).")
    ] = None
    body_column: Annotated[
        str | None, Option(metavar="NAME", help="Column or JSON key with the text (default: found by its name).")
    ] = None
    encoding: Annotated[
        str | None, Option(help="Encoding of the file, such as cp1252 (default: UTF-8, or UTF-16 with its mark).")
    ] = None

    def columns(self, date_format: str | None = None, keep: Sequence[str] = ()) -> Columns:
        """Return the chosen columns. keep: columns that the posts carry along."""
        return Columns.of(self.id_column, self.title_column, self.body_column, date_format=date_format, keep=keep)


@dataclass(frozen=True)
class MessageFlags:
    """Flags of a producer: the options of its messages, and the queue that it sends to.

    Fields without an option are flags of SENDING; None if only the environment sets them.
    """

    labels: str | None = None
    template: str | None = None
    multi_label: MultiLabelOption = False
    queue: str | None = None

    def options(self, settings: Settings) -> ClassifyOptions:
        """Return the message options.

        Options that were not given stay unset, so that the worker's settings apply and not this process's.
        """
        labels = None if self.labels is None else settings.labels
        return ClassifyOptions(labels=labels, template=self.template, multi_label=self.multi_label)

    def check_queue(self, redis: Redis) -> None:
        """Check the queue that `--queue` selects. Raises UserError if it is unknown, and redis.exceptions.RedisError.

        FEEDMILL_QUEUE is not checked against the known queues, because producers may start before the first worker.
        """
        from feedmill.shared.model_routing import check_queue  # noqa: PLC0415 - Celery, which other commands need not

        if self.queue is not None:
            check_queue(redis, self.queue)


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

        rules: list[Callable[[set[str]], str]] = []

        @wraps(command)
        def expanded(**given: Any) -> None:
            # Flags are typed if they have other than default values.
            typed = {_shown_name(shown[name]) for name in given if given[name] not in (shown[name].default, None, [])}
            for rule in rules:
                if text := rule(typed):
                    raise UserError(text)
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
        expanded.rules = rules  # type: ignore[attr-defined]
        expanded.__annotations__ = {flag.name: flag.annotation for flag in parameters}
        return expanded

    return decorate


def excludes(flag: str, *others: str) -> Callable[[Command], Command]:
    """Refuse a command line that has `flag` and one of `others`. Arguments are named as in the help, such as FILE."""

    def problem(typed: set[str]) -> str:
        other = next((other for other in others if {flag, other} <= typed), "")
        return other and f"{flag} cannot be combined with {other.removesuffix('...')}. Leave out one of them."

    return _rule(problem)


def needs(flag: str, other: str) -> Callable[[Command], Command]:
    """Refuse a command line that has `flag` without `other`."""
    return _rule(lambda typed: f"{flag} needs {other}." if flag in typed and other not in typed else "")


def refuse(*rules: tuple[bool, str]) -> None:
    """Raise UserError for the first rule about values that applies. Each rule says whether it does, and the error."""
    for applies, message in rules:
        if applies:
            raise UserError(printable(message))


def _rule(problem: Callable[[set[str]], str]) -> Callable[[Command], Command]:
    """Return a decorator that adds a rule to a command of `with_settings`: the problem of the typed flags, or ""."""

    def decorate(command: Command) -> Command:
        command.rules.insert(0, problem)  # type: ignore[attr-defined]
        return command

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
