"""Train a head: a linear layer for the labels, on the frozen embeddings of a sentence-transformers model.

The layer is a multinomial logistic regression, a convex problem that takes seconds and few examples. It corrects the
base's zero-shot logits instead of replacing them, if that is more accurate: they are linear in the embedding, too, so
the sum of both is again one layer. Posts are embedded as a worker embeds them.
"""

import json
import time
from collections.abc import Iterator, Sequence
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

#: L2 penalties to choose from, for centred features of unit mean square. The first leaves almost only the prior.
PENALTIES = (1.0, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5)
#: Weights of the zero-shot logits to choose from. Others are no more accurate, nor is a weight that is fitted.
PRIOR_WEIGHTS = (1.0, 0.0)
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
    """Embed the training posts and fit a head to them. Raises UserError, DeviceFull or DeviceLost."""
    report.phase(f"loading {options.base}")
    embedder = Embedder(options.base, settings, options.max_tokens)
    began = time.monotonic()
    features = embedder.embed([example.post.text for example in dataset.train], report)
    rate = len(features) / (time.monotonic() - began)
    report.phase("fitting the head")
    targets = torch.tensor(dataset.targets(dataset.train, options))
    sentences = embedder.label_vectors(ClassifyOptions(labels=described(dataset.labels, settings)))
    head, found = fit(features, targets, options.seed, COSINE_SCALE * sentences)
    device = embedder.classifier.device
    plan = found | {
        "classifier": "head",
        "max_tokens": options.max_tokens,
        "precision": f"{device.precision}: {device.dtype_reason}",
        "device": device.name,
    }
    record = {"plan": plan, "seconds": time.monotonic() - began, "samples_per_s": rate, "curve": []}
    return HeadModel(embedder, dataset.labels, head, record)


def described(labels: Sequence[str], settings: Settings) -> dict[str, tuple[str, ...]]:
    """Return the labels' descriptions for zero-shot classification: those set or built in, else the names."""
    known = settings.labels or DESCRIBED_TOPICS
    return {label: tuple(known.get(label, (label,))) for label in labels}


def fit(features: torch.Tensor, targets: torch.Tensor, seed: int, prior: torch.Tensor) -> tuple[Fitted, dict[str, Any]]:
    """Fit a head with the prior's weight and penalty of the highest cross-validated accuracy, then scale its logits.

    The scale has the lowest log loss on the held-out examples: the most accurate penalties give scores that are too low
    (Guo et al., "On Calibration of Modern Neural Networks", 2017, temperature scaling).

    features: [examples, dimensions]. targets: distributions [examples, labels]. prior: the layer of the zero-shot
    logits, [labels, dimensions]. Returns the head in float32, and: prior, its weight; penalty; sharpness, the scale;
    and accuracies by weight and penalty, empty if there are too few examples.
    """
    centre = features.mean(0)
    scale = (features - centre).square().sum(1).mean().sqrt().clamp_min(1e-6)
    # In float64, the fit converges to the same result despite rounding.
    scaled, zero_shot = ((features - centre) / scale).double(), (features @ prior.T).double()
    chosen: dict[str, Any] = {"prior": 1.0, "penalty": USUAL_PENALTY, "sharpness": 1.0, "accuracies": {}}
    with one_thread():
        if len(scaled) >= FOLDS:
            chosen = _cross_validate(scaled, targets, zero_shot, seed)
        offset = chosen["prior"] * zero_shot
        ((weight, bias),) = fit_logistic(scaled, targets, [chosen["penalty"]], BIAS_PENALTY / len(scaled), offset)
    weight, sharpness = weight / scale, chosen["sharpness"]
    bias = sharpness * (bias - weight @ centre.double())
    return ((sharpness * (weight + chosen["prior"] * prior)).float(), bias.float()), chosen


def _cross_validate(
    features: torch.Tensor, targets: torch.Tensor, zero_shot: torch.Tensor, seed: int
) -> dict[str, Any]:
    """Choose the prior's weight, the penalty and the sharpness by the logits of examples that a head has not seen.

    zero_shot: logits, [examples, labels].
    """
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed))[:MAX_VALIDATED]
    parts, expected, best = order.tensor_split(FOLDS), targets[order], targets[order].argmax(1)
    held_out: dict[tuple[float, float], torch.Tensor] = {}  # [examples, labels] by weight and penalty
    for prior in PRIOR_WEIGHTS:
        offset, logits = prior * zero_shot, []
        for number, part in enumerate(parts):
            others = torch.cat(parts[:number] + parts[number + 1 :])
            heads = fit_logistic(
                features[others], targets[others], PENALTIES, BIAS_PENALTY / len(others), offset[others]
            )
            logits.append(torch.stack([offset[part] + features[part] @ weight.T + bias for weight, bias in heads]))
        held_out |= zip(((prior, penalty) for penalty in PENALTIES), torch.cat(logits, 1), strict=True)
    accuracies = {each: float((logits.argmax(1) == best).double().mean()) for each, logits in held_out.items()}
    prior, penalty = chosen = max(accuracies, key=accuracies.__getitem__)  # the first of equals is nearest to the base
    losses = {each: loss_of_rows(each * held_out[chosen], expected).mean() for each in SHARPNESSES}
    return {
        "prior": prior,
        "penalty": penalty,
        "sharpness": min(losses, key=losses.__getitem__),
        "accuracies": {each: {by: accuracies[each, by] for by in PENALTIES} for each in PRIOR_WEIGHTS},
    }


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
def fit_logistic(
    features: torch.Tensor, targets: torch.Tensor, penalties: Sequence[float], bias_penalty: float, offset: torch.Tensor
) -> list[Fitted]:
    """Fit a multinomial logistic regression for each L2 penalty of the weights.

    features: [examples, dimensions], float64. targets: distributions [examples, labels]. offset: logits that the fit
    adds to, [examples, labels].
    """
    weight = features.new_zeros(targets.shape[1], features.shape[1])
    bias = features.new_zeros(targets.shape[1])
    targets = targets.to(features)
    heads = []
    for penalty in penalties:  # each fit starts at the previous one, which is near
        optimizer = torch.optim.LBFGS(
            [weight, bias],
            max_iter=MAX_ITERATIONS,
            tolerance_grad=TOLERANCE,
            tolerance_change=TOLERANCE * 1e-5,
            line_search_fn="strong_wolfe",
        )

        def step(penalty: float = penalty) -> torch.Tensor:
            """Return the loss and set its gradients. Autograd would take 1.5 times as long."""
            likelihoods = (offset + features @ weight.T + bias).log_softmax(-1)
            errors = (targets.sum(1, keepdim=True) * likelihoods.exp() - targets) / len(features)
            weight.grad = errors.T @ features + 2 * penalty * weight
            bias.grad = errors.sum(0) + 2 * bias_penalty * bias
            loss = -(targets * likelihoods).sum() / len(features)
            return loss + penalty * weight.square().sum() + bias_penalty * bias.square().sum()

        optimizer.step(step)  # type: ignore[no-untyped-call]
        heads.append((weight.clone(), bias.clone()))
    return heads


def loss_of_rows(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each row with its distribution over the labels: [rows]."""
    return -(targets.to(logits) * logits.log_softmax(-1)).sum(-1)
