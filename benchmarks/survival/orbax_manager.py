"""Orbax' CheckpointManager with its defaults (saves in the background), as in its API overview; the state as NumPy."""

import os

import numpy as np
import orbax.checkpoint as ocp
import torch
from _training import EVERY, STEPS, Net, train_step

model = Net()
optimizer = torch.optim.AdamW(model.parameters())
names = [name for name, _ in model.named_parameters()]


def tree():
    """Return weights, moments and steps as arrays of their own."""
    weights = dict(model.named_parameters())
    state = {name: optimizer.state[weights[name]] for name in names}
    return {
        "model": {name: weights[name].detach().numpy().copy() for name in names},
        "optimizer": {name: {key: np.array(value) for key, value in state[name].items()} for name in names},
    }


manager = ocp.CheckpointManager(os.path.abspath("out"))
step = manager.latest_step() or 0
if step:
    saved = manager.restore(step, args=ocp.args.StandardRestore())
    model.load_state_dict({name: torch.tensor(np.asarray(array)) for name, array in saved["model"].items()})
    for place, weight in enumerate(model.parameters()):
        moments = saved["optimizer"][names[place]]
        optimizer.state[weight] = {key: torch.tensor(np.asarray(array)) for key, array in moments.items()}
while step < STEPS:
    train_step(model, optimizer, step)
    step += 1
    if step % EVERY == 0:
        manager.save(step, args=ocp.args.StandardSave(tree()))
manager.wait_until_finished()
