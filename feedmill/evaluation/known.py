"""The posts of an evaluation, each with its true label."""

from collections import Counter
from collections.abc import Sequence
from itertools import islice

from rich.console import Console

from feedmill.producers.files import FileReading
from feedmill.producers.records import FileOptions
from feedmill.shared.errors import InputError, printable
from feedmill.shared.messages import Post
from feedmill.shared.none_of_these import NO_LABEL
from feedmill.training.picked import PICKED_COLUMN, fits_none

#: Topics that an error message names at most, the most frequent ones.
MAX_TOPICS_NAMED = 10


def read_posts(
    source: str,
    file: FileOptions,
    limit: int | None,
    notes: Console,
) -> tuple[list[Post], FileReading]:
    """Return the first `limit` posts of a file, and the reading, which counts its bad records.

    The caller ends the reading. Raises InputError for a file without posts, or without topics.
    """
    reading = FileReading(
        source,
        notes,
        columns=file.columns()._replace(mark=PICKED_COLUMN),
        encoding=file.encoding,
    )
    posts = list(islice(reading.posts(), limit))
    if not posts:
        reading.end()
        raise InputError(f"{reading.name} contains no valid post. Give another file.")
    if not any(post.topic for post in posts):
        names = file.columns().names_of("topic")
        raise InputError(
            f"No post of {reading.name} has a true label, which is in a column or key "
            f"{' or '.join(names)}. Add it, or name another with --label-column."
        )
    return posts, reading


def matching_label(topic: str | None, labels: Sequence[str]) -> str | None:
    """Return the label equal to the topic, else the only label that differs in case alone, else
    None.
    """
    if topic is None or topic in labels:
        return topic
    folded = topic.casefold()
    matches = [label for label in labels if label.casefold() == folded]
    if len(matches) != 1:
        return None
    return matches[0]


def known_posts(
    posts: Sequence[Post],
    label_sets: Sequence[Sequence[str]],
    *,
    others_fit_none: bool = False,
    answers_fit_none: bool = False,
) -> list[tuple[Post, str]]:
    """Return the posts whose topic is a label of every set, each with that label.

    others_fit_none: also return those with another topic, each with NO_LABEL. answers_fit_none:
    also return those that fit none of the labels by an answer of `feedmill label`. Raises
    InputError without any.
    """
    first_set = label_sets[0]
    common_labels = [
        label for label in first_set if all(label in labels for labels in label_sets)
    ]
    known: list[tuple[Post, str]] = []
    for post in posts:
        if answers_fit_none and fits_none(post):
            known.append((post, NO_LABEL))
            continue
        label = matching_label(post.topic, first_set)
        if label is not None and label in common_labels:
            known.append((post, label))
        elif others_fit_none and _fits_none(post, label_sets):
            known.append((post, NO_LABEL))
    if all(label == NO_LABEL for _, label in known):
        raise _no_known_topic(posts, common_labels)
    return known


def _no_known_topic(posts: Sequence[Post], labels: Sequence[str]) -> InputError:
    """Return the error for posts of which none has a label's name as its topic."""
    topics = Counter(post.topic for post in posts if post.topic)
    most_common = topics.most_common(MAX_TOPICS_NAMED)
    topic_names = ", ".join(printable(topic) for topic, _ in most_common)
    label_names = ", ".join(labels)
    return InputError(
        f"No post's topic is one of the labels (topics: {topic_names}; labels: {label_names}). "
        "Pass the topics as --labels."
    )


def _fits_none(post: Post, label_sets: Sequence[Sequence[str]]) -> bool:
    """Return whether a post has a topic, and no model has a label for it."""
    if post.topic is None:
        return False
    matches = [matching_label(post.topic, labels) for labels in label_sets]
    return all(match is None for match in matches)
