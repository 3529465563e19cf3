"""Options shared by several commands, the settings that a command loads from its flags, and rules
for flags.

typer reads a command's flags from its signature. `with_settings` adds the flags of settings and of
groups to it:

    @app.command()
    @excludes("--run", "--watch")
    @needs("--table", "--database")
    @with_settings("redis_url")
    def command(settings: Settings, ...) -> None:
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, is_dataclass
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

import typer
from pydantic import ValidationError
from redis import Redis
from typer import Argument, Option
from typer.models import ArgumentInfo, OptionInfo

from feedmill.cli.none_flag import parse_none
from feedmill.producers.records import (
    COMMENTS,
    FileOptions,
    parse_kinds,
    seconds_of_date,
)
from feedmill.shared import errors, logs
from feedmill.shared.errors import UserError
from feedmill.shared.messages import ClassifyOptions, parse_run
from feedmill.shared.redis_errors import user_errors
from feedmill.shared.settings import (
    Settings,
    load,
    unknown_variables,
)

if TYPE_CHECKING:
    from feedmill.producers.titles import Titles

logger = logging.getLogger(__name__)

#: Parameter with typer's context in a command of `with_settings`.
CONTEXT = "typer_context"

Command = Callable[..., None]
Flags = list[inspect.Parameter]
#: Returns the problem of the flags on a command line, or "".
Rule = Callable[[set[str]], str]

#: Settings of commands that classify, and of commands that send posts.
MODEL = ("model", "labels", "template", "classifier", "engine", "device", "dtype")
SENDING = ("labels", "template", "queue", "priority", "redis_url")

AsJson = Annotated[bool, Option("--json", help="Print JSON, one object per line.")]
JsonSummary = Annotated[
    bool, Option("--json", help="Print the summary as a JSON line.")
]
RunName = Annotated[
    str | None,
    Option(
        "--run",
        metavar="NAME",
        parser=parse_run,
        help=("Run, as `feedmill status` lists it."),
    ),
]
ForExcel = Annotated[
    bool,
    Option(
        "--excel",
        help=(
            "With --out: begin CSV with a byte order mark, so that Excel reads it as UTF-8."
        ),
    ),
]
Limit = Annotated[
    int | None,
    Option(
        metavar="N",
        help=("Maximum number of posts to read (default: all)."),
        min=1,
    ),
]
MultiLabelOption = Annotated[
    bool, Option("--multi-label", help="Score each label independently.")
]

#: A float or a bool, which typer cannot tell.
NoneOption = Annotated[
    float | None,
    Option(
        "--none",
        metavar="SCORE",
        parser=parse_none,
        help=(
            "Give no label to posts whose best label has a lower score than this, from 0 to 1, "
            "because they fit none. Without a value: the model's default. off: each post has a "
            "label."
        ),
    ),
]
Yes = Annotated[bool, Option("--yes", help="Do not ask for confirmation.")]
File = Annotated[
    str,
    Argument(
        metavar="FILE",
        help=(
            "Posts as CSV, JSONL, a JSON array, Parquet, .xlsx or .txt; plain, gzip or zstd; - "
            "is standard input."
        ),
    ),
]


def parse_date(date: str) -> float:
    """Parse the date of an option to seconds since 1970."""
    try:
        return seconds_of_date(date.strip())
    except ValueError:
        raise typer.BadParameter(
            f"{date!r:.80} is not a date. Write 2026-01-31, or 2026-01-31T12:30 (UTC)."
        ) from None


Since = Annotated[
    float | None,
    Option(
        metavar="DATE",
        parser=parse_date,
        help=("Only from this date on, such as 2026-01-31 or 2026-01-31T12:30 (UTC)."),
    ),
]


@dataclass(frozen=True)
class Period:
    """Flags of a period, as seconds since 1970. Raises UserError if it is empty."""

    since: Since = None
    until: Annotated[
        float | None,
        Option(
            metavar="DATE",
            parser=parse_date,
            help="Only before this date (UTC).",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.since is None or self.until is None:
            return
        if self.since >= self.until:
            since = utc(self.since)
            until = utc(self.until)
            raise UserError(f"--since {since} must be before --until {until}.")


def utc(seconds: float) -> str:
    """Format seconds since 1970 as date and time in UTC."""
    time = datetime.fromtimestamp(seconds, UTC)
    return time.isoformat(" ", "seconds")


def load_for_command(*, plain_logs: bool = False, **flags: Any) -> Settings:
    """Load the settings with these option values, configure logging and warn about unknown
    variables.

    flags: option values by setting name; None means that the option was not given. plain_logs: see
    `logs.configure`. Raises SettingsError for a value that is out of range or malformed.
    """
    settings = load(**flags)
    logs.configure(settings, plain=plain_logs)
    for warning in unknown_variables():
        logger.warning(warning)
    has_labels_flag = flags.get("labels") is not None
    if has_labels_flag:
        _warn_of_single_label(settings)
    return settings


def _warn_of_single_label(settings: Settings) -> None:
    if len(settings.labels or ()) == 1:
        typer.echo(
            "--labels names only one label, which every post gets. Separate labels by commas.",
            err=True,
        )


@dataclass(frozen=True)
class FileFlags(FileOptions):
    """Flags of commands that read posts from a file: its columns and its encoding."""

    id_column: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help=("Column or JSON key with the post id (default: id or post_id)."),
        ),
    ] = None
    title_column: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help=("Column or JSON key with the title (default: found by its name)."),
        ),
    ] = None
    body_column: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help=("Column or JSON key with the text (default: found by its name)."),
        ),
    ] = None
    encoding: Annotated[
        str | None,
        Option(
            help=(
                "Encoding of the file, such as cp1252 (default: UTF-8, or UTF-16 with its mark)."
            )
        ),
    ] = None
    label_column: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help=(
                "Column or JSON key with the true label (default: topic, label or category)."
            ),
        ),
    ] = None
    date_column: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help=("Column or JSON key with the date (default: found by its name)."),
        ),
    ] = None
    subreddit_column: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help=(
                "Column or JSON key with the subreddit, or another group that posts come from "
                "(default: subreddit)."
            ),
        ),
    ] = None
    date_format: Annotated[
        str | None,
        Option(
            metavar="FORMAT",
            help=("Format of the file's dates, such as %d.%m.%Y (default: ISO)."),
        ),
    ] = None


@dataclass(frozen=True)
class KindFlags:
    """Flags about the comments in a file. Raises UserError."""

    kind: Annotated[
        str,
        Option(
            "--kind",
            metavar="KINDS",
            help=("What to read of Reddit's dumps: posts, comments or posts,comments."),
        ),
    ] = "posts"
    context: Annotated[
        str | None,
        Option(
            "--context",
            metavar="title",
            help=(
                "title: classify a comment with its post's title, from this file or from "
                "--titles."
            ),
        ),
    ] = None
    titles: Annotated[
        list[str] | None,
        Option(
            "--titles",
            metavar="FILE",
            help=(
                "With --context: file with the posts of the comments, such as "
                "RS_2023-11.zst; may be repeated (default: the file itself)."
            ),
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.context not in (None, "title"):
            raise UserError("--context: give title, the title of a comment's post.")
        if self.context is not None and COMMENTS not in self.kinds:
            raise UserError("--context is for comments. Give --kind posts,comments.")
        if self.titles and self.context is None:
            raise UserError("--titles needs --context title.")

    @property
    def kinds(self) -> frozenset[str]:
        return parse_kinds(self.kind)

    def open_titles(
        self,
        file: str,
        columns: FileOptions,
        subreddits: frozenset[str] = frozenset(),
    ) -> AbstractContextManager["Titles | None"]:
        """Return a block with the titles of posts; with None if comments have no context."""
        if self.context is None:
            return nullcontext()
        # SQLite, which few commands need.
        from feedmill.producers.titles import titles_of  # noqa: PLC0415

        return titles_of(
            self.titles or [file],
            columns.columns(),
            columns.encoding,
            subreddits,
        )


def message_options(**options: Any) -> ClassifyOptions:
    """Return message options. Raises UserError if flags contradict each other."""
    try:
        return ClassifyOptions(**options)
    except ValidationError as error:
        option, reason = errors.first_problem(error)
        flag = option.replace("_", "-")
        raise UserError(f"--{flag}: {reason}.") from None


@dataclass(frozen=True)
class MessageFlags:
    """Flags of a producer: the options of its messages, and the queue that it sends to.

    Fields without an option are flags of SENDING; None if only the environment sets them.
    """

    labels: str | None = None
    template: str | None = None
    multi_label: MultiLabelOption = False
    none: NoneOption = None
    precision: Annotated[
        float | None, Option("--precision", hidden=True, metavar="SHARE")
    ] = None
    queue: str | None = None

    def __post_init__(self) -> None:
        if self.precision is not None:
            raise UserError(
                "--precision needs the scores of all posts, which a queue gets one by one. Use "
                "`feedmill classify FILE --precision`, or choose a threshold with --none."
            )

    def options(self, settings: Settings) -> ClassifyOptions:
        """Return the message options.

        Options that were not given stay unset, so that the worker's settings apply and not this
        process's.
        """
        labels = None if self.labels is None else settings.labels
        return message_options(
            labels=labels,
            template=self.template,
            multi_label=self.multi_label,
            none=self.none,
        )

    def check_queue(self, redis: Redis) -> None:
        """Check the queue that `--queue` selects.

        Raises UserError if it is unknown, and redis.exceptions.RedisError.

        FEEDMILL_QUEUE is not checked against the known queues, because producers may start before
        the first worker.
        """
        # Celery, which other commands need not.
        from feedmill.shared.model_routing import check_queue  # noqa: PLC0415

        if self.queue is not None:
            check_queue(redis, self.queue)


def with_settings(
    *names: str, plain_logs: bool = False, explains_redis: bool = True
) -> Callable[[Command], Command]:
    """Add the flags of these settings to a command, and pass it the Settings as `settings`.

    Parameters whose type is a dataclass are groups: the command's flags are their fields. A
    parameter or a group's field with the name of one of the settings receives the flag's value,
    None if it was not given.

    plain_logs: see `load_for_command`. explains_redis: convert Redis' errors to UserError.
    """

    def decorate(command: Command) -> Command:
        interface = _interface(command, names)
        rules: list[Rule] = []

        @wraps(command)
        def run_command(**values: Any) -> None:
            context = values.pop(CONTEXT)
            command_line = _flags_on_command_line(context, interface.flags, values)
            for rule in rules:
                problem = rule(command_line)
                if problem:
                    raise UserError(problem)
            setting_values = {name: values.get(name) for name in names}
            settings = load_for_command(plain_logs=plain_logs, **setting_values)
            arguments = interface.arguments(values)
            explained: AbstractContextManager[None] = nullcontext()
            if explains_redis:
                explained = user_errors(settings)
            with explained:
                command(settings=settings, **arguments)

        signature = interface.signature()
        annotations: dict[str, Any] = {}
        for parameter in signature.parameters.values():
            annotations[parameter.name] = parameter.annotation
        run_command.__signature__ = signature  # type: ignore[attr-defined]
        run_command.__annotations__ = annotations
        run_command.rules = rules  # type: ignore[attr-defined]
        return run_command

    return decorate


class _Interface(NamedTuple):
    """The flags of a command, and its parameters, to which their values go.

    parameters: of the command, without `settings`. groups: the flags of each parameter that is a
    group. flags: all, by name: fields of groups, other parameters, and settings.
    """

    parameters: Mapping[str, inspect.Parameter]
    groups: Mapping[str, Flags]
    flags: Mapping[str, inspect.Parameter]

    def signature(self) -> inspect.Signature:
        """Return what typer reads: a parameter for its context, and one for each flag."""
        context = inspect.Parameter(
            CONTEXT,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=typer.Context,
        )
        parameters = [context]
        for flag in self.flags.values():
            parameter = flag.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            parameters.append(parameter)
        return inspect.Signature(parameters)

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the command's arguments. values: those of the flags, by name."""
        arguments = _only(self.parameters, values)
        for name, members in self.groups.items():
            field_names = [flag.name for flag in members]
            fields = _only(field_names, values)
            group = self.parameters[name].annotation
            arguments[name] = group(**fields)
        return arguments


def _interface(command: Command, setting_names: Iterable[str]) -> _Interface:
    """Return the flags of a command. setting_names: settings that have a flag."""
    signature = inspect.signature(command, eval_str=True)
    parameters = dict(signature.parameters)
    parameters.pop("settings", None)
    groups: dict[str, Flags] = {}
    flags: dict[str, inspect.Parameter] = {}
    for name, parameter in parameters.items():
        members = _group_flags(parameter.annotation)
        if not members:
            flags[name] = parameter
            continue
        groups[name] = members
        for flag in members:
            flags[flag.name] = flag
    for name in setting_names:
        flags[name] = _setting_flag(name)
    return _Interface(parameters, groups, flags)


def _flags_on_command_line(
    context: typer.Context,
    flags: Mapping[str, inspect.Parameter],
    values: Mapping[str, Any],
) -> set[str]:
    """Return the flags and arguments on the command line, named as in the help, also if their
    value is the default.
    """
    names = set()
    for name, flag in flags.items():
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        # `--no-…` asks for nothing where that is the default.
        is_off = flag.default is False and values[name] is False
        if not is_off:
            names.add(_shown_name(flag))
    return names


def _only(names: Iterable[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of these names, without names that have none."""
    return {name: values[name] for name in names if name in values}


def excludes(flag: str, *others: str) -> Callable[[Command], Command]:
    """Refuse a command line that has `flag` and one of `others`.

    Arguments are named as in the help, such as FILE.
    """

    def problem(command_line: set[str]) -> str:
        if flag not in command_line:
            return ""
        for other in others:
            if other in command_line:
                name = other.removesuffix("...")
                return f"{flag} cannot be combined with {name}. Leave out one of them."
        return ""

    return _rule(problem)


def needs(flag: str, other: str) -> Callable[[Command], Command]:
    """Refuse a command line that has `flag` without `other`."""

    def problem(command_line: set[str]) -> str:
        if flag not in command_line or other in command_line:
            return ""
        return f"{flag} needs {other}."

    return _rule(problem)


def _rule(rule: Rule) -> Callable[[Command], Command]:
    """Return a decorator that adds a rule to a command of `with_settings`."""

    def decorate(command: Command) -> Command:
        command.rules.insert(0, rule)  # type: ignore[attr-defined]
        return command

    return decorate


def _shown_name(parameter: inspect.Parameter) -> str:
    """Return the name of a flag, such as --run, or of an argument, such as FILE, as the help shows
    it.
    """
    for option in getattr(parameter.annotation, "__metadata__", ()):
        if isinstance(option, ArgumentInfo):
            return option.metavar or parameter.name.upper()
        # In an annotation, typer takes a name that comes first for the default.
        if isinstance(option, OptionInfo) and isinstance(option.default, str):
            name, _, _ = option.default.partition("/")
            return name
    return _long_flag(parameter.name)


def _long_flag(name: str) -> str:
    """Return the flag of a parameter or setting, such as --posts-per-message."""
    words = name.replace("_", "-")
    return f"--{words}"


def _group_flags(kind: Any) -> Flags:
    """Return the flags of a group; none for any other type."""
    if not isinstance(kind, type) or not is_dataclass(kind):
        return []
    signature = inspect.signature(kind, eval_str=True)
    return list(signature.parameters.values())


def setting_help(name: str) -> str:
    """Return the help of a setting's flag, with the setting's default if the text names none."""
    field = Settings.model_fields[name]
    if field.description is None:
        raise TypeError(f"the setting {name} has a flag, but no description")
    text = field.description.replace("[", r"\[")  # not rich's markup
    default = field.default
    if default in (None, ()) or "(default: " in text:
        return text
    return f"{text.removesuffix('.')} (default: {default})."


def _setting_flag(name: str) -> inspect.Parameter:
    """Return the flag of a setting. Its default is None; the setting's own default applies."""
    field = Settings.model_fields[name]
    kind: Any = field.annotation
    while get_args(kind):
        # unwrap an optional or constrained type; a Literal ends at its first choice
        kind = get_args(kind)[0]
    parsed = kind if kind in (int, float, Path) else str
    option = Option(_long_flag(name), help=setting_help(name))
    annotation: Any = Annotated[parsed | None, option]
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=annotation,
        default=None,
    )
