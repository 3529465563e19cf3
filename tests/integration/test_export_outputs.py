"""`feedmill export` to files that exist: their modes, links and devices, and what an interrupted
export says.
"""

import os
import stat
import time
from pathlib import Path

import pytest

from feedmill.cli.export import describe, exit_status
from feedmill.exporting.columns import COLUMNS, ExportFilter
from feedmill.exporting.files import opened, post_ids, schema_of
from feedmill.exporting.run import ExportCounts, ExportRun
from feedmill.outcomes.rows import RowReader
from feedmill.shared.messages import Post
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from tests.support import RedisServer, feedmill, make_classification, naming


def fill(server: RedisServer, *post_ids: str) -> None:
    now = time.time()
    results = [
        Result(
            Post(id=post_id, title="x"), make_classification(post_id, classified_at=now)
        )
        for post_id in post_ids
    ]
    ResultsStore(server.client, Settings()).write(results)


def run(server: RedisServer, out: Path, stop: list[int]) -> ExportCounts:
    reader = RowReader(server.client)
    form = out.suffix[1:]
    with opened(
        out, form, schema_of(COLUMNS, form == "parquet"), ExportFilter(), reader
    ) as target:
        export = ExportRun(
            reader, target, ExportFilter(), stop, follow=False, close_after=600.0
        )
        export.all()
    return export.counts()


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_a_replaced_file_keeps_its_mode_and_its_link(
    server: RedisServer, tmp_path: Path, form: str
) -> None:
    fill(server, "1", "2")
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / f"target.{form}", tmp_path / f"out.{form}"
    target.write_text("before")
    target.chmod(0o600)
    link.symlink_to(target)
    run(server, link, [])
    assert link.is_symlink()
    assert list(post_ids(target, form)) == ["1", "2"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert [*target.parent.iterdir()] == [target]


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_exports_to_files_of_any_name(
    server: RedisServer, tmp_path: Path, form: str
) -> None:
    """The longest name has 255 bytes on most file systems."""
    fill(server, "1", "2")
    out = tmp_path / f"{'x' * (254 - len(form))}.{form}"
    for _ in range(2):
        run(server, out, [])
        assert list(post_ids(out, form)) == ["1", "2"]
        assert [*tmp_path.iterdir()] == [out]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_an_interrupted_file_is_unchanged_and_said_to_be(
    server: RedisServer, tmp_path: Path, form: str
) -> None:
    fill(server, "1")
    out = tmp_path / f"out.{form}"
    out.write_text("before")
    counts = run(server, out, stop=[2])
    assert out.read_text() == "before"
    assert [*tmp_path.iterdir()] == [out]
    assert exit_status(counts, [2], follow=False) == 130
    assert (counts.rows, counts.complete) == (0, False)
    assert "written" not in describe(counts, str(out))
    with pytest.raises(AssertionError, match=naming(out, "unchanged", "same command")):
        raise AssertionError(describe(counts, str(out)))


def test_pipes_and_devices_are_refused_as_files_of_an_export(
    server: RedisServer, tmp_path: Path
) -> None:
    """An export replaces its file at the end."""
    os.mkfifo(tmp_path / "pipe.csv")
    said = feedmill("export", "pipe.csv", cwd=tmp_path, FEEDMILL_REDIS_URL=server.url)
    assert said.returncode == 2
    assert "pipe.csv is a pipe or a device" in said.stderr
    assert stat.S_ISFIFO((tmp_path / "pipe.csv").stat().st_mode)


def test_a_report_keeps_mode_and_link_and_can_go_to_a_device(
    server: RedisServer, tmp_path: Path
) -> None:
    fill(server, "1")
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    page.write_text("before")
    page.chmod(0o600)
    link.symlink_to(page)
    assert (
        feedmill(
            "report", "link.html", cwd=tmp_path, FEEDMILL_REDIS_URL=server.url
        ).stderr
        == ""
    )
    assert link.is_symlink()
    assert "<html" in page.read_text()
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    said = feedmill(
        "report", "/dev/stdout", cwd=tmp_path, FEEDMILL_REDIS_URL=server.url
    )
    assert "<html" in said.stdout
    assert Path("/dev/stdout").is_symlink()
