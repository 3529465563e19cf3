"""BERT encoders without transformers, whose imports take longer than all else at a worker's start.

Runs packed sentence encoders of the type `bert`, such as the embedded model; network.py runs every
other model.

Relies on torch's private operators `_reorder_linear_weight` and `_linear_pointwise`, behind the
check in torch_engine.py.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch.nn.functional import (
    embedding,
    gelu,
    layer_norm,
    linear,
    scaled_dot_product_attention,
)

from feedmill.workers.models.device import Device
from feedmill.workers.models.engines.packing import Group, pool
from feedmill.workers.models.files import WEIGHTS_FILE, loading
from feedmill.workers.models.tensors import TensorFile
from feedmill.workers.models.weights import Weights, read_config_file

#: Values of transformers' BertConfig: defaults, and those without which it computes something
#: else.
DEFAULTS = {
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "num_attention_heads": 12,
    "pad_token_id": 0,
}
REQUIRED = {
    "auto_map": None,
    "hidden_act": "gelu",
    "is_decoder": False,
    "position_embedding_type": "absolute",
}
#: Names of the tables of vectors: by token, by token type, by position.
WORD_EMBEDDINGS = "embeddings.word_embeddings.weight"
EMBEDDINGS = [
    f"embeddings.{kind}_embeddings.weight"
    for kind in ("word", "token_type", "position")
]

#: A part of the network: states to states, [tokens, dimensions].
Part = Callable[[torch.Tensor], torch.Tensor]


def read_bert(weights: Weights) -> SimpleNamespace | None:
    """Return the configuration of a model that `Bert` runs; None for any other.

    Raises ModelError.
    """
    config = read_config_file(weights)
    file = weights.folder / WEIGHTS_FILE
    if config.get("model_type") != "bert" or not file.is_file():
        return None
    for name, value in REQUIRED.items():
        if config.get(name, value) != value:
            return None
    tensors = TensorFile(file)
    for name in EMBEDDINGS:
        if name not in tensors:
            return None
    settings = DEFAULTS | config
    return SimpleNamespace(**settings)


class Bert:
    """A BERT encoder. config: from `read_bert`. reads: pooling modes. reordered: keep weights in
    oneDNN's own layout.

    Raises ModelError.
    """

    #: Position of a row's first token.
    first_position = 0

    def __init__(
        self,
        weights: Weights,
        config: SimpleNamespace,
        device: Device,
        reads: Sequence[str],
        reordered: bool,
    ) -> None:
        self.pad_id: int = config.pad_token_id
        self._config = config
        self._reads = reads
        self._reordered = reordered
        file = TensorFile(weights.folder / WEIGHTS_FILE)
        with loading(f"the model in {weights.folder}"):
            tensors = {}
            for name in file.places:
                stored = file.read(name)
                tensors[name] = stored.to(device.torch, device.dtype)
            self._embeddings = [tensors[name] for name in EMBEDDINGS]
            self._norm = self._normalization(tensors, "embeddings")
            self._layers = []
            for number in range(config.num_hidden_layers):
                layer = self._layer(tensors, f"encoder.layer.{number}")
                self._layers.append(layer)

    def _layer(self, tensors: dict[str, torch.Tensor], name: str) -> tuple[Part, ...]:
        """Return a layer's parts in the order in which `packed` applies them."""
        attention = f"{name}.attention"
        merge = f"{attention}.output"
        output = f"{name}.output"
        return (
            self._linear(
                tensors,
                f"{attention}.self.query",
                f"{attention}.self.key",
                f"{attention}.self.value",
            ),
            self._linear(tensors, f"{merge}.dense"),
            self._normalization(tensors, merge),
            self._linear(
                tensors,
                f"{name}.intermediate.dense",
                activation="gelu",
            ),
            self._linear(tensors, f"{output}.dense"),
            self._normalization(tensors, output),
        )

    def _linear(
        self, tensors: dict[str, torch.Tensor], *names: str, activation: str = "none"
    ) -> Part:
        """Take linear layers from the tensors, and return them as one, with the activation behind
        it: none or gelu.
        """
        weights = []
        biases = []
        for name in names:
            layer_weight = tensors.pop(f"{name}.weight")
            layer_bias = tensors.pop(f"{name}.bias")
            weights.append(layer_weight)
            biases.append(layer_bias)
        weight = torch.cat(weights)
        bias = torch.cat(biases)
        operators = torch.ops.mkldnn
        if self._reordered:
            reordered = operators._reorder_linear_weight(weight)
            product = operators._linear_pointwise
            return lambda states: product(
                states,
                reordered,
                bias,
                activation,
                [],
                "none",
            )
        if activation == "gelu":
            return lambda states: gelu(linear(states, weight, bias))
        return lambda states: linear(states, weight, bias)

    def _normalization(self, tensors: dict[str, torch.Tensor], name: str) -> Part:
        weight = tensors[f"{name}.LayerNorm.weight"]
        bias = tensors[f"{name}.LayerNorm.bias"]
        epsilon = self._config.layer_norm_eps
        return lambda states: layer_norm(
            states,
            normalized_shape=weight.shape,
            weight=weight,
            bias=bias,
            eps=epsilon,
        )

    def packed(
        self,
        groups: Sequence[Group],
        ids: torch.Tensor,
        positions: torch.Tensor,
        types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return pooled embeddings of packed rows, as `Network.packed` does."""
        if types is None:
            types = torch.zeros_like(ids)
        word_table, type_table, position_table = self._embeddings
        words = embedding(ids[0], word_table)
        kinds = embedding(types[0], type_table)
        places = embedding(positions[0], position_table)
        states = self._norm(words + kinds + places)  # [tokens, dimensions]
        for layer in self._layers:
            project, merge, norm_attention, expand, reduce, norm = layer
            # Without names for parts, whose memory is then free for the next.
            states = norm_attention(
                merge(self._attend(project(states), groups)) + states
            )
            states = norm(reduce(expand(states)) + states)
        pooled = []
        for group in groups:
            rows = group.batch(states)
            embeddings = pool(rows, group.real, self._reads)
            pooled.append(embeddings)
        return torch.cat(pooled)

    def _attend(self, projected: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
        """Return attention within each row: [tokens, dimensions]. projected: [tokens, 3 *
        dimensions].
        """
        tokens, projected_dimensions = projected.shape
        dimensions = projected_dimensions // 3
        heads = self._config.num_attention_heads
        # [tokens, 3, heads, dimensions of a head]
        split = projected.view(tokens, 3, heads, -1)
        first_group = groups[0]
        if first_group.starts is not None:
            query, key, value = split.unbind(1)
            attended = first_group.attend(query, key, value)
            return attended.flatten(1)
        parts = []
        rest = tokens
        for group in groups:
            # [rows, heads, width, dimensions of a head]
            query, key, value = group.batch(split).permute(2, 0, 3, 1, 4)
            rows = scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=group.mask,
            )
            batch = rows.transpose(1, 2)
            own = group.own(batch)
            parts.append(own.flatten(1))
            rest -= len(own)
        zeros = projected.new_zeros(rest, dimensions)
        parts.append(zeros)
        return torch.cat(parts)
