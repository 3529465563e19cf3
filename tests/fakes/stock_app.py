"""A Celery application with Feedmill's tasks on Celery's own pool and consumer, for tests that
compare workers:

    celery -A tests.fakes.stock_app worker -P prefork

Like other applications' workers, it classifies in its own processes. It has the configuration of
Feedmill's worker.
"""

from feedmill.shared.broker import make_app
from feedmill.shared.settings import PREFIX, load
from feedmill.workers.models.plugins import import_user_module
from feedmill.workers.runtime import task  # noqa: F401 - registers the shared task

settings = load()
app = make_app(settings, current=True)
for module in settings.include:
    import_user_module(module, f"{PREFIX}INCLUDE")
app.finalize()
