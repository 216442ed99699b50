"""The trainer's end of the writer: submit jobs, get futures."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from holdfast.config import Mirror
from holdfast.errors import ConfigError, HoldfastError
from holdfast.storage.base import Storage

from .arena import Arena
from .conversation import Conversation, PendingCall, can_run_process
from .messages import IngestJob, PartsJob, RunOpened, SaveJob, SaveResult, error_to_json, limits_of

if TYPE_CHECKING:
    from .uploads.files import UploadJob

__all__ = ["SharedWriter", "WriterClient"]


class WriterClient:
    """One writer process (or thread) and the calls that it answers. All methods return at once, except `close`.

    Futures are resolved on a thread of the client: a callback must be short and must not wait for another future.
    After a death of the writer process it is started again once and everything unanswered is sent again (the data
    still lies in the arena). The windows of a job have to be sent again by whoever sent them, see `window`.

    Example:
        >>> with WriterClient.start(storage) as writer:                               # doctest: +SKIP
        ...     writer.submit(storage, job, [index, state], arena).result().bytes_written
    """

    def __init__(self, *, thread: bool, conversation: Conversation | None = None) -> None:
        self._conversation = Conversation(thread=thread) if conversation is None else conversation
        self._conversation.users.add(self)
        # What of it has to be given back by a `close` that does not end the writer.
        self._names: set[tuple[int, str]] = set()
        self._holds_run = self._joined = self._for_run = False

    @classmethod
    def start(
        cls, storage: Storage | None = None, *, thread: bool | None = None, remote: Storage | None = None
    ) -> WriterClient:
        """Start a writer: a process where possible, else a thread.

        Args:
            storage: where the jobs will go; one that cannot describe itself (memory, live objects) needs a thread.
            thread: force the choice.
            remote: where checkpoints are mirrored to.
        """
        if thread is None:
            thread = _needs_thread(storage, remote)
        return cls(thread=thread)

    @property
    def process_id(self) -> int | None:
        """Process id of the writer, None when it is a thread."""
        return None if self._conversation.process is None else self._conversation.process.pid

    @property
    def closed(self) -> bool:
        """True once this client takes no more work: closed, or its writer died for good."""
        return self not in self._conversation.users or self._conversation.closed

    def attach(self, arena: Arena) -> None:
        """Hand an arena over before the first job needs it, so that the writer maps its pages meanwhile."""
        with self._conversation.turn():
            self._conversation.tell_arena(arena)

    def submit(
        self,
        storage: Storage,
        job: SaveJob,
        blobs: Sequence[bytes] = (),
        arena: Arena | None = None,
        *,
        filled: int | None = None,
    ) -> PendingCall:
        """Start a save. The arena ranges of the job must not change until the future is done.

        Args:
            storage: root that ``job.directory`` is relative to.
            job: what to write. Unless it is windowed, it is sealed by this call: from now on it is committed even
                if the trainer dies.
            blobs: bytes of ``job.blobs``, in order.
            arena: memory that holds the files.
            filled: bytes of the arena that are complete, None for all. `fill` reports the rest, and the job is sealed
                when all bytes are complete.

        Raises:
            HoldfastError: the writer died twice, or this client is closed.
            ConfigError: the storage cannot be used by a writer process.
        """
        header = {"do": "save", "job": job, "arena": None if arena is None else arena.number}
        if filled is not None:
            header["filled"] = filled
        with self._conversation.turn():
            header["storage"] = self._conversation.tell_storage(storage)
            if arena is not None:
                self._conversation.tell_arena(arena)
            save = self._conversation.call(
                header, attachments=tuple(blobs), arena=arena, windowed=job.windowed, decode=SaveResult.from_json
            )  # fmt: skip
            if job.joint:
                save.add_done_callback(lambda done: self._tell_failure(job.save_id, done))
            return save

    def hold(self, storage: Storage, job: SaveJob, blobs: Sequence[bytes], arena: Arena) -> None:
        """Have the writer keep a sealed save that it commits only if the trainer dies, or at `rescue`.

        It holds until another one is kept in the same arena, or `release`. Nobody waits for it, and it is lost with its
        writer: the next one is kept by the writer that is started again.

        Args:
            storage: as for `submit`.
            job: as for `submit`.
            blobs: as for `submit`.
            arena: must not change before `release`.
        """
        with self._conversation.turn():
            header = {"do": "hold", "job": job, "storage": self._conversation.tell_storage(storage)}
            self._conversation.tell_arena(arena)
            self._conversation.send({**header, "arena": arena.number}, blobs)

    def release(self, arena: Arena, timeout_s: float | None = None) -> bool:
        """Have the writer forget what it holds in an arena.

        Returns:
            Whether the arena may change from now on. If not, after ``timeout_s``, the message would still be lost with
            this process, and the writer would commit what it holds there.
        """
        with self._conversation.turn():
            self._conversation.send({"do": "release", "arena": arena.number})
        return self._conversation.flush(timeout_s)

    def rescue(self, why: str) -> Future[str | None]:
        """Commit the newest save that is held, if it is newer than all that are committed.

        Args:
            why: for the manifest.

        Returns:
            The name of the checkpoint, None if there was nothing newer.
        """
        return self._conversation.call({"do": "rescue", "why": why})

    def ingest(self, storage: Storage, job: IngestJob) -> PendingCall:
        """Make a checkpoint of directories of files. It is committed even if the trainer dies meanwhile.

        Sources that are not owned must not change until the future is done.

        Args:
            storage: root that ``job.directory`` is relative to.
            job: what to take, and where to.

        Raises:
            HoldfastError: as `submit`. From the future: nothing was committed and sources that are not owned are as
                they were; files of owned ones may be lost.
        """
        return self._make("ingest", storage, job)

    def commit_parts(self, storage: Storage, job: PartsJob) -> PendingCall:
        """Commit a checkpoint whose parts other writers have stored (`SaveJob.part`).

        Raises:
            HoldfastError: as `submit`. From the future: a part is missing, or parts contradict each other; all files
                of this save are removed then.
        """
        return self._make("parts", storage, job)

    def upload(self, source: Storage, target: Storage, job: UploadJob, *, num_workers: int = 1) -> Future[None]:
        """Send a checkpoint or a file; it is sent even if the trainer dies meanwhile.

        Args:
            source: holds it.
            target: where it goes. All uploads to one target wait in one queue, the oldest first.
            job: what it is, and what follows it.
            num_workers: uploads to this target at once; the first call decides.

        Raises:
            HoldfastError: as `submit`. From the future: it was tried as often as the job says; nothing counts as
                uploaded.
        """
        with self._conversation.turn():
            tell = self._conversation.tell_storage
            keys = {"storage": tell(source), "target": tell(target)}
            return self._conversation.call({"do": "upload", **keys, "job": job, "num_workers": num_workers})

    def _make(self, do: str, storage: Storage, job: IngestJob | PartsJob) -> PendingCall:
        if not job.manifest.get("checkpoint_id"):
            raise ConfigError(f"{job.directory}: a job needs a checkpoint_id, by which a repeated one is known again")
        with self._conversation.turn():
            header = {"do": do, "storage": self._conversation.tell_storage(storage), "job": job}
            return self._conversation.call(header, decode=SaveResult.from_json)

    def window(
        self, save: PendingCall, *, file_no: int, file_offset: int, arena_offset: int, nbytes: int
    ) -> Future[None]:
        """Hand over the next bytes of a file of a windowed job; resolved when the arena range may be reused.

        Windows of a file come in ascending order without gaps; all but the last are multiples of 1 MiB.

        Raises:
            WindowsLostError: (also from the future) the writer has died and was started again; after `begin_again` all
                windows of this job have to be sent once more, from the first.
        """
        header = {"do": "window", "job_no": save.number, "file_no": file_no, "file_offset": file_offset}
        header |= {"arena_offset": arena_offset, "nbytes": nbytes}
        with self._conversation.lock:
            save.check_windows()
            return self._conversation.call(header, repeatable=False)

    def begin_again(self, save: PendingCall) -> None:
        """Send the windows of a job from the first again, to a writer that was started again."""
        with self._conversation.lock:
            save.interrupted = False

    def fill(self, save: PendingCall, filled: int) -> None:
        """Report that the first ``filled`` bytes of the arena are complete, for a job submitted before they were."""
        with self._conversation.turn():
            if not save.done():
                # Kept with the call: if the writer dies, the job is sent again with what is there by then.
                save.header["filled"] = filled
                self._conversation.send({"do": "fill", "job_no": save.number, "filled": filled})

    def seal(self, save: PendingCall) -> None:
        """Declare the state of a windowed job complete: from now on it is committed even if the trainer dies.

        Raises:
            WindowsLostError: as `window`.
        """
        with self._conversation.turn():
            save.check_windows()
            save.sealed = True
            self._conversation.send({"do": "seal", "job_no": save.number})

    def abandon(self, save: PendingCall, error: HoldfastError | None = None) -> None:
        """Drop a job that is not sealed; its files are removed and its future fails. Does nothing after the end.

        Args:
            save: what `submit` has returned.
            error: why, for the future, and for the futures of the other ranks.
        """
        header = {"do": "abandon", "job_no": save.number, "error": None if error is None else error_to_json(error)}
        with self._conversation.lock:
            if self._conversation.closed:
                return  # the writer drops what is not sealed; an error of ours would hide the one that led here
            with self._conversation.turn():
                # A writer that is started again must not wait for the rest of it.
                save.dropped = save.dropped or error or HoldfastError("the trainer abandoned this save")
                self._conversation.send(header)

    def join(
        self,
        mailbox: Arena,
        *,
        rank: int,
        world_size: int,
        addresses: Sequence[tuple[str, int]],
        token: str,
        timeout_s: float,
        listener: int | None = None,
        beat_s: float = 5.0,
        stale_s: float = 30.0,
    ) -> None:
        """Join the writers of the other ranks: rank 0's writer listens, all connect to it. Returns at once.

        Args:
            mailbox: memory of a `holdfast.writer.arena.StepMailbox`, cleared.
            rank: of this trainer.
            world_size: number of ranks.
            addresses: where rank 0's writer listens, to be tried in turn.
            token: a secret of the ranks, equal on all.
            timeout_s: bound of a save, from the first rank that begins it to the last that ends it.
            listener: rank 0: the listening socket; must stay open here, for a writer that is started again.
            beat_s: seconds between signs of life.
            stale_s: silence after which a rank counts as lost.
        """
        fds = () if listener is None else (listener,)
        header = {"do": "join", "rank": rank, "world_size": world_size, "addresses": list(addresses), "token": token}
        header |= {"timeout_s": timeout_s, "mailbox": mailbox.number, "pid": os.getpid()}
        with self._conversation.turn():
            self._conversation.membership = {**header, "beat_s": beat_s, "stale_s": stale_s}, mailbox, fds
            self._joined = True
            self._conversation.tell_membership()

    def stage(self, local: Storage, remote: Storage, mirror: Mirror, *, start_id: str) -> Future[None]:
        """Stage the parts of joint saves on a local disk and bring them to the remote, where the run is open.

        Args:
            local: where jobs go from now on; a disk of this machine.
            remote: the run.
            mirror: how far the remote may be behind.
            start_id: of this life.
        """
        with self._conversation.turn():
            assert self._conversation.membership is not None
            header, mailbox, fds = self._conversation.membership
            keys = {"local": self._conversation.tell_storage(local), "remote": self._conversation.tell_storage(remote)}
            args = {**keys, "limits": limits_of(mirror), "start_id": start_id}
            self._conversation.membership = ({**header, "stage": args}, mailbox, fds)
            return self._conversation.call({"do": "joint", "what": "stage", "args": args})

    def tell_ranks(self, what: str, **args: Any) -> None:
        """Send a message about this rank to the other ranks.

        "want" (kind: "save", "stop" or "rollback", at a step to be agreed), "acted" (step: this rank acts at the agreed
        step), "part_failed" (save, error: this rank has no part of that save).
        """
        with self._conversation.turn():
            header = {"do": "joint", "what": what, "args": args}
            self._conversation.remember(header)
            self._conversation.send(header)

    def ask_ranks(self, about: str) -> Future[bool]:
        """Put a question to rank 0's writer, which decides once for all ranks.

        "save <step>": whether to save that step; no, while another save is under way. "stop <anything>": whether a rank
        wants all ranks to stop. `WHO_LEFT`: the future fails with the reason, once our mailbox says that a rank has
        left.
        """
        return self._conversation.call({"do": "ask", "about": about})

    def open_run(
        self,
        storage: Storage,
        *,
        owner: dict[str, Any] | None = None,
        keep: dict[str, Any] | None = None,
        wait_s: float = 60.0,
        mirror: Mirror | None = None,
        remote: Storage | None = None,
        memory: Arena | None = None,
        links: bool = True,
    ) -> Future[RunOpened]:
        """Take the lease of the run at ``storage``, find its checkpoints and register this attempt.

        Args:
            storage: root of the run; jobs with ``run=True`` go there.
            owner: fields of the lease, among them the start_id of this trainer; missing fields are filled in.
            keep: `holdfast.config.Keep` as JSON, applied after each commit; None keeps everything.
            wait_s: how long to wait for the writer of a dead trainer to finish.
            mirror: rules of a mirrored run; ``storage`` is then its local side.
            remote: the remote side of a mirrored run; ``keep`` applies there.
            memory: see `StepMemory`: the writer records what it says when the trainer has died.
            links: whether a run on a disk has a link to its newest checkpoint.

        Raises:
            RunBusyError: (from the future) a live trainer holds the run.
        """
        with self._conversation.turn():
            owner = {"start_id": secrets.token_hex(4), **(owner or {}), "trainer_pid": os.getpid()}
            tell = self._conversation.tell_storage
            header = {"do": "open_run", "storage": tell(storage), "owner": owner, "keep": keep}
            header |= {"wait_s": wait_s, "links": links}
            if memory is not None:
                self._conversation.memory = memory
                self._conversation.tell_arena(memory)
                header["memory"] = memory.number
            if mirror is not None and remote is not None:
                far = {"limits": limits_of(mirror), "keep": keep, "storage": tell(remote)}
                header |= {"mirror": far, "keep": None if mirror.keep is None else mirror.keep.to_json()}
            self._holds_run = True
            future = self._conversation.call(header, decode=RunOpened.from_json)

        def opened(found: RunOpened) -> None:
            again = {"run_id": found.run_id, "attempt": found.attempt, "start_id": found.start_id}
            self._conversation.run = {**header, "again": again}

        return self._remember(future, opened)

    def take_name(self, storage: Storage, of: str, *, start_id: str, wait_s: float = 60.0) -> Future[None]:
        """Take the lease of a name of single files; the writer holds the lease until it ends.

        Args:
            storage: the folder.
            of: eight hex digits that stand for the name; those of `SafetensorsFile.lease` and `TorchFile.lease`.
            start_id: of this trainer.
            wait_s: how long to wait for the writer of a dead trainer to finish.

        Raises:
            RunBusyError: (from the future) a live trainer holds it.
        """
        owner = {"start_id": start_id, "trainer_pid": os.getpid()}
        with self._conversation.turn():
            header = self._name("take", storage, of)
            self._names.add(name := (header["storage"], of))
            header |= {"owner": owner, "wait_s": wait_s}
            future = self._conversation.call(header)

        def taken(_: None) -> None:
            if name in self._names:  # else it was given back meanwhile
                self._conversation.names[name] = header

        return self._remember(future, taken)

    def verify_name(self, storage: Storage, of: str) -> Future[None]:
        """Make sure that the lease of a name is still ours, after the saves submitted before.

        Raises:
            RunBusyError: (from the future) another process has taken it.
            StorageError: (from the future) the storage does not answer, so this is not known.
        """
        with self._conversation.turn():
            return self._conversation.call(self._name("verify", storage, of))

    def give_back_name(self, storage: Storage, of: str) -> Future[None]:
        """Give the lease of a name back, after the saves submitted before."""
        with self._conversation.turn():
            header = self._name("give_back", storage, of)
            self._names.discard((header["storage"], of))
            future = self._conversation.call(header)
            self._conversation.names.pop((header["storage"], of), None)
            return future

    def _name(self, what: str, storage: Storage, of: str) -> dict[str, Any]:
        return {"do": "name", "what": what, "storage": self._conversation.tell_storage(storage), "of": of}

    def run_op(self, op: str, **args: Any) -> Future[Any]:
        """Carry out another operation on the open run.

        "report" (rows; done when durable, within about a second), "metrics" (name, metrics; names that retention
        deleted because of them), "pin" (name, on), "quarantine" (name, reason), "finished" (info), "resumed" (name,
        step), "records", "close_run" (reason, details), and "probe" (storage; see `probe`). For the driver of restarted
        workers: "next_attempt" (reason, details: of the attempt that ends; {"attempt", "start_id"} of the new one),
        "details" (details: added to the current attempt), "note" (key, value: small JSON that stays with the run),
        "protect" (names: of checkpoints that retention spares until the next "protect"). "discard" (names, why: deletes
        checkpoints; the names of those that stay for now), "confirm" (names: the caller is about to delete these by
        itself; fails if the run is not ours any more). For mirrored runs: "follow" (since: a version; the state of the
        mirror, as soon as it has another version; later ones are higher, also those of a writer that is started again).
        "journal" (events: JSON of `holdfast.run.journal.JournalEvent`; done at once, written with the next save).
        "hurry": the caller waits for the rows of its reports, which are written at once then.

        All but "report", "follow", "journal" and "hurry" run after the saves submitted before them.
        """
        if op == "next_attempt":
            args.setdefault("start_id", secrets.token_hex(4))  # so that a repeated call is known again
        future = self._conversation.call({"do": "op", "op": op, "args": args})
        if op == "close_run":
            self._holds_run = False
            self._remember(future, lambda _: self._run_again(None))
        elif op == "next_attempt":
            self._remember(future, self._run_again)
        elif op == "protect":
            self._remember(future, lambda _: self._run_again({"protect": list(args["names"])}))
        return future

    def probe(self, storage: Storage, *, directory: str) -> Future[dict[str, Any]]:
        """Send a small checkpoint through the whole commit in ``directory`` and delete it.

        The future gives {"free_bytes": int | None, "seconds": float} or the error a save would meet.
        """
        with self._conversation.turn():
            return self.run_op("probe", storage=self._conversation.tell_storage(storage), directory=directory)

    def close(self, timeout_s: float | None = None, *, why: str = "closed") -> None:
        """Let pending jobs finish, give the leases back and end the writer; idempotent.

        After ``timeout_s`` the writer is left alone: it still commits what is sealed, then ends by itself, while
        the futures fail. ``why`` is what other ranks hear if they still expect a save of this rank. A writer that other
        clients use too (`SharedWriter`) goes on for them.
        """
        given_back: list[Future[Any]] = []
        with self._conversation.lock:
            shared = bool(self._conversation.users - {self})
            if shared and self in self._conversation.users:
                with contextlib.suppress(HoldfastError):  # the writer is gone, and everything with it
                    self._give_back(given_back, why)
            self._conversation.users.discard(self)
        if shared:
            wait(given_back, timeout=timeout_s)
        else:
            self._conversation.close(timeout_s, why)

    def _give_back(self, given_back: list[Future[Any]], why: str) -> None:
        if self._holds_run:
            given_back.append(self.run_op("close_run", reason=why))
        for key, of in self._names:
            given_back.append(self._conversation.call({"do": "name", "what": "give_back", "storage": key, "of": of}))
            self._conversation.names.pop((key, of), None)
        if self._joined:
            self._conversation.forget_ranks()
            given_back.append(self._conversation.call({"do": "leave", "why": why}))

    def __enter__(self) -> WriterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell_failure(self, save: str, done: Future[SaveResult]) -> None:
        """Report a failed part to the other ranks, for it may be lost with its writer; other failures they know."""
        error = None if done.cancelled() else done.exception()
        if error is not None:
            with contextlib.suppress(HoldfastError):
                self.tell_ranks("part_failed", save=save, error=error_to_json(error))

    def _remember(self, call: PendingCall, change: Callable[[Any], None]) -> PendingCall:
        """Have ``change`` take the answer of a call, once it is carried out, for a writer that is started again."""

        def answered(done: Future[Any]) -> None:
            if not done.cancelled() and done.exception() is None:
                with self._conversation.lock:
                    change(done.result())

        call.add_done_callback(answered)
        return call

    def _run_again(self, known: dict[str, Any] | None) -> None:
        """Change what a writer that is started again is told of the run; None: there is none any more."""
        run = self._conversation.run
        self._conversation.run = None if run is None or known is None else {**run, "again": {**run["again"], **known}}


class SharedWriter:
    """One writer for all that a trainer stores: each part has a client of its own; the last to close ends the writer.

    A storage that no other process can make has a thread as its writer, and each further run has its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._conversations: list[Conversation] = []

    def client(self, storage: Storage, *, remote: Storage | None = None, for_run: bool = False) -> WriterClient:
        """Return a new client of a writer that serves these storages, which is started if there is none.

        Args:
            storage: where the jobs will go.
            remote: where they are sent on to.
            for_run: it will open a run, or join other ranks; a writer does that for one client at a time.
        """
        thread = _needs_thread(storage, remote)
        with self._lock:
            for conversation in self._conversations:
                with conversation.lock:
                    fits = conversation.is_thread is thread and conversation.users and not conversation.closed
                    if fits and not (for_run and any(user._for_run for user in conversation.users)):
                        client = WriterClient(thread=thread, conversation=conversation)
                        break
            else:
                client = WriterClient(thread=thread)
            client._for_run = for_run
            newest = client._conversation
            others = [known for known in self._conversations if known.users and known is not newest]
            self._conversations = [*others, newest]
            return client


def _needs_thread(*targets: Storage | None) -> bool:
    return not can_run_process() or any(target is not None and target.describe() is None for target in targets)
