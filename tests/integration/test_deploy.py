"""hot_swap.py on a real Redis: the requested model is loaded, tested and activated, or the reason
is reported.
"""

import re
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from feedmill.shared.broker import connect
from feedmill.shared.errors import DeviceFull, ModelError, UserError
from feedmill.shared.keys import REQUESTED_MODELS
from feedmill.shared.metrics import connect_for_monitoring
from feedmill.shared.model_routing import (
    MAX_QUEUES,
    DeploymentReport,
    RequestedModel,
    Stage,
    request_model,
    requested_model,
)
from feedmill.shared.settings import Settings
from feedmill.teaching import deployment
from feedmill.workers.models.device import select_device
from feedmill.workers.models.weights import locate
from feedmill.workers.runtime import hot_swap
from feedmill.workers.runtime.hot_swap import Deployer, load_wanted
from tests.fakes.models import make_model
from tests.support import RedisServer, find, wait_until
from tests.unit.test_pipeline import Owner
from tests.unit.test_replacing import Model

LABELS = {0: "NEGATIVE", 1: "POSITIVE"}
CPU = select_device("cpu", "float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tuned model."""
    return make_model("bert", tmp_path_factory.mktemp("tuned"), LABELS)


def asked(folder: Path, **others: Any) -> RequestedModel:
    return replace(
        RequestedModel(str(folder), locate(str(folder)).sha256, time.time()), **others
    )


def test_keeps_a_deployment_until_it_is_withdrawn(redis: RedisServer) -> None:
    for ask in (
        RequestedModel("/srv/models/ours", "00", 1.5),
        RequestedModel(None, None, 2.5),
    ):
        request_model(redis.client, "feedmill", ask)
        assert requested_model(redis.client, "feedmill") == ask
    key = find(REQUESTED_MODELS)
    assert key
    assert key.pattern == REQUESTED_MODELS
    request_model(redis.client, "feedmill", None)
    assert requested_model(redis.client, "feedmill") is None


def test_queues_without_a_deployed_model_leave_room_for_others(
    redis: RedisServer,
) -> None:
    """A queue that was returned to its workers' own model does not count against the limit."""
    for number in range(MAX_QUEUES):
        request_model(redis.client, f"old-{number}", RequestedModel(None, None, 1.0))
    deployed = RequestedModel("/srv/models/ours", "00", 2.0)
    for number in range(MAX_QUEUES):
        request_model(redis.client, f"new-{number}", deployed)
    with pytest.raises(UserError, match="--reset"):
        request_model(redis.client, "one-more", deployed)
    assert redis.client.hlen(REQUESTED_MODELS) == MAX_QUEUES


def test_deployed_folder_overrides_the_workers_model_settings(folder: Path) -> None:
    own = Settings(
        classifier="similarity",
        revision="main",
        trust_remote_code=True,
        models_folder=folder.parent,
    )
    loaded = load_wanted(asked(folder), own, CPU)
    assert (loaded.kind, loaded.weights.name, loaded.weights.revision) == (
        "sequence",
        str(folder),
        None,
    )


def test_todays_digest_needs_no_look_at_that_of_0_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> str:
        raise ModelError("this model has no digest of 0.1")

    monkeypatch.setattr(hot_swap, "digest_of_0_1", fail)
    assert load_wanted(asked(folder), Settings(), CPU).weights.name == str(folder)


@pytest.mark.parametrize(
    ("changes", "settings", "words"),
    [
        ({"model": "/srv/none"}, {}, f"/srv/none.* {socket.gethostname()}"),
        ({"model": "someone/model"}, {}, "someone/model"),
        ({"model": "/" + "x" * 5000}, {}, "/xxxx"),
        ({"model": "/\0\x1b"}, {}, r"/\\x00\\x1b"),
        ({"weights": "ab" * 32}, {}, r"[0-9a-f]{12}.*\babababababab\b"),
        ({"weights": None}, {}, r"\b[0-9a-f]{12}\b.*None"),
        ({}, {"models_folder": Path("/srv/models")}, "/srv/models.*FEEDMILL_MODELS_FOLDER"),
    ],
)  # fmt: skip
def test_rejects_models_that_may_not_be_loaded(
    folder: Path, changes: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        load_wanted(asked(folder, **changes), Settings(**settings), CPU)


def test_rejects_symlinks_out_of_the_models_folder(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ModelError, match="FEEDMILL_MODELS_FOLDER"):
        load_wanted(asked(tmp_path / "link"), Settings(models_folder=tmp_path), CPU)


class Candidate(Model):
    """A new model under test."""

    score = 0.75

    def finish(self, rows: Any, outputs: Any) -> Any:
        return [
            (row, dict.fromkeys(self.labels.labels, self.score))
            for row, _ in super().finish(rows, outputs)
        ]


class House:
    """A pipeline with a stand-in model, and a Deployer that replaces it."""

    def __init__(
        self, redis: RedisServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.redis, self.settings = redis, settings
        self.owner = Owner(Model("old"))
        self.replaced = 0
        #: Factories of the models to load, by requested name.
        self.models: dict[str, Callable[[], Model]] = {}
        self.loaded: list[weakref.ref[Model]] = []
        monkeypatch.setattr(
            hot_swap, "load_wanted", lambda ask, *_: self._load(ask.model or "own")
        )
        self.deployer = Deployer(
            self.owner.pipeline, settings, connect(settings), None, self._on_replaced
        )
        self.deployer.start()

    def _load(self, name: str) -> Model:
        made = self.models[name]()
        self.loaded.append(weakref.ref(made))
        return made

    def _on_replaced(self) -> None:
        self.replaced += 1

    def deploy(self, name: str | None, model: Callable[[], Model]) -> RequestedModel:
        ask = RequestedModel(name, "00", time.time())
        self.models[name or "own"] = model
        request_model(self.redis.client, "feedmill", ask)
        self.deployer.request_check()
        return ask

    def report(self, ask: RequestedModel) -> DeploymentReport:
        """Return the final report on this request."""

        def is_over() -> bool:
            report = self.deployer.report
            return bool(
                report
                and report.at == ask.at
                and report.stage in (Stage.DONE, Stage.FAILED)
            )

        wait_until(is_over, "the deployment is done or has failed")
        assert self.deployer.report
        return self.deployer.report

    def at_work(self) -> str:
        (found,) = self.owner.results("a post")
        return str(found["model"])

    def close(self) -> None:
        self.owner.pipeline.stop()
        self.deployer.stop()


@pytest.fixture
def house(
    redis: RedisServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[House]:
    made = House(redis, settings, monkeypatch)
    yield made
    made.close()


def test_activates_a_deployed_model_and_the_workers_own_again(house: House) -> None:
    report = house.report(house.deploy("/new", lambda: Candidate("new")))
    assert report.stage is Stage.DONE
    assert "/new" in report.said
    assert house.at_work() == "new"
    assert (
        house.report(house.deploy(None, lambda: Candidate("own"))).stage is Stage.DONE
    )
    assert house.at_work() == "own"
    wait_until(lambda: house.replaced == 2, "both replacements are announced")


def test_returns_to_the_workers_own_model_once_the_deployment_is_removed(
    house: House,
) -> None:
    """A worker that did not answer to `feedmill deploy --reset` finds no deployment later."""
    deployed = house.deploy("/new", lambda: Candidate("new"))
    assert house.report(deployed).stage is Stage.DONE
    house.models["own"] = lambda: Candidate("own")
    request_model(house.redis.client, "feedmill", None)
    house.deployer.request_check()
    wait_until(lambda: house.replaced == 2, "the worker's own model is active")
    assert house.at_work() == "own"


def fails(error: BaseException) -> Callable[[], Model]:
    def load() -> Model:
        raise error

    return load


def full(_: Any) -> Any:
    raise DeviceFull("out of memory")


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (fails(ModelError("There is none.")), "There is none."),
        (fails(RuntimeError("a bug\x1b")), "RuntimeError: a bug\\x1b"),
        (fails(DeviceFull("out of memory")), "memory"),
    ],
    ids=["no model", "bug", "no memory"],
)
def test_a_failed_deployment_keeps_the_active_model(
    house: House, load: Callable[[], Model], words: str
) -> None:
    report = house.report(house.deploy("/new", load))
    assert report.stage is Stage.FAILED
    assert report.said.startswith("old ")
    assert words in report.said
    assert house.at_work() == "old"
    assert house.owner.failures == house.replaced == 0
    wait_until(
        lambda: not any(model() for model in house.loaded),
        "the rejected model is freed",
    )
    assert (
        house.report(house.deploy("/good", lambda: Candidate("good"))).stage
        is Stage.DONE
    )


@pytest.mark.parametrize("fails", [True, False], ids=["failed", "replaced"])
def test_budget_lowered_beside_another_model_is_restored(
    house: House, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    forward, lowered = house.owner.classifier.forward, []

    def without_memory(rows: Any) -> Any:
        return forward(rows) if len(rows) <= 4 else full(rows)

    def load() -> Model:
        with monkeypatch.context() as during:
            during.setattr(house.owner.classifier, "forward", without_memory)
            house.owner.results(*["two words"] * 32)
        lowered.append(house.owner.pipeline.backlog.loaded.budget)
        if fails:
            raise ModelError("There is none.")
        return Candidate("new")

    report = house.report(house.deploy("/new", load))
    assert report.stage is (Stage.FAILED if fails else Stage.DONE)
    assert lowered[0] < 64
    wait_until(
        lambda: house.owner.pipeline.backlog.loaded.budget == 2048,
        ("the token budget is restored"),
    )


def test_the_latest_deployment_wins(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    """If a second request arrives while the first model loads, the first model is never
    activated.
    """
    asks: list[RequestedModel] = []

    def load() -> Model:
        asks.append(house.deploy("/last", lambda: Candidate("last")))
        return Candidate("first")

    first = house.deploy("/first", load)
    wait_until(lambda: asks, "the first model is being loaded")
    assert house.report(asks[0]).stage is Stage.DONE
    assert asks[0] != first
    assert any(
        "old " in record.getMessage()
        for record in caplog.records
        if record.name == hot_swap.__name__
    )
    assert house.at_work() == "last"
    wait_until(lambda: house.replaced == 1, "the replacement is announced")


def test_keeps_the_model_while_redis_is_unreachable(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "feedmill.workers.runtime.hot_swap")
    there, house.deployer._redis = (
        house.deployer._redis,
        connect_for_monitoring(Settings(redis_url="redis://127.0.0.1:1/0")),
    )
    ask = house.deploy("/new", lambda: Candidate("new"))
    wait_until(
        lambda: any(record.name == hot_swap.__name__ for record in caplog.records),
        "the failed read is logged",
    )
    assert house.at_work() == "old"
    house.deployer._redis = there
    house.deployer.request_check()
    assert house.report(ask).stage is Stage.DONE


def test_tests_and_activates_a_real_model(
    redis: RedisServer, settings: Settings, folder: Path
) -> None:
    """Deploy a real model, with its classifier, engine and tokenizer."""
    owner = Owner(Model("old"))
    owner.pipeline.classifier.device = CPU
    deployer = Deployer(owner.pipeline, settings, connect(settings), None, lambda: None)
    deployer.start()
    try:
        ask = asked(folder)
        request_model(redis.client, "feedmill", ask)
        deployer.request_check()
        wait_until(
            lambda: owner.pipeline.classifier.weights.name == str(folder),
            "the model is active",
        )
        (found,) = owner.results("a post")
        assert set(found["scores"]) == set(LABELS.values())
        assert (found["model"], found["revision"], found["weights"]) == (
            str(folder),
            None,
            ask.weights,
        )
    finally:
        owner.pipeline.stop()
        deployer.stop()
    assert torch.get_default_dtype() is torch.float32


class Workers:
    """Stand-in for Celery's remote control: the workers' answers, one dict per broadcast."""

    def __init__(self, *looks: dict[str, Any]) -> None:
        self.control = self
        self.looks = list(looks)

    def connection_for_write(self, **_: Any) -> Any:
        return nullcontext()

    def mailbox(self, _: Any) -> "Workers":
        return self

    def call(
        self, destination: list[str], command: str, **_: Any
    ) -> list[dict[str, Any]]:
        assert command == "feedmill_deploy"
        look = self.looks.pop(0) if self.looks else {}
        return [{node: look[node]} for node in destination if node in look]


ASKED, BEFORE = RequestedModel("/new", "00", 2.0), RequestedModel("/before", "11", 1.0)


def says(stage: Stage, at: float = ASKED.at) -> dict[str, Any]:
    return DeploymentReport(at, stage, "so it goes")._asdict()


@pytest.mark.parametrize(
    ("looks", "words", "status", "left"),
    [
        (
            [
                {"a": {}, "b": says(Stage.LOADING)},
                {"a": says(Stage.DONE), "b": says(Stage.DONE)},
            ],
            r"\b2 workers",
            0,
            ASKED,
        ),
        ([{"a": says(Stage.DONE), "b": says(Stage.FAILED)}], r"\b1 of 2\b", 1, ASKED),
        (
            [{"a": says(Stage.FAILED), "b": says(Stage.FAILED)}],
            r"\b0 of 2\b",
            1,
            BEFORE,
        ),
        (
            [{"a": says(Stage.DONE), "b": says(Stage.DONE, 1.0)}],
            r"\b1 of 2\b.* b ",
            1,
            ASKED,
        ),
        (
            [{"a": says(Stage.FAILED), "b": says(Stage.LOADING)}],
            r"\b0 of 2\b.* b ",
            1,
            ASKED,
        ),
    ],
    ids=["all", "some", "none", "one does not react", "one vanishes"],
)
def test_reports_how_the_deployment_ended(
    redis: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    looks: list[dict[str, Any]],
    words: str,
    status: int,
    left: RequestedModel,
) -> None:
    is_silent = words.endswith(" b ")  # only then ends the timeout the wait
    monkeypatch.setattr(deployment, "REPORT_TIMEOUT_S", 1.0 if is_silent else 120.0)
    monkeypatch.setattr(deployment, "POLL_INTERVAL_S", 0.01)
    request_model(redis.client, "feedmill", ASKED)
    reports = deployment.wait_for_workers(
        Workers(*looks),  # type: ignore[arg-type]
        ["a", "b"],
        ASKED,
        lambda: True,
        lambda *_: None,
    )
    said, is_complete = deployment.conclude(
        redis.client, "feedmill", ASKED, BEFORE, reports
    )
    assert re.search(words, said)
    assert is_complete == (status == 0)
    assert requested_model(redis.client, "feedmill") == left
