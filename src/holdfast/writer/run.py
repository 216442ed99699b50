"""The open run on the writer's side: lease, index, retention, reports."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.heartbeat import Heartbeat
from holdfast.checkpoint.lease import Lease
from holdfast.checkpoint.record import Record
from holdfast.checkpoint.remains import INCOMING, sweep_hidden
from holdfast.checkpoint.retention import Verdict
from holdfast.checkpoint.runindex import Attempt, RunIndex
from holdfast.config import Keep
from holdfast.errors import CheckpointError, ConfigError, HoldfastError, StorageError
from holdfast.format.commit import read_manifest
from holdfast.format.manifest import Manifest
from holdfast.storage.base import Storage

from .messages import RunOpened
from .reports import Answer, ReportBuffer, check_rows

if TYPE_CHECKING:  # most writers never need them, and each start waits
    from .mirror import Mirroring
    from .mirror_plan import Limits
    from .mirror_remote import RemoteRun
    from .mirror_start import RemoteSide
    from .staged_run import StagedRun

__all__ = ["Run"]

_LOG = logging.getLogger("holdfast.writer")


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
        # Reports are written by their own thread; `resumed` writes to the same segments.
        self._segments = threading.Lock()
        self._closed = False
        self._reports = ReportBuffer(self._write_rows)

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
    ) -> tuple[Run, RunOpened]:
        """Take the lease, find the checkpoints, register the attempt, sweep the remains of dead lives.

        Args:
            storage: root of the run.
            owner: start_id and trainer_pid, and whatever else the lease shall say.
            keep: rules of retention as JSON.
            wait_s: how long to wait for the lease.
            again: attempt number and run id, when an earlier writer of the same trainer died.
            pause: how to wait; may raise to give up.
            remote: the remote side of a mirrored run; ``storage`` is the local one then, and ``keep`` is of it.
            later: runs a call on the working thread, now or soon.
        """
        if not owner.get("start_id"):
            raise ConfigError("open_run needs an owner with a start_id")
        rules = None if keep is None else Keep.from_json(keep)
        far = None if remote is None else remote.open(storage, owner, wait_s=wait_s, pause=pause)
        run = None
        try:
            lease = Lease.acquire(storage, {**owner, "pid": os.getpid()}, wait_s=wait_s, sleep=pause)
            run = cls(lease, rules)  # now, for its heartbeat: reading and sweeping may take longer than a lease lasts
            opened = run._begin(storage, owner["start_id"], far, again)
            if remote is not None and far is not None:
                opened = run._begin_mirror(opened, far, remote.limits, later)
        except BaseException:
            if run is not None:
                run._reports.close()
            held = [] if run is None else [run._heartbeat]
            for one in held if far is None else [*held, far.heartbeat]:
                with contextlib.suppress(StorageError):  # what went wrong first says more
                    one.close()
            raise
        return run, opened

    def _begin(self, storage: Storage, start_id: str, far: RemoteRun | None, again: dict[str, Any] | None) -> RunOpened:
        """Find the checkpoints and register the attempt."""
        self._catalog = catalog = Catalog(storage)
        swept: list[str] = []
        index = catalog.index
        if far is not None:
            far.join(index)
        if again is None:
            attempt = self._register(start_id, above=0 if far is None else far.highest_attempt)
            swept = [*catalog.sweep(), *sweep_hidden(storage, {attempt.start_id})]
        else:
            attempt = _attempt_of(index, again, self._heartbeat.lease.owner)
            index.rejoin(attempt, again["run_id"])
            self._protected = frozenset(again.get("protect", ()))
        self._start_id = attempt.start_id
        waited_s = self._heartbeat.lease.waited_s + (0.0 if far is None else far.heartbeat.lease.waited_s)
        return RunOpened(
            run_id=index.run_id,
            attempt=attempt.attempt,
            start_id=attempt.start_id,
            records=tuple(record.row() for record in catalog.records()),
            quarantined=dict(index.quarantined),
            finished=index.finished,
            waited_s=waited_s,
            swept=tuple(swept),
            notes=index.notes,
            taken=tuple(catalog.taken()),
        )

    def _begin_mirror(
        self, opened: RunOpened, far: RemoteRun, limits: Limits, later: Callable[[Callable[[], object]], object]
    ) -> RunOpened:
        """Start the uploading thread, and tell of the checkpoints of both sides."""
        from .mirror_start import start_mirror

        self._mirror, told = start_mirror(far, self._catalog, limits, changed=lambda: later(self._uploaded))
        now = self._catalog.index.current
        has_saved = now is not None and any(row[1] == now.attempt for row in self._catalog.index.rows.values())
        if now is not None and (now.resumed_from is not None or has_saved):
            self._mirror.go()  # an earlier writer of this trainer died after the resume: nobody would say it again
        return replace(opened, **{**told, "swept": (*opened.swept, *told["swept"])})

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
            self.committed(name, manifest)
            then()

    def newest(self) -> Record | None:
        """Return the newest checkpoint; may be called by any thread."""
        with self._lock:
            return next(iter(self._catalog.records()), None)

    @property
    def uploads(self) -> Mirroring | None:
        """What brings checkpoints to a remote, if anything does."""
        return self._mirror if self._staged is None else self._staged.mirror

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

    def _check(self) -> None:
        self._heartbeat.check()
        if self._mirror is not None:
            self._mirror.check()

    def committed(self, name: str, manifest: Manifest) -> tuple[tuple[str, str], ...]:
        """Record a commit and apply retention; give the names that were deleted and why.

        The checkpoint is committed whatever happens here: the index is a cache, so its failure is only said.
        """
        try:
            with self._lock:
                record = self._catalog.add(name, manifest)
                if self._mirror is not None:
                    self._mirror.committed(record)
                return self.retain()
        except HoldfastError as error:
            _LOG.warning("%s is committed, but the index of the run could not be written: %s", name, error)
            return ()

    def retain(self) -> tuple[tuple[str, str], ...]:
        """Save the index and apply the rules; give what was deleted."""
        mirror, catalog = self._mirror, self._catalog
        needed = self._protected if mirror is None else self._protected | mirror.needed()
        gone: list[Verdict] = []
        with self._lock:
            if self._keep is None:
                catalog.index.save()
            elif mirror is None or mirror.has_begun:
                gone = catalog.prune(self._keep, needed)
            if mirror is not None and mirror.has_begun:
                gone += catalog.discard(mirror.done_with(catalog.index.rows), f"uploaded to {mirror.uri}")
        return tuple((verdict.name, verdict.why) for verdict in gone)

    def make_room(self) -> bool:
        """Apply the rules because a save found its disk full; false if that has not helped."""
        return self._staged is None and bool(self.retain())  # staged saves have their own disks, with no checkpoint

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
        self._reports.add(call, check_rows(rows), answer)

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
            "records": lambda: [record.row() for record in self._catalog.records()],
            "next_attempt": self._next_attempt,
            "details": self._catalog.index.describe_attempt,
            "note": self._note,
            "protect": self._protect,
            "discard": self._discard,
        }
        if op not in operations:
            raise ConfigError(f"unknown operation {op!r} of a run: use one of {sorted(operations)}")
        with self._lock:
            return operations[op](**args)

    def _metrics(self, name: str, metrics: dict[str, Any]) -> list[str]:
        if self._is_uploaded(name, metrics) or self._is_staged(name, lambda: self._metrics(name, metrics)):
            return []
        # `record` refuses a name that retention deleted: a sidecar there would look like a foreign checkpoint.
        self._catalog.record(name)
        self._catalog.set_metrics(name, metrics)
        return [gone for gone, _ in self.retain()]

    def _pin(self, name: str, *, on: bool = True) -> None:
        if not (self._is_uploaded(name, {}, pinned=on) or self._is_staged(name, lambda: self._pin(name, on=on))):
            self._catalog.record(name)
            self._catalog.pin(name, on=on)

    def _is_uploaded(self, name: str, metrics: dict[str, Any], *, pinned: bool | None = None) -> bool:
        """Tell the remote of what came late, if it has this checkpoint; True if nobody else has."""
        mirror = self._mirror
        if mirror is None or not mirror.has(name):
            return False
        # Also of one that the local side still has: it may go before anybody has compared the two.
        mirror.late(name, metrics, pinned=pinned)
        return name not in self._catalog.index.rows

    def _quarantine(self, name: str, reason: str, *, side: str | None = None) -> None:
        if self._mirror is not None and side == self._mirror.uri:
            self._mirror.quarantine(name, reason)
        else:
            self._catalog.index.quarantine(name, reason)

    def _resumed(self, name: str, step: int, attempt: int | None = None) -> None:
        mirror = self._mirror
        if attempt is None and mirror is not None and name not in self._catalog.index.rows:
            attempt = mirror.attempt_of(name)
        with self._segments:
            self._catalog.index.resumed(name, step=step, attempt=attempt)
        if mirror is not None:
            mirror.go()

    def _next_attempt(self, reason: str, start_id: str, details: dict[str, Any] | None = None) -> dict[str, Any]:
        self._check()
        index, before = self._catalog.index, list(self._catalog.index.attempts)
        self._reports.flush()  # they belong to the attempt that ends
        with self._segments:
            try:
                if all(one.start_id != start_id for one in before):
                    index.end_attempt(reason, details, save=False)
                attempt = self._register(start_id)
            except BaseException:
                index.attempts = before
                raise
        try:
            self._catalog.refresh()
            self._catalog.sweep()
            sweep_hidden(self._catalog.storage, {start_id})
        except HoldfastError as error:
            _LOG.warning("remains of the attempt before stay for now: %s", error)
        self._start_id = start_id
        return {"attempt": attempt.attempt, "start_id": start_id}

    def _register(self, start_id: str, *, above: int = 0) -> Attempt:
        index, owner = self._catalog.index, self._heartbeat.lease.owner
        for attempt in index.attempts:
            if attempt.start_id == start_id and attempt.ended is None:
                # Asked again: the writer before this one died after it had done so.
                index.rejoin(attempt, index.run_id)
                return attempt
        return index.register_attempt(start_id, host=owner["host"], pid=owner["trainer_pid"], above=above)

    def _note(self, key: str, value: Any) -> None:
        with self._segments:
            self._catalog.index.note(key, value)

    def _protect(self, names: list[str]) -> None:
        self._protected = frozenset(names)

    def _discard(self, names: list[str], why: str) -> list[str]:
        return [verdict.name for verdict in self._catalog.discard(names, why)]

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

    def close(self, reason: str, details: dict[str, Any] | None = None) -> None:
        """Write the last reports, note the end, upload what waits (bounded), give the lease back."""
        mirror = self._mirror
        self.end_uploads()
        try:
            try:
                self._reports.close()
                if self._heartbeat.lost is None:
                    self._catalog.index.end_attempt(reason, details)
                    self._catalog.storage.delete_tree(f"{INCOMING}{self._start_id}")
            finally:  # a disk that is full keeps nothing from the remote
                if mirror is not None:
                    mirror.close()
            if mirror is not None and self._heartbeat.lost is None:
                self.retain()
        finally:
            self._closed = True
            self._heartbeat.close()


def _attempt_of(index: RunIndex, again: dict[str, Any], owner: dict[str, Any]) -> Attempt:
    """Find the attempt that this trainer's earlier writer registered."""
    for attempt in index.attempts:
        if attempt.attempt == again["attempt"]:
            return attempt
    return Attempt(  # run.json was lost as well
        attempt=again["attempt"], start_id=again["start_id"], host=owner["host"], pid=owner["trainer_pid"]
    )
