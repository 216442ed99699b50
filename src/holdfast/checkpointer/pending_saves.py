"""`PendingSaves`: the saves of one owner on their way, taken in one after another by the thread that trains.

Each front door follows its saves with one of these: what a good end means for the next save, what a lost one costs, how
long anybody waits. A storage that is full or does not answer costs a save, not the training; `LostSaves` is the one
policy for that. `manifest_fields` says what the trainer knows of a checkpoint. `NoteSender` sends the notes between
saves: rows of a report, late metrics. `Stats` says what saving has cost, in blocked time and in time lost to the
writing in the background, and `SaveCosts` what each save has.
"""

from __future__ import annotations

import platform
import secrets
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from threading import Event
from typing import Any

import torch

from holdfast._log import get_logger
from holdfast._version import __version__
from holdfast.errors import DroppedSaveError, HoldfastError, StorageError, StorageFullError, StorageUnavailableError
from holdfast.storage.together import SerialExecutor, chain
from holdfast.writer.client import WriterClient

from .metrics import plain_metrics

__all__ = [
    "ANSWER_MARGIN_S", "MAX_LOST", "TRANSIENT_ERRORS", "LostSaves", "NoteSender", "PendingSaves", "RunSave",
    "SaveCosts", "Stats", "failed", "manifest_fields", "new_start_id", "passing_error", "state_of",
]  # fmt: skip

TRANSIENT_ERRORS = (StorageFullError, StorageUnavailableError)
"""The errors after which training may go on."""

MAX_LOST = 10
"""Saves in a row: who trains on after that trains for nothing."""

ANSWER_MARGIN_S = 15.0
"""Seconds that a rank waits longer than rank 0's writer, so that it receives the reason instead of giving up first."""

_LOG = get_logger("checkpointer")


def _step_not_saved(save: RunSave, error: BaseException) -> str:
    why = f": {error}" if isinstance(error, DroppedSaveError) else f", {state_of(error)} ({error})"
    return f"step {save.step} was NOT saved{why}; older checkpoints are untouched"


@dataclass(slots=True, kw_only=True)
class RunSave:
    """A save from its name to its end.

    Attributes:
        step: of the training.
        epoch: of the training.
        metrics: of this step; or what gives them, which is called when the save is handed over, by a thread that may
            wait for a device.
        name: path of the checkpoint below the root of the run, whose index knows what lies directly there; "" until the
            session has named it.
        overwrite: a checkpoint of this name is replaced when the save commits.
        extra: for the manifest.
        follow: gets the future of the commit; returns the future of what its owner does at once after the commit. None:
            nothing is done, the session gave the name, and its steps are measured.
        committed: called, in `PendingSaves.settle`, with the outcome of a good end.
        lost: called there with the error of a bad end; returns what is logged of it, if that does not end the training.
        checkpoint_id: of the checkpoint; None for a file, which has none.
        future: resolves when it is committed, and what ``follow`` does is done.
        begun: when the save began, by `time.perf_counter`.
        durable: when it had ended, well or not; 0.0 before. Set by another thread.
    """

    step: int
    epoch: float | None = None
    metrics: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = field(default_factory=dict)
    name: str = ""
    overwrite: bool = False
    extra: Mapping[str, str] = field(default_factory=dict)
    follow: Callable[[Future[Any]], Future[Any]] | None = None
    committed: Callable[[RunSave, Any], object] = lambda save, result: None
    lost: Callable[[RunSave, BaseException], str] = _step_not_saved
    checkpoint_id: str | None = None
    future: Future[Any] = field(default_factory=Future)
    begun: float = 0.0
    durable: float = 0.0


def new_start_id() -> str:
    """Return an id for one life of a process; part of file names, so two lives never share a file."""
    return secrets.token_hex(4)


def manifest_fields(
    *,
    checkpoint_id: str,
    step: int | None,
    epoch: float | None,
    metrics: Mapping[str, Any],
    run_id: str | None = None,
    parent: str | None = None,
    attempt: int = 1,
    world_size: int = 1,
) -> dict[str, Any]:
    """Return the fields of a manifest that the trainer knows; the defaults are those of a save without a run."""
    return {
        "run_id": run_id,
        "checkpoint_id": checkpoint_id,
        "parent": parent,
        "attempt": attempt,
        "step": step,
        "epoch": epoch,
        "created": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "metrics": plain_metrics(metrics) if metrics else {},
        "world_size": world_size,
        "versions": {"holdfast": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


class PendingSaves:
    """Saves that follow one another, oldest first. Used by a single thread.

    One that the storage did not take costs itself, the tenth in a row raises; one whose data is gone (a tensor changed
    while it was copied, the writer died after the last window) costs itself; any other failure raises.

    Args:
        uri: of their storage, for messages.
        timeout_s: how long to wait for one save, in seconds; may be changed.
        bound: names the user's argument that ``timeout_s`` is, for messages; "" if no argument does.
        rank: of this process, where several ranks save together: then a failure is taken in by `settle` alone, which
            all of them call at the same step; None for a process alone.
        on_full: when the storage is full or does not answer: "skip" a save, "wait" (the owner tries again, see
            `wants_retry`) or "raise".
        held: called with the seconds that a wait held the caller.

    Attributes:
        ended: set when something has ended that `settle` has to take in.
        parent: id of the newest durable checkpoint, or of the checkpoint that training goes on from.
        lost: counts the saves that the storage did not take.
        wants_retry: ``on_full="wait"``, and the last save found no space, or no answer.
        wants_another: the last save was dropped because its data is gone, so the current step is to be saved instead.
    """

    def __init__(
        self,
        uri: str,
        *,
        timeout_s: float,
        bound: str = "",
        rank: int | None = None,
        on_full: str = "skip",
        held: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        self._uri, self.timeout_s, self._bound = uri, timeout_s, bound
        self._rank, self._held = rank, held
        self.on_full = on_full
        self.ended = Event()
        self.parent: str | None = None
        self.lost = LostSaves()
        self.wants_retry = self.wants_another = False
        self.stuck = False  # the time for a save was up: it is not waited for as long again
        self._newest: tuple[int, str | None] = (-1, None)  # step and name of the newest durable checkpoint
        self._pending: list[RunSave] = []  # oldest first
        self._gone: set[str] = set()  # names of saves that were lost

    def resume_at(self, step: int, *, name: str | None, checkpoint_id: str | None) -> None:
        """Begin at a step whose checkpoint is durable already.

        Args:
            step: of the training.
            name: of its checkpoint.
            checkpoint_id: parent of the next checkpoint.
        """
        self.parent, self._newest = checkpoint_id, (step, name)

    def add(self, save: RunSave) -> None:
        """Follow a save that was handed over."""

        def ended(_: Future[Any]) -> None:
            save.durable = save.durable or time.perf_counter()
            self.ended.set()

        self._pending.append(save)
        save.future.add_done_callback(ended)

    # -- what there is

    @property
    def last_step(self) -> int:
        """Newest step with a save that is durable or on its way; -1 before the first."""
        return self._pending[-1].step if self._pending else self._newest[0]

    @property
    def last_name(self) -> str | None:
        """Name of the checkpoint of `last_step`."""
        return self._pending[-1].name if self._pending else self._newest[1]

    def __len__(self) -> int:
        """Return the number of saves that `settle` has not taken in."""
        return len(self._pending)

    @property
    def busy(self) -> bool:
        """True while a save is being written."""
        return bool(self._pending) and any(not save.durable for save in self._pending)  # asked at each step

    def is_lost(self, name: str) -> bool:
        """Tell whether the save of this name was lost, as far as its writer has said."""
        ended = (save for save in self._pending if save.name == name and save.future.done())
        return name in self._gone or any(save.future.exception() is not None for save in ended)

    # -- what became of them

    def glance(self) -> None:
        """Process, between saves, what has ended.

        Of saves of many ranks only good ends: a failure changes what is done next, so all ranks take it in at the same
        step: the next save, or a step they agree on.
        """
        if self._rank is None:
            self.settle(leave=len(self._pending))
            return
        self.ended.clear()
        while self._pending and self._pending[0].future.done() and self._pending[0].future.exception() is None:
            self._take_in(self._pending.pop(0))

    def settle(self, *, leave: int = 0) -> None:
        """Process what has ended; wait until at most ``leave`` saves are on their way.

        Raises:
            HoldfastError: a save failed, or takes too long.
            StorageError: the storage did not take the tenth save in a row.
        """
        self.ended.clear()
        while self._pending:
            save = self._pending[0]
            if not save.future.done():
                if len(self._pending) <= leave:
                    return
                begun = time.perf_counter()
                limit_s = self.timeout_s + (0.0 if self._rank is None else ANSWER_MARGIN_S)
                wait([save.future], timeout=0.0 if self.stuck else limit_s)
                self._held(time.perf_counter() - begun)
                self.stuck = not save.future.done()
                if self.stuck:
                    whose = "" if self._rank is None else f"rank {self._rank}: "
                    raise HoldfastError(
                        f"{whose}the save of step {save.step} is not durable after {limit_s:.0f} s{self._bound}: "
                        f"{self._uri} is stuck or very slow; training cannot count on it"
                    )
            del self._pending[0]
            self._take_in(save)

    def _take_in(self, save: RunSave) -> None:
        self.stuck = False
        error = save.future.exception()
        if error is None:
            self.lost.durable()
            self.wants_retry = self.wants_another = False
            self.parent, self._newest = save.checkpoint_id or self.parent, (save.step, save.name)
            save.committed(save, save.future.result())
            return
        # Its step is not saved: the final save must not count it as done, nor the next save take it as its parent.
        self._gone.add(save.name)
        message = save.lost(save, error)
        if isinstance(error, DroppedSaveError):
            self.wants_another = True
            if not self._rank:
                _LOG.warning("%s; training goes on", message)
            return
        if not isinstance(error, TRANSIENT_ERRORS):
            raise error
        # "wait" tries the same step again; its own timeout bounds that.
        self.lost.add(error, limit={"raise": 1, "wait": None}.get(self.on_full, MAX_LOST))
        if not (self._rank or self.wants_retry):  # rank 0, or alone: all ranks lose the same save; a retry is not said
            what_next = "is held until it can be saved, up to timeout_s" if self.on_full == "wait" else "goes on"
            _LOG.warning("%s; training %s (save %d in a row)", message, what_next, self.lost.in_a_row)
        self.wants_retry = self.on_full == "wait"


def failed(error: BaseException) -> Future[Any]:
    """Return the future of a save that the storage refused before the writer had it."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


class NoteSender:
    """Sends records in their order: at once, or from a thread of its own as soon as one of them has to wait.

    Args:
        client: the writer.

    Attributes:
        newest_save: name of the checkpoint whose save began last, and what is done when the writer has it (None: it has
            it). What is said about that save comes after it, for the writer has to know it.
    """

    def __init__(self, client: WriterClient) -> None:
        self._client = client
        self._executor: SerialExecutor | None = None
        self._newest: Future[None] | None = None  # done when the newest record of that thread is sent
        self.newest_save: tuple[str | None, Future[Any] | None] = (None, None)

    def send(
        self, op: str, args: Mapping[str, Any], *, about: str | None, late: Callable[[], Mapping[str, Any]] | None
    ) -> Future[Any]:
        """Send a record; returns the future of its answer.

        Args:
            op: kind of record, see `WriterClient.run_op`.
            args: the record.
            about: name of its checkpoint.
            late: gives the rest of the record; may wait for a device.
        """
        name, handed_over = self.newest_save
        # Rows of a report name a checkpoint that may come later, or never; they go ahead of it.
        after = handed_over if op != "report" and about is not None and about == name else None
        waits = late is not None or (after is not None and not after.done())
        if not waits and (self._newest is None or self._newest.done()):
            return self._client.run_op(op, **args)
        if self._executor is None:
            self._executor = SerialExecutor("holdfast-notes")
        answered: Future[Any] = Future()

        def send() -> None:
            try:
                wait([] if after is None else [after])
                sent = self._client.run_op(op, **args, **({} if late is None else late()))
            except BaseException as error:  # noqa: BLE001 - a thread edge: the record's future carries it
                answered.set_exception(error)
            else:
                chain(sent, answered)

        self._newest = self._executor.run(send)
        return answered

    def behind(self, read: Callable[[], Mapping[str, Any]]) -> Callable[[], Mapping[str, Any]]:
        """Return what calls ``read`` once the records up to now are sent.

        So a trainer that is killed right after it has handed a save over has sent the rows that belong to it too.
        """
        newest = self._newest
        if newest is None:
            return read

        def wait_and_read() -> Mapping[str, Any]:
            wait([newest])
            return read()

        return wait_and_read

    def close(self) -> None:
        """Send nothing more than what is on its way; waits for nothing."""
        if self._executor is not None:
            self._executor.close(wait=False)


class LostSaves:
    """Counts the saves that a storage did not take: each costs itself, the tenth in a row ends the training.

    Attributes:
        total: saves lost so far.
        in_a_row: of these, since the last save that became durable.
        error: why the newest save was lost; None once a later save is durable.
    """

    def __init__(self) -> None:
        self.total = self.in_a_row = 0
        self.error: StorageError | None = None

    def durable(self) -> None:
        """Note that a save is durable: those lost before it were not the end."""
        self.in_a_row, self.error = 0, None

    def add(self, error: StorageError, *, limit: int | None = MAX_LOST) -> None:
        """Count a lost save.

        Args:
            error: one of `TRANSIENT_ERRORS`.
            limit: the number in a row from which training must not go on; None for no limit.

        Raises:
            StorageError: at the limit: ``error``, or what has been lost with it.
        """
        self.total += 1
        self.in_a_row += 1
        self.error = error
        if limit == 1:
            raise error
        if limit is not None and self.in_a_row >= limit:
            lost = f"{self.in_a_row} saves in a row were lost, {state_of(error)} ({error})"
            raise passing_error(error, lost) from error


def state_of(error: BaseException | None) -> str:
    """Return in words why a save was lost."""
    return "the storage does not answer" if isinstance(error, StorageUnavailableError) else "the storage is full"


def passing_error(error: BaseException | None, lost: str) -> StorageError:
    """Return the error for a run that ends without its last save: what was lost, why, and what to do."""
    again = "start the same command again, it goes on from there"
    if isinstance(error, StorageUnavailableError):
        return StorageUnavailableError(f"{lost}: when it answers again, {again}")
    return StorageFullError(f"{lost}: free some space and {again}")


_TOLD_EVERY_S = 1.0  # a snapshot of each step would be a message of each step


@dataclass(slots=True)
class Stats:
    """Totals of one `Checkpointer`.

    Attributes:
        saves: checkpoints committed.
        skipped: saves that were due and left out (writer busy, storage full), or dropped (a tensor changed).
        bytes_written: bytes that went to the storage.
        bytes_reused: bytes shared with the checkpoint before instead of written.
        seconds_blocked: time `step` and `save` held the loop.
        seconds_lost: blocked time, plus what steps took longer while a save was being written than usual.
        seconds_to_durable: time from each save's start to its commit.
        last_durable_step: newest step that is safe; -1 before the first. In a mirrored run: on the local disk.
        last_remote_step: newest step that the remote of a mirrored run has; -1 before the first, and without a mirror.
        remote_behind: checkpoints on the local disk that wait for their upload.
        seconds_since_remote: age of the newest checkpoint at the remote.
    """

    saves: int = 0
    skipped: int = 0
    bytes_written: int = 0
    bytes_reused: int = 0
    seconds_blocked: float = 0.0
    seconds_lost: float = 0.0
    seconds_to_durable: list[float] = field(default_factory=list)
    last_durable_step: int = -1
    last_remote_step: int = -1
    remote_behind: int = 0
    seconds_since_remote: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the totals as plain data."""
        return asdict(self)


class SaveCosts:
    """Divides the held and lost time of a run: each save pays for itself, and snapshots are counted together.

    Steps that ran while a save was being written are told apart from quiet ones: the time lost to a save is the sum
    over its steps of what each took longer than the median quiet step.

    Args:
        stats: has the totals of both.

    Example:
        >>> costs = SaveCosts(Stats())
        >>> costs.held(0.5)
        >>> costs.kept(0.25, step=7)
        >>> costs.of_save()
        (0.5, 0.5)
        >>> costs.of_save(), costs.take_snapshots()["held_s"]
        ((0.0, 0.0), 0.25)
    """

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._counted = (0.0, 0.0)  # seconds blocked and lost that are told, or are those of snapshots
        self._snapshots_s = 0.0
        self._untold: dict[str, Any] = {}
        self._next_telling = 0.0
        self._quiet: deque[float] = deque(maxlen=64)
        self._draining: list[float] = []

    def stepped(self, seconds: float, *, draining: bool) -> None:
        """Take in one step, without the time it was held."""
        (self._draining if draining else self._quiet).append(seconds)

    def held(self, seconds: float) -> None:
        """Take in that a save has held the loop."""
        self._stats.seconds_blocked += seconds
        self._stats.seconds_lost += seconds

    def kept(self, seconds: float, *, step: int) -> None:
        """Take in that a snapshot of ``step`` has just held the loop: no save pays for it."""
        self.held(seconds)
        held, lost = self._counted
        self._counted = held + seconds, lost + seconds
        self._snapshots_s += seconds
        self._untold = {"step": step, "time": time.time(), "held_s": self._snapshots_s}

    def of_save(self) -> tuple[float, float]:
        """Return the seconds held and lost since the save before, which the one that has just ended pays for."""
        steps, self._draining = self._draining, []
        if len(self._quiet) >= 3 and steps:
            usual = statistics.median(self._quiet)
            self._stats.seconds_lost += max(0.0, sum(seconds - usual for seconds in steps))
        before, self._counted = self._counted, (self._stats.seconds_blocked, self._stats.seconds_lost)
        return self._counted[0] - before[0], self._counted[1] - before[1]

    def take_snapshots(self, *, is_end: bool = False) -> dict[str, Any]:
        """Return, for the journal, the last snapshot and what all have cost; nothing twice, nor twice in a second.

        Args:
            is_end: no more come, so there is no waiting for the second to be over.
        """
        now = time.monotonic()
        if not self._untold or (now < self._next_telling and not is_end):
            return {}
        told, self._untold, self._next_telling = self._untold, {}, now + _TOLD_EVERY_S
        return told
