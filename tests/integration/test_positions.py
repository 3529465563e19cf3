"""Positions of feedmill/cli/enqueue.py on a real Redis: file positions, what identifies a file, and expiry."""

from pathlib import Path

import pytest

from feedmill.cli.enqueue import POSITION_TTL, Position, _position
from feedmill.producers.records import NO_FILTERS, Columns
from feedmill.shared.broker import connect
from feedmill.shared.keys import find
from feedmill.shared.settings import Settings
from tests.support import RedisServer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "posts.jsonl"
    path.write_bytes(b"x" * 100_000)
    return path


def position(settings: Settings, path: Path, *way: str) -> Position:
    return Position(connect(settings), str(path), *way)


def test_the_next_run_loads_the_position(settings: Settings, path: Path) -> None:
    first = position(settings, path, "labels", "filters")
    assert first.load() == 0
    first.save(1000)
    first.save(123_456_789)
    assert position(settings, path, "labels", "filters").load() == 123_456_789
    first.forget()
    assert position(settings, path, "labels", "filters").load() == 0


def test_position_key_is_registered_and_expires(settings: Settings, redis: RedisServer, path: Path) -> None:
    position(settings, path).save(7)
    (key,) = redis.client.keys()
    known = find(str(key))
    assert known
    assert known.pattern == "feedmill:position:*"
    assert 0 < redis.client.ttl(key) <= POSITION_TTL


def test_a_growing_file_keeps_its_position(settings: Settings, path: Path) -> None:
    position(settings, path).save(7)
    with path.open("ab") as file:
        file.write(b"more")
    assert position(settings, path).load() == 7


@pytest.mark.parametrize("what", ["way", "beginning", "name"])
def test_another_file_or_options_has_another_position(settings: Settings, path: Path, what: str) -> None:
    position(settings, path, "way").save(7)
    if what == "beginning":
        path.write_bytes(b"y" + path.read_bytes()[1:])
    if what == "name":
        path = path.rename(path.with_suffix(".json"))
    assert position(settings, path, "other" if what == "way" else "way").load() == 0


def test_relative_and_absolute_paths_share_a_position(
    settings: Settings, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    position(settings, path).save(7)
    monkeypatch.chdir(path.parent)
    assert position(settings, Path(path.name)).load() == 7


def test_other_columns_start_from_the_beginning(settings: Settings, path: Path) -> None:
    redis = connect(settings)
    others = [Columns("text"), Columns(), Columns(title="ticket"), Columns(body="ticket"), Columns("ticket", None, "x")]
    ways = [(Columns("ticket"), None), (Columns("ticket"), None), (Columns("ticket"), "cp1252")]
    ways += [(columns, None) for columns in (*others, Columns("ticket", date_format="%Y"))]
    first, *_ = found = [each for way in ways if (each := _position(redis, str(path), [""], NO_FILTERS, *way))]
    first.save(1)
    assert [position.load() for position in found] == [1, 1, 0, 0, 0, 0, 0, 0, 0]
