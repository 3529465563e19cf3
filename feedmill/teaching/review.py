"""Choose posts of the results stream for people to label, each for one reviewer at a time.

One pick in five is random, and so are the first ones: they measure the accuracy. The others are
posts of which the model is uncertain, on which two models disagree, or that fit no label. A fifth
of the posts, by a digest of their text, is for random picks only, so that these stay a random
sample.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from redis import Redis
from redis.exceptions import RedisError

from feedmill.outcomes.rows import ResultRow, RowReader
from feedmill.shared import runs
from feedmill.shared.errors import UserError
from feedmill.shared.messages import Labels
from feedmill.shared.settings import DESCRIBED_TOPICS, Settings
from feedmill.teaching.answer_file import (
    AnsweredPost,
    AnswerFile,
    AnswerKey,
    now_text,
)
from feedmill.teaching.candidates import (
    DISAGREEMENT,
    UNLABELLED,
    Candidate,
    candidates_of,
    label_names,
    lists_of,
)
from feedmill.training.picked import FIRST, RANDOM, UNCERTAIN

logger = logging.getLogger(__name__)

#: Newest results of the stream to choose from.
MAX_ROWS = 5000
#: Newest runs of the results in which descriptions of the labels are looked for.
MAX_RUNS = 20
#: Seconds after which the results are read again, and once nothing is left to ask.
REFRESH_S = 30.0
EMPTY_REFRESH_S = 2.0
#: Random picks at the beginning.
FIRST_PICKS = 10
#: Kinds of picks, in turn.
TURNS = (RANDOM, UNCERTAIN, DISAGREEMENT, UNCERTAIN, UNLABELLED)
#: Kinds to fall back to, in order.
FALLBACKS = (UNCERTAIN, DISAGREEMENT, UNLABELLED, RANDOM)
#: Seconds for which a post belongs to the reviewer who sees it.
CLAIM_S = 600.0
#: Reviewers that are remembered, and answers of each that can be undone.
MAX_REVIEWERS = 1000
MAX_UNDO = 100


class Pick(NamedTuple):
    """A post for one reviewer, and why it was picked."""

    candidate: Candidate
    why: str


class Claim(NamedTuple):
    """A post that a reviewer sees. until: by the queue's clock."""

    pick: Pick
    reviewer: str
    until: float


class NotShown(UserError):  # noqa: N818 - named after the event
    """An answer to a post that this reviewer does not see any more."""


class ReviewQueue:
    """The posts to review. Thread-safe. Methods raise UserError and redis.exceptions.RedisError.

    A reviewer is a person at one browser: any name that stays the same there.
    """

    def __init__(
        self,
        redis: Redis,
        settings: Settings,
        file: AnswerFile,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self._reader = RowReader(redis)
        self._settings = settings
        self.file = file
        self._clock = clock
        self._lock = threading.RLock()
        #: When the newest results were read, by the clock.
        self._read_at: float | None = None
        self._is_refreshing = False
        self._names: tuple[str, ...] = ()
        self._labels: Labels | None = None
        self._candidates: dict[AnswerKey, Candidate] = {}
        self._lists: dict[str, list[Candidate]] = {}
        self._claims: dict[AnswerKey, Claim] = {}
        #: Answers of each reviewer that can be undone.
        self._histories: OrderedDict[str, list[tuple[Pick, str]]] = OrderedDict()
        self._turn = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The labels: those of the settings, else those of most results; empty without results."""
        with self._lock:
            self._keep_fresh()
            return self._names

    @property
    def labels(self) -> Labels | None:
        """The labels with their descriptions: those of the settings, else those with which a run
        of the results was sent; None if neither has them.
        """
        with self._lock:
            self._keep_fresh()
            return self._labels

    @property
    def undescribed(self) -> list[str]:
        """The labels of which only the name is known. A lesson learns little about them."""
        with self._lock:
            known_descriptions = self.labels or DESCRIBED_TOPICS
            names: list[str] = []
            for name in self._names:
                descriptions = known_descriptions.get(name, (name,))
                if tuple(descriptions) == (name,):
                    names.append(name)
            return names

    @property
    def candidates(self) -> list[Candidate]:
        """The posts of the newest results, the newest first."""
        with self._lock:
            self._keep_fresh()
            return list(self._candidates.values())

    def next(self, reviewer: str) -> Pick | None:
        """Return the post that this reviewer sees, or another one; None if there is none."""
        with self._lock:
            self._keep_fresh()
            claim = self._claim_of(reviewer)
            if claim is not None:
                self._claim(claim.pick, reviewer)
                return claim.pick
            pick = self._pick()
            age_s = self._clock() - (self._read_at or 0.0)
            if pick is None and age_s >= EMPTY_REFRESH_S:
                self.refresh()
                pick = self._pick()
            if pick is not None:
                self._turn += 1
                self._claim(pick, reviewer)
            return pick

    def answer(
        self, reviewer: str, person: str, token: str, label: str | None, *, skips: bool
    ) -> None:
        """Store an answer to the post that this reviewer sees. label: None for none of these.

        Raises NotShown if the reviewer sees another post.
        """
        with self._lock:
            claim = self._claim_of(reviewer)
            if claim is None or claim.pick.candidate.token != token:
                raise NotShown("This post is not shown any more. Reload the page.")
            if label is not None and label not in self._names:
                raise UserError(
                    f"{label!r:.80} is none of the labels. Reload the page."
                )
            answered = _answer_to(
                claim.pick,
                person,
                label,
                skips=skips,
            )
            self.file.put([answered])
            del self._claims[claim.pick.candidate.key]
            history = self._history(reviewer)
            history.append((claim.pick, answered.at))
            del history[:-MAX_UNDO]

    def undo(self, reviewer: str) -> bool:
        """Take this reviewer's latest answer back, and show its post again.

        Return whether there was one. An answer that somebody has changed since stays.
        """
        with self._lock:
            history = self._history(reviewer)
            while history:
                pick, at = history.pop()
                key = pick.candidate.key
                answered = self.file.snapshot().answers.get(key)
                if answered is None or answered.at != at or key in self._claims:
                    continue
                self.file.remove([key])
                claim = self._claim_of(reviewer)
                if claim is not None:
                    del self._claims[claim.pick.candidate.key]
                self._claim(pick, reviewer)
                return True
            return False

    def forget_purged(self) -> None:
        """Remove the answers to posts that were purged."""
        answers = self.file.snapshot().answers
        gone = self.purged({key.id for key in answers})
        if gone:
            self.file.remove([key for key in answers if key.id in gone])

    def purged(self, ids: Iterable[str]) -> set[str]:
        """Return the ids of purged posts."""
        return self._reader.gone(ids)

    def _history(self, reviewer: str) -> list[tuple[Pick, str]]:
        history = self._histories.pop(reviewer, [])
        self._histories[reviewer] = history
        if len(self._histories) > MAX_REVIEWERS:
            self._histories.popitem(last=False)
        return history

    # Claims.

    def _claim_of(self, reviewer: str) -> Claim | None:
        for claim in self._claims.values():
            if claim.reviewer == reviewer:
                return claim
        return None

    def _claim(self, pick: Pick, reviewer: str) -> None:
        until = self._clock() + CLAIM_S
        self._claims[pick.candidate.key] = Claim(pick, reviewer, until)
        if len(self._claims) > MAX_REVIEWERS:
            oldest = min(self._claims, key=lambda key: self._claims[key].until)
            del self._claims[oldest]

    # Picks.

    def _pick(self) -> Pick | None:
        snapshot = self.file.snapshot()
        now = self._clock()
        claimed_texts: set[str] = set()
        for key, claim in self._claims.items():
            if claim.until > now:
                claimed_texts.add(key.text)
        answer_count = len(snapshot.answers) + len(claimed_texts)
        kinds = (TURNS[self._turn % len(TURNS)], *FALLBACKS)
        if answer_count < FIRST_PICKS:
            kinds = (RANDOM, *FALLBACKS)
        for kind in kinds:
            for candidate in self._lists.get(kind, ()):
                text = candidate.key.text
                if text in snapshot.texts or text in claimed_texts:
                    continue
                self._claims.pop(candidate.key, None)  # one that has ended
                why = kind
                if kind == RANDOM and answer_count < FIRST_PICKS:
                    why = FIRST
                return Pick(candidate, why)
        return None

    def _keep_fresh(self) -> None:
        """Read the newest results, at first now, later on a thread: it takes up to a second."""
        if self._read_at is None:
            self.refresh()
            return
        is_stale = self._clock() - self._read_at >= REFRESH_S
        if is_stale and not self._is_refreshing:
            self._is_refreshing = True
            thread = threading.Thread(
                target=self._refresh_quietly,
                name="review",
                daemon=True,
            )
            thread.start()

    def _refresh_quietly(self) -> None:
        try:
            self.refresh()
        except (RedisError, UserError) as error:
            logger.warning("review: cannot read the newest results: %s", error)
        finally:
            self._is_refreshing = False

    def refresh(self) -> None:
        """Read the newest results."""
        began = self._clock()
        self.forget_purged()
        newest = self._reader.newest(MAX_ROWS)
        rows = [row for row in newest if row.found["scores"]]
        answers = self.file.snapshot().answers.values()
        answered_names = {answer.label for answer in answers if answer.label}
        names = label_names(rows, self._settings, answered_names)
        usable = [row for row in rows if set(row.found["scores"]) == set(names)]
        if self._settings.labels is not None and not usable:
            # Labels of one's own, for posts that were classified with others.
            usable = rows
        labels = self._settings.labels
        if labels is None:
            labels = self._labels_of_runs(usable, names)
        candidates = candidates_of(usable)
        lists = lists_of(candidates)
        with self._lock:
            self._names = names
            self._labels = labels
            self._candidates = {candidate.key: candidate for candidate in candidates}
            self._lists = lists
            self._read_at = began

    def _labels_of_runs(
        self, rows: Sequence[ResultRow], names: Sequence[str]
    ) -> Labels | None:
        """Return the descriptions of the labels, of the newest run that was sent with them."""
        known_runs: set[str] = set()
        for row in rows:
            run = row.post.get("run")
            if not run or run in known_runs:
                continue
            if len(known_runs) == MAX_RUNS:
                return None
            known_runs.add(run)
            labels = runs.kept_labels(self._redis, run)
            if labels is not None and set(labels) == set(names):
                return labels
        return None


def _answer_to(
    pick: Pick, person: str, label: str | None, *, skips: bool
) -> AnsweredPost:
    candidate = pick.candidate
    return AnsweredPost(
        post=candidate.post,
        label=label or "",
        why=pick.why,
        fits_none=label is None and not skips,
        by=person,
        at=now_text(),
        was=candidate.label,
        was_by=candidate.weights,
    )
