"""producers/reddit/topics.py: the topics file, and what is wrong with one."""

from pathlib import Path

import pytest

from producers.reddit import topics
from shared.errors import SettingsError
from shared.topics import TOPICS


def written(folder: Path, text: str) -> Path:
    path = folder / "topics.toml"
    path.write_text(text)
    return path


def test_the_default_topics_are_those_that_posts_are_labelled_with() -> None:
    assert tuple(topics.read(None).topics) == TOPICS


def test_names_may_be_written_as_people_write_them(tmp_path: Path) -> None:
    read = topics.read(written(tmp_path, '[topics]\n"a b" = ["r/One", "/r/two"]\n'))
    assert read.subreddits == ["One", "two"]
    assert read.active == 3
    assert read.topic_of == {"one": "a b", "two": "a b"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[topics", " is not valid TOML: "),
        ("", "topics: field required"),
        ("[topics]\n", "topics: "),
        ('[topics]\n"a" = []\n', "topics.a: "),
        ('[topics]\n"a" = ["no spaces here"]\n', "topics.a.0: "),
        ('[topics]\n"a" = ["x1"]\n"b" = ["X1"]\n', "r/X1 is listed under 'a' and 'b'"),
        ('[topics]\n"a" = ["x1", "x1"]\n', "r/x1 is listed under 'a' and 'a'"),
        ('active = 0\n[topics]\n"a" = ["x1"]\n', "active: "),
        ('actvie = 2\n[topics]\n"a" = ["x1"]\n', "actvie: "),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(SettingsError) as refused:
        topics.read(written(tmp_path, text))
    assert problem in str(refused.value)
    assert "topics.toml" in str(refused.value)
    if "TOML" not in problem:
        assert "`feedmill ingest topics`" in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="/none: No such file or directory"):
        topics.read(tmp_path / "none")
