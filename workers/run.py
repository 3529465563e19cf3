"""Runs one worker in this process, as `feedmill worker` does."""

import logging
import os
import socket
import warnings
from typing import Any

from celery.exceptions import SecurityWarning
from celery.signals import setup_logging, worker_ready, worker_shutting_down

from shared import logs, service
from shared.broker import Application
from shared.leases import release
from shared.settings import Settings
from workers.app import make_worker_app
from workers.pool import DevicePool


def run_worker(settings: Settings, name: str | None) -> int:
    """Run until SIGTERM or a failure; returns the exit status.

    name: the node name, with or without @host; it must be unique among the workers of one Redis.
    """
    return run(make_worker_app(settings), name or f"feedmill-{os.getpid()}", pool_cls=DevicePool)


def run(app: Application, node: str, **options: Any) -> int:
    """Run a worker of this application, likewise. options: Celery's, of a worker."""
    settings = app.settings
    # Celery leaves logging alone where someone has connected to this.
    setup_logging.connect(lambda **_: logs.configure(settings), weak=False)
    worker_ready.connect(lambda **_: service.tell("READY=1"), weak=False)
    worker_shutting_down.connect(lambda **_: service.tell("STOPPING=1"), weak=False)
    # As root in a container is how many people run it; JSON only makes that warning's danger (pickle) moot.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    worker = app.Worker(
        hostname=node if "@" in node else f"{node}@{socket.gethostname()}",
        quiet=True,
        # Every worker listening to every other worker's events costs with the square of their number.
        without_gossip=True,
        **options,
    )
    worker.start()
    status = int(worker.exitcode or 0)
    if status:
        # A thread that hangs inside the device's driver would hold up the interpreter's own way out.
        release()
        logging.shutdown()
        os._exit(status)
    return status
