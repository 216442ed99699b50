"""What Lightning does not keep by itself: the position in the data, the folder of the checkpoints, and what is lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from holdfast.state.data.batches import ResumableBatches
from holdfast.trainers.loader import PreparedLoader

__all__ = ["EpochLoader", "generators_of_all", "lost_in_mid_epoch", "only_version_differs", "resumable"]


class EpochLoader(PreparedLoader):
    """A loader for a trainer that leaves an epoch without asking for the batch after the last one.

    Args:
        loader: the loader inside.
        length: returns how many batches an epoch has.
        **options: as in `PreparedLoader`.
    """

    def __init__(self, loader: DataLoader[Any], *, length: Callable[[], float], **options: Any) -> None:
        super().__init__(loader, **options)
        self._length = length

    def state_dict(self) -> dict[str, Any]:
        """Describe the position; after the last batch it is the beginning of the next epoch."""
        state = super().state_dict()
        position = state["position"]
        if position is not None and position["epoch"] == state["epoch"] and position["batches"] >= self._length():
            state["epoch"] += 1
        return state

    def _was_a_look(self, batches: ResumableBatches) -> bool:
        return super()._was_a_look(batches) and batches.batches < self._length()  # else the last batch of the epoch


def resumable(loader: Any, trainer: Any, *, seed_samples: bool) -> Any:
    """Return a training loader whose position can be saved, and the text of what stands against it.

    Returns:
        (loader, None), or the loader as it is and why it cannot be resumed within an epoch.
    """
    if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        return loader, None
    name = type(loader).__name__
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader, f"{name} over an iterable has no state_dict: an epoch that is resumed begins anew"
    if trainer.overfit_batches:
        return loader, "overfit_batches: the loader is left as it is"
    seed = getattr(loader.sampler, "seed", None)
    if not isinstance(seed, int):
        seed = torch.initial_seed() % (1 << 62) if trainer.world_size == 1 else 0
    made = EpochLoader(
        loader, length=lambda: float(trainer.num_training_batches), seed=seed, seed_samples=seed_samples,
        rank=trainer.global_rank, world_size=trainer.world_size,
    )  # fmt: skip
    return made, None


def generators_of_all(own: Mapping[str, Any], world_size: int) -> list[Any]:
    """Gather the generators of all ranks, in order; every rank calls it, and only rank 0's dictionary is stored."""
    if world_size == 1 or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [own]
    found: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(found, own)
    return found


def lost_in_mid_epoch(checkpoint: Mapping[str, Any], trainer: Any, module: Any) -> Iterator[tuple[str, str]]:
    """Yield (what, why) of all that Lightning loses where a checkpoint was not taken at the end of an epoch."""
    batches = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    ready = batches.get("current", {}).get("ready", 0)
    if not ready or batches.get("is_last_batch"):
        return
    yield (
        "averages over the epoch",
        "Lightning does not save what self.log(..., on_epoch=True) has gathered: in this epoch they are those of the "
        "batches from here on",
    )
    if ready % trainer.accumulate_grad_batches:
        yield (
            "gradients that were gathered",
            f"the checkpoint was taken after {ready % trainer.accumulate_grad_batches} of "
            f"{trainer.accumulate_grad_batches} batches of a step: save at multiples of accumulate_grad_batches",
        )
    base = next((cls for cls in type(module).__mro__ if cls.__name__ == "LightningModule"), type(module))
    if type(module).on_train_batch_end is not base.on_train_batch_end:  # type: ignore[attr-defined]
        yield (
            "on_train_batch_end of the module",
            "Lightning takes a checkpoint within an epoch before it calls this hook: what it did after the last batch "
            "is not in it",
        )


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
