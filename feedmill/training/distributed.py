"""Train in several processes, one per device, which share each optimization step.

`feedmill train --devices` starts the processes itself, on one machine; torchrun may start them
instead, on several. The process of rank 0 reads the posts, reports, and writes checkpoints and the
model. The others receive the posts from it.
"""

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import start_processes

from feedmill.console import Report, notes_console
from feedmill.shared import errors
from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import DeviceFull, FeedmillError, UserError, printable
from feedmill.shared.settings import Settings
from feedmill.stack.supervisor import Share, shares
from feedmill.training.batches import BatchSize, said_of_smaller_batch
from feedmill.training.data import Dataset, check_devices
from feedmill.training.options import TrainOptions

#: Back ends that exchange tensors of a CPU, and of GPUs.
CPU_BACKEND = "gloo"
GPU_BACKEND = "cpu:gloo,cuda:nccl"
#: Variable of the network interface that gloo uses; processes of one machine need no other than
#: this one.
INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "lo"
#: Start method of the processes. CUDA does not survive a fork.
START_METHOD = "spawn"
#: Seconds that processes get to end after another one failed.
GRACE_S = 10.0
#: Seconds between looks at the processes, beside the end of one.
POLL_INTERVAL_S = 1.0
#: Words in the errors of a process whose peer has ended.
PEER_ENDED = ("by peer", "Broken pipe", "gloo", "NCCL", "Gloo")
#: Files in the folder that the processes share: the result, and the failure of the process of a
#: rank.
RECORD = "record.json"
FAILURE = "failure-{}.json"


class PeerLost(UserError):  # noqa: N818 - named after what happened
    """Another process of the training ended."""


def processes() -> int:
    """Return the number of processes of this training."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def rank() -> int:
    """Return the number of this process, from 0."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def highest(number: int | None) -> int | None:
    """Return the highest number of all processes; None if unknown."""
    if processes() == 1:
        return number
    # 0 stands for unknown.
    maximum = torch.tensor([number or 0], dtype=torch.int64)
    distributed.all_reduce(maximum, distributed.ReduceOp.MAX)
    return int(maximum) or None


@contextmanager
def explain_lost_peers() -> Iterator[None]:
    """Raise PeerLost for the errors of a process whose peer has ended."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if processes() > 1 and any(words in text for words in PEER_ENDED):
            raise PeerLost(
                "Another process of the training ended, and says why. The same command continues "
                "from the last checkpoint."
            ) from error
        raise


# torchrun


def join(settings: Settings) -> Settings:
    """Join the processes that torchrun started; return the settings of this process' device."""
    if settings.named_devices:
        raise UserError(
            "torchrun has started the processes already: leave out --devices (FEEDMILL_DEVICES)."
        )
    uses_gpu = settings.device == "cuda" or (
        settings.device == "auto" and torch.cuda.is_available()
    )
    if not uses_gpu and settings.device not in ("auto", "cpu"):
        raise UserError(
            "torchrun gives each process its device: set --device auto or cpu, not "
            f"{settings.device}."
        )
    backend = GPU_BACKEND if uses_gpu else CPU_BACKEND
    with explain_lost_peers():
        distributed.init_process_group(backend)
    device = "cpu"
    if uses_gpu:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    return settings.model_copy(update={"device": device})


def send(dataset: Dataset, options: TrainOptions) -> None:
    """Send what to train from rank 0 to the others."""
    with explain_lost_peers():
        distributed.broadcast_object_list([dataset, options], src=0)


def train_as_peer(settings: Settings) -> None:
    """Train as a process other than rank 0 until that has ended.

    Raises UserError, DeviceFull or DeviceLost. A process that fails does not leave the group: that
    may wait for the others, which learn of the failure by its end.
    """
    from feedmill.training.finetune import Training  # noqa: PLC0415 - it imports this module

    warnings.simplefilter("ignore")  # rank 0 shows the same ones
    settings = join(settings)
    received: list[Any] = [None, None]
    with explain_lost_peers():
        distributed.broadcast_object_list(received, src=0)
        dataset, options = received
        training = Training(dataset, options, settings, Report())
        training.run()
    leave()


def leave() -> None:
    """Leave the group of processes."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


# Processes of our own


@dataclass(frozen=True)
class Job:
    """The training of the processes. folder: where they leave the result or their failures."""

    dataset: Dataset
    options: TrainOptions
    settings: Settings
    shares: Sequence[Share]
    batch: BatchSize
    folder: Path

    @property
    def gpus(self) -> list[str]:
        """The GPUs as CUDA_VISIBLE_DEVICES names them, in the order of the ranks."""
        return [
            share.environment["CUDA_VISIBLE_DEVICES"]
            for share in self.shares
            if share.device == "cuda"
        ]

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment of a process."""
        count = str(len(self.shares))
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": count,
            "LOCAL_WORLD_SIZE": count,
        }
        environment = dict(self.shares[rank].environment)
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        return environment | place

    def settings_of(self, rank: int) -> Settings:
        """Return the settings of a process, with its device."""
        device = f"cuda:{rank}" if self.gpus else "cpu"
        changes = {"device": device, "devices": None}
        return self.settings.model_copy(update=changes)


def devices_of(setting: str) -> list[Share]:
    """Return the devices that the setting `devices` names.

    Raises UserError if they cannot train together.
    """
    check_devices(setting)
    devices = shares(setting)
    names = set()
    for share in devices:
        name = share.environment.get("CUDA_VISIBLE_DEVICES", share.name)
        if name in names:
            raise UserError(
                f"--devices {setting} names a GPU twice. A GPU trains one process: name it once."
            )
        names.add(name)
    return devices


def first_device(setting: str) -> str:
    """Return the value of the setting `device` for the first of several devices."""
    if setting.startswith("cpu"):
        return "cpu"
    if setting == "all":
        return "auto"
    first, _, _ = setting.partition(",")
    return f"cuda:{first}"


def launch(
    dataset: Dataset, options: TrainOptions, settings: Settings, report: Report
) -> dict[str, Any]:
    """Train in a process for each device, write the model, and return the record of the training.

    If a batch runs out of memory, the processes start again with half of it. Raises UserError,
    DeviceFull or DeviceLost.
    """
    devices = devices_of(settings.named_devices or "")
    batch = BatchSize(
        rows=options.batch_size,
        accumulation=options.accumulation,
        processes=len(devices),
    )
    too_large: list[int] = []
    while True:
        try:
            record = _attempt(
                dataset,
                options,
                settings,
                devices,
                batch,
            )
        except DeviceFull as error:
            smaller = batch.smaller()
            if smaller is None:
                raise
            note = said_of_smaller_batch(batch, smaller, str(error))
            report.print(note)
            too_large.append(batch.rows)
            batch = smaller
            continue
        record["plan"]["out_of_memory"] = too_large
        return record


def _attempt(
    dataset: Dataset,
    options: TrainOptions,
    settings: Settings,
    devices: Sequence[Share],
    batch: BatchSize,
) -> dict[str, Any]:
    """Train with this batch size in a process for each device, and return the record."""
    with tempfile.TemporaryDirectory(prefix="feedmill-train-") as name:
        job = Job(
            dataset=dataset,
            options=options,
            settings=settings,
            shares=devices,
            batch=batch,
            folder=Path(name),
        )
        # torch reads it when it is imported. Its warning that no parameter is unused concerns
        # speed alone.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        context = start_processes(  # type: ignore[no-untyped-call]
            _work,
            (job,),
            nprocs=len(devices),
            join=False,
            start_method=START_METHOD,
        )
        try:
            _wait(context, job)
        finally:
            _stop(context.processes)
        record_file = job.folder / RECORD
        if not record_file.exists():
            raise KeyboardInterrupt  # the processes were interrupted; this one will be
        text = record_file.read_text()
        record: dict[str, Any] = json.loads(text)
        return record


def _wait(context: Any, job: Job) -> None:
    """Wait until all processes have ended. Raises the error of the one that failed."""
    running = list(context.processes)
    while running:
        sentinels = [process.sentinel for process in running]
        wait(sentinels, timeout=POLL_INTERVAL_S)
        if _has_failed(context, job):
            raise _cause(context, job)
        running = [process for process in running if process.exitcode is None]


def _has_failed(context: Any, job: Job) -> bool:
    if _failures(job):
        return True
    return any(process.exitcode for process in context.processes)


def _failures(job: Job) -> dict[int, FeedmillError]:
    """Return the errors that processes have left, by rank."""
    failures = {}
    for number in range(len(job.shares)):
        path = job.folder / FAILURE.format(number)
        if not path.exists():
            continue
        failure = json.loads(path.read_text())
        kind: type[FeedmillError] = PeerLost
        if failure["kind"] != PeerLost.__name__:
            kind = getattr(errors, failure["kind"], UserError)
        failures[number] = kind(failure["text"])
    return failures


def _cause(context: Any, job: Job) -> FeedmillError:
    """Return the error of the process that failed first: the others only lost it.

    They can notice that before its end is known, so this waits for it.
    """
    deadline = time.monotonic() + GRACE_S
    while not _is_known(context, job) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S / 10)
    codes = [process.exitcode for process in context.processes]
    for number, code in enumerate(codes):
        if code is not None and code < 0:
            return UserError(
                f"{_named(job, number)} was ended by signal {-code}, and the others were stopped. "
                "Linux sends signal 9 when memory runs out. The same command continues from the "
                "last checkpoint."
            )
    failures = _failures(job)
    own_error = _own_error(failures.values())
    if own_error is not None:
        return own_error
    failed = [number for number, code in enumerate(codes) if code]
    for number in failed:
        trace = Path(context.error_files[number])
        if trace.exists() and trace.stat().st_size:
            return UserError(
                f"{_named(job, number)} failed, and the others were stopped: {_last_line(trace)}"
            )
    number = next(iter(failed), 0)
    if number in failures:
        return failures[number]
    return UserError(f"{_named(job, number)} ended with status {codes[number]}.")


def _own_error(errors_of_processes: Iterable[FeedmillError]) -> FeedmillError | None:
    """Return the first error that is not the loss of another process, one of a full device before
    others; None if there is none.
    """
    own_errors = [
        error for error in errors_of_processes if not isinstance(error, PeerLost)
    ]
    for error in own_errors:
        if isinstance(error, DeviceFull):
            return error
    return next(iter(own_errors), None)


def _is_known(context: Any, job: Job) -> bool:
    """Return whether a process has failed for another reason than that it lost one."""
    failures = _failures(job)
    if any(not isinstance(error, PeerLost) for error in failures.values()):
        return True
    return any(
        process.exitcode and number not in failures
        for number, process in enumerate(context.processes)
    )


def _named(job: Job, number: int) -> str:
    count = len(job.shares)
    device = job.shares[number].name
    return f"Process {number + 1} of {count} ({device})"


def _last_line(trace: Path) -> str:
    """Return the last line of the traceback that torch pickled."""
    import pickle  # noqa: PLC0415 - written by our own process, in a folder of this user

    text: str = pickle.loads(trace.read_bytes())  # noqa: S301
    lines = text.strip().splitlines()
    if lines:
        return printable(lines[-1])
    return "unknown error"


def _stop(running: Sequence[Any]) -> None:
    """End the processes that still run, and wait for them."""
    for process in running:
        if process.is_alive():
            process.terminate()
    for process in running:
        process.join(GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()
    console = notes_console()
    if console.is_terminal:
        console.show_cursor()  # a progress bar may have hidden it


def _work(number: int, job: Job) -> None:
    """Train as the process of this rank."""
    os.environ.update(job.environment(number))
    share = job.shares[number]
    if share.processors and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share.processors)
        torch.set_num_threads(len(share.processors))
    if sys.platform == "linux":
        os.environ.setdefault(INTERFACE, LOOPBACK)
    if number:
        warnings.simplefilter("ignore")  # rank 0 shows the same ones
    report = Report(notes_console() if number == 0 else None)
    try:
        with explain_lost_peers():
            _train(number, job, report)
    except FeedmillError as error:
        _leave_failure(job.folder / FAILURE.format(number), error)
        sys.exit(1)
    finally:
        report.stop()


def _train(number: int, job: Job, report: Report) -> None:
    from feedmill.training.finetune import Training  # noqa: PLC0415 - it imports this module

    distributed.init_process_group(
        GPU_BACKEND if job.gpus else CPU_BACKEND,
        init_method=f"file://{job.folder}/rendezvous",
        rank=number,
        world_size=len(job.shares),
    )
    training = Training(
        job.dataset,
        job.options,
        job.settings_of(number),
        report,
        job.batch,
    )
    trained = training.run()
    if number == 0:
        trained.save(Path(job.options.out))
        with replacing(job.folder / RECORD) as temporary:
            temporary.write_text(json.dumps(trained.record))
    distributed.barrier()  # the others wait for rank 0, whose failure would otherwise be theirs
    with suppress(RuntimeError):
        leave()


def _leave_failure(path: Path, error: FeedmillError) -> None:
    failure = {"kind": type(error).__name__, "text": str(error)}
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(failure))
