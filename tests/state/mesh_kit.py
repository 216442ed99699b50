"""Ranks without processes: torch's fake process group plays each rank of a mesh in turn."""

from contextlib import contextmanager
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.checkpointer.pending_saves import manifest_fields
from holdfast.state.load.restore import load_state
from holdfast.state.save.snapshot import Snapshotter
from holdfast.storage import MemoryStorage
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import PartsJob, SaveJob

_numbers = count(1)
FIELDS = manifest_fields(run_id=None, checkpoint_id="c", parent=None, attempt=1, step=1, epoch=None, metrics={})


@contextmanager
def playing(rank, world):
    """Be one rank of a world: collectives do nothing, meshes know where this rank is."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_mesh(*shape):
    """Return a mesh over the world; its names tell it from that of the rank before, which torch remembers."""
    number = next(_numbers)
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"{name}{number}" for name in "abcd"[: len(shape)]))


class Layout:
    """How a tensor is spread: the shape of a mesh and a placement for each of its dimensions.

    Placements are integers (the dimension that is sharded), "R", or ("S", dimension, factor) for a strided shard.
    """

    def __init__(self, mesh, placements):
        self.mesh, self.placements = tuple(mesh), tuple(placements)

    def __repr__(self):
        return f"Layout({self.mesh}, {self.placements})"

    @property
    def world(self):
        return torch.Size(self.mesh).numel()

    def torch_placements(self):
        made = {"R": lambda _: Replicate(), "S": lambda one: _StridedShard(one[1], split_factor=one[2])}
        return [Shard(one) if isinstance(one, int) else made[one[0]](one) for one in self.placements]

    def shard(self, tensor):
        """Spread a tensor that every rank holds, as torch splits it; call it while playing a rank."""
        mesh = make_mesh(*self.mesh)
        local = tensor
        placements = self.torch_placements()
        for dim, (placement, at) in enumerate(zip(placements, mesh.get_coordinate(), strict=True)):
            if not placement.is_replicate():
                local = placement._split_tensor(local, self.mesh[dim], with_padding=False)[0][at]
        return DTensor.from_local(
            local.clone(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )


def save_ranks(world, make, *, storage=None, directory="one", keep=None, **options):
    """Save ``make(rank)`` of every rank as parts of one checkpoint; returns the storage rooted at it."""
    storage = storage or MemoryStorage(f"ranks-{next(_numbers)}")
    save_id = f"abcd0000-{next(_numbers):x}"
    fields = {**FIELDS, "world_size": world, "checkpoint_id": save_id}
    with WriterClient.start(thread=True) as client:
        for rank in range(world):
            with playing(rank, world):
                snapshotter = Snapshotter(rank=rank, world_size=world, **options)
                try:
                    arguments = {"directory": directory, "save_id": save_id, "manifest": fields, "part": world > 1}
                    snapshotter.submit(make(rank), client, storage, SaveJob(**arguments)).result(60)
                finally:
                    if keep is not None:
                        keep.append(snapshotter.layout)
                    snapshotter.close()
        if world > 1:
            job = PartsJob(
                directory=directory, save_id=save_id, writers=tuple(range(world)), manifest=fields, run=False
            )
            client.commit_parts(storage, job).result(60)
    return storage.child(directory)


def load_ranks(storage, world, make, check):
    """Load the checkpoint into ``make(rank)`` on every rank of another world and call ``check(rank, state)``."""
    for rank in range(world):
        with playing(rank, world):
            state = make(rank)
            load_state(storage, state, rank=rank)
            check(rank, state)
