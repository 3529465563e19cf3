"""Linear layers with weights in oneDNN's own layout, for bfloat16 on x86 CPUs.

`torch.nn.Linear` passes its weights to oneDNN as they are, and copies the bias into the result before each product.
The layers here reorder their weights once, when a model is loaded, and add the bias within the product.
"""

import platform

import torch

from workers.models.device import Device, onednn_has_bfloat16
from workers.models.engines.packing import PACKABLE_TYPES

#: Architectures whose linear layers are replaced: those that call the layers and never read their weights. Tests
#: compare each with transformers' own model.
REORDERED_TYPES = PACKABLE_TYPES | {"bart", "deberta-v2"}


class ReorderedLinear(torch.nn.Module):
    """A linear layer for inference. Its weights have no gradients and belong to no state_dict."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(states, self.weight, self.bias, "none", [], "")
        return product


def can_reorder(device: Device) -> bool:
    """Return whether this machine's oneDNN gains from reordered weights in the device's precision."""
    return (
        device.torch.type == "cpu"
        and device.dtype == torch.bfloat16
        and platform.machine().lower() in ("x86_64", "amd64")
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and onednn_has_bfloat16()
    )


def reorder_linear_layers(module: torch.nn.Module) -> None:
    """Replace the linear layers within a module, one by one, so that no more than one has its weights twice."""
    for name, child in module.named_children():
        if type(child) is torch.nn.Linear:  # subclasses may be read by their owners
            setattr(module, name, ReorderedLinear(child))
        else:
            reorder_linear_layers(child)
