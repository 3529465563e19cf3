"""Training a tiny model gives equal weights with accumulation and after an interruption."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForSequenceClassification

from feedmill.console import Report
from feedmill.producers.records import Labelled
from feedmill.shared.errors import DeviceFull, ModelError, UserError
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.settings import Settings
from feedmill.training import finetune
from feedmill.training.batches import Order
from feedmill.training.data import Dataset
from feedmill.training.finetune import Trained, Training
from feedmill.training.options import TrainOptions
from feedmill.workers.models.classifiers import label_set_of
from feedmill.workers.models.classifiers.fixed_labels import read_head
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.weights import locate
from tests.fakes.families import make_family
from tests.fakes.models import FP32, make_model, make_sentence_model, scores_of
from tests.support import long_cases

LABELS = ("food", "sports", "travel")
WORDS = {
    "food": "bread soup salt oven",
    "sports": "match goal team keeper",
    "travel": "train visa hotel border",
}


def examples(count: int) -> list[Labelled]:
    source = random.Random(7)
    found = []
    for number in range(count):
        label = LABELS[number % 3]
        words = source.choices(
            [*WORDS[label].split(), "the", "a", "of", "and"], k=source.randrange(2, 30)
        )
        found.append(
            Labelled(
                Post(id=f"p{number}", title=" ".join([*words, str(number)])), label
            )
        )
    return found


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_model("bert", tmp_path / "base")


@pytest.fixture
def still(tmp_path: Path) -> Path:
    """A base without dropout, whose random numbers depend on the batch size."""
    return make_model(
        "bert",
        tmp_path / "still",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread, because more threads slow down a model this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def options_of(base: Path, out: Path, **options: Any) -> TrainOptions:
    usual: dict[str, Any] = {"learning_rate": 1e-3, "epochs": 2} | options
    return TrainOptions(source="nowhere", base=str(base), out=str(out), **usual)


def trained(
    base: Path,
    out: Path,
    learnt: int = 44,  # too few to measure the logits' scale, which takes another training
    dtype: str = "auto",
    report: Report | None = None,
    **options: Any,
) -> Trained:
    dataset = Dataset(LABELS, examples(learnt), [], {})
    settings = Settings.model_validate({"device": "cpu", "dtype": dtype})
    return Training(
        dataset, options_of(base, out, **options), settings, report or Report()
    ).run()


def weights(model: Any) -> dict[str, torch.Tensor]:
    """Return all weights except the keys' biases, which a softmax cancels: their gradients are
    rounding errors.
    """
    return {
        name: value
        for name, value in model.state_dict().items()
        if not name.endswith("key.bias")
    }


def assert_same(one: Any, other: Any, tolerance: float = 2e-5) -> None:
    found, expected = weights(one), weights(other)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=tolerance, rtol=0), name


def moved(model: Any, base: Path) -> float:
    before = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=3
    ).state_dict()
    return max(
        float((value - before[name]).abs().max())
        for name, value in weights(model).items()
        if name.startswith("bert.")
    )


def test_accumulated_batches_equal_one_large_batch(still: Path, tmp_path: Path) -> None:
    """The last step is incomplete: 44 posts are one step of 32 and one of 12."""
    whole = trained(still, tmp_path / "a", batch_size=32, dtype="float32")
    parts = trained(
        still, tmp_path / "b", batch_size=8, accumulation=4, dtype="float32"
    )
    plans = whole.record["plan"], parts.record["plan"]
    assert [(plan["steps"], plan["effective_batch"]) for plan in plans] == [(4, 32)] * 2
    assert_same(parts.model, whole.model)
    assert moved(whole.model, still) > 1e-3


def test_resumed_training_equals_uninterrupted(base: Path, tmp_path: Path) -> None:
    """The base has dropout, so the random state must be restored, too."""
    straight = trained(base, tmp_path / "straight")

    class Steps(Report):
        def __init__(self, last: int) -> None:
            super().__init__()
            self.done: list[int] = []
            self.last = last

        def advance(self, done: int, note: str = "") -> None:  # noqa: ARG002
            self.done.append(done)
            if done == self.last:
                raise KeyboardInterrupt

    out = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        trained(base, out, report=Steps(4))
    with pytest.raises(UserError, match="other options"):
        trained(base, out, seed=8)
    (out / "checkpoints" / "checkpoint-99").mkdir()  # a kill before it was complete
    steps = Steps(99)
    resumed = trained(base, out, report=steps)
    assert steps.done == [4, 5, 6], "an epoch has three steps"
    assert_same(resumed.model, straight.model, tolerance=0.0)


def test_completed_training_that_resumes_records_what_was_trained(
    base: Path, tmp_path: Path
) -> None:
    """A kill between the last step and the model's file leaves nothing to train: the record is
    that of the training.
    """
    straight = trained(base, tmp_path / "out", learnt=60).record
    resumed = trained(base, tmp_path / "out", learnt=60).record
    assert straight["resumed_at_step"] is None
    assert resumed["resumed_at_step"] == straight["steps"] == 8
    assert straight["samples_per_s"] > 0
    measured = (
        "plan",
        "steps",
        "kept_step",
        "training_seconds",
        "samples_per_s",
        "peak_memory_bytes",
        "epochs",
        "curve",
    )
    for name in measured:
        assert resumed[name] == straight[name], name


def test_partly_resumed_training_counts_all_epochs(base: Path, tmp_path: Path) -> None:
    """Half an epoch is trained after the interruption; posts and losses are those of the whole
    training.
    """
    out = tmp_path / "out"
    first = trained(base, out, epochs=1)
    begun = out / "checkpoints" / "begun.json"
    begun.write_text(begun.read_text().replace('"epochs": 1,', '"epochs": 1.5,'))
    record = trained(base, out, epochs=1.5).record
    assert record["resumed_at_step"] == 3
    assert [(epoch["step"], epoch["posts"]) for epoch in record["epochs"]] == [
        (3, 44),
        (5, 32),
    ]
    assert record["epochs"][0] == first.record["epochs"][0]
    assert record["samples_per_s"] == pytest.approx(76 / record["training_seconds"])
    again = trained(base, out, epochs=1.5).record
    assert again["steps"] == 5, "no further step is trained"


def test_interrupted_training_of_an_earlier_version_continues(
    base: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    trained(base, out, epochs=1)
    begun = out / "checkpoints" / "begun.json"
    content = json.loads(begun.read_text())
    for name in ("evaluate", "patience", "trainer"):
        del content["options"][name]
    del content["processes"]
    begun.write_text(json.dumps(content))
    assert trained(base, out, epochs=1).record["resumed_at_step"] == 3


def test_records_loss_and_evaluation_of_each_epoch(base: Path, tmp_path: Path) -> None:
    lines: list[str] = []

    class Lines(Report):
        def print(self, line: str) -> None:
            lines.append(line)

    record = trained(
        base, tmp_path / "out", evaluate="epoch", epochs=2, report=Lines()
    ).record
    assert record["evaluated_on"] == 4
    assert [
        (epoch["epoch"], epoch["step"], epoch["posts"]) for epoch in record["epochs"]
    ] == [
        (1, 3, 40),
        (2, 6, 40),
    ]
    losses = [point["loss"] for point in record["curve"]]
    assert [epoch["loss"] for epoch in record["epochs"]] == pytest.approx(
        [sum(losses[:3]) / 3, sum(losses[3:]) / 3]
    )
    for epoch in record["epochs"]:
        assert 0 <= epoch["evaluation"]["accuracy"] <= 1
        assert any(
            f"evaluation loss {epoch['evaluation']['loss']:.3f}" in line
            for line in lines
        )
    assert record["peak_memory_bytes"] > 0
    with pytest.raises(UserError, match="at least 20 posts"):
        trained(base, tmp_path / "few", learnt=19, evaluate="epoch")


def test_stops_early_and_keeps_the_best_model(base: Path, tmp_path: Path) -> None:
    """Random labels: the loss on unseen posts soon rises."""
    source = random.Random(3)
    dataset = Dataset(
        LABELS,
        [each._replace(label=source.choice(LABELS)) for each in examples(80)],
        [],
        {},
    )
    options = options_of(
        base,
        tmp_path / "out",
        epochs=30,
        evaluate="epoch",
        patience=2,
        learning_rate=3e-3,
    )

    def train() -> Trained:
        return Training(
            dataset, options, Settings(device="cpu", dtype="float32"), Report()
        ).run()

    stopped = train()
    record = stopped.record
    losses = [epoch["evaluation"]["loss"] for epoch in record["epochs"]]
    best = losses.index(min(losses))
    assert record["stopped_early"]
    assert len(losses) == best + 1 + 2 < 30
    assert record["kept_step"] == record["epochs"][best]["step"]
    resumed = train()
    assert resumed.record["epochs"] == record["epochs"], (
        "a training that stopped early has nothing left to do"
    )
    assert_same(resumed.model, stopped.model, tolerance=0.0)


def limit_rows(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Let a training step on more than `most` rows run out of memory."""
    load = finetune.make_model

    def limited(*arguments: Any) -> Any:
        model = load(*arguments)
        forward = model.forward

        def checked(input_ids: torch.Tensor, **others: Any) -> Any:
            if model.training and len(input_ids) > most:
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 2.00 GiB."
                )
            return forward(input_ids=input_ids, **others)

        model.forward = checked
        return model

    monkeypatch.setattr(finetune, "make_model", limited)


@pytest.mark.parametrize(("rows", "left"), [(32, (8, 4)), (15, (5, 3))])
def test_batch_that_runs_out_of_memory_is_halved(
    still: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    left: tuple[int, int],
) -> None:
    """The effective batch stays, and therefore the weights."""
    lines: list[str] = []

    class Lines(Report):
        def print(self, line: str) -> None:
            lines.append(line)

    whole = trained(still, tmp_path / "a", batch_size=rows, dtype="float32")
    limit_rows(monkeypatch, 8)
    halved = trained(
        still, tmp_path / "b", batch_size=rows, dtype="float32", report=Lines()
    )
    plan = halved.record["plan"]
    assert (plan["batch_size"], plan["accumulation"]) == left
    assert plan["effective_batch"] == rows
    assert plan["out_of_memory"] == ([32, 16] if rows == 32 else [15])
    assert any(
        f"{rows} rows ran out of memory (CUDA out of memory" in line for line in lines
    )
    assert_same(halved.model, whole.model)


def test_single_row_that_runs_out_of_memory_fails(
    still: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_rows(monkeypatch, 0)
    with pytest.raises(DeviceFull):
        trained(still, tmp_path / "out", batch_size=2)


def test_trainer_options_reach_the_trainer(base: Path, tmp_path: Path) -> None:
    chosen = [
        "max_steps=4",
        "lr_scheduler_type=constant",
        "warmup_steps=0",
        "gradient_checkpointing=true",
    ]
    record = trained(base, tmp_path / "out", trainer=chosen).record
    assert record["steps"] == record["plan"]["steps"] == 4
    assert [point["learning_rate"] for point in record["curve"]] == [1e-3] * 4
    assert trained(base, tmp_path / "out", trainer=chosen).record["steps"] == 4, (
        "no further step is trained"
    )


def test_recomputed_activations_give_equal_weights(tmp_path: Path) -> None:
    """The model is a sentence encoder with a head, which transformers does not have."""
    base = make_sentence_model(tmp_path / "base", dense=24)
    plain = trained(base, tmp_path / "a", dtype="float32")
    recomputed = trained(
        base, tmp_path / "b", dtype="float32", trainer=["gradient_checkpointing=true"]
    )
    assert_same(recomputed.model, plain.model)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("lr_scheduler_type=steep", "lr_scheduler_type=steep.*valid SchedulerType"),
        ("max_step=3", "no max_step.*max_steps"),
        ("weight_decay=nan", "finite"),
        ("report_to=nowhere", "report_to=nowhere"),
        pytest.param(
            "max_steps=many",
            "max_steps cannot be 'many'.*integer",
            marks=pytest.mark.long,
        ),
        pytest.param("max_steps=0", "at least 1", marks=pytest.mark.long),
        pytest.param("lr_scheduler_kwargs=a", "JSON", marks=pytest.mark.long),
    ],
)
def test_refuses_values_that_transformers_would(
    base: Path, tmp_path: Path, option: str, error: str
) -> None:
    with pytest.raises(UserError, match=error):
        trained(base, tmp_path / "out", trainer=[option])
    assert trained(base, tmp_path / "out", epochs=1).record["steps"] == 3, (
        "the corrected command needs no other folder"
    )


def test_order_groups_lengths_and_depends_on_seed_and_epoch() -> None:
    lengths = [random.Random(number).randrange(5, 100) for number in range(203)]

    def order(epoch: int, seed: int = 3) -> list[int]:
        sampler = Order(lengths, 16, seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    first = order(0)
    assert order(0) == first
    assert sorted(first) == list(range(203))
    assert order(1) != first
    assert order(0, seed=4) != first
    assert lengths[first[0]] == max(lengths)
    steps = [
        [lengths[place] for place in first[at : at + 16]] for at in range(0, 203, 16)
    ]
    assert sum(max(step) * len(step) for step in steps) < 1.25 * sum(lengths)


def test_learns_soft_labels(base: Path, tmp_path: Path) -> None:
    """A model trained on the scores 0.6, 0.3, 0.1 predicts them for any text."""
    scores = dict(zip(LABELS, (0.6, 0.3, 0.1), strict=True))
    dataset = Dataset(
        LABELS, [each._replace(scores=scores) for each in examples(48)], [], {}
    )
    options = options_of(
        base, tmp_path / "out", targets="soft", batch_size=8, accumulation=2, epochs=10
    )
    found = Training(dataset, options, Settings(device="cpu"), Report()).run()
    tokens = found.tokenizer(
        ["the match of the team", "bread"], padding=True, return_tensors="pt"
    )
    with torch.inference_mode():
        predicted = found.model.eval()(**tokens).logits.softmax(-1)
    torch.testing.assert_close(
        predicted, torch.tensor([[0.6, 0.3, 0.1]] * 2), atol=0.08, rtol=0
    )


def others(count: int) -> list[Labelled]:
    """Return posts that fit none of the labels."""
    source = random.Random(5)
    posts = []
    for number in range(count):
        words = source.choices(["tax", "form", "office", "the", "a"], k=8)
        title = " ".join([*words, str(number)])
        posts.append(Labelled(Post(id=f"n{number}", title=title)))
    return posts


@pytest.mark.parametrize(
    ("kind", "learnt"),
    [
        ("sequence", 60),
        ("head", 24),
        pytest.param("sequence", 24, marks=pytest.mark.long),
        pytest.param("head", 60, marks=pytest.mark.long),
    ],
)
def test_posts_that_fit_none_become_posts_without_a_label(
    kind: str, learnt: int, tmp_path: Path
) -> None:
    """With enough posts, a part of them tells the threshold."""
    if kind == "head":
        base = make_sentence_model(tmp_path / "base")
    else:
        base = make_model("bert", tmp_path / "base")
    out = tmp_path / "out"
    dataset = Dataset(LABELS, examples(learnt), [], {}, none_train=others(learnt // 2))
    options = options_of(base, out, epochs=20, max_tokens=32, learning_rate=3e-3)
    settings = Settings(device="cpu", dtype="float32")
    found = Training(dataset, options, settings, Report()).run()
    found.save(out)
    promise = found.record["plan"]["none"]
    assert 0 < promise["threshold"] <= 1
    assert (promise["precision"] is None) == (learnt == 24)

    classifier = load_classifier(Settings(model=str(out)), FP32)
    assert classifier.kind == kind
    plain = label_set_of(classifier, ClassifyOptions())
    asked = label_set_of(classifier, ClassifyOptions(none=True))
    chosen = label_set_of(classifier, ClassifyOptions(none=0.7))
    assert plain.labels == asked.labels == LABELS
    assert (plain.none, asked.none, chosen.none) == (None, promise["threshold"], 0.7)
    assert len({plain.recipe, asked.recipe, chosen.recipe}) == 3

    posts = [example.post.text for example in examples(30)]
    foreign = [example.post.text for example in others(20)]
    texts = [*posts, *foreign]
    # One micro-batch, whose rows differ in what they ask for.
    rows = []
    for text in texts:
        for label_set in (plain, asked):
            rows += classifier.prepare([text], label_set)[0]
    scored = classifier.finish(rows, classifier.forward(rows))
    scores = [list(by_label.values()) for _, by_label in scored]
    of_plain = torch.tensor(scores[::2])
    of_asked = torch.tensor(scores[1::2])
    torch.testing.assert_close(of_plain.sum(1), torch.ones(len(texts)))
    assert bool((of_asked[30:].sum(1) < 0.5).all())
    best, places = of_asked.max(1)
    fits = best >= promise["threshold"]
    assert torch.equal(places[fits], of_plain.argmax(1)[fits])
    assert int(fits[:30].sum()) >= 27
    assert int(fits[30:].sum()) <= 2


def test_a_saved_none_class_has_the_name_of_no_label(
    base: Path, tmp_path: Path
) -> None:
    """For programs that read the folder with transformers."""
    labels = ("food", "no label")
    learnt = [
        example._replace(label=labels[number % 2])
        for number, example in enumerate(examples(24))
    ]
    out = tmp_path / "out"
    dataset = Dataset(labels, learnt, [], {}, none_train=others(10))
    options = options_of(base, out, epochs=1)
    Training(dataset, options, Settings(device="cpu"), Report()).run().save(out)
    loaded = AutoModelForSequenceClassification.from_pretrained(out)
    assert loaded.config.num_labels == 3
    assert len(set(loaded.config.id2label.values())) == 3
    classifier = load_classifier(Settings(model=str(out)), FP32)
    assert classifier.label_set(ClassifyOptions()).labels == labels


@pytest.mark.parametrize(
    "figures",
    [{"threshold": 2}, [], *long_cases({"threshold": None}, {}, {"threshold": "x"})],
)
def test_refuses_a_damaged_threshold(
    figures: object, base: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    trained(base, out, learnt=24, epochs=1).save(out)
    config_file = out / "config.json"
    config = json.loads(config_file.read_text()) | {"feedmill_none": figures}
    config_file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match="feedmill_none"):
        load_classifier(Settings(model=str(out)), FP32)


def test_a_training_continues_only_with_the_same_posts_that_fit_none() -> None:
    plain = Dataset(LABELS, examples(9), [], {})
    some = plain._replace(none_train=others(2))
    more = plain._replace(none_train=others(3))
    assert len({dataset.digest for dataset in (plain, some, more)}) == 3


def test_refuses_a_base_that_workers_would_refuse(tmp_path: Path) -> None:
    base = make_family("convbert", tmp_path / "base")
    with pytest.raises(ModelError, match="other scores"):
        Training(
            Dataset(LABELS, [], [], {}),
            options_of(base, tmp_path / "out"),
            Settings(device="cpu"),
            Report(),
        )


def test_a_sentence_encoder_keeps_its_pooling_and_gets_a_head(tmp_path: Path) -> None:
    """The folder gives sentence-transformers' embeddings and a worker's scores, which are those of
    the training.
    """
    base, out = (
        make_sentence_model(tmp_path / "base", dense=24, prompt="topic: "),
        tmp_path / "out",
    )
    found = trained(base, out, learnt=60, dtype="float32", max_tokens=32, epochs=10)
    found.save(out)
    shutil.rmtree(out / "checkpoints")
    classifier = load_classifier(Settings(model=str(out)), FP32)
    assert classifier.kind == "head"
    texts = [each.post.text for each in examples(90)]
    scores = scores_of(classifier, texts)
    right = sum(
        max(each, key=each.__getitem__) == LABELS[number % 3]
        for number, each in enumerate(scores)
    )
    assert right >= 65
    labels, weight, bias = read_head(locate(str(out)))
    vectors = torch.tensor(
        SentenceTransformer(str(out), device="cpu").encode(
            texts, normalize_embeddings=True
        )
    )
    before = torch.tensor(
        SentenceTransformer(str(base), device="cpu").encode(
            texts, normalize_embeddings=True
        )
    )
    assert float((vectors - before).abs().max()) > 1e-2, (
        "all weights are trained, not only the head"
    )
    expected = (vectors @ weight.T + bias).softmax(-1)
    assert labels == LABELS
    assert torch.allclose(
        torch.tensor([list(each.values()) for each in scores]), expected, atol=1e-5
    )


def test_scales_logits_by_what_unseen_posts_show(base: Path, tmp_path: Path) -> None:
    """Labels that no text explains get low scores after many epochs that learn each one by
    heart.
    """
    source = random.Random(3)
    dataset = Dataset(
        LABELS,
        [each._replace(label=source.choice(LABELS)) for each in examples(100)],
        [],
        {},
    )
    options = options_of(base, tmp_path / "out", epochs=6)
    found = Training(
        dataset, options, Settings(device="cpu", dtype="float32"), Report()
    ).run()
    assert found.record["plan"]["sharpness"] < 1
    few = trained(base, tmp_path / "few", epochs=1)
    assert few.record["plan"]["sharpness"] == 1


def test_saves_the_trained_model(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    settings: dict[str, Any] = {"max_tokens": 16, "epochs": 1}
    found = trained(base, out, learnt=48, dtype="bfloat16", **settings)
    assert [point["step"] for point in found.record["curve"]] == [1, 2, 3]
    found.save(out)
    assert {path.name for path in out.iterdir()} == {
        "checkpoints",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    loaded = AutoModelForSequenceClassification.from_pretrained(out)
    assert loaded.config.id2label == dict(enumerate(LABELS))
    assert_same(loaded, found.model, tolerance=0.0)
    assert (
        json.loads((out / "tokenizer_config.json").read_text())["model_max_length"]
        == 16
    )
