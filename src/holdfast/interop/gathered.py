"""A foreign checkpoint that was read: its state as typed JSON, the bytes of its tensors, and what was left out.

The functions for its files say which of them may be read, and read with little memory. Symbolic links in a foreign
folder are not followed, because they could lead anywhere. The exception is the cache of the Hugging Face hub: it keeps
each file once, as ``<repository>/blobs/<digest>``, and a snapshot, ``<repository>/snapshots/<revision>/...``, links
there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from xxhash import xxh3_128, xxh3_128_digest

from holdfast.errors import CheckpointError
from holdfast.format.contents import tensor_rows
from holdfast.format.names import check_links
from holdfast.state.save.plan import signature
from holdfast.state.save.torch_file import tensor_bytes
from holdfast.state.tree.arrays import dtype_name
from holdfast.state.tree.flatten import Flat, flatten, unused_name
from holdfast.storage.base import FileReader
from holdfast.storage.local.local_storage import LocalStorage

from .blobs import WINDOW, Blob, Row
from .unpickle import refuse_pointer

_MAX_HOLES = 10_000  # items of a list that an importer has left out

_TWICE = "an item of this name was taken from elsewhere in the source"
_SAMPLE = 64 << 10  # bytes that are compared before whole tensors are
_MADV_DONTNEED = 4


@dataclass(slots=True)
class Gathered:
    """A state under construction.

    Attributes:
        tree: top-level name -> typed JSON.
        rows: the tensors.
        aliases: name of a tied tensor -> name of the tensor it is stored as.
        taken: (name, description) of each item that was taken.
        not_taken: (path, why) of what was left out.
        step: training step, if the source says.
        epoch: epoch, if the source says.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    taken: list[tuple[str, str]] = field(default_factory=list)
    not_taken: list[tuple[str, str]] = field(default_factory=list)
    step: int | None = None
    epoch: int | None = None

    def weights(self, item: str, blobs: Mapping[str, Blob]) -> None:
        """Take named tensors as the item ``item``."""
        self.tree[item] = {"$": "tensors", "at": f"{item}/", "k": list(blobs), "o": 1}
        self.rows += [Row(f"{item}/{name}", blob, blob.shape) for name, blob in blobs.items()]
        total = sum(blob.nbytes for blob in blobs.values())
        self.taken.append((item, f"{len(blobs)} tensors, {total} bytes"))

    def values(
        self,
        state: Mapping[str, Any],
        *,
        labels: Mapping[str, str] | None = None,
        mapped: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Take nested plain data with tensors in it; values that cannot be saved go to ``not_taken``.

        So does what has the name of an item that was taken before.

        Args:
            state: the data.
            labels: name -> its description in ``taken``.
            mapped: memory that is mapped from files (`mapped_ranges`).
        """
        self.not_taken += [(key, _TWICE) for key in state if key in self.tree]
        flat = flatten({key: value for key, value in state.items() if key not in self.tree}, unsupported="drop")
        items = _top_items(flat.tree)
        self.tree.update(items)
        self.add(flat, mapped)
        why = "neither plain data nor a dense tensor, nor of a class that is looked up"
        self.not_taken += [(path.removeprefix("state"), why) for path in flat.dropped]
        for key in items:
            count = sum(name == key or name.startswith(f"{key}/") for name in flat.names)
            self.taken.append((key, (labels or {}).get(key) or (f"{count} tensors" if count else "plain data")))

    def position(self, step: Any, epoch: Any = None) -> None:
        """Take step and epoch of the source, if they are what a checkpoint can have."""
        self.step = step if type(step) is int and step >= 0 else None
        self.epoch = epoch if type(epoch) is int and epoch >= 0 else None

    def add(self, flat: Flat, mapped: Sequence[tuple[int, int]] = ()) -> None:
        """Take the tensors of a flattened state."""
        tied = signature(flat).aliases
        for number, (name, tensor) in enumerate(zip(flat.names, flat.tensors, strict=True)):
            if number in tied:
                self.aliases[name] = flat.names[tied[number]]
                continue
            shape = tuple(tensor.shape)
            blob = Blob(name, dtype_name(tensor.dtype), shape, partial(streamed, tensor, mapped), tensor.itemsize)
            self.rows.append(Row(name, blob, shape))

    def join(self, other: Gathered, *, inside: str) -> None:
        """Take the items of ``other``, of the directory ``inside`` of the source, but no name that exists here."""
        twice = self.tree.keys() & other.tree.keys()

        def is_new(name: str) -> bool:
            return not any(name == key or name.startswith(f"{key}/") for key in twice)

        self.tree.update((key, node) for key, node in other.tree.items() if key not in twice)
        self.rows += [row for row in other.rows if is_new(row.name)]
        self.aliases.update((name, original) for name, original in other.aliases.items() if is_new(name))
        self.taken += [(key, label) for key, label in other.taken if key not in twice]
        self.not_taken += [(f"{inside}/{path}", why) for path, why in other.not_taken]
        self.not_taken += [(f"{inside}/{key}", _TWICE) for key in sorted(twice)]

    def tie_equal(self) -> None:
        """Store weights with equal bytes once: formats without ties write a tied tensor under each of its names.

        A live model in which they are tied refuses to load them otherwise; a model in which they are not reads the same
        bytes twice. Vectors stay as they are, and so do tensors that begin with zeros: they may be equal by chance.
        """
        alike: dict[tuple[str, tuple[int, ...]], list[Row]] = {}
        for row in self.rows:
            if len(row.shape) > 1 and row.box is None and row.blob.nbytes:
                alike.setdefault((row.blob.dtype, row.shape), []).append(row)
        for rows in alike.values():
            first: dict[bytes, list[Row]] = {}
            for row in rows if len(rows) > 1 else ():
                view = next(row.blob.parts())[:_SAMPLE]
                if any(view):
                    first.setdefault(xxh3_128_digest(view), []).append(row)
            for same in first.values():
                self._tie(same)

    def _tie(self, rows: list[Row]) -> None:
        originals: dict[bytes, str] = {}
        for row in rows if len(rows) > 1 else ():
            hasher = xxh3_128()
            for part in row.blob.parts():
                hasher.update(part)
            original = originals.setdefault(hasher.digest(), row.name)
            if original != row.name:
                self.aliases[row.name] = original
                self.rows.remove(row)


def tensor_name(path: Sequence[str | int], taken: AbstractSet[str] = frozenset()) -> str:
    """Return a name for the tensor at a path that is not ``taken``: keys with "/" in them can make two paths alike."""
    return unused_name("/".join(map(str, path)), taken)


def node_of(
    value: Any, name: str, *, unsupported: str = "raise", taken: AbstractSet[str] = frozenset()
) -> tuple[Any, Flat]:
    """Encode one value of a state; the tensors in it have names below ``name`` that are not ``taken``.

    Raises:
        UnsupportedStateError: the value cannot be saved.
    """
    label, number = name, 1
    while not taken.isdisjoint((flat := flatten({label: value}, unsupported=unsupported)).names):
        number += 1
        label = f"{name}~{number}"
    items = _top_items(flat.tree)
    return items.get(label), flat  # the node is None if the value was dropped


def tensor_names(node: Any) -> Iterator[str]:
    """Yield the names of all tensors in typed JSON."""
    if isinstance(node, dict):
        if node.get("$") == "tensors":
            yield from (node["at"] + key for key in node["k"])
        elif node.get("$") == "tensor":
            yield node["n"]
        else:
            for child in node.values():
                yield from tensor_names(child)
    elif isinstance(node, list):
        for child in node:
            yield from tensor_names(child)


def _top_items(tree: Any) -> dict[str, Any]:
    """Return the nodes of a state by name, in whichever form `flatten` wrote the mapping."""
    if tree.get("$") == "tensors":
        return tensor_rows(tree)
    return dict(tree["v"]) if "$" in tree else tree


def nested(nodes: Mapping[tuple[str | int, ...], Any]) -> Any:
    """Build the tree: text in a path is a key of a dict, a number is a place in a list.

    Raises:
        CheckpointError: the paths contradict one another.
    """
    root: dict[Any, Any] = {}
    for path, node in nodes.items():
        at = root
        for step in path[:-1]:
            at = at.setdefault(step, {})
            if not isinstance(at, dict) or isinstance(at, _Node):
                raise CheckpointError(f"{tensor_name(path)!r} lies inside of a value: give it another name")
        if path[-1] in at:
            raise CheckpointError(f"{tensor_name(path)!r} is there twice: give one of them another name")
        at[path[-1]] = _Node(node=node)
    return _close(root)


class _Node(dict[str, Any]):
    """A finished node: its class distinguishes it from containers under construction."""


def _close(value: dict[Any, Any]) -> Any:
    if isinstance(value, _Node):
        return value["node"]
    if value and all(type(key) is int for key in value):
        if min(value) < 0 or max(value) > len(value) + _MAX_HOLES:
            raise CheckpointError(f"a list of {len(value)} items has the places {min(value)} to {max(value)}")
        return [_close(value[key]) if key in value else None for key in range(max(value) + 1)]
    items = {str(key): _close(item) for key, item in value.items()}
    if len(items) < len(value):
        raise CheckpointError(f"a number and a text are the same key of a dict that has {', '.join(items)}: rename one")
    if "$" in items:
        return {"$": "dict", "v": [[key, item] for key, item in items.items()]}
    return items


def own_file(folder: str, name: str) -> str:
    """Return the path at which to read a file (or directory) of a foreign folder.

    Raises:
        CorruptCheckpointError: the file is a link, its path has a link in it, or only Git's pointer to it was fetched.
    """
    path = os.path.join(folder, name)
    refuse_pointer(path)
    if os.path.islink(path):
        snapshots, revision = os.path.split(os.path.abspath(folder))
        repository, kind = os.path.split(snapshots)
        real = os.path.realpath(path)
        if revision and kind == "snapshots" and os.path.dirname(real) == os.path.realpath(f"{repository}/blobs"):
            return real
    check_links(LocalStorage(folder), "", (name,))
    return path


def ranges(reader: FileReader, offset: int, size: int) -> Iterator[memoryview]:
    """Yield a range of a file, window by window."""
    buffer = memoryview(bytearray(min(WINDOW, size)))
    for start in range(0, size, WINDOW):
        view = buffer[: min(WINDOW, size - start)]
        reader.read_into(offset + start, view)
        yield view


def mapped_ranges(path: str) -> list[tuple[int, int]]:
    """Return the address ranges at which this process has mapped a file; an empty list where /proc is missing."""
    real = os.path.realpath(path)
    try:
        with open("/proc/self/maps") as file:
            lines = [line.split(maxsplit=5) for line in file]
    except OSError:
        return []
    spans = [fields[0].split("-") for fields in lines if len(fields) == 6 and fields[5].rstrip("\n") == real]
    return [(int(low, 16), int(high, 16)) for low, high in spans]


def streamed(tensor: torch.Tensor, mapped: Sequence[tuple[int, int]]) -> Iterator[memoryview]:
    """Yield the bytes of a tensor; pages mapped from a file are given back once read, or they would add up."""
    address = tensor.data_ptr()
    whole = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    memory = tensor.untyped_storage()
    first, last = memory.data_ptr(), memory.data_ptr() + memory.nbytes()
    is_mapped = any(low <= first and last <= high for low, high in mapped)
    for view in tensor_bytes(tensor):
        for start in range(0, len(view), WINDOW):
            part = view[start : start + WINDOW]
            yield part
            if is_mapped and whole:
                forget(address + start, len(part))
    if is_mapped:
        forget(first, last - first)


def forget(address: int, size: int) -> None:
    """Give back clean pages of a private file mapping; the next access reads them from the file again."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_DONTNEED)
