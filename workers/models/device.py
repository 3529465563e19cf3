"""Choose the worker's device and precision, and say why.

Relies on torch's private operator `_is_mkldnn_bf16_supported`; without it, torch is trusted.
"""

import os
import platform
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from feedmill.shared import linux
from feedmill.shared.errors import SettingsError
from feedmill.workers.models.shapes import EXACT, FEW, Shapes

#: True in a process of Ray whose OMP_NUM_THREADS is 1: Ray sets it for tasks of one CPU, the
#: default.
HAS_RAYS_DEFAULT = (
    os.environ.get("OMP_NUM_THREADS") == "1" and "RAY_RAYLET_PID" in os.environ
)
#: Number of cores that torch uses. OMP_NUM_THREADS overrides the default, except for Ray's.
TORCH_THREADS = (
    len(linux.allowed_cpus()) if HAS_RAYS_DEFAULT else torch.get_num_threads()
)
#: Maximum parallel forward passes on a CPU. Each needs Python's global interpreter lock between
#: operations.
MAX_LANES = 4
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}
#: Model types that overflow in float16 whatever their configuration says: gte-Qwen2 and
#: EmbeddingGemma are stored in float32, but their base models were trained in bfloat16. vLLM
#: refuses all of these but qwen2 in float16.
BFLOAT16_TYPES = frozenset(
    {"gemma2", "gemma3", "gemma3_text", "glm4", "plamo2", "qwen2"}
)
#: Options of glibc's `mallopt` (malloc.h) and their values: return memory at the end of the heap
#: to the system only beyond 2 GiB, take up to 1 GiB from the heap, and use one heap for all
#: threads, from which little is returned.
MALLOC_OPTIONS = {-1: 2**31 - 1, -3: 2**30, -8: 1}
#: Precisions of the engines that run a graph, by engine and device type; the default first.
GRAPH_DTYPES: dict[str, dict[str, tuple[str, ...]]] = {
    "onnx": {"cpu": ("float32", "int8"), "cuda": ("float16", "float32")},
    "tensorrt": {"cuda": ("float16", "float32")},
}
#: Libraries that run the graphs, as users know them.
GRAPH_LIBRARIES = {"onnx": "ONNX Runtime", "tensorrt": "TensorRT"}

#: The type's name within Device, whose field `torch` hides the package.
TorchDevice = torch.device


class Precision(NamedTuple):
    """A precision, and the reason for it: a sentence, or the library that decides."""

    dtype: torch.dtype
    reason: str


class Selection(NamedTuple):
    """A device of torch, and the reason for it, or the device's name."""

    torch: torch.device
    reason: str


class Device(NamedTuple):
    """A torch device and its precision. `reason` and `dtype_reason` say how they were chosen."""

    torch: torch.device
    dtype: torch.dtype
    reason: str
    dtype_reason: str = "precision as set"
    #: True if the setting `dtype` is auto, so that the model may need another precision.
    automatic: bool = False
    #: More GPUs over which the model is spread. The inputs and outputs of a forward pass are on
    #: `torch`, the first.
    others: tuple[TorchDevice, ...] = ()
    #: Equal parts into which the CPU's cores are divided. This device is one of them.
    parts: int = 1

    @property
    def name(self) -> str:
        """The device's name in results: cpu, mps, cuda:2, or cuda:2+3 for a model on two GPUs.

        If CUDA_VISIBLE_DEVICES is set, a GPU's number is taken from that variable. torch numbers
        the visible GPUs from 0, so workers with one visible GPU each would all report cuda:0.
        """
        if self.torch.type != "cuda":
            return str(self.torch)
        numbers = [_gpu_name(gpu) for gpu in self.all]
        joined = "+".join(numbers)
        return f"cuda:{joined}"

    @property
    def all(self) -> tuple[TorchDevice, ...]:
        """The devices that have a part of the model."""
        return (self.torch, *self.others)

    @property
    def threads(self) -> int:
        """Number of cores that the device computes with, if it is a CPU."""
        return max(1, TORCH_THREADS // self.parts)

    @property
    def lanes(self) -> int:
        """Number of parallel forward passes: up to one per core on a CPU, otherwise one.

        Parallel passes use the cores better than one pass on all cores, because cores that share a
        pass wait for the slowest one after every operation.
        """
        if self.torch.type == "cpu":
            return min(self.threads, MAX_LANES)
        return 1

    @property
    def shapes(self) -> Shapes:
        """The shapes to which engines pad micro-batches on this device."""
        if self.torch.type == "cuda":
            return FEW
        return EXACT

    def take_share(self, passes: int) -> None:
        """Limit the calling thread to its share of the cores while `passes` forward passes run in
        parallel.
        """
        if self.torch.type == "cpu":
            share = self.threads // passes
            torch.set_num_threads(max(1, share))

    def give_back(self) -> None:
        """Release cached memory that no tensor uses."""
        if self.torch.type == "cuda":
            torch.cuda.empty_cache()
        elif self.torch.type == "mps":
            torch.mps.empty_cache()

    @property
    def hardware(self) -> str:
        """The name of the processor or GPU; for a CPU, with its number of threads."""
        if self.torch.type == "cuda":
            names = map(torch.cuda.get_device_name, self.all)
            return " + ".join(names)
        if self.torch.type == "mps":
            return "Apple GPU"
        processor = linux.processor() or platform.processor() or platform.machine()
        return f"{processor}, {self.threads} threads"

    @property
    def precision(self) -> str:
        """The name of the precision, as in the setting `dtype`."""
        return str(self.dtype).removeprefix("torch.")

    def for_model(self, config: Mapping[str, Any], engine: str) -> "Device":
        """Return this device in the precision that a model needs, unless the setting `dtype`
        determines it.

        config: the model's config.json. Values of a model that was trained in bfloat16 may exceed
        65,504, the maximum of float16; scores can then be wrong without being infinite. Every
        other default suits every model.
        """
        if not self.automatic:
            return self
        default = _default_precision(self.torch, engine)
        bfloat16_reason = None
        if default.dtype == torch.float16:
            bfloat16_reason = _bfloat16_reason(config)
        if bfloat16_reason is None:
            return self._replace(
                dtype=default.dtype,
                dtype_reason=default.reason,
            )
        lacking = GRAPH_LIBRARIES.get(engine)
        if lacking is None and not has_bfloat16(self.torch):
            lacking = "this GPU"
        if lacking is None:
            return self._replace(
                dtype=torch.bfloat16,
                dtype_reason=bfloat16_reason,
            )
        return self._replace(
            dtype=torch.float32,
            dtype_reason=f"{bfloat16_reason}, which {lacking} lacks",
        )

    def __str__(self) -> str:
        return f"{self.name} in {self.precision}: {self.reason}; {self.dtype_reason}"


def select_device(
    device: str = "auto", dtype: str = "auto", engine: str = "torch"
) -> Device:
    """Return the device for the settings `device`, `dtype` and `engine`.

    Raises SettingsError if the machine lacks the device, or the engine does not support the
    precision.
    """
    if "+" in device:
        return _spread(device, dtype, engine)
    selection = _select(device)
    torch_device = selection.torch
    _check_support(engine, torch_device, dtype)
    if dtype == "auto":
        precision = _default_precision(torch_device, engine)
        return Device(
            torch=torch_device,
            dtype=precision.dtype,
            reason=selection.reason,
            dtype_reason=precision.reason,
            automatic=True,
        )
    return Device(
        torch=torch_device,
        dtype=DTYPES[dtype],
        reason=selection.reason,
    )


def _check_support(engine: str, torch_device: torch.device, dtype: str) -> None:
    """Raise SettingsError if an engine does not support the device, or the precision there."""
    possible = _precisions(engine, torch_device)
    if not possible:
        others = "torch, or FEEDMILL_DEVICE=cpu"
        if torch_device.type == "cpu":
            others = "torch or onnx"
        raise SettingsError(
            f"FEEDMILL_ENGINE: {engine} does not support {torch_device}. Set {others}."
        )
    if dtype not in ("auto", *possible):
        choices = " or ".join(possible)
        raise SettingsError(
            f"FEEDMILL_DTYPE: {engine} does not support {dtype} on {torch_device}. Set "
            f"{choices}; int8 needs FEEDMILL_ENGINE=onnx and FEEDMILL_DEVICE=cpu."
        )


def select_devices(
    devices: str | None, device: str, dtype: str, engine: str
) -> list[Device]:
    """Return the devices for the setting `devices`, each with a model of its own; the one in
    `device` if it is None.

    Raises SettingsError as `select_device` does.
    """
    if devices is None:
        only_device = select_device(device, dtype, engine)
        return [only_device]
    kind, _, number = devices.partition(":")
    if kind == "cpu":
        parts = int(number or 1)
        return _parts_of_cpu(parts, dtype, engine)
    groups = devices.split(",")
    if devices in ("all", "auto"):
        if not torch.cuda.is_available():
            if devices == "auto":
                best_device = select_device("auto", dtype, engine)
                return [best_device]
            return _parts_of_cpu(1, dtype, engine)
        count = torch.cuda.device_count()
        groups = [str(index) for index in range(count)]
    _check_gpus(groups)
    gpus = []
    for group in groups:
        gpu = select_device(f"cuda:{group}", dtype, engine)
        gpus.append(gpu)
    return gpus


def _check_gpus(groups: list[str]) -> None:
    """Raise SettingsError if the setting `devices` names a GPU that does not exist, or one GPU
    twice for one model.

    groups: such as 0, or 0+1.
    """
    count = torch.cuda.device_count()
    for group in groups:
        numbers = [int(number) for number in group.split("+")]
        for number in numbers:
            if number >= count:
                raise SettingsError(
                    f"FEEDMILL_DEVICES: GPU {number} does not exist; torch sees {count} CUDA "
                    "devices, numbered from 0. Set existing ones, all, or cpu."
                )
        distinct = set(numbers)
        if len(distinct) < len(numbers):
            raise SettingsError(
                f"FEEDMILL_DEVICES: {group} names a GPU twice. Name each once."
            )


def _parts_of_cpu(parts: int, dtype: str, engine: str) -> list[Device]:
    if parts > TORCH_THREADS:
        raise SettingsError(
            f"FEEDMILL_DEVICES: cpu:{parts} needs a core for each part, but torch uses "
            f"{TORCH_THREADS}. Set cpu:{TORCH_THREADS} or fewer."
        )
    cpu = select_device("cpu", dtype, engine)
    part = cpu._replace(parts=parts)
    return [part] * parts


def _spread(device: str, dtype: str, engine: str) -> Device:
    """Return several GPUs as one device for a model that does not fit one of them.

    Raises SettingsError.
    """
    if engine != "torch":
        raise SettingsError(
            f"FEEDMILL_ENGINE: {engine} runs a model on one device, not on {device}. Set torch, "
            "or one GPU."
        )
    group = device.removeprefix("cuda:")
    numbers = group.split("+")
    distinct = set(numbers)
    if len(distinct) < len(numbers):
        raise SettingsError(
            f"FEEDMILL_DEVICE: {device} names a GPU twice. Name each once."
        )
    gpus = []
    reasons = []
    for number in numbers:
        gpu = select_device(f"cuda:{number}", dtype, engine)
        gpus.append(gpu)
        reasons.append(gpu.reason)
    first, *others = gpus
    return first._replace(
        reason=" + ".join(reasons),
        others=tuple(gpu.torch for gpu in others),
    )


def _gpu_name(gpu: torch.device) -> str:
    """Return a GPU's number or name in CUDA_VISIBLE_DEVICES, or else torch's number."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",")
    index = gpu.index or 0
    if index < len(names):
        name = names[index]
        if name:
            return name.strip()
    return str(index)


def for_training(device: Device, wanted: str = "auto") -> Precision:
    """Return the precision of the forward and backward passes.

    Weights and their updates are always float32. float16 needs loss scaling, bfloat16 does not.
    wanted: the setting `dtype`. Raises SettingsError if the device does not support training in
    this precision.
    """
    on_cuda = device.torch.type == "cuda"
    if wanted == "int8" or (wanted == "float16" and not on_cuda):
        raise SettingsError(
            f"FEEDMILL_DTYPE: {device.name} does not train in {wanted}. Set auto, "
            "bfloat16 or float32."
        )
    if wanted != "auto":
        return Precision(DTYPES[wanted], "precision as set")
    if on_cuda:
        if has_bfloat16(device.torch):
            return Precision(torch.bfloat16, "this GPU has bfloat16 in hardware")
        return Precision(torch.float16, "this GPU has no bfloat16; the loss is scaled")
    if device.torch.type == "cpu":
        return _half_precision(device.torch)
    return Precision(torch.float32, "mixed precision is untested on Apple GPUs")


def _select(wanted: str) -> Selection:
    is_auto = wanted == "auto"
    if wanted.startswith("cuda") or (is_auto and torch.cuda.is_available()):
        return _select_cuda(wanted)
    has_mps = torch.backends.mps.is_available()
    if wanted == "mps" and not has_mps:
        raise SettingsError(
            "FEEDMILL_DEVICE: mps is not available: torch finds no Apple GPU. Set auto or cpu."
        )
    if wanted == "mps" or (is_auto and has_mps):
        return Selection(torch.device("mps"), "Apple GPU")
    reason = "no GPU found"
    if wanted == "cpu":
        reason = "as set"
    return Selection(torch.device("cpu"), reason)


def _select_cuda(wanted: str) -> Selection:
    _, _, number = wanted.partition(":")
    index = int(number or 0)
    count = torch.cuda.device_count()
    if index >= count:
        raise SettingsError(
            f"FEEDMILL_DEVICE: {wanted} is not available: torch finds {count} CUDA devices. "
            "Set auto or cpu."
        )
    name = torch.cuda.get_device_name(index)
    return Selection(torch.device("cuda", index), reason=name)


def limit_memory(device: torch.device, share: float) -> None:
    """Let this process use at most a share of the GPU's memory.

    Beyond it, torch raises OutOfMemoryError.
    """
    if device.type == "cuda" and share < 1:
        torch.cuda.set_per_process_memory_fraction(share, device)


class PeakMemory(NamedTuple):
    """A GPU's memory in bytes: the most that torch has reserved, and all; 0 without a GPU."""

    peak: int = 0
    total: int = 0


def measure_peak_memory(device: Device) -> None:
    """Begin a new measurement of `peak_memory`."""
    device.give_back()
    if device.torch.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device.torch)


def peak_memory(device: Device) -> PeakMemory:
    """Return the most memory that this process has reserved since `measure_peak_memory`."""
    if device.torch.type == "cuda":
        properties = torch.cuda.get_device_properties(device.torch)
        return PeakMemory(
            peak=torch.cuda.max_memory_reserved(device.torch),
            total=properties.total_memory,
        )
    return PeakMemory()


def keep_freed_memory(device: torch.device) -> None:
    """Let this process keep memory that a micro-batch on a CPU has freed, for the next one.

    glibc returns the largest blocks to the system, which clears each page when it is used again:
    6% of the time with all-MiniLM-L6-v2 in bfloat16. Does nothing with another C library, or if
    the environment sets glibc's options.
    """
    if device.type != "cpu":
        return
    for name in os.environ:
        if name == "GLIBC_TUNABLES" or name.startswith("MALLOC_"):
            return
    linux.set_malloc_options(MALLOC_OPTIONS)


def _default_precision(device: torch.device, engine: str) -> Precision:
    """Return the precision that suits most models."""
    if engine in GRAPH_DTYPES:
        default, *_ = _precisions(engine, device)
        return Precision(DTYPES[default], reason=GRAPH_LIBRARIES[engine])
    return _half_precision(device)


def _precisions(engine: str, device: torch.device) -> tuple[str, ...]:
    """Return the precisions that an engine supports on a device; none if it does not run there."""
    if engine in GRAPH_DTYPES:
        by_device = GRAPH_DTYPES[engine]
        return by_device.get(device.type, ())
    return ("float32", "bfloat16", "float16")


def _bfloat16_reason(config: Mapping[str, Any]) -> str | None:
    """Return why a model needs bfloat16's range, by its config.json; None if float16 suffices."""
    parts = [config]
    text = config.get("text_config")  # of a model that reads images, too
    if isinstance(text, Mapping):
        parts.append(text)
    for part in parts:
        stored = part.get("dtype") or part.get("torch_dtype")
        if str(stored).removeprefix("torch.") == "bfloat16":
            return "the model's configuration asks for bfloat16"
        model_type = part.get("model_type")
        if model_type in BFLOAT16_TYPES:
            return f"{model_type} models need bfloat16"
    return None


def has_bfloat16(device: torch.device) -> bool:
    """Return whether the hardware computes in bfloat16, without emulation."""
    if device.type == "cuda":
        if torch.version.hip is not None:
            return True
        capability = torch.cuda.get_device_capability(device)
        return capability >= (8, 0)
    if device.type == "mps":
        return torch.backends.mps.is_macos_or_newer(14, 0)
    return _half_precision(device).dtype == torch.bfloat16


def _half_precision(device: torch.device) -> Precision:
    """Return half precision if the hardware supports it, otherwise float32.

    Emulation is slower.
    """
    if device.type != "cpu":
        return Precision(torch.float16, "GPUs compute in half precision")
    capabilities = torch.cpu.get_capabilities()
    for feature in ("amx_bf16", "avx512_bf16", "bf16"):
        if not capabilities.get(feature):
            continue
        if onednn_has_bfloat16():
            return Precision(torch.bfloat16, f"this CPU has {feature}")
        reason = f"this CPU has {feature}, but oneDNN does not use it (see ONEDNN_MAX_CPU_ISA)"
        return Precision(torch.float32, reason)
    return Precision(torch.float32, "this CPU has no bfloat16 in hardware")


def onednn_has_bfloat16() -> bool:
    """Return whether oneDNN multiplies in bfloat16.

    ONEDNN_MAX_CPU_ISA can exclude the instructions for it.
    """
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    if supported is None:
        return True
    return bool(supported())
