"""Plug-ins: modules that somebody brings, and classes in them, by name. Knows nothing of what they are for."""

from importlib import import_module
from traceback import extract_tb
from types import ModuleType
from typing import Any

from shared.errors import SettingsError
from shared.settings import PREFIX


def plugin(name: str, setting: str) -> Any:
    """What a name such as module:Class stands for. setting: the one that has it. Raises SettingsError."""
    module, _, attribute = name.partition(":")
    found = imported(module, setting)
    try:
        return getattr(found, attribute)
    except AttributeError:
        raise SettingsError(
            f"{PREFIX}{setting.upper()}: the module {module} has no {attribute}; it is {found.__file__}."
        ) from None


def imported(module: str, setting: str) -> ModuleType:
    """The module of this name. setting: the one that names it. Raises SettingsError."""
    try:
        return import_module(module)
    except Exception as error:  # whatever somebody's own module raises
        raise SettingsError(_not_imported(module, setting, error)) from None


def _not_imported(module: str, setting: str, error: Exception) -> str:
    what = f"The module {module}, which --{setting} or {PREFIX}{setting.upper()} names, cannot be imported: "
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return (
            f"{what}there is none of this name in PYTHONPATH or among the installed packages. The working directory "
            "does not count."
        )
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen ")]
    where = "" if isinstance(error, SyntaxError) else f" ({frames[-1].filename}, line {frames[-1].lineno})"
    return f"{what}{type(error).__name__}: {error}{where}."
