"""`StateCopy`: what is remembered of a state that was saved or loaded, so that a change since then is noticed.

It is asked once, where a run is left whose last step is saved already. Where the copy still lies in its arena, bytes
are compared; else some elements of each tensor, as of a state that was loaded or went through windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from holdfast.format.codec import dumps
from holdfast.writer.arena import Arena

from ..tree.flatten import Flat
from .plan import Layout
from .staging import fingerprints

__all__ = ["StateCopy"]


class StateCopy:
    """A state as it was when it was saved or loaded. Holds none of its tensors.

    Args:
        flat: the state.
        layout: where its tensors lie in ``arena``.
        arena: has the copy, until the next save; None: elements of tensors are noted.
    """

    def __init__(self, flat: Flat, layout: Layout | None = None, arena: Arena | None = None) -> None:
        self._tree, self._per_rank, self._names = flat.tree, flat.per_rank, flat.names
        self._layout, self._arena = layout, arena
        self._whole = frozenset(flat.names[number] for number in flat.whole)
        self._samples = _samples(flat.tensors) if arena is None else []

    def changed(self, now: Flat, *, apart_from: str, within: Container[str] | None = None) -> list[str]:
        """Return the top-level names of what is no longer as it was, sorted.

        Args:
            now: the same state, or a part of it, taken apart again.
            apart_from: a top-level name that does not count.
            within: top-level names that are in ``now``; None: all.
        """
        found = _differing(self._tree, now.tree) | _differing(self._per_rank, now.per_rank)
        before: dict[str, deque[int]] = {}  # boxes of one tensor share its name, and keep their order
        for number, name in enumerate(self._names):
            before.setdefault(name, deque()).append(number)
        found |= before.keys() ^ set(now.names)
        samples = _samples(now.tensors) if self._arena is None else []
        for number, name in enumerate(now.names):
            if name in self._whole or not before.get(name):
                continue
            was = before[name].popleft()
            if samples:
                is_same = samples[number] == self._samples[was]
            else:
                is_same = self._has_bytes(was, now.tensors[number])
            if not is_same:
                found.add(name)
        names = {name.partition("/")[0] for name in found} - {apart_from}
        return sorted(name for name in names if within is None or name in within)

    def _has_bytes(self, number: int, tensor: torch.Tensor) -> bool:
        """Tell whether the arena has the bytes of a tensor; True of one that has no place of its own there."""
        assert self._layout is not None
        assert self._arena is not None
        begin, size = self._layout.offsets[number], self._layout.sizes[number]
        if begin < 0:  # tied to another, or written by another rank
            return True
        if tensor.nbytes != size or not size:
            return tensor.nbytes == size
        now = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu().reshape(-1).view(torch.uint8)
        return torch.equal(now, torch.frombuffer(self._arena.view, dtype=torch.uint8, count=size, offset=begin))


def _differing(before: Any, now: Any) -> set[str]:
    """Return the keys under which two mappings of typed JSON hold something else."""
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        return set()
    return {
        key
        for key in before.keys() | now.keys()
        if key not in before or key not in now or dumps(before[key]) != dumps(now[key])
    }


def _samples(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return a digest of elements of each tensor; "" for one that has none."""
    full = [number for number, tensor in enumerate(tensors) if tensor.numel() and not tensor.is_meta]
    digests = dict(zip(full, fingerprints([tensors[number] for number in full]), strict=True))
    return [digests.get(number, "") for number in range(len(tensors))]
