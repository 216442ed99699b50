"""Checksums of tensors that a device takes before a copy and the CPU after it, with the same result.

A tensor is read once, as words of eight bytes. Word ``i`` is added to column ``i % columns``, with wrapping integers;
the high half of each sum is mixed into its low half, and the sums are added with a random odd weight for each column.
The number of columns is odd and random, so that rows of a matrix lie at another column each: what exchanges, turns,
moves or negates elements changes the sum, as everything does that does not happen to leave the sums of all columns as
they are. A changed sign in the high half of a word adds 2**63 to its column, so two of these in one column cancel: that
takes two elements that lie a multiple of the random number of columns apart, and nothing else that changes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch

from holdfast.format.digest import chunk_digests

__all__ = ["Checksums", "fingerprints", "is_checked"]

MIN_BYTES = 64 << 10  # below, a copy costs a device less than a checksum
_ELEMENTS = 16  # elements of a tensor in its fingerprint
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COLUMNS = range(4097, 8192, 2)
_TOGETHER = 64  # tensors whose sums are mixed at once; bounds the memory that it takes on a device to some megabytes


def is_checked(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has a checksum: it is large, and whole words in memory.

    Elements of eight bytes have none: all of their signs are the highest bit of a word, so a change of signs alone
    shows only in columns with an odd number of them. Of smaller elements, those in the low half of a word show too.
    """
    return (
        tensor.nbytes >= MIN_BYTES
        and not tensor.nbytes % 8
        and (tensor.itemsize < 8 or tensor.dtype == torch.complex64)
        and tensor.is_contiguous()
        and not tensor.data_ptr() % 8
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


class Checksums:
    """One way to take checksums; those of two objects differ."""

    def __init__(self) -> None:
        chance = random.SystemRandom()  # draws nothing from a generator that training uses
        self.columns = chance.choice(_COLUMNS)
        self._weights = torch.tensor([chance.getrandbits(63) | 1 for _ in range(self.columns)], device="cpu")
        self._on_device: dict[torch.device, torch.Tensor] = {}

    def prepare(self, device: torch.device) -> None:
        """Bring to a device what its checksums need; waits for it."""
        if device not in self._on_device:
            self._on_device[device] = self._weights.to(device)

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the checksums of tensors of one device, which must be `is_checked`, as a tensor of that device.

        It is the work of about two operations for each, queued on the current stream.
        """
        device = tensors[0].device
        self.prepare(device)
        parts = []
        for start in range(0, len(tensors), _TOGETHER):
            some = tensors[start : start + _TOGETHER]
            sums = torch.empty((len(some), self.columns), dtype=torch.int64, device=device)
            for row, tensor in zip(sums.unbind(), some, strict=True):
                self._add_columns(tensor.detach().view(-1).view(torch.int64), row)
            parts.append(self._mix(sums, self._on_device[device]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def of_memory(self, view: memoryview, offset: int, size: int) -> int:
        """Return the checksum of bytes in host memory, on one thread."""
        words = np.frombuffer(view, np.int64, size // 8, offset)
        whole = len(words) // self.columns * self.columns
        # NumPy, because torch would share the sum among its threads, which belong to training.
        sums = np.add.reduce(words[:whole].reshape(-1, self.columns), axis=0)
        sums[: len(words) - whole] += words[whole:]
        return int(self._mix(torch.from_numpy(sums)[None], self._weights))

    def _add_columns(self, words: torch.Tensor, row: torch.Tensor) -> None:
        whole = len(words) // self.columns * self.columns
        torch.sum(words[:whole].view(-1, self.columns), 0, out=row)
        if whole < len(words):
            row[: len(words) - whole].add_(words[whole:])

    def _mix(self, sums: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (sums ^ (sums >> 32)).mul_(weights).sum(1)


def fingerprints(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return a digest of sixteen elements of each tensor, spread from its first to its last; no tensor may be empty.

    Ranks that are expected to hold equal tensors compare them. Waits for the devices of the tensors.
    """
    by_device: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(number)
    digests = [""] * len(tensors)
    for device, numbers in by_device.items():
        steps = torch.arange(_ELEMENTS, device=device)
        rows = torch.stack([_elements(tensors[number].detach(), steps) for number in numbers]).cpu()
        for number, row in zip(numbers, rows.numpy(), strict=True):
            digests[number] = chunk_digests(memoryview(row.tobytes())).hex()
    return digests


def _elements(tensor: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Pick elements as the integers of their bits, so that 0.0 differs from -0.0, and a NaN from other NaNs."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.resolve_neg().view(_INTEGERS[tensor.itemsize])
    return bits.take(steps * (bits.numel() - 1) // (_ELEMENTS - 1)).to(torch.int64)
