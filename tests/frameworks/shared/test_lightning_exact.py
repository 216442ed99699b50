"""What `HoldfastCallback` adds to Lightning, in parts that need no Lightning."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader, IterableDataset

from holdfast.frameworks.lightning_callback import EpochLoader, lost_in_mid_epoch, only_version_differs, resumable


def made(length=None, seed=3):
    loader = DataLoader(range(12), batch_size=2, shuffle=True)
    return EpochLoader(loader, length=lambda: float(length or len(loader)), seed=seed)


@pytest.mark.parametrize("length", [6, 4])
def test_the_last_batch_ends_an_epoch(length):
    """A trainer stops after so many batches without asking for one more: what is saved then begins the next epoch."""
    loader = made(length)
    epochs = []
    for _ in range(3):
        drawn = iter(loader)
        epochs.append([batch.tolist() for batch in islice(drawn, length)])
        end = loader.state_dict()
        del drawn
    assert end["epoch"] == 3
    again = made(length, seed=99)
    again.load_state_dict(end)
    fourth = iter(loader)
    assert [batch.tolist() for batch in islice(iter(again), length)] == [
        batch.tolist() for batch in islice(fourth, length)
    ]
    middle = made(length)
    drawn = iter(middle)
    first = [next(drawn).tolist() for _ in range(2)]
    resumed = made(length, seed=99)
    resumed.load_state_dict(middle.state_dict())
    assert first + [batch.tolist() for batch in islice(iter(resumed), length - 2)] == epochs[0]


def test_which_loaders_can_be_resumed():
    """Map-style ones get a position, those with a state are left alone, others are named."""
    trainer = SimpleNamespace(world_size=1, global_rank=0, num_training_batches=6, overfit_batches=0)

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    class Stateful(list):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    loader, why_not = resumable(DataLoader(range(12), batch_size=2), trainer, seed_samples=True)
    assert isinstance(loader, EpochLoader)
    assert why_not is None
    own = Stateful()
    assert resumable(own, trainer, seed_samples=True) == (own, None)
    for other in (DataLoader(Stream()), [1, 2]):
        found, why_not = resumable(other, trainer, seed_samples=True)
        assert found is other
        assert "begins anew" in why_not


def test_what_lightning_loses_in_the_middle_of_an_epoch():
    """Averages, gathered gradients, the module's own hook; nothing at the end of an epoch."""

    class LightningModule:
        def on_train_batch_end(self):
            pass

    class Own(LightningModule):
        def on_train_batch_end(self):
            pass

    def lost(module, ready, is_last):
        progress = {"current": {"ready": ready}, "is_last_batch": is_last}
        checkpoint = {"loops": {"fit_loop": {"epoch_loop.batch_progress": progress}}}
        return [what for what, _ in lost_in_mid_epoch(checkpoint, SimpleNamespace(accumulate_grad_batches=4), module)]

    assert lost(Own(), 12, True) == []
    assert lost(LightningModule(), 8, False) == ["averages over the epoch"]
    assert lost(LightningModule(), 9, False) == ["averages over the epoch", "gradients that were gathered"]
    assert lost(Own(), 8, False)[-1] == "on_train_batch_end of the module"


def test_folders_of_versions():
    """Only the number that Lightning counts up may differ."""
    assert only_version_differs("logs/a/version_0/checkpoints", "logs/a/version_12/checkpoints")
    assert only_version_differs("s3://b/a/version_0/checkpoints", "s3://b/a/version_1/checkpoints")
    assert not only_version_differs("logs/a/version_0/checkpoints", "logs/a/version_0/checkpoints")
    assert not only_version_differs("logs/a/version_0/checkpoints", "logs/b/version_1/checkpoints")
    assert not only_version_differs("logs/a/checkpoints", "logs/a/version_1/checkpoints")
    assert not only_version_differs("logs/run1/checkpoints", "logs/run2/checkpoints")
