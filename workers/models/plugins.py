"""Load plugins: user modules, and classes in them, by name."""

from importlib import import_module
from traceback import extract_tb
from types import ModuleType
from typing import Any

from feedmill.shared.errors import SettingsError


def load_plugin(name: str, source: str) -> Any:
    """Return the object named by `module:attribute`. source: what names it, for errors.

    Raises SettingsError.
    """
    module, _, attribute = name.partition(":")
    user_module = import_user_module(module, source)
    try:
        return getattr(user_module, attribute)
    except AttributeError:
        raise SettingsError(
            f"{source}: the module {module} ({user_module.__file__}) has no {attribute}. "
            "Set the name of a class in the module."
        ) from None


def import_user_module(module: str, source: str) -> ModuleType:
    """Import a module and return it. source: what names it, for errors. Raises SettingsError."""
    try:
        return import_module(module)
    except Exception as error:  # a user's module may raise anything
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name
            and f"{module}.".startswith(f"{error.name}.")
        ):
            why = (
                "it is neither installed nor on PYTHONPATH. The working directory is not "
                "searched."
            )
        else:
            frames = [
                frame
                for frame in extract_tb(error.__traceback__)
                if not frame.filename.startswith("<frozen ")
            ]
            where = ""
            if not isinstance(error, SyntaxError):
                last = frames[-1]
                where = f" ({last.filename}, line {last.lineno})"
            why = f"{type(error).__name__}: {error}{where}."
        raise SettingsError(
            f"{source}: cannot import the module {module}: {why}"
        ) from None
