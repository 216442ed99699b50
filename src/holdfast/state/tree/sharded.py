"""What this rank holds of a state that is spread over ranks, and which ranks hold the same.

Of a tensor (DTensor, ShardedTensor) everything follows from its own mesh, placements and shape, without asking another
rank; whether a tensor is one says `arrays`. Of a whole state (stages of a pipeline, experts) the user names the ranks
that hold the same, or the state does: a mesh or a process group of some ranks leaves the others out. A group that is
too small costs space, never data: each group stores what it holds, even if another group holds the same name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import nn

from holdfast.errors import ConfigError, UnsupportedStateError
from holdfast.format.digest import bytes_digest
from holdfast.format.division import Box

from .arrays import is_spread, local_of, local_tensor, parts_of, spread_types
from .objects import leaves, parallel_wrapper

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

APART = frozenset({"pp", "pipe", "pipeline", "stage", "ep", "expert"})
"""Names of dimensions of a mesh along which ranks hold different modules."""
_Runs = list[tuple[int, int]]  # (first index, length), in the order in which they lie in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How a tensor is spread over ranks.

    Attributes:
        text: mesh and placements; the same on all ranks.
        num_ranks: how many ranks the mesh covers, with those that hold the same.
        rank: this rank, as the mesh counts.
        holders: ranks that hold the same as this rank, with this rank.
        ranks: all ranks that the mesh covers.
    """

    text: str
    num_ranks: int
    rank: int
    holders: tuple[int, ...]
    ranks: tuple[int, ...] = field(default=(), compare=False, repr=False)  # many; `text` distinguishes them, too


class Region(NamedTuple):
    """A part of a tensor that this rank holds: the shape of the whole, and the box of it."""

    shape: tuple[int, ...]
    box: Box
    spread: Placement

    @property
    def everywhere(self) -> bool:
        """True if every rank holds the whole tensor."""
        return 0 in self.shape or (len(self.spread.holders) == self.spread.num_ranks and self.box.shape == self.shape)


Parts = list[tuple[Region | None, torch.Tensor]]
"""What a rank holds of a tensor: regions with the memory of each; None for a tensor that is spread over no ranks."""


def stand_in(value: torch.Tensor) -> torch.Tensor:
    """Return something of the shape of a whole DTensor that takes no memory, and the same memory for tied tensors."""
    local = local_of(value)
    base = local if local.numel() else local.new_empty(1)
    return base.as_strided(value.shape, (0,) * len(value.shape))


def local_parts(value: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """Return the boxes of a tensor that this rank holds, each with a view of its memory.

    Raises:
        UnsupportedStateError: the tensor holds terms of a sum, or its placement is unknown.
    """
    if hasattr(value, "local_shards"):
        return [(_shard_box(shard), shard.tensor.detach()) for shard in value.local_shards()]
    local = local_tensor(value)
    expected, parts = _held(value)
    if local.shape != expected:
        _refuse_shape(value, local, expected)
    return [(box, _part(local, box, at)) for box, at in parts]


def spread_of(value: Any) -> Placement:
    """Return how a tensor of `spread_types` is spread, without looking at what this rank holds."""
    return _sharded_spread(value) if hasattr(value, "local_shards") else _spread(value.device_mesh, value.placements)


class Regions:
    """Finds what this rank holds of each tensor of a state. Tensors laid out alike are examined once."""

    def __init__(self) -> None:
        self._spreads: dict[tuple[int, Any], Placement] = {}
        self._known: dict[tuple[int, Any, Any], tuple[tuple[int, ...], list[Region], tuple[Held, ...]]] = {}
        self._kept: list[Any] = []  # keeps the meshes alive, so that no id is used again

    def of(self, value: Any) -> Parts:
        """Return the parts of a tensor on this rank: one region of no elements if it holds none.

        Raises:
            UnsupportedStateError: as in `local_parts`; the message names no path.
        """
        if hasattr(value, "local_shards"):
            return _of_shards(value)
        local, mesh, placements = local_of(value), value.device_mesh, value.placements
        key = (id(mesh), placements, value.shape)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._look(value)
        expected, regions, held_parts = known
        if 0 in value.shape:
            return [(regions[0], local.new_empty(value.shape))]
        if local.shape != expected:
            _refuse_shape(value, local, expected)
        if len(regions) == 1:
            return [(regions[0], local)]
        rows = zip(regions, held_parts, strict=True)
        return [(region, _part(local, box, at)) for region, (box, at) in rows]

    def _look(self, value: Any) -> tuple[tuple[int, ...], list[Region], tuple[Held, ...]]:
        mesh, placements, shape = value.device_mesh, value.placements, tuple(value.shape)
        self._kept.append(mesh)
        expected, parts = _held(value)
        spread = self._spreads.get((id(mesh), placements))
        if spread is None:
            spread = self._spreads[id(mesh), placements] = _spread(mesh, placements)
        regions = [Region(shape, box, spread) for box, _ in parts]
        empty = shape if 0 in shape else expected
        return expected, regions or [Region(shape, Box((0,) * len(shape), empty), spread)], parts


def _of_shards(value: Any) -> Parts:
    shape, spread = tuple(value.size()), _sharded_spread(value)
    rows: Parts = [(Region(shape, _shard_box(shard), spread), shard.tensor.detach()) for shard in value.local_shards()]
    nothing = (0,) * len(shape)
    empty = torch.empty(nothing, dtype=value.dtype, device="cpu")
    return rows or [(Region(shape, Box(nothing, nothing), spread), empty)]


def empty_alike(value: Any, device: torch.device) -> Any:
    """Return a tensor with memory of its own that is spread over the ranks as ``value`` is."""
    if not hasattr(value, "local_shards"):
        return torch.empty_like(value, device=device)
    shards = [type(one)(torch.empty_like(one.tensor, device=device), one.metadata) for one in value.local_shards()]
    return value._init_from_local_shards_and_global_metadata(
        shards, value.metadata(), process_group=value._process_group
    )


def layouts_of(value: Any, name: str) -> dict[str, list[int | None]]:
    """Return how the tensors in what an object keeps are spread over ranks.

    Args:
        value: tensors, in containers or not.
        name: of the value; begins the names of its tensors.

    Returns:
        Name of a tensor -> for each dimension of the mesh the dimension that is sharded along it, or None.
    """
    kinds = spread_types()
    return {
        where: [getattr(placement, "dim", None) for placement in item.placements]
        for where, item in leaves(value, name, tensors=True)
        if isinstance(item, kinds) and hasattr(item, "placements")
    }


def spread_tensors(state: Any) -> list[Any]:
    """Return the tensors of a state that are spread over ranks: weights, those of optimizers, and what lies there."""
    found: list[Any] = []
    for _, value in leaves(state, tensors=True):
        if isinstance(value, nn.Module):
            found.extend(filter(is_spread, value.parameters()))
        elif isinstance(value, torch.optim.Optimizer):
            found.extend(param for group in value.param_groups for param in group["params"] if is_spread(param))
        elif is_spread(value):
            found.append(value)
    return found


def odd_layouts(optimizer: torch.optim.Optimizer, rows: Sequence[Sequence[str]]) -> dict[str, list[int | None]]:
    """Return the `layouts_of` state that does not lie beside its parameter as this is spread.

    It has another shape (factored second moments), or is deeper within (the lists of LBFGS).

    Args:
        optimizer: keeps that state.
        rows: its `live_names`.
    """
    layouts: dict[str, list[int | None]] = {}
    for group, row in zip(optimizer.param_groups, rows, strict=True):
        for param, name in zip(group["params"], row, strict=True):
            if is_spread(param):
                for key, value in optimizer.state.get(param, {}).items():
                    if not (is_spread(value) and tuple(value.shape) == tuple(param.shape)):
                        layouts.update(layouts_of(value, f"{name}/{key}"))
    return layouts


def _tensor_package() -> Any:
    try:
        return importlib.import_module("torch.distributed.tensor")
    except ImportError:
        return importlib.import_module("torch.distributed._tensor")  # torch 2.4


def empty_beside(
    param: Any, shape: tuple[int, ...], dtype: torch.dtype, layout: list[int | None] | None
) -> torch.Tensor:
    """Return an uninitialised tensor on the mesh of a parameter, of another shape than the parameter.

    Args:
        param: a DTensor.
        shape: of the whole tensor.
        dtype: of the tensor.
        layout: as in `layouts_of`. If it is None or does not fit the mesh, each dimension of the same size as in
            ``param`` is sharded as in ``param``.
    """
    kinds = _tensor_package()
    Replicate, Shard = kinds.Replicate, kinds.Shard  # noqa: N806 - classes
    if layout is None or len(layout) != param.device_mesh.ndim:
        dims = (getattr(placement, "dim", None) for placement in param.placements)
        layout = [
            dim if dim is not None and dim < len(shape) and shape[dim] == param.shape[dim] else None for dim in dims
        ]
    placements = [Replicate() if dim is None or dim >= len(shape) else Shard(dim) for dim in layout]
    made: torch.Tensor = kinds.empty(*shape, dtype=dtype, device_mesh=param.device_mesh, placements=placements)
    return made


def beside_alike(
    params: Iterable[Any], shape: tuple[int, ...], dtype: torch.dtype, layout: list[int | None]
) -> torch.Tensor | None:
    """Return an uninitialised tensor that is spread as one of some parameters is, or else on the mesh they are on.

    Args:
        params: tensors that are spread over ranks.
        shape: of the whole tensor.
        dtype: of the tensor.
        layout: as in `layouts_of`; one of other dimensions counts by how many these are.

    Returns:
        None if there is no mesh, or several that may be meant.
    """
    fits = [param for param in params if len(getattr(param, "placements", ())) == len(layout)]
    alike = [param for param in fits if tuple(param.shape) == shape and any(dim is not None for dim in layout)]
    chosen = alike or fits
    if not chosen or any(param.device_mesh != chosen[0].device_mesh for param in chosen):
        return None
    if alike and len({param.placements for param in alike}) == 1:
        return torch.empty_like(alike[0], dtype=dtype)
    return empty_beside(chosen[0], shape, dtype, layout)


def spread_as(param: Any, value: Any) -> Any:
    """Spread what this rank holds of a tensor that wraps others as a parameter is spread; all else stays as it is."""
    if not isinstance(value, torch.Tensor) or is_spread(value) or parts_of(value) is None:
        return value
    kind = _tensor_package().DTensor
    mesh, placements = param.device_mesh, param.placements
    return kind.from_local(value, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def _part(local: torch.Tensor, box: Box, at: tuple[int, ...]) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(at, box.shape, strict=True)):
        if local.shape[dim] != size:
            local = local.narrow(dim, start, size)
    return local


def _held(value: Any) -> tuple[tuple[int, ...], tuple[Held, ...]]:
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return (0,), ()  # the local shape that torch gives ranks outside of a mesh
    return held(tuple(value.shape), tuple(_cuts(value.placements, tuple(mesh.shape), coordinate)))


def _refuse_shape(value: Any, local: torch.Tensor, expected: tuple[int, ...]) -> None:
    if not local.numel() and not all(expected):
        return  # nothing is nothing, whatever its shape
    raise UnsupportedStateError(
        f"a DTensor of shape {list(value.shape)} with placements {value.placements} over a mesh of "
        f"{tuple(value.device_mesh.shape)} has {list(expected)} on this rank, but its local tensor is "
        f"{list(local.shape)}: shard it as torch does (torch.chunk)"
    )


def _cuts(placements: Any, sizes: tuple[int, ...], coordinate: Any) -> Iterator[Cut]:
    for placement, parts, number in zip(placements, sizes, coordinate, strict=True):
        if placement.is_replicate():
            continue
        if placement.is_partial() or not hasattr(placement, "dim"):
            raise UnsupportedStateError(
                f"a DTensor with the placement {placement} holds terms of a sum that nobody has added up: save "
                "tensor.redistribute(placements=[Replicate() or Shard(...)]) instead"
            )
        yield Cut(placement.dim, parts, number, int(getattr(placement, "split_factor", 1)))


def _spread(mesh: Any, placements: Any) -> Placement:
    """Find the holders: ranks along replicated dimensions, and along dimensions that the mesh was sliced out of."""
    grid, inner = _grid(mesh), mesh.mesh
    text = f"{tuple(grid.shape)} {bytes_digest(repr(grid.flatten().tolist()).encode())} {tuple(inner.shape)} "
    text += " ".join(map(str, placements))
    if mesh.get_coordinate() is None:
        return Placement(text=text, num_ranks=grid.numel(), rank=-1, holders=(), ranks=_sorted(grid))
    coordinate = mesh.get_coordinate()
    rank = int(inner[tuple(coordinate)])
    rows = zip(placements, coordinate, strict=True)
    same = inner[tuple(slice(None) if placement.is_replicate() else at for placement, at in rows)]
    holders = {int(holder) for holder in same.flatten()}
    if inner.numel() < grid.numel():
        places = {holder: (grid == holder).nonzero()[0].tolist() for holder in holders}
        mine = (grid == rank).nonzero()[0].tolist()
        others = torch.isin(grid, inner).nonzero()
        along = [bool((others[:, dim] != at).any()) for dim, at in enumerate(mine)]
        text += f" {along}"
        for place in places.values():
            peers = grid[tuple(at if on else slice(None) for on, at in zip(along, place, strict=True))]
            holders.update(int(member) for member in peers.flatten())
    return Placement(text=text, num_ranks=grid.numel(), rank=rank, holders=tuple(sorted(holders)), ranks=_sorted(grid))


def _sorted(grid: torch.Tensor) -> tuple[int, ...]:
    return tuple(sorted(grid.flatten().tolist()))


def _grid(mesh: Any) -> torch.Tensor:
    """Return the ranks that may hold what is spread over ``mesh``: those of the mesh that it was sliced out of.

    Stages of a pipeline, and experts, are different modules: along a dimension with such a name, no two ranks hold the
    same.
    """
    root = _root(mesh)
    grid: torch.Tensor = root.mesh
    names, own = root.mesh_dim_names or (), mesh.mesh_dim_names or ()
    coordinate = root.get_coordinate()
    for dim, name in enumerate(names):
        if name in APART and name not in own and coordinate is not None:
            rest = grid.narrow(dim, coordinate[dim], 1)
            if torch.isin(mesh.mesh, rest).all():
                grid = rest
    return grid


def _root(mesh: Any) -> Any:
    """Return the mesh that ``mesh`` was sliced out of, or itself."""
    find = getattr(mesh, "_get_root_mesh", None)
    if find is None:  # torch < 2.8
        known: Any = getattr(sys.modules.get("torch.distributed.device_mesh"), "_mesh_resources", None)
        find = getattr(known, "get_root_mesh", None) or getattr(known, "get_parent_mesh", None)
        return (find(mesh) if find else None) or mesh
    return find()


def _shard_box(shard: Any) -> Box:
    return Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))


def _sharded_spread(value: Any) -> Placement:
    import torch.distributed as dist

    shards = [(tuple(shard.shard_offsets), tuple(shard.shard_sizes)) for shard in value.metadata().shards_metadata]
    digest = bytes_digest(repr(shards).encode())
    rank = dist.get_rank()
    size = dist.get_world_size(value._process_group)
    ranks = tuple(sorted(dist.get_process_group_ranks(value._process_group)))
    return Placement(text=f"shards {digest}", num_ranks=size, rank=rank, holders=(rank,), ranks=ranks)


class Cut(NamedTuple):
    """One cut: ``dim`` into ``parts``, of which ``number`` is held; ``factor`` above 1 makes it a strided cut."""

    dim: int
    parts: int
    number: int
    factor: int = 1


class Held(NamedTuple):
    """A box of the whole tensor, and where it begins in the local tensor."""

    box: Box
    local: tuple[int, ...]


@lru_cache(maxsize=4096)
def held(shape: tuple[int, ...], cuts: tuple[Cut, ...]) -> tuple[tuple[int, ...], tuple[Held, ...]]:
    """Return the local shape, and the boxes that make up the local tensor; no box if it is empty.

    Args:
        shape: of the whole tensor.
        cuts: in order; each cuts what the cuts before it have left.
    """
    runs: list[_Runs] = [[(0, size)] for size in shape]
    for dim, parts, number, factor in cuts:
        old, new = runs[dim], []
        total = sum(length for _, length in old)
        for piece in range(factor):
            start, size = _chunk(total, factor, piece)
            first, length = _chunk(size, parts, number)
            new.extend(_take(old, start + first, length))
        runs[dim] = _merged(new)
    local_shape = tuple(sum(length for _, length in row) for row in runs)
    if not all(local_shape):
        return local_shape, ()
    boxes = []
    for rows in product(*[list(zip(row, _starts(row), strict=True)) for row in runs]):
        box = Box(tuple(start for (start, _), _ in rows), tuple(length for (_, length), _ in rows))
        boxes.append(Held(box, tuple(at for _, at in rows)))
    return local_shape, tuple(boxes)


def _chunk(size: int, parts: int, number: int) -> tuple[int, int]:
    full = -(-size // parts)
    start = min(size, full * number)
    return start, min(size, start + full) - start


def _take(runs: _Runs, start: int, length: int) -> _Runs:
    taken = []
    for first, size in runs:
        low, high = max(0, start), min(size, start + length)
        if low < high:
            taken.append((first + low, high - low))
        start -= size
    return taken


def _merged(runs: _Runs) -> _Runs:
    merged: _Runs = []
    for first, size in runs:
        if merged and sum(merged[-1]) == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((first, size))
    return merged


def _starts(runs: _Runs) -> list[int]:
    starts, at = [], 0
    for _, size in runs:
        starts.append(at)
        at += size
    return starts


Alike: TypeAlias = "DeviceMesh | ProcessGroup | Sequence[int] | None"
"""The ranks that hold the same as this rank; None: those that the state names, else all ranks."""


def ranks_alike(alike: Any, *, rank: int, world_size: int) -> tuple[int, ...] | None:
    """Return the ranks that ``alike`` names, None if it names none.

    Raises:
        ConfigError: it names no ranks, ranks outside of ``world_size``, or not this rank.
    """
    if alike is None:
        return None
    if isinstance(alike, Sequence) and not isinstance(alike, (str, bytes)):
        ranks = list(alike)
    elif hasattr(alike, "mesh") and isinstance(alike.mesh, torch.Tensor):
        ranks = alike.mesh.flatten().tolist()
    else:
        import torch.distributed as dist

        if not dist.is_available() or not isinstance(alike, dist.ProcessGroup):
            raise ConfigError(
                f"alike={alike!r}: name the ranks that hold the same as this rank, with a DeviceMesh (mesh['dp']), a "
                "process group or a list of ranks; [rank] where each rank holds something of its own"
            )
        ranks = dist.get_process_group_ranks(alike)
    good = all(type(member) is int and 0 <= member < world_size for member in ranks)
    if not good or rank not in ranks or len(set(ranks)) != len(ranks):
        raise ConfigError(
            f"alike names the ranks {ranks}, and this is rank {rank} of {world_size}: name each rank that holds the "
            "same as this rank once, and this rank, too"
        )
    return tuple(sorted(ranks))


def common_group(groups: Iterable[tuple[int, ...]], *, rank: int, world_size: int) -> tuple[int, ...] | None:
    """Return the ranks that all groups of a state have in common; None if these are all ranks."""
    common = set(range(world_size))
    for group in groups:
        if rank in group:
            common.intersection_update(group)
    return None if len(common) == world_size else tuple(sorted(common))


def group_of(state: Any, *, rank: int, world_size: int) -> tuple[int, ...] | None:
    """Find out from the modules and tensors of a state which ranks hold the same; None: all of them."""
    return common_group(set(_groups(state, ())), rank=rank, world_size=world_size)


def parallel_group(module: nn.parallel.DistributedDataParallel) -> tuple[int, ...]:
    """Return the ranks over which a module is wrapped in DDP."""
    import torch.distributed as dist

    return tuple(sorted(dist.get_process_group_ranks(module.process_group)))


def _groups(value: Any, above: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    kinds = spread_types()
    if isinstance(value, nn.Module):
        if (parallel := parallel_wrapper(value)) is not None:
            yield parallel_group(parallel)
        yield from _spread_over(value.parameters(), kinds)
    elif isinstance(value, torch.Tensor):
        yield from _spread_over([value], kinds)
    elif isinstance(value, (Mapping, list, tuple)) and id(value) not in above:
        items = value.values() if isinstance(value, Mapping) else value
        yield from _spread_over((item for item in items if isinstance(item, torch.Tensor)), kinds)
        for item in items:
            if not isinstance(item, (torch.Tensor, int, float, str)):
                yield from _groups(item, (*above, id(value)))


def _spread_over(tensors: Iterable[torch.Tensor], kinds: tuple[type, ...]) -> Iterator[tuple[int, ...]]:
    if not kinds:
        return
    seen: dict[tuple[int, Any], Any] = {}
    for tensor in tensors:
        if isinstance(tensor, kinds):
            mesh = getattr(tensor, "device_mesh", None)
            key = (id(mesh), getattr(tensor, "placements", None)) if mesh is not None else (id(tensor), None)
            if key not in seen:
                seen[key] = mesh
                yield spread_of(tensor).ranks
