"""The open run on the writer's side: lease, index, retention, reports."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.lease import HEARTBEAT_S, Lease
from holdfast.checkpoint.remains import INCOMING, sweep_hidden
from holdfast.checkpoint.runindex import Attempt, RunIndex
from holdfast.config import Keep
from holdfast.errors import CheckpointError, ConfigError, HoldfastError, StorageError
from holdfast.format.commit import read_manifest
from holdfast.format.manifest import Manifest
from holdfast.storage.base import Storage

from .messages import RunOpened
from .reports import Answer, ReportBuffer, check_rows

__all__ = ["Run"]

_LOG = logging.getLogger("holdfast.writer")


class Run:
    """One attempt at a run. Held from `open` to `close`; all methods but `report` belong to the working thread."""

    _catalog: Catalog  # set by `open`

    def __init__(self, lease: Lease, keep: Keep | None) -> None:
        self._lease, self._keep = lease, keep
        self._start_id = ""
        self._protected: frozenset[str] = frozenset()
        self._lost: HoldfastError | None = None
        # Reports are written by their own thread; `resumed` writes to the same segments.
        self._segments = threading.Lock()
        self._trainer_alive = True
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._reports = ReportBuffer(self._write_rows)
        self._beats = threading.Thread(target=self._beat, name="holdfast-lease", daemon=True)
        self._beats.start()

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
    ) -> tuple[Run, RunOpened]:
        """Take the lease, find the checkpoints, register the attempt, sweep the remains of dead lives.

        Args:
            storage: root of the run.
            owner: start_id and trainer_pid, and whatever else the lease shall say.
            keep: rules of retention as JSON.
            wait_s: how long to wait for the lease.
            again: attempt number and run id, when an earlier writer of the same trainer died.
            pause: how to wait; may raise to give up.
        """
        if not owner.get("start_id"):
            raise ConfigError("open_run needs an owner with a start_id")
        rules = None if keep is None else Keep.from_json(keep)
        lease = Lease.acquire(storage, {**owner, "pid": os.getpid()}, wait_s=wait_s, sleep=pause)
        run = None
        try:
            run = cls(lease, rules)  # now, for its heartbeat: reading and sweeping may take longer than a lease lasts
            run._catalog = catalog = Catalog(storage)
            swept: list[str] = []
            index = catalog.index
            if again is None:
                attempt = run._register(owner["start_id"])
                swept = [*catalog.sweep(), *sweep_hidden(storage, {attempt.start_id})]
            else:
                attempt = _attempt_of(index, again, lease.owner)
                index.rejoin(attempt, again["run_id"])
                run._protected = frozenset(again.get("protect", ()))
            run._start_id = attempt.start_id
            opened = RunOpened(
                run_id=index.run_id,
                attempt=attempt.attempt,
                start_id=attempt.start_id,
                records=tuple(record.row() for record in catalog.records()),
                quarantined=dict(index.quarantined),
                finished=index.finished,
                waited_s=lease.waited_s,
                swept=tuple(swept),
                notes=index.notes,
                taken=tuple(catalog.taken()),
            )
            return run, opened
        except BaseException:
            if run is None:
                lease.release()
            else:
                run._reports.close()
                run._give_back()
            raise

    # ---- saves

    def before_commit(self) -> None:
        """Refuse to commit after the lease was lost; make the metrics up to this save durable before it."""
        if self._lost is not None:
            raise self._lost
        self._reports.flush()

    def committed(self, name: str, manifest: Manifest) -> tuple[tuple[str, str], ...]:
        """Record a commit and apply retention; give the names that were deleted and why.

        The checkpoint is committed whatever happens here: the index is a cache, so its failure is only said.
        """
        try:
            self._catalog.add(name, manifest)
            return self.retain()
        except HoldfastError as error:
            _LOG.warning("%s is committed, but the index of the run could not be written: %s", name, error)
            return ()

    def retain(self) -> tuple[tuple[str, str], ...]:
        """Save the index and apply the rules; give what was deleted."""
        if self._keep is None:
            self._catalog.index.save()
            return ()
        return tuple((verdict.name, verdict.why) for verdict in self._catalog.prune(self._keep, self._protected))

    def latest_manifest(self) -> tuple[str, Manifest] | None:
        """Give name and manifest of the newest checkpoint, if there is a readable one."""
        for record in self._catalog.records():
            try:
                return record.name, read_manifest(self._catalog.storage, record.name)
            except (CheckpointError, StorageError):
                return None
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
        operations: dict[str, Callable[..., Any]] = {
            "metrics": self._metrics,
            "pin": self._pin,
            "quarantine": self._catalog.index.quarantine,
            "finished": self._catalog.index.finish,
            "resumed": self._resumed,
            "records": lambda: [record.row() for record in self._catalog.records()],
            "next_attempt": self._next_attempt,
            "details": self._catalog.index.describe_attempt,
            "note": self._note,
            "protect": self._protect,
        }
        if op not in operations:
            raise ConfigError(f"unknown operation {op!r} of a run: use one of {sorted(operations)}")
        return operations[op](**args)

    def _metrics(self, name: str, metrics: dict[str, Any]) -> list[str]:
        # `record` refuses a name that retention deleted: a sidecar there would look like a foreign checkpoint.
        self._catalog.record(name)
        self._catalog.set_metrics(name, metrics)
        return [gone for gone, _ in self.retain()]

    def _pin(self, name: str, *, on: bool = True) -> None:
        self._catalog.record(name)
        self._catalog.pin(name, on=on)

    def _resumed(self, name: str, step: int, attempt: int | None = None) -> None:
        with self._segments:
            self._catalog.index.resumed(name, step=step, attempt=attempt)

    def _next_attempt(self, reason: str, start_id: str, details: dict[str, Any] | None = None) -> dict[str, Any]:
        if self._lost is not None:
            raise self._lost
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

    def _register(self, start_id: str) -> Attempt:
        index, owner = self._catalog.index, self._lease.owner
        for attempt in index.attempts:
            if attempt.start_id == start_id and attempt.ended is None:
                # Asked again: the writer before this one died after it had done so.
                index.rejoin(attempt, index.run_id)
                return attempt
        return index.register_attempt(start_id, host=owner["host"], pid=owner["trainer_pid"])

    def _note(self, key: str, value: Any) -> None:
        with self._segments:
            self._catalog.index.note(key, value)

    def _protect(self, names: list[str]) -> None:
        self._protected = frozenset(names)

    # ---- lease and end

    def trainer_gone(self) -> None:
        """Let others know that only this writer is left, which will end soon."""
        self._trainer_alive = False
        self._wake.set()

    def _beat(self) -> None:
        while True:
            self._wake.wait(HEARTBEAT_S)
            self._wake.clear()
            if self._stop.is_set():
                return
            try:
                self._lease.heartbeat(trainer_alive=self._trainer_alive)
            except StorageError as error:
                _LOG.warning("the lease could not be renewed, trying again in %g s: %s", HEARTBEAT_S, error)
            except HoldfastError as error:
                self._lost = error
                _LOG.error("%s", error)
                return
            except Exception as error:  # noqa: BLE001 - a thread edge: a lease nobody renews is taken by another
                _LOG.warning("the lease could not be renewed, trying again in %g s: %r", HEARTBEAT_S, error)

    def close(self, reason: str, details: dict[str, Any] | None = None) -> None:
        """Write the last reports, note the end, remove what nobody took in, give the lease back."""
        try:
            self._reports.close()
            if self._lost is None:
                self._catalog.index.end_attempt(reason, details)
                self._catalog.storage.delete_tree(f"{INCOMING}{self._start_id}")
        finally:
            self._give_back()

    def _give_back(self) -> None:
        self._stop.set()
        self._wake.set()
        self._beats.join()
        self._lease.release()


def _attempt_of(index: RunIndex, again: dict[str, Any], owner: dict[str, Any]) -> Attempt:
    """Find the attempt that this trainer's earlier writer registered."""
    for attempt in index.attempts:
        if attempt.attempt == again["attempt"]:
            return attempt
    return Attempt(  # run.json was lost as well
        attempt=again["attempt"], start_id=again["start_id"], host=owner["host"], pid=owner["trainer_pid"]
    )
