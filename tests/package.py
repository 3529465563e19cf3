"""The package, built and tried as its users get it: `make dist`. Takes minutes, and what `feedmill[demo]` downloads.

From a checkout a wheel and an sdist are made. In an environment of its own the wheel, without extras, satisfies `pip
check`, is smaller than LARGEST with all that it brings, and runs without torch or praw; in another one, the sdist with
the extra `demo` passes `feedmill demo`. Both files stay in dist/.
"""

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
#: Bytes of the wheel alone with all that it brings, compiled.
LARGEST = 60 * 10**6
#: Imports the whole command, and says which of the large ones came with it.
LIGHT = "import sys, feedmill.cli; print(*{'torch', 'transformers', 'praw', 'flower'} & set(sys.modules))"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        for left in DIST.glob("feedmill-*"):
            left.unlink()
        run(sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT))
        (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
        base, full = Path(folder) / "base", Path(folder) / "full"

        size = install(base, str(wheel))
        imported = run(str(base / "bin" / "python"), "-c", LIGHT).split()
        run(str(base / "bin" / "feedmill"), "--version")

        install(full, f"{sdist}[demo]")
        demo = json.loads(run(str(full / "bin" / "feedmill"), "demo", "--json").splitlines()[-1])
    found = {"wheel": wheel.name, "base_mb": round(size / 1e6, 1), "imported": imported, "demo": demo}
    sys.stdout.write(json.dumps(found) + "\n")
    return int(size > LARGEST or bool(imported) or not demo)


def install(environment: Path, what: str) -> int:
    """Make an environment that has this, as constraints.txt says; its bytes. What does not fit together is refused."""
    venv.create(environment, with_pip=True)
    empty = size_of(environment)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), what)
    run(*pip, "check")
    return size_of(environment) - empty


def size_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def run(*command: str) -> str:
    """What it prints; ends all this where it fails."""
    sys.stderr.write(f"{' '.join(command)}\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("FEEDMILL_", "PYTHON"))}
    done = subprocess.run(command, cwd="/", env=clean, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
