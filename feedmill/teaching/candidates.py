"""The posts of the newest results that people can be asked about, and how they are ordered."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from feedmill.outcomes.rows import ResultRow
from feedmill.shared.errors import UserError
from feedmill.shared.messages import Post
from feedmill.shared.none_of_these import NO_LABEL
from feedmill.shared.results import Result
from feedmill.shared.settings import TOPICS, Settings
from feedmill.teaching.answer_file import AnswerKey, key_of
from feedmill.teaching.label_keys import LABEL_KEYS
from feedmill.training.picked import RANDOM, UNCERTAIN

#: One post in so many is for random picks only.
RANDOM_EVERY = 5
#: Why a post was picked, besides those of `feedmill label`.
DISAGREEMENT = "disagreement"
UNLABELLED = "unlabelled"
#: Bytes of a post's token, and characters of a model's digest in the answers.
TOKEN_BYTES = 12
DIGEST_CHARACTERS = 16


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A post of the stream with its newest result.

    margin: the score of the best outcome above the second best, low if the model is uncertain.
    other_label: of the newest result by another model with another label; None without one.
    """

    key: AnswerKey
    post: Post
    label: str
    score: float
    margin: float
    model: str
    weights: str
    other_label: str | None = None
    other_model: str = ""

    @property
    def token(self) -> str:
        """The post's identity for a browser."""
        return _digest("\0".join(self.key), TOKEN_BYTES)

    @property
    def is_reserved(self) -> bool:
        """True if only random picks take the post."""
        number = int(_digest(self.key.text, 8), 16)
        return number % RANDOM_EVERY == 0


def label_names(
    rows: Iterable[ResultRow], settings: Settings, answered: set[str]
) -> tuple[str, ...]:
    """Return the labels to ask about: those of the settings, else those of most results, if
    possible of such that have all labels of the answers.

    Raises UserError if there are too many for keys.
    """
    if settings.labels is not None:
        names = tuple(settings.labels)
    else:
        label_sets = Counter(frozenset(row.found["scores"]) for row in rows)
        best = max(
            label_sets,
            key=lambda labels: (answered <= labels, label_sets[labels]),
            default=frozenset(),
        )
        names = tuple(sorted(best))
        if best == frozenset(TOPICS):
            names = TOPICS
    if len(names) > len(LABEL_KEYS):
        raise UserError(
            f"There are {len(names):,} labels, and keys for {len(LABEL_KEYS)}. Start `feedmill "
            "web` with fewer --labels."
        )
    return names


def candidates_of(rows: Iterable[ResultRow]) -> list[Candidate]:
    """Return the posts of rows, the newest first. rows: the newest first."""
    newest: dict[AnswerKey, Candidate] = {}
    texts: set[str] = set()
    for row in rows:
        candidate = describe(row.result)
        if not candidate.key.text:
            continue
        newer = newest.get(candidate.key)
        if newer is not None:
            newest[candidate.key] = _with_other(newer, candidate)
        elif candidate.key.text not in texts:  # reposts are asked about once
            newest[candidate.key] = candidate
            texts.add(candidate.key.text)
    return list(newest.values())


def describe(result: Result) -> Candidate:
    """Return a result as a candidate. Its scores must not be empty."""
    classification = result.classification
    scores = classification.scores
    label = classification.label
    best_label = classification.best_label
    # With `none`, the scores sum to less than 1: the rest is that of "none of these".
    rest = max(0.0, 1 - sum(scores.values()))
    best_scores = sorted([*scores.values(), rest])
    return Candidate(
        key=key_of(result.post),
        post=result.post,
        label=label or NO_LABEL,
        score=scores[best_label],
        margin=best_scores[-1] - best_scores[-2],
        model=classification.model,
        weights=classification.weights[:DIGEST_CHARACTERS],
    )


def _with_other(newer: Candidate, older: Candidate) -> Candidate:
    """Return a candidate with the label of another model, if it is another one."""
    is_same = newer.weights == older.weights or newer.label == older.label
    if newer.other_label is not None or is_same:
        return newer
    return replace(
        newer,
        other_label=older.label,
        other_model=older.model,
    )


def lists_of(candidates: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    """Return the candidates for each kind of picks, the best first."""
    reserved: list[Candidate] = []
    others: list[Candidate] = []
    for candidate in candidates:
        if candidate.is_reserved:
            reserved.append(candidate)
        else:
            others.append(candidate)
    unlabelled = [candidate for candidate in others if candidate.label == NO_LABEL]
    disagreements = [
        candidate for candidate in others if candidate.other_label is not None
    ]
    return {
        RANDOM: sorted(reserved, key=lambda candidate: candidate.token),
        UNCERTAIN: sorted(others, key=lambda candidate: candidate.margin),
        DISAGREEMENT: disagreements,
        UNLABELLED: sorted(unlabelled, key=lambda candidate: -candidate.score),
    }


def _digest(text: str, size: int) -> str:
    data = text.encode("utf-8", "replace")
    return blake2b(data, digest_size=size).hexdigest()
