"""The types of messages, outcomes and results need only the base install."""

import sys
import tomllib
from pathlib import Path

import pytest

from tests.support import (
    NEW_INTERPRETER,
    ROOT,
    _environment,
    distributions_of,
    make_classification,
    run,
)

#: Packages of extras that a program must not need.
FORBIDDEN = (
    "torch", "transformers", "numpy", "tokenizers", "safetensors", "huggingface_hub", "pandas",
    "pyarrow", "flower", "prometheus_client", "praw", "websockets",
)  # fmt: skip
#: Refuses to import them, before anything else is imported.
HOOK = f"""
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {FORBIDDEN!r}:
            raise ImportError("imports " + name)

sys.meta_path.insert(0, Refusing())
"""


def run_without_extras(code: str, folder: Path) -> str:
    environment = _environment(folder) | NEW_INTERPRETER
    said = run([sys.executable, "-P", "-c", HOOK + code], folder, environment)
    assert said.returncode == 0, said.stderr
    return said.stdout


def test_base_install_has_no_package_of_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = distributions_of(project["dependencies"])
    assert "pydantic" in installed
    assert installed.isdisjoint(name.replace("_", "-") for name in FORBIDDEN)


def test_every_public_name_is_there_without_extras(tmp_path: Path) -> None:
    code = "import feedmill\nfor name in feedmill.__all__: getattr(feedmill, name)\n"
    run_without_extras(code, tmp_path)


def test_every_command_is_there_without_extras(tmp_path: Path) -> None:
    """A command that needs an extra says so, which it can only do once it is imported."""
    code = """
from feedmill.cli.main import COMMANDS, application
for _, place, _ in COMMANDS:
    application(place.split(".")[1])
"""
    run_without_extras(code, tmp_path)


def test_outcomes_become_typed(tmp_path: Path) -> None:
    found = make_classification("a", "food", scores={"food": 0.75, "law": 0.25})
    unfit = make_classification("b", None, scores={"food": 0.25, "law": 0.125})
    outcomes = [
        found.model_dump() | {"new_field": 1},
        {"id": "c", "error": "no text"},
        unfit.model_dump(),
    ]
    code = f"""
from feedmill import Classification, PostError, parse_outcomes
labelled, failed, unfit = parse_outcomes({outcomes!r})
assert isinstance(labelled, Classification) and isinstance(failed, PostError)
print(labelled.label, labelled.label_score, failed.error, unfit.label, unfit.best_label)
"""
    assert run_without_extras(code, tmp_path) == "food 0.75 no text None food\n"


def test_posts_are_checked_before_they_are_sent(tmp_path: Path) -> None:
    code = """
from feedmill import ClassifyOptions, Post, PostRefused, RequestRefused
post = Post.parse({"id": 7, "title": "Fish &amp; chips"})
print(post.id, post.text, ClassifyOptions.parse({"labels": "a, b"}).labels)
for refused, call in ((PostRefused, lambda: Post.parse({"id": "x"})),
                      (RequestRefused, lambda: ClassifyOptions.parse({"none": 2}))):
    try:
        call()
    except refused as error:
        print(type(error).__name__)
"""
    assert run_without_extras(code, tmp_path).splitlines() == [
        "7 Fish & chips {'a': ('a',), 'b': ('b',)}",
        "PostRefused",
        "RequestRefused",
    ]


@pytest.mark.parametrize("outcomes", [5, [5], [{"id": "a"}], [{"label": "food"}], None])
def test_what_is_no_result_is_refused(outcomes: object) -> None:
    from feedmill import UserError, parse_outcomes  # noqa: PLC0415 - as applications do

    with pytest.raises(UserError, match=r"outcomes"):
        parse_outcomes(outcomes)
