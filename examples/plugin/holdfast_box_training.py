"""What a training uses of this package. Beside the storage, which the process that writes imports without torch."""

from __future__ import annotations

import json
import os

import holdfast
from holdfast.trackers import Tracker


class Journal(Tracker):
    """Appends a line of JSON for each checkpoint to the file that HOLDFAST_JOURNAL names: ``on_commit="journal"``."""

    def __init__(self):
        super().__init__()
        self._path = os.environ["HOLDFAST_JOURNAL"]

    def record(self, checkpoint):
        with open(self._path, "a") as file:
            file.write(json.dumps({"step": checkpoint.step, "uri": checkpoint.uri}) + "\n")


def for_timm(state):
    """Make the files with which ``timm.create_model("local-dir:...")`` takes a checkpoint: ``model_files="timm"``.

    All weights of ``state["model"]`` go into one file, for timm reads no index.
    """
    model = state["model"]
    config = {
        "architecture": model.pretrained_cfg["architecture"],
        "num_classes": model.num_classes,
        "pretrained_cfg": model.pretrained_cfg,
    }
    weights = {f"model/{name}": name for name in model.state_dict()}
    return holdfast.ModelFiles(files={"config.json": json.dumps(config)}, named={"model.safetensors": weights})
