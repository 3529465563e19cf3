"""workers/models/classifiers/registry.py: choosing the classifier from a model's files."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from feedmill.shared.errors import DeviceFull, ModelError, SettingsError
from feedmill.shared.settings import EMBEDDED_MODEL, Settings
from feedmill.workers.models.classifiers import registry
from feedmill.workers.models.classifiers.pairs import Entailment
from feedmill.workers.models.classifiers.registry import (
    check_size,
    classifier_kind,
    load_classifier,
)
from feedmill.workers.models.engines import torch_engine
from feedmill.workers.models.weights import locate
from tests.fakes.models import FP32, NLI, make_gliclass, make_model, make_sentence_model
from tests.support import naming


def test_detects_the_kind_of_each_model(tmp_path: Path) -> None:
    kinds = {
        make_model("bart", tmp_path / "a", NLI): "nli",
        make_model(
            "bert", tmp_path / "b", {0: "entailment", 1: "not_entailment"}
        ): "nli",
        make_model(
            "distilbert", tmp_path / "c", {0: "NEGATIVE", 1: "POSITIVE"}
        ): "sequence",
        make_model("bert", tmp_path / "e", {0: "LABEL_0"}): "rerank",
        make_model("bert", tmp_path / "f", {0: "toxic"}): "sequence",
        make_model(
            "bert", tmp_path / "g", {0: "LABEL_0"}, problem_type="regression"
        ): "sequence",
        make_model(
            "bert",
            tmp_path / "h",
            {0: "relevant"},
            sentence_transformers={"version": "4.0.1"},
        ): "rerank",
        make_sentence_model(tmp_path / "d"): "similarity",
        make_gliclass(tmp_path / "i"): "gliclass",
    }
    for folder, kind in kinds.items():
        assert load_classifier(Settings(model=str(folder)), FP32).kind == kind
    assert classifier_kind(locate(EMBEDDED_MODEL)) == "similarity"


def test_rejects_a_generative_reranker(tmp_path: Path) -> None:
    folder = make_model("gpt2", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]})
    )
    (folder / "modules.json").write_text("[]")
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"model_type": "CrossEncoder"})
    )
    with pytest.raises(
        ModelError,
        match=naming(folder, "Qwen3ForCausalLM", "ForSequenceClassification"),
    ):
        load_classifier(Settings(model=str(folder)), FP32)


@pytest.mark.parametrize(("kind", "served"), [("bert", True), ("own", False)])
def test_never_runs_a_models_own_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, served: bool
) -> None:
    """transformers' own code runs the model types that it supports.

    Other types are rejected without a prompt.
    """
    folder = make_model("bert", tmp_path / "model", NLI)
    made = tmp_path / "made"
    for name in ("configuration_own", "modeling_own", "tokenization_own"):
        (folder / f"{name}.py").write_text(
            f"import pathlib\npathlib.Path({str(made)!r}).touch()\n"
        )
    classes = {
        "AutoConfig": "configuration_own.C",
        "AutoModelForSequenceClassification": "modeling_own.M",
    }
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": kind, "auto_map": classes})
    )
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    own = {"auto_map": {"AutoTokenizer": ["tokenization_own.T", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | own))
    if served:
        assert load_classifier(Settings(model=str(folder)), FP32).kind == "nli"
    else:
        with pytest.raises(ModelError, match=r"config\.json"):
            load_classifier(Settings(model=str(folder)), FP32)
    assert not made.exists()
    assert "[y/N]" not in capsys.readouterr().out


def test_first_forward_pass_failure_is_a_model_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model("bert", tmp_path, NLI)
    for fault in (DeviceFull("no memory"), TypeError("an argument\nis missing")):
        with monkeypatch.context() as patch:
            patch.setattr(Entailment, "forward", Mock(side_effect=fault))
            with pytest.raises(ModelError, match=naming("cpu", type(fault).__name__)):
                load_classifier(Settings(model=str(folder)), FP32)
    monkeypatch.setattr(
        torch_engine,
        "TorchEngine",
        Mock(side_effect=torch.OutOfMemoryError("no memory")),
    )
    with pytest.raises(ModelError, match=naming("cpu", "no memory")):
        load_classifier(Settings(model=str(folder)), FP32)
    monkeypatch.undo()
    with pytest.raises(SettingsError, match="labels"):
        load_classifier(
            Settings(
                model=str(folder),
                max_tokens=8,
                labels=("a label of very many words indeed"),
            ),
            FP32,
        )


def test_rejects_a_model_larger_than_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = locate(str(make_model("bert", tmp_path, NLI)))
    check_size(weights, FP32)
    monkeypatch.setattr(registry, "_memory", lambda _: 1000)
    with pytest.raises(ModelError, match=naming("0.0 GB", "float32", "cpu")):
        check_size(weights, FP32)
