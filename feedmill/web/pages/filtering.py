"""The filter of a page of the stream: the fields of its form, which are in its address."""

from collections import Counter
from collections.abc import Callable
from typing import Annotated
from urllib.parse import urlencode

from fastapi import Query

from feedmill.outcomes.followers import ResultFilter
from feedmill.outcomes.rows import ResultRow
from feedmill.web.failures import Failure

#: Characters of a field.
MAX_LENGTH = 200
Text = Annotated[str, Query(max_length=MAX_LENGTH)]


class StreamFilter:
    """A filter for rows of the stream. An empty field matches all."""

    def __init__(
        self,
        label: Text = "",
        none: Text = "",
        min_score: Text = "",
        max_score: Text = "",
        source: Text = "",
        run: Text = "",
        language: Text = "",
        words: Text = "",
    ) -> None:
        #: Fields of the form.
        self.form = {
            "label": label,
            "none": none,
            "min_score": min_score,
            "max_score": max_score,
            "source": source,
            "run": run,
            "language": language,
            "words": words,
        }
        #: Fields of the address, without empty ones.
        self.fields: dict[str, str] = {}
        for name, text in self.form.items():
            if text.strip():
                self.fields[name] = text.strip()
        self._results = ResultFilter(
            label=self.fields.get("label"),
            min_score=self._score("min_score"),
            run=self.fields.get("run"),
        )
        self._max_score = self._score("max_score")
        self._wants_none = "none" in self.fields
        self._source = source.strip().casefold().removeprefix("r/")
        self._language = language.strip().casefold()
        self._words = words.casefold().split()

    @property
    def query(self) -> str:
        """The fields as in an address."""
        return urlencode(self.fields)

    def _score(self, name: str) -> float | None:
        text = self.fields.get(name)
        if text is None:
            return None
        try:
            score = float(text)
        except ValueError:
            score = -1.0
        if not 0 <= score <= 1:
            raise Failure(422, "invalid", "A score must be a number from 0 to 1.")
        return score

    def has(self, row: ResultRow) -> bool:
        """Return whether a row matches."""
        if not self._results.has(row):
            return False
        if self._wants_none and row.found["label"] is not None:
            return False
        if self._max_score is not None and score_of(row) > self._max_score:
            return False
        if self._source and self._source not in map(str.casefold, sources_of(row)):
            return False
        if self._language and language_of(row).casefold() != self._language:
            return False
        if not self._words:
            return True
        text = f"{row.post.get('title', '')} {row.post.get('body', '')}".casefold()
        return all(word in text for word in self._words)


class Choices:
    """A filter that notes what the rows before it have, to offer it in the form."""

    def __init__(self, inner: StreamFilter) -> None:
        self._inner = inner
        self.labels: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        self.languages: Counter[str] = Counter()

    def has(self, row: ResultRow) -> bool:
        label = row.found["label"]
        if label is not None:
            self.labels[label] += 1
        self.sources.update(sources_of(row))
        language = language_of(row)
        if language:
            self.languages[language] += 1
        return self._inner.has(row)


def score_of(row: ResultRow) -> float:
    """Return the highest score of a row."""
    scores: dict[str, float] = row.found["scores"]
    return max(scores.values(), default=0.0)


def sources_of(row: ResultRow) -> list[str]:
    """Return where a post comes from: its subreddit and its topic, if it has them."""
    values = [row.post.get("subreddit"), row.post.get("topic")]
    return [value for value in values if isinstance(value, str) and value]


def language_of(row: ResultRow) -> str:
    """Return the code of a post's language; "" if it is unknown."""
    language = row.post.get("language") or row.found.get("language")
    if not isinstance(language, str):
        return ""
    return language


def most_common(counts: Counter[str], count: int = 200) -> list[str]:
    """Return the most common names, in order of the alphabet."""
    names = [name for name, _ in counts.most_common(count)]
    key: Callable[[str], str] = str.casefold
    return sorted(names, key=key)
