"""Routes that answer as other servers do, so that their clients work with another address.

`POST /classify` is vLLM's; `POST /predict` is Text Embeddings Inference's. Labels are the worker's
own.
"""

import time
from typing import Annotated, Any
from uuid import uuid4

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from feedmill.shared.messages import MAX_POSTS_PER_MESSAGE
from feedmill.web import schema
from feedmill.web.endpoint import Shared, json_response, outcomes_of
from feedmill.web.failures import Failure
from feedmill.web.resources import Resources, scope

#: Seconds to wait for labels.
TIMEOUT_S = 60.0

router = APIRouter(responses=schema.ERRORS)

Input = Annotated[
    schema.Texts | schema.Text, Field(description="A text, or several ones")
]
Sender = Annotated[Any, Depends(scope("send"))]


class VllmRequest(BaseModel):
    """A request as vLLM takes it. Options that are not named here are ignored."""

    model_config = ConfigDict(extra="ignore")

    #: Must be the worker's model if given.
    model: str | None = None
    input: Input


class Predicted(BaseModel):
    """A label with its probability."""

    label: str
    score: float


class TeiRequest(BaseModel):
    """A request as Text Embeddings Inference takes it. Other options are ignored."""

    model_config = ConfigDict(extra="ignore")

    #: A text, or several ones, each of them in a list of its own or not.
    inputs: (
        Input
        | Annotated[
            list[Annotated[list[schema.Text], Field(min_length=1, max_length=1)]],
            Field(min_length=1, max_length=MAX_POSTS_PER_MESSAGE),
        ]
    )


@router.post("/classify")
async def classify(
    request: Request, body: VllmRequest, shared: Shared, _: Sender
) -> Response:
    """Answer as vLLM does: of each text the best label, and the probabilities of all labels in the
    order of their names.
    """
    texts = [body.input] if isinstance(body.input, str) else body.input
    outcomes = await _classified(request, shared, texts)
    model = outcomes[0]["model"]
    if body.model not in (None, model):
        raise Failure(
            404, "not_found", f"The model here is {model!r}, not {body.model!r}."
        )
    data = []
    for index, outcome in enumerate(outcomes):
        scores = outcome["scores"]
        names = sorted(scores)
        described = {
            "index": index,
            "label": outcome["label"],
            "probs": [scores[name] for name in names],
            "num_classes": len(names),
        }
        data.append(described)
    usage = {"prompt_tokens": 0, "total_tokens": 0, "completion_tokens": 0}
    return json_response(
        {
            "id": f"classify-{uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": data,
            "usage": usage,
        }
    )


@router.post("/predict")
async def predict(
    request: Request, body: TeiRequest, shared: Shared, _: Sender
) -> Response:
    """Answer as Text Embeddings Inference does: of each text all labels, best first."""
    inputs = body.inputs
    is_single = isinstance(inputs, str)
    given = [inputs] if isinstance(inputs, str) else inputs
    texts = [text if isinstance(text, str) else text[0] for text in given]
    outcomes = await _classified(request, shared, texts)
    predicted = []
    for outcome in outcomes:
        scores = outcome["scores"].items()
        predicted.append([{"label": name, "score": score} for name, score in scores])
    return json_response(predicted[0] if is_single else predicted)


async def _classified(
    request: Request, shared: Resources, texts: list[str]
) -> list[dict[str, Any]]:
    """Return the classification of each text. Raises Failure if one has none: the other servers
    know no outcome of a single text.
    """
    body = schema.Options(texts=texts)
    outcomes = await outcomes_of(request, shared.asker, body, TIMEOUT_S)
    for place, outcome in enumerate(outcomes):
        if "error" in outcome:
            raise Failure(422, "refused", f"Text {place}: {outcome['error']}")
    return outcomes
