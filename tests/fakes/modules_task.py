"""A task of a worker's owner that names the imported modules of OpenTelemetry and Feedmill."""

import sys

from celery import shared_task


@shared_task(name="tests.imported")
def imported() -> list[str]:
    """Return the names of the modules."""
    return [
        name
        for name in sys.modules
        if name.startswith(("opentelemetry", "feedmill.workers.runtime"))
    ]
