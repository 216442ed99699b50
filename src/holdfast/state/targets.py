"""Which stored tensor is read into which memory. Linear and lean: 100 000 tensors are an ordinary case."""

from __future__ import annotations

import torch

from ..errors import CorruptCheckpointError
from ..format.index import TensorEntry
from . import arrays
from .reader import ReadRequest
from .stored import Stored

__all__ = ["Targets"]


class Targets:
    """Collects read requests for one load.

    Args:
        stored: the checkpoint.
        cast: floating dtype that floating tensors may be read into; None allows no cast.
    """

    def __init__(self, stored: Stored, cast: torch.dtype | None = None) -> None:
        self.stored, self._cast = stored, cast
        self.requests: list[ReadRequest] = []
        self._dtypes: dict[str, torch.dtype] = {}
        # By address: tied live tensors are one memory, which is read once.
        self._at: dict[int, list[tuple[torch.Tensor, str]]] = {}

    def dtype(self, name: str) -> torch.dtype:
        """Return the torch dtype of a stored name."""
        found = self._dtypes.get(name)
        if found is None:
            found = self._dtypes[name] = arrays.dtype_of(name)
        return found

    def add(self, name: str, live: torch.Tensor) -> str | None:
        """Read stored tensor ``name`` into ``live``; returns why the two do not fit, None if they do."""
        entry = self.stored.entries.get(name) or self.stored.entry(name)
        dtype = self._dtypes.get(entry.dtype) or self.dtype(entry.dtype)
        if live.shape != entry.shape:
            return f"shape {tuple(live.shape)} in the state, {tuple(entry.shape)} in the checkpoint"
        if live.dtype is not dtype:
            castable = self._cast is not None and dtype.is_floating_point and live.dtype.is_floating_point
            if not castable:
                return f"{arrays.dtype_name(live.dtype)} in the state, {entry.dtype} in the checkpoint"
        address = live.data_ptr()
        if address:
            there = self._at.get(address)
            if there is None:
                self._at[address] = [(live, entry.name)]
            else:
                for other, source in there:
                    if _same_memory(live, other):
                        if source == entry.name or source in self.stored.own:
                            return None
                        if entry.name in self.stored.own:
                            self._withdraw(source, other)
                            there[:] = [pair for pair in there if pair[0] is not other]
                            break
                        return f"tied in the state to what is stored as {source!r}, but stored apart in the checkpoint"
                there.append((live, entry.name))
        self._request(entry, dtype, live)
        return None

    def _withdraw(self, name: str, target: torch.Tensor) -> None:
        """Do not read ``name`` into ``target``: this rank stored a value of its own for that memory."""
        self.requests = [one for one in self.requests if one.target is not target or one.name != name]

    def append(self, name: str, target: torch.Tensor) -> None:
        """Read stored tensor ``name`` into memory that is known to fit."""
        entry = self.stored.entry(name)
        self._request(entry, self.dtype(entry.dtype), target)

    def _request(self, entry: TensorEntry, dtype: torch.dtype, target: torch.Tensor) -> None:
        name, stored_dtype, shape, pieces = entry
        if len(pieces) == 1:
            file, offset, nbytes, _, _ = pieces[0]
            if nbytes == target.numel() * dtype.itemsize:
                self.requests.append(ReadRequest(name, file, offset, nbytes, dtype, target))
                return
        raise CorruptCheckpointError(
            f"tensor {name!r}: its bytes do not make {stored_dtype} {list(shape)}, or it is in several pieces, which "
            "this version does not read",
            file=pieces[0].file if pieces else None,
            tensor=name,
        )


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.device == other.device
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )
