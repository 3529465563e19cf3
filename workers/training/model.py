"""Create the model to train: a base with a new classification head, fitted to the base's features.

A randomly initialized head sends large, undirected gradients into the base, which distorts pretrained features before
the head has converged ("Fine-Tuning can Distort Pretrained Features", arXiv 2202.10054). Fitting the head first is a
convex problem, takes one pass through the base, and reaches most of the final accuracy.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from shared.errors import ModelError, clause
from workers.models.engines.network import PADDING_SENSITIVE_TYPES, max_row_tokens, padding_token, read_config
from workers.models.weights import GLICLASS, Weights, read_config_file

#: L2 penalty of the fitted head. With the embedded model and 830 real posts, values from 0.02 to 0.2 differ little;
#: below 0.01 the head overfits.
RIDGE_PENALTY = 0.05
#: Maximum L-BFGS iterations. The fit converges well before.
MAX_ITERATIONS = 200


def load_tokenizer(weights: Weights, most: int, remote_code: bool = False) -> Any:
    """Load the base's tokenizer, set to truncate to `most` tokens or the base's lower limit. Raises ModelError."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            weights.folder, local_files_only=True, trust_remote_code=remote_code
        )
    except Exception as error:  # a broken tokenizer can fail in any way
        raise ModelError(
            f"Cannot load the tokenizer in {weights.folder}: {clause(error)}. Download the model again, or "
            "use another base."
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    takes = max_row_tokens(read_config(weights, remote_code))
    # Saved with the model, so that workers truncate texts as training did.
    tokenizer.model_max_length = min(most, tokenizer.model_max_length, takes or most)
    return tokenizer


def make_model(weights: Weights, labels: Sequence[str], pad_id: int, remote_code: bool = False) -> Any:
    """Load the base in float32 with a head for these labels. A head of the same size in the base is kept.

    Raises ModelError.
    """
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call] # the head is new on purpose
    if read_config_file(weights).get("model_type") == GLICLASS:
        raise ModelError(f"{weights.name} is a GLiClass model, which cannot be fine-tuned here. Use another base.")
    config = read_config(weights, remote_code)
    if config.model_type in PADDING_SENSITIVE_TYPES:
        raise ModelError(
            f"{weights.name} has the unsupported model type {config.model_type}: its scores depend on padding. "
            "Use another base."
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
    except Exception as error:  # a broken folder can fail in any way
        raise ModelError(
            f"Cannot load {weights.name} for classification: {clause(error)}. Download it again, or use another base."
        ) from error
    model.config.pad_token_id = padding_token(model.config, pad_id)
    return model


def head_parameters(model: Any) -> set[str]:
    """Return the names of the head's parameters: all that are not the base's."""
    base = f"{model.base_model_prefix}."
    return {name for name, _ in model.named_parameters() if not name.startswith(base)}


@torch.no_grad()
def fit_head(model: Any, batches: Sequence[dict[str, Any]], loss_of: Callable[[Any, Any], torch.Tensor]) -> None:
    """Fit the last linear layer to the features of these batches. loss_of: maps logits and labels to a loss per row.

    Leaves the model unchanged if its last layer does not return logits of [rows, labels].
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
    # In float64, the fit converges to the same result despite rounding; the computation is small.
    features, wanted = torch.cat(seen).cpu().double(), torch.cat(labels).cpu()
    if features.shape[:-1] != wanted.shape[:1]:
        return
    # Unit variance, so that RIDGE_PENALTY has the same effect for every base.
    scale = features.std().clamp_min(1e-6)
    weight, bias = fit_logistic(features / scale, wanted, last.out_features, loss_of, RIDGE_PENALTY)
    last.weight.copy_(weight / scale)
    if last.bias is not None:
        last.bias.copy_(bias)


@torch.enable_grad()
def fit_logistic(
    features: torch.Tensor,
    wanted: torch.Tensor,
    labels: int,
    loss_of: Callable[[Any, Any], torch.Tensor],
    penalty: float,
    bias_penalty: float = 0.0,
    start: tuple[torch.Tensor, torch.Tensor] | None = None,
    tolerance: float = 1e-9,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fit a multinomial logistic regression with L2 penalties. Returns (weight [labels, dimensions], bias [labels]).

    start: weight and bias to begin with; default: 0. tolerance: greatest component of the gradient at the end.
    """
    zeros = features.new_zeros(labels, features.shape[1]), features.new_zeros(labels)
    weight, bias = (tensor.clone().requires_grad_() for tensor in start or zeros)
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=MAX_ITERATIONS,
        tolerance_grad=tolerance,
        tolerance_change=tolerance * 1e-5,
        line_search_fn="strong_wolfe",
    )

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(features @ weight.T + bias, wanted).mean()
        loss = loss + penalty * weight.square().sum() + bias_penalty * bias.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(step)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()


def loss_of_rows(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return the cross-entropy of each row: [rows]. labels: label numbers, or distributions over the labels."""
    wanted = labels if labels.dim() == 1 else labels.to(logits.dtype)
    return cross_entropy(logits, wanted, weight=weights, reduction="none")
