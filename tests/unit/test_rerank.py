"""workers/models/classifiers/pairs.py: scores equal those of sentence-transformers' CrossEncoder
on equal weights.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import CrossEncoder

from feedmill.shared.errors import ModelError
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers.pairs import Reranker
from feedmill.workers.models.weights import Weights
from tests.fakes.models import cases_of, fp, make_model, scores_of
from tests.support import naming
from tests.unit.test_nli import LABELS, TEXTS

ARCHITECTURES = (
    "roberta",
    "xlm-roberta",
    "bert",
    "electra",
    "distilbert",
    "deberta-v2",
    "modernbert",
)
ONE = {0: "LABEL_0"}


@pytest.fixture(scope="module", params=cases_of(ARCHITECTURES))
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return make_model(request.param, tmp_path_factory.mktemp(request.param), ONE)


def loaded(folder: Path, **settings: Any) -> Reranker:
    return Reranker(
        Weights(folder.name, folder, None, "00"), fp(), Settings(**settings)
    )


def theirs(
    folder: Path, texts: Sequence[str], labels: Sequence[str], **options: Any
) -> torch.Tensor:
    """Return CrossEncoder's scores: [texts, labels]."""
    model = CrossEncoder(str(folder), device="cpu")
    pairs = [
        (text, f"This post is about {label}.") for text in texts for label in labels
    ]
    found: torch.Tensor = model.predict(
        pairs, convert_to_tensor=True, show_progress_bar=False, **options
    )
    return found.view(len(texts), len(labels))


def scores(found: list[dict[str, float]]) -> torch.Tensor:
    return torch.tensor([list(scores.values()) for scores in found])


def test_scores_match(folder: Path) -> None:
    """A single label's scores are the softmax of the logits."""
    texts = [*TEXTS, "I baked bread " + "and bread " * 4_000]
    multi, logits = (
        theirs(folder, texts, LABELS),
        theirs(folder, texts, LABELS, activation_fn=torch.nn.Identity()),
    )
    assert multi.std() > 0.01, "scores differ enough to compare"
    for multi_label, expected in ((True, multi), (False, logits.softmax(-1))):
        found = scores(
            scores_of(loaded(folder), texts, labels=LABELS, multi_label=multi_label)
        )
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    "activation", [torch.nn.Identity, torch.nn.Sigmoid, torch.nn.Tanh, torch.nn.ReLU]
)
def test_activation_follows_the_configuration(
    tmp_path: Path, activation: type[torch.nn.Module]
) -> None:
    """The activation is in config.json, under one of two keys, or in
    config_sentence_transformers.json.
    """
    name = f"{activation.__module__}.{activation.__name__}"
    of_old = make_model(
        "bert", tmp_path / "old", ONE, sbert_ce_default_activation_function=name
    )
    of_v4 = make_model(
        "bert", tmp_path / "v4", ONE, sentence_transformers={"activation_fn": name}
    )
    of_new, plain = tmp_path / "new", make_model("bert", tmp_path / "plain", ONE)
    CrossEncoder(str(plain), device="cpu", activation_fn=activation()).save_pretrained(
        str(of_new)
    )
    expected = activation()(
        theirs(plain, TEXTS, LABELS, activation_fn=torch.nn.Identity())
    )
    for folder in (of_old, of_v4, of_new):
        found = scores(
            scores_of(loaded(folder), TEXTS, labels=LABELS, multi_label=True)
        )
        assert torch.allclose(found, expected, atol=1e-5)
        assert torch.allclose(found, theirs(folder, TEXTS, LABELS), atol=1e-5)


def test_default_prompt_limit_and_case_match(tmp_path: Path) -> None:
    """A prompt precedes the post, as it precedes the first text of CrossEncoder's pairs."""
    made, folder = make_model("roberta", tmp_path / "model", ONE), tmp_path / "saved"
    prompts = {"topic": "Topic of this post: "}
    model = CrossEncoder(
        str(made), device="cpu", prompts=prompts, default_prompt_name="topic"
    )
    model.save_pretrained(str(folder))
    file = folder / "sentence_bert_config.json"
    file.write_text(
        json.dumps(
            json.loads(file.read_text()) | {"max_seq_length": 40, "do_lower_case": True}
        )
    )
    found = scores(scores_of(loaded(folder), TEXTS, labels=LABELS, multi_label=True))
    assert torch.allclose(found, theirs(folder, TEXTS, LABELS), atol=1e-5)
    without = scores(scores_of(loaded(made), TEXTS, labels=LABELS, multi_label=True))
    assert not torch.allclose(found, without, atol=1e-3)
    for chosen, options in (
        ("none", {"prompt": ""}),
        ("topic", {"prompt_name": "topic"}),
        ("A: ", {"prompt": "A: "}),
    ):
        found = scores(
            scores_of(
                loaded(folder, post_prompt=chosen),
                TEXTS,
                labels=LABELS,
                multi_label=True,
            )
        )
        assert torch.allclose(
            found, theirs(folder, TEXTS, LABELS, **options), atol=1e-5
        )


def test_everything_that_changes_scores_is_part_of_the_recipe(tmp_path: Path) -> None:
    folder = make_model("bert", tmp_path, ONE)
    recipes = [loaded(folder).label_set(ClassifyOptions()).recipe]
    for file, changed in (
        (
            "config_sentence_transformers.json",
            {"prompts": {"a": "topic: "}, "default_prompt_name": "a"},
        ),
        (
            "config_sentence_transformers.json",
            {"activation_fn": "torch.nn.modules.linear.Identity"},
        ),
        ("sentence_bert_config.json", {"max_seq_length": 50}),
        ("sentence_bert_config.json", {"do_lower_case": True}),
    ):
        (folder / file).write_text(json.dumps(changed))
        recipes.append(loaded(folder).label_set(ClassifyOptions()).recipe)
    assert len(set(recipes)) == len(recipes)


@pytest.mark.parametrize(
    ("labels", "config", "words"),
    [
        ({0: "a", 1: "b"}, {}, ["2", "FEEDMILL_CLASSIFIER"]),
        (ONE, {"sbert_ce_default_activation_function": "somewhere.Custom"}, ["Custom"]),
    ],
)
def test_rejects_models_whose_scores_would_be_wrong(
    tmp_path: Path, labels: dict[int, str], config: dict[str, Any], words: list[str]
) -> None:
    folder = make_model("bert", tmp_path, labels, **config)
    with pytest.raises(ModelError, match=naming(folder.name, *words)):
        loaded(folder)


def test_rejects_a_chat_template(tmp_path: Path) -> None:
    folder = make_model("gpt2", tmp_path, ONE)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    with pytest.raises(ModelError, match="chat template"):
        loaded(folder)
