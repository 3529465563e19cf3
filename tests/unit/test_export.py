"""Write exports and read them back, without Redis."""

import csv
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feedmill.export.parquet import Parquet, batch_of, schema_of
from feedmill.export.text import COLUMNS, Csv, Jsonl, PostKey, label_set_of
from feedmill.export.writer import STATE_FILE, format_of, purge
from feedmill.reading.rows import ResultRow
from producers import exported
from producers.files import Source
from producers.records import BadRecord
from shared.errors import UserError
from shared.messages import Classification, Post
from tests.support import naming

FORMULAS = ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "'=1", "''=1", "'twas", "\uff1d1", "a=1", "'")


def row(post: Post, entry: str = "1-0", **fields: Any) -> ResultRow:
    found = Classification(
        id=post.id,
        label="food",
        scores={"food": 0.875, "odd, \"label'": 1e-17},
        model="a/model",
        revision=None,
        weights="00",
        fingerprint="f" * 32,
        classified_at=1_700_000_000.123456,
        worker="w",
        device="cpu",
        queued_seconds=0.25,
    )
    stored = json.loads(post.model_dump_json(exclude_defaults=True))
    return ResultRow(entry, found.model_dump(mode="json") | fields, stored)


FULL = Post(
    id="t3_1", topic="a, b", title="=HYPERLINK(1)", body='two\r\nlines "quoted"\rand\nmore', subreddit="Food", score=-5,
    url="https://example.org/?a=1,2", created_utc=1_700_000_000.0, permalink="https://example.org/p",
    edited_utc=1_700_000_001.5, stickied=True, nsfw=True, spoiler=True, extra={"a": [1, None, "ä"]},
)  # fmt: skip
BARE = Post(id="2", title="no url, no topic", permalink="https://example.org/p2")


def written(path: Path, form: Csv | Jsonl, *posts: Post) -> Path:
    writer = form.create(path)
    writer.add([row(post) for post in posts])
    writer.close()
    return path


@pytest.mark.parametrize("form", [Csv(), Csv(has_mark=True), Jsonl()])
def test_reads_back_the_same_posts(tmp_path: Path, form: Csv | Jsonl) -> None:
    path = written(tmp_path / "out", form, FULL, BARE)
    assert list(Source(str(path)).items()) == [FULL, BARE]
    assert [post.id for post in form.posts(path)] == ["t3_1", "2"]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(FORMULAS)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(title=TEXT, body=TEXT, topic=TEXT, post_id=TEXT)
@pytest.mark.parametrize("form", [Csv(), Jsonl()])
def test_any_text_survives_a_round_trip(
    tmp_path: Path, form: Csv | Jsonl, title: str, body: str, topic: str, post_id: str
) -> None:
    post = Post(id=f"x{post_id}", title=f"{title}", body=f"{body}.", topic=topic or None)
    assert list(Source(str(written(tmp_path / "out", form, post, BARE))).items()) == [post, BARE]


@pytest.mark.parametrize("text", FORMULAS)
def test_csv_cells_are_never_formulas(tmp_path: Path, text: str) -> None:
    assert exported.unescape_formula(exported.escape_formula(text)) == text
    post = Post(id=f"{text}1", title=text, body=f"{text}b", topic=text, subreddit=text, url=text, permalink=text)
    path = written(tmp_path / "out.csv", Csv(), post)
    with path.open(newline="", encoding="utf-8") as file:
        _, cells = csv.reader(file)
    for cell in cells:
        assert cell[:1] not in ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d"), cell


def test_csv_keeps_negative_numbers(tmp_path: Path) -> None:
    path = written(tmp_path / "out.csv", Csv(), FULL)
    with path.open(newline="", encoding="utf-8") as file:
        (cells,) = csv.DictReader(file)
    assert (cells["score"], cells["date"]) == ("-5", "2023-11-14T22:13:20+00:00")
    assert (cells["label"], cells["label_score"], cells["revision"]) == ("food", "0.875", "")
    assert json.loads(cells["scores"]) == {"food": 0.875, "odd, \"label'": 1e-17}


def test_jsonl_has_every_column(tmp_path: Path) -> None:
    (line,) = written(tmp_path / "out.jsonl", Jsonl(), BARE).read_text().splitlines()
    record = json.loads(line)
    assert tuple(record) == COLUMNS
    assert (record["topic"], record["score"], record["nsfw"], record["body"]) == (None, None, False, "")


def test_parquet_matches_jsonl(tmp_path: Path) -> None:
    batch = batch_of([row(FULL), row(BARE)])
    assert tuple(batch.schema.names) == COLUMNS
    (line, _) = written(tmp_path / "out.jsonl", Jsonl(), FULL, BARE).read_text().splitlines()
    (full, bare) = batch.to_pylist()
    expected = json.loads(line)
    for column in ("date", "edited", "classified_at"):
        assert full.pop(column).isoformat() == expected.pop(column)
    assert dict(full.pop("scores")) == expected.pop("scores")
    assert json.loads(full.pop("extra")) == expected.pop("extra")
    assert full == expected
    assert (bare["topic"], bare["title"], bare["body"], bare["date"]) == (None, BARE.title, "", None)


CHOSEN = ("label", "id", "title", "scores")


@pytest.mark.parametrize("form", [Csv(CHOSEN), Jsonl(CHOSEN), Parquet(CHOSEN)])
def test_writes_chosen_columns(tmp_path: Path, form: Csv | Jsonl | Parquet) -> None:
    path, copy = tmp_path / "out", tmp_path / "copy"
    writer = form.create(path)
    writer.add([row(Post(id="+1", title="=a")), row(Post(id="2", title="b"))])
    writer.close()
    # Reading and copying take the columns from the file.
    assert format_of(form.name).copy(path, copy, lambda post: post.id == "+1") == 1
    assert list(format_of(form.name).posts(copy)) == [PostKey("+1")]
    if form.name == "parquet":
        (record,) = pq.read_table(copy).to_pylist()
        values = list(record.values())[:3]
    elif form.name == "csv":
        with copy.open(newline="", encoding="utf-8") as file:
            (record,) = csv.DictReader(file)
        values = [exported.unescape_formula(cell) for cell in record.values()][:3]
    else:
        record = json.loads(copy.read_text())
        values = list(record.values())[:3]
    assert (tuple(record), values) == (CHOSEN, ["food", "+1", "=a"])


def test_excel_mark_survives_resuming_and_purging(tmp_path: Path) -> None:
    path, copy = tmp_path / "out.csv", tmp_path / "copy.csv"
    form = format_of("csv", COLUMNS, for_excel=True)
    written(path, form, Post(id="1", title="Käse"))  # type: ignore[arg-type]
    with path.open("ab+") as file:
        file.seek(0, 2)
        writer = Csv(has_mark=True).open(file)
        writer.add([row(Post(id="2", title="b"))])
        writer.close()
    assert format_of("csv").copy(path, copy, lambda post: post.id == "2") == 1
    for each, ids in ((path, ["1", "2"]), (copy, ["2"])):
        assert each.read_bytes().startswith(b"\xef\xbb\xbfid,topic")
        assert each.read_bytes().count(b"\xef\xbb\xbf") == 1
        assert [post.id for post in Source(str(each)).items() if isinstance(post, Post)] == ids


def test_writes_the_latest_possible_date() -> None:
    latest = Post(id="1", title="t", created_utc=253_402_300_799)
    assert batch_of([row(latest)]).column("date")[0].as_py().year == 9999


@pytest.mark.parametrize("name", ["parquet", "csv", "jsonl"])
def test_copies_without_removed_posts(tmp_path: Path, name: str) -> None:
    form = format_of(name)
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    writer = form.create(whole)
    for start in range(0, 20, 5):
        writer.add([row(Post(id=f"={number}", title="a\nb")) for number in range(start, start + 5)])
    writer.close()
    assert form.copy(whole, copy, lambda post: post.id not in ("=3", "=17")) == 18
    assert [post.id for post in form.posts(copy)] == [f"={number}" for number in range(20) if number not in (3, 17)]
    again = tmp_path / "again"
    assert form.copy(copy, again, lambda _: True) == 18
    assert again.read_bytes() == copy.read_bytes()


def test_labels_of_other_files_are_topics(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_bytes(b"id,title,label,scores,permalink\r\n1,'=a,food,{},p\r\n")
    (post,) = Source(str(path)).items()
    assert isinstance(post, Post)
    assert (post.topic, post.title, post.url) == ("food", "'=a", "p")


def test_reads_exports_of_earlier_versions(tmp_path: Path) -> None:
    """Their columns had capital letters."""
    path = written(tmp_path / "out.csv", Csv(), FULL)
    header, rest = path.read_bytes().split(b"\r\n", 1)
    path.write_bytes(header.title() + b"\r\n" + rest)
    assert list(Source(str(path)).items()) == [FULL]


def test_reports_a_row_with_an_invalid_date(tmp_path: Path) -> None:
    path = written(tmp_path / "out.jsonl", Jsonl(), FULL, BARE)
    path.write_text(path.read_text().replace('"date":"2023-', '"date":"about 2023-', 1))
    bad, good = Source(str(path)).items()
    assert isinstance(bad, BadRecord)
    assert bad.reason.startswith("created_utc: ")
    assert good == BARE


def test_schema_equals_the_documented_one() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "export.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    types = {names.strip(): kind.strip() for _, names, kind, *_ in rows if kind.strip() in KINDS}
    documented = {name.strip("` "): kind for names, kind in types.items() for name in names.split(",")}
    assert list(documented) == list(COLUMNS)
    assert {name: KINDS[kind] for name, kind in documented.items()} == {
        field.name: field.type for field in schema_of(COLUMNS)
    }


KINDS = {
    "text": pa.string(),
    "whole number": pa.int64(),
    "number": pa.float64(),
    "time": pa.timestamp("us", tz="UTC"),
    "true or false": pa.bool_(),
    "map of text to number": pa.map_(pa.string(), pa.float64()),
}


def test_refuses_to_purge_an_export_with_damaged_state(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text("{")
    with pytest.raises(UserError, match=naming(STATE_FILE)):
        purge(tmp_path, Mock())


@pytest.mark.parametrize("name", ["parquet", "csv", "jsonl"])
def test_writes_run_label_set_and_own_columns(tmp_path: Path, name: str) -> None:
    columns = ("id", "run", "label_set", "device", "=own")
    form, path = format_of(name, columns), tmp_path / "out"
    writer = form.create(path)
    writer.add([row(Post(id="1", title="a", run="=monday", extra={"device": "phone", "=own": 5}))])
    writer.add([row(Post(id="t3_x", title="b", run="tuesday")), row(Post(id="2", title="c"))])
    writer.close()
    assert list(format_of(name).posts(path)) == [PostKey("1", "=monday"), PostKey("t3_x", "tuesday"), PostKey("2")]
    if name == "parquet":
        records: list[dict[str, object]] = pq.read_table(path).to_pylist()
    elif name == "csv":
        with path.open(newline="", encoding="utf-8") as file:
            records = [{key.lstrip("'"): cell.lstrip("'") or None for key, cell in each.items()}
                       for each in csv.DictReader(file)]  # fmt: skip
    else:
        records = list(map(json.loads, path.read_text().splitlines()))
    assert [record["run"] for record in records] == ["=monday", "tuesday", None]
    scored = label_set_of(row(Post(id="1", title="a")).found)
    assert [record["label_set"] for record in records] == [scored] * 3
    assert [record["device"] for record in records] == ["phone", None, None]
    assert [str(record["=own"]) for record in records] == ["5", "None", "None"]
