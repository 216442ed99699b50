"""Where every tensor goes: structure, division over the ranks, files with their headers, index, and the arena.

All of it is a pure function of the structure of a state (`Signature`), so no rank has to ask another, and a layout is
reused until the structure changes; headers and index are part of it.

The layout of the arena is the layout of the files (header padded to 4096 bytes, tensors in the order of `lay_out`,
without holes), so bytes go from the arena to the disk with no further copy.

In a state that several ranks save together, the parameters of modules and the state of optimizers for them are
*replicated*: the ranks divide them. A tensor that is spread over ranks (DTensor) says which rank holds which box; one
of the ranks that hold a box writes it. Each rank writes its own values (`PerRank`, generators, small objects), rank
0 everything else.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heapreplace
from operator import attrgetter, eq, is_
from typing import TYPE_CHECKING, Any

import torch

from holdfast.errors import ConfigError, UnsupportedStateError
from holdfast.format.digest import bytes_digest
from holdfast.format.index import Index, Piece, TensorEntry
from holdfast.format.tensor_file import lay_out, split_by_size
from holdfast.writer.messages import FilePlan

from ..tree.arrays import dtype_name
from ..tree.flatten import Flat

if TYPE_CHECKING:
    from holdfast.format.division import Division
    from holdfast.model_files import ModelFiles

    from ..tree.sharded import Region

__all__ = ["Assignment", "FileLayout", "Layout", "Signature", "divide", "fits", "plan", "share_of", "signature"]

BLOCK = 4096  # alignment of direct I/O and of every file in the arena
MIN_WINDOW = 1 << 20
_OWN_FILE = 1 << 20  # items below this size share the file "state", unless they are modules
_LOOSE = "state"
FROZEN = ".frozen"
# Bytes; rank 0 writes every replicated tensor up to this size (step counts of optimizers). So a rank that loads a
# sharded state needs two indexes: its own and that of rank 0.
_SMALL = 64
_SAMPLED = 64  # tensors whose values the ranks compare
_SAMPLED_ALIKE = 256  # the same where ranks hold different tensors: of the names they have in common


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
    alone: list[int] = field(default_factory=list)


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
        flat.alone,
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
        and sig.alone == flat.alone
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
            continue  # an empty tensor has no alias
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


@dataclass(slots=True)
class FileLayout:
    """One file: its segments, and its place in the arena. A file without a suffix is called ``stem`` in every save."""

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
        return f"{self.stem}-{save_id}{self.suffix}" if self.suffix else self.stem

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
        offsets: for each tensor its place in the arena; -1 if it is tied to another, or written by another rank.
        sizes: bytes of each tensor.
        arena_bytes: size of an arena that holds all files.
        tensor_bytes: bytes of all tensors that are written, ties counted once.
        division: how the state is divided over the ranks; None for a rank that saves alone.
        sampled: positions of tensors whose values the ranks compare: they have to be the same.
        alone: the same of tensors of which one rank's are stored: it is said if they are not.
        leader: the rank that stores what is not divided, for all ranks that hold the same.
        indexes: name of a safetensors index that this rank writes -> its text, with ``{save_id}`` in the file names.
    """

    signature: Signature
    files: list[FileLayout]
    offsets: list[int]
    sizes: list[int]
    arena_bytes: int
    tensor_bytes: int
    division: Division | None = None
    sampled: tuple[int, ...] = ()
    alone: tuple[int, ...] = ()
    leader: int = 0
    indexes: dict[str, str] = field(default_factory=dict)

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
    model_files: ModelFiles | None = None,
) -> Layout:
    """Lay out a structure.

    Args:
        sig: the structure.
        rank: the writing rank; part of the file names.
        num_ranks: how many ranks write it together; what other ranks write is not part of this layout.
        max_file_bytes: a file is split when it would grow beyond this (one tensor is never split).
        stable: names of tensors that did not change between saves; they get files of their own, as frozen tensors do.
        alike: the ranks that hold the same as this rank, where others hold other tensors; None: all ranks.
        model_files: what rank 0 puts beside the tensors, with the bytes of every file, and how other libraries are to
            find the tensors; the same on all ranks but for the bytes.

    Raises:
        UnsupportedStateError: a tensor is spread over ranks that do not save, or that ``model_files`` wants whole.
        ConfigError: ``model_files`` names what is not in the state.
    """
    sizes = [dtype.itemsize * shape.numel() for dtype, shape in zip(sig.dtypes, sig.shapes, strict=True)]
    structure, named = sig, dict[int, tuple[str, str]]()
    foreign, contents = dict[str, str](), dict[str, Any]()
    if model_files is not None:
        sig = _with_items(sig, model_files)
        named = _named(sig, model_files, alike)
        foreign, contents = dict(model_files.indexes), dict(model_files.files)
    share = None
    if num_ranks > 1:
        share = share_of(sig, sizes, rank=rank, num_ranks=num_ranks, alike=alike, held=named)
    else:
        _check_whole(sig)

    def lay_out_tensors(writer: int, share: Assignment | None) -> tuple[list[FileLayout], list[tuple[int, int]]]:
        writes = None if share is None else share.writes
        groups = _groups(sig, sizes, stable, writes, apart=frozenset(foreign.values()), named=named)
        return _files(sig, sizes, groups, rank=writer, max_file_bytes=max_file_bytes, named=named)

    files, place = lay_out_tensors(rank, share)
    aliases = sig.aliases if share is None else share.aliases
    division = None if share is None else share.division
    indexes: dict[str, str] = {}
    if rank == 0:
        if foreign:
            layouts = [(files, place)]
            for other in range(1, num_ranks):
                # Of the tensors that an index names none is cut; of the others this rank cannot say who writes what.
                their_share = share_of(replace(sig, regions={}), sizes, rank=other, num_ranks=num_ranks, held=named)
                layouts.append(lay_out_tensors(other, their_share))
            indexes = {
                path: _foreign_index(sig, sizes, item, layouts, depth=path.count("/")) for path, item in foreign.items()
            }
        for path, content in sorted(contents.items()):
            assert isinstance(content, bytes)
            files.append(FileLayout(path, "", "user", stable=True))
            files[-1].add(content, len(content))
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
    sampled, alone = ((), ()) if share is None else (share.sampled, share.alone)
    leader, num_bytes = 0 if alike is None else alike[0], max(end, BLOCK)
    return Layout(
        structure, files, offsets, sizes, num_bytes, tensor_bytes, division, sampled, alone, leader, indexes
    )  # fmt: skip


def _files(
    sig: Signature,
    sizes: list[int],
    groups: dict[str, list[int]],
    *,
    rank: int,
    max_file_bytes: int,
    named: Mapping[int, tuple[str, str]],
) -> tuple[list[FileLayout], list[tuple[int, int]]]:
    """Lay out the files of tensors; also returns, for each tensor, the number of its file and its offset there."""
    files: list[FileLayout] = []
    place: list[tuple[int, int]] = [(-1, -1)] * len(sizes)
    for label, members in groups.items():
        if label.startswith("/"):
            file = FileLayout(label[1:], "", "tensors")
            names = [named[position][1] for position in members]
            _fill(file, members, names, sig, sizes, number=len(files), place=place)
            files.append(file)
            continue
        for part, places in enumerate(split_by_size([sizes[position] for position in members], max_file_bytes)):
            chunk = [members[place] for place in places]
            stem = f"{label}-{rank:05d}" + (f".part{part:02d}" if part else "")
            file = FileLayout(stem, ".safetensors", "tensors", stable=label.endswith(FROZEN))
            own = sig.files[chunk[0]] if label.removesuffix(FROZEN) != _LOOSE else ""
            names = [_inside(own, sig.names[position]) for position in chunk]
            _fill(file, chunk, names, sig, sizes, number=len(files), place=place)
            files.append(file)
    return files, place


def _with_items(sig: Signature, model_files: ModelFiles) -> Signature:
    """Return ``sig`` with each item of an index that is a path ("state/model") as a file group of its own.

    A path ends at a "/" or, for a module within another one, at a ".".
    """
    inner = sorted(set(model_files.indexes.values()).difference(sig.files), key=len, reverse=True)
    if not inner:
        return sig
    files = [
        next((item for item in inner if name.startswith((f"{item}/", f"{item}."))), file)
        for file, name in zip(sig.files, sig.names, strict=True)
    ]
    return replace(sig, files=files)


def _inside(item: str, name: str) -> str:
    """Return the name of a tensor within its item; "" for none."""
    return name[len(item) + 1 :] if item and name.startswith((f"{item}/", f"{item}.")) else name


def _named(sig: Signature, model_files: ModelFiles, alike: tuple[int, ...] | None) -> dict[int, tuple[str, str]]:
    """Return the file, and the name there, of each tensor that ``model_files`` puts into a file with a name."""
    if alike is not None and (model_files.indexes or model_files.named):
        raise ConfigError(
            "model_files wants one directory that holds a whole model, but the ranks hold different parts of it "
            "(alike, stages of a pipeline, experts): leave model_files out, and use `holdfast export` afterwards"
        )
    items = set(model_files.indexes.values())
    unknown = sorted(items.difference(sig.files))
    if unknown:
        raise ConfigError(
            f"model_files: the state has no tensors under {', '.join(map(repr, unknown))}; it has them under "
            f"{', '.join(sorted({repr(item) for item in sig.files if item}))}: give item=..., the key of the model in "
            "the state"
        )
    at = {name: number for number, name in enumerate(sig.names)}
    wanted = {path: (file, name) for file, names in model_files.named.items() for path, name in names.items()}
    missing = sorted(wanted.keys() - at.keys())
    if missing:
        raise ConfigError(
            f"model_files: the state has no tensor {missing[0]!r}"
            + (f", nor {len(missing) - 1} more" if len(missing) > 1 else "")
            + ": make the files from the model that is saved, and give item=..., its key in the state"
        )
    named = {at[path]: place for path, place in wanted.items()}
    for number, region in sig.regions.items():
        if region.box.shape != region.shape and (number in named or sig.files[number] in items):
            raise UnsupportedStateError(
                f"model_files: {sig.names[number]!r} is cut over {region.spread.num_ranks} ranks, and other libraries "
                "read whole tensors: a DTensor (FSDP2, tensor parallelism) that all ranks save together is put "
                "together, this one is not; leave model_files out here, and use `holdfast export` afterwards"
            )
    return named


def _foreign_index(
    sig: Signature,
    sizes: list[int],
    item: str,
    layouts: list[tuple[list[FileLayout], list[tuple[int, int]]]],
    *,
    depth: int,
) -> str:
    """Write the index of an item as safetensors and Transformers have it; ``layouts`` are those of all ranks."""
    from holdfast.model_files import index_template

    weights, total = {}, 0
    for files, place in layouts:
        for number, (file, _) in enumerate(place):
            if file >= 0 and sig.files[number] == item:
                weights[_inside(item, sig.names[number])] = files[file].path("{save_id}")
                total += sizes[number]
    return index_template(depth, dict(sorted(weights.items())), total)


def _check_whole(sig: Signature) -> None:
    parts = sorted(sig.names[position] for position, region in sig.regions.items() if region.box.shape != region.shape)
    if parts:
        num_ranks = max(region.spread.num_ranks for region in sig.regions.values())
        raise UnsupportedStateError(
            f"{parts[0]!r} and {len(set(parts)) - 1} more are spread over {num_ranks} ranks, but this rank saves alone "
            "and holds a part of them: let all ranks save (ranks='all'), or save tensor.full_tensor()"
        )


def _groups(
    sig: Signature,
    sizes: list[int],
    stable: frozenset[str],
    writes: frozenset[int] | None,
    *,
    apart: frozenset[str],
    named: Mapping[int, tuple[str, str]],
) -> dict[str, list[int]]:
    """Assign tensors to files: one for each item of the state, frozen tensors apart, small items together.

    The files are those of the whole state, whatever part of it ``writes`` (None: all) is. Items in ``apart`` get files
    of their own at any size; a tensor in ``named`` goes to its file, whose label is "/" and its name.
    """
    totals: dict[str, int] = {}
    for item, size in zip(sig.files, sizes, strict=True):
        totals[item] = totals.get(item, 0) + size
    labels, taken = {"": _LOOSE}, {_LOOSE}
    for item, total in totals.items():
        if item and item != _LOOSE and (total >= _OWN_FILE or item == "model" or item in apart):
            safe = re.sub(r"[^A-Za-z0-9_.-]", "_", item).lstrip(".")[:64] or _LOOSE
            label, number = safe, len(labels)
            # Disks of macOS, Windows and some shares do not tell "G" from "g".
            while label.lower() in taken or label.lower().endswith(FROZEN):
                label, number = f"{safe}.{number}", number + 1
            labels[item] = label
            taken.add(label.lower())
    groups: dict[str, list[int]] = {}
    for number, (item, name) in enumerate(zip(sig.files, sig.names, strict=True)):
        if number in sig.aliases if writes is None else number not in writes:
            continue
        label = labels.get(item, _LOOSE)
        if number in named:
            label = f"/{named[number][0]}"
        elif number in sig.frozen or name in stable:
            label += FROZEN
        groups.setdefault(label, []).append(number)
    return groups


def _fill(
    file: FileLayout,
    members: list[int],
    names: list[str],
    sig: Signature,
    sizes: list[int],
    *,
    number: int,
    place: list[tuple[int, int]],
) -> None:
    rows = [
        (name, dtype_name(sig.dtypes[position]), tuple(sig.shapes[position]), sizes[position])
        for name, position in zip(names, members, strict=True)
    ]
    laid_out = lay_out(rows)
    file.add(laid_out.header, len(laid_out.header))
    for at in laid_out.order:
        position = members[at]
        place[position] = (number, laid_out.offsets[at])
        file.add(position, sizes[position])


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
    stored = (
        None if division is None else replace(division, names="", loose=(), num_loose=0)
    )  # of the summary of each save
    return Index(writer=rank, files=tuple(paths), tensors=tensors, aliases=tied, division=stored).to_bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What one rank writes.

    Attributes:
        writes: positions of the tensors it writes.
        aliases: position of a tied tensor -> position of the tensor that it writes for both.
        division: what all ranks must have derived alike.
        sampled: positions of tensors to be compared between the ranks that hold the same.
        alone: the same of those of which one rank's are stored for all.
    """

    writes: frozenset[int]
    aliases: dict[int, int]
    division: Division
    sampled: tuple[int, ...]
    alone: tuple[int, ...]


def divide(
    names: Sequence[str], sizes: Sequence[int], num_ranks: int, *, last: Collection[int] = frozenset()
) -> list[int]:
    """Give every tensor to one rank: largest tensor first, each to the rank with the fewest bytes. O(n log n).

    The result depends on the set of (name, size), not on its order. No rank gets more than another by more than the
    largest tensor, neither in all nor in the tensors before ``last``.

    Args:
        names: of the tensors; no two are equal.
        sizes: their bytes.
        num_ranks: how many ranks there are.
        last: positions that come after all others: frozen tensors, which most saves link instead of writing.

    Returns:
        The rank of each tensor.
    """
    order = sorted(range(len(names)), key=names.__getitem__)
    order.sort(key=lambda position: -sizes[position])
    if last:
        order.sort(key=lambda position: position in last)
    ranks = [0] * len(names)
    loads = [(0, rank) for rank in range(num_ranks)]
    heapify(loads)
    for position in order:
        load, rank = loads[0]
        ranks[position] = rank
        heapreplace(loads, (load + sizes[position], rank))
    return ranks


def share_of(
    sig: Signature,
    sizes: Sequence[int],
    *,
    rank: int,
    num_ranks: int,
    alike: tuple[int, ...] | None = None,
    held: Collection[int] = frozenset(),
) -> Assignment:
    """Derive what ``rank`` writes.

    Tied tensors stay together: if one of them is replicated they all are. But a tensor that differs between ranks is
    never tied to a tensor that does not, because its values differ on the next rank.

    Args:
        sig: the structure; all but the values that differ must be the same on all ranks.
        sizes: bytes of each of its tensors.
        rank: the rank.
        num_ranks: how many ranks there are.
        alike: the ranks that divide it, where other ranks hold other tensors; None: all ranks.
        held: positions of tensors that lie in one file together: the first of these ranks writes them.
    """
    from holdfast.format.division import Division, sketch  # not above: of several ranks only

    group = tuple(range(num_ranks)) if alike is None else alike
    own, replicated = frozenset(sig.own), set(sig.replicated)
    aliases: dict[int, int] = {}
    heads: dict[tuple[int, bool], int] = {}  # (tie, whether it differs between ranks) -> its first tensor
    for number in sorted({*sig.aliases, *sig.aliases.values()}):
        head = heads.setdefault((sig.aliases.get(number, number), number in own), number)
        if head != number:
            aliases[number] = head
            if number in replicated:
                replicated.add(head)
    divided = sorted(replicated.difference(aliases), key=sig.names.__getitem__)
    names, lengths = [sig.names[position] for position in divided], [sizes[position] for position in divided]
    frozen = frozenset(place for place, position in enumerate(divided) if position in sig.frozen)
    owners = [group[place] for place in divide(names, lengths, len(group), last=frozen)]
    owners = [
        group[0] if size <= _SMALL or position in held else owner
        for owner, size, position in zip(owners, lengths, divided, strict=True)
    ]
    writes = {position for position, owner in zip(divided, owners, strict=True) if owner == rank}
    writes.update(number for number in own if number not in aliases)
    boxes, shared_boxes = _of_regions(sig, sizes, aliases, rank=rank, num_ranks=num_ranks, alike=alike)
    writes.update(boxes)
    if rank == group[0]:
        elsewhere = replicated.union(aliases, sig.regions)
        writes.update(number for number in range(len(sizes)) if number not in elsewhere)
    rows = [f"{name}\0{size}\0{place in frozen}" for place, (name, size) in enumerate(zip(names, lengths, strict=True))]
    rows += [f"{sig.names[position]}\0held" for position in sorted(held)]
    ties = sorted(f"{sig.names[tied]}\0{sig.names[head]}" for tied, head in aliases.items() if head in replicated)
    spread = {
        f"{sig.names[position]}\0{sig.dtypes[position]}\0{region.shape}\0{region.spread.text}"
        for position, region in sig.regions.items()
    }
    text = "\n".join([*rows, "", *ties, *(["", *sorted(spread)] if spread else [])])
    known = {*names, *(sig.names[position] for position in sig.regions)}
    if alike is None:
        sampled = _sampled(divided, lengths) + _sampled(shared_boxes, [sizes[position] for position in shared_boxes])
    else:
        mine = [position for position in sig.loose if position in writes]
        sampled = _sampled_alike([*divided, *boxes, *shared_boxes, *mine], sig)
    alone = {sig.names[position]: position for position in sig.alone if sizes[position] and alike is None}
    return Assignment(
        writes=frozenset(writes),
        aliases={number: head for number, head in aliases.items() if head in writes},
        division=Division(
            num_ranks=num_ranks,
            structure=_digest(text),
            alike=alike,
            names=_digest("\n".join(sorted(known))),
            loose=sketch(sig.names[position] for position in sig.loose if position not in replicated),
            num_loose=len(sig.loose),
        ),
        sampled=sampled,
        alone=tuple(alone[name] for name in sketch(alone)),
    )


def _digest(text: str) -> str:
    return bytes_digest(text.encode(errors="surrogatepass")).removeprefix("xxh3:")


def _of_regions(
    sig: Signature,
    sizes: Sequence[int],
    aliases: dict[int, int],
    *,
    rank: int,
    num_ranks: int,
    alike: tuple[int, ...] | None,
) -> tuple[list[int], list[int]]:
    """Return the positions of the boxes that ``rank`` writes, and those of boxes that other ranks hold as well.

    Ranks that hold the same box hold the same boxes of every tensor with this placement, so they derive the same
    division.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, region in sig.regions.items():
        spread = region.spread
        if alike is not None:
            if spread.rank != rank or not set(alike).issubset(spread.ranks):
                raise UnsupportedStateError(
                    f"{sig.names[number]!r} is spread over a mesh of the ranks {list(spread.ranks)[:20]}, but the "
                    f"ranks {list(alike)[:20]} are said to hold the same: alike= has to name ranks of that mesh"
                )
        elif spread.num_ranks != num_ranks or spread.rank != rank:
            raise UnsupportedStateError(
                f"{sig.names[number]!r} is spread over a mesh of {spread.num_ranks} ranks, where this is rank "
                f"{spread.rank}, but {num_ranks} ranks save together and this is rank {rank}: make one mesh of all "
                "ranks (init_device_mesh) and give parts of it (mesh['tp']) to what is sharded over fewer"
            )
        if number not in aliases and all(region.box.shape):
            holders = spread.holders if alike is None else tuple(holder for holder in spread.holders if holder in alike)
            groups.setdefault(holders, []).append(number)
    writes, several = list(groups.pop((rank,), ())), []
    for holders, numbers in sorted(groups.items()):
        names = {position: f"{sig.names[position]}\0{sig.regions[position].box.start}" for position in numbers}
        numbers.sort(key=names.__getitem__)
        frozen = frozenset(place for place, position in enumerate(numbers) if position in sig.frozen)
        owners = divide(
            [names[number] for number in numbers], [sizes[number] for number in numbers], len(holders), last=frozen
        )
        writes.extend(position for position, owner in zip(numbers, owners, strict=True) if holders[owner] == rank)
        several.extend(numbers)
    return writes, several


def _sampled(divided: Sequence[int], lengths: Sequence[int]) -> tuple[int, ...]:
    """Choose tensors to compare: the largest, and others evenly over the names."""
    filled = [position for position, length in zip(divided, lengths, strict=True) if length]
    if len(filled) <= _SAMPLED:
        return tuple(filled)
    largest = divided[max(range(len(lengths)), key=lengths.__getitem__)]
    spread = {filled[place * len(filled) // _SAMPLED] for place in range(_SAMPLED - 1)}
    return tuple(position for position in filled if position == largest or position in spread)


def _sampled_alike(candidates: Sequence[int], sig: Signature) -> tuple[int, ...]:
    """Choose tensors by their names alone, so that two ranks choose the same of those they have in common."""
    if len(candidates) > _SAMPLED_ALIKE:
        order = sorted(set(candidates), key=lambda position: _digest(sig.names[position]))
        return tuple(sorted(order[:_SAMPLED_ALIKE]))
    return tuple(sorted(set(candidates)))
