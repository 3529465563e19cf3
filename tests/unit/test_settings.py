"""shared/settings.py: sources of values, and errors of invalid ones."""

import json
from pathlib import Path

import pytest

from feedmill.shared.errors import SettingsError
from feedmill.shared.settings import (
    LOCK_FILE,
    STACK_FILE,
    Settings,
    load,
    unknown_variables,
)
from tests.support import announced, naming


def test_flags_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDMILL_TOKEN_BUDGET", "100")
    assert load().token_budget == 100
    assert load(token_budget=200).token_budget == 200
    assert load(token_budget=None).token_budget == 100


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("FEEDMILL_TOKEN_BUDGET", "many", ("integer",)),
        (
            "FEEDMILL_DTYPE",
            "fp8",
            ("'auto', 'float32', 'bfloat16', 'float16' or 'int8'",),
        ),
        ("FEEDMILL_DEVICE", "gpu", ("cuda:N", "'gpu'")),
        ("FEEDMILL_LABELS", "a,a", ("'a'",)),
        ("FEEDMILL_LABELS", "a,,b", ("a label is empty",)),
        ("FEEDMILL_LABELS", '["a', ("JSON", "Unterminated string")),
        ("FEEDMILL_TEMPLATE", "x", ("{}",)),
        ("FEEDMILL_REDIS_URL", "redis://:s3cret/x@host:6379/0", ("redis://",)),
        ("FEEDMILL_REDIS_URL", "redis://:s3cret@host:abc/0", ("redis://",)),
        ("FEEDMILL_RESULTS_MEMORY", "1MB", ("10000000",)),
    ],
)
def test_invalid_value_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, named: tuple[str, ...]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=naming(*named)) as error:
        load()
    assert str(error.value).startswith(f"{name}: ")
    assert "s3cret" not in str(error.value)


PRAISE = {"praise": ("thanks, applause", "good"), "Kritik – 1": ("Kritik – 1",)}


AB = {"a": ("a",), "b": ("b",)}
SHAPES_OF_AB = [
    '{"labels": ["a", "b"]}',
    '{"labels": "a, b"}',
    '{"candidate_labels": ["a", "b"]}',
    '{"Labels": ["a", "b"]}',
    '{"0": "a", "1": "b"}',
    '{"1": "b", "0": "a"}',
    '{"a": 0, "b": 1}',
    '{"b": 1, "a": 0}',
    '{"label2id": {"a": 0, "b": 1}}',
    '{"id2label": {"0": "a", "1": "b"}, "model_type": "bert", "num_labels": 2}',
    '[{"label": "a"}, {"label": "b"}]',
    '[{"id": 0, "name": "a"}, {"id": 1, "name": "b"}]',
    '{"a": null, "b": ""}',
]


@pytest.mark.parametrize(
    ("name", "text", "labels"),
    [
        ("a, b", None, {"a": ("a",), "b": ("b",)}),
        ("5", None, {"5": ("5",)}),
        ('["a, b", "c"]', None, {"a, b": ("a, b",), "c": ("c",)}),
        ('{"film": "movies, television"}', None, {"film": ("movies, television",)}),
        ("a.json, b.txt", None, {"a.json": ("a.json",), "b.txt": ("b.txt",)}),
        ("mail@home", None, {"mail@home": ("mail@home",)}),
        ("a.b", None, {"a.b": ("a.b",)}),
        ("labels.json", '["a, b", "c"]', {"a, b": ("a, b",), "c": ("c",)}),
        ("my labels.json", "\ufeff" + json.dumps({"a": "b"}), {"a": ("b",)}),
        ("@labels", json.dumps({"a": "b"}), {"a": ("b",)}),
        ("@a,b.json", '["a"]', {"a": ("a",)}),
        ("labels.txt", "a, b\r\n\n  c \n", {"a, b": ("a, b",), "c": ("c",)}),
        (
            "labels.csv",
            'Label,Description,More\npraise,"thanks, applause",good\nKritik – 1,,\n',
            PRAISE,
        ),
        ("labels.csv", "praise;thanks, applause;good\nKritik – 1\n", PRAISE),
        *((shape, None, AB) for shape in SHAPES_OF_AB),
        *(("labels.json", shape, AB) for shape in SHAPES_OF_AB),
        (
            "labels.json",
            '{"labels": {"a": "x", "b": null}}',
            {"a": ("x",), "b": ("b",)},
        ),
        (
            "labels.json",
            '[{"label": "a", "description": "x"}, {"label": "b"}]',
            {"a": ("x",), "b": ("b",)},
        ),
        (
            "labels.json",
            '{"a": {"id": 0, "descriptions": ["x", "y"]}}',
            {"a": ("x", "y")},
        ),
        (
            "labels.json",
            '{"1": ["terrible"], "5": ["excellent"]}',
            {"1": ("terrible",), "5": ("excellent",)},
        ),
        ("labels.json", "[1, 2, true]", {name: (name,) for name in ("1", "2", "true")}),
        ("labels.csv", "id,label\n0,a\n1,b\n", AB),
        ("labels.csv", "0,a\n1,b\n", AB),
        ("labels.csv", "a,0\nb,1\n", AB),
        ("labels.csv", "label,id\na,7\nb,9\n", AB),
        (
            "labels.csv",
            "id;name;description\n1;a;x\n2;b;\n",
            {"a": ("x",), "b": ("b",)},
        ),
        ("labels.csv", "a;b\n", AB),
        (
            "labels.csv",
            "sep=;\r\nlabel;description\r\na;x\r\nb;y\r\n",
            {"a": ("x",), "b": ("y",)},
        ),
        (
            "labels.csv",
            'label,description\na,"x\ny, z"\nb,\n',
            {"a": ("x\ny, z",), "b": ("b",)},
        ),
        ("labels.csv", "category,description\na,x\nb,y\n", {"a": ("x",), "b": ("y",)}),
        ("labels.csv", "label,share\na,0.5\nb,0.25\n", AB),
        ("@labels.tsv", "label\tdescription\na\tx\nb\t\n", {"a": ("x",), "b": ("b",)}),
        ("labels.csv", "a,12%\nb,88%\n", AB),
        ("labels.txt", "a, b\n", AB),
    ],
)
def test_reads_labels_from_text_json_or_a_file(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    text: str | None,
    labels: dict[str, tuple[str]],
) -> None:
    """Names with dots or an @ may be labels."""
    if text is not None:
        (tmp_path / name.removeprefix("@")).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert load(labels=name).labels == labels
    monkeypatch.setenv("FEEDMILL_LABELS", f" {name}")
    assert load().labels == labels


#: Shapes without labels, and shapes that can be meant in two ways.
REFUSED_SHAPES = [
    b"null", b"1", b"[]", b"{}", b"[null]", b"[1.5]", b'[["a", "b"]]', b'{"labels": []}',
    b'{"labels": null}',
    b'{"labels": ["a", "b"], "template": "about {}"}', b'{"1": "terrible", "5": "excellent"}',
    b'{"a": 0, "b": 2}',
    b'{"a": 0.5, "b": 0.5}', b'{"a": {"colour": "red"}}', b'[{"text": "a post", "label": "a"}]',
    b'[{"a": "x"}]',
    b'{"a": [1]}', b'{"data": [{"label": "a"}]}', b'{"id2label": ["a", "b"]}',
    b'{"names": ["a", "b"]}',
    b'{"Topics": ["a", "b"]}', b'{"label": ["a", "b"]}', b'{"0": "a", "00": "b"}',
]  # fmt: skip


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("labels.txt", "ä\nb"),
        ("labels.csv", "label\nä\nb"),
        ("labels.json", '["ä", "b"]'),
    ],
)
def test_reads_label_files_with_a_byte_order_mark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, text: str, encoding: str
) -> None:
    marked = text if encoding in ("utf-16", "utf-8-sig") else f"\ufeff{text}"
    (tmp_path / name).write_text(marked, encoding=encoding)
    monkeypatch.chdir(tmp_path)
    assert load(labels=name).labels == {"ä": ("ä",), "b": ("b",)}


@pytest.mark.parametrize(
    ("name", "data", "named"),
    [
        ("missing.json", None, "no file missing.json"),
        ("@x\0", None, "cannot be read"),
        ("labels.json", b'{"a": ', "labels.json.*JSON"),
        ("labels.txt", b"caf\xe9", "labels.txt.*utf-8"),
        ("labels.csv", b"label,description\na,b\na,c\n", "'a' is named twice"),
        ("labels.txt", b"x" * (2**20 + 1), "labels.txt.*1,048,576"),
        ("labels.txt", "a\nb\n".encode("utf-16-le"), "labels.txt.*null characters"),
        ("labels.txt", "a\nb\n".encode("utf-32"), "labels.txt.*null characters"),
        ("labels.csv", b"colour,label\nred,a\n", "labels.csv.*'colour'"),
        ("labels.csv", b"name,label\nx,a\ny,b\n", "labels.csv.*2 columns of labels"),
        ("labels.csv", b'"a\nb\n', "labels.csv.*not CSV"),
        # A process that has read posts takes larger cells; then the name is too long.
        (
            "labels.csv",
            b"x" * 200_000 + b"\nb\n",
            ("labels.csv.*not CSV in line 1|at most 200 characters"),
        ),
        ("labels.tsv", b"a\tx\nb\ty\n", "labels.tsv is a file.*@labels.tsv"),
        ("labels.json", b'{"a": "x", "a": "y"}', "'a' is named twice"),
        *(
            ("labels.json", shape, r'labels.json.*\["sports", "food"\].*"sports": ')
            for shape in REFUSED_SHAPES
        ),
    ],
)
def test_rejects_unreadable_label_files(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    data: bytes | None,
    named: str,
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=f"^--labels: .*{named}"):
        load(labels=name)


def test_finds_unknown_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(unknown_variables()) == []
    monkeypatch.setenv("FEEDMILL_MODLE", "x")
    monkeypatch.setenv("FEEDMILL_XYZZY", "x")
    misspelt, unknown = unknown_variables()
    assert "FEEDMILL_MODLE" in misspelt
    assert "FEEDMILL_XYZZY" in unknown


def test_masks_passwords() -> None:
    settings = Settings.model_validate(
        {"redis_url": "redis://:hunter2@example.org:7000/3"}
    )
    assert "hunter2" not in repr(settings) + str(settings) + settings.model_dump_json()
    assert settings.redis_address == "example.org:7000/3"
    assert "hunter2" in settings.broker_url


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("valkey://:p@host:7000/3", "redis://:p@host:7000/3"),
        (" valkeys://host ", "rediss://host"),
    ],
)
def test_takes_valkey_addresses(given: str, used: str) -> None:
    assert Settings.model_validate({"redis_url": given}).broker_url == used


def test_finds_a_running_stack(tmp_path: Path) -> None:
    settings, later = (
        Settings.model_validate({"data_folder": tmp_path}) for _ in range(2)
    )
    assert settings.broker_url == "redis://127.0.0.1:6379/0"
    with announced(
        tmp_path, json.dumps({"redis_url": "redis://:p@127.0.0.1:1/0"})
    ) as file:
        assert settings.broker_url == "redis://:p@127.0.0.1:1/0"
        assert (
            Settings(data_folder=tmp_path, redis_url="redis://a/0").broker_url
            == "redis://a/0"
        )
        file.write_text("{")
        with pytest.raises(SettingsError, match=STACK_FILE):
            _ = later.broker_url
        file.unlink()  # it is starting, and another Redis may listen on localhost's port
        with pytest.raises(SettingsError, match=naming(tmp_path)):
            _ = later.broker_url
        # A command that runs on names the Redis that it is connected to, while the stack is
        # restarted and afterwards.
        assert settings.redis_address == "127.0.0.1:1/0"
    assert settings.redis_address == "127.0.0.1:1/0"
    assert later.redis_address == "127.0.0.1:6379/0"
    assert settings == later, "of which `classify_task` keeps one sender"
    assert ":p@" not in repr(settings) + settings.model_dump_json()


def test_rejects_an_unreadable_lock(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(SettingsError, match=naming(tmp_path)):
        _ = Settings.model_validate({"data_folder": tmp_path}).broker_url


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host",
        "http://u:hidden@host",
        "http://host?token=hidden",
        "host",
        "http://",
    ],
)
def test_rejects_addresses_of_servers_without_quoting_secrets(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEEDMILL_REDDIT_URL", url)
    with pytest.raises(SettingsError) as refused:
        load()
    assert "FEEDMILL_REDDIT_URL" in str(refused.value)
    assert "hidden" not in str(refused.value)
