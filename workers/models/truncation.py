"""Cut long texts before tokenization, without changing the tokens that are kept.

A row keeps the first tokens of a text, but a tokenizer reads all of it: tens of milliseconds for 100,000 characters.
No number of characters per token is safe to cut at: WordPiece makes one token of a word of any length, and spaces and
control characters may give none. So a text is cut where the cut provably changes no token before it (a boundary), and
its tokens are counted: if the start gives too few, more of the text is tokenized, up to all of it.

The boundary is between `ab` and the space of "ab c", where a, b and c are letters or digits of LETTERS, with spaces or
line feeds between. The start's tokens are the text's first tokens, because no step of the tokenizer reads across it:

1. Added tokens (such as [SEP]) are found from left to right. None that is accepted here contains a character followed
   by white space, so none spans the boundary. They strip only white space, which ends at b.
2. Normalizers replace characters one by one, or canonical sequences, or grapheme clusters (SentencePiece's map), or
   white space, or given words without it. None of these units contains both b and the space: neither letters of
   LETTERS nor a space ever combine with the character before. `_keeps_letters` checks that the normalizer turns each
   letter into text without spaces; the space stays one, or is merged with the spaces after it.
3. The first pre-tokenizer that is not confined to single characters separates words at white space, or by the regular
   expression of GPT-2 or Qwen: after a letter no branch takes white space, and the only look-ahead is for white space.
   What follows in a sequence reads each piece by itself.
4. The model (WordPiece, BPE, Unigram, WordLevel) reads each piece by itself, unless it samples.

Tokenizers with any other part, such as Gemma's and Llama's, which merge tokens across spaces, read texts as a whole. So
do those that keep a text's last tokens. tests/unit/test_truncation.py compares cut and whole texts of many scripts.
"""

import json
import re
from collections.abc import Callable, Sequence, Sized
from typing import Any, TypeVar

#: Characters to read at first for each token to keep. English has four to five.
CHARACTERS_PER_TOKEN = 5
#: Factor for the characters to read if there were too few tokens.
GROWTH = 4
IDEOGRAPHS = "一-鿕"
#: Letters and digits that never combine with a neighbour: Latin, Greek, Cyrillic, Hebrew, Arabic, kana, CJK, Hangul.
LETTERS = f"0-9A-Za-zÀ-ÖØ-öø-žΑ-ΡΣ-Ωα-ωА-яא-תء-غف-يぁ-ゖァ-ヺ{IDEOGRAPHS}가-힣"
#: Punctuation that may end a line of the text before the boundary.
CLOSING = ".,;:!?)\"'…”’。、！？」』）"
#: Normalizers that replace characters one by one or in canonical sequences, whatever their options.
LOCAL_NORMALIZERS = frozenset(
    {"BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Strip", "StripAccents"}
)
#: Regular expressions of normalizers that match only white space.
WHITE_SPACE = frozenset({" {2,}", r"\s{2,}|[\n\r\t]", r"\s+", " +"})
#: Pre-tokenizers that separate single characters from the others.
LOCAL_PRE_TOKENIZERS = frozenset({"Digits", "Punctuation"})
#: Pre-tokenizers that separate words at any white space.
WORD_PRE_TOKENIZERS = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})
#: Regular expressions of Qwen and Llama 3, which join punctuation to the line feeds after it.
WORD_EXPRESSIONS = frozenset(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
    for digits in (r"\p{N}", r"\p{N}{1,3}")
)
MODELS = frozenset({"BPE", "Unigram", "WordLevel", "WordPiece"})

Encoded = TypeVar("Encoded", bound=Sized)


def find_boundaries(rust: Any) -> re.Pattern[str] | None:
    """Return an expression that finds the places to cut texts at; None if the tokenizer must read whole texts.

    rust: a `tokenizers.Tokenizer`.
    """
    normalizers = _steps(rust.normalizer, "normalizers")
    pre_tokenizers = _steps(rust.pre_tokenizer, "pretokenizers")
    closing, feeds = _separation(rust, pre_tokenizers, normalizers)
    metaspace = any(step["type"] == "Metaspace" for step in pre_tokenizers)
    # BERT's normalizer puts spaces around ideographs, also at a text's end: they must not become tokens.
    spaced = any(step.get("handle_chinese_chars") for step in normalizers)
    drops_spaces = bool(pre_tokenizers) and pre_tokenizers[0]["type"] in WORD_PRE_TOKENIZERS
    added = [token.content for token in rust.get_added_tokens_decoder().values()]
    added += [_normalized(rust, content) for content in added]
    samples = getattr(rust.model, "dropout", None) or getattr(rust.model, "alpha", None)
    if (
        not feeds
        or samples
        or type(rust.model).__name__ not in MODELS
        or not all(_is_local(step, metaspace) for step in normalizers)
        or any(re.search(r"\S\s", content) for content in added)
        or (spaced and not drops_spaces)
        or not _keeps_letters(rust, spaced)
    ):
        return None
    boundary = rf"[{feeds}](?<=[{LETTERS}][{LETTERS}{re.escape(closing)}].)(?=[{feeds}]*[{LETTERS}])"
    if spaced and not re.search(f"[{IDEOGRAPHS}]", "".join(added)):
        boundary += f"|(?<=[{IDEOGRAPHS}])(?=[{IDEOGRAPHS}])"
    return re.compile(boundary, re.DOTALL)


def encode_starts(
    texts: Sequence[str],
    tokens: int,
    boundaries: Callable[[], re.Pattern[str] | None],
    encode: Callable[[list[int], list[str]], Sequence[Encoded]],
) -> list[Encoded]:
    """Encode only as much of each text as gives `tokens` tokens.

    boundaries: returns what `find_boundaries` found; called if a text is long, because the search takes 50 ms.
    encode: encodes starts of the texts with the given indices. The length of a result is its number of tokens; those
    beyond `tokens` may be missing.
    """
    results: dict[int, Encoded] = {}
    pending, characters = list(range(len(texts))), tokens * CHARACTERS_PER_TOKEN
    while pending:
        starts = [_start(texts[index], characters, boundaries) for index in pending]
        results |= zip(pending, encode(pending, starts), strict=True)
        pending = [
            index
            for index, start in zip(pending, starts, strict=True)
            if len(start) < len(texts[index]) and len(results[index]) < tokens
        ]
        characters *= GROWTH
    return [results[index] for index in range(len(texts))]


def _start(text: str, characters: int, boundaries: Callable[[], re.Pattern[str] | None]) -> str:
    if len(text) <= characters:
        return text
    found = boundaries()
    boundary = found.search(text, characters) if found else None
    return text[: boundary.start()] if boundary else text


def _steps(part: Any, kind: str) -> list[dict[str, Any]]:
    """Return the configurations of a normalizer or pre-tokenizer: of each step if it is a sequence."""
    if part is None:
        return []
    try:
        config = json.loads(part.__getstate__())
    except Exception:  # written in Python: raises whatever it likes
        return [{"type": "Custom"}]
    pending, steps = [config], []
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending[:0] = step[kind]
        else:
            steps.append(step)
    return steps


def _separation(rust: Any, steps: list[dict[str, Any]], normalizers: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the punctuation that may precede a boundary, and the white space that may follow it (empty: none)."""
    words = next((step for step in steps if step["type"] not in LOCAL_PRE_TOKENIZERS), None)
    if words is None:
        return "", ""
    kind = words["type"]
    if kind in WORD_PRE_TOKENIZERS or (kind == "ByteLevel" and words["use_regex"]):
        return CLOSING, " \n"
    if kind == "Metaspace" and words["split"] and words["replacement"] == "▁":
        return CLOSING, " \n" if _normalized(rust, "a\nb") == _normalized(rust, "a b") else " "
    if kind == "Split" and words["pattern"].get("Regex") in WORD_EXPRESSIONS:
        whole = words["behavior"] == "Isolated" and not words["invert"]
        return "", " \n" if whole and {step["type"] for step in normalizers} <= {"NFC"} else ""
    return "", ""


def _is_local(normalizer: dict[str, Any], metaspace: bool) -> bool:
    """Return whether a normalizer keeps boundaries: reads nothing across them, and leaves white space there."""
    if normalizer["type"] != "Replace":
        return normalizer["type"] in LOCAL_NORMALIZERS
    pattern, content = normalizer["pattern"], normalizer["content"]
    if "Regex" in pattern:
        return pattern["Regex"] in WHITE_SPACE and (content == " " or (metaspace and content == "▁"))
    return not re.search(r"\s", pattern["String"]) and re.fullmatch("[!-~]+", content) is not None


def _keeps_letters(rust: Any, spaced: bool) -> bool:
    """Return whether the normalizer turns LETTERS and CLOSING into text that is not empty and has no white space.

    spaced: accept spaces around letters.
    """
    ranges = re.findall("(.)-(.)", LETTERS)
    letters = [chr(code) for first, last in ranges for code in range(ord(first), ord(last) + 1)] + list(CLOSING)
    normalized = _normalized(rust, " 0 ".join(letters))
    words = normalized.split()
    # A letter without text, or with white space, would shift all separators after it.
    kept = len(words) == 2 * len(letters) - 1 and set(words[1::2]) == {"0"}
    return kept and (spaced or normalized == " ".join(words))


def _normalized(rust: Any, text: str) -> str:
    return str(rust.normalizer.normalize_str(text)) if rust.normalizer else text
