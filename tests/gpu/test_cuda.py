"""The CUDA path on a real GPU: scores, no hidden synchronisation, and errors.

`make test-gpu` runs these tests; `make test` excludes them. The models are small, with random
weights.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch

from feedmill.shared.errors import DeviceFull, ModelError
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers import Row
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.device import Device, limit_memory, select_device
from feedmill.workers.models.engines import device_errors
from feedmill.workers.models.engines.onnx_engine import CUDA
from feedmill.workers.models.engines.packing import LOGITS, PACKABLE_TYPES
from feedmill.workers.models.engines.tensorrt import TENSORRT
from feedmill.workers.models.engines.torch_engine import TorchEngine
from feedmill.workers.models.shapes import FEW
from feedmill.workers.models.tokenizer import Tokens
from feedmill.workers.models.weights import locate
from tests.fakes.models import NLI, make_gliclass, make_model, make_sentence_model
from tests.unit.test_canary import overflowing

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["similarity", "bart", "bert"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A sentence encoder, an entailment model like the default one, and a model with token
    types.
    """
    path = tmp_path_factory.mktemp("model")
    return (
        make_sentence_model(path)
        if request.param == "similarity"
        else make_model(request.param, path, NLI)
    )


def classifier(folder: Path, device: Device) -> Any:
    return load_classifier(
        Settings(model=str(folder), labels={"a": "sports", "b": "food", "c": "music"}),
        device,
    )


def rows_of(classifier: Any, *lengths: int, **options: object) -> list[Row]:
    label_set = classifier.label_set(ClassifyOptions.parse(options))
    texts = [
        " ".join(f"word{(7 * length + place) % 500}" for place in range(length))
        for length in lengths
    ]
    return sorted(
        (row for rows in classifier.prepare(texts, label_set) for row in rows),
        key=lambda row: row.length,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float16", 2e-2)])
def test_scores_match_the_cpu(folder: Path, dtype: str, tolerance: float) -> None:
    found = []
    for device in (select_device("cuda", dtype), select_device("cpu", "float32")):
        loaded = classifier(folder, device)
        of_posts = [rows_of(loaded, length) for length in (3, 3, 40, 7, 250)]
        for number, rows in enumerate(of_posts):
            for row in rows:
                row.owner = number
        batch = sorted(
            (row for rows in of_posts for row in rows), key=lambda row: row.length
        )
        found.append(
            {
                row.owner: scores
                for row, scores in loaded.finish(batch, loaded.forward(batch))
            }
        )
    assert found[0].keys() == found[1].keys() == set(range(5))
    for number, exact in found[1].items():
        assert found[0][number] == pytest.approx(exact, abs=tolerance)


@pytest.mark.parametrize("architecture", ["deberta-v2", "modernbert"])
def test_scores_of_gliclass_match_the_cpu(tmp_path: Path, architecture: str) -> None:
    folder = make_gliclass(
        tmp_path, architecture, scorer_type="mlp", use_segment_embeddings=True
    )
    test_scores_match_the_cpu(folder, "float32", 1e-4)


def test_models_run_in_the_precision_that_they_need(tmp_path: Path) -> None:
    """The model's activations exceed float16."""
    settings = Settings(model=str(overflowing(tmp_path)))
    with pytest.raises(ModelError, match="float16.*FEEDMILL_DTYPE="):
        load_classifier(settings, select_device("cuda"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert load_classifier(settings, select_device("cuda")).device.dtype in (
        torch.bfloat16,
        torch.float32,
    )


def test_forward_does_not_synchronise(folder: Path) -> None:
    gpu = classifier(folder, select_device("cuda"))
    mixed = rows_of(gpu, 5, 9) + rows_of(gpu, 12, 30, labels="word7,word8,word9,word10")
    for batch in (rows_of(gpu, 8, 8, 8), rows_of(gpu, 4, 60, 200), mixed):
        gpu.forward(batch).wait()  # the first batch embeds the label sets
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", "Synchronization debug mode is a prototype"
                )
                torch.cuda.set_sync_debug_mode("error")
            outputs = gpu.forward(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert outputs.wait().isfinite().all()
        assert 0 < outputs.seconds < 10


def test_batches_in_flight_keep_their_own_outputs(folder: Path) -> None:
    gpu = classifier(folder, select_device("cuda"))
    batches = [rows_of(gpu, *range(start, start + 8)) for start in range(2, 40)]
    sequential = [gpu.forward(batch).wait() for batch in batches]
    in_flight = [gpu.forward(batch) for batch in batches]
    for outputs, expected in zip(in_flight, sequential, strict=True):
        assert torch.allclose(outputs.wait(), expected, atol=1e-5)


def test_pads_to_few_shapes_and_needs_no_plans(folder: Path) -> None:
    gpu = classifier(
        folder, select_device("cuda", "float32")
    )  # half precision is packed
    assert gpu.device.shapes is FEW
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    computed: list[torch.Size] = []
    gpu._engine.network.register_forward_pre_hook(
        lambda _, given: computed.append(given[0].shape)
    )
    batch = rows_of(gpu, 5, 9, 12, 30, 41)
    longest = max(row.length for row in batch)
    assert gpu.forward(batch).wait().shape[0] == len(batch)
    assert computed[-1] == torch.Size(
        (FEW.rows(len(batch)), min(FEW.length(longest), gpu._engine._most))
    )


@pytest.mark.parametrize("architecture", sorted(PACKABLE_TYPES))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_packed_rows_give_the_outputs_of_padded_ones(
    tmp_path: Path, architecture: str, dtype: str
) -> None:
    device, folder = (
        select_device("cuda", dtype),
        make_model(architecture, tmp_path, NLI),
    )
    rows = [
        Tokens([5 + (length + 7 * place) % 90 for place in range(length)])
        for length in (3, 9, 9, 40, 150)
    ]
    packed, padded = (
        TorchEngine(locate(str(folder)), device, LOGITS, 1, 200, packed=each)
        for each in (True, False)
    )
    assert (packed.packed, padded.packed) == (True, False)
    assert torch.allclose(
        packed.forward(rows), padded.forward(rows), rtol=0.02, atol=0.02
    )


def test_a_worker_stays_within_its_share_of_the_memory() -> None:
    device = torch.device("cuda", 0)
    half = torch.cuda.get_device_properties(device).total_memory // 2
    limit_memory(device, 0.4)
    try:
        with pytest.raises(DeviceFull), device_errors():
            torch.empty(half, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_survives_out_of_memory(folder: Path) -> None:
    gpu = classifier(folder, select_device("cuda"))
    with pytest.raises(DeviceFull), device_errors():
        torch.empty(2**50, device="cuda")
    batch = rows_of(gpu, 4, 5)
    assert gpu.forward(batch).wait().isfinite().all()


@pytest.mark.parametrize(
    ("engine", "provider"), [("onnx", CUDA), ("tensorrt", TENSORRT)]
)
def test_scores_of_a_graph_match_torch(
    folder: Path, tmp_path: Path, engine: str, provider: str
) -> None:
    if provider not in onnxruntime.get_available_providers():
        pytest.skip(f"this build of ONNX Runtime has no {provider}")
    exact = classifier(folder, select_device("cpu", "float32"))
    settings = Settings(
        model=str(folder),
        labels={"a": "sports", "b": "food", "c": "music"},
        engine=engine,
    )
    graph: Any = load_classifier(
        settings.model_copy(update={"cache_folder": tmp_path}),
        select_device("cuda", "float32", engine),
    )
    assert graph._engine.provider == provider
    lengths = (3, 3, 40, 7, 250)
    expected = exact.forward(rows_of(exact, *lengths)).wait()
    assert torch.allclose(
        graph.forward(rows_of(graph, *lengths)).wait(), expected, atol=1e-3
    )
