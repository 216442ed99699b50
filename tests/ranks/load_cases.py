"""What the tests of ranks that load together run on each of them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast as hf
from holdfast.checkpointer import functions
from holdfast.state.load import shared_reads
from holdfast.storage.local import local_io

ROWS, COLUMNS = 4096, 1024  # 16 MiB; rows of 4 KiB


class Counted:
    """Counts the bytes of large reads, which are those of tensors."""

    def __init__(self, kill_after: int | None = None) -> None:
        self.total, self.kill_after = 0, kill_after

    def __enter__(self) -> Counted:
        self._read = local_io.LocalReader.read_into
        counted = self

        def read(reader: Any, offset: int, view: memoryview) -> None:
            counted._read(reader, offset, view)
            if len(view) >= 1 << 16:
                counted.total += len(view)
                if counted.kill_after is not None and counted.total > counted.kill_after:
                    os.kill(os.getpid(), signal.SIGKILL)

        local_io.LocalReader.read_into = read  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        local_io.LocalReader.read_into = self._read  # type: ignore[method-assign]


def _weights() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


def elsewhere(root: str) -> bool:
    """Save and load together under a default device whose tensors cannot be read, as those of a GPU in NumPy."""
    expected, live = _weights(), torch.zeros(ROWS, COLUMNS)
    torch.set_default_device("meta")
    try:
        hf.save(Path(root, "one"), {"w": expected}, ranks="all")
        hf.load(Path(root, "one"), {"w": live}, ranks="all")
    finally:
        torch.set_default_device(None)
    return torch.equal(live, expected)


def together(root: str) -> dict[str, Any]:
    """Load what is replicated, then columns of it, then go on with a run; tells the bytes that this rank has read."""
    rank, world = dist.get_rank(), dist.get_world_size()
    expected = _weights()
    hf.save(Path(root, "one"), {"w": torch.nn.Parameter(expected)}, ranks="all")
    live = {"w": torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))}
    with Counted() as everything:
        hf.load(Path(root, "one"), live, ranks="all")
    assert torch.equal(live["w"], expected)
    with Counted() as fresh:
        assert torch.equal(hf.load(Path(root, "one"), ranks="all")["w"], expected)
    mesh = init_device_mesh("cpu", (world,))
    width = COLUMNS // world
    spread = DTensor.from_local(torch.zeros(ROWS, width), mesh, [Shard(1)], run_check=False)
    with Counted() as columns:
        hf.load(Path(root, "one"), {"w": spread}, ranks="all")
    assert torch.equal(spread.to_local(), expected[:, rank * width : (rank + 1) * width])
    model = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    with torch.no_grad():
        model.weight.copy_(expected)
    with hf.Checkpointer(Path(root, "run"), {"model": model}, every=None) as ck:
        ck.step()
    with torch.no_grad():
        model.weight.zero_()
    with Counted() as resumed, hf.Checkpointer(Path(root, "run"), {"model": model}, every=None):
        assert torch.equal(model.weight, expected)
    parts = {"everything": everything, "fresh": fresh, "columns": columns, "resumed": resumed}
    return {"bytes": expected.nbytes, **{name: one.total for name, one in parts.items()}}


def wrong_on_one(root: str) -> dict[str, str]:
    """Rank 1's state does not fit; then what every rank loads for itself fits."""
    rank = dist.get_rank()
    hf.save(Path(root, "one"), {"w": torch.nn.Parameter(_weights())}, ranks="all")
    began = time.monotonic()
    try:
        hf.load(Path(root, "one"), {"w": torch.zeros(3 if rank == 1 else ROWS, COLUMNS)}, ranks="all")
        told = "fine"
    except hf.HoldfastError as error:
        told = f"{type(error).__name__}: {error}"
    try:
        hf.load("nowhere://one" if rank == 1 else Path(root, "one"), ranks="all")
        named = "fine"
    except hf.HoldfastError as error:
        named = f"{type(error).__name__}: {error}"
    quick = time.monotonic() - began < 60  # of ten minutes that ranks wait for each other
    if rank == 1:
        hf.load(Path(root, "one"), {"w": torch.zeros(ROWS, COLUMNS)})
    return {"told": told, "named": named, "quick": str(quick)}


def one_dies(root: str) -> str:
    """Rank 1 is killed in the middle of a load."""
    functions._LOAD_S = 2.0
    shared_reads._PATIENCE_S = 20.0  # a dead rank is noticed without it
    expected = _weights()
    hf.save(Path(root, "one"), {"w": torch.nn.Parameter(expected)}, ranks="all")
    live = {"w": torch.zeros(ROWS, COLUMNS)}
    with Counted(kill_after=4 << 20 if dist.get_rank() == 1 else None):
        try:
            hf.load(Path(root, "one"), live, ranks="all")
        except hf.HoldfastError as error:
            assert torch.equal(live["w"], expected)  # this rank had all it needs
            return str(error)
    return "fine"


def damaged(root: str) -> dict[str, Any]:
    """Load together a file with a flipped byte, in each block in turn; tells in which this rank found none."""
    rank, home = dist.get_rank(), Path(root, "rotten")
    hf.save(home, {"w": torch.nn.Parameter(_weights())}, ranks="all")
    path = max(home.glob("*.safetensors"), key=lambda one: one.stat().st_size)
    live = {"w": torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))}
    missed = []
    blocks = range(path.stat().st_size // shared_reads.BLOCK)
    for block in blocks:
        for change in (4, 4):
            if change and rank == 0:
                with path.open("r+b") as file:
                    file.seek(block * shared_reads.BLOCK + 999)
                    (value,) = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([value ^ change]))
            dist.barrier()
            try:
                hf.load(home, live, ranks="all")
            except hf.CorruptCheckpointError:
                missed += [f"{block} after it was mended"] * (block in missed)
            else:
                missed.append(block)
            dist.barrier()
    return {"missed": missed, "blocks": len(blocks)}
