"""The basis of the benchmarks' figures: operation counts, batches of the ideal and comparison of variants."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertModel

from benchmarks.hardware import forward_flops
from benchmarks.ours import cut
from benchmarks.report import VariantResult, VariantResults, comparable, summary
from feedmill.shared.settings import Settings, load, variables
from feedmill.stack.embedded import Stack
from feedmill.workers.models.classifiers import LabelSet, Row
from feedmill.workers.models.tokenizer import Tokens

ROOT = Path(__file__).parents[2]


def test_forward_flops_match_torch() -> None:
    config = BertConfig(hidden_size=48, intermediate_size=100, num_hidden_layers=3, num_attention_heads=4)
    config._attn_implementation = "eager"
    model = BertModel(config, add_pooling_layer=False).eval()  # type: ignore[no-untyped-call]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for length in (7, 30):
            model(input_ids=torch.ones(1, length, dtype=torch.long))
    assert forward_flops(config.to_dict(), [7, 30]) == counter.get_total_flops()


def test_gpu_benchmark_needs_neither_redis_nor_celery() -> None:
    missing = dict.fromkeys(("celery", "kombu", "redis", "praw"))
    command = f"import sys; sys.modules.update({missing}); from benchmarks.gpu import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, "--device", "cpu", "--quick"],
        capture_output=True, text=True, check=False, timeout=170, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ceiling_gflops"] > 0
    assert found["models"].keys() == {"minilm", "distilbert", "bart-large"}
    for model in found["models"].values():
        assert model["stalls"].keys() == {"default", "no cuDNN", "few shapes"}
        assert model["share"]["as cut from posts"]["share"] > 0
        assert model["host_us_per_post"]["tokenize"] > 0
    assert found["window"]["shapes"]["few"] < found["window"]["shapes"]["exact"]


def test_cut_fills_the_budget_and_keeps_every_row() -> None:
    labels = LabelSet(("a",), False, "")
    rows = [Row(Tokens([0] * length), labels) for length in (2, 2, 3, 5, 5, 9, 40)]
    batches = list(cut(rows, token_budget=12))
    assert [[row.length for row in batch] for batch in batches] == [[2, 2, 3], [5, 5], [9], [40]]


def test_stack_passes_every_setting_to_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = {
        "dtype": "float32", "classifier": "nli", "labels": {"a": "one, two", "b": "b"}, "include": "json,math",
        "token_budget": 77, "template": None, "forward_timeout": 7.5, "models_folder": tmp_path,
    }  # fmt: skip
    monkeypatch.setenv("FEEDMILL_DTYPE", "bfloat16")
    monkeypatch.setenv("FEEDMILL_TEMPLATE", "It is {}.")
    stack = Stack(Settings.model_validate(given), tmp_path, durable=False)
    for name, value in stack._environment.items():
        monkeypatch.setenv(name, value)
    child = load()
    assert {name: getattr(child, name) for name in given} == {name: getattr(stack.settings, name) for name in given}
    assert child.broker_url == stack.settings.broker_url
    stack.stop()


def test_variables_leave_secrets_out() -> None:
    secrets = {"redis_url": "redis://:hidden@127.0.0.1/0", "flower_password": "hidden", "reddit_client_id": "hidden"}
    found = variables(Settings.model_validate(secrets | {"queue": "other"}))
    assert found["FEEDMILL_QUEUE"] == "other"
    assert "hidden" not in str(found)


def test_leaves_out_variants_with_different_labels() -> None:
    labels = ["a"] * 100
    ideal, good = VariantResult(100.0, labels, 1.0), VariantResult(50.0, [*labels[:98], "b", "b"], 2.0)
    other = VariantResult(300.0, ["a"] * 90 + ["b"] * 10, 3.0)
    record: VariantResults = {"ideal": [ideal, ideal], "good": [good, None], "other": [other, other]}
    assert set(comparable(record)) == {"ideal", "good"}
    found: Any = summary(record, list(record))
    assert (found["ideal"], found["good"], found["other"]) == (100.0, 50.0, None)
    assert found["share_of_ideal"] == {"ideal": 1.0, "good": 0.5, "other": None}
    assert found["cpu_us_per_post"] == {"ideal": 1.0, "good": 2.0, "other": None}
    assert found["left_out"].keys() == {"other"}
    assert "90.0%" in found["left_out"]["other"]
    assert "97%" in found["left_out"]["other"]
    assert found["agreement"]["other"] == 0.9


@pytest.mark.parametrize(("page", "heading"), [("README.md", "## Speed"), ("docs/comparison.md", "# Comparison")])
def test_quoted_figures_are_recorded(page: str, heading: str) -> None:
    """Each decimal in a table of figures stands in a record of benchmarks/README.md."""
    section = (ROOT / page).read_text().partition(heading)[2].partition("\n## ")[0]
    rows = [line.partition("](")[0] if page == "README.md" else line.split("|")[2] for line in section.splitlines()
            if line.startswith("|")]  # fmt: skip
    quoted = {figure for row in rows for figure in re.findall(r"\d+\.\d+", row)}
    recorded = set(re.findall(r"\d+\.\d+", (ROOT / "benchmarks/README.md").read_text()))
    assert len(quoted) > 7
    assert quoted <= recorded
