"""producers/reddit/topics.py: reading and validating the topics file."""

from pathlib import Path

import pytest

from feedmill.producers.reddit import topics
from feedmill.shared.errors import SettingsError
from feedmill.shared.settings import TOPICS


def written(folder: Path, text: str) -> Path:
    path = folder / "topics.toml"
    path.write_text(text)
    return path


def test_default_topics_equal_the_default_labels() -> None:
    assert tuple(topics.read(None).topics) == TOPICS


def test_reads_common_spellings_of_subreddits(tmp_path: Path) -> None:
    read = topics.read(written(tmp_path, '[topics]\n"a b" = ["r/One", "/r/two"]\n'))
    assert read.topics == {"a b": ("One", "two")}
    assert read.active == 3
    assert read.topic_of == {"one": "a b", "two": "a b"}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_reads_files_with_a_byte_order_mark(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "topics.toml"
    path.write_bytes('[topics]\r\n"café" = ["One"]\r\n'.encode(encoding))
    assert topics.read(path).topics == {"café": ("One",)}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[topics", "TOML"),
        ("", "topics: "),
        ("[topics]\n", "topics: "),
        ('[topics]\n"a" = []\n', "topics.a: "),
        ('[topics]\n"a" = ["no spaces here"]\n', "topics.a.0: "),
        ('[topics]\n"a" = ["x1"]\n"b" = ["X1"]\n', "r/X1"),
        ('[topics]\n"a" = ["x1", "x1"]\n', "r/x1"),
        ('active = 0\n[topics]\n"a" = ["x1"]\n', "active: "),
        ('actvie = 2\n[topics]\n"a" = ["x1"]\n', "actvie: "),
    ],
)
def test_mistakes_name_the_entry(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(SettingsError) as refused:
        topics.read(written(tmp_path, text))
    assert problem in str(refused.value)
    assert "topics.toml" in str(refused.value)
    if "TOML" not in problem:
        assert "feedmill ingest topics" in str(refused.value)


def test_rejects_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="/none.*No such file or directory"):
        topics.read(tmp_path / "none")
