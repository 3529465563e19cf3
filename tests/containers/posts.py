"""Generated posts for the containers."""

import random

SUBJECTS = (
    "The telescope",
    "My old bicycle",
    "This recipe",
    "The new stadium",
    "A small update",
    "Our garden",
    "The band",
)
VERBS = ("needs", "got", "lost", "found", "beats", "follows", "surprised", "replaced", "explains", "ignores")
OBJECTS = ("a second look", "the usual advice", "every forecast", "half its parts", "the neighbours", "an early start")
REASONS = (
    "after the rain",
    "since last spring",
    "on the way home",
    "without a warning",
    "for the third time",
    "by accident",
)
#: Sentences of a post; each has about ten tokens. Long posts keep a worker on few cores busy for a while.
SENTENCES = 10


def generated_posts(first: int, count: int) -> list[dict[str, str]]:
    """Return posts numbered from `first`. The same number always gives the same post."""
    return [_post(number) for number in range(first, first + count)]


def _post(number: int) -> dict[str, str]:
    chosen = random.Random(number)
    sentences = [
        f"{chosen.choice(SUBJECTS)} {chosen.choice(VERBS)} {chosen.choice(OBJECTS)} {chosen.choice(REASONS)}."
        for _ in range(SENTENCES)
    ]
    return {"id": f"c{number:06}", "title": f"{sentences[0]} ({number})", "body": " ".join(sentences[1:])}
