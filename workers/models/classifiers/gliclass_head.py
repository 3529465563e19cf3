"""The part of a GLiClass model after its encoder: pool hidden states, project them, and score each label.

Supports what a uni-encoder checkpoint can name in its configuration (https://pypi.org/project/gliclass, 0.1.21). The
names of submodules are those of the checkpoints' weights. Logits equal those of the package for a row without padding.
(The package pools padding, too, so that its own logits of padded rows depend on the batch; these do not.)
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.activations import ACT2FN

from feedmill.shared.errors import ModelError, clause
from feedmill.workers.models.engines.network import GLICLASS_ENCODER, GLICLASS_SEGMENTS, read_tensors
from feedmill.workers.models.weights import Weights

#: Prefix of the names of a checkpoint's weights.
PREFIX = "model."
#: Options that change scores and are not supported, with their only supported value. The package itself fails with
#: `squeeze_layers`.
ONLY_VALUES: dict[str, Any] = {
    "use_lstm": False,
    "squeeze_layers": False,
    "encoder_layer_id": -1,
    "use_calibrator": False,
}
#: Added to norms before a division, as in the package.
EPSILON = 1e-8


class Spans(NamedTuple):
    """Where labels and texts are in the rows of a micro-batch. Places are in tokens; an end is not included."""

    #: Start of each label, then the end of the last: [rows, labels + 1]. Rows with fewer labels repeat the end.
    labels: torch.Tensor
    #: Number of labels, start of the text, and length of each row: [rows].
    counts: torch.Tensor
    text_starts: torch.Tensor
    lengths: torch.Tensor


class Projector(nn.Module):
    """Two linear layers with an activation."""

    def __init__(self, encoder_size: int, hidden_size: int, activation: str) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(encoder_size, hidden_size)
        self.linear_2 = nn.Linear(hidden_size, encoder_size)
        self._activate = ACT2FN[activation]

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.linear_2(self._activate(self.linear_1(features)))
        return projected


# Scorers: (text [rows, size], labels [rows, labels, size], mask of real labels [rows, labels]) -> [rows, labels].


class DotScorer(nn.Module):
    """The dot product of text and label."""

    def __init__(self, _size: int, **_: Any) -> None:
        super().__init__()

    def forward(self, text: torch.Tensor, labels: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return (labels @ text.unsqueeze(-1)).squeeze(-1)


class WeightedDotScorer(nn.Module):
    """Two projections of text and label: one pair side by side, the other multiplied."""

    def __init__(self, size: int, **_: Any) -> None:
        super().__init__()
        self.proj_text, self.proj_label = nn.Linear(size, 2 * size), nn.Linear(size, 2 * size)
        self.out_mlp = nn.Sequential(nn.Linear(3 * size, 4 * size), nn.Identity(), nn.ReLU(), nn.Linear(4 * size, 1))

    def forward(self, text: torch.Tensor, labels: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        text_side, text_factor = self.proj_text(text).unsqueeze(1).chunk(2, dim=-1)
        label_side, label_factor = self.proj_label(labels).chunk(2, dim=-1)
        pairs = torch.cat((text_side.expand_as(label_side), label_side, text_factor * label_factor), dim=-1)
        scores: torch.Tensor = self.out_mlp(pairs)
        return scores.squeeze(-1)


class MlpScorer(nn.Module):
    """A multilayer perceptron of text and label side by side."""

    def __init__(self, size: int, **_: Any) -> None:
        super().__init__()
        self.mlp = _mlp(2 * size)

    def forward(self, text: torch.Tensor, labels: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.mlp(torch.cat((text.unsqueeze(1).expand_as(labels), labels), dim=-1))
        return scores.squeeze(-1)


class HopfieldScorer(nn.Module):
    """Attention from labels to the text, normalized over the labels, then a multilayer perceptron of the label."""

    BETA = 4

    def __init__(self, size: int, **_: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(size, size, bias=False) for _ in range(3))
        self.mlp = _mlp(size)

    def forward(self, text: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        attention = self.BETA * (self.q_proj(labels) @ self.k_proj(text).unsqueeze(-1))
        shares = attention.masked_fill(~mask.unsqueeze(-1), float("-inf")).softmax(1)
        scores: torch.Tensor = self.mlp(labels + shares * self.v_proj(text).unsqueeze(1))
        return scores.squeeze(-1)


class CrossAttentionScorer(nn.Module):
    """Attention from labels to all tokens of the text; text: [rows, tokens, size], with a mask of its tokens."""

    def __init__(self, size: int, *, heads: int, hidden: int) -> None:
        super().__init__()
        self._heads = heads
        self.q_norm, self.kv_norm, self.norm = (nn.LayerNorm(size) for _ in range(3))
        self.q, self.k, self.v, self.out = (nn.Linear(size, size) for _ in range(4))
        self.score_mlp = nn.Sequential(
            nn.Linear(2 * size, hidden), nn.GELU(), nn.Linear(hidden, hidden // 2), nn.GELU(), nn.Linear(hidden // 2, 1)
        )

    def forward(
        self, text: torch.Tensor, labels: torch.Tensor, _: torch.Tensor, text_mask: torch.Tensor
    ) -> torch.Tensor:
        query, key, value = self.q(self.q_norm(labels)), self.k(self.kv_norm(text)), self.v(text)
        query, key, value = (each.unflatten(-1, (self._heads, -1)).transpose(1, 2) for each in (query, key, value))
        attended = scaled_dot_product_attention(query, key, value, attn_mask=text_mask[:, None, None, :])
        context = self.norm(self.out(attended.transpose(1, 2).flatten(2)))
        scores: torch.Tensor = self.score_mlp(torch.cat((context, labels), dim=-1))
        return scores.squeeze(-1)


def _mlp(inputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1))


SCORERS: dict[str, Callable[..., nn.Module]] = {
    "simple": DotScorer,
    "weighted-dot": WeightedDotScorer,
    "mlp": MlpScorer,
    "hopfield": HopfieldScorer,
    "cross-attn": CrossAttentionScorer,
}
#: Poolings of a text by name: (states of the text and 0 elsewhere [rows, tokens, size], lengths of the rows [rows, 1])
#: -> [rows, size]. Means are over the whole row, labels included, as in the package. "first", "last" and "max" need
#: more than this and are in `Head`.
POOLINGS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "avg": lambda text, lengths: text.sum(1) / lengths,
    "sum": lambda text, _: text.sum(1),
    "rms": lambda text, lengths: (text.pow(2).sum(1) / lengths).sqrt(),
    "abs_max": lambda text, _: text.abs().amax(1),
    "abs_avg": lambda text, lengths: text.abs().sum(1) / lengths,
}
#: The pooling that keeps all tokens, and the only scorer that takes them.
ALL_TOKENS, TAKES_TOKENS = "pass", "cross-attn"


class Head(nn.Module):
    """Logits of a GLiClass model from its encoder's hidden states. In float32; stays on the CPU until it is moved.

    config: the checkpoint's config.json. size: dimensions of the hidden states.
    Raises ModelError if the configuration or the weights are unsupported or incomplete.
    """

    def __init__(self, weights: Weights, config: Mapping[str, Any], size: int) -> None:
        super().__init__()
        self._pooling, scorer = config.get("pooling_strategy", "first"), config.get("scorer_type", "simple")
        self._averages = config.get("class_token_pooling", "first") == "average"
        self._skips_marker = not config.get("embed_class_token", True)
        self._text_only, self._normalizes = bool(config.get("extract_text_features")), config.get("normalize_features")
        poolings = ("first", "max", ALL_TOKENS, *POOLINGS, *(() if self._text_only else ("last",)))
        values: list[tuple[str, Any, tuple[Any, ...]]] = [("architecture_type", "uni-encoder", ("uni-encoder",))]
        values += [("scorer_type", "simple", tuple(SCORERS)), ("pooling_strategy", "first", poolings)]
        values += [("class_token_pooling", "first", ("first", "average"))]
        values += [(name, only, (only,)) for name, only in ONLY_VALUES.items()]
        for name, default, supported in values:
            value = config.get(name)
            if (value := default if value is None else value) not in supported:
                raise ModelError(
                    f"{weights.name} has {name}={value}, which is not supported. Use a GLiClass model with "
                    f"{name}={' or '.join(map(str, supported))}."
                )
        if (scorer == TAKES_TOKENS) != (self._pooling == ALL_TOKENS):
            raise ModelError(
                f"{weights.name} combines scorer_type={scorer} with pooling_strategy={self._pooling}, which is not "
                "supported. Use another model."
            )
        try:
            hidden_size = config.get("hidden_size") or size
            activation = config.get("projector_hidden_act", "gelu")
            self.text_projector = Projector(size, hidden_size, activation)
            self.classes_projector = Projector(size, hidden_size, activation)
            heads, hidden = config.get("scorer_num_heads", 16), config.get("scorer_mlp_hidden_size", 1024)
            self.scorer = SCORERS[scorer](hidden_size, heads=heads, hidden=hidden)
            self.logit_scale = nn.Parameter(torch.tensor(0.0)) if self._normalizes else None
            found = read_tensors(weights, _of_head)
            tensors = {name.removeprefix(PREFIX): tensor.float() for name, tensor in found.items()}
            missing = self.load_state_dict(tensors, strict=False).missing_keys
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ModelError(
                f"The weights of {weights.name} do not match its config.json: {clause(error)}. Download it again, or "
                "use another model."
            ) from error
        if missing:
            raise ModelError(
                f"{weights.name} has no weights for {', '.join(sorted(missing)[:3])}. Download it again, or use "
                "another model."
            )
        self.eval().requires_grad_(False)

    def forward(self, states: torch.Tensor, spans: Spans) -> torch.Tensor:
        """Return logits: [rows, labels] in float32; beyond a row's own labels they have no meaning.

        states: [rows, tokens, size], padded on the right with any finite values.
        """
        places = torch.arange(states.shape[1], device=states.device)
        starts = spans.text_starts if self._text_only else torch.zeros_like(spans.lengths)
        in_text = (places >= starts.unsqueeze(1)) & (places < spans.lengths.unsqueeze(1))
        text = self._normalized(self.text_projector(self._pooled(states, in_text, starts, spans.lengths)))
        labels = self._normalized(self.classes_projector(self._label_states(states, places, spans)))
        real = torch.arange(labels.shape[1], device=states.device) < spans.counts.unsqueeze(1)
        logits: torch.Tensor = self.scorer(text, labels, real, in_text)
        return logits if self.logit_scale is None else logits * self.logit_scale

    def _pooled(
        self, states: torch.Tensor, in_text: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """Return the text's vector, [rows, size], or all of its tokens, [rows, tokens, size]."""
        rows = torch.arange(len(states), device=states.device)
        if self._pooling == ALL_TOKENS:
            return states
        if self._pooling == "first":
            return states[rows, starts]
        if self._pooling == "last":
            return states[rows, lengths - 1]
        if self._pooling == "max":
            largest = states.masked_fill(~in_text.unsqueeze(-1), float("-inf")).amax(1)
            return largest.clamp(min=0) if self._text_only else largest  # the package fills up the text with zeros
        return POOLINGS[self._pooling](states * in_text.unsqueeze(-1), lengths.unsqueeze(1))

    def _label_states(self, states: torch.Tensor, places: torch.Tensor, spans: Spans) -> torch.Tensor:
        """Return each label's vector: [rows, labels, size]."""
        starts, ends = spans.labels[:, :-1] + self._skips_marker, spans.labels[:, 1:]
        if not self._averages:
            rows = torch.arange(len(states), device=states.device).unsqueeze(1)
            return states[rows, starts.clamp(max=states.shape[1] - 1)]
        if not self._text_only:  # the last label's span then includes what follows it, as in the package
            last = torch.arange(starts.shape[1], device=states.device) == spans.counts.unsqueeze(1) - 1
            ends = torch.where(last, spans.lengths.unsqueeze(1), ends)
        member = ((places >= starts.unsqueeze(-1)) & (places < ends.unsqueeze(-1))).to(states.dtype)
        return member @ states / member.sum(-1, keepdim=True).clamp(min=1)

    def _normalized(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors / (vectors.norm(dim=-1, keepdim=True) + EPSILON) if self._normalizes else vectors


def _of_head(name: str) -> bool:
    return name.startswith(PREFIX) and not name.startswith(GLICLASS_ENCODER) and name != GLICLASS_SEGMENTS
