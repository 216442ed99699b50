"""Which stored bytes are read into which memory. Linear and lean: 100 000 tensors are an ordinary case.

A part of a stored box is contiguous in the file from its last cut dimension on. Where the gaps between such runs are
large, each run is a `ReadRequest` of its own, read straight into the tensor if memory is contiguous there too. Where
they are small, the gaps are read as well, and a `Pick` copies the wanted rows out of each block that is read, as where
memory has gaps: the whole array never needs a buffer.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from operator import itemgetter, sub
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from holdfast._outgoing import brief
from holdfast.errors import CheckpointError, CorruptCheckpointError
from holdfast.format.division import Box, flaw
from holdfast.format.index import Piece, TensorEntry
from holdfast.format.index_group import Boxes, Pieces
from holdfast.storage.base import FileReader

from ..tree import arrays
from ..tree.arrays import PLAIN, is_spread, local_tensor, move, move_small
from ..tree.sharded import local_parts
from .stored import Stored

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "BATCH", "SMALL", "CheckingReader", "Cuts", "Pick", "ReadRequest", "Targets", "box_of", "can_pick", "extent",
    "is_direct", "read_block", "spans",
]  # fmt: skip

BATCH = 32 << 20  # tensors that need a detour (other device, dtype, order) are read in batches of this size

SMALL = 16 << 10  # fewer bytes are copied without giving up the interpreter lock
_LONGEST = 1 << 30  # bytes of the longest element that NumPy takes
_ANYWHERE: Any = ctypes.c_char * (1 << 46)  # memory from an address on; its end is never used

_Span = tuple[int, int]
_Dim = tuple[int, _Span, int]
"""A dimension of a stored array, the part of it that is wanted, and its stride in the target, in bytes."""


@dataclass(slots=True)
class ReadRequest:
    """One stored byte range and the tensor it goes to.

    Attributes:
        name: name of the tensor, for messages.
        file: path inside the checkpoint.
        offset: first byte within the file.
        nbytes: number of bytes.
        dtype: stored dtype.
        target: the tensor to fill: same number of elements; any device, strides or floating dtype.
        within: (shape, slices) if only a part of these bytes is wanted: they are an array of this shape.
        address: of the target, if it was seen when the read was planned that the bytes can go straight there.
    """

    name: str
    file: str
    offset: int
    nbytes: int
    dtype: torch.dtype
    target: torch.Tensor
    within: tuple[tuple[int, ...], tuple[slice, ...]] | None = None
    address: int | None = None


def _is_plain(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tell whether a tensor is memory of this process with elements as they are stored."""
    if not target.is_cpu or target.dtype is not dtype or target.is_conj() or target.is_neg():
        return False
    try:
        # A subclass that wraps other tensors has a shape and strides, but no memory. Freed memory is another case.
        return target.data_ptr() != 0 or not target.untyped_storage().nbytes()
    except RuntimeError:  # it has no address
        return False


def is_direct(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tell whether stored bytes can be read straight into a tensor."""
    return _is_plain(target, dtype) and target.is_contiguous()


def _address_of(target: torch.Tensor, dtype: torch.dtype) -> int | None:
    """Return the address of a target that `is_direct` and has its memory; None where the reader has to look closer."""
    if type(target) not in PLAIN or not target.is_cpu or target.dtype is not dtype or not target.is_contiguous():
        return None
    address, memory = target.data_ptr(), target.untyped_storage()
    room = memory.nbytes() - (address - memory.data_ptr())  # less than it needs: it was freed, or resized
    if not address or room < target.nbytes or target.is_conj() or target.is_neg():
        return None
    return address


def can_pick(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tell whether stored bytes can be copied into a tensor row by row.

    Its elements lie in the order of the file, perhaps with gaps: no two share memory, and the last dimension has none.
    """
    if not _is_plain(target, dtype) or not target.dim() or not target.numel():
        return False
    inner = 1
    for size, stride in zip(reversed(target.shape), reversed(target.stride()), strict=True):
        if size > 1:
            if stride < inner:
                return False
            inner = size * stride
    return target.shape[-1] == 1 or target.stride(-1) == 1


def extent(target: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last."""
    steps = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
    return (1 + steps) * target.itemsize if target.numel() else 0


class Pick:
    """A part of a stored array on its way into a tensor.

    Nearly every part is the same range of bytes in each of several successive rows, because a dimension that is wanted
    whole is merged with the dimension before it. One call copies the rows of a block of the file.

    Args:
        target: memory of the part, for which `can_pick` is true. Its memory has to outlive this.
        shape: shape of the stored array, with as many dimensions as ``target``.
        wanted: the part, a slice for each dimension.
    """

    __slots__ = ("_address", "_deep", "_first", "_high", "_kind", "_last", "_low", "_row", "_rows", "_stride")

    def __init__(self, target: torch.Tensor, shape: tuple[int, ...], wanted: tuple[slice, ...]) -> None:
        dims = _dims(target, shape, wanted)
        self._address = target.data_ptr()
        self._deep: _Deep | None = None
        if len(dims) > 2 or dims[-1][0] > _LONGEST:
            self._deep = _Deep(dims, self._address)
            return
        _, (self._first, self._last), self._stride = dims[0] if len(dims) == 2 else (1, (0, 1), 0)
        self._row, (self._low, self._high), _ = dims[-1]
        # Runs of bytes as elements: NumPy does not know every dtype of torch, and copies without the interpreter lock.
        self._kind = np.dtype((np.void, self._high - self._low))
        rows = self._last - self._first
        self._rows = np.ndarray((rows,), self._kind, _ANYWHERE.from_address(self._address), 0, (self._stride,))

    def take(self, offset: int, address: int, size: int) -> None:
        """Copy the part's share of ``size`` bytes of the stored array.

        Args:
            offset: position of the bytes in the stored array.
            address: where the bytes are in memory.
            size: number of bytes.
        """
        if self._deep is not None:
            self._deep.take(offset, address, size)
            return
        end, row, low, high, first = offset + size, self._row, self._low, self._high, self._first
        begin = max(first, -((low - offset) // row))  # the first row whose part begins in these bytes
        stop = min(self._last, (end - high) // row + 1)  # behind the last row whose part ends in them
        if begin < stop:
            start = address + begin * row + low - offset
            source = np.ndarray((stop - begin,), self._kind, _ANYWHERE.from_address(start), 0, (row,))
            self._rows[begin - first : stop - first] = source
        for number in {begin - 1, stop}:  # rows that these bytes begin or end within
            if first <= number < self._last:
                at = number * row + low
                head, tail = max(offset, at), min(end, number * row + high)
                if head < tail:
                    into = self._address + (number - first) * self._stride + head - at
                    (move_small if tail - head <= SMALL else move)(into, address + head - offset, tail - head)


class _Deep:
    """A part that is cut along three dimensions or more, or has very long rows.

    Args:
        dims: as `_dims` returns them.
        address: address of the target.
    """

    __slots__ = ("_shape", "_target", "_wanted")

    def __init__(self, dims: list[_Dim], address: int) -> None:
        sizes = [stop - start for _, (start, stop), _ in dims]
        strides = [stride for _, _, stride in dims]
        self._target = np.ndarray(sizes, np.uint8, _ANYWHERE.from_address(address), 0, strides)
        self._shape = tuple(size for size, _, _ in dims)
        self._wanted = tuple(span for _, span, _ in dims)

    def take(self, offset: int, address: int, size: int) -> None:
        """See `Pick.take`."""
        data = np.ndarray((size,), np.uint8, _ANYWHERE.from_address(address))
        _pour(data, offset, self._shape, self._wanted, self._target)


def _dims(target: torch.Tensor, shape: tuple[int, ...], wanted: tuple[slice, ...]) -> list[_Dim]:
    """Return the dimensions of a part, the last in bytes, with neighbours merged where possible."""
    width = target.itemsize
    dims: list[_Dim] = [(width, (0, width), 1)]
    for size, part, step in zip(reversed(shape), reversed(wanted), reversed(target.stride()), strict=True):
        start, stop, _ = part.indices(size)
        inner, (low, high), stride = dims[-1]
        if low == 0 and high == inner and (step * width == inner * stride or stop - start == 1):
            dims[-1] = size * inner, (start * inner, stop * inner), stride
        elif stop - start == 1:
            dims[-1] = size * inner, (start * inner + low, start * inner + high), stride
        else:
            dims.append((size, (start, stop), step * width))
    return dims[::-1]


def _pour(data: np.ndarray, offset: int, shape: tuple[int, ...], wanted: tuple[_Span, ...], target: np.ndarray) -> None:
    """Copy whole rows at once; for a row that the data begin or end within, recurse into its own rows."""
    end = offset + len(data)
    first, last = wanted[0]
    row = prod(shape[1:])
    low, high = max(first, -(-offset // row)), min(last, end // row)
    if low < high:
        rows = data[low * row - offset : high * row - offset].reshape(high - low, *shape[1:])
        inner = slice(None), *[slice(*span) for span in wanted[1:]]
        part, into = rows[inner], target[low - first : high - first]
        if (
            part.ndim > 1 and part.size and part.shape[-1] > 1
        ):  # runs of bytes as elements: faster, above all for short runs
            run = np.dtype((np.void, part.shape[-1]))
            part, into = part.view(run), into.view(run)
        into[...] = part
    for number in sorted({offset // row, end // row}):
        start, stop = max(offset, number * row), min(end, (number + 1) * row)
        if first <= number < last and 0 < stop - start < row:
            part = data[start - offset : stop - offset]
            _pour(part, start - number * row, shape[1:], wanted[1:], target[number - first])


class CheckingReader(FileReader):
    """A reader that compares blocks with their digests itself, where it has to know whether they are the right ones."""

    @abstractmethod
    def read_checked(self, offset: int, view: memoryview) -> bool:
        """Fill ``view`` as `read_into` does; tell whether its bytes were compared."""


def read_block(reader: FileReader, offset: int, view: memoryview) -> bool:
    """Fill ``view``; tell whether its bytes were compared with their digests: nothing is hashed twice."""
    if isinstance(reader, CheckingReader):
        return reader.read_checked(offset, view)
    reader.read_into(offset, view)
    return False


_FEW = 64  # boxes, and fewer: arrays are slower
_MANY = 1 << 24  # corners that are looked at by arrays
_LIMIT = 1 << 62
_CPU = torch.device("cpu")

# Rows of at least so many bytes are read one by one: each range reads up to 64 KiB more at both ends, for digests.
_GAP = 256 << 10


class Targets:
    """Collects read requests for one load.

    Args:
        stored: the checkpoint.
        cast: floating dtype that floating tensors may be read into; None allows no cast.
    """

    def __init__(self, stored: Stored, cast: torch.dtype | None = None) -> None:
        self.stored, self.cast = stored, cast
        self.requests: list[ReadRequest] = []
        self._dtypes: dict[str, torch.dtype] = {}
        self._complete: set[str] = set()  # names of tensors whose stored boxes cover them exactly
        self._cuts: dict[tuple[object, ...], Cuts] = {}
        # address -> live tensors and arrays there and the stored names read into them; tied tensors are read once
        self._at: dict[int, tuple[tuple[Any, str], ...]] = {}
        self._spread: set[int] = set()  # ids of those that are a part of a tensor
        self.left: set[int] = set()  # ids of the arrays that are left as they are

    def dtype(self, name: str) -> torch.dtype:
        """Return the torch dtype of a stored name."""
        dtype = self._dtypes.get(name)
        if dtype is None:
            dtype = self._dtypes[name] = arrays.dtype_of(name)
        return dtype

    def add(self, name: str, live: torch.Tensor) -> str | None:
        """Read stored tensor ``name`` into ``live``; returns why the two do not fit, None if they do.

        Of a tensor that is spread over ranks it reads what this rank holds; it compares the shapes of the whole.
        """
        entry = self.stored.entries.get(name) or self.stored.entry(name)
        stored_name, dtype_name, shape, _ = entry  # by name each takes longer
        dtype = self._dtypes.get(dtype_name) or self.dtype(dtype_name)
        if live.shape != shape:
            return f"shape {tuple(live.shape)} in the state, {tuple(shape)} in the checkpoint"
        if live.dtype is not dtype:
            castable = self.cast is not None and dtype.is_floating_point and live.dtype.is_floating_point
            if not castable:
                return f"{arrays.dtype_name(live.dtype)} in the state, {dtype_name} in the checkpoint"
        spread = type(live) not in PLAIN and is_spread(live)
        home = local_tensor(live) if spread else live
        address = home.data_ptr()
        if not address and home.is_meta:  # ``live.is_meta`` fails for a ShardedTensor with several shards on this rank
            return "it is on the meta device in the state: give it memory first"
        if address:
            planned, here = self._at.get(address, ()), ((home, stored_name),)
            for other, source in planned:
                if self._is_tied(home, entry, other, source):
                    if source == stored_name or source in self.stored.own:
                        return None
                    if stored_name in self.stored.own:  # this rank stored a value of its own for that memory
                        self._withdraw(source, other)
                        planned = tuple(pair for pair in planned if pair[0] is not other)
                        break
                    return f"tied in the state to what is stored as {source!r}, but stored apart in the checkpoint"
            self._at[address] = planned + here
        if spread:
            self._spread.add(id(home))
            self._boxes(entry, dtype, local_parts(live))
        else:
            self._request(entry, dtype, live)
        return None

    def fits(self, name: str, live: Any) -> bool:
        """Tell whether a live value is a tensor of the shape and dtype of stored tensor ``name``."""
        entry = self.stored.entries.get(name) or self.stored.entry(name)
        dtype = self._dtypes.get(entry.dtype) or self.dtype(entry.dtype)
        return isinstance(live, torch.Tensor) and live.dtype is dtype and live.shape == entry.shape

    def add_array(self, name: str, live: NDArray[Any]) -> str | None:
        """Note that the stored array ``name`` comes into ``live``; returns why it does not fit into what is shared.

        The reading is that of `fresh`: an array gets a copy.
        """
        entry = self.stored.entry(name)
        if not live.size:
            return None
        address = live.__array_interface__["data"][0]
        planned = self._at.get(address, ())
        for other, source in planned:
            if self._is_tied(live, entry, other, source):
                if source == entry.name or {source, entry.name} & self.stored.own:
                    return None
                if live.flags.c_contiguous:  # else each was stored as a copy of its own
                    return f"tied in the state to what is stored as {source!r}, but stored apart in the checkpoint"
        self._at[address] = (*planned, (live, entry.name))
        return None

    def _is_tied(self, live: Any, entry: TensorEntry, other: Any, source: str) -> bool:
        """Tell whether a save takes two live values at one address for one: of other dtypes it stores both."""
        if not _same_memory(live, other):
            return False
        if isinstance(live, torch.Tensor) and isinstance(other, torch.Tensor):
            return True  # of one dtype
        return self.stored.entry(source).dtype == entry.dtype

    def clashes(self, read: Callable[[Sequence[ReadRequest]], object]) -> list[tuple[str, str]]:
        """Find values that do not go together into the memory that live tensors and arrays share in part.

        Views of one buffer, a transposed tie: what was saved from such memory fits, and what was saved apart need not.
        Nothing live is touched: the values concerned are read, and laid over each other in a copy of that memory. Those
        that do not fit are not read any more.

        Args:
            read: carries out requests.

        Returns:
            Stored names, each with the reason.
        """
        found = []
        for group in self._overlaps():
            staged = Targets(self.stored, self.cast)
            values = [staged.fresh(name, dtype=_dtype_of(live, staged, name), device=_CPU) for live, name, _ in group]
            read(staged.requests)
            if any(
                value.nbytes != prod(one.shape) * one.itemsize for value, (*_, one) in zip(values, group, strict=True)
            ):
                continue  # a stored array that is damaged: said when it is made
            for number in _lost(values, [layout for _, _, layout in group]):
                live, name, _ = group[number]
                if isinstance(live, torch.Tensor):
                    self._withdraw(name, live)
                else:
                    self.left.add(id(live))
                others = ", ".join(sorted({repr(other) for _, other, _ in group} - {repr(name)}))
                if others:
                    why = f"it shares memory in the state with {others}, and what is stored does not go together there"
                else:
                    why = "its elements share memory in the state, and are stored with different values"
                found.append((name, why))
        return found

    def _overlaps(self) -> Iterator[list[tuple[Any, str, _Layout]]]:
        """Yield groups of tensors and arrays whose memory is shared in part, or with itself, and lies in one piece."""
        direct = {request.address: request.nbytes for request in self.requests if request.address is not None}
        if direct.keys() >= self._at.keys() and sum(map(len, self._at.values())) == len(self._at):
            # The usual case, quickly: 100 000 tensors, each read whole to an address of its own.
            lows = np.fromiter(direct, np.int64, len(direct))
            order = lows.argsort()
            lows = lows[order]
            ends = lows + np.fromiter(direct.values(), np.int64, len(direct))[order]
            if not (lows[1:] < ends[:-1]).any():
                return
        spans: dict[Any, list[tuple[int, int, Any, str]]] = {}
        for address, planned in self._at.items():
            for live, name in planned:
                if id(live) in self._spread or not _num_elements(live):
                    continue
                low, high = _span(live, address)
                device = _CPU if isinstance(live, np.ndarray) else live.device
                spans.setdefault(device, []).append((low, high, live, name))
        for rows in spans.values():
            rows.sort(key=itemgetter(0, 1))
            group, reach = rows[:1], rows[0][1]
            for row in [*rows[1:], (_LIMIT, _LIMIT, None, "")]:
                if row[0] < reach:
                    group.append(row)
                    reach = max(reach, row[1])
                    continue
                if len(group) > 1 or _overlaps_itself(group[0][2], group[0][1] - group[0][0]):
                    yield [(live, name, _Layout.of(live)) for _, _, live, name in group]
                group, reach = [row], row[1]

    def _withdraw(self, name: str, target: torch.Tensor) -> None:
        """Do not read ``name`` into ``target``."""
        memory = target.untyped_storage().data_ptr()
        self.requests = [
            request
            for request in self.requests
            if request.name != name or request.target.untyped_storage().data_ptr() != memory
        ]

    def fresh(self, name: str, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Read stored tensor ``name`` into new memory, which is taken when the stored bytes are known to fill it.

        Raises:
            CorruptCheckpointError: they do not.
            CheckpointError: there is not as much memory.
        """
        entry, stored = self.stored.entry(name), self.dtype(self.stored.entry(name).dtype)
        if _is_whole(entry):
            _check_whole(entry, stored)
        else:
            if not self.stored.is_complete and not self._cuts_of(entry).make_up(_whole(entry.shape)):
                self.stored.complete()
                entry = self.stored.entry(name)
            self._check_boxes(entry, self._cuts_of(entry), stored)
        try:
            target = torch.empty(entry.shape, dtype=dtype, device=device)
        except RuntimeError as error:
            raise CheckpointError(
                f"tensor {name!r}: there is no memory on {device} for {dtype} {list(entry.shape)}: load less at once "
                f"(only=...), or into tensors that exist (into=...) ({brief(error, 200)})"
            ) from error
        self._request(entry, stored, target)
        return target

    def _request(self, entry: TensorEntry, dtype: torch.dtype, target: torch.Tensor) -> None:
        name, _, shape, pieces = entry
        if len(pieces) != 1 or (piece := pieces[0]).box_start is not None:  # `_is_whole`, for 100 000 tensors
            self._boxes(entry, dtype, [(_whole(shape), target)])
            return
        file, offset, nbytes, _, _ = piece
        if nbytes != target.nbytes or target.dtype is not dtype:  # the target has the stored shape
            _check_whole(entry, dtype)
        self.requests.append(ReadRequest(name, file, offset, nbytes, dtype, target, None, _address_of(target, dtype)))

    def _boxes(self, entry: TensorEntry, dtype: torch.dtype, parts: list[tuple[Box, torch.Tensor]]) -> None:
        """Read boxes of a tensor, each into memory of its own; the stored boxes may be cut differently."""
        cuts = self._cuts_of(entry)
        if not self.stored.is_complete and not all(cuts.make_up(wanted) for wanted, _ in parts):
            self.stored.complete()
            entry = self.stored.entry(entry.name)
            cuts = self._cuts_of(entry)
        self._check_boxes(entry, cuts, dtype)
        for wanted, target in parts:
            for number, common in cuts.overlaps(wanted):
                piece, box = entry.pieces[number], cuts.box(number)
                self.requests.extend(spans(entry.name, piece, box, common, _within(target, wanted, common), dtype))

    def _check_boxes(self, entry: TensorEntry, cuts: Cuts, dtype: torch.dtype) -> None:
        if entry.name not in self._complete:
            problem = _wrong_sizes(entry, cuts, dtype)
            if not problem and self.stored.is_complete:
                problem = cuts.problem
            if problem:
                raise CorruptCheckpointError(
                    f"tensor {entry.name!r}: {problem}: this checkpoint is damaged; use another one",
                    file=entry.pieces[0].file if entry.pieces else None,
                    tensor=entry.name,
                )
            if self.stored.is_complete:
                self._complete.add(entry.name)

    def _cuts_of(self, entry: TensorEntry) -> Cuts:
        # By identity: equal boxes are one object, and to compare a million of them takes seconds.
        shape, pieces = entry.shape, entry.pieces
        key: tuple[object, ...]
        if isinstance(pieces, Pieces):
            key = shape, id(pieces.boxes)  # the entries keep these alive
        else:
            key = shape, *[id(piece[3]) for piece in pieces], *[id(piece[4]) for piece in pieces]
        cuts = self._cuts.get(key)
        if cuts is None:
            if isinstance(pieces, Pieces):
                cuts = Cuts(shape, pieces.boxes)
            else:
                cuts = Cuts.of(shape, [box_of(piece, shape) for piece in pieces])
            self._cuts[key] = cuts
        return cuts


def _is_whole(entry: TensorEntry) -> bool:
    return len(entry.pieces) == 1 and entry.pieces[0].box_start is None


def _check_whole(entry: TensorEntry, dtype: torch.dtype) -> None:
    file, _, nbytes, _, _ = entry.pieces[0]
    if nbytes != prod(entry.shape) * dtype.itemsize:
        raise CorruptCheckpointError(
            f"tensor {entry.name!r}: its bytes do not make {entry.dtype} {list(entry.shape)}: this checkpoint is "
            "damaged; use another one",
            file=file,
            tensor=entry.name,
        )


def _wrong_sizes(entry: TensorEntry, cuts: Cuts, dtype: torch.dtype) -> str | None:
    """Return why the bytes of a piece are not as many as its box needs; None if all are."""
    pieces, width = entry.pieces, dtype.itemsize
    if isinstance(pieces, Pieces):
        wrong = pieces.nbytes != cuts.counts_array * width
        short = wrong.nonzero()[0].tolist() if wrong.any() else []
    else:
        short = [at for at, piece in enumerate(pieces) if piece[2] != cuts.counts[at] * width]
    return f"its bytes do not make {entry.dtype} {list(cuts.box(short[0]).shape)}" if short else None


def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def box_of(piece: Piece, shape: tuple[int, ...]) -> Box:
    """Return the part of a tensor of ``shape`` that a piece is."""
    start, size = piece.box_start, piece.box_shape
    return _whole(shape) if start is None or size is None else Box(start, size)


def _within(target: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """Return the view of ``target``, the memory of ``box``, that is the memory of ``part``."""
    for dim, (start, size) in enumerate(zip(part.start, part.shape, strict=True)):
        if box.shape[dim] != size:
            target = target.narrow(dim, start - box.start[dim], size)
    return target


def _same_memory(first: Any, second: Any) -> bool:
    """Tell whether two tensors or arrays that begin at one address have the same elements at the same places."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return (
            first.device == second.device
            and first.dtype == second.dtype
            and first.shape == second.shape
            and first.stride() == second.stride()
        )
    here = all(isinstance(one, np.ndarray) or one.is_cpu for one in (first, second))
    return here and _Layout.of(first) == _Layout.of(second)


class _Layout(NamedTuple):
    """Where the elements of a tensor or an array lie; address and strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, live: Any) -> _Layout:
        if isinstance(live, np.ndarray):
            return cls(live.__array_interface__["data"][0], live.shape, live.strides, live.itemsize)
        itemsize = live.element_size()
        return cls(live.data_ptr(), tuple(live.shape), tuple(step * itemsize for step in live.stride()), itemsize)

    @property
    def span(self) -> tuple[int, int]:
        """The first byte, and the one behind the last."""
        steps = [(size - 1) * step for size, step in zip(self.shape, self.strides, strict=True)]
        begin, end = sum(min(0, step) for step in steps), sum(max(0, step) for step in steps)
        return self.address + begin, self.address + end + self.itemsize


def _num_elements(live: Any) -> int:
    return live.size if isinstance(live, np.ndarray) else live.numel()


def _span(live: Any, address: int) -> tuple[int, int]:
    """Return the first byte of a tensor or an array that begins at ``address``, and the one behind its last."""
    if isinstance(live, torch.Tensor) and live.is_contiguous():
        return address, address + live.numel() * live.element_size()
    return _Layout.of(live).span


def _overlaps_itself(live: Any, nbytes: int) -> bool:
    """Tell whether elements share memory, as far as there is less of it, ``nbytes``, than they need."""
    return bool(nbytes < _num_elements(live) * live.itemsize)


def _dtype_of(live: Any, targets: Targets, name: str) -> torch.dtype:
    """Return the dtype in which a stored tensor has the bytes that come into ``live``."""
    return live.dtype if isinstance(live, torch.Tensor) else targets.dtype(targets.stored.entry(name).dtype)


def _lost(values: Sequence[torch.Tensor], layouts: Sequence[_Layout]) -> list[int]:
    """Lay values over each other as their memory is; return the positions of those that are not whole afterwards."""
    spans = [layout.span for layout in layouts]
    low, high = min(span[0] for span in spans), max(span[1] for span in spans)
    buffer = np.zeros(high - low, np.uint8)
    pairs = []
    for value, one in zip(values, layouts, strict=True):
        shape = (*one.shape, one.itemsize)
        place: NDArray[np.uint8] = np.ndarray(
            shape, np.uint8, buffer, offset=one.address - low, strides=(*one.strides, 1)
        )
        pairs.append((place, value.reshape(-1).view(torch.uint8).numpy().reshape(shape)))
    lost: set[int] = set()
    for order in (pairs, pairs[::-1]):  # which comes last is nobody's choice
        for place, data in order:
            place[...] = data
        lost.update(number for number, (place, data) in enumerate(pairs) if not np.array_equal(place, data))
    return sorted(lost)


def spans(
    name: str, piece: Piece, box: Box, wanted: Box, target: torch.Tensor, dtype: torch.dtype
) -> Iterator[ReadRequest]:
    """Yield the reads that bring ``wanted`` of a stored piece to ``target``.

    Args:
        name: name of the tensor, for messages.
        piece: where the stored box lies.
        box: the stored box.
        wanted: a box within it, not empty.
        target: memory for ``wanted``, of its shape.
        dtype: stored dtype.
    """
    if not box.shape:
        yield ReadRequest(name, piece.file, piece.offset, piece.nbytes, dtype, target)
        return
    if box.shape[1:] == wanted.shape[1:] and is_direct(target, dtype):  # the usual case: whole rows without gaps
        stride = dtype.itemsize * prod(box.shape[1:])
        begin = piece.offset + (wanted.start[0] - box.start[0]) * stride
        yield ReadRequest(name, piece.file, begin, wanted.shape[0] * stride, dtype, target)
        return
    start, strides, cut, along, slices = _geometry(box, wanted, dtype.itemsize, _GAP)
    rows, stride, start = wanted.shape[along], strides[along], start + piece.offset
    for outer in product(*map(range, wanted.shape[:along])):
        offset = start + sum(at * step for at, step in zip(outer, strides, strict=False))
        part = target[outer] if outer else target
        whole = along == cut and is_direct(part, dtype)
        step = rows if whole else max(1, BATCH // stride)
        for low in range(0, rows, step):
            count = min(step, rows - low)
            within = None if along == cut else ((count, *box.shape[along + 1 :]), (slice(None), *slices))
            rows_here = part if count == rows else part.narrow(0, low, count)
            yield ReadRequest(name, piece.file, offset + low * stride, count * stride, dtype, rows_here, within)


@lru_cache(maxsize=256)  # layers are cut alike
def _geometry(box: Box, wanted: Box, itemsize: int, gap: int) -> tuple[int, list[int], int, int, tuple[slice, ...]]:
    """Find how a part of a stored box is read.

    Returns:
        First byte of the part within the box, strides of the box in bytes, its last cut dimension, the dimension along
        which ranges of the file follow each other, and the wanted slices of the dimensions behind it.
    """
    dims = range(len(box.shape))
    strides = [itemsize * prod(box.shape[dim + 1 :]) for dim in dims]
    first = [at - start for at, start in zip(wanted.start, box.start, strict=True)]
    cut = max((dim for dim in dims if wanted.shape[dim] != box.shape[dim]), default=0)
    along = next((dim for dim in range(cut) if strides[dim] < gap), cut)
    slices = tuple(slice(first[dim], first[dim] + wanted.shape[dim]) for dim in dims[along + 1 :])
    start = sum(at * step for at, step in zip(first[: along + 1], strides, strict=False))
    return start, strides, cut, along, slices


class Cuts:
    """A way to cut a tensor into stored boxes.

    Args:
        shape: of the tensor.
        boxes: stored boxes, perhaps not all of the tensor.
    """

    def __init__(self, shape: tuple[int, ...], boxes: Boxes) -> None:
        self.shape, self.boxes = shape, boxes
        self._overlaps: dict[Box, tuple[tuple[int, Box], ...]] = {}

    @classmethod
    def of(cls, shape: tuple[int, ...], boxes: Sequence[Box]) -> Cuts:
        """Return the cuts of a tensor of ``shape`` into single boxes."""
        size = len(boxes), len(shape)
        starts = np.array([box.start for box in boxes], dtype=np.int64).reshape(size)
        return cls(shape, Boxes(starts, np.array([box.shape for box in boxes], dtype=np.int64).reshape(size)))

    def box(self, number: int) -> Box:
        """Return a stored box."""
        return Box(tuple(self.boxes.starts[number].tolist()), tuple(self.boxes.sizes[number].tolist()))

    @cached_property
    def problem(self) -> str | None:
        """Why the boxes do not make up the tensor with each element once; None if they do."""
        if len(self.boxes.starts) > _FEW:
            text = _flaw(self.shape, self.boxes)
            if text is not None:
                return text or None
        return flaw(self.shape, [self.box(number) for number in range(len(self.boxes.starts))])

    @cached_property
    def counts(self) -> list[int]:
        """How many elements each box has."""
        return [prod(size) for size in self.boxes.sizes.tolist()]

    @cached_property
    def counts_array(self) -> NDArray[np.int64]:
        """`counts` as an array; a count beyond 2**62 is cut to that."""
        return np.array([min(count, _LIMIT) for count in self.counts], np.int64)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """The first indices behind all boxes."""
        return self.boxes.starts + self.boxes.sizes

    def overlaps(self, wanted: Box) -> tuple[tuple[int, Box], ...]:
        """Return the numbers of the boxes that overlap ``wanted``, each with what they have in common."""
        common = self._overlaps.get(wanted)
        if common is None:
            first = np.array(wanted.start, dtype=np.int64)
            low = np.maximum(self.boxes.starts, first)
            sizes = np.minimum(self._ends, first + np.array(wanted.shape, dtype=np.int64)) - low
            numbers = (sizes > 0).all(axis=1).nonzero()[0]
            rows = zip(numbers.tolist(), low[numbers].tolist(), sizes[numbers].tolist(), strict=True)
            common = tuple([(number, Box(tuple(start), tuple(size))) for number, start, size in rows])
            self._overlaps[wanted] = common
        return common

    def make_up(self, wanted: Box) -> bool:
        """Tell whether the boxes make up ``wanted``, each element once, whatever is missing elsewhere."""
        common = [box for _, box in self.overlaps(wanted)]
        moved = [Box(tuple(map(sub, box.start, wanted.start)), box.shape) for box in common]
        return flaw(wanted.shape, moved) is None


def _flaw(shape: tuple[int, ...], boxes: Boxes) -> str | None:
    """Look for a flaw with arrays: "" if there is none, None if `flaw` has to look."""
    full = (boxes.sizes > 0).all(axis=1)
    starts, sizes = boxes.starts[full], boxes.sizes[full]
    cut = [dim for dim, size in enumerate(shape) if (sizes[:, dim] != size).any()]
    if prod(size + 1 for size in shape) >= _LIMIT or len(starts) << len(cut) > _MANY:
        return None
    if sum(np.multiply.reduce(sizes, axis=1).tolist()) != prod(shape):
        return None  # the message of `flaw` says how many elements
    steps = [prod(shape[dim] + 1 for dim in cut[place + 1 :]) for place in range(len(cut))]
    corners, expected = np.zeros((1, len(starts)), np.int64), np.zeros(1, np.int64)
    signs = np.ones(1, np.int64)
    for dim, step in zip(cut, steps, strict=True):
        low, high = starts[:, dim] * step, (starts[:, dim] + sizes[:, dim]) * step
        corners = np.concatenate([corners + low, corners + high])
        expected = np.concatenate([expected, expected + shape[dim] * step])
        signs = np.concatenate([signs, -signs])
    places, inverse = np.unique(corners, return_inverse=True)
    sums = np.bincount(inverse.reshape(-1), np.repeat(signs, len(starts)), len(places)).astype(np.int64)
    left = np.stack([places, sums], axis=1)[sums != 0]
    order = np.argsort(expected)
    whole = np.stack([expected, signs], axis=1)[order] if prod(shape) else left[:0]
    return "" if np.array_equal(left, whole) else None
