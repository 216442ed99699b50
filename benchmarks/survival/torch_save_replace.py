"""torch.save to a temporary name, then os.replace."""

import os

import torch
from _training import EVERY, STEPS, Net, train_step

model = Net()
optimizer = torch.optim.AdamW(model.parameters())
step = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
while step < STEPS:
    train_step(model, optimizer, step)
    step += 1
    if step % EVERY == 0:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "checkpoint.pt.tmp"
        )  # fmt: skip
        os.replace("checkpoint.pt.tmp", "checkpoint.pt")
