"""The worker's Celery application: its tasks, and the pool that runs them.

`feedmill worker` starts it; `celery -A workers.app worker` does too, since the pool is named in its configuration.
"""

from importlib import import_module
from traceback import extract_tb
from typing import Any

from shared.broker import Application, make_app, reserve
from shared.errors import SettingsError
from shared.settings import Settings, load
from workers import task  # noqa: F401 - a shared task: whatever application is made next has it


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
        # Messages for later are fetched and kept besides; without a limit a worker would take the whole queue.
        worker_eta_task_limit=2 * settings.window_rows,
        task_track_started=settings.track_started,
    )
    app.steps["consumer"].add("workers.consumer:ConsumerFit")
    for module in settings.include:
        try:
            import_module(module)
        except Exception as error:  # whatever somebody's own module raises
            raise SettingsError(_not_imported(module, error)) from None
    app.finalize()
    return app


def _not_imported(module: str, error: Exception) -> str:
    what = f"The module {module}, which --include or FEEDMILL_INCLUDE names, cannot be imported: "
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return (
            f"{what}there is none of this name in PYTHONPATH or among the installed packages. The working directory "
            "does not count."
        )
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen ")]
    where = "" if isinstance(error, SyntaxError) else f" ({frames[-1].filename}, line {frames[-1].lineno})"
    return f"{what}{type(error).__name__}: {error}{where}."


def __getattr__(name: str) -> Any:
    """`app`, for `celery -A workers.app`: made when asked for, so that importing reads no settings."""
    if name == "app":
        try:
            return make_worker_app(load())
        except SettingsError as error:  # of any Exception the `celery` command shows the traceback
            raise SystemExit(f"feedmill: {error}") from None
    raise AttributeError(name)
