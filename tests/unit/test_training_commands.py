"""`feedmill train` and `feedmill label`: what they say before a model is loaded, and without
Redis.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from feedmill.shared import settings
from feedmill.shared.settings import Settings
from feedmill.training.data import purged_ids
from tests.fakes.models import make_model
from tests.support import ROOT, announced, run

#: Code that runs commands one after the other. For each, it prints as JSON the exit status,
#: whether torch has been imported, the text on standard error, and the files in its folder.
RUNS = """
import io, json, os, sys
from contextlib import redirect_stderr
from feedmill.__main__ import main
for command in json.loads(sys.argv[1]):
    sys.argv[1:] = command.split()
    status = None
    with redirect_stderr(io.StringIO()) as errors:
        try:
            main()
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, "torch" in sys.modules, errors.getvalue(), os.listdir()]))
"""
#: Commands, and words in their errors.
REFUSED = {
    "train --from no.csv --out out": "no.csv",
    "train --from no.csv --out out --head": "no.csv",
    "train --from two.csv --out out --trainer max_steps": "KEY=VALUE",
    "train --from two.csv --out out --trainer max_steps=1 --trainer max_steps=2": "twice",
    "train --from two.csv --out out --trainer learning_rate=1": "--learning-rate",
    "train --from two.csv --out out --trainer fp16=true": "--dtype",
    "train --from two.csv --out out --trainer save-steps=5": "checkpoint",
    "train --from two.csv --out out --trainer hub_token=x": "hub_token",
    "train --from two.csv --out out --patience 2": "--eval epoch",
    "train --from two.csv --out out --page no/page.html": "no folder no",
    "train --from two.csv --out out --head --trainer max_steps=1": (
        "--head cannot be combined with --trainer"
    ),
    "train --from no.csv --out out --devices 0+1": "whole model",
    "train --from one.csv --out out": "'only'",
    "label no.csv --out out --labels a,b": "no.csv",
    "label empty.csv --out out --labels a,b": "empty.csv",
    "evaluate no.csv": "no.csv",
    "tune no.csv": "no.csv",
    "classify no.csv --out out.csv": "no.csv",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Run all commands in one new interpreter, in which no other code imports torch.

    Return what it prints of each.
    """
    folder = tmp_path_factory.mktemp("refused")
    (folder / "empty.csv").touch()
    (folder / "one.csv").write_text("id,text,label\n1,bread,only\n2,soup,only\n")
    done = subprocess.run(
        [sys.executable, "-c", RUNS, json.dumps(list(REFUSED))],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip(REFUSED, printed, strict=True))


@pytest.mark.parametrize("command", REFUSED)
def test_a_file_is_refused_before_torch_is_imported(
    outcomes: dict[str, list[Any]], command: str
) -> None:
    status, has_torch, errors, files = outcomes[command]
    assert (status, has_torch) == (2, False)
    assert REFUSED[command] in errors
    assert sorted(files) == ["empty.csv", "one.csv"]


def test_without_redis_the_note_on_purged_posts_names_no_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(settings, "FALLBACK_REDIS_URL", "redis://127.0.0.1:1/0")
    lines: list[str] = []
    notes = Console(width=1000)
    notes.print = lambda line, **_: lines.append(line)  # type: ignore[method-assign]
    assert purged_ids(["a"], Settings(data_folder=tmp_path), notes) is None
    with announced(tmp_path, json.dumps({"redis_url": "redis://127.0.0.1:1/0"})):
        assert purged_ids(["a"], Settings(data_folder=tmp_path), notes) is None
    assert (
        purged_ids(
            ["a"],
            Settings.model_validate({"redis_url": "redis://127.0.0.1:1/0"}),
            notes,
        )
        is None
    )
    without, embedded, own = lines
    assert "FEEDMILL_REDIS_URL" in without
    assert not any(word in without for word in ("6379", "rediss", "127.0.0.1"))
    assert "127.0.0.1:1" in embedded
    assert "127.0.0.1:1" in own


#: Code that limits the size of files, as a full disk does, and runs a command.
RUNS_LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
from feedmill.__main__ import main
try:
    main()
except SystemExit as end:
    print("status", end.code)
"""


@pytest.mark.parametrize("room", [2_000, 20_000, 120_000])
def test_a_full_disk_ends_a_training_without_a_traceback(
    tmp_path: Path, room: int
) -> None:
    """Configuration, weights, optimizer, tokenizer: each library has its own error for a file that
    has no room.
    """
    base = make_model("distilbert", tmp_path / "base")
    rows = [
        f"{number},{word} number {number},{word}"
        for number in range(20)
        for word in ("soup", "match")
    ]
    (tmp_path / "posts.csv").write_text("\n".join(["id,title,topic", *rows]))
    arguments = (
        f"train --from posts.csv --out out --base {base} --min-posts 2 --epochs 1 "
        "--no-compare"
    )
    command = [sys.executable, "-c", RUNS_LIMITED, str(room), *arguments.split()]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "FEEDMILL_DEVICE": "cpu",
        "FEEDMILL_DTYPE": "float32",
    }
    done = run(command, tmp_path, environment, seconds=300)
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1].startswith("status 2")
    assert "Cannot write" in done.stderr
    assert str(tmp_path / "out") in done.stderr.replace("\n", "")
