"""What all scripts of this folder train: 2.1 million weights with AdamW, a state of 25 MB, 40 steps, a save every 5.

The data of a step depend on its number alone, so whoever gets weights, optimizer state and step back goes on exactly.
"""

import torch

STEPS, EVERY = 40, 5


class Net(torch.nn.Module):
    """A small network; with labels it returns its loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512)
        )  # fmt: skip

    def forward(self, x, labels=None):
        out = self.body(x)
        return out if labels is None else {"loss": (out - labels).pow(2).mean()}


def sample(number):
    """Return one sample."""
    x = torch.randn(512, generator=torch.Generator().manual_seed(number))
    return {"x": x, "labels": x.flip(0)}


def train_step(model, optimizer, step):
    """Make one step."""
    batch = [sample(4 * step + place) for place in range(4)]
    loss = model(torch.stack([one["x"] for one in batch]), torch.stack([one["labels"] for one in batch]))["loss"]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


class Samples(torch.utils.data.Dataset):
    """The same samples as a data set, for trainers that draw their batches themselves."""

    def __len__(self):
        return 4 * STEPS

    def __getitem__(self, number):
        return sample(number)
