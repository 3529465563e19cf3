"""The help of commands: grouped by purpose in `feedmill --help`, and formatted for any width of the terminal."""

import re
from typing import Any

from typer.core import TyperGroup

#: Commands by purpose, in the order in which users meet them.
PURPOSES = {
    "Try it": ("classify", "demo"),
    "Run it": ("up", "down", "url", "worker", "flower"),
    "Send posts": ("enqueue", "ingest", "queue"),
    "Read results": ("results", "export", "report"),
    "Observe it": ("status", "health", "metrics"),
    "Handle failures and deletions": ("dead", "purge"),
    "Improve the model": ("evaluate", "tune", "label", "train", "deploy"),
}
#: Word for an option's value, by the name that typer gives to its type. A choice shows what can be chosen.
VALUE_WORDS = {"str": "TEXT", "int": "N", "float": "NUMBER", "path": "PATH"}
_PURPOSE_OF = {name: purpose for purpose, names in PURPOSES.items() for name in names}


class CommandsByPurpose(TyperGroup):
    """Commands in the order of PURPOSES, each purpose with a panel of its own in the help."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        order = list(_PURPOSE_OF)
        return sorted(super().list_commands(ctx), key=order.index)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of this name, with its panel; None if there is none."""
        command: Any = super().get_command(ctx, cmd_name)
        if command is not None:
            command.rich_help_panel = _PURPOSE_OF[cmd_name]
            _format(command, ctx)
        return command

    def get_params(self, ctx: Any) -> Any:
        """Return the options of `feedmill` itself."""
        found = super().get_params(ctx)
        _name_values(found, ctx)
        return found


def _format(command: Any, context: Any) -> None:
    """Join the lines of each paragraph of the help, and name the values of the options."""
    command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", command.help or "")
    _name_values(command.get_params(context), context)
    for each in getattr(command, "commands", {}).values():
        _format(each, context)


def _name_values(parameters: Any, context: Any) -> None:
    """Show a word in capitals for each option's value instead of its type, and nothing for flags and arguments."""
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            name = parameter.metavar if parameter.required else f"[{parameter.metavar}]"
            parameter.get_usage_pieces = lambda _, name=name: [name]
            parameter.display_type_rich = lambda ctx: None  # noqa: ARG005 - typer passes it by name
        elif getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif parameter.metavar is None:
            kind = re.sub(r"<|list\[|\]?( range)?>", "", parameter.display_type(context))
            parameter.metavar = kind if "|" in kind else VALUE_WORDS[kind]
