"""What `HoldfastCallback` adds to Lightning, in parts that need no Lightning."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader, IterableDataset

from holdfast.frameworks.lightning_callback import (
    EpochLoader,
    epoch_end_of,
    lost_at_epoch_end,
    lost_in_mid_epoch,
    only_version_differs,
    resumable,
)


class Trainer:
    """Trains so many batches in an epoch, and leaves it without asking for one more."""

    def __init__(self, length=6):
        self.length, self.total, self.current = length, 0, 0

    def loader(self, seed=3):
        loader = DataLoader(range(12), batch_size=2, shuffle=True)
        return EpochLoader(
            loader, length=lambda: float(self.length), num_trained=lambda: (self.total, self.current), seed=seed
        )

    def train(self, loader, batches, count=None):
        found = []
        for batch in islice(batches, count):
            self.total, self.current = self.total + 1, self.current + 1
            loader.trained()
            found.append(batch.tolist())
        return found

    def resumed(self, state):
        again = Trainer(self.length)
        again.total, again.current = self.total, self.current % self.length
        loader = again.loader(seed=99)
        loader.load_state_dict(state)
        return again, loader


@pytest.mark.parametrize("length", [6, 4])
def test_the_last_batch_ends_an_epoch(length):
    """A trainer stops after so many batches without asking for one more: what is saved then begins the next epoch."""
    trainer = Trainer(length)
    loader = trainer.loader()
    epochs = []
    for _ in range(3):
        trainer.current = 0
        drawn = iter(loader)
        epochs.append(trainer.train(loader, drawn, length))
        end = loader.state_dict()
        del drawn
    assert end["epoch"] == 3
    again, other = trainer.resumed(end)
    trainer.current = 0
    assert again.train(other, iter(other), length) == trainer.train(loader, iter(loader), length)
    trainer = Trainer(length)
    middle = trainer.loader()
    first = trainer.train(middle, iter(middle), 2)
    again, resumed = trainer.resumed(middle.state_dict())
    assert first + again.train(resumed, iter(resumed), length - 2) == epochs[0]


def test_a_batch_that_is_not_trained_does_not_count():
    """It was given, and an exception came; or the trainer has ended, and its iteration is dropped."""
    trainer = Trainer()
    loader = trainer.loader()
    whole = trainer.train(loader, iter(loader))
    for taken, begun in ((3, 0), (3, 1), (0, 1)):
        trainer = Trainer()
        loader = trainer.loader()
        loader.set_epoch(0)
        drawn = iter(loader)
        trainer.train(loader, drawn, taken)
        for _ in range(begun):
            next(drawn)
        state = loader.state_dict()
        del drawn
        assert loader.state_dict() == state
        again, resumed = trainer.resumed(state)
        drawn = iter(resumed)
        next(drawn)  # an exception comes again, before anything is trained
        again, resumed = again.resumed(resumed.state_dict())
        assert again.train(resumed, iter(resumed)) == whole[taken:]


def test_a_loader_that_has_given_all_before_the_end_of_an_epoch():
    """`CombinedLoader(mode="max_size")`: it gives nothing more until the next epoch, also after a resume."""
    trainer = Trainer(length=8)
    loader = trainer.loader()
    trainer.train(loader, iter(loader))
    trainer.total = trainer.current = 7  # a batch of a longer loader alone
    loader.trained()
    again, resumed = trainer.resumed(loader.state_dict())
    assert again.train(resumed, iter(resumed)) == []
    again.total = again.current = 8
    resumed.trained()
    assert resumed.state_dict()["epoch"] == 1
    assert again.train(resumed, iter(resumed), 2) == trainer.train(loader, iter(loader), 2)


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
    """Averages, gathered gradients, hooks of the user's own; nothing at the end of an epoch."""

    class LightningModule:
        def on_train_batch_end(self):
            pass

    class Own(LightningModule):
        def on_train_batch_end(self):
            pass

    class GradientAccumulationScheduler:
        def get_accumulate_grad_batches(self, epoch):
            return {0: 1, 2: 3}[epoch]

        def on_train_epoch_start(self):
            pass

    GradientAccumulationScheduler.__module__ = "lightning.pytorch.callbacks.gradient_accumulation_scheduler"

    class Warms(LightningModule):
        def on_train_epoch_start(self):
            pass

    def lost(module, ready, is_last, epoch=0, callbacks=()):
        progress = {"current": {"ready": ready}, "is_last_batch": is_last}
        loops = {"epoch_loop.batch_progress": progress, "epoch_progress": {"current": {"processed": epoch}}}
        trainer = SimpleNamespace(accumulate_grad_batches=4, callbacks=callbacks)
        return [what for what, _ in lost_in_mid_epoch({"loops": {"fit_loop": loops}}, trainer, module)]

    assert lost(Own(), 12, True) == []
    assert lost(LightningModule(), 8, False) == ["averages over the epoch"]
    assert lost(LightningModule(), 9, False) == ["averages over the epoch", "gradients that were gathered"]
    assert lost(Own(), 8, False)[-1] == "on_train_batch_end of the module"
    assert lost(Warms(), 8, False, callbacks=[Warms()])[1:] == ["on_train_epoch_start of Warms, Warms"]
    scheduler = GradientAccumulationScheduler()
    assert lost(LightningModule(), 9, False, epoch=2, callbacks=[scheduler]) == ["averages over the epoch"]
    assert lost(LightningModule(), 8, False, epoch=2, callbacks=[scheduler])[1:] == ["gradients that were gathered"]


def test_what_lightning_leaves_out_at_the_end_of_an_epoch():
    """The step of a plateau scheduler; after the last batch the hooks and the evaluation; nothing once all is done."""

    class LightningModule:
        def on_train_batch_end(self):
            pass

        def on_train_epoch_end(self):
            pass

    class Own(LightningModule):
        def on_train_epoch_end(self):
            pass

    def lost(module, *, completed, epochs=0, is_last=True, plateau=False, evaluated=False, callbacks=()):
        batches = {"current": {"ready": 8, "processed": 8, "completed": completed}, "is_last_batch": is_last}
        epoch = {"current": {"started": 1, "completed": epochs}}
        loops = {"epoch_loop.batch_progress": batches, "epoch_progress": epoch}
        scheduler = SimpleNamespace(reduce_on_plateau=plateau, interval="epoch")
        trainer = SimpleNamespace(lr_scheduler_configs=[scheduler], enable_validation=evaluated, callbacks=callbacks)
        ends = epoch_end_of({"loops": {"fit_loop": loops}})
        return [what for what, _ in lost_at_epoch_end(ends, trainer, module)]

    class Prunes:
        def on_train_epoch_end(self):
            pass

    class ModelCheckpoint(Prunes):
        def on_train_epoch_end(self):
            pass

    assert lost(LightningModule(), completed=7) == []
    assert lost(LightningModule(), completed=7, evaluated=True) == ["the end of the epoch"]
    assert lost(Own(), completed=7, plateau=True) == ["the last step of ReduceLROnPlateau", "the end of the epoch"]
    assert lost(Own(), completed=8, plateau=True, evaluated=True) == ["the last step of ReduceLROnPlateau"]
    assert lost(Own(), completed=8, epochs=1, plateau=True) == []
    assert lost(Own(), completed=7, is_last=False, plateau=True, evaluated=True) == []
    assert lost(LightningModule(), completed=7, callbacks=[Prunes()]) == ["the end of the epoch"]
    assert lost(LightningModule(), completed=7, callbacks=[ModelCheckpoint()]) == []


def test_folders_of_versions():
    """Only the number that Lightning counts up may differ."""
    assert only_version_differs("logs/a/version_0/checkpoints", "logs/a/version_12/checkpoints")
    assert only_version_differs("s3://b/a/version_0/checkpoints", "s3://b/a/version_1/checkpoints")
    assert not only_version_differs("logs/a/version_0/checkpoints", "logs/a/version_0/checkpoints")
    assert not only_version_differs("logs/a/version_0/checkpoints", "logs/b/version_1/checkpoints")
    assert not only_version_differs("logs/a/checkpoints", "logs/a/version_1/checkpoints")
    assert not only_version_differs("logs/run1/checkpoints", "logs/run2/checkpoints")
