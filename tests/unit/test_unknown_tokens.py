"""Texts with tokens of which the tokenizer knows more than the model: only their posts fail, and
without a traceback.

On a GPU, the look-up of a vector that is not there would end the worker, again after each
redelivery.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import feedmill
from feedmill.shared.errors import ModelError
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers.registry import load_classifier
from tests.fakes.models import (
    FP32,
    NLI,
    _bert,
    make_gliclass,
    make_model,
    make_sentence_model,
)
from tests.unit.test_static import save_model2vec

#: A token that the model has no vector for.
STRANGE = "<strange>"
TEXTS = ["The match ended in a draw.", f"a {STRANGE} match", "bread"]
LABELS = {0: "bad", 1: "good", 2: "mixed"}


@pytest.fixture(autouse=True)
def _no_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDMILL_TOKEN_BUDGET", "2048")  # measuring it takes seconds


def with_strange_token(folder: Path) -> Path:
    """Add a token to a folder's tokenizer, as `add_tokens` does without
    `resize_token_embeddings`.
    """
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    known = [
        *content["model"]["vocab"],
        *(token["content"] for token in content["added_tokens"]),
    ]
    token = {
        "content": STRANGE,
        "special": False,
        "normalized": False,
        "lstrip": False,
        "rstrip": False,
    }
    content["added_tokens"].append(token | {"id": len(known), "single_word": False})
    file.write_text(json.dumps(content))
    return folder


def make_sequence(folder: Path) -> Path:
    return make_model("distilbert", folder, LABELS)


def make_nli(folder: Path) -> Path:
    return make_model("bart", folder, NLI)


def make_bert_embeddings(folder: Path) -> Path:
    return make_sentence_model(folder, "bert")


def make_modern_embeddings(folder: Path) -> Path:
    return make_sentence_model(folder, "modernbert")


@pytest.mark.parametrize(
    "make",
    [
        make_sequence,
        make_nli,
        make_bert_embeddings,
        make_modern_embeddings,
        make_gliclass,
    ],
)
def test_only_posts_with_strange_tokens_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Any
) -> None:
    folder = with_strange_token(make(tmp_path / "model"))
    labels = None if make is make_sequence else ["food", "sports"]
    with feedmill.Classifier(
        str(folder), labels=labels, device="cpu", dtype="float32"
    ) as classifier:
        without = classifier.classify([TEXTS[0], TEXTS[2]])
        with pytest.warns(UserWarning, match=STRANGE):
            first, strange, last = classifier.classify(TEXTS)
    assert first.label is not None
    assert [first.label, last.label] == [prediction.label for prediction in without]
    assert strange.label is None
    assert strange.error is not None
    assert STRANGE in strange.error
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("make", [make_nli, make_modern_embeddings, make_gliclass])
def test_labels_with_strange_tokens_are_refused(tmp_path: Path, make: Any) -> None:
    folder = with_strange_token(make(tmp_path / "model"))
    with (
        feedmill.Classifier(
            str(folder), labels=["food", "sports"], device="cpu", dtype="float32"
        ) as classifier,
        pytest.raises(feedmill.UserError, match=f"labels: .*{STRANGE}"),
    ):
        classifier.classify(TEXTS[:1], labels=["food", STRANGE])


def test_static_embeddings_count_ids_and_not_tokens(tmp_path: Path) -> None:
    """Ids may have gaps: a tokenizer of few tokens can have ids beyond a larger table."""
    folder = save_model2vec(tmp_path / "model", _bert())
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.__getitem__)
    vocabulary[last] += 1
    file.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="its tokenizer has"):
        load_classifier(Settings(model=str(folder), labels={"food": ["food"]}), FP32)
