"""workers/models/classifiers/fixed_labels.py: scores equal those of transformers'
text-classification pipeline.
"""

from pathlib import Path
from typing import Any

import pytest
from transformers import pipeline

from feedmill.shared.errors import ModelError, RequestRefused
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers.fixed_labels import SequenceClassifier
from feedmill.workers.models.weights import Weights
from tests.fakes.models import FP32, cases_of, make_model, scores_of
from tests.support import naming

LABELS = {0: "NEGATIVE", 1: "POSITIVE", 2: "MIXED"}
TEXTS = [
    "The match ended in a draw.",
    "x",
    "I baked bread " * 200,
    "😀 </s> [SEP]",
    "你好 Ünï",
]
ARCHITECTURES = (
    "distilbert",
    "bert",
    "roberta",
    "xlm-roberta",
    "electra",
    "bart",
    "deberta-v2",
    "modernbert",
)


def loaded(folder: Path, **settings: Any) -> SequenceClassifier:
    return SequenceClassifier(
        Weights(folder.name, folder, None, "00"), FP32, Settings(**settings)
    )


def theirs(folder: Path, texts: list[str]) -> list[dict[str, float]]:
    classify: Any = pipeline(
        "text-classification", model=str(folder), top_k=None, truncation=True
    )
    return [
        {entry["label"]: entry["score"] for entry in found} for found in classify(texts)
    ]


def assert_equal(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("architecture", cases_of(ARCHITECTURES))
def test_scores_match_for_each_architecture(tmp_path: Path, architecture: str) -> None:
    folder = make_model(architecture, tmp_path, LABELS)
    found = scores_of(loaded(folder), TEXTS)
    assert_equal(found, theirs(folder, TEXTS))
    spread = max(max(scores.values()) - min(scores.values()) for scores in found)
    assert spread > 0.05, "scores differ enough to compare"


@pytest.mark.parametrize("architecture", ["bert", "electra", "roberta", "xlm-roberta"])
@pytest.mark.parametrize("options", [{"is_decoder": True}, {"return_dict": False}])
def test_scores_match_for_rare_options(
    tmp_path: Path, architecture: str, options: dict[str, Any]
) -> None:
    """An encoder as a decoder attends to earlier tokens alone; a model for TorchScript returns
    tuples.
    """
    folder = make_model(architecture, tmp_path, LABELS, **options)
    expected = theirs(
        make_model(
            architecture, tmp_path / "named", LABELS, **options | {"return_dict": True}
        ),
        TEXTS,
    )
    assert_equal(scores_of(loaded(folder), TEXTS), expected)


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        (LABELS, "multi_label_classification"),
        (LABELS, "regression"),
        ({0: "toxic"}, None),
        ({0: "stars"}, "regression"),
    ],
)
def test_follows_the_configured_problem_type(
    tmp_path: Path, labels: dict[int, str], problem: str | None
) -> None:
    folder = make_model("distilbert", tmp_path, labels, problem_type=problem)
    assert_equal(scores_of(loaded(folder), TEXTS), theirs(folder, TEXTS))


def test_scores_are_those_of_the_cleaned_text(tmp_path: Path) -> None:
    """Sources that escape HTML and those that do not give a post the same scores, those of the
    plain text.
    """
    folder = make_model("bert", tmp_path, LABELS)
    posts = [
        Post(id="1", title=" Which bank & rate? "),
        Post(id="2", title=("Which bank &amp; rate?\n")),
    ]
    found = scores_of(loaded(folder), [post.text for post in posts])
    assert_equal(found, theirs(folder, ["Which bank & rate?"] * 2))


def test_rejects_options_of_zero_shot_models(tmp_path: Path) -> None:
    classifier = loaded(make_model("bert", tmp_path, LABELS))
    for options, reason in (
        ({"labels": ["a"]}, "^labels: .*NEGATIVE, POSITIVE, MIXED"),
        ({"template": "It is {}."}, "^template: "),
        ({"multi_label": True}, "^multi_label: "),
    ):
        with pytest.raises(RequestRefused, match=reason):
            classifier.label_set(ClassifyOptions.parse(options))


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (dict(enumerate(map(str, range(1001)))), naming("1,001", "1,000")),
        ({0: "fine", 1: "x" * 201}, naming(201, 200, "config.json")),
        ({0: "same", 1: "same"}, naming(2, 1, "label")),
    ],
)
def test_rejects_unusable_labels(
    tmp_path: Path, labels: dict[int, str], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        loaded(make_model("bert", tmp_path, labels))
