"""`feedmill classify FILE --out OUT`, interrupted by Ctrl-C or killed, and started again."""

import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests import support
from tests.fakes.models import make_sentence_model
from tests.support import feedmill, make_posts, wait_until


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows; scores depend on a batch's other posts in the last digits."""
    if path.suffix == ".parquet":
        table: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    else:
        header, *lines = path.read_text().splitlines()
        names = header.split(",")
        table = [dict(zip(names, line.split(","), strict=False)) for line in lines]
    for row in table:
        row["label_score"] = f"{float(row['label_score']):.3f}"
    return table


@pytest.mark.parametrize(
    ("how", "name"),
    [
        (signal.SIGINT, "out.parquet"),
        (signal.SIGKILL, "out.csv"),
        pytest.param(signal.SIGKILL, "out.parquet", marks=pytest.mark.long),
        pytest.param(signal.SIGINT, "out.csv", marks=pytest.mark.long),
    ],
)
def test_the_same_command_continues(
    tmp_path: Path, how: signal.Signals, name: str
) -> None:
    model = make_sentence_model(tmp_path / "model")
    path = tmp_path / "posts.jsonl"
    path.write_text(support.as_jsonl(make_posts(8_000)))
    command = ("classify", str(path), "--model", str(model), "--labels", "cats,dogs")
    options = ("--none", "off", "--device", "cpu", "--out")
    out = tmp_path / name
    kept = tmp_path / f".{name}.outcomes"
    with support.running(*command, *options, name, cwd=tmp_path) as interrupted:
        wait_until(
            lambda: kept.exists() and kept.stat().st_size > 50_000,
            "outcomes are kept",
        )
        interrupted.end(how)
    assert "Traceback" not in interrupted.text()
    assert not out.exists()
    if how == signal.SIGINT:
        assert "The same command continues after" in interrupted.text()
    model.rename(tmp_path / "not mounted")
    failed = feedmill(*command, *options, name, cwd=tmp_path)
    assert failed.returncode != 0
    assert "Traceback" not in failed.stderr
    (tmp_path / "not mounted").rename(model)
    rest = feedmill(*command, *options, name, cwd=tmp_path)
    assert rest.returncode == 0, rest.stderr
    assert "had been labelled before an interruption" in rest.stderr
    assert not kept.exists()
    whole = feedmill(*command, *options, f"whole-{name}", cwd=tmp_path)
    assert "before an interruption" not in whole.stderr
    assert rows_of(out) == rows_of(tmp_path / f"whole-{name}")
    assert len(rows_of(out)) == 8_000
