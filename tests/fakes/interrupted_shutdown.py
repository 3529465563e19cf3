"""A module for FEEDMILL_INCLUDE: a second SIGTERM interrupts Celery's handler of the first while
it holds a lock.
"""

import os
import signal
import sys
from typing import Any

from celery.signals import worker_shutting_down

shutting_down: Any = worker_shutting_down
clear = shutting_down._clear_dead_receivers


def interrupt() -> None:
    """Send the second SIGTERM. `send` calls this with the signal's lock held, and so does
    `connect`.
    """
    if sys._getframe(1).f_code.co_name == "_live_receivers":
        shutting_down._clear_dead_receivers = clear
        os.kill(os.getpid(), signal.SIGTERM)
    clear()


shutting_down._clear_dead_receivers = interrupt
