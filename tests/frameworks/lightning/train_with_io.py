"""A training that is killed: `train_with_io.py TREE ROOT EPOCH` dies by SIGKILL when that epoch begins."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path

from tiny import keeper, make_model, make_trainer

from holdfast.lightning import HoldfastCheckpointIO

tree, root, epoch = sys.argv[1:]
pl = importlib.import_module(tree)


class Kill(pl.Callback):  # type: ignore[misc, name-defined]
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == int(epoch):
            os.kill(os.getpid(), signal.SIGKILL)


io = HoldfastCheckpointIO(root)
trainer = make_trainer(tree, Path.cwd(), plugins=io, callbacks=[Kill(), keeper(tree, Path.cwd() / "unused")])
trainer.fit(make_model(tree), ckpt_path=io.latest())
