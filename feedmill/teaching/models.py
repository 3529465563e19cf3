"""Taught models: their folders, deploying one, and going back to what it replaced."""

import json
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from celery import Celery
from pydantic import TypeAdapter, ValidationError
from redis import Redis

from feedmill.shared import model_routing
from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import UserError, explain_unwritable
from feedmill.shared.model_routing import DeploymentReport, RequestedModel
from feedmill.shared.redis_errors import user_errors
from feedmill.shared.settings import Settings
from feedmill.teaching import deployment

logger = logging.getLogger(__name__)

#: Names of the models' folders, and how many are kept, besides those that were deployed lately.
MODEL_NAME = re.compile(r"taught-\d{4}-\d\d-\d\d-\d{6}(-\d+)?")
MAX_MODELS = 5
#: Names in the models' folder and in a model's: deployments, and the record of a lesson.
HISTORY_FILE = "deployments.json"
RECORD_FILE = "training.json"
#: Deployments that can be taken back.
MAX_DEPLOYMENTS = 20
#: Workers whose reports are shown.
MAX_REPORTS = 100


@dataclass(frozen=True, kw_only=True)
class DeploymentState:
    """The state of a deployment: idle, running, done or failed."""

    state: str = "idle"
    #: "deploy" or "back".
    what: str = ""
    model: str | None = None
    message: str = ""
    #: The latest report of each worker, by its name.
    workers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """A deployment from the page, and the one that it replaced."""

    deployed: RequestedModel
    before: RequestedModel | None


class TaughtModels:
    """The taught models in a folder, and their deployments to the settings' queue. Thread-safe.

    when_ended: called after each deployment. Methods raise UserError, and
    redis.exceptions.RedisError.
    """

    def __init__(
        self,
        redis: Redis,
        celery: Celery,
        settings: Settings,
        folder: Path,
        when_ended: Callable[[], None],
    ) -> None:
        self._redis = redis
        self._celery = celery
        self._settings = settings
        self.folder = folder.expanduser().absolute()
        self._when_ended = when_ended
        self._lock = threading.Lock()
        self.deployment = DeploymentState()

    def new_folder(self) -> Path:
        with explain_unwritable(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        name = f"taught-{datetime.now():%Y-%m-%d-%H%M%S}"
        folder = self.folder / name
        number = 1
        while folder.exists():
            number += 1
            folder = self.folder / f"{name}-{number}"
        return folder

    def all(self) -> list[Path]:
        """Return the folders of taught models, the newest first."""
        folders: list[Path] = []
        with suppress(OSError):
            for path in self.folder.iterdir():
                is_model = MODEL_NAME.fullmatch(path.name) is not None
                if is_model and (path / RECORD_FILE).is_file():
                    folders.append(path)
        return sorted(folders, reverse=True)

    def prune(self) -> None:
        """Delete the oldest taught models, except those that may still be deployed."""
        deployable: set[str] = set()
        for replaced in self.history():
            deployable.add(str(replaced.deployed.model))
            if replaced.before is not None:
                deployable.add(str(replaced.before.model))
        try:
            with user_errors(self._settings):
                deployable |= model_routing.requested_folders(self._redis)
        except UserError as error:
            logger.warning("keeping all taught models: %s", error)
            return
        for folder in self.all()[MAX_MODELS:]:
            if str(folder) not in deployable:
                shutil.rmtree(folder, ignore_errors=True)

    # Deployments.

    def deploy(self, name: str) -> None:
        """Begin to switch the workers to a taught model, by its folder's name."""
        folder = self.folder / name
        if not MODEL_NAME.fullmatch(name) or not folder.is_dir():
            raise UserError(f"There is no taught model {name!r:.80}. Reload the page.")
        request = deployment.request_of(folder)
        self._begin_deployment("deploy", request)

    def back(self) -> None:
        """Begin to switch the workers back to what the latest deployment from here replaced."""
        replaced = self.can_go_back()
        if replaced is None:
            raise UserError(
                "There is no deployment from this page to take back, or another one has replaced "
                "it. See `feedmill deploy`."
            )
        before = replaced.before or RequestedModel(None, None, 0.0)
        request = RequestedModel(before.model, before.weights, time.time())
        self._begin_deployment("back", request)

    def can_go_back(self) -> Replaced | None:
        """Return the latest deployment from here if its model is still the deployed one."""
        history = self.history()
        if not history:
            return None
        requested = model_routing.requested_model(self._redis, self._settings.queue)
        if requested is None or requested.at != history[-1].deployed.at:
            return None
        return history[-1]

    def _begin_deployment(self, what: str, request: RequestedModel) -> None:
        with self._lock:
            if self.deployment.state == "running":
                raise UserError("A deployment runs already. Wait for its end.")
            self.deployment = DeploymentState(
                state="running",
                what=what,
                model=request.model,
            )
        thread = threading.Thread(
            target=self._deploy,
            args=(what, request),
            name="deployment",
            daemon=True,
        )
        thread.start()

    def _deploy(self, what: str, request: RequestedModel) -> None:
        queue = self._settings.queue

        def on_report(node: str, report: DeploymentReport) -> None:
            with self._lock:
                workers = dict(self.deployment.workers)
                if len(workers) < MAX_REPORTS:
                    workers[node] = f"{report.stage}: {report.said}"
                self.deployment = replace(self.deployment, workers=workers)

        try:
            with user_errors(self._settings):
                before = model_routing.readable_request(self._redis, queue)
            history = self._history_after(what, request, before)
            with user_errors(self._settings):
                conclusion = deployment.deploy(
                    self._redis, self._celery, queue, request, on_report
                )
                requested = model_routing.requested_model(self._redis, queue)
            if requested == request:
                self._write_history(history)
            state = "done" if conclusion.is_complete else "failed"
            message = conclusion.message
        except UserError as error:
            state = "failed"
            message = str(error)
        except Exception:
            logger.exception("a deployment failed")
            state = "failed"
            message = "The deployment failed. The server's log has the reason."
        with self._lock:
            self.deployment = replace(
                self.deployment,
                state=state,
                message=message,
            )
        self._when_ended()

    def _history_after(
        self, what: str, request: RequestedModel, before: RequestedModel | None
    ) -> list[Replaced]:
        """Return the history after a deployment. before: the model that it replaces."""
        history = self.history()
        if what != "back":
            history.append(Replaced(deployed=request, before=before))
            return history
        history = history[:-1]
        if history:
            # What is deployed now is again what that deployment asked for.
            history[-1] = replace(history[-1], deployed=request)
        return history

    def history(self) -> list[Replaced]:
        """Return the deployments from here that can be taken back, the oldest first."""
        path = self.folder / HISTORY_FILE
        try:
            text = path.read_text("utf-8")
        except (OSError, ValueError):
            return []
        try:
            return TypeAdapter(list[Replaced]).validate_json(text)
        except ValidationError:
            logger.warning("%s is damaged: deployments cannot be taken back", path)
            return []

    def _write_history(self, history: Sequence[Replaced]) -> None:
        rows: list[dict[str, Any]] = []
        for replaced in history[-MAX_DEPLOYMENTS:]:
            row = asdict(replaced)
            rows.append(row)
        path = self.folder / HISTORY_FILE
        with explain_unwritable(path), replacing(path) as temporary:
            text = json.dumps(rows, indent=1)
            temporary.write_text(f"{text}\n", encoding="utf-8")
