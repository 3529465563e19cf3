"""Rehearsal: measure what a post costs this worker's host and its device, before messages come.

A supervisor that fills a GPU asks for it (shared/worker_load.py). Generated posts take the way of
a worker's, without messages: they are tokenized, cut into micro-batches, computed and scored.
"""

import random
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from feedmill.shared.messages import ClassifyOptions
from feedmill.workers.models.classifiers import Classifier, Outputs, Row
from feedmill.workers.models.device import measure_peak_memory, peak_memory
from feedmill.workers.pipeline.calibration import generated
from feedmill.workers.pipeline.window import Window

#: Posts of a rehearsal, those that are tokenized together, and rounds. The last round counts: the
#: first ones prepare the device for new shapes.
POSTS = 512
POSTS_TOGETHER = 64
ROUNDS = 3
#: Micro-batches that the device has at a time, as in a worker.
IN_FLIGHT = 2


class Rehearsal(NamedTuple):
    """The cost of a post, in microseconds of CPU time and of device time, and the memory of the
    device: that of the passes, and all, in bytes.
    """

    host_us: float
    device_us: float
    memory_bytes: int
    total_memory_bytes: int


def rehearse(classifier: Classifier, budget: int, batch_rows: int) -> Rehearsal:
    """Measure the cost of a post. budget, batch_rows: maximum tokens and rows of a micro-batch."""
    chance = random.Random(1)
    texts: list[str] = []
    for _ in range(POSTS):
        text = generated(chance)
        texts.append(text)
    device = classifier.device
    measure_peak_memory(device)
    for _ in range(ROUNDS):
        began = time.process_time()
        device_s = _compute(classifier, texts, budget, batch_rows)
        host_s = time.process_time() - began
    memory = peak_memory(device)
    return Rehearsal(
        host_us=1e6 * host_s / POSTS,
        device_us=1e6 * device_s / POSTS,
        memory_bytes=memory.peak,
        total_memory_bytes=memory.total,
    )


def _compute(
    classifier: Classifier, texts: Sequence[str], budget: int, batch_rows: int
) -> float:
    """Classify the texts. Return the seconds of device time."""
    label_set = classifier.label_set(ClassifyOptions())
    window: Window[Row] = Window(time.monotonic, classifier.device.shapes)
    for begin in range(0, len(texts), POSTS_TOGETHER):
        end = begin + POSTS_TOGETHER
        rows_of_posts = classifier.prepare(texts[begin:end], label_set)
        for rows in rows_of_posts:
            for row in rows:
                window.add(row)
    in_flight: deque[tuple[Sequence[Row], Outputs]] = deque()
    device_s = 0.0
    while window or in_flight:
        if window:
            batch = window.take(budget, batch_rows)
            outputs = classifier.forward(batch)
            in_flight.append((batch, outputs))
        if not window or len(in_flight) >= IN_FLIGHT:
            oldest, oldest_outputs = in_flight.popleft()
            classifier.finish(oldest, oldest_outputs)
            device_s += oldest_outputs.seconds
    return device_s
