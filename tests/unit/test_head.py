"""Training and serving a head on frozen embeddings: `feedmill train --head`."""

import json
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch.nn.functional import normalize
from typer.testing import CliRunner

from feedmill.cli.main import application
from feedmill.cli.train import show_trained
from feedmill.console import Report
from feedmill.producers.records import Labelled
from feedmill.shared import logs
from feedmill.shared.errors import ModelError
from feedmill.shared.messages import Classification, ClassifyOptions, Post
from feedmill.shared.settings import Settings
from feedmill.training.data import Dataset
from feedmill.training.head import ADAPTED, NOTHING, Fit, HeadModel, fit, train_head
from feedmill.training.options import TrainOptions
from feedmill.workers.models.classifiers import Classifier
from feedmill.workers.models.classifiers.fixed_labels import (
    read_head,
    read_none_class,
    write_head,
)
from feedmill.workers.models.classifiers.registry import (
    classifier_kind,
    load_classifier,
)
from feedmill.workers.models.files import HEAD_FILE
from feedmill.workers.models.weights import locate
from feedmill.workers.pipeline import offline
from feedmill.workers.pipeline.backlog import Loaded
from tests.fakes.models import FP32, make_sentence_model, scores_of
from tests.support import naming

LABELS = ("food", "sports")
WORDS = {"food": "bread crust sourdough baked", "sports": "match keeper penalty draw"}
TEXTS = ["bread the bread", "match the match", "baked bread " * 60, "🙃"]


def examples(count: int) -> list[Labelled]:
    found = []
    for number in range(count):
        label = LABELS[number % 2]
        words = WORDS[label].split()
        found.append(
            Labelled(
                Post(
                    id=f"p{number}",
                    title=(f"{words[number % 4]} the {words[number % 3]} {number}"),
                ),
                label,
            )
        )
    return found


def trained(base: Path, settings: Settings | None = None) -> HeadModel:
    dataset = Dataset(LABELS, examples(40), [], {})
    options = TrainOptions(
        source="x", out="y", base=str(base), head=True, max_tokens=16
    )
    return train_head(
        dataset, options, settings or Settings(device="cpu", dtype="float32"), Report()
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_sentence_model(tmp_path_factory.mktemp("base"))
    prompts = {
        "prompts": {"topic": "climate: "},
        "default_prompt_name": None,
        "truncate_dim": 24,
    }
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


@pytest.fixture(scope="module")
def model(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    settings = Settings(device="cpu", dtype="float32", post_prompt="topic")
    trained(base, settings).save(folder)
    return folder


def scores(classifier: Classifier, texts: list[str]) -> torch.Tensor:
    """Return the scores: [texts, labels]."""
    return torch.tensor(
        [[each[label] for label in LABELS] for each in scores_of(classifier, texts)]
    )


def test_scores_equal_those_of_the_saved_model_in_sentence_transformers(
    model: Path,
) -> None:
    """The folder holds all that determines the embeddings: the token limit, the prompt and the
    dimensions.
    """
    classifier = load_classifier(Settings(model=str(model)), FP32)
    assert classifier.kind == "head"
    labels, weight, bias = read_head(locate(str(model)))
    assert (labels, [*weight.shape]) == (LABELS, [2, 24])
    assert (model / HEAD_FILE).stat().st_mode == (
        model / "config.json"
    ).stat().st_mode, "other users serve models"
    features = torch.tensor(
        SentenceTransformer(str(model), device="cpu").encode(
            TEXTS, normalize_embeddings=True
        )
    )
    expected = (features @ weight.T + bias).softmax(-1)
    assert torch.allclose(scores(classifier, TEXTS), expected, atol=1e-5)
    assert float(expected[:, 0].max() - expected[:, 0].min()) > 0.01, (
        "scores differ enough to compare"
    )


def test_learns_the_examples(model: Path) -> None:
    found = scores(
        load_classifier(Settings(model=str(model)), FP32),
        [each.post.text for each in examples(40)],
    )
    right = sum(
        LABELS[int(best)] == each.label
        for best, each in zip(found.argmax(1), examples(40), strict=True)
    )
    assert right >= 38


@pytest.mark.parametrize(
    ("labels", "example_count", "has_none"),
    [
        ({"food": ("bread and baking",), "sports": ("matches", "penalties")}, 0, True),
        ({"food": ("bread and baking",), "sports": ("sports",)}, 0, False),
        ({"food": ("food",), "sports": ("sports",)}, 0, False),
        ({"food": ("bread and baking",), "sports": ("matches", "penalties")}, 8, False),
    ],
)
def test_described_labels_compete_with_subjects_if_there_are_no_answers(
    base: Path,
    tmp_path: Path,
    labels: dict[str, tuple[str, ...]],
    example_count: int,
    has_none: bool,
) -> None:
    """Then the posts, most of which may fit no label, do not move the labels."""
    dataset = Dataset(LABELS, examples(example_count), [], {}, unlabelled=examples(40))
    options = TrainOptions(
        source="x", out="y", base=str(base), head=True, max_tokens=16
    )
    settings = Settings(device="cpu", dtype="float32", labels=labels)
    head_model = train_head(dataset, options, settings, Report())
    head_model.save(tmp_path)
    none_class = read_none_class(locate(str(tmp_path)))
    assert (none_class is not None) == has_none
    assert ("none" in head_model.record["plan"]) == has_none
    if none_class is None:
        return
    assert head_model.record["plan"]["none"]["threshold"] == none_class.threshold

    classifier = load_classifier(Settings(model=str(tmp_path)), FP32)
    posts = [example.post for example in examples(40)]
    model = Loaded(classifier, 2048)
    settings = Settings(model=str(tmp_path))
    classified = offline.classify(posts, [model], settings, ClassifyOptions(none=True))
    for _, outcome in classified:
        assert isinstance(outcome, Classification)
        fits = outcome.label_score >= none_class.threshold
        assert (outcome.label is not None) == fits


def test_another_head_is_another_model(model: Path, tmp_path: Path) -> None:
    """Results, deployments and token budgets tell models apart by the digest of their weights."""
    other = tmp_path / "other"
    other.mkdir()
    trained(model).save(other)  # a model with a head can be the base of another
    assert classifier_kind(locate(str(other))) == "head"
    labels, weight, bias = read_head(locate(str(other)))
    before = locate(str(other)).sha256
    write_head(other / HEAD_FILE, labels, weight, bias + 1)
    assert locate(str(other)).sha256 != before


def test_scales_logits_by_cross_validation() -> None:
    """Scores are low where labels are noise, and high where labels are clear."""
    source = torch.Generator().manual_seed(3)
    wanted = torch.arange(60) % 3
    noise = torch.randn(60, 16, generator=source)
    targets = torch.eye(3)[wanted]
    clear = targets @ torch.randn(3, 16, generator=source) + noise / 100
    certain = []
    for features in (noise, clear):
        fitted = fit(features, targets, None, 7)
        weight, bias = fitted.head
        logits = features @ weight.T + bias
        accuracy = float(fitted.right.mean())
        assert fitted.choice["accuracies"] == {NOTHING: pytest.approx(accuracy)}
        certain.append(float(logits.softmax(1).amax(1).mean()))
    assert certain[0] < 0.7
    assert certain[1] > 0.95
    assert logits.argmax(1).tolist() == wanted.tolist()
    few = fit(clear[:4], targets[:4], None, 7)
    assert few.choice["accuracies"] == {}
    assert few.right.isnan().all()


def stream(distance: float = 0.4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return posts around four centres, their labels, and label sentences at a distance from the
    centres.
    """
    source = torch.Generator().manual_seed(5)
    centres = normalize(torch.randn(4, 32, generator=source), dim=1)
    truth = torch.arange(600) % 4
    posts = normalize(
        centres[truth] + 0.25 * torch.randn(600, 32, generator=source), dim=1
    )
    return (
        posts,
        truth,
        normalize(centres + distance * torch.randn(4, 32, generator=source), dim=1),
    )


def accuracy(fitted: Fit, posts: torch.Tensor, truth: torch.Tensor) -> float:
    return float(
        ((posts @ fitted.head[0].T + fitted.head[1]).argmax(1) == truth).double().mean()
    )


def test_posts_without_a_label_adapt_zero_shot_classification() -> None:
    posts, truth, sentences = stream()
    zero_shot = float(
        ((posts[300:] @ sentences.T).argmax(1) == truth[300:]).double().mean()
    )
    adapted = fit(posts[:300], torch.zeros(0, 4), sentences, 7)
    assert adapted.choice == {"start": ADAPTED, "sharpness": 1.0, "accuracies": {}}
    assert accuracy(adapted, posts[300:], truth[300:]) > zero_shot + 0.1
    answered = fit(posts[:300], torch.eye(4)[truth[:24]], sentences, 7)
    assert answered.choice["start"] == ADAPTED
    assert accuracy(answered, posts[300:], truth[300:]) > accuracy(
        adapted, posts[300:], truth[300:]
    )


def test_labels_with_misleading_sentences_are_learnt_from_examples_alone() -> None:
    posts, truth, sentences = stream(0.0)
    fitted = fit(posts[:300], torch.eye(4)[truth[:40]], sentences.roll(1, 0), 7)
    assert fitted.choice["start"] == NOTHING
    assert accuracy(fitted, posts[300:], truth[300:]) > 0.9


def test_rejects_a_broken_head(model: Path, tmp_path: Path) -> None:
    settings = Settings(model=str(model))
    weights = locate(str(model))._replace(folder=tmp_path)
    for content in (b"", b"x" * 100):
        (tmp_path / HEAD_FILE).write_bytes(content)
        with pytest.raises(ModelError, match=HEAD_FILE):
            read_head(weights)
    write_head(tmp_path / HEAD_FILE, LABELS, torch.zeros(3, 24), torch.zeros(2))
    with pytest.raises(ModelError, match=naming(HEAD_FILE, "[3, 24]")):
        read_head(weights)
    original = (model / HEAD_FILE).read_bytes()
    try:
        write_head(model / HEAD_FILE, LABELS, torch.zeros(2, 23), torch.zeros(2))
        with pytest.raises(ModelError, match="24 and 23"):
            load_classifier(settings, FP32)
    finally:
        (model / HEAD_FILE).write_bytes(original)


@pytest.mark.parametrize("file", ["model_head.pkl", "config_setfit.json"])
def test_rejects_setfit_models_but_takes_them_as_a_base(
    tmp_path: Path, file: str
) -> None:
    folder = tmp_path / "setfit"
    make_sentence_model(folder)
    (folder / file).write_bytes(b"{}")
    with pytest.raises(
        ModelError, match=naming(folder, "model_head.pkl", "feedmill train --head")
    ):
        load_classifier(Settings(model=str(folder)), FP32)
    out = tmp_path / "out"
    out.mkdir()
    trained(folder).save(out)
    assert classifier_kind(locate(str(out))) == "head"


def test_command_writes_a_tested_model(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "configure", lambda *_, **__: None)
    monkeypatch.setenv(
        "FEEDMILL_TOKEN_BUDGET", "2048"
    )  # measuring it takes most of a minute
    posts = tmp_path / "posts.jsonl"
    rows = [
        each.post.model_dump(exclude_defaults=True) | {"topic": each.label}
        for each in examples(100)
    ]
    rows += [
        {"id": f"u{number}", "title": f"bread {number}", "topic": ""}
        for number in range(3)
    ]
    posts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [
        "--head",
        "--from",
        str(posts),
        "--base",
        str(base),
        "--out",
        str(tmp_path / "out"),
        "--device",
        "cpu",
    ]
    found = CliRunner().invoke(
        application(), ["train", *flags, "--json"], catch_exceptions=False
    )
    assert found.exit_code == 0, found.output
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert (record["plan"]["start"], record["plan"]["unlabelled"]) == (ADAPTED, 3)
    assert record["metrics"]["accuracy"] > 0.8
    assert record["metrics"]["posts"] == record["zero_shot"]["posts"] == record["test"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "sentence-transformers" in card
    assert "bread the" not in card
    assert (tmp_path / "out" / "config.json").is_file()


def test_command_adapts_a_model_to_posts_without_a_label(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "configure", lambda *_, **__: None)
    posts, out = tmp_path / "posts.csv", tmp_path / "out"
    posts.write_text(
        "title\n" + "".join(f"{each.post.title}\n" for each in examples(40))
    )
    given = [
        "train",
        "--head",
        "--from",
        str(posts),
        "--base",
        str(base),
        "--out",
        str(out),
        "--device",
        "cpu",
    ]
    assert "has a label" in str(CliRunner().invoke(application(), given).exception)
    found = CliRunner().invoke(
        application(), [*given, "--labels", ",".join(LABELS)], catch_exceptions=False
    )
    assert found.exit_code == 0, found.output
    record = json.loads((out / "training.json").read_text())
    assert (record["train"], record["metrics"], record["plan"]["unlabelled"]) == (
        0,
        None,
        40,
    )
    assert read_head(locate(str(out)))[0] == LABELS


def test_command_adapts_described_labels_beside_subjects(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model card and what is printed say so, and how to use it."""
    monkeypatch.setattr(logs, "configure", lambda *_, **__: None)
    posts, out = tmp_path / "posts.csv", tmp_path / "out"
    titles = [example.post.title for example in examples(40)]
    posts.write_text("\n".join(["title", *titles]))
    labels = tmp_path / "labels.json"
    labels.write_text(json.dumps(WORDS))
    flags = ["--from", str(posts), "--labels", str(labels), "--base", str(base)]
    result = CliRunner().invoke(
        application(),
        ["train", "--head", *flags, "--out", str(out), "--device", "cpu"],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    record = json.loads((out / "training.json").read_text())
    none_class = record["plan"]["none"]
    threshold = none_class["threshold"]
    assert f"--none {threshold:.2f}" in result.output
    card = (out / "README.md").read_text()
    assert "Everyday subjects compete with its labels." in card
    assert f"score below {threshold:.3f} get no label" in card


@pytest.mark.parametrize(
    ("zero_shot", "advised"),
    [(0.412, False), (0.685, False), (0.3, True), (None, True)],
)
def test_a_model_no_better_than_its_base_is_not_to_be_deployed(
    capsys: pytest.CaptureFixture[str], zero_shot: float | None, advised: bool
) -> None:
    usual = {"macro_f1": 0.5, "calibration_error": 0.1, "posts_per_s": 9.0, "posts": 40}
    record = {
        "seconds": 1.0, "samples_per_s": 2.0, "curve": [], "options": {"head": True},
        "plan": {},
        "metrics": usual | {"accuracy": 0.412},
        "zero_shot": zero_shot and usual | {"accuracy": zero_shot},
    }  # fmt: skip
    show_trained(record, "model")
    printed = capsys.readouterr().out
    assert ("feedmill deploy model" in printed) == advised
    assert (
        f"no more accurate (0.412) than its base zero-shot ({zero_shot})" in printed
    ) == (not advised)
