"""engines/torch_engine.py: outputs do not depend on other rows or layout; device errors are
classified.
"""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BartForSequenceClassification,
)

from feedmill.shared.errors import DeviceFull, DeviceLost
from feedmill.shared.settings import EMBEDDED_MODEL
from feedmill.workers.models.device import Device
from feedmill.workers.models.engines import device_errors, packing, torch_engine
from feedmill.workers.models.engines.bert import Bert
from feedmill.workers.models.engines.network import (
    PADDED_TYPES,
    Network,
    max_row_tokens,
)
from feedmill.workers.models.engines.packing import LOGITS, PACKABLE_TYPES
from feedmill.workers.models.engines.torch_engine import (
    REORDERED_TYPES,
    ReorderedLinear,
    TorchEngine,
    can_reorder,
    reorder_linear_layers,
    use_attention_without_plans,
)
from feedmill.workers.models.shapes import EXACT, FEW
from feedmill.workers.models.tokenizer import Tokens
from feedmill.workers.models.weights import Weights, locate, read_config
from tests.fakes.models import ARCHITECTURES, FP32, NLI, TYPED, cases_of, make_model
from tests.support import long_cases

BF16 = FP32._replace(dtype=torch.bfloat16)


@pytest.fixture(
    scope="module",
    params=cases_of(ARCHITECTURES.keys() - {"bart", "gpt2"}),
)
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A small encoder of each architecture, with random weights."""
    return make_model(request.param, tmp_path_factory.mktemp("models") / request.param)


def weights(folder: Path) -> Weights:
    return Weights(folder.name, folder, None, "00")


def engine_of(
    folder: Path, reads: tuple[str, ...] = ("mean", "cls"), **options: Any
) -> TorchEngine:
    return TorchEngine(weights(folder), FP32, reads, 1, 200, **options)


def rows_of(*lengths: int) -> list[Tokens]:
    source = random.Random(3)
    return [
        Tokens([source.randrange(5, 60) for _ in range(length)]) for length in lengths
    ]


def alone(folder: Path, rows: list[Tokens]) -> torch.Tensor:
    """Return each row's mean and first hidden state, computed by transformers one row at a
    time.
    """
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        states = [
            model(input_ids=torch.tensor([row.ids])).last_hidden_state for row in rows
        ]
        return torch.cat(
            [torch.cat([of_row.mean(1), of_row[:, 0]], dim=-1) for of_row in states]
        )


@pytest.mark.parametrize(
    "lengths", [(2, 5, 5, 9, 40), *long_cases((3, 3, 3), (40, 2, 9, 2, 9), (1,))]
)
def test_other_rows_do_not_change_outputs(
    folder: Path, lengths: tuple[int, ...]
) -> None:
    rows = rows_of(*lengths)
    assert torch.allclose(
        engine_of(folder).forward(rows), alone(folder, rows), atol=1e-4
    )


def test_accepts_the_longest_row(folder: Path) -> None:
    most = max_row_tokens(weights(folder), 300)
    # its positions start after the padding token's
    if folder.name in ("mpnet", "roberta", "xlm-roberta"):
        assert most == 200 - read_config(weights(folder)).pad_token_id - 1
    else:
        assert most == (
            300 if folder.name == "deberta-v2" else 200
        )  # its positions are relative
    assert engine_of(folder).forward(rows_of(most, 3)).isfinite().all()


@pytest.mark.parametrize("architecture", ["bert", "modernbert"])
@pytest.mark.parametrize(
    "lengths",
    [
        (1, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33),
        (40, 2, 9, 2, 9, 70, 69, 71, 100),
        (48, 48, 64, 100),
    ],
)
def test_padding_within_groups_does_not_change_outputs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    lengths: tuple[int, ...],
) -> None:
    """As in bfloat16, but in float32, to compare exactly."""
    monkeypatch.setattr(packing, "MAX_PADDED_LENGTH", 70)
    folder = make_model(architecture, tmp_path)
    engine = engine_of(folder)
    engine._length_step, engine._token_step = 16, 64
    rows = rows_of(*lengths)
    assert torch.allclose(engine.forward(rows), alone(folder, rows), atol=1e-4)


def in_a_loop(
    query: Any,
    key: Any,
    value: Any,
    starts: Any,
    _: Any,
    most: int,
    __: int,
    **given: Any,
) -> torch.Tensor:
    """Compute what torch's kernel for rows of any length does, in another way: one row after the
    other.
    """
    (left, right), scale = (
        given["window_size"],
        given["scale"] or query.shape[-1] ** -0.5,
    )
    found = []
    for start, end in pairwise(starts.tolist()):
        assert end - start <= most
        q, k, v = (states[start:end].transpose(0, 1) for states in (query, key, value))
        away = torch.arange(end - start)[None] - torch.arange(end - start)[:, None]
        hidden = ((left >= 0) & (-away > left)) | ((right >= 0) & (away > right))
        scores = (scale * q @ k.transpose(1, 2)).masked_fill(hidden, float("-inf"))
        found.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("architecture", cases_of(PACKABLE_TYPES))
def test_one_kernel_for_all_rows_does_not_change_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """As on a GPU."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", in_a_loop)

    def grouped(lengths: list[int], *_: object) -> list[packing.Group]:
        return [
            packing.single_group(lengths, -sum(lengths) % 64, lambda tensor: tensor)
        ]

    monkeypatch.setattr(torch_engine, "groups_of", grouped)
    folder = make_model(architecture, tmp_path)
    engine = engine_of(folder)
    engine._token_step = 64
    for lengths in ((3, 3, 3), (2, 5, 5, 9, 40), (150, 2, 9), (1,), (62, 64)):
        rows = rows_of(*lengths)
        assert torch.allclose(engine.forward(rows), alone(folder, rows), atol=1e-4)
    assert engine._runs()
    refuse = Mock(side_effect=RuntimeError("head_size must be a multiple of 8"))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", refuse)
    assert not engine._runs()


@pytest.mark.parametrize(
    "lengths", [(3, 3, 194, 195, 2), *long_cases((3, 3, 3), (2, 5, 5, 9, 40), (195,))]
)
def test_padding_to_few_shapes_does_not_change_outputs(
    folder: Path, lengths: tuple[int, ...]
) -> None:
    limit = max_row_tokens(weights(folder), 200)
    rows = rows_of(*lengths)
    engine = TorchEngine(weights(folder), FP32, ("mean", "cls"), 1, limit, packed=False)
    engine._shapes = FEW
    computed: list[torch.Size] = []
    engine.network.register_forward_pre_hook(
        lambda _, given: computed.append(given[0].shape)
    )
    outputs = engine.forward(rows)
    assert computed == [
        torch.Size((FEW.rows(len(lengths)), min(FEW.length(max(lengths)), limit)))
    ]
    assert outputs.shape[0] == len(rows)
    assert torch.allclose(outputs, alone(folder, rows), atol=1e-4)


def test_only_cuda_has_few_shapes_and_no_cudnn_attention() -> None:
    gpu = Device(torch.device("cuda"), torch.float16, "for a test")
    assert (FP32.shapes, gpu.shapes) == (EXACT, FEW)
    torch_cuda: Any = torch.backends.cuda  # without annotations
    before = torch_cuda.cudnn_sdp_enabled()
    try:
        torch_cuda.enable_cudnn_sdp(True)
        use_attention_without_plans(FP32)
        assert torch_cuda.cudnn_sdp_enabled()
        use_attention_without_plans(gpu)
        assert not torch_cuda.cudnn_sdp_enabled()
        assert torch_cuda.flash_sdp_enabled()
        assert torch_cuda.mem_efficient_sdp_enabled()
    finally:
        torch_cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("architecture", ["mpnet", "roberta", "xlm-roberta"])
def test_reads_padding_tokens_within_texts(tmp_path: Path, architecture: str) -> None:
    folder = make_model(architecture, tmp_path / architecture)
    rows = [Tokens([0, 9, 1, 9, 8, 2]), Tokens([0, 7, 6, 1, 1, 2])]  # 1 is "<pad>"
    assert torch.allclose(
        engine_of(folder).forward(rows), alone(folder, rows), atol=1e-4
    )


@pytest.mark.parametrize("architecture", cases_of(PACKABLE_TYPES))
def test_packed_classifiers_match_transformers(
    tmp_path: Path, architecture: str
) -> None:
    """Compare classification heads and token types, too."""
    check_packed_classifier(tmp_path, architecture, {})


def test_packed_classifier_that_pools_the_mean_matches_transformers(
    tmp_path: Path,
) -> None:
    check_packed_classifier(tmp_path, "modernbert", {"classifier_pooling": "mean"})


def check_packed_classifier(
    tmp_path: Path, architecture: str, config: dict[str, Any]
) -> None:
    folder = make_model(architecture, tmp_path, NLI, **config)
    typed = architecture in TYPED
    rows = [
        row._replace(types=[0, *[1] * (len(row.ids) - 1)] if typed else None)
        for row in rows_of(2, 7, 7, 30)
    ]
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = torch.cat(
            [
                model(
                    input_ids=torch.tensor([row.ids]),
                    token_type_ids=torch.tensor([row.types]) if row.types else None,
                ).logits
                for row in rows
            ]
        )
    for packed in (True, False):
        engine = engine_of(folder, LOGITS, packed=packed)
        assert engine.packed == packed
        assert torch.allclose(engine.forward(rows), expected, atol=1e-5)


def test_bart_clamps_float16_like_transformers(tmp_path: Path) -> None:
    """Equal outputs without transformers' check for finite values, which makes the host wait for
    the device.
    """
    folder = make_model("bart", tmp_path, NLI)
    ours = Network(
        weights(folder), torch.float16, LOGITS, 1
    ).model.base_model.encoder.layers[0]
    library: Any = BartForSequenceClassification.from_pretrained(
        folder, dtype=torch.float16
    )
    theirs = library.eval().base_model.encoder.layers[0]
    states = torch.randn(2, 5, 32, dtype=torch.float16)
    wide = torch.full((32,), 60_000.0, dtype=torch.float16)
    for layer in (ours, theirs):
        # overflows wherever a state is 1.1 deviations away
        layer.final_layer_norm.weight.data.copy_(wide)
    with torch.no_grad():
        expected = theirs(states, None)
        assert torch.equal(ours(states, None), expected)
    assert expected.abs().max() == torch.finfo(torch.float16).max - 1000


@pytest.mark.parametrize("architecture", cases_of(PADDED_TYPES & ARCHITECTURES.keys()))
def test_padded_passes_read_nothing_on_the_host(
    tmp_path: Path, architecture: str
) -> None:
    """On a GPU, reading a value would wait for the device.

    On the device `meta`, it raises an error.
    """
    half = FP32._replace(dtype=torch.float16)
    folder = make_model(architecture, tmp_path, NLI)
    engine = TorchEngine(weights(folder), half, LOGITS, 1, 200, packed=False)
    engine._shapes = FEW
    engine.network.to("meta")
    engine.device = half._replace(torch=torch.device("meta"))
    assert engine.forward(rows_of(3, 40)).is_meta


def test_decoders_read_the_last_token_of_each_row(tmp_path: Path) -> None:
    folder = make_model("gpt2", tmp_path, NLI, pad_token_id=0)
    engine = engine_of(folder, LOGITS)
    rows = rows_of(2, 7, 30)
    together = engine.forward(rows)
    for number, row in enumerate(rows):
        assert torch.allclose(together[number], engine.forward([row])[0], atol=1e-5)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), DeviceFull),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"
            ),
            DeviceFull,
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            DeviceFull,
        ),
        (torch.AcceleratorError("CUDA error: out of memory"), DeviceFull),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), DeviceLost),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), DeviceLost),
        (RuntimeError("shapes do not match"), RuntimeError),
        (ValueError("a bad row"), ValueError),
    ],
)
def test_classifies_device_errors(raised: Exception, expected: type[Exception]) -> None:
    with pytest.raises(expected) as caught, device_errors():
        raise raised
    assert caught.type is expected


@pytest.mark.parametrize("architecture", cases_of(ARCHITECTURES))
def test_bfloat16_outputs_match_transformers(tmp_path: Path, architecture: str) -> None:
    folder = make_model(architecture, tmp_path / architecture, NLI)
    engine = TorchEngine(weights(folder), BF16, LOGITS, 1, 200)
    kinds = set(map(type, engine.network.modules()))
    # On a CPU without bfloat16, the layers stay torch's, and the outputs must match, too.
    reordered = architecture in REORDERED_TYPES and can_reorder(BF16)
    assert (ReorderedLinear in kinds) == reordered
    assert not (reordered and torch.nn.Linear in kinds)
    # BART needs its last token
    rows = [Tokens([0, *range(5, 4 + length), 2]) for length in (3, 7, 7, 40)]
    exact, half = (
        AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    with torch.no_grad():
        expected, rounded = (
            torch.cat(
                [
                    model(input_ids=torch.tensor([row.ids])).logits.float()
                    for row in rows
                ]
            )
            for model in (exact, half)
        )
    # As near to the exact logits as transformers in the same precision, within twice its error.
    error = (rounded - expected).abs().max()
    assert (engine.forward(rows) - expected).abs().max() <= 2 * error + 1e-2


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 32), (7, 32), (1, 500, 32), (3, 9, 32)])
def test_reordered_layer_equals_the_original(
    shape: tuple[int, ...], bias: bool
) -> None:
    torch.manual_seed(7)
    # in float32, which every CPU has
    plain = torch.nn.Sequential(torch.nn.Linear(32, 48, bias=bias))
    states = torch.randn(shape)
    with torch.inference_mode():
        expected = plain(states)
        reorder_linear_layers(plain)
        assert type(plain[0]) is ReorderedLinear
        assert torch.allclose(plain(states), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "device",
    [
        FP32,
        FP32._replace(dtype=torch.float16),
        BF16._replace(torch=torch.device("cuda")),
    ],
)
def test_reorders_only_for_bfloat16_on_a_cpu(device: Device) -> None:
    assert not can_reorder(device)


def test_embedded_model_runs_without_transformers() -> None:
    """Its outputs in bfloat16 are as near to float32's as those of transformers' layers."""
    model, rows = locate(EMBEDDED_MODEL), rows_of(3, 7, 7, 40)
    engine = TorchEngine(model, BF16, ("mean",), 0, 512)
    assert isinstance(engine.network, Bert)
    rounded, expected = (
        Network(model, dtype, ("mean",), 0) for dtype in (torch.bfloat16, torch.float32)
    )
    with torch.no_grad():
        theirs, exact = (
            torch.cat(
                [
                    one(ids := torch.tensor([row.ids]), torch.ones_like(ids).bool())
                    for row in rows
                ]
            )
            for one in (rounded, expected)
        )
    assert (engine.forward(rows) - exact).abs().max() <= 2 * (
        theirs - exact
    ).abs().max()
