"""Take a state apart: its tensors by name, and a tree of typed JSON for everything else.

Nothing is copied here. The tensors are the live ones; `staging` copies them. Plain data is encoded at once, so the
tree is a snapshot of it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from holdfast.errors import UnsupportedStateError
from holdfast.format.codec import BESIDE, MAX_NESTING, encode, is_text, nesting_error
from holdfast.format.digest import bytes_digest

from . import arrays, objects, rng
from .arrays import check_module, spread_types
from .objects import Modules, canonical_keys, parallel_wrapper, parameter_names, stored_parameters, unwrap
from .values import Attrs, PerRank

if TYPE_CHECKING:
    from . import sharded

__all__ = ["OWN", "Flat", "flatten", "pointer", "unused_name"]

OWN = "own values"
"""Key, among what a rank stores for itself, of its plain data and small objects: where they are (`pointer`) -> tree.

Rank 0 has none: its own are in the structure, where each of the other ranks has its own put in when it loads.
"""

_PLAIN = frozenset({int, str, bool, type(None)})
_OF_BATCHES = ("running_mean", "running_var", "num_batches_tracked")  # of BatchNorm: they differ, and may
_SMALL_OBJECT = 1 << 20  # bytes of the tensors of an object that each rank stores
_TEXT, _TENSOR = frozenset({str}), frozenset({torch.Tensor})
_OF_RANK = re.compile(r"@\d+(?=[/~]|$)")  # the part of a tensor's name that names its rank
# One step of a path as the codec spells it: ['key'], [3] or .field.
_STEP = re.compile(r"""\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\]]*)\]|\.(\w+)""")


@dataclass(slots=True)
class Flat:
    """A state taken apart.

    Attributes:
        tree: typed JSON of the structure and the plain data.
        names: name of each tensor, in order of discovery; unique.
        tensors: the live tensors, in the same order.
        files: for each tensor the group of files it belongs to: the top-level key, or "" for loose tensors.
        frozen: positions of tensors that are known not to train.
        optimized: names of parameters, and of the state an optimizer keeps for them: these change in its step only.
        per_rank: key -> tree of what each rank stores for itself; under `OWN` what is as good as that (`_note_plain`).
        own: positions of tensors that each rank stores for itself.
        regions: position -> which part of a tensor lies there, for tensors that are spread over ranks. A tensor of
            which a rank holds several boxes has several positions with the same name.
        replicated: positions of tensors that all ranks hold alike; found only with ``shared``.
        loose: positions of tensors in plain containers, and in objects that hold many bytes, of which one rank stores
            its own; found only with ``shared``.
        alone: positions of tensors, in plain containers and in objects, and of buffers, of which one rank's come back
            on all ranks although others may hold something else; found only with ``shared``.
        settings: path of the groups of an optimizer, of which one rank's come back on all ranks -> digest of their
            hyper-parameters; found only with ``shared``.
        groups: ranks of the meshes and process groups of the state; found only with ``shared``.
        whole: position -> the tensor of which this rank holds a part and that is to be saved whole; in `tensors` there
            is something of its shape without its values.
        dropped: paths left out because of ``unsupported="drop"``.
    """

    tree: Any = None
    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    frozen: set[int] = field(default_factory=set)
    optimized: set[str] = field(default_factory=set)
    per_rank: dict[str, Any] = field(default_factory=dict)
    own: list[int] = field(default_factory=list)
    regions: dict[int, sharded.Region] = field(default_factory=dict)
    replicated: list[int] = field(default_factory=list)
    loose: list[int] = field(default_factory=list)
    alone: list[int] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    groups: set[tuple[int, ...]] = field(default_factory=set)
    whole: dict[int, torch.Tensor] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)


def flatten(
    state: Mapping[Any, Any],
    *,
    unsupported: str = "raise",
    rank: int = 0,
    shared: bool = False,
    whole: Callable[[str], bool] | None = None,
) -> Flat:
    """Take ``state`` apart.

    Args:
        state: name -> value; it is not changed.
        unsupported: "raise", or "drop" to leave out what cannot be saved.
        rank: this rank; part of the names of tensors that each rank stores for itself.
        shared: several ranks save this state together: find out what is replicated.
        whole: tells by its name whether a tensor that is spread over ranks is to be saved whole.

    Raises:
        UnsupportedStateError: a value is of no supported kind; the message names its path, its type and what to do.
    """
    if not isinstance(state, Mapping):
        raise UnsupportedStateError(
            f"a state is a mapping {{name: value}}, not {type(state).__name__}: wrap it, as in {{'model': model}}"
        )
    modules: Modules = {}  # kept, because it takes long to go through them
    walker = _Walker(parameter_names(state, modules), modules, drop=unsupported == "drop", rank=rank, shared=shared)
    walker.whole = whole
    if shared:
        walker.asked = objects.ask_in_order(state)
    walker.flat.tree = walker.mapping(state if isinstance(state, dict) else dict(state), "", "")
    if shared:
        if walker.plain:
            walker.flat.per_rank[OWN] = walker.plain
        if walker.flat.per_rank:
            _check_names(walker.flat)
        walker.settle_replicated()
    return walker.flat


class _Walker:
    def __init__(self, names: dict[int, str], modules: Modules, *, drop: bool, rank: int, shared: bool) -> None:
        self.flat = Flat()
        self.parameter_names, self.modules = names, modules
        self.drop, self.rank, self.shared = drop, rank, shared
        self.known = frozenset(names.values()) if shared else frozenset()
        self.file = ""
        self.taken: set[str] = set()
        self.active: set[int] = set()  # ids of the containers around the current value
        self.spread = spread_types()
        self.listed = frozenset({torch.Tensor, *self.spread})
        self.regions: sharded.Regions | None = None  # of the first tensor that is spread over ranks
        self.whole: Callable[[str], bool] | None = None
        self.parted: dict[int, torch.Tensor] = {}  # id of what stands for a tensor that is to be saved whole -> this
        self.owned = False  # within a value that each rank stores for itself
        self.asked: dict[str, tuple[Any, Any]] = {}  # objects by name, with what their `state_dict` gave
        self.inner: list[range] = []  # positions of what modules, optimizers, and objects of each rank hold
        self.within = False  # the state of an object
        self.plain: dict[str, Any] = {}  # see `OWN`
        self.averaged: set[int] = set()  # positions of buffers that average those of a model, for evaluation
        # Keys and indexes around the current value; None within what is noted whole or not at all: objects, tuples, ...
        self.place: tuple[str | int, ...] | None = () if shared and rank else None
        self.num_wholes = 0  # modules and optimizers, which ranks hold alike even if they have no tensors

    # -- containers and objects

    def mapping(self, value: Mapping[Any, Any], name: str, path: str) -> Any:
        """Encode a dict; its own fast paths, because a state may hold 100 000 entries."""
        kind = type(value)
        if kind in (dict, OrderedDict) and _TEXT.issuperset(map(type, value)) and is_text("".join(value)):
            if kind is OrderedDict and self.within and (beside := objects.metadata_of(value)) is not None:
                value = OrderedDict(value, **{BESIDE: beside})
            if value and self.listed.issuperset(map(type, value.values())):
                return self._all_tensors(value, name, path, ordered=kind is OrderedDict)
            if kind is OrderedDict:
                return {"$": "odict", "v": [[key, item] for key, item in self._entries(value, name, path).items()]}
            if "$" not in value:
                return self._rows(value, name) or self._entries(value, name, path)
        return self._encode(value, name, path)

    def _entries(self, value: Any, name: str, path: str) -> dict[Any, Any]:
        """Encode what a dict or a list holds, by its keys; by its places in what is stored of a list.

        Cycles are refused, and nesting that a reader would refuse.
        """
        tree: dict[Any, Any] = {}
        is_list, place, held = type(value) is list, self.place, set()
        top, prefix = not name and not is_list, f"{name}/" if name or is_list else ""
        if id(value) in self.active or len(self.active) >= MAX_NESTING:
            raise nesting_error(value, f"state{path}", self.active)
        self.active.add(id(value))
        try:
            for key, item in enumerate(value) if is_list else value.items():
                at = len(tree) if is_list else key
                if type(item) in _PLAIN and (type(item) is not str or item.isascii()):
                    tree[at] = item
                    continue
                if top:
                    self.file = "" if isinstance(item, torch.Tensor) else str(key)
                if place is not None:
                    self.place, before = (*place, at), self._num_held()
                try:
                    tree[at] = self.value(item, f"{prefix}{key}", f"{path}[{key!r}]")
                except UnsupportedStateError:
                    if not self.drop:
                        raise
                    self.flat.dropped.append(f"state{path}[{key!r}]")
                if place is not None and (not is_list or at in tree) and self._num_held() != before:
                    held.add(at)
        finally:
            self.active.discard(id(value))
        if place is not None:
            self._note_plain(place, tree, held)
        return tree

    def _num_held(self) -> int:
        """Return a number that grows with whatever is no plain data: tensors, values of each rank, modules."""
        return len(self.flat.names) + len(self.flat.per_rank) + self.num_wholes

    def _note_plain(self, place: tuple[str | int, ...], tree: Mapping[Any, Any], held: set[Any]) -> None:
        """Note what a container has beside ``held``; one without any of that is noted whole, by the one around it."""
        self.place = place
        if held or not place:
            self.plain.update((pointer((*place, key)), item) for key, item in tree.items() if key not in held)

    def value(self, value: Any, name: str, path: str) -> Any:
        """Encode any value; ``name`` begins the names of its tensors, ``path`` is its spelling in errors."""
        kind = type(value)
        if kind in _PLAIN and (kind is not str or value.isascii()):
            return value
        if kind is dict or kind is OrderedDict:
            return self.mapping(value, name, path)
        if kind is Attrs:
            return self.mapping(dict(value), name, path)
        leaf = self._leaf(value, name, path)
        if leaf is not NotImplemented:
            return leaf
        if kind is list and not (value and type(value[0]) in (int, float, str)):
            return list(self._entries(value, name, path).values())
        return self._encode(value, name, path)

    def _encode(self, value: Any, name: str, path: str) -> Any:
        """Let the codec encode a value; it calls `_leaf` for what is not plain."""
        base = f"state{path}"

        def leaf(item: Any, where: str) -> Any:
            tail = where[len(base) :]
            below = _as_name(tail)
            return self._leaf(item, f"{name}/{below}" if name and below else name + below, path + tail)

        place, self.place = self.place, None
        try:
            return encode(value, leaf=leaf, path=base, dropped=self.flat.dropped if self.drop else None)
        finally:
            self.place = place

    def _leaf(self, value: Any, name: str, path: str) -> Any:
        """Encode a value that is not plain data; NotImplemented if the codec has to encode or refuse it."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name, path)
        if value is rng.RNG:
            key = self._key(name, path)
            self.flat.per_rank[key] = {"rng": self._own(rng.capture(), key, path)}
            return {"$": "rng", "key": key}
        if isinstance(value, PerRank):
            return self._per_rank(value.value, name, path)
        if (plain := arrays.encode_torch_value(value)) is not None:
            if self.shared and isinstance(value, torch.Generator):
                # Beside the one of rank 0, which is all that a reader needs that does not know of the others.
                key = self._key(name, path)
                self.flat.per_rank[key] = plain
                return {**plain, "own": key}
            return plain
        if arrays.is_array(value):
            stored, extra = arrays.array_to_tensor(value, f"state{path}")
            return {**self._add([(None, stored)], name), "k": "array", **extra}
        if isinstance(value, type):
            return NotImplemented
        if isinstance(value, nn.Module):
            return self._module(value, name, path)
        if (optimizer := objects.plain_optimizer(value)) is not None:
            return self._optimizer(optimizer, name, path)
        if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            return self._object(value, "object", objects.state_of(value, self.asked, name), name, path)
        return NotImplemented

    def _per_rank(self, value: Any, name: str, path: str) -> dict[str, Any]:
        key = self._key(name, path)
        self.flat.per_rank[key] = self._own(value, key, path)
        return {"$": "per_rank", "key": key}

    def _key(self, name: str, path: str) -> str:
        """Return the key of a value of each rank: its name, or its path if the name may be that of another value.

        Names alone say it, not which comes first: ranks need not hold their values in one order.
        """
        if self.owned:  # within a value of this rank, where the order is that of this rank
            return unused_name(name, self.flat.per_rank)
        steps = [key or field for key, field in _STEP.findall(path.replace(".state_dict()", ""))]
        is_number = any(step[1:-1].isdecimal() for step in steps if step[:1] in ("'", '"'))  # as text
        plain = not is_number and len(steps) == name.count("/") + 1 and name != OWN and not name.startswith("[")
        return unused_name(name if plain else path, self.flat.per_rank)

    def _object(self, value: Any, kind: str, state: Any, name: str, path: str) -> dict[str, Any]:
        start, num_own, place, self.place = len(self.flat.names), len(self.flat.per_rank), self.place, None
        outside, self.within = self.within, kind == "object"
        tree = self.value(state, name, f"{path}.state_dict()")
        added, held = range(start, len(self.flat.names)), kind in ("module", "optimizer")
        self.place = place
        node = {"$": "object", "type": type(value).__name__, "kind": kind, "state": tree}
        has_nothing = state is None or (isinstance(state, Mapping) and not state)  # it is given what rank 0 has
        if held or isinstance(value, torch.optim.Optimizer) or has_nothing:
            self.num_wholes += 1
        elif self.shared and len(self.flat.per_rank) == num_own:  # else its author has said what differs
            if place is not None and self._is_small(start):
                self.plain[pointer(place)] = {**node, "state": self._own(state, OWN, path, f"/{name}")}
                held = True
            else:
                self.flat.alone.extend(added)
        else:
            held = True
        if self.shared and held:
            self.inner.append(added)
        if self.regions is not None and kind == "object":
            from . import sharded  # not above: few states have such tensors

            if layouts := sharded.layouts_of(state, name):
                node["spread"] = layouts
        self.within = outside
        return node

    def _is_small(self, start: int) -> bool:
        """Tell whether the tensors from ``start`` on are some, few, and not spread over ranks."""
        flat = self.flat
        added = range(start, len(flat.tensors))
        small = bool(added) and sum(flat.tensors[number].nbytes for number in added) <= _SMALL_OBJECT
        return small and flat.regions.keys().isdisjoint(added) and flat.whole.keys().isdisjoint(added)

    def _own(self, value: Any, name: str, path: str, below: str = "") -> Any:
        """Encode what this rank stores for itself: nothing in it is replicated, whatever it is."""
        start, shared, self.shared, self.owned = len(self.flat.names), self.shared, False, True
        place, self.place = self.place, None
        try:
            return self.value(value, f"{name}@{self.rank}{below}", path)
        finally:
            self.shared, self.owned, self.place = shared, False, place
            self.flat.own = [
                *(number for number in self.flat.own if number < start),
                *range(start, len(self.flat.names)),
            ]

    def _optimizer(self, optimizer: torch.optim.Optimizer, name: str, path: str) -> dict[str, Any]:
        rows = objects.live_names(optimizer, self.parameter_names)
        if shared := objects.shared_names(optimizer, rows):
            raise UnsupportedStateError(f"state{path}: {shared[0]}")
        if self.shared:
            params = (param for group in optimizer.param_groups for param in group["params"])
            arrays.check_parameters((one for one in params if id(one) not in self.parameter_names), f"state{path}")
        named, start = objects.to_named(optimizer, rows), len(self.flat.names)
        node = self._object(optimizer, "optimizer", named, name, path)
        prefix = f"{name}/" if name else ""
        if self.regions is not None:
            from . import sharded  # not above: few states have such tensors

            if layouts := sharded.odd_layouts(optimizer, rows):
                node["spread"] = {f"{prefix}state/{key}": layout for key, layout in layouts.items()}
        added = self.flat.names[start:]
        while added and added[-1].startswith(f"{prefix}{objects.OTHER_STATE}/"):
            added.pop()  # what belongs to no parameter may change elsewhere than in a step (a hook of a module)
        self.flat.optimized.update(added, *rows)
        if self.shared:
            replicated = self._states(named["state"], added, start, f"{prefix}state/")
            self.flat.replicated.extend(replicated)
            held = range(start, len(self.flat.names))
            if len(replicated) < len(held):  # of parameters of no module, or of none: ranks may hold something else
                self.flat.alone.extend({*held}.difference(replicated))
            self.flat.settings[f"{prefix}param_groups"] = _digest_of_settings(node["state"]["param_groups"])
        return node

    def _states(self, kept: Mapping[str, Any], added: list[str], start: int, prefix: str) -> Sequence[int]:
        """Return the positions of what an optimizer keeps for parameters that a module has.

        State of a parameter of no module ("param.7") may differ between ranks.
        """
        end = len(added)
        while end and not added[end - 1].startswith(prefix):
            end -= 1  # tensors among the hyper-parameters, which come last
        unknown = kept.keys() - self.known
        if not unknown:
            return range(start, start + end)
        keys = enumerate(added[:end], start)
        return [number for number, key in keys if key[len(prefix) :].partition("/")[0] not in unknown]

    def _module(self, module: nn.Module, name: str, path: str) -> dict[str, Any]:
        if objects.is_metric(module):
            return self._object(module, "metric", objects.metric_state(module), name, path)
        parallel = parallel_wrapper(module) if self.shared else None
        if parallel is not None:
            from . import sharded  # not above: few states have such a module

            self.flat.groups.add(sharded.parallel_group(parallel))
        check_module(module, f"state{path}")
        module = unwrap(module)
        raw = module.state_dict()
        named = OrderedDict(zip(canonical_keys(module, list(raw)), raw.values(), strict=True))
        start = len(self.flat.names)
        node = self._object(module, "module", named, name, path)
        parameters = dict(self.modules.get(id(module), (module, []))[1])
        if list(map(id, parameters.values())) != _ids(module, []) or not parameters.keys() <= named.keys():
            parameters = dict(stored_parameters(module))  # state_dict, or a hook of it, has changed them
        params = {f"{name}/{key}" if name else key: param for key, param in parameters.items()}
        names, added = self.flat.names, range(start, len(self.flat.names))
        # What a parameter wraps is called "parameter/part".
        owners = {number: params.get(names[number], params.get(names[number].rpartition("/")[0])) for number in added}
        self.flat.frozen.update(
            number for number, owner in owners.items() if owner is not None and not owner.requires_grad
        )
        if self.shared:
            self.flat.replicated.extend(number for number, owner in owners.items() if owner is not None)
            # DDP gives all ranks the buffers of rank 0 before each forward pass; nothing does where weights are spread.
            differ = objects.is_replicated(module)
            differ = differ or any(number in self.flat.regions or number in self.flat.whole for number in added)
            if parallel is not None:
                differ = not parallel.broadcast_buffers
            averaged = objects.averages_buffers(module)
            if differ or averaged:
                buffers = [number for number, owner in owners.items() if owner is None]
                self.flat.alone.extend(buffers)
                self.averaged.update(buffers if averaged else ())
        return node

    # -- tensors

    def _all_tensors(self, value: Mapping[str, torch.Tensor], name: str, path: str, *, ordered: bool) -> dict[str, Any]:
        prefix = f"{name}/" if name else ""
        names = [prefix + key for key in value]
        spread = not arrays.all_dense(value.values())
        parts = self._parts(names, value.values()) if spread else None
        if not self.taken.isdisjoint(names) or (spread and parts is None):
            # A name is taken (a key with "/" in it) or a tensor is odd: each gets its own node.
            nodes = self._entries(value, name, path)
            return {"$": "odict", "v": [[key, node] for key, node in nodes.items()]} if ordered else nodes
        if parts is not None:
            for unique, held in zip(names, parts, strict=True):
                self._add(held, unique)
        else:
            self.taken.update(names)
            self.flat.names.extend(names)
            self.flat.tensors.extend(value.values())
            self.flat.files.extend([self.file] * len(names))
        node = {"$": "tensors", "at": prefix, "k": list(value), "o": int(ordered)}
        if trained := [key for key, tensor in value.items() if tensor.requires_grad and tensor.is_leaf]:
            node["rg"] = trained
        return node

    def _rows(self, value: Mapping[str, Any], name: str) -> dict[str, Any] | None:
        """Encode a dictionary all of whose values are dictionaries of plain tensors; None if there is more to it.

        Optimizers keep half of the tensors of a state, or more, in this way. The loop makes hardly a call, because
        training waits for it at every save.
        """
        if not name or len(self.active) >= MAX_NESTING:
            return None
        tree: dict[str, Any] = {}
        names: list[str] = []
        tensors: list[torch.Tensor] = []
        for key, row in value.items():
            if type(row) is not dict or not row or not _TENSOR.issuperset(map(type, row.values())):
                return None
            if not _TEXT.issuperset(map(type, row)) or not is_text("".join(row)):
                return None
            at, keys = f"{name}/{key}/", list(row)
            names.extend([at + row_key for row_key in keys])
            tensors.extend(row.values())
            tree[key] = {"$": "tensors", "at": at, "k": keys, "o": 0}
        if any(map(attrgetter("requires_grad"), tensors)) or not arrays.all_dense(tensors):
            return None
        if len(set(names)) != len(names) or not self.taken.isdisjoint(names):
            return None
        self.taken.update(names)
        self.flat.names.extend(names)
        self.flat.tensors.extend(tensors)
        self.flat.files.extend([self.file] * len(names))
        return tree

    def _parts(self, names: Iterable[str], tensors: Iterable[torch.Tensor]) -> list[sharded.Parts] | None:
        """Return the parts of tensors some of which are spread over ranks; None if any of them cannot be saved."""
        parts: list[sharded.Parts] = []
        try:
            for name, tensor in zip(names, tensors, strict=True):
                if type(tensor) is torch.Tensor:
                    parts.append([(None, tensor)])
                    if not arrays.all_dense((tensor,)):
                        return None
                else:
                    parts.append(self._spread(tensor, name, ""))
        except UnsupportedStateError:
            return None
        return parts

    def _tensor(self, value: torch.Tensor, name: str, path: str) -> dict[str, Any]:
        if isinstance(value, self.spread):
            if not self.owned and arrays.parts_of(local := arrays.local_tensor(value)) is not None:
                return self._per_rank(local, name, path)  # its codes are cut as the rank holds them: no boxes
            node = self._add(self._spread(value, name, path), name)
        else:
            inner = value if type(value) in arrays.PLAIN else arrays.bare(value)
            if type(inner) not in arrays.PLAIN and (parts := arrays.parts_of(inner)) is not None:
                return self._object(inner, "tensor", parts, name, path)
            arrays.check_tensor(inner, f"state{path}")
            node = self._add([(None, inner.detach())], name)
        if isinstance(value, nn.Parameter):
            node["k"] = "parameter"
            node["rg"] = int(value.requires_grad)
        elif value.requires_grad and value.is_leaf:
            node["rg"] = 1
        return node

    def _spread(self, value: torch.Tensor, name: str, path: str) -> sharded.Parts:
        """Take a tensor apart that is spread over ranks."""
        from . import sharded  # not above: most states have no such tensor

        if self.owned:
            raise UnsupportedStateError(
                f"state{path}: a {type(value).__name__} says itself what each rank holds of it: take it out of PerRank"
            )
        try:
            self.regions = self.regions or sharded.Regions()
            parts = self.regions.of(value)
        except UnsupportedStateError as error:
            raise UnsupportedStateError(f"state{path}: {error}") from None
        if self.whole is not None and hasattr(value, "full_tensor") and self.whole(name):
            stand_in = sharded.stand_in(value)
            self.parted[id(stand_in)] = value
            self.flat.groups.update(region.spread.ranks for region, _ in parts if region is not None)
            return [(None, stand_in)]
        for _, part in parts:
            arrays.check_tensor(part, f"state{path}")
        return parts

    def settle_replicated(self) -> None:
        """Correct what seemed replicated by its place in the state, with the placements of the tensors."""
        regions = self.flat.regions
        held = bytearray(len(self.flat.names))
        for rows in self.inner:
            held[rows.start : rows.stop] = b"\1" * len(rows)
        for number in (*self.flat.own, *regions, *self.flat.whole):
            held[number] = 1
        self.flat.replicated = sorted({*self.flat.replicated, *self.flat.whole}.difference(self.flat.own))
        self.flat.optimized.difference_update(self.flat.names[number] for number in self.flat.whole)
        self.flat.loose = [number for number, is_held in enumerate(held) if not is_held] if 0 in held else []
        if self.flat.loose or self.flat.alone:  # seldom, and this is done at each save
            alone, tensors = {*self.flat.loose, *self.flat.alone}, self.flat.tensors
            alone.difference_update(self.flat.own, regions, self.flat.replicated)
            mine = {tensors[number].data_ptr() for number in self.flat.own}  # what each rank gets back all the same
            self.flat.alone = sorted(
                number
                for number in alone
                if tensors[number].data_ptr() not in mine
                and (number in self.averaged or not self.flat.names[number].endswith(_OF_BATCHES))
            )
        if regions:
            self.flat.groups.update({region.spread.ranks for region in regions.values()})
            everywhere = {number for number, region in regions.items() if region.everywhere}
            self.flat.replicated = sorted(everywhere.union(self.flat.replicated).difference(regions) | everywhere)
            for number in everywhere:
                del regions[number]

    def _add(self, parts: sharded.Parts, name: str) -> dict[str, Any]:
        """Note what this rank holds of a tensor; returns its node."""
        flat, unique = self.flat, unused_name(name, self.taken)
        self.taken.add(unique)
        for region, part in parts:
            if region is not None:
                flat.regions[len(flat.names)] = region
            elif id(part) in self.parted:
                flat.whole[len(flat.names)] = self.parted[id(part)]
            flat.names.append(unique)
            flat.tensors.append(part)
            flat.files.append(self.file)
        return {"$": "tensor", "n": unique}


def _digest_of_settings(groups: list[dict[str, Any]]) -> str:
    rows = [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in groups]
    return bytes_digest(repr(rows).encode(errors="surrogatepass"))


def unused_name(name: str, taken: Container[str]) -> str:
    """Return a name that is not ``taken``: with a number behind it if it is."""
    unique, number = name, 1
    while unique in taken:
        number += 1
        unique = f"{name}~{number}"
    return unique


def _check_names(flat: Flat) -> None:
    """Refuse a name that a value of another rank may have: readers merge their indexes."""
    own = frozenset(flat.own)
    for number, name in enumerate(flat.names):
        if "@" not in name or number in own:
            continue
        for match in _OF_RANK.finditer(name):
            if name[: match.start()] in flat.per_rank:
                raise UnsupportedStateError(
                    f"the tensor {name!r} has the name that a rank's own part of {name[: match.start()]!r} "
                    "(PerRank, RNG) may have: give it another name"
                )


def _ids(module: nn.Module, ids: list[int]) -> list[int]:
    ids.extend([id(param) for param in module._parameters.values() if param is not None])
    for child in module._modules.values():
        if child is not None:
            _ids(child, ids)
    return ids


def _as_name(tail: str) -> str:
    """Turn the spelling of a path below a plain container ("[0]['a'].b") into a name ("0/a/b")."""
    return "/".join(field or key.strip("'\"") for key, field in _STEP.findall(tail))


def pointer(place: Iterable[str | int]) -> str:
    """Spell the keys and indexes that lead to a value as a JSON pointer (RFC 6901), without its first slash."""
    return "/".join(str(step).replace("~", "~0").replace("/", "~1") for step in place)
