"""workers/models/classifiers/shortlist.py: pairs only of the labels nearest to a post."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from feedmill.evaluation.report import models_table
from feedmill.evaluation.run import measure
from shared.errors import DeviceFull, ModelError
from shared.messages import Classification, ClassifyOptions, Post
from shared.settings import Settings
from tests.fakes.models import NLI, make_model, make_sentence_model
from tests.unit.test_nli import TEXTS, fp, ours
from workers.models.classifiers.nli import Entailment
from workers.models.classifiers.pairs import PairClassifier
from workers.models.classifiers.registry import load_classifier
from workers.models.classifiers.rerank import Reranker
from workers.models.classifiers.similarity import Similarity
from workers.models.weights import locate
from workers.pipeline import offline
from workers.pipeline.calibration import TokenBudget

LABELS = ["sports", "technology", "food", "climate change", "music", "travel"]
SIZE = 3


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sentence_model(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module", params=["nli", "rerank"])
def settings(request: pytest.FixtureRequest, embedder: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp(request.param)
    make_model("bert", folder, NLI if request.param == "nli" else {0: "LABEL_0"})
    return Settings(model=str(folder), labels=LABELS, shortlist=SIZE, shortlist_model=str(embedder))


def loaded(settings: Settings, **changed: Any) -> PairClassifier:
    found = load_classifier(settings.model_copy(update=changed), fp())
    assert isinstance(found, Entailment | Reranker)
    return found


def nearest(embedder: Path, texts: Sequence[str]) -> list[set[str]]:
    """Return the nearest labels of each text, from the similarity classifier itself."""
    similarity = Similarity(locate(str(embedder)), fp(), Settings())
    label_set = similarity.label_set(ClassifyOptions.parse({"labels": LABELS, "multi_label": True}))
    rows = [row for (row,) in similarity.prepare(texts, label_set)]
    found = [scores for _, scores in similarity.finish(rows, similarity.forward(rows))]
    return [set(sorted(scores, key=lambda label: -scores[label])[:SIZE]) for scores in found]


def test_scores_the_nearest_labels_as_without_a_shortlist(settings: Settings, embedder: Path) -> None:
    kept = ours(loaded(settings), TEXTS, multi_label=True)
    whole = ours(loaded(settings, shortlist=None), TEXTS, multi_label=True)
    assert [scores.keys() for scores in kept] == nearest(embedder, TEXTS)
    assert len({frozenset(scores) for scores in kept}) > 1, "posts differ in their nearest labels"
    for few, every in zip(kept, whole, strict=True):
        assert few == pytest.approx({label: every[label] for label in few}, abs=1e-5)


def test_single_label_scores_are_shares_of_the_scored_labels(settings: Settings) -> None:
    kept, whole = ours(loaded(settings), TEXTS), ours(loaded(settings, shortlist=None), TEXTS)
    for few, every in zip(kept, whole, strict=True):
        total = sum(every[label] for label in few)
        assert few == pytest.approx({label: every[label] / total for label in few}, abs=1e-4)


def test_a_post_costs_a_row_per_label_that_is_kept(settings: Settings) -> None:
    classifier = loaded(settings)
    for labels, rows in ((LABELS, SIZE), (LABELS[:4], SIZE), (LABELS[:SIZE], SIZE), (LABELS[:1], 1)):
        label_set = classifier.label_set(ClassifyOptions.parse({"labels": labels}))
        assert [len(found) for found in classifier.prepare(TEXTS, label_set)] == [rows] * len(TEXTS)
        assert label_set.rows == rows
        assert classifier.label_set(ClassifyOptions.parse({"labels": labels})) is label_set


def test_the_shortlist_is_part_of_the_recipe(settings: Settings, tmp_path: Path) -> None:
    other = str(make_sentence_model(tmp_path, dense=16))
    changes: list[dict[str, Any]] = [{}, {"shortlist": None}, {"shortlist": 2}, {"shortlist_model": other}]
    recipes = {loaded(settings, **changed).label_set(ClassifyOptions()).recipe for changed in changes}
    assert len(recipes) == len(changes)


def test_memory_errors_divide_the_batch(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = loaded(settings)
    expected = ours(classifier, TEXTS)
    forward = Similarity.forward

    def small(similarity: Similarity, rows: Sequence[Any]) -> Any:
        if len(rows) > 2:
            raise DeviceFull("no memory")
        return forward(similarity, rows)

    monkeypatch.setattr(Similarity, "forward", small)
    assert [scores.keys() for scores in ours(classifier, TEXTS)] == [scores.keys() for scores in expected]


def test_rejects_a_model_that_does_not_embed(settings: Settings) -> None:
    with pytest.raises(ModelError, match=r"FEEDMILL_SHORTLIST_MODEL: .*modules\.json"):
        loaded(settings, shortlist_model=settings.model)


def test_results_name_labels_without_scores(settings: Settings) -> None:
    posts = [Post(id=f"p{number}", title=text) for number, text in enumerate(TEXTS) if text.strip()]
    for _, found in offline.classify(iter(posts), loaded(settings), settings, TokenBudget(512)):
        assert isinstance(found, Classification)
        assert len(found.scores) == SIZE
        assert set(found.scores) | set(found.unscored) == set(LABELS)
        assert not set(found.scores) & set(found.unscored)
        assert found.label in found.scores


def test_evaluation_measures_the_recall_of_the_shortlist(
    settings: Settings, embedder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.pipeline.calibration.calibrate", Mock(return_value=TokenBudget(512)))
    texts = [text for text in TEXTS if text.strip()]
    known = [(Post(id=str(number), title=text), "food") for number, text in enumerate(texts)]
    recall = sum("food" in kept for kept in nearest(embedder, [post.text for post, _ in known])) / len(known)
    found = measure(known, loaded(settings), settings)
    assert found.shortlist_recall == found.summary(0)["shortlist_recall"] == recall
    assert 0 < recall < 1
    assert found.evaluation.accuracy <= recall
    whole = measure(known, loaded(settings, shortlist=None), settings)
    assert whole.shortlist_recall is None
    for measured, column in (([found, whole], True), ([whole], False)):
        table = models_table("model", [(each.model, each.summary(0)) for each in measured])
        assert ("shortlist recall" in [each.header for each in table.columns]) == column


def test_canary_finds_a_broken_embedding_model(settings: Settings, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 - only this test needs it

    folder = make_sentence_model(tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items() if "LayerNorm" in name}
    save_file(tensors | broken, file, {"format": "pt"})
    with pytest.raises(ModelError, match="not finite"):
        loaded(settings, shortlist_model=str(folder))
