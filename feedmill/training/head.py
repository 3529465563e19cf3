"""Train a head: a linear layer for the labels, on the frozen embeddings of a sentence-transformers model.

Zero-shot classification is a linear layer of the embedding. `adapt` moves it towards a sample of posts, whose labels it
need not know; then a multinomial logistic regression corrects it by the labelled posts, if there are any. The sum is
again one layer. If cross-validation shows that the correction does better without the adapted layer, that is left out.
Posts are embedded as a worker embeds them.
"""

import json
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from feedmill.console import Report
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import DESCRIBED_TOPICS, Settings
from feedmill.training.data import Dataset, TrainOptions
from feedmill.workers.models.classifiers.fixed_labels import write_head
from feedmill.workers.models.classifiers.layout import TEXT_CONFIGS, read_text_config, read_text_settings
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.classifiers.similarity import Similarity
from feedmill.workers.models.device import select_device
from feedmill.workers.models.engines import device_errors
from feedmill.workers.models.weights import HEAD_FILE, Weights, copy_model

#: Inverse variance of the posts of a label, where the mean square distance of all posts from their centre is 1; and
#: posts that a label's sentences count as. Twice as much or half of it costs less than the draws differ.
PRECISION, PRIOR_POSTS = 44.0, 8.0
#: Starts of the correction. The second is taken if it is more accurate by two standard errors.
ADAPTED, NOTHING = "adapted", "nothing"
#: L2 penalties of the weights, for centred features of unit mean square, and of the biases, beside the examples' summed
#: losses. Without the latter, the few examples' label frequencies are learnt as if they were those of all posts.
PENALTY, BIAS_PENALTY = 0.15, 5.0
#: Maximum L-BFGS iterations, of which a fit needs fewer, and greatest component of the gradient at its end.
MAX_ITERATIONS, TOLERANCE = 200, 1e-6
#: Parts of the cross-validation, and the maximum number of examples in it.
FOLDS, MAX_VALIDATED = 5, 2000
#: Posts without a label that a head learns from. More hardly move it.
MAX_UNLABELLED = 2000
#: Maximum tokens per forward pass, with padding.
BATCH_TOKENS = 8192
#: Factors of the logits to choose from, and the usual deviation of their logarithm for layers of the labels' sentences.
SHARPNESSES, SHARPNESS_DEVIATION = tuple(2 ** (step / 16) for step in range(-16, 65)), 0.05
#: Name of the prompt that FEEDMILL_POST_PROMPT chose, in the saved model.
PROMPT_NAME = "posts"


#: Weight [labels, dimensions] and bias [labels].
Fitted = tuple[torch.Tensor, torch.Tensor]


class Embedder:
    """A sentence-transformers model that reads `max_tokens` of a post. Raises UserError if it cannot be loaded."""

    def __init__(self, base: str, settings: Settings, max_tokens: int) -> None:
        own = {"model": base, "classifier": "similarity", "max_tokens": max_tokens, "labels": None, "template": None}
        self.settings, self.max_tokens = settings.model_copy(update=own), max_tokens
        device = select_device(settings.device, settings.dtype, settings.engine)
        self.classifier = cast(Similarity, load_classifier(self.settings, device))

    def embed(self, texts: Sequence[str], report: Report) -> torch.Tensor:
        """Return the unit vectors of texts: [texts, dimensions], in float32 on the CPU.

        Raises DeviceFull or DeviceLost.
        """
        report.phase(f"embedding {len(texts):,} posts", len(texts))
        label_set = self.classifier.label_set(ClassifyOptions())
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]), reverse=True)
        size = max(1, BATCH_TOKENS // self.max_tokens)
        vectors: list[torch.Tensor] = []
        for start in range(0, len(texts), size):
            rows = self.classifier.prepare([texts[place] for place in order[start : start + size]], label_set)
            with device_errors(), torch.inference_mode():
                vectors.append(self.classifier.embed([row.tokens for (row,) in rows]).float().cpu())
            report.advance(start + len(rows))
        return torch.cat(vectors)[torch.tensor(order).argsort()]

    def label_vectors(self, options: ClassifyOptions) -> torch.Tensor:
        """Return the unit vectors of the labels' sentences: [labels, dimensions].

        Raises RequestRefused, DeviceFull or DeviceLost.
        """
        with device_errors(), torch.inference_mode():
            vectors = self.classifier.label_vectors(self.classifier.label_set(options)).float().cpu()
        return vectors.clone()  # outside of the block: a tensor as any other


class HeadModel(NamedTuple):
    """A head and the model that it belongs to."""

    embedder: Embedder
    labels: tuple[str, ...]
    #: Float32, on the CPU.
    head: Fitted
    #: The training's part of training.json.
    record: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Write the model's folder: a copy of the base, with the head beside it. Raises OSError."""
        base = self.embedder
        save_with_head(folder, self.labels, self.head, base.classifier.weights, base.settings, base.max_tokens)


def save_with_head(
    folder: Path, labels: tuple[str, ...], head: Fitted, weights: Weights, settings: Settings, max_tokens: int
) -> None:
    """Write a head, and the files of its base that are not in the folder.

    The base's configuration gets the training's token limit and prompt, so that workers, and sentence-transformers'
    `encode`, embed texts as the training did. Raises OSError.
    """
    texts = read_text_settings(weights, settings)
    write_head(folder / HEAD_FILE, labels, *head)
    config = dict(texts.config)
    if settings.post_prompt is not None:
        chosen = {PROMPT_NAME: texts.post_prompt} if texts.post_prompt else {}
        config["prompts"] = (config.get("prompts") or {}) | chosen
        config["default_prompt_name"] = PROMPT_NAME if chosen else None
    if config:
        _write_json(folder / "config_sentence_transformers.json", config)
    limit = min(max_tokens, texts.max_tokens or max_tokens)
    _write_json(folder / TEXT_CONFIGS[0], read_text_config(weights.folder) | {"max_seq_length": limit})
    copy_model(weights, folder)


def train_head(dataset: Dataset, options: TrainOptions, settings: Settings, report: Report) -> HeadModel:
    """Embed the posts for training, and fit a head to them. Raises UserError, DeviceFull or DeviceLost."""
    report.phase(f"loading {options.base}")
    embedder = Embedder(options.base, settings, options.max_tokens)
    began = time.monotonic()
    others = random.Random(options.seed).sample(dataset.unlabelled, min(len(dataset.unlabelled), MAX_UNLABELLED))
    vectors = embedder.embed([example.post.text for example in (*dataset.train, *others)], report)
    rate = len(vectors) / (time.monotonic() - began)
    report.phase("fitting the head")
    targets = torch.tensor(dataset.targets(dataset.train, options)).reshape(-1, len(dataset.labels))
    sentences = embedder.label_vectors(ClassifyOptions(labels=described(dataset.labels, settings)))
    fitted = fit(vectors, targets, sentences, options.seed)
    device = embedder.classifier.device
    plan = fitted.choice | {
        "unlabelled": len(others),
        "classifier": "head",
        "max_tokens": options.max_tokens,
        "precision": f"{device.precision}: {device.dtype_reason}",
        "device": device.name,
    }
    record = {"plan": plan, "seconds": time.monotonic() - began, "samples_per_s": rate, "curve": []}
    return HeadModel(embedder, dataset.labels, fitted.head, record)


def described(labels: Sequence[str], settings: Settings) -> dict[str, tuple[str, ...]]:
    """Return the labels' descriptions for zero-shot classification: those set or built in, else the names."""
    known = settings.labels or DESCRIBED_TOPICS
    return {label: tuple(known.get(label, (label,))) for label in labels}


class Fit(NamedTuple):
    """A head, and how it was chosen."""

    head: Fitted
    #: start, the name of the layer that it corrects; sharpness, the factor of its logits; accuracies in the
    #: cross-validation, by start. With too few examples for that, the first start, 1 and none.
    choice: dict[str, Any]
    #: For each example, 1 if a head that has not seen it labels it right, else 0; NaN if that is unknown: [examples].
    right: torch.Tensor


def adapt(vectors: torch.Tensor, label_vectors: torch.Tensor) -> tuple[Fitted, torch.Tensor]:
    """Move each label's vector to the mean of itself and of the posts that resemble it, once.

    Return the layer, and each post's logits by the layer of all other posts, [posts, labels]: a post draws the label
    that it resembles towards itself, so in its own layer, its scores would be too high.

    This is the first step of expectation maximization, for a mixture of Gaussians of equal variance (Nigam et al.,
    "Text Classification from Labeled and Unlabeled Documents using EM", 2000). Further steps let frequent labels absorb
    rare ones.

    vectors: unit vectors of posts, [posts, dimensions]. label_vectors: those of the labels' sentences, [labels,
    dimensions].
    """
    centre, scale = _centre(vectors)
    points, sentences = (vectors - centre) / scale, (label_vectors - label_vectors.mean(0)) / scale
    shares = (PRECISION * (points @ sentences.T - sentences.square().sum(1) / 2)).softmax(1)
    sums, counts = PRIOR_POSTS * sentences + shares.T @ points, PRIOR_POSTS + shares.sum(0)
    means, others = sums / counts[:, None], counts - shares
    weight = PRECISION / scale * means
    own, products = shares * points.square().sum(1, keepdim=True), points @ sums.T
    squares = sums.square().sum(1) - 2 * shares * products + shares * own
    logits = PRECISION * ((products - own) / others - squares / others.square() / 2)
    return (weight, -PRECISION / 2 * means.square().sum(1) - weight @ centre), logits


def scores_of(layer: Fitted, vectors: torch.Tensor) -> torch.Tensor:
    """Return the logits of vectors: [vectors, labels]."""
    return vectors @ layer[0].T + layer[1]


def _centre(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean of vectors, [dimensions], and the root of their mean square distance from it."""
    centre = vectors.mean(0)
    return centre, (vectors - centre).square().sum(1).mean().sqrt().clamp_min(1e-6)


def fit(vectors: torch.Tensor, targets: torch.Tensor, label_vectors: torch.Tensor | None, seed: int) -> Fit:
    """Correct the adapted layer, or none, by examples, and scale its logits, both by cross-validation.

    The scale has the lowest log loss on the held-out examples (Guo et al., "On Calibration of Modern Neural Networks",
    2017, temperature scaling); few of them move it little from 1.

    vectors: [posts, dimensions], of which the first are the examples. targets: the examples' distributions, [examples,
    labels]. label_vectors: as for `adapt`; None without zero-shot classification.
    """
    labels, (centre, scale) = targets.shape[1], _centre(vectors)
    starts = {} if label_vectors is None else {ADAPTED: adapt(vectors, label_vectors)}
    starts[NOTHING] = (torch.zeros(labels, len(centre)), torch.zeros(labels)), torch.zeros(len(vectors), labels)
    vectors, count = vectors[: len(targets)], len(targets)
    # In float64, the fit converges to the same result despite rounding.
    features = ((vectors - centre) / scale).double()
    choice: dict[str, Any] = {"start": next(iter(starts)), "sharpness": 1.0, "accuracies": {}}
    right = torch.full((count,), torch.nan)
    with one_thread():
        if count >= FOLDS:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:MAX_VALIDATED]
            held_out = {
                name: _held_out(features[order], targets[order], scores_of(layer, vectors[order]), unseen[order])
                for name, (layer, unseen) in starts.items()
            }
            choice, right[order] = _choose(held_out, targets[order])
        (first, first_bias), sharpness = starts[choice["start"]][0], choice["sharpness"]
        weight, bias = fit_logistic(features, targets, scores_of((first, first_bias), vectors))
    bias = first_bias + bias - weight @ (centre / scale).double()
    return Fit(((sharpness * (first + weight / scale)).float(), (sharpness * bias).float()), choice, right)


def _held_out(
    features: torch.Tensor, targets: torch.Tensor, offset: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    """Add to the logits, of a start that has not seen each example, the correction of folds that have not seen it.

    offset: the logits of the start that is corrected, [examples, labels].
    """
    numbers = torch.arange(len(targets)) % FOLDS
    for number in range(FOLDS):
        part, others = numbers == number, numbers != number
        weight, bias = fit_logistic(features[others], targets[others], offset[others])
        logits[part] += (features[part] @ weight.T + bias).float()
    return logits


def _choose(held_out: Mapping[str, torch.Tensor], targets: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the choice of a `Fit` by the logits of each start, and 1 for each example that its start labels right."""
    rights = {name: (logits.argmax(1) == targets.argmax(1)).float() for name, logits in held_out.items()}
    first = next(iter(rights))
    gains = rights[NOTHING] - rights[first]
    best = NOTHING if gains.mean() > 2 * gains.std() / len(gains) ** 0.5 else first
    accuracies = {name: float(each.mean()) for name, each in rights.items()}
    sharpness = best_sharpness(held_out[best], targets, math.inf if best == NOTHING else SHARPNESS_DEVIATION)
    return {"start": best, "sharpness": sharpness, "accuracies": accuracies}, rights[best]


def best_sharpness(logits: torch.Tensor, targets: torch.Tensor, deviation: float = math.inf) -> float:
    """Return the factor with the lowest log loss, or the likeliest if logarithms have a Cauchy distribution so wide."""

    def loss(factor: float) -> float:
        return float(loss_of_rows(factor * logits, targets).sum()) + math.log1p((math.log(factor) / deviation) ** 2)

    return min(SHARPNESSES, key=loss)


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


@torch.no_grad()
def fit_logistic(features: torch.Tensor, targets: torch.Tensor, offset: torch.Tensor) -> Fitted:
    """Fit a multinomial logistic regression.

    features: [examples, dimensions], float64. targets: distributions [examples, labels]. offset: logits that the fit
    adds to, [examples, labels].
    """
    weight = features.new_zeros(targets.shape[1], features.shape[1])
    bias = features.new_zeros(targets.shape[1])
    targets, count = targets.to(features), max(1, len(features))
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=MAX_ITERATIONS,
        tolerance_grad=TOLERANCE,
        tolerance_change=TOLERANCE * 1e-5,
        line_search_fn="strong_wolfe",
    )

    def step() -> torch.Tensor:
        """Return the loss and set its gradients. Autograd would take 1.5 times as long."""
        likelihoods = (offset + features @ weight.T + bias).log_softmax(-1)
        errors = targets.sum(1, keepdim=True) * likelihoods.exp() - targets
        weight.grad = (errors.T @ features + 2 * PENALTY * weight) / count
        bias.grad = (errors.sum(0) + 2 * BIAS_PENALTY * bias) / count
        penalties = PENALTY * weight.square().sum() + BIAS_PENALTY * bias.square().sum()
        return (penalties - (targets * likelihoods).sum()) / count

    optimizer.step(step)  # type: ignore[no-untyped-call]
    return weight, bias


def loss_of_rows(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each row with its distribution over the labels: [rows]."""
    return -(targets.to(logits) * logits.log_softmax(-1)).sum(-1)
