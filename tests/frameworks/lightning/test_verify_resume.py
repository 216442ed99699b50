"""`holdfast verify-resume` of a script with the framework's own trainer and its own checkpoints: no false verdict."""

from __future__ import annotations

import sys

from holdfast.testing import assert_resumes

SCRIPT = """
import os, torch, lightning as L
from torch.utils.data import DataLoader, TensorDataset

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return (self.layer(batch[0]) - batch[1]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

L.seed_everything(0)
data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
last = "out/last.ckpt" if os.path.exists("out/last.ckpt") else None
save = L.pytorch.callbacks.ModelCheckpoint("out", save_last=True)
trainer = L.Trainer(max_epochs=4, accelerator="cpu", callbacks=[save], logger=False, enable_progress_bar=False)
trainer.fit(Model(), DataLoader(data, batch_size=4), ckpt_path=last)
"""


def test_a_trainer_that_resumes_is_exact(tmp_path):
    """Lightning's steps run forward and backward in a closure, and resume exactly where nothing is random."""
    (tmp_path / "train.py").write_text(SCRIPT)
    assert assert_resumes([sys.executable, "train.py"], cwd=tmp_path, kills=1).lives[1].began
