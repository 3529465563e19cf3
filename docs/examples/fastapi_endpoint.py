"""Serve labels over HTTP. Needs `pip install 'celery[redis]' fastapi uvicorn`.

    FEEDMILL_REDIS_URL=redis://:password@127.0.0.1:6379/0 uvicorn fastapi_endpoint:app

    curl http://127.0.0.1:8000/classify \\
        --json '{"posts": [{"id": "a1", "title": "The keeper saved two penalties"}]}'

POST /classify takes the arguments of `feedmill.classify`. It responds 200 with one outcome per
post, 422 with the reason if the message failed, or 202 with the result's address if there is no
result within `PATIENCE` seconds.
"""

import os
from typing import Annotated, Any

from celery import Celery
from celery.exceptions import TimeoutError as TooSlow
from celery.result import AsyncResult
from fastapi import Body, FastAPI, HTTPException, Response

URL = os.environ["FEEDMILL_REDIS_URL"]
#: Seconds that a request waits for outcomes before it responds 202.
PATIENCE = float(os.environ.get("PATIENCE", "30"))
#: Errors that the sender can fix: invalid options; all posts failed or, with `strict`, any post.
REFUSALS = {"RequestRefused", "MessageFailed"}

# Not the process' current application: `@shared_task` stays with one that you may have.
celery = Celery(broker=URL, backend=URL, set_as_current=False)
app = FastAPI(title="Labels")


@app.post("/classify")
def classify(
    arguments: Annotated[dict[str, Any], Body()], response: Response
) -> dict[str, Any]:
    sent = celery.send_task("feedmill.classify", kwargs=arguments, queue="feedmill")
    try:
        sent.get(timeout=PATIENCE, propagate=False)
    except TooSlow:
        sent.backend.remove_pending_result(sent)  # stop listening for the result
    return answer(sent, response)


@app.get("/results/{message_id}")
def result(message_id: str, response: Response) -> dict[str, Any]:
    """Return a message's outcomes. Celery reports an unknown message as one that still waits."""
    return answer(AsyncResult(message_id, app=celery), response)


def answer(sent: AsyncResult[Any], response: Response) -> dict[str, Any]:
    if not sent.ready():
        response.status_code = 202
        response.headers["Location"] = f"/results/{sent.id}"
        return {"id": sent.id}
    if sent.failed():
        name = type(sent.result).__name__
        raise HTTPException(422 if name in REFUSALS else 502, f"{name}: {sent.result}")
    return {"id": sent.id, "outcomes": sent.result}
