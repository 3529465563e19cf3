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
from feedmill.shared.errors import UserError
from feedmill.shared.messages import Post
from feedmill.shared.settings import Settings
from feedmill.training.data import Dataset, TrainOptions
from feedmill.training.finetune import Order, Trained, Training
from feedmill.workers.models.classifiers.fixed_labels import read_head
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.weights import locate
from tests.fakes.models import FP32, make_model, make_sentence_model, scores_of

LABELS = ("food", "sports", "travel")
WORDS = {"food": "bread soup salt oven", "sports": "match goal team keeper", "travel": "train visa hotel border"}


def examples(count: int) -> list[Labelled]:
    source = random.Random(7)
    found = []
    for number in range(count):
        label = LABELS[number % 3]
        words = source.choices([*WORDS[label].split(), "the", "a", "of", "and"], k=source.randrange(2, 30))
        found.append(Labelled(Post(id=f"p{number}", title=" ".join([*words, str(number)])), label))
    return found


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_model("bert", tmp_path / "base")


@pytest.fixture
def still(tmp_path: Path) -> Path:
    """A base without dropout, whose random numbers depend on the batch size."""
    return make_model("bert", tmp_path / "still", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


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
    return Training(dataset, options_of(base, out, **options), settings, report or Report()).run()


def weights(model: Any) -> dict[str, torch.Tensor]:
    """Return all weights except the keys' biases, which a softmax cancels: their gradients are rounding errors."""
    return {name: value for name, value in model.state_dict().items() if not name.endswith("key.bias")}


def assert_same(one: Any, other: Any, tolerance: float = 2e-5) -> None:
    found, expected = weights(one), weights(other)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=tolerance, rtol=0), name


def moved(model: Any, base: Path) -> float:
    before = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3).state_dict()
    return max(
        float((value - before[name]).abs().max()) for name, value in weights(model).items() if name.startswith("bert.")
    )


def test_accumulated_batches_equal_one_large_batch(still: Path, tmp_path: Path) -> None:
    """The last step is incomplete: 44 posts are one step of 32 and one of 12."""
    whole = trained(still, tmp_path / "a", batch_size=32, dtype="float32")
    parts = trained(still, tmp_path / "b", batch_size=8, accumulation=4, dtype="float32")
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
    steps = [[lengths[place] for place in first[at : at + 16]] for at in range(0, 203, 16)]
    assert sum(max(step) * len(step) for step in steps) < 1.25 * sum(lengths)


def test_learns_soft_labels(base: Path, tmp_path: Path) -> None:
    """A model trained on the scores 0.6, 0.3, 0.1 predicts them for any text."""
    scores = dict(zip(LABELS, (0.6, 0.3, 0.1), strict=True))
    dataset = Dataset(LABELS, [each._replace(scores=scores) for each in examples(48)], [], {})
    options = options_of(base, tmp_path / "out", targets="soft", batch_size=8, accumulation=2, epochs=10)
    found = Training(dataset, options, Settings(device="cpu"), Report()).run()
    tokens = found.tokenizer(["the match of the team", "bread"], padding=True, return_tensors="pt")
    with torch.inference_mode():
        predicted = found.model.eval()(**tokens).logits.softmax(-1)
    torch.testing.assert_close(predicted, torch.tensor([[0.6, 0.3, 0.1]] * 2), atol=0.08, rtol=0)


def test_a_sentence_encoder_keeps_its_pooling_and_gets_a_head(tmp_path: Path) -> None:
    """The folder gives sentence-transformers' embeddings and a worker's scores, which are those of the training."""
    base, out = make_sentence_model(tmp_path / "base", dense=24, prompt="topic: "), tmp_path / "out"
    found = trained(base, out, learnt=60, dtype="float32", max_tokens=32, epochs=10)
    found.save(out)
    shutil.rmtree(out / "checkpoints")
    classifier = load_classifier(Settings(model=str(out)), FP32)
    assert classifier.kind == "head"
    texts = [each.post.text for each in examples(90)]
    scores = scores_of(classifier, texts)
    right = sum(max(each, key=each.__getitem__) == LABELS[number % 3] for number, each in enumerate(scores))
    assert right >= 65
    labels, weight, bias = read_head(locate(str(out)))
    vectors = torch.tensor(SentenceTransformer(str(out), device="cpu").encode(texts, normalize_embeddings=True))
    before = torch.tensor(SentenceTransformer(str(base), device="cpu").encode(texts, normalize_embeddings=True))
    assert float((vectors - before).abs().max()) > 1e-2, "all weights are trained, not only the head"
    expected = (vectors @ weight.T + bias).softmax(-1)
    assert labels == LABELS
    assert torch.allclose(torch.tensor([list(each.values()) for each in scores]), expected, atol=1e-5)


def test_scales_logits_by_what_unseen_posts_show(base: Path, tmp_path: Path) -> None:
    """Labels that no text explains get low scores after many epochs that learn each one by heart."""
    source = random.Random(3)
    dataset = Dataset(LABELS, [each._replace(label=source.choice(LABELS)) for each in examples(100)], [], {})
    options = options_of(base, tmp_path / "out", epochs=6)
    found = Training(dataset, options, Settings(device="cpu", dtype="float32"), Report()).run()
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
    assert json.loads((out / "tokenizer_config.json").read_text())["model_max_length"] == 16
