"""engines/torch_engine.py: reordered weights give the same outputs, replace the originals, and stay out of float32."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from feedmill.workers.models.device import Device
from feedmill.workers.models.engines.network import LOGITS
from feedmill.workers.models.engines.torch_engine import (
    REORDERED_TYPES,
    ReorderedLinear,
    TorchEngine,
    can_reorder,
    reorder_linear_layers,
)
from feedmill.workers.models.tokenizer import Tokens
from feedmill.workers.models.weights import Weights
from tests.fakes.models import ARCHITECTURES, NLI, make_model

FP32 = Device(torch.device("cpu"), torch.float32, "for a test")
BF16 = FP32._replace(dtype=torch.bfloat16)
ROWS = [Tokens([0, *range(5, 4 + length), 2]) for length in (3, 7, 7, 40)]


def engine_of(folder: Path, device: Device) -> TorchEngine:
    return TorchEngine(Weights(folder.name, folder, None, "00"), device, LOGITS, 1, 200)


def layers(engine: TorchEngine, kind: type[torch.nn.Module]) -> int:
    return sum(type(module) is kind for module in engine.network.modules())


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_bfloat16_outputs_match_transformers(tmp_path: Path, architecture: str) -> None:
    folder = make_model(architecture, tmp_path / architecture, NLI)
    engine = engine_of(folder, BF16)
    # On a CPU without bfloat16, the layers stay torch's, and the outputs must match, too.
    reordered = architecture in REORDERED_TYPES and can_reorder(BF16)
    assert bool(layers(engine, ReorderedLinear)) == reordered
    assert not (reordered and layers(engine, torch.nn.Linear))
    exact, half = (
        AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    with torch.no_grad():
        expected, rounded = (
            torch.cat([model(input_ids=torch.tensor([row.ids])).logits.float() for row in ROWS])
            for model in (exact, half)
        )
    # As near to the exact logits as transformers in the same precision, within twice its error.
    error = (rounded - expected).abs().max()
    assert (engine.forward(ROWS) - expected).abs().max() <= 2 * error + 1e-2


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 32), (7, 32), (1, 500, 32), (3, 9, 32)])
def test_reordered_layer_equals_the_original(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(7)
    plain = torch.nn.Sequential(torch.nn.Linear(32, 48, bias=bias))  # in float32, which every CPU has
    states = torch.randn(shape)
    with torch.inference_mode():
        expected = plain(states)
        reorder_linear_layers(plain)
        assert type(plain[0]) is ReorderedLinear
        assert torch.allclose(plain(states), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "device",
    [FP32, FP32._replace(dtype=torch.float16), BF16._replace(torch=torch.device("cuda"))],
)
def test_reorders_only_for_bfloat16_on_a_cpu(device: Device) -> None:
    assert not can_reorder(device)
