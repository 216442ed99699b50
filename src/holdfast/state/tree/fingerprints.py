"""Small fingerprints of tensors that all ranks are taken to hold alike: where they are not, it shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.format.digest import chunk_digests

__all__ = ["fingerprints"]

_ELEMENTS = 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return a digest of sixteen elements of each tensor, from the first to the last; none of them may be empty.

    Waits for the devices of the tensors.
    """
    by_device: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(number)
    found = [""] * len(tensors)
    for device, numbers in by_device.items():
        steps = torch.arange(_ELEMENTS, device=device)
        rows = torch.stack([_elements(tensors[number].detach(), steps) for number in numbers]).cpu()
        for number, row in zip(numbers, rows.numpy(), strict=True):
            found[number] = chunk_digests(memoryview(row.tobytes())).hex()
    return found


def _elements(tensor: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Pick elements as the integers their bits are: comparing has to tell 0.0 from -0.0 and one NaN from another."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.resolve_neg().view(_INTEGERS[tensor.itemsize])
    return bits.take(steps * (bits.numel() - 1) // (_ELEMENTS - 1)).to(torch.int64)
