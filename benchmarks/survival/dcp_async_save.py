"""torch.distributed.checkpoint.async_save, as in PyTorch's recipe "Asynchronous Saving with Distributed Checkpoint"."""

import torch
import torch.distributed.checkpoint as dcp
from _dcp import AppState, newest
from _training import EVERY, STEPS, Net, train_step

model = Net()
optimizer = torch.optim.AdamW(model.parameters())
app = AppState(model, optimizer)
found = newest("checkpoints")
if found is not None:
    dcp.load({"app": app}, checkpoint_id=found)
pending = None
while app.step < STEPS:
    train_step(model, optimizer, app.step)
    app.step += 1
    if app.step % EVERY == 0:
        if pending is not None:
            pending.result()
        pending = dcp.async_save({"app": app}, checkpoint_id=f"checkpoints/step-{app.step}")
if pending is not None:
    pending.result()
