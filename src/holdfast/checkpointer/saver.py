"""Saves of a run: start one, learn how it ended, keep going or stop as the policies say."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from holdfast._log import get_logger
from holdfast._units import format_bytes
from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import CheckpointNotFoundError, HoldfastError, StorageError
from holdfast.format.names import MANIFEST_NAME
from holdfast.state.save.snapshot import SaveRequest, Snapshotter, Submitted
from holdfast.storage.base import Storage
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import RunOpened, SaveResult

from .announce import Announcer
from .identity import free_name, manifest_fields
from .rank_group import ANSWER_MARGIN_S, RankGroup
from .remote import RemoteWatch
from .stats import Stats, StepClock
from .transient import MAX_LOST, TRANSIENT_ERRORS, LostSaves, passing_error, state_of

__all__ = ["RunSaver"]

_LOG = get_logger("checkpointer")
_SLOW_DISK = 200e6  # bytes/s, for the time of a save before the first one was measured


@dataclass(slots=True)
class _Pending:
    """A save under way, and what has to be true again if it fails."""

    submitted: Submitted
    step: int
    started: float
    before: tuple[int, str | None, str | None]
    durable: float = 0.0  # when it had ended, well or not; set by another thread


class RunSaver:
    """Starts saves into one run and follows them, one at a time.

    Args:
        storage: root of the run.
        client: the writer, with the run opened.
        opened: what opening the run found.
        snapshotter: copies the state.
        state: the full state, evaluated at each save.
        names: names that are taken under the run.
        when_busy: "wait" for the save before, or "skip" this one.
        on_full: "skip", "wait" or "raise" when the storage is full.
        timeout_s: bound of every wait.
        team: the ranks that save together, None for this process alone.
    """

    def __init__(
        self,
        storage: Storage,
        client: WriterClient,
        opened: RunOpened,
        snapshotter: Snapshotter,
        state: Callable[[], Mapping[Any, Any]],
        *,
        names: set[str],
        when_busy: str,
        on_full: str,
        timeout_s: float,
        team: RankGroup | None = None,
    ) -> None:
        self.storage, self.client, self.opened, self.snapshotter, self.state = (
            storage,
            client,
            opened,
            snapshotter,
            state,
        )
        self.names, self.when_busy, self.on_full, self.timeout_s = names, when_busy, on_full, timeout_s
        self.team = team
        self.leads = team is None or team.rank == 0  # the run is open in our writer
        self.stats = Stats()
        self.clock = StepClock()
        self.remote: RemoteWatch | None = None  # of a mirrored run
        self.announcer = Announcer(())
        self.parent: str | None = None
        self.last_step = -1  # newest step with a save started
        self.last_name: str | None = None
        self.deleted: list[tuple[str, str]] = []
        self._lost = LostSaves()
        self._pending: _Pending | None = None
        self._side: list[Future[Any]] = []  # reports and late metrics on their way
        self._ended = threading.Event()  # something that `settle` has to take in
        self._number = 0
        self._told = (0.0, 0.0)  # seconds blocked and lost that the run's journal has
        self._retry = False
        self._stuck = False  # the time for a save was up: it is not waited for as long again

    @property
    def busy(self) -> bool:
        """True while a save is being written."""
        return self._pending is not None and not self._pending.durable

    @property
    def unsettled(self) -> bool:
        """True when something has ended and `settle` has to take it in; costs next to nothing."""
        return self._ended.is_set()

    @property
    def save_s(self) -> float:
        """Seconds the last save took until it was durable, at the remote too; a careful guess before the first one."""
        if self.stats.seconds_to_durable:
            upload_s = 0.0 if self.remote is None else self.remote.upload_s
            return self.stats.seconds_to_durable[-1] + upload_s
        layout = self.snapshotter.layout
        return 0.0 if layout is None else layout.tensor_bytes / _SLOW_DISK

    def save(
        self,
        *,
        step: int,
        epoch: int,
        metrics: Mapping[str, Any],
        announce: Callable[[str], object],
        force: bool = False,
    ) -> bool:
        """Start a save; False when it was left out because the writer is busy.

        Args:
            step: steps done.
            epoch: current epoch.
            metrics: metrics of this step.
            announce: told the name of the checkpoint before the save is handed over.
            force: wait for a busy writer whatever ``when_busy`` says.

        Raises:
            HoldfastError: the save before this one failed.
        """
        if self.when_busy == "skip" and not force and self._is_busy(step):
            self.stats.skipped += 1
            self._note("skipped", step=step)
            _LOG.info("step %d: the save of step %d is still being written; this one is skipped", step, self.last_step)
            return False
        self.settle(wait_for_it=True)
        begun = time.perf_counter()
        name = free_name(step, attempt=self.opened.attempt, taken=self.names)
        checkpoint_id, team = uuid.uuid4().hex, self.team
        self._number += 1
        save_id = f"{self.opened.start_id}-{self._number:x}"
        with contextlib.nullcontext() if team is None else team.told(save_id):
            if self.remote is not None:
                self.remote.make_room(self.timeout_s)
            # Metrics first: a trainer killed right after the hand-over has its save committed all the same.
            announce(name)
            request = SaveRequest(
                storage=self.storage,
                directory=name,
                save_id=save_id,
                manifest=manifest_fields(
                    run_id=self.opened.run_id,
                    checkpoint_id=checkpoint_id,
                    parent=self.parent,
                    attempt=self.opened.attempt,
                    step=step,
                    epoch=epoch,
                    metrics=metrics,
                    world_size=1 if team is None else team.world_size,
                ),
                reuse=True,
                run=self.leads,
                part=team is not None,
                joint=team is not None,
            )
            submitted = self.snapshotter.submit(self.state(), self.client, request, lazy=True)
        self.names.add(name)
        pending = _Pending(submitted, step, begun, (self.last_step, self.last_name, self.parent))

        def ended(_: Future[Any]) -> None:
            pending.durable = time.perf_counter()
            self._ended.set()

        self._pending = pending
        submitted.future.add_done_callback(ended)
        self.last_step, self.last_name, self.parent = step, name, checkpoint_id
        self._held(begun)
        return True

    def glance(self) -> None:
        """Take in, between saves, what has ended.

        Of a save of many ranks only the good end: a failure changes what is done next, so all ranks take it in at the
        same step, which is the next save or one they agree on.
        """
        if self.team is None:
            self.settle()
            return
        self._ended.clear()
        future = None if self._pending is None else self._pending.submitted.future
        if future is not None and future.done() and future.exception() is None:
            self._settle_save(wait_for_it=False)

    def settle(self, *, wait_for_it: bool = False) -> None:
        """Take in a save that has ended; with ``wait_for_it`` wait for it first.

        Raises:
            HoldfastError: the save, or something reported on the side, failed.
        """
        self._ended.clear()
        # Looked at before the save: whatever failed for want of its checkpoint comes after the news of that failure.
        done = [one for one in self._side if one.done()]
        self._settle_save(wait_for_it=wait_for_it)
        self._settle_side(done)

    def _settle_save(self, *, wait_for_it: bool) -> None:
        if self._pending is None:
            return
        pending, future = self._pending, self._pending.submitted.future
        if not future.done():
            if not wait_for_it:
                return
            begun = time.perf_counter()
            limit_s = self.timeout_s + (0.0 if self.team is None else ANSWER_MARGIN_S)
            wait([future], timeout=0.0 if self._stuck else limit_s)
            self._held(begun)
            self._stuck = not future.done()
            if self._stuck:
                whose = "" if self.team is None else f"rank {self.team.rank}: "
                raise HoldfastError(
                    f"{whose}the save of step {pending.step} is not durable after {limit_s:.0f} s (timeout_s): "
                    f"{self.storage.uri} is stuck or very slow; training cannot count on it"
                )
        self._pending, self._stuck = None, False
        error = future.exception()
        if error is None:
            self._committed(future.result(), pending)
            return
        # This step is not saved: the final save must not take it for done, nor the next one for its parent.
        self._free_name(self.last_name)
        self.last_step, self.last_name, self.parent = pending.before
        if not isinstance(error, TRANSIENT_ERRORS):
            raise error
        self._leave_out(error, pending.step)

    def fence(self) -> None:
        """Make the device wait for copies of its tensors that are still under way; costs the CPU nothing."""
        copies = self.snapshotter.copies
        if copies is not None:
            copies.stepped()

    def finish(self) -> None:
        """Wait for everything on its way; raises what failed."""
        self.settle(wait_for_it=True)
        wait(self._side, timeout=0.0 if self._stuck else self.timeout_s)
        self._settle_side([one for one in self._side if one.done()])
        if self._side:
            raise HoldfastError(f"metrics are not durable after {self.timeout_s:.0f} s: {self.storage.uri} is stuck")

    def on_the_side(self, future: Future[Any]) -> None:
        """Follow an operation whose failure has to surface: a report, late metrics."""
        self._side.append(future)
        future.add_done_callback(lambda _: self._ended.set())

    @property
    def wants_retry(self) -> bool:
        """True when ``on_full="wait"`` and the last save found no space, or no answer."""
        return self._retry

    def say_lost(self) -> None:
        """Log, at the end of the run, what a storage that was full or did not answer cost."""
        if self._lost.total:
            _LOG.warning(
                "%d save(s) of this run were lost, the storage was full or did not answer; %s", self._lost.total,
                self._newest_safe(),
            )  # fmt: skip

    def final_is_missing(self, step: int) -> StorageError:
        """Return the error for a run whose last step could not be saved."""
        error = self._lost.error
        lost = f"the final step {step} was NOT saved, {state_of(error)} ({error}); {self._newest_safe()}"
        return passing_error(error, lost)

    def _newest_safe(self) -> str:
        step = self.stats.last_durable_step
        free = self.storage.free_bytes()
        room = "" if free is None else f"; {format_bytes(free)} are free at {self.storage.uri}"
        return ("no checkpoint was written" if step < 0 else f"the newest checkpoint is that of step {step}") + room

    def _held(self, begun: float) -> None:
        seconds = time.perf_counter() - begun
        self.stats.seconds_blocked += seconds
        self.stats.seconds_lost += seconds

    def _committed(self, result: SaveResult, pending: _Pending) -> None:
        self._lost.durable()
        self._retry = False
        stats = self.stats
        stats.saves += 1
        stats.bytes_written += result.bytes_written
        stats.bytes_reused += result.bytes_reused
        # `ended` runs on another thread, right after those who wait are woken.
        stats.seconds_to_durable.append((pending.durable or time.perf_counter()) - pending.started)
        stats.last_durable_step = max(stats.last_durable_step, pending.step)
        stats.seconds_lost += self.clock.take_lost()
        held, lost = stats.seconds_blocked, stats.seconds_lost
        self._note(
            "cost", step=pending.step, name=result.name, durable_s=stats.seconds_to_durable[-1],
            held_s=held - self._told[0], lost_s=lost - self._told[1],
        )  # fmt: skip
        self._told = (held, lost)
        self.deleted.extend(result.deleted)
        self.snapshotter.observe(result.unchanged)
        if self.leads and (self.remote is None or not self.remote.staged):  # that one tells of what has arrived
            self.announcer.tell(Checkpoint.at(self.storage, result.directory))

    def _note(self, what: str, **about: Any) -> None:
        """Tell the run's journal what only the trainer knows; nobody waits for it, nothing fails for it."""
        if self.leads:
            event = {"what": what, "time": time.time(), "attempt": self.opened.attempt, **about}
            with contextlib.suppress(HoldfastError):
                self.client.run_op("journal", events=[event])

    def _leave_out(self, error: StorageError, step: int) -> None:
        self.stats.skipped += 1
        tries_again = self.on_full == "wait"  # the same step: its own time bounds that
        self._lost.add(error, limit={"raise": 1, "wait": None}.get(self.on_full, MAX_LOST))
        _LOG.warning(
            "step %d was NOT saved, %s (%s); older checkpoints are untouched, training goes on (save %d in a row)",
            step, state_of(error), error, self._lost.in_a_row,
        )  # fmt: skip
        self._retry = tries_again

    def _settle_side(self, done: list[Future[Any]]) -> None:
        self._side = [one for one in self._side if one not in done]
        for future in done:
            error = future.exception()
            if isinstance(error, TRANSIENT_ERRORS) and self.on_full != "raise":
                _LOG.warning("metrics were not recorded, %s: %s", state_of(error), error)
            elif isinstance(error, CheckpointNotFoundError) and self._lost.total:
                _LOG.warning("metrics were not bound, the save of their step was lost: %s", error)
            elif error is not None:
                raise error

    def _free_name(self, name: str | None) -> None:
        """Let the next try use the name of a save that failed, unless it committed after all."""
        if self.team is not None and name is not None:
            # Not looked at: all ranks have to choose the same name next, and may see different things.
            self.names.discard(name)
            return
        with contextlib.suppress(StorageError):
            if name is not None and not self.storage.exists(f"{name}/{MANIFEST_NAME}"):
                self.names.discard(name)

    def _is_busy(self, step: int) -> bool:
        """Tell whether the save before is still being written; the same answer on all ranks."""
        return self.busy if self.team is None else not self.team.may_save(step)
