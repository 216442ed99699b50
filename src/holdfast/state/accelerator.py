"""Which accelerator this process has, by the names torch gives to all of them.

CUDA (ROCm too), XPU, NPU and backends of others have the same module: devices, streams, events, generators. MPS is not
chosen unless it is named: it has no float64, so a script that says nothing may not run there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def accelerator() -> str | None:
    """Return the type of the accelerator of this machine ("cuda", "xpu", ...); None without one. Starts nothing."""
    if torch.cuda.is_available():
        return "cuda"
    generic = getattr(torch, "accelerator", None)  # torch >= 2.6
    if generic is None or not generic.is_available():
        return None
    device = generic.current_accelerator()
    return None if device is None else str(device.type)


def has_streams(device: torch.device) -> bool:
    """Tell whether a device works on streams; another one (MPS, XLA) blocks while it copies, as the CPU does."""
    return device.type != "cpu" and hasattr(getattr(torch, device.type, None), "current_stream")


def any_on_device(tensors: Iterable[torch.Tensor]) -> bool:
    """Tell whether any tensor lives on an accelerator."""
    return not all(tensor.is_cpu for tensor in tensors)


def default_device(local_rank: int) -> torch.device:
    """Return the device of a process: one of the accelerators of this machine, the CPU where there is none.

    Args:
        local_rank: number of the process on this machine.
    """
    kind = accelerator()
    if kind is None or kind == "mps":
        return torch.device("cpu")
    return torch.device(kind, local_rank % max(1, torch.get_device_module(kind).device_count()))


def make_current(device: torch.device) -> None:
    """Make a device the current one of its type, where there can be several."""
    module = getattr(torch, device.type, None)
    if device.type != "cpu" and module is not None and hasattr(module, "set_device"):
        module.set_device(device)


def group_backend(kind: str) -> str:
    """Return what ranks with such devices talk over ("nccl" for "cuda"); gloo where torch names nothing."""
    if kind == "cuda":
        return "nccl"
    named = getattr(torch.distributed, "get_default_backend_for_device", None)  # torch >= 2.6
    try:
        return "gloo" if named is None else str(named(kind))
    except ValueError:
        return "gloo"


def move(value: Any, device: torch.device, *, non_blocking: bool) -> Any:
    """Move every tensor of a batch to a device, whatever the batch is made of; what is there already is not copied."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=non_blocking)
    if callable(getattr(value, "to", None)):  # PackedSequence (a tuple too), BatchEncoding, graphs
        return value.to(device)
    moved: Any
    if isinstance(value, Mapping):
        moved = {key: move(item, device, non_blocking=non_blocking) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        moved = [move(item, device, non_blocking=non_blocking) for item in value]
    else:
        return value
    try:
        return value._make(moved) if hasattr(value, "_make") else type(value)(moved)
    except TypeError:  # of a class of its own, which takes other arguments
        return tuple(moved) if isinstance(value, tuple) else moved
