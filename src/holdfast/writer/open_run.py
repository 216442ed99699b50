"""The open run on the writer's side: lease, index, retention, reports."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from holdfast._log import get_logger
from holdfast.config import Keep
from holdfast.errors import (
    CheckpointError,
    ConfigError,
    HoldfastError,
    RunBusyError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
)  # fmt: skip
from holdfast.format.commit import read_manifest
from holdfast.format.manifest import Manifest
from holdfast.run.candidates import GUESTS, copies_shown
from holdfast.run.catalog import Catalog, draw_fence
from holdfast.run.index import Attempt, RunIndex
from holdfast.run.lease import Heartbeat, Lease
from holdfast.run.names import INCOMING
from holdfast.run.record import Record
from holdfast.run.remains import sweep_hidden
from holdfast.run.reports import Answer, ReportBuffer, check_rows, highest_attempt, read_history
from holdfast.run.retention import Verdict
from holdfast.run.trash import Trash
from holdfast.storage.base import Storage
from holdfast.storage.together import together

from .arena import rows_left, steps_done
from .messages import SPARE_BYTES, RunOpened

if TYPE_CHECKING:  # most writers never need them, and each start waits
    from .messages import MirrorLimits
    from .uploads.mirror import Mirroring, RemoteRun, RemoteSide
    from .uploads.queue import UploadQueue
    from .uploads.staged_run import StagedRun

__all__ = ["Run"]

_LOG = get_logger("writer")
_END_S = 5.0  # for deletions that are behind at the end; the next life goes on with them


def _at_once(call: Callable[[], object]) -> object:
    return call()


class Run:
    """One attempt at a run. Held from `open` to `close`; all methods but `report` belong to the working thread."""

    _catalog: Catalog  # set by `open`

    def __init__(self, lease: Lease, keep: Keep | None) -> None:
        self._heartbeat, self._keep = Heartbeat(lease), keep
        self._mirror: Mirroring | None = None
        self._staged: StagedRun | None = None
        # Of the catalog, which the thread that uploads staged saves works with as well.
        self._lock = threading.RLock()
        self._start_id = ""
        self._protected: frozenset[str] = frozenset()
        self._later: Callable[[Callable[[], object]], object] = _at_once
        self._gone: list[Verdict] = []  # deleted, and not reported to the trainer yet
        self._unconfirmed = False  # since the last commit it was not checked that the lease was still ours
        # Reports are written by their own thread; `resumed` writes to the same segments.
        self._segments = threading.Lock()
        self._closed = False
        self._reports = ReportBuffer(self._write_rows)
        self.memory: Callable[[], memoryview] | None = None  # of the trainer, see `StepMemory`
        self._last_rows: Sequence[Mapping[str, Any]] = ()  # of the last report

    @classmethod
    def open(
        cls,
        storage: Storage,
        *,
        owner: dict[str, Any],
        keep: dict[str, Any] | None,
        wait_s: float,
        again: dict[str, Any] | None = None,
        pause: Callable[[float], None] = time.sleep,
        remote: RemoteSide | None = None,
        later: Callable[[Callable[[], object]], object] = _at_once,
        links: bool = True,
    ) -> tuple[Run, RunOpened]:
        """Take the lease, find the checkpoints, register the attempt, sweep the remains of dead lives.

        Args:
            storage: root of the run.
            owner: start_id, trainer_pid and more fields of the lease.
            keep: rules of retention as JSON.
            wait_s: how long to wait for the lease.
            again: attempt number and run id, when an earlier writer of the same trainer died.
            pause: how to wait; may raise to give up.
            remote: the remote side of a mirrored run; ``storage`` and ``keep`` are then those of the local side.
            later: runs a call on the working thread, now or soon.
            links: whether a run on a disk has the link `LATEST`.
        """
        if not owner.get("start_id"):
            raise ConfigError("open_run needs an owner with a start_id")
        rules = None if keep is None else Keep.from_json(keep)
        far = None if remote is None else remote.open(storage, owner, wait_s=wait_s, pause=pause)
        run = None
        try:
            lease = Lease.acquire(storage, {**owner, "pid": os.getpid()}, wait_s=wait_s, sleep=pause)
            run = cls(lease, rules)  # now, for its heartbeat: reading and sweeping may take longer than a lease lasts
            run._later = later
            opened = run._begin(storage, owner["start_id"], far, again, links=links)
            if remote is not None and far is not None:
                opened = run._begin_mirror(opened, far, remote.limits, later)
        except BaseException:
            if run is not None:
                run._reports.close()
            held = [] if run is None else [run._heartbeat]
            for heartbeat in held if far is None else [*held, far.heartbeat]:
                with contextlib.suppress(StorageError):  # the first error says more
                    heartbeat.close()
            raise
        return run, opened

    def _begin(
        self, storage: Storage, start_id: str, far: RemoteRun | None, again: dict[str, Any] | None, *, links: bool
    ) -> RunOpened:
        """Find the checkpoints and register the attempt."""
        doomed = self._heartbeat.lease.predecessor.doomed
        looks: list[Callable[[], Any]] = [lambda: Catalog(storage, doomed=doomed), lambda: highest_attempt(storage)]
        catalog: Catalog
        catalog, reported = together(storage, looks)
        self._catalog = catalog
        catalog.announce = self._announce
        catalog.confirm = self._confirm
        catalog.links = links
        swept: list[str] = []
        index = catalog.index
        last = None if index.damage is not None else index.current
        if far is not None:
            far.join(index)
            catalog.side = "local"
        if again is None:
            above = 0 if far is None else far.highest_attempt
            attempt = self._register(start_id, above=above, reported=reported)
        else:
            attempt = _attempt_of(index, again, self._heartbeat.lease.owner)
            _check_rejoins(storage, index, attempt, self._heartbeat.lease.owner)
            index.rejoin(attempt, again["run_id"])
            self._protected = frozenset(again.get("protect", ()))
        draw_fence(self._heartbeat, catalog, attempt, last=last)
        if again is None:
            hidden = catalog.hidden if storage.local_root is None else None
            swept = [*catalog.sweep(), *sweep_hidden(storage, {attempt.start_id}, hidden)]
            Trash(storage).empty()
            if catalog.guests:
                _LOG.warning(
                    "%s: left alone, as copies of its checkpoints or renamed ones: %s. They are never deleted, and no "
                    "start takes one that resume= does not name",
                    storage.uri, copies_shown(catalog.guests),
                )  # fmt: skip
            early = {name: of for name, of in catalog.guests.items() if not catalog.others[name].name}
            if early != index.notes.get(GUESTS, {}):  # once their original is deleted nothing else tells what they are
                index.note(GUESTS, early or None)
        catalog.point_latest()  # whoever was here before may have died first
        self._start_id = attempt.start_id
        waited_s = self._heartbeat.lease.waited_s + (0.0 if far is None else far.heartbeat.lease.waited_s)
        return RunOpened(
            run_id=index.run_id,
            attempt=attempt.attempt,
            start_id=attempt.start_id,
            records=tuple(catalog.rows()),
            quarantined=catalog.bad(),
            finished=index.finished,
            waited_s=waited_s,
            swept=tuple(swept),
            copies=copies_shown(catalog.guests) if catalog.guests else "",
            notes=index.notes,
            taken=tuple(dict.fromkeys([*catalog.taken(), *catalog.found()])),
            incomplete=tuple(catalog.incomplete),
            strangers=tuple(sorted(catalog.others.keys() - catalog.guests.keys())),
            dead=tuple(sorted(catalog.fence.dead)) if catalog.fence is not None else (),
        )

    def _begin_mirror(
        self, opened: RunOpened, far: RemoteRun, limits: MirrorLimits, later: Callable[[Callable[[], object]], object]
    ) -> RunOpened:
        """Make the queue of uploads, and add the checkpoints of the remote side to ``opened``."""
        from .uploads.mirror import start_mirror

        self._mirror, fields = start_mirror(far, self._catalog, limits, changed=lambda: later(self._uploaded))
        self._mirror.protect(self._protected)
        now = self._catalog.index.current
        has_saved = now is not None and any(row[1] == now.attempt for row in self._catalog.index.rows.values())
        if now is not None and (now.resumed_from is not None or has_saved):
            # An earlier writer of this trainer died after the resume: "resumed" does not come again.
            self._mirror.queue.go()
        return replace(opened, **{**fields, "swept": (*opened.swept, *fields["swept"])})

    # ---- staged saves, whose parts lie on the disks of several machines

    def stage(self, make: Callable[[Heartbeat, Catalog, str], StagedRun]) -> None:
        """From now on saves are staged first; ``make`` is given the lease, the checkpoints and our start id."""
        self._staged = make(self._heartbeat, self._catalog, self._start_id)

    def stage_save(self, name: str, save: str, manifest: Manifest) -> None:
        """Take a save whose parts all ranks have staged."""
        if self._staged is None:
            raise HoldfastError("the writer could not begin to stage saves; its log says why")
        self._check()
        self._staged.add(name, save, manifest)

    def arrived(self, name: str, manifest: Manifest, then: Callable[[], object] = lambda: None) -> None:
        """Record a staged save that has been committed at the remote, then call ``then``; for any thread."""
        self._reports.flush()
        with self._lock:
            self.committed(name, manifest, kind="ranks")
            then()

    def admit(self, name: str, manifest: Manifest) -> None:
        """Let a checkpoint that an earlier life had staged count, although that life may have been taken over since.

        Raises:
            CheckpointError: its name cannot be used any more.
        """
        with self._lock:
            if name in self._catalog.dead:
                raise CheckpointError(
                    f"{name} cannot be brought to {self._catalog.storage.uri}: an owner that was taken over may still "
                    "be deleting there"
                )
            self._catalog.admit({name: manifest.checkpoint_id}, self._start_id)

    def newest(self) -> Record | None:
        """Return the newest checkpoint; may be called by any thread."""
        with self._lock:
            return self._catalog.newest()

    @property
    def uploads(self) -> UploadQueue | None:
        """What brings checkpoints to a remote, if anything does."""
        source = self._staged or self._mirror
        return None if source is None else source.queue

    def end_uploads(self) -> None:
        """Upload what is staged, for a bounded time."""
        if self._staged is not None:
            self._staged.end()

    def _is_staged(self, name: str, say: Callable[[], object]) -> bool:
        return self._staged is not None and name not in self._catalog.index.rows and self._staged.keeps(name, say)

    def _uploaded(self) -> None:
        if not self._closed and self._heartbeat.lost is None:
            self.retain()

    # ---- saves

    def before_commit(self) -> None:
        """Refuse to commit after the lease was lost; make the metrics up to this save durable before it."""
        self._check()
        self._reports.flush()

    def verify(self) -> None:
        """Make sure, by one read, that the lease was ours up to now.

        Raises:
            RunBusyError: another process has taken the run over.
            StorageError: the storage does not answer.
        """
        self._heartbeat.verify()

    def is_void(self, name: str, manifest: Manifest | None = None) -> bool:
        """Whether a manifest under ``name`` counts for nothing; see `RunView.is_void`."""
        return self._catalog.is_void(name, manifest)

    def _check(self) -> None:
        self._heartbeat.check()
        if self._mirror is not None:
            self._mirror.check()

    def committed(
        self, name: str, manifest: Manifest, *, kind: str, durable_s: float | None = None, is_new: bool = False
    ) -> tuple[tuple[str, str], ...]:
        """Record a commit and apply retention; give the names that were deleted and why.

        The checkpoint is committed whatever happens here: the index is a cache, so its failure is only said. But it
        counts only if the lease was still ours when its manifest was there: that is asked for now, after the fact.

        Args:
            name: of the checkpoint.
            manifest: of the checkpoint.
            kind: how it was made (`holdfast.run.journal.JournalEvent`).
            durable_s: how long that took.
            is_new: it was committed just now, so nothing can lie beside it.

        Raises:
            RunBusyError: another process had taken the run over: this checkpoint must not be counted on.
            StorageError: the storage does not answer, so it is not known whether the checkpoint counts.
        """
        journal = self._catalog.index.journal
        journal.add(
            "saved", name=name, kind=kind, attempt=manifest.attempt, step=manifest.step or 0,
            bytes=manifest.total_bytes, reused=manifest.reused_bytes, durable_s=durable_s,
            why=str(manifest.extra.get("rescued", "")),
        )  # fmt: skip
        with self._lock:
            self._unconfirmed = True
            if self._mirror is not None:
                self._confirm()  # at a local disk, where one more read is cheap
            try:
                record = self._catalog.add(name, manifest, is_new=is_new)
                if self._mirror is not None:
                    self._mirror.committed(record)
                self._retain()
                if journal.is_full:
                    with self._segments, contextlib.suppress(StorageError):  # tried again, and old events are dropped
                        self._catalog.index.flush_journal()
            except RunBusyError:
                raise
            except HoldfastError as error:
                _LOG.warning("%s is committed, but the index of the run could not be written: %s", name, error)
            self._confirm()
            return self._told()

    # ---- the journal: nothing here writes or fails

    def note_lost(self, name: str, fields: Mapping[str, Any], error: BaseException) -> None:
        """Note that a save with these fields of a manifest failed."""
        about = {"attempt": fields.get("attempt") or 0, "step": fields.get("step") or 0}
        self._catalog.index.journal.add("lost", name=name, why=f"{type(error).__name__}: {error}", **about)

    def take_events(self, events: Any) -> None:
        """Take what the trainer knows of its saves; may be called by any thread."""
        self._catalog.index.journal.take(events)

    def _announce(self, doomed: Collection[str]) -> None:
        """Announce deletions in the lease; the same request confirms that what was committed before counts."""
        self._heartbeat.announce(doomed)
        self._unconfirmed = False

    def _confirm(self) -> None:
        """Make sure that what was committed counts, unless an announcement has confirmed it already."""
        if self._unconfirmed:
            self._heartbeat.verify()
        self._unconfirmed = False

    def retain(self) -> tuple[tuple[str, str], ...]:
        """Save the index and apply the rules, for a bounded time; give what was deleted."""
        with self._lock:
            self._retain()
            return self._told()

    def _told(self) -> tuple[tuple[str, str], ...]:
        gone, self._gone = self._gone, []
        return tuple((verdict.name, verdict.why) for verdict in gone)

    def _go_on(self) -> None:
        """Delete what there was no time for; between saves."""
        if not self._closed and self._heartbeat.lost is None:
            with self._lock:
                self._retain()

    def _retain(self) -> None:
        mirror, catalog = self._mirror, self._catalog
        needed = self._protected if mirror is None else self._protected | mirror.queue.needed()
        with self._lock:
            if self._keep is None:
                catalog.save()
            elif mirror is None or mirror.queue.has_begun:
                self._gone += catalog.prune(self._keep, needed)
            behind = catalog.num_behind
            if mirror is not None and mirror.queue.has_begun:
                self._gone += catalog.discard(mirror.done_with(catalog.index.rows), f"uploaded to {mirror.uri}")
            if behind or catalog.num_behind:
                self._later(self._go_on)

    def make_room(self) -> bool:
        """Apply the rules because a save found its disk full; false if that has not helped."""
        if self._staged is not None:
            return False  # staged saves have their own disks, with no checkpoint
        with self._lock:
            before = len(self._gone)  # the trainer hears of them with its next save
            try:
                self._retain()
                while len(self._gone) > before and self._catalog.num_behind:
                    self._retain()
            except StorageFullError:
                return False  # not even the index can be written; the caller's error says what was not saved
            return len(self._gone) > before

    def latest_manifest(self) -> tuple[str, Manifest] | None:
        """Give name and manifest of the newest checkpoint, if there is a readable one."""
        record = self.newest()
        try:
            return None if record is None else (record.name, read_manifest(self._catalog.storage, record.name))
        except (CheckpointError, StorageError):
            return None

    # ---- other operations

    def report(self, call: int, rows: Any, answer: Answer) -> None:
        """Take rows; may be called by any thread."""
        self._last_rows = checked = check_rows(rows)
        self._reports.add(call, checked, answer)

    def hurry(self) -> None:
        """Write the rows that have come: somebody waits for them. May be called by any thread."""
        self._reports.hurry()

    def _write_rows(self, rows: list[dict[str, Any]]) -> None:
        with self._segments:
            self._catalog.index.report(rows)

    def op(self, op: str, args: dict[str, Any]) -> Any:
        """Carry out one of the operations of `WriterClient.run_op`."""
        if op == "bring" and self._staged is not None:
            return self._staged.bring(**args)  # without the lock: it waits for the other thread
        operations: dict[str, Callable[..., Any]] = {
            "metrics": self._metrics,
            "pin": self._pin,
            "quarantine": self._quarantine,
            "finished": self._catalog.index.finish,
            "resumed": self._resumed,
            "records": self._catalog.rows,
            "next_attempt": self._next_attempt,
            "details": self._catalog.index.describe_attempt,
            "note": self._note,
            "protect": self._protect,
            "discard": self._discard,
            "confirm": self._ask,
        }
        if op not in operations:
            raise ConfigError(f"unknown operation {op!r} of a run: use one of {sorted(operations)}")
        with self._lock:
            return operations[op](**args)

    def _metrics(self, name: str, metrics: dict[str, Any]) -> list[str]:
        is_there = self._tell_remote(name, metrics)
        if self._is_remote_only(name, is_there) or self._is_staged(name, lambda: self._metrics(name, metrics)):
            return []
        # `record` refuses a name that retention deleted: a sidecar there would look like a foreign checkpoint.
        self._catalog.record(name)
        self._catalog.set_metrics(name, metrics)
        if not is_there:
            self._tell_remote(name, metrics)  # the upload may have ended meanwhile
        return [gone for gone, _ in self.retain()]

    def _pin(self, name: str, *, on: bool = True) -> None:
        is_there = self._tell_remote(name, {}, pinned=on)
        if not (self._is_remote_only(name, is_there) or self._is_staged(name, lambda: self._pin(name, on=on))):
            self._catalog.record(name)
            self._catalog.pin(name, on=on)
            if not is_there:
                self._tell_remote(name, {}, pinned=on)  # as above

    def _tell_remote(self, name: str, metrics: dict[str, Any], *, pinned: bool | None = None) -> bool:
        """Send what came late to the remote if it has this checkpoint; returns whether it has."""
        mirror = self._mirror
        if mirror is None or not mirror.has(name):
            return False
        # Also if the local side still has the checkpoint: it may go before the two sides are compared.
        mirror.late(name, metrics, pinned=pinned)
        return True

    def _is_remote_only(self, name: str, is_there: bool) -> bool:
        return is_there and name not in self._catalog.index.rows

    def _quarantine(self, name: str, reason: str, *, side: str | None = None) -> None:
        if self._mirror is not None and side == self._mirror.uri:
            self._mirror.quarantine(name, reason)
        else:
            self._catalog.index.quarantine(name, reason)
            self._catalog.point_latest()

    def _resumed(self, name: str, step: int, attempt: int | None = None, *, hold: bool = True) -> None:
        mirror = self._mirror
        self._catalog.holds_resumed = hold
        if attempt is None and mirror is not None and name not in self._catalog.index.rows:
            attempt = mirror.attempt_of(name)
        with self._segments:
            self._catalog.index.resumed(name, step=step, attempt=attempt)
        if mirror is not None:
            mirror.queue.go()
        self._make_first_room()

    def _make_first_room(self) -> None:
        """Apply the rules before the first save if that would find its disk full: they may be stricter than before."""
        storage, newest = self._catalog.storage, self._catalog.newest()
        free = storage.free_bytes()
        if newest is not None and free is not None and free < newest.size + SPARE_BYTES and self.make_room():
            _LOG.warning("%s is full: what keep= does not keep was deleted before the first save", storage.uri)

    def _next_attempt(self, reason: str, start_id: str, details: dict[str, Any] | None = None) -> dict[str, Any]:
        self._check()
        index, before = self._catalog.index, list(self._catalog.index.attempts)
        self._reports.flush()  # they belong to the attempt that ends
        with self._segments:
            try:
                if all(attempt.start_id != start_id for attempt in before):
                    index.end_attempt(reason, details, save=False)
                attempt = self._register(start_id)
            except BaseException:
                index.attempts = before
                raise
        self._heartbeat.verify()  # see `draw_fence`
        try:
            self._catalog.refresh()
            self._catalog.sweep()
            sweep_hidden(self._catalog.storage, {start_id})
        except HoldfastError as error:
            _LOG.warning("remains of the attempt before stay for now: %s", error)
        self._start_id = start_id
        return {"attempt": attempt.attempt, "start_id": start_id}

    def _register(self, start_id: str, *, above: int = 0, reported: int | None = None) -> Attempt:
        index, owner = self._catalog.index, self._heartbeat.lease.owner
        for attempt in index.attempts:
            if attempt.start_id == start_id and attempt.ended is None:
                # A repeated call: the writer before died after it had registered the attempt.
                index.rejoin(attempt, index.run_id)
                return attempt
        fence = self._catalog.fence
        above = max(above, 0 if fence is None else fence.below)
        return index.register_attempt(
            start_id, host=owner["host"], pid=owner["trainer_pid"], above=above, reported=reported
        )

    def _note(self, key: str, value: Any) -> None:
        with self._segments:
            self._catalog.index.note(key, value)
        self._catalog.point_latest()  # the note may say that the newest one holds a bad step

    def _protect(self, names: list[str]) -> None:
        self._protected = frozenset(names)
        if self._mirror is not None:
            self._mirror.protect(self._protected)

    def _discard(self, names: list[str], why: str) -> list[str]:
        gone = {verdict.name for verdict in self._catalog.discard(names, why)}
        return [name for name in names if name not in gone]

    def _ask(self, names: list[str]) -> None:
        """Make sure that the run is still ours, and announce names that the trainer is about to delete itself."""
        self._unconfirmed = True
        if names:
            self._announce(names)
        else:
            self._confirm()

    # ---- lease and end

    def trainer_gone(self) -> None:
        """Let others know that only this writer is left, which will end soon."""
        self._heartbeat.trainer_gone()
        if self._mirror is not None:
            self._mirror.trainer_gone()

    def follow(self, since: int | None, answer: Callable[[dict[str, Any] | None], None]) -> None:
        """Call ``answer`` with the state of the mirror once it is another than ``since``; for any thread."""
        if self.uploads is None:
            answer(None)
        else:
            self.uploads.follow(since, answer)

    def _finish(self) -> None:
        until = time.monotonic() + _END_S
        self._later = lambda _: None
        self._retain()
        while self._catalog.num_behind and time.monotonic() < until:
            self._retain()
        if (left := self._catalog.num_behind) > 0:
            _LOG.warning(
                "%s: %d checkpoints that keep= does not keep are still to be deleted; the next start goes on, "
                "or `holdfast prune` does it now",
                self._catalog.storage.uri, left,
            )  # fmt: skip

    def take_left(self) -> dict[str, Any] | None:
        """Report the rows that a trainer that has died had not sent, and return details of its end."""
        if self.memory is None:
            return None
        memory = self.memory()
        # A trainer that was killed right after it had sent rows has left them all the same.
        sent = {(row["step"], row["time"]) for row in self._last_rows if "time" in row}
        if rows := [row for row in rows_left(memory) if (row["step"], row["time"]) not in sent]:
            with contextlib.suppress(HoldfastError):  # closed: the trainer had ended in order
                self._reports.add(0, rows, lambda _, error: _say_rows_lost(error))
        return {"last_step": steps_done(memory)}

    def close(self, reason: str, details: dict[str, Any] | None = None, *, ended: float | None = None) -> None:
        """Write the last reports, note the end, upload what waits (bounded), give the lease back.

        Args:
            reason: why the attempt ended.
            details: small JSON about that.
            ended: when its trainer died, in seconds since 1970; None: it ends now.
        """
        mirror, answers = self._mirror, True
        self.end_uploads()
        try:
            try:
                self._reports.close()
                if self._heartbeat.lost is None:
                    self._catalog.index.end_attempt(reason, details, ended=ended)
                    self._catalog.storage.delete_tree(f"{INCOMING}{self._start_id}")
            finally:  # a disk that is full keeps nothing from the remote
                if mirror is not None:
                    mirror.close()
            if self._heartbeat.lost is None and (mirror is not None or self._catalog.num_behind):
                self._finish()
        except StorageUnavailableError:
            answers = False
            raise
        finally:
            self._closed = True
            self._heartbeat.close(wait=answers)  # a beat may be asking a store that is gone, for a minute more


def _say_rows_lost(error: BaseException | None) -> None:
    if error is not None:
        _LOG.warning("the last metrics of a trainer that died are lost: %s", error)


def _check_rejoins(storage: Storage, index: RunIndex, attempt: Attempt, owner: Mapping[str, Any]) -> None:
    """Refuse to go on with an attempt that another trainer's has followed: ours was taken over and does not know it."""
    # From the segments, too: who was taken over may have written its own run.json over that of its successor.
    known = {**read_history(storage).attempts, **{later.attempt: later for later in index.attempts}}
    for later in known.values():
        if later.attempt > attempt.attempt and (later.host, later.pid) != (owner["host"], owner["trainer_pid"]):
            raise RunBusyError(
                f"{storage.uri}: attempt {attempt.attempt} was taken over, attempt {later.attempt} of process "
                f"{later.pid} on {later.host} has followed it: this process must not write to the run any more. Start "
                "it again, and it goes on from the newest checkpoint"
            )


def _attempt_of(index: RunIndex, again: dict[str, Any], owner: dict[str, Any]) -> Attempt:
    """Find the attempt that this trainer's earlier writer registered."""
    for attempt in index.attempts:
        if attempt.attempt == again["attempt"]:
            return attempt
    return Attempt(  # run.json was lost as well
        attempt=again["attempt"], start_id=again["start_id"], host=owner["host"], pid=owner["trainer_pid"]
    )
