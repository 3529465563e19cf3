"""A Docker engine for tests: started in a scratch folder, with images from Debian's packages, and removed completely.

No registry is needed. The base image, which stands for python:slim, comes from debootstrap and stays in a cache folder.
Builds use this machine's certificates and pip configuration; local folders of that configuration are served on
loopback.
"""

import ast
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parent.parent.parent
#: Debian's release: that of the images' own base (python:3.12-slim-bookworm).
SUITE = "bookworm"
#: What the base needs to build and run the images; python:slim has it, too.
BASE_PACKAGES = "ca-certificates,python3,python3-venv,python3-pip,python-is-python3"
#: Folders that python:slim and debian:slim leave out.
UNNEEDED = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/info",
    "var/lib/apt/lists",
    "var/cache/apt",
)
BASE, DEBIAN, PRODUCER, WORKER = "feedmill-python", "feedmill-debian", "feedmill-producer", "feedmill-worker:cpu"
#: Program -> Debian's package.
PROGRAMS = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "docker-compose": "docker-compose",
    "debootstrap": "debootstrap",
    "iptables": "iptables",
    "ip": "iproute2",
}
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
NOTHING = Path(os.devnull)
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
#: Rules, chains and links of Docker.
DOCKERS_RULE = re.compile(r"\bDOCKER|\bdocker0\b|\bbr-[0-9a-f]{12}\b")
DOCKERS_LINK = re.compile(r"docker0|br-[0-9a-f]{12}")
#: pip's options that say where packages come from. Those that may hold folders of this machine are served.
PIP_OPTIONS = ("index-url", "extra-index-url", "find-links", "trusted-host")
#: Seconds: for one command; for the engine to start and to stop; between two progress lines and two checks.
COMMAND_S, ENGINE_S, PROGRESS_S, POLL_S = 120.0, 60.0, 30.0, 1.0
LOG_LINES = 20


class ContainersError(Exception):
    """A phase failed, or this machine cannot run containers."""


def tell(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def until(holds: Callable[[], object], description: str, seconds: float) -> None:
    """Wait until `holds()` is true. A failing command counts as false. Raises ContainersError."""
    deadline = time.monotonic() + seconds
    reason = ""
    while True:
        try:
            if holds():
                return
        except ContainersError as error:
            reason = f" ({error})"
        if time.monotonic() > deadline:
            raise ContainersError(f"not within {seconds:.0f} s: {description}{reason}")
        time.sleep(POLL_S)


def missing_requirement() -> str | None:
    """Return what this machine lacks and how to supply it, or None."""
    if os.geteuid():
        return "root is required, to start a Docker engine and to create roots with debootstrap."
    if packages := {package for program, package in PROGRAMS.items() if not shutil.which(program)}:
        return f"missing programs: apt-get install --no-install-recommends {' '.join(sorted(packages))}"
    for command in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):  # the process has ended
            if command.read_text().strip() == "dockerd":
                return f"another Docker engine runs (process {command.parent.name}): stop it, or use another machine."
    return None


class HostNetwork:
    """This machine's network settings before the engine changes them."""

    def __init__(self) -> None:
        self._forwarding, self._rules = FORWARDING.read_text(), _saved_rules()
        self._links = _links()

    def restore(self) -> None:
        """Remove Docker's rules, chains and bridges that were added since. Leaves others' changes alone."""
        for link in sorted(_links() - self._links):
            if DOCKERS_LINK.fullmatch(link):
                _run_here("ip", "link", "delete", link)
        for command in commands_to_restore(self._rules, _saved_rules()):
            _run_here(*command)
        FORWARDING.write_text(self._forwarding)


def _links() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def _saved_rules() -> str:
    return _run_here("iptables-save")


def _run_here(*command: str) -> str:
    """Run a command of this machine and return its output. A failure only shows what the command says."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout


def commands_to_restore(before: str, after: str) -> list[list[str]]:
    """Return commands that remove Docker's rules and chains from `after`, both as printed by iptables-save."""
    old, new = _parsed(before), _parsed(after)
    rules, flushed, removed, policies = [], [], [], []
    for table, (chains, lines) in new.items():
        old_chains, old_lines = old.get(table, ({}, []))
        command = ["iptables", "-t", table]
        added = [line for line in lines if line not in old_lines and DOCKERS_RULE.search(line)]
        rules += [[*command, "-D", *shlex.split(line)[1:]] for line in added]
        for chain, policy in chains.items():
            if chain not in old_chains and chain.startswith("DOCKER"):
                flushed.append([*command, "-F", chain])
                removed.append([*command, "-X", chain])
            elif chain == "FORWARD" and policy != (wanted := old_chains.get(chain, "ACCEPT")):
                policies.append([*command, "-P", chain, wanted])
    return rules + flushed + removed + policies


def _parsed(saved: str) -> dict[str, tuple[dict[str, str], list[str]]]:
    """Return table -> (chain -> policy, rules)."""
    found: dict[str, tuple[dict[str, str], list[str]]] = {}
    for line in saved.splitlines():
        if line.startswith("*"):
            chains, rules = found[line[1:]] = ({}, [])
        elif line.startswith(":"):
            chain, policy, *_ = line[1:].split()
            chains[chain] = policy
        elif line.startswith("-A "):
            rules.append(line)
    return found


class Engine:
    """A running Docker engine. folder: for its socket and logs; data: for its images and containers."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self._data = folder, data
        self._log = folder / "dockerd.log"
        host = f"unix://{folder}/socket"
        (folder / "client").mkdir()
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("DOCKER_", "COMPOSE_"))}
        # Without buildx, which Debian's client lacks; with a configuration of its own.
        self.environment = clean | {
            "DOCKER_HOST": host,
            "DOCKER_BUILDKIT": "0",
            "DOCKER_CONFIG": str(folder / "client"),
        }
        command = ["dockerd", "--data-root", str(data), "--exec-root", str(folder / "exec")]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--pidfile", str(folder / "pid"), "--host", host],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must reach it last
            )

    def wait(self) -> str:
        """Wait until the engine answers, and return its version."""

        def answers() -> bool:
            if self._process.poll() is not None:
                raise SystemExit(f"feedmill: dockerd ended:\n{_end_of(self._log)}")
            return bool(self.docker("version", "--format", "{{.Server.Version}}"))

        until(answers, "the engine answers", ENGINE_S)
        return self.docker("version", "--format", "{{.Server.Version}}")

    def docker(self, *arguments: str, stdin: str | None = None, seconds: float = COMMAND_S) -> str:
        return self.run("docker", *arguments, stdin=stdin, seconds=seconds)

    def run(self, *command: str, stdin: str | None = None, seconds: float = COMMAND_S) -> str:
        """Run a command on this engine and return its output without the last newline. Raises ContainersError."""
        try:
            done = subprocess.run(
                command, env=self.environment, input=stdin, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            raise ContainersError(f"`{shlex.join(command)}` did not end within {seconds:.0f} s") from None
        if done.returncode:
            said = "\n".join((done.stdout + done.stderr).splitlines()[-LOG_LINES:])
            raise ContainersError(f"`{shlex.join(command)}` exited with status {done.returncode}: {said}")
        return done.stdout.strip()

    def start(self, *command: str, stdin: Path | None = None, log: Path | None = None) -> "subprocess.Popen[str]":
        """Start a command on this engine in the background."""
        with (stdin or NOTHING).open() as given, (log or NOTHING).open("w") as said:
            return subprocess.Popen(
                command, env=self.environment, stdin=given, stdout=said, stderr=subprocess.STDOUT, text=True
            )

    def build(self, name: str, *arguments: str) -> float:
        """Build an image and return the seconds. Shows progress. Raises ContainersError."""
        log, began = self.folder / f"{name.replace(':', '-')}.log", time.monotonic()
        tell(f"building {name}")
        process = self.start("docker", "build", "--network", "host", "--tag", name, *arguments, log=log)
        try:
            while True:
                try:
                    process.wait(PROGRESS_S)
                    break
                except subprocess.TimeoutExpired:
                    step = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("Step ")]
                    tell(f"building {name}, {time.monotonic() - began:.0f} s: {(step or [''])[-1][:80]}")
        finally:
            process.kill()
        if process.returncode:
            raise ContainersError(f"the build of {name} failed:\n{_end_of(log)}")
        return round(time.monotonic() - began, 1)

    def inspect(self, container: str, template: str) -> str:
        return self.docker("inspect", "--format", template, container)

    def clear(self) -> None:
        """Remove every container, network and volume."""
        for listed, remove in (
            (("ps", "--all", "--quiet"), ("rm", "--force", "--volumes")),
            (("network", "ls", "--quiet", "--filter", "type=custom"), ("network", "rm")),
            (("volume", "ls", "--quiet"), ("volume", "rm", "--force")),
        ):
            with suppress(ContainersError):
                if names := self.docker(*listed).split():
                    self.docker(*remove, *names)

    def stop(self) -> None:
        """Stop the engine and everything it started."""
        if self._process.poll() is None:
            self.clear()
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ENGINE_S)
        self._process.kill()
        self._process.wait()
        # containerd outlives a killed engine.
        with suppress(OSError, ValueError):
            os.kill(int((self.folder / "exec" / "containerd" / "containerd.pid").read_text()), signal.SIGKILL)
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            mounted = line.split()[1]
            if mounted.startswith((f"{self.folder}/", f"{self._data}/")):
                _run_here("umount", "--lazy", mounted)


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])


@contextmanager
def running_engine(folder: Path, data: Path) -> Iterator[Engine]:
    """Run an engine, and afterwards restore this machine's network."""
    network = HostNetwork()
    try:
        engine = Engine(folder, data)
        try:
            yield engine
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not interrupt this
            tell("stopping the engine")
            engine.stop()
    finally:
        network.restore()


# Images.


def make_root(cache: Path) -> Path:
    """Return a folder with Debian's base system and Python, from the cache or from debootstrap."""
    root = cache / f"python-{SUITE}"
    if root.exists():
        return root
    cache.mkdir(parents=True, exist_ok=True)
    part, log = cache / f"{root.name}.part", cache / "debootstrap.log"
    shutil.rmtree(part, ignore_errors=True)
    tell(f"creating the base image's root with debootstrap, some minutes; log in {log}")
    with log.open("w") as said:
        command = ["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", SUITE, str(part)]
        if subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, check=False).returncode:
            raise ContainersError(f"debootstrap failed:\n{_end_of(log)}")
    for name in UNNEEDED:
        shutil.rmtree(part / name, ignore_errors=True)
    for compiled in (part / "usr/lib/python3").rglob("__pycache__"):
        shutil.rmtree(compiled)
    part.rename(root)
    return root


def import_base(engine: Engine, root: Path, pip_configuration: str) -> None:
    """Import the root as the base image, with this machine's certificates and the pip configuration."""
    (root / "etc/pip.conf").write_text(pip_configuration)
    if CERTIFICATES.exists():
        shutil.copy(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
    archive = ["tar", "--directory", str(root), "--exclude=./dev/*", "--exclude=./proc/*", "--create", "."]
    import_it = ["docker", "import", "-", BASE]
    with subprocess.Popen(archive, stdout=subprocess.PIPE) as made:
        subprocess.run(import_it, stdin=made.stdout, env=engine.environment, capture_output=True, check=True)
    if made.returncode:
        raise ContainersError(f"tar of {root} failed")


def build_images(engine: Engine) -> dict[str, float]:
    """Build the images from the imported base and return the seconds of each."""
    base, here = ("--build-arg", f"PYTHON={BASE}"), str(ROOT)
    debian = str(Path(__file__).parent / "debian.Dockerfile")
    return {
        DEBIAN: engine.build(DEBIAN, "--build-arg", f"BASE={BASE}", "--file", debian, str(Path(__file__).parent)),
        PRODUCER: engine.build(PRODUCER, *base, "--file", f"{here}/docker/producer.Dockerfile", here),
        WORKER: engine.build(WORKER, *base, "--file", f"{here}/docker/worker.Dockerfile", here),
    }


# pip's configuration.


def pip_options(listed: str) -> dict[str, list[str]]:
    """Return the options in PIP_OPTIONS from the output of `pip config list`. The environment comes first."""
    found: dict[str, list[str]] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if option in PIP_OPTIONS and (section == ":env:" or option not in found):
            found[option] = str(ast.literal_eval(value)).split()
    return found


def local_folder(place: str) -> Path | None:
    """Return the folder that a file:// address or a path names, or None for another address."""
    parts = urlsplit(place)
    if parts.scheme not in ("", "file"):
        return None
    return Path(unquote(parts.path)).resolve()


def configuration_for_builds(options: dict[str, list[str]], port: int) -> str:
    """Return a pip.conf in which local folders are addresses of the server on this port."""
    lines = ["[global]", "retries = 1", *([f"cert = {CERTIFICATES}"] if CERTIFICATES.exists() else [])]
    for option, places in options.items():
        served = [
            f"http://127.0.0.1:{port}{folder}"
            if option != "trusted-host" and (folder := local_folder(place))
            else place
            for place in places
        ]
        lines.append(f"{option} = {' '.join(served)}")
    return "\n".join(lines) + "\n"


def served_folders(options: dict[str, list[str]]) -> list[Path]:
    """Return the local folders that builds need. Links of an index may point beside it, so its parent is served."""
    found = []
    for option in ("index-url", "extra-index-url", "find-links"):
        folders = [folder for place in options.get(option, ()) if (folder := local_folder(place))]
        found += folders if option == "find-links" else [folder.parent for folder in folders]
    return found


@contextmanager
def pip_configuration() -> Iterator[str]:
    """Serve pip's local folders on loopback, and give the configuration that makes a build use them."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    options = pip_options(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    folders = served_folders(options)

    class Handler(SimpleHTTPRequestHandler):
        """Serve the folders."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory="/")

        def translate_path(self, path: str) -> str:
            found = Path(super().translate_path(path)).resolve()
            allowed = any(found.is_relative_to(folder) for folder in folders)
            return str(found) + "/" * path.endswith("/") if allowed else "/nonexistent"

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield configuration_for_builds(options, server.server_port)
        finally:
            server.shutdown()
