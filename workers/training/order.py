"""The order in which a training sees its examples. Knows nothing of what they are but their lengths."""

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

#: Optimization steps whose examples are sorted by length together: more pad less, fewer are closer to a random order.
SORTED_TOGETHER = 32


class Order(Sampler[int]):
    """Which example comes when: another order in each epoch, decided by nothing but the seed.

    batch: examples of an optimization step, over all devices. Grouped, those of a step are of similar length, and so
    are its parts, however it is divided; steps come in random order, in the first epoch the longest one first: what has
    no room is to fail at once.
    """

    def __init__(self, lengths: Sequence[int], batch: int, seed: int, grouped: bool) -> None:
        self._lengths, self._batch, self._seed, self._grouped = lengths, batch, seed, grouped
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + self._epoch)
        order: list[int] = torch.randperm(len(self._lengths), generator=generator).tolist()
        if not self._grouped:
            return iter(order)
        # What fills no step stays at the end: in between it would shift all steps after it.
        whole = len(order) - len(order) % self._batch
        steps: list[list[int]] = []
        for start in range(0, whole, SORTED_TOGETHER * self._batch):
            together = sorted(order[start : min(start + SORTED_TOGETHER * self._batch, whole)], key=self._length)
            steps += [together[at : at + self._batch] for at in range(0, len(together), self._batch)]
        if self._epoch:
            steps = [steps[place] for place in torch.randperm(len(steps), generator=generator).tolist()]
        elif steps:
            steps.insert(0, steps.pop(max(range(len(steps)), key=lambda place: self._length(steps[place][-1]))))
            steps[1:] = [steps[1 + place] for place in torch.randperm(len(steps) - 1, generator=generator).tolist()]
        return iter([example for step in steps for example in step] + sorted(order[whole:], key=self._length))

    def _length(self, example: int) -> int:
        return self._lengths[example]
