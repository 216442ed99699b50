"""The state of PyTorch's recipes for distributed checkpoints, and the newest directory as torchtitan looks for it."""

import os
import re

from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


class AppState(Stateful):
    """Model, optimizer and step."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self):
        """Return what is saved."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state):
        """Take what was loaded."""
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )  # fmt: skip
        self.step = state["step"]


def newest(folder):
    """Return the directory of the highest step that has its metadata, None if there is none."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    steps = [int(name[5:]) for name in names if re.fullmatch(r"step-\d+", name)]
    whole = [step for step in steps if os.path.isfile(f"{folder}/step-{step}/.metadata")]
    return f"{folder}/step-{max(whole)}" if whole else None
