"""Switch the workers of a queue to another model while they keep running: the request, its reports
and its end.

`feedmill deploy` and the page Teach show what happens.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from celery import Celery
from redis import Redis

from feedmill.monitoring import watch
from feedmill.shared import model_routing
from feedmill.shared.errors import ModelError, explain_missing
from feedmill.shared.model_routing import DeploymentReport, RequestedModel, Stage

#: Seconds without a report on the deployment after which a worker counts as unresponsive.
REPORT_TIMEOUT_S = 30.0
#: Seconds between two polls of the workers.
POLL_INTERVAL_S = 0.5
#: Seconds that a poll waits for the workers' answers.
ANSWER_TIMEOUT_S = 1.0

OnReport = Callable[[str, DeploymentReport], None]


class Conclusion(NamedTuple):
    """The end of a deployment. is_complete: every worker of the queue has switched."""

    message: str
    is_complete: bool


def deploy(
    redis: Redis,
    celery: Celery,
    queue: str,
    request: RequestedModel,
    on_report: OnReport,
) -> Conclusion:
    """Request a model for a queue, and wait until its workers have switched or failed.

    Restores the previous deployment if every worker failed; an invalid one is removed instead.
    Raises UserError and redis.exceptions.RedisError.
    """
    before = model_routing.readable_request(redis, queue)
    workers = watch.current_workers(celery, redis)
    nodes = list(serving(workers, queue))
    model_routing.request_model(redis, queue, request)

    def holds() -> bool:
        return model_routing.requested_model(redis, queue) == request

    reports = wait_for_workers(celery, nodes, request, holds, on_report)
    return conclude(redis, queue, request, before, reports)


def reset(
    redis: Redis,
    celery: Celery,
    queue: str,
    request: RequestedModel,
    on_report: OnReport,
) -> Conclusion:
    """Return a queue's workers to their own model, and remove the deployment once all have
    switched.

    request: that of `request_of` without a folder. Raises as `deploy` does.
    """
    if not model_routing.has_request(redis, queue):
        message = (
            f"No model is deployed to queue {queue}: its workers use their own. Nothing to "
            "do."
        )
        return Conclusion(message, True)
    conclusion = deploy(
        redis,
        celery,
        queue,
        request,
        on_report,
    )
    if conclusion.is_complete:
        model_routing.request_model(redis, queue, None)
    return conclusion


def serving(
    workers: dict[str, dict[str, Any]], queue: str
) -> dict[str, dict[str, Any]]:
    """Return the workers of a queue, from the statistics of all."""
    return {node: pool for node, pool in workers.items() if queue in pool["queues"]}


def request_of(folder: Path | None) -> RequestedModel:
    """Return the deployment to store; without a folder, that of the workers' own model.

    Raises ModelError.
    """
    if folder is None:
        return RequestedModel(None, None, time.time())
    with explain_missing("Deploying a model", "worker"):
        # Needs packages that only workers have.
        from feedmill.workers.models.weights import locate  # noqa: PLC0415
    folder = folder.expanduser().absolute()
    if not folder.is_dir():
        raise ModelError(f"There is no folder {folder}. Name a model's folder.")
    name = str(folder)
    files = locate(name)
    return RequestedModel(name, files.sha256, time.time())


def wait_for_workers(
    celery: Celery,
    nodes: list[str],
    deployment: RequestedModel,
    holds: Callable[[], bool],
    on_report: OnReport,
) -> dict[str, DeploymentReport | None]:
    """Poll the workers until each has switched, failed or stopped reporting.

    on_report: called with each new report. holds: returns False once another deployment replaces
    this one, which ends the wait.
    Returns each worker's last report; None for one that did not report on this deployment in time.
    """
    reports: dict[str, DeploymentReport | None] = dict.fromkeys(nodes)
    # When each worker reported last.
    report_times = dict.fromkeys(nodes, time.monotonic())
    while nodes and holds():
        for node, report in _poll(celery, nodes):
            is_ours = report.at == deployment.at
            if is_ours or not _is_done(report):  # or busy with an earlier deployment
                report_times[node] = time.monotonic()
            if is_ours and reports[node] != report:
                reports[node] = report
                on_report(node, report)
        unfinished = []
        for node in nodes:
            silence = time.monotonic() - report_times[node]
            if silence > REPORT_TIMEOUT_S:
                reports[node] = None
            elif not _is_done(reports[node]):
                unfinished.append(node)
        nodes = unfinished
        if nodes:
            time.sleep(POLL_INTERVAL_S)
    return reports


def _is_done(report: DeploymentReport | None) -> bool:
    if report is None:
        return False
    return report.stage in (Stage.DONE, Stage.FAILED)


def _poll(celery: Celery, nodes: list[str]) -> list[tuple[str, DeploymentReport]]:
    """Ask the workers to check for a deployment; return each one's report on the latest deployment
    it has read.
    """
    answers = watch.ask(celery, "feedmill_deploy", nodes, ANSWER_TIMEOUT_S)
    reports: list[tuple[str, DeploymentReport]] = []
    for node, answer in answers.items():
        if "at" in answer:
            stage = Stage(answer["stage"])
            report = DeploymentReport(answer["at"], stage, answer["said"])
            reports.append((node, report))
    return reports


def conclude(
    redis: Redis,
    queue: str,
    deployment: RequestedModel,
    before: RequestedModel | None,
    reports: dict[str, DeploymentReport | None],
) -> Conclusion:
    """Return how a deployment ended.

    Restores the previous deployment if every worker failed.
    """
    if not reports:
        message = (
            f"No worker serves queue {queue} now. The deployment applies when one "
            "starts."
        )
        return Conclusion(message, False)
    silent = []
    done = 0
    for node, report in reports.items():
        if report is None:
            silent.append(node)
        elif report.stage is Stage.DONE:
            done += 1
    count = f"{done:,} of {len(reports):,} workers of queue {queue} have switched"
    if model_routing.requested_model(redis, queue) != deployment:
        rest = "another deployment replaced this one (`feedmill deploy` shows it)"
    elif done == len(reports):
        return Conclusion(f"{count}.", True)
    elif silent:
        rest = (
            f"{silent[0]} has not reported for {REPORT_TIMEOUT_S:.0f} s; see the worker's log, "
            "and `feedmill deploy`"
        )
    elif done:
        rest = (
            "two models now serve the queue. Fix the errors above and deploy again, or deploy "
            "the previous model"
        )
    else:
        model_routing.request_model(redis, queue, before)
        rest = "rolled back to the previous deployment"
    return Conclusion(f"{count}: {rest}.", False)
