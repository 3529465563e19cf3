"""The file in which Flower saves its messages, and what it names of posts.

A message's arguments show the ids of its first posts, and a failure names the post; no text of a
post is shown.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from feedmill.shared.broker import MAX_SHOWN_CHARACTERS
from feedmill.shared.errors import printable

#: File in the data folder.
STATE_FILE = "flower.json"
#: Posts in a message's arguments, as Flower shows them.
SHOWN_POSTS = re.compile(r"<\d[\d,]* posts?: (.*?)>", re.DOTALL)
#: Text between the ids there.
SEPARATOR = ", "
#: Fields of a message with the texts of its outcome.
OUTCOMES = ("result", "exception", "traceback")
#: Shortest id that is searched for anywhere in a text: shorter ones occur in others.
MIN_SEARCHED = 4


def without_posts(
    tasks: Iterable[Mapping[str, Any]], ids: Collection[str]
) -> list[Mapping[str, Any]]:
    """Return the saved messages that name none of these posts."""
    search = IdSearch(ids)
    return [task for task in tasks if not search.names_post(task)]


class IdSearch:
    """A search for the ids of posts in saved messages."""

    def __init__(self, ids: Collection[str]) -> None:
        #: The ids as arguments show them, and those that contain what separates them there.
        self._shown_ids = {printable(post_id[:MAX_SHOWN_CHARACTERS]) for post_id in ids}
        self._split_ids = []
        for shown_id in self._shown_ids:
            if SEPARATOR in shown_id or ">" in shown_id:
                self._split_ids.append(shown_id)
        long_ids = []
        short_ids = []
        for post_id in ids:
            for form in _forms(post_id):
                escaped = re.escape(form)
                if len(post_id) >= MIN_SEARCHED:
                    long_ids.append(escaped)
                else:
                    short_ids.append(escaped)
        parts = list(long_ids)
        if short_ids:
            short_choices = "|".join(short_ids)
            parts.append(rf"(?<=post )(?:{short_choices})")
        choices = "|".join(parts) or "(?!)"
        self._pattern = re.compile(rf"(?<![\w/.:-])(?:{choices})(?![\w/-])")

    def names_post(self, task: Mapping[str, Any]) -> bool:
        """Return whether a message names one of the posts."""
        for name in ("args", "kwargs"):
            text = str(task.get(name) or "")
            if self._shows_post(text):
                return True
        for name in OUTCOMES:
            text = str(task.get(name) or "")
            if self.is_named_in(text):
                return True
        return False

    def is_named_in(self, text: str) -> bool:
        """Return whether the reason or the traceback of a failure names one of the posts."""
        return self._pattern.search(text) is not None

    def _shows_post(self, text: str) -> bool:
        for match in SHOWN_POSTS.finditer(text):
            shown = match[1].split(SEPARATOR)
            if not self._shown_ids.isdisjoint(shown):
                return True
            # up to the end of the text: an id with ">" ends the match too early
            ids = text[match.start(1) :]
            for shown_id in self._split_ids:
                if _is_listed(shown_id, ids):
                    return True
        return False


def _forms(post_id: str) -> set[str]:
    """Return an id as failures quote it: as it is, printable, in Python, and in JSON."""
    in_python = repr(post_id)[1:-1]
    in_json = json.dumps(post_id)[1:-1]
    return {post_id, printable(post_id), in_python, in_json}


def _is_listed(shown_id: str, text: str) -> bool:
    """Return whether a text begins with an id, or has it behind a separator, as a whole."""
    for end in (SEPARATOR, ">"):
        item = f"{shown_id}{end}"
        if text.startswith(item) or f"{SEPARATOR}{item}" in text:
            return True
    return False
