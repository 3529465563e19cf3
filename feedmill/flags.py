"""What commands share: their flags, and how flags become settings and options."""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from redis import Redis

from shared import logs
from shared.broker import told_plainly
from shared.errors import UserError
from shared.messages import ClassifyOptions
from shared.serving import check_queue, queue_of
from shared.settings import Settings, load, unknown_variables

logger = logging.getLogger(__name__)

RedisUrl = Annotated[str | None, typer.Option(help="Redis, as redis://:password@host:6379/0.", show_default=False)]
DataFolder = Annotated[Path | None, typer.Option(help="Folder of the embedded stack's data.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
Model = Annotated[
    str | None, typer.Option(help="A model's folder, package:NAME, or its name on the hub.", show_default=False)
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a model from the hub.", show_default=False)
]
Kind = Annotated[str | None, typer.Option(help="nli, sequence, similarity, auto, or module:Class.", show_default=False)]
Engine = Annotated[str | None, typer.Option(help="torch, onnx, or module:Class.", show_default=False)]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:N or mps.", show_default=False)]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16 or int8.", show_default=False)]
Labels = Annotated[
    str | None,
    typer.Option(
        help='Labels to choose from: a,b,c, or JSON: \\["a", "b"] or {"a": "description", …}.', show_default=False
    ),
]
Template = Annotated[str | None, typer.Option(help="Sentence that a label is put into, at {}.", show_default=False)]
ToModel = Annotated[
    str | None,
    typer.Option(
        "--model", help="Model to send to, by its name or the last part of it; its queue is found.", show_default=False
    ),
]
ToQueue = Annotated[str | None, typer.Option("--queue", help="Queue to send to.", show_default=False)]
IdColumn = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Column, or key, that is the posts' id; else id or post_id.", show_default=False),
]
Priority = Annotated[
    int | None, typer.Option(help="Whose turn it is: 0, which is the default, before 9.", show_default=False)
]
MultiLabel = Annotated[bool, typer.Option(help="Score every label by itself.")]


#: The flag that stands before the command.
log_format: str | None = None


def settings_of(**flags: Any) -> Settings:
    """The settings with these flags, and the log set up by them. Raises SettingsError."""
    settings = load(log_format=log_format, **flags)
    logs.configure(settings)
    for sentence in unknown_variables():
        logger.warning(sentence)
    return settings


def sending(settings: Settings, redis: Redis, model: str | None, queue: str | None) -> Settings:
    """The settings of who sends, with the queue that these flags mean. Raises UserError.

    The environment's FEEDMILL_MODEL says what a worker runs, not where posts go; its FEEDMILL_QUEUE is taken as it is,
    since whole systems are started before any worker of theirs is known.
    """
    if model is not None and queue is not None:
        raise UserError("--model finds the queue that --queue names: leave out one of them.")
    with told_plainly(settings):
        if queue is not None:
            check_queue(redis, queue)
        return settings if model is None else settings.model_copy(update={"queue": queue_of(redis, model)})


def options_of(settings: Settings, labels: str | None, template: str | None, multi_label: bool) -> ClassifyOptions:
    """What these flags ask of a message. Where they are not given the worker's settings count, not this process's."""
    return ClassifyOptions(
        labels=None if labels is None else settings.labels, template=template, multi_label=multi_label
    )
