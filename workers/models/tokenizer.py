"""Tokenizer: turn texts into token rows, identical to those of the model's own tokenizer, but faster where possible.

The Rust tokenizer is called directly, because it releases Python's global interpreter lock, and its Python wrapper does
not. Of a long text, only the start is tokenized if it gives enough tokens (`encode_starts`). Pairs of text and
hypothesis are assembled from parts: tokenizing each text and each hypothesis once is far faster than tokenizing every
pair (19 times at 16 labels per post). On loading, pairs of difficult texts are assembled and compared with the
tokenizer's own. If any differs, the tokenizer encodes each pair itself.
"""

import logging
from collections.abc import Callable, Sequence, Sized
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import AutoTokenizer, PreTrainedConfig

from feedmill.workers.models.weights import GLICLASS, Weights, loading, read_config_file

logger = logging.getLogger(__name__)

#: A model_max_length of at least this means that none was set.
UNSET_LENGTH = 1_000_000
#: Characters to read of a text for each token to keep, twice as many as English has. The cut is at a space, far behind
#: the last token kept, so that it changes none.
CHARACTERS_PER_TOKEN = 10
#: Difficult texts, on which assembled pairs are compared with the tokenizer's own.
PROBE_TEXTS = (
    "A first post.",
    " leading and trailing ",
    "¿Qué? 你好 👩‍👩‍👧 e\u0301",
    "</s><s>[SEP][CLS]",
    "\n\n\t",
    "a" * 300,
)

#: A text, or a pair of texts.
Text = TypeVar("Text", str, tuple[str, str])
Encoded = TypeVar("Encoded", bound=Sized)


class Tokens(NamedTuple):
    """A row's token ids, and its token type ids if the model uses them and any is not 0."""

    ids: list[int]
    types: list[int] | None = None


def padded(rows: Sequence[Sequence[int]], longest: int, padding_token: int, pinned: bool = False) -> torch.Tensor:
    """Pad token ids on the right to [rows, longest], on the host. pinned: in page-locked memory."""
    tensor = torch.full((len(rows), longest), padding_token, pin_memory=pinned)
    values = tensor.numpy()
    for index, row in enumerate(rows):
        values[index, : len(row)] = row
    return tensor


def filled(rows: Sequence[Tokens], count: int) -> Sequence[Tokens]:
    """Return `count` rows: the given ones, followed by copies of the shortest. The copies' outputs are to be dropped.

    Copies, because a row of padding alone could give values that are not finite.
    """
    if len(rows) == count:
        return rows
    return [*rows, *[min(rows, key=lambda row: len(row.ids))] * (count - len(rows))]


def encode_starts(
    texts: Sequence[Text], tokens: int | None, encode: Callable[[list[Text]], Sequence[Encoded]]
) -> list[Encoded]:
    """Encode only the start of each long text, or all of it if the start gives fewer than `tokens` tokens.

    tokens: None to read whole texts. encode: its results' lengths are numbers of tokens.
    """
    if tokens is None:
        return list(encode(list(texts)))
    characters = tokens * CHARACTERS_PER_TOKEN
    starts = [_start(text, characters) for text in texts]
    results = list(encode(starts))
    few = [place for place, start in enumerate(starts) if start != texts[place] and len(results[place]) < tokens]
    for place, result in zip(few, encode([texts[place] for place in few]) if few else (), strict=True):
        results[place] = result
    return results


def _start(text: Text, characters: int) -> Text:
    if isinstance(text, tuple):
        return _start(text[0], characters), text[1]
    if len(text) <= characters:
        return text
    space = text.rfind(" ", 0, characters)
    if space <= 0:  # not within a word if possible: WordPiece reads one of over 100 characters as one unknown token
        characters *= 2
        space = text.find(" ", characters // 2, characters)
    return text[: space if space > 0 else characters]


class Frame(NamedTuple):
    """The special tokens around and between the two texts of a pair, and the type ids of all parts."""

    before: list[int]
    between: list[int]
    after: list[int]
    #: Type ids of the tokens before, of the first text, of the tokens between, of the second text, and of the tokens
    #: after. None if all are 0.
    types: tuple[list[int], int, list[int], int, list[int]] | None

    def pair(self, first: list[int], second: list[int]) -> Tokens:
        """Assemble the row of a pair from the tokens of its texts."""
        ids = [*self.before, *first, *self.between, *second, *self.after]
        if self.types is None:
            return Tokens(ids)
        before, of_first, between, of_second, after = self.types
        return Tokens(ids, [*before, *[of_first] * len(first), *between, *[of_second] * len(second), *after])


def load_tokenizer(weights: Weights, remote_code: bool = False) -> Any:
    """Load the tokenizer in a model's folder with transformers. Raises ModelError."""
    # transformers warns about configurations that it does not know. A tokenizer does not depend on this one.
    gliclass = read_config_file(weights).get("model_type") == GLICLASS
    with loading(f"the tokenizer in {weights.folder}"):
        loaded: Any = AutoTokenizer.from_pretrained(
            weights.folder,
            config=PreTrainedConfig() if gliclass else None,
            local_files_only=True,
            trust_remote_code=remote_code,
        )
        _ = loaded.backend_tokenizer  # a tokenizer in Python has none
        return loaded


class Tokenizer:
    """The tokenizer in a model's folder. Raises ModelError.

    max_tokens: maximum tokens of a row, special tokens included; a lower limit of the tokenizer takes precedence.
    """

    def __init__(self, weights: Weights, max_tokens: int, remote_code: bool = False) -> None:
        loaded = load_tokenizer(weights, remote_code)
        self._rust: Any = loaded.backend_tokenizer
        own_limit = loaded.model_max_length
        self.max_tokens = min(max_tokens, own_limit) if own_limit < UNSET_LENGTH else max_tokens
        known = (token for token in (loaded.pad_token_id, loaded.eos_token_id) if token is not None)
        self.pad_id: int = next(known, 0)
        self.has_chat_template = bool(loaded.chat_template)
        self._cuts_left = loaded.truncation_side == "left"
        # A tokenizer.json may set its own padding and truncation.
        self._rust.no_padding()
        self._rust.no_truncation()
        self._types_matter = "token_type_ids" in loaded.model_input_names
        #: Number of special tokens in a pair.
        self.pair_size: int = self._rust.num_special_tokens_to_add(True)
        #: None if pairs cannot be assembled from parts.
        self.frame = self._probe_frame()

    def encode(self, texts: Sequence[str] | Sequence[tuple[str, str]]) -> list[Tokens]:
        """Return the row of each text or pair. Truncates the text, or a pair's first text, to fit `max_tokens`."""
        direction = "left" if self._cuts_left else "right"
        self._rust.enable_truncation(self.max_tokens, strategy="only_first", direction=direction)
        try:
            encodings = self._encode_starts(texts, self.max_tokens, self._rust.encode_batch_fast)
        finally:
            self._rust.no_truncation()
        return [self._tokens(encoding) for encoding in encodings]

    def parts(self, texts: Sequence[str], max_tokens: int | None = None) -> list[list[int]]:
        """Return the token ids of each text without special tokens, for `cut` and `Frame.pair`.

        max_tokens: how many will be kept at most; the end of a longer text may be missing. None keeps all.
        """

        encodings = self._encode_starts(
            texts, max_tokens, lambda starts: self._rust.encode_batch_fast(starts, add_special_tokens=False)
        )
        return [encoding.ids for encoding in encodings]

    def _encode_starts(self, texts: Sequence[Any], tokens: int | None, encode: Callable[[list[Any]], Any]) -> list[Any]:
        return encode_starts(texts, None if self._cuts_left else tokens, encode)

    def cut(self, part: list[int], max_tokens: int) -> list[int]:
        """Return the first `max_tokens` tokens of a text, or the last if the tokenizer truncates on the left."""
        if len(part) <= max_tokens:
            return part
        return part[-max_tokens:] if self._cuts_left else part[:max_tokens]

    def _tokens(self, encoding: Any) -> Tokens:
        types = encoding.type_ids if self._types_matter else None
        return Tokens(encoding.ids, types if types and any(types) else None)

    def _probe_frame(self) -> Frame | None:
        """Return the tokens that the tokenizer puts around a pair; None if pairs cannot be assembled from parts."""
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
        for text in PROBE_TEXTS:
            for other in PROBE_TEXTS:
                one, two = self.parts([text, other])
                if found.pair(one, two) != self._tokens(self._rust.encode(text, other)):
                    logger.info(
                        "cannot assemble this tokenizer's pairs from encoded parts; encoding each pair as a whole"
                    )
                    return None
        return found
