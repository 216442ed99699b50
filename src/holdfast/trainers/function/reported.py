"""Batches of any make on their way to a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast.state.accelerator import has_streams

__all__ = ["Transfer"]


class Transfer:
    """Moves every tensor of a batch to a device.

    With ``overlap`` a device with streams copies on one of its own, beside the kernels that still run for the batch
    before; that needs ``pin_memory=True`` of the loader. The batch may be used at once either way.
    """

    def __init__(self, device: torch.device, *, overlap: bool = True) -> None:
        self.device = device
        self._overlap = overlap and has_streams(device)
        self._stream: Any = None

    def __call__(self, batch: Any) -> Any:
        """Return the batch on the device; what is there already is not copied."""
        if not self._overlap:
            return self._move(batch)
        module = torch.get_device_module(self.device)
        if self._stream is None:
            self._stream = module.Stream(self.device)
        with module.stream(self._stream):
            moved = self._move(batch)
        current = module.current_stream(self.device)
        current.wait_stream(self._stream)
        _record(moved, current)
        return moved

    def _move(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self.device, non_blocking=self._overlap)
        if callable(getattr(value, "to", None)):  # PackedSequence (a tuple too), BatchEncoding, graphs
            return value.to(self.device)
        if isinstance(value, tuple):
            items = [self._move(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, list):
            return [self._move(item) for item in value]
        if type(value) is dict:
            return {key: self._move(item) for key, item in value.items()}
        if isinstance(value, Mapping):
            moved = {key: self._move(item) for key, item in value.items()}
            try:
                return type(value)(moved)  # type: ignore[call-arg]
            except TypeError:
                return moved
        return value


def _record(value: Any, stream: Any) -> None:
    """Keep the memory of a batch from being reused before ``stream`` is done with it."""
    if isinstance(value, torch.Tensor):
        value.record_stream(stream)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _record(item, stream)
    elif isinstance(value, Mapping):
        for item in value.values():
            _record(item, stream)
