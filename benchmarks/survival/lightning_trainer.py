"""Lightning's ModelCheckpoint with every_n_train_steps and save_last, resumed by ckpt_path="last"."""

import lightning.pytorch as pl
import torch
from _training import EVERY, STEPS, Net, Samples
from lightning.pytorch.callbacks import ModelCheckpoint


class Module(pl.LightningModule):
    """The network with its optimizer."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, _):
        """Return the loss of a batch."""
        return self.net(**batch)["loss"]

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters())


saving = ModelCheckpoint(dirpath="out", every_n_train_steps=EVERY, save_top_k=-1, save_last=True)
trainer = pl.Trainer(
    max_steps=STEPS, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[saving],
)  # fmt: skip
loader = torch.utils.data.DataLoader(Samples(), batch_size=4)
trainer.fit(Module(), loader, ckpt_path="last")
