"""A Holdfast checkpoint for exporters: plain data with stand-ins for tensors, and the bytes of each on demand.

A stand-in is a tensor on the "meta" device: it has dtype, shape and an identity, but no memory. Tied tensors share a
stand-in, so code that keeps identities keeps ties.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from holdfast.errors import CorruptCheckpointError, StorageNotFoundError
from holdfast.format.digest import CHUNK, Digests
from holdfast.format.tensor_file import item_size
from holdfast.state.load.restore import paths, select
from holdfast.state.load.selection import Selection
from holdfast.state.load.stored import open_stored
from holdfast.state.load.targets import box_of
from holdfast.state.save.torch_file import MARK, to_plain
from holdfast.state.tree import arrays
from holdfast.state.tree.objects import OTHER_STATE, renamed
from holdfast.state.tree.values import ObjectNode, PerRankNode, TensorRef
from holdfast.storage.base import FileReader, Storage

from .blobs import Blob, BoxReader, assemble, cast


def paths_of_one_name(named: Iterable[tuple[str, Sequence[Any]]]) -> dict[str, str]:
    """Return the names that several paths have, because names of other formats join keys; with a text about the paths.

    Args:
        named: (name, the keys on the way) of each value.
    """
    first: dict[str, Sequence[Any]] = {}
    found: dict[str, str] = {}
    for name, path in named:
        other = first.setdefault(name, path)
        if other is not path and name not in found:
            both = " and ".join(sorted((repr(list(other)), repr(list(path)))))
            found[name] = f"{both} of the state would both be called {name!r}"
    return found


class OpenedCheckpoint:
    """An opened checkpoint of any number of ranks; used by one thread, close it.

    Args:
        storage: rooted at the checkpoint.
        only: names or globs over "/"-joined paths; None takes everything.
        dtype: floating tensors are converted to it while they are read; arrays are not.
        rank: the rank whose own values (`PerRank`) are exported.
        verify: check every byte against its digest.
        progress: called with the bytes of tensors just read.
        share: how many checkpoints are open at once; they divide memory and open files.

    Attributes:
        stored: the checkpoint; ``stored.tree`` holds what ``only`` takes.
        too_large: names of tensors read so far with finite values beyond what ``dtype`` holds.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        only: str | Iterable[str] | None = None,
        dtype: torch.dtype | None = None,
        rank: int = 0,
        verify: bool = True,
        progress: Callable[[int], object] | None = None,
        share: int = 1,
    ) -> None:
        self._progress = progress
        self.stored = open_stored(storage, rank=rank)
        selection = Selection(only)
        selection.check(paths(self.stored))
        if not selection.everything:
            self.stored.tree = select(self.stored.tree, "", selection)
        self._dtype = dtype
        self.too_large: set[str] = set()
        self._files = CheckedFiles(storage, self.stored.digests if verify else None, self._tensor_at, share=share)
        self._stand_ins: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._names: dict[int, str] = {}  # memory of a stand-in -> stored name

    def __enter__(self) -> OpenedCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the tree, tied tensors counted once."""
        names: set[str] = set()

        def leaf(value: Any, path: str) -> Any:
            if isinstance(value, TensorRef):
                names.add(self.stored.aliases.get(value.name, value.name))
                return None
            if isinstance(value, ObjectNode):
                return to_plain(value.state, leaf, path=path)
            if isinstance(value, PerRankNode):
                return to_plain((self.stored.per_rank or {}).get(value.key), leaf, path=path)
            return NotImplemented

        to_plain(self.stored.tree, leaf)
        return sum(self.named(name).nbytes for name in names)

    def close(self) -> None:
        """Close the files; idempotent."""
        self._files.close()

    def plain(self, *, by_name: bool = False) -> Any:
        """Return the state as plain data with stand-ins, and objects as their ``state_dict()``.

        Args:
            by_name: optimizers keep their parameters' names, as ``torch.distributed.checkpoint.state_dict`` has them;
                otherwise positions, as ``Optimizer.state_dict`` has them.
        """
        modules = list(_modules(self.stored.tree, "")) if by_name else []

        def leaf(value: Any, path: str) -> Any:
            if isinstance(value, TensorRef):
                return self._leaf(value)
            if isinstance(value, ObjectNode):
                state = value.state
                if value.kind == "optimizer" and {"state", "param_groups"} <= state.keys():
                    state = _short_names(state, modules) if by_name else _positions(state)
                return to_plain(state, leaf, path=path)
            if isinstance(value, PerRankNode):
                own = (self.stored.per_rank or {}).get(value.key)
                return to_plain(own["rng"] if value.rng and own is not None else own, leaf, path=path)
            return NotImplemented

        return to_plain(self.stored.tree, leaf)

    def blob(self, stand_in: torch.Tensor) -> Blob:
        """Return the bytes that belong to a stand-in."""
        blob = self.named(self.name_of(stand_in))
        if self._dtype is None or blob.dtype == arrays.dtype_name(stand_in.dtype):
            return blob
        return cast(blob, self._dtype, self.too_large)

    def name_of(self, stand_in: torch.Tensor) -> str:
        """Return the stored name of a stand-in."""
        return self._names[stand_in.untyped_storage()._cdata]

    def read(self, stand_in: torch.Tensor) -> torch.Tensor:
        """Read the whole tensor that a stand-in stands for."""
        data = bytearray().join(bytes(part) for part in self.blob(stand_in).parts())
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
        return flat.view(stand_in.dtype).view(stand_in.shape)

    def exported(self, ref: TensorRef) -> Blob:
        """Return the bytes of a tensor of the tree, in the dtype of `dtype_of`."""
        blob, dtype = self.named(ref.name), self.dtype_of(ref)
        return blob if blob.dtype == arrays.dtype_name(dtype) else cast(blob, dtype, self.too_large)

    def named(self, name: str) -> Blob:
        """Return a tensor in its stored dtype."""
        entry = self.stored.entry(name)
        itemsize = item_size(entry.dtype) or arrays.dtype_of(entry.dtype).itemsize
        parts = partial(assemble, entry.name, entry.shape, itemsize, self.boxes(name))
        return Blob(name, entry.dtype, entry.shape, parts, itemsize)

    def boxes(self, name: str) -> list[BoxReader]:
        """Return the boxes that a tensor is stored in."""
        entry = self.stored.entry(name)
        return [
            BoxReader(box_of(piece, entry.shape), partial(self._read, piece.file, piece.offset, entry.name))
            for piece in entry.pieces
        ]

    def dtype_of(self, ref: TensorRef) -> torch.dtype:
        """Return the dtype in which a tensor is exported."""
        stored = self.stored.entry(ref.name).dtype
        own = arrays.dtype_of(stored)
        is_number = own.is_floating_point and stored != "float4_e2m1fn_x2"  # that has two numbers in an element
        return self._dtype if self._dtype is not None and is_number and ref.kind != "array" else own

    def _read(self, file: str, start: int, tensor: str, offset: int, view: memoryview) -> None:
        self._files.read(file, start + offset, view, tensor)
        if self._progress is not None:
            self._progress(len(view))

    def _tensor_at(self, file: str, start: int, stop: int) -> str | None:
        for entry in self.stored.entries.values():
            for piece in entry.pieces:
                if piece.file == file and piece.offset < stop and piece.offset + piece.nbytes > start:
                    return entry.name
        return None

    def _leaf(self, ref: TensorRef) -> Any:
        original = self.stored.aliases.get(ref.name, ref.name)
        dtype = self.dtype_of(ref)
        stand_in = self._stand_ins.get((original, dtype))
        if stand_in is None:
            shape = self.stored.entry(ref.name).shape
            stand_in = self._stand_ins[original, dtype] = torch.empty(shape, dtype=dtype, device="meta")
            self._names[stand_in.untyped_storage()._cdata] = original
        if ref.kind == "array":
            return {MARK: {"$": "array", "t": stand_in, **ref.extra}}
        if ref.kind == "parameter":
            return torch.nn.Parameter(stand_in, requires_grad=bool(ref.extra.get("rg", 1)))
        if ref.extra.get("rg") and (dtype.is_floating_point or dtype.is_complex):
            return stand_in.detach().requires_grad_()
        return stand_in


def _positions(state: Mapping[str, Any]) -> dict[str, Any]:
    """Number the parameters of an optimizer in the order of its groups."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    found = renamed(state, {name: at for at, name in enumerate(names)}.__getitem__)
    others = found.pop(OTHER_STATE, {})
    return {**found, "state": {**others, **found["state"]}}


def _short_names(state: Mapping[str, Any], modules: list[str]) -> dict[str, Any]:
    """Name parameters as in their module, without its path in the state, unless two would have the same name."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    short = {name: _within(name, modules) for name in names}
    return renamed(state, short.__getitem__) if len(set(short.values())) == len(short) else dict(state)


def _within(name: str, modules: list[str]) -> str:
    homes = [path for path in modules if name.startswith(path + "/")]
    return name[len(max(homes, key=len)) + 1 :] if homes else name


def _modules(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, ObjectNode):
        if value.kind == "module":
            yield path
        else:
            yield from _modules(value.state, path)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(item, TensorRef):
                yield from _modules(item, f"{path}/{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _modules(item, f"{path}/{number}" if path else str(number))


_BLOCK = 64 * CHUNK  # 4 MiB: small tensors next to each other are read together
_BLOCKS = 6  # blocks in the cache
_OPEN = 64  # open files
_MANY = 4  # with more checkpoints open than this, blocks are smaller


class _Block(NamedTuple):
    data: memoryview
    checked: bytearray  # one byte for each chunk


class CheckedFiles:
    """Reads ranges of files; used by one thread.

    Args:
        storage: rooted at the checkpoint.
        digests: the tables of its files; None reads unchecked.
        tensor_at: called with a damaged range (file, first, last); returns the name of a tensor in it.
        share: how many of these readers there are; they divide memory and open files.
    """

    def __init__(
        self, storage: Storage, digests: Digests | None, tensor_at: Callable[..., str | None], *, share: int = 1
    ) -> None:
        self._block_bytes = max(CHUNK, _BLOCK // share // CHUNK * CHUNK) if share > _MANY else _BLOCK
        self._max_open = max(1, _OPEN // share)
        self._storage, self._digests, self._tensor_at = storage, digests, tensor_at
        self._readers: OrderedDict[str, FileReader] = OrderedDict()
        self._blocks: OrderedDict[tuple[str, int], _Block] = OrderedDict()
        self.bytes_read = 0

    def read(self, file: str, offset: int, view: memoryview, tensor: str) -> None:
        """Fill ``view`` with the bytes of ``file`` from ``offset`` on.

        Raises:
            CorruptCheckpointError: the bytes differ from their digest; names file and tensor.
        """
        done = 0
        while done < len(view):
            at = offset + done
            block = self._block(file, at // self._block_bytes, tensor)
            start = at % self._block_bytes
            size = min(len(block.data) - start, len(view) - done)
            if size <= 0:
                raise CorruptCheckpointError(f"{file} ends before tensor {tensor!r} does", file=file, tensor=tensor)
            self._check(file, at - start, block, start, start + size)
            view[done : done + size] = block.data[start : start + size]
            done += size

    def close(self) -> None:
        """Close all files; idempotent."""
        while self._readers:
            self._readers.popitem()[1].close()
        self._blocks.clear()

    def _check(self, file: str, base: int, block: _Block, start: int, stop: int) -> None:
        """Check the chunks of a range that are not checked yet; damage elsewhere in the block does not matter here."""
        if self._digests is None:
            return
        chunks = [chunk for chunk in range(start // CHUNK, -(-stop // CHUNK)) if not block.checked[chunk]]
        if not chunks:
            return
        # Checked chunks in between are checked again: that is rare.
        first, last = chunks[0], chunks[-1] + 1
        view = block.data[first * CHUNK : last * CHUNK]
        self._digests.check(file, base // CHUNK + first, view, lambda low, high: self._tensor_at(file, low, high))
        block.checked[first:last] = b"\1" * (last - first)

    def _block(self, file: str, number: int, tensor: str) -> _Block:
        key = (file, number)
        cached = self._blocks.get(key)
        if cached is not None:
            self._blocks.move_to_end(key)
            return cached
        reader = self._reader(file, tensor)
        start = number * self._block_bytes
        while len(self._blocks) >= _BLOCKS:
            self._blocks.popitem(last=False)
        data = memoryview(bytearray(max(0, min(self._block_bytes, reader.size - start))))
        if data:
            reader.read_into(start, data)
            self.bytes_read += len(data)
        block = _Block(data, bytearray(-(-len(data) // CHUNK)))
        self._blocks[key] = block
        return block

    def _reader(self, file: str, tensor: str) -> FileReader:
        reader = self._readers.get(file)
        if reader is None:
            if len(self._readers) >= self._max_open:
                self._readers.popitem(last=False)[1].close()
            try:
                reader = self._readers[file] = self._storage.open(file)
            except StorageNotFoundError as error:
                raise CorruptCheckpointError(
                    f"{file} is gone; it holds tensor {tensor!r}: this checkpoint is damaged; use another one",
                    file=file,
                    tensor=tensor,
                ) from error
        self._readers.move_to_end(file)
        return reader
