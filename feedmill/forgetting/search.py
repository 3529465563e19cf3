"""Find the posts of a selection in all places, and what was probably meant by ids that match
nothing.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import NamedTuple

from redis import Redis

from feedmill.forgetting.places import Record
from feedmill.forgetting.selection import Selection
from feedmill.outcomes.post_forms import key_of_handle, other_forms
from feedmill.producers.push import known_ids
from feedmill.shared.messages import MAX_ID

#: Ids that matched nothing for which similar ids are looked for, ids to compare them with, and
#: similar ids to name.
MAX_COMPARED = 20
MAX_LOOKALIKES = 5000
MAX_SIMILAR = 5
#: Share of equal characters of two similar ids.
SIMILARITY = 0.8


class Matches(NamedTuple):
    """The posts of a selection.

    ids: of posts. runs: those of which anything is stored. shown_ids: `ids`, and those of the
    runs' posts. unmatched: ids and runs of the selection about which nothing is stored. similar:
    ids of stored posts that were probably meant by these. counts: numbers of items by place.
    shared: number of the ids that occur in several runs. forms: the ids by those of the selection
    that are stored in another form only.
    """

    ids: list[str]
    runs: list[str]
    shown_ids: frozenset[str]
    unmatched: list[str]
    similar: list[str]
    counts: Counter[str]
    shared: int = 0
    forms: Mapping[str, str] = MappingProxyType({})


class Search:
    """A search for the posts of a selection. runs: those whose progress is known."""

    def __init__(
        self, redis: Redis, selection: Selection, runs: Collection[str]
    ) -> None:
        self._redis = redis
        self._selection = selection
        self._runs = set(runs)
        self._run_ids: set[str] = set()
        #: Ids that an id of the selection may stand for, the best one first.
        self._forms: dict[str, list[str]] = {}
        self._candidates: set[str] = set()
        #: Halves of these ids: one mistake leaves one of them intact.
        self._beginnings: set[str] = set()
        self._ends: set[str] = set()
        #: Ends of the ids of posts that are named with their author's handle.
        self._handle_keys: set[str] = set()
        for text in selection.ids:
            self._add_forms(text)
        self._stored_forms: set[str] = set()
        #: Posts of the selection with a record from its time, with one that has no time, and with
        #: one that is newer.
        self._covered: dict[str, None] = {}
        self._undated: dict[str, None] = {}
        self._newer: set[str] = set()
        #: Ids of posts that look like those of the selection.
        self._lookalikes: dict[str, None] = {}

    def _add_forms(self, text: str) -> None:
        """Note the ids that an id of the selection may stand for."""
        forms = []
        for form in [text, *other_forms(text)]:
            if len(form) > MAX_ID:
                continue
            forms.append(form)
            half = len(form) // 2
            beginning = form[:half]
            end = form[half:]
            self._beginnings.add(beginning)
            self._ends.add(end)
        self._forms[text] = forms
        self._candidates.update(forms)
        key = key_of_handle(text)
        if key is not None:
            self._handle_keys.add(key)

    def look_at(self, records: Iterable[Record]) -> None:
        """Look for the selection in these records."""
        selection = self._selection
        for _, post_id, fields, at in records:
            if post_id in self._candidates:
                self._stored_forms.add(post_id)
            elif self._forms and self._looks_alike(post_id):
                self._lookalikes[post_id] = None
            run = fields.get("run")
            if run in selection.runs:
                self._runs.add(run)
                self._run_ids.add(post_id)
            until = selection.covered_until(post_id, fields)
            if until == -math.inf:
                continue
            if not at:
                self._undated[post_id] = None
            elif at <= until:
                self._covered[post_id] = None
            else:
                self._newer.add(post_id)

    def _looks_alike(self, post_id: str) -> bool:
        """Return whether an id may be meant by one of the selection."""
        if len(self._lookalikes) >= MAX_LOOKALIKES:
            return False
        handle_keys = tuple(self._handle_keys)
        if post_id.endswith(handle_keys):
            return True
        half = len(post_id) // 2
        for place in (half, half + 1):
            beginning = post_id[:place]
            end = post_id[place:]
            if beginning in self._beginnings:
                return True
            if end in self._ends:
                return True
        return False

    def matches(self) -> Matches:
        """Return what was found. Raises redis.exceptions.RedisError."""
        missing = sorted(self._candidates - self._stored_forms)
        self._stored_forms |= known_ids(self._redis, missing)
        ids = dict(self._covered)
        for post_id in self._undated:
            if post_id not in self._newer:
                ids[post_id] = None
        unmatched = []
        other_form_of = {}
        for text, forms in self._forms.items():
            form = self._stored_form(forms)
            if form is None:
                unmatched.append(text)
            else:
                ids[form] = None
                if form != text:
                    other_form_of[text] = form
        runs = []
        for run in self._selection.runs:
            if run in self._runs:
                runs.append(run)
            else:
                unmatched.append(run)
        post_ids = frozenset(ids)
        return Matches(
            ids=list(ids),
            runs=runs,
            shown_ids=post_ids | self._run_ids,
            unmatched=unmatched,
            similar=self._similar(unmatched),
            counts=Counter(),
            forms=other_form_of,
        )

    def _stored_form(self, forms: Sequence[str]) -> str | None:
        """Return the first form that a stored post has: another post can have the bare id, and an
        id as it is stored means itself.
        """
        for form in forms:
            if form in self._stored_forms:
                return form
        return None

    def _similar(self, unmatched: Sequence[str]) -> list[str]:
        """Return the ids of stored posts that look like ids that match nothing."""
        lookalikes = list(self._lookalikes)
        similar: dict[str, None] = {}
        for text in unmatched[:MAX_COMPARED]:
            end = key_of_handle(text)
            if end is not None:
                same_key = [post_id for post_id in lookalikes if post_id.endswith(end)]
                similar |= dict.fromkeys(same_key[:MAX_SIMILAR])
                continue
            for form in self._forms.get(text, ()):
                close = get_close_matches(
                    form,
                    lookalikes,
                    n=MAX_SIMILAR,
                    cutoff=SIMILARITY,
                )
                similar |= dict.fromkeys(close)
        return list(similar)[:MAX_SIMILAR]


def count(records: Iterable[Record], matches: Matches) -> Matches:
    """Return the matches with their numbers of items in each place."""
    ids = frozenset(matches.ids)
    counts: Counter[str] = Counter()
    run_of: dict[str, object] = {}
    shared = set()
    for place, post_id, fields, _ in records:
        run = fields.get("run") or None
        is_of_run = run in matches.runs
        if post_id in ids:
            # some places have only ids
            if fields:
                first_run = run_of.setdefault(post_id, run)
                if first_run != run:
                    shared.add(post_id)
            counts[place] += 1
        elif is_of_run:
            counts[place] += 1
    return matches._replace(counts=counts, shared=len(shared))
