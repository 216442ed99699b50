"""Accelerate's save_state with automatic names, resumed by load_state() from the newest, as in its guide."""

import os

import torch
from _training import EVERY, STEPS, Net, train_step
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration


class Progress:
    """The step, as a registered object."""

    step = 0

    def state_dict(self):
        """Return the step."""
        return {"step": self.step}

    def load_state_dict(self, state):
        """Take the step."""
        self.step = state["step"]


settings = ProjectConfiguration(project_dir="out", automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=settings)
model = Net()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
progress = Progress()
accelerator.register_for_checkpointing(progress)
if os.path.isdir("out/checkpoints") and os.listdir("out/checkpoints"):
    accelerator.load_state()
    settings.iteration = progress.step // EVERY  # the number of the next name
while progress.step < STEPS:
    train_step(model, optimizer, progress.step)
    progress.step += 1
    if progress.step % EVERY == 0:
        accelerator.save_state()
