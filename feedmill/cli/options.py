"""Options and groups of options shared by several commands, and their conversion to settings."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from redis import Redis

from feedmill.producers.records import Columns
from feedmill.shared import logs
from feedmill.shared.broker import user_errors
from feedmill.shared.errors import UserError
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.model_routing import check_queue, queue_for_model
from feedmill.shared.settings import CLASSIFIER_CHOICES, Settings, load, unknown_variables

logger = logging.getLogger(__name__)

RedisUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Redis URL: redis://:password@host:6379/0 (default: the running `feedmill up`, else localhost).",
    ),
]
DataFolder = Annotated[
    Path | None, typer.Option(help="Folder for data and logs of `feedmill up` (default: ~/.local/share/feedmill).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
JsonSummary = Annotated[bool, typer.Option("--json", help="Print the summary as a JSON line.")]
MetricsPort = Annotated[int | None, typer.Option(help="Serve Prometheus metrics on this port (default: off).")]
ModelOption = Annotated[
    str | None,
    typer.Option(help="Model: a folder or a Hugging Face Hub name (default: the bundled all-MiniLM-L6-v2)."),
]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub model (default: main).")]
ClassifierOption = Annotated[
    str | None,
    typer.Option(help=f"Classifier: {CLASSIFIER_CHOICES} (default: auto)."),
]
EngineOption = Annotated[
    str | None, typer.Option(help="Inference engine: torch, onnx or module:Class (default: torch).")
]
DeviceOption = Annotated[str | None, typer.Option(help="Device: auto, cpu, cuda, cuda:N or mps (default: auto).")]
DtypeOption = Annotated[
    str | None, typer.Option(help="Data type: auto, float32, bfloat16, float16 or int8 (default: auto).")
]
LabelsOption = Annotated[
    str | None,
    typer.Option(
        help='Candidate labels: a,b,c; JSON such as \\["a", "b"] or {"a": "description"}; or a file: labels.json, '
        "labels.csv, labels.txt."
    ),
]
TemplateOption = Annotated[
    str | None, typer.Option(help="Sentence with {} in place of the label, such as 'This post is about {}.'")
]
ToModel = Annotated[
    str | None,
    typer.Option("--model", help="Send to the queue of this model; the last part of the model's name is enough."),
]
ToQueue = Annotated[str | None, typer.Option("--queue", help="Queue name (default: feedmill).")]
RunFilter = Annotated[
    str | None, typer.Option("--run", metavar="NAME", help="Only posts of this run, as `feedmill status` lists it.")
]
IdColumn = Annotated[
    str | None, typer.Option(metavar="NAME", help="Column or JSON key with the post id (default: id or post_id).")
]
TitleColumn = Annotated[
    str | None, typer.Option(metavar="NAME", help="Column or JSON key with the title (default: found by its name).")
]
BodyColumn = Annotated[
    str | None, typer.Option(metavar="NAME", help="Column or JSON key with the text (default: found by its name).")
]
EncodingOption = Annotated[
    str | None, typer.Option(help="Encoding of the file, such as cp1252 (default: UTF-8, or UTF-16 with its mark).")
]
Limit = Annotated[int | None, typer.Option(metavar="N", help="Maximum number of posts to read (default: all).", min=1)]
WorkerName = Annotated[
    str | None, typer.Option(help="Worker name, unique among the workers of one Redis (default: generated).")
]
PriorityOption = Annotated[int | None, typer.Option(help="Message priority, 0 (first) to 9 (last) (default: 0).")]
MultiLabelOption = Annotated[bool, typer.Option("--multi-label", help="Score each label independently.")]


#: The value of `--log-format`, which precedes the command; set by feedmill/cli/main.py.
log_format: str | None = None


def settings_of(*, plain_logs: bool = False, **flags: Any) -> Settings:
    """Load the settings with these option values, configure logging and warn about unknown variables.

    flags: option values by setting name; None means that the option was not given. plain_logs: see `logs.configure`.
    Raises SettingsError for a value that is out of range or malformed.
    """
    settings = load(log_format=log_format, **flags)
    logs.configure(settings, plain=plain_logs)
    for warning in unknown_variables():
        logger.warning(warning)
    if flags.get("labels") is not None and len(settings.labels or ()) == 1:
        typer.echo("--labels names only one label, which every post gets. Separate labels by commas.", err=True)
    return settings


@dataclass(frozen=True)
class ModelFlags:
    """Flags of commands that classify. Each overrides the setting of the same name."""

    labels: LabelsOption = None
    template: TemplateOption = None
    classifier: ClassifierOption = None
    engine: EngineOption = None
    device: DeviceOption = None
    dtype: DtypeOption = None


@dataclass(frozen=True)
class FileFlags:
    """Flags of commands that read posts from a file: its columns and its encoding."""

    id_column: IdColumn = None
    title_column: TitleColumn = None
    body_column: BodyColumn = None
    encoding: EncodingOption = None

    def columns(self, date_format: str | None = None, keep: Sequence[str] = ()) -> Columns:
        """Return the chosen columns. keep: columns that the posts carry along."""
        return Columns.of(self.id_column, self.title_column, self.body_column, date_format=date_format, keep=keep)


@dataclass(frozen=True)
class MessageFlags:
    """Flags of a producer: the options of its messages, and the queue that it sends to."""

    labels: LabelsOption = None
    template: TemplateOption = None
    multi_label: MultiLabelOption = False
    to_model: ToModel = None
    to_queue: ToQueue = None
    priority: PriorityOption = None

    def settings_of(self, **others: Any) -> Settings:
        """Load the settings with these flags and other option values; see the function `settings_of`."""
        return settings_of(
            labels=self.labels, template=self.template, queue=self.to_queue, priority=self.priority, **others
        )

    def options(self, settings: Settings) -> ClassifyOptions:
        """Return the message options.

        Options that were not given stay unset, so that the worker's settings apply and not this process's.
        """
        labels = None if self.labels is None else settings.labels
        return ClassifyOptions(labels=labels, template=self.template, multi_label=self.multi_label)

    def select_queue(self, settings: Settings, redis: Redis) -> Settings:
        """Return the settings with the queue that `--model` or `--queue` selects.

        FEEDMILL_MODEL does not select a queue: it names the model that a worker loads. FEEDMILL_QUEUE is not checked
        against the known queues, because producers may start before the first worker.

        Raises UserError if both options are given, no known queue matches, or Redis fails.
        """
        if self.to_model is not None and self.to_queue is not None:
            raise UserError("--model and --queue both select a queue. Give one of them.")
        with user_errors(settings):
            if self.to_queue is not None:
                check_queue(redis, self.to_queue)
            if self.to_model is None:
                return settings
            return settings.model_copy(update={"queue": queue_for_model(redis, self.to_model)})
