"""Lay a stored checkpoint over a live state without touching it: which bytes go where, and what does not fit.

`Matcher` walks both sides together. Tensors become `Targets`, objects become actions that run after the reading, and
every difference becomes a problem; only when the caller accepts the problems does anything change.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn

from ..tree import arrays, objects, rng
from ..tree.arrays import is_spread, spread_types
from ..tree.objects import ask_in_order, live_names, parameter_names, state_of, to_positions
from ..tree.values import ObjectNode, PerRank, PerRankNode, TensorRef, remade
from .match_objects import match_module, match_optimizer, match_wrapper
from .match_plan import MatchPlan, derive_generators, kind_of, match_per_rank, match_rng, note_apart

__all__ = ["Matcher", "holds_live"]


class Matcher(MatchPlan):
    """A walk over a live state and a stored state."""

    def run(self, into: Mapping[Any, Any]) -> Any:
        """Match the whole state; returns the value that `load` returns once reading and actions have filled it."""
        self.parameter_names, self._into = parameter_names(into), into
        derive_generators(self)
        note_apart(self)
        if spread_types():
            self._asked = ask_in_order(into, lambda path: self.takes(path) or self.selection.partly(path))
        return self._mapping(into, self.stored.tree, "")

    # -- walking

    def match(self, live: Any, saved: Any, path: str) -> Any:
        """Match one value; returns its replacement in the result."""
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
            if isinstance(live, nn.Module) and not objects.is_metric(live):
                matched: Any = match_module(self, live, saved, path)
            elif (optimizer := objects.plain_optimizer(live)) is not None:
                match_optimizer(self, optimizer, saved, path)
                matched = live
            else:
                matched = self._object(live, saved, path)
            self._handovers.append((path, self.actions[begun:]))
            del self.actions[begun:]
            return matched
        if isinstance(live, Mapping):
            if isinstance(saved, ObjectNode) and saved.kind != "optimizer":
                saved = saved.state  # the live side is the state_dict() of what was saved as an object
            if isinstance(saved, Mapping) or holds_live(live.values()) or "param_groups" in live:
                return self._mapping(live, saved, path)
        if isinstance(live, (list, tuple, deque)) and holds_live(live):
            return self._sequence(live, saved, path)
        if self.selection.partly(path) and len({self.takes(leaf) for leaf in _leaf_paths(saved, path)}) > 1:
            self.problems.wrong.append(
                f"{path}: only= or skip= takes a part of {kind_of(saved)}, which is plain data in the state: take all "
                "of it, or nothing"
            )
        return self.fresh(saved, path) if self.takes(path) else live

    @property
    def hands_over(self) -> bool:
        """Whether `handovers` has any."""
        return any(actions for _, actions in self._handovers)

    def handovers(self, *, sort: bool) -> Iterator[Callable[[], object]]:
        """Yield calls that give objects their state, in the order of the live state or, with ``sort``, of their paths.

        Objects may use collectives in ``load_state_dict``: ranks whose dicts have another order would wait for ever.
        """
        for _, actions in sorted(self._handovers, key=itemgetter(0)) if sort else self._handovers:
            yield from actions

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
                if (problem := self.targets.add(saved[key].name, value)) is not None:
                    self.problems.wrong.append(f"{path}/{key}: {problem}")
            self.restored.append(path)
            return OrderedDict(live) if type(saved) is OrderedDict else dict(live)
        simple = not holds_live(live.values()) and not any(map(has_node, saved.values()))
        if path and simple and not self.selection.partly(path):
            return self.fresh(saved, path) if self.takes(path) else live
        result: Any = defaultdict(saved.default_factory) if isinstance(saved, defaultdict) else type(saved)()
        outdone = self.selection.outdone(self._spot(path, key)[0] for key in saved) | self.outdone
        available = {
            (self.selection.renamed(spot[0]), spot[1]): (key, value)
            for key, value in saved.items()
            if (spot := self._spot(path, key))[0] not in outdone
        }
        if self.selection.renames:
            spots = ((new, self._spot(path, key)[0]) for (new, _), (key, _) in available.items())
            self._origin.update((new, old) for new, old in spots if new != old)
        for key, value in live.items():
            spot = self._spot(path, key)
            where = spot[0]
            if spot in available:
                _, stored_value = available.pop(spot)
                result[key] = self.match(value, stored_value, where)
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
                other = f"{len(saved)} entries" if isinstance(saved, base) else kind_of(saved)
                self.problems.wrong.append(
                    f"{path}: a {base.__name__} of {len(live)} entries in the state, {other} in the checkpoint"
                )
            return live
        names = getattr(live, "_fields", range(len(live)))
        rows = zip(names, live, saved, strict=True)
        items = [self.match(value, stored, f"{path}/{name}") for name, value, stored in rows]
        return remade(live, items)

    # -- leaves

    def _tensor(self, live: torch.Tensor, saved: Any, path: str) -> torch.Tensor:
        if self.takes(path):
            if isinstance(saved, TensorRef):
                self.read(saved, live, path)
                self.restored.append(path)
            elif match_wrapper(self, live, saved, path) is not None:
                self.restored.append(path)
            else:
                self.problems.wrong.append(f"{path}: a tensor in the state, {kind_of(saved)} in the checkpoint")
        return live

    def _array(self, live: Any, saved: Any, path: str) -> Any:
        if not self.takes(path):
            return live
        if live.shape == () and type(saved) is live.dtype.type:  # NumPy makes a scalar of such an array when it counts
            return saved
        value = self.fresh(saved, path)
        if not (isinstance(saved, TensorRef) and saved.kind == "array"):
            self.problems.wrong.append(f"{path}: an array in the state, {kind_of(saved)} in the checkpoint")
            return live
        want = (saved.extra.get("dt"), list(saved.extra.get("sh", ())))
        if want != (live.dtype.str, list(live.shape)):
            self.problems.wrong.append(f"{path}: array {live.dtype.str} {live.shape} in the state, {want} stored")
            return live
        if live.flags.writeable and (problem := self.targets.add_array(saved.name, live)) is not None:
            self.problems.wrong.append(f"{path}: {problem}")
            return live
        self.restored.append(path)
        if not live.flags.writeable:
            return value
        self.actions.append(lambda: id(live) in self.targets.left or live.__setitem__(..., self.filled(value)))
        return live

    def _generator(self, live: torch.Generator, saved: Any, path: str) -> Any:
        if not self.takes(path):
            return live
        if not isinstance(saved, torch.Generator):
            self.problems.wrong.append(f"{path}: a generator in the state, {kind_of(saved)} in the checkpoint")
        elif saved.device.type != live.device.type:
            self.not_restored.append((path, f"a generator of {saved.device} does not fit a generator of {live.device}"))
        else:
            state = saved.get_state()
            self.actions.append(lambda: live.set_state(state))
            self.restored.append(path)
        return live

    # -- objects

    def _object(self, live: Any, saved: Any, path: str) -> Any:
        """Match an object with ``load_state_dict``, which gets a fresh copy of its stored state."""
        partly = self.selection.partly(path) or self.selection.partly(self.stored_path(path))
        if not (partly or self.takes(path)):
            return live
        metric = objects.is_metric(live)
        fits = isinstance(saved, ObjectNode) and (saved.kind == "metric") == metric
        if not fits and (metric or not isinstance(saved, Mapping)):
            self.problems.wrong.append(
                f"{path}: {type(live).__name__} in the state, {kind_of(saved)} in the checkpoint"
            )
            return live
        # A dict: the caller saved the result of the object's state_dict().
        content = saved.state if isinstance(saved, ObjectNode) else saved
        leaves = [*_leaf_paths(content, path)] if partly or self.selection.renames else [path]
        chosen = {self.takes(leaf) for leaf in leaves}
        if True not in chosen:
            return live
        renamed = ((leaf, self.selection.renamed(self.stored_path(leaf))) for leaf in leaves)
        if lost := [leaf for leaf, new in renamed if new != leaf and new.startswith(f"{path}/")]:
            self.problems.wrong.append(
                f"{lost[0]}: rename gives it another name within a {type(live).__name__}, which loads its state itself"
            )
            return live
        if isinstance(saved, ObjectNode) and saved.kind == "optimizer" and isinstance(live, torch.optim.Optimizer):
            if len(chosen) > 1:
                self.problems.wrong.append(
                    f"{path}: only= or skip= takes a part of a {type(live).__name__}, which loads its state itself: "
                    "take all of it, or nothing"
                )
                return live
            content = to_positions(content, live_names(live, self.parameter_names))
        if len(chosen) > 1 or (not metric and spread_types()):
            mine = objects.metric_state(live) if metric else state_of(live, self._asked, path)
            if len(chosen) > 1:
                content = self._chosen(content, mine, path)
            if not metric and spread_types():
                _place_alike(self, content, mine)
                if isinstance(live, torch.optim.Optimizer):
                    _place_by_position(self, content, live)
                if layouts := saved.spread if isinstance(saved, ObjectNode) else {}:
                    self._place_spread(content, layouts, live, mine, path)
        state = self.fresh(content, path)
        if metric:
            self.actions.append(lambda: self._note(path, objects.restore_metric(live, self.filled(state))))
        else:
            self.actions.append(lambda: live.load_state_dict(self.filled(state)))
        self.restored.append(path)
        return live

    def _place_spread(self, saved: Any, layouts: Mapping[str, Any], live: Any, mine: Any, path: str) -> None:
        """Give what the live object does not hold yet a place beside what is spread over ranks in the state."""
        from ..tree.sharded import spread_tensors  # not above: most states have no such tensor

        elsewhere = [] if isinstance(live, torch.optim.Optimizer) else [self._into]
        known = spread_tensors([live, mine, *elsewhere])
        if known and (num := self.place_spread(saved, layouts, known)):
            self.notes.append(
                f"{path}: {num} tensor(s) that were spread over ranks come whole: the state does not say over which "
                "ranks (give the model beside it)"
            )

    def _chosen(self, saved: Any, live: Any, path: str) -> Any:
        """Return the stored state of an object with its live state where nothing is to be loaded."""
        if isinstance(saved, dict) and isinstance(live, Mapping):
            result = copy.copy(saved)
            result.clear()
            for key, value in saved.items():
                where = f"{path}/{key}"
                if key in live:
                    result[key] = self._chosen(value, live[key], where)
                elif self.takes(where):
                    result[key] = value
            for key, value in live.items():
                if key not in saved and not self.takes(f"{path}/{key}"):
                    result[key] = value
            return result
        if _is_sequence(saved) and isinstance(live, (list, tuple, deque)) and len(saved) == len(live):
            pairs = enumerate(zip(saved, live, strict=True))
            items = [self._chosen(value, mine, f"{path}/{number}") for number, (value, mine) in pairs]
            return remade(saved, items)
        return saved if self.takes(path) else live

    def _note(self, path: str, problems: list[str]) -> None:
        self.not_restored.extend((path, why) for why in problems)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple, deque)) and not isinstance(value, torch.Size)


def _leaf_paths(value: Any, path: str) -> Iterator[str]:
    """Yield the paths of what the state of an object holds; a list of numbers and texts is one value."""
    rows: Any = value.items() if isinstance(value, dict) else ()
    if _is_sequence(value) and not all(isinstance(item, (int, float, str, type(None))) for item in value):
        rows = enumerate(value)
    if not rows:
        yield path
    for key, item in rows:
        yield from _leaf_paths(item, f"{path}/{key}")


def _tensors_only(live: Mapping[Any, Any], saved: Mapping[Any, Any]) -> bool:
    """Tell whether both sides hold only tensors, as a big dict of weights does."""
    return (
        type(saved) in (dict, OrderedDict)
        and {*map(type, live.values())} <= {torch.Tensor}
        and {*map(type, saved.values())} <= {TensorRef}
        and {*map(attrgetter("kind"), saved.values())} <= {"tensor"}
        and {*map(type, live)} <= {str}
    )


def has_state(value: Any) -> bool:
    """Tell whether a value is saved through ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _is_live_kind(value: Any) -> bool:
    return isinstance(value, (TensorRef, ObjectNode, PerRankNode)) or (
        isinstance(value, Mapping) and any(map(_is_live_kind, value.values()))
    )


def _is_value(value: Any) -> bool:
    """Tell whether a stored value can be made anew: it holds tensors and plain data, but no object's state."""
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


def _place_by_position(plan: MatchPlan, saved: Any, live: torch.optim.Optimizer) -> None:
    """Plan to read state of the shape of its parameter, in torch's own layout, as the parameter is spread."""
    params = [param for group in live.param_groups for param in group["params"]]
    states = saved.get("state") if isinstance(saved, Mapping) else None
    for number, state in states.items() if isinstance(states, Mapping) else ():
        param: Any = params[number] if type(number) is int and number < len(params) else None
        for key, ref in state.items() if is_spread(param) and isinstance(state, Mapping) else ():
            if isinstance(ref, TensorRef) and ref.value is None and key != "step":
                entry = plan.stored.entry(ref.name)
                target = torch.empty_like(param, dtype=plan.targets.dtype(entry.dtype), device=plan.home_of(param))
                if plan.targets.add(ref.name, target) is None:  # of the shape of the parameter
                    ref.value = target


def _place_alike(plan: MatchPlan, saved: Any, live: Any) -> None:
    """Plan to read each stored tensor that the state of an object has spread over ranks; skip all others."""
    if isinstance(saved, ObjectNode):
        saved = saved.state
    if isinstance(saved, TensorRef):
        if saved.value is None and is_spread(live):
            from ..tree.sharded import empty_alike  # not above: most states have no such tensor

            target = empty_alike(live, plan.home_of(live))
            if plan.targets.add(saved.name, target) is None:  # else the object gets the whole tensor, and may refuse it
                saved.value = target
    elif isinstance(saved, Mapping) and isinstance(live, Mapping):
        for key, item in saved.items():
            if key in live:
                _place_alike(plan, item, live[key])
    elif isinstance(saved, (list, tuple)) and isinstance(live, (list, tuple)):
        for item, other in zip(saved, live, strict=False):
            _place_alike(plan, item, other)
