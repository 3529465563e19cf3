"""Requests to the HTTP endpoint, and its answers as the project's types."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, to_json

from feedmill.outcomes.purge import Purged
from feedmill.outcomes.rows import Missed
from feedmill.shared.batches import batched
from feedmill.shared.errors import InputError, UserError, first_problem
from feedmill.shared.messages import (
    MAX_POSTS_PER_MESSAGE,
    Classification,
    Outcome,
    Post,
    PostError,
)
from feedmill.shared.results import Result
from feedmill.shared.runs import Progress

#: A text, a post, or a dictionary with the fields of one.
Item: TypeAlias = str | Post | Mapping[str, Any]
#: Names of labels, or each with its description.
Labels: TypeAlias = Iterable[str] | Mapping[str, Any]
#: Seconds that the server may take to answer other requests than those for labels.
PLAIN_TIMEOUT_S = 30.0
#: Seconds by which the server may answer later than the timeout that it was asked for.
TIMEOUT_MARGIN_S = 5.0
MAX_TIMEOUT_S = 600.0


class Call(NamedTuple):
    """A request. `is_repeatable`: doing it twice has the same effect as doing it once."""

    method: str
    path: str
    body: bytes | None = None
    query: Mapping[str, Any] = {}
    is_repeatable: bool = True
    timeout_s: float = PLAIN_TIMEOUT_S


class SentRun(NamedTuple):
    """Posts that were sent as a run.

    Attributes:
        run: Name of the run.
        sent: Posts in the queue.
        skipped: Posts that were sent before.
        purged: Posts that were deleted, which are never sent again.
        refused: Posts that could not be sent, each with the reason; the first hundred per request.
    """

    run: str
    sent: int
    skipped: int = 0
    purged: int = 0
    refused: tuple[PostError, ...] = ()


class ResultPage(NamedTuple):
    """Stored results in order.

    Attributes:
        results: The results. Where the results stream has dropped a post, only its id is left.
        cursor: Pass it as `after` for the next page.
        ended: Whether there was nothing behind this page.
        missed: Results that were trimmed before they were read, if any.
    """

    results: list[Result]
    cursor: str
    ended: bool
    missed: Missed | None


class FollowedResult(NamedTuple):
    """A result as it is stored, or a gap. Pass `cursor` as `after` to continue behind it."""

    cursor: str
    item: Result | Missed


# Requests.


def options_of(
    labels: Labels | None,
    template: str | None,
    multi_label: bool,
    none: float | bool | None,
) -> dict[str, Any]:
    """Return the options of a request, without those that are not given."""
    options: dict[str, Any] = {}
    if isinstance(labels, Mapping):
        options["labels"] = dict(labels)
    elif isinstance(labels, str):
        options["labels"] = labels.split(",")
    elif isinstance(labels, Iterable):
        options["labels"] = list(labels)
    elif labels is not None:
        raise UserError(
            "labels must be a list such as ['praise', 'complaint'], or a dictionary from each "
            "name to its description."
        )
    if template is not None:
        options["template"] = template
    if multi_label:
        options["multi_label"] = True
    if isinstance(none, bool):
        options["none"] = "on" if none else "off"
    elif none is not None:
        options["none"] = none
    return options


def listed(items: Iterable[Item]) -> list[Item]:
    """Return the items as a list. Raises InputError for a single one."""
    if isinstance(items, str | bytes | Mapping | Post) or not isinstance(
        items, Iterable
    ):
        raise InputError(
            "items must be a list of texts, posts or dictionaries. For one item, write [item]."
        )
    return list(items)


def batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Return the items in as many batches as they need. Raises InputError."""
    return batched(listed(items), MAX_POSTS_PER_MESSAGE)


def body_of(batch: Sequence[Item], options: Mapping[str, Any]) -> bytes:
    """Return the body of a request with these items. Raises InputError."""
    if all(isinstance(item, str) for item in batch):
        content: dict[str, Any] = {"texts": batch}
    else:
        content = {"posts": [_post_of(item) for item in batch]}
    try:
        return to_json(content | dict(options), inf_nan_mode="null")
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        raise InputError(
            f"An item or an option cannot be written as JSON: {error!s:.200}. Use texts, numbers, "
            "dates, lists and dictionaries."
        ) from None


def _post_of(item: Item) -> Any:
    if isinstance(item, str):
        return {"body": item}
    if isinstance(item, Post):
        return item.model_dump(mode="json", exclude_defaults=True)
    if isinstance(item, Mapping):
        return dict(item)
    raise InputError(
        f"An item must be a text, a post or a dictionary, not {type(item).__name__}."
    )


def classify(
    batch: Sequence[Item], options: Mapping[str, Any], timeout_s: float
) -> Call:
    """Return the request for the labels of a batch.

    It can be repeated: a worker answers from the store what it has classified.
    """
    is_number = isinstance(timeout_s, int | float)
    if not is_number or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise UserError(
            f"timeout must be more than 0 and at most {MAX_TIMEOUT_S:g} seconds, not "
            f"{timeout_s!r:.80}."
        )
    body = body_of(batch, {**options, "timeout_s": timeout_s})
    return Call(
        "POST",
        "/v1/classify",
        body=body,
        timeout_s=timeout_s + TIMEOUT_MARGIN_S,
    )


def start_run(batch: Sequence[Item], options: Mapping[str, Any]) -> Call:
    """Return the request that sends a batch as a run.

    Only a run with a name can be sent twice: posts that were sent before are skipped in it.
    """
    is_repeatable = options.get("run") is not None and not options.get("again")
    body = body_of(batch, options)
    return Call(
        "POST",
        "/v1/runs",
        body=body,
        is_repeatable=is_repeatable,
    )


def run_path(run: str) -> str:
    return f"/v1/runs/{quote(run, safe='')}"


def post_path(post_id: str) -> str:
    return f"/v1/posts/{quote(str(post_id), safe='')}"


def answers(labels: Mapping[str, str | None]) -> Call:
    """Return the request that stores people's answers. Each is noted with its time."""
    content = [
        {"id": str(post_id), "label": label} for post_id, label in labels.items()
    ]
    body = to_json({"answers": content})
    return Call(
        "POST",
        "/v1/answers",
        body=body,
        is_repeatable=False,
    )


def query_of(**values: Any) -> dict[str, Any]:
    """Return the parameters that are given."""
    return {name: value for name, value in values.items() if value is not None}


# Answers. All raise ValueError, KeyError, TypeError or AttributeError for other content.


def read_outcomes(content: Any, count: int) -> list[Classification | PostError]:
    """Return the outcomes of a batch of so many items."""
    outcomes = [_outcome(fields) for fields in content["results"]]
    if len(outcomes) != count:
        raise ValueError(f"{len(outcomes)} outcomes for {count} items")
    return outcomes


def _outcome(fields: dict[str, Any]) -> Outcome:
    if "error" not in fields:
        return Classification.model_validate(fields)
    error = fields["error"]
    if isinstance(error, dict):
        error = error["message"]
    return PostError(id=fields.get("id"), error=str(error))


def read_result(fields: dict[str, Any]) -> Result:
    """Return a stored result."""
    classification = Classification.model_validate(fields)
    # As stored: its body may be truncated, or the post be gone.
    post_fields: dict[str, Any] = {"id": classification.id}
    stored_post = fields.get("post") or {}
    for name in Post.model_fields:
        if name in stored_post:
            post_fields[name] = stored_post[name]
    post = Post.model_construct(**post_fields)
    return Result(post, classification)


def read_results(content: Any) -> list[Result]:
    """Return the results of a post."""
    return [read_result(fields) for fields in content["results"]]


def read_page(content: Any) -> ResultPage:
    results = read_results(content)
    missed = None
    if content.get("missed") is not None:
        missed = read_missed(content["missed"])
    return ResultPage(
        results=results,
        cursor=str(content["cursor"]),
        ended=bool(content.get("ended", not results)),
        missed=missed,
    )


def read_missed(fields: dict[str, Any]) -> Missed:
    return Missed(
        count=fields["count"],
        since=float(fields["since"]),
        until=float(fields["until"]),
    )


def read_sent(content: Any) -> SentRun:
    refusals = map(PostError.model_validate, content.get("refused", ()))
    sent = content.get("sent", content.get("posts"))
    skipped = content.get("skipped", 0)
    purged = content.get("purged", 0)
    return SentRun(
        run=str(content["run"]),
        sent=int(sent),
        skipped=int(skipped),
        purged=int(purged),
        refused=tuple(refusals),
    )


def add_sent(first: SentRun | None, second: SentRun) -> SentRun:
    """Return both parts of a run as one."""
    if first is None:
        return second
    return SentRun(
        run=second.run,
        sent=first.sent + second.sent,
        skipped=first.skipped + second.skipped,
        purged=first.purged + second.purged,
        refused=first.refused + second.refused,
    )


def read_progress(content: Any) -> Progress:
    fields = {}
    for name in Progress._fields:
        if name in content:
            fields[name] = content[name]
    columns = content.get("columns", ())
    fields["columns"] = tuple(columns)
    return Progress(**fields)


def read_purged(content: Any) -> Purged:
    counts = {str(name): int(count) for name, count in content["counts"].items()}
    return Purged(counts, unmatched=[], similar=[])


def reason_of(error: Exception) -> str:
    """Return in a few words why an answer cannot be read."""
    if isinstance(error, ValidationError):
        return ": ".join(first_problem(error))
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    return str(error)
