"""Read the state of an unfinished export, by which a later run resumes it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from feedmill.export.text import COLUMNS
from shared.errors import UserError
from shared.scripts.stream import Place

#: Version of the state. Increase it when this version cannot resume an export of an earlier one.
STATE_VERSION = 1


def read_state(path: Path, wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state of an earlier run, or None. Raises UserError if it belongs to an export with other options."""
    try:
        # Defaults for states written before these options existed.
        state = {"columns": [*COLUMNS], "latest": False, "run": None} | json.loads(path.read_bytes())
        if missing := wanted.keys() - state.keys():
            raise KeyError(missing)
        Place(**state["place"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"Cannot read {path}, the state of an unfinished export. Delete this file and the unfinished export."
        ) from None
    check_options(str(path), state, wanted)
    return dict(state)


def check_options(name: str, state: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise UserError if an earlier run had other options. name: of its state, or of what it exported to."""
    for option, value in wanted.items():
        if (asked := state.get(option)) != value:
            if option == "version":
                raise UserError(f"{name} was written by another version of feedmill. Give another OUT.")
            flag = f"without --{option}" if asked in (None, False) else f"with another value of --{option}"
            flag = f"with --{option}" if asked is True else flag
            raise UserError(f"{name} belongs to an export {flag}. Give another OUT, or repeat the earlier flags.")
