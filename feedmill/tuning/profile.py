"""Look into a forward pass with torch's profiler: the largest operations, and a trace for a
browser.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from feedmill.shared.errors import InputError
from feedmill.tuning.trials import Bench, Size
from feedmill.workers.models.classifiers import Row

#: Micro-batches in the profile, and operations in the table.
PROFILED_BATCHES = 10
OPERATIONS = 10
#: A trace for chrome://tracing or ui.perfetto.dev.
TRACE_FILE = "trace.json"


@dataclass(frozen=True)
class Operation:
    """An operation of torch in the profiled micro-batches: its own seconds, without those of
    operations it calls.
    """

    name: str
    calls: int
    seconds: float
    share: float


def profile_batches(bench: Bench, size: Size, folder: Path) -> list[Operation]:
    """Profile PROFILED_BATCHES micro-batches, write the trace, and return the operations that take
    longest.

    Raises InputError if the folder cannot be written.
    """
    batches = list(islice(bench.batches(size), PROFILED_BATCHES))
    device = bench.classifier.device
    is_cuda = device.torch.type == "cuda"
    activities = [ProfilerActivity.CPU]
    if is_cuda:
        activities.append(ProfilerActivity.CUDA)
    # the profiler prints its state to standard error
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    device.take_share(1)
    _run(bench, batches[:1])  # warm-up
    with profile(activities=activities) as profiler:
        _run(bench, batches)
    trace = folder / TRACE_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
    except OSError as error:
        raise InputError(f"Cannot write {trace}: {error.strerror}.") from None
    microseconds = {}
    calls = {}
    for average in profiler.key_averages():
        calls[average.key] = average.count
        microseconds[average.key] = average.self_cpu_time_total
        if is_cuda:
            microseconds[average.key] = average.self_device_time_total
    total = sum(microseconds.values()) or 1.0
    names = sorted(
        microseconds,
        key=microseconds.__getitem__,
        reverse=True,
    )
    operations = []
    for name in names[:OPERATIONS]:
        operation = Operation(
            name=name,
            calls=calls[name],
            seconds=microseconds[name] / 1e6,
            share=microseconds[name] / total,
        )
        operations.append(operation)
    return operations


def _run(bench: Bench, batches: Sequence[Sequence[Row]]) -> None:
    for batch in batches:
        outputs = bench.classifier.forward(batch)
        bench.classifier.finish(batch, outputs)
