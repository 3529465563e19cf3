"""What commands share: their flags, and how flags become settings and options."""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from shared import logs
from shared.messages import ClassifyOptions
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
Kind = Annotated[str | None, typer.Option(help="nli, sequence, similarity, or auto.", show_default=False)]
Engine = Annotated[str | None, typer.Option(help="torch or onnx.", show_default=False)]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:N or mps.", show_default=False)]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16 or int8.", show_default=False)]
Labels = Annotated[
    str | None,
    typer.Option(
        help='Labels to choose from: a,b,c, or JSON: \\["a", "b"] or {"a": "description", …}.', show_default=False
    ),
]
Template = Annotated[str | None, typer.Option(help="Sentence that a label is put into, at {}.", show_default=False)]
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


def options_of(settings: Settings, labels: str | None, template: str | None, multi_label: bool) -> ClassifyOptions:
    """What these flags ask of a message. Where they are not given the worker's settings count, not this process's."""
    return ClassifyOptions(
        labels=None if labels is None else settings.labels, template=template, multi_label=multi_label
    )
