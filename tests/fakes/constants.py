"""Run `feedmill` with other values of constants than users have: short times, and servers on this
machine.
"""

import json
import os
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

#: Environment variable with the constants: module and name, or attribute of an object in it ->
#: value, as JSON.
VARIABLE = "FAKE_CONSTANTS"


def reddit(url: str) -> dict[str, Any]:
    """Return the constants with which Reddit is read from another server."""
    return {
        f"feedmill.producers.reddit.client.{name}": url
        for name in ("API_URL", "TOKEN_URL")
    }


def arctic_shift(url: str) -> dict[str, Any]:
    return {"feedmill.producers.reddit.arctic_shift.URL": url}


def hacker_news(url: str) -> dict[str, Any]:
    return {"feedmill.producers.hacker_news.URL": url}


def replace(constants: Mapping[str, Any]) -> None:
    """Replace the constants in this process."""
    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        assert hasattr(resolve_name(module), constant), name
        setattr(resolve_name(module), constant, value)


if __name__ == "__main__":
    from feedmill.cli.main import run

    replace(json.loads(os.environ[VARIABLE]))
    run()
