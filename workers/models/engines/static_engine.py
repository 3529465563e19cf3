"""Static embeddings: a text's embedding is the mean of its tokens' vectors, looked up in a table. No transformer.

Reads folders of sentence-transformers (`StaticEmbedding`) and model2vec. Embeddings equal those of the library that
wrote the folder: sentence-transformers averages all tokens, model2vec leaves out unknown ones. Lookups take less time
than a copy to a GPU, so they run on the CPU whatever the worker's device.
"""

import json
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file
from torch.nn.functional import embedding_bag

from feedmill.shared.errors import ModelError, SettingsError
from feedmill.shared.settings import Settings
from feedmill.workers.models.device import Device
from feedmill.workers.models.tokenizer import Tokens, encode_starts
from feedmill.workers.models.weights import WEIGHTS_FILE, Weights, loading

#: Names of the table in the files of sentence-transformers and of model2vec.
SENTENCE_TRANSFORMERS, MODEL2VEC = "embedding.weight", "embeddings"


class StaticTokenizer:
    """A tokenizer without special tokens. Has a part of `Tokenizer`'s interface. Raises ModelError.

    drops_unknown: leave out unknown tokens. empty: the row of a text without tokens.
    """

    def __init__(self, folder: Path, max_tokens: int, drops_unknown: bool, empty: int) -> None:
        with loading(folder / "tokenizer.json"):
            self._rust: Any = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.max_tokens = max_tokens
        self.size: int = self._rust.get_vocab_size()
        self._rust.no_padding()
        self._rust.enable_truncation(max_tokens)
        self._unknown = _unknown_token(self._rust) if drops_unknown else None
        self._empty = empty

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the token ids of each text, at most `max_tokens`, unknown ones included."""
        encodings = encode_starts(self._rust, texts, self.max_tokens, special_tokens=False)
        return [
            Tokens([token for token in encoding.ids if token != self._unknown] or [self._empty])
            for encoding in encodings
        ]


class StaticEngine:
    """A table of token vectors, on the CPU. Raises ModelError if the folder holds none."""

    packed = True
    home = torch.device("cpu")

    def __init__(self, device: Device, folder: Path) -> None:
        self.device = device
        with loading(f"static embeddings, {SENTENCE_TRANSFORMERS} or {MODEL2VEC}, in {folder / WEIGHTS_FILE}"):
            tensors = load_file(folder / WEIGHTS_FILE)
            #: True if the folder is model2vec's.
            self.of_model2vec = SENTENCE_TRANSFORMERS not in tensors
            table = tensors[MODEL2VEC if self.of_model2vec else SENTENCE_TRANSFORMERS].float()
            if self.of_model2vec and "mapping" in tensors:  # several tokens share a vector
                table = table[tensors["mapping"].long()]
            if self.of_model2vec and "weights" in tensors:
                table = table * tensors["weights"].float()[:, None]
            #: Number of tokens. The row after the last is zero: the embedding of a text without tokens.
            self.size = len(table)
            self._table = torch.cat([table, torch.zeros(1, table.shape[1])]).to(device.dtype)

    @torch.inference_mode()
    def forward(self, rows: Sequence[Tokens]) -> torch.Tensor:
        """Return each row's mean vector: [rows, dimensions] in float32."""
        ids = torch.tensor(list(chain.from_iterable(row.ids for row in rows)))
        starts = torch.tensor([0, *accumulate(len(row.ids) for row in rows)][:-1])
        return embedding_bag(ids, self._table, starts, mode="mean").float()


def create_static_engine(
    weights: Weights, device: Device, settings: Settings, folder: Path, max_tokens: int
) -> tuple[StaticEngine, StaticTokenizer]:
    """Load a table and its tokenizer. folder: the folder of both. Raises ModelError or SettingsError."""
    if settings.engine != "torch":
        raise SettingsError(
            f"FEEDMILL_ENGINE is {settings.engine}, but {weights.name} has static embeddings, which need none: unset "
            "FEEDMILL_ENGINE."
        )
    engine = StaticEngine(device, folder)
    tokenizer = StaticTokenizer(folder, max_tokens, engine.of_model2vec, engine.size)
    if tokenizer.size > engine.size:
        raise ModelError(
            f"{weights.name} has vectors for {engine.size:,} tokens, but its tokenizer has {tokenizer.size:,}. "
            "Download the model again."
        )
    return engine, tokenizer


def _unknown_token(rust: Any) -> int | None:
    """Return the id of the tokenizer's unknown token, if it has one."""
    if hasattr(rust.model, "unk_token"):
        return rust.token_to_id(rust.model.unk_token) if rust.model.unk_token is not None else None
    unknown: int | None = json.loads(rust.to_str())["model"].get("unk_id")
    return unknown
