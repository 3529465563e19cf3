"""Order of the training examples, decided by seed, epoch and lengths alone."""

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

#: Optimization steps whose examples are sorted by length together. More steps reduce padding; fewer add randomness.
STEPS_SORTED_TOGETHER = 32


class Order(Sampler[int]):
    """A reproducible order of examples, different in each epoch and determined by the seed.

    batch: examples per optimization step, over all devices. grouped: put examples of similar length into one step, and
    sort each step by length, so that its forward passes need little padding. Steps then come in random order, but the
    first epoch begins with the step of the longest example, so that running out of memory shows at once.
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
        # An incomplete last step stays at the end: elsewhere it would shift the steps after it.
        complete = len(order) - len(order) % self._batch
        steps: list[list[int]] = []
        for start in range(0, complete, STEPS_SORTED_TOGETHER * self._batch):
            chunk = sorted(order[start : min(start + STEPS_SORTED_TOGETHER * self._batch, complete)], key=self._length)
            steps += [chunk[at : at + self._batch] for at in range(0, len(chunk), self._batch)]
        if self._epoch:
            steps = [steps[place] for place in torch.randperm(len(steps), generator=generator).tolist()]
        elif steps:
            steps.insert(0, steps.pop(max(range(len(steps)), key=lambda place: self._length(steps[place][-1]))))
            steps[1:] = [steps[1 + place] for place in torch.randperm(len(steps) - 1, generator=generator).tolist()]
        return iter([example for step in steps for example in step] + sorted(order[complete:], key=self._length))

    def _length(self, example: int) -> int:
        return self._lengths[example]
