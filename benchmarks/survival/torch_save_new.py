"""torch.save to a new name each time; the newest file by its time is loaded."""

import glob
import os

import torch
from _training import EVERY, STEPS, Net, train_step

model = Net()
optimizer = torch.optim.AdamW(model.parameters())
step = 0
found = sorted(glob.glob("checkpoint-*.pt"), key=os.path.getmtime)
if found:
    saved = torch.load(found[-1])
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
while step < STEPS:
    train_step(model, optimizer, step)
    step += 1
    if step % EVERY == 0:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"checkpoint-{step}.pt"
        )  # fmt: skip
