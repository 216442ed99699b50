"""The structure of a state taken apart: what a layout and the division over ranks follow from."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter, eq, is_

import torch

from holdfast.errors import UnsupportedStateError

from ..tree.flatten import Flat
from ..tree.sharded import Region

__all__ = ["Signature", "fits", "signature"]


@dataclass(slots=True)
class Signature:
    """The structure of a flat state: two saves with equal signatures share one layout."""

    names: list[str]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    files: list[str]
    frozen: set[int]
    aliases: dict[int, int]  # position -> position of the tensor it is tied to
    own: list[int]
    replicated: list[int]
    regions: dict[int, Region]
    loose: list[int] = field(default_factory=list)


def signature(flat: Flat) -> Signature:
    """Return the structure of ``flat``; linear, and cheap enough for 100 000 tensors at every save."""
    return Signature(
        flat.names,
        [tensor.dtype for tensor in flat.tensors],
        [tensor.shape for tensor in flat.tensors],
        flat.files,
        flat.frozen,
        _aliases(flat),
        flat.own,
        flat.replicated,
        flat.regions,
        flat.loose,
    )


def fits(sig: Signature, flat: Flat) -> bool:
    """Tell whether ``flat`` has this structure, without building its own signature: four times as fast."""
    tensors = flat.tensors
    return (
        sig.names == flat.names
        and all(map(eq, map(attrgetter("shape"), tensors), sig.shapes))
        and all(map(is_, map(attrgetter("dtype"), tensors), sig.dtypes))
        and sig.files == flat.files
        and sig.frozen == flat.frozen
        and sig.replicated == flat.replicated
        and sig.own == flat.own
        and sig.loose == flat.loose
        and sig.regions == flat.regions
        and sig.aliases == _aliases(flat)
    )


def _aliases(flat: Flat) -> dict[int, int]:
    """Find tensors that are the same memory seen the same way (tied weights).

    Raises:
        UnsupportedStateError: a tensor has no memory (any more).
    """
    tensors, regions = flat.tensors, flat.regions
    pointers = [tensor.data_ptr() for tensor in tensors]
    if 0 in pointers:
        _check_memory(flat, pointers)
    if len(set(pointers)) == len(pointers):
        return {}
    first: dict[tuple[object, ...], int] = {}
    aliases = {}
    for number, (tensor, pointer) in enumerate(zip(tensors, pointers, strict=True)):
        if not pointer:
            continue  # an empty tensor is nobody's alias
        seen = (pointer, tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        key = (*seen, regions.get(number))
        original = first.setdefault(key, number)
        if original != number:
            aliases[number] = original
    return aliases


def _check_memory(flat: Flat, pointers: list[int]) -> None:
    for name, tensor, pointer in zip(flat.names, flat.tensors, pointers, strict=True):
        if not pointer and tensor.is_cpu and tensor.numel():
            raise UnsupportedStateError(
                f"{name!r}, a tensor of shape {list(tensor.shape)}, has no memory: its storage was freed (fully "
                "sharded modules do that with gathered parameters): save between two steps"
            )
