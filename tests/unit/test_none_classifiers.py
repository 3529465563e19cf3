"""The option `none` with every classifier, from Python and as a message's option."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import validate

import feedmill
from feedmill.shared.errors import RequestRefused
from feedmill.shared.messages import Classification, ClassifyOptions, Post
from feedmill.shared.none_of_these import (
    DEFAULT_NONE,
    DEFAULT_NONE_ALONE,
    DEFAULT_NONE_COSINE,
)
from feedmill.shared.settings import EMBEDDED_MODEL, Settings
from feedmill.workers.models.classifiers import (
    MAX_LABEL_SETS,
    Classifier,
    label_set_of,
)
from feedmill.workers.models.classifiers.fixed_labels import write_head
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.files import HEAD_FILE
from feedmill.workers.pipeline.backlog import Loaded
from feedmill.workers.pipeline.offline import OfflinePipeline
from tests.fakes.models import (
    FP32,
    NLI,
    make_gliclass,
    make_model,
    make_sentence_model,
    scores_of,
)
from tests.generated import SCHEMAS

LABELS = ["sports", "food", "travel"]
TEXTS = [
    "The keeper saved two penalties and the crowd went home happy",
    "Which form does the tax office want for a second flat?",
    "bread crust sourdough",
    "x",
]
POSTS = [
    Post(id=f"p{number}", title=text) for number, text in enumerate(TEXTS, start=1)
]
OWN_LABELS = dict(enumerate(LABELS))
#: Classifiers whose models bring their labels.
FIXED = ("sequence", "sequence of several labels", "head")
KINDS = ("similarity", "nli", "rerank", "rerank with logits", "gliclass", *FIXED)


@pytest.fixture(autouse=True)
def _no_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDMILL_TOKEN_BUDGET", "2048")  # measuring it takes seconds


def make(kind: str, folder: Path) -> str:
    """Save a model for a classifier, and return its name."""
    if kind == "similarity":
        return EMBEDDED_MODEL
    if kind == "gliclass":
        return str(make_gliclass(folder, "modernbert", scorer_type="mlp"))
    if kind == "head":
        make_sentence_model(folder)
        torch.manual_seed(3)
        write_head(
            folder / HEAD_FILE, tuple(LABELS), torch.randn(3, 32), torch.zeros(3)
        )
        return str(folder)
    if kind == "nli":
        return str(make_model("bert", folder, NLI))
    if kind == "sequence":
        return str(make_model("bert", folder, OWN_LABELS))
    if kind == "sequence of several labels":
        problem = "multi_label_classification"
        return str(make_model("bert", folder, OWN_LABELS, problem_type=problem))
    make_model("bert", folder, {0: "LABEL_0"})
    if kind == "rerank with logits":
        settings = {"activation_fn": "torch.nn.modules.linear.Identity"}
        file = folder / "config_sentence_transformers.json"
        file.write_text(json.dumps(settings))
    return str(folder)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def classifier(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Classifier:
    name = make(kind, tmp_path_factory.mktemp("model"))
    settings = Settings(model=name, device="cpu", dtype="float32")
    return load_classifier(settings, FP32)


@pytest.fixture(scope="module")
def pipeline(classifier: Classifier) -> Iterator[OfflinePipeline]:
    made = OfflinePipeline([Loaded(classifier, 4096)], Settings())
    yield made
    made.stop()


@pytest.fixture(scope="module")
def is_fixed(kind: str) -> bool:
    return kind in FIXED


def classified(
    pipeline: OfflinePipeline, is_fixed: bool, **options: Any
) -> list[Classification]:
    """Return the classifications of POSTS."""
    if not is_fixed:
        options["labels"] = LABELS
    outcomes = pipeline.classify(POSTS, ClassifyOptions.parse(options))
    classifications = []
    for _, outcome in outcomes:
        assert isinstance(outcome, Classification), outcome
        classifications.append(outcome)
    return classifications


def content(classifications: list[Classification]) -> list[dict[str, Any]]:
    """Return everything but the time."""
    return [item.model_dump(exclude={"classified_at"}) for item in classifications]


def test_off_changes_nothing(
    pipeline: OfflinePipeline, classifier: Classifier, is_fixed: bool
) -> None:
    unsaid = classified(pipeline, is_fixed)
    assert content(classified(pipeline, is_fixed, none=False)) == content(unsaid)
    assert None not in [item.label for item in unsaid]
    options: dict[str, Any] = {} if is_fixed else {"labels": LABELS}
    for item, scores in zip(
        unsaid, scores_of(classifier, TEXTS, **options), strict=True
    ):
        assert item.scores == pytest.approx(scores, abs=1e-5)
        assert item.label == max(scores, key=scores.__getitem__)


@pytest.mark.parametrize("none", [0, 0.2, 0.36, 0.5, 0.9, 1.0, True])
def test_a_post_has_no_label_exactly_if_its_best_score_is_below_the_threshold(
    pipeline: OfflinePipeline, classifier: Classifier, is_fixed: bool, none: Any
) -> None:
    options = ClassifyOptions(none=none)
    threshold = label_set_of(classifier, options).none
    assert threshold is not None
    for item in classified(pipeline, is_fixed, none=none):
        best = max(item.scores.values())
        assert (item.label is None) == (best < threshold)
        assert item.label_score == best
        assert item.best_label in LABELS


def test_with_threshold_0_every_post_has_a_label_and_with_1_hardly_any(
    pipeline: OfflinePipeline, is_fixed: bool
) -> None:
    labels = [item.label for item in classified(pipeline, is_fixed, none=0)]
    assert None not in labels
    hardly_any = [item.label for item in classified(pipeline, is_fixed, none=1.0)]
    assert hardly_any.count(None) > len(hardly_any) / 2


def test_a_higher_threshold_never_adds_a_label_or_changes_a_score(
    pipeline: OfflinePipeline, is_fixed: bool
) -> None:
    before = classified(pipeline, is_fixed, none=0)
    for none in (0.3, 0.5, 0.8):
        after = classified(pipeline, is_fixed, none=none)
        for old, new in zip(before, after, strict=True):
            assert new.scores == pytest.approx(old.scores, abs=1e-5)
            assert new.label in (old.label, None)
        before = after


def test_labels_alone_may_all_be_absent(
    pipeline: OfflinePipeline, kind: str, is_fixed: bool
) -> None:
    options: dict[str, Any] = {"multi_label": True}
    if kind in ("sequence", "head"):  # give each post exactly one label
        with pytest.raises(RequestRefused, match="multi_label"):
            classified(pipeline, is_fixed, none=0.5, **options)
        return
    plain = classified(pipeline, is_fixed, **options)
    for item, other in zip(
        classified(pipeline, is_fixed, none=0.5, **options), plain, strict=True
    ):
        best = max(item.scores.values())
        assert (item.label is None) == (best < 0.5)
        if kind != "rerank with logits":  # which become probabilities
            assert item.scores == pytest.approx(other.scores, abs=1e-5)


def test_results_match_the_schema(pipeline: OfflinePipeline, is_fixed: bool) -> None:
    schema = json.loads((SCHEMAS / "result.json").read_text())
    for none in (False, True, 1.0):
        outcomes = classified(pipeline, is_fixed, none=none)
        dumped = [item.model_dump(mode="json") for item in outcomes]
        validate(dumped, schema)


def test_the_threshold_is_part_of_the_recipe(classifier: Classifier) -> None:
    recipes = []
    for none in (None, False, True, 0.1, 0.2):
        options = ClassifyOptions(none=none)
        assert label_set_of(classifier, options) is label_set_of(classifier, options)
        recipes.append(label_set_of(classifier, options).recipe)
    assert recipes[0] == recipes[1] == classifier.label_set(ClassifyOptions()).recipe
    assert len(set(recipes)) == 4


def test_the_default_is_the_classifiers(classifier: Classifier, kind: str) -> None:
    default = DEFAULT_NONE if kind == "similarity" else DEFAULT_NONE_ALONE
    assert label_set_of(classifier, ClassifyOptions(none=True)).none == default


def test_the_workers_setting_applies_to_messages_that_say_nothing(
    classifier: Classifier, is_fixed: bool
) -> None:
    pipeline = OfflinePipeline([Loaded(classifier, 4096)], Settings(none=1.0))
    try:
        unsaid = classified(pipeline, is_fixed)
        off = classified(pipeline, is_fixed, none=False)
        own = classified(pipeline, is_fixed, none=0)
    finally:
        pipeline.stop()
    assert [item.label for item in unsaid].count(None) > len(unsaid) / 2
    assert None not in [item.label for item in off]
    assert None not in [item.label for item in own]
    assert off[0].fingerprint != unsaid[0].fingerprint


def test_many_thresholds_are_not_all_kept(tmp_path: Path) -> None:
    settings = Settings(model=make("sequence", tmp_path))
    classifier = load_classifier(settings, FP32)
    for number in range(3 * MAX_LABEL_SETS):
        options = ClassifyOptions(none=number / 1000)
        label_set_of(classifier, options)
    plain = classifier.label_set(ClassifyOptions())
    assert len(plain.by_threshold) <= MAX_LABEL_SETS


def test_cosines_have_a_default_of_their_own() -> None:
    settings = Settings()
    classifier = load_classifier(settings, FP32)
    options = ClassifyOptions(none=True, multi_label=True)
    label_set = label_set_of(classifier, options)
    assert label_set.none == DEFAULT_NONE_COSINE
    assert label_set.subjects is None


def test_a_deployed_model_serves_waiting_messages_with_its_labels_and_none(
    classifier: Classifier,
) -> None:
    options = ClassifyOptions.parse({"labels": LABELS[::-1], "none": True})
    label_set = label_set_of(classifier, options)
    assert set(label_set.labels) == set(LABELS)
    assert label_set.none is not None


def test_python_takes_none_with_every_option(tmp_path: Path) -> None:
    model = make("sequence", tmp_path)
    labelled = feedmill.classify(TEXTS, model=model, none=0)
    assert None not in labelled.counts()
    unlabelled = feedmill.classify(TEXTS, model=model, none=1.0)
    assert [prediction.label for prediction in unlabelled].count(None) > 2
    several = feedmill.classify(TEXTS, LABELS, none=1.0, multi_label=True)
    assert {prediction.label for prediction in several} == {None}
