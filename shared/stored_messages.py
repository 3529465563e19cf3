"""Find posts in messages as they are stored in Redis, and remove posts from them, whichever Celery
client sent them.

Celery's messages have two forms. In protocol 2, the body is a list of arguments, keyword arguments
and options such as callbacks, and the headers name the task. In protocol 1, which gocelery,
celery.node and applications with `task_protocol=1` send, the body is an object with `task`, `id`,
`args`, `kwargs` and callbacks, and there may be no headers at all. A body of this form can also
come with headers that name the task, which then count.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

from feedmill.shared import encoding
from feedmill.shared.broker import CLASSIFY_TASK
from feedmill.shared.encoding import UnreadableError
from feedmill.shared.messages import MAX_POSTS_PER_MESSAGE, Post, parse_id, parse_posts

#: Fields that distinguish a post from other objects with an id.
OTHER_FIELDS = Post.model_fields.keys() - {"id"}
#: Text that replaces the previews of arguments, which most senders fill with the start of the
#: arguments; and the names of these previews, in headers and in bodies of protocol 1.
PURGED = "purged"
PREVIEWS = ("argsrepr", "kwargsrepr")


class StoredRequest(NamedTuple):
    """A task's name and arguments, as sent: of any type."""

    task: object
    args: object
    kwargs: object

    def posts(self) -> object:
        """Return the posts of a classification, as sent."""
        if isinstance(self.args, list) and self.args:
            return self.args[0]
        if isinstance(self.kwargs, dict):
            return self.kwargs.get("posts")
        return None


class Redacted(NamedTuple):
    """A message without some posts, and the ids of the posts that were removed from it."""

    message: str
    ids: frozenset[str]


def request_of(envelope: dict[str, Any], body: object) -> StoredRequest | None:
    """Return the request in a message; None if there is none. envelope: the message. body: its
    body, decoded.
    """
    headers = encoding.headers_of(envelope)
    if isinstance(body, dict):
        task = headers.get("task", body.get("task"))
        return StoredRequest(
            task=task,
            args=body.get("args"),
            kwargs=body.get("kwargs"),
        )
    if isinstance(body, list) and len(body) == 3:
        args, kwargs, _ = body
        return StoredRequest(
            task=headers.get("task"),
            args=args,
            kwargs=kwargs,
        )
    return None


def posts_in(message: bytes) -> list[Post | None]:
    """Return the posts of a message that requests their classification, None for each invalid one.

    Returns none for other messages, and for more than a message may have. Raises UnreadableError.
    """
    envelope = encoding.open_message(message)
    text = encoding.body_text(envelope)
    try:
        body = encoding.read(text)
    except Exception as error:  # values of kombu's types raise errors of any type
        raise UnreadableError(f"not JSON ({type(error).__name__})") from None
    request = request_of(envelope, body)
    if request is None or request.task != CLASSIFY_TASK:
        return []
    raw_posts = request.posts()
    if not isinstance(raw_posts, list) or len(raw_posts) > MAX_POSTS_PER_MESSAGE:
        return []
    posts: list[Post | None] = []
    for post in parse_posts(raw_posts):
        if isinstance(post, Post):
            posts.append(post)
        else:
            posts.append(None)
    return posts


def ids_in(message: bytes) -> Iterator[str]:
    """Yield the ids of posts anywhere in a message, without removed posts. Ids can be repeated.

    Raises UnreadableError.
    """
    for post_id, _ in records_in(message):
        yield post_id


def records_in(message: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the id and the fields, as sent, of each post anywhere in a message, without removed
    posts.

    Raises UnreadableError.
    """
    envelope = encoding.open_message(message)
    text = encoding.body_text(envelope)
    body = encoding.parse(text)
    for container, key, _ in _posts_within(envelope, [body]):
        post = container[key]
        post_id = _id_of(post)
        if post_id is not None:
            yield post_id, post


def without_posts(message: bytes, ids: Collection[str]) -> Redacted | None:
    """Return a message in which each of these posts is reduced to its id; None if it contains none
    of them.

    The message keeps one outcome per post, in order, and its other posts are classified as usual.
    Callbacks can contain posts, too. Raises UnreadableError.
    """

    def is_chosen(post: dict[str, Any], raw_id: Any) -> bool:
        # A message can have a million objects, and `_id_of` takes a microsecond.
        is_plain = type(raw_id) is str and raw_id.isascii()
        if is_plain and raw_id.strip() not in ids:
            return False
        return _id_of(post) in ids

    return _redacted(message, is_chosen)


def without_run(message: bytes, run: str) -> Redacted | None:
    """Return a message in which each post of a run is reduced to its id, as `without_posts`."""
    return _redacted(message, lambda post, _: post.get("run") == run)


def _redacted(
    message: bytes, is_chosen: Callable[[dict[str, Any], Any], bool]
) -> Redacted | None:
    """Return a message in which the chosen posts are reduced to their ids; None if there are none.

    is_chosen: decides by a post's fields and its id, both as sent. Raises UnreadableError.
    """
    envelope = encoding.open_message(message)
    text = encoding.body_text(envelope)
    whole = [encoding.parse(text)]
    removed = set()
    for container, key, raw_id in _posts_within(envelope, whole):
        post = container[key]
        if not is_chosen(post, raw_id):
            continue
        post_id = _id_of(post)
        if post_id is not None:
            removed.add(post_id)
            container[key] = {"id": raw_id}
    if not removed:
        return None
    (body,) = whole
    headers = encoding.headers_of(envelope)
    _clear_previews(headers)
    if isinstance(body, dict):
        _clear_previews(body)
    redacted = encoding.with_body(envelope, body)
    return Redacted(
        message=redacted,
        ids=frozenset(removed),
    )


def _clear_previews(fields: dict[str, Any]) -> None:
    for name in PREVIEWS:
        if name in fields:
            fields[name] = PURGED


def _posts_within(
    envelope: dict[str, Any], whole: list[Any]
) -> Iterator[tuple[Any, Any, Any]]:
    """Yield every post in a message's headers and body, without those of which only the id is
    left.

    Yields the object or list that contains it, its key or index there, and its id. The caller may
    replace it.

    whole: a list of the body. A body that names a task is not a post; other applications' can be
    one. Uses no recursion, because nesting can be deep.
    """
    (body,) = whole
    request = request_of(envelope, body)
    #: The lists of a classification's posts, by identity. Their objects are posts whatever their
    #: fields are.
    post_lists: set[int] = set()
    containers: list[Any] = [encoding.headers_of(envelope)]
    names_task = False
    if request is not None:
        post_lists.update(_post_lists(request))
        names_task = request.task is not None
    if names_task:
        containers.append(body)
    else:
        containers.append(whole)
    while containers:
        container = containers.pop()
        if type(container) is dict and "task" in container:  # a callback
            callback = StoredRequest(
                task=container["task"],
                args=container.get("args"),
                kwargs=container.get("kwargs"),
            )
            post_lists.update(_post_lists(callback))
        are_posts = id(container) in post_lists
        for key, value in _items_of(container):
            if type(value) is dict:
                if _is_whole_post(value, are_posts):
                    raw_id = value["id"]
                    yield container, key, raw_id
                if value:
                    containers.append(container[key])  # the caller may have replaced it
            elif type(value) is list and value:
                containers.append(value)


def _items_of(container: Any) -> Iterable[tuple[Any, Any]]:
    """Yield the keys or indexes of an object or list with their values; nothing for others."""
    if type(container) is dict:
        return container.items()
    if type(container) is list:
        return enumerate(container)
    return ()


def _is_whole_post(value: dict[str, Any], are_posts: bool) -> bool:
    """Return whether an object is a post with more than its id. are_posts: whether all objects
    beside it are posts.
    """
    has_more_than_id = len(value) > 1 and "id" in value
    if not has_more_than_id:
        return False
    return are_posts or not OTHER_FIELDS.isdisjoint(value)


def _post_lists(request: StoredRequest) -> Iterator[int]:
    """Yield the identities of the lists that hold a classification's posts."""
    if request.task != CLASSIFY_TASK:
        return
    args = request.args
    if isinstance(args, list) and args:
        first_argument = args[0]
        yield id(first_argument)
    kwargs = request.kwargs
    if isinstance(kwargs, dict):
        posts = kwargs.get("posts")
        yield id(posts)


def _id_of(post: dict[str, Any]) -> str | None:
    """Return the id of a post, as JSON has it, in the form of `Post.id`."""
    value = post.get("id")
    if isinstance(value, dict):
        try:
            value = encoding.typed(value)
        except Exception:  # values of kombu's types raise errors of any type
            return None
    return parse_id(value)
