"""Build the package and test it as users install it (`make dist`).

Takes minutes and downloads `feedmill[demo]`.

Builds a wheel and an sdist into dist/. The wheel without extras, in a new environment, must pass
`pip check`, stay below MAX_INSTALLED_BYTES with its dependencies, and run without torch and praw.
The last commit of this repository, installed by pip through git, must run. The sdist with the
extra `demo`, in another environment, must pass `feedmill demo` and `feedmill classify` with other
labels. All are installed under constraints.txt, as the README says.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
#: Maximum size of the wheel and its dependencies with bytecode, in bytes.
MAX_INSTALLED_BYTES = 60 * 10**6
#: Code that imports the whole command and prints which large packages that imported.
PRINT_LARGE_IMPORTS = (
    "import sys, feedmill.cli.main; print(*{'torch', 'transformers', 'praw', 'flower'} & "
    "set(sys.modules))"
)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        for left in DIST.glob("feedmill-*"):
            left.unlink()
        run(sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT))
        (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
        base, git, full = (Path(folder) / name for name in ("base", "git", "full"))

        size = install(base, str(wheel))
        imported = run(str(base / "bin" / "python"), "-c", PRINT_LARGE_IMPORTS).split()
        run(str(base / "bin" / "feedmill"), "--version")

        install(git, f"feedmill @ git+file://localhost{ROOT}")
        run(str(git / "bin" / "feedmill"), "--version")

        install(full, f"{sdist}[demo]")
        demo = re.findall(
            r"\d+ of \d+ right", run(str(full / "bin" / "feedmill"), "demo")
        )
        own = run(
            str(full / "bin" / "feedmill"),
            "classify",
            "I want my money back",
            "--labels",
            "delivery,refund",
        )
    found = {
        "wheel": wheel.name,
        "base_mb": round(size / 1e6, 1),
        "imported": imported,
        "demo": demo,
        "own": own,
    }
    sys.stdout.write(json.dumps(found) + "\n")
    return int(size > MAX_INSTALLED_BYTES or bool(imported) or not demo or not own)


def install(environment: Path, what: str) -> int:
    """Create an environment and install a package under constraints.txt.

    Return the installed bytes.

    Exits if requirements conflict.
    """
    venv.create(environment, with_pip=True)
    empty = size_of(environment)
    pip = [
        str(environment / "bin" / "python"),
        "-m",
        "pip",
        "--disable-pip-version-check",
    ]
    run(*pip, "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), what)
    run(*pip, "check")
    return size_of(environment) - empty


def size_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def run(*command: str, stdin: str = "") -> str:
    """Run a command and return its output. Exits if it fails."""
    sys.stderr.write(f"{' '.join(command)}\n")
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FEEDMILL_", "PYTHON"))
    }
    done = subprocess.run(
        command,
        cwd="/",
        env=clean,
        input=stdin,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{command[0]} ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
