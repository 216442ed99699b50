"""The writer process: one thread reads the messages of its trainer, one does the work in order.

`Handed` keeps what the trainer hands over, storages and memory, by the numbers that later messages name them with.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast._log import get_logger
from holdfast.errors import HoldfastError, StorageError
from holdfast.run.process import how_it_ended
from holdfast.storage.base import Storage
from holdfast.storage.resolve import extend_path, from_description

from .arena import Arena
from .frames import Channel, Message
from .messages import IngestJob, PartsJob, SaveJob, SaveResult, error_to_json
from .open_run import Run
from .pipeline import Arriving, Watermark, WindowSource
from .save import SaveRunner, Task, commit_parts, probe

if TYPE_CHECKING:
    from .distributed import Joint
    from .messages import RunOpened
    from .single_file import FileSaves, NameLeases
    from .uploads.files import FileUploads

__all__ = ["Handed", "HandedOver", "WriterLoop", "main"]

_LOG = get_logger("writer")
# How long a half-sent message of a dead trainer is waited for.
_DRAIN_MS = 2000
_HOLD_S = 1.0
_DIED = "the trainer died"
_CUT_OFF = "nothing more could be sent to its writer"
_NICE = 5


class Handed:
    """Storages and arenas of one conversation, which come out of the socket.

    Taken in on the reading thread, dropped on the working one.
    """

    def __init__(self) -> None:
        self._storages: dict[int, Storage | HoldfastError] = {}
        self._views: dict[int, memoryview] = {}
        self._unmapped: dict[int, Message] = {}
        self._arenas: dict[int, Arena] = {}

    def take_storage(self, message: Message) -> None:
        """Take a storage in, or the reason why it cannot be made here: what is asked of it fails with that.

        A plug-in is imported along the trainer's ``sys.path``.
        """
        try:
            extend_path(message.header.get("imports", []))
            made = from_description(message.header["description"], message.header.get("secrets"))
            self._storages[message.header["key"]] = made
        except HoldfastError as error:
            self._storages[message.header["key"]] = error

    def storage(self, key: int) -> Storage:
        """Return a storage by its number.

        Raises:
            HoldfastError: it could not be made in this process.
        """
        found = self._storages[key]
        if isinstance(found, HoldfastError):
            raise found
        return found

    def take_arena(self, message: Message) -> None:
        """Take an arena in, and map it if that is possible now: else the first job that needs it tries again."""
        self._unmapped[message.header["number"]] = message
        with contextlib.suppress(HoldfastError):
            self.view(message.header["number"])

    def view(self, number: int) -> memoryview:
        """Return the memory of an arena, mapped now if it is not yet.

        Raises:
            HoldfastError: there is no room to map it.
        """
        view = self._views.get(number)
        if view is None:
            message = self._unmapped[number]
            try:
                view = self._views[number] = self._map(message)
            except OSError as error:
                raise HoldfastError(
                    f"the writer cannot map {message.header['size']} bytes of memory that it shares with the trainer "
                    f"({error.strerror}): this save is lost, the next one tries again; give the machine more memory"
                ) from error
            del self._unmapped[number]
        return view

    def _map(self, message: Message) -> memoryview:
        arena = Arena.attach(message.fds[0], message.header["size"])
        arena.prefault(allocate=False)  # in the background: direct IO needs mapped pages
        self._arenas[message.header["number"]] = arena
        return arena.view

    def drop_arena(self, number: int) -> None:
        """Give an arena back, when no job uses it any more."""
        self._views.pop(number, None)
        message = self._unmapped.pop(number, None)
        for fd in () if message is None else message.fds:
            os.close(fd)
        arena = self._arenas.pop(number, None)
        if arena is not None:
            arena.close()


class HandedOver(Handed):
    """What a writer that is a thread takes from its trainer directly: there the same objects serve both."""

    def __init__(self) -> None:
        super().__init__()
        self._shared: dict[int, memoryview] = {}

    def share_storage(self, key: int, storage: Storage) -> None:
        """Hand a storage over, before the message that tells of it."""
        self._storages[key] = storage

    def share(self, arena: Arena) -> None:
        """Hand memory over: a view of our own, so that it outlives `Arena.close` in the middle of a save."""
        self._shared[arena.number] = arena.view[:]

    def take_storage(self, message: Message) -> None:
        """Do nothing: it is here."""

    def _map(self, message: Message) -> memoryview:
        return self._shared[message.header["number"]]

    def drop_arena(self, number: int) -> None:
        """Let go of an arena, which is the trainer's to close."""
        super().drop_arena(number)
        view = self._shared.pop(number, None)
        if view is not None:
            view.release()


class WriterLoop:
    """Serves one trainer. `serve` returns when the trainer closed or died and what was sealed is committed."""

    def __init__(self, channel: Channel, handed: Handed, *, trainer_fd: int = -1, in_trainer: bool = False) -> None:
        self._channel, self._trainer_fd = channel, trainer_fd
        self._handed, self._arriving = handed, Arriving()
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._saver = SaveRunner()
        self._run: Run | None = None
        self._joint: Joint | None = None
        self._uploads: dict[int, FileUploads] = {}  # by the number of their target
        self._files: FileSaves | None = None  # made by the reading thread for the first file, or the first name
        self._kept: dict[int, Task] = {}  # saves that are committed only if the trainer dies, by their arena
        self._committed_step = -1  # of the run
        self._will: str | None = None  # several ranks: why our trainer leaves, so that they rescue what they hold
        self._last: dict[str, Any] | None = None  # arguments of "close_run", for after the rescue
        self._ending = threading.Event()
        # A thread ends with its trainer. If only its channel ends, the trainer lives, and goes on writing to the memory
        # of snapshots that must not be rescued.
        self._end = _CUT_OFF if in_trainer else _DIED
        self._reason = ""  # for the run: how the trainer has died, and with several ranks which one it is
        self._died_at: float | None = None  # what is rescued and uploaded after that is no time of the training
        self._trainer_pid = 0
        self._handlers: dict[str, Callable[[Message], None]] = {
            "storage": self._handed.take_storage,
            "arena": self._handed.take_arena,
            "drop_arena": self._drop_arena,
            "save": self._take_save,
            "hold": self._take_hold,
            "release": self._release,
            "rescue": self._take_rescue,
            "window": self._arriving.window,
            "fill": self._arriving.fill,
            "seal": self._arriving.seal,
            "abandon": self._arriving.abandon,
            "ingest": self._take_ingest,
            "parts": self._take_parts,
            "upload": self._take_upload,
            "join": self._join,
            "leave": self._leave,
            "joint": self._tell_ranks,
            "ask": self._ask_ranks,
            "open_run": self._take_open_run,
            "name": self._take_name,
            "op": self._take_op,
        }

    def serve(self) -> None:
        """Read messages until the end, while a second thread works them off."""
        worker = threading.Thread(target=self._worker, name="holdfast-writer-work", daemon=True)
        worker.start()
        try:
            self._read()
        except Exception:  # noqa: BLE001 - a thread edge: without messages there is nothing to do but to end in order
            _LOG.exception("the writer cannot read its trainer's messages")
        finally:
            if self._end == _DIED:  # now, before its parent has asked for its status
                self._died_at = time.time()
                died = _DIED if self._joint is None else f"rank {self._joint.rank}: its trainer process has died"
                self._reason = died + how_it_ended(self._trainer_pid)
            self._ending.set()
            run = self._run  # read once: the working thread may be closing it
            if run is not None:
                run.trainer_gone()
            if self._files is not None:
                self._files.leases.trainer_gone()
            self._arriving.abandon_all(f"{self._end} before this save was complete")
            dead = self._end == _DIED
            if self._joint is not None:
                offers = self._kept and (dead or self._will is not None)
                self._joint.finish(self._end, dead=dead, rescue=self._rescue_together if offers else None)
            elif dead:
                self._work.put(self._rescue_after_death)
            self._work.put(None)
            if self._files is not None:
                self._files.end()
            self._end_uploads()
            worker.join()
            if self._files is not None:
                self._files.close()
        self._say({"on": "bye"})
        self._channel.flush(5.0)
        self._channel.close()
        self._handlers.clear()  # bound methods: only a garbage collection would free this, and the arenas it maps

    # ---- the reading thread

    def _read(self) -> None:
        poll, ours, trainer = select.poll(), self._channel.fileno(), self._trainer_fd
        poll.register(ours, select.POLLIN)
        if trainer >= 0:
            poll.register(trainer, select.POLLIN)
        while True:
            if trainer >= 0:
                ready = dict(poll.poll())
                if ours not in ready:
                    return  # the trainer is dead, and has left no more messages
                if trainer in ready:
                    # A forked child of the trainer may hold the other end open: then no end of file comes.
                    self._channel.set_timeout(_DRAIN_MS / 1000)
            message = self._channel.receive()
            if message is None:
                return
            kind = message.header["do"]
            if kind == "close":
                self._end = message.header.get("why", "closed")
                return
            try:
                self._handlers[kind](message)
            except Exception as error:  # noqa: BLE001 - the caller hears of it; other calls go on
                self.say_failed(message.header.get("call"), error)

    def _drop_arena(self, message: Message) -> None:
        """Let go of an arena, behind the jobs that use it."""
        if self._will is not None:
            return  # it may hold what is rescued
        self._kept.pop(message.header["number"], None)
        drop = partial(self._handed.drop_arena, message.header["number"])
        self._work.put(drop if self._files is None else partial(self._files.run, drop))

    def _take_save(self, message: Message) -> None:
        header = message.header
        call, number = header["call"], header["arena"]
        job = SaveJob.from_json(header["job"])
        arriving: WindowSource | Watermark | None = WindowSource(self._answer_many) if job.windowed else None
        if "filled" in header:
            arriving = Watermark(
                header["filled"], max((plan.arena_offset + plan.size for plan in job.files), default=0)
            )
        task = Task(
            job=job,
            storage=self._handed.storage(header["storage"]),
            storage_key=header["storage"],
            view=memoryview(b"") if number is None else self._handed.view(number),
            blobs=message.attachments,
            arriving=arriving,
            again=header.get("again", False),
        )
        if arriving is not None:
            # Not before the task exists: nobody would answer the windows of a save that could not even be queued.
            self._arriving.expect(call, arriving)
        joint = self._joined() if job.joint else None
        if joint is not None:
            joint.begun(call, job, task.storage, again=task.again)
        if job.container is None:
            self._work.put(partial(self._save, call, task, joint))
        else:
            self._file_saves().run(partial(self._save, call, task, None))

    def _file_saves(self) -> FileSaves:
        if self._files is None:
            from .single_file import FileSaves  # not above: most writers never need it, and each start waits

            self._files = FileSaves()
        return self._files

    def _take_hold(self, message: Message) -> None:
        header = message.header
        self._kept[header["arena"]] = Task(
            job=SaveJob.from_json(header["job"]), storage=self._handed.storage(header["storage"]),
            storage_key=header["storage"], view=self._handed.view(header["arena"]), blobs=message.attachments,
        )  # fmt: skip

    def _release(self, message: Message) -> None:
        self._kept.pop(message.header["arena"], None)

    def _take_rescue(self, message: Message) -> None:
        if self._joint is None:
            self._later(message, lambda: self._rescue(message.header["why"]))
            return
        # The other ranks may wait for the end of our trainer's process: it is rescued after that.
        self._will = message.header["why"]
        self.say_done(message.header["call"], None)

    def _join(self, message: Message) -> None:
        from .distributed import Joint  # not above: a writer of one rank starts faster without

        joint = Joint(self)
        joint.join(message.header, message.fds, self._handed.view(message.header["mailbox"]))
        self._joint = joint
        self.say_done(message.header["call"], None)

    def _leave(self, message: Message) -> None:
        """Leave the other ranks, while this writer goes on with other work."""
        self._joined().finish(message.header["why"], dead=False)
        self.say_done(message.header["call"], None)

    def _tell_ranks(self, message: Message) -> None:
        """Tell the other ranks something."""
        header, joint = message.header, self._joined()
        told: dict[str, Callable[..., None]] = {
            "want": joint.want, "acted": joint.acted, "part_failed": joint.part_failed, "stage": joint.stage,
        }  # fmt: skip
        call = {"call": header["call"]} if "call" in header else {}  # it is answered
        told[header["what"]](**header["args"], **call)

    def _ask_ranks(self, message: Message) -> None:
        self._joined().ask(message.header["call"], message.header["about"])

    def _joined(self) -> Joint:
        if self._joint is None:
            raise HoldfastError("this writer has not joined those of other ranks: call join first")
        return self._joint

    def _take_ingest(self, message: Message) -> None:
        job = IngestJob.from_json(message.header["job"])
        storage, again = self._handed.storage(message.header["storage"]), message.header.get("again", False)
        side = self._saver.side

        def make(run: Run | None) -> SaveResult:
            from .ingest.intake import Intake, commit_in_place  # not above: few writers need them, each start waits

            if not job.sources:
                return commit_in_place(storage, job, run, side, again=again)
            return Intake(storage, job, side).take(run, again=again)

        self._make(message.header["call"], job, make)

    def _take_parts(self, message: Message) -> None:
        job = PartsJob.from_json(message.header["job"])
        storage, again = self._handed.storage(message.header["storage"]), message.header.get("again", False)
        self._make(message.header["call"], job, lambda run: commit_parts(storage, job, run, again=again))

    def _take_upload(self, message: Message) -> None:
        from .uploads.files import FileUploads, UploadJob  # not above: few writers need it, and each start waits

        header = message.header
        call, key = header["call"], header["target"]
        if key not in self._uploads:
            self._uploads[key] = FileUploads(self._handed.storage(key), num_workers=header["num_workers"])

        def done(error: BaseException | None) -> None:
            if error is None:
                self.say_done(call, None)
            else:
                self.say_failed(call, error)

        self._uploads[key].add(self._handed.storage(header["storage"]), UploadJob.from_json(header["job"]), done)

    def _end_uploads(self) -> None:
        """Finish what the trainer has asked to be uploaded, dead or not."""
        for uploads in self._uploads.values():
            if self._end == _DIED:
                uploads.trainer_gone()
        for uploads in self._uploads.values():
            uploads.close()

    def _take_open_run(self, message: Message) -> None:
        self._later(message, lambda: self._open_run(message.header))

    def _take_name(self, message: Message) -> None:
        files = self._file_saves()
        files.run(self._answering(message, lambda: self._name(files.leases, message.header)))

    def _take_op(self, message: Message) -> None:
        header, run = message.header, self._run
        early = run is not None and header["op"] == "follow" and run.uploads is None  # they may be about to begin
        if run is None or early or not self._is_taken(run, header):
            self._later(message, lambda: self._op(header))

    def _is_taken(self, run: Run, header: dict[str, Any]) -> bool:
        """Pass on what need not wait for the saves before it, and is answered later."""
        if header["op"] == "report":
            run.report(header["call"], header["args"]["rows"], self._answer_many)
        elif header["op"] == "journal":
            run.take_events(header["args"]["events"])
            self.say_done(header["call"], None)
        elif header["op"] == "hurry":
            run.hurry()
            self.say_done(header["call"], None)
        elif header["op"] == "follow":
            run.follow(header["args"]["since"], lambda state: self.say_done(header["call"], state))
        else:
            return False
        return True

    # ---- the working thread

    def _later(self, message: Message, call: Callable[[], Any]) -> None:
        work = self._answering(message, call)
        if self._joint is None:
            self._work.put(work)
        else:
            self._joint.after(work)

    def _answering(self, message: Message, call: Callable[[], Any]) -> Callable[[], None]:
        """Return what answers a message with what ``call`` returns, or raises."""

        def work() -> None:
            try:
                value = call()
            except Exception as error:  # noqa: BLE001 - a thread edge: the caller's future carries it
                self.say_failed(message.header["call"], error)
            else:
                if value is not _ANSWERED:
                    self.say_done(message.header["call"], value)

        return work

    def _worker(self) -> None:
        while (work := self._work.get()) is not None:
            work()
        try:
            if self._run is not None and self._last is not None:
                self._run.close(self._last.get("reason", "closed"), self._last.get("details"))
            elif self._run is not None:
                left = self._run.take_left() if self._end == _DIED else None
                self._run.close(self._reason or self._end, left, ended=self._died_at)
        except Exception as error:  # noqa: BLE001 - a thread edge; the lease goes stale by itself
            _LOG.warning("the run could not be closed in order: %s", error)
        self._saver.close()

    def _make(self, call: int, job: IngestJob | PartsJob, make: Callable[[Run | None], SaveResult]) -> None:
        def work() -> None:
            try:
                result = make(self.run_of(job))
            except Exception as error:  # noqa: BLE001 - a thread edge: the future of the job carries it
                self.note_lost(job, error)
                self.say_failed(call, error)
            else:
                self.say_done(call, result, (result.manifest,))

        self._work.put(work)

    def run_of(self, job: SaveJob | IngestJob | PartsJob) -> Run | None:
        """Give the open run if the job belongs to it; on the working thread."""
        if job.run and self._run is None:
            raise HoldfastError("a save of a run needs an open run: call open_run first")
        return self._run if job.run else None

    def note_lost(self, job: SaveJob | IngestJob | PartsJob, error: BaseException) -> None:
        """Let the run, if it is open here, know that a save of it failed."""
        if self._run is not None and job.run:
            self._run.note_lost(job.directory, job.manifest, error)

    @property
    def run(self) -> Run | None:
        """The open run."""
        return self._run

    def storage_of(self, key: int) -> Storage:
        """Return a storage that the trainer has announced."""
        return self._handed.storage(key)

    def later(self, work: Callable[[], None]) -> None:
        """Do something on the working thread, behind what is queued."""
        self._work.put(work)

    def _save(self, call: int, task: Task, joint: Joint | None) -> None:
        job = task.job
        try:
            if job.container is None:
                result = self._saver.save(task, self.run_of(job))
            else:
                result = self._file_saves().save(task, job.container)
        except Exception as error:  # noqa: BLE001 - a thread edge: the future of the save carries it
            self._arriving.end(call, error)
            if joint is not None:
                joint.failed(job, error)
            else:
                self.note_lost(job, error)
                self.say_failed(call, error)
        else:
            self._arriving.end(call)
            if joint is not None:
                joint.stored(job, result)
            else:
                if job.may_be_resumed:
                    self._committed_step = max(self._committed_step, job.manifest["step"])
                self.say_done(call, result, (result.manifest,))

    def _rescue(self, why: str) -> str | None:
        """Commit the newest save that is held, if none that is committed is as new; on the working thread."""
        kept = max(self._kept.values(), key=lambda task: task.job.manifest["step"], default=None)
        self._kept.clear()
        if kept is None or kept.job.manifest["step"] <= self._committed_step:
            return None
        task = _rescued(kept, why)
        try:
            self._saver.save(task, self.run_of(task.job))
        except Exception as error:
            self.note_lost(task.job, error)
            raise
        self._committed_step = task.job.manifest["step"]
        return task.job.directory

    def _rescue_together(self) -> None:
        """Store our part of the newest snapshot that the writers of all ranks hold; the reading thread ends with it."""
        joint = self._joined()
        held = {task.job.save_id: task for task in self._kept.values()}
        chosen = held.get(joint.offer({save: task.job.manifest["step"] for save, task in held.items()}))
        if chosen is not None:
            task = _rescued(chosen, self._will or self._reason)
            joint.rescue(task.job, task.storage)
            self._work.put(lambda: self._save(-1, task, joint))

    def _rescue_after_death(self) -> None:
        try:
            self._rescue(self._reason or self._end)
        except StorageError as error:
            _LOG.warning("the snapshot of the dead trainer could not be saved, the newest checkpoint counts: %s", error)
        except Exception:  # noqa: BLE001 - a thread edge: the newest durable checkpoint counts
            _LOG.exception("the snapshot of the dead trainer could not be saved")

    def _open_run(self, header: dict[str, Any]) -> RunOpened:
        if self._run is not None:
            raise HoldfastError("this writer has an open run: close it first, or start another writer")
        remote = None
        if (told := header.get("mirror")) is not None:
            from .uploads.mirror import RemoteSide  # not above: most writers never need it, and each start waits

            remote = RemoteSide.from_told(self._handed.storage(told["storage"]), told)
        self._trainer_pid = header["owner"].get("trainer_pid", 0)
        self._forget_run()  # a shared writer may have served another one
        run, opened = Run.open(
            self._handed.storage(header["storage"]),
            owner=header["owner"],
            keep=header["keep"],
            wait_s=header["wait_s"],
            pause=self._pause,
            again=header.get("again") if isinstance(header.get("again"), dict) else None,
            remote=remote,
            later=self._work_later,
            links=header.get("links", True),
        )
        if (number := header.get("memory")) is not None:
            run.memory = partial(self._handed.view, number)
        self._run = run
        if self._ending.is_set():  # set before `serve` looked for a run to tell, perhaps while there was none yet
            run.trainer_gone()
        return opened

    def _forget_run(self) -> None:
        """Forget what is known of the run before: its steps say nothing of the next one, nor is it rescued there."""
        self._committed_step = -1
        for number in [number for number, task in list(self._kept.items()) if task.job.run]:
            self._kept.pop(number, None)

    def _name(self, leases: NameLeases, header: dict[str, Any]) -> None:
        storage, of = self._handed.storage(header["storage"]), header["of"]
        if header["what"] == "take":
            leases.take(storage, of, header["owner"], wait_s=header["wait_s"], pause=self._pause)
        elif header["what"] == "give_back":
            leases.give_back(storage.uri, of)
        elif (held := leases.held(storage, of)) is not None:
            held.verify()

    def _work_later(self, call: Callable[[], object]) -> None:
        def work() -> None:
            try:
                call()
            except Exception:  # noqa: BLE001 - a thread edge: nobody waits for it
                _LOG.exception("what was left to be done between saves failed; it is tried again after the next one")

        self._work.put(work)

    def _pause(self, seconds: float) -> None:
        if self._ending.wait(seconds):
            raise HoldfastError("nobody needs this run any more")

    def _op(self, header: dict[str, Any]) -> Any:
        op, args = header["op"], header["args"]
        if op == "probe":
            return probe(self._handed.storage(args["storage"]), args["directory"], self._saver)
        if self._run is None:
            raise HoldfastError(f"{op!r} needs an open run: call open_run first")
        if self._is_taken(self._run, header):
            return _ANSWERED
        if op == "close_run" and self._will is not None:
            self._last = args
            return None
        if op == "close_run":
            run, self._run = self._run, None
            self._forget_run()
            run.close(args.get("reason", "closed"), args.get("details"))
            return None
        return self._run.op(op, args)

    # ---- answers, from any thread

    def hold(self, fd: int) -> bool:
        """Have the trainer keep a descriptor open too, in place of the one before, until its writer has ended for good.

        Returns:
            Whether the file is certain to stay open as long as somebody may start this writer again.
        """
        try:
            self._channel.send({"on": "hold", "calls": []}, fds=(fd,))
        except OSError as error:
            return isinstance(error, BrokenPipeError | ConnectionResetError)  # nobody will start us again
        return self._channel.flush(_HOLD_S)

    def _answer_many(self, calls: list[int], error: BaseException | None) -> None:
        if error is None:
            self._say({"on": "done", "calls": calls})
        else:
            self._say({"on": "failed", "calls": calls, "error": error_to_json(error)})

    def say_done(self, call: int, value: Any, attachments: tuple[bytes, ...] = ()) -> None:
        """Answer a call."""
        self._say({"on": "done", "calls": [call], "value": value}, attachments)

    def say_failed(self, call: int | None, error: BaseException) -> None:
        """Let a call fail."""
        if not isinstance(error, HoldfastError):
            _LOG.error("the writer failed", exc_info=error)
        if call is not None:
            self._say({"on": "failed", "calls": [call], "error": error_to_json(error)})

    def _say(self, header: dict[str, Any], attachments: tuple[bytes, ...] = ()) -> None:
        try:
            self._channel.send(header, attachments)
        except OSError:
            _LOG.debug("nobody hears: %s", header["on"])  # the trainer is gone; its job is finished all the same


def _rescued(kept: Task, why: str) -> Task:
    manifest = dict(kept.job.manifest)
    manifest["extra"] = {**manifest.get("extra", {}), "rescued": why}
    return replace(kept, job=replace(kept.job, manifest=manifest))


_ANSWERED = object()


def main(socket_fd: int, trainer_fd: int) -> None:
    """Serve one trainer until it closes or dies, then end.

    Args:
        socket_fd: our end of the socket pair.
        trainer_fd: pidfd of the trainer, -1 where there is none.
    """
    # Batch systems signal every process of a job. This process ends with its trainer, after the last save.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # some sandboxes refuse; then we compete as an equal
        os.nice(_NICE)
    # Digests of small chunks keep the interpreter lock: hand it to the writing thread sooner than every 5 ms.
    sys.setswitchinterval(0.0005)
    for fd in (socket_fd, trainer_fd):
        if fd >= 0:
            os.set_inheritable(fd, False)
    loop = WriterLoop(Channel(socket.socket(fileno=socket_fd)), Handed(), trainer_fd=trainer_fd)
    loop.serve()
    # An upload that hangs in its client must not keep this process; what it did not finish, the next start does.
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(0)
