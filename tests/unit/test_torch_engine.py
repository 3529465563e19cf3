"""workers/engines/torch_engine.py: company and layout change nothing, for each architecture; errors are told apart."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModel,
    BertConfig,
    DistilBertConfig,
    ElectraConfig,
    MPNetConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    XLMRobertaConfig,
)

from shared.errors import DeviceFull, DeviceLost
from workers.device import Device
from workers.engines.torch_engine import PACKABLE, SHIFTED, TorchEngine, device_errors
from workers.weights import Weights

FP32 = Device(torch.device("cpu"), torch.float32, "for a test")
SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
    "pad_token_id": 1,
}
CONFIGS: dict[str, Any] = {
    "bert": BertConfig(**SMALL),
    "electra": ElectraConfig(**SMALL, embedding_size=16),
    "roberta": RobertaConfig(**SMALL),
    "xlm-roberta": XLMRobertaConfig(**SMALL),
    "distilbert": DistilBertConfig(**SMALL, dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    "mpnet": MPNetConfig(**SMALL),
}


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of each architecture, with random weights."""
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(7)
    AutoModel.from_config(CONFIGS[request.param]).save_pretrained(path)  # type: ignore[no-untyped-call]
    vocabulary = {word: number for number, word in enumerate(["<s>", "<pad>", "</s>", "[UNK]", "a", "b", "c"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="[UNK]")  # type: ignore[no-untyped-call]
    fast.save_pretrained(path)
    return path


def weights(folder: Path) -> Weights:
    return Weights(folder.name, folder, None, "00")


def rows_of(*lengths: int) -> list[list[int]]:
    source = random.Random(3)
    return [[source.randrange(2, 60) for _ in range(length)] for length in lengths]


def sums(folder: Path, rows: list[list[int]]) -> torch.Tensor:
    """The sum of each row's hidden states by transformers itself: one row at a time, as eager code."""
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([row])).last_hidden_state.sum(1) for row in rows])


@pytest.mark.parametrize("lengths", [(3, 3, 3), (2, 5, 5, 9, 40), (40, 2, 9, 2, 9), (1,)])
def test_each_row_is_computed_as_if_it_were_alone(folder: Path, lengths: tuple[int, ...]) -> None:
    engine = TorchEngine(weights(folder), FP32)
    rows = rows_of(*lengths)
    hidden = engine.forward(rows)
    assert torch.allclose(hidden.sums(), sums(folder, rows), atol=1e-4)
    assert torch.allclose(hidden.first(), torch.cat([engine.forward([row]).first() for row in rows]), atol=1e-5)


def test_the_longest_row_fits(folder: Path) -> None:
    engine = TorchEngine(weights(folder), FP32)
    shifted = any(folder.name.startswith(f"{name}0") for name in SHIFTED)
    assert engine.max_tokens == 78 if shifted else 80
    assert engine.forward(rows_of(engine.max_tokens, 3)).sums().isfinite().all()


def test_the_architectures_that_are_packed(folder: Path) -> None:
    packed = TorchEngine(weights(folder), FP32)
    assert packed.packed == any(folder.name.startswith(f"{name}0") for name in PACKABLE)
    padded = TorchEngine(weights(folder), FP32, packed=False)
    assert not padded.packed
    rows = rows_of(2, 7, 7, 30)
    assert torch.allclose(padded.forward(rows).sums(), packed.forward(rows).sums(), atol=1e-4)
    assert torch.allclose(padded.forward(rows).first(), packed.forward(rows).first(), atol=1e-5)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), DeviceFull),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), DeviceFull),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), DeviceFull),
        (torch.AcceleratorError("CUDA error: out of memory"), DeviceFull),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), DeviceLost),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), DeviceLost),
        (RuntimeError("shapes do not match"), RuntimeError),
        (ValueError("a bad row"), ValueError),
    ],
)
def test_errors_of_the_device_are_told_apart(raised: Exception, expected: type[Exception]) -> None:
    with pytest.raises(expected) as caught, device_errors():
        raise raised
    assert caught.type is expected


def test_a_batch_that_does_not_fit_into_memory() -> None:
    """What the CPU's allocator really says."""
    with pytest.raises(DeviceFull, match="allocate"), device_errors():
        torch.empty(2**50)
