"""Posts that fit no label: shared/none_of_these.py,
workers/models/classifiers/none_of_these.py, and the option `none` with the real weights.
"""

import math
from typing import Any

import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import feedmill
from feedmill.shared.errors import RequestRefused
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.none_of_these import (
    DEFAULT_NONE,
    best_f1_threshold,
    precise_threshold,
)
from feedmill.shared.results import pack, split, unpack
from feedmill.shared.settings import EMBEDDED_MODEL, Settings
from feedmill.workers.models.classifiers import LabelSet
from feedmill.workers.models.classifiers.none_of_these import (
    SUBJECT_WEIGHT,
    apart,
    fitting_scores,
    read_subjects,
)
from feedmill.workers.models.classifiers.similarity import COSINE_SCALE, Similarity
from feedmill.workers.models.weights import locate
from tests.fakes.models import FP32, scores_of
from tests.support import make_classification

LABELS = ["sports", "food"]
FITS = "The keeper saved two penalties and the crowd went home happy"
FITS_NONE = "Which form does the tax office want for a second flat?"
SCORES = st.lists(
    st.floats(0.01, 1) | st.sampled_from([0.2, 0.5]), min_size=1, max_size=30
)


@pytest.fixture(autouse=True)
def _no_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDMILL_TOKEN_BUDGET", "2048")  # measuring it takes seconds


@pytest.fixture(scope="module")
def classifier() -> Similarity:
    return Similarity(locate(EMBEDDED_MODEL), FP32, Settings())


def label_set(classifier: Similarity, **options: Any) -> LabelSet:
    return classifier.label_set(ClassifyOptions.parse(options))


# Thresholds.


def expected_f1(scores: list[float], threshold: float) -> float:
    labelled = [score for score in scores if score >= threshold]
    return 2 * math.fsum(labelled) / (len(labelled) + math.fsum(scores))


@given(SCORES)
def test_no_threshold_has_a_higher_expected_f1(scores: list[float]) -> None:
    best = expected_f1(scores, best_f1_threshold(scores))
    for other in scores:
        assert expected_f1(scores, other) <= best + 1e-9


@given(SCORES, st.floats(0.01, 1))
def test_labels_above_a_precise_threshold_are_expected_to_be_right(
    scores: list[float], precision: float
) -> None:
    threshold = precise_threshold(scores, precision)
    labelled = [score for score in scores if score >= threshold]
    assert math.fsum(labelled) >= precision * len(labelled) - 1e-9


@given(SCORES, st.floats(0.01, 1))
def test_no_lower_threshold_is_precise_enough(
    scores: list[float], precision: float
) -> None:
    threshold = precise_threshold(scores, precision)
    lower = [score for score in scores if score < threshold]
    if lower:
        labelled = [score for score in scores if score >= max(lower)]
        assert math.fsum(labelled) < precision * len(labelled) + 1e-9


def test_thresholds_of_four_scores() -> None:
    scores = [0.95, 0.9, 0.5, 0.1]
    assert precise_threshold(scores, 0.92) == 0.9
    assert best_f1_threshold(scores) == 0.5


def test_thresholds_without_scores() -> None:
    assert best_f1_threshold([]) == DEFAULT_NONE
    assert precise_threshold([], 0.9) == math.inf


# Scores.


def test_subjects_near_any_label_are_left_out() -> None:
    subjects = torch.eye(12)
    labels = torch.zeros(2, 12)
    labels[0, 3] = 1.0
    labels[1, 7] = 1.0
    others = [number for number in range(12) if number not in (3, 7)]
    assert torch.equal(apart(labels, subjects), subjects[others])


def test_scores_are_probabilities_among_labels_and_subjects() -> None:
    labels = torch.tensor([[2.0, 1.0]])
    subjects = torch.tensor([[3.0, 0.0, -1.0]])
    weights = labels.exp().sum() + SUBJECT_WEIGHT * subjects.exp().sum()
    scores = fitting_scores(labels, subjects)
    assert torch.allclose(scores, labels.exp() / weights)


def test_without_subjects_scores_are_those_of_the_labels_alone() -> None:
    labels = torch.tensor([[2.0, 1.0]])
    assert torch.equal(fitting_scores(labels, torch.zeros(1, 0)), labels.softmax(-1))


def test_each_subject_has_a_name_and_a_description() -> None:
    subjects = read_subjects()
    options = ClassifyOptions(labels=subjects)
    assert options.labels == subjects
    assert len({described for _, described in subjects.values()}) == len(subjects)


# The classifier.


def test_scores_match_their_definition(classifier: Similarity) -> None:
    labels = label_set(classifier, labels=LABELS, none=True)
    subjects = label_set(classifier, labels=read_subjects())
    (rows,) = classifier.prepare([FITS], labels)
    vector = classifier.embed([rows[0].tokens])
    label_vectors = classifier.label_vectors(labels)
    subject_vectors = apart(label_vectors, classifier.label_vectors(subjects))
    expected = fitting_scores(
        COSINE_SCALE * vector @ label_vectors.T,
        COSINE_SCALE * vector @ subject_vectors.T,
    )
    (scores,) = scores_of(classifier, [FITS], labels=LABELS, none=True)
    found = torch.tensor([[scores[label] for label in LABELS]])
    assert torch.allclose(found, expected, atol=1e-5)


def test_posts_that_fit_no_label_have_low_scores(classifier: Similarity) -> None:
    fitting, other = scores_of(classifier, [FITS, FITS_NONE], labels=LABELS, none=True)
    assert max(fitting, key=fitting.__getitem__) == "sports"
    assert fitting["sports"] >= DEFAULT_NONE
    assert sum(other.values()) < DEFAULT_NONE


def test_one_label_can_fit_or_not(classifier: Similarity) -> None:
    fitting, other = scores_of(
        classifier, [FITS, FITS_NONE], labels=["sports"], none=True
    )
    assert fitting["sports"] >= DEFAULT_NONE
    assert other["sports"] < DEFAULT_NONE


def test_rows_with_and_without_none_share_a_forward_pass(
    classifier: Similarity,
) -> None:
    plain = label_set(classifier, labels=LABELS)
    with_none = label_set(classifier, labels=LABELS, none=True)
    rows = []
    for labels in (plain, with_none):
        (prepared,) = classifier.prepare([FITS], labels)
        rows += prepared
    answers = classifier.finish(rows, classifier.forward(rows))
    (alone,) = scores_of(classifier, [FITS], labels=LABELS)
    (alone_with_none,) = scores_of(classifier, [FITS], labels=LABELS, none=True)
    assert [scores for _, scores in answers] == [
        pytest.approx(alone, abs=1e-5),
        pytest.approx(alone_with_none, abs=1e-5),
    ]


def test_subjects_use_the_template_of_the_labels(classifier: Similarity) -> None:
    template = "This review is about {}."
    labels = label_set(classifier, labels=LABELS, template=template, none=True)
    subjects = label_set(classifier, labels=read_subjects(), template=template)
    assert labels.subjects is subjects


def test_the_threshold_is_part_of_the_recipe_only_if_it_is_set(
    classifier: Similarity,
) -> None:
    plain = label_set(classifier, labels=LABELS)
    recipes = {
        label_set(classifier, labels=LABELS, none=none).recipe
        for none in (False, None, True, 0.5)
    }
    assert len(recipes) == 3
    assert plain.recipe in recipes
    assert plain.none is None


# Options, results and Python.


@pytest.mark.parametrize("none", [True, False, 0.0, 0.5, 1.0])
def test_a_message_says_what_it_was_told(none: float | bool) -> None:
    arguments = ClassifyOptions.parse({"none": none}).arguments()
    assert arguments == {"none": none}
    assert type(arguments["none"]) is type(none)
    assert ClassifyOptions.parse({"none": None}).arguments() == {}


@pytest.mark.parametrize("none", [-0.1, 1.1, math.nan, math.inf, "yes", [0.5]])
def test_refuses_other_thresholds(none: object) -> None:
    with pytest.raises(RequestRefused, match="^none: "):
        ClassifyOptions.parse({"none": none})


def test_stores_results_without_a_label() -> None:
    scores = {"sports": 0.2, "food": 0.1}
    labelled = make_classification(
        "t3_x",
        label="sports",
        scores=scores,
        fingerprint="f0443d56baefed70ea7db12a3a34028e",
    )
    result = labelled.model_copy(update={"label": None})
    record, context = pack(result)
    assert context is not None
    (stored,) = split(record)
    unpacked = unpack("t3_x", stored, {context.id: context}.get)
    assert unpacked is not None
    assert unpacked.label is None
    assert unpacked.best_label == "sports"
    assert unpacked.label_score == pytest.approx(0.2, abs=1e-5)


def test_a_prediction_without_a_label_names_the_best_one() -> None:
    fitting, other = feedmill.classify([FITS, FITS_NONE], LABELS, none=True)
    assert fitting.label == fitting.best_label == "sports"
    assert other.label is None
    assert other.error is None
    assert other.best_label in LABELS
    assert other.score is not None
    assert other.score < DEFAULT_NONE
    assert "best_label" in repr(other)


TEXTS = [
    FITS,
    FITS_NONE,
    "Slow-cooked beans, smoked paprika, a handful of parsley",
    "A handball coach explains his diet",
]


def test_a_precision_keeps_the_labels_that_are_expected_to_be_right() -> None:
    scored = feedmill.classify(TEXTS, LABELS, none=0)
    scores = [prediction.score for prediction in scored if prediction.score is not None]
    assert len(scores) == len(TEXTS)
    threshold = precise_threshold(scores, 0.6)
    expected = [
        prediction.best_label if score >= threshold else None
        for prediction, score in zip(scored, scores, strict=True)
    ]
    assert 0 < expected.count(None) < len(TEXTS)
    predictions = feedmill.classify(TEXTS, LABELS, precision=0.6)
    assert [prediction.label for prediction in predictions] == expected
    frame = feedmill.classify(pandas.DataFrame({"text": TEXTS}), LABELS, precision=0.6)
    labels = [None if pandas.isna(label) else label for label in frame["label"]]
    assert labels == expected
    assert frame["label_score"].tolist() == scores


@pytest.mark.parametrize("precision", [0, 1.5, -1, math.nan, True, "0.9"])
def test_refuses_other_precisions(precision: Any) -> None:
    with pytest.raises(feedmill.UserError, match="precision must be a number"):
        feedmill.classify(TEXTS, LABELS, precision=precision)


def test_refuses_a_precision_of_scores_that_are_no_probabilities() -> None:
    with pytest.raises(feedmill.UserError, match="multi_label"):
        feedmill.classify(TEXTS, LABELS, precision=0.9, multi_label=True)


def test_refuses_two_ways_to_choose_the_threshold() -> None:
    with pytest.raises(feedmill.UserError, match="none and precision"):
        feedmill.classify(TEXTS, LABELS, none=True, precision=0.9)


def test_without_none_each_prediction_has_a_label() -> None:
    predictions = feedmill.classify([FITS, FITS_NONE], LABELS)
    assert None not in predictions.counts()
