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
    "Improve the model": ("evaluate", "tune", "label", "train", "trainer", "deploy"),
}
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
            _format(command)
        return command


def _format(command: Any) -> None:
    """Join the lines of each paragraph of the help, and show no type for flags, which take no value."""
    command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", command.help or "")
    for parameter in command.params:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for each in getattr(command, "commands", {}).values():
        _format(each)
