"""The page Teach: fit a head to the answers, deploy it, and go back."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from feedmill.shared import model_routing
from feedmill.shared.broker import queue_depth
from feedmill.shared.none_of_these import NO_LABEL
from feedmill.shared.redis_errors import user_errors
from feedmill.teaching.classroom import MIN_ANSWERS
from feedmill.web.access import Caller
from feedmill.web.answers import Teaching, teaching_of
from feedmill.web.pages.frame import (
    Form,
    field_of,
    page,
    page_router,
    person,
    see_other,
)
from feedmill.web.resources import Resources, resources, scope

#: Taught models that are listed.
MAX_SHOWN = 5

router = page_router()
#: Routes of scripts: their errors are JSON.
scripts = APIRouter(prefix="/teach", include_in_schema=False)
Shared = Annotated[Resources, Depends(resources)]
Teacher = Annotated[Caller, Depends(person("teach"))]
Admin = Annotated[Caller, Depends(person("admin"))]


@router.get("/teach")
def show(request: Request, shared: Shared, caller: Teacher) -> Response:
    teaching = teaching_of(shared)
    classroom = teaching.classroom
    settings = shared.settings
    with user_errors(settings):
        names = teaching.queue.names
        undescribed = teaching.queue.undescribed
        served = model_routing.known_queues(shared.redis).get(settings.queue)
        requested = model_routing.requested_model(shared.redis, settings.queue)
        depth = queue_depth(shared.redis, settings.queue)
        replaced = classroom.models.can_go_back()
    deployed = requested.model if requested is not None else None
    back: str | None = None
    if replaced is not None:
        before = replaced.before
        back = "each worker's own model"
        if before is not None and before.model is not None:
            back = before.model
    return page(
        request,
        "teach.html",
        names=names,
        counts=_counts(teaching, names),
        undescribed=undescribed,
        least=MIN_ANSWERS,
        missing=classroom.missing,
        lesson=classroom.lesson,
        deployment=classroom.models.deployment,
        queue=settings.queue,
        serves=served.model if served is not None else None,
        deployed=deployed,
        waiting=depth.waiting,
        models=[(path.name, str(path)) for path in classroom.models.all()[:MAX_SHOWN]],
        back=back,
        may_deploy=caller.may("admin"),
    )


def _counts(teaching: Teaching, names: tuple[str, ...]) -> dict[str, int]:
    """Return the numbers of answers by label, of none of these, skipped, and of other labels."""
    counts = dict.fromkeys(names, 0)
    none = 0
    skipped = 0
    others = 0
    for answer in teaching.queue.file.snapshot().answers.values():
        if answer.label in counts:
            counts[answer.label] += 1
        elif answer.fits_none:
            none += 1
        elif answer.label:
            others += 1
        else:
            skipped += 1
    counts[NO_LABEL] = none
    if skipped:
        counts["(skipped)"] = skipped
    if others:
        counts["(other labels, not learnt)"] = others
    return counts


@router.post("/teach/start")
def start(shared: Shared, _: Teacher) -> Response:
    with user_errors(shared.settings):
        teaching_of(shared).classroom.teach()
    return see_other("/teach")


@router.post("/teach/cancel")
def cancel(shared: Shared, _: Teacher) -> Response:
    teaching_of(shared).classroom.cancel()
    return see_other("/teach")


@router.post("/teach/deploy")
def deploy(shared: Shared, _: Admin, form: Form) -> Response:
    with user_errors(shared.settings):
        teaching_of(shared).classroom.models.deploy(field_of(form, "model"))
    return see_other("/teach")


@router.post("/teach/back")
def go_back(shared: Shared, _: Admin) -> Response:
    with user_errors(shared.settings):
        teaching_of(shared).classroom.models.back()
    return see_other("/teach")


@scripts.get("/state")
def show_state(
    shared: Shared, _: Annotated[Caller, Depends(scope("teach"))]
) -> dict[str, Any]:
    """Return how the lesson and the deployment proceed."""
    classroom = teaching_of(shared).classroom
    lesson = classroom.lesson
    deployment = classroom.models.deployment
    return {
        "lesson": {
            "state": lesson.state,
            "phase": lesson.phase,
            "done": lesson.done,
            "total": lesson.total,
        },
        "deployment": {"state": deployment.state, "workers": deployment.workers},
    }
