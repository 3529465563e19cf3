"""Errors: each sentence that the program raises is read by a test."""

import ast
import re
from functools import cache

import pytest

from shared import errors
from tests.sentences import CLASSES, ROOT, RUN, Sentence, runs, sentences, texts_in


@cache
def told_in_tests() -> str:
    """What the strings of all tests say; patterns without their backslashes."""
    files = (ROOT / "tests").rglob("test_*.py")
    return "\n".join(text for file in files for text in texts_in(ast.parse(file.read_text()))).replace("\\", "")


@pytest.mark.parametrize("sentence", sentences(), ids=lambda sentence: sentence.words[:60])
def test_a_sentence_is_read_by_a_test(sentence: Sentence) -> None:
    """A test has a run of it which no other sentence has; or any, where another has them all."""
    others = "\n".join({other.words for other in sentences()} - {sentence.words})
    known_by = runs(sentence.words)
    known_by = {run for run in known_by if run not in others} or known_by
    assert any(run in told_in_tests() for run in known_by), f"no test has {RUN} characters in a row of it"


def test_the_tree_is_that_of_the_classes() -> None:
    named = re.findall(r"[├└]─ (\w+)", errors.__doc__ or "")
    assert named == list(CLASSES)
