"""The result of matching a stored checkpoint with a live state: what to read where, what to run, what does not fit.

`Matcher` (`match`) walks through both, with `match_objects` for modules and optimizers, and `rank_values`
for values of single ranks. All of them write into a `MatchPlan`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..tree import rng
from ..tree.values import ObjectNode, PerRankNode, TensorRef, fill
from .selection import Selection, covers
from .stored import Stored
from .targets import Targets

__all__ = ["MatchPlan", "Problems", "kind_of"]


@dataclass(slots=True)
class Problems:
    """The entries that do not fit, by kind: a path, or a path with an explanation."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.wrong)

    def without(self, patterns: tuple[str, ...]) -> Problems:
        """Return the entries whose path no name or glob covers."""
        if not patterns:
            return self
        kinds = (self.missing, self.unexpected, self.wrong)
        return Problems(*([entry for entry in kind if not covers(patterns, entry.split(": ", 1)[0])] for kind in kinds))


class MatchPlan(ABC):
    """The plan of a load, while it is made.

    Attributes:
        targets: the reads.
        actions: calls to make after the reading, in order; `handovers` come after them.
        last: calls to make at the very end (generators).
        problems: entries that do not fit.
        restored: paths of entries that will be restored.
        not_restored: (path, why) of entries that will not.
        notes: a sentence for each value that differs from what was saved because the number of ranks differs.
    """

    def __init__(
        self,
        stored: Stored,
        selection: Selection,
        *,
        allow_missing: tuple[str, ...] = (),
        cast: torch.dtype | None = None,
        rank: int = 0,
        device: torch.device | None = None,
        added: frozenset[str] = frozenset(),
    ) -> None:
        self._added = added  # paths that the live state may lack: their values are made anew
        self.stored, self.selection, self.allow_missing, self.rank = stored, selection, allow_missing, rank
        self.device = device  # for tensors that have no memory yet; None: the CPU
        self.notes: list[str] = []
        self.targets = Targets(stored, cast)
        self.actions: list[Callable[[], object]] = []
        self._asked: dict[str, tuple[Any, Any]] = {}  # objects by path, with what their `state_dict` gave
        self._handovers: list[tuple[str, list[Callable[[], object]]]] = []
        self.last: list[Callable[[], None]] = []
        self.problems = Problems()
        self.restored: list[str] = []
        self.not_restored: list[tuple[str, str]] = []
        self.parameter_names: dict[int, str] = {}
        self._fresh: dict[str, torch.Tensor] = {}  # stored name -> new tensor; tied tensors share it
        self._origin: dict[str, str] = {}  # new path -> stored path, for what `rename` moves
        self.moved: dict[str, TensorRef] = {}  # new name -> tensor, for what `rename` moves
        self.outdone = selection.outdone(stored.refs)  # stored names whose place a renamed one takes
        if selection.renames:
            for name, ref in stored.refs.items():
                if (new := selection.renamed(name)) != name and name not in self.outdone:
                    self.moved[new], self._origin[new] = ref, name

    @abstractmethod
    def match(self, live: Any, saved: Any, path: str) -> Any:
        """Match one value; returns its replacement in the result."""

    def takes(self, path: str) -> bool:
        """Tell whether a live entry is wanted, by its own path or by its stored path."""
        if not self.selection.renames:
            return self.selection.takes(path)
        return self.selection.takes(path, self.stored_path(path))

    def stored_path(self, path: str) -> str:
        """Return the path in the checkpoint of what comes to ``path``."""
        if not self._origin:
            return path
        above, below = path, ""
        while above and above not in self._origin:
            above, _, last = above.rpartition("/")
            below = f"/{last}{below}"
        return self._origin[above] + below if above else path

    def lacks(self, value: Any, path: str) -> None:
        """Record that the checkpoint has nothing for a live entry."""
        if not self.takes(path):
            return
        if value is rng.RNG:
            self.not_restored.append((path, "the checkpoint holds no generator states"))
        elif covers(self.allow_missing, path):
            self.not_restored.append((path, "not in the checkpoint (allow_missing)"))
        else:
            self.problems.missing.append(path)

    def read(self, ref: TensorRef, live: torch.Tensor, path: str) -> bool:
        """Plan to read a stored tensor into a live tensor; False (and a problem) if they do not fit."""
        problem = self.targets.add(ref.name, live)
        if problem is not None:
            self.problems.wrong.append(f"{path}: {problem}")
        return problem is None

    def home_of(self, tensor: torch.Tensor) -> torch.device:
        """Return the device of a tensor; without memory, the device of its mesh, else ``device``."""
        if not tensor.is_meta:
            return tensor.device
        mesh = getattr(tensor, "device_mesh", None)
        return torch.device(mesh.device_type) if mesh is not None else self.device or torch.device("cpu")

    def fresh(self, saved: Any, path: str) -> Any:
        """Plan to read every tensor of a stored value into new memory; `filled` then returns the value."""
        for ref in self._refs(saved):
            if ref.value is None:
                entry = self.stored.entry(ref.name)  # first: it may read the index that has its tie
                source = self.stored.aliases.get(ref.name, ref.name)
                if source not in self._fresh:
                    dtype = self.targets.dtype(entry.dtype)
                    self._fresh[source] = self.targets.fresh(source, dtype=dtype, device=torch.device("cpu"))
                ref.value = self._fresh[source]
        return saved

    def _refs(self, value: Any) -> Iterator[TensorRef]:
        if isinstance(value, TensorRef):
            yield value
        elif isinstance(value, ObjectNode):
            yield from self._refs(value.state)
        elif isinstance(value, PerRankNode):
            # Within the state of an object, which gets the plain value.
            self.stored.say_borrowed()
            yield from self._refs((self.stored.per_rank or {}).get(value.key))
        elif isinstance(value, Mapping):
            for item in value.values():
                yield from self._refs(item)
        elif isinstance(value, (list, tuple, set, frozenset, deque)) and not isinstance(value, torch.Size):
            for item in value:
                if not isinstance(item, (int, float, str)):
                    yield from self._refs(item)

    def filled(self, value: Any) -> Any:
        """Replace every placeholder of a stored value by what was read."""
        return fill(value, self.stored.per_rank)


def kind_of(saved: Any) -> str:
    """Say what a stored value is, for messages."""
    if isinstance(saved, TensorRef):
        return "a tensor" if saved.kind != "array" else "an array"
    if isinstance(saved, ObjectNode):
        return saved.type
    if saved is None:
        return "nothing"
    return f"a {type(saved).__name__}"
