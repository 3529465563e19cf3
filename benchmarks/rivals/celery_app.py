"""What both Celery rivals and their driver agree on: names, and a worker with Celery's defaults.

Imported with two versions of Celery: by the driver with ours, by celery-batches' worker with the one it demands.
"""

import os

from celery import Celery

#: The one task; its argument is the text of one post.
TASK = "classify"
#: Environment variable with the address of the rival's own Redis, without the database.
REDIS_URL = "RIVAL_REDIS_URL"
QUEUE_DATABASE, RESULTS_DATABASE = 0, 1


def worker_app(prefetch: int) -> Celery:
    """An application that fetches so many messages ahead, acknowledges late like Feedmill, and sends no events."""
    url = os.environ[REDIS_URL]
    app = Celery(broker=f"{url}/{QUEUE_DATABASE}", backend=f"{url}/{RESULTS_DATABASE}")
    app.conf.update(accept_content=["json"], task_acks_late=True, worker_prefetch_multiplier=prefetch)
    return app


def work(app: Celery, pool: str = "solo", processes: int = 1) -> None:
    """Take messages until SIGTERM. Solo: one process with the model, whose forward pass has all cores."""
    # At its default level a worker writes two lines a task.
    app.worker_main(["worker", "--pool", pool, "--concurrency", str(processes), "--loglevel", "WARNING"])
