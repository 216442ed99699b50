"""Carries out what the controller decides: with the engine, the writer, and threads where a storage has to be read.

Nothing here waits. What takes time comes back later as an `ActionResult`, given to ``post`` by the thread that has it.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from holdfast._log import get_logger
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpointer.run_session import RunSession
from holdfast.config import Keep
from holdfast.copying.transfer import copy_file
from holdfast.errors import CheckpointError, ConfigError, HoldfastError
from holdfast.format.names import MANIFEST_NAME, join
from holdfast.run.names import LOGS
from holdfast.storage.base import Storage
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.writer.ingest.incoming import read_incoming, remove_incoming
from holdfast.writer.ingest.merge import suffixed
from holdfast.writer.messages import IngestJob, IngestSource, PartsJob, is_incoming

from ..config import ValidationConfig
from ..engine import Engine, GroupSpec, TaskEnded
from ..transit import checkpoint_at, error_to_wire
from .actions import (
    Action,
    ActionResult,
    Answer,
    Begin,
    Call,
    CommitParts,
    CommitUploaded,
    Details,
    FindStart,
    Ingest,
    Input,
    KillGroup,
    LateMetrics,
    NextAttempt,
    Note,
    OpenRun,
    Protect,
    ReportedDirectory,
    Resumed,
    Say,
    Send,
    StartGroup,
    StopValidation,
    StoreRows,
    Validate,
)
from .messages import say
from .plan import RunSpec
from .starts import RunContents, find_start
from .validation import TaskRunner, pack_validation

__all__ = ["Executor", "ExecutorOptions", "LocalWorkers", "LogCopies", "bring_beside"]

_EVERY_S = 60.0
_LAST_S = 30.0
_HEAD_BYTES, _TAIL_BYTES = 1 << 20, 7 << 20

_LOG = get_logger("trainers.function")


class LocalWorkers(Engine, TaskRunner, Protocol):
    """An engine that runs tasks too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """What is carried out with, besides the plan.

    Attributes:
        blob: train_func and its config, packed.
        secrets: credentials of storages that workers open, packed.
        keep: rules of retention.
        use_gpu: workers get GPUs.
        environment: variables of every worker.
        validation: what validates a checkpoint.
        callbacks: objects whose methods are called for reports and failures.
        context: first argument of callbacks.
    """

    blob: bytes
    keep: Keep
    use_gpu: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    validation: ValidationConfig | None = None
    callbacks: Sequence[Any] = ()
    context: Any = None
    secrets: bytes = field(default=b"", repr=False)


class Executor:
    """Carries out the actions of a controller.

    Args:
        plan: of the run.
        options: what it is carried out with.
        engine: runs the workers.
        session: the run.
        post: takes outcomes; called from any thread.

    Attributes:
        contents: what the run held at the last look.
    """

    def __init__(
        self,
        plan: RunSpec,
        options: ExecutorOptions,
        engine: LocalWorkers,
        session: RunSession,
        post: Callable[[Input], None],
    ) -> None:
        self._plan, self._options, self._storage = plan, options, session.storage
        self._engine, self._session, self._post = engine, session, post
        self.contents: RunContents | None = None
        self._tasks: dict[int, Validate] = {}
        self._copies: LogCopies | None = None
        self._does: dict[type[Any], Callable[[Any], None]] = {
            OpenRun: lambda do: self._follow(do, session.open_later(keep=options.keep)),
            NextAttempt: lambda do: self._op(do, "next_attempt", reason=do.reason, details=dict(do.details)),
            FindStart: self._find_start,
            # Not held: it is the newest until the next commit, and after that the rules decide alone.
            Resumed: lambda do: self._op(do, "resumed", name=do.name, step=do.step, attempt=do.attempt, hold=False),
            Details: lambda do: self._op(do, "details", details=dict(do.details)),
            Note: lambda do: self._op(do, "note", key=do.key, value=do.value),
            StoreRows: lambda do: self._op(do, "report", rows=[dict(row) for row in do.rows]),
            Protect: lambda do: self._op(do, "protect", names=list(do.names)),
            LateMetrics: lambda do: self._op(do, "metrics", name=do.name, metrics=dict(do.metrics)),
            Ingest: self._ingest,
            CommitParts: self._commit_parts,
            CommitUploaded: self._commit_uploaded,
            StartGroup: self._start_group,
            KillGroup: lambda do: engine.kill(None, do.grace_s),
            Begin: self._begin,
            Answer: self._answer,
            Send: lambda do: self._tell(do.rank, dict(do.header), do.error),
            Validate: self._validate,
            StopValidation: self._stop_validation,
            Call: self._call,
            Say: lambda do: say(f"holdfast: {do.line}"),
        }

    def do(self, action: Action) -> None:
        """Begin to carry out an action; what goes wrong at once becomes its outcome."""
        try:
            self._does[type(action)](action)
        except HoldfastError as error:
            self._post(ActionResult(action=action, error=error))

    def close(self) -> None:
        """Store what the workers have printed last; to be called when they are gone. Idempotent, bounded."""
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.close()

    def task_ended(self, event: TaskEnded) -> None:
        """Take the end of a validation."""
        action = self._tasks.pop(event.task, None)
        if action is None:
            return
        value = pickle.loads(event.result) if event.result is not None else None
        self._post(ActionResult(action=action, value=value, error=event.error))

    # -- the run -------------------------------------------------------------------------------------------------

    def _follow(self, action: Action, future: Future[Any]) -> None:
        def settled(done: Future[Any]) -> None:
            error = done.exception()
            self._post(ActionResult(action=action, value=None if error is not None else done.result(), error=error))

        future.add_done_callback(settled)

    def _op(self, action: Action, op: str, **args: Any) -> None:
        self._follow(action, self._session.client.run_op(op, **args))

    def _find_start(self, action: FindStart) -> None:
        """Look through the run in a thread: a checkpoint may have thousands of files."""
        session = self._session

        def work() -> None:
            try:
                contents = find_start(
                    self._storage,
                    session.ask("records"),
                    quarantined=session.quarantined,
                    quarantine=session.quarantine,
                    deep=action.deep,
                    dead=session.opened.dead,
                    validations=self._options.validation is not None and self.contents is None,
                )
            except Exception as error:  # noqa: BLE001 - a thread edge: the controller hears of it
                self._post(ActionResult(action=action, error=error))
            else:
                self.contents = contents
                self._post(ActionResult(action=action, value=contents))

        threading.Thread(target=work, name="holdfast-find", daemon=True).start()

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def _ingest(self, action: Ingest | CommitUploaded) -> None:
        """Take directories in; an uploaded checkpoint has none: it is committed where it lies."""
        sources = action.sources if isinstance(action, Ingest) else ()
        job = IngestJob(
            directory=action.directory,
            save_id=action.save_id,
            sources=tuple(IngestSource(rank=source.rank, path=source.path, owned=source.owned) for source in sources),
            manifest=_dated(action.manifest),
        )
        self._follow(action, self._session.client.ingest(self._storage, job))

    def _commit_uploaded(self, action: CommitUploaded) -> None:
        if not action.beside:
            self._ingest(action)
            return

        def work() -> None:
            try:
                bring_beside(self._storage, action.directory, action.beside)
                self._ingest(action)
            except Exception as error:  # noqa: BLE001 - a thread edge: the controller hears of it
                self._post(ActionResult(action=action, error=error))

        threading.Thread(target=work, name="holdfast-beside", daemon=True).start()

    def _commit_parts(self, action: CommitParts) -> None:
        job = PartsJob(
            directory=action.directory,
            save_id=action.save_id,
            writers=action.writers,
            manifest=_dated(action.manifest),
            wait_s=action.wait_s,
        )
        self._follow(action, self._session.client.commit_parts(self._storage, job))

    # -- workers -------------------------------------------------------------------------------------------------

    def _start_group(self, action: StartGroup) -> None:
        environment = dict(self._options.environment)
        self._engine.start(
            GroupSpec(
                num_workers=action.num_workers,
                attempt=action.attempt,
                environment=dict.fromkeys(range(action.num_workers), environment),
                log_directory=self._logs() / f"attempt-{action.attempt:05d}",
                use_gpu=self._options.use_gpu,
            )
        )

    def _logs(self) -> Path:
        """Return the folder of the logs: in the run itself, or a folder that is copied there."""
        root = self._storage.local_root
        if root is not None:
            return root / LOGS
        if self._copies is None:
            self._copies = LogCopies(self._storage)
        return self._copies.folder

    def _begin(self, action: Begin) -> None:
        attachments = [self._options.blob, action.memory or b"", self._options.secrets]
        while attachments and not attachments[-1]:
            attachments.pop()
        self._engine.send(action.rank, dict(action.header), attachments)

    def _answer(self, action: Answer) -> None:
        header: dict[str, Any] = {"do": "answer", "call": action.call}
        if action.error is not None:
            self._tell(action.rank, header, action.error)
        else:
            memory = () if action.memory is None else (action.memory,)
            self._engine.send(action.rank, {**header, "value": dict(action.value or {})}, memory)

    def _tell(self, rank: int, header: dict[str, Any], error: BaseException | None) -> None:
        if error is None:
            self._engine.send(rank, header)
            return
        description, data = error_to_wire(error)
        self._engine.send(rank, {**header, "error": description}, (data,))

    # -- validations and callbacks -------------------------------------------------------------------------------

    def _validate(self, action: Validate) -> None:
        validation = self._options.validation
        if validation is None:
            raise HoldfastError("there is no function that validates")
        defaults = {} if validation.task_config is None else validation.task_config.fn_kwargs or {}
        blob = pack_validation(
            validation.fn,
            Checkpoint.at(self._storage, action.name),
            {**defaults, **action.arguments},
            secrets=self._options.secrets,
        )
        task = self._engine.run_task(
            blob,
            name=f"validation of {action.name}",
            log_file=self._logs() / f"validation-{action.name}.log",
        )
        self._tasks[task] = action

    def _stop_validation(self, action: StopValidation) -> None:
        for task, running in self._tasks.items():
            if running.name == action.name:
                self._engine.kill_task(task)

    def _call(self, action: Call) -> None:
        arguments = [
            checkpoint_at(value) if name == "checkpoint" and value is not None else value
            for name, value in action.arguments.items()
        ]
        for callback in self._options.callbacks:
            hook = getattr(callback, action.hook, None)
            if callable(hook):
                try:
                    hook(self._options.context, *arguments)
                except Exception:  # noqa: BLE001 - the user's code must not end a training that may have run for days
                    _LOG.exception("%s of %r failed; training goes on", action.hook, callback)


def _dated(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {**manifest, "created": datetime.now(timezone.utc).isoformat(timespec="milliseconds")}


def bring_beside(storage: Storage, directory: str, sources: Sequence[ReportedDirectory]) -> None:
    """Copy the files of reported directories into ``directory``, where files lie already.

    A file that is there with the same bytes is left out, a file with other bytes gets the rank in its name. Files that
    are copied and never committed are swept like all of an upload that failed.

    Args:
        storage: root of the run.
        directory: the uploaded directory.
        sources: what ranks reported; owned ones are removed afterwards.

    Raises:
        ConfigError: both are Holdfast checkpoints.
        HoldfastError: something could not be read or stored.
    """
    skip = len(directory) + 1
    taken = {info.path[skip:] for info in storage.list(directory)}
    for source in sources:
        here, names = _files(storage, source)
        if MANIFEST_NAME in names:
            raise ConfigError(
                f"rank {source.rank} reported {source.path}, a Holdfast checkpoint, while another rank uploaded files "
                "by itself: report both in one way"
            )
        for name, path in names.items():
            target = name
            if name in taken:
                if storage.read(join(directory, name)) == here.read(path):
                    continue
                target = suffixed(name, source.rank, taken)
                _LOG.warning(
                    "%s: %s of rank %d differs from the file there and is kept as %s; give files that differ between "
                    "ranks distinct names", directory, name, source.rank, target,
                )  # fmt: skip
            copy_file(here, path, storage, join(directory, target))
            taken.add(target)
    for source in sources:
        if is_incoming(source.path):
            remove_incoming(storage, source.path)
        elif source.owned:
            LocalStorage(os.path.dirname(source.path)).delete_tree(os.path.basename(source.path))


def _files(storage: Storage, source: ReportedDirectory) -> tuple[Storage, dict[str, str]]:
    """Return the storage of a source's files, and their paths in it by name."""
    path = source.path
    if is_incoming(path):
        contents = read_incoming(storage, path, source.rank).contents
        last = contents.manifest_file
        return storage, {file.name: file.source for file in (*contents.files, *(() if last is None else (last,)))}
    if os.path.isfile(path):
        head, name = os.path.split(path)
        return LocalStorage(head), {name: name}
    try:
        found = [
            os.path.relpath(os.path.join(place, name), path)
            for place, _, names in os.walk(path, onerror=_fail, followlinks=True)
            for name in names
        ]
        # The next attempt renames a directory before it removes it: what is still there was listed whole.
        os.lstat(path)
    except OSError as error:
        raise CheckpointError(f"what rank {source.rank} reported in {path} could not be listed: {error}") from error
    return LocalStorage(path), {name: name for name in sorted(found)}


def _fail(error: OSError) -> None:
    raise error


class LogCopies:
    """Copies the files in a folder to ``logs/`` of a storage: those that have grown, each minute and at the end.

    A file of more than 8 MiB is cut in its middle there. A storage that fails is logged once and tried again; it never
    delays training.

    Args:
        storage: root of the run.
        every_s: pause between two rounds.

    Attributes:
        folder: where the logs are written.
    """

    def __init__(self, storage: Storage, *, every_s: float = _EVERY_S) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-logs-"))
        self._storage, self._every_s = storage, every_s
        self._copied: dict[str, int] = {}
        self._failed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="holdfast-logs", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = _LAST_S) -> None:
        """Copy what is new and remove the folder; idempotent. What cannot be copied in time stays in the folder."""
        self._stop.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive() or self._failed:
            _LOG.warning("the last output of the workers could not be stored: it is in %s", self.folder)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _work(self) -> None:
        while not self._stop.wait(self._every_s):
            self._round()
        self._round()

    def _round(self) -> None:
        try:
            for path in sorted(self.folder.rglob("*.log")):
                name, size = f"logs/{path.relative_to(self.folder).as_posix()}", path.stat().st_size
                if self._copied.get(name) != size:
                    self._storage.put(name, _read(path))
                    self._copied[name] = size
            self._failed = False
        except Exception as error:  # noqa: BLE001 - a thread edge: the folder must stay if the thread cannot go on
            if not self._failed:
                _LOG.warning("the output of the workers could not be stored, trying again: %s", error)
            self._failed = True


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        if size <= _HEAD_BYTES + _TAIL_BYTES:
            return file.read()
        head = file.read(_HEAD_BYTES)
        file.seek(size - _TAIL_BYTES)
        cut = size - _HEAD_BYTES - _TAIL_BYTES
        return head + f"\n[... {cut} bytes are left out here ...]\n".encode() + file.read(_TAIL_BYTES)
