"""Bound what a model's configuration and tokenizer declare, before anything is built from it.

A configuration of a few bytes can ask for a billion labels or a million layers, and a chain of
replacements in a tokenizer can turn one letter into a billion. The weights file is what a folder
really has to show for such numbers, and its size is known to fit: counts must not exceed its
tensors, and sizes not its parameters.

Relies on transformers' `_from_config`, which builds a model without weights.
"""

import json
import re
from base64 import b64decode
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

from feedmill.shared.errors import ModelError, printable
from feedmill.workers.models.files import CONFIG_FILE, MAX_NAME, loading, open_regular
from feedmill.workers.models.tensors import TensorFile

#: Names of counts for each of which transformers builds a layer, and of sizes for which it makes
#: tensors or tables.
COUNT_NAMES = re.compile(
    r"(layers?|blocks?|block_sizes|depths?|experts|hidden_groups|group_num|stages|hash_functions)$"
)
SIZE_NAMES = re.compile(
    r"^(n|num|d)_|(size|sizes|dim|dims|positions|embeddings|width|channels|buckets|rank|_num)$"
)
#: Counts and sizes up to these are allowed whatever the weights: some layers share weights, and
#: rotary positions have none.
MIN_COUNT_LIMIT = 256
MIN_SIZE_LIMIT = 2**24
#: Maximum tensors of all weight files together. transformers compares each name with the model's,
#: empty ones, too: a second for 4,000. The largest mixtures of experts that fit one device have
#: about 20,000.
MAX_TENSORS = 2**15
#: Maximum labels of a configuration. transformers makes two tables of them.
MAX_DECLARED_LABELS = 2**16
#: A model may have this many times the parameters of its weights file, and this many more: tied
#: weights are counted twice, and tables of positions are in no file. Quantised weights are packed
#: into fewer numbers.
MAX_GROWTH = 2
MAX_MORE = 2**24
MAX_PACKED = 16
#: End of the names of classifiers' architectures.
CLASSIFIER = "ForSequenceClassification"
#: Maximum numbers of labels that an error quotes.
MAX_QUOTED = 10
#: Maximum steps of a tokenizer's normalizer and pre-tokenizer, and maximum characters that they
#: make of one.
MAX_STEPS = 2000
MAX_CHARACTERS_PER_CHARACTER = 1000
#: Characters that the step ByteLevel makes of one, at most: one for each of its bytes.
BYTES_PER_CHARACTER = 4.0
#: Bytes of the length at the beginning of a Precompiled step.
CHARSMAP_LENGTH_BYTES = 4
#: Maximum tokens that a tokenizer may add to each text.
MAX_ADDED_TOKENS = 1000
#: Maximum tokens beside a tokenizer's vocabulary, such as special ones, and their characters
#: together: the library takes hours and gigabytes to look for many or long ones. Gemma has 6,400.
MAX_OWN_TOKENS = 2**14
MAX_OWN_CHARACTERS = 2**20


def read_headers(files: Sequence[Path]) -> list[TensorFile]:
    """Return the headers of weight files.

    Raises ModelError if they have more tensors together than MAX_TENSORS.
    """
    headers = []
    count = 0
    for file in files:
        header = TensorFile(file)
        tensors = header.places
        headers.append(header)
        count += len(tensors)
        if count > MAX_TENSORS:
            raise ModelError(
                f"{file} and the weight files before it have {count:,} tensors; {MAX_TENSORS:,} "
                "are supported. Use another model."
            )
    return headers


def check_config(
    file: Path, config: dict[str, Any], tensors: Sequence[TensorFile]
) -> None:
    """Raise ModelError if a configuration declares more than the weights can hold. file: names it,
    for errors.
    """
    names = _list(config.get("architectures"))
    architectures = map(str, names)
    if any(name.endswith(CLASSIFIER) for name in architectures):
        _check_labels(file, config)
    tensor_count = 0
    for tensor_file in tensors:
        tensor_count += len(tensor_file.places)
    number_count = _stored_numbers(tensors)
    max_count = max(MIN_COUNT_LIMIT, tensor_count)
    max_size = max(MIN_SIZE_LIMIT, number_count)
    for name, number in _numbers(config):
        limit = None
        if name == "num_labels":
            limit = MAX_DECLARED_LABELS
        elif COUNT_NAMES.search(name):
            limit = max_count
        elif SIZE_NAMES.search(name):
            limit = max_size
        if limit is not None and number > limit:
            raise ModelError(
                f"{file} declares {printable(name)[:MAX_NAME]}={number:,.0f}, more than the "
                f"weights beside it can have ({limit:,}). Use the configuration that belongs to "
                "the weights."
            )


def _stored_numbers(tensors: Sequence[TensorFile]) -> int:
    """Return how many numbers weight files have together."""
    total = 0
    for tensor_file in tensors:
        for place in tensor_file.places.values():
            total += place.numbers
    return total


def _list(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return []


def _check_labels(file: Path, config: dict[str, Any]) -> None:
    """Raise ModelError unless id2label numbers a classifier's labels 0, 1, …, and label2id has
    numbers.
    """
    names = config.get("id2label")
    if names is not None:
        _check_names(file, names)
    numbers = config.get("label2id")
    if numbers is not None:
        _check_numbers(file, numbers)


def _check_names(file: Path, names: Any) -> None:
    """Raise ModelError unless id2label has the keys "0", "1", … and texts."""
    if not _are_counted(names):
        numbering = repr(names)
        if isinstance(names, dict):
            keys = map(str, names)
            first_keys = islice(keys, MAX_QUOTED)
            numbering = ", ".join(first_keys)
        quoted = printable(numbering)[:MAX_NAME]
        raise ModelError(
            f"id2label in {file} numbers its labels {quoted}, but a "
            "model counts them from 0. Number them 0, 1, … in the order of training."
        )
    for name in names.values():
        if not isinstance(name, str | int):
            quoted = printable(json.dumps(name))
            raise ModelError(
                f"id2label in {file} has {quoted:.100} in place of a label's "
                "name. Write each name as text."
            )


def _check_numbers(file: Path, numbers: Any) -> None:
    """Raise ModelError unless label2id has whole numbers."""
    values = [numbers]
    if isinstance(numbers, dict):
        values = list(numbers.values())
    for value in values:
        text = str(value)
        if not re.fullmatch(r"\d{1,9}", text):
            raise ModelError(
                f"label2id in {file} has {printable(text):.100} for a label's number. Give "
                "each label the number that it has in id2label, or leave label2id out."
            )


def _are_counted(names: Any) -> bool:
    """Return whether the keys of id2label are "0", "1", …, in any order."""
    if not isinstance(names, dict):
        return False
    numbers = {str(number) for number in range(len(names))}
    return set(names) == numbers


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Return the numbers in a JSON value, each with the name of the nearest object's key."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _numbers(part, key)
    elif isinstance(value, list):
        for part in value:
            yield from _numbers(part, name)
    elif isinstance(value, bool):
        return
    elif isinstance(value, int | float):
        yield name, value


def blank_model(architecture: Any, config: Any, file: Path) -> Any:
    """Return the model that a configuration describes, without memory for its weights.

    Raises ModelError.

    architecture: a class of transformers. file: the configuration's file, for errors.
    """
    import torch  # noqa: PLC0415 - see tensors.py

    with loading(f"the model that {file} describes"), torch.device("meta"):
        from_config = getattr(architecture, "from_config", None)
        if from_config is None:
            from_config = architecture._from_config
        own_config = deepcopy(config)
        return from_config(own_config)


def check_shapes(model: Any, files: Sequence[Path], exact: bool) -> None:
    """Raise ModelError if a model has far more parameters than its weight files, or tensors of
    other shapes.

    model: as `blank_model` returns it. files: the weight files. exact: compare each tensor's
    shape.
    """
    first_file = files[0]
    tensors = [TensorFile(path) for path in files]
    stored = _stored_numbers(tensors)
    quantization = getattr(model.config, "quantization_config", None)
    quantized = quantization is not None
    growth = MAX_GROWTH
    if quantized:
        growth *= MAX_PACKED
    limit = stored * growth + MAX_MORE
    declared = 0
    for tensor in (*model.parameters(), *model.buffers()):
        declared += tensor.numel()
    if declared > limit:
        config_file = first_file.parent / CONFIG_FILE
        raise ModelError(
            f"{config_file} describes a model of {declared:,} parameters, but "
            f"{first_file.name} has {stored:,}. Use the configuration that belongs to the weights."
        )
    if exact and not quantized:
        shapes = {}
        for tensor_file in tensors:
            for name, place in tensor_file.places.items():
                shapes[name] = place.shape
        _compare(model, shapes, first_file)


def _compare(model: Any, shapes: dict[str, tuple[int, ...]], file: Path) -> None:
    """Raise ModelError for the first tensor whose shape in the file differs from that in the
    model.
    """
    labels = getattr(model.config, "num_labels", None)
    prefix = f"{model.base_model_prefix}."
    for name, tensor in model.state_dict().items():
        # A file of the encoder alone lacks the prefix, and an encoder lacks that of a whole model.
        names = (
            name,
            prefix + name,
            name.removeprefix(prefix),
        )
        matches = [shapes[possible] for possible in names if possible in shapes]
        if not matches:
            continue
        shape = matches[0]
        configured = tuple(tensor.shape)
        if shape == configured:
            continue
        in_base_model = name.startswith(prefix)
        is_head = not in_base_model and configured[:1] == (labels,)
        if is_head and shape[1:] == configured[1:]:
            config_file = file.parent / CONFIG_FILE
            raise ModelError(
                f"{config_file} names {labels} labels (id2label), but the weights "
                f"have a head for {shape[0]}: {name} is {list(shape)}. Name each label once in "
                "id2label, in the order of training."
            )
        raise ModelError(
            f"{file} has {name} of the shape {list(shape)}, but {CONFIG_FILE} asks for "
            f"{list(configured)}. Use the configuration that belongs to the weights."
        )


def check_tokenizer(file: Path) -> None:
    """Raise ModelError if a tokenizer.json could make very much of a short text, as chains of
    replacements do.
    """
    with loading(file):
        with open_regular(file) as opened:
            content = json.load(opened)
        if not isinstance(content, dict):
            raise TypeError("it must contain a dict")
        normalizer = content.get("normalizer")
        pre_tokenizer = content.get("pre_tokenizer")
        post_processor = content.get("post_processor")
        steps = [*_steps(normalizer), *_steps(pre_tokenizer)]
        added_tokens = 0
        for step in _steps(post_processor):
            step_tokens = _added_tokens(step)
            added_tokens = max(added_tokens, step_tokens)
        _check_growth(file, steps)
        own_tokens = content.get("added_tokens") or ()
        own_characters = 0
        for token in own_tokens:
            text = str(token["content"])
            own_characters += len(text)
    own_count = len(own_tokens)
    if own_count > MAX_OWN_TOKENS or own_characters > MAX_OWN_CHARACTERS:
        raise ModelError(
            f"{file} has {own_count:,} added_tokens of {own_characters:,} characters; "
            f"{MAX_OWN_TOKENS:,} of {MAX_OWN_CHARACTERS:,} are supported. Use another model."
        )
    if added_tokens > MAX_ADDED_TOKENS:
        raise ModelError(
            f"The post-processor in {file} adds {added_tokens:,} tokens to a text; "
            f"{MAX_ADDED_TOKENS:,} are supported. Use another model."
        )


def _check_growth(file: Path, steps: Sequence[dict[str, Any]]) -> None:
    growth = 1.0
    for number, step in enumerate(steps, 1):
        growth *= _growth(step)
        if number > MAX_STEPS or growth > MAX_CHARACTERS_PER_CHARACTER:
            raise ModelError(
                f"The normalizer and pre-tokenizer in {file} make more than "
                f"{MAX_CHARACTERS_PER_CHARACTER:,} characters of one in their first {number:,} "
                f"steps, or have more than {MAX_STEPS:,}. Use another model."
            )


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Return the steps of a normalizer, a pre-tokenizer or a post-processor, in order."""
    if not isinstance(part, dict):
        return
    if part.get("type") != "Sequence":
        yield part
    for name in ("normalizers", "pretokenizers", "processors"):
        for step in part.get(name) or ():
            yield from _steps(step)


def _growth(step: dict[str, Any]) -> float:
    """Return how many characters a step makes of one, at most; 1 for the steps that have no text
    of their own.
    """
    kind = step.get("type")
    if kind == "ByteLevel":
        return BYTES_PER_CHARACTER
    if kind == "Precompiled":
        charsmap = step.get("precompiled_charsmap") or ""
        return _charsmap_growth(str(charsmap))
    content = step.get("content", step.get("prepend", ""))
    length = 0
    if isinstance(content, str):
        length = len(content)
    pattern = step.get("pattern")
    replaced = None
    if isinstance(pattern, dict):
        replaced = pattern.get("String")
    if isinstance(replaced, str) and replaced:
        return max(1.0, length / len(replaced))
    # A regular expression can match one character, or the empty text between two.
    if length <= 1:
        return 1.0
    return length + 1.0


def _charsmap_growth(encoded: str) -> float:
    """Return how many bytes the longest text of a SentencePiece map of characters has, at least 1.

    The format: 4 bytes with the length of a table, the table, and the texts, each with a null byte
    at its end.
    """
    charsmap = b64decode(encoded)
    length_bytes = charsmap[:CHARSMAP_LENGTH_BYTES]
    table_bytes = int.from_bytes(length_bytes, "little")
    texts_start = CHARSMAP_LENGTH_BYTES + table_bytes
    texts = charsmap[texts_start:].split(b"\0")
    longest = max(map(len, texts))
    return float(max(1, longest))


def _added_tokens(step: dict[str, Any]) -> int:
    """Return how many tokens a step of a post-processor adds to a text or a pair, at most."""
    special_tokens = step.get("special_tokens")
    most = 0
    for name in ("single", "pair"):
        pieces = step.get(name) or []
        if isinstance(pieces, str):
            pieces = pieces.split()
        added = len(pieces)
        for piece in pieces:
            token = None
            if isinstance(piece, dict):
                token = piece.get("SpecialToken")
            if token and isinstance(special_tokens, dict):
                token_id = token["id"]
                special_token = special_tokens[token_id]
                ids = special_token["ids"]
                added += len(ids)
        most = max(most, added)
    return most
