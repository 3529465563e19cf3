"""workers/models/tokenizer.py: of a long text, the start is tokenized, with the same tokens as the
whole text.
"""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some
from tokenizers import Tokenizer, models, normalizers, trainers

from feedmill.shared.settings import EMBEDDED_MODEL
from feedmill.workers.models.tokenizer import (
    CHARACTERS_PER_TOKEN,
    EMBEDDED_TOKENIZER_SETTINGS,
    encode_starts,
    load_tokenizer,
)
from feedmill.workers.models.tokenizer import Tokenizer as ModelTokenizer
from feedmill.workers.models.weights import Weights, locate
from tests.fakes.models import make_model

#: Words, white space and characters that tokenizers treat specially.
PIECES = [
    "The", "match", "keeper", "I", "can't", "we'll", "laptop", "1234", "x" * 150, "-" * 30, " ",
    " ", "\n", "\n\n",
    " " * 40, "\r\n", "\t", "\u00a0", "\u3000", "\x0b", ".", "!?", "...", "<b>",
    "https://example.org/?a=b", "你好",
    "汉字测试", "。", "カタカナ", "ﾊﾟ", "가나다", "e\u0301", "\u0301", "Å", "Σας", "ﬁ",
    "שלום", "مرحبا",
    "กำ", "क्षि",
    "👩‍👩‍👧", "👍🏽", "\u200b", "\ufeff", "\x00", "[SEP]", "<mask>", "</s>", "▁",
]  # fmt: skip
TEXTS = some.lists(
    some.sampled_from(PIECES) | some.text(max_size=3), min_size=1, max_size=30
).map("".join)


@pytest.mark.parametrize("architecture", ["bert", "bart", "deberta-v2"])
@settings(max_examples=20)
@given(text=TEXTS)
@example(text="x" * 190)
@example(text="ab" + " " * 190)
@example(text="x" * 300 + "match " * 20)
def test_rows_equal_those_of_whole_texts(
    tokenizers: dict[str, tuple[ModelTokenizer, Tokenizer]],
    architecture: str,
    text: str,
) -> None:
    ours, library = tokenizers[architecture]
    long = f"{text} " * 20
    library.enable_truncation(16, strategy="only_first")
    assert ours.encode([long])[0].ids == library.encode(long).ids
    assert (
        ours.pair(*ours.parts([long, "food"])).ids == library.encode(long, "food").ids
    )


@pytest.mark.parametrize("spaces", [1, 2, 3])
@pytest.mark.parametrize("kept", [4, 16, 64])
def test_tokens_of_long_words_are_those_of_whole_texts(spaces: int, kept: int) -> None:
    """Words of some ten characters for each token: the last token kept may be the last before the
    cut.
    """
    words = ["electroencephalograph", "internationalization"]
    library = Tokenizer(models.BPE())
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.train_from_iterator(
        [f"{spaces * ' '}".join(words) + "   end"] * 9,
        trainers.BpeTrainer(vocab_size=400),
    )
    library.enable_truncation(kept)
    for start in range(2 * CHARACTERS_PER_TOKEN):
        text = (
            "x " * (start % 4)
            + "y" * start
            + " "
            + (" " * spaces).join(words * kept * 2)
        )
        (encoding,) = encode_starts(library, [text], kept, special_tokens=True)
        assert encoding.ids == library.encode(text).ids


@pytest.fixture(scope="module")
def tokenizers(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[ModelTokenizer, Tokenizer]]:
    """Return our tokenizer of each architecture, for rows of 16 tokens, and the library's."""
    found = {}
    for architecture in ("bert", "bart", "deberta-v2"):
        folder = make_model(architecture, tmp_path_factory.mktemp(architecture))
        library = Tokenizer.from_file(str(folder / "tokenizer.json"))
        library.no_padding()
        found[architecture] = (
            ModelTokenizer(Weights("m", folder, None, "00"), 16),
            library,
        )
    return found


def test_embedded_tokenizer_equals_transformers() -> None:
    weights = locate(EMBEDDED_MODEL)
    ours, library = ModelTokenizer(weights, 512), load_tokenizer(weights)
    rust = library.backend_tokenizer
    rust.no_padding()
    rust.enable_truncation(512, strategy="only_first")
    assert ours._rust.to_str() == rust.to_str()
    assert {
        name: getattr(library, name) for name in EMBEDDED_TOKENIZER_SETTINGS
    } == EMBEDDED_TOKENIZER_SETTINGS


def test_left_truncation_reads_whole_texts(tmp_path: Path) -> None:
    folder = make_model("bert", tmp_path)
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("{", '{"truncation_side": "left",', 1))
    ours = ModelTokenizer(Weights("m", folder, None, "00"), 8)
    text = "match " * 500 + "keeper laptop"
    assert ours.encode([text]) == ours.encode(["match match match match keeper laptop"])
    assert ours.pair(*ours.parts([text, "food"])) == ours.pair(
        *ours.parts([("match match keeper laptop"), "food"])
    )
