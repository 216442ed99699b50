"""A small training on the late device, and what its checkpoints have to hold."""

import itertools
import random
import uuid
from contextlib import contextmanager

import torch
from tearing_loops import LOOPS
from torch import nn

import holdfast as hf
from holdfast.checkpointer.pending_saves import manifest_fields
from holdfast.state.save.snapshot import Snapshotter
from holdfast.storage import LocalStorage
from holdfast.writer.messages import SaveJob


def model_of(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(128, 160), nn.BatchNorm1d(160), nn.ReLU(), nn.Linear(160, 128)).to("late")


def on_cpu(state):
    """Copy a state as a checkpoint gives it back without objects."""
    model, optimizer = state["model"], state["optimizer"]
    return {
        "model": {name: value.cpu().clone() for name, value in model.state_dict().items()},
        "optimizer": [{key: value.cpu().clone() for key, value in entry.items()} for entry in optimizer.state.values()],
    }


def read(path):
    """Load a checkpoint into a fresh model and return its state on the CPU."""
    model = model_of(0).cpu()
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    hf.load(path, {"model": model, "optimizer": optimizer}, only=["model", "optimizer"])
    return on_cpu({"model": model, "optimizer": optimizer})


@contextmanager
def as_late_as_can_be():
    """Let nothing but training make a copy happen, however long another thread waits for it."""
    torch.late.set_patience(10_000)
    try:
        yield
    finally:
        torch.late.set_patience(5)


class Training:
    """A training on the late device that saves at each boundary through a writer, as a `Checkpointer` does."""

    def __init__(self, folder, loop, seed, client):
        self.folder, self.body, self.client = folder, LOOPS[loop], client
        self.model = model_of(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.snapshotter = Snapshotter()
        self.numbers = itertools.count(1)
        self.chance = random.Random(seed)
        self.step(0)
        self.snapshotter.prepare(self.state, client)
        self.step(0)

    def step(self, when):
        """Train one step; the code of the loop runs at a moment of it."""
        batch = torch.randn(4, 128, device="late")
        runs = self.body(self.model, self.optimizer, self.chance.randrange(100))
        if when == 0:
            next(runs)
        loss = self.model(batch).square().mean()
        if when == 1:
            for _ in runs:
                pass
        self.optimizer.zero_grad()
        loss.backward()
        if when == 2:
            next(runs)
        for _ in runs:
            pass
        self.optimizer.step()

    def job(self):
        """Return the job of the next save."""
        name = f"save-{next(self.numbers)}"
        fields = manifest_fields(
            run_id=None, checkpoint_id=uuid.uuid4().hex, parent=None, attempt=1, step=1, epoch=None, metrics={}
        )
        return SaveJob(directory=name, save_id=f"abcdabcd-{name[5:]}", manifest=fields)

    def save(self, *, forget=True):
        """Save the boundary; returns what it has to hold, its future and its place.

        Args:
            forget: copy late whatever was torn before.
        """
        copies = self.snapshotter.copies
        copies.stepped()
        if forget:
            copies._torn.clear()
            copies._num_torn = 0
        wanted = on_cpu(self.state)
        job = self.job()
        return (
            wanted,
            self.snapshotter.submit(self.state, self.client, LocalStorage(self.folder), job, lazy=True),
            self.folder / job.directory,
        )

    def loaded(self, path, key):
        """Return an entry of a checkpoint without an object for it."""
        return hf.load(path, only=key)[key]

    def close(self):
        self.snapshotter.close()
