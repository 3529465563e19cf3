"""The model that is trained on: a base with a new classifier on top, fitted to what the base says of the examples.

A classifier that starts from nothing sends large, aimless gradients into the base, which forgets some of what it knows
before the classifier has found its place ("Fine-Tuning can Distort Pretrained Features", arXiv 2202.10054). Fitting it
by itself is a convex problem, takes one pass through the base, and gets most of the way there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from shared.errors import ModelError
from workers.engines.network import NOT_PADDED, filler, most_tokens, read_config
from workers.weights import Weights

#: How strongly the fitted classifier's weights are held small. From 0.02 to 0.2 it matters little with the embedded
#: model and 830 real posts; below 0.01 the classifier learns them by heart.
RIDGE = 0.05
#: Rounds of L-BFGS; it has converged long before.
ROUNDS = 200


def load_tokenizer(weights: Weights, most: int, remote_code: bool = False) -> Any:
    """The base's, which cuts texts at `most` tokens, or before where the base takes fewer. Raises ModelError."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            weights.folder, local_files_only=True, trust_remote_code=remote_code
        )
    except Exception as error:  # broken files fail in as many ways as there are kinds of them
        raise ModelError(f"The tokenizer in {weights.folder} cannot be loaded by transformers: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    takes = most_tokens(read_config(weights, remote_code))
    # The worker that serves the model cuts where its tokenizer says, and so as it was trained.
    tokenizer.model_max_length = min(most, tokenizer.model_max_length, takes or most)
    return tokenizer


def make_model(weights: Weights, labels: Sequence[str], pad_id: int, remote_code: bool = False) -> Any:
    """The base, in float32, with a classifier of these labels: new, unless the base has one of the same size.

    Raises ModelError.
    """
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call] # what is new is new on purpose
    config = read_config(weights, remote_code)
    if config.model_type in NOT_PADDED:
        raise ModelError(
            f"{weights.name} is a model of the kind {config.model_type}: its scores would depend on padding."
        )
    try:
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            weights.folder,
            num_labels=len(labels),
            id2label=dict(enumerate(labels)),
            label2id={label: place for place, label in enumerate(labels)},
            problem_type="single_label_classification",
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=remote_code,
        )
    except Exception as error:  # a broken folder fails in as many ways as it has files
        raise ModelError(f"{weights.name} cannot be trained to classify by transformers: {error}") from error
    model.config.pad_token_id = filler(model.config, pad_id)
    return model


def head_parameters(model: Any) -> set[str]:
    """The names of the weights that are not the base's."""
    base = f"{model.base_model_prefix}."
    return {name for name, _ in model.named_parameters() if not name.startswith(base)}


@torch.no_grad()
def fit_head(model: Any, batches: Sequence[dict[str, Any]], loss_of: Callable[[Any, Any], torch.Tensor]) -> None:
    """Fit the last layer to what comes into it now. loss_of: of logits and labels, each row's.

    A model whose last layer gives no logits of [rows, labels] is left as it is.
    """
    last = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)][-1]
    if last.out_features != model.config.num_labels:
        return
    seen: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    hook = last.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    model.eval()
    try:
        for batch in batches:
            labels.append(batch["labels"].to(model.device))
            model(**{name: value.to(model.device) for name, value in batch.items() if name != "labels"})
    finally:
        hook.remove()
    # In float64 it converges to one result, however sums were rounded; there is little to compute.
    features, wanted = torch.cat(seen).cpu().double(), torch.cat(labels).cpu()
    if features.shape[:-1] != wanted.shape[:1]:
        return
    # Of unit variance, so that RIDGE means the same for every base.
    scale = features.std().clamp_min(1e-6)
    weight, bias = _fit(features / scale, wanted, last.out_features, loss_of)
    last.weight.copy_(weight / scale)
    if last.bias is not None:
        last.bias.copy_(bias)


@torch.enable_grad()
def _fit(
    features: torch.Tensor, wanted: torch.Tensor, labels: int, loss_of: Callable[[Any, Any], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multinomial logistic regression: (weight [labels, dimensions], bias [labels])."""
    weight = torch.zeros(labels, features.shape[1], dtype=features.dtype, requires_grad=True)
    bias = torch.zeros(labels, dtype=features.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=ROUNDS, tolerance_grad=1e-9, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(features @ weight.T + bias, wanted).mean() + RIDGE * weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(step)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()


def loss_of_rows(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Cross-entropy of each row: [rows]. labels: a label's number each, or a distribution over them."""
    if labels.dim() == 1:
        return cross_entropy(logits, labels, weight=weights, reduction="none")
    return cross_entropy(logits, labels.to(logits.dtype), weight=weights, reduction="none")
