"""Lay a stored checkpoint over a live state without touching it: what to read where, and what does not fit.

`Matcher` walks both sides together. Tensors become `Targets`, objects become actions that run after the reading, and
every difference becomes a problem; only when the caller accepts the problems does anything change.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from ..tree import arrays, metrics, rng
from ..tree.in_order import ask_in_order, state_of
from ..tree.names import parameter_names
from ..tree.optimizers import is_plain
from ..tree.sharded import spread_types
from ..tree.values import ObjectNode, PerRank, PerRankNode, TensorRef
from .alike import place_alike
from .match_rank import match_per_rank, match_rng
from .selection import Selection, covers
from .stored import Stored
from .targets import Targets

__all__ = ["Matcher", "Problems", "holds_live"]


@dataclass(slots=True)
class Problems:
    """Everything that does not fit, by kind; paths with an explanation."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.wrong)

    def without(self, patterns: tuple[str, ...]) -> Problems:
        """Return those whose path no name or glob covers."""
        if not patterns:
            return self
        kinds = (self.missing, self.unexpected, self.wrong)
        return Problems(*([one for one in kind if not covers(patterns, one.split(": ", 1)[0])] for kind in kinds))


class Matcher:
    """One walk over a live state and a stored one.

    Attributes:
        targets: what is read where.
        actions: what to run after the reading, in order; `handovers` come behind them.
        last: what to run at the very end (generators).
        problems: what does not fit.
        restored: paths of what will be restored.
        not_restored: (path, why) of what will not.
        notes: what is not simply as it was, because the number of ranks is another one; a sentence each.
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
        self._added = added  # paths that the live side need not have: their values are made anew
        self.stored, self.selection, self.allow_missing, self.rank = stored, selection, allow_missing, rank
        self.device = device  # where to put what has no memory yet
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
        self._fresh: dict[str, torch.Tensor] = {}  # by stored tensor: tied ones stay tied
        self._origin: dict[str, str] = {}  # new path -> stored path, for what `rename` moves
        self.moved: dict[str, TensorRef] = {}  # new name -> tensor, for what `rename` moves
        if selection.renames:
            for name, ref in stored.refs.items():
                if (new := selection.renamed(name)) != name:
                    self.moved[new], self._origin[new] = ref, name

    def run(self, into: Mapping[Any, Any]) -> Any:
        """Match the whole state; returns the value `load` gives back, to be filled by reading and actions."""
        self.parameter_names = parameter_names(into)
        if spread_types():
            self._asked = ask_in_order(into, self.takes)
        return self._mapping(into, self.stored.tree, "")

    def takes(self, path: str) -> bool:
        """Tell whether a live entry is wanted, by its own path or by the one it is stored under."""
        if not self.selection.renames:
            return self.selection.takes(path)
        above, below = path, ""
        while above and above not in self._origin:
            above, _, last = above.rpartition("/")
            below = f"/{last}{below}"
        return self.selection.takes(path, self._origin[above] + below if above else path)

    # -- walking

    def match(self, live: Any, saved: Any, path: str) -> Any:
        """Match one value; returns what takes its place in the result."""
        if isinstance(live, torch.Tensor):
            return self._tensor(live, saved, path)
        if arrays.is_array(live):
            return self._array(live, saved, path)
        if live is rng.RNG:
            return match_rng(self, saved, path)
        if isinstance(live, PerRank):
            return match_per_rank(self, live, saved, path)
        if isinstance(live, torch.Generator):
            return self._generator(live, saved, path)
        if has_state(live):
            begun = len(self.actions)
            found = self._with_state(live, saved, path)
            self._handovers.append((path, self.actions[begun:]))
            del self.actions[begun:]
            return found
        if isinstance(live, Mapping):
            if isinstance(saved, ObjectNode) and saved.kind != "optimizer":
                saved = saved.state  # the live side is the state_dict() of what was saved as an object
            if isinstance(saved, Mapping) or holds_live(live.values()) or "param_groups" in live:
                return self._mapping(live, saved, path)
        if isinstance(live, (list, tuple, deque)) and holds_live(live):
            return self._sequence(live, saved, path)
        return self.fresh(saved, path) if self.takes(path) else live

    def handovers(self, *, sort: bool) -> Iterator[Callable[[], object]]:
        """Yield what hands objects their state, in the order of the live state or, with ``sort``, of their paths.

        Objects may use collectives in ``load_state_dict``: ranks whose dicts have another order would wait for ever.
        """
        for _, actions in sorted(self._handovers, key=itemgetter(0)) if sort else self._handovers:
            yield from actions

    def _with_state(self, live: Any, saved: Any, path: str) -> Any:
        if isinstance(live, nn.Module) and not metrics.is_metric(live):
            from .match_module import match_module

            return match_module(self, live, saved, path)
        if isinstance(live, torch.optim.Optimizer) and is_plain(live):
            from .match_optim import match_optimizer

            return match_optimizer(self, live, saved, path)
        return self._object(live, saved, path)

    def _mapping(self, live: Mapping[Any, Any], saved: Any, path: str) -> Any:
        if not isinstance(saved, Mapping):
            if self.takes(path):
                advice = ": give the optimizer itself" if "param_groups" in live and has_node(saved) else ""
                self.problems.wrong.append(
                    f"{path or 'state'}: a dict in the state, {kind_of(saved)} in the checkpoint{advice}"
                )
            return live
        if path and self.selection.everything and live.keys() == saved.keys() and _tensors_only(live, saved):
            for key, value in live.items():
                self.read(saved[key], value, f"{path}/{key}")
            self.restored.append(path)
            return OrderedDict(live) if type(saved) is OrderedDict else dict(live)
        simple = not holds_live(live.values()) and not any(map(has_node, saved.values()))
        if path and simple and not self.selection.partly(path):
            return self.fresh(saved, path) if self.takes(path) else live
        result: Any = defaultdict(saved.default_factory) if isinstance(saved, defaultdict) else type(saved)()
        available = {self._key(path, key): (key, value) for key, value in saved.items()}
        if self.selection.renames:
            spots = ((new, self._spot(path, key)[0]) for (new, _), (key, _) in available.items())
            self._origin.update((new, old) for new, old in spots if new != old)
        for key, value in live.items():
            spot = self._spot(path, key)
            where = spot[0]
            if spot in available:
                _, found = available.pop(spot)
                result[key] = self.match(value, found, where)
            elif isinstance(value, (nn.Module, torch.Tensor)) and self._has_moved(where):
                result[key] = self.match(value, self.moved.get(where), where)
            else:
                result[key] = value
                self.lacks(value, where)
        for (where, _), (key, value) in available.items():
            if self.takes(where) and not self._taken_elsewhere(where):
                if _is_live_kind(value) and not (where in self._added and _is_value(value)):
                    self.problems.unexpected.append(where)
                else:
                    result[key] = self.fresh(value, where)
        return result

    def _spot(self, path: str, key: Any) -> tuple[str, type]:
        return f"{path}/{key}" if path else str(key), type(key)  # the type tells 1 from "1"

    def _key(self, path: str, key: Any) -> tuple[str, type]:
        where, kind = self._spot(path, key)
        return self.selection.renamed(where), kind

    def _has_moved(self, where: str) -> bool:
        return where in self.moved or any(name.startswith(where + "/") for name in self.moved)

    def _taken_elsewhere(self, where: str) -> bool:
        """Tell whether a rename moved everything below a stored container to another place."""
        if not self.moved:
            return False
        below = [name for name in self.stored.refs if name.startswith(where + "/")]
        return bool(below) and all(not self.selection.renamed(name).startswith(where + "/") for name in below)

    def _sequence(self, live: Any, saved: Any, path: str) -> Any:
        base = next(kind for kind in (list, tuple, deque) if isinstance(live, kind))
        if not isinstance(saved, base) or len(live) != len(saved):
            if self.takes(path):
                found = f"{len(saved)} entries" if isinstance(saved, base) else kind_of(saved)
                self.problems.wrong.append(
                    f"{path}: a {base.__name__} of {len(live)} entries in the state, {found} in the checkpoint"
                )
            return live
        names = getattr(live, "_fields", range(len(live)))
        rows = zip(names, live, saved, strict=True)
        items = [self.match(value, found, f"{path}/{name}") for name, value, found in rows]
        if isinstance(live, deque):
            return deque(items, live.maxlen)
        return live._make(items) if hasattr(live, "_make") else type(live)(items)

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

    # -- leaves

    def _tensor(self, live: torch.Tensor, saved: Any, path: str) -> torch.Tensor:
        if self.takes(path):
            if isinstance(saved, TensorRef):
                self.read(saved, live, path)
                self.restored.append(path)
            else:
                self.problems.wrong.append(f"{path}: a tensor in the state, {kind_of(saved)} in the checkpoint")
        return live

    def read(self, ref: TensorRef, live: torch.Tensor, path: str) -> bool:
        """Plan reading a stored tensor into a live one; False (and a problem) if they do not fit."""
        problem = self.targets.add(ref.name, live)
        if problem is not None:
            self.problems.wrong.append(f"{path}: {problem}")
        return problem is None

    def _array(self, live: Any, saved: Any, path: str) -> Any:
        if not self.takes(path):
            return live
        value = self.fresh(saved, path)
        if not (isinstance(saved, TensorRef) and saved.kind == "array"):
            self.problems.wrong.append(f"{path}: an array in the state, {kind_of(saved)} in the checkpoint")
            return live
        want = (saved.extra.get("dt"), list(saved.extra.get("sh", ())))
        if want != (live.dtype.str, list(live.shape)):
            self.problems.wrong.append(f"{path}: array {live.dtype.str} {live.shape} in the state, {want} stored")
            return live
        self.restored.append(path)
        if not live.flags.writeable:
            return value
        self.actions.append(lambda: live.__setitem__(..., self.filled(value)))
        return live

    def _generator(self, live: torch.Generator, saved: Any, path: str) -> Any:
        if not self.takes(path):
            return live
        if not isinstance(saved, torch.Generator):
            self.problems.wrong.append(f"{path}: a generator in the state, {kind_of(saved)} in the checkpoint")
        elif saved.device.type != live.device.type:
            self.not_restored.append((path, f"a generator of {saved.device} does not fit one of {live.device}"))
        else:
            state = saved.get_state()
            self.actions.append(lambda: live.set_state(state))
            self.restored.append(path)
        return live

    # -- objects

    def _object(self, live: Any, saved: Any, path: str) -> Any:
        """Anything with ``load_state_dict``: gets a fresh copy of its stored state."""
        if not self.takes(path):
            return live
        metric = metrics.is_metric(live)
        fits = isinstance(saved, ObjectNode) and (saved.kind == "metric") == metric
        if not fits and (metric or not isinstance(saved, Mapping)):
            self.problems.wrong.append(
                f"{path}: {type(live).__name__} in the state, {kind_of(saved)} in the checkpoint"
            )
            return live
        # A dict is what the object's own state_dict() gave, saved in its place.
        content = saved.state if isinstance(saved, ObjectNode) else saved
        if not metric and spread_types():
            place_alike(self, content, state_of(live, self._asked, path))
        state = self.fresh(content, path)
        if metric:
            self.actions.append(lambda: self._note(path, metrics.restore_metric(live, self.filled(state))))
        else:
            self.actions.append(lambda: live.load_state_dict(self.filled(state)))
        self.restored.append(path)
        return live

    # -- values that are made anew

    def fresh(self, saved: Any, path: str) -> Any:
        """Plan reading every tensor in a stored value into new memory; `filled` gives the value afterwards."""
        for ref in self._refs(saved):
            if ref.value is None:
                entry = self.stored.entry(ref.name)  # first: what it is tied to may be in an index not read so far
                source = self.stored.aliases.get(ref.name, ref.name)
                if source not in self._fresh:
                    self._fresh[source] = torch.empty(entry.shape, dtype=arrays.dtype_of(entry.dtype))
                    self.targets.append(source, self._fresh[source])
                ref.value = self._fresh[source]
        return saved

    def _refs(self, value: Any) -> Iterator[TensorRef]:
        if isinstance(value, TensorRef):
            yield value
        elif isinstance(value, ObjectNode):
            yield from self._refs(value.state)
        elif isinstance(value, PerRankNode):
            # Within the state of an object, which gets the value itself.
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
        from ..tree.fill import fill

        return fill(value, self.stored.per_rank)

    def _note(self, path: str, problems: list[str]) -> None:
        self.not_restored.extend((path, why) for why in problems)


def _tensors_only(live: Mapping[Any, Any], saved: Mapping[Any, Any]) -> bool:
    """Tell whether both sides hold nothing but tensors, as a big dict of weights does."""
    return (
        type(saved) in (dict, OrderedDict)
        and all(type(value) is torch.Tensor for value in live.values())
        and all(type(value) is TensorRef and value.kind == "tensor" for value in saved.values())
        and all(type(key) is str for key in live)
    )


def has_state(value: Any) -> bool:
    """Tell whether a value is saved through ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _is_live_kind(value: Any) -> bool:
    return isinstance(value, (TensorRef, ObjectNode, PerRankNode)) or (
        isinstance(value, Mapping) and any(map(_is_live_kind, value.values()))
    )


def _is_value(value: Any) -> bool:
    """Tell whether a stored value can be made anew: tensors and plain data, but no object's state."""
    if isinstance(value, Mapping):
        return all(map(_is_value, value.values()))
    if isinstance(value, (list, tuple, deque)):
        return all(map(_is_value, value))
    return not has_node(value)


def has_node(value: Any) -> bool:
    """Tell whether a stored value is an object's state."""
    return isinstance(value, (ObjectNode, PerRankNode))


def holds_live(values: Any) -> bool:
    """Tell whether a container holds anything that is restored in place."""
    for value in values:
        if isinstance(value, (torch.Tensor, PerRank)) or value is rng.RNG or has_state(value) or arrays.is_array(value):
            return True
        if isinstance(value, Mapping) and holds_live(value.values()):
            return True
        if isinstance(value, torch.Generator):
            return True
        if isinstance(value, (list, tuple, deque)) and not isinstance(value, torch.Size) and holds_live(value):
            return True
    return False


def kind_of(saved: Any) -> str:
    """Say what a stored value is, for messages."""
    if isinstance(saved, TensorRef):
        return "a tensor" if saved.kind != "array" else "an array"
    if isinstance(saved, ObjectNode):
        return saved.type
    if saved is None:
        return "nothing"
    return f"a {type(saved).__name__}"
