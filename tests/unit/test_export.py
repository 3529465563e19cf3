"""Write exports and read them back, without Redis."""

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feedmill.exporting.columns import COLUMNS, FURTHER_COLUMNS, ExportFilter, label_set
from feedmill.exporting.files import TYPES, batch_of, opened, post_ids, schema_of
from feedmill.outcomes.rows import Place, ResultRow
from feedmill.producers.files import FileSource
from feedmill.shared.messages import Post
from tests.support import make_classification

FORMULAS = (
    "=1+1",
    "+1",
    "-1",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "\n=1",
    "'=1",
    "''=1",
    "'twas",
    "\uff1d1",
    "a=1",
    "'",
)


def row(post: Post, entry: str = "1-0", **fields: Any) -> ResultRow:
    found = make_classification(
        post.id,
        scores={"food": 0.875, "odd, \"label'": 1e-17},
        model="a/model",
        fingerprint="f" * 32,
        classified_at=1_700_000_000.123456,
        queued_seconds=0.25,
    )
    stored = json.loads(post.model_dump_json(exclude_defaults=True))
    return ResultRow(entry, found.model_dump(mode="json") | fields, stored)


FULL = Post(
    id="t3_1", topic="a, b", title="=HYPERLINK(1)", body='two\r\nlines "quoted"\rand\nmore',
    subreddit="Food", score=-5,
    url="https://example.org/?a=1,2", created_utc=1_700_000_000.0,
    permalink="https://example.org/p",
    edited_utc=1_700_000_001.5, stickied=True, nsfw=True, spoiler=True,
    extra={"a": [1, None, "ä"]},
)  # fmt: skip
BARE = Post(id="2", title="no url, no topic", permalink="https://example.org/p2")


class NoTombstones:
    """A reader of a Redis without purged posts."""

    def gone(self, ids: Iterable[str]) -> set[str]:
        return {*ids} & set()


def written(
    path: Path, rows: Sequence[ResultRow], columns: Sequence[str] = COLUMNS
) -> Path:
    form, reader = path.suffix[1:], NoTombstones()
    schema = schema_of(columns, form == "parquet")
    with opened(path, form, schema, ExportFilter(), reader) as target:  # type: ignore[arg-type]
        target.add(batch_of(rows, target.schema), Place("1-0"))
        target.close(Place("1-0"))
    return path


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_reads_back_the_same_posts(tmp_path: Path, form: str) -> None:
    path = written(tmp_path / f"out.{form}", [row(FULL), row(BARE)])
    assert list(FileSource(str(path)).items()) == [FULL, BARE]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    FORMULAS
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(title=TEXT, body=TEXT, topic=TEXT, post_id=TEXT)
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_any_text_survives_a_round_trip(
    tmp_path: Path, form: str, title: str, body: str, topic: str, post_id: str
) -> None:
    post = Post(
        id=f"x{post_id}", title=f"{title}", body=f"{body}.", topic=topic or None
    )
    assert list(
        FileSource(
            str(written(tmp_path / f"out.{form}", [row(post), row(BARE)]))
        ).items()
    ) == [post, BARE]


@pytest.mark.parametrize("text", FORMULAS)
def test_csv_cells_are_never_formulas(tmp_path: Path, text: str) -> None:
    extra = {"=own": text, "other": text}
    post = Post(
        id=f"{text}1",
        title=text,
        body=f"{text}b",
        topic=text,
        subreddit=text,
        url=text,
        extra=extra,
    )
    path = written(
        tmp_path / "out.csv",
        [row(post, label=text, scores={text: 1.0})],
        (*COLUMNS, *extra),
    )
    with path.open(newline="", encoding="utf-8") as file:
        for cells in csv.reader(file):
            for cell in cells:
                assert cell[:1] not in (
                    "=",
                    "+",
                    "-",
                    "@",
                    "\t",
                    "\r",
                    "\n",
                    "\uff1d",
                ), cell
    assert [*post_ids(path, "csv")] == [post.id]


def test_parquet_matches_jsonl(tmp_path: Path) -> None:
    rows = [row(FULL), row(BARE)]
    full, bare = pq.read_table(written(tmp_path / "out.parquet", rows)).to_pylist()
    expected, other = map(
        json.loads, written(tmp_path / "out.jsonl", rows).read_text().splitlines()
    )
    assert tuple(expected) == tuple(full) == COLUMNS
    for column in ("date", "edited", "classified_at"):
        assert full.pop(column).isoformat() == expected.pop(column)
    assert dict(full.pop("scores")) == expected.pop("scores")
    assert json.loads(full.pop("extra")) == expected.pop("extra")
    assert full == expected
    assert (bare["topic"], bare["title"], bare["body"], bare["date"]) == (
        None,
        BARE.title,
        "",
        None,
    )
    assert (other["topic"], other["score"], other["nsfw"], other["body"]) == (
        None,
        None,
        False,
        "",
    )


def test_schema_equals_the_documented_one() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "export.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    types = {
        names.strip(): kind.strip()
        for _, names, kind, *_ in rows
        if kind.strip() in KINDS
    }
    documented = {
        name.strip("` "): kind
        for names, kind in types.items()
        for name in names.split(",")
        if name.strip("` ") not in FURTHER_COLUMNS
    }
    assert list(documented) == list(COLUMNS)
    assert {name: KINDS[kind] for name, kind in documented.items()} == {
        name: TYPES[name] if name != "extra" else pa.string() for name in COLUMNS
    } | {"scores": schema_of(["scores"], parquet=True).field(0).type}


KINDS = {
    "text": pa.string(),
    "whole number": pa.int64(),
    "number": pa.float64(),
    "time": pa.timestamp("us", tz="UTC"),
    "true or false": pa.bool_(),
    "map of text to number": pa.map_(pa.string(), pa.float64()),
}


@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl"])
def test_writes_run_label_set_and_own_columns(tmp_path: Path, form: str) -> None:
    own = {"device": "phone", "=own": 5, "stored_at": "noon"}
    rows = [row(Post(id="1", title="a", run="=monday", extra=own)),
    row(Post(id="t3_x", title="b", run="tuesday")),
            row(Post(id="2", title="c"))]  # fmt: skip
    path = written(
        tmp_path / f"out.{form}",
        rows,
        ("id", "run", "label_set", "device", "=own", "stored_at"),
    )
    assert list(post_ids(path, form)) == ["1", "t3_x", "2"]
    if form == "parquet":
        records: list[dict[str, object]] = pq.read_table(path).to_pylist()
    elif form == "csv":
        with path.open(newline="", encoding="utf-8") as file:
            records = [{key.lstrip("'"): cell.lstrip("'") or None for key, cell in each.items()}
                       for each in csv.DictReader(file)]  # fmt: skip
    else:
        records = list(map(json.loads, path.read_text().splitlines()))
    assert [record["run"] for record in records] == ["=monday", "tuesday", None]
    assert [record["label_set"] for record in records] == [
        label_set(rows[0].found["scores"])
    ] * 3
    assert [record["device"] for record in records] == ["phone", None, None]
    assert [record["stored_at"] for record in records] == ["noon", None, None]
    assert [str(record["=own"]) for record in records] == ["5", "None", "None"]
