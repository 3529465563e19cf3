"""Spread a model over several devices, layer after layer, because it does not fit one of them.

transformers loads each module onto its device; hooks of accelerate move the values from one device
to the next in a forward pass. One device computes at a time, so this is for models that are too
large for one device, not for speed.

Relies on `_no_split_modules` of transformers' models: the modules that stay on one device.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from feedmill.shared.errors import ModelError, explain_missing
from feedmill.workers.models.device import Device

#: Returns the device of each module by its name, for a model without weights (on torch's device
#: meta).
DeviceMapper = Callable[[Any], dict[str, Any]]
#: Share of a device's free memory for weights. The rest is for the values of a micro-batch.
WEIGHTS_SHARE = 0.8


def device_mapper(device: Device) -> DeviceMapper | None:
    """Return how to spread a model over the device's GPUs, by their free memory; None for a single
    one.

    Raises UserError if accelerate is not installed.
    """
    if not device.others:
        return None
    limits: dict[Any, int] = {}
    for gpu in device.all:
        free, _ = torch.cuda.mem_get_info(gpu)
        limits[gpu.index] = int(free * WEIGHTS_SHARE)
    return partial(
        map_devices,
        limits=limits,
        dtype=device.dtype,
    )


def map_devices(
    model: Any, limits: Mapping[Any, int], dtype: torch.dtype
) -> dict[str, Any]:
    """Return the device of each module by its name.

    A layer stays whole; devices are filled in order, evenly on GPUs.

    model: without weights. limits: bytes for weights, by device. Raises ModelError if the weights
    do not fit, and UserError if accelerate is not installed.
    """
    with explain_missing("A model on several GPUs", "train"):
        from accelerate import infer_auto_device_map  # noqa: PLC0415 - an extra
        from accelerate.utils import get_balanced_memory  # noqa: PLC0415

    whole = list(model._no_split_modules or ())
    even = get_balanced_memory(
        model,
        dict(limits),
        whole,
        dtype,
    )
    max_memory = {name: even[name] for name in limits}
    max_memory["cpu"] = 0
    devices: dict[str, Any] = infer_auto_device_map(
        model,
        max_memory=max_memory,
        no_split_module_classes=whole,
        dtype=dtype,
    )
    for name, device in devices.items():
        if device in limits:
            continue
        total_bytes = sum(limits.values())
        raise ModelError(
            f"The model does not fit its {len(limits)} devices, which have "
            f"{total_bytes / 1e9:.1f} GB for weights: no room for {name}. Name more GPUs, or use "
            "half precision (FEEDMILL_DTYPE)."
        )
    return devices
