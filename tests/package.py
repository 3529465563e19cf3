"""Build a release and test it as users install it (`make release`).

Takes minutes and downloads `feedmill[demo]`. Works on the last commit of the checkout, whatever
else is in its folder.

Builds an sdist and a wheel twice, in two folders, and requires the same bytes. twine checks what
an index would show. The wheel without extras, in a new environment, must pass `pip check`, stay
below MAX_INSTALLED_BYTES with its dependencies, and run without torch and praw. The commit,
installed by pip through git, must run. The wheel with the extra `demo`, in another environment,
must pass `feedmill demo` and `feedmill classify` with other labels. All are installed under
constraints.txt, as the README says. build/release then has both files, a list of the packages of
the last environment in CycloneDX, and SHA256SUMS. With --quick, the environment with the extra
`demo` is left out, and so is the list.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
RELEASE = ROOT / "build" / "release"
#: The list of packages.
SBOM = "feedmill.cdx.json"
#: Maximum size of the wheel and its dependencies with bytecode, in bytes.
MAX_INSTALLED_BYTES = 70 * 10**6
#: Code that imports the whole command and prints which large packages that imported.
PRINT_LARGE_IMPORTS = (
    "import sys, feedmill.cli.main; print(*{'torch', 'transformers', 'praw', 'flower'} & "
    "set(sys.modules))"
)


def main(*flags: str) -> int:
    shutil.rmtree(RELEASE, ignore_errors=True)
    RELEASE.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel, sdist = build(folder)
        run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
        report = {"wheel": wheel.name, "sdist": sdist.name, **check_base(folder, wheel)}
        if "--quick" not in flags:
            report |= check_demo(folder, wheel)
    write_sums()
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


def build(folder: Path) -> tuple[Path, Path]:
    """Build the last commit twice. Return the wheel and the sdist. Exits if the builds differ."""
    epoch = run("git", "-C", str(ROOT), "log", "-1", "--format=%ct").strip()
    archive = folder / "source.tar"
    run("git", "-C", str(ROOT), "archive", "--output", str(archive), "HEAD")
    sums = []
    for out in (RELEASE, folder / "again"):
        source = folder / f"source-{out.name}"
        with tarfile.open(archive) as opened:
            opened.extractall(source, filter="tar")
        constraints = str(source / "constraints.txt")
        run(
            sys.executable, "-m", "build", "--outdir", str(out), str(source),
            SOURCE_DATE_EPOCH=epoch, PIP_CONSTRAINT=constraints,
        )  # fmt: skip
        sums.append(sums_of(out))
    if sums[0] != sums[1]:
        sys.exit(f"the same commit gave different files: {sums[0]} and {sums[1]}")
    (wheel,), (sdist,) = RELEASE.glob("*.whl"), RELEASE.glob("*.tar.gz")
    return wheel, sdist


def check_base(folder: Path, wheel: Path) -> dict[str, object]:
    """Install the wheel without extras, and the commit through git. Return what was measured."""
    base, git = folder / "base", folder / "git"
    size = install(base, str(wheel))
    imported = run(str(base / "bin" / "python"), "-c", PRINT_LARGE_IMPORTS).split()
    if size > MAX_INSTALLED_BYTES or imported:
        sys.exit(f"{size:,} bytes were installed, and the command imports {imported}")
    version = run(str(base / "bin" / "feedmill"), "--version").split()[-1]
    if f"-{version}-" not in wheel.name:
        sys.exit(f"{wheel.name} has the version {version}")
    install(git, f"feedmill @ git+file://localhost{ROOT}")
    run(str(git / "bin" / "feedmill"), "--version")
    return {"base_mb": round(size / 1e6, 1)}


def check_demo(folder: Path, wheel: Path) -> dict[str, object]:
    """Install the wheel with the demo, run it, and list its packages. Exits if it fails."""
    full = folder / "full"
    install(full, f"{wheel}[demo]")
    feedmill = str(full / "bin" / "feedmill")
    demo = re.findall(r"\d+ of \d+ right", run(feedmill, "demo"))
    own = run(
        feedmill, "classify", "I want my money back", "--labels", "delivery,refund"
    )
    if not demo or not own:
        sys.exit("feedmill demo or feedmill classify said nothing")
    run(
        sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible",
        "--pyproject", str(ROOT / "pyproject.toml"), "--output-file", str(RELEASE / SBOM),
        str(full / "bin" / "python"),
    )  # fmt: skip
    set_version(RELEASE / SBOM, wheel.name.split("-")[1])
    return {"demo": demo, "own": own}


def set_version(file: Path, version: str) -> None:
    """Write the version into a list of packages: pyproject.toml leaves it to the build."""
    content = json.loads(file.read_text())
    content["metadata"]["component"]["version"] = version
    file.write_text(json.dumps(content, indent=2) + "\n")


def sums_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in a folder, by name."""
    sums = {}
    for file in sorted(folder.iterdir()):
        sums[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return sums


def write_sums() -> None:
    """Write SHA256SUMS, which `sha256sum --check` reads."""
    sums = sums_of(RELEASE)
    lines = [f"{digest}  {name}\n" for name, digest in sums.items()]
    (RELEASE / "SHA256SUMS").write_text("".join(lines))


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


def run(*command: str, **environment: str) -> str:
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
        env=clean | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{command[0]} ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
