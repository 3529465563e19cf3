"""The help of the commands: grouped by purpose, and readable in a narrow terminal."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from feedmill.cli.command_groups import PURPOSES
from feedmill.cli.main import app


def test_every_command_has_a_purpose() -> None:
    group: Any = get_command(app)
    names = [name for names in PURPOSES.values() for name in names]
    assert sorted(group.commands) == sorted(names)
    said = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80", "TERM": "dumb"}).output
    places = [said.index(f"─ {purpose} ─") for purpose in PURPOSES]
    assert places == sorted(places)
    for purpose, (first, *_) in PURPOSES.items():
        assert said.index(purpose) < said.index(f" {first} ", said.index(purpose))


@pytest.mark.parametrize("command", ["classify", "enqueue"])
def test_help_is_readable_at_80_columns(command: str) -> None:
    """The descriptions of the options have at least 35 columns."""
    said = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80", "TERM": "dumb"}).output
    (line,) = [line for line in said.splitlines() if "--template" in line]
    description = line.index("Sentence")
    assert line.rindex("│") - description >= 35, said


def test_help_shows_words_instead_of_types() -> None:
    root: Any = get_command(app)
    for path in paths(root, []):
        said = CliRunner().invoke(app, [*path, "-h"], env={"COLUMNS": "120", "TERM": "dumb"}).output
        assert not re.search(r"<\w|[{}]\w|\w[{}]", said), said
    said = CliRunner().invoke(app, ["dead", "retry", "-h"], env={"COLUMNS": "120", "TERM": "dumb"}).output
    assert "feedmill dead retry [OPTIONS] [ID...]".removeprefix("feedmill ") in said
    said = CliRunner().invoke(app, ["health", "-h"], env={"COLUMNS": "120", "TERM": "dumb"}).output
    assert re.search(r"--check +redis\|memory\|", said)


def paths(command: Any, path: list[str]) -> Iterator[list[str]]:
    """Yield the words of a command and of its subcommands."""
    yield path
    for name, each in getattr(command, "commands", {}).items():
        yield from paths(each, [*path, name])


def test_help_joins_lines_and_shows_no_type_for_flags() -> None:
    said = CliRunner().invoke(app, ["ingest", "reddit", "--help"], env={"COLUMNS": "300", "TERM": "dumb"}).output
    assert "now and exit, with status 1 if a topic could not be read. Posts that were already sent are skipped." in said
    (line,) = [line for line in said.splitlines() if "--multi-label" in line]
    assert "<" not in line
