"""The `feedmill deploy` command: switch the workers of a queue to another model while they keep
running.
"""

import json
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
from feedmill.shared.errors import UserError, printable
from feedmill.shared.keys import REQUESTED_MODELS
from feedmill.shared.model_routing import DeploymentReport, RequestedModel, Stage
from feedmill.shared.settings import Settings
from feedmill.teaching import deployment
from feedmill.teaching.deployment import Conclusion


@excludes("--reset", "FOLDER")
@with_settings("queue", "redis_url")
def deploy(
    settings: Settings,
    folder: Annotated[
        Path | None,
        Argument(metavar="FOLDER", help=("Model folder written by save_pretrained.")),
    ] = None,
    queue: str | None = None,
    reset: Annotated[
        bool,
        Option("--reset", help=("Return to the model in each worker's own settings.")),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """FOLDER must exist under the same absolute path on every worker's machine.

    If every worker fails to load the model, the previous deployment is restored. Exits 1 if a
    worker did not switch or none serves the queue. --reset does nothing if no model is deployed.
    Without FOLDER and --reset, shows the deployed and running models of all queues.
    """
    redis = connect(settings)
    celery = make_app(settings)
    if queue is not None and not model_routing.has_request(redis, queue):
        model_routing.check_queue(redis, queue)
    if folder is None and not reset:
        _show(redis, celery, settings, as_json)
        return

    def print_report(node: str, report: DeploymentReport) -> None:
        line = _report_line(node, report, as_json)
        typer.echo(line)

    name = settings.queue
    request = deployment.request_of(folder)
    if reset:
        conclusion = deployment.reset(
            redis,
            celery,
            name,
            request,
            print_report,
        )
    else:
        conclusion = deployment.deploy(
            redis,
            celery,
            name,
            request,
            print_report,
        )
    _print_conclusion(name, request, conclusion, as_json)
    status = 0 if conclusion.is_complete else 1
    raise typer.Exit(status)


def _print_conclusion(
    queue: str, request: RequestedModel, conclusion: Conclusion, as_json: bool
) -> None:
    message = conclusion.message
    if not as_json:
        typer.echo(printable(message))
        return
    fields = {
        "queue": queue,
        **asdict(request),
        "said": message,
    }
    typer.echo(json.dumps(fields))


def _report_line(node: str, report: DeploymentReport, as_json: bool) -> str:
    if as_json:
        return json.dumps({"worker": node} | report._asdict())
    return printable(f"{node}  {report.stage:<8}  {report.said}")


def _show(redis: Redis, celery: Celery, settings: Settings, as_json: bool) -> None:
    """Print the deployed model of each queue and the model that each of its workers runs."""
    workers = watch.current_workers(celery, redis)
    names: Any = redis.hkeys(REQUESTED_MODELS)
    queues = {*names, *model_routing.queues(redis, settings)}
    for queue in sorted(queues):
        serving = deployment.serving(workers, queue)
        requested = None
        model = "each worker's own model"
        try:
            requested = model_routing.requested_model(redis, queue)
        except UserError as error:
            # The other queues are shown all the same.
            message = printable(str(error))
            typer.echo(message, err=True)
            model = "an invalid request"
        if as_json:
            typer.echo(_queue_json(queue, requested, serving))
            continue
        name = printable(queue)
        if requested and requested.model:
            weights = str(requested.weights)[:12]
            model = printable(f"{requested.model} ({weights})")
        typer.echo(f"{name}  deployed: {model}")
        for node, pool in serving.items():
            line = _worker_line(node, pool)
            typer.echo(printable(line))


def _queue_json(
    queue: str,
    requested: RequestedModel | None,
    serving: dict[str, dict[str, Any]],
) -> str:
    """Return the deployment of a queue, and what each of its workers runs, as JSON."""
    workers: dict[str, dict[str, Any]] = {}
    for node, pool in serving.items():
        workers[node] = {
            "model": pool["model"],
            "weights": pool["weights"],
            "deploy": pool["deploy"],
        }
    fields = {
        "queue": queue,
        "wanted": requested and asdict(requested),
        "workers": workers,
    }
    return json.dumps(fields)


def _worker_line(node: str, pool: dict[str, Any]) -> str:
    """Return the model that a worker runs, and its latest report unless it has switched."""
    weights = pool["weights"][:12]
    line = f"  {node}  runs {pool['model']} ({weights})"
    report = pool["deploy"]
    if report and report["stage"] != Stage.DONE:
        line += f"; {report['stage']}: {report['said']}"
    return line
