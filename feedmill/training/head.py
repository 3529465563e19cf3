"""Train a head: a linear layer for the labels, on the frozen embeddings of a sentence-transformers
model.

Zero-shot classification is a linear layer of the embedding. `adapt` moves it towards a sample of
posts, whose labels it need not know; then a multinomial logistic regression corrects it by the
labelled posts, if there are any. The sum is again one layer. If cross-validation shows that the
correction does better without the adapted layer, that is left out. Posts are embedded as a worker
embeds them.
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
from feedmill.training.data import Dataset
from feedmill.training.options import TrainOptions
from feedmill.workers.models.classifiers.fixed_labels import NoneClass, write_head
from feedmill.workers.models.classifiers.layout import (
    TEXT_CONFIGS,
    read_text_config,
    read_text_settings,
)
from feedmill.workers.models.classifiers.none_of_these import read_subjects
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.classifiers.similarity import Similarity
from feedmill.workers.models.device import select_device
from feedmill.workers.models.engines import device_errors
from feedmill.workers.models.files import HEAD_FILE
from feedmill.workers.models.weights import Weights, copy_model

#: Inverse variance of the posts of a label, where the mean square distance of all posts from their
#: centre is 1; and posts that a label's sentences count as. Twice as much or half of it costs less
#: than the draws differ.
PRECISION = 44.0
PRIOR_POSTS = 8.0
#: Starts of the correction. The second is taken if it is more accurate by two standard errors.
ADAPTED = "adapted"
NOTHING = "nothing"
#: L2 penalties of the weights, for centred features of unit mean square, and of the biases, beside
#: the examples' summed losses. Without the latter, the few examples' label frequencies are learnt
#: as if they were those of all posts.
PENALTY = 0.15
BIAS_PENALTY = 5.0
#: Maximum L-BFGS iterations, of which a fit needs fewer, and greatest component of the gradient at
#: its end.
MAX_ITERATIONS = 200
TOLERANCE = 1e-6
#: Parts of the cross-validation, and the maximum number of examples in it.
FOLDS = 5
MAX_VALIDATED = 2000
#: Posts without a label that a head learns from. More hardly move it.
MAX_UNLABELLED = 2000
#: Maximum tokens per forward pass, with padding.
BATCH_TOKENS = 8192
#: Factors of the logits to choose from, and the usual deviation of their logarithm for layers of
#: the labels' sentences.
SHARPNESSES = tuple(2 ** (step / 16) for step in range(-16, 65))
SHARPNESS_DEVIATION = 0.05
#: Name of the prompt that FEEDMILL_POST_PROMPT chose, in the saved model.
PROMPT_NAME = "posts"


#: Weight [labels, dimensions] and bias [labels].
Fitted = tuple[torch.Tensor, torch.Tensor]


class Embedder:
    """A sentence-transformers model that reads `max_tokens` of a post.

    Raises UserError if it cannot be loaded.
    """

    def __init__(self, base: str, settings: Settings, max_tokens: int) -> None:
        changes = {
            "model": base,
            "classifier": "similarity",
            "max_tokens": max_tokens,
            "labels": None,
            "template": None,
        }
        self.settings = settings.model_copy(update=changes)
        self.max_tokens = max_tokens
        device = select_device(
            settings.device,
            settings.dtype,
            settings.engine,
        )
        classifier = load_classifier(self.settings, device)
        self.classifier = cast(Similarity, classifier)

    def embed(self, texts: Sequence[str], report: Report) -> torch.Tensor:
        """Return the unit vectors of texts: [texts, dimensions], in float32 on the CPU.

        Raises DeviceFull or DeviceLost.
        """
        count = len(texts)
        report.phase(f"embedding {count:,} posts", count)
        classifier = self.classifier
        options = ClassifyOptions()
        label_set = classifier.label_set(options)
        order = sorted(
            range(count),
            key=lambda index: len(texts[index]),
            reverse=True,
        )
        batch_size = BATCH_TOKENS // self.max_tokens
        batch_size = max(1, batch_size)
        batches: list[torch.Tensor] = []
        for start in range(0, count, batch_size):
            end = start + batch_size
            indexes = order[start:end]
            batch = [texts[index] for index in indexes]
            rows = classifier.prepare(batch, label_set)
            tokens = [row.tokens for (row,) in rows]
            with device_errors(), torch.inference_mode():
                vectors = classifier.embed(tokens)
                vectors = vectors.float().cpu()
                batches.append(vectors)
            done = start + len(rows)
            report.advance(done)
        original_order = torch.tensor(order).argsort()
        return torch.cat(batches)[original_order]

    def label_vectors(self, options: ClassifyOptions) -> torch.Tensor:
        """Return the unit vectors of the labels' sentences: [labels, dimensions].

        Raises RequestRefused, DeviceFull or DeviceLost.
        """
        classifier = self.classifier
        with device_errors(), torch.inference_mode():
            label_set = classifier.label_set(options)
            vectors = classifier.label_vectors(label_set)
            vectors = vectors.float().cpu()
        return vectors.clone()  # outside of the block: a tensor as any other


class HeadModel(NamedTuple):
    """A head and the model that it belongs to."""

    embedder: Embedder
    labels: tuple[str, ...]
    #: Float32, on the CPU.
    head: Fitted
    #: The training's part of training.json.
    record: dict[str, Any]
    none: NoneClass | None = None

    def save(self, folder: Path) -> None:
        """Write the model's folder: a copy of the base, with the head beside it.

        Raises OSError.
        """
        base = self.embedder
        save_with_head(
            folder,
            self.labels,
            self.head,
            base.classifier.weights,
            base.settings,
            base.max_tokens,
            self.none,
        )


def save_with_head(
    folder: Path,
    labels: tuple[str, ...],
    head: Fitted,
    weights: Weights,
    settings: Settings,
    max_tokens: int,
    none: NoneClass | None = None,
) -> None:
    """Write a head, and the files of its base that are not in the folder.

    The base's configuration gets the training's token limit and prompt, so that workers, and
    sentence-transformers' `encode`, embed texts as the training did. Raises OSError.
    """
    texts = read_text_settings(weights, settings)
    weight, bias = head
    write_head(
        folder / HEAD_FILE,
        labels,
        weight,
        bias,
        none,
    )

    config = dict(texts.config)
    if settings.post_prompt is not None:
        base_prompts = config.get("prompts")
        prompts = dict(base_prompts or {})
        prompt_name = None
        if texts.post_prompt:
            prompt_name = PROMPT_NAME
            prompts[prompt_name] = texts.post_prompt
        config["prompts"] = prompts
        config["default_prompt_name"] = prompt_name
    if config:
        _write_json(folder / "config_sentence_transformers.json", config)

    text_config = read_text_config(weights.folder)
    limit = max_tokens
    if texts.max_tokens:
        limit = min(limit, texts.max_tokens)
    text_config["max_seq_length"] = limit
    _write_json(folder / TEXT_CONFIGS[0], text_config)
    copy_model(weights, folder)


def train_head(
    dataset: Dataset, options: TrainOptions, settings: Settings, report: Report
) -> HeadModel:
    """Embed the posts for training, and fit a head to them.

    Raises UserError, DeviceFull or DeviceLost.
    """
    report.phase(f"loading {options.base}")
    embedder = Embedder(
        options.base,
        settings,
        options.max_tokens,
    )
    began = time.monotonic()
    unlabelled_count = min(len(dataset.unlabelled), MAX_UNLABELLED)
    unlabelled = random.Random(options.seed).sample(
        dataset.unlabelled,
        unlabelled_count,
    )
    posts = [*dataset.train, *dataset.none_train, *unlabelled]
    texts = [example.post.text for example in posts]
    vectors = embedder.embed(texts, report)
    embedding_seconds = time.monotonic() - began
    rate = len(vectors) / embedding_seconds

    report.phase("fitting the head")
    fitted = _fit_examples(
        vectors,
        dataset,
        options,
        settings,
        embedder,
    )
    device = embedder.classifier.device
    plan = fitted.choice | {
        "unlabelled": unlabelled_count,
        "classifier": "head",
        "max_tokens": options.max_tokens,
        "precision": f"{device.precision}: {device.dtype_reason}",
        "device": device.name,
    }
    record = {
        "plan": plan,
        "seconds": time.monotonic() - began,
        "samples_per_s": rate,
        "curve": [],
    }
    return HeadModel(
        embedder=embedder,
        labels=dataset.labels,
        head=fitted.head,
        record=record,
        none=fitted.none,
    )


def _fit_examples(
    vectors: torch.Tensor,
    dataset: Dataset,
    options: TrainOptions,
    settings: Settings,
    embedder: Embedder,
) -> "Fit":
    """Fit a head to the examples, with a none-class if some fit none of the labels, or if there
    are no examples and each label has a description.

    vectors: those of all posts, of which the first are the examples.
    """
    distributions = dataset.targets(dataset.train, options)
    label_count = len(dataset.labels)
    targets = torch.tensor(distributions)
    targets = targets.reshape(-1, label_count)
    descriptions = described(dataset.labels, settings)
    label_options = ClassifyOptions(labels=descriptions)
    sentences = embedder.label_vectors(label_options)
    # Without an answer, subjects move towards the posts that fit no label, which would otherwise
    # move the labels. Bare names tell too little: they lose up to 0.04 of accuracy.
    has_subjects = bool(dataset.none_train)
    if not dataset.train and not has_subjects:
        has_subjects = _are_described(descriptions)
    if not has_subjects:
        return fit(
            vectors,
            targets,
            sentences,
            options.seed,
        )

    from feedmill.training.none_class import fit_none  # noqa: PLC0415 - imports this

    example_count = len(dataset.train) + len(dataset.none_train)
    none_targets = torch.zeros(example_count, label_count + 1)
    none_targets[: len(targets), :-1] = targets
    none_targets[len(targets) :, -1] = 1
    subject_options = ClassifyOptions(labels=read_subjects())
    return fit_none(
        vectors,
        none_targets,
        sentences,
        embedder.label_vectors(subject_options),
        options.seed,
    )


def described(labels: Sequence[str], settings: Settings) -> dict[str, tuple[str, ...]]:
    """Return the labels' descriptions for zero-shot classification: those set or built in, else
    the names.
    """
    known_descriptions = settings.labels or DESCRIBED_TOPICS
    descriptions: dict[str, tuple[str, ...]] = {}
    for label in labels:
        sentences = known_descriptions.get(label, [label])
        descriptions[label] = tuple(sentences)
    return descriptions


def _are_described(descriptions: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether each label has a description, not its name alone."""
    return all(sentences != (label,) for label, sentences in descriptions.items())


class Fit(NamedTuple):
    """A head, and how it was chosen."""

    head: Fitted
    #: start, the name of the layer that it corrects; sharpness, the factor of its logits;
    #: accuracies in the cross-validation, by start. With too few examples for that, the first
    #: start, 1 and none.
    choice: dict[str, Any]
    #: For each example, 1 if a head that has not seen it labels it right, else 0; NaN if that is
    #: unknown: [examples].
    right: torch.Tensor
    #: The none-class, if everyday subjects competed with the labels (none_class.py).
    none: NoneClass | None = None
    #: With a none-class: as `right`, if each post gets its best label.
    best_right: torch.Tensor | None = None


def adapt(
    vectors: torch.Tensor, label_vectors: torch.Tensor
) -> tuple[Fitted, torch.Tensor]:
    """Move each label's vector to the mean of itself and of the posts that resemble it, once.

    Return the layer, and each post's logits by the layer of all other posts, [posts, labels]: a
    post draws the label that it resembles towards itself, so in its own layer, its scores would be
    too high.

    This is the first step of expectation maximization, for a mixture of Gaussians of equal
    variance (Nigam et al., "Text Classification from Labeled and Unlabeled Documents using EM",
    2000). Further steps let frequent labels absorb rare ones.

    vectors: unit vectors of posts, [posts, dimensions]. label_vectors: those of the labels'
    sentences, [labels, dimensions].
    """
    centre, scale = centre_of(vectors)
    centred = vectors - centre
    points = centred / scale
    label_centre = label_vectors.mean(0)
    centred_labels = label_vectors - label_centre
    sentences = centred_labels / scale

    # Expectation: each post is shared out to the labels, [posts, labels].
    similarities = points @ sentences.T
    norms = sentences.square().sum(1)  # [labels]
    half_norms = norms / 2
    log_likelihoods = PRECISION * (similarities - half_norms)
    shares = log_likelihoods.softmax(1)

    # Maximization: the mean of each label. Its sentences count as PRIOR_POSTS posts.
    prior_points = PRIOR_POSTS * sentences
    shared_points = shares.T @ points  # [labels, dimensions]
    sums = prior_points + shared_points
    shared_posts = shares.sum(0)  # [labels]
    counts = PRIOR_POSTS + shared_posts
    means = sums / counts[:, None]

    # The layer of these means: each label's log likelihood, which is linear in the vector.
    mean_norms = means.square().sum(1)  # [labels]
    scaled_precision = PRECISION / scale
    half_precision = PRECISION / 2
    weight = scaled_precision * means
    bias = -half_precision * mean_norms
    bias = bias - weight @ centre

    # The same for each post, with the means of all others: [posts, labels].
    point_norms = points.square().sum(1, keepdim=True)  # [posts, 1]
    own_products = shares * point_norms
    products = points @ sums.T
    sum_norms = sums.square().sum(1)  # [labels]
    cross_terms = 2 * shares * products
    own_norms = shares * own_products
    other_counts = counts - shares
    other_products = products - own_products
    other_norms = sum_norms - cross_terms + own_norms
    mean_products = other_products / other_counts
    square_counts = other_counts.square()
    other_mean_norms = other_norms / square_counts
    half_mean_norms = other_mean_norms / 2
    logits = PRECISION * (mean_products - half_mean_norms)
    layer = (weight, bias)
    return layer, logits


def logits_of(layer: Fitted, vectors: torch.Tensor) -> torch.Tensor:
    """Return the logits of vectors: [vectors, labels]."""
    weight, bias = layer
    products = vectors @ weight.T
    return products + bias


def centre_of(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean of vectors, [dimensions], and the root of their mean square distance from
    it.
    """
    centre = vectors.mean(0)
    centred = vectors - centre
    square_distances = centred.square().sum(1)
    mean_square = square_distances.mean()
    scale = mean_square.sqrt()
    return centre, scale.clamp_min(1e-6)


def fit(
    vectors: torch.Tensor,
    targets: torch.Tensor,
    label_vectors: torch.Tensor | None,
    seed: int,
) -> Fit:
    """Correct the adapted layer, or none, by examples, and scale its logits, both by
    cross-validation.

    The scale has the lowest log loss on the held-out examples (Guo et al., "On Calibration of
    Modern Neural Networks", 2017, temperature scaling); few of them move it little from 1.

    vectors: [posts, dimensions], of which the first are the examples. targets: the examples'
    distributions, [examples, labels]. label_vectors: as for `adapt`; None without zero-shot
    classification.
    """
    count, labels = targets.shape
    centre, scale = centre_of(vectors)
    starts = _starts(vectors, labels, label_vectors)
    vectors = vectors[:count]
    centred = vectors - centre
    # In float64, the fit converges to the same result despite rounding.
    features = centred / scale
    features = features.double()
    first_start = next(iter(starts))
    choice: dict[str, Any] = {
        "start": first_start,
        "sharpness": 1.0,
        "accuracies": {},
    }
    right = torch.full([count], torch.nan)
    with one_thread():
        if count >= FOLDS:
            order = validation_order(count, seed)
            validated = targets[order]
            held_out = {}
            for name, start in starts.items():
                held_out[name] = held_out_logits(
                    features[order],
                    validated,
                    logits_of(start.layer, vectors[order]),
                    start.unseen[order],
                )
            choice, right[order] = _choose(held_out, validated)

        start_layer = starts[choice["start"]].layer
        correction = fit_logistic(
            features,
            targets,
            logits_of(start_layer, vectors),
        )
    head = sum_of_layers(start_layer, correction, centre, scale, choice["sharpness"])
    return Fit(
        head=head,
        choice=choice,
        right=right,
    )


class _Start(NamedTuple):
    """A layer to correct, and the logits of posts by a layer that has not seen them."""

    layer: Fitted
    unseen: torch.Tensor


def _starts(
    vectors: torch.Tensor, labels: int, label_vectors: torch.Tensor | None
) -> dict[str, _Start]:
    """Return the layers to choose from: the adapted one, if any, and none."""
    starts = {}
    if label_vectors is not None:
        layer, unseen = adapt(vectors, label_vectors)
        starts[ADAPTED] = _Start(layer, unseen)
    posts, dimensions = vectors.shape
    no_weight = torch.zeros(labels, dimensions)
    no_bias = torch.zeros(labels)
    no_logits = torch.zeros(posts, labels)
    starts[NOTHING] = _Start((no_weight, no_bias), no_logits)
    return starts


def validation_order(count: int, seed: int) -> torch.Tensor:
    """Return the examples that are held out in turn, in a random order."""
    generator = torch.Generator()
    generator.manual_seed(seed)
    order = torch.randperm(count, generator=generator)
    return order[:MAX_VALIDATED]


def sum_of_layers(
    start: Fitted,
    correction: Fitted,
    centre: torch.Tensor,
    scale: torch.Tensor,
    sharpness: float,
) -> Fitted:
    """Return one layer of vectors for the start and the correction, which is one of features:
    (vectors - centre) / scale.
    """
    start_weight, start_bias = start
    correction_weight, correction_bias = correction
    feature_centre = centre / scale
    centre_product = correction_weight @ feature_centre.double()
    vector_correction = correction_weight / scale
    weight = start_weight + vector_correction
    bias = start_bias + correction_bias
    bias = bias - centre_product
    sharp_weight = sharpness * weight
    sharp_bias = sharpness * bias
    return sharp_weight.float(), sharp_bias.float()


def held_out_logits(
    features: torch.Tensor,
    targets: torch.Tensor,
    offset: torch.Tensor,
    logits: torch.Tensor,
) -> torch.Tensor:
    """Add to the logits, of a start that has not seen each example, the correction of folds that
    have not seen it.

    offset: the logits of the start that is corrected, [examples, labels].
    """
    indexes = torch.arange(len(targets))
    numbers = indexes % FOLDS
    for number in range(FOLDS):
        part = numbers == number
        others = numbers != number
        correction = fit_logistic(
            features[others],
            targets[others],
            offset[others],
        )
        part_features = features[part]
        corrections = logits_of(correction, part_features)
        logits[part] += corrections.float()
    return logits


def _choose(
    held_out: Mapping[str, torch.Tensor], targets: torch.Tensor
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the choice of a `Fit` by the logits of each start, and 1 for each example that its
    start labels right.
    """
    labels = targets.argmax(1)
    rights = {}
    accuracies = {}
    for name, logits in held_out.items():
        best_labels = logits.argmax(1)
        is_right = best_labels == labels
        right = is_right.float()
        rights[name] = right
        accuracies[name] = float(right.mean())

    best = next(iter(rights))
    gains = rights[NOTHING] - rights[best]
    root_count = len(gains) ** 0.5
    two_deviations = 2 * gains.std()
    two_errors = two_deviations / root_count
    if gains.mean() > two_errors:
        best = NOTHING
    deviation = SHARPNESS_DEVIATION
    if best == NOTHING:
        deviation = math.inf
    sharpness = best_sharpness(
        held_out[best],
        targets,
        deviation,
    )
    choice = {
        "start": best,
        "sharpness": sharpness,
        "accuracies": accuracies,
    }
    return choice, rights[best]


def best_sharpness(
    logits: torch.Tensor, targets: torch.Tensor, deviation: float = math.inf
) -> float:
    """Return the factor with the lowest log loss, or the likeliest if logarithms have a Cauchy
    distribution so wide.
    """

    def loss(factor: float) -> float:
        scaled = factor * logits
        log_losses = loss_of_rows(scaled, targets)
        total_loss = float(log_losses.sum())
        deviations = math.log(factor) / deviation
        improbability = math.log1p(deviations**2)
        return total_loss + improbability

    return min(SHARPNESSES, key=loss)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread inside the block: with matrices this small, threads mostly wait for each
    other.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write_json(path: Path, content: object) -> None:
    text = json.dumps(
        content,
        ensure_ascii=False,
        indent=2,
    )
    path.write_text(f"{text}\n", encoding="utf-8")


@torch.no_grad()
def fit_logistic(
    features: torch.Tensor, targets: torch.Tensor, offset: torch.Tensor
) -> Fitted:
    """Fit a multinomial logistic regression.

    features: [examples, dimensions], float64. targets: distributions [examples, labels]. offset:
    logits that the fit adds to, [examples, labels].
    """
    _, labels = targets.shape
    _, dimensions = features.shape
    weight = features.new_zeros(labels, dimensions)
    bias = features.new_zeros(labels)
    targets = targets.to(features)
    totals = targets.sum(1, keepdim=True)
    count = max(1, len(features))
    # Factors in the gradients of the penalties.
    weight_factor = 2 * PENALTY
    bias_factor = 2 * BIAS_PENALTY
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=MAX_ITERATIONS,
        tolerance_grad=TOLERANCE,
        tolerance_change=TOLERANCE * 1e-5,
        line_search_fn="strong_wolfe",
    )

    def step() -> torch.Tensor:
        """Return the loss and set its gradients. Autograd would take 1.5 times as long."""
        products = features @ weight.T
        logits = offset + products + bias
        log_likelihoods = logits.log_softmax(-1)

        likelihoods = log_likelihoods.exp()
        errors = totals * likelihoods
        errors = errors - targets
        weight_gradient = errors.T @ features
        bias_gradient = errors.sum(0)
        weight_gradient += weight_factor * weight
        bias_gradient += bias_factor * bias
        weight.grad = weight_gradient / count
        bias.grad = bias_gradient / count

        weight_norm = weight.square().sum()
        bias_norm = bias.square().sum()
        weight_penalty = PENALTY * weight_norm
        bias_penalty = BIAS_PENALTY * bias_norm
        penalties = weight_penalty + bias_penalty
        target_likelihoods = targets * log_likelihoods
        loss = penalties - target_likelihoods.sum()
        return loss / count

    optimizer.step(step)  # type: ignore[no-untyped-call]
    return weight, bias


def loss_of_rows(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each row with its distribution over the labels: [rows]."""
    log_likelihoods = logits.log_softmax(-1)
    targets = targets.to(logits)
    target_likelihoods = targets * log_likelihoods
    return -target_likelihoods.sum(-1)
