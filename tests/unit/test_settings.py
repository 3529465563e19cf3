"""shared/settings.py: where values come from, and what a bad one is answered with."""

import json
from pathlib import Path

import pytest

from shared.errors import SettingsError
from shared.settings import LOCK_FILE, STACK_FILE, Settings, load, unknown_variables
from tests.support import announced


def test_flags_go_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDMILL_TOKEN_BUDGET", "100")
    assert load().token_budget == 100
    assert load(token_budget=200).token_budget == 200
    assert load(token_budget=None).token_budget == 100


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("FEEDMILL_TOKEN_BUDGET", "many", "FEEDMILL_TOKEN_BUDGET: input should be a valid integer"),
        ("FEEDMILL_DTYPE", "fp8", "FEEDMILL_DTYPE: input should be 'auto', 'float32', 'bfloat16', 'float16' or 'int8'"),
        ("FEEDMILL_DEVICE", "gpu", "FEEDMILL_DEVICE: should be auto, cpu, cuda, cuda:N or mps, not 'gpu'."),
        ("FEEDMILL_DEVICE", "cuda:", "FEEDMILL_DEVICE: should be auto, cpu, "),
        (
            "FEEDMILL_DEVICES",
            "0,",
            "FEEDMILL_DEVICES: should be all, GPU numbers such as 0,2, cpu or cpu:N, not '0,'.",
        ),
        ("FEEDMILL_DEVICES", "1,1", "FEEDMILL_DEVICES: lists GPU 1 "),
        ("FEEDMILL_QUEUE", "my queue", "FEEDMILL_QUEUE: should be 1 to 64 letters, digits, dots, dashes or "),
        ("FEEDMILL_REVISION", "a b", "FEEDMILL_REVISION: should be a branch, tag or commit, not 'a b'."),
        ("FEEDMILL_LABELS", "a,a", "FEEDMILL_LABELS: the label 'a' is named twice"),
        ("FEEDMILL_LABELS", '["a', "FEEDMILL_LABELS: invalid JSON: "),
        ("FEEDMILL_LABELS", "[" * 100_000, "FEEDMILL_LABELS: invalid JSON: "),
        ("FEEDMILL_LABELS", '{"a": ""}', "FEEDMILL_LABELS: a.0: string should have at least 1 character"),
        ("FEEDMILL_TEMPLATE", "x", "FEEDMILL_TEMPLATE: must contain {}"),
        ("FEEDMILL_REDIS_URL", "http://host", "FEEDMILL_REDIS_URL: must look like redis://"),
        ("FEEDMILL_REDIS_URL", "redis://:s3cret/x@host:6379/0", "FEEDMILL_REDIS_URL: must look like redis://"),
        ("FEEDMILL_REDIS_URL", "redis://:s3cret@host:abc/0", "FEEDMILL_REDIS_URL: must look like redis://"),
        ("FEEDMILL_REDIS_URL", "redis://:s3cret@host:6379/zero", "FEEDMILL_REDIS_URL: must look like redis://"),
        ("FEEDMILL_DRAIN", "0", "FEEDMILL_DRAIN: "),
    ],
)
def test_a_bad_value_names_the_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as error:
        load()
    assert str(error.value).startswith(words)
    assert "s3cret" not in str(error.value)


def test_a_data_folder_is_meant_from_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(data_folder="mill").data_folder == tmp_path / "mill"


def test_a_bad_flag_is_named_as_a_flag() -> None:
    with pytest.raises(SettingsError, match="^--posts-per-message: "):
        load(posts_per_message=0)
    with pytest.raises(SettingsError, match="^--labels: .* column 10.$"):
        load(labels='{"a": "b"')


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("a, b", {"a": ("a",), "b": ("b",)}),
        ("5", {"5": ("5",)}),
        ('["a, b", "c"]', {"a, b": ("a, b",), "c": ("c",)}),
        ('{"film": "movies, television"}', {"film": ("movies, television",)}),
    ],
)
def test_labels(monkeypatch: pytest.MonkeyPatch, text: str, labels: dict[str, tuple[str]]) -> None:
    assert load().labels is None
    assert load(labels=text).labels == labels
    monkeypatch.setenv("FEEDMILL_LABELS", text)
    assert load().labels == labels


def test_variables_that_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(unknown_variables()) == []
    monkeypatch.setenv("FEEDMILL_MODLE", "x")
    monkeypatch.setenv("FEEDMILL_XYZZY", "x")
    assert list(unknown_variables()) == [
        "FEEDMILL_MODLE is not a setting and is ignored; did you mean FEEDMILL_MODEL?",
        "FEEDMILL_XYZZY is not a setting and is ignored",
    ]


def test_the_password_is_never_shown() -> None:
    settings = Settings.model_validate({"redis_url": "redis://:hunter2@example.org:7000/3"})
    assert "hunter2" not in repr(settings) + str(settings) + settings.model_dump_json()
    assert settings.redis_address == "example.org:7000/3"
    assert "hunter2" in settings.broker_url


def test_a_running_stack_is_found(tmp_path: Path) -> None:
    settings = Settings.model_validate({"data_folder": tmp_path})
    assert settings.broker_url == "redis://127.0.0.1:6379/0"
    with announced(tmp_path, json.dumps({"redis_url": "redis://:p@127.0.0.1:1/0"})) as file:
        assert settings.broker_url == "redis://:p@127.0.0.1:1/0"
        file.write_text("{")
        with pytest.raises(SettingsError, match=STACK_FILE):
            _ = settings.broker_url


def test_ignores_the_address_of_a_killed_stack(tmp_path: Path) -> None:
    settings = Settings.model_validate({"data_folder": tmp_path})
    with announced(tmp_path, json.dumps({"redis_url": "redis://:p@127.0.0.1:1/0"})):
        pass
    assert settings.broker_url == "redis://127.0.0.1:6379/0"


def test_a_lock_that_cannot_be_read_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(SettingsError, match=f"{LOCK_FILE} cannot be read"):
        _ = Settings.model_validate({"data_folder": tmp_path}).broker_url
