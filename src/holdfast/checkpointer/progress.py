"""Step, epoch and data position: always part of a run's state; and the iterators that move them.

`Batches` is what `Checkpointer.batches` returns: where a loop asks for its next batch. That moment is the boundary of
the step before: whatever the body did after ``ck.step()`` is done by then, and nothing of the next batch has begun.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from holdfast._log import get_logger
from holdfast.errors import ConfigError, SessionError
from holdfast.run.data_ring import BatchSpan
from holdfast.state.data.batches import ResumableBatches, elsewhere, of_this_rank, said, with_ranks_apart
from holdfast.state.data.loaders import unwrapped

from .ledger import DataLedger, LeftOut

if TYPE_CHECKING:
    from .guard import Judge

RESERVED = "holdfast"
"""Top-level key of the run's own entries in a state."""

_LOG = get_logger("checkpointer")
_NOBODY = 0  # no thread has this identity


@dataclass(slots=True, kw_only=True)
class _Pass:
    """What is known of the pass over one loader in the current epoch.

    Attributes:
        batches: gives them.
        drawn: batches that it has yielded.
        trained: its samples and batches at the last step.
        marks: its last positions, in samples and batches: 1 + the number of batches drawn ahead.
        draws: batches at its start, before its first step, its second.
        failed_at: where it has failed last; -1: nowhere.
        is_elsewhere: another thread than that of the steps draws from it.
        was_left: its loop was left by a `break`, and is not gone on with.
        was_reopened: it was gone on with by another loop.
    """

    batches: ResumableBatches
    drawn: int
    trained: tuple[int, int]
    marks: deque[tuple[int, int]]
    draws: list[int]
    failed_at: int = -1
    is_elsewhere: bool = False
    was_left: bool = False
    was_reopened: bool = False

    @property
    def is_trained(self) -> bool:
        """Whether a batch of it was trained, in this life or before."""
        return self.trained[1] > 0

    @property
    def ahead(self) -> int:
        """How many batches the loop has said to draw before it trains them."""
        return (self.marks.maxlen or 1) - 1

    def position(self) -> dict[str, Any]:
        """Return the position after the last trained step."""
        batches, trained = self.batches, self.trained
        is_behind = batches.kind != "stateful" and trained != (batches.samples, batches.batches)
        left = {"left": True} if self.was_left and not batches.done else {}
        return {**batches.state_dict(at=trained if is_behind else None), **left}

    def move_up(self) -> None:
        """Where no batch is left to be drawn, let a step go on to those that were drawn ahead."""
        begin, *drawn = self.draws
        first = drawn[0] if drawn else self.drawn - begin  # what is in flight, and what one step takes
        for _ in range(min(len(self.marks) - 1, max(1, first - self.ahead))):
            self.marks.popleft()


class Progress:
    """Counters of a run and the position in its data.

    The position of a loader moves with `stepped`, not with the batches it yields: a batch that was drawn and not
    trained (the loop was left, the process dies, gradients are still gathering) comes again after a resume. Only a
    loader with a state of its own cannot go back; its position is what it has yielded.

    Attributes:
        step: optimizer steps done.
        epoch: number of the current epoch, counted from 0.
        used_epochs: the loop over epochs of this life is `epochs`.
        num_drawn: batches drawn in this life.
        num_steps: steps made in this life.
        num_passes: passes over loaders begun in this life.
        epoch_steps: steps of this life in the current epoch.
        begun_after: the epoch that this life did not enter again, since its only step was made; -1 if there is none.
        home: the state that the user gave.
        given: the names in it when the run was entered: those that came since are saved by their names.
        counted_by_user: the script has asked for the step or the epoch, so its own loops can begin where the run is.
        has_own_place: whoever makes the steps keeps the place in the data, in the state: `ck.batches` is not missed.
        ledger: what was trained on, compared with what resumed loaders give.
        judge: judges the metric that a guard watches; its window is part of the state.
        place: with a judge, the batches of the last step.
        first_seed: seed of the order of the data in a new run; all ranks need the same. None: a single process follows
            `torch.manual_seed`, several ranks (which may be seeded differently) take 0.
    """

    def __init__(
        self, *, seed_samples: bool, rank: int = 0, world_size: int = 1, on_data_mismatch: str = "raise"
    ) -> None:
        self.ledger = DataLedger(on_mismatch=on_data_mismatch, world_size=world_size)
        self.step = 0
        self.epoch = 0
        self.first_seed: int | None = None
        self._seed: int | None = None
        self._seed_samples, self._rank, self._world_size = seed_samples, rank, world_size
        self._samples_before = 0  # of the epochs that are over
        self._positions: dict[str, Mapping[str, Any]] = {}  # where earlier lives stopped, by loader name
        self._passes: dict[str, _Pass] = {}  # of this epoch, by loader name
        self._by_epochs = self.used_epochs = False
        self._body, self._body_thread = "", _NOBODY
        self._stepper: threading.Thread | None = None  # has made the last step
        self._index = 0
        self.num_drawn = self.num_steps = self.num_passes = 0
        self.epoch_steps = 0
        self._steps_an_epoch = 0  # of the last epoch that made steps without batches; 0: none was seen to its end
        self.begun_after = -1
        self._late_steps = 0  # of this pass, after its last batch
        self._drawn_last = "", 0  # the loader that gave the last batch, and the step after which it did
        self.home: Mapping[Any, Any] = {}
        self.given: frozenset[Any] = frozenset()
        self._added_before: list[str] = []
        self.counted_by_user = self.has_own_place = False
        self._awaited: set[str] = set()  # loaders that the checkpoint has in the middle of a pass, and no loop took up
        self.checks: list[Callable[[], str]] = []  # done once, after the first step of this life: what is to be said
        self._reminded: set[str] = set()
        self.judge: Judge | None = None
        self.place: tuple[BatchSpan, ...] = ()
        self.left_out = LeftOut(world_size)

    def stepped(self) -> None:
        """Count one optimizer step: what has been yielded so far is trained."""
        self.step += 1
        self.num_steps += 1
        self.epoch_steps += 1
        self._stepper = threading.current_thread()
        checks, self.checks = self.checks, []
        for check in checks:  # it may leave one for the next step
            if found := check():
                self._remind(found)
        if self._awaited:
            self._say_awaited()
        place: list[BatchSpan] = []
        for name, one in self._passes.items():
            if len(one.marks) > 1 and one.batches.done:
                one.move_up()
            at, draws = one.marks[0], one.draws
            if self.judge is not None and at[1] > one.trained[1]:
                place.append(BatchSpan(name, self.epoch, one.trained[1], at[1]))
            if len(draws) < 3:
                draws.append(one.drawn - sum(draws))
                if len(draws) == 3:
                    self._say_ahead(name, one)
            one.trained = at
        self.place = tuple(place)
        if self._passes and all(one.batches.done for one in self._passes.values()) and not self.in_body:
            self._late_steps += 1
            if self._late_steps == 2 + max(one.ahead for one in self._passes.values()):
                self._remind(
                    "steps were made after ck.batches() had given its last batch, without asking it for another one: "
                    "batches that the script keeps itself (itertools.cycle, a list) are gone after a resume. Take each "
                    "batch from a loop over ck.batches(loader); for more passes, begin such a loop again"
                )
        if self._by_epochs and not self.num_passes:
            # A full-batch loop: what follows the last step of an epoch belongs to it, as in a body over batches.
            is_last = self.epoch_steps == (self._steps_an_epoch or 1)
            self._body, self._body_thread = "", threading.get_ident() if is_last else _NOBODY
        if self.epoch_steps == 2 and self._by_epochs and not self._passes and not self.has_own_place:
            self._remind(
                "steps in ck.epochs() without ck.batches(): a resume in the middle of an epoch begins the epoch anew. "
                "Wrap the training loader, as in `for batch in ck.batches(loader)`"
            )

    def _say_awaited(self) -> None:
        """Say that steps are made on another loader than the one that the checkpoint was saved in the middle of."""
        saved, self._awaited = ", ".join(map(repr, sorted(self._awaited))), set()
        others = ", ".join(repr(name) for name in sorted(self._passes) if name not in self._positions)
        if others:
            self._remind(
                f"this checkpoint was saved in the middle of epoch {self.epoch} of {saved}, and steps are made on "
                f"{others}, which it does not know: the epoch begins anew there. A loader that goes on has the name= "
                "that it was saved with"
            )

    @property
    def samples(self) -> int:
        """Samples of trained steps, over all ranks and epochs."""
        current = sum(one.trained[0] for one in self._passes.values())
        stored = sum(
            int(position["samples"])
            for name, position in self._positions.items()
            if name not in self._passes and position["epoch"] == self.epoch
        )
        return self._samples_before + current + stored

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        positions = dict(self._positions)
        # All of a loader without a step is no position: an evaluation, under the name of the loader for training even.
        counted = {name: one for name, one in self._passes.items() if one.is_trained or not one.batches.done}
        positions.update((name, one.position()) for name, one in counted.items())
        ledger = self.ledger.state_dict(positions)
        added = [name for name in self.home if name not in self.given and isinstance(name, str)]
        if self._world_size > 1:
            positions = {name: with_ranks_apart(position) for name, position in positions.items()}
        return {
            "step": self.step,
            "epoch": self.epoch,
            "samples_before": self._samples_before,
            "seed": self._seed,
            "positions": positions,
            "added": sorted({*self._added_before, *added}),
            "ledger": ledger,
            # Of a loop over epochs without batches: enough to know whether this epoch is over.
            "epoch_steps": self.epoch_steps if self.used_epochs and not self.num_passes else 0,
            "steps_an_epoch": self._steps_an_epoch,
            "left_out": self.left_out.state_dict(),
            "guard": None if self.judge is None else [self.judge.state_dict(), [list(span) for span in self.place]],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what an earlier life saved."""
        self.step = int(state["step"])
        self.epoch = int(state["epoch"])
        self._samples_before = int(state["samples_before"])
        self._seed = state["seed"]
        self._added_before = list(state.get("added", ()))
        self.ledger.load_state_dict(state.get("ledger"))
        self.left_out.load_state_dict(state.get("left_out", (0, ())))
        if self.judge is not None and (known := state.get("guard")) is not None:
            self.judge.load_state_dict(known[0])
            self.place = tuple(map(BatchSpan.from_json, known[1]))
        self._positions = {name: of_this_rank(position) for name, position in state["positions"].items()}
        self._forget_passes()
        here = {name: position for name, position in self._positions.items() if position["epoch"] == self.epoch}
        self._index = int(next(iter(here.values()))["batches"]) if len(here) == 1 else 0
        self._awaited = {name for name, at in here.items() if at["batches"] and not (at["done"] or at.get("left"))}
        self._steps_an_epoch = int(state.get("steps_an_epoch", 0))
        if not here and int(state.get("epoch_steps", 0)) == (self._steps_an_epoch or 1):
            self.begun_after = self.epoch
            self.epoch += 1

    @staticmethod
    def added_in(tree: Any) -> list[str]:
        """Return the names that came into the state of an earlier life, from its stored tree; none if it has none."""
        own = tree.get(RESERVED) if isinstance(tree, Mapping) else None
        node = own.get("progress") if isinstance(own, Mapping) else None
        state = getattr(node, "state", None)
        found = state.get("added", ()) if isinstance(state, Mapping) else ()
        return [name for name in found if isinstance(name, str)] if isinstance(found, (list, tuple)) else []

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
        if self.begun_after >= 0:
            found.append(
                f"epoch {self.begun_after} is done: its step was made and ck.batches() was not used, so epoch "
                f"{self.epoch} is the next one"
            )
        return found

    def skip_to(self, epoch: int) -> None:
        """Go on after the epochs a finished life did."""
        while self.epoch < epoch:
            self._next_epoch()

    def epochs(self, count: int, *, at_end: Callable[[int], None]) -> Iterator[int]:
        """Yield the numbers of the epochs still to do; ``at_end`` is called after each with the number done."""
        if self._by_epochs:
            raise ConfigError("ck.epochs() is iterated already: use one loop over epochs at a time")
        self._by_epochs = self.used_epochs = True
        try:
            while self.epoch < count:
                yield self.epoch
                self._next_epoch()
                at_end(self.epoch)
        finally:
            self._by_epochs = False
            self._body_thread = _NOBODY if not self._body else self._body_thread

    # -- passes over loaders; `Batches` calls these in this order

    def is_open(self, name: str, batches: ResumableBatches) -> bool:
        """Tell whether this is the pass over ``name`` that counts: its epoch goes on, and no other loop took it up."""
        one = self._passes.get(name)
        return one is not None and one.batches is batches

    def take_up(self, name: str, batches: ResumableBatches, loader: Any) -> bool:
        """Let a loop go on where another loop over the same pass is; False where that is at its end.

        Raises:
            ConfigError: the pass has ended with its epoch, or the other loop is over another loader.
        """
        if batches.epoch != self.epoch:
            raise ConfigError(
                f"the pass over {name!r} ended with epoch {batches.epoch}, after {batches.batches} batches: the passes "
                "over all loaders end with an epoch, which is one of ck.epochs(), or ends where another loader is gone "
                "through anew. Begin them together: `for epoch in ck.epochs(n):`, and in it a loop over "
                f"ck.batches(loader, name={name!r}), or a new iter() of it"
            )
        live = self._passes.get(name)
        if live is not None and not live.batches.has_data_of(loader):
            raise ConfigError(
                f"another loader was gone through under the name {name!r} in the middle of a pass, after "
                f"{batches.batches} batches: a loader for evaluation needs no ck.batches(); a second one for training "
                "gets a name, ck.batches(other, name='other')"
            )
        return live is None or not live.batches.done

    def turn_over(self, name: str, loader: Any, *, at_end: Callable[[int], None]) -> None:
        """Begin the next epoch if another pass over a loader begins after its end, outside of `epochs`.

        A pass without a step that is followed by one over other data was no epoch: it was an evaluation.
        """
        before = self._passes.get(name)
        if before is None or not before.batches.done:
            return
        if self._by_epochs:
            raise ConfigError(
                f"ck.batches() has given all batches of {name!r} in epoch {self.epoch} already: in one epoch of "
                "ck.epochs() each loader is gone through once, under a name of its own (ck.batches(other, "
                "name='other')); a validation loader needs no ck.batches(). One that is shorter than another, and is "
                "to begin again beside it, takes sampler=RandomSampler(dataset, num_samples=...)"
            )
        if not before.is_trained and not before.batches.has_data_of(loader):
            del self._passes[name]
            self._remind(
                "ck.batches() gave all of a loader, nothing was trained on it, and another loader takes its turn under "
                f"the name {name!r}: it counts as no epoch. A loader for evaluation needs no ck.batches(); a second "
                "one for training gets a name, ck.batches(other, name='other')"
            )
            return
        # A plain `for epoch in range(n)` loop: another pass over the loader is another epoch.
        self._next_epoch()
        self._remind_of_epochs()
        at_end(self.epoch)

    def open(self, loader: Any, name: str, *, split: bool | tuple[int, int] = True, ahead: int = 0) -> ResumableBatches:
        """Return the rest of the current epoch of ``loader``, to be iterated.

        Args:
            loader: what is iterated.
            name: of the loader within the run.
            split: how samples are dealt out to ranks.
            ahead: batches that are drawn before they are trained: the position stays that many batches behind.

        Raises:
            ConfigError: ``ahead`` with a loader whose position is its own state, which cannot go back.
        """
        this = weakref.proxy(self)  # a cycle would leave the loader, and its workers, to the garbage collector
        before = self._passes.get(name)
        position = before.batches.state_dict() if before is not None else self._positions.get(name)
        if self._seed is None:
            # Kept with the run from now on.
            self._seed = self.own_seed() if self.first_seed is None and self._world_size == 1 else self.first_seed or 0
        batches = before.batches if before is not None and before.batches.goes_on(loader) else None
        if batches is None:
            if hasattr(loader, "end_of_dataloader") and hasattr(loader, "set_epoch"):  # Accelerate's counts passes here
                loader.set_epoch(self.epoch)
            batches = ResumableBatches(
                loader, position, seed=self._seed, epoch=self.epoch, seed_samples=self._seed_samples,
                rank=self._rank, world_size=self._world_size, split=split, is_reopened=before is not None,
                mismatch=lambda text: this.ledger.say(name, f"step {this.step + 1}, {text}"),
                replayed=lambda index, batch: this.ledger.replayed(loader, name, index, batch, step=this.step),
            )  # fmt: skip
        if ahead and batches.kind == "stateful":
            raise ConfigError(
                f"ahead={ahead}: a {type(loader).__name__} keeps its own position, which cannot go back to a batch "
                "drawn before: draw each batch where it is trained, and leave ahead= out"
            )
        if self.num_passes == 0 and self.epoch and not self._by_epochs:
            self._remind_of_epochs()
        self.ledger.opened(loader, name, batches, position)
        self.num_passes += 1
        self._awaited.discard(name)
        if before is not None:
            marks = deque([before.trained], maxlen=ahead + 1)
            marks.append((batches.samples, before.drawn))
            found = replace(
                before, batches=batches, marks=marks, draws=[before.drawn], was_left=False, was_reopened=True
            )  # fmt: skip
        else:
            if position is not None and position.get("left") and position["epoch"] == self.epoch:
                self._remind(
                    f"the loop over {name!r} had been left after {position['batches']} batches of epoch {self.epoch} "
                    "when this checkpoint was saved, and goes on with the next one now. If the script begins the next "
                    "epoch after such a `break`, these batches are more than the uninterrupted run has trained: save "
                    "in the body over ck.batches(), or give it a loader of that length"
                )
            drawn = int(batches.state_dict()["batches"])
            at = batches.samples, drawn
            found = _Pass(
                batches=batches, drawn=drawn, trained=at, marks=deque([at], maxlen=ahead + 1), draws=[drawn]
            )  # fmt: skip
        self._index = found.drawn
        self._passes[name] = found  # last: after an interrupt in between nothing is half known
        return batches

    def drew(self, name: str, loader: Any, batch: Any) -> None:
        """Count a batch of ``loader`` that is handed to the loop now.

        Raises:
            StateMismatchError: it is not the one that should come, see `DataLedger`.
        """
        one = self._passes[name]
        self.ledger.given(loader, name, one.batches, batch, index=one.drawn, step=self.step)
        if len(self._passes) > 1 and self._drawn_last[0] == name and self._drawn_last[1] < self.step:
            self._say_kept_batch(name)
        self._drawn_last = name, self.step
        self._index = one.drawn
        one.drawn += 1
        self.num_drawn += 1
        if self._stepper is not None and self._stepper is not threading.current_thread():
            one.is_elsewhere = True
        one.marks.append((one.batches.samples, one.drawn))
        if one.ahead == 0:
            self._body, self._body_thread = name, threading.get_ident()

    def leaves_out(self, name: str) -> bool:
        """Tell whether the batch drawn just now is one that no life trains; if so its place counts as done."""
        if not self.left_out.spans:
            return False
        one = self._passes[name]
        at = one.drawn
        if not self.left_out.covers(name, self.epoch, at):
            return False
        before, after = one.marks[-1], (one.batches.samples, at + 1)
        one.drawn += 1
        one.draws[0] += 1
        one.marks[-1] = after
        if one.trained == before:
            one.trained = after
        return True

    def failed(self, name: str, error: Exception) -> None:
        """Note that a batch of ``name`` could not be drawn; one that the loader leaves behind counts as drawn.

        Raises:
            SessionError: nothing was drawn since it failed before: a script that catches the error would try for ever.
        """
        one = self._passes[name]
        at, before = one.batches.batches, one.failed_at
        one.drawn = at
        one.failed_at = at
        if before == at:
            raise SessionError(
                f"the data of {name!r} fail at batch {at} of epoch {self.epoch} whenever they are asked for it "
                f"({type(error).__name__}: {error}), and cannot be gone on with behind it: mend them, or leave out in "
                "the data set what cannot be read"
            ) from error

    def exhausted(self, name: str, loader: Any) -> None:
        """Note that ``name`` has no more batches.

        Raises:
            StateMismatchError: the epoch has more of them, see `DataLedger`.
        """
        one = self._passes[name]
        self.ledger.ended(loader, name, one.batches, index=one.drawn, step=self.step)
        self._index = one.drawn if self._by_epochs else 0
        self.left_body(name)

    def left_body(self, name: str) -> None:
        """Note that the loop over ``name`` has no body any more."""
        if self._body == name:
            self._body, self._body_thread = "", _NOBODY

    def broke_off(self, name: str) -> None:
        """Note that the loop over ``name`` was left by a `break`: steps after it are boundaries of their own."""
        one = self._passes.get(name)
        if one is not None and not one.was_reopened:  # else each batch has a loop of its own: `next(iter())`
            one.was_left = True
        self.left_body(name)

    @property
    def in_body(self) -> bool:
        """True within the body of a loop over batches that this thread has drawn."""
        return self._body_thread == threading.get_ident()

    @property
    def is_elsewhere(self) -> bool:
        """True in another thread than the one that makes the steps, as long as that may make more."""
        stepper = self._stepper
        return stepper is not None and stepper is not threading.current_thread() and stepper.is_alive()

    @property
    def after_pass(self) -> bool:
        """True between the last batch of an epoch and the beginning of the next one."""
        return any(one.batches.done for one in self._passes.values())

    @property
    def is_at_end_of_epoch(self) -> bool:
        """True where an earlier life has trained all batches of the current epoch, and has not left it."""
        return any(position["epoch"] == self.epoch and position["done"] for position in self._positions.values())

    @property
    def batch(self) -> int:
        """Index, in the epoch, of the batch drawn last; before the first batch, the index of the first."""
        return self._index

    def length(self, loader: Any, *, split: bool | tuple[int, int]) -> int:
        """Return how many batches this rank gets in a whole epoch.

        Raises:
            TypeError: the loader has no length.
        """
        return len(
            ResumableBatches(
                loader, None, seed=self._seed or 0, epoch=self.epoch, seed_samples=self._seed_samples,
                rank=self._rank, world_size=self._world_size, split=split, remarks=False,
            )
        )  # fmt: skip

    def leaves(self) -> None:
        """Note that the run is left in order: whoever asks for more steps goes on with an epoch that was broken off."""
        for one in self._passes.values():
            one.was_left = False

    def finish(self, *, is_saved: bool) -> None:
        """Count the last epoch of a loop that does not use `epochs` as done, if all of its batches were drawn.

        Args:
            is_saved: this step has a checkpoint; else one is made now, and loaders with a state are asked for it now.
        """
        for name, one in self._passes.items():
            left = one.drawn - one.trained[1]
            if one.batches.kind == "stateful" and left and self.step and not (one.batches.done or is_saved):
                self._remind(
                    f"the loop was left with {left} batch(es) of {name!r} drawn and not trained, and the loader keeps "
                    "its own position, which cannot go back: a resume leaves them out. Ask whether to stop (`if "
                    "ck.global_step >= n: break`, ck.should_stop) behind ck.step(), not after the next batch was drawn"
                )
        passes = self._passes.values()
        is_over = all(one.batches.done for one in passes) and any(one.is_trained for one in passes)
        if not self.used_epochs and is_over:
            self._next_epoch()

    def close(self) -> None:
        """Let go of the loaders, whose workers end with them, and of the ledger's file; idempotent."""
        self._samples_before, self._positions = self.samples, {}
        self._forget_passes()
        self.ledger.close()

    def left(self, name: str) -> int | None:
        """Number of batches that the loader ``name`` has left in this epoch, None if it cannot know."""
        try:
            return len(self._passes[name].batches)
        except (KeyError, TypeError):
            return None

    @staticmethod
    def own_seed() -> int:
        """Return the data seed that follows from torch's; rank 0's is a good `first_seed` for all."""
        return torch.initial_seed() % (1 << 62)

    def remind_at_end(self, *, was_finished: bool) -> None:
        """Say, where the body ends, what was not counted, and what a loop that asks at its bottom did too much.

        Args:
            was_finished: this life went on from the end of a finished one.
        """
        if was_finished and self.num_steps == 1:
            self._remind(
                f"this run had finished at step {self.step - 1}, and this start made one more step: if no more was "
                "asked for, the loop asks at its bottom whether it is done, after it has trained. Ask at its head, as "
                "in `while ck.global_step < max_steps:`, or before the loop: a start of a finished run trains nothing"
            )
        if self.num_steps == 0 and (self.num_drawn > self.num_passes or self.step == 0):  # one is drawn to ask: "done?"
            drawn = f" after {self.num_drawn} batches" if self.num_drawn else ""
            self._remind(
                f"the run ended{drawn} without a single ck.step(): nothing was counted, and nothing saved. Call "
                "ck.step() after each optimizer step"
            )

    def remind_of_order(self) -> None:
        """Log that a step is saved while the body of the next step is under way."""
        self._remind(
            "ck.report() or ck.save() with metrics before ck.step(): the step before is saved in the middle of this "
            "body, so a resume from there runs the first part of the body twice (random numbers that it drew, weights "
            "that it changed). Call ck.step() first: an evaluation, report or save belongs after it"
        )

    def _say_ahead(self, name: str, one: _Pass) -> None:
        """Say that more, or fewer, batches are drawn ahead of the step than the script has said."""
        _, first, second = one.draws
        found, ahead = first - max(1, second), one.ahead
        if found > 0 and one.is_elsewhere:
            self._remind(
                f"the batches of {name!r} are drawn by another thread than the one that trains, ahead of it: how many "
                "are drawn and not trained is a matter of chance, so a resume may repeat or leave out some. Draw each "
                "batch in the loop that trains it, and let the DataLoader work ahead (num_workers=)"
            )
        elif found > 0 and not ahead and self.left(name) != 0:  # fewer are left to gather at the end of an epoch
            self._remind(
                f"{first} batches of {name!r} were drawn before a step and {second} before the next one. If the loop "
                "leaves batches out (`continue` before ck.step()), all is well: they count as done with the next step. "
                "If the loop draws ahead, a resume would leave out what was drawn and not trained: pass "
                f"ck.batches(loader, ahead={found}) with ck.step() as the last line of the body, or draw each batch "
                "where it is trained"
            )
        elif ahead and 0 <= found != ahead and not one.batches.done:
            what = "leave out some that were not" if found > ahead else "repeat some that were"
            self._remind(
                f"ahead={ahead}, and {first} batches of {name!r} were drawn before a step and {second} before the next "
                f"one. Unless the loop leaves batches out, {found} are drawn ahead, and a resume would {what} trained: "
                f"pass ahead={found}"
            )

    def _say_kept_batch(self, name: str) -> None:
        """Say that another loader's batch, which was trained with the step before, may be in hand for one more step."""
        for other, one in self._passes.items():
            if other != name and one.drawn > one.draws[0] and one.is_trained and not (one.batches.done or one.was_left):
                self._remind(
                    f"steps are made on one batch of {name!r} after another, and on one of {other!r}: a resume between "
                    f"them goes on with the next one of each. If the loop over {name!r} stands in the body of that "
                    f"over {other!r}, call ck.step() once for each batch of {other!r}, behind the inner loop"
                )

    def _remind_of_epochs(self) -> None:
        if not self.counted_by_user:
            self._remind(
                "epochs are counted by passes over the loader: a loop such as `for epoch in range(n)` begins at 0 "
                "again after a resume. Use `for epoch in ck.epochs(n)`, or begin at ck.epoch"
            )

    def _remind(self, sentence: str) -> None:
        """Say once what a script seems to have forgotten."""
        if self._rank == 0 and sentence not in self._reminded:
            self._reminded.add(sentence)
            _LOG.warning("%s", sentence)

    def _say_kept(self) -> None:
        """Say when a loader that was over in the checkpoint has ended an epoch in which others have batches left."""
        stored = {name for name, found in self._positions.items() if found["epoch"] == self.epoch and found["batches"]}
        ended = {name for name, one in self._passes.items() if one.batches.done}
        over, rest = (", ".join(map(repr, sorted(names))) for names in (stored & ended, stored - ended))
        if over and rest:
            self._remind(
                f"epoch {self.epoch} went on from its middle and ended without a step: {over} had given its last batch "
                f"before, and {rest} has some left. If the loop begins {over} again by itself, as in zip(..., "
                "itertools.cycle(ck.batches(...))), the batches that it keeps are in no checkpoint, and the rest of "
                "the epoch is not trained: make that loader as long, with RandomSampler(dataset, num_samples=...)"
            )

    def _forget_passes(self) -> None:
        self._passes = {}
        self._body, self._body_thread = "", _NOBODY
        self._late_steps = 0

    def _next_epoch(self) -> None:
        # What was yielded and never trained at the end of an epoch (gradients not stepped) is over with it.
        passes = self._passes.values()
        for name, one in self._passes.items():
            left = one.drawn - one.trained[1]
            is_evaluation = not one.is_trained and any(other.is_trained for other in passes)
            if one.batches.done and left and self.epoch_steps and not is_evaluation:
                self._remind(
                    f"an epoch ended with batches of {name!r} drawn after its last ck.step(): gradients that were not "
                    "stepped are in no checkpoint, so a resume from the end of an epoch goes on without them. Step "
                    "once more at the end of the epoch, or zero the gradients at its begin"
                )
        if self._by_epochs and not self.epoch_steps:
            self._say_kept()
        self._samples_before = self.samples + sum(one.batches.samples - one.trained[0] for one in passes)
        for name, one in self._passes.items():
            self._positions[name] = one.batches.state_dict(is_over=True)
        if not passes and self.epoch_steps:
            self._steps_an_epoch = self.epoch_steps
        self._forget_passes()
        self._awaited = set()
        self.epoch += 1
        self.epoch_steps = self._index = 0


class Batches:
    """The batches of the current epoch of one loader, from the position of the last trained step on.

    ``len()`` is the number of batches of the whole epoch, also after a resume in the middle of it. One object may be
    iterated in every epoch: ``iter()`` goes on with a pass that was left, and begins a new one after its end, or after
    that of its epoch.

    Args:
        progress: knows the position.
        loader: what is iterated.
        name: of the loader within the run.
        split: how samples are dealt out to ranks; see `Checkpointer.batches`.
        ahead: batches that the loop draws before it trains them.
        ask: called before each batch is drawn.
        epoch_done: called with the number of finished epochs where beginning a pass ends the epoch before.
    """

    def __init__(
        self,
        progress: Progress,
        loader: Any,
        name: str,
        *,
        split: bool | tuple[int, int],
        ahead: int,
        ask: Callable[[], None],
        epoch_done: Callable[[int], None],
    ) -> None:
        self._progress, self._name = progress, name
        self._loader, self._move = unwrapped(loader)
        self._split, self._ahead = split, ahead
        self._ask, self._epoch_done = ask, epoch_done
        self._pass: ResumableBatches | None = None
        self._drawn: Iterator[Any] | None = None
        self._ended = False
        self._length: tuple[int, int] | None = None  # an epoch, and the number of its batches

    def __len__(self) -> int:
        epoch = self._progress.epoch
        if self._length is None or self._length[0] != epoch:  # bodies ask at every batch
            self._length = epoch, self._progress.length(self._loader, split=self._split)
        return self._length[1]

    def __iter__(self) -> Iterator[Any]:
        if self._ended or (self._pass is not None and not self._progress.is_open(self._name, self._pass)):
            self._drawn, self._pass, self._ended = None, None, False
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        progress, name, known = self._progress, self._name, self._pass
        if known is not None and not progress.is_open(name, known):
            self._ask()  # raises if the run has ended
            self._ended = not progress.take_up(name, known, self._loader)
            self._drawn = self._pass = None
            if self._ended:
                raise StopIteration
        if self._drawn is None:
            progress.turn_over(name, self._loader, at_end=self._epoch_done)
        self._ask()
        if self._drawn is None:
            self._pass = progress.open(self._loader, name, split=self._split, ahead=self._ahead)
            self._drawn = iter(self._pass)
        try:
            batch = next(self._drawn)
            while progress.leaves_out(name):
                batch = next(self._drawn)
        except StopIteration:
            if self._pass is not None and not self._pass.done:  # it has failed, and was asked again
                self._drawn = None
                return next(self)
            self._ended = True
            progress.exhausted(name, self._loader)
            raise
        except Exception as error:
            progress.failed(name, error)
            raise
        progress.drew(name, self._loader, batch)
        return batch if self._move is None else self._move(batch)

    def __del__(self) -> None:
        if self._drawn is not None and not self._ended:
            self._progress.broke_off(self._name)


class NumberedBatches:
    """Pairs of (index in the epoch, batch); the index is right after a resume in the middle of an epoch too.

    Args:
        batches: what `Checkpointer.batches` gave.
        index: returns the index of the batch drawn last.
    """

    def __init__(self, batches: Any, index: Callable[[], int]) -> None:
        self._batches, self._index = batches, index

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        for batch in self._batches:
            yield self._index(), batch
