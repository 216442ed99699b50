"""Saves of many ranks, in the writer of one of them: our part, what rank 0 hears of it, and how the whole ends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast._log import get_logger
from holdfast.errors import HoldfastError, StorageError
from holdfast.format.commit import PartSummary, assemble
from holdfast.format.parts import remove_part
from holdfast.storage.base import Storage

from .answers import DeferredAnswers
from .messages import PartsJob, SaveJob, SaveResult, error_from_json, error_to_json
from .open_files import allow_connections
from .parts import commit_parts, is_committed
from .process_state import how_it_ended, is_stopped
from .ranks.link import Message
from .ranks.member import ControlMember
from .ranks.saves import named_error
from .ranks.server import ControlServer
from .ranks.step_mailbox import WHO_LEFT, StepMailbox
from .uploads.plan import MirrorLimits

if TYPE_CHECKING:
    from .uploads.staged_part import StagedParts

__all__ = ["Joint"]

_LOG = get_logger("writer.control")
_REMEMBERED = 16
_VISIBLE_S = 3.0  # a network file system may show what another machine has stored a little later
_MARGIN_S = 45.0
_LAST_S = 5.0


@dataclass(slots=True, kw_only=True)
class _Waiting:
    """A save whose outcome is not known yet."""

    call: int
    job: SaveJob
    storage: Storage
    again: bool
    manifest: dict[str, Any] = field(default_factory=dict)
    result: SaveResult | None = None
    ended: bool = False  # our part: stored or failed
    committed: bytes = b""
    told: Message = field(default_factory=dict)  # what rank 0 hears of our part
    outcome: Message | None = None


class Joint:
    """Ours is one rank of several; see `ControlServer` and `ControlMember` for how they talk.

    Args:
        answers: the loop.
    """

    def __init__(self, answers: DeferredAnswers) -> None:
        self._answers = answers
        self._server: ControlServer | None = None
        self._member: ControlMember | None = None
        self._rank, self._world_size, self._timeout_s, self._trainer = 0, 1, 0.0, 0
        self._changed = threading.Condition()
        self._waiting: dict[str, _Waiting] = {}
        self._asked: dict[str, list[int]] = {}
        self._wants: dict[str, None] = {}
        self._failed: dict[str, dict[str, Any]] = {}
        self._heard: dict[str, Message] = {}
        self._after: list[Callable[[], None]] = []
        self._staged: StagedParts | None = None
        self._lost: str | None = None
        self._broken = ""  # who left first, and why

    # -- from the trainer, on the reading thread

    def join(self, header: dict[str, Any], fds: tuple[int, ...], board: memoryview) -> None:
        """Join the other ranks; with a listening socket we are rank 0, and the server is here."""
        self._rank, self._world_size, self._timeout_s = header["rank"], header["world_size"], header["timeout_s"]
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
                **times,
            )
        if "stage" in header:  # before orders for it can come
            self.stage(**header["stage"])
        with self._changed:  # else what is answered to the first words of rank 0 may be said by nobody
            self._member = ControlMember(
                rank=self._rank,
                addresses=[(host, port) for host, port in header["addresses"]],
                token=header["token"],
                board=StepMailbox(board),
                hear=self._hear,
                again=self._again,
                stopped=lambda: is_stopped(self._trainer),
                hold=self._answers.hold,
                **times,
            )

    def stage(self, local: int, remote: int, limits: dict[str, Any], start_id: str, call: int | None = None) -> None:
        """From now on our parts are staged on the local disk, and brought to the remote later. May be repeated."""
        from .uploads.staged_part import StagedParts  # not above: few writers need it, and each start waits

        here, far = self._answers.storage_of(local), self._answers.storage_of(remote)
        if self._staged is None:
            self._staged = StagedParts(here, far, self._rank, start_id, self._say)
        self._answers.later(lambda: self._lead(here, far, limits, call))

    def begun(self, call: int, job: SaveJob, storage: Storage, *, again: bool) -> None:
        """Take a job: from now on its end, good or bad, reaches the other ranks."""
        with self._changed:
            one = self._waiting[job.save_id] = _Waiting(call=call, job=job, storage=storage, again=again)
            lost = None if self._lost is None else self._lost_outcome(self._lost)
            one.outcome = self._heard.get(job.save_id) or lost  # told before it began
        self._say(_begun(job))

    def part_failed(self, save: str, error: dict[str, Any]) -> None:
        """The trainer could not make its part of a save, or lost it."""
        with self._changed:
            self._failed[save] = error
            _forget(self._failed)
        self._say({"do": "failed", "save": save, "error": error})

    def want(self, kind: str) -> None:
        """The trainer wants all ranks to save, or stop, at a common step."""
        with self._changed:
            self._wants[kind] = None
        self._say({"do": "want", "kind": kind})

    def acted(self, step: int) -> None:
        """The trainer acts at the agreed step."""
        with self._changed:
            self._wants.clear()
        self._say({"do": "acted", "step": step})

    def ask(self, call: int, about: str) -> None:
        """The trainer asks something that is decided once for all ranks; see `ControlServer`."""
        if about == WHO_LEFT:
            self._answers.say_failed(call, HoldfastError(self._lost or self._broken or "no rank has left"))
            return
        with self._changed:
            self._asked.setdefault(about, []).append(call)
            lost = self._lost
        if lost is not None:
            self._fail_asked(lost)
        self._say({"do": "ask", "about": about})

    def after(self, work: Callable[[], None]) -> None:
        """Do something on the working thread once the saves begun before it have ended."""
        with self._changed:
            if self._waiting:
                self._after.append(work)
                return
        self._answers.later(work)

    # -- from the working thread

    def stored(self, job: SaveJob, result: SaveResult, manifest: dict[str, Any]) -> None:
        """Our part is durable."""
        told: Message = {"do": "stored", "save": job.save_id}
        if self._staged is not None:
            try:
                told["part"] = self._staged.hold(job.save_id, job.directory)
            except HoldfastError as error:
                self.failed(job, error)
                return
        with self._changed:
            one = self._waiting[job.save_id]
            one.told = told
            one.result, one.manifest, one.ended = result, manifest, True
            known = one.outcome is not None
        if known:
            self._settle(one)
        else:
            self._say(one.told)

    def failed(self, job: SaveJob, error: BaseException) -> None:
        """Our part could not be stored; its files are gone."""
        with self._changed:
            one = self._waiting[job.save_id]
            one.ended = True
            known = one.outcome is not None
            self._failed[job.save_id] = told = error_to_json(error)
            _forget(self._failed)
        if known:
            self._settle(one)
        else:
            self._say({"do": "failed", "save": job.save_id, "error": told})

    def finish(self, why: str, *, dead: bool) -> None:
        """Begin no more saves; wait for the outcome of those begun, then leave.

        Args:
            why: of our trainer's end.
            dead: it did not end in order.
        """
        if self._member is None:
            return
        if dead:
            why = f"its trainer process has died{how_it_ended(self._trainer)}"
        self._say({"do": "left", "why": why})
        until = time.monotonic() + self._timeout_s + _MARGIN_S
        with self._changed:
            # Bounded by the server's own bounds, so this one is for the case that it is stuck itself.
            self._changed.wait_for(lambda: not self._waiting, max(0.0, until - time.monotonic()))
        if self._staged is not None:
            if (run := self._answers.run) is not None:
                run.end_uploads()
            if self._server is not None:  # nobody else asks for anything
                until = min(until, time.monotonic() + _LAST_S)
            self._staged.await_end(until, lambda: self._lost is not None)
        self._member.close(why)
        if self._server is not None:
            self._server.close(f"rank 0: {why}")

    # -- from the control channel, on its threads

    def _hear(self, message: Message) -> None:
        if message["do"] == "verdict":
            with self._changed:
                calls = self._asked.pop(message["about"], [])
            for call in calls:
                self._answers.say_done(call, message["go"])
            return
        if message["do"] == "broken":
            self._broken = message["why"]
            return
        if message["do"] in ("upload", "clear", "keep"):
            if self._staged is not None:
                self._staged.take(message)
            elif message["do"] == "upload":  # our trainer is about to say where; it is asked for again
                error = named_error("StorageError", "it is just starting")
                self._say({"do": "uploaded", "save": message["save"], "error": error})
            return
        with self._changed:
            if message["do"] == "lost":
                self._lost = message["why"]
                told = {save: self._lost_outcome(self._lost) for save in self._waiting}
            else:
                told = {message["save"]: message}
                self._heard[message["save"]] = {**message, "do": "heard"}
                _forget(self._heard)
            ready = []
            for save, outcome in told.items():
                one = self._waiting.get(save)
                if one is not None and one.outcome is None:
                    one.outcome = outcome
                    if one.ended:
                        ready.append(one)
        for one in ready:
            self._answers.later(lambda one=one: self._settle(one))  # type: ignore[misc]
        if self._lost is not None:
            self._fail_asked(self._lost)

    def _again(self) -> list[Message]:
        """Say again what a new connection (or a new server) has to know."""
        with self._changed:
            told: list[Message] = list(self._heard.values())
            for one in self._waiting.values():
                told.append(_begun(one.job))
                if one.result is not None:
                    told.append(one.told)
            told += [{"do": "failed", "save": save, "error": error} for save, error in self._failed.items()]
            told += [{"do": "want", "kind": kind} for kind in self._wants]
            told += [{"do": "ask", "about": about} for about in self._asked]
        return told

    def _lost_outcome(self, why: str) -> Message:
        text = f"{why}; whether this save was committed is not known, the checkpoint before it stays"
        return {"do": "outcome", "error": named_error("HoldfastError", text), "value": None, "discard": False}

    def _fail_asked(self, why: str) -> None:
        with self._changed:
            asked, self._asked = self._asked, {}
        for calls in asked.values():
            for call in calls:
                self._answers.say_failed(call, HoldfastError(why))

    def _say(self, message: Message) -> None:
        with self._changed:
            member = self._member
        if member is not None:
            member.say(message)

    # -- the end of a save

    def _settle(self, one: _Waiting) -> None:
        """Answer the trainer; on the working thread."""
        outcome = one.outcome
        assert outcome is not None
        if outcome["error"] is not None:
            if outcome["discard"]:
                self._discard(one)
                if self._staged is not None:
                    self._staged.let_go(one.job.save_id)
            error = error_from_json(outcome["error"])
            if one.job.run and (run := self._answers.run) is not None:
                run.note_lost(one.job.directory, one.job.manifest, error)
            self._answers.say_failed(one.call, error)
        else:
            assert one.result is not None
            value = outcome["value"] or {}
            deleted = tuple((name, why) for name, why in value.get("deleted", ()))
            result = replace(one.result, deleted=deleted, warnings=tuple(value.get("warnings", ())))
            self._answers.say_done(one.call, result.to_json(), (one.committed,))
        with self._changed:
            self._waiting.pop(one.job.save_id, None)
            if not self._waiting:
                after, self._after = self._after, []
                for work in after:
                    self._answers.later(work)
            self._changed.notify_all()

    def _discard(self, one: _Waiting) -> None:
        """Remove our part, the part file first: what it names must be whole."""
        job = one.job
        with suppress(HoldfastError):
            if is_committed(one.storage, job):
                return  # by a writer of rank 0 that died before it could say so
            remove_part(one.storage, job.directory, job.save_id, job.writer)

    def _commit_later(self, save: str) -> None:
        self._answers.later(lambda: self._commit(save))

    def _commit(self, save: str) -> None:
        """Commit what all ranks have stored, record it in the run, tell everybody."""
        server = self._server
        assert server is not None
        with self._changed:
            one = self._waiting.get(save)
        try:
            if one is None:
                raise HoldfastError(f"rank 0 does not know of save {save}")
            if self._staged is not None:
                self._stage(one, server)
                server.committed(save, value={})
                return
            job = PartsJob(
                directory=one.job.directory,
                save_id=save,
                writers=tuple(range(self._world_size)),
                manifest=one.manifest,
                wait_s=_VISIBLE_S,
                run=one.job.run,
                overwrite=one.job.overwrite,
                stored=True,
            )
            result = commit_parts(one.storage, job, self._answers.run_of(one.job), again=one.again)
        except Exception as error:  # noqa: BLE001 - a thread edge: all ranks hear of it
            told = error_to_json(error)
            if isinstance(error, StorageError) or not isinstance(error, HoldfastError):
                told["message"] = f"rank 0: {told['message']}"
            server.committed(save, error=told)
            if self._staged is not None and one is not None:
                server.tell({"do": "clear", "save": save, "directory": one.job.directory})
        else:
            one.committed = result.manifest
            server.committed(save, value={"deleted": result.deleted, "warnings": result.warnings})

    def _lead(self, local: Storage, remote: Storage, limits: dict[str, Any], call: int | None) -> None:
        """Be the one who decides what is brought when; on the working thread, where the run is open by now."""
        run = self._answers.run
        try:
            if self._server is not None and run is not None and run.uploads is None:
                from .uploads.staged_run import StagedRun  # as above

                run.stage(partial(StagedRun, run, self._server, remote, local, MirrorLimits(**limits)))
        except Exception as error:  # noqa: BLE001 - a thread edge: the trainer, or the next save, hears of it
            _LOG.warning("saves cannot be staged: %s", error)
            self._answers.say_failed(call, error)
        else:
            if call is not None:
                self._answers.say_done(call, None)

    def _stage(self, one: _Waiting, server: ControlServer) -> None:
        """Take a save that all ranks have staged: it is on its way to the remote from now on."""
        run = self._answers.run_of(one.job)
        if run is None:
            raise HoldfastError("a staged save needs an open run")
        parts = [PartSummary.from_json(part) for part in server.parts(one.job.save_id)]
        fields = {**one.manifest, "writers": tuple(range(self._world_size))}
        run.stage_save(one.job.directory, one.job.save_id, assemble(one.job.directory, fields, parts))


def _begun(job: SaveJob) -> Message:
    return {"do": "begun", "save": job.save_id, "directory": job.directory, "step": job.manifest.get("step")}


def _forget(known: dict[str, Any]) -> None:
    while len(known) > _REMEMBERED:
        del known[next(iter(known))]
