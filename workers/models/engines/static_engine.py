"""Static embeddings: a text's embedding is the mean of its tokens' vectors, looked up in a table.

No transformer.

Reads folders of sentence-transformers (`StaticEmbedding`) and model2vec. Embeddings equal those of
the library that wrote the folder: sentence-transformers averages all tokens, model2vec leaves out
unknown ones. Lookups take less time than a copy to a GPU, so they run on the CPU whatever the
worker's device.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch.nn.functional import embedding_bag

from feedmill.shared.errors import ModelError, SettingsError
from feedmill.shared.settings import Settings
from feedmill.workers.models.bounds import check_tokenizer
from feedmill.workers.models.device import Device
from feedmill.workers.models.files import WEIGHTS_FILE, loading
from feedmill.workers.models.tensors import TensorFile
from feedmill.workers.models.tokenizer import Tokens, encode_starts, number_of_ids
from feedmill.workers.models.weights import Weights

#: Names of the table in the files of sentence-transformers and of model2vec.
SENTENCE_TRANSFORMERS = "embedding.weight"
MODEL2VEC = "embeddings"
#: Names of model2vec's row of each token, and of the factor of each token's vector.
MAPPING = "mapping"
FACTORS = "weights"


class StaticTokenizer:
    """A tokenizer without special tokens.

    Has a part of `Tokenizer`'s interface. Raises ModelError.

    drops_unknown: leave out unknown tokens. empty: the row of a text without tokens.
    """

    def __init__(
        self, folder: Path, max_tokens: int, drops_unknown: bool, empty: int
    ) -> None:
        file = folder / "tokenizer.json"
        check_tokenizer(file)
        with loading(file):
            self._rust: Any = tokenizers.Tokenizer.from_file(str(file))
        self.max_tokens = max_tokens
        self.size = number_of_ids(self._rust)
        self._rust.no_padding()
        self._rust.enable_truncation(max_tokens)
        self._unknown = None
        if drops_unknown:
            self._unknown = _unknown_token(self._rust)
        self._empty = empty

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the token ids of each text, at most `max_tokens`, unknown ones included."""
        encodings = encode_starts(
            self._rust,
            texts,
            max_tokens=self.max_tokens,
            special_tokens=False,
        )
        unknown = self._unknown
        rows = []
        for encoding in encodings:
            ids = [token for token in encoding.ids if token != unknown]
            if not ids:
                ids = [self._empty]
            rows.append(Tokens(ids))
        return rows


class StaticEngine:
    """A table of token vectors, on the CPU. Raises ModelError if the folder holds none."""

    packed = True
    home = torch.device("cpu")

    def __init__(self, device: Device, folder: Path) -> None:
        self.device = device
        path = folder / WEIGHTS_FILE
        with loading(
            f"static embeddings, {SENTENCE_TRANSFORMERS} or {MODEL2VEC}, in {path}"
        ):
            file = TensorFile(path)
            #: True if the folder is model2vec's.
            self.of_model2vec = SENTENCE_TRANSFORMERS not in file
            name = SENTENCE_TRANSFORMERS
            if self.of_model2vec:
                name = MODEL2VEC
            if name not in file:
                raise ValueError("it has neither")
            table = file.read(name).float()
            vectors, dimensions = table.shape
            tokens = vectors
            rows: torch.Tensor | None = None
            factors: torch.Tensor | None = None
            if self.of_model2vec and MAPPING in file:
                rows = _read_rows(file, vectors)
                tokens = len(rows)
            if self.of_model2vec and FACTORS in file:
                factors = _read_factors(file, tokens)
            #: Row of the table by token, where several tokens share a vector. The table is not
            #: repeated for them: two kilobytes of a file can name a billion vectors.
            self._rows: torch.Tensor | None = None
            #: Factor of each token's vector, with `_rows` alone.
            self._factors: torch.Tensor | None = None
            if rows is not None:
                empty_row = torch.tensor([vectors])
                self._rows = torch.cat([rows, empty_row])
            if factors is not None:
                if rows is None:
                    table *= factors[:, None]
                else:
                    empty_factor = torch.ones(1)
                    factors = torch.cat([factors, empty_factor])
                    self._factors = factors.to(device.dtype)
            #: Number of tokens. The row after the last is zero: the embedding of a text without
            #: tokens.
            self.size = tokens
            empty_vector = torch.zeros(1, dimensions)
            table = torch.cat([table, empty_vector])
            self._table = table.to(device.dtype)

    @torch.inference_mode()
    def forward(self, rows: Sequence[Tokens]) -> torch.Tensor:
        """Return each row's mean vector: [rows, dimensions] in float32."""
        all_ids: list[int] = []
        row_starts = []
        lengths = []
        for row in rows:
            row_starts.append(len(all_ids))
            lengths.append(len(row.ids))
            all_ids += row.ids
        ids = torch.tensor(all_ids)  # [tokens of all rows]
        starts = torch.tensor(row_starts)  # [rows]
        places = ids
        if self._rows is not None:
            places = self._rows[ids]
        if self._factors is None:
            means = embedding_bag(
                places,
                self._table,
                starts,
                mode="mean",
            )
            return means.float()
        sums = embedding_bag(
            places,
            self._table,
            starts,
            mode="sum",
            per_sample_weights=self._factors[ids],
        )
        row_lengths = torch.tensor(lengths)
        return sums.float() / row_lengths[:, None]


def create_static_engine(
    weights: Weights, device: Device, settings: Settings, folder: Path, max_tokens: int
) -> tuple[StaticEngine, StaticTokenizer]:
    """Load a table and its tokenizer. folder: the folder of both.

    Raises ModelError or SettingsError.
    """
    if settings.engine != "torch":
        raise SettingsError(
            f"FEEDMILL_ENGINE is {settings.engine}, but {weights.name} has static embeddings, "
            "which need none: unset FEEDMILL_ENGINE."
        )
    engine = StaticEngine(device, folder)
    tokenizer = StaticTokenizer(
        folder=folder,
        max_tokens=max_tokens,
        drops_unknown=engine.of_model2vec,
        empty=engine.size,
    )
    if tokenizer.size > engine.size:
        raise ModelError(
            f"{weights.name} has vectors for {engine.size:,} tokens, but its tokenizer has "
            f"{tokenizer.size:,}. Download the model again."
        )
    return engine, tokenizer


def _unknown_token(rust: Any) -> int | None:
    """Return the id of the tokenizer's unknown token, if it has one."""
    number: int | None = None
    if not hasattr(rust.model, "unk_token"):
        content = json.loads(rust.to_str())
        model = content["model"]
        number = model.get("unk_id")
    elif rust.model.unk_token is not None:
        number = rust.token_to_id(rust.model.unk_token)
    return number


def _read_rows(file: TensorFile, vectors: int) -> torch.Tensor:
    """Return the row of the table by token. Raises ValueError for a row beyond the table."""
    rows = file.read(MAPPING).long()
    (tokens,) = rows.shape
    if tokens and (int(rows.min()) < 0 or int(rows.max()) >= vectors):
        raise ValueError(
            f"its mapping names vectors beyond the {vectors:,} that there are"
        )
    return rows


def _read_factors(file: TensorFile, tokens: int) -> torch.Tensor:
    """Return the factor of each token's vector. Raises ValueError if there are others."""
    factors = file.read(FACTORS).float()
    if factors.shape != (tokens,):
        shape = [*factors.shape]
        raise ValueError(f"it has {shape} weights for {tokens:,} tokens")
    return factors
