"""workers/models/hub.py against a stand-in hub; each `locate` runs in its own process."""

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoModel

from feedmill.shared.errors import ModelError
from feedmill.workers.models import hub as hub_module
from feedmill.workers.models import weights
from feedmill.workers.models.hub import download
from tests.fakes.hub import Hub
from tests.fakes.models import make_sentence_model
from tests.support import run

NAME = "someone/small-bert"
TOKEN = "hf_thisIsASecretOfMine"
#: Requested by huggingface_hub once a day, for its User-Agent.
AGENTS = "/api/agent-harnesses"
#: huggingface_hub reads its settings when imported, so each use needs its own process.
SCRIPT = """
import json, logging, sys
logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
from feedmill.shared.errors import ModelError
from feedmill.workers.models import hub
from feedmill.workers.models.weights import locate, parameters
hub.constants.DOWNLOAD_CHUNK_SIZE = 5_000
try:
    found = locate(sys.argv[1], **json.loads(sys.argv[2]))
except ModelError as error:
    answer = {"error": str(error)}
else:
    answer = {"error": None, "folder": str(found.folder), "revision": found.revision,
              "sha256": found.sha256,
              "files": [file.name for file in found.files], "parameters": parameters(found)}
print(json.dumps(answer))
"""


class Located(NamedTuple):
    """The result of `locate`, or its error message, and the log."""

    error: str | None
    log: str
    folder: Path
    revision: str
    sha256: str
    files: list[str]
    parameters: int


Locate = Callable[..., Located]
OFFLINE = {"HF_HUB_OFFLINE": "1"}


@pytest.fixture
def locate(tmp_path: Path) -> Locate:
    """`locate` with a separate cache for each test."""

    def located(
        hub: Hub | str,
        model: str = NAME,
        environment: dict[str, str] = {},  # noqa: B006 - never changed
        **options: Any,
    ) -> Located:
        outside = re.compile(r"HF_|FEEDMILL_|.*_proxy$", re.IGNORECASE)
        kept = {
            name: value for name, value in os.environ.items() if not outside.match(name)
        }
        ours = {
            "HF_ENDPOINT": hub if isinstance(hub, str) else hub.url,
            "HF_HOME": str(tmp_path / "cache"),
        }
        command = [sys.executable, "-c", SCRIPT, model, json.dumps(options)]
        done = run(command, tmp_path, kept | ours | environment)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == 0, done.stderr
        assert TOKEN not in done.stdout + done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        if found["error"]:
            return Located(found["error"], done.stderr, Path(), "", "", [], 0)
        return Located(log=done.stderr, **found | {"folder": Path(found["folder"])})

    return located


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small sentence-transformers model, with files that must not be downloaded."""
    path = make_sentence_model(tmp_path_factory.mktemp("model"), dense=8)
    for part in ("onnx", "openvino"):
        (path / part).mkdir()
    for unwanted in (
        "pytorch_model.bin",
        "2_Dense/pytorch_model.bin",
        "modeling_own.py",
        "tf_model.h5",
        "README.md",
    ):
        (path / unwanted).write_bytes(b"unwanted")
    for unwanted in (
        "onnx/model.onnx",
        "onnx/config.json",
        "openvino/openvino_model.bin",
        "model.fp16.safetensors",
    ):
        (path / unwanted).write_bytes(b"unwanted")
    return path


WANTED = {
    *(
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "modules.json",
        "model.safetensors",
    ),
    "sentence_bert_config.json",
    *("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"),
}


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    with Hub({NAME: folder}) as running:
        yield running


def variant(folder: Path, into: Path, **files: bytes | None) -> Path:
    """Copy the model and replace files by name, with _DOT_ for . and __ for /; None deletes a
    file.
    """
    shutil.copytree(folder, into)
    for name, content in files.items():
        path = into / name.replace("__", "/").replace("_DOT_", ".")
        path.unlink() if content is None else path.write_bytes(content)
    return into


def test_downloads_and_loads_a_model(
    hub: Hub, locate: Locate, folder: Path, tmp_path: Path
) -> None:
    found = locate(hub)
    assert found.error is None
    assert found.revision == hub.commit(NAME)
    assert found.folder.is_relative_to(tmp_path / "cache")
    assert found.files == ["model.safetensors", "model.safetensors"], (
        "the model's, and its dense layer's"
    )
    assert found.sha256 == weights.locate(str(folder)).sha256, (
        "wherever a model is, its digest is the same"
    )
    model = AutoModel.from_pretrained(
        found.folder, local_files_only=True, use_safetensors=True
    )
    dense = 8 * 32 + 8
    assert found.parameters == dense + sum(
        tensor.numel() for tensor in model.state_dict().values()
    )
    assert hub.files_asked() == WANTED
    assert {request.authorization for request in hub.requests} == {None}
    locate(hub, remote_code=True)
    assert hub.files_asked() == WANTED | {"modeling_own.py"}


def test_downloads_branches_tags_and_commits(
    locate: Locate, folder: Path, tmp_path: Path
) -> None:
    newer = variant(
        folder,
        tmp_path / "newer",
        config_DOT_json=(folder / "config.json").read_bytes() + b"\n",
    )
    with Hub({NAME: {"main": newer, "v1": folder, "refs/pr/1": newer}}) as hub:
        commit = hub.commit(NAME, "v1")
        by_tag = locate(hub, revision="v1")
        assert by_tag.revision == commit
        assert commit in by_tag.log
        assert locate(hub, revision="refs/pr/1").revision == hub.commit(NAME) != commit
        hub.requests.clear()
        assert locate(hub, revision=commit)._replace(log="") == by_tag._replace(log="")
        assert {request.path for request in hub.requests} <= {AGENTS}
        unknown = locate(hub, revision="v9").error
    assert unknown is not None
    assert all(
        words in unknown for words in (NAME, "'v9'", hub.url, "FEEDMILL_REVISION")
    )


# The hub is unreachable or not to be used.


def test_offline_uses_the_cache(hub: Hub, locate: Locate, folder: Path) -> None:
    with Hub({NAME: folder}) as running:
        first = locate(running)
    assert first.error is None
    for revision in (None, first.revision):
        assert locate(hub, revision=revision, environment=OFFLINE)._replace(
            log=""
        ) == first._replace(log="")
    assert hub.requests == []


@pytest.mark.parametrize("revision", [None, "../../etc"])
def test_offline_without_a_cached_model_fails(
    hub: Hub, locate: Locate, tmp_path: Path, revision: str | None
) -> None:
    error = str(locate(hub, environment=OFFLINE, revision=revision).error)
    at = f" at revision {revision!r}" if revision else ""
    assert re.search(f"{NAME}{at} ", error)
    assert "HF_HUB_OFFLINE" in error
    assert str(tmp_path / "cache") in error
    assert hub.requests == []


def test_unreachable_hub_fails_without_revealing_passwords(locate: Locate) -> None:
    with Hub({}) as gone:
        pass
    address = gone.url.replace("://", "://me:my-password@")
    error = str(locate(address, environment={"HF_TOKEN": TOKEN}).error)
    assert gone.url.partition("://")[2] in error
    assert "HF_HUB_OFFLINE=1" in error
    assert "my-password" not in error


# The hub refuses.


def test_unknown_model_fails_with_advice(hub: Hub, locate: Locate) -> None:
    error = str(locate(hub, "someone/nothing", environment={"HF_TOKEN": TOKEN}).error)
    assert hub.url in error
    assert "someone/nothing" in error
    for words in ("owner/name", "facebook/bart-large-mnli", "HF_TOKEN"):
        assert words in error
    assert {
        request.authorization for request in hub.requests if request.path != AGENTS
    } == {f"Bearer {TOKEN}"}


def test_finds_the_head_of_an_old_setfit_model(
    locate: Locate, folder: Path, tmp_path: Path
) -> None:
    """It is never loaded, but a worker must not serve the model without it."""
    with Hub(
        {NAME: variant(folder, tmp_path / "setfit", model_head_DOT_pkl=b"pickle")}
    ) as hub:
        found = locate(hub)
    assert (found.folder / "model_head.pkl").is_file()
    assert found.error is None


def test_names_what_is_not_a_model(hub: Hub, locate: Locate, tmp_path: Path) -> None:
    error = str(locate(hub, str(tmp_path / "nothing")).error)
    assert f"no model folder {tmp_path / 'nothing'}" in error
    assert {request.path for request in hub.requests} <= {AGENTS}


# Downloads fail.


def test_resumes_a_cut_download(hub: Hub, locate: Locate, folder: Path) -> None:
    size = (folder / "model.safetensors").stat().st_size
    hub.cuts = {"model.safetensors": [size // 2]}
    found = locate(hub)
    assert found.error is None
    assert found.sha256 == weights.locate(str(folder)).sha256
    assert hub.cuts == {"model.safetensors": []}
    assert all(
        line.startswith("INFO feedmill.workers.models.hub: ")
        for line in found.log.splitlines()
    )


def test_damaged_download_is_detected(hub: Hub, locate: Locate) -> None:
    hub.damaged = {"model.safetensors"}
    error = str(locate(hub).error)
    damaged = re.search(r"(?<= )(/\S+)", error)
    assert damaged is not None
    hub.damaged = set()
    assert locate(hub).error == error
    Path(damaged[1]).unlink()
    assert locate(hub).error is None


def refused(status: int) -> HfHubHTTPError:
    return HfHubHTTPError("no", response=Mock(status_code=status))


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left.*HF_HOME"),
        (
            ValueError(f"Illegal header value b'Bearer {TOKEN}'"),
            r": Illegal header value b'\*\*\*\. ",
        ),
        (
            ValueError("at https://a.example/x?Signature=secret\nnow"),
            r": at https://a.example/x\*\*\* now\. ",
        ),
        (refused(401), "no.*HF_TOKEN"),
    ],
)
def test_explains_other_download_failures(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, words: str
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(hub_module, "snapshot_download", broken)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(ModelError, match=words) as caught:
        download(NAME, "0" * 40, ["*.json"])
    assert TOKEN not in str(caught.value)
    assert "\n" not in str(caught.value)
