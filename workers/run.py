"""Run one worker in this process, as `feedmill worker` does.

Relies on these internals of Celery 5.7 (celery/apps/worker.py): `Worker.install_platform_tweaks`
installs the handlers of signals, the last of which counts. `install_worker_term_handler` installs
a warm shutdown's, for any signal.
"""

import logging
import os
import signal
import socket
import warnings
from typing import Any

from celery.apps import worker as celery_worker
from celery.exceptions import SecurityWarning
from celery.signals import setup_logging, worker_ready, worker_shutting_down

from feedmill.shared import linux, logs, tracing
from feedmill.shared.settings import Settings
from feedmill.workers.app import make_worker_app
from feedmill.workers.runtime.pool import DevicePool
from feedmill.workers.transport.leases import release


class Worker(celery_worker.Worker):
    """Celery's worker, which Ctrl-C and a closed terminal end as SIGTERM does: with 0, after the
    messages it holds.

    After Ctrl-C, Celery's ends with 1; and SIGHUP restarts it, or kills it in a terminal. Under
    nohup, SIGHUP has no effect, nor has Ctrl-C on a job in a shell's background.
    """

    def install_platform_tweaks(self, worker: Any) -> None:
        before = {
            number: signal.getsignal(number)
            for number in (signal.SIGINT, signal.SIGHUP)
        }
        super().install_platform_tweaks(worker)
        for number, handler in before.items():
            if handler == signal.SIG_IGN:
                signal.signal(number, signal.SIG_IGN)
            else:
                # Not in the stub.
                install: Any = celery_worker.install_worker_term_handler  # type: ignore[attr-defined]
                install(worker, sig=number.name)


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
    app: Any = make_worker_app(settings)  # the stubs lack `subclass_with_self`
    worker = app.subclass_with_self(Worker)(
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
        tracing.stop()
        logging.shutdown()
        os._exit(status)
    return status
