"""feedmill.testing.FakeWorker answers as a real worker does: one suite of messages for both."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import CeleryError

from feedmill.testing import FakeWorker
from tests.support import RedisServer, application, wait_until

SPORTS = {"id": "1", "title": "The keeper saved two penalties in the final"}
FOOD = {"id": "2", "title": "How long do dried beans keep?", "extra": {"row": 7}}
ODD = {"id": 3, "title": "Fish &amp; chips", "body": "[removed]", "author": "me"}
EMPTY = {"id": "4", "title": "", "body": "[deleted]"}
POSTS = [SPORTS, FOOD, ODD]
LABELS = ["sports", "food"]
DESCRIBED = {"sports": "sports and matches", "food": ["kitchen and cooking", "meals"]}
#: Labels of the posts above, as the embedded model answers.
ANSWERS = {SPORTS["title"]: "sports", FOOD["title"]: "food", "Fish &amp; chips": "food"}

#: Messages by what they show: the arguments of `feedmill.classify`.
WELL_FORMED: dict[str, dict[str, Any]] = {
    "topics of the worker": {"posts": POSTS},
    "labels": {"posts": POSTS, "labels": LABELS},
    "labels as text": {"posts": POSTS, "labels": "sports, food"},
    "described labels": {"posts": POSTS, "labels": DESCRIBED},
    "one label": {"posts": [FOOD], "labels": ["food"]},
    "template": {"posts": POSTS, "labels": LABELS, "template": "A text on {}."},
    "multi_label": {"posts": POSTS, "labels": LABELS, "multi_label": True},
    "top_k": {"posts": POSTS, "top_k": 2},
    "none, for posts that fit": {"posts": POSTS, "labels": LABELS, "none": 0.0},
    "none off": {"posts": POSTS, "labels": LABELS, "none": False},
    "version": {"posts": POSTS, "version": 1},
    "strict": {"posts": POSTS, "strict": True},
    "one of them fails": {"posts": [SPORTS, EMPTY, 5, {"title": "no id"}, FOOD]},
    "a thousand posts": {"posts": [{**SPORTS, "id": str(n)} for n in range(1000)]},
}
#: The same for messages that fit no label: the answer is None.
UNFIT: dict[str, dict[str, Any]] = {
    "none": {"posts": [FOOD], "labels": ["astronomy", "law"], "none": True},
    "a high threshold": {
        "posts": [FOOD],
        "labels": ["astronomy", "law"],
        "none": 0.999,
    },
    "none, multi_label": {
        "posts": [FOOD],
        "labels": ["astronomy", "law"],
        "none": True,
        "multi_label": True,
    },
}
REFUSED: dict[str, dict[str, Any]] = {
    "unknown argument": {"posts": POSTS, "lables": "a"},
    "version of tomorrow": {"posts": POSTS, "version": 2},
    "no posts": {},
    "empty posts": {"posts": []},
    "posts that are no list": {"posts": SPORTS},
    "too many posts": {"posts": [SPORTS] * 1001},
    "no labels": {"posts": POSTS, "labels": []},
    "repeated label": {"posts": POSTS, "labels": ["food", " food"]},
    "too many labels": {"posts": POSTS, "labels": [str(n) for n in range(257)]},
    "template without a place": {"posts": POSTS, "template": "about"},
    "top_k of 0": {"posts": POSTS, "top_k": 0},
    "none of 2": {"posts": POSTS, "none": 2},
    "labels of a wrong type": {"posts": POSTS, "labels": 5},
}
FAILING: dict[str, dict[str, Any]] = {
    "all posts": {"posts": [EMPTY, {"id": "5"}]},
    "strict": {"posts": [SPORTS, EMPTY], "strict": True},
    "many reasons": {"posts": [{"id": str(n)} for n in range(9)]},
}


def send(app: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
    return app.send_task(
        "feedmill.classify", args, kwargs=kwargs, queue="feedmill", **options
    )


def classify(app: Celery, posts: Sequence[Any]) -> Any:
    kwargs = {"posts": posts, "labels": LABELS}
    return app.signature("feedmill.classify", kwargs=kwargs, queue="feedmill")


def anything(app: Celery) -> Any:
    """Return a signature that takes the result before it as its posts."""
    return app.signature("feedmill.classify", queue="feedmill")


def unknown_task(app: Celery) -> Any:
    return app.send_task("feedmill.clasify", kwargs={"posts": POSTS}, queue="feedmill")


def pickled(app: Celery) -> Any:
    return send(app, kwargs={"posts": POSTS}, serializer="pickle")


def own_keys(app: Celery) -> Any:
    link = app.signature("mine", queue="feedmill:results")
    return send(app, kwargs={"posts": POSTS}, link=link)


def expired(app: Celery) -> Any:
    return send(app, kwargs={"posts": POSTS}, expires=-1)


def revoked(app: Celery) -> Any:
    app.control.revoke("mine", reply=True, timeout=60, limit=1)
    return send(app, kwargs={"posts": POSTS}, task_id="mine")


def protocol_1(app: Celery) -> Any:
    app.conf.task_protocol = 1
    return send(app, kwargs={"posts": POSTS})


#: Ways of sending, beyond plain messages.
WAYS: dict[str, Callable[[Celery], Any]] = {
    "by position": lambda app: send(app, (POSTS, LABELS, None, False, False, 1)),
    "too many by position": lambda app: send(app, (POSTS, *[None] * 7)),
    "an argument twice": lambda app: send(app, (POSTS,), kwargs={"posts": POSTS}),
    "group": lambda app: group(classify(app, POSTS[:2]), classify(app, POSTS[2:]))(),
    "group with a failure": lambda app: group(
        classify(app, POSTS[:2]), classify(app, [EMPTY])
    )(),
    "chain": lambda app: chain(classify(app, POSTS), anything(app))(),
    "an argument twice in a chain": lambda app: chain(
        classify(app, POSTS), classify(app, [])
    )(),
    "chord": lambda app: chord([classify(app, POSTS)], anything(app))(),
    "later": lambda app: send(app, kwargs={"posts": POSTS}, countdown=0.2),
    "protocol 1": protocol_1,
    "unknown task": unknown_task,
    "pickled": pickled,
    "callback to Feedmill's own keys": own_keys,
    "an invalid ETA": lambda app: send(
        app, kwargs={"posts": POSTS}, headers={"eta": "soon"}
    ),
    "expired": expired,
    "revoked": revoked,
}

CASES: dict[str, Callable[[Celery], Any]] = dict(WAYS)
for messages in (WELL_FORMED, UNFIT, REFUSED, FAILING):
    for name, arguments in messages.items():
        CASES[f"{name}: {', '.join(arguments)}"] = partial(send, kwargs=arguments)


def shape_of(answer: Any) -> Any:
    """Return an answer without what depends on the model, the place and the time."""
    if isinstance(answer, BaseException):
        return [type(answer).__module__, type(answer).__name__, str(answer)]
    if isinstance(answer, list):
        return [shape_of(part) for part in answer]
    if "error" in answer:
        return answer
    scores = list(answer["scores"].values())
    assert scores == sorted(scores, reverse=True)
    shape = {name: type(value).__name__ for name, value in answer.items()}
    # The best one, and which others there are unless `top_k` left some out.
    names = list(answer["scores"])
    labels = names[:1] if answer["label"] is not None else []
    if set(names) == set(LABELS):
        labels += sorted(names)
    return shape | {"id": answer["id"], "label": answer["label"], "labels": labels}


def answer_of(app: Celery, way: Callable[[Celery], Any]) -> Any:
    result = way(app)
    try:
        answer = result.get(timeout=60)
    except (CeleryError, Exception) as error:
        answer = error
    # A failed chain's last task fails after the first one.
    wait_until(result.ready, "the message has ended")
    return [shape_of(answer), str(getattr(result, "state", "")), result.successful()]


# Celery's own, for an argument that comes twice.
@pytest.mark.filterwarnings("ignore:Exception raised outside body")
@pytest.mark.parametrize("name", CASES)
def test_answers_as_a_real_worker_does(served: RedisServer, name: str) -> None:
    way = CASES[name]
    real = answer_of(application(served), way)
    unfit = name.partition(":")[0] in UNFIT
    app = Celery(
        broker="redis://nowhere.invalid:1/0",
        backend="redis://nowhere.invalid:1/0",
        set_as_current=False,
    )

    def answer(post: Any, _: tuple[str, ...]) -> Any:
        return None if unfit else ANSWERS[post.title]

    with FakeWorker(app, answer):
        fake = answer_of(app, way)
    assert fake == real
