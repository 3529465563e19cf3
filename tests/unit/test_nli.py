"""workers/models/classifiers/pairs.py: scores equal those of transformers' zero-shot pipeline on
the same weights.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from feedmill.shared.errors import RequestRefused
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers.pairs import Entailment
from feedmill.workers.models.weights import Weights
from tests.fakes.models import NLI, cases_of, fp, make_model, scores_of
from tests.support import long_cases

ARCHITECTURES = (
    "bart",
    "roberta",
    "xlm-roberta",
    "bert",
    "electra",
    "distilbert",
    "deberta-v2",
    "modernbert",
)
#: For what depends on the tokenizer only: an architecture with each kind.
each_tokenizer = pytest.mark.parametrize(
    "folder", ["bart", "bert", "deberta-v2"], indirect=True
)
LABELS = ["sports", "technology", "food", "climate change"]
TEXTS = [
    "The match ended in a draw.",
    "My laptop will not boot since the last update, what should I try? "
    * 8,  # truncated
    "</s> a text </s> with <s> special [SEP] tokens [CLS] in it",
    "😀🎉🔥",
    "x",
    "  \n\t bread  ",
    "Ünïcödé 你好 e\u0301",
]


def theirs(
    folder: Path, texts: Sequence[str], **options: Any
) -> list[dict[str, float]]:
    """Return the scores of transformers' pipeline, computed row by row."""
    zero_shot = pipeline("zero-shot-classification", model=str(folder))
    return [
        dict(zip(found["labels"], found["scores"], strict=True))
        for found in zero_shot(list(texts), **options)
    ]


def assert_equal(
    ours: list[dict[str, float]], theirs: list[dict[str, float]], tolerance: float
) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        assert max(abs(mine[label] - other[label]) for label in other) <= tolerance
        order = sorted(mine, key=lambda label: -mine[label])
        for better, worse in zip(list(other), list(other)[1:], strict=False):
            if (
                other[better] - other[worse] > 2 * tolerance
            ):  # closer scores may swap places
                assert order.index(better) < order.index(worse)


@pytest.fixture(scope="module", params=cases_of(ARCHITECTURES))
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return make_model(request.param, tmp_path_factory.mktemp(request.param), NLI)


def loaded(folder: Path, **settings: Any) -> Entailment:
    return Entailment(
        Weights(folder.name, folder, None, "00"), fp(), Settings(**settings)
    )


@pytest.mark.parametrize("multi_label", [False, True])
def test_scores_match(folder: Path, multi_label: bool) -> None:
    texts = [*TEXTS, "I baked bread " + "and bread " * 4_000]  # 40,000 characters
    found = scores_of(loaded(folder), texts, labels=LABELS, multi_label=multi_label)
    assert_equal(
        found,
        theirs(folder, texts, candidate_labels=LABELS, multi_label=multi_label),
        1e-5,
    )
    spread = max(max(scores.values()) - min(scores.values()) for scores in found)
    assert spread > 0.05, "scores differ enough to compare"
    assert multi_label or all(
        math.isclose(sum(scores.values()), 1, abs_tol=1e-5) for scores in found
    )


@each_tokenizer
def test_only_label_competes_with_contradiction(folder: Path) -> None:
    found = scores_of(loaded(folder), TEXTS[:3], labels=["sports"])
    assert_equal(found, theirs(folder, TEXTS[:3], candidate_labels=["sports"]), 1e-5)
    assert found[0]["sports"] < 1


@each_tokenizer
@pytest.mark.parametrize(
    "template",
    [
        "Is this about {}? It is {}.",
        " {} </s>",
        *long_cases("{}", "Dieses Beispiel ist {}"),
    ],
)
def test_template_scores_match(folder: Path, template: str) -> None:
    found = scores_of(loaded(folder), TEXTS[:3], labels=LABELS, template=template)
    # the pipeline uses str.format; ours replaces each {}
    one_place = template.replace("{}", "{0}")
    assert_equal(
        found,
        theirs(
            folder, TEXTS[:3], candidate_labels=LABELS, hypothesis_template=one_place
        ),
        1e-5,
    )


def test_reads_models_with_entailment_first(tmp_path: Path) -> None:
    folder = make_model(
        "bert", tmp_path, {0: "ENTAILMENT", 1: "neutral", 2: "contradiction"}
    )
    for multi_label in (False, True):
        found = scores_of(
            loaded(folder), TEXTS[:3], labels=LABELS, multi_label=multi_label
        )
        assert_equal(
            found,
            theirs(folder, TEXTS[:3], candidate_labels=LABELS, multi_label=multi_label),
            1e-5,
        )


def test_uses_the_last_label_without_entailment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_model("bert", tmp_path, {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"})
    found = scores_of(loaded(folder), TEXTS[:2], labels=LABELS)
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "label" in warning.getMessage()
    assert_equal(found, theirs(folder, TEXTS[:2], candidate_labels=LABELS), 1e-5)


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_supports_left_padding_tokenizers(tmp_path: Path, architecture: str) -> None:
    folder = make_model(architecture, tmp_path, NLI, padding_side="left")
    found = scores_of(loaded(folder), TEXTS[:5], labels=LABELS)
    expected = [
        theirs(folder, [text], candidate_labels=LABELS)[0] for text in TEXTS[:5]
    ]
    assert_equal(found, expected, 1e-5)


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_decoders_without_padding_token_read_the_last_token(
    tmp_path: Path, architecture: str
) -> None:
    """A tokenizer may end pairs with the token that it pads with, and an author a text."""
    folder = make_model(architecture, tmp_path, NLI, pad_token_id=None)
    texts = [*TEXTS[:5], "bread<|endoftext|>", "<|endoftext|>"]
    ours = scores_of(loaded(folder, template="{}<|endoftext|>"), texts, labels=LABELS)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text, scores in zip(texts, ours, strict=True):
        entailments = []
        for label in LABELS:
            pair = tokenizer(
                text,
                f"{label}<|endoftext|>",
                truncation="only_first",
                return_tensors="pt",
            )
            with torch.inference_mode():
                entailments.append(model(**pair).logits[0, 2])
        expected = torch.stack(entailments).softmax(0).tolist()
        assert [scores[label] for label in LABELS] == pytest.approx(expected, abs=1e-4)


@each_tokenizer
def test_label_sets_share_a_forward_pass(folder: Path) -> None:
    classifier = loaded(folder)
    sets = [
        classifier.label_set(ClassifyOptions.parse({"labels": labels}))
        for labels in (LABELS, ["food", "sports"])
    ]
    rows = []
    for number, label_set in enumerate(sets):
        for row in classifier.prepare([TEXTS[0]], label_set)[0]:
            row.owner = number
            rows.append(row)
    # The rows are computed in two forward passes. The last row finishes the post.
    first = classifier.finish(rows[:5], classifier.forward(rows[:5]))
    second = classifier.finish(rows[5:], classifier.forward(rows[5:]))
    assert [row.owner for row, _ in first] == [0]
    assert [row.owner for row, _ in second] == [1]
    expected = [
        theirs(folder, [TEXTS[0]], candidate_labels=labels)[0]
        for labels in (LABELS, ["food", "sports"])
    ]
    assert_equal([first[0][1], second[0][1]], expected, 1e-5)


@each_tokenizer
def test_refuses_labels_that_leave_no_room_for_posts(folder: Path) -> None:
    classifier = loaded(folder, max_tokens=16)
    with pytest.raises(RequestRefused, match=r"^labels: "):
        classifier.label_set(
            ClassifyOptions.parse({"labels": ["a label of very many words " * 4]})
        )
    with pytest.raises(RequestRefused, match=r"^labels: .*\b2\b"):
        classifier.label_set(
            ClassifyOptions.parse({"labels": {"food": ["bread", "soup"], "b": "c"}})
        )
