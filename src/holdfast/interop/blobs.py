"""A tensor as bytes that somebody can be asked for: what exporters and importers pass to one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from holdfast.format.layout import item_size

if TYPE_CHECKING:
    import torch

__all__ = ["Blob", "cast"]


@dataclass(frozen=True, slots=True, eq=False)
class Blob:
    """One tensor.

    Attributes:
        name: for messages.
        dtype: name as torch has it.
        shape: its size.
        parts: starts a pass over its bytes in row-major order; each view is valid until the next, and whole elements.
        itemsize: bytes of an element.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[memoryview]]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * self.itemsize


def cast(blob: Blob, dtype: torch.dtype) -> Blob:
    """Return a floating blob in another floating dtype; converted on the way. Others are returned as they are."""
    import torch

    have = getattr(torch, blob.dtype)
    if have is dtype or not have.is_floating_point:
        return blob
    if not dtype.is_floating_point:
        raise ValueError(f"{dtype} is no floating dtype")

    def parts() -> Iterator[memoryview]:
        for view in blob.parts():
            if len(view):
                converted = torch.frombuffer(view, dtype=torch.uint8).view(have).to(dtype)
                yield memoryview(converted.view(torch.uint8).numpy().data)

    name = str(dtype)[6:]
    return replace(blob, dtype=name, parts=parts, itemsize=item_size(name) or dtype.itemsize)
