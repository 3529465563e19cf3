"""Names and worker settings that the Celery rivals share with their driver.

Two versions of Celery run this module: Feedmill's in the driver, an older one in the worker of
celery-batches.
"""

import os

from celery import Celery

#: Name of the task. Its argument is the text of one post.
TASK = "classify"
#: Environment variable with the URL of the rival's private Redis, without the database.
REDIS_URL = "RIVAL_REDIS_URL"
QUEUE_DATABASE, RESULTS_DATABASE = 0, 1


def worker_app(prefetch: int) -> Celery:
    """Create an application with this prefetch that acknowledges late, like Feedmill, and sends no
    events.
    """
    url = os.environ[REDIS_URL]
    app = Celery(broker=f"{url}/{QUEUE_DATABASE}", backend=f"{url}/{RESULTS_DATABASE}")
    app.conf.update(
        accept_content=["json"],
        task_acks_late=True,
        worker_prefetch_multiplier=prefetch,
    )
    return app


def work(app: Celery, pool: str = "solo", processes: int = 1) -> None:
    """Consume messages until SIGTERM. The pool `solo` is one process, whose forward pass uses all
    cores.
    """
    # At the default level, a worker logs two lines per task.
    app.worker_main(
        [
            "worker",
            "--pool",
            pool,
            "--concurrency",
            str(processes),
            "--loglevel",
            "WARNING",
        ]
    )
