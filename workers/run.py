"""Run one worker in this process, as `feedmill worker` does."""

import logging
import os
import socket
import warnings

from celery.exceptions import SecurityWarning
from celery.signals import setup_logging, worker_ready, worker_shutting_down

from feedmill.shared import linux, logs
from feedmill.shared.settings import Settings
from feedmill.workers.app import make_worker_app
from feedmill.workers.runtime.pool import DevicePool
from feedmill.workers.transport.leases import release


def run_worker(settings: Settings, name: str | None) -> int:
    """Run a worker until SIGTERM or a failure. Return the exit status.

    name: the node name, with or without @host; unique among the workers of one Redis.
    """
    node = name or f"feedmill-{os.getpid()}"
    # Celery does not configure logging if this signal has a receiver.
    setup_logging.connect(lambda **_: logs.configure(settings), weak=False)
    worker_ready.connect(lambda **_: linux.notify("READY=1"), weak=False)
    worker_shutting_down.connect(lambda **_: linux.notify("STOPPING=1"), weak=False)
    # Containers often run as root. The warning is about pickle, and this worker accepts only JSON.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    worker = make_worker_app(settings).Worker(
        hostname=node if "@" in node else f"{node}@{socket.gethostname()}",
        quiet=True,
        # Gossip makes every worker listen to all others, at a cost quadratic in their number.
        without_gossip=True,
        pool_cls=DevicePool,
    )
    worker.start()
    status = int(worker.exitcode or 0)
    if status:
        # A thread that hangs in the device's driver would block a normal interpreter exit.
        release()
        logging.shutdown()
        os._exit(status)
    return status
