"""`feedmill worker`: the effect of its flags, with a stand-in for the worker."""

from typing import Any

import pytest
from typer.testing import CliRunner

from feedmill.cli import main
from feedmill.shared import logs
from feedmill.shared.settings import Settings
from feedmill.stack.devices import Share
from feedmill.workers import run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments that each worker or supervisor is started with."""
    found: list[tuple[Any, ...]] = []

    class Supervisor:
        def __init__(self, *given: Any) -> None:
            found.append(given)

        def run(self) -> int:
            return 0

    def run_worker(*given: Any) -> int:
        found.append(given)
        return 0

    monkeypatch.setattr(logs, "configure", lambda *_, **__: None)
    monkeypatch.setattr(run, "run_worker", run_worker)
    monkeypatch.setattr(main, "Supervisor", Supervisor)
    return found


def invoke(*arguments: str) -> None:
    assert CliRunner().invoke(main.app, ["worker", *arguments]).exit_code == 0


@pytest.mark.parametrize(
    "flags",
    [
        {"--classifier": "keywords:Keywords", "--queue": "feedmill-keywords"},
        {"--classifier": "keywords:Keywords"},
        {"--engine": "logged:LoggedEngine"},
    ],
)
def test_flags_set_settings(started: list[tuple[Any, ...]], flags: dict[str, str]) -> None:
    invoke(*(word for flag in flags.items() for word in flag))
    assert started == [
        (Settings.model_validate({flag.removeprefix("--"): value for flag, value in flags.items()}), None)
    ]


def test_several_devices_start_a_supervisor(started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Share("cuda", f"cuda:{number}", {"CUDA_VISIBLE_DEVICES": str(number)}) for number in (0, 1)]
    monkeypatch.setattr(main, "shares", lambda devices: gpus if devices == "all" else [])
    invoke("--devices", "all", "--metrics-port", "9110")
    ((settings, found, name),) = started
    assert (settings.devices, settings.metrics_port, found, name) == ("all", 9110, gpus, None)
