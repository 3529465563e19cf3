"""engines/separation.py, engines/network.py: scores of every family equal transformers' for each
row by itself.

Models whose scores depend on other rows are refused. Rows are as long as the model's positions
allow.
"""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from feedmill.shared.errors import ModelError
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers.fixed_labels import SequenceClassifier
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.device import select_device
from feedmill.workers.models.engines import onnx_engine
from feedmill.workers.models.engines.network import DECODER_TYPES
from feedmill.workers.models.engines.packing import LOGITS
from feedmill.workers.models.engines.separation import (
    FURTHER_LENGTHS,
    SHORT_LENGTHS,
    check_rows,
)
from feedmill.workers.models.engines.torch_engine import create_engine
from feedmill.workers.models.tokenizer import Tokens
from feedmill.workers.models.weights import Weights
from tests.fakes.families import make_family
from tests.fakes.graphs import write_graph_that_reads_padding
from tests.fakes.models import FP32, NLI, make_model, scores_of
from tests.support import ROOT

#: Families whose positions start after the padding token's id, which is 1.
OFFSET_FAMILIES = (
    "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke",
    "markuplm", "mpnet",
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
#: Families that are measured when they are loaded, some of them with experts.
MEASURED_FAMILIES = (
    "albert", "biogpt", "ctrl", "gpt_bigcode", "jamba", "mbart", "mixtral", "mobilebert", "mpt",
    "perceiver",
    "qwen3_5_text", "rembert", "roformer", "squeezebert", "t5", "xlm",
)  # fmt: skip
#: Families in which padding changes the outputs of real tokens.
DEPENDENT_FAMILIES = (
    "canine",
    "convbert",
    "fnet",
    "nystromformer",
    "reformer",
    "xlnet",
    "yoso",
)
#: Families that `make test` has of those above and of DECODER_TYPES. `make long` has them all.
USUAL_FAMILIES = (
    "albert", "biogpt", "bloom", "canine", "convbert", "fnet", "jamba", "llama", "longformer",
    "luke", "mpnet",
    "opt", "qwen3_5_text", "roberta", "t5", "xlnet",
)  # fmt: skip
POSITIONS = 64
LABELS = ["sports", "technology", "food"]
TEXTS = [
    "The match ended in a draw.",
    "x",
    "My laptop will not boot since the last update, what should I try?",
    "bread<|endoftext|>",
    "bread<|endoftext|><|endoftext|>",
    "<|endoftext|>",
]


def each_of(families: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize a test by family; families beside the usual ones are long tests."""
    cases = []
    for family in families:
        marks = () if family in USUAL_FAMILIES else (pytest.mark.long,)
        cases.append(pytest.param(family, marks=marks))
    return pytest.mark.parametrize("family", cases)


def weights(folder: Path) -> Weights:
    return Weights(folder.name, folder, None, "00")


def rows_of(*lengths: int) -> list[Tokens]:
    """Return rows that begin and end with the special tokens of `make_family`."""
    source = random.Random(3)
    return [
        Tokens([0, *(source.randrange(5, 300) for _ in range(length - 2)), 2])
        for length in lengths
    ]


def alone(folder: Path, rows: list[Tokens]) -> torch.Tensor:
    """Return each row's logits, computed by transformers one row at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        return torch.cat(
            [model(input_ids=torch.tensor([row.ids])).logits for row in rows]
        )


def assert_scores_equal(folder: Path, limit: int) -> None:
    engine, tokenizer = create_engine(weights(folder), FP32, Settings(), LOGITS, 200)
    assert tokenizer.max_tokens == limit
    rows = rows_of(6, 17, limit)
    assert torch.allclose(engine.forward(rows), alone(folder, rows), atol=1e-4)


@each_of(OFFSET_FAMILIES)
def test_reads_rows_up_to_the_last_position(tmp_path: Path, family: str) -> None:
    assert_scores_equal(make_family(family, tmp_path, POSITIONS), POSITIONS - 2)


@each_of(sorted(DECODER_TYPES))
def test_decoders_match_transformers(tmp_path: Path, family: str) -> None:
    assert_scores_equal(
        make_family(family, tmp_path, POSITIONS),
        200 if family == "bloom" else POSITIONS,
    )


@each_of(MEASURED_FAMILIES)
def test_does_not_refuse_models_with_independent_rows(
    tmp_path: Path, family: str
) -> None:
    assert_scores_equal(
        make_family(family, tmp_path, POSITIONS), 200 if family == "t5" else POSITIONS
    )


@each_of(DEPENDENT_FAMILIES)
def test_refuses_models_whose_scores_depend_on_other_posts(
    tmp_path: Path, family: str
) -> None:
    folder = make_family(family, tmp_path, POSITIONS)
    with pytest.raises(
        ModelError, match=r"other scores .* Use a model of another architecture"
    ):
        create_engine(weights(folder), FP32, Settings(), LOGITS, 200)


ROTARY: dict[str, Any] = {
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("family", "positions", "options"),
    [
        ("big_bird", 1024, {"block_size": 16, "num_random_blocks": 1}),
        (
            "phi3",
            256,
            {
                "original_max_position_embeddings": 32,
                "rope_parameters": ROTARY
                | {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 4,
                    "long_factor": [4.0] * 4,
                },
            },
        ),
    ],
)
def test_refuses_models_that_change_with_the_length(
    tmp_path: Path, family: str, positions: int, options: dict[str, Any]
) -> None:
    """They attend or count positions differently in long rows, and are of families that are not
    refused otherwise.
    """
    folder = make_family(family, tmp_path, positions, **options)
    with pytest.raises(ModelError, match="other scores"):
        create_engine(weights(folder), FP32, Settings(), LOGITS, positions)


def test_does_not_refuse_convolutions_over_masked_embeddings(tmp_path: Path) -> None:
    folder = make_family(
        "deberta-v2", tmp_path, POSITIONS, conv_kernel_size=3, conv_act="gelu"
    )
    assert_scores_equal(folder, POSITIONS)


def test_measures_embeddings_and_half_precision(tmp_path: Path) -> None:
    folder = make_family("convbert", tmp_path, POSITIONS)
    with pytest.raises(ModelError, match="other scores"):
        create_engine(
            weights(folder),
            FP32._replace(dtype=torch.bfloat16),
            Settings(),
            LOGITS,
            POSITIONS,
        )
    with pytest.raises(ModelError, match="other scores"):
        create_engine(weights(folder), FP32, Settings(), ("mean",), POSITIONS)


def test_measuring_keeps_the_precision(tmp_path: Path) -> None:
    folder = make_family("albert", tmp_path, POSITIONS)
    engine: Any
    engine, _ = create_engine(
        weights(folder),
        FP32._replace(dtype=torch.bfloat16),
        Settings(),
        LOGITS,
        POSITIONS,
    )
    assert {parameter.dtype for parameter in engine.network.parameters()} == {
        torch.bfloat16
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measures_plugged_in_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples" / "extending"))
    settings = Settings(engine="logged:LoggedEngine")
    device = FP32._replace(dtype=dtype)
    with pytest.raises(ModelError, match="other scores"):
        create_engine(
            weights(make_family("convbert", tmp_path / "a", POSITIONS)),
            device,
            settings,
            LOGITS,
            POSITIONS,
        )
    create_engine(
        weights(make_family("bert", tmp_path / "b", POSITIONS)),
        device,
        settings,
        LOGITS,
        POSITIONS,
    )


@pytest.mark.parametrize("exports", [False, pytest.param(True, marks=pytest.mark.long)])
def test_measures_the_onnx_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exports: bool
) -> None:
    """A model that is not known to keep rows apart is refused if its graph does not.

    An export takes seconds; a graph written by hand differs in nothing that is measured.
    """
    if not exports:
        graph = write_graph_that_reads_padding(tmp_path / "model.onnx", len(LABELS))
        monkeypatch.setattr(onnx_engine, "exported", lambda *_: graph)
    folder = make_family("convbert", tmp_path / "model", POSITIONS)
    settings = Settings(
        model=str(folder),
        cache_folder=tmp_path / "cache",
        engine="onnx",
        classifier="sequence",
    )
    with pytest.raises(ModelError, match="other scores"):
        load_classifier(settings, select_device("cpu", settings.dtype, settings.engine))


def test_names_the_limit_of_a_model_that_fails_on_long_rows() -> None:
    def forward(rows: Any) -> torch.Tensor:
        if max(len(row.ids) for row in rows) > 50:
            raise IndexError("index out of range in self")
        return torch.ones(len(rows), 3)

    def encode(texts: Any) -> list[Tokens]:
        return rows_of(*(64 for _ in texts))

    with pytest.raises(
        ModelError, match=r"custom fails with 64 tokens.* FEEDMILL_MAX_TOKENS"
    ):
        check_rows("custom", forward, encode, 64)


def test_rounding_is_no_dependence() -> None:
    """Outputs near 0, and an expert that another token meets by chance in the longest row."""
    source = torch.Generator().manual_seed(3)

    def forward(rows: Any) -> torch.Tensor:
        outputs = torch.full((len(rows), 1), 1e-4)
        outputs += 1e-6 * torch.randn(outputs.shape, generator=source)
        return outputs

    check_rows("custom", forward, lambda texts: rows_of(*(64 for _ in texts)), 64)


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
@pytest.mark.parametrize("own", [True, False])
def test_decoders_read_the_last_token(
    tmp_path: Path, architecture: str, own: bool
) -> None:
    """With a padding token in the configuration, the last token that is none; else the last one,
    whatever it is.
    """
    folder = make_model(architecture, tmp_path, NLI, pad_token_id=0 if own else None)
    classifier = SequenceClassifier(weights(folder), FP32, Settings())
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    expected = []
    for row in classifier.prepare(TEXTS, classifier.label_set(ClassifyOptions())):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([row[0].tokens.ids])).logits[0]
        expected.append(
            dict(zip(NLI.values(), logits.softmax(0).tolist(), strict=True))
        )
    for scores, their_scores in zip(
        scores_of(classifier, TEXTS), expected, strict=True
    ):
        assert scores == pytest.approx(their_scores, abs=1e-4)


@pytest.mark.parametrize("alike", [1, 5])
def test_one_row_that_padding_leaves_alone_hides_no_other(alike: int) -> None:
    """Mixtures of experts may change a single row because of rounding; a model that changes
    several is refused.
    """
    lengths = sorted((*SHORT_LENGTHS, *FURTHER_LENGTHS))
    changing = lengths[: len(lengths) - alike]

    def forward(rows: Any) -> torch.Tensor:
        longest = max(len(row.ids) for row in rows)
        outputs = []
        for row in rows:
            length = len(row.ids)
            outputs.append(float(longest if length in changing else length))
        return torch.tensor(outputs)[:, None]

    def encode(texts: Any) -> list[Tokens]:
        return rows_of(*[37 for _ in texts])

    if len(changing) > 1:
        with pytest.raises(ModelError, match="other scores"):
            check_rows("fake", forward, encode, 37)
    else:
        check_rows("fake", forward, encode, 37)


def test_finds_padding_that_attention_hides_from_some_rows(tmp_path: Path) -> None:
    """MobileBERT reads each token's neighbours, and so the padding, if its configuration names no
    padding token.
    """
    for seed in range(3):
        folder = make_family(
            "mobilebert",
            tmp_path / str(seed),
            POSITIONS,
            pad_token_id=None,
            eos_token_id=seed,
        )
        with pytest.raises(ModelError, match="other scores"):
            create_engine(weights(folder), FP32, Settings(), LOGITS, 200)
