"""`feedmill train` in several processes: the losses of one process, output from one of them, and
one end for all.
"""

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forkserver
from tests.e2e.test_train import write_posts
from tests.fakes import constants
from tests.fakes.models import make_model
from tests.support import (
    Feedmill,
    feedmill,
    forks,
    naming,
    processes_in,
    run,
    running,
    wait_until,
)

#: Options of all trainings here: without dropout, the loss does not depend on who computes which
#: row.
USUAL = (
    "--from", "posts.jsonl", "--base", "base", "--dtype", "float32", "--no-compare", "--split",
    "none",
)  # fmt: skip
#: Fork the training processes: as new interpreters, each would import torch for seconds.
#: test_two_processes_learn_what_one_learns starts them as users do.
FORKING = {
    constants.VARIABLE: json.dumps(
        {"feedmill.training.distributed.START_METHOD": "fork"}
    )
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_posts(tmp_path / "posts.jsonl", 87)  # the last step of an epoch is incomplete
    make_model(
        "bert",
        tmp_path / "base",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return tmp_path


def record_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "training.json").read_text())
    return record


def losses(record: dict[str, Any]) -> list[float]:
    return [point["loss"] for point in record["curve"]]


def workers_of(training: Feedmill) -> list[int]:
    """Return the ids of the training processes that a command has started."""
    pid = training.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in children.split()]


def test_two_processes_learn_what_one_learns(folder: Path) -> None:
    """With the same effective batch; --eval too.

    Both write the same files, and one of the two talks.
    """
    one = feedmill(
        "train",
        *USUAL,
        "--device",
        "cpu",
        "--batch-size",
        "32",
        "--eval",
        "epoch",
        "--out",
        "one",
        cwd=folder,
    )
    two = feedmill(
        "train", *USUAL, "--devices", "cpu:2", "--batch-size", "8", "--accumulation", "2",
        "--eval", "epoch",
        "--out", "two", cwd=folder,
    )  # fmt: skip
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    alone, shared = record_of(folder / "one"), record_of(folder / "two")
    assert shared["plan"]["devices"] == 2
    assert shared["plan"]["effective_batch"] == alone["plan"]["effective_batch"] == 32
    assert losses(shared) == pytest.approx(losses(alone), abs=1e-4)
    assert [epoch["posts"] for epoch in shared["epochs"]] == [
        epoch["posts"] for epoch in alone["epochs"]
    ]
    for here, there in zip(alone["epochs"], shared["epochs"], strict=True):
        assert there["evaluation"] == pytest.approx(here["evaluation"], abs=1e-4)
    assert shared["plan"]["sharpness"] == pytest.approx(
        alone["plan"]["sharpness"], abs=1e-3
    )
    assert two.stderr.count("32 = 8 × 2 accumulated × 2 devices") == 1
    assert two.stderr.count("epoch 1: evaluation loss") == 1
    assert "Warning" not in two.stderr
    names = [
        {path.name for path in (folder / name).iterdir()} for name in ("one", "two")
    ]
    assert names[0] == names[1]


def test_joins_the_processes_of_torchrun(folder: Path) -> None:
    """A real torchrun, whose processes ask the fork server for the command instead of importing
    torch themselves.
    """
    forks()
    forked = (sys.executable, forkserver.__file__, "-u", "-m", "feedmill")
    options = ("--device", "cpu", "--epochs", "1", "--batch-size", "16")
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--no-python",
    ]
    environment = os.environ | {
        "FEEDMILL_TOKEN_BUDGET": "2048",
        "FEEDMILL_CACHE_FOLDER": str(folder / "cache"),
    }
    done = run(
        [*launcher, *forked, "train", *USUAL, *options, "--out", "two"],
        folder,
        environment,
        seconds=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Trained in") == 1
    assert record_of(folder / "two")["plan"]["effective_batch"] == 32
    options = ("--device", "cpu", "--epochs", "1", "--batch-size", "32")
    one = feedmill("train", *USUAL, *options, "--out", "one", cwd=folder)
    assert one.returncode == 0, one.stderr
    assert losses(record_of(folder / "two")) == pytest.approx(
        losses(record_of(folder / "one")), abs=1e-4
    )


def test_a_process_of_torchrun_refuses_devices(folder: Path) -> None:
    """The variables are those that torchrun sets."""
    place = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    refused = feedmill(
        "train", *USUAL, "--devices", "cpu:2", "--out", "three", cwd=folder, **place
    )
    assert refused.returncode == 2
    assert "leave out --devices" in refused.stderr


def test_killed_process_ends_the_others_and_the_same_command_continues(
    folder: Path,
) -> None:
    command = ("train", *USUAL, "--devices", "cpu:2", "--epochs", "40", "--out", "out")
    checkpoints = folder / "out" / "checkpoints"
    with running(*command, cwd=folder, **FORKING) as training:
        wait_until(
            lambda: (
                any(checkpoints.glob("checkpoint-*/trainer_state.json"))
                or not training.lives()
            ),
            "checkpoint",
        )
        os.kill(workers_of(training)[-1], signal.SIGKILL)
        assert training.process.wait(120) == 2
        said = training.text()
    assert "Process" in said
    assert "of 2 (cpu:" in said
    assert "signal 9" in said
    assert "Traceback" not in said
    wait_until(lambda: not processes_in(folder), "the other process ends")
    again = feedmill(*command, cwd=folder, **FORKING)
    assert again.returncode == 0, again.stderr
    assert record_of(folder / "out")["resumed_at_step"] > 0
    assert len(record_of(folder / "out")["epochs"]) == 40


def test_interrupt_ends_all_processes(folder: Path) -> None:
    with running(
        "train",
        *USUAL,
        "--devices",
        "cpu:2",
        "--epochs",
        "1000",
        "--out",
        "out",
        cwd=folder,
        **FORKING,
    ) as training:
        wait_until(
            lambda: (
                any(folder.glob("out/checkpoints/checkpoint-*")) or not training.lives()
            ),
            "checkpoint",
        )
        assert training.end(signal.SIGINT) == 130
        assert "the same command continues" in training.text()
    wait_until(lambda: not processes_in(folder), "all processes end")


def test_error_of_a_process_is_the_error_of_the_command(folder: Path) -> None:
    (folder / "base" / "model.safetensors").write_bytes(b"\0" * 100)
    refused = feedmill(
        "train", *USUAL, "--devices", "cpu:2", "--out", "out", cwd=folder, **FORKING
    )
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert "base" in refused.stderr


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--devices", "cpu:2", "--head"), "--head cannot be combined with --devices"),
        (("--devices", "cpu:2", "--device", "cpu"), naming("FEEDMILL_DEVICE")),
        (("--devices", "0"), naming("0", "does not exist")),
        (("--devices", "cpu:2", "--trainer", "optim=none"), naming("optim=none")),
    ],
)
def test_refuses_devices_that_cannot_train(
    folder: Path, options: tuple[str, ...], error: str
) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if "0" in options else {}
    refused = feedmill("train", *USUAL, *options, "--out", "out", cwd=folder, **hidden)
    assert refused.returncode == 2
    assert re.search(error, refused.stderr), refused.stderr
