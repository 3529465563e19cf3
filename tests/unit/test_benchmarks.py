"""What the benchmarks' figures rest on: operations counted as torch counts them, batches cut as the ideal says."""

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertModel

from benchmarks.hardware import forward_flops
from benchmarks.ours import cut
from benchmarks.report import agreement
from workers.classifiers import LabelSet, Row
from workers.tokenizer import Tokens


def test_operations_are_those_that_torch_counts() -> None:
    config = BertConfig(hidden_size=48, intermediate_size=100, num_hidden_layers=3, num_attention_heads=4)
    config._attn_implementation = "eager"
    model = BertModel(config, add_pooling_layer=False).eval()  # type: ignore[no-untyped-call]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for length in (7, 30):
            model(input_ids=torch.ones(1, length, dtype=torch.long))
    assert forward_flops(config.to_dict(), [7, 30]) == counter.get_total_flops()


def test_batches_of_the_ideal_fill_the_budget_and_lose_nothing() -> None:
    labels = LabelSet(("a",), False, "")
    rows = [Row(Tokens([0] * length), labels) for length in (2, 2, 3, 5, 5, 9, 40)]
    batches = list(cut(rows, token_budget=12))
    assert [[row.length for row in batch] for batch in batches] == [[2, 2, 3], [5, 5], [9], [40]]


def test_agreement_is_the_share_of_equal_labels() -> None:
    assert agreement(["a", "b", "c", "d"], ["a", "b", "c", "x"]) == 0.75
