"""The worker's Celery application: its tasks and its pool.

`feedmill worker` starts it. So does `celery -A feedmill.workers.app worker`, because the configuration names the pool.
"""

from typing import Any

from feedmill.shared.broker import Application, make_app
from feedmill.shared.errors import SettingsError
from feedmill.shared.settings import PREFIX, Settings, load
from feedmill.workers.models.plugins import import_user_module
from feedmill.workers.runtime import task  # noqa: F401 - registers the shared task with every application
from feedmill.workers.runtime.in_flight import keep_unstored
from feedmill.workers.transport.redis_transport import use_leases

#: Maximum messages that a worker holds, apart from those with an ETA. Each costs the host about as much as 32 posts.
MAX_MESSAGES = 1024


class WorkerApplication(Application):
    """An application whose results wait while Redis does not accept them."""

    def _get_backend(self) -> Any:
        return keep_unstored(super()._get_backend())  # type: ignore[misc]  # the stubs lack private methods


def make_worker_app(settings: Settings) -> Application:
    """Return the application, with tasks and pool, for one worker on one device.

    Raises SettingsError.
    """
    app = make_app(settings, kind=WorkerApplication)
    use_leases(app)
    app.conf.update(
        worker_pool="feedmill.workers.runtime.pool:DevicePool",
        worker_concurrency=1,
        worker_consumer="feedmill.workers.runtime.consumer:Consumer",
        worker_autoscaler="feedmill.workers.runtime.consumer:Scaler",
        # The pool's own limit counts rows. This one bounds messages of few posts, which cost the host more.
        worker_prefetch_multiplier=min(settings.window_rows, MAX_MESSAGES),
        # Messages with an ETA are prefetched on top of that. Without a limit, a worker would take the whole queue; at
        # the limit, it stops prefetching altogether. So the limit is high, and consumer.py bounds the memory of
        # these messages.
        worker_eta_task_limit=20 * min(settings.window_rows, MAX_MESSAGES),
    )
    app.steps["consumer"].add("feedmill.workers.runtime.consumer:ConsumerFit")
    for module in settings.include:
        import_user_module(module, f"{PREFIX}INCLUDE")
    app.finalize()
    return app


def __getattr__(name: str) -> Any:
    """Create `app` for Celery's `-A feedmill.workers.app` on first use: importing this module reads no settings."""
    if name == "app":
        try:
            return make_worker_app(load())
        except SettingsError as error:  # for an Exception, the `celery` command would print the traceback
            raise SystemExit(f"feedmill: {error}") from None
    raise AttributeError(name)
