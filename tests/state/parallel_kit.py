"""Real ranks: one process of a gloo world that saves and loads a small transformer in many layouts.

`launch` runs a world: it trains and saves in each layout of ``save`` (names with commas), then loads every checkpoint
there is into each layout of ``load`` and compares all of it, bit by bit, with what was gathered by torch when it was
saved. Nothing but the check and the training itself communicates.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from holdfast.checkpointer.pending_saves import manifest_fields
from holdfast.state.load.restore import load_state
from holdfast.state.save.snapshot import Snapshotter
from holdfast.storage import LocalStorage
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import PartsJob, SaveJob

FIELDS = manifest_fields(run_id=None, checkpoint_id="c", parent=None, attempt=1, step=1, epoch=None, metrics={})
VOCABULARY, WIDTH, HEADS = 37, 24, 12  # uneven over two, three and four ranks; heads can be split over all of them


class Block(nn.Module):
    """Attention and a perceptron, with names that a tensor-parallel plan knows."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        one = self.norm(x)
        heads = [
            part(one).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2).contiguous()
            for part in (self.q, self.k, self.v)
        ]
        mixed = nn.functional.softmax(heads[0] @ heads[1].transpose(-1, -2), -1) @ heads[2]
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.relu(self.up(x)))


class Transformer(nn.Module):
    """A very small language model with a buffer."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("places", torch.randn(8, WIDTH))

    def forward(self, tokens):
        x = self.wte(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tensor_parallel(model, mesh):
    for block in model.blocks:
        plan = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel()) | dict.fromkeys(
            ("out", "down"), RowwiseParallel()
        )
        parallelize_module(block, mesh, plan)
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    parallelize_module(model, mesh, {"wte": RowwiseParallel(input_layouts=Replicate())})


def shard(model, mesh, **options):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def spread(model, layout, world):
    """Lay a model out over all ranks."""
    if layout == "fsdp":
        shard(model, init_device_mesh("cpu", (world,)))
    elif layout == "fsdp-columns":
        from torch.distributed.tensor import Shard

        even = lambda param: Shard(1 if param.dim() > 1 and param.shape[1] % world == 0 else 0)  # noqa: E731
        shard(model, init_device_mesh("cpu", (world,)), shard_placement_fn=even)
    elif layout == "tp":
        tensor_parallel(model, init_device_mesh("cpu", (world,)))
    elif layout == "hsdp":
        shard(model, init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicas", "shards")))
    elif layout in ("fsdp+tp", "ddp+tp"):
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        tensor_parallel(model, mesh["tensor"])
        if layout == "fsdp+tp":
            shard(model, mesh["data"])
    else:
        assert layout == "plain"
    return model


def build(layout, world, *, seed, meta=False):
    """Return a state in a layout, its optimizer without any state yet."""
    if meta:
        with torch.device("meta"):
            model = Transformer(seed)
    else:
        model = Transformer(seed)
    model = spread(model, layout, world)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False), "n": seed}


def train(state, steps):
    """All ranks train with the same batch, so that any layout is a right one of the same training."""
    for step in steps:
        tokens = torch.randint(0, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(step))
        state["optimizer"].zero_grad()
        logits = state["model"](tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        state["optimizer"].step()


def full(value):
    """Gather with torch's own means."""
    return value.full_tensor() if isinstance(value, DTensor) else value.detach()


def gathered(state):
    """Return every tensor of a state as a whole."""
    found = {f"model/{name}": full(value).clone() for name, value in state["model"].state_dict().items()}
    for name, param in state["model"].named_parameters():
        for key, value in state["optimizer"].state[param].items():
            found[f"optimizer/{name}/{key}"] = full(value).clone()
    return found


def assert_equal(found, expected, where):
    assert found.keys() == expected.keys(), (where, found.keys() ^ expected.keys())
    for name, value in found.items():
        assert value.dtype == expected[name].dtype, (where, name)
        assert torch.equal(value, expected[name]), (where, name)


def save(storage, name, state, rank, world, number):
    """Save as one of several ranks: no rank hears of another but through files."""
    save_id = f"abcd0000-{number:x}"
    fields = {**FIELDS, "world_size": world, "checkpoint_id": save_id}
    snapshotter = Snapshotter(rank=rank, world_size=world)
    with WriterClient.start(thread=True) as client:
        arguments = {"directory": name, "save_id": save_id, "manifest": fields, "part": world > 1}
        snapshotter.submit(state, client, storage, SaveJob(**arguments)).result(60)
        if rank == 0 and world > 1:
            job = PartsJob(
                directory=name, save_id=save_id, writers=tuple(range(world)), manifest=fields, run=False, wait_s=60
            )
            client.commit_parts(storage, job).result(90)
    snapshotter.close()


def save_all(storage, layouts, rank, world):
    for number, layout in enumerate(layouts):
        state = build(layout, world, seed=3)
        train(state, range(2))
        if layout == "fsdp":
            with torch.no_grad():  # leaves gathered parameters in place
                state["model"](torch.zeros(1, 8, dtype=torch.long))
        name = f"{layout}-{world}"
        save(storage, name, state, rank, world, 16 * world + number)
        expected = gathered(state)
        train(state, [7])
        after = gathered(state)
        if rank == 0:
            torch.save((expected, after), Path(storage.local_root) / f"{name}.pt")
        dist.barrier()


def load_all(storage, layouts, rank, world):
    for reference in sorted(Path(storage.local_root).glob("*.pt")):
        expected, after = torch.load(reference)
        for layout in layouts:
            for meta in (False, True) if layout != "tp" else (False,):
                state = build(layout, world, seed=50 + rank, meta=meta)
                loaded = load_state(storage.child(reference.stem), state, rank=rank)
                where = f"{reference.stem} -> {layout}-{world}{' (meta)' * meta}"
                assert (loaded.not_restored, loaded.state["n"]) == ([], 3), (where, loaded.not_restored)
                assert_equal(gathered(state), expected, where)
                if reference.stem == f"{layout}-{world}":
                    train(state, [7])
                    assert_equal(gathered(state), after, f"{where}, trained on")
        whole = load_state(storage.child(reference.stem)).state
        found = {f"model/{name}": value for name, value in whole["model"].items()}
        for name, kept in whole["optimizer"]["state"].items():
            found |= {f"optimizer/{name.removeprefix('model/')}/{key}": value for key, value in kept.items()}
        assert_equal(found, expected, f"{reference.stem} -> nothing")


def launch(directory, world, save="", load="", *, script=__file__):
    """Run one world of processes; raises with what they printed if one fails."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, str(script), str(world), str(directory), place, save, load]
        output = [open(f"{place}/out-{rank}", "w+") for rank in range(world)]  # noqa: SIM115
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=file, stderr=subprocess.STDOUT)
            for rank, file in enumerate(output)
        ]
        try:
            codes = [rank.wait(240) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
            text = []
            for number, file in enumerate(output):
                file.seek(0)
                text.append(f"rank {number}: {file.read()[-3000:]}")
                file.close()
        assert codes == [0] * world, "\n".join(text)


def main():
    world, directory, place, to_save, to_load, rank = sys.argv[1:]
    world, rank = int(world), int(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=world)
    storage = LocalStorage(directory)
    save_all(storage, to_save.split(",") if to_save else [], rank, world)
    load_all(storage, to_load.split(",") if to_load else [], rank, world)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
