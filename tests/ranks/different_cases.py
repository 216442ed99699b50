"""Ranks that hold different things: what the ranks of `test_different` run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import holdfast as hf
from holdfast.dcp import HoldfastReader, HoldfastWriter


def values(start: int) -> torch.Tensor:
    return torch.arange(start, start + 32, dtype=torch.float32).reshape(8, 4)


def through_dcp(root: str) -> dict[str, Any]:
    """Save through DCP with our writer, then load here into another layout, each for itself and all together."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    spread = distribute_tensor(values(0), mesh, [Shard(0)])
    own = {f"stage{rank}": {"weight": values(100 * rank), "depth": rank}}
    path = Path(root, "dcp")
    dcp.save({"w": spread, **own}, storage_writer=HoldfastWriter(path))
    for ranks in ("this", "all"):
        columns = distribute_tensor(torch.zeros(8, 4), mesh, [Shard(1)])
        other = (rank + 1) % world_size
        into = {"w": columns, f"stage{other}": {"weight": torch.zeros(8, 4), "depth": 0}}
        found = hf.load(path, into, only=["w", f"stage{other}"], ranks=ranks)
        assert torch.equal(columns.full_tensor(), values(0))
        assert torch.equal(into[f"stage{other}"]["weight"], values(100 * other))
        assert found[f"stage{other}"]["depth"] == other
        whole = distribute_tensor(torch.zeros(8, 4), mesh, [Replicate()])
        hf.load(path, {"w": whole}, only="w", ranks=ranks)
        assert torch.equal(whole.to_local(), values(0))
    back = {"w": distribute_tensor(torch.zeros(8, 4), mesh, [Shard(1)]), "stage0": {"weight": torch.zeros(8, 4)}}
    dcp.load(back, storage_reader=HoldfastReader(path))
    assert torch.equal(back["stage0"]["weight"], values(0))
    return {"keys": sorted(hf.load(path))}


def refused(call: Any) -> str:
    try:
        call()
    except hf.HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def plain_dicts(root: str) -> dict[str, Any]:
    """State dicts of stages, of other keys on each rank and none of which says whose it is."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def stage(number: int, start: int = 0) -> dict[str, Any]:
        name = f"layers.{number}.weight"
        return {
            "model": {name: values(100 * number) * bool(start)},
            "optimizer": {
                "state": {name: {"exp_avg": values(1000 * number) * bool(start), "step": torch.tensor(3.0 * start)}},
                "param_groups": [{"lr": 0.1, "params": [name]}],
            },
            "epoch": 7 * start,
        }

    path = Path(root, "stages")
    found = {"unsaid": refused(lambda: hf.save(path, stage(rank, 1)))}
    hf.save(path, stage(rank, 1), alike=[rank])
    for ranks in ("all", "this"):
        other = (rank + 1) % world_size
        live = stage(other)
        assert hf.load(path, live, ranks=ranks, alike=[rank])["epoch"] == 7
        name = f"layers.{other}.weight"
        assert torch.equal(live["model"][name], values(100 * other))
        assert torch.equal(live["optimizer"]["state"][name]["exp_avg"], values(1000 * other))
        assert live["optimizer"]["state"][name]["step"] == 3
    mine = stage(rank)
    found["nobody's"] = refused(lambda: hf.load(path, mine if rank else {"epoch": 0}, ranks="all", alike=[rank]))
    assert not mine["model"][f"layers.{rank}.weight"].any()
    found["one name"] = refused(lambda: hf.save(Path(root, "x"), {"model": {"0.weight": values(rank)}}, alike=[rank]))
    wrong = [rank, 0] if rank else [0]
    found["no agreement"] = refused(lambda: hf.save(Path(root, "y"), stage(rank, 1), alike=sorted(set(wrong))))
    found["not this one"] = refused(lambda: hf.save(Path(root, "z"), stage(rank, 1), alike=[1 - min(rank, 1)]))
    later = hf.save_async(Path(root, "later"), stage(rank, 1), alike=[rank]).result(60)
    found["keys"] = sorted(hf.load(later)["model"])
    return found


class Layers(nn.Module):
    """Some of the layers of a model, under the names they have in the whole."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = {str(number): nn.Linear(8, 8) for number in range(4)}
        self.layers = nn.ModuleDict({str(number): layers[str(number)] for number in numbers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def stage_state(rank: int, how: str, mesh: Any, *, seed: int = 1) -> dict[str, Any]:
    """Two layers of four, trained for a step on two ranks under DDP or FSDP2."""
    stage: nn.Module = Layers(range(2 * (rank // 2), 2 * (rank // 2) + 2))
    if how == "ddp":
        stage = nn.parallel.DistributedDataParallel(stage, process_group=mesh.get_group())
    else:
        fully_shard(stage, mesh=mesh)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01 * seed)
    if seed:
        torch.manual_seed(seed)
        stage(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    return {"model": stage, "optimizer": optimizer, "step": seed}


def whole_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All weights and moments of a state, in full."""
    found = {}
    for name, weight in getattr(state["model"], "module", state["model"]).named_parameters():
        for key, value in {"weight": weight.detach(), **state["optimizer"].state.get(weight, {})}.items():
            found[f"{name}/{key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found


def stages(root: str, how: str, mesh_of: str) -> dict[str, Any]:
    """Stages of two ranks each, whose meshes or process groups tell that the others hold something else."""
    rank = dist.get_rank()
    if mesh_of == "names":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    else:
        meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
        mesh = meshes[rank // 2]
    state = stage_state(rank, how, mesh)
    mine = whole_of(state)
    path = Path(root, "stages")
    hf.save(path, state)
    everything: list[Any] = [None] * 4
    dist.all_gather_object(everything, mine)
    expected = everything[0] | everything[2]

    whole = {"model": Layers(range(4)), "optimizer": None}
    whole["optimizer"] = torch.optim.AdamW(whole["model"].parameters(), lr=1.0)
    hf.load(path, whole, only=["model", "optimizer"])
    found = whole_of(whole)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert whole["optimizer"].param_groups[0]["lr"] == 0.01
    again = Path(root, "whole")
    hf.save(again, {**whole, "step": 1})
    for source, ranks in ((path, "all"), (again, "all"), (path, "this"), (again, "this")):
        # The stage that this rank had not.
        other = stage_state((rank + 2) % 4, how, mesh, seed=0)
        hf.load(source, other, ranks=ranks)
        theirs = everything[(rank + 2) % 4]
        found = whole_of(other)
        assert all(torch.equal(found[name], value) for name, value in theirs.items()), source
    return {"params": len(expected)}


def experts(root: str) -> dict[str, Any]:
    """Dense layers over all four ranks, two experts of two ranks each: names in common, and names of some ranks."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
    whole = mesh._flatten("dp") if hasattr(mesh, "_flatten") else init_device_mesh("cpu", (4,))

    def made(which: int, seed: int) -> dict[str, Any]:
        model = nn.Module()
        torch.manual_seed(0)
        model.dense = fully_shard(nn.Linear(8, 8), mesh=whole)
        model.norm = nn.LayerNorm(8)
        model.experts = nn.ModuleDict({str(which): fully_shard(nn.Linear(8, 8), mesh=mesh["edp"])})
        optimizer = torch.optim.AdamW(model.parameters())
        if seed:
            torch.manual_seed(seed)
            x = torch.randn(4, 8)
            (model.norm(model.dense(x)).square().sum() + model.experts[str(which)](x).square().sum()).backward()
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    mine = made(rank // 2, 1)
    path = Path(root, "moe")
    hf.save(path, mine, alike=mesh["edp"])
    everything: list[Any] = [None] * 4
    dist.all_gather_object(everything, whole_of(mine))
    expected = everything[0] | everything[2]
    loaded = hf.load(path)
    for path_of, value in expected.items():
        name, _, key = path_of.rpartition("/")
        there = loaded["model"][name] if key == "weight" else loaded["optimizer"]["state"][f"model/{name}"][key]
        assert torch.equal(there, value), name
    other = made(1 - rank // 2, 0)
    hf.load(path, other, ranks="all", alike=mesh["edp"])
    found = whole_of(other)
    assert all(torch.equal(found[name], value) for name, value in everything[(rank + 2) % 4].items())
    return {"names": len(expected)}


def start_apart(root: str) -> dict[str, Any]:
    """Start a run whose ranks hold other layers, unsaid and said, and one whose lists will be alike later."""
    rank, path = dist.get_rank(), Path(root, "run")

    def start(state: dict[str, Any], **options: Any) -> str:
        return refused(lambda: hf.Checkpointer(path, state, every="10min", **options).start().close())

    mine = Layers(range(rank, rank + 1))
    return {
        "unsaid": start({"model": mine}),
        "frozen": start({"model": Layers(range(1)).requires_grad_(rank == 0)}),
        "said": start({"model": mine}, alike=[rank]),
        "later": start({"replay": [torch.ones(2)] * rank}),
    }


class Holder:
    """An object with many bytes, whose ``state_dict()`` has other names on each rank."""

    def __init__(self, key: str) -> None:
        self.held = {key: torch.full((1 << 19,), 1.0 + dist.get_rank())}

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state


def big_objects(root: str) -> dict[str, Any]:
    """Save what objects hold: under other names on each rank, unsaid and said, and under one name."""
    rank, path = dist.get_rank(), Path(root, "objects")
    stage = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(stage.parameters(), momentum=0.9)
    optimizer.register_state_dict_pre_hook(lambda _: None)  # so that it goes by its own state_dict(), by positions
    (stage(torch.ones(1, 4)).sum() * (rank + 1)).backward()
    optimizer.step()
    found = {
        "unsaid": refused(lambda: hf.save(path, {"object": Holder(f"layers.{rank}")})),
        "one name": refused(lambda: hf.save(path, {"optimizer": optimizer}, alike=[rank])),
        "said": refused(lambda: hf.save(path, {"object": Holder(f"layers.{rank}")}, alike=[rank])),
    }
    mine = Holder(f"layers.{rank}")
    mine.held[f"layers.{rank}"].zero_()
    hf.load(path, {"object": mine}, ranks="all", alike=[rank])
    return {**found, "loaded": [value.unique().tolist() for _, value in sorted(mine.held.items())]}


class Agreed:
    """Has a number that is agreed over the ranks whenever it is saved or loaded, as wrappers around FSDP do it."""

    def __init__(self, kind: int) -> None:
        self.kind, self.value = kind, 0

    def _agree(self) -> None:
        kinds: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(kinds, self.kind)
        assert set(kinds) == {self.kind}, kinds

    def state_dict(self) -> dict[str, Any]:
        self._agree()
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._agree()
        self.value = state["value"]


def another_order(root: str) -> dict[str, Any]:
    """The same objects in dicts of another order on each rank."""

    def made() -> dict[str, Any]:
        objects: dict[str, Any] = {f"o{kind}": Agreed(kind) for kind in range(3)}
        objects["inner"] = {"x": Agreed(3), "y": Agreed(4)}
        return dict(list(objects.items())[:: -1 if dist.get_rank() else 1])

    state = made()
    for one in (*state.values(), *state["inner"].values()):
        if isinstance(one, Agreed):
            one.value = one.kind + 10
    hf.save(Path(root, "one"), state)
    live = made()
    hf.load(Path(root, "one"), live)
    with hf.Checkpointer(Path(root, "run"), state, every=1) as ck:
        ck.step()
    again = made()
    with hf.Checkpointer(Path(root, "run"), again, every=1):
        pass
    return {name: [one[name].value for one in (live, again)] for name in ("o0", "o1", "o2")}


class Factored(torch.optim.Optimizer):
    """Keeps the mean of the squares of a matrix by rows and by columns, spread as far as its parameter is."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                squares = param.grad.square()
                for key, dim in (("row", 1), ("col", 0)):
                    mean = squares.mean(dim)
                    if any(one.is_partial() for one in mean.placements):
                        mean = mean.redistribute(placements=[Replicate()] * mean.device_mesh.ndim)
                    state[key] = mean if key not in state else state[key] + mean
                param.add_(param.grad, alpha=-group["lr"])


def odd_spreads(root: str) -> dict[str, Any]:
    """State of another shape than its parameter, into a fresh optimizer; several local shards of one tensor."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))

    def made(dim: int = 0) -> dict[str, Any]:
        model = nn.Linear(8, 6, bias=False)
        weight = distribute_tensor(torch.arange(48.0).reshape(6, 8) / 48, mesh, [Shard(dim)])
        model.weight = nn.Parameter(weight)
        return {"model": model, "optimizer": Factored(model.parameters())}

    def step(state: dict[str, Any]) -> dict[str, torch.Tensor]:
        state["model"].weight.grad = state["model"].weight.detach() * 2
        state["optimizer"].step()
        kept = state["optimizer"].state[state["model"].weight]
        return {key: value.full_tensor() for key, value in kept.items()}

    state = made()
    before = step(state)
    hf.save(Path(root, "one"), state)
    after = step(state)
    for dim in (0, 1):
        fresh = made(dim)
        hf.load(Path(root, "one"), fresh)
        kept = fresh["optimizer"].state[fresh["model"].weight]
        assert {key: type(value).__name__ for key, value in kept.items()} == {"row": "DTensor", "col": "DTensor"}
        assert all(torch.equal(kept[key].full_tensor(), value) for key, value in before.items())
        if dim == 0:
            assert (kept["row"].placements, kept["col"].placements) == ((Shard(0),), (Replicate(),))
            again = step(fresh)
            assert all(torch.equal(again[key], value) for key, value in after.items())

    def shards(filled: bool) -> Any:
        rows = [
            LocalShard(
                torch.full((2, 3), float(number) if filled else -1.0),
                ShardMetadata(shard_offsets=[2 * number, 0], shard_sizes=[2, 3], placement=f"rank:{rank}/cpu"),
            )
            for number in (rank, rank + world_size)
        ]
        return init_from_local_shards(rows, 4 * world_size, 3)

    hf.save(Path(root, "two"), {"w": shards(filled=True)})
    live = shards(filled=False)
    hf.load(Path(root, "two"), {"w": live})
    found = [shard.tensor.unique().tolist() for shard in live.local_shards()]
    whole = torch.zeros(4 * world_size, 3)
    hf.load(Path(root, "two"), {"w": whole})
    return {"shards": found, "whole": whole[::2, 0].tolist()}
