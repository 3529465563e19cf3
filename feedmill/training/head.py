"""Train a head: a linear layer for the labels, on the frozen embeddings of a sentence-transformers model.

Zero-shot classification is a linear layer of the embedding. `adapt` moves it towards a sample of posts, whose labels it
need not know; then a multinomial logistic regression corrects it by the labelled posts, if there are any. The sum is
again one layer. If cross-validation shows that zero-shot classification as it is, or nothing, is a better start for the
correction, that replaces the adapted layer. Posts are embedded as a worker embeds them.
"""

import json
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
from feedmill.workers.models.classifiers.similarity import COSINE_SCALE, Similarity
from feedmill.workers.models.device import select_device
from feedmill.workers.models.engines import device_errors
from feedmill.workers.models.weights import HEAD_FILE, Weights, copy_model

#: Inverse variance of the posts of a label, where the mean square distance of all posts from their centre is 1; and
#: posts that a label's sentences count as. Twice as much or half of it costs less than the draws differ.
PRECISION, PRIOR_POSTS = 40.0, 8.0
#: Starts of the correction. The first is taken unless another is certainly more accurate.
ADAPTED, ZERO_SHOT, NOTHING = "adapted", "zero-shot", "nothing"
#: L2 penalties of the weights, for centred features of unit mean square, and of the biases, beside the examples' summed
#: losses. Without the latter, the few examples' label frequencies are learnt as if they were those of all posts.
PENALTY, BIAS_PENALTY = 0.15, 5.0
#: Maximum L-BFGS iterations. The fit converges well before.
MAX_ITERATIONS = 200
#: Greatest component of the gradient at the end of a fit.
TOLERANCE = 1e-6
#: Parts of the cross-validation, and the maximum number of examples in it.
FOLDS, MAX_VALIDATED = 5, 2000
#: Posts without a label that a head learns from. More hardly move it.
MAX_UNLABELLED = 2000
#: Maximum tokens per forward pass, with padding.
BATCH_TOKENS = 8192
#: Factors of the logits to choose from.
SHARPNESSES = tuple(2 ** (step / 4) for step in range(-4, 17))
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
        embedder = self.embedder
        weights = embedder.classifier.weights
        save_with_head(folder, self.labels, self.head, weights, embedder.settings, embedder.max_tokens)


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


def adapt(vectors: torch.Tensor, label_vectors: torch.Tensor) -> Fitted:
    """Move each label's vector to the mean of itself and of the posts that resemble it, once.

    This is the first step of expectation maximization, for a mixture of Gaussians of equal variance (Nigam et al.,
    "Text Classification from Labeled and Unlabeled Documents using EM", 2000). Further steps let frequent labels absorb
    rare ones.

    vectors: unit vectors of posts, [posts, dimensions]. label_vectors: those of the labels' sentences, [labels,
    dimensions].
    """
    centre, scale = _centre(vectors)
    points, sentences = (vectors - centre) / scale, (label_vectors - label_vectors.mean(0)) / scale
    shares = (PRECISION * (points @ sentences.T - sentences.square().sum(1) / 2)).softmax(1)
    means = (PRIOR_POSTS * sentences + shares.T @ points) / (PRIOR_POSTS + shares.sum(0))[:, None]
    weight = PRECISION / scale * means
    return weight, -PRECISION / 2 * means.square().sum(1) - weight @ centre


def scores_of(layer: Fitted, vectors: torch.Tensor) -> torch.Tensor:
    """Return the logits of vectors: [vectors, labels]."""
    return vectors @ layer[0].T + layer[1]


def _centre(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean of vectors, [dimensions], and the root of their mean square distance from it."""
    centre = vectors.mean(0)
    return centre, (vectors - centre).square().sum(1).mean().sqrt().clamp_min(1e-6)


def _starts(vectors: torch.Tensor, label_vectors: torch.Tensor | None, labels: int) -> dict[str, Fitted]:
    """Return the layers that a head may correct, by name. The arguments are those of `fit`."""
    nothing = torch.zeros(labels, vectors.shape[1]), torch.zeros(labels)
    if label_vectors is None:
        return {NOTHING: nothing}
    zero_shot = COSINE_SCALE * label_vectors, nothing[1]
    return {ADAPTED: adapt(vectors, label_vectors), ZERO_SHOT: zero_shot, NOTHING: nothing}


def fit(vectors: torch.Tensor, targets: torch.Tensor, label_vectors: torch.Tensor | None, seed: int) -> Fit:
    """Correct the best of some layers by examples, and scale its logits, both by cross-validation.

    The scale has the lowest log loss on the held-out examples (Guo et al., "On Calibration of Modern Neural Networks",
    2017, temperature scaling).

    vectors: [posts, dimensions], of which the first are the examples. targets: the examples' distributions, [examples,
    labels]. label_vectors: as for `adapt`; None without zero-shot classification.
    """
    starts = _starts(vectors, label_vectors, targets.shape[1])
    centre, scale = _centre(vectors)
    vectors, count = vectors[: len(targets)], len(targets)
    # In float64, the fit converges to the same result despite rounding.
    features = ((vectors - centre) / scale).double()
    logits = {name: scores_of(layer, vectors).double() for name, layer in starts.items()}
    choice: dict[str, Any] = {"start": next(iter(starts)), "sharpness": 1.0, "accuracies": {}}
    right = torch.full((count,), torch.nan)
    with one_thread():
        if count >= FOLDS:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:MAX_VALIDATED]
            held_out = {name: _held_out(features[order], targets[order], each[order]) for name, each in logits.items()}
            choice, right[order] = _choose(held_out, targets[order])
        weight, bias = fit_logistic(features, targets, logits[choice["start"]])
    weight, sharpness, (first, first_bias) = weight / scale, choice["sharpness"], starts[choice["start"]]
    bias = first_bias + bias - weight @ centre.double()
    return Fit(((sharpness * (first + weight)).float(), (sharpness * bias).float()), choice, right)


def _held_out(features: torch.Tensor, targets: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return the logits of each example by a head that has not seen it: [examples, labels]."""
    numbers, logits = torch.arange(len(targets)) % FOLDS, offset.clone()
    for number in range(FOLDS):
        part, others = numbers == number, numbers != number
        weight, bias = fit_logistic(features[others], targets[others], offset[others])
        logits[part] += features[part] @ weight.T + bias
    return logits


def _choose(held_out: Mapping[str, torch.Tensor], targets: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the choice of a `Fit` by the logits of each start, and 1 for each example that its start labels right."""
    rights = {name: (logits.argmax(1) == targets.argmax(1)).float() for name, logits in held_out.items()}
    best, *others = rights
    for name in others:
        if _is_positive(rights[name] - rights[best]):
            best = name
    accuracies = {name: float(each.mean()) for name, each in rights.items()}
    logits, sharpness = held_out[best], best_sharpness(held_out[best], targets)
    if not _is_positive(loss_of_rows(logits, targets) - loss_of_rows(sharpness * logits, targets)):
        sharpness = 1.0
    return {"start": best, "sharpness": sharpness, "accuracies": accuracies}, rights[best]


def best_sharpness(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the factor of logits with the lowest log loss."""
    return min(SHARPNESSES, key=lambda each: float(loss_of_rows(each * logits, targets).mean()))


def _is_positive(differences: torch.Tensor) -> bool:
    """Return whether the mean is above zero by more than twice its standard error."""
    return bool(differences.mean() > 2 * differences.std() / len(differences) ** 0.5)


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
