"""The CUDA path on a real GPU: exact, without hidden synchronisation, and told apart when it fails.

`make test` leaves these out, since they need a GPU: `make test-gpu` runs them. The model is small, with random weights.
"""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from shared.errors import DeviceFull
from shared.messages import ClassifyOptions
from shared.settings import Settings
from workers.classifiers import Row
from workers.classifiers.similarity import Similarity
from workers.device import Device, choose
from workers.engines.outputs import device_errors
from workers.weights import locate

pytestmark = pytest.mark.gpu

WORDS = ["[PAD]", "[UNK]", *(f"word{number}" for number in range(500))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(7)
    BertModel(BertConfig(vocab_size=len(WORDS), num_hidden_layers=4)).save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")  # type: ignore[no-untyped-call]
    fast.save_pretrained(path)
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return path


def classifier(folder: Path, device: Device) -> Similarity:
    return Similarity(locate(str(folder)), device, Settings(labels={"a": "word1 word2", "b": "word3", "c": "word4"}))


def rows_of(classifier: Similarity, *lengths: int, **options: object) -> list[Row]:
    label_set = classifier.label_set(ClassifyOptions.parse(options))
    texts = [" ".join(f"word{(7 * length + place) % 500}" for place in range(length)) for length in lengths]
    return [row for rows in classifier.prepare(texts, label_set) for row in rows]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float16", 2e-2)])
def test_scores_are_those_of_the_cpu(folder: Path, dtype: str, tolerance: float) -> None:
    gpu = classifier(folder, choose("cuda", dtype))
    cpu = classifier(folder, choose("cpu", "float32"))
    lengths = (3, 3, 40, 7, 250)
    for ours, exact in zip(
        gpu.finish(rows := rows_of(gpu, *lengths), gpu.forward(rows)),
        cpu.finish(rows := rows_of(cpu, *lengths), cpu.forward(rows)),
        strict=True,
    ):
        assert ours[1] == pytest.approx(exact[1], abs=tolerance)


def test_nothing_waits_for_the_device_inside_a_batch(folder: Path) -> None:
    gpu = classifier(folder, choose("cuda"))
    gpu.warm_up()
    mixed = rows_of(gpu, 5, 9) + rows_of(gpu, 12, 30, labels="word7,word8,word9,word10")
    for batch in (rows_of(gpu, 8, 8, 8), rows_of(gpu, 4, 60, 200), mixed):
        gpu.finish(batch, gpu.forward(batch))  # label sets are embedded by the first batch that needs them
        torch.cuda.set_sync_debug_mode("error")
        try:
            outputs = gpu.forward(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(gpu.finish(batch, outputs)) == len(batch)
        assert outputs.ready()
        assert 0 < outputs.seconds < 10


def test_batches_in_flight_keep_their_own_outputs(folder: Path) -> None:
    gpu = classifier(folder, choose("cuda"))
    batches = [rows_of(gpu, *range(start, start + 8)) for start in range(2, 40)]
    alone = [gpu.finish(batch, gpu.forward(batch)) for batch in batches]
    flying = [gpu.forward(batch) for batch in batches]
    for batch, outputs, expected in zip(batches, flying, alone, strict=True):
        assert [scores for _, scores in gpu.finish(batch, outputs)] == [
            pytest.approx(scores, abs=1e-5) for _, scores in expected
        ]


def test_out_of_memory_is_told_apart_and_survived(folder: Path) -> None:
    gpu = classifier(folder, choose("cuda"))
    with pytest.raises(DeviceFull), device_errors():
        torch.empty(2**50, device="cuda")
    batch = rows_of(gpu, 4, 5)
    assert len(gpu.finish(batch, gpu.forward(batch))) == 2
