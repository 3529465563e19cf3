"""From texts to token rows, as the model's own tokenizer would make them, and faster where that can be had.

The Rust tokenizer is called directly: it releases Python's lock, which the Python one around it does not. Pairs of a
text and a hypothesis are put together from parts, since tokenizing each text once and each hypothesis once is far
cheaper than tokenizing every pair (19 times at 16 labels a post). That this gives the tokenizer's own pairs is tried
out on awkward texts when the tokenizer is loaded; one for which it does not is asked for each pair.
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from shared.errors import ModelError
from workers.weights import Weights

logger = logging.getLogger(__name__)

#: A tokenizer's model_max_length above this says that nobody set one.
UNSET_LENGTH = 1_000_000
#: Texts on which pairs put together from parts are compared with the tokenizer's own.
AWKWARD = (
    "A first post.",
    " leading and trailing ",
    "¿Qué? 你好 👩‍👩‍👧 e\u0301",
    "</s><s>[SEP][CLS]",
    "\n\n\t",
    "a" * 300,
)


class Tokens(NamedTuple):
    """One row's tokens: their ids, and, where the model tells them apart, which of two texts each belongs to."""

    ids: list[int]
    types: list[int] | None = None


class Frame(NamedTuple):
    """The special tokens around and between the two texts of a pair, and the types of all parts."""

    before: list[int]
    between: list[int]
    after: list[int]
    #: Of the tokens before, of the first text, between, of the second, after. None where all are 0.
    types: tuple[list[int], int, list[int], int, list[int]] | None

    def pair(self, first: list[int], second: list[int]) -> Tokens:
        """The row of two texts' tokens."""
        ids = [*self.before, *first, *self.between, *second, *self.after]
        if self.types is None:
            return Tokens(ids)
        before, of_first, between, of_second, after = self.types
        return Tokens(ids, [*before, *[of_first] * len(first), *between, *[of_second] * len(second), *after])


class Tokenizer:
    """The tokenizer of a model's folder.

    most: tokens of a row, at most, special tokens included; where the tokenizer was made for fewer, its own limit
    counts. remote_code: whether Python code that comes with the model may run. Raises ModelError.
    """

    def __init__(self, weights: Weights, most: int, remote_code: bool = False) -> None:
        try:
            loaded: Any = AutoTokenizer.from_pretrained(
                weights.folder, local_files_only=True, trust_remote_code=remote_code
            )
            self._rust: Any = loaded.backend_tokenizer
        except Exception as error:  # broken files fail in as many ways as there are kinds of them
            raise ModelError(f"The tokenizer in {weights.folder} cannot be loaded by transformers: {error}") from error
        own_limit = loaded.model_max_length
        self.max_tokens = min(most, own_limit) if own_limit < UNSET_LENGTH else most
        known = (token for token in (loaded.pad_token_id, loaded.eos_token_id) if token is not None)
        #: Fills short rows.
        self.pad_id: int = next(known, 0)
        self._cuts_left = loaded.truncation_side == "left"
        # A tokenizer.json may pad every row to one length and cut at another.
        self._rust.no_padding()
        self._rust.no_truncation()
        self._types_matter = "token_type_ids" in loaded.model_input_names
        #: Special tokens in a pair.
        self.pair_size: int = self._rust.num_special_tokens_to_add(True)
        #: None where pairs cannot be put together from parts.
        self.frame = self._find_frame()

    def single(self, texts: Sequence[str]) -> list[Tokens]:
        """Each text by itself, cut to `max_tokens`."""
        direction = "left" if self._cuts_left else "right"
        self._rust.enable_truncation(self.max_tokens, direction=direction)
        try:
            encodings = self._rust.encode_batch_fast(list(texts))
        finally:
            self._rust.no_truncation()
        return [self._tokens(encoding) for encoding in encodings]

    def parts(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text's tokens, whole, without special tokens: what `pair` and `cut` work on."""
        return [encoding.ids for encoding in self._rust.encode_batch_fast(list(texts), add_special_tokens=False)]

    def cut(self, part: list[int], most: int) -> list[int]:
        """A text's first tokens, or its last where the tokenizer cuts on the left."""
        if len(part) <= most:
            return part
        return part[-most:] if self._cuts_left else part[:most]

    def whole_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Tokens]:
        """Pairs as the tokenizer makes them, the first text cut to `max_tokens` of both."""
        direction = "left" if self._cuts_left else "right"
        self._rust.enable_truncation(self.max_tokens, strategy="only_first", direction=direction)
        try:
            encodings = self._rust.encode_batch(list(pairs))
        finally:
            self._rust.no_truncation()
        return [self._tokens(encoding) for encoding in encodings]

    def _tokens(self, encoding: Any) -> Tokens:
        types = encoding.type_ids if self._types_matter else None
        return Tokens(encoding.ids, types if types and any(types) else None)

    def _find_frame(self) -> Frame | None:
        """What the tokenizer puts around a pair."""
        probe = self._rust.encode("a", "b")
        sequences, ids, types = probe.sequence_ids, probe.ids, probe.type_ids
        if 0 not in sequences or 1 not in sequences:
            return None
        first = sequences.index(0), len(sequences) - sequences[::-1].index(0)
        second = sequences.index(1), len(sequences) - sequences[::-1].index(1)
        if first[1] > second[0]:
            return None
        found = Frame(
            ids[: first[0]],
            ids[first[1] : second[0]],
            ids[second[1] :],
            (
                types[: first[0]], types[first[0]], types[first[1] : second[0]], types[second[0]], types[second[1] :],
            ) if self._types_matter and any(types) else None,
        )  # fmt: skip
        for text in AWKWARD:
            for other in AWKWARD:
                one, two = self.parts([text, other])
                if found.pair(one, two) != self._tokens(self._rust.encode(text, other)):
                    logger.info("this tokenizer's pairs are not the sum of their parts; it is asked for each pair")
                    return None
        return found
