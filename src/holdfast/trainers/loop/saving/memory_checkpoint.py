"""Nested dictionaries of tensors, laid out as a checkpoint without a copy: loading takes each from where it lies.

So a file that is mapped from a disk goes to the live tensors piece by piece, by the same rules as a directory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast.errors import StorageNotFoundError, UnsupportedStateError
from holdfast.format.codec import dumps
from holdfast.format.index import Piece, TensorEntry
from holdfast.format.manifest import Manifest
from holdfast.interop.foreign_files import forget
from holdfast.state.load.stored import Stored, decode_tree
from holdfast.state.memory import move
from holdfast.state.save.plan import signature
from holdfast.state.tree.arrays import dtype_name
from holdfast.state.tree.flatten import flatten
from holdfast.storage.base import FileReader, FileWriter, ObjectInfo, Storage

__all__ = ["lay"]

_STEP = 4 << 20  # mapped bytes that are copied before their pages are given back
_AROUND = 2 << 20


def lay(state: Mapping[str, Any], uri: str, *, mapped: Sequence[tuple[int, int]] = ()) -> Stored:
    """Return ``state`` as an opened checkpoint; its tensors stay where they are.

    Args:
        state: nested plain data and tensors.
        uri: what it is called in messages.
        mapped: memory that is mapped from a file and that nobody has written to: its pages are given back once read.
    """
    flat = flatten(state)
    ties = signature(flat).aliases
    memory = _Memory(uri, mapped)
    stored = Stored(memory, Manifest(versions={}))
    stored.tree = decode_tree(dumps(flat.tree), uri, stored.refs)
    if flat.per_rank:
        stored.per_rank = decode_tree(dumps(flat.per_rank), uri, stored.refs)
    order = sorted(range(len(flat.tensors)), key=lambda number: flat.tensors[number].data_ptr())
    for place, number in enumerate(order):
        name, tensor = flat.names[number], flat.tensors[number]
        if number in ties:
            stored.aliases[name] = flat.names[ties[number]]
            continue
        file = f"{place:09d}"  # files are read in the order of their names: so a mapped one is from front to back
        memory.tensors[file] = tensor
        piece = Piece(file, 0, tensor.numel() * tensor.itemsize)
        stored.entries[name] = TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), (piece,))
    return stored


class _Memory(Storage):
    """Tensors as files, to be read only."""

    def __init__(self, uri: str, mapped: Sequence[tuple[int, int]]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._uri, self._mapped = uri, mapped

    @property
    def uri(self) -> str:
        return self._uri

    def open(self, path: str) -> FileReader:
        if path not in self.tensors:
            raise StorageNotFoundError(f"{self._uri} holds no tensor {path!r}")
        return _TensorReader(self.tensors[path], self._mapped)

    def stat(self, path: str) -> ObjectInfo:
        with self.open(path) as reader:
            return ObjectInfo(path=path, size=reader.size)

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        yield from (self.stat(name) for name in self.tensors)

    def put(
        self, path: str, data: bytes | memoryview, *, if_absent: bool = False, if_match: str | None = None
    ) -> str | None:
        raise UnsupportedStateError(f"{self._uri} is only read")

    def copy(self, source: str, target: str) -> None:
        raise UnsupportedStateError(f"{self._uri} is only read")

    def create(self, path: str, size: int) -> FileWriter:
        raise UnsupportedStateError(f"{self._uri} is only read")

    def delete(self, path: str) -> None:
        raise UnsupportedStateError(f"{self._uri} is only read")


class _TensorReader(FileReader):
    def __init__(self, tensor: torch.Tensor, mapped: Sequence[tuple[int, int]]) -> None:
        self.size = tensor.numel() * tensor.itemsize
        # A tensor of other strides is brought into order first: a copy of this one, for as long as it is read.
        self._tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        first, own = self._tensor.data_ptr(), self._tensor.data_ptr() == tensor.data_ptr()
        begins = (low for low, high in mapped if own and low <= first and first + self.size <= high)
        self._mapped_from: int | None = next(begins, None)  # where the file begins in memory

    def read_into(self, offset: int, view: memoryview) -> None:
        source, target = self._tensor.data_ptr() + offset, _address(view.cast("B"))
        step = max(1, view.nbytes) if self._mapped_from is None else _STEP
        for start in range(0, view.nbytes, step):
            size = min(step, view.nbytes - start)
            move(target + start, source + start, size)
            if self._mapped_from is not None:
                forget(source + start, size)

    def close(self) -> None:
        if self._mapped_from is not None:
            # The kernel maps pages around each fault, among them some that were given back before.
            first = self._tensor.data_ptr()
            begin = max(self._mapped_from, first - _AROUND)
            forget(begin, first + self.size - begin)


def _address(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr() if len(view) else 0
