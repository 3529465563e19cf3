"""Tokenizer: turn texts into token rows, identical to those of the model's own tokenizer, but
faster where possible.

The Rust tokenizer is called directly, because it releases Python's global interpreter lock, and
its Python wrapper does not. Of a long text, only the start is tokenized if it gives enough tokens
(`encode_starts`). For pairs, each text and each hypothesis is tokenized once, and the library
joins the two: 26 times faster than tokenizing every pair.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import torch

from feedmill.shared.errors import ModelError, PostRefused, printable
from feedmill.workers.models.bounds import check_tokenizer
from feedmill.workers.models.files import digest_of, loading, matching
from feedmill.workers.models.shapes import EXACT, Shapes
from feedmill.workers.models.weights import GLICLASS, Weights, read_config_file

#: A model_max_length of at least this means that none was set.
UNSET_LENGTH = 1_000_000
#: Names of a tokenizer's own format: tokenizer_config.json may name another one for a version of
#: transformers.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.*.json")
#: Characters to read of a text for each token to keep, twice as many as English has. The cut is at
#: a space, at least CUT_CHARACTERS behind the last token to keep, and so changes none: WordPiece
#: reads words of up to 100 characters.
CHARACTERS_PER_TOKEN = 10
CUT_CHARACTERS = 500
#: The embedded model's tokenizer, which its copies with a head share, and what transformers reads
#: from its files.
EMBEDDED_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
EMBEDDED_TOKENIZER_SHA256 = (
    "5323c950607cff79d1446ab8bf2a01f80adcfb1e049ffd3d2bbb1ef1e83ab265"
)
EMBEDDED_TOKENIZER_SETTINGS = {
    "chat_template": None, "eos_token_id": None, "model_input_names": ["input_ids",
    "token_type_ids", "attention_mask"],
    "model_max_length": 512, "pad_token_id": 0, "truncation_side": "right",
}  # fmt: skip


class Tokens(NamedTuple):
    """A row's token ids, and its token type ids if the model uses them and any is not 0."""

    ids: list[int]
    types: list[int] | None = None


def padded(
    rows: Sequence[Tokens], pad_id: int, max_tokens: int, shapes: Shapes = EXACT
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Pad rows on the right to a shape, on the host.

    Return ids, mask (true at real tokens), and types if any is not 0.

    max_tokens: maximum tokens of a row that shapes may pad to. Added rows are copies of the
    shortest, because a row of padding alone could give values that are not finite; their outputs
    are to be dropped.
    """
    shortest = min(rows, key=lambda row: len(row.ids))
    longest = max(len(row.ids) for row in rows)
    row_count = shapes.rows(len(rows))
    rounded_length = shapes.length(longest)
    allowed_length = min(rounded_length, max_tokens)
    length = max(longest, allowed_length)
    shape = (row_count, length)
    copies = row_count - len(rows)
    added_rows = [shortest] * copies

    ids = np.full(shape, pad_id)
    mask = np.zeros(shape, bool)
    types = np.zeros(shape, np.int64)
    for index, row in enumerate([*rows, *added_rows]):
        tokens = len(row.ids)
        ids[index, :tokens] = row.ids
        mask[index, :tokens] = True
        if row.types:
            types[index, :tokens] = row.types
    type_tensor = None
    if types.any():
        type_tensor = torch.from_numpy(types)
    return (
        torch.from_numpy(ids),
        torch.from_numpy(mask),
        type_tensor,
    )


def encode_starts(
    rust: Any, texts: Sequence[str], max_tokens: int, special_tokens: bool
) -> list[Any]:
    """Encode only the start of each long text, or all of it if the start gives too few tokens.

    rust: a tokenizer that truncates to `max_tokens`. special_tokens: add the model's special
    tokens.
    """
    characters = max_tokens * CHARACTERS_PER_TOKEN + CUT_CHARACTERS
    starts = {}
    for index, text in enumerate(texts):
        if len(text) > characters:
            beginning = text[:characters]
            starts[index] = _start(beginning)
    # With the places of tokens in the text, which the faster function leaves out.
    start_encodings = rust.encode_batch(
        list(starts.values()),
        add_special_tokens=special_tokens,
    )
    encodings = {}
    for index, encoding in zip(starts, start_encodings, strict=True):
        start_length = len(starts[index])
        if _is_enough(encoding, max_tokens, start_length):
            encodings[index] = encoding

    whole_places = []
    whole_texts = []
    for index, text in enumerate(texts):
        if index not in encodings:
            whole_places.append(index)
            whole_texts.append(text)
    whole_encodings = rust.encode_batch_fast(
        whole_texts,
        add_special_tokens=special_tokens,
    )
    encodings |= zip(whole_places, whole_encodings, strict=True)
    return [encodings[index] for index in range(len(texts))]


def _is_enough(encoding: Any, max_tokens: int, characters: int) -> bool:
    """Return whether the start of a text, of this many characters, has all tokens to keep far
    before its end.
    """
    ends = (end for _, end in encoding.offsets)
    last_end = max(ends, default=0)
    is_far_before_end = last_end <= characters - CUT_CHARACTERS
    has_all_tokens = len(encoding) >= max_tokens
    return has_all_tokens and is_far_before_end


def _start(text: str) -> str:
    """Return the text without its last word, which may be cut."""
    start, _, _ = text.rpartition(" ")
    return start or text


def load_tokenizer(weights: Weights) -> Any:
    """Load the tokenizer in a model's folder with transformers. Raises ModelError."""
    from transformers import AutoTokenizer, PreTrainedConfig  # noqa: PLC0415 - takes a second

    # transformers warns about configurations that it does not know. A tokenizer does not depend on
    # this one.
    model_config = read_config_file(weights)
    config = None
    if model_config.get("model_type") == GLICLASS:
        config = PreTrainedConfig()
    folder = weights.folder
    names = matching(folder, TOKENIZER_FILES)
    for name in sorted(names):
        check_tokenizer(folder / name)
    with loading(f"the tokenizer in {folder}"):
        loaded: Any = AutoTokenizer.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            trust_remote_code=weights.remote_code,
        )
        _ = loaded.backend_tokenizer  # a tokenizer in Python has none
        return loaded


def _load_embedded(weights: Weights) -> Any:
    """Return the tokenizer if the folder has the embedded model's, else None."""
    files = [file for file in weights.read if file.name in EMBEDDED_TOKENIZER]
    if digest_of(files) != EMBEDDED_TOKENIZER_SHA256:
        return None
    name = EMBEDDED_TOKENIZER[0]
    path = str(weights.folder / name)
    return SimpleNamespace(
        backend_tokenizer=tokenizers.Tokenizer.from_file(path),
        **EMBEDDED_TOKENIZER_SETTINGS,
    )


def _own_limit(loaded: Any, weights: Weights) -> int | None:
    """Return the maximum tokens of a row that a tokenizer's configuration sets, or None.

    Raises ModelError if it is no number of tokens.
    """
    length = loaded.model_max_length
    is_number = isinstance(length, int | float)
    if isinstance(length, bool):
        is_number = False
    if is_number and length >= UNSET_LENGTH:
        return None
    is_count = is_number and length >= 1 and length == int(length)
    if not is_count:
        raise ModelError(
            f"The tokenizer_config.json in {weights.folder} sets model_max_length to "
            f"{printable(repr(length)):.40}. Set it to the model's maximum tokens, such as 512, "
            "or delete it."
        )
    return int(length)


def number_of_ids(rust: Any) -> int:
    """Return the number after a tokenizer's largest token id. Ids may have gaps."""
    vocabulary: dict[str, int] = rust.get_vocab(with_added_tokens=True)
    largest = max(vocabulary.values(), default=-1)
    return largest + 1


class Tokenizer:
    """The tokenizer in a model's folder. Raises ModelError.

    max_tokens: maximum tokens of a row, special tokens included; a lower limit of the tokenizer
    takes precedence. vocabulary: number of tokens for which the model has a vector; None if the
    model does not say.
    """

    def __init__(
        self, weights: Weights, max_tokens: int, vocabulary: int | None = None
    ) -> None:
        loaded = _load_embedded(weights)
        if loaded is None:
            loaded = load_tokenizer(weights)
        self._rust: Any = loaded.backend_tokenizer
        self.max_tokens = max_tokens
        own_limit = _own_limit(loaded, weights)
        if own_limit is not None:
            self.max_tokens = min(max_tokens, own_limit)
        self.pad_id: int = 0
        if loaded.pad_token_id is not None:
            self.pad_id = loaded.pad_token_id
        elif loaded.eos_token_id is not None:
            self.pad_id = loaded.eos_token_id
        self.has_chat_template = bool(loaded.chat_template)
        self.cuts_left = loaded.truncation_side == "left"
        # A tokenizer.json may set its own padding and truncation.
        self._rust.no_padding()
        self._rust.enable_truncation(
            self.max_tokens,
            strategy="only_first",
            direction=loaded.truncation_side,
        )
        self._types_matter = "token_type_ids" in loaded.model_input_names
        #: Number of tokens that the model knows, if the tokenizer has others, too.
        self._known_tokens: int | None = None
        if vocabulary is not None and number_of_ids(self._rust) > vocabulary:
            self._known_tokens = vocabulary
        #: Number of special tokens in a pair.
        self.pair_size: int = self._rust.num_special_tokens_to_add(True)

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the row of each text, truncated to `max_tokens`."""
        encodings = self._encode(texts, special_tokens=True)
        return [self._tokens(encoding) for encoding in encodings]

    def parts(self, texts: Sequence[str]) -> list[Any]:
        """Encode each text without special tokens, truncated to `max_tokens`.

        Return the library's encodings.
        """
        return self._encode(texts, special_tokens=False)

    def pair(self, first: Any, second: Any) -> Tokens:
        """Return the row of a pair of `parts`. Truncates the first to fit `max_tokens`."""
        encoding = self._rust.post_process(first, second)
        return self._tokens(encoding)

    def _encode(self, texts: Sequence[str], special_tokens: bool) -> list[Any]:
        if self.cuts_left:
            encodings = self._rust.encode_batch_fast(
                list(texts),
                add_special_tokens=special_tokens,
            )
        else:
            encodings = encode_starts(
                self._rust,
                texts,
                max_tokens=self.max_tokens,
                special_tokens=special_tokens,
            )
        if self._known_tokens is not None:
            for encoding in encodings:
                self._check_known(encoding.ids, self._known_tokens)
        return list(encodings)

    def _check_known(self, ids: Sequence[int], known_tokens: int) -> None:
        """Raise PostRefused for a token without a vector.

        On a GPU, the look-up would end the process.
        """
        largest = max(ids, default=0)
        if largest >= known_tokens:
            token = self._rust.id_to_token(largest)
            raise PostRefused(
                None,
                "",
                f"the text has the token {printable(str(token)):.100}, number {largest:,} of the "
                f"tokenizer, but the model knows {known_tokens:,} tokens",
            )

    def _tokens(self, encoding: Any) -> Tokens:
        types = None
        if self._types_matter:
            types = encoding.type_ids
            if not any(types):
                types = None
        return Tokens(encoding.ids, types)
