"""Holdfast's Checkpointer, as in its README."""

import torch
from _training import EVERY, STEPS, Net, train_step

import holdfast

model = Net()
optimizer = torch.optim.AdamW(model.parameters())
with holdfast.Checkpointer("run", {"model": model, "optimizer": optimizer}, every=EVERY) as ck:
    while ck.global_step < STEPS:
        ck.step(loss=train_step(model, optimizer, ck.global_step))
