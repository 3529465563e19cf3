"""workers/models/truncation.py: a text's start gives the same first tokens as the whole text."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from tests.fakes.models import CORPUS, make_model
from workers.models import tokenizer as tokenizer_module
from workers.models.tokenizer import Tokenizer as ModelTokenizer
from workers.models.truncation import WORD_EXPRESSIONS, encode_starts, find_boundaries
from workers.models.weights import EMBEDDED_MODEL, Weights, locate

#: Words, white space and characters that tokenizers treat specially.
PIECES = [
    "The", "match", "keeper", "I", "can't", "we'll", "it's", "laptop", "1234", "x" * 150, "-" * 30,
    " ", " ", " ", "\n", "\n", "  ", "\n\n", " " * 40, "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\x0b",
    ".", ",", "!?", "...", "'", '"', "``", "''", "#", "<b>", "https://example.org/?a=b",
    "你好", "汉字测试", "。", "」", "！", "かな", "カタカナ", "パ", "ﾊﾟ", "가나다", "ᄀ", "ᅡ", "ᆨ", "\u1160", "\u3164",
    "e\u0301", "\u0301", "\u0308", "Å", "ñ", "Σας", "İ", "ﬁ", "½", "Ａ", "ﷺ", "שלום", "مرحبا", "\u0600", "\u0651", "กำ",
    "क्षि", "👩‍👩‍👧", "👍🏽", "🇩🇪", "🙂", "\u200b", "\u200d", "\u200e", "\u202e", "\u2060", "\ufeff", "\xad", "\x00",
    "\x07", "[SEP]", "<mask>", "word", "</s>", "▁",
]  # fmt: skip
ANY = some.lists(some.sampled_from(PIECES) | some.text(max_size=3), max_size=30).map("".join)
#: Places at which most tokenizers let a text be cut.
PLACES = some.sampled_from(
    ["ab cd", "The\n\nmatch", "you'll  x", "12 34", "здесь\nи", "你好 x", "ab。\n好", "汉字", "ab! x"]
)
TEXTS = some.lists(some.tuples(ANY, PLACES), min_size=1, max_size=4).map(lambda parts: "".join(sum(parts, ())))
#: Added tokens that absorb the spaces around them, or depend on the characters around them.
ADDED = [
    AddedToken("[SEP]", special=True),
    AddedToken("<mask>", special=True, lstrip=True, rstrip=True),
    AddedToken("word", single_word=True, normalized=True),
]
#: ModernBERT has tokens for spaces.
SPACES = [AddedToken("  ", normalized=True), AddedToken("    ", normalized=True)]


def tokenizer(model: str, pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    """Train a tokenizer on the corpus."""
    made: Any
    trainer: Any
    if model == "WordPiece":
        made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"])
    elif model == "BPE":
        made = Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    else:
        made = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=["[UNK]"], unk_token="[UNK]")
    made.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        made.normalizer = normalizer
    made.train_from_iterator([*CORPUS, " ".join(PIECES)], trainer)
    made.add_tokens([*ADDED, *SPACES] if model == "BPE" else ADDED)
    return made  # type: ignore[no-any-return]


def split(expression: str) -> Any:
    """Return a pre-tokenizer like Qwen's."""
    words = pre_tokenizers.Split(Regex(expression), "isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def spaces(pattern: str, content: str = " ") -> Any:
    return normalizers.Replace(Regex(pattern), content)


def metaspace(first: Any, **options: Any) -> Any:
    return pre_tokenizers.Sequence([first, pre_tokenizers.Metaspace(**options)])


QWEN, LLAMA = sorted(WORD_EXPRESSIONS, key=len)
#: Name -> a function that makes the tokenizer. Each has the parts of a published one.
CUT: dict[str, Callable[[], Tokenizer]] = {
    "bert": lambda: tokenizer("WordPiece", pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()),
    "bert-cased": lambda: tokenizer(
        "WordPiece",
        pre_tokenizers.BertPreTokenizer(),
        normalizers.BertNormalizer(lowercase=False, handle_chinese_chars=False, clean_text=False),
    ),
    "roberta": lambda: tokenizer("BPE", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "modernbert": lambda: tokenizer("BPE", pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC()),
    "decomposed": lambda: tokenizer("BPE", pre_tokenizers.ByteLevel(), normalizers.NFKD()),
    "qwen": lambda: tokenizer("BPE", split(QWEN), normalizers.NFC()),
    "llama-3": lambda: tokenizer("BPE", split(LLAMA)),
    "xlm-roberta": lambda: tokenizer(
        "Unigram",
        metaspace(pre_tokenizers.WhitespaceSplit()),
        normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), spaces(" {2,}")]),
    ),
    "camembert": lambda: tokenizer(
        "Unigram",
        pre_tokenizers.Metaspace(prepend_scheme="first"),
        normalizers.Sequence(
            [normalizers.Nmt(), normalizers.NFKC(), normalizers.Strip(left=False), spaces(" {2,}", "▁")]
        ),
    ),
    "deberta-v2": lambda: tokenizer(
        "Unigram",
        metaspace(pre_tokenizers.Punctuation()),
        normalizers.Sequence([spaces(r"\s{2,}|[\n\r\t]"), normalizers.NFC(), normalizers.Strip(left=False)]),
    ),
    "albert": lambda: tokenizer(
        "Unigram",
        pre_tokenizers.Metaspace(),
        normalizers.Sequence(
            [
                normalizers.Replace("``", '"'), normalizers.Replace("''", '"'), normalizers.NFKD(),
                normalizers.StripAccents(), normalizers.Lowercase(), spaces(" {2,}"),
            ]
        ),
    ),
}  # fmt: skip
UNCUT: dict[str, Callable[[], Tokenizer]] = {
    "gemma": lambda: tokenizer("BPE", pre_tokenizers.Split(" ", "merged_with_previous"), normalizers.Replace(" ", "▁")),
    "metaspace without splits": lambda: tokenizer("Unigram", pre_tokenizers.Metaspace(split=False)),
    "no pre-tokenizer": lambda: tokenizer("BPE", None),
    "unknown expression": lambda: tokenizer("BPE", split(r"\w+\s\w+|.")),
    "bytes without words": lambda: tokenizer("BPE", pre_tokenizers.ByteLevel(use_regex=False)),
    "letters to spaces": lambda: tokenizer(
        "WordPiece", pre_tokenizers.BertPreTokenizer(), normalizers.Replace("k", "")
    ),
    "spaces around ideographs as tokens": lambda: tokenizer(
        "Unigram", pre_tokenizers.Metaspace(), normalizers.Sequence([normalizers.BertNormalizer(), spaces(" {2,}")])
    ),
    "removed words": lambda: tokenizer(
        "WordPiece", pre_tokenizers.BertPreTokenizer(), normalizers.Replace("match", "")
    ),
    "removed spaces": lambda: tokenizer("WordPiece", pre_tokenizers.BertPreTokenizer(), spaces(r"\s+", "")),
}


@pytest.fixture(scope="module", params=list(CUT))
def cut(request: pytest.FixtureRequest) -> tuple[Tokenizer, re.Pattern[str]]:
    """Return a tokenizer and the boundaries at which its texts may be cut."""
    made = CUT[request.param]()
    boundaries = find_boundaries(made)
    assert boundaries is not None
    return made, boundaries


def ids(rust: Tokenizer, text: str) -> list[int]:
    return rust.encode(text, add_special_tokens=False).ids


@settings(max_examples=30)
@given(text=TEXTS)
def test_text_before_a_boundary_gives_the_first_tokens(cut: tuple[Tokenizer, re.Pattern[str]], text: str) -> None:
    rust, boundaries = cut
    whole = ids(rust, text)
    for boundary in boundaries.finditer(text):
        start = ids(rust, text[: boundary.start()])
        assert start == whole[: len(start)]


def test_finds_boundaries_between_words(cut: tuple[Tokenizer, re.Pattern[str]]) -> None:
    boundaries = cut[1]
    assert [found.start() for found in boundaries.finditer("ab cd  ef\u0301 g h\n")] == [2, 5]
    assert boundaries.search("קי ab") is not None
    assert boundaries.search(" \u0301a\u0301 \u200bb \u0308c\r\n") is None


@pytest.mark.parametrize("name", UNCUT)
def test_reads_whole_texts_where_tokens_could_change(name: str) -> None:
    assert find_boundaries(UNCUT[name]()) is None


@pytest.mark.parametrize("content", ["a b", "\u00e9\u00a0x"])
def test_reads_whole_texts_with_tokens_across_words(content: str) -> None:
    made = CUT["roberta"]()
    assert find_boundaries(made) is not None
    made.add_tokens([AddedToken(content)])
    assert find_boundaries(made) is None


def test_reads_whole_texts_with_random_merges() -> None:
    made = CUT["roberta"]()
    made.model.dropout = 0.1
    assert find_boundaries(made) is None


def test_reads_more_of_texts_with_few_tokens() -> None:
    texts = ["a" * 3000, "word " * 1000, " " * 900 + "word word " * 200, "short", "ab " + " " * 5000]
    read: list[list[int]] = []

    def encode(indices: list[int], starts: list[str]) -> list[list[str]]:
        read.append(indices)
        return [start.split()[:20] for start in starts]

    found = encode_starts(texts, 20, lambda: re.compile(r"(?<=\w) (?=\w)"), encode)
    assert found == [text.split()[:20] for text in texts]
    assert read[0] == [0, 1, 2, 3, 4]
    assert 1 not in read[1]
    assert 2 in read[1]


@pytest.mark.parametrize("architecture", ["bert", "bart", "deberta-v2"])
@settings(max_examples=20)
@given(text=TEXTS)
def test_rows_equal_those_of_whole_texts(
    tokenizers: dict[str, tuple[ModelTokenizer, Tokenizer]], architecture: str, text: str
) -> None:
    ours, library = tokenizers[architecture]
    long = f"{text} " * 20
    library.enable_truncation(16, strategy="only_first")
    assert ours.encode([long])[0].ids == library.encode(long).ids
    assert ours.encode([(long, "food")])[0].ids == library.encode(long, "food").ids
    library.no_truncation()
    whole = library.encode(long, add_special_tokens=False).ids
    (part,) = ours.parts([long], 10)
    assert ours.cut(part, 10) == whole[:10]
    assert ours.parts([long]) == [whole]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ModelTokenizer, Tokenizer]]:
    """Return our tokenizer of each architecture, for rows of 16 tokens, and the library's."""
    found = {}
    for architecture in ("bert", "bart", "deberta-v2"):
        folder = make_model(architecture, tmp_path_factory.mktemp(architecture))
        library = Tokenizer.from_file(str(folder / "tokenizer.json"))
        library.no_padding()
        found[architecture] = ModelTokenizer(Weights("m", folder, None, "00"), 16), library
    return found


def test_tokenizes_only_the_start_of_long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    given_lengths: list[int] = []
    encode_all = encode_starts

    def recorded(texts: Any, tokens: Any, boundaries: Any, encode: Any) -> Any:
        def measured(indices: list[int], starts: list[str]) -> Any:
            given_lengths.extend(map(len, starts))
            return encode(indices, starts)

        return encode_all(texts, tokens, boundaries, measured)

    monkeypatch.setattr(tokenizer_module, "encode_starts", recorded)
    ours = ModelTokenizer(locate(EMBEDDED_MODEL), 64)
    given_lengths.clear()
    assert len(ours.encode(["The match ended in a draw. " * 4000])[0].ids) == 64
    assert len(ours.parts(["汉字测试。" * 10_000], 64)[0]) >= 64
    assert sum(given_lengths) < 2000


def test_left_truncation_reads_whole_texts(tmp_path: Path) -> None:
    folder = make_model("bert", tmp_path)
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("{", '{"truncation_side": "left",', 1))
    ours = ModelTokenizer(Weights("m", folder, None, "00"), 8)
    text = "match " * 500 + "keeper laptop"
    assert ours.encode([text])[0].ids[1:-1] == ours.parts(["match match match match keeper laptop"])[0]
