"""Several ranks saved by one process: each rank's state through a snapshotter of its own, then one commit."""

import itertools

import torch
from torch import nn

from holdfast.checkpointer.pending_saves import manifest_fields
from holdfast.state.load.restore import load_state
from holdfast.state.save.snapshot import Snapshotter
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import PartsJob, SaveJob

_numbers = itertools.count(1)
FIELDS = manifest_fields(run_id=None, checkpoint_id="c", parent=None, attempt=1, step=1, epoch=None, metrics={})


def save_parts(storage, directory, states, *, snapshotters=None, writers=None, **arguments):
    """Save what each rank holds, then commit the parts of ``writers`` (all)."""
    world = len(states)
    own = snapshotters or [Snapshotter(rank=rank, world_size=world) for rank in range(world)]
    save_id = f"abcd0000-{next(_numbers):x}"
    fields = {**FIELDS, "world_size": world, "checkpoint_id": save_id}
    with WriterClient.start(thread=True) as client:
        try:
            futures = [
                snapshotter.submit(
                    state,
                    client,
                    storage,
                    SaveJob(directory=directory, save_id=save_id, manifest=fields, part=True),
                    **arguments,
                )
                for state, snapshotter in zip(states, own, strict=True)
            ]
            assert all(future.result(60).manifest == b"" for future in futures)
            some = tuple(range(world)) if writers is None else tuple(writers)
            job = PartsJob(directory=directory, save_id=save_id, writers=some, manifest=fields, run=False)
            client.commit_parts(storage, job).result(60)
        finally:
            if snapshotters is None:
                for snapshotter in own:
                    snapshotter.close()


def load_rank(storage, directory, into=None, *, rank=0, **arguments):
    """Load as one rank does."""
    return load_state(storage.child(directory), into, rank=rank, **arguments)


class Tied(nn.Module):
    """A model with a tied weight, a frozen part and buffers, of uneven sizes."""

    def __init__(self, width=8, frozen=False):
        super().__init__()
        self.wte = nn.Embedding(50, width)
        self.body = nn.Sequential(nn.Linear(width, 3 * width), nn.BatchNorm1d(3 * width), nn.Linear(3 * width, width))
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.wte.weight
        if frozen:
            self.body[0].requires_grad_(False)

    def forward(self, tokens):
        return self.head(self.body(self.wte(tokens)))


def train(model, *optimizers, seed=1):
    """Take two steps, so that optimizers have state."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        tokens = torch.randint(0, 50, (16,), generator=generator)
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(tokens).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def plain_state(seed=0):
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    return {"model": model, "optimizer": optimizer, "epoch": 3, "loose": torch.randn(7)}


def frozen_state(seed=0):
    torch.manual_seed(seed)
    model = Tied(frozen=True)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    train(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def model_only(seed=0):
    torch.manual_seed(seed)
    return {"model": nn.Linear(3, 2)}


def several_optimizers(seed=0):
    torch.manual_seed(seed)
    model, critic = Tied(), nn.Sequential(nn.Linear(4, 30), nn.Linear(30, 1, bias=False))
    one = torch.optim.SGD(model.body.parameters(), lr=0.1, momentum=0.9)
    two = torch.optim.Adam(model.wte.parameters())
    three = torch.optim.LBFGS(critic.parameters())
    train(model, one, two)
    three.step(lambda: critic(torch.ones(2, 4)).square().sum().backward() or torch.tensor(1.0))
    schedule = torch.optim.lr_scheduler.StepLR(one, 1)
    return {"nets": [model, {"critic": critic}], "one": one, "two": two, "three": three, "schedule": schedule}


def odd_values(seed=0):
    torch.manual_seed(seed)
    model = nn.ModuleDict({"a b/ü": nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), "low": nn.Linear(9, 9)})
    model["low"].to(torch.bfloat16)
    model.register_parameter("phase", nn.Parameter(torch.randn(5, dtype=torch.complex64)))
    model.register_parameter("none", nn.Parameter(torch.empty(0, 4)))
    model.register_parameter("scalar", nn.Parameter(torch.tensor(2.0)))
    return {"model": model, "again": model, "weights": model.state_dict(), "view": model["low"].weight.data}
