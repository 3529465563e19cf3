"""A message that workers died with: its posts are computed in isolation, and a poison post becomes
a dead letter.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from feedmill.workers.models.classifiers import Row
from feedmill.workers.models.device import Device
from feedmill.workers.pipeline.message import MAX_DEATHS, Message
from tests.support import wait_until
from tests.unit.test_pipeline import Owner, StandIn


class TwoLanes(Device):
    lanes = 2  # a CPU with two cores


class Watched(StandIn):
    """A stand-in model that records the posts of each pass."""

    device = TwoLanes(torch.device("meta"), torch.float32, "for a test")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, ...]] = []

    def forward(self, rows: Sequence[Row]) -> Any:
        self.seen.append(tuple(row.owner.post.id for row in rows))
        return super().forward(rows)


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner(Watched(), batch_rows=2)
    yield made
    made.pipeline.stop()


def submit(owner: Owner, posts: int, deaths: Mapping[int, int] | None) -> Message:
    sent = [{"id": str(number), "title": "two words"} for number in range(posts)]
    message = Message({"posts": sent}, None, deaths=deaths)
    owner.pipeline.submit(message)
    return message


def test_isolates_suspects_and_dead_letters_the_poison_post(owner: Owner) -> None:
    message = submit(owner, posts=50, deaths={2: 1, 4: 2, 5: MAX_DEATHS})
    wait_until(lambda: message in owner.finished, "the message is finished")
    assert [letter.id for letter in owner.store.dead] == ["5"]
    assert "3 " in owner.store.dead[0].reason
    assert message.result()[5]["error"] == owner.store.dead[0].reason
    assert len(owner.store.written) == 49
    assert owner.classifier.seen[:2] == [("2",), ("4",)]  # type: ignore[attr-defined]
    assert owner.classifier.seen[2] == ("0", "1")  # type: ignore[attr-defined]


def test_names_the_posts_on_the_device_until_the_pass_ends(owner: Owner) -> None:
    message = submit(owner, posts=5, deaths={3: 1})
    wait_until(lambda: len(owner.computed) == 4, "two passes have ended")
    assert owner.computed == [
        (message, posts) for posts in ((3,), (), (0, 1, 2, 4), ())
    ]


def test_does_not_name_posts_of_other_messages(owner: Owner) -> None:
    message = submit(owner, posts=5, deaths=None)
    wait_until(lambda: message in owner.finished, "the message is finished")
    assert not owner.computed


def test_no_post_is_to_blame_while_results_wait_for_redis(owner: Owner) -> None:
    owner.store.refusals = 1_000_000
    message = submit(owner, posts=3, deaths=dict.fromkeys(range(3), 2))
    wait_until(lambda: owner.store.refusals < 999_998, "the first result waits")
    assert owner.computed == [(message, (0,)), (message, ())]
    owner.store.refusals = 0
    wait_until(
        lambda: message in owner.finished and len(owner.computed) == 6,
        "the message and three passes ended",
    )


def test_a_withdrawn_message_ends_its_isolation(owner: Owner) -> None:
    message = Message(
        {"posts": [{"id": "0", "title": "x"}, {"id": "1", "title": "y"}]},
        None,
        deaths={0: 1},
    )
    owner.unwanted.append(message)
    owner.pipeline.submit(message)
    submit(owner, posts=1, deaths=None)
    wait_until(lambda: owner.finished, "the next message is finished")
    assert not owner.classifier.batches[1:]
