"""Tokenizer: turn texts into token rows, identical to those of the model's own tokenizer, but faster where possible.

The Rust tokenizer is called directly, because it releases Python's global interpreter lock, and its Python wrapper does
not. Of a long text, only the start is tokenized if it gives enough tokens (`encode_starts`). For pairs, each text and
each hypothesis is tokenized once, and the library joins the two: 26 times faster than tokenizing every pair.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import torch

from feedmill.workers.models.shapes import EXACT, Shapes
from feedmill.workers.models.weights import GLICLASS, Weights, loading, read_config_file, sha256_of

#: A model_max_length of at least this means that none was set.
UNSET_LENGTH = 1_000_000
#: Characters to read of a text for each token to keep, twice as many as English has. The cut is at a space, far behind
#: the last token kept, so that it changes none.
CHARACTERS_PER_TOKEN = 10
#: The embedded model's tokenizer, which its copies with a head share, and what transformers reads from its files.
EMBEDDED_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
EMBEDDED_TOKENIZER_SHA256 = "1f7f1f569918cd462aae605741b76b5f9de78b206d442c489015af9f3c0c9f7b"
EMBEDDED_TOKENIZER_SETTINGS = {
    "chat_template": None, "eos_token_id": None, "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    "model_max_length": 512, "pad_token_id": 0, "truncation_side": "right",
}  # fmt: skip


class Tokens(NamedTuple):
    """A row's token ids, and its token type ids if the model uses them and any is not 0."""

    ids: list[int]
    types: list[int] | None = None


def padded(
    rows: Sequence[Tokens], pad_id: int, max_tokens: int, shapes: Shapes = EXACT
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Pad rows on the right to a shape, on the host. Return ids, mask (true at real tokens), and types if any is not 0.

    max_tokens: maximum tokens of a row that shapes may pad to. Added rows are copies of the shortest, because a row of
    padding alone could give values that are not finite; their outputs are to be dropped.
    """
    shortest = min(rows, key=lambda row: len(row.ids))
    filled = [*rows, *[shortest] * (shapes.rows(len(rows)) - len(rows))]
    longest = max(len(row.ids) for row in rows)
    ids = np.full((len(filled), max(longest, min(shapes.length(longest), max_tokens))), pad_id)
    mask, types = np.zeros(ids.shape, bool), np.zeros(ids.shape, np.int64)
    for index, row in enumerate(filled):
        ids[index, : len(row.ids)] = row.ids
        mask[index, : len(row.ids)] = True
        if row.types:
            types[index, : len(row.ids)] = row.types
    given_types = torch.from_numpy(types) if types.any() else None
    return torch.from_numpy(ids), torch.from_numpy(mask), given_types


def encode_starts(rust: Any, texts: Sequence[str], max_tokens: int, special_tokens: bool) -> list[Any]:
    """Encode only the start of each long text, or all of it if the start gives fewer than `max_tokens` tokens.

    rust: a tokenizer that truncates to `max_tokens`. special_tokens: add the model's special tokens.
    """
    characters = max_tokens * CHARACTERS_PER_TOKEN
    starts = [text if len(text) <= characters else _start(text[:characters]) for text in texts]
    found: list[Any] = rust.encode_batch_fast(starts, add_special_tokens=special_tokens)
    few = [place for place, text in enumerate(texts) if starts[place] != text and len(found[place]) < max_tokens]
    whole = rust.encode_batch_fast([texts[place] for place in few], add_special_tokens=special_tokens)
    for place, encoding in zip(few, whole, strict=True):
        found[place] = encoding
    return found


def _start(text: str) -> str:
    """Return the text without its last word, which may be cut."""
    return text.rpartition(" ")[0] or text


def load_tokenizer(weights: Weights) -> Any:
    """Load the tokenizer in a model's folder with transformers. Raises ModelError."""
    from transformers import AutoTokenizer, PreTrainedConfig  # noqa: PLC0415 - takes a second

    # transformers warns about configurations that it does not know. A tokenizer does not depend on this one.
    gliclass = read_config_file(weights).get("model_type") == GLICLASS
    with loading(f"the tokenizer in {weights.folder}"):
        loaded: Any = AutoTokenizer.from_pretrained(
            weights.folder,
            config=PreTrainedConfig() if gliclass else None,
            local_files_only=True,
            trust_remote_code=weights.remote_code,
        )
        _ = loaded.backend_tokenizer  # a tokenizer in Python has none
        return loaded


def _load_embedded(weights: Weights) -> Any:
    """Return the tokenizer if the folder has the embedded model's, else None."""
    files = [weights.folder / name for name in EMBEDDED_TOKENIZER]
    if not all(file.is_file() for file in files) or sha256_of(*files) != EMBEDDED_TOKENIZER_SHA256:
        return None
    rust = tokenizers.Tokenizer.from_file(str(files[0]))
    return SimpleNamespace(backend_tokenizer=rust, **EMBEDDED_TOKENIZER_SETTINGS)


class Tokenizer:
    """The tokenizer in a model's folder. Raises ModelError.

    max_tokens: maximum tokens of a row, special tokens included; a lower limit of the tokenizer takes precedence.
    """

    def __init__(self, weights: Weights, max_tokens: int) -> None:
        loaded = _load_embedded(weights) or load_tokenizer(weights)
        self._rust: Any = loaded.backend_tokenizer
        own_limit = loaded.model_max_length
        self.max_tokens = min(max_tokens, own_limit) if own_limit < UNSET_LENGTH else max_tokens
        known = (token for token in (loaded.pad_token_id, loaded.eos_token_id) if token is not None)
        self.pad_id: int = next(known, 0)
        self.has_chat_template = bool(loaded.chat_template)
        self.cuts_left = loaded.truncation_side == "left"
        # A tokenizer.json may set its own padding and truncation.
        self._rust.no_padding()
        self._rust.enable_truncation(self.max_tokens, strategy="only_first", direction=loaded.truncation_side)
        self._types_matter = "token_type_ids" in loaded.model_input_names
        #: Number of special tokens in a pair.
        self.pair_size: int = self._rust.num_special_tokens_to_add(True)

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the row of each text, truncated to `max_tokens`."""
        return [self._tokens(encoding) for encoding in self._encode(texts, special_tokens=True)]

    def parts(self, texts: Sequence[str]) -> list[Any]:
        """Encode each text without special tokens, truncated to `max_tokens`. Return the library's encodings."""
        return self._encode(texts, special_tokens=False)

    def pair(self, first: Any, second: Any) -> Tokens:
        """Return the row of a pair of `parts`. Truncates the first to fit `max_tokens`."""
        return self._tokens(self._rust.post_process(first, second))

    def _encode(self, texts: Sequence[str], special_tokens: bool) -> list[Any]:
        if self.cuts_left:
            return list(self._rust.encode_batch_fast(list(texts), add_special_tokens=special_tokens))
        return encode_starts(self._rust, texts, self.max_tokens, special_tokens)

    def _tokens(self, encoding: Any) -> Tokens:
        types = encoding.type_ids if self._types_matter else None
        return Tokens(encoding.ids, types if types and any(types) else None)
