"""User errors that commands report before they connect to Redis or load a model."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, BytesIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import feedmill.exporting
from feedmill.cli import deletions, main, offline, options
from feedmill.cli.main import application
from feedmill.evaluation import measure
from feedmill.shared import logs
from feedmill.shared.errors import (
    DeviceLost,
    FeedmillError,
    InputError,
    RequestRefused,
    UserError,
    explain_refusals,
)
from feedmill.shared.messages import Classification, Post, PostError
from feedmill.shared.settings import STACK_FILE
from tests.support import naming

#: User id that owns no file.
NOBODY = 65534
POST = '{"id": "a", "title": "A title", "topic": "food"}\n'


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files in the working folder, and a stand-in for the model of `feedmill evaluate`."""
    label_set = SimpleNamespace(labels=["tea", "coffee"])
    monkeypatch.setattr(
        measure, "load_model", lambda _: Mock(label_set=lambda _: label_set)
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    for name, text in (
        ("posts.jsonl", POST),
        ("bad.jsonl", '{"id": 1}\n'),
        ("full/thesis.txt", "a text\n"),
    ):
        (tmp_path / name).write_text(text)
    # of a killed `up`
    (tmp_path / "full" / STACK_FILE).write_text(
        '{"redis_url": "redis://127.0.0.1:1/0"}'
    )


@pytest.fixture
def quiet(files: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001 - the files
    monkeypatch.setattr(logs, "configure", lambda *_, **__: None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "enqueue posts.csv --limti 3",
            ["Try 'feedmill enqueue --help'", "--limti", "--limit"],
        ),
        ("classify", ["TEXT|FILE"]),
        ("results --limit x", ["--limit", "integer"]),
        ("classify x --limit 0", ["--limit"]),
        ("health --check nonsense", ["--check", "'nonsense'", "'redis'"]),
        ("nonsense", ["nonsense"]),
        ("flower --port 99999", ["--port"]),
        ("results --limit 1 --redis-url here", ["feedmill: --redis-url: "]),
        ("enqueue - --posts-per-message 0", ["feedmill: --posts-per-message: "]),
        ("enqueue - --template x", ["--template: ", "'x'"]),
        ("enqueue - --labels a,a", ["--labels: ", "'a'"]),
        ('enqueue - --labels {"a":"b"', ["--labels: ", "JSON", "column 9"]),
        ("url --data-folder full", ["full", "FEEDMILL_REDIS_URL is not set"]),
        ("enqueue - --since yesterday", ["--since", "'yesterday'"]),
        (
            "enqueue - --since 2024-02-01 --until 2024-01-01",
            ["--since", "2024-02-01", "2024-01-01"],
        ),
        ("results --from-start", ["--from-start needs --group."]),
        # Defaults that are typed.
        ("ingest reddit --listing hot", ["--listing needs --once."]),
        ("ingest reddit --period all", ["--period needs --once."]),
        (
            "ingest reddit --once --source reddit",
            ["--once cannot be combined with --source."],
        ),
        ("export x --purge --follow", ["--purge cannot be combined with --follow."]),
        ("export postgresql://host/database --columns id,label", ["--columns"]),
        (
            "export labels.csv --table labels",
            ["--table", "postgresql://user@host/database"],
        ),
        ("enqueue x --no-run --wait", ["--no-run cannot be combined with --wait."]),
        ("purge --run x a", ["--run cannot be combined with ID."]),
        ("purge", ["ids", "--run"]),
        ("train --from x --out y --head --epochs 3", ["--head", "--epochs"]),
        ("train --from x --out y --test-share nan", ["--test-share"]),
        ("train --from x --out y --split size", ["--split", "size"]),
        ("train --from x --out y --batch-size 0", ["--batch-size"]),
        ("train --from posts.jsonl --out full", ["/full is not empty"]),
        ("train --from no.csv --out y", ["no.csv"]),
        (f"train --from {'x' * 300}.csv --out y", ["File name too long"]),
        ("classify missing --out out.csv", ["There is no file missing"]),
        (
            "report no/report.html",
            ["Cannot write no/report.html: there is no folder no"],
        ),
        ("train --from no.csv --out y --head", ["no.csv"]),
        ("tune bad.jsonl", ["bad.jsonl"]),
        ("evaluate /no/such/file", ["/no/such/file"]),
        ("evaluate full/thesis.txt", ["topic"]),
        ("evaluate posts.jsonl", ["topics: food; labels: tea, coffee"]),
        ("classify full --out out.csv", ["full is a folder"]),
        ("classify posts.jsonl --scores", ["--scores", "--out"]),
        ("worker --devices cpu:0", ["--devices: ", "'cpu:0'"]),
        ("worker --devices cpu:9999", ["FEEDMILL_DEVICES: cpu:9999"]),
        ("worker --devices 2,", ["--devices: ", "'2,'"]),
        ("worker --devices cpu --device cpu", ["--devices: ", "FEEDMILL_DEVICE"]),
        ("ingest bluesky --bluesky-languages english", ["--bluesky-languages"]),
        ("ingest bluesky --bluesky-min-characters 0", ["--bluesky-min-characters"]),
        ("ingest live nosuchmodule:Thing", ["nosuchmodule"]),
        ("ingest live json:Thing", ["Thing"]),
        ("ingest live json", ["MODULE:CLASS"]),
        ("up --data-folder posts.jsonl", ["posts.jsonl: File exists"]),
        ("FEEDMILL_REDIS_URL=redis://127.0.0.1:1/0 up", ["Unset it"]),
    ],
)
@pytest.mark.usefixtures("files")
def test_wrong_arguments_end_with_status_2_and_name_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    words: list[str],
) -> None:
    command, before = arguments.split(), set(Path.cwd().rglob("*"))
    if "=" in command[0]:
        monkeypatch.setenv(*command.pop(0).split("=", 1))
    monkeypatch.setattr(sys, "argv", ["feedmill", *command])
    with pytest.raises(SystemExit) as end:
        main.run()
    captured = capsys.readouterr()
    assert (end.value.code, captured.out) == (2, "")
    assert all(word in captured.err for word in words), captured.err
    assert "Traceback" not in captured.err
    assert set(Path.cwd().rglob("*")) == before


def test_help_lists_every_command_and_fits_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    root: Any = get_command(application())
    for arguments in ([], *[[name] for name in root.commands]):
        monkeypatch.setattr(sys, "argv", ["feedmill", *arguments, "-h"])
        with pytest.raises(SystemExit):
            main.run()
        said = capsys.readouterr().out
        assert max(map(len, said.splitlines())) <= 80
        assert arguments or all(f"│ {name} " in said for name in root.commands)
        assert arguments or "─ Commands ─" not in said, (
            "every command belongs to a panel"
        )


@pytest.mark.usefixtures("quiet")
def test_url_is_that_of_the_setting() -> None:
    done = CliRunner().invoke(
        application(), ["url"], env={"FEEDMILL_REDIS_URL": "redis://there/0"}
    )
    assert (done.exit_code, done.stdout) == (0, "redis://there/0\n")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16-le-mark", "utf-16"])
def test_ids_are_read_in_the_encodings_of_windows(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    ids = "a1\r\n\r\n é2 \r\na3"
    data = (
        b"\xff\xfe" + ids.encode("utf-16-le")
        if encoding == "utf-16-le-mark"
        else ids.encode(encoding)
    )
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BufferedReader(BytesIO(data))))
    assert list(deletions._stdin_lines()) == ["a1", "é2", "a3"]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        ("feedmill.monitoring.dashboard", "flower", ["Flower", "feedmill[monitor]"]),
        (
            "psycopg",
            "export postgresql://host/database",
            ["psycopg", "feedmill[postgres]"],
        ),
        ("feedmill.workers.pipeline", "classify word", ["workers", "feedmill[worker]"]),
        (
            "accelerate",
            "train --from x --out out",
            ["accelerate", "`pip install 'feedmill[worker,train]'`"],
        ),
    ],
)
def test_missing_packages_name_their_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, arguments: str, words: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "feedmill.exporting.postgres", raising=False)
    monkeypatch.delattr(feedmill.exporting, "postgres", raising=False)
    said = CliRunner().invoke(application(), arguments.split()).exception
    assert isinstance(said, UserError)
    assert re.search(naming(*words), str(said))


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("data", "named", "status"),
    [("foo,bar\n1,2\n", "foo, bar", None), ("nope\n{}\n", "posts.jsonl:1: ", 1)],
)
def test_rejects_a_file_without_posts_before_loading_a_model(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    data: str,
    named: str,
    status: int | None,
) -> None:
    monkeypatch.setattr(offline, "load_offline", Mock(side_effect=AssertionError))
    (tmp_path / "posts.jsonl").write_text(data)
    done = CliRunner().invoke(application(), ["classify", "posts.jsonl"])
    assert named in f"{done.stderr}{done.exception}"
    assert getattr(done.exception, "code", None) == status


@pytest.mark.usefixtures("quiet")
def test_file_that_cannot_be_found_for_other_reasons_is_no_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(offline, "load_offline", Mock(side_effect=AssertionError))
    (tmp_path / "loop").symlink_to("loop")
    done = CliRunner().invoke(application(), ["classify", "loop/posts.csv"])
    assert isinstance(done.exception, InputError)
    assert str(done.exception).startswith("Cannot read loop/posts.csv: ")


@contextmanager
def unprivileged() -> Iterator[None]:
    """Give up root's right to read every folder."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.usefixtures("quiet")
def test_file_in_a_folder_without_access_is_no_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(offline, "load_offline", Mock(side_effect=AssertionError))
    folder = tmp_path / "private"
    folder.mkdir(mode=0)
    command = ["classify", "private/posts.csv"]
    try:
        with unprivileged():
            done = CliRunner().invoke(application(), command)
    finally:
        folder.chmod(0o700)
    assert isinstance(done.exception, InputError)
    assert str(done.exception).startswith("Cannot read private/posts.csv: ")


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("text", [f"{'either' * 50}/or", "black/white\0"])
def test_word_that_names_no_file_is_a_text(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    load = Mock(side_effect=UserError("loaded"))
    monkeypatch.setattr(offline, "load_offline", load)
    done = CliRunner().invoke(application(), ["classify", text])
    assert str(done.exception) == "loaded"


def test_classify_prints_complete_ids(capsys: pytest.CaptureFixture[str]) -> None:
    """Users look up results by these ids."""
    best = Mock(spec=Classification, label="food", scores={"food": 0.5})
    ids = ["1", f"text-{'a' * 32}", "2", "b" * 128]
    posts = [Post(id=post_id, title="Bread") for post_id in ids]
    outcomes: list[Any] = [best, best, PostError(id="2", error="why"), best]
    numbers = offline._show_posts(zip(posts, outcomes, strict=True), as_json=False)
    assert numbers == offline.Shown(posts=4, failures=1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines] == ids
    shown = [line.partition(" ")[2].lstrip() for line in lines]
    assert [shown[place] for place in (0, 1, 3)] == [f"{'food 0.50':<48} Bread"] * 3
    assert shown[2].endswith("why")


@pytest.mark.parametrize(
    ("labels", "warned"),
    [("praise", True), ('["praise"]', True), ("a,b", False), (None, False)],
)
def test_warns_about_a_single_label(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    labels: str | None,
    warned: bool,
) -> None:
    monkeypatch.setattr(logs, "configure", lambda *_, **__: None)
    options.load_for_command(labels=labels)
    assert ("only one label" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (RequestRefused("labels: too many"), "labels: too many"),
        (DeviceLost("CUDA error"), "CUDA error"),
    ],
)
def test_model_failures_are_user_errors(fault: FeedmillError, named: str) -> None:
    with pytest.raises(UserError, match=named), explain_refusals("some/model"):
        raise fault
