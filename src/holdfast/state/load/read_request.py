"""One read that a load has planned: the value that planning, sharing and reading have in common."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["ReadRequest"]


@dataclass(slots=True)
class ReadRequest:
    """One stored byte range and the tensor it goes to.

    Attributes:
        name: name of the tensor, for messages.
        file: path inside the checkpoint.
        offset: first byte within the file.
        nbytes: number of bytes.
        dtype: stored dtype.
        target: where it goes: same number of elements; any device, strides or floating dtype.
        within: (shape, slices) if only a part of these bytes is wanted: they are an array of this shape.
    """

    name: str
    file: str
    offset: int
    nbytes: int
    dtype: torch.dtype
    target: torch.Tensor
    within: tuple[tuple[int, ...], tuple[slice, ...]] | None = None
