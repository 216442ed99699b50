"""Saves of many ranks, in the writer of one rank: its part, its messages to rank 0, the outcome of the whole."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast._log import get_logger
from holdfast.errors import HoldfastError, StorageError
from holdfast.format.commit import PartSummary, assemble
from holdfast.format.parts import remove_part
from holdfast.run.process import how_it_ended, is_stopped
from holdfast.storage.base import Storage

from .arena import WHO_LEFT, StepMailbox
from .messages import MirrorLimits, PartsJob, SaveJob, SaveResult, error_from_json, error_to_json
from .ranks.agreement import named_error
from .ranks.link import Message, allow_connections
from .ranks.member import ControlMember
from .ranks.server import ControlServer
from .save import commit_parts, is_committed, say_stored_for_all

if TYPE_CHECKING:
    from .server import WriterLoop
    from .uploads.staged_run import StagedParts

_LOG = get_logger("writer.control")
_REMEMBERED = 16
_VISIBLE_S = 3.0  # a network file system may show what another machine has stored a little later
_MARGIN_S = 45.0
_LAST_S = 5.0
_NOBODY = -1  # instead of a call: the trainer is gone


@dataclass(slots=True, kw_only=True)
class _PendingSave:
    """A save whose outcome is not known yet.

    Attributes:
        call: number of the trainer's call, which is answered with the outcome.
        result: our part, once it is stored.
        ended: our part is stored or has failed.
        committed: bytes of the manifest; on rank 0, after the commit.
        report: the message about our part to rank 0.
        outcome: the message of rank 0 about the whole save.
    """

    call: int
    job: SaveJob
    storage: Storage
    again: bool
    result: SaveResult | None = None
    ended: bool = False
    committed: bytes = b""
    report: Message = field(default_factory=dict)
    outcome: Message | None = None


class Joint:
    """The saves of a writer that is one of several; `ControlServer` and `ControlMember` carry the messages.

    Args:
        loop: of this writer.

    Attributes:
        rank: of our trainer.
    """

    def __init__(self, loop: WriterLoop) -> None:
        self._loop = loop
        self._server: ControlServer | None = None
        self._member: ControlMember | None = None
        self.rank, self._world_size, self._timeout_s, self._trainer = 0, 1, 0.0, 0
        self._changed = threading.Condition()
        self._waiting: dict[str, _PendingSave] = {}
        self._asked: dict[str, list[int]] = {}
        self._wants: dict[str, None] = {}
        self._failed: dict[str, dict[str, Any]] = {}
        self._heard: dict[str, Message] = {}
        self._after: list[Callable[[], None]] = []
        self._staged: StagedParts | None = None
        self._lost: str | None = None
        self._broken = ""  # which rank left first, and why
        self._newest = -1  # on rank 0: the newest committed step that a start goes on from
        self._left: Message | None = None  # that our trainer has ended
        self._offered: Message | None = None  # what our trainer has left
        self._chosen: str | None = None  # of what was offered

    # -- from the trainer, on the reading thread

    def join(self, header: dict[str, Any], fds: tuple[int, ...], mailbox: memoryview) -> None:
        """Join the other ranks. The writer that gets a listening socket is that of rank 0 and runs the server."""
        self.rank, self._world_size, self._timeout_s = header["rank"], header["world_size"], header["timeout_s"]
        self._trainer = header["pid"]
        times = {name: header[name] for name in ("beat_s", "stale_s")}
        if fds:
            allow_connections(self._world_size)
            self._server = ControlServer(
                socket.socket(fileno=fds[0]),
                token=header["token"],
                world_size=self._world_size,
                timeout_s=self._timeout_s,
                commit=self._commit_later,
                newest=lambda: self._newest,
                **times,
            )
        if "stage" in header:  # before rank 0 can ask for parts
            self.stage(**header["stage"])
        with self._changed:  # rank 0's first message may come before the assignment: its answer needs the member
            self._member = ControlMember(
                rank=self.rank,
                addresses=[(host, port) for host, port in header["addresses"]],
                token=header["token"],
                mailbox=StepMailbox(mailbox),
                hear=self._hear,
                again=self._again,
                stopped=lambda: is_stopped(self._trainer),
                hold=self._loop.hold,
                **times,
            )

    def stage(self, local: int, remote: int, limits: dict[str, Any], start_id: str, call: int | None = None) -> None:
        """Stage our parts on the local disk from now on; they go to the remote later. May be repeated."""
        from .uploads.staged_run import StagedParts  # not above: few writers need it, and each start waits

        here, far = self._loop.storage_of(local), self._loop.storage_of(remote)
        if self._staged is None:
            self._staged = StagedParts(here, far, self.rank, start_id, self._say)
        self._loop.later(lambda: self._lead(here, far, limits, call))

    def begun(self, call: int, job: SaveJob, storage: Storage, *, again: bool) -> None:
        """Take a job. From now on the other ranks learn how it ends."""
        with self._changed:
            pending = self._waiting[job.save_id] = _PendingSave(call=call, job=job, storage=storage, again=again)
            lost = None if self._lost is None else self._lost_outcome(self._lost)
            pending.outcome = self._heard.get(job.save_id) or lost  # it may have come before the job
        self._say(_begun(job))

    def part_failed(self, save: str, error: dict[str, Any]) -> None:
        """Report that the trainer could not make its part of a save, or lost it."""
        with self._changed:
            self._failed[save] = error
            _forget(self._failed)
        self._say({"do": "failed", "save": save, "error": error})

    def want(self, kind: str) -> None:
        """Ask for a save or a stop of all ranks at a common step."""
        with self._changed:
            self._wants[kind] = None
        self._say({"do": "want", "kind": kind})

    def acted(self, step: int) -> None:
        """Report that the trainer acts at the agreed step."""
        with self._changed:
            self._wants.clear()
        self._say({"do": "acted", "step": step})

    def ask(self, call: int, about: str) -> None:
        """Put a question to rank 0's writer, which decides once for all ranks; see `ControlServer`."""
        if about == WHO_LEFT:
            self._loop.say_failed(call, HoldfastError(self._lost or self._broken or "no rank has left"))
            return
        with self._changed:
            self._asked.setdefault(about, []).append(call)
            lost = self._lost
        if lost is not None:
            self._fail_asked(lost)
        self._say({"do": "ask", "about": about})

    def after(self, work: Callable[[], None]) -> None:
        """Call ``work`` on the working thread once the saves begun before have ended."""
        with self._changed:
            if self._waiting:
                self._after.append(work)
                return
        self._loop.later(work)

    # -- from the working thread

    def stored(self, job: SaveJob, result: SaveResult) -> None:
        """Report that our part is durable."""
        report: Message = {"do": "stored", "save": job.save_id}
        if self._staged is not None:
            try:
                report["part"] = self._staged.hold(job.save_id, job.directory)
            except HoldfastError as error:
                self.failed(job, error)
                return
        with self._changed:
            pending = self._waiting[job.save_id]
            pending.report = report
            pending.result, pending.ended = result, True
            known = pending.outcome is not None
        if known:
            self._settle(pending)
        else:
            self._say(pending.report)

    def failed(self, job: SaveJob, error: BaseException) -> None:
        """Report that our part could not be stored; its files are removed."""
        with self._changed:
            pending = self._waiting[job.save_id]
            pending.ended = True
            known = pending.outcome is not None
            self._failed[job.save_id] = described = error_to_json(error)
            _forget(self._failed)
        if known:
            self._settle(pending)
        else:
            self._say({"do": "failed", "save": job.save_id, "error": described})

    def offer(self, held: Mapping[str, int]) -> str:
        """Offer snapshots that our trainer has left, and return the one that all ranks are to store; "" for none.

        Waits until the trainers of all ranks have ended, or one of them has nothing to offer.

        Args:
            held: their steps, by the ids of their saves.
        """
        self._offered = {"do": "offer", "held": dict(held)}
        self._say(self._offered)
        with self._changed:
            self._changed.wait_for(lambda: self._chosen is not None or self._lost is not None, self._timeout_s)
            return self._chosen or ""

    def rescue(self, job: SaveJob, storage: Storage) -> None:
        """Take a job that was chosen; `stored` or `failed` follows. Nobody waits for its answer."""
        with self._changed:
            pending = self._waiting[job.save_id] = _PendingSave(call=_NOBODY, job=job, storage=storage, again=False)
            pending.outcome = self._heard.get(job.save_id)

    def finish(self, why: str, *, dead: bool, rescue: Callable[[], object] | None = None) -> None:
        """Begin no more saves, wait for the outcome of those begun, then leave the other ranks; idempotent.

        Args:
            why: why our trainer ends, for the other ranks.
            dead: the trainer died; it did not close its writer.
            rescue: called once the others know that; it may `offer` and `rescue`. None: there is nothing to offer.
        """
        member = self._member
        if member is None:
            return
        if dead:
            why = f"its trainer process has died{how_it_ended(self._trainer)}"
        self._left = {"do": "left", "why": why, "offers": rescue is not None}
        self._say(self._left)
        if rescue is not None:
            rescue()
        until = time.monotonic() + self._timeout_s + _MARGIN_S
        with self._changed:
            # The server bounds each save; this bound is for a server that hangs.
            self._changed.wait_for(lambda: not self._waiting, max(0.0, until - time.monotonic()))
        if self._staged is not None:
            if (run := self._loop.run) is not None:
                run.end_uploads()
            if self._server is not None:  # only rank 0's own writer asks for uploads
                until = min(until, time.monotonic() + _LAST_S)
            self._staged.await_end(until, lambda: self._lost is not None)
        member.close(why)
        if self._server is not None:
            self._server.close(f"rank 0: {why}")
        with self._changed:
            self._member = None

    # -- from the control channel, on its threads

    def _hear(self, message: Message) -> None:
        if message["do"] == "verdict":
            with self._changed:
                calls = self._asked.pop(message["about"], [])
            for call in calls:
                self._loop.say_done(call, message["go"])
            return
        if message["do"] == "broken":
            self._broken = message["why"]
            return
        if message["do"] == "rescue":
            with self._changed:
                self._chosen = message["save"]
                self._changed.notify_all()
            return
        if message["do"] in ("upload", "clear", "keep"):
            if self._staged is not None:
                self._staged.take(message)
            elif message["do"] == "upload":  # our trainer has not said where to yet; rank 0 asks again
                error = named_error("StorageError", "it is just starting")
                self._say({"do": "uploaded", "save": message["save"], "error": error})
            return
        with self._changed:
            if message["do"] == "lost":
                self._lost = message["why"]
                self._changed.notify_all()
                outcomes = {save: self._lost_outcome(self._lost) for save in self._waiting}
            else:
                outcomes = {message["save"]: message}
                self._heard[message["save"]] = {**message, "do": "heard"}
                _forget(self._heard)
            ready = []
            for save, outcome in outcomes.items():
                pending = self._waiting.get(save)
                if pending is not None and pending.outcome is None:
                    pending.outcome = outcome
                    if pending.ended:
                        ready.append(pending)
        for pending in ready:
            self._loop.later(lambda pending=pending: self._settle(pending))  # type: ignore[misc]
        if self._lost is not None:
            self._fail_asked(self._lost)

    def _again(self) -> list[Message]:
        """Return the messages that a new connection, or a new server, needs to be sent again."""
        with self._changed:
            messages: list[Message] = list(self._heard.values())
            for pending in self._waiting.values():
                if pending.call != _NOBODY:  # else it is no save that anybody began
                    messages.append(_begun(pending.job))
                if pending.result is not None:
                    messages.append(pending.report)
            messages += [{"do": "failed", "save": save, "error": error} for save, error in self._failed.items()]
            messages += [{"do": "want", "kind": kind} for kind in self._wants]
            messages += [one for one in (self._left, self._offered) if one is not None]
            messages += [{"do": "ask", "about": about} for about in self._asked]
        return messages

    def _lost_outcome(self, why: str) -> Message:
        text = f"{why}; whether this save was committed is not known, the checkpoint before it stays"
        return {"do": "outcome", "error": named_error("HoldfastError", text), "value": None, "discard": False}

    def _fail_asked(self, why: str) -> None:
        with self._changed:
            asked, self._asked = self._asked, {}
        for calls in asked.values():
            for call in calls:
                self._loop.say_failed(call, HoldfastError(why))

    def _say(self, message: Message) -> None:
        with self._changed:
            member = self._member
        if member is not None:
            member.say(message)

    # -- the end of a save

    def _settle(self, pending: _PendingSave) -> None:
        """Answer the trainer's call with the outcome; on the working thread."""
        outcome = pending.outcome
        assert outcome is not None
        if outcome["error"] is not None:
            if outcome["discard"]:
                self._discard(pending)
                if self._staged is not None:
                    self._staged.let_go(pending.job.save_id)
            error = error_from_json(outcome["error"])
            if pending.job.run and (run := self._loop.run) is not None:
                run.note_lost(pending.job.directory, pending.job.manifest, error)
            self._loop.say_failed(pending.call, error)
        else:
            assert pending.result is not None
            value = outcome["value"] or {}
            deleted = tuple((name, why) for name, why in value.get("deleted", ()))
            result = replace(pending.result, deleted=deleted, warnings=tuple(value.get("warnings", ())))
            self._loop.say_done(pending.call, result, (pending.committed,))
        with self._changed:
            self._waiting.pop(pending.job.save_id, None)
            if not self._waiting:
                after, self._after = self._after, []
                for work in after:
                    self._loop.later(work)
            self._changed.notify_all()

    def _discard(self, pending: _PendingSave) -> None:
        """Remove our part, the part file first: the files that a part file names must be whole."""
        job = pending.job
        with suppress(HoldfastError):
            if is_committed(pending.storage, job):
                return  # a writer of rank 0 has committed it and died before it reported that
            remove_part(pending.storage, job.directory, job.save_id, job.writer)

    def _commit_later(self, save: str) -> None:
        self._loop.later(lambda: self._commit(save))

    def _commit(self, save: str) -> None:
        """Commit what all ranks have stored, record it in the run, send the outcome to all ranks."""
        server = self._server
        assert server is not None
        with self._changed:
            pending = self._waiting.get(save)
        try:
            if pending is None:
                raise HoldfastError(f"rank 0 does not know of save {save}")
            if self._staged is not None:
                self._stage(pending, server)
                server.committed(save, value={})
                return
            job = PartsJob(
                directory=pending.job.directory,
                save_id=save,
                writers=tuple(range(self._world_size)),
                manifest=pending.job.manifest,
                wait_s=_VISIBLE_S,
                run=pending.job.run,
                overwrite=pending.job.overwrite,
                stored=True,
            )
            result = commit_parts(pending.storage, job, self._loop.run_of(pending.job), again=pending.again)
        except Exception as error:  # noqa: BLE001 - a thread edge: all ranks get the error
            described = error_to_json(error)
            if isinstance(error, StorageError) or not isinstance(error, HoldfastError):
                described["message"] = f"rank 0: {described['message']}"
            server.committed(save, error=described)
            if self._staged is not None and pending is not None:
                server.tell({"do": "clear", "save": save, "directory": pending.job.directory})
        else:
            pending.committed = result.manifest
            if pending.job.may_be_resumed:
                self._newest = max(self._newest, pending.job.manifest.get("step") or -1)
            server.committed(save, value={"deleted": result.deleted, "warnings": result.warnings})

    def _lead(self, local: Storage, remote: Storage, limits: dict[str, Any], call: int | None) -> None:
        """Rank 0: decide what goes to the remote and when. On the working thread, where the run is open by now."""
        run = self._loop.run
        try:
            if self._server is not None and run is not None and run.uploads is None:
                from .uploads.staged_run import StagedRun  # as above

                run.stage(partial(StagedRun, run, self._server, remote, local, MirrorLimits(**limits)))
        except Exception as error:  # noqa: BLE001 - a thread edge: the trainer's call, or the next save, fails
            _LOG.warning("saves cannot be staged: %s", error)
            self._loop.say_failed(call, error)
        else:
            if call is not None:
                self._loop.say_done(call, None)

    def _stage(self, pending: _PendingSave, server: ControlServer) -> None:
        """Queue a save that all ranks have staged for its upload to the remote."""
        run = self._loop.run_of(pending.job)
        if run is None:
            raise HoldfastError("a staged save needs an open run")
        parts = [PartSummary.from_json(part) for part in server.parts(pending.job.save_id)]
        say_stored_for_all(parts)
        fields = {**pending.job.manifest, "writers": tuple(range(self._world_size))}
        run.stage_save(pending.job.directory, pending.job.save_id, assemble(pending.job.directory, fields, parts))


def _begun(job: SaveJob) -> Message:
    return {"do": "begun", "save": job.save_id, "directory": job.directory, "step": job.manifest.get("step")}


def _forget(known: dict[str, Any]) -> None:
    while len(known) > _REMEMBERED:
        del known[next(iter(known))]
