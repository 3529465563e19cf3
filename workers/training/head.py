"""Train a head: a linear layer for the labels, on the frozen embeddings of a sentence-transformers model.

The layer is a multinomial logistic regression, a convex problem that takes seconds and few examples. Posts are embedded
as a worker embeds them.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy

from feedmill.shared.errors import DeviceFull, DeviceLost, ModelError, clause
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers.fixed_labels import write_head
from feedmill.workers.models.classifiers.layout import TEXT_CONFIGS, Layout, read_layout, read_text_config
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.classifiers.similarity import Similarity
from feedmill.workers.models.device import select_device
from feedmill.workers.models.engines import device_errors
from feedmill.workers.models.weights import HEAD_FILE, Weights, copy_model
from feedmill.workers.training import Report
from feedmill.workers.training.examples import Dataset
from feedmill.workers.training.options import TrainOptions

#: L2 penalties to choose from, for centred features of unit mean square.
PENALTIES = (3e-3, 1e-3, 3e-4, 1e-4, 3e-5)
#: Maximum L-BFGS iterations. The fit converges well before.
MAX_ITERATIONS = 200
#: Penalty if there are too few examples for a choice.
USUAL_PENALTY = 3e-4
#: Greatest component of the gradient at the end of a fit.
TOLERANCE = 1e-6
#: Penalty of the biases, divided by the number of examples. Without one, the few examples' label frequencies are learnt
#: as if they were those of all posts, which costs 7% of accuracy with 48 examples and 2% with 160.
BIAS_PENALTY = 5.0
#: Parts of the cross-validation, and the maximum number of examples in it.
FOLDS, MAX_VALIDATED = 5, 2000
#: Texts tokenized and sorted by length together, and maximum tokens per forward pass, with padding.
TEXTS_SORTED_TOGETHER, BATCH_TOKENS = 512, 4096
#: Factors of the logits to choose from.
SHARPNESSES = tuple(2 ** (step / 4) for step in range(-4, 17))
#: Name of the prompt that FEEDMILL_POST_PROMPT chose, in the saved model.
PROMPT_NAME = "posts"


#: Weight [labels, dimensions] and bias [labels].
Fitted = tuple[torch.Tensor, torch.Tensor]


class Fit(NamedTuple):
    """A fitted head. weight: [labels, dimensions]; bias: [labels]; float32."""

    weight: torch.Tensor
    bias: torch.Tensor
    penalty: float
    #: Factor by which the logits were scaled.
    sharpness: float
    #: Cross-validated accuracy by penalty; empty if there are too few examples.
    accuracies: dict[float, float]


class HeadModel(NamedTuple):
    """A head and the model that it belongs to."""

    weights: Weights
    layout: Layout
    #: Maximum tokens to read of a post; the model's own limit applies if it is lower.
    max_tokens: int
    labels: tuple[str, ...]
    #: Float32, on the CPU: [labels, dimensions] and [labels].
    weight: torch.Tensor
    bias: torch.Tensor
    settings: Settings
    #: The training's part of training.json.
    record: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def save(self, folder: Path) -> None:
        """Write the model's folder: a copy of the base, with the head beside it.

        The base's configuration gets the training's token limit and prompt, so that workers, and
        sentence-transformers' `encode`, embed texts as the training did. Raises OSError.
        """
        layout = self.layout
        write_head(folder / HEAD_FILE, self.labels, self.weight, self.bias)
        config = dict(layout.texts.config)
        if self.settings.post_prompt is not None:
            chosen = {PROMPT_NAME: layout.texts.post_prompt} if layout.texts.post_prompt else {}
            config["prompts"] = (config.get("prompts") or {}) | chosen
            config["default_prompt_name"] = PROMPT_NAME if chosen else None
        if config:
            _write_json(folder / "config_sentence_transformers.json", config)
        limit = min(self.max_tokens, layout.texts.max_tokens or self.max_tokens)
        _write_json(folder / TEXT_CONFIGS[0], read_text_config(self.weights.folder) | {"max_seq_length": limit})
        copy_model(self.weights, folder, self.settings.trust_remote_code)


def train_head(dataset: Dataset, options: TrainOptions, settings: Settings, report: Report | None = None) -> HeadModel:
    """Embed the training posts and fit a head to them. Raises UserError."""
    report = report or Report()
    report.phase(f"loading {options.base}")
    classifier, layout = load_embedder(options.base, settings, options.max_tokens)
    began = time.monotonic()
    texts = [example.post.text for example in dataset.train]
    features = embed(classifier, texts, report)
    seconds_to_embed = time.monotonic() - began
    report.phase("fitting the head")
    wanted = torch.tensor([dataset.target(example, options.targets == "soft") for example in dataset.train])
    weights = torch.tensor(dataset.label_weights) if options.class_weights else None
    fitted = fit(features, wanted, len(dataset.labels), options.seed, weights)
    plan = {
        "penalty": fitted.penalty,
        "sharpness": fitted.sharpness,
        "accuracies": fitted.accuracies,
        "max_tokens": options.max_tokens,
        "precision": f"{classifier.device.precision}: {classifier.device.dtype_reason}",
        "device": classifier.device.name,
    }
    rate = len(texts) / seconds_to_embed
    record = {"plan": plan, "seconds": time.monotonic() - began, "samples_per_s": rate, "curve": []}
    head = (fitted.weight, fitted.bias)
    return HeadModel(classifier.weights, layout, options.max_tokens, dataset.labels, *head, settings, record)


def load_embedder(base: str, settings: Settings, max_tokens: int) -> tuple[Similarity, Layout]:
    """Load a sentence-transformers model that reads `max_tokens` of a post. Raises UserError."""
    own = {"model": base, "classifier": "similarity", "max_tokens": max_tokens, "labels": None, "template": None}
    chosen = settings.model_copy(update=own)
    classifier = load_classifier(chosen, select_device(settings.device, settings.dtype, settings.engine))
    if not isinstance(classifier, Similarity):
        raise TypeError("the classifier `similarity` must be the built-in one")
    return classifier, read_layout(classifier.weights, chosen)


def embed(classifier: Similarity, texts: Sequence[str], report: Report) -> torch.Tensor:
    """Return the unit vectors of texts: [texts, dimensions], in float32 on the CPU.

    Raises ModelError if the device fails.
    """
    label_set = classifier.label_set(ClassifyOptions())
    places: list[int] = []
    vectors: list[torch.Tensor] = []

    def batches() -> Iterator[int]:
        for start in range(0, len(texts), TEXTS_SORTED_TOGETHER):
            rows = [each for (each,) in classifier.prepare(texts[start : start + TEXTS_SORTED_TOGETHER], label_set)]
            left = sorted(range(len(rows)), key=lambda place: rows[place].length)
            while left:  # the longest first
                size = max(1, BATCH_TOKENS // rows[left[-1]].length)
                batch, left = left[-size:], left[:-size]
                with device_errors(), torch.inference_mode():
                    vectors.append(classifier.embed([rows[place].tokens for place in batch]).float().cpu())
                places.extend(start + place for place in batch)
                yield from batch

    try:
        for _ in report.counting("embedding", batches(), len(texts)):
            pass
    except (DeviceFull, DeviceLost) as error:
        raise ModelError(f"The device failed: {clause(error)}. Check the device, or set another --device.") from None
    return torch.cat(vectors)[torch.tensor(places).argsort()]


def label_vectors(classifier: Similarity, options: ClassifyOptions) -> torch.Tensor:
    """Return the unit vectors of the labels' sentences: [labels, dimensions]. Raises RequestRefused."""
    with torch.inference_mode():
        vectors = classifier.label_vectors(classifier.label_set(options)).float().cpu()
    return vectors.clone()  # outside of the block: a tensor as any other


def fit(
    features: torch.Tensor, wanted: torch.Tensor, labels: int, seed: int, label_weights: torch.Tensor | None = None
) -> Fit:
    """Fit a head with the penalty of the highest cross-validated accuracy, then scale its logits.

    The scale has the lowest log loss on the held-out examples: the most accurate penalties give scores that are too low
    (Guo et al., "On Calibration of Modern Neural Networks", 2017, temperature scaling).

    features: [examples, dimensions]. wanted: label numbers [examples], or distributions [examples, labels].
    label_weights: [labels].
    """
    centre = features.mean(0)
    scale = (features - centre).square().sum(1).mean().sqrt().clamp_min(1e-6)
    # In float64, the fit converges to the same result despite rounding.
    scaled = ((features - centre) / scale).double()

    def fitted(places: torch.Tensor, penalty: float, start: Fitted | None = None) -> Fitted:
        penalties = penalty, BIAS_PENALTY / len(places)
        return fit_logistic(scaled[places], wanted[places], labels, penalties, label_weights, start)

    with one_thread():
        order = torch.randperm(len(scaled), generator=torch.Generator().manual_seed(seed))[:MAX_VALIDATED]
        held_out = _held_out_logits(scaled, order, fitted) if len(order) >= FOLDS else {}
        expected = wanted[order]
        best = expected if expected.dim() == 1 else expected.argmax(1)
        accuracies = {each: float((logits.argmax(1) == best).double().mean()) for each, logits in held_out.items()}
        penalty = max(accuracies, key=accuracies.__getitem__, default=USUAL_PENALTY)
        sharpness = 1.0
        if held_out:
            logits = held_out[penalty]
            losses = {each: loss_of_rows(each * logits, expected, label_weights).mean() for each in SHARPNESSES}
            sharpness = min(losses, key=losses.__getitem__)
        weight, bias = (sharpness * tensor for tensor in fitted(torch.arange(len(scaled)), penalty))
    weight = weight / scale
    return Fit(weight.float(), (bias - weight @ centre.double()).float(), penalty, sharpness, accuracies)


def _held_out_logits(
    scaled: torch.Tensor, order: torch.Tensor, fitted: Callable[..., Fitted]
) -> dict[float, torch.Tensor]:
    """Return the logits of each example by a head that has not seen it, for each penalty: [examples, labels]."""
    parts = order.tensor_split(FOLDS)
    found: dict[float, list[torch.Tensor]] = {penalty: [] for penalty in PENALTIES}
    for number, part in enumerate(parts):
        last: Fitted | None = None
        for penalty in PENALTIES:  # each fit starts at the previous one, which is near
            last = fitted(torch.cat(parts[:number] + parts[number + 1 :]), penalty, last)
            found[penalty].append(scaled[part] @ last[0].T + last[1])
    return {penalty: torch.cat(logits) for penalty, logits in found.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread inside the block: with matrices this small, threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


@torch.enable_grad()
def fit_logistic(
    features: torch.Tensor,
    wanted: torch.Tensor,
    labels: int,
    penalties: tuple[float, float],
    label_weights: torch.Tensor | None = None,
    start: Fitted | None = None,
) -> Fitted:
    """Fit a multinomial logistic regression.

    features: [examples, dimensions], float64. penalties: L2, of the weight and of the bias. start: default: 0.
    """
    zeros = features.new_zeros(labels, features.shape[1]), features.new_zeros(labels)
    weight, bias = (tensor.clone().requires_grad_() for tensor in start or zeros)
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=MAX_ITERATIONS,
        tolerance_grad=TOLERANCE,
        tolerance_change=TOLERANCE * 1e-5,
        line_search_fn="strong_wolfe",
    )

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of_rows(features @ weight.T + bias, wanted, label_weights).mean()
        loss = loss + penalties[0] * weight.square().sum() + penalties[1] * bias.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(step)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()


def loss_of_rows(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return the cross-entropy of each row: [rows]. labels: label numbers, or distributions over the labels."""
    wanted = labels if labels.dim() == 1 else labels.to(logits)
    return cross_entropy(logits, wanted, weight=None if weights is None else weights.to(logits), reduction="none")
