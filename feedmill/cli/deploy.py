"""The `feedmill deploy` command: switch the workers of a queue to another model while they keep running."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from celery import Celery
from redis import Redis
from typer import Argument, Option

from feedmill.cli.options import AsJson, excludes, with_settings
from feedmill.monitoring import watch
from feedmill.shared import model_routing
from feedmill.shared.broker import connect, make_app
from feedmill.shared.errors import ModelError, explain_missing, printable
from feedmill.shared.keys import REQUESTED_MODELS
from feedmill.shared.model_routing import DeploymentReport, RequestedModel, Stage
from feedmill.shared.settings import Settings

#: Seconds without a report on the deployment after which a worker counts as unresponsive.
REPORT_TIMEOUT_S = 30.0
#: Seconds between two polls of the workers.
POLL_INTERVAL_S = 0.5
#: Seconds that a poll waits for the workers' answers.
ANSWER_TIMEOUT_S = 1.0


@excludes("--reset", "FOLDER")
@with_settings("queue", "redis_url")
def deploy(
    settings: Settings,
    folder: Annotated[Path | None, Argument(metavar="FOLDER", help="Model folder written by save_pretrained.")] = None,
    queue: str | None = None,
    reset: Annotated[bool, Option("--reset", help="Return to the model in each worker's own settings.")] = False,
    as_json: AsJson = False,
) -> None:
    """FOLDER must exist under the same absolute path on every worker's machine. If every worker fails to load the
    model, the previous deployment is restored. Exits 1 if a worker did not switch or none serves the queue. --reset
    does nothing if no model is deployed. Without FOLDER and --reset, shows the deployed and running models of all
    queues.
    """
    redis, celery = connect(settings), make_app(settings)
    if queue is not None:
        model_routing.check_queue(redis, queue)
    if folder is None and not reset:
        _show(redis, celery, settings, as_json)
        return
    name = settings.queue
    before = model_routing.requested_model(redis, name)
    deployment = _requested(folder)
    serving = {node: pool for node, pool in watch.current_workers(celery, redis).items() if name in pool["queues"]}
    if reset and before is None:
        message, status = f"No model is deployed to queue {name}: its workers use their own. Nothing to do.", 0
    else:
        model_routing.request_model(redis, name, deployment)
        reports = _wait_for_workers(
            celery, list(serving), deployment, lambda: model_routing.requested_model(redis, name) == deployment, as_json
        )
        message, status = _conclude(redis, name, deployment, before, reports)
    typer.echo(json.dumps({"queue": name, **asdict(deployment), "said": message}) if as_json else printable(message))
    raise typer.Exit(status)


def _requested(folder: Path | None) -> RequestedModel:
    """Return the deployment to store; without a folder, that of the workers' own model. Raises ModelError."""
    if folder is None:
        return RequestedModel(None, None, time.time())
    with explain_missing("Deploying a model", "worker"):
        from feedmill.workers.models.weights import locate  # noqa: PLC0415 - needs packages that only workers have
    place = str(folder.expanduser().absolute())
    if not Path(place).is_dir():
        raise ModelError(f"There is no folder {place}. Name a model's folder.")
    return RequestedModel(place, locate(place).sha256, time.time())


def _wait_for_workers(
    celery: Celery, nodes: list[str], deployment: RequestedModel, holds: Callable[[], bool], as_json: bool
) -> dict[str, DeploymentReport | None]:
    """Poll the workers until each has switched, failed or stopped reporting; print reports as they arrive.

    holds: returns False once another deployment replaces this one, which ends the wait.
    Returns each worker's last report; None for one that did not report on this deployment in time.
    """
    reports: dict[str, DeploymentReport | None] = dict.fromkeys(nodes)
    heard = dict.fromkeys(nodes, time.monotonic())
    while nodes and holds():
        for node, report in _poll(celery, nodes):
            ours = report.at == deployment.at
            if ours or not _is_done(report):  # or busy with an earlier deployment
                heard[node] = time.monotonic()
            if ours and reports[node] != report:
                reports[node] = report
                if as_json:
                    typer.echo(json.dumps({"worker": node} | report._asdict()))
                else:
                    typer.echo(printable(f"{node}  {report.stage:<8}  {report.said}"))
        over = [node for node in nodes if time.monotonic() - heard[node] > REPORT_TIMEOUT_S]
        reports |= dict.fromkeys(over)
        nodes = [node for node in nodes if node not in over and not _is_done(reports[node])]
        time.sleep(POLL_INTERVAL_S if nodes else 0)
    return reports


def _is_done(report: DeploymentReport | None) -> bool:
    return report is not None and report.stage in (Stage.DONE, Stage.FAILED)


def _poll(celery: Celery, nodes: list[str]) -> list[tuple[str, DeploymentReport]]:
    """Ask the workers to check for a deployment; return each one's report on the latest deployment it has read."""
    answers = watch.ask(celery, "feedmill_deploy", nodes, ANSWER_TIMEOUT_S) if nodes else {}
    return [
        (node, DeploymentReport(found["at"], Stage(found["stage"]), found["said"]))
        for node, found in answers.items()
        if "at" in found
    ]


def _conclude(
    redis: Redis,
    queue: str,
    deployment: RequestedModel,
    before: RequestedModel | None,
    reports: dict[str, DeploymentReport | None],
) -> tuple[str, int]:
    """Return the summary and the exit status. Restores the previous deployment if every worker failed."""
    if not reports:
        return f"No worker serves queue {queue} now. The deployment applies when one starts.", 1
    done = sum(report is not None and report.stage is Stage.DONE for report in reports.values())
    silent = [node for node, report in reports.items() if report is None]
    if model_routing.requested_model(redis, queue) != deployment:
        rest = "another deployment replaced this one (`feedmill deploy` shows it)"
    elif done == len(reports):
        return f"{done:,} of {len(reports):,} workers of queue {queue} have switched.", 0
    elif silent:
        rest = f"{silent[0]} has not reported for {REPORT_TIMEOUT_S:.0f} s; see the worker's log, and `feedmill deploy`"
    elif done:
        rest = "two models now serve the queue. Fix the errors above and deploy again, or deploy the previous model"
    else:
        model_routing.request_model(redis, queue, before)
        rest = "rolled back to the previous deployment"
    return f"{done:,} of {len(reports):,} workers of queue {queue} have switched: {rest}.", 1


def _show(redis: Redis, celery: Celery, settings: Settings, as_json: bool) -> None:
    """Print the deployed model of each queue and the model that each of its workers runs."""
    workers = watch.current_workers(celery, redis)
    known: Any = redis.hkeys(REQUESTED_MODELS)
    for queue in sorted({*known, *model_routing.queues(redis, settings)}):
        deployment = model_routing.requested_model(redis, queue)
        serving = {node: pool for node, pool in workers.items() if queue in pool["queues"]}
        if as_json:
            runs = {node: {key: pool[key] for key in ("model", "weights", "deploy")} for node, pool in serving.items()}
            typer.echo(json.dumps({"queue": queue, "wanted": deployment and asdict(deployment), "workers": runs}))
            continue
        what = "each worker's own model"
        if deployment and deployment.model:
            what = f"{printable(deployment.model)} ({printable(str(deployment.weights)[:12])})"
        typer.echo(f"{printable(queue)}  deployed: {what}")
        for node, pool in serving.items():
            model = f"{pool['model']} ({pool['weights'][:12]})"
            report = pool["deploy"]
            latest = f"; {report['stage']}: {report['said']}" if report and report["stage"] != Stage.DONE else ""
            typer.echo(printable(f"  {node}  runs {model}{latest}"))
