"""The flag `--none`, whose value may be left out."""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import typer
from typer.core import TyperCommand

from feedmill.shared.none_of_these import DEFAULT_NONE, NONE_WORDS


def parse_none(text: str) -> float | bool:
    """Parse the threshold of `--none`, or on or off."""
    word = NONE_WORDS.get(text.strip().lower())
    if word is not None:
        return word
    threshold = math.nan
    with suppress(ValueError):
        threshold = float(text)
    if not 0 <= threshold <= 1:
        raise typer.BadParameter(
            f"{text!r:.80} is not a score. Write a number from 0 to 1, such as {DEFAULT_NONE}, "
            "or on or off."
        )
    return threshold


class NoneCommand(TyperCommand):
    """A command whose flag `--none` needs no value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_none_value(args))


def with_none_value(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the value `on` for a `--none` before anything but a value."""
    end = len(arguments)
    if "--" in arguments:
        end = arguments.index("--")
    completed = []
    for index, argument in enumerate(arguments):
        following = arguments[index + 1 : index + 2]
        has_value = any(map(_is_none_value, following))
        if argument == "--none" and index < end and not has_value:
            completed.append("--none=on")
        else:
            completed.append(argument)
    return completed


def _is_none_value(argument: str) -> bool:
    """Return whether an argument is meant as the value of `--none`: a word, or any number."""
    if argument.strip().lower() in NONE_WORDS:
        return True
    try:
        float(argument)
    except ValueError:
        return False
    return True
