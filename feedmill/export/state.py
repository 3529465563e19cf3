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
        asked = {name: state[name] for name in wanted}
        Place(**state["place"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"Cannot read {path}, the state of an unfinished export. Delete this file and the unfinished export."
        ) from None
    for name, value in wanted.items():
        if asked[name] != value:
            if name == "version":
                raise UserError(f"{path} was written by another version of feedmill. Give another OUT.")
            flag = f"without --{name}" if asked[name] in (None, False) else f"with another value of --{name}"
            flag = f"with --{name}" if asked[name] is True else flag
            raise UserError(f"{path} belongs to an export {flag}. Give another OUT, or repeat the earlier flags.")
    return dict(state)
