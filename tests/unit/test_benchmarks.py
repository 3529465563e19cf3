"""The basis of the benchmarks' figures: operation counts, batches of the ideal and comparison of
variants.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from feedmill.shared.settings import Settings, variables
from tests.support import run

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "models",
    ["minilm", pytest.param("minilm,bert-base,bart-large", marks=pytest.mark.long)],
)
def test_gpu_benchmark_needs_neither_redis_nor_celery(models: str) -> None:
    missing = dict.fromkeys(("celery", "kombu", "redis", "praw"))
    command = f"import sys; sys.modules.update({missing}); from benchmarks.gpu import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, "--device", "cpu", "--quick", "--models", models],
        capture_output=True, text=True, check=False, timeout=170,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ceiling_gflops"] > 0
    assert found["models"].keys() == set(models.split(","))
    for model in found["models"].values():
        assert model["stalls"].keys() == {"default", "no cuDNN", "few shapes"}
        assert model["share"]["as cut from posts"]["share"] > 0
        assert model["host_us_per_post"]["tokenize"] > 0
    assert found["window"]["shapes"]["few"] < found["window"]["shapes"]["exact"]


@pytest.mark.parametrize(
    "parts",
    [
        "waits,tests",
        pytest.param(
            "waits,workers,modernbert,precision,tests", marks=pytest.mark.long
        ),
    ],
)
def test_gpu_record_says_what_it_did_not_measure_on_a_cpu(
    parts: str, tmp_path: Path
) -> None:
    options = ["--all", "--quick", "--device", "cpu", "--only", parts]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "FEEDMILL_CACHE_FOLDER": str(tmp_path),
    }
    command = [sys.executable, "-m", "benchmarks.gpu", *options]
    done = run(command, ROOT, environment, seconds=1500)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["waits"] == "not measured: needs a GPU"
    assert record["tests"] == "not run: needs a GPU"
    if "workers" in record:
        for runs in record["workers"].values():
            assert [run["devices"] for run in runs] == ["cpu", "cpu:2", "auto"]
            assert all(run["posts_per_s"] > 0 for run in runs)
        assert record["modernbert"]["share"]["as cut from posts"]["share"] > 0
        exact, *others = record["precision"]
        assert exact["precision"] == "float32"
        assert exact["largest_difference"] == 0
        assert {row["precision"] for row in others} == {"bfloat16", "int8"}


@pytest.mark.parametrize("option", ["--only=waits,nothing", "--models=nothing"])
def test_gpu_benchmark_refuses_unknown_parts(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu.parsed(["--all", option])
    assert "nothing" in capsys.readouterr().err


def test_precision_is_a_part_of_the_record() -> None:
    arguments = gpu.parsed(["--precision"])
    assert arguments.all
    assert arguments.only == ["precision"]


def test_variables_leave_secrets_out() -> None:
    secrets = {
        "redis_url": "redis://:hidden@127.0.0.1/0",
        "flower_password": "hidden",
        "reddit_client_id": "hidden",
    }
    found = variables(Settings.model_validate(secrets | {"queue": "other"}))
    assert found["FEEDMILL_QUEUE"] == "other"
    assert "hidden" not in str(found)


@pytest.mark.parametrize(
    ("page", "heading"),
    [("README.md", "## Speed"), ("docs/comparison.md", "# Comparison")],
)
def test_quoted_figures_are_recorded(page: str, heading: str) -> None:
    """Each decimal in a table of figures stands in a record of benchmarks/README.md."""
    section = (ROOT / page).read_text().partition(heading)[2].partition("\n## ")[0]
    rows = [line.partition("](")[0] if page == "README.md" else line.split("|")[2]
            for line in section.splitlines()
            if line.startswith("|")]  # fmt: skip
    quoted = {figure for row in rows for figure in re.findall(r"\d+\.\d+", row)}
    recorded = set(re.findall(r"\d+\.\d+", (ROOT / "benchmarks/README.md").read_text()))
    assert len(quoted) > 7
    assert quoted <= recorded
