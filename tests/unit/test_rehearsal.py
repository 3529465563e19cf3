"""workers/pipeline/rehearsal.py: the cost of a post, measured before messages come."""

from collections.abc import Sequence
from typing import Any

from feedmill.workers.models.classifiers import LabelSet, Row
from feedmill.workers.models.device import select_device
from feedmill.workers.models.tokenizer import Tokens
from feedmill.workers.pipeline.rehearsal import IN_FLIGHT, POSTS, ROUNDS, rehearse


class Outputs:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class Classifier:
    """Two rows per post. A row takes the device a millisecond, by its own account."""

    device = select_device("cpu")

    def __init__(self) -> None:
        self.in_flight = 0
        self.most_in_flight = 0
        self.scored = 0
        self.labels = LabelSet(("good", "bad"), False, "recipe")

    def label_set(self, _: Any) -> LabelSet:
        return self.labels

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        return [
            [Row(Tokens([0] * len(text.split())), label_set) for _ in range(2)]
            for text in texts
        ]

    def forward(self, rows: Sequence[Row]) -> Outputs:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return Outputs(0.001 * len(rows))

    def finish(self, rows: Sequence[Row], _: Outputs) -> list[Any]:
        self.in_flight -= 1
        self.scored += len(rows)
        return []


def test_measures_all_rows_of_the_posts_with_the_device_one_pass_ahead() -> None:
    classifier: Any = Classifier()
    rehearsal = rehearse(classifier, budget=2048, batch_rows=64)
    assert round(rehearsal.device_us) == 2000
    assert rehearsal.host_us > 0
    assert classifier.scored == 2 * POSTS * ROUNDS
    assert classifier.most_in_flight == IN_FLIGHT
    assert classifier.in_flight == 0
    assert rehearsal.total_memory_bytes == 0, "unknown without a GPU"
