"""A foreign checkpoint that was read: its state as typed JSON, the bytes of its tensors, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from xxhash import xxh3_128, xxh3_128_digest

from holdfast.state.save.plan import signature
from holdfast.state.tree.arrays import dtype_name
from holdfast.state.tree.flatten import Flat, flatten

from .blobs import Blob
from .foreign_files import streamed
from .part import Row
from .tree import top_items

__all__ = ["Gathered"]

_SAMPLE = 64 << 10  # bytes that are compared before whole tensors are


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

        Args:
            state: the data.
            labels: name -> its description in ``taken``.
            mapped: memory that is mapped from files (`mapped_ranges`).
        """
        flat = flatten(state, unsupported="drop")
        items = top_items(flat.tree)
        self.tree.update(items)
        self.add(flat, mapped)
        why = "no plain data, nor of a class that is looked up"
        self.not_taken += [(path.removeprefix("state"), why) for path in flat.dropped]
        for key in items:
            count = sum(name == key or name.startswith(f"{key}/") for name in flat.names)
            self.taken.append((key, (labels or {}).get(key) or (f"{count} tensors" if count else "plain data")))

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
        why = "an item of this name was taken from elsewhere in the source"
        self.not_taken += [(f"{inside}/{key}", why) for key in sorted(twice)]

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
