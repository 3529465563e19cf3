"""The worker's Celery application: its tasks, and the pool that runs them.

`feedmill worker` starts it; `celery -A workers.app worker` does too, since the pool is named in its configuration.
"""

from typing import Any

from shared.broker import Application, make_app, reserve
from shared.errors import SettingsError
from shared.settings import Settings, load
from workers import task  # noqa: F401 - a shared task: whatever application is made next has it
from workers.plugins import imported


def make_worker_app(settings: Settings) -> Application:
    """The application with its tasks and the pool, for one worker on one device. Raises SettingsError."""
    app = make_app(settings)
    reserve(app)
    app.conf.update(
        worker_pool="workers.pool:DevicePool",
        worker_concurrency=1,
        worker_consumer="workers.consumer:Consumer",
        worker_autoscaler="workers.consumer:Scaler",
        # In messages, as if each held one row; the pool's gate counts rows, and closes before this does.
        worker_prefetch_multiplier=settings.window_rows,
        # Messages for later are fetched and kept besides; without a limit a worker would take the whole queue. With as
        # many it fetches nothing more, so the limit is far off; workers/consumer.py bounds their memory.
        worker_eta_task_limit=20 * settings.window_rows,
        task_track_started=settings.track_started,
    )
    app.steps["consumer"].add("workers.consumer:ConsumerFit")
    for module in settings.include:
        imported(module, "include")
    app.finalize()
    return app


def __getattr__(name: str) -> Any:
    """`app`, for `celery -A workers.app`: made when asked for, so that importing reads no settings."""
    if name == "app":
        try:
            return make_worker_app(load())
        except SettingsError as error:  # of any Exception the `celery` command shows the traceback
            raise SystemExit(f"feedmill: {error}") from None
    raise AttributeError(name)
