"""`RunSession`: one process's hold on a run, from its lease to its end, and the saves that go into it.

Every front door makes a `RunSession`. The front door decides when to save and what to print. The session decides how a
save is named and numbered, what its parent is, how it is followed, and what a lost save costs.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast._log import get_logger
from holdfast.config import Keep, Mirror
from holdfast.errors import CheckpointNotFoundError, DroppedSaveError, HoldfastError, StorageError
from holdfast.format.names import MANIFEST_NAME
from holdfast.run.life import LifeReport, deaths_before
from holdfast.state.save.snapshot import Snapshotter
from holdfast.storage.base import Storage
from holdfast.writer.arena import StepMemory
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import IngestJob, IngestSource, RunOpened, SaveJob, SaveResult

from .meeting import SILENCE_S, Alone, Meeting
from .pending_saves import (
    TRANSIENT_ERRORS,
    NoteSender,
    PendingSaves,
    RunSave,
    SaveCosts,
    Stats,
    failed,
    manifest_fields,
    new_start_id,
    state_of,
)

if TYPE_CHECKING:
    from .announce import Announcer, Listener
    from .rank_group import RankGroup
    from .remote import RemoteWatch

__all__ = ["RunSession", "answer"]

_LOG = get_logger("checkpointer")
_LEASE_S = 3600.0  # that the writer of a dead trainer may still take to finish
_SNAPSHOTS = 1 << 40  # beyond the numbers of saves: whether a rank could keep one changes none of those
_SAID_AGAIN_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """Something small on its way to the run: rows of a report, late metrics.

    Attributes:
        future: resolves when it is durable.
        about: name of its checkpoint, if it has one.
        what: the beginning of what is logged if it is lost.
    """

    future: Future[Any]
    about: str | None
    what: str


class RunSession:
    """Holds a run: starts its writer, takes its lease, follows saves, gives the run back. Used by a single thread.

    Saves are taken in, in their order, by `settle`, see `PendingSaves`.

    Args:
        storage: where saves go; the root of the run, unless `open` is given another.
        remote: where a mirrored run is uploaded to.
        meeting: of the ranks that save together; their writers join one another.
        on_full: when the storage is full or does not answer: "skip" a save, "wait" (the owner tries again, see
            `wants_retry`) or "raise".
        timeout_s: bound of every wait.
        timeout_name: the user's argument that sets this bound, for messages; "" if no argument does.
        silence_s: a rank that says nothing for so long is given up.
        client: the writer, which `close` closes; None: a new one.

    Attributes:
        root: of the run.
        client: the writer.
        rank_group: the ranks that save together; None for this process alone.
        leads: the run is open in our writer.
        staged: the ranks share no disk: the run is at the remote, and each rank stages its part of a save.
        start_id: of this life.
        is_open: the lease was taken.
        opened: what opening the run has found; not there before.
        has_begun: the first step of this life is done.
        quarantined: reasons of the checkpoints that were set aside, by name.
        names: names that are taken under the run.
        saves: those on their way, but for the ones that are followed by their owner.
        stats: what saving has cost.
        costs: divides that among the saves; its owner feeds it with the steps.
        remote_watch: follows the uploads of a mirrored run.
        announcer: calls listeners with what is committed; None without any.
        life: what this process tells `holdfast run`, if that has started it.
        paid: called with the seconds that a save has cost training, and those until it was durable; None: nobody asks.
        extra: entries of the manifest's ``extra`` for the next saves.
        memory: what the writer has to know if this process is killed.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        remote: Storage | None = None,
        meeting: Meeting | None = None,
        on_full: str = "skip",
        timeout_s: float = 600.0,
        timeout_name: str = "timeout_s",
        silence_s: float = SILENCE_S,
        client: WriterClient | None = None,
    ) -> None:
        self.storage = self.root = storage
        self.remote, self.timeout_s = remote, timeout_s
        self._bound = f" ({timeout_name})" if timeout_name else ""
        self.meeting: Meeting = meeting or Alone()
        self.leads = self.meeting.rank == 0
        self.staged = False
        self.quarantined: dict[str, str] = {}
        self.names: set[str] = set()
        self.stats = Stats()
        self.costs = SaveCosts(self.stats)
        self.remote_watch: RemoteWatch | None = None
        self.announcer: Announcer | None = None
        self.life = LifeReport()
        self.paid: Callable[[float, float], object] | None = None
        self.extra: dict[str, Any] = {}
        self._staged_saves: dict[str, Mapping[str, Any]] = {}  # name -> fields of its manifest
        self.opened: RunOpened
        self.is_open = False
        self._notes: list[_Note] = []
        self._said: dict[str, float] = {}  # of notes that the storage did not take: until when that is said
        self._number = 0
        self.has_begun = False
        self.memory = StepMemory()
        self.client = WriterClient.start(storage, remote=remote) if client is None else client
        self._sender = NoteSender(self.client)
        self.start_id = new_start_id()
        self.rank_group: RankGroup | None = None
        if self.meeting.world_size > 1:
            self.rank_group = self._join(silence_s)
            self.start_id = self.rank_group.start_id
        self.saves = self.pending(on_full=on_full)

    def _join(self, silence_s: float) -> RankGroup:
        from .rank_group import RankGroup  # not above: most runs have one rank

        try:
            return RankGroup(self.meeting, self.client, timeout_s=self.timeout_s, silence_s=silence_s)
        except BaseException as error:
            self.client.close(self.timeout_s, why=f"did not start: {type(error).__name__}")
            raise

    def pending(self, *, on_full: str = "skip") -> PendingSaves:
        """Return what follows saves into this run, see `PendingSaves`."""
        return PendingSaves(
            self.storage.uri, timeout_s=self.timeout_s, bound=self._bound,
            rank=None if self.rank_group is None else self.rank_group.rank, on_full=on_full, held=self.costs.held,
        )  # fmt: skip

    # -- the run

    def open(
        self, *, keep: Keep | None, root: Storage | None = None, mirror: Mirror | None = None, links: bool = True
    ) -> RunOpened:
        """Take the lease of the run on rank 0, and check that all ranks see its storage.

        Args:
            keep: rules of retention; None keeps everything.
            root: root of the run, if saves go elsewhere first.
            mirror: rules of a mirrored run, whose other side is ``remote``.
            links: whether a run on a disk has a link to its newest checkpoint.

        Raises:
            RunBusyError: another live process holds the run.
            ConfigError: a rank sees another storage; names the ranks.
        """
        self.root = storage = root or self.storage
        mark, many = f".probe-{self.start_id}/ranks", self.meeting.world_size > 1
        lease_s = min(_LEASE_S, self.timeout_s)

        def open_here() -> dict[str, Any] | None:
            if not self.leads:
                return None
            future = self._request(keep, lease_s, mirror, links=links)
            far = storage if mirror is None or self.remote is None else self.remote
            opened: RunOpened = self.answer(future, far, lease_s + self.timeout_s)
            # What a save must not be called: checkpoints, good or bad, and anything else that lies there.
            names = {*(row[0] for row in opened.records), *opened.quarantined, *opened.taken}
            if storage.local_root is not None:  # at an object store `opened.taken` has all names
                names.update(info.path.rstrip("/") for info in storage.list("", recursive=False))
            if many:
                storage.put(mark, b"all ranks see this file")
            return {"opened": opened.to_json(), "names": sorted(names)}

        found = self.meeting.agree("open", open_here, work_s=lease_s + self.timeout_s)
        self._take(RunOpened.from_json(found["opened"]))
        self.names = set(found["names"])
        if many:
            from .rank_group import check_shared  # not above: most runs have one rank

            check_shared(self.meeting, storage, mark)
        return self.opened

    def open_later(self, *, keep: Keep | None) -> Future[RunOpened]:
        """Take the lease without waiting for it. `opened` is there before the callbacks of the future run."""

        def take(done: Future[RunOpened]) -> None:
            if not done.cancelled() and done.exception() is None:
                self._take(done.result())

        future = self._request(keep, min(_LEASE_S, self.timeout_s))
        future.add_done_callback(take)
        return future

    def _request(
        self, keep: Keep | None, lease_s: float, mirror: Mirror | None = None, *, links: bool = True
    ) -> Future[RunOpened]:
        return self.client.open_run(
            self.root, owner={"start_id": self.start_id}, keep=None if keep is None else keep.to_json(),
            wait_s=lease_s, mirror=mirror, remote=None if mirror is None else self.remote,
            memory=self.memory.arena, links=links,
        )  # fmt: skip

    def note_step(self, step: int) -> None:
        """Let the writer, and `holdfast run`, know how many steps are done; costs no call."""
        self.memory.note_step(step)
        self.life.stepped(step)

    def _take(self, opened: RunOpened) -> None:
        self.opened, self.is_open, self.quarantined = opened, True, dict(opened.quarantined)
        uri = self.root.uri
        self.life = LifeReport.begin(uri=uri, attempt=opened.attempt, rank=self.meeting.rank)
        if self.leads:
            for death in deaths_before(uri):
                self.journal(**death)

    @property
    def sides(self) -> list[Storage]:
        """The storages in which checkpoints of this run lie."""
        return [self.root] if self.remote is None or self.staged else [self.root, self.remote]

    def answer(self, future: Future[Any], storage: Storage | None = None, timeout_s: float | None = None) -> Any:
        """Wait for an answer of the writer, for a bounded time.

        Args:
            future: the answer.
            storage: named in the error if there is no answer; default: that of the run.
            timeout_s: how long to wait; default: that of the session.

        Raises:
            HoldfastError: the error that the writer answers, or no answer in time.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        return answer(future, storage or self.root, limit_s, bound=self._bound)

    def ask(self, op: str, **args: Any) -> Any:
        """Ask the writer something about the run, see `WriterClient.run_op`, and wait for its answer."""
        return self.answer(self.client.run_op(op, **args))

    def quarantine(self, name: str, reason: str, *, side: str | None = None) -> None:
        """Set a bad checkpoint aside: no start takes it any more, its files stay.

        Args:
            name: which.
            reason: why.
            side: URI of the side of a mirrored run on which it is bad; None: wherever it is.
        """
        where = {} if side is None else {"side": side}
        self.ask("quarantine", name=name, reason=reason, **where)
        if side is None:
            self.quarantined[name] = reason

    def resume_at(self, step: int, *, name: str | None, checkpoint_id: str | None) -> None:
        """Begin at a step whose checkpoint is durable already.

        Args:
            step: of the training.
            name: of its checkpoint, which belongs to this run.
            checkpoint_id: parent of the next checkpoint.
        """
        self.saves.resume_at(step, name=name, checkpoint_id=checkpoint_id)
        self.memory.note_step(step)
        self.stats.last_durable_step = step

    def announce(self, listeners: Sequence[Listener], *, mirror: Mirror | None = None) -> None:
        """Call listeners with each checkpoint when it is committed; of a mirrored run, follow the uploads too.

        Args:
            listeners: called with each checkpoint; where the ranks share no disk, once it is at the remote.
            mirror: rules of a mirrored run.
        """
        if listeners:
            from .announce import Announcer  # not above: most runs have no listener

            self.announcer = Announcer(listeners)
        announcer, far, staged = self.announcer, self.remote, self.staged

        def arrived(name: str) -> None:
            if announcer is not None and far is not None and staged:
                from holdfast.checkpoint.handle import Checkpoint, CommittedCheckpoint  # not above: needed by few

                known = self._staged_saves.pop(name, None)
                if known is None:  # an earlier life has saved it
                    announcer.tell(Checkpoint.at(far, name))
                else:
                    announcer.tell(CommittedCheckpoint.told(far, name, step=known["step"], metrics=known["metrics"]))

        if mirror is not None and far is not None and self.leads:
            from .remote import RemoteWatch  # not above: only mirrored runs follow uploads

            self.remote_watch = RemoteWatch(
                self.client, mirror, far.uri, staged=staged, arrived=arrived,
            )  # fmt: skip

    # -- saves

    def save_state(
        self,
        state: Callable[[], Mapping[Any, Any]],
        snapshotter: Snapshotter,
        save: RunSave,
        *,
        announce: Callable[[str], object] | None = None,
        saves: PendingSaves | None = None,
    ) -> None:
        """Copy a state and hand it to the writer; waits for the saves before. The state may change afterwards.

        Args:
            state: returns what to save.
            snapshotter: copies it; of this session alone.
            save: what its owner says of it.
            announce: called with the name of the checkpoint before the save is handed over.
            saves: those that it comes after; None: those of the session.

        Raises:
            HoldfastError: an earlier save failed, or this save cannot begin. A storage that is full or does not answer
                is a lost save, which `settle` takes in.
        """
        if saves is None:
            self.settle()
            saves = self.saves
        else:
            saves.settle()
        self._name(save)
        save.begun, save_id, metrics = time.perf_counter(), self.next_save_id(), save.metrics
        try:
            with contextlib.nullcontext() if self.rank_group is None else self.rank_group.broadcast_errors(save_id):
                if self.remote_watch is not None:
                    self.remote_watch.make_room(self.timeout_s)
                # Metrics first: a trainer killed right after the hand-over has its save committed all the same.
                if announce is not None:
                    announce(save.name)
                job = self._job(save, saves, save_id)
                if self.staged:
                    self._staged_saves[save.name] = job.manifest  # its metrics may come when it is handed over
                late = self._sender.behind(metrics) if callable(metrics) else None
                save.committed = partial(self._state_committed, snapshotter, job.manifest)
                save.future = snapshotter.submit(
                    state(), self.client, self.storage, job, metrics=late, lazy=save.follow is None
                )  # fmt: skip
                # So that `holdfast run` keeps the memory of the newest saves for the next life.
                self.life.keeps(snapshotter.arenas, snapshotter.arena_files)
                self._sender.newest_save = save.name, snapshotter.handed_over
        except (*TRANSIENT_ERRORS, DroppedSaveError) as error:
            save.future = failed(error)
        self._begin(save, saves)
        self.costs.held(time.perf_counter() - save.begun)

    def _state_committed(
        self, snapshotter: Snapshotter, manifest: Mapping[str, Any], save: RunSave, result: SaveResult
    ) -> None:
        held, lost = self.costs.of_save()
        cost = {"durable_s": self.stats.seconds_to_durable[-1], "held_s": held}
        if save.follow is None:
            cost["lost_s"] = lost
            if self.paid is not None:
                self.paid(lost, cost["durable_s"])
        self.journal("cost", step=save.step, name=save.name, **cost)
        snapshotter.observe(result.unchanged)
        # A staged save is announced when it has arrived at the remote.
        if self.leads and not self.staged and self.announcer is not None:
            from holdfast.checkpoint.handle import CommittedCheckpoint

            told = CommittedCheckpoint.told(
                self.storage, result.directory, step=save.step, metrics=manifest["metrics"], manifest=result.manifest
            )
            self.announcer.tell(told)

    def keep_state(
        self,
        state: Callable[[], Mapping[Any, Any]],
        snapshotter: Snapshotter,
        save: RunSave,
        *,
        saves: PendingSaves | None = None,
    ) -> bool:
        """Copy a state and have the writer hold the copy, which it commits only if this process dies.

        Args:
            state: returns what to save.
            snapshotter: copies it.
            save: as for `save_state`; its metrics are read now.
            saves: as for `save_state`.

        Returns:
            False if memory is too short for it.
        """
        begun = time.perf_counter()
        self._name(save)
        if callable(save.metrics):
            save.metrics = save.metrics()
        job = self._job(save, saves or self.saves, f"{self.start_id}-{_SNAPSHOTS + save.step:x}")
        kept = snapshotter.keep(state(), self.client, self.storage, job)
        self.life.keeps(snapshotter.arenas, snapshotter.arena_files)
        self.costs.kept(time.perf_counter() - begun, step=save.step)
        self._tell_snapshots()
        return kept

    def save_directory(
        self, sources: Sequence[IngestSource], save: RunSave, *, save_id: str, world_size: int
    ) -> None:  # fmt: skip
        """Let the writer make a checkpoint of directories, even if this process dies meanwhile.

        Args:
            sources: what to take.
            save: what its owner says of it; its ``lost`` is called too if the directories cannot be handed over.
            save_id: of `next_save_id`.
            world_size: number of ranks that train.

        Raises:
            HoldfastError: they cannot be handed over.
        """
        self._name(save)
        save.begun = time.perf_counter()
        fields = self._fields(save, self.saves, world_size)
        try:
            job = IngestJob(directory=save.name, save_id=save_id, sources=tuple(sources), manifest=fields)
            save.future = self.client.ingest(self.storage, job)
        except BaseException as error:
            save.lost(save, error)
            raise
        self._begin(save, self.saves)

    def _job(self, save: RunSave, saves: PendingSaves, save_id: str) -> SaveJob:
        """Return what the writer is told of a state; the snapshotter adds its files."""
        joint, in_run = self.rank_group is not None, "/" not in save.name  # a run's index has what lies directly in it
        return SaveJob(
            directory=save.name, save_id=save_id, manifest=self._fields(save, saves, self.meeting.world_size),
            overwrite=save.overwrite, reuse=in_run, run=in_run and self.leads, part=joint, joint=joint,
        )  # fmt: skip

    def _fields(self, save: RunSave, saves: PendingSaves, world_size: int) -> dict[str, Any]:
        """Return what the trainer knows of a manifest."""
        opened = self.opened
        fields = manifest_fields(
            run_id=opened.run_id, checkpoint_id=save.checkpoint_id or "", parent=saves.parent, attempt=opened.attempt,
            step=save.step, epoch=save.epoch, metrics={} if callable(save.metrics) else save.metrics,
            world_size=world_size,
        )  # fmt: skip
        if extra := {**self.extra, **save.extra}:
            fields["extra"] = extra
        return fields

    def _name(self, save: RunSave) -> None:
        save.name, save.checkpoint_id = save.name or self._free_name(save.step), uuid.uuid4().hex

    def _free_name(self, step: int) -> str:
        """Return a name for a step; if it is taken (by a branch, or a quarantined checkpoint) add the attempt."""
        name = f"step_{step:08d}"
        if name in self.names:
            name = f"{name}-a{self.opened.attempt}"
        base, number = name, 1
        while name in self.names:
            number += 1
            name = f"{base}.{number}"
        return name

    def next_save_id(self) -> str:
        """Return an id for one save, unique over all lives of the run."""
        self._number += 1
        return f"{self.start_id}-{self._number:x}"

    def _begin(self, save: RunSave, saves: PendingSaves) -> None:
        """Follow a save that was handed over."""

        def ended(done: Future[Any]) -> None:
            save.durable = time.perf_counter()
            if not done.cancelled() and done.exception() is None:
                self.life.durable(save.step)  # now: a loop that hangs takes nothing in any more

        save.committed = partial(self._committed, save.committed)
        save.lost = partial(self._lost, save.lost)
        save.future.add_done_callback(ended)
        if save.follow is None:
            self.names.add(save.name)
        else:
            save.future = save.follow(save.future)
        saves.add(save)

    # -- what became of them

    def glance(self) -> None:
        """Process, between saves, what has ended, at next to no cost if nothing has; see `PendingSaves.glance`."""
        if not self.saves.ended.is_set():
            return
        if self.rank_group is None:
            self.settle(leave=len(self.saves))
        else:
            self.saves.glance()

    def settle(self, *, leave: int = 0) -> None:
        """Process what has ended; wait until at most ``leave`` saves are on their way.

        Raises:
            HoldfastError: a save, or something noted on the side, failed.
        """
        if not self._notes:
            self.saves.settle(leave=leave)
            return
        # Collected before the saves: a note that failed because its checkpoint is missing is processed after that save.
        done = [note for note in self._notes if note.future.done()]
        self.saves.settle(leave=leave)
        self._settle_notes(done)
        if any(note.future.done() for note in self._notes):  # it ended meanwhile
            self.saves.ended.set()

    def finish(self) -> None:
        """Wait for everything on its way; raises what failed."""
        self.settle()
        if self._notes:
            self._sender.send("hurry", {}, about=None, late=None)
            self.wait_for_notes()

    def _committed(self, committed: Callable[[RunSave, SaveResult], object], save: RunSave, result: SaveResult) -> None:
        stats = self.stats
        stats.saves += 1
        stats.bytes_written += result.bytes_written
        stats.bytes_reused += result.bytes_reused
        # `durable` is set on another thread, right after those who wait are woken.
        stats.seconds_to_durable.append((save.durable or time.perf_counter()) - save.begun)
        stats.last_durable_step = max(stats.last_durable_step, save.step)
        committed(save, result)

    def _lost(
        self, lost: Callable[[RunSave, BaseException], str], save: RunSave, error: BaseException
    ) -> str:  # fmt: skip
        if save.follow is None:  # the session gave the name
            self._free(save.name)
        if isinstance(error, (*TRANSIENT_ERRORS, DroppedSaveError)):
            self.stats.skipped += 1
        return lost(save, error)

    def _free(self, name: str) -> None:
        """Let the next try use the name of a save that failed, unless it committed after all."""
        if self.rank_group is not None:
            # No look at the storage: all ranks have to choose the same name next, and they may see different things.
            self.names.discard(name)
            return
        with contextlib.suppress(StorageError):
            if not self.storage.exists(f"{name}/{MANIFEST_NAME}"):
                self.names.discard(name)

    # -- what it cost

    def _tell_snapshots(self, *, is_end: bool = False) -> None:
        if told := self.costs.take_snapshots(is_end=is_end):
            self.journal("snapshots", **told)

    def began(self, step: int) -> None:
        """Record, once, that the first step of this life is done: until then it was starting."""
        if not self.has_begun:
            self.has_begun = True
            self.journal("began", step=step)

    def journal(self, what: str, **about: Any) -> None:
        """Record in the run's journal what only the trainer knows. Nobody waits for it, and it cannot fail a save."""
        if self.leads:
            event = {"what": what, "time": time.time(), "attempt": self.opened.attempt, **about}
            with contextlib.suppress(HoldfastError):
                self.client.run_op("journal", events=[event])

    # -- notes: small records that nobody waits for

    def note(
        self,
        op: str,
        *,
        about: str | None = None,
        what: str = "metrics were not recorded",
        late: Callable[[], Mapping[str, Any]] | None = None,
        **args: Any,
    ) -> None:
        """Send the writer a small record of the run, see `WriterClient.run_op`; its failure surfaces in `settle`.

        Args:
            op: kind of record.
            about: name of the checkpoint that it belongs to; if that save is lost, so is this record.
            what: the beginning of what is logged if the storage did not take it.
            late: gives the rest of the record, on a thread that may wait for a device.
            **args: the record.
        """
        future = self._sender.send(op, args, about=about, late=late)
        self._notes.append(_Note(future=future, about=about, what=what))
        future.add_done_callback(lambda _: self.saves.ended.set())

    def wait_for_notes(self) -> None:
        """Wait for everything noted, and for no save; raises what failed.

        Raises:
            HoldfastError: it failed, or takes longer than ``timeout_s``.
        """
        wait([note.future for note in self._notes], timeout=0.0 if self.saves.stuck else self.timeout_s)
        self._settle_notes([note for note in self._notes if note.future.done()])
        if self._notes:
            raise HoldfastError(f"metrics are not durable after {self.timeout_s:.0f} s: {self.storage.uri} is stuck")

    def _settle_notes(self, done: Sequence[_Note]) -> None:
        self._notes = [note for note in self._notes if note not in done]
        for note in done:
            error = note.future.exception()
            if isinstance(error, TRANSIENT_ERRORS) and self.saves.on_full != "raise":
                if self._said.get(note.what, 0.0) < time.monotonic():  # a disk stays full for hours
                    self._said[note.what] = time.monotonic() + _SAID_AGAIN_S
                    _LOG.warning("%s, %s: %s", note.what, state_of(error), error)
            elif (
                isinstance(error, CheckpointNotFoundError) and note.about is not None and self.saves.is_lost(note.about)
            ):
                _LOG.warning("metrics were not bound, the save of their step was lost: %s", error)
            elif error is not None:
                raise error
            else:
                self._said.pop(note.what, None)

    # -- the end

    def end(
        self, reason: str, *, details: Mapping[str, Any] | None = None, finished: Mapping[str, Any] | None = None
    ) -> None:
        """Give the lease back once the writer has finished its work, and record how the run ended.

        Args:
            reason: "finished", "stopped", or what ended it.
            details: small JSON about the end.
            finished: what a later start has to know of a finished training; None if it is not finished.

        Raises:
            HoldfastError: that, or another note, failed.
        """
        if self.leads and self.is_open:
            self._tell_snapshots(is_end=True)
            what = "the end of the run was not recorded"
            if finished is not None:
                self.note("finished", what=what, info=dict(finished))
            self.note("close_run", what=what, reason=reason, details=dict(details or {}))
        self.wait_for_notes()
        self.life.end(reason)

    def abandon(self, why: str) -> None:
        """Give up a run that failed before its first step; never raises."""
        with contextlib.suppress(HoldfastError):
            self.client.run_op("close_run", reason=why)
        self.close(why)

    def close(self, why: str, *, timeout_s: float | None = None) -> None:
        """End the writer, which first commits the saves it has; idempotent.

        Args:
            why: the reason that other ranks receive if they still expect a save of this rank.
            timeout_s: how long to wait for that; default: that of the session.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        self._sender.close()
        self.client.close(limit_s, why=why)
        if self.rank_group is not None:
            self.rank_group.close()
        if self.announcer is not None:
            self.announcer.close(limit_s)
        self.life.end()
        self.memory.close()


def answer(future: Future[Any], storage: Storage, timeout_s: float, *, bound: str = " (timeout_s)") -> Any:
    """Wait for an answer of the writer, for a bounded time.

    Args:
        future: the answer.
        storage: named in the error if there is no answer.
        timeout_s: how long to wait.
        bound: names the argument that ``timeout_s`` is, for the message.

    Raises:
        HoldfastError: the error that the writer answers, or no answer in time.
    """
    wait([future], timeout=timeout_s)
    if not future.done():
        raise HoldfastError(f"no answer after {timeout_s:.0f} s{bound}: {storage.uri} is stuck or very slow")
    return future.result()
