"""workers/hub.py: models come from a hub as they would from the real one, each `locate` in a process of its own."""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast

from shared.errors import ModelError
from tests.fakes.hub import Hub
from workers import hub as hub_module
from workers.hub import Progress, Repository

NAME = "someone/small-bert"
TOKEN = "hf_thisIsASecretOfMine"
#: What huggingface_hub asks for once a day, for its User-Agent.
AGENTS = "/api/agent-harnesses"
#: huggingface_hub reads its settings when it is imported, so that a process of its own is how it is used.
SCRIPT = """
import json, logging, sys
logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
from shared.errors import ModelError
from workers import hub
from workers.weights import locate, parameters
hub.LOG_INTERVAL_S, hub.constants.DOWNLOAD_CHUNK_SIZE = 1e-9, 50_000
try:
    found = locate(sys.argv[1], **json.loads(sys.argv[2]))
except ModelError as error:
    answer = {"error": str(error)}
else:
    answer = {"error": None, "folder": str(found.folder), "revision": found.revision, "sha256": found.sha256,
              "files": [file.name for file in found.files], "parameters": parameters(found)}
print(json.dumps(answer))
"""


class Located(NamedTuple):
    """What `locate` gave, or its sentence, and what was logged meanwhile."""

    error: str | None
    log: str
    folder: Path
    revision: str
    sha256: str
    files: list[str]
    parameters: int


Locate = Callable[..., Located]


@pytest.fixture
def locate(tmp_path: Path) -> Locate:
    """`locate` with a cache of the test's own."""

    def run(hub: Hub | str, model: str = NAME, environment: dict[str, str] | None = None, **options: Any) -> Located:
        outside = re.compile(r"HF_|FEEDMILL_|.*_proxy$", re.IGNORECASE)
        kept = {name: value for name, value in os.environ.items() if not outside.match(name)}
        ours = {"HF_ENDPOINT": hub if isinstance(hub, str) else hub.url, "HF_HOME": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, model, json.dumps(options)],
            env=kept | ours | (environment or {}),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == 0, done.stderr
        assert TOKEN not in done.stdout + done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        if found["error"]:
            return Located(found["error"], done.stderr, Path(), "", "", [], 0)
        return Located(log=done.stderr, **found | {"folder": Path(found["folder"])})

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that a sentence-transformers repository could hold, with all that is not to be downloaded."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(7)
    words = ["[PAD]", "[UNK]", *(f"word{number}" for number in range(500))]
    BertModel(
        BertConfig(
            vocab_size=len(words), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
        )
    ).save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")  # type: ignore[no-untyped-call]
    fast.save_pretrained(path)
    for part in ("1_Pooling", "2_Dense", "onnx", "openvino"):
        (path / part).mkdir()
    (path / "modules.json").write_text("[]")
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (path / "2_Dense" / "config.json").write_text("{}")
    save_file({"linear.weight": torch.zeros(8, 64)}, path / "2_Dense" / "model.safetensors")
    for unwanted in ("pytorch_model.bin", "2_Dense/pytorch_model.bin", "modeling_own.py", "tf_model.h5", "README.md"):
        (path / unwanted).write_bytes(b"unwanted")
    for unwanted in ("onnx/model.onnx", "onnx/config.json", "openvino/openvino_model.bin", "model.fp16.safetensors"):
        (path / unwanted).write_bytes(b"unwanted")
    return path


WANTED = {
    *("config.json", "tokenizer.json", "tokenizer_config.json", "modules.json", "model.safetensors"),
    *("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"),
}


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    with Hub({NAME: folder}) as running:
        yield running


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def variant(folder: Path, into: Path, **files: bytes | None) -> Path:
    """A copy of the model with some files, named with _ for . and /, given another content, or none."""
    shutil.copytree(folder, into)
    for name, content in files.items():
        path = into / name.replace("__", "/").replace("_DOT_", ".")
        path.unlink() if content is None else path.write_bytes(content)
    return into


def test_a_model_is_downloaded_and_loads(hub: Hub, locate: Locate, folder: Path, tmp_path: Path) -> None:
    found = locate(hub)
    assert found.error is None
    assert found.revision == hub.commit(NAME)
    assert found.folder.is_relative_to(tmp_path / "cache")
    assert (found.files, found.sha256) == (["model.safetensors"], sha256(folder / "model.safetensors"))
    model = AutoModel.from_pretrained(found.folder, local_files_only=True, use_safetensors=True)
    assert found.parameters == sum(tensor.numel() for tensor in model.state_dict().values())
    assert AutoTokenizer.from_pretrained(found.folder, local_files_only=True)("word7 word8").input_ids == [9, 10]


def test_only_what_is_needed_is_asked_for(hub: Hub, locate: Locate) -> None:
    locate(hub)
    assert hub.files_asked() == WANTED
    locate(hub, remote_code=True)
    assert hub.files_asked() == WANTED | {"modeling_own.py"}


def test_a_second_time_no_file_is_asked_for(hub: Hub, locate: Locate) -> None:
    first = locate(hub)
    hub.requests.clear()
    second = locate(hub)
    assert second._replace(log="") == first._replace(log="")
    assert {request.path for request in hub.requests} - {AGENTS} == {f"/api/models/{NAME}"}
    assert "downloading" not in second.log


def test_the_log_tells_of_the_download(hub: Hub, locate: Locate) -> None:
    log = locate(hub).log
    assert f"INFO workers.hub: requesting the model {NAME} from {hub.url}" in log
    assert f"INFO workers.hub: downloading {NAME} (commit {hub.commit(NAME)}): 0.5 MB" in log
    assert re.search(rf"INFO workers.hub: downloading {NAME}: \d\d% of 0.5 MB, [\d,.]+ MB/s\n", log)
    assert re.search(rf"INFO workers.hub: downloaded {NAME}: 0.5 MB in \d+ s\n", log)
    assert "\r" not in log
    assert "it/s" not in log


def test_revisions(locate: Locate, folder: Path, tmp_path: Path) -> None:
    newer = variant(folder, tmp_path / "newer", config_DOT_json=(folder / "config.json").read_bytes() + b"\n")
    with Hub({NAME: {"main": newer, "v1": folder, "refs/pr/1": newer}}) as hub:
        commit = hub.commit(NAME, "v1")
        assert locate(hub).revision == hub.commit(NAME) != commit
        by_tag = locate(hub, revision="v1")
        assert by_tag.revision == commit
        assert f"downloading {NAME} (v1, commit {commit})" in by_tag.log
        assert locate(hub, revision="refs/pr/1").revision == hub.commit(NAME)
        hub.requests.clear()
        assert locate(hub, revision=commit)._replace(log="") == by_tag._replace(log="")
        assert hub.requests == []
        unknown = locate(hub, revision="v9").error
    assert unknown is not None
    assert re.match(rf"The model {NAME} at {hub.url} has no revision 'v9'\. Set FEEDMILL_REVISION", unknown)


@pytest.mark.parametrize("revision", ["0" * 40, "../../../etc"])
def test_revisions_that_are_none(hub: Hub, locate: Locate, revision: str) -> None:
    assert f"has no revision {revision!r}" in str(locate(hub, revision=revision).error)


def test_the_embedded_models_name_with_a_revision(locate: Locate, folder: Path) -> None:
    name = "sentence-transformers/all-MiniLM-L6-v2"
    with Hub({name: folder}) as hub:
        assert locate(hub, name, revision="main").revision == hub.commit(name)


def test_weights_in_several_files(locate: Locate, folder: Path, tmp_path: Path) -> None:
    several = variant(folder, tmp_path / "several", model_DOT_safetensors=None)
    model = AutoModel.from_pretrained(folder)
    model.save_pretrained(several, max_shard_size="100KB")
    shards = sorted(path.name for path in several.glob("model-*.safetensors"))
    with Hub({NAME: several}) as hub:
        found = locate(hub)
        assert found.files == shards
        assert len(shards) > 1
        assert hub.files_asked() == WANTED - {"model.safetensors"} | {*shards, "model.safetensors.index.json"}
    digests = b"".join(bytes.fromhex(sha256(several / shard)) for shard in shards)
    assert found.sha256 == hashlib.sha256(digests).hexdigest()
    assert found.parameters == sum(tensor.numel() for tensor in model.state_dict().values())


# Without the hub.


@pytest.mark.parametrize("environment", [{}, {"HF_HUB_OFFLINE": "1"}])
def test_offline_after_a_download(hub: Hub, locate: Locate, folder: Path, environment: dict[str, str]) -> None:
    with Hub({NAME: folder}) as running:
        first = locate(running)
    assert first.error is None
    again = locate(running.url, offline=not environment, environment=environment)
    assert again._replace(log="") == first._replace(log="")
    by_commit = locate(running.url, revision=first.revision, offline=True)
    assert by_commit._replace(log="") == first._replace(log="")
    assert locate(hub, offline=True).error is None
    assert hub.requests == []


def test_a_hub_that_is_gone_after_a_download(locate: Locate, folder: Path) -> None:
    with Hub({NAME: folder}) as running:
        first = locate(running)
    assert locate(running.url)._replace(log="") == first._replace(log="")


def test_offline_takes_what_another_program_downloaded(locate: Locate, folder: Path, tmp_path: Path) -> None:
    with Hub({NAME: folder}) as running:
        first = locate(running)
    for listing in (tmp_path / "cache").rglob("trees"):
        shutil.rmtree(listing)
    assert locate(running.url, offline=True)._replace(log="") == first._replace(log="")


@pytest.mark.parametrize("revision", [None, "v1", "0" * 40])
def test_offline_without_a_download(hub: Hub, locate: Locate, tmp_path: Path, revision: str | None) -> None:
    error = str(locate(hub, offline=True, revision=revision).error)
    at = f" at revision {revision}" if revision else ""
    assert error.startswith(f"The model {NAME}{at} is not completely in the cache ")
    assert "Start once without FEEDMILL_OFFLINE" in error
    assert str(tmp_path / "cache") in error
    assert hub.requests == []


def test_offline_with_half_a_download(hub: Hub, locate: Locate) -> None:
    hub.short = {"model.safetensors"}
    assert locate(hub).error is not None
    assert "is not completely in the cache" in str(locate(hub, offline=True).error)


def test_no_network(locate: Locate) -> None:
    with Hub({}) as gone:
        pass
    address = gone.url.replace("://", "://me:my-password@")
    error = str(locate(address, environment={"HF_TOKEN": TOKEN}).error)
    assert error.startswith(f"The hub at {gone.url} is unreachable (")
    assert "Check the network, HF_ENDPOINT" in error
    assert "FEEDMILL_OFFLINE=true" in error
    assert "my-password" not in error


def test_an_address_that_is_no_hub(locate: Locate) -> None:
    assert "is unreachable" in str(locate("http://host.invalid").error)


# What the hub refuses.


@pytest.mark.parametrize("environment", [{}, {"HF_TOKEN": TOKEN}])
def test_an_unknown_model(hub: Hub, locate: Locate, environment: dict[str, str]) -> None:
    error = str(locate(hub, "someone/nothing", environment=environment).error)
    assert error.startswith(f"The hub at {hub.url} has no public model someone/nothing.")
    for words in ("owner/name", "facebook/bart-large-mnli", "private or gated", "HF_TOKEN"):
        assert words in error
    token = f"Bearer {TOKEN}" if environment else None
    assert {request.authorization for request in hub.requests if request.path != AGENTS} == {token}


def test_a_gated_model(hub: Hub, locate: Locate) -> None:
    hub.gated = {NAME}
    error = str(locate(hub, environment={"HF_TOKEN": TOKEN}).error)
    assert error.startswith(f"The model {NAME} is gated: its authors ")
    assert f"{hub.url}/{NAME}" in error
    assert "HF_TOKEN" in error


def test_a_token_that_is_none(hub: Hub, locate: Locate) -> None:
    error = str(locate(hub, environment={"HF_TOKEN": f"hf_two\x01\n{TOKEN}"}).error)
    assert error.startswith("HF_TOKEN contains characters ")


# What a repository lacks.


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("config_DOT_json", "has no config.json"),
        ("tokenizer_DOT_json", "has no tokenizer.json and no files"),
        ("model_DOT_safetensors", "only as a pickle (pytorch_model.bin)"),
        ("2_Dense__model_DOT_safetensors", "only as a pickle (2_Dense/pytorch_model.bin)"),
    ],
)
def test_repositories_that_lack_something(
    locate: Locate, folder: Path, tmp_path: Path, missing: str, words: str
) -> None:
    lacking = variant(folder, tmp_path / "lacking", **{missing: None})
    with Hub({NAME: lacking}) as hub:
        error = str(locate(hub).error)
        assert error.startswith(f"The model {NAME} at commit {hub.commit(NAME)} ")
        assert words in error
        assert hub.files_asked() <= {"config.json"}, "the weights were downloaded all the same"
    if "pickle" in words:
        assert "refs/pr/N" in error
        assert "save_pretrained" in error


# Downloads that go wrong.


def test_a_connection_that_is_cut_is_taken_up_again(hub: Hub, locate: Locate, folder: Path) -> None:
    size = (folder / "model.safetensors").stat().st_size
    hub.cuts = {"model.safetensors": [size // 2]}
    found = locate(hub)
    assert found.error is None
    assert found.sha256 == sha256(folder / "model.safetensors")
    assert hub.cuts == {"model.safetensors": []}
    assert f"downloaded {NAME}: 0.5 MB" in found.log
    assert re.search("^WARNING workers.hub: Error while downloading .* Trying to resume", found.log, re.MULTILINE)
    assert all(re.match("(INFO|WARNING) workers.hub: ", line) for line in found.log.splitlines())


def test_a_file_that_comes_incomplete(hub: Hub, locate: Locate) -> None:
    hub.short = {"model.safetensors"}
    error = str(locate(hub).error)
    assert error.startswith(f"Cannot download the model {NAME} from {hub.url} (Consistency check failed")
    assert "start again" in error
    hub.short = set()
    assert locate(hub).error is None


def test_a_file_that_comes_damaged(hub: Hub, locate: Locate) -> None:
    hub.damaged = {"model.safetensors"}
    error = str(locate(hub).error)
    assert "its SHA-256 differs from the one announced" in error
    hub.damaged = set()
    assert locate(hub).error == error
    damaged = re.search(r"Delete (\S+) and start again", error)
    assert damaged is not None
    Path(damaged[1]).unlink()
    assert locate(hub).error is None


def refused(status: int) -> HfHubHTTPError:
    return HfHubHTTPError("no", response=Mock(status_code=status))


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "The disk is full: .* does not fit in the cache .* HF_HOME",
        ),
        (RuntimeError("xet: No space left on device (os error 28)"), "The disk is full: .* set HF_HOME"),
        (PermissionError(errno.EACCES, "Permission denied"), "Cannot write the model .* to the cache .* Set HF_HOME"),
        (OSError(errno.EROFS, "Read-only file system"), "Cannot write the model .* to the cache .* Set HF_HOME"),
        (ValueError(f"Illegal header value b'Bearer {TOKEN}'"), r"\(Illegal header value b'\*\*\*\)"),
        (ValueError("at https://a.example/x?Signature=secret\nand more"), r"\(at https://a.example/x\*\*\*\)"),
        (ValueError(), r"\(ValueError\)"),
        (refused(401), r"denies access to the model .* \(401\). Set HF_TOKEN"),
        (refused(429), r"limits the requests from this address \(429\)"),
    ],
)
def test_what_else_goes_wrong(monkeypatch: pytest.MonkeyPatch, raised: Exception, words: str) -> None:
    def broken(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(hub_module, "snapshot_download", broken)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(ModelError, match=words) as caught:
        Repository(NAME, "0" * 40, False, ())
    assert TOKEN not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_lines_on_a_download_are_few(caplog: pytest.LogCaptureFixture) -> None:
    seconds = 0.0
    caplog.set_level(logging.INFO)
    progress = Progress("some/model", "commit 12", 1_630_000_000, clock=lambda: seconds)
    for at, megabytes in (
        *((1, 400), (6, 500), (6.5, 900), (12, 700), (13, 1000), (14, 950), (20, 1000)),
        *((70, 1001), (100, 1100), (140, 1102), (170, 1120), (180, 1630)),
    ):
        seconds = at
        progress.reached(megabytes * 1_000_000)
    progress.end()
    assert caplog.messages == [
        "downloading some/model (commit 12): 1,630 MB",
        "downloading some/model: 31% of 1,630 MB, 83 MB/s",
        "downloading some/model: 55% of 1,630 MB, 67 MB/s",
        "downloading some/model: 67% of 1,630 MB, 2.3 MB/s",
        "downloading some/model: 69% of 1,630 MB, 0.3 MB/s",
        "downloaded some/model: 1,630 MB in 180 s",
    ]
