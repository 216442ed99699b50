"""The result of matching a stored checkpoint with a live state: what to read where, what to run, what does not fit.

`Matcher` (`match`) walks through both, with `match_objects` for modules and optimizers, and writes into a `MatchPlan`.

So do the functions here for generators and `PerRank` values, which each rank stored for itself. The generators of four
ranks do not fit three: each rank gets new generators. Their state is a function of the stored state of rank 0, the
step, the number of ranks and the rank, so the same resume always gives the same numbers and no two ranks draw the same.
Generators that all ranks kept in step (the same seed everywhere and the same draws, for decisions that ranks take
together) stay in step: all ranks take the state of rank 0.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import xxhash

from holdfast._units import listed

from ..data.seeding import mix
from ..tree import arrays, rng
from ..tree.values import ObjectNode, PerRank, PerRankNode, TensorRef, fill
from .selection import Selection, covers
from .stored import Stored
from .targets import ReadRequest, Targets

__all__ = [
    "MatchPlan", "Problems", "derive_generators", "kind_of", "match_per_rank", "match_rng", "note_apart",
    "restore_derived",
]  # fmt: skip


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
        fixed: (path, live, stored) of tensors that nothing can load: they have to be alike (`other_values`).
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
        self._takes_all = selection.everything
        self.device = device  # for tensors that have no memory yet; None: the CPU
        self.notes: list[str] = []
        self.targets = Targets(stored, cast)
        self.actions: list[Callable[[], object]] = []
        self._asked: dict[str, tuple[Any, Any]] = {}  # objects by path, with what their `state_dict` gave
        self._handovers: list[tuple[str, list[Callable[[], object]]]] = []
        self.last: list[Callable[[], None]] = []
        self.fixed: list[tuple[str, torch.Tensor, TensorRef]] = []
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

    def forget_actions(self) -> None:
        """Let go of calls that have been made: they hold this plan, and all it was made from until a collection."""
        self.actions, self._handovers, self.last = [], [], []

    @abstractmethod
    def match(self, live: Any, saved: Any, path: str) -> Any:
        """Match one value; returns its replacement in the result."""

    def takes(self, path: str) -> bool:
        """Tell whether a live entry is wanted, by its own path or by its stored path."""
        if self._takes_all:
            return True
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
        problem: str | None = None
        if type(live) not in arrays.PLAIN and not arrays.is_spread(live):
            live = arrays.bare(live)
            if arrays.parts_of(live) is not None:
                problem = f"a {type(live).__name__} in the state, {kind_of(ref)} in the checkpoint"
        problem = problem or self.targets.add(ref.name, live)
        if problem is not None:
            self.problems.wrong.append(f"{path}: {problem}")
        return problem is None

    def place_spread(self, saved: Any, spread: Mapping[str, list[int | None]], params: Sequence[Any]) -> int:
        """Plan to read tensors that were spread over ranks into such tensors; returns how many will come whole.

        Args:
            saved: a stored value; its tensors that have a place already keep it.
            spread: name of a tensor -> its layout (`sharded.layouts_of`).
            params: tensors that are spread over ranks now, as those may be that belong to them.
        """
        from ..tree.sharded import beside_alike  # not above: few states have such tensors

        num_whole = 0
        for ref in self.stored.refs_in(saved):
            if ref.value is None and (layout := spread.get(ref.name)) is not None:
                entry = self.stored.entry(ref.name)
                target = beside_alike(params, tuple(entry.shape), self.targets.dtype(entry.dtype), layout)
                if target is not None and self.targets.add(ref.name, target) is None:
                    ref.value = target
                else:
                    num_whole += 1
        return num_whole

    def other_values(self, read: Callable[[Sequence[ReadRequest]], object]) -> list[str]:
        """Read what is `fixed`, and return a problem for each tensor that has other values in the checkpoint."""
        if not self.fixed:
            return []
        apart = Targets(self.stored, None)
        dtypes = (arrays.dtype_of(self.stored.entry(ref.name).dtype) for _, _, ref in self.fixed)
        values = [
            apart.fresh(ref.name, dtype=dtype, device=torch.device("cpu"))
            for (_, _, ref), dtype in zip(self.fixed, dtypes, strict=True)
        ]
        read(apart.requests)
        return [
            f"{path}: the module has no code to load it, and the checkpoint has another value: make the module of the "
            "same weights, in the same way"
            for (path, live, _), value in zip(self.fixed, values, strict=True)
            if not _has_same_bits(live.cpu(), value)
        ]

    def home_of(self, tensor: torch.Tensor) -> torch.device:
        """Return the device of a tensor; without memory, the device of its mesh, else ``device``."""
        shards = getattr(tensor, "local_shards", None)
        if shards is not None:  # it answers for itself where a rank holds one shard, not several or none
            return next((shard.tensor.device for shard in shards()), torch.device("cpu"))
        if not tensor.is_meta:
            return tensor.device
        mesh = getattr(tensor, "device_mesh", None)
        return torch.device(mesh.device_type) if mesh is not None else self.device or torch.device("cpu")

    def fresh(self, saved: Any, path: str) -> Any:
        """Plan to read every tensor of a stored value into new memory; `filled` then returns the value."""
        for ref in self.stored.refs_in(saved):
            if ref.value is None:
                entry = self.stored.entry(ref.name)  # first: it may read the index that has its tie
                source = self.stored.aliases.get(ref.name, ref.name)
                if source not in self._fresh:
                    own = ref.kind == "part"
                    dtype = arrays.dtype_of(entry.dtype) if own else self.targets.dtype(entry.dtype)
                    self._fresh[source] = self.targets.fresh(source, dtype=dtype, device=torch.device("cpu"))
                ref.value = self._fresh[source]
        return saved

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


_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")  # NumPy's own


def match_rng(plan: MatchPlan, saved: Any, path: str) -> Any:
    """Plan to restore the generators of this process, last of all."""
    stored = plan.stored
    parts = stored.per_rank
    if not plan.takes(path):
        return rng.RNG
    if not (isinstance(saved, PerRankNode) and saved.rng):
        plan.not_restored.append((path, "the checkpoint holds no generator states"))
    elif stored.resized is not None and (first := (stored.part(0) or {}).get(saved.key)) is not None:
        # Rank 1 and the last rank are compared with rank 0: a group of ranks may be in step only among themselves.
        compared = ({1, stored.manifest.world_size - 1} - {0}) & stored.parts.keys()
        others = ((stored.part(rank) or {}).get(saved.key) for rank in sorted(compared))
        states = [plan.fresh(part["rng"], path) for part in (first, *others) if part is not None]
        plan.last.append(lambda: _derive(plan, states, path))
        plan.restored.append(path)
    elif parts is None or saved.key not in parts or stored.borrowed:
        plan.not_restored.append((path, "the checkpoint holds no generator states of this rank"))
    else:
        state = plan.fresh(parts[saved.key]["rng"], path)
        plan.last.append(lambda: plan.not_restored.extend((path, why) for why in rng.restore(plan.filled(state))))
        plan.restored.append(path)
    return rng.RNG


def _derive(plan: MatchPlan, states: list[Any], path: str) -> None:
    """Derive the generators of this rank from those of rank 0; the other states show which were in step."""
    manifest, now = plan.stored.manifest, plan.stored.resized or 1
    first, *others = map(plan.filled, states)
    in_step, problems = restore_derived(first, others, step=manifest.step, rank=plan.rank, world_size=now)
    note = f"random generators: derived for {now} rank(s) (the checkpoint has {manifest.world_size})"
    if in_step:
        note += f"; those in step on all ranks go on in step: {', '.join(in_step)}"
    if _in_groups([one.get("torch") for one in (first, *others)]):
        note += (
            "; ranks 0 and 1 drew alike, and not as the last rank: seed groups that have to draw alike (tensor "
            "parallel) anew behind this start"
        )
    plan.notes.append(note)
    plan.not_restored.extend((path, why) for why in problems)


def _in_groups(states: list[Any]) -> bool:
    """Tell from the generators of ranks 0, 1 and the last one whether some ranks were in step, and not all."""
    if len(states) < 3 or not all(isinstance(one, torch.Tensor) for one in states):
        return False
    return _has_same_bits(*states[:2]) and not _has_same_bits(*states[1:])


def derive_generators(plan: MatchPlan) -> None:
    """Seed the generators of the state of which each rank stored its own, if another number of ranks loads them.

    Those in step on all ranks, as far as they are compared, are left as rank 0 had them.
    """
    stored = plan.stored
    if stored.resized is None or not stored.generators:
        return
    ranks = sorted({0, 1, stored.manifest.world_size - 1} & stored.parts.keys())
    parts = [part for rank in ranks if (part := stored.part(rank)) is not None]
    place = mix(stored.manifest.step or 0, stored.resized, plan.rank)
    for key, generator in stored.generators.items():
        found = [part[key] for part in parts if isinstance(part.get(key), torch.Generator)]
        if not found or found[0].device.type != generator.device.type:
            continue
        first, *others = (one.get_state() for one in found)
        if others and all(torch.equal(first, other) for other in others):
            generator.set_state(first)
            continue
        generator.manual_seed(mix(_hash(first), place))
        if plan.takes(key):
            before = stored.manifest.world_size
            plan.notes.append(f"{key}: a generator for each of {before} rank(s): derived for {stored.resized}")


def note_apart(plan: MatchPlan) -> None:
    """Say which values every rank has from rank 0 now, although the ranks that saved had others."""
    stored = plan.stored
    if stored.resized is None:
        return
    apart: set[str] = set()
    unread: list[tuple[str, TensorRef, TensorRef]] = []
    for path, first, other in stored.others_values():
        if plan.takes(path) and path not in apart:
            pairs: list[tuple[TensorRef, TensorRef]] = []
            if not _is_same(first, other, pairs):
                apart.add(path)
                continue
            unread.extend((path, *pair) for pair in pairs)
            plan.fresh(pairs, path)

    def say() -> None:
        apart.update(path for path, first, other in unread if not _has_same_bits(first.value, other.value))
        if apart:
            plan.notes.append(
                f"{listed(sorted(apart))}: other values on other ranks when {stored.manifest.world_size} "
                f"saved; {stored.resized} go on, each with that of rank 0"
            )

    plan.actions.append(say)


def _is_same(first: Any, other: Any, pairs: list[tuple[TensorRef, TensorRef]]) -> bool:
    """Compare two stored values; ``pairs`` gets the tensors, which have to be read first."""
    if isinstance(first, ObjectNode) and isinstance(other, ObjectNode):
        return _is_same(first.state, other.state, pairs)
    if isinstance(first, TensorRef) and isinstance(other, TensorRef):
        pairs.append((replace(first), other))  # where the first itself is read to is not decided yet
        return True
    if type(first) is not type(other):
        return False
    if isinstance(first, Mapping):
        return first.keys() == other.keys() and all(_is_same(value, other[key], pairs) for key, value in first.items())
    if isinstance(first, (list, tuple, deque)):
        return len(first) == len(other) and all(_is_same(*both, pairs) for both in zip(first, other, strict=True))
    return bool(first == other) or (
        isinstance(first, (float, np.floating)) and bool(np.isnan(first) and np.isnan(other))
    )


def _has_same_bits(first: torch.Tensor, other: torch.Tensor) -> bool:
    if first.dtype != other.dtype or first.shape != other.shape:
        return False
    return torch.equal(*(tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (first, other)))


def match_per_rank(plan: MatchPlan, live: PerRank, saved: Any, path: str) -> Any:
    """Match the value of this rank; a rank that did not exist at the save keeps its value."""
    stored, before = plan.stored, plan.stored.manifest.world_size
    parts, now = stored.per_rank, stored.resized
    if not isinstance(saved, PerRankNode) or parts is None or saved.key not in parts:
        plan.not_restored.append((path, "the checkpoint has no part for this rank"))
        return live
    if now is not None:
        fate = f"those of ranks {now} to {before - 1} go to nobody" if now < before else "new ranks keep what they have"
        plan.notes.append(f"{path}: a value for each of {before} rank(s), {now} now: {fate}")
    if stored.borrowed:
        why = f"there was no rank {plan.rank}, saved by {before}: it keeps what it has"
        plan.not_restored.append((path, why))
        return live
    return PerRank(plan.match(live.value, parts[saved.key], path))


def restore_derived(
    first: Mapping[str, Any], others: Sequence[Mapping[str, Any]], *, step: int | None, rank: int, world_size: int
) -> tuple[list[str], list[str]]:
    """Set every generator of this process for a rank that goes on in a world of another size.

    Args:
        first: the result of `rng.capture` on rank 0.
        others: that of some other ranks: a generator with the same state on all of these was kept in step.
        step: the step of the checkpoint.
        rank: this rank.
        world_size: number of ranks now.

    Returns:
        The names of the generators that stay in step, and one line for each that could not be set.
    """
    place = mix(step or 0, world_size, rank)
    in_step: list[str] = []
    derived: dict[str, Any] = {}
    problems: list[str] = []
    for name in ("python", "numpy", "torch"):
        if name not in first:
            continue
        try:
            alike = bool(others) and all(_bytes(other.get(name)) == _bytes(first[name]) for other in others)
            derived[name] = first[name] if alike else _derived(name, first[name], mix(_hash(first[name]), place))
        except rng.REFUSALS as error:
            problems.append(f"{name} generator: {type(error).__name__}: {error}")
            continue
        if alike:
            in_step.append(name)
    damaged = {problem.split(" ", 1)[0] for problem in problems}
    refused = rng.restore(derived, devices=False)
    problems += [problem for problem in refused if problem.split(" ", 1)[0] not in damaged]
    return in_step, problems + _set_devices(first, others, place, in_step)


def _set_devices(
    first: Mapping[str, Any], others: Sequence[Mapping[str, Any]], place: int, in_step: list[str]
) -> list[str]:
    problems: list[str] = []
    devices = first.get("devices")
    for kind, states in (devices if isinstance(devices, Mapping) else {}).items():
        try:
            # Each process lists all devices it sees and uses one of them, each another: the order means nothing.
            seen = set(map(_bytes, states))
            theirs = ((other.get("devices") or {}).get(kind) or () for other in others)
            alike = bool(others) and all(set(map(_bytes, listed)) == seen for listed in theirs)
            problems += rng.set_devices(str(kind), states[0] if alike else mix(_hash(states[0]), place))
        except rng.REFUSALS as error:
            problems.append(f"{kind} generators: {type(error).__name__}: {error}")
            continue
        if alike:
            in_step.append(str(kind))
    return problems


def _derived(name: str, state: Any, seed: int) -> Any:
    """Return the state of a generator of the same kind that was seeded with ``seed``."""
    if name == "torch":
        return torch.Generator().manual_seed(seed).get_state()
    if name == "python":
        return rng.python_entry(random.Random(seed).getstate())
    name = str(state["bit_generator"])
    if name not in _BIT_GENERATORS:
        raise ValueError(f"unknown bit generator {name!r}")
    kind = getattr(np.random, name)
    return {**rng.plain(kind(seed).state), "has_gauss": 0, "gauss": 0.0}


def _hash(state: Any) -> int:
    return xxhash.xxh3_64_intdigest(_bytes(state))


def _bytes(state: Any) -> bytes:
    if isinstance(state, torch.Tensor):
        return state.cpu().numpy().tobytes()
    return repr(sorted(state.items()) if isinstance(state, Mapping) else state).encode()
