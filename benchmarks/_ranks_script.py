"""One rank of `benchmarks/ranks.py`: saves a sharded state and loads checkpoints of other worlds; rank 0 tells times.

    python -m benchmarks._ranks_script ORDER.json RANK

The state is a flat dict of DTensors, cut along their first dimension (or along the last, to load columns), with the
shapes of the benchmark's usual one.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast as hf

from .bench import Context, drop_cache, fsync_tree, remove
from .limits import Limits
from .load import read_all
from .states import gpt2_state

Tensors = dict[str, torch.Tensor]


class Rank:
    """What a rank does, in step with the others."""

    def __init__(self, order: dict[str, Any], rank: int) -> None:
        self.order, self.rank = order, rank
        self.samples: list[dict[str, Any]] = []
        self.mesh = init_device_mesh("cpu", (order["world"],))
        torch.manual_seed(0)
        whole = gpt2_state(scale=order["scale"], quick=order["quick"]).tensors
        self.rows = {name: _cut(tensor, self.mesh, 0) for name, tensor in whole.items()}
        self._number = 0

    def timed(self, method: str, kind: str, work: Callable[[], object], *, first: bool) -> None:
        """Time what all ranks do, from the moment all of them begin until the last has ended."""
        dist.barrier()
        begun = time.perf_counter()
        work()
        dist.barrier()
        self.note(method, kind, time.perf_counter() - begun, first=first)

    def note(self, method: str, kind: str, value: float, *, first: bool) -> None:
        slowest = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        self.samples.append({"method": method, "kind": kind, "value": slowest.item(), "first": first})

    def place(self) -> Path:
        """Return a path that no rank has used yet."""
        self._number += 1
        return Path(self.order["folder"], f"save-{self.order['world']}-{self._number}")

    def gone(self, path: Path) -> None:
        dist.barrier()
        if self.rank == 0:
            remove(path)
        dist.barrier()

    def save(self) -> None:
        """Save in turns: ours and theirs, held and durable; then leave one checkpoint of each for the loads."""
        ways: dict[str, Callable[[Path, bool], None]] = {
            "save_async": self._save_async,
            "save": lambda path, first: self.timed(
                "save", self._kind("durable"), lambda: hf.save(path, self.rows), first=first
            ),
            "raw write": self._raw_write,
            "DCP save": self._dcp_save,
            "DCP async_save": self._dcp_async,
        }
        for turn in range(self.order["turns"] + 1 if self.order["turns"] else 0):
            for way in ways.values():
                path = self.place()
                way(path, not turn)
                self.gone(path)
        if self.order["keep"]:
            hf.save(self.order["kept"] + f"-{self.order['world']}", self.rows)
        if self.order["load"]:
            self._dcp_save(Path(self.order["kept"] + f"-dcp-{self.order['world']}"), None)

    def _kind(self, what: str) -> str:
        return f"{what} {self.order['world']}"

    def _save_async(self, path: Path, first: bool) -> None:
        def work() -> None:
            handle = hf.save_async(path, self.rows)
            held.append(handle.held_s)
            handle.result(300)

        held: list[float] = []
        self.timed("save_async", self._kind("durable"), work, first=first)
        self.note("save_async", self._kind("held"), held[0], first=first)

    def _raw_write(self, path: Path, first: bool) -> None:
        """Write as many bytes, each rank its share in one file, from warm memory: what the disk can do at best."""
        if not hasattr(self, "_limits"):
            share = sum(_local(tensor).nbytes for tensor in self.rows.values())
            self._limits = Limits(Context(scratch=path.parent), share)
        file = path.with_name(f"{path.name}-{self.rank}")
        self.timed("raw write", self._kind("durable"), lambda: self._limits.write(file), first=first)
        remove(file)

    def _dcp_save(self, path: Path, first: bool | None) -> None:
        import torch.distributed.checkpoint as dcp

        def work() -> None:
            dcp.save(self.rows, storage_writer=_writer(path), planner=_planner())
            if self.rank == 0:
                fsync_tree(path)

        if first is None:
            work()
        else:
            self.timed("DCP save", self._kind("durable"), work, first=first)

    def _dcp_async(self, path: Path, first: bool) -> None:
        import torch.distributed.checkpoint as dcp

        def work() -> None:
            begun = time.perf_counter()
            future: Any = dcp.async_save(
                self.rows,
                storage_writer=_writer(path),
                planner=_planner(),
                async_stager=self.stager(),
                process_group=self.group(),
            )
            held.append(time.perf_counter() - begun)
            getattr(future, "upload_completion", future).result()
            if self.rank == 0:
                fsync_tree(path)

        held: list[float] = []
        self.timed("DCP async_save", self._kind("durable"), work, first=first)
        self.note("DCP async_save", self._kind("held"), held[0], first=first)

    def stager(self) -> Any:
        """Return the one stager of all saves, whose buffers are warm from the second on."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if not hasattr(self, "_stager"):
            self._stager = DefaultStager(StagingOptions(False, False, False, False))
        return self._stager

    def group(self) -> Any:
        """Return a group of its own for the collectives of saves in the background."""
        if not hasattr(self, "_group"):
            self._group = dist.new_group(backend="gloo")
        return self._group

    def load(self) -> None:
        """Load in turns: the same layout, checkpoints of other worlds, columns; warm and cold, ours and theirs."""
        here = self.order["world"]
        spread = {"rows": self.rows, "columns": {name: _columns(one, self.mesh) for name, one in self.rows.items()}}
        ways: dict[str, tuple[Path, str, Callable[[Path, Tensors], object]]] = {}
        for world in self.order["saved"]:
            ways[f"{world} -> {here}"] = (Path(f"{self.order['kept']}-{world}"), "rows", _load)
        ways[f"{here} -> {here} columns"] = (Path(f"{self.order['kept']}-{here}"), "columns", _load)
        theirs = Path(f"{self.order['kept']}-dcp-{here}")
        ways[f"DCP {here} -> {here}"] = (theirs, "rows", _dcp_load)
        ways[f"DCP {here} -> {here} columns"] = (theirs, "columns", _dcp_load)
        for turn in range(self.order["repeat"] + 1):
            for kind in ("warm", "cold"):
                for method, (path, layout, load) in ways.items():
                    if self.rank == 0:
                        (read_all if kind == "warm" else drop_cache)(path)
                    state = spread[layout]
                    before = _probe(state) if not turn else None
                    if before is not None:
                        for tensor in state.values():
                            _local(tensor).zero_()
                    self.timed(
                        method, kind, lambda load=load, path=path, state=state: load(path, state), first=not turn
                    )
                    if before is not None and _probe(state) != before:
                        raise AssertionError(f"{method} did not bring the state back")


def _load(path: Path, state: Tensors) -> None:
    hf.load(path, state, ranks="all")


def _dcp_load(path: Path, state: Tensors) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.load(state, checkpoint_id=path)


def _writer(path: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemWriter

    return FileSystemWriter(path, thread_count=2, sync_files=True)


def _planner() -> Any:
    from torch.distributed.checkpoint import DefaultSavePlanner

    return DefaultSavePlanner(enable_plan_caching=True)


def _cut(tensor: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """Return what this rank holds of a tensor; scalars, and what cannot be cut, as they are."""
    if not tensor.dim() or tensor.shape[dim] < mesh.size():
        return tensor
    local = tensor.chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous().clone()
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=tensor.shape, stride=tensor.stride())


def _columns(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    if not isinstance(tensor, DTensor) or tensor.dim() < 2:
        return tensor
    return _cut(tensor.full_tensor(), mesh, 1)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _probe(state: Tensors) -> list[float]:
    found = []
    for tensor in state.values():
        local = _local(tensor)
        found += [float(local.reshape(-1)[at]) for at in (0, -1)] if local.numel() else []
    return found


def main() -> None:
    """Run one rank."""
    warnings.filterwarnings("ignore", module=r"torch.*")
    order, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{order['store']}", rank=rank, world_size=order["world"])
    one = Rank(order, rank)
    one.save()
    if order["load"]:
        one.load()
    if rank == 0:
        Path(order["result"]).write_text(json.dumps(one.samples))
    dist.barrier()
    if hasattr(one, "_stager"):
        one.stager().close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
