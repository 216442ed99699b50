"""Where every tensor goes: files, their headers, the index, and the arena that mirrors them.

The layout of the arena is the layout of the files (header padded to 4096 bytes, tensors by descending element size
without holes), so bytes go from the arena to the disk with no further copy. A layout depends on the structure of the
state alone and is reused until the structure changes; headers and index are part of it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from holdfast.errors import UnsupportedStateError
from holdfast.format.division import Division
from holdfast.format.index import Index, Piece, TensorEntry
from holdfast.format.layout import header_bytes
from holdfast.writer.messages import FilePlan

from ..tree.arrays import dtype_name
from .assignment import share_of
from .signature import Signature

__all__ = ["FileLayout", "Layout", "plan"]

BLOCK = 4096  # alignment of direct I/O and of every file in the arena
_OWN_FILE = 1 << 20  # items below this size share the file "state", unless they are modules
_LOOSE = "state"
_FROZEN = ".frozen"


@dataclass(slots=True)
class FileLayout:
    """One file: what stands where in it, and where it lies in the arena."""

    stem: str
    suffix: str
    role: str
    size: int = 0
    arena_offset: int = 0
    stable: bool = False
    starts: list[int] = field(default_factory=list)  # first byte of each segment within the file
    segments: list[tuple[int | bytes, int, int]] = field(default_factory=list)  # (tensor or bytes, start, size)

    def path(self, save_id: str) -> str:
        """Return the name of this file in the checkpoint of ``save_id``."""
        return f"{self.stem}-{save_id}{self.suffix}"

    @property
    def padded(self) -> int:
        """Size rounded up to whole blocks."""
        return -(-self.size // BLOCK) * BLOCK

    def add(self, source: int | bytes, size: int) -> None:
        """Append a segment."""
        if size:
            self.starts.append(self.size)
            self.segments.append((source, self.size, size))
        self.size += size

    def segments_between(self, start: int, stop: int) -> Iterator[tuple[int | bytes, int, int]]:
        """Yield the segments that overlap bytes ``start:stop`` of the file."""
        for number in range(max(0, bisect_right(self.starts, start) - 1), len(self.segments)):
            source, first, size = self.segments[number]
            if first >= stop:
                return
            if first + size > start:
                yield source, first, size


@dataclass(slots=True)
class Layout:
    """Files and arena for one structure.

    Attributes:
        signature: the structure this layout is for.
        files: all files with tensors, then the index.
        offsets: for each tensor its place in the arena; -1 for one that is tied to another, or written by another rank.
        sizes: bytes of each tensor.
        arena_bytes: size of an arena that holds everything.
        tensor_bytes: bytes of all tensors that are written, ties counted once.
        division: how the state is divided over the ranks; None for a rank that saves alone.
        sampled: positions of tensors whose values the ranks compare.
        leader: the rank that stores what is not divided, for all that hold the same.
    """

    signature: Signature
    files: list[FileLayout]
    offsets: list[int]
    sizes: list[int]
    arena_bytes: int
    tensor_bytes: int
    division: Division | None = None
    sampled: tuple[int, ...] = ()
    leader: int = 0

    def file_plans(self, save_id: str) -> tuple[FilePlan, ...]:
        """Describe the files of one save to the writer."""
        return tuple(
            FilePlan(
                path=file.path(save_id),
                size=file.size,
                role=file.role,
                arena_offset=file.arena_offset,
                stable=file.stable,
            )
            for file in self.files
        )

    def write_static(self, view: memoryview) -> None:
        """Put headers and index into a fresh arena; they stay there for every save with this layout."""
        for file in self.files:
            for source, start, size in file.segments:
                if isinstance(source, bytes):
                    at = file.arena_offset + start
                    view[at : at + size] = source


def plan(
    sig: Signature,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    max_file_bytes: int = 4 << 30,
    stable: frozenset[str] = frozenset(),
    alike: tuple[int, ...] | None = None,
) -> Layout:
    """Lay out a structure.

    Args:
        sig: the structure.
        rank: the writing rank; part of the file names.
        num_ranks: how many ranks write it together; what the others write has no place in this layout.
        max_file_bytes: a file is split when it would grow beyond this (one tensor is never split).
        stable: names of tensors observed not to change between saves; they get files of their own, as frozen ones do.
        alike: the ranks that hold the same as this one, where others hold something else; None: all of them.
    """
    sizes = [dtype.itemsize * shape.numel() for dtype, shape in zip(sig.dtypes, sig.shapes, strict=True)]
    files: list[FileLayout] = []
    place: list[tuple[int, int]] = [(-1, -1)] * len(sizes)  # tensor -> (file number, offset in file)
    share = share_of(sig, sizes, rank=rank, num_ranks=num_ranks, alike=alike) if num_ranks > 1 else None
    if share is None:
        _check_whole(sig)
    aliases = sig.aliases if share is None else share.aliases
    division = None if share is None else share.division
    for label, members in _groups(sig, sizes, stable, None if share is None else share.writes).items():
        for part, chunk in enumerate(_parts(members, sizes, max_file_bytes)):
            stem = f"{label}-{rank:05d}" + (f".part{part:02d}" if part else "")
            file = FileLayout(stem, ".safetensors", "tensors", stable=label.endswith(_FROZEN))
            own = sig.files[chunk[0]] if label.removesuffix(_FROZEN) != _LOOSE else ""
            _fill(file, chunk, sig, sizes, prefix=f"{own}/" if own else "", number=len(files), place=place)
            files.append(file)
    index = FileLayout(f"index-{rank:05d}", ".json", "index")
    body = _index(sig, sizes, place, files, rank, aliases, division)
    index.add(body, len(body))
    files.append(index)
    end = 0
    for file in files:
        file.arena_offset = end
        end += file.padded
    offsets = [files[number].arena_offset + at if number >= 0 else -1 for number, at in place]
    tensor_bytes = sum(size for size, (at, _) in zip(sizes, place, strict=True) if at >= 0)
    sampled = () if share is None else share.sampled
    leader = 0 if alike is None else alike[0]
    return Layout(sig, files, offsets, sizes, max(end, BLOCK), tensor_bytes, division, sampled, leader)


def _check_whole(sig: Signature) -> None:
    parts = sorted(sig.names[one] for one, region in sig.regions.items() if region.box.shape != region.shape)
    if parts:
        num_ranks = max(region.spread.num_ranks for region in sig.regions.values())
        raise UnsupportedStateError(
            f"{parts[0]!r} and {len(set(parts)) - 1} more are spread over {num_ranks} ranks, but this rank saves alone "
            "and holds a part of them: let all ranks save (ranks='all'), or save tensor.full_tensor()"
        )


def _groups(
    sig: Signature, sizes: list[int], stable: frozenset[str], writes: frozenset[int] | None
) -> dict[str, list[int]]:
    """Assign tensors to files: one for each item of the state, frozen tensors apart, small items together.

    The files are those of the whole state, whatever part of it ``writes`` (None: all) is.
    """
    totals: dict[str, int] = {}
    for item, size in zip(sig.files, sizes, strict=True):
        totals[item] = totals.get(item, 0) + size
    labels: dict[str, str] = {"": _LOOSE}
    for item, total in totals.items():
        if item and item != _LOOSE and (total >= _OWN_FILE or item == "model"):
            safe = re.sub(r"[^A-Za-z0-9_.-]", "_", item).lstrip(".")[:64] or _LOOSE
            taken = safe in labels.values() or safe.endswith(_FROZEN)
            labels[item] = f"{safe}.{len(labels)}" if taken else safe
    groups: dict[str, list[int]] = {}
    for number, (item, name) in enumerate(zip(sig.files, sig.names, strict=True)):
        if number in sig.aliases if writes is None else number not in writes:
            continue
        label = labels.get(item, _LOOSE)
        if number in sig.frozen or name in stable:
            label += _FROZEN
        groups.setdefault(label, []).append(number)
    return groups


def _parts(members: list[int], sizes: list[int], limit: int) -> Iterator[list[int]]:
    part: list[int] = []
    total = 0
    for number in members:
        if part and total + sizes[number] > limit:
            yield part
            part, total = [], 0
        part.append(number)
        total += sizes[number]
    if part:
        yield part


def _fill(
    file: FileLayout,
    members: list[int],
    sig: Signature,
    sizes: list[int],
    *,
    prefix: str,
    number: int,
    place: list[tuple[int, int]],
) -> None:
    # safetensors wants every tensor aligned to its element size and no holes: widest elements first.
    members = sorted(members, key=lambda one: -sig.dtypes[one].itemsize)
    rows = [
        (sig.names[one].removeprefix(prefix), dtype_name(sig.dtypes[one]), tuple(sig.shapes[one]), sizes[one])
        for one in members
    ]
    header = header_bytes(rows, {"format": "pt"})
    file.add(header, len(header))
    for one in members:
        place[one] = (number, file.size)
        file.add(one, sizes[one])


def _index(
    sig: Signature,
    sizes: list[int],
    place: list[tuple[int, int]],
    files: list[FileLayout],
    rank: int,
    aliases: dict[int, int],
    division: Division | None,
) -> bytes:
    """Encode the index. File names carry ``{save_id}`` so that the same bytes serve every save."""
    paths = [file.path("{save_id}") for file in files]
    tensors: dict[str, TensorEntry] = {}
    for number, name in enumerate(sig.names):
        at, offset = place[number]
        if at >= 0:
            piece = Piece(file=paths[at], offset=offset, nbytes=sizes[number])
            shape = tuple(sig.shapes[number])
            if (region := sig.regions.get(number)) is not None:
                shape = region.shape
                if region.box.shape != shape:
                    piece = piece._replace(box_start=region.box.start, box_shape=region.box.shape)
            before = tensors[name].pieces if name in tensors else ()
            tensors[name] = TensorEntry(
                name=name, dtype=dtype_name(sig.dtypes[number]), shape=shape, pieces=(*before, piece)
            )
    tied = {sig.names[number]: sig.names[original] for number, original in aliases.items()}
    told = (
        None if division is None else replace(division, names="", loose=(), num_loose=0)
    )  # of the summary of each save
    return Index(writer=rank, files=tuple(paths), tensors=tensors, aliases=tied, division=told).to_bytes()
