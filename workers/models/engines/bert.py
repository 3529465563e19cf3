"""BERT encoders without transformers, whose imports take longer than all else at a worker's start.

Runs packed sentence encoders of the type `bert`, such as the embedded model; network.py runs every other model.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from safetensors import safe_open
from torch.nn.functional import embedding, gelu, layer_norm, linear, scaled_dot_product_attention

from feedmill.workers.models.device import Device
from feedmill.workers.models.engines.packing import Group, pool
from feedmill.workers.models.weights import WEIGHTS_FILE, Weights, loading, read_config_file

#: Values of transformers' BertConfig: defaults, and those without which it computes something else.
DEFAULTS = {"layer_norm_eps": 1e-12, "max_position_embeddings": 512, "num_attention_heads": 12, "pad_token_id": 0}
REQUIRED = {"auto_map": None, "hidden_act": "gelu", "is_decoder": False, "position_embedding_type": "absolute"}
EMBEDDINGS = [f"embeddings.{kind}_embeddings.weight" for kind in ("word", "token_type", "position")]

#: A part of the network: states to states, [tokens, dimensions].
Part = Callable[[torch.Tensor], torch.Tensor]


def read_bert(weights: Weights) -> SimpleNamespace | None:
    """Return the configuration of a model that `Bert` runs; None for any other. Raises ModelError."""
    config, file = read_config_file(weights), weights.folder / WEIGHTS_FILE
    is_other = any(config.get(name, value) != value for name, value in REQUIRED.items())
    if config.get("model_type") != "bert" or is_other or not file.is_file():
        return None
    with loading(file), safe_open(file, "pt") as tensors:
        return SimpleNamespace(**DEFAULTS | config) if {*EMBEDDINGS} <= {*tensors.keys()} else None


class Bert:
    """A BERT encoder. config: from `read_bert`. reads: pooling modes. reordered: keep weights in oneDNN's own layout.

    Raises ModelError.
    """

    def __init__(
        self, weights: Weights, config: SimpleNamespace, device: Device, reads: Sequence[str], reordered: bool
    ) -> None:
        self.pad_id: int = config.pad_token_id
        self._config, self._reads, self._reordered = config, reads, reordered
        with loading(f"the model in {weights.folder}"), safe_open(weights.folder / WEIGHTS_FILE, "pt") as file:
            tensors = {
                name: file.get_tensor(name).to(device.torch, device.dtype)
                for name in file.keys()  # noqa: SIM118 - no mapping
            }
            self._embeddings = [tensors[name] for name in EMBEDDINGS]
            self._norm = self._normalization(tensors, "embeddings")
            numbers = range(config.num_hidden_layers)
            self._layers = [self._layer(tensors, f"encoder.layer.{number}") for number in numbers]

    def _layer(self, tensors: dict[str, torch.Tensor], name: str) -> tuple[Part, ...]:
        attention = f"{name}.attention"
        return (
            self._linear(tensors, *(f"{attention}.self.{kind}" for kind in ("query", "key", "value"))),
            self._linear(tensors, f"{attention}.output.dense"),
            self._normalization(tensors, f"{attention}.output"),
            self._linear(tensors, f"{name}.intermediate.dense", activation="gelu"),
            self._linear(tensors, f"{name}.output.dense"),
            self._normalization(tensors, f"{name}.output"),
        )

    def _linear(self, tensors: dict[str, torch.Tensor], *names: str, activation: str = "none") -> Part:
        """Return linear layers as one, with the activation behind it: none or gelu."""
        weight, bias = (torch.cat([tensors.pop(f"{name}.{kind}") for name in names]) for kind in ("weight", "bias"))
        if self._reordered:
            own, product = torch.ops.mkldnn._reorder_linear_weight(weight), torch.ops.mkldnn._linear_pointwise
            return lambda states: product(states, own, bias, activation, [], "none")
        if activation == "gelu":
            return lambda states: gelu(linear(states, weight, bias))
        return lambda states: linear(states, weight, bias)

    def _normalization(self, tensors: dict[str, torch.Tensor], name: str) -> Part:
        weight, bias = (tensors[f"{name}.LayerNorm.{kind}"] for kind in ("weight", "bias"))
        return lambda states: layer_norm(states, weight.shape, weight, bias, self._config.layer_norm_eps)

    def packed(
        self, groups: Sequence[Group], ids: torch.Tensor, positions: torch.Tensor, types: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return pooled embeddings of packed rows, as `Network.packed` does."""
        indices = (ids, torch.zeros_like(ids) if types is None else types, positions)
        words, kinds, places = (embedding(one[0], table) for one, table in zip(indices, self._embeddings, strict=True))
        states = self._norm(words + kinds + places)
        for project, merge, norm_attention, expand, reduce, norm in self._layers:
            states = norm_attention(merge(self._attend(project(states), groups)) + states)
            states = norm(reduce(expand(states)) + states)
        return torch.cat([pool(group.batch(states), group.real, self._reads) for group in groups])

    def _attend(self, projected: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
        """Return attention within each row: [tokens, dimensions]. projected: [tokens, 3 * dimensions]."""
        split = projected.view(len(projected), 3, self._config.num_attention_heads, -1)
        if groups[0].starts is not None:
            query, key, value = split.unbind(1)
            return groups[0].attend(query, key, value).flatten(1)
        attended = []
        for group in groups:
            query, key, value = group.batch(split).permute(2, 0, 3, 1, 4)  # [rows, heads, width, dimensions of a head]
            rows = scaled_dot_product_attention(query, key, value, attn_mask=group.mask)
            attended.append(group.own(rows.transpose(1, 2)).flatten(1))
        rest = len(projected) - sum(map(len, attended))
        return torch.cat([*attended, projected.new_zeros(rest, projected.shape[1] // 3)])
