"""Lightning: `HoldfastCallback`, which makes a resume under its own trainer as exact as it can be."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.utils import prune
from torch.utils.data import DataLoader, IterableDataset

from holdfast._log import get_logger
from holdfast._optional import Grafted
from holdfast.checkpointer.console import ResumeBlock
from holdfast.state.data import stated
from holdfast.state.data.batches import ResumableBatches, with_ranks_apart
from holdfast.state.data.loaders import keeps_state
from holdfast.state.data.seeding import generators_kept
from holdfast.state.gradient_order import INEXACT, fix_gradient_order, parallel_modules
from holdfast.state.tree import rng
from holdfast.trainers.torch_helpers import PreparedLoader

from .lightning_plugins import HoldfastCheckpointIO

_LOG = get_logger("frameworks")
_PACKAGES = ("lightning.", "pytorch_lightning.")
_SHARDED = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")
_STOPS = "EarlyStopping"
_FINDERS = ("LearningRateFinder", "BatchSizeFinder")


class HoldfastCallback(Grafted):
    """Makes a resumed ``Trainer.fit(..., ckpt_path=...)`` exact, as far as Lightning allows, and says what is not.

    Saved with every checkpoint and restored: the random generators of all ranks, the order of the data and the position
    within the epoch (of each training `DataLoader` over a map-style data set; loaders with ``state_dict`` are left to
    Lightning). An evaluation leaves the generators of training as they were, and DDP adds gradients in one order from
    the first step on (docs/parallel.md). At the start a block on stderr says what was restored and what was not. A
    `ModelCheckpoint` without a ``dirpath`` goes on in the folder it had, where Lightning would begin ``version_1``:
    else nobody removes what it has left in ``version_0``. Works with any plugin for checkpoints, and is meant to go
    with `HoldfastCheckpointIO`.

    Args:
        seed_samples: make random augmentation in ``__getitem__`` a function of (seed, epoch, index).
    """

    BASES = ("lightning.pytorch:Callback", "pytorch_lightning:Callback")
    EXTRA = "lightning"
    KEY = "holdfast"

    def __init__(self, *, seed_samples: bool = True) -> None:
        super().__init__()
        self._seed_samples = seed_samples
        self._found: Mapping[str, Any] | None = None
        self._generators: Mapping[str, Any] | None = None  # to be restored once more, when training begins
        self._before: Mapping[str, Any] | None = None  # generators after the last batch
        self._at_end: Mapping[str, Any] | None = None
        self._first_fetch = contextlib.ExitStack()  # while the first batch after a resume is fetched
        self._ended: list[Any] = []  # states of the loaders that Lightning knows, at the end of an epoch
        self._ahead: list[list[Any]] = []  # their states behind the batch in training, if one more is fetched
        self._evaluated = False  # since the last batch
        self._logged: tuple[int, int] | None = None  # batches trained in all, and the step that loggers have next
        self._logged_before: int | None = None  # that of the checkpoint, until a batch has begun
        self._num_made = 0  # loaders of this training so far
        self._named_no_folder: list[Any] = []
        self._block = ResumeBlock()
        self._not_restored: list[tuple[str, str]] = []
        self._ends = ""
        self._num_batches: float | None = None  # of the epoch in which the checkpoint was taken

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take over the training loaders, once Lightning has given them their samplers."""
        if trainer.precision == "64-true":
            # Lightning does it after it has restored the weights, which would be rounded to float32 on the way.
            trainer.precision_plugin.convert_module(pl_module)
        if stage != "fit":
            return
        self._found = self._generators = self._before = self._at_end = None
        self._logged = self._logged_before = None
        self._evaluated = False
        self._num_made, self._ended, self._ahead = 0, [], []
        self._block, self._not_restored = ResumeBlock(), []
        self._named_no_folder = [
            callback for callback in trainer.checkpoint_callbacks if getattr(callback, "dirpath", "") is None
        ]
        strategy = trainer.strategy
        process = type(strategy).process_dataloader.__get__(strategy)

        def process_dataloader(loader: Any) -> Any:
            loader, why_not = resumable(process(loader), trainer, seed_samples=self._seed_samples)
            if why_not is not None:
                self._not_restored.append(("position in the data", why_not))
            elif isinstance(loader, EpochLoader):
                self._follow(loader, trainer.current_epoch)
            elif getattr(loader, "num_workers", 0):
                why = f"the state of a {type(loader).__name__} does not hold them, a plain DataLoader has them seeded"
                self._not_restored.append(("random numbers that samples draw in workers", why))
            return loader

        fit_loop = trainer.fit_loop
        setup_data = type(fit_loop).setup_data.__get__(fit_loop)

        def setup_training_data() -> None:
            strategy.process_dataloader = process_dataloader  # not for long: loaders of evaluations are left alone
            try:
                setup_data()
            finally:
                vars(strategy).pop("process_dataloader", None)

        fit_loop.setup_data = setup_training_data
        loop = trainer.fit_loop.epoch_loop
        before_fetch = type(loop)._on_before_fetch.__get__(loop)

        def on_before_fetch() -> None:
            self._begin_fetch(trainer)
            before_fetch()

        loop._on_before_fetch = on_before_fetch

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give loops and callbacks their own methods back."""
        self._first_fetch.close()
        vars(trainer.fit_loop).pop("setup_data", None)
        vars(trainer.fit_loop.epoch_loop).pop("_on_before_fetch", None)
        for finder in _kinds(trainer.callbacks, *_FINDERS):
            vars(finder).pop("on_fit_start", None)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the generators of all ranks; every rank calls it."""
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        # Within a batch, which will be trained again, and after the end of training nothing drawn since then counts.
        then = self._before if batches.ready > batches.processed else self._at_end
        if self._logged is None or self._logged[0] != _num_trained(trainer)[0]:
            self._note_logged(trainer)
        checkpoint[self.KEY] = {
            "generators": generators_of_all(rng.capture() if then is None else then, trainer.world_size),
            # Lightning keeps their states too, and does not give them back after the end of an epoch.
            "loaders": [loader.state_dict() for loader in _epoch_loaders(trainer)],
            "next_logged": self._logged and self._logged[1],
            "num_batches": trainer.num_training_batches,
            "frozen": sorted(_frozen(pl_module)),
            "searched": {name: get(name) for _, name, get, _ in searched(trainer, pl_module)},
            "stopped": trainer.should_stop and any(_has_stopped(one) for one in _kinds(trainer.callbacks, _STOPS)),
            "pruned": pruned(trainer.callbacks, pl_module),
            "gathered": gathered(trainer, pl_module),
        }
        if self._ahead:
            states = self._ahead[0 if batches.ready > batches.processed else -1]
            checkpoint["loops"]["fit_loop"]["state_dict"].update({"combined_loader": states} if states else {})

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take note of what is to be restored, and let `ModelCheckpoint` go on in its folder."""
        if not trainer.training and getattr(trainer.state.fn, "value", "fit") != "fit":
            return
        if was_a_search(trainer):
            return  # a search is over, and goes back to where it began
        self._found = checkpoint.get(self.KEY, {})
        self._ends = epoch_end_of(checkpoint)
        self._logged_before = self._found.get("next_logged")
        if (frozen := self._found.get("frozen")) is not None and _kinds(trainer.callbacks, "BaseFinetuning"):
            # It has frozen all anew, and thaws at the beginning of an epoch only; DDP is not made yet.
            for name, weight in pl_module.named_parameters():
                weight.requires_grad_(name not in frozen)
        self._search_no_more(trainer, pl_module)
        if self._found.get("stopped") and _kinds(trainer.callbacks, _STOPS):
            trainer.should_stop = True
        self._ended = ended_loaders(checkpoint)
        settle_progress(checkpoint, by_steps=trainer.max_steps != -1)
        lost = list(lost_in_mid_epoch(checkpoint, trainer, pl_module))
        self._num_batches = self._found.get("num_batches") if lost else None
        self._not_restored += lost
        for callback in self._named_no_folder:
            before, now = checkpoint["callbacks"].get(callback.state_key, {}).get("dirpath"), str(callback.dirpath)
            if before and str(before) != now and only_version_differs(str(before), now):
                self._block.notes.append(f"checkpoints go on in {before}: beside {now} they would stay for ever")
                callback.dirpath = before

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the generators, let DDP add gradients in one order, and print the block; every rank calls it."""
        block = self._block
        if self._found is None:
            done = trainer.global_step and f"goes on at step {trainer.global_step} with what this process has"
            block.headline = f"{done or 'fresh start'}: fit() was given no ckpt_path"
            block.notes.extend(f"a resume will not restore {what}: {why}" for what, why in self._not_restored)
        else:
            self._not_restored += lost_at_epoch_end(self._ends, trainer, pl_module)
            if self._ends == "batch":
                # An epoch like any other begins: else it would have no on_train_epoch_start.
                trainer.fit_loop.reset_restart_stage()
                trainer.fit_loop.epoch_loop._restarting = False
            if self._num_batches not in (None, now := trainer.num_training_batches):
                why = (
                    f"it had {self._num_batches} batches, now one has {now} (another batch size, other data, another "
                    "limit?), and Lightning ends this one by that count, however many samples are left"
                )
                self._not_restored.append(("length of the epoch", why))
            block.headline = f"Lightning resumed from {trainer.ckpt_path} at {_place(trainer)}"
            self._restore_generators(trainer, self._found.get("generators"))
            if "generators" not in self._found:
                self._not_restored.append(("order of the data", "for the same reason"))
            elif not any(what == "position in the data" for what, _ in self._not_restored):
                block.restored = [*block.restored, "order of the data and position in the epoch"]
            begin_averaging(trainer, pl_module)
            self._not_restored += prune_again(self._found.get("pruned"), trainer.callbacks, pl_module)
            block.not_restored = self._not_restored
        fixed = [fix_gradient_order(model) for model in parallel_modules(trainer.strategy.model).values()]
        if not all(fixed):
            block.notes.append(INEXACT)
        if writes_itself(trainer.strategy) and isinstance(trainer.strategy.checkpoint_io, HoldfastCheckpointIO):
            block.notes.append(
                f"{type(trainer.strategy).__name__} saves by itself: HoldfastCheckpointIO is not used and its latest() "
                "finds nothing of this, ckpt_path='last' does"
            )
        if trainer.is_global_zero:
            block.show()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Do what Lightning does at the end of training only, if there was nothing left to train, and say that."""
        if self._found is None or self._block.headline:
            return
        progress = trainer.fit_loop.epoch_progress.current
        progress.completed = progress.processed
        self._block.headline = (
            f"{trainer.ckpt_path} is the end of a training, at {_place(trainer)}: no batch is trained, and no hook of "
            "training is called"
        )
        self._restore_generators(trainer, self._found.get("generators"))
        self._generators, self._block.not_restored = None, self._not_restored
        for callback in _kinds(trainer.callbacks, "WeightAveraging", "StochasticWeightAveraging"):
            if not getattr(callback, "_model_contains_batch_norm", False):  # else an epoch more has done it
                callback.on_train_end(trainer, pl_module)
        if self._found.get("stopped"):
            self._block.notes.append("early stopping had ended it: to train on, take that callback out")
        if trainer.is_global_zero:
            self._block.show()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin with the generators of the checkpoint, whatever was drawn since, and so do its loaders."""
        ended, self._ended = self._ended, []
        known = [one for one in trainer.fit_loop._combined_loader.flattened if keeps_state(one)]
        with generators_kept():
            for number, loader in enumerate(known):
                if isinstance(loader, EpochLoader):
                    continue
                if number < len(ended):
                    stated.begin_next(loader, ended[number])
                else:
                    stated.forget_start(loader)  # Lightning draws no end of an epoch, so some go on from a resume again
        is_resumed = self._generators is not None
        self._begin()
        if is_resumed and not all(isinstance(one, EpochLoader) for one in trainer.fit_loop._combined_loader.flattened):
            iter(trainer.fit_loop._data_fetcher)  # Lightning has made it before the generators were restored

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Do the same where an evaluation comes first."""
        self._begin()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Do the same where a batch comes first, and what Lightning does at the beginning of an epoch only."""
        self._first_fetch.close()
        self._begin()
        if self._found is not None and self._logged is None:
            missing = sorted(_frozen(pl_module).difference(self._found.get("frozen", _frozen(pl_module))))
            if missing and trainer.is_global_zero:
                _LOG.warning(
                    "%d parameter(s) are frozen now and were trained when the checkpoint was saved (%s, ...): what "
                    "thaws them in the course of training has to do so at the start of a resume too",
                    len(missing), missing[0],
                )  # fmt: skip
            for callback in _kinds(trainer.callbacks, "GradientAccumulationScheduler"):
                trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)
        if self._logged_before is not None:
            trainer.fit_loop.epoch_loop._batches_that_stepped, self._logged_before = self._logged_before, None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Remember the generators: Lightning leaves out an evaluation if it resumes right before it."""
        self._before = rng.capture()
        self._note_logged(trainer)
        for loader in _epoch_loaders(trainer):
            loader.trained()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Put the generators back to where training was, so that an evaluation does not move them."""
        self._evaluated = not trainer.sanity_checking and self._before is not None
        if self._evaluated:
            rng.restore(self._before or {})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Do the same after the module's own end of an evaluation, and let `ReduceLROnPlateau` make its step.

        Lightning leaves that out in the whole first epoch of a resume, since it does not save metrics.
        """
        self._begin()
        if not trainer.fit_loop.restarting or self._logged is None:
            return
        by = {config.monitor for config in trainer.lr_scheduler_configs if _by_epoch(config)}
        if missing := sorted(by - trainer.callback_metrics.keys()):
            if trainer.is_global_zero:
                _LOG.warning("no step of ReduceLROnPlateau after this epoch: no value of %s yet", ", ".join(missing))
        elif by:
            trainer.fit_loop._restarting = False

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Remember the generators, for what ``trainer.save_checkpoint`` saves from now on."""
        self._at_end = rng.capture()

    def _restore_generators(self, trainer: Any, saved: Any) -> None:
        self._block.restored = ["weights, optimizers, schedulers, callbacks and loops (by Lightning)"]
        if saved is None:
            self._not_restored.append(("random generators", "the checkpoint was saved without HoldfastCallback"))
        elif len(saved) != trainer.world_size:
            why = f"the checkpoint has those of {len(saved)} rank(s), there are {trainer.world_size}"
            self._not_restored.append(("random generators", why))
        else:
            self._generators = saved[trainer.global_rank]
            self._not_restored += [("random generators", problem) for problem in rng.restore(self._generators)]
            self._block.restored.append("random generators")

    def _search_no_more(self, trainer: Any, pl_module: Any) -> None:
        """Take what a finder had found, and search no more: Lightning forgets to resume after a search."""
        had = (self._found or {}).get("searched", {})
        for finder in _kinds(trainer.callbacks, *_FINDERS):
            finder.on_fit_start = _do_nothing
        for finder, name, _, put in searched(trainer, pl_module):
            if name in had:
                put(name, had[name])
                self._block.notes.append(f"{type(finder).__name__} does not search again: {name} is {had[name]!r}")
            else:
                why = f"no {type(finder).__name__} had found one when the checkpoint was saved, and none searches now"
                self._not_restored.append((name, why))

    def _follow(self, loader: EpochLoader, epoch: int) -> None:
        """Let a loader that Lightning has just made begin where it has to."""
        saved = (self._found or {}).get("loaders", ())
        if self._generators is None and self._before is None and self._num_made < len(saved):
            loader.load_state_dict(saved[self._num_made])
        else:
            loader.set_epoch(epoch)  # reload_dataloaders_every_n_epochs
        self._num_made += 1

    def _note_logged(self, trainer: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        self._logged = _num_trained(trainer)[0], loop._batches_that_stepped + (not loop._should_accumulate())

    def _begin_fetch(self, trainer: Any) -> None:
        """Begin before a batch is fetched: samples that are loaded in this process may draw."""
        if self._generators is not None:
            for loader in trainer.fit_loop._combined_loader.flattened:
                if not isinstance(loader, EpochLoader):
                    self._first_fetch.enter_context(stated.beginning(loader, seed=torch.initial_seed()))
        self._begin()
        if trainer.fit_loop._data_fetcher.length is None:  # then it fetches a batch more, to know which is the last one
            with generators_kept():
                states = trainer.fit_loop._combined_loader._state_dicts()
            self._ahead = [*self._ahead[-1:], states]

    def _begin(self) -> None:
        if self._generators is not None:
            rng.restore(self._generators)
            self._before = self._generators
        elif self._evaluated:
            rng.restore(self._before or {})
        self._generators, self._evaluated = None, False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a loader was at some moment.

    Attributes:
        num_trained: batches that the trainer had trained.
        batches: the iteration that it was in; None: in none.
        at: samples and batches that this had given.
        state: of the loader, in no iteration.
        is_over: the epoch of the trainer was over.
    """

    num_trained: int
    batches: ResumableBatches | None
    at: tuple[int, int] | None
    state: Mapping[str, Any]
    is_over: bool


class EpochLoader(PreparedLoader):
    """A loader for a trainer that leaves an epoch without asking for the batch after the last one.

    Its state is the position after the last trained batch: one that was given and not trained does not count, nor does
    it that the trainer has dropped the iteration since.

    Args:
        loader: the loader inside.
        length: returns how many batches an epoch of the trainer has.
        num_trained: returns how many batches the trainer has trained, in all and in its epoch.
        **options: as in `PreparedLoader`.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        length: Callable[[], float],
        num_trained: Callable[[], tuple[int, int]],
        **options: Any,
    ) -> None:
        super().__init__(loader, **options)
        self._length, self._num_trained = length, num_trained
        self._place: _Place | None = None  # after the last trained batch
        self._is_spent = False  # the next iteration gives nothing: the trainer has had all before its epoch is over

    def __iter__(self) -> Iterator[Any]:
        if self._is_spent:
            self._is_spent = False
        else:
            yield from super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        """Decide which epoch the next iteration is."""
        super().set_epoch(epoch)
        self._place = self._here(is_spent=False, is_over=False)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` described."""
        super().load_state_dict(state)
        self._is_spent = bool(state.get("is_spent"))
        self._place = self._here(is_spent=self._is_spent, is_over=False)

    def state_dict(self) -> dict[str, Any]:
        """Describe the position; after the last batch of the trainer's epoch it is the beginning of the next epoch."""
        place = self._place
        if place is None or place.num_trained != self._num_trained()[0]:
            place = self._here(is_spent=self._over)  # trained, and not said yet
        if place.batches is None:
            return dict(place.state)
        position: Mapping[str, Any] = place.batches.state_dict(at=place.at, is_over=place.is_over)
        if self._options["world_size"] > 1:
            position = with_ranks_apart(position)
        return {"epoch": place.batches.epoch + place.is_over, "seed": self._seed, "position": position}

    def trained(self) -> None:
        """Take note that all it has given is trained."""
        self._is_first = False  # it was no look
        self._place = self._here(is_spent=self._over)

    def _wanted(self) -> int | None:
        return self._chosen  # not what the trainer tells the sampler: it counts its own epochs, not these iterations

    def _here(self, *, is_spent: bool, is_over: bool | None = None) -> _Place:
        total, of_epoch = self._num_trained()
        is_over = of_epoch >= self._length() if is_over is None else is_over
        batches = None if self._over else self._batches
        state = {} if batches is not None else super().state_dict()
        if is_spent and not is_over:
            state["is_spent"] = True
        at = None if batches is None else (batches.samples, batches.batches)
        return _Place(num_trained=total, batches=batches, at=at, state=state, is_over=is_over)

    def _was_a_look(self, batches: ResumableBatches) -> bool:
        return super()._was_a_look(batches) and batches.batches < self._length()  # else the last batch of the epoch


def resumable(loader: Any, trainer: Any, *, seed_samples: bool) -> Any:
    """Return a training loader whose position can be saved, and the text of what stands against it.

    Returns:
        (loader, None), or the loader as it is and why it cannot be resumed within an epoch.
    """
    if keeps_state(loader):
        return loader, None
    name = type(loader).__name__
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        why_not = "an epoch that is resumed begins anew, in another order if it is random"
        return loader, f"{name} over an iterable has no state_dict: {why_not}"
    seed = getattr(loader.sampler, "seed", None)
    if not isinstance(seed, int):
        seed = torch.initial_seed() % (1 << 62) if trainer.world_size == 1 else 0
    made = EpochLoader(
        loader, length=lambda: float(trainer.num_training_batches), num_trained=lambda: _num_trained(trainer),
        seed=seed, seed_samples=seed_samples, rank=trainer.global_rank, world_size=trainer.world_size,
    )  # fmt: skip
    return made, None


def _num_trained(trainer: Any) -> tuple[int, int]:
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return progress.total.processed, progress.current.processed


def generators_of_all(own: Mapping[str, Any], world_size: int) -> list[Any]:
    """Gather the generators of all ranks, in order; every rank calls it, and only rank 0's dictionary is stored."""
    if world_size == 1 or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [own]
    found: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(found, own)
    return found


def ended_loaders(checkpoint: Mapping[str, Any]) -> list[Any]:
    """Take the states of loaders that are at the end of an epoch out of a checkpoint; [] within an epoch.

    Lightning gives them back where the last batch of an epoch was the last thing, and they are at an end for the whole
    next epoch; after the end of an epoch it does not give them back.
    """
    loops = checkpoint.get("loops", {}).get("fit_loop", {})
    batches = loops.get("epoch_loop.batch_progress")
    if not batches or not batches["is_last_batch"]:
        return []
    return list(loops.get("state_dict", {}).pop("combined_loader", []))


def settle_progress(checkpoint: Mapping[str, Any], *, by_steps: bool) -> None:
    """Let Lightning go on with the rest of an epoch, or with the whole next one, where its own counts say otherwise.

    It counts an epoch that it has left because training stops as a whole one; with ``max_steps`` it takes the first
    batch after a whole epoch for an epoch.

    Args:
        checkpoint: as it was loaded; is changed.
        by_steps: the training that begins has ``max_steps``.
    """
    loops = checkpoint.get("loops", {}).get("fit_loop", {})
    epochs, batches = loops.get("epoch_progress"), loops.get("epoch_loop.batch_progress")
    if not epochs or not batches or not batches["current"]["ready"]:
        return
    now, total = epochs["current"], epochs["total"]
    if now["processed"] != now["started"]:
        return
    if not batches["is_last_batch"]:
        num_whole = {"processed": now["started"] - 1, "completed": now["started"] - 1}
    elif by_steps:
        num_whole = {"completed": now["started"]}
        batches["current"] = dict.fromkeys(batches["current"], 0)
        batches["is_last_batch"] = False
    else:
        return
    for name, count in num_whole.items():
        total[name] += count - now[name]
        now[name] = count


def lost_in_mid_epoch(checkpoint: Mapping[str, Any], trainer: Any, module: Any) -> Iterator[tuple[str, str]]:
    """Yield (what, why) of all that Lightning loses where a checkpoint was not taken at the end of an epoch."""
    batches = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    ready = batches.get("current", {}).get("ready", 0)
    if not ready or batches.get("is_last_batch"):
        return
    names = checkpoint.get(HoldfastCallback.KEY, {}).get("gathered")
    if names != []:
        yield (
            f"averages over the epoch of {', '.join(names)}" if names else "averages over the epoch",
            "Lightning does not save what self.log(..., on_epoch=True) and metric objects have gathered: in this epoch "
            "they are those of the batches from here on",
        )
    epoch = checkpoint["loops"]["fit_loop"].get("epoch_progress", {}).get("current", {}).get("processed", 0)
    schedulers = _kinds(trainer.callbacks, "GradientAccumulationScheduler")
    of_step = schedulers[0].get_accumulate_grad_batches(epoch) if schedulers else trainer.accumulate_grad_batches
    if ready % of_step:
        yield (
            "gradients that were gathered",
            f"the checkpoint was taken after {ready % of_step} of {of_step} batches of a step: save at multiples of "
            "accumulate_grad_batches",
        )
    if own := [type(one).__name__ for one in (module, *trainer.callbacks) if _starts_epochs(one)]:
        yield (
            f"on_train_epoch_start of {', '.join(own)}",
            "Lightning does not call this hook where it resumes within an epoch: what it sets has to be in the "
            "checkpoint, or set in on_train_start too",
        )
    for averaging in _kinds(trainer.callbacks, "StochasticWeightAveraging"):
        if trainer.max_epochs != -1 and epoch >= trainer.max_epochs:
            yield (
                type(averaging).__name__,
                "the checkpoint was taken within the last epoch, which measures for batch norm: take an earlier one",
            )
    if _overrides(module, "on_train_batch_end"):
        yield (
            "on_train_batch_end of the module",
            "Lightning takes a checkpoint within an epoch before it calls this hook: what it did after the last batch "
            "is not in it",
        )


def epoch_end_of(checkpoint: Mapping[str, Any]) -> str:
    """Tell where at the end of an epoch a checkpoint was taken: after its last "batch", at its end ("epoch"), or ""."""
    loops = checkpoint.get("loops", {}).get("fit_loop", {})
    epochs, batches = loops.get("epoch_progress"), loops.get("epoch_loop.batch_progress")
    if not epochs or not batches or not batches["current"]["ready"] or not batches["is_last_batch"]:
        return ""
    if epochs["current"]["completed"] == epochs["current"]["started"]:
        return ""  # all is done
    return "epoch" if batches["current"]["completed"] == batches["current"]["processed"] else "batch"


def lost_at_epoch_end(ends: str, trainer: Any, module: Any) -> Iterator[tuple[str, str]]:
    """Yield (what, why) of what Lightning leaves out when it resumes where an epoch ends.

    Args:
        ends: what `epoch_end_of` has told of the checkpoint.
        trainer: with its optimizers.
        module: that it trains.
    """
    configs = trainer.lr_scheduler_configs
    if ends and any(_by_epoch(config) for config in configs):
        yield (
            "the last step of ReduceLROnPlateau",
            "Lightning makes it after the checkpoint of an epoch, and leaves it out when it resumes from that; save "
            "within an epoch for all steps",
        )
    left_out = [
        f"{name} of the module" for name in ("on_train_batch_end", "on_train_epoch_end") if _overrides(module, name)
    ]
    left_out += [f"on_train_epoch_end of {type(one).__name__}" for one in trainer.callbacks if _ends_epochs(one)]
    left_out += ["the evaluation"] if trainer.enable_validation else []
    if ends == "batch" and left_out:
        yield (
            "the end of the epoch",
            "the checkpoint was taken after the last batch, and Lightning resumes with the next epoch, without "
            f"{', '.join(left_out)}: save at the end of an epoch, or by a number of steps that no epoch ends with",
        )


def gathered(trainer: Any, module: Any) -> list[str]:
    """Name what a training epoch has gathered so far: logged averages, and metric objects of the module."""
    results = trainer.fit_loop.epoch_loop._results.values()
    metrics = (path for path, one in module.named_modules() if getattr(one, "_update_count", 0))
    return sorted({result.meta.name for result in results if result.meta.on_epoch}.union(metrics))


def begin_averaging(trainer: Any, module: Any) -> None:
    """Let `StochasticWeightAveraging` go on: Lightning does it in the next epoch only, at another learning rate."""
    for averaging in _kinds(trainer.callbacks, "StochasticWeightAveraging"):
        if averaging._scheduler_state is None or trainer.current_epoch > averaging.swa_end:
            continue
        (optimizer,) = trainer.optimizers
        before = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        averaging.on_train_epoch_start(trainer, module)
        for group, values in zip(optimizer.param_groups, before, strict=True):
            group.update(values)  # to make its scheduler is a step of it


def pruned(callbacks: Iterable[Any], module: Any) -> dict[str, Any]:
    """Return what `ModelPruning` has in a module and leaves out of a checkpoint; {} if there is none.

    Returns:
        "weights": {name: (values without the mask, mask)}; "first": what each of the lottery's weights was at first.
    """
    if not (found := _kinds(callbacks, "ModelPruning")):
        return {}
    weights = {
        f"{path}.{hook._tensor_name}": tuple(
            getattr(layer, f"{hook._tensor_name}_{end}").detach() for end in ("orig", "mask")
        )
        for path, layer in module.named_modules()
        for hook in layer._forward_pre_hooks.values()
        if isinstance(hook, prune.BasePruningMethod)
    }
    # Where it was pruned on the CPU, Lightning lets the weight and what it was at first share their memory.
    first = [
        [None if now.data_ptr() == was.data_ptr() else was.detach() for now, was in _tickets(one)] for one in found
    ]
    return {"weights": weights, "first": first}


def prune_again(saved: Any, callbacks: Iterable[Any], module: Any) -> Iterator[tuple[str, str]]:
    """Put back what `pruned` has returned, once there are optimizers; yields (what, why) of what cannot be."""
    found = _kinds(callbacks, "ModelPruning")
    if found and not saved:
        yield "masks of ModelPruning", "the checkpoint has none: what was pruned grows again until the next pruning"
    if not found or not saved:
        return
    with torch.no_grad():
        for name, (values, mask) in saved["weights"].items():
            path, _, own = name.rpartition(".")
            try:
                layer = module.get_submodule(path)
                weight = getattr(layer, own)
            except AttributeError:
                yield f"mask of {name}", "the model has no such weight"
                continue
            weight.copy_(values)
            prune.custom_from_mask(layer, own, mask.to(weight.device))  # type: ignore[no-untyped-call]
        for one, first in zip(found, saved["first"], strict=False):
            for (now, was), value in zip(_tickets(one), first, strict=False):
                was.data = now.data if value is None else value.to(was.device)


def _tickets(pruning: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each weight of a lottery and a copy of what it was at first, in one order."""
    for layer in (pruning._original_layers or {}).values():
        for number, name in layer["names"]:
            module = pruning._parameters_to_prune[number][0]
            yield getattr(module, f"{name}_orig", getattr(module, name)), getattr(layer["data"], name)


def writes_itself(strategy: Any) -> bool:
    """Tell whether a strategy saves shards, or without the plugin for checkpoints."""
    return any(kind.__name__ in _SHARDED for kind in type(strategy).__mro__)


def was_a_search(trainer: Any) -> bool:
    """Tell whether a finder has made the checkpoint that a trainer has restored last."""
    return os.path.basename(str(trainer.ckpt_path)).startswith((".lr_find_", ".scale_batch_size_"))


def searched(trainer: Any, module: Any) -> Iterator[tuple[Any, str, Callable[[str], Any], Callable[[str, Any], None]]]:
    """Yield each finder of a learning rate or batch size, the name of what it sets, and how to get and set that."""
    for finder in _kinds(trainer.callbacks, *_FINDERS):
        base = next(cls for cls in type(finder).__mro__ if cls.__name__ in _FINDERS)
        of = importlib.import_module(f"{base.__module__.partition('.callbacks')[0]}.utilities.parsing")
        names = [finder._batch_arg_name] if base.__name__ == "BatchSizeFinder" else []
        if base.__name__ == "LearningRateFinder" and finder._update_attr:
            names = [finder._attr_name] if finder._attr_name else ["lr", "learning_rate"]
        for name in names:
            if of.lightning_hasattr(module, name):
                yield finder, name, partial(of.lightning_getattr, module), partial(of.lightning_setattr, module)


def _place(trainer: Any) -> str:
    return f"step {trainer.global_step}, epoch {trainer.current_epoch}"


def _has_stopped(early_stopping: Any) -> bool:
    return getattr(early_stopping, "stopping_reason_message", None) is not None


def _do_nothing(*arguments: Any) -> None:
    pass


def _epoch_loaders(trainer: Any) -> list[EpochLoader]:
    """Return the loaders of this kind that are in use; a search, or a new epoch, makes others."""
    loaders = trainer.fit_loop._combined_loader
    return [] if loaders is None else [one for one in loaders.flattened if isinstance(one, EpochLoader)]


def _kinds(callbacks: Iterable[Any], *names: str) -> list[Any]:
    """Return the callbacks of some classes of Lightning, under whichever name of the package."""
    return [
        one
        for one in callbacks
        if any(cls.__name__ in names and cls.__module__.startswith(_PACKAGES) for cls in type(one).__mro__)
    ]


def _frozen(module: Any) -> set[str]:
    return {name for name, weight in module.named_parameters() if not weight.requires_grad}


def _by_epoch(config: Any) -> bool:
    """Tell whether a scheduler goes by a metric at the end of an epoch."""
    return bool(config.reduce_on_plateau and config.interval == "epoch")


def _starts_epochs(one: Any) -> bool:
    """Tell whether a module or callback has an ``on_train_epoch_start`` of the user's."""
    owner = next((cls for cls in type(one).__mro__ if "on_train_epoch_start" in vars(cls)), None)
    return owner is not None and not owner.__module__.startswith((*_PACKAGES, "holdfast."))


def _ends_epochs(callback: Any) -> bool:
    """Tell whether the end of an epoch is more to a callback than to show or to save something."""
    owner = next((cls for cls in type(callback).__mro__ if "on_train_epoch_end" in vars(cls)), object)
    return (
        owner.__name__ not in ("object", "Callback", "HoldfastCallback", "ModelCheckpoint", "StochasticWeightAveraging")
        and "Progress" not in owner.__name__
    )


def _overrides(module: Any, name: str) -> bool:
    base = next((cls for cls in type(module).__mro__ if cls.__name__ == "LightningModule"), type(module))
    return getattr(type(module), name) is not getattr(base, name)


def only_version_differs(before: str, now: str) -> bool:
    """Tell whether two directories are the same but for a folder ``version_N``, which Lightning counts up by itself."""
    if "://" in before or "://" in now:
        left, right = before.split("/"), now.split("/")
    else:
        left, right = (os.path.abspath(path).split(os.sep) for path in (before, now))
    if len(left) != len(right):
        return False
    differing = [(a, b) for a, b in zip(left, right, strict=True) if a != b]
    return len(differing) == 1 and all(part.startswith("version_") for part in differing[0])
