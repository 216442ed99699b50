"""Step, epoch and data position: always part of a run's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..errors import ConfigError
from ..state.data import ResumableBatches
from ..state.position import elsewhere, of_this_rank, said, with_ranks_apart

__all__ = ["Progress"]


class Progress:
    """Counters of a run and the position in its data.

    The position of a loader moves with `stepped`, not with the batches it yields: a batch that was drawn and not
    trained (the loop was left, the process dies, gradients are still gathering) comes again after a resume. Only a
    loader with a state of its own cannot go back; its position is what it has yielded.

    Attributes:
        step: optimizer steps done.
        epoch: number of the current epoch, counted from 0.
        first_seed: what decides the order of the data in a run that begins; all ranks need the same. None: one process
            follows `torch.manual_seed`, several ranks (which may well be seeded differently) take 0.
    """

    def __init__(self, *, seed_samples: bool, rank: int = 0, world_size: int = 1) -> None:
        self.step = 0
        self.epoch = 0
        self.first_seed: int | None = None
        self._seed: int | None = None
        self._seed_samples, self._rank, self._world_size = seed_samples, rank, world_size
        self._samples_before = 0  # of the epochs that are over
        self._positions: dict[str, Mapping[str, Any]] = {}  # where earlier lives stopped, by loader name
        self._live: dict[str, ResumableBatches] = {}
        self._drawn: dict[str, int] = {}  # batches each live loader has yielded
        self._trained: dict[str, tuple[int, int]] = {}  # its samples and batches at the last step
        self._by_epochs = False

    def stepped(self) -> None:
        """Count one optimizer step: what has been yielded so far is trained."""
        self.step += 1
        for name, batches in self._live.items():
            self._trained[name] = batches.samples, self._drawn[name]

    @property
    def samples(self) -> int:
        """Samples of trained steps, over all ranks and epochs."""
        current = sum(self._trained[name][0] for name in self._live)
        stored = sum(
            int(position["samples"])
            for name, position in self._positions.items()
            if name not in self._live and position["epoch"] == self.epoch
        )
        return self._samples_before + current + stored

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        positions = dict(self._positions)
        positions.update((name, self._position(name)) for name in self._live)
        if self._world_size > 1:
            positions = {name: with_ranks_apart(position) for name, position in positions.items()}
        return {
            "step": self.step,
            "epoch": self.epoch,
            "samples_before": self._samples_before,
            "seed": self._seed,
            "positions": positions,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what an earlier life saved."""
        self.step = int(state["step"])
        self.epoch = int(state["epoch"])
        self._samples_before = int(state["samples_before"])
        self._seed = state["seed"]
        self._positions = {name: of_this_rank(position) for name, position in state["positions"].items()}
        self._live, self._drawn, self._trained = {}, {}, {}

    def notes(self) -> list[str]:
        """Say what becomes of the positions if another number of ranks goes on from them than have saved them."""
        found = [
            elsewhere(position, self._world_size)
            for position in self._positions.values()
            if position["epoch"] == self.epoch
            and not position["done"]
            and position.get("world_size", self._world_size) != self._world_size
        ]
        said.update(found)
        return found

    def skip_to(self, epoch: int) -> None:
        """Go on after the epochs a finished life did."""
        while self.epoch < epoch:
            self._next_epoch()

    def epochs(self, count: int, *, at_end: Callable[[int], None]) -> Iterator[int]:
        """Yield the numbers of the epochs still to do; ``at_end`` hears how many are done after each."""
        if self._by_epochs:
            raise ConfigError("ck.epochs() is iterated already: use one loop over epochs at a time")
        self._by_epochs = True
        try:
            while self.epoch < count:
                yield self.epoch
                self._next_epoch()
                at_end(self.epoch)
        finally:
            self._by_epochs = False

    def batches(
        self, loader: Any, name: str, *, at_end: Callable[[int], None], split: bool | tuple[int, int] = True
    ) -> Iterator[Any]:
        """Yield the rest of the current epoch of ``loader``."""
        before = self._live.get(name)
        if before is not None and before.done:
            if self._by_epochs:
                raise ConfigError(
                    f"ck.batches() has given all batches of {name!r} in epoch {self.epoch} already: in one epoch of "
                    "ck.epochs() each loader is gone through once, under a name of its own (ck.batches(other, "
                    "name='other')); a validation loader needs no ck.batches()"
                )
            # A plain `for epoch in range(n)` loop: another pass over the loader is another epoch.
            self._next_epoch()
            at_end(self.epoch)
            before = None
        position = before.state_dict() if before is not None else self._positions.get(name)
        if self._seed is None:
            # Kept with the run from now on.
            self._seed = self.own_seed() if self.first_seed is None and self._world_size == 1 else self.first_seed or 0
        batches = ResumableBatches(
            loader,
            position,
            seed=self._seed,
            epoch=self.epoch,
            seed_samples=self._seed_samples,
            rank=self._rank,
            world_size=self._world_size,
            split=split,
        )
        self._live[name] = batches
        if before is None:
            self._drawn[name] = int(batches.state_dict()["batches"])
            self._trained[name] = batches.samples, self._drawn[name]
        for batch in batches:
            self._drawn[name] += 1
            yield batch

    def left(self, name: str) -> int | None:
        """Number of batches that the loader ``name`` has left in this epoch, None if it cannot know."""
        try:
            return len(self._live[name])
        except (KeyError, TypeError):
            return None

    @staticmethod
    def own_seed() -> int:
        """Return the data seed that follows from torch's; rank 0's is a good `first_seed` for all."""
        return torch.initial_seed() % (1 << 62)

    def _position(self, name: str) -> dict[str, Any]:
        """Return the position after the last trained step."""
        batches = self._live[name]
        position, trained = batches.state_dict(), self._trained[name]
        if batches.kind != "stateful" and trained != (position["samples"], position["batches"]):
            position["samples"], position["batches"] = trained
            position["done"] = False
        return position

    def _next_epoch(self) -> None:
        # What was yielded and never trained at the end of an epoch (gradients not stepped) is over with it.
        current = sum(batches.samples for batches in self._live.values())
        self._samples_before = self.samples + current - sum(self._trained[name][0] for name in self._live)
        for name, batches in self._live.items():
            self._positions[name] = batches.state_dict()
        self._live, self._drawn, self._trained = {}, {}, {}
        self.epoch += 1
