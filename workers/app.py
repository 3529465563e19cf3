"""The worker's Celery application: its tasks and its pool.

`feedmill worker` starts it. So does `celery -A feedmill.workers.app worker`, because the
configuration names the pool.

Relies on Celery's `_get_backend`, which creates the backend of a thread.
"""

from typing import Any
from weakref import ref

from feedmill.shared.broker import DEVICE_POOL, Application, make_app
from feedmill.shared.encoding import limit_bodies
from feedmill.shared.errors import SettingsError
from feedmill.shared.settings import PREFIX, Settings, load
from feedmill.workers.models.plugins import import_user_module

# Registers the shared task with every application.
from feedmill.workers.runtime import task  # noqa: F401
from feedmill.workers.runtime.in_flight import keep_unstored
from feedmill.workers.runtime.replies import Control, expire_replies

#: Maximum messages that a worker holds. Each costs the host about as much as 32 posts.
MAX_MESSAGES = 1024


class WorkerApplication(Application):
    """An application whose results wait while Redis does not accept them, and whose replies
    expire.
    """

    control_cls = f"{Control.__module__}:{Control.__name__}"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._backends: list[ref[Any]] = []
        super().__init__(*args, **kwargs)

    @property
    def backends(self) -> list[Any]:
        """Celery's result backends. Each thread has its own."""
        alive = (reference() for reference in tuple(self._backends))
        return [backend for backend in alive if backend is not None]

    def _get_backend(self) -> Any:
        backend = super()._get_backend()  # type: ignore[misc]  # the stubs lack private methods
        backend = keep_unstored(expire_replies(backend, self))
        self._backends.append(ref(backend))
        return backend


def make_worker_app(settings: Settings) -> Application:
    """Return the application, with tasks and pool, for one worker on one device.

    Raises SettingsError.
    """
    # Modules of own tasks configure the current application.
    app = make_app(settings, current=True, kind=WorkerApplication)
    limit_bodies()
    app.conf.update(
        worker_pool=DEVICE_POOL,
        worker_concurrency=1,
        worker_consumer="feedmill.workers.runtime.consumer:Consumer",
        worker_autoscaler="feedmill.workers.runtime.consumer:Scaler",
        # The pool's own limit counts rows. This one bounds messages of few posts, which cost the
        # host more.
        worker_prefetch_multiplier=min(settings.window_rows, MAX_MESSAGES),
    )
    app.steps["consumer"].add("feedmill.workers.runtime.consumer:ConsumerFit")
    for module in settings.include:
        import_user_module(module, f"{PREFIX}INCLUDE")
    app.finalize()
    return app


def __getattr__(name: str) -> Any:
    """Create `app` for Celery's `-A feedmill.workers.app` on first use: importing this module
    reads no settings.
    """
    if name == "app":
        try:
            return make_worker_app(load())
        except SettingsError as error:
            # for an Exception, the `celery` command would print the traceback
            raise SystemExit(f"feedmill: {error}") from None
    raise AttributeError(name)
