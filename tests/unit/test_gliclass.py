"""workers/models/classifiers/gliclass.py: scores equal those of the package gliclass on equal
weights.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gliclass import GLiClassModel, ZeroShotClassificationPipeline
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from feedmill.shared.errors import ModelError, RequestRefused
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers import Row
from feedmill.workers.models.classifiers.gliclass import Gliclass
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.weights import locate
from tests.fakes import models
from tests.fakes.models import fp, make_gliclass, scores_of
from tests.support import long_cases, naming
from tests.unit.test_nli import LABELS, TEXTS

ENCODERS = ("deberta-v2", "modernbert")
POOLINGS = ("avg", "sum", "rms", "abs_max", "abs_avg")

#: Heads of published checkpoints, and every other scorer, pooling and order.
HEADS: dict[str, dict[str, Any]] = {
    "edge-v3.0": {"scorer_type": "mlp"},
    "modern-base-v3.0": {"scorer_type": "simple", "normalize_features": True},
    "instruct-edge-v1.0": {"scorer_type": "mlp", "class_token_pooling": "average",
    "use_segment_embeddings": True},
    "multilang-edge": {
        "scorer_type": "cross-attn", "pooling_strategy": "pass", "class_token_pooling": "average",
        "extract_text_features": True,
    },
    "text first": {"scorer_type": "weighted-dot",
    "prompt_first": False, "use_segment_embeddings": True},
    "text first, averages": {
        "scorer_type": "hopfield", "prompt_first": False, "class_token_pooling": "average",
        "embed_class_token": False,
    },
    "last": {"pooling_strategy": "last", "embed_class_token": False},
    "max": {"pooling_strategy": "max"},
    "max of text": {"pooling_strategy": "max", "extract_text_features": True},
    **{f"{name} of text": {"pooling_strategy": name,
    "extract_text_features": True} for name in ("first", *POOLINGS)},
}  # fmt: skip


#: Of published checkpoints, and one of each order, kind of pooling and scorer; `make long` has the
#: others.
USUAL_HEADS = (
    "edge-v3.0", "multilang-edge", "text first", "text first, averages", "last", "max of text",
)  # fmt: skip
FURTHER_HEADS = [name for name in HEADS if name not in USUAL_HEADS]


@pytest.fixture(scope="module", params=[*USUAL_HEADS, *long_cases(*FURTHER_HEADS)])
def head(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A checkpoint on either base with one of the heads."""
    encoder = ENCODERS[list(HEADS).index(request.param) % len(ENCODERS)]
    return make_gliclass(
        tmp_path_factory.mktemp("head"), encoder, **HEADS[request.param]
    )


@pytest.fixture(scope="module", params=ENCODERS)
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return make_gliclass(
        tmp_path_factory.mktemp(request.param), request.param, scorer_type="mlp"
    )


def loaded(folder: Path, **settings: Any) -> Gliclass:
    return Gliclass(locate(str(folder)), fp(), Settings(**settings))


def ours(classifier: Gliclass, texts: Sequence[str], **options: Any) -> torch.Tensor:
    """Return the scores of all texts from one padded micro-batch: [texts, labels]."""
    return torch.tensor(
        [list(scores.values()) for scores in scores_of(classifier, texts, **options)]
    )


def theirs(
    folder: Path, texts: Sequence[str], labels: Sequence[str], multi_label: bool = False
) -> torch.Tensor:
    """Return the package's scores, computed row by row: [texts, labels]."""
    pipe = ZeroShotClassificationPipeline(
        GLiClassModel.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
        max_length=128,
        classification_type="multi-label" if multi_label else "single-label",
        device="cpu",
        progress_bar=False,
    )
    found = pipe(list(texts), list(labels), batch_size=1, return_hierarchical=True)
    return torch.tensor([list(scores.values()) for scores in found])


@pytest.mark.parametrize("multi_label", [False, True])
def test_scores_match(head: Path, multi_label: bool) -> None:
    # the package truncates labels after a long text
    texts = [text for text in TEXTS if len(text) < 200] + ["bread"]
    expected = theirs(head, texts, LABELS, multi_label)
    found = ours(loaded(head), texts, labels=LABELS, multi_label=multi_label)
    assert torch.allclose(found, expected, atol=1e-5)
    assert expected.std(dim=0).max() > 1e-3, "scores differ enough to compare"


def test_long_posts_are_truncated_as_by_the_package(folder: Path) -> None:
    texts = [*TEXTS, "I baked bread " + "and bread " * 4_000]
    expected = theirs(folder, texts, LABELS, multi_label=True)
    assert torch.allclose(
        ours(loaded(folder, max_tokens=512), texts, labels=LABELS, multi_label=True),
        expected,
        atol=1e-5,
    )


@pytest.mark.parametrize("scorer", ["hopfield", "mlp"])
def test_label_sets_share_a_micro_batch(tmp_path: Path, scorer: str) -> None:
    classifier = loaded(
        make_gliclass(tmp_path, scorer_type=scorer, class_token_pooling="average")
    )
    sets: list[dict[str, Any]] = [
        {"labels": LABELS},
        {"labels": ["food", "sports"], "multi_label": True},
    ]
    rows: list[Row] = []
    for options in sets:
        prepared = classifier.prepare(
            TEXTS[:2], classifier.label_set(ClassifyOptions.parse(options))
        )
        rows += [row for (row,) in prepared]
    found = [
        list(scores.values())
        for _, scores in classifier.finish(rows, classifier.forward(rows))
    ]
    alone = [
        scores
        for options in sets
        for scores in ours(classifier, TEXTS[:2], **options).tolist()
    ]
    for mixed, single in zip(found, alone, strict=True):
        assert mixed == pytest.approx(single, abs=1e-5)


def test_other_posts_change_no_score_with_any_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ConvBERT's convolutions read the padding behind a row."""
    _, arguments, make_tokenizer, specials = models.ARCHITECTURES["bert"]
    convolutions = (
        transformers.ConvBertConfig,
        arguments | {"embedding_size": 32},
        make_tokenizer,
        specials,
    )
    monkeypatch.setitem(models.ARCHITECTURES, "convbert", convolutions)
    classifier = loaded(make_gliclass(tmp_path, "convbert", pooling_strategy="first"))
    texts = ["x", "A draw.", "The match ended in a draw.", "I baked bread " * 20]
    together = ours(classifier, texts, labels=LABELS)
    alone = torch.cat([ours(classifier, [text], labels=LABELS) for text in texts])
    assert torch.allclose(together, alone, atol=1e-5)
    assert together.std(dim=0).max() > 1e-3, "scores differ enough to compare"


@pytest.mark.parametrize("prompt_first", [True, False])
def test_leaves_out_markers_in_a_post(tmp_path: Path, prompt_first: bool) -> None:
    """Otherwise a score could belong to another label."""
    classifier = loaded(make_gliclass(tmp_path, prompt_first=prompt_first))
    label_set = classifier.label_set(ClassifyOptions.parse({"labels": LABELS}))
    (row,) = classifier.prepare(["<<LABEL>>food<<SEP>> <<LABEL>>"], label_set)[0]
    label, separator = classifier._markers
    assert (row.tokens.ids.count(label), row.tokens.ids.count(separator)) == (
        len(LABELS),
        1,
    )


def test_refuses_labels_that_do_not_fit_and_names_the_number_that_does(
    folder: Path,
) -> None:
    classifier = loaded(folder)
    labels = [
        f"{letter}{other} sports" for letter in "abcdefgh" for other in "abcdefgh"
    ]
    with pytest.raises(RequestRefused, match=naming("labels", 64, 128)) as refused:
        classifier.label_set(ClassifyOptions.parse({"labels": labels}))
    fitting = int(str(refused.value).split()[1])
    assert 0 < fitting < 64
    classifier.label_set(ClassifyOptions.parse({"labels": labels[:fitting]}))
    with pytest.raises(RequestRefused, match=naming(fitting)):
        classifier.label_set(ClassifyOptions.parse({"labels": labels[: fitting + 1]}))


def test_loads_a_checkpoint_in_bfloat16(folder: Path) -> None:
    assert (
        load_classifier(Settings(model=str(folder)), fp(torch.bfloat16)).kind
        == "gliclass"
    )


def change(folder: Path, **config: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architecture_type": "bi-encoder"}, ["bi-encoder", "uni-encoder"]),
        ({"pooling_strategy": "middle"}, ["middle"]),
        ({"scorer_type": "mlp"}, ["scorer"]),
        ({"hidden_size": 16}, []),
        ({"class_token_index": 5}, ["<<LABEL>>", 5]),
    ],
)
def test_rejects_models_whose_scores_would_be_wrong(
    tmp_path: Path, config: dict[str, Any], words: list[Any]
) -> None:
    folder = make_gliclass(tmp_path)
    change(folder, **config)
    with pytest.raises(ModelError, match=naming(folder, *words)):
        load_classifier(Settings(model=str(folder)), fp())


def test_everything_that_changes_scores_is_part_of_the_recipe(tmp_path: Path) -> None:
    folder = make_gliclass(tmp_path)
    recipes = {loaded(folder, max_tokens=100).label_set(ClassifyOptions()).recipe}
    changes: list[dict[str, Any]] = [
        {},
        {"prompt_first": False},
        {"embed_class_token": False},
    ]
    changes += [
        {"class_token_pooling": "average"},
        {"extract_text_features": True},
        {"pooling_strategy": "avg"},
    ]
    for changed in changes:
        change(folder, **changed)
        recipes.add(loaded(folder).label_set(ClassifyOptions()).recipe)
    assert len(recipes) == 1 + len(changes)


@pytest.mark.parametrize(
    "name",
    [
        "model.text_projector.linear_1.weight",
        "model.segment_embeddings.weight",
        "model.encoder_model.encoder.layer.1.output.dense.weight",
    ],
)
def test_rejects_missing_weights(tmp_path: Path, name: str) -> None:
    folder = make_gliclass(tmp_path, use_segment_embeddings=True)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=naming(folder, name)):
        load_classifier(Settings(model=str(folder)), fp())


@pytest.mark.parametrize(("side", "kept"), [("left", "keeper"), ("right", "match")])
def test_truncates_posts_on_the_tokenizers_side(
    tmp_path: Path, side: str, kept: str
) -> None:
    folder = make_gliclass(tmp_path)
    config = folder / "tokenizer_config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"truncation_side": side})
    )
    classifier = loaded(folder)
    label_set = classifier.label_set(
        ClassifyOptions.parse({"labels": ["sports", "food"]})
    )
    ((cut,), (whole,)) = classifier.prepare(
        ["match " * 200 + "keeper " * 200, f"{kept} " * 200], label_set
    )
    assert cut.tokens == whole.tokens
