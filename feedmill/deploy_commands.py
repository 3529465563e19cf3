"""`feedmill deploy`: puts another model to work on the workers of a queue, which go on meanwhile.

What is wanted is noted in Redis; the workers are told to look, and asked again and again how it goes.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from celery import Celery
from redis import Redis

from feedmill import watch
from feedmill.flags import AsJson, RedisUrl, ToQueue, settings_of
from shared.broker import connect, make_app, told_plainly
from shared.errors import UserError, printable
from shared.keys import WANTED
from shared.serving import Report, Stage, Wanted, check_queue, queues, want, wanted
from shared.settings import Settings

#: Seconds for which a worker may say nothing of what it was asked for.
SILENT = 30.0
#: Seconds between two questions, and those that an answer may take.
PAUSE = 0.5
PATIENCE = 1.0

app = typer.Typer()


@app.command()
def deploy(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="FOLDER", help="The model, as save_pretrained writes it.", show_default=False),
    ] = None,
    queue: ToQueue = None,
    own: Annotated[
        bool, typer.Option("--own", help="In place of a folder: the model of each worker's own settings.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Change nothing: tell what is wanted, and who runs what.")
    ] = False,
    wait: Annotated[bool, typer.Option(help="Stay until all workers have switched, or said why not.")] = True,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Put another model to work on the workers of a queue, without stopping them."""
    settings = settings_of(redis_url=redis_url)
    redis, celery = connect(settings), make_app(settings)
    if [folder is not None, own, show].count(True) != 1:
        raise UserError("Give one of these: the FOLDER of a model, --own, or --show.")
    with told_plainly(settings):
        if queue is not None:
            check_queue(redis, queue)
        if show:
            _show(redis, celery, settings, as_json)
            return
        name = queue or settings.queue
        before = wanted(redis, name)
        asked = _asking(folder)
        want(redis, name, asked)
        nodes = [node for node, pool in watch.worker_statistics(celery).items() if name in pool["queues"]]
        if wait or not nodes:
            reports = _told(celery, nodes, asked, lambda: wanted(redis, name) == asked, as_json)
            said, status = _ended(redis, name, asked, before, reports)
        else:
            _answers(celery, nodes)
            said, status = f"{len(nodes):,} workers of queue {name} were told: --show tells how it goes.", 0
    typer.echo(json.dumps({"queue": name, **asked._asdict(), "said": said}) if as_json else printable(said))
    raise typer.Exit(status)


def _asking(folder: Path | None) -> Wanted:
    """Raises UserError where the folder holds no model."""
    if folder is None:
        return Wanted(None, None, time.time())
    try:
        from workers.weights import locate  # noqa: PLC0415 - what it reads a model with, only workers have
    except ModuleNotFoundError as missing:
        raise UserError(
            f"Reading a model needs {missing.name}, which `pip install 'feedmill[worker]'` brings."
        ) from None
    place = folder.expanduser().absolute()
    if not place.is_dir():
        raise UserError(
            f"There is no folder {place}: give that of a model, as save_pretrained writes it. A model of the hub is "
            "downloaded first."
        )
    return Wanted(str(place), locate(str(place), offline=True).sha256, time.time())


def _told(
    celery: Celery, nodes: list[str], asked: Wanted, holds: Callable[[], bool], as_json: bool
) -> dict[str, Report | None]:
    """By worker, the last that it said, shown as it comes; None where it said nothing of this.

    holds: whether it is still what is wanted.
    """
    reports: dict[str, Report | None] = dict.fromkeys(nodes)
    heard = dict.fromkeys(nodes, time.monotonic())
    while nodes and holds():
        for node, report in _answers(celery, nodes):
            ours = report.at == asked.at
            if ours or not _is_done(report):  # or it is busy with an earlier one
                heard[node] = time.monotonic()
            if ours and reports[node] != report:
                reports[node] = report
                _show_report(node, report, as_json)
        over = [node for node in nodes if time.monotonic() - heard[node] > SILENT]
        reports |= dict.fromkeys(over)
        nodes = [node for node in nodes if node not in over and not _is_done(reports[node])]
        time.sleep(PAUSE if nodes else 0)
    return reports


def _is_done(report: Report | None) -> bool:
    return report is not None and report.stage in (Stage.DONE, Stage.FAILED)


def _answers(celery: Celery, nodes: list[str]) -> list[tuple[str, Report]]:
    """What each of the workers says of the latest asking that it knows of; each of them looks by that, too."""
    answers = watch.ask(celery, "feedmill_deploy", nodes, PATIENCE) if nodes else {}
    return [
        (node, Report(found["at"], Stage(found["stage"]), found["said"]))
        for node, found in answers.items()
        if "at" in found
    ]


def _show_report(node: str, report: Report, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"worker": node} | report._asdict()))
    else:
        typer.echo(printable(f"{node}  {report.stage:<8}  {report.said}"))


def _ended(
    redis: Redis, queue: str, asked: Wanted, before: Wanted | None, reports: dict[str, Report | None]
) -> tuple[str, int]:
    """How it ended, for people, and the exit status. What no worker could take is wanted no more."""
    if not reports:
        return f"No worker serves queue {queue} now: those that start will load it.", 1
    done = sum(report is not None and report.stage is Stage.DONE for report in reports.values())
    silent = [node for node, report in reports.items() if report is None]
    if wanted(redis, queue) != asked:
        rest = "something else was deployed meanwhile, and is what is wanted (--show)"
    elif done == len(reports):
        return f"{done:,} workers of queue {queue} have switched.", 0
    elif silent:
        rest = f"{silent[0]} says nothing of it for {SILENT:.0f} s (--show)"
    elif done:
        rest = "two models serve it. Mend what is said above and deploy it again, or deploy the one before"
    else:
        want(redis, queue, before)
        rest = "what was wanted before is wanted again"
    return f"{done:,} of {len(reports):,} workers of queue {queue} have switched: {rest}.", 1


def _show(redis: Redis, celery: Celery, settings: Settings, as_json: bool) -> None:
    """What is wanted for each queue, and what each of its workers runs."""
    workers = watch.worker_statistics(celery)
    known: Any = redis.hkeys(WANTED)
    for queue in sorted({*known, *queues(redis, settings)}):
        asked = wanted(redis, queue)
        serving = {node: pool for node, pool in workers.items() if queue in pool["queues"]}
        if as_json:
            runs = {node: {key: pool[key] for key in ("model", "weights", "deploy")} for node, pool in serving.items()}
            typer.echo(json.dumps({"queue": queue, "wanted": asked and asked._asdict(), "workers": runs}))
            continue
        what = "what each worker's settings say"
        if asked and asked.model:
            what = f"{printable(asked.model)} ({printable(str(asked.weights)[:12])})"
        typer.echo(f"{printable(queue)}  is to be served with {what}")
        for node, pool in serving.items():
            model = f"{pool['model']} ({pool['weights'][:12]})"
            typer.echo(printable(f"  {node}  runs {model}{_latest(pool['deploy'])}"))


def _latest(report: dict[str, Any]) -> str:
    """The latest asking's way with a worker, where it has not come to a good end."""
    return f"; {report['stage']}: {printable(report['said'])}" if report and report["stage"] != Stage.DONE else ""
