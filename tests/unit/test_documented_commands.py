"""Every command shown in the documentation is accepted by the real command line.

Commands in blocks marked `sh` must be complete. Inline code may omit arguments.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from typer.main import get_command

from feedmill.cli.main import application
from tests.unit.test_deployment import accept

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    *(
        ROOT / name
        for name in (
            "README.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "benchmarks/README.md",
        )
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FEEDMILL: Any = get_command(application())
#: Programs that start `feedmill` elsewhere, given as one of their arguments.
LAUNCHERS = ("docker", "kubectl")
#: The parser's errors for a missing argument, flag value or subcommand.
INCOMPLETE_ERRORS = ("MissingParameter", "BadOptionUsage", "NoArgsIsHelpError")


class Shown(NamedTuple):
    """A command on a page, split into words.

    `whole` is false for inline code, which may omit arguments.
    """

    page: str
    words: tuple[str, ...]
    whole: bool


def test_documented_commands_parse() -> None:
    """Arguments, flags and flag values must parse, too."""
    for page, words, whole in shown("feedmill"):
        error = parse_error(words)
        accepted = error in (None, "Exit") or (error in INCOMPLETE_ERRORS and not whole)
        assert accepted, f"{page}: {' '.join(words)}: {error}"


def test_command_blocks_are_marked_sh() -> None:
    for page in PAGES:
        for marked, block in re.findall(
            r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL
        ):
            assert marked == "sh" or not re.search(
                r"^(\$ )?(feedmill|make) [a-z]", block, re.MULTILINE
            ), page


def test_documented_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    found = list(shown("make"))
    assert found
    for page, (_, *words), _ in found:
        for word in words:
            variable, given, _ = word.partition("=")
            wanted = rf"^{variable} \?=" if given else rf"^{word}:"
            assert re.search(wanted, makefile, re.MULTILINE), f"{page}: make {word}"


def test_documented_python_modules_have_the_flags() -> None:
    """The test covers only modules of this repository."""
    found = [
        one
        for one in shown("python")
        if one.words[1:2] == ("-m",) and (ROOT / one.words[2].split(".")[0]).is_dir()
    ]
    assert found
    for page, (_, _, module, *words), _ in found:
        source = source_of(module)
        for flag in words:
            assert (
                not flag.startswith("--") or flag == "--help" or f'"{flag}"' in source
            ), f"{page}: {module} {flag}"


def test_documented_extras_and_pins_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    installed = 0
    for page in PAGES:
        for line in re.findall(r"pip install .*", page.read_text()):
            for extras in re.findall(r"(?:feedmill|\.|\.whl)\[([\w,]+)\]", line):
                assert set(extras.split(",")) <= set(
                    project["optional-dependencies"]
                ), f"{page}: {line}"
                installed += 1
            for pin in re.findall(r"\b[a-z]\S*==[\d.]+", line):
                assert pin in pins, f"{page}: {line}"
    assert installed


def parse_error(words: tuple[str, ...]) -> str | None:
    """Return the class name of the parser's error, or None.

    `Exit` means that help was requested.
    """
    try:
        accept(FEEDMILL, list(words))
    except Exception as error:
        return type(error).__name__
    return None


def shown(program: str) -> Iterator[Shown]:
    """Yield the documented commands that start the program."""
    for page in PAGES:
        name, text = str(page.relative_to(ROOT)), page.read_text()
        for block in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                yield from (
                    Shown(name, words, True) for words in commands_in(line, program)
                )
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        for code in re.findall(r"`([^`]+)`", prose):
            for line in alternatives(code):
                yield from (
                    Shown(name, words, False) for words in commands_in(line, program)
                )


def alternatives(code: str) -> Iterator[str]:
    """Expand `dead list|show` into two commands."""
    return map(
        " ".join,
        product(
            *(word.split("|") if word.strip("|") else [word] for word in code.split())
        ),
    )


def commands_in(line: str, program: str) -> Iterator[tuple[str, ...]]:
    """Yield the commands of a shell line that start the program, directly or by a launcher,
    without variables.
    """
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    try:
        tokens = list(reader)
    except ValueError:  # prose with an apostrophe
        return
    command: list[str] = []
    for token in [*tokens, ";"]:
        if token.strip("();<>|&"):
            if command or not re.fullmatch(r"\w+=.*", token):
                command.append(token)
            continue
        if command and command[0] in LAUNCHERS and program in command:
            command = command[len(command) - command[::-1].index(program) - 1 :]
        if command and command[0].removeprefix(".venv/bin/") == program:
            yield (program, *(word for word in command[1:] if word != "…"))
        command = []


def source_of(module: str) -> str:
    """Return a module's source, followed by the source of the modules that it imports
    `main` from.
    """
    path = ROOT / module.replace(".", "/")
    source = (
        path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    ).read_text()
    return source + "".join(
        source_of(other) for other in re.findall(r"from (\S+) import main\b", source)
    )
