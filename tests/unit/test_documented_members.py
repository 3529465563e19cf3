"""docs/extending.md names exactly the members that the code asks of a plug-in."""

import re
from typing import Any

import pytest

from feedmill.producers.live.source import Event, Source
from feedmill.shared.settings import CLASSIFIERS
from feedmill.workers.models.classifiers import Classifier, Outputs
from feedmill.workers.models.engines import Engine
from tests.support import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text()
#: The first name in backticks, without its arguments.
NAME = re.compile(r"`(\w+)(?:\(.*?\))?`")


def section(title: str) -> str:
    """Return the page's section of that title."""
    match = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert match, title
    return match[1]


def table(text: str, head: str) -> set[str]:
    """Return the names in the first column of the table with that head."""
    match = re.search(rf"^\| {head} \|.*\n\|-.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert match, head
    first_cells = [row.split("|")[1] for row in match[1].splitlines()]
    return {name for cell in first_cells for name in NAME.findall(cell)}


def sentence(text: str, start: str) -> set[str]:
    """Return the names in the sentence that starts so."""
    match = re.search(rf"{re.escape(start)}[^.]*", text)
    assert match, start
    return set(NAME.findall(match[0]))


def members(kind: Any) -> set[str]:
    """Return the public attributes and methods of a protocol or class."""
    return {
        name
        for name in {*vars(kind), *kind.__annotations__}
        if not name.startswith("_")
    }


def test_a_source_has_the_documented_members() -> None:
    assert table(section("Source"), "member") - {"__init__"} == members(Source)
    assert table(section("Source"), "field") | {"cursor", "at"} == set(Event._fields)


def test_a_classifier_has_the_documented_members() -> None:
    text = section("Classifier")
    documented = table(text, "method") | sentence(text, "It also has the attributes")
    assert documented == members(Classifier)
    assert sentence(text, "It must have") == members(Outputs)


def test_an_engine_has_the_documented_members() -> None:
    text = section("Engine")
    documented = sentence(text, "The attribute") | sentence(text, "It has one method")
    assert documented - {"Engine"} <= members(Engine)


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_every_kind_of_classifier_is_documented(kind: str) -> None:
    assert f"`{kind}`" in (ROOT / "docs" / "models.md").read_text()
