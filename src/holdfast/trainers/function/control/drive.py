"""Drives a run: hands events to the controller, carries out its actions, and prints what people read.

The driver's thread waits only in `Engine.events`, and never longer than until the controller's next deadline. What
takes time goes on elsewhere and comes back as an `ActionResult`.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from holdfast._log import get_logger
from holdfast._outgoing import masked, visible
from holdfast._units import format_duration, listed
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpointer.console import found_notes
from holdfast.checkpointer.run_session import RunSession
from holdfast.config import Keep, rules_of
from holdfast.copying.transfer import copy_file
from holdfast.errors import CheckpointError, ConfigError, HoldfastError
from holdfast.format.names import METADATA_FILE, join
from holdfast.run.names import LOGS
from holdfast.storage.base import Storage
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.writer.ingest.merge import suffixed
from holdfast.writer.ingest.sources import read_incoming, remove_incoming, scan
from holdfast.writer.messages import IngestJob, IngestSource, PartsJob, RunOpened

from ..config import ValidationConfig
from ..engine import Engine, GroupSpec, TaskEnded, Woken
from ..transit import TravellingSecrets, checkpoint_at, error_to_wire, pack_value, run_validation
from . import actions
from .actions import RunState
from .checkpoints import RunContents, Start, find_start
from .controller import Controller
from .plan import RunSpec

_LOG = get_logger("trainers.function")
_OP_S = 120.0  # most time of the writer for an operation
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ENOUGH = 3
_EVERY_S = 60.0
_LAST_S = 30.0
_HEAD_BYTES, _TAIL_BYTES = 1 << 20, 7 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverOptions:
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


class Driver:
    """A run from the lease to the last commit. `close` is always called, whatever `run` does.

    Args:
        plan: what was asked for.
        options: what it is carried out with.
        storage: root of the run.
        engine: runs the workers; closed by `close`.

    Attributes:
        controller: decides.
        storage: root of the run.
    """

    def __init__(self, plan: RunSpec, options: DriverOptions, storage: Storage, engine: Engine) -> None:
        self._plan, self._options, self._engine, self.storage = plan, options, engine, storage
        self.controller = Controller(plan)
        self._inputs: deque[actions.Input] = deque()
        self._session = session = RunSession(storage, timeout_s=_OP_S, timeout_name="")
        self._end: actions.End | None = None
        self._contents: RunContents | None = None  # at the last look
        self._announced = False
        self._begun = time.monotonic()
        self._in_callbacks_s = 0.0
        self._tasks: dict[int, actions.Validate] = {}
        self._copies: LogCopies | None = None
        self._does: dict[type[Any], Callable[[Any], None]] = {
            actions.OpenRun: lambda do: self._follow(do, session.open_later(keep=options.keep)),
            actions.NextAttempt: lambda do: self._op(do, "next_attempt", reason=do.reason, details=dict(do.details)),
            actions.FindStart: self._find_start,
            # Not held: it is the newest until the next commit, and after that the rules decide alone.
            actions.Resumed: lambda do: self._op(
                do, "resumed", name=do.name, step=do.step, attempt=do.attempt, hold=False
            ),
            actions.Details: lambda do: self._op(do, "details", details=dict(do.details)),
            actions.Note: lambda do: self._op(do, "note", key=do.key, value=do.value),
            actions.StoreRows: lambda do: self._op(do, "report", rows=[dict(row) for row in do.rows]),
            actions.Protect: lambda do: self._op(do, "protect", names=list(do.names)),
            actions.LateMetrics: lambda do: self._op(do, "metrics", name=do.name, metrics=dict(do.metrics)),
            actions.Commit: self._commit,
            actions.StartGroup: self._start_group,
            actions.KillGroup: lambda do: self._engine.kill(None, do.grace_s),
            actions.Begin: self._begin,
            actions.Answer: self._answer,
            actions.Send: lambda do: self._tell(do.rank, dict(do.header), do.error),
            actions.Validate: self._validate,
            actions.StopValidation: self._stop_validation,
            actions.Call: self._call,
            actions.Say: lambda do: say(f"holdfast: {do.line}"),
        }

    def stop(self, why: str) -> None:
        """Ask for the end of the run; callable from any thread and from signal handlers."""
        self._post(actions.StopRequested(why=why))

    def run(self) -> actions.End:
        """Go on until the run has ended; say how."""
        self._carry_out(self.controller.start(self._now()))
        while self._end is None:
            for event in self._engine.events(self._patience()):
                if isinstance(event, TaskEnded):
                    self._task_ended(event)
                elif not isinstance(event, Woken):
                    self._take(event)
            while self._inputs:
                self._take(self._inputs.popleft())
            self._take(actions.Tick())
            self._session.note_step(self.num_reports)
        return self._end

    def close(self) -> None:
        """End all workers, note the end of the run, give the lease back. Idempotent, bounded."""
        self._engine.close()
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.close()  # with what the workers have printed last
        session = self._session
        if session.is_open and not session.client.closed:
            end = self._end or actions.End(state=RunState.ERRORED, reason="the driver failed")
            finished = {"step": self.num_reports} if end.state is RunState.FINISHED else None
            try:
                session.end(end.reason, details=end.details, finished=finished)
            except HoldfastError as error:
                _LOG.warning("the end of the run could not be noted: %s", error)
        session.close("the run has ended")

    @property
    def num_reports(self) -> int:
        """The number of the last report of any rank."""
        return max(self.controller.reports.ledger.entered)

    def last_words(self) -> str:
        """Return the line that says how the run ended."""
        state, restarts = self.controller.state, self.controller.restarts
        names = [record.name for record in self.controller.reports.known.in_order()]
        why = self._end.reason if self._end is not None else ""
        ended = {RunState.FINISHED: "finished", RunState.ABORTED: f"was stopped ({why})"}.get(state, "failed")
        after = format_duration(time.monotonic() - self._begun)
        again = f", {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""
        kept = (
            f"{len(names)} checkpoint{'s' if len(names) > 1 else ''}, newest {names[-1]}" if names else "no checkpoint"
        )
        line = f"holdfast: {self._plan.run_name} {ended} at report {self.num_reports} after {after}{again}; {kept}"
        return line if state is RunState.FINISHED else f"{line}; run the same script again to go on"

    # -- events and actions --------------------------------------------------------------------------------------

    def _post(self, given: actions.Input) -> None:
        self._inputs.append(given)
        self._engine.wake()

    def _patience(self) -> float | None:
        if self._inputs:
            return 0.0
        deadline = self.controller.deadline()
        return None if deadline is None else max(0.0, deadline - self._now())

    def _take(self, given: actions.Input) -> None:
        self._carry_out(self.controller.handle(given, self._now()))

    def _now(self) -> float:
        """Return the controller's time, which stands still in callbacks: no worker is heard then."""
        return time.monotonic() - self._in_callbacks_s

    def _carry_out(self, wanted: Iterable[actions.Action]) -> None:
        for action in wanted:
            if isinstance(action, actions.End):
                self._end = action
                if self._announced:
                    self._do(actions.Call(hook="after_run", arguments={}))
                continue
            if isinstance(action, actions.StartGroup) and not self._announced:
                self._announce()
            self._do(action)

    def _announce(self) -> None:
        session, contents = self._session, self._contents
        self._announced = True
        if session.is_open and contents is not None:
            keep, use_gpu = self._options.keep, self._options.use_gpu
            say(*start_block(self._plan, session.opened, contents, self.controller.first, keep=keep, use_gpu=use_gpu))
        self._do(actions.Call(hook="before_run", arguments={}))

    def _do(self, action: actions.Action) -> None:
        """Begin to carry out an action; what goes wrong at once becomes its outcome."""
        try:
            self._does[type(action)](action)
        except HoldfastError as error:
            self._post(actions.ActionResult(action=action, error=error))

    def _task_ended(self, event: TaskEnded) -> None:
        """Take the end of a validation."""
        action = self._tasks.pop(event.task, None)
        if action is None:
            return
        value = pickle.loads(event.result) if event.result is not None else None
        self._post(actions.ActionResult(action=action, value=value, error=event.error))

    # -- the run -------------------------------------------------------------------------------------------------

    def _follow(self, action: actions.Action, future: Future[Any]) -> None:
        def settled(done: Future[Any]) -> None:
            error = done.exception()
            self._post(
                actions.ActionResult(action=action, value=None if error is not None else done.result(), error=error)
            )

        future.add_done_callback(settled)

    def _op(self, action: actions.Action, op: str, **args: Any) -> None:
        self._follow(action, self._session.client.run_op(op, **args))

    def _in_thread(self, action: actions.Action, work: Callable[[], None]) -> None:
        """Carry out an action that reads storage; ``work`` posts its outcome."""

        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - a thread edge: the controller hears of it
                self._post(actions.ActionResult(action=action, error=error))

        threading.Thread(target=run, name="holdfast-execute", daemon=True).start()

    def _find_start(self, action: actions.FindStart) -> None:
        """Look through the run in a thread: a checkpoint may have thousands of files."""
        session = self._session

        def work() -> None:
            self._contents = contents = find_start(
                self.storage,
                session.ask("records"),
                quarantined=session.quarantined,
                quarantine=session.quarantine,
                deep=action.deep,
                dead=session.opened.dead,
                validations=self._options.validation is not None and self._contents is None,
            )
            self._post(actions.ActionResult(action=action, value=contents))

        self._in_thread(action, work)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def _commit(self, action: actions.Commit) -> None:
        client, storage, sources = self._session.client, self.storage, action.sources
        created = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        job: dict[str, Any] = {
            "directory": action.directory,
            "save_id": action.save_id,
            "manifest": {**action.manifest, "created": created},
        }

        def take_in(sources: tuple[IngestSource, ...]) -> None:
            """Without sources: commit what lies there."""
            self._follow(action, client.ingest(storage, IngestJob(**job, sources=sources)))

        def beside() -> None:
            bring_beside(storage, action.directory, sources)
            take_in(())

        if action.writers:
            parts = PartsJob(**job, writers=action.writers, wait_s=action.wait_s)
            self._follow(action, client.commit_parts(storage, parts))
        elif action.uploaded and sources:
            self._in_thread(action, beside)
        else:
            take_in(sources)

    # -- workers -------------------------------------------------------------------------------------------------

    def _start_group(self, action: actions.StartGroup) -> None:
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
        root = self.storage.local_root
        if root is not None:
            return root / LOGS
        if self._copies is None:
            self._copies = LogCopies(self.storage)
        return self._copies.folder

    def _begin(self, action: actions.Begin) -> None:
        attachments = [self._options.blob, action.memory or b"", self._options.secrets]
        while attachments and not attachments[-1]:
            attachments.pop()
        self._engine.send(action.rank, dict(action.header), attachments)

    def _answer(self, action: actions.Answer) -> None:
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

    def _validate(self, action: actions.Validate) -> None:
        validation = self._options.validation
        if validation is None:
            raise HoldfastError("there is no function that validates")
        defaults = {} if validation.task_config is None else validation.task_config.fn_kwargs or {}
        checkpoint, arguments = Checkpoint.at(self.storage, action.name), {**defaults, **action.arguments}
        secrets = TravellingSecrets(self._options.secrets)
        blob = pack_value(partial(run_validation, secrets, validation.fn, checkpoint, arguments), "validation")
        task = self._engine.run_task(
            blob,
            name=f"validation of {action.name}",
            log_file=self._logs() / f"validation-{action.name}.log",
        )
        self._tasks[task] = action

    def _stop_validation(self, action: actions.StopValidation) -> None:
        for task, running in self._tasks.items():
            if running.name == action.name:
                self._engine.kill_task(task)

    def _call(self, action: actions.Call) -> None:
        arguments = [
            checkpoint_at(value) if name == "checkpoint" and value is not None else value
            for name, value in action.arguments.items()
        ]
        begun = time.monotonic()
        for callback in self._options.callbacks:
            hook = getattr(callback, action.hook, None)
            if callable(hook):
                try:
                    hook(self._options.context, *arguments)
                except Exception:  # noqa: BLE001 - the user's code must not end a training that may have run for days
                    _LOG.exception("%s of %r failed; training goes on", action.hook, callback)
        self._in_callbacks_s += time.monotonic() - begun


class Stops:
    """Calls ``stop`` for signals in place of what they did before; the third signal is let through.

    Only where signals can be handled at all: in the main thread.

    Args:
        stop: called with the name of the signal.

    Attributes:
        received: the first signal that came.
    """

    def __init__(self, stop: Callable[[str], None]) -> None:
        self._stop = stop
        self._count = 0
        self._before: dict[signal.Signals, Any] = {}
        self.received: signal.Signals | None = None

    def __enter__(self) -> Stops:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN and before is not None:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def raise_again(self) -> None:
        """Raise what the received signal would have raised.

        Raises:
            KeyboardInterrupt: it was Ctrl-C.
            SystemExit: it was SIGTERM.
        """
        if self.received is signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        self._count += 1
        if self._count < _ENOUGH:
            self._stop(signal.Signals(number).name)
        else:
            self._restore()
            self.raise_again()


def bring_beside(storage: Storage, directory: str, sources: Sequence[IngestSource]) -> None:
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
        contents = read_incoming(storage, source.path, source.rank).contents if source.is_incoming else scan(source)
        # The next attempt renames a directory before it removes it: what is still there was listed whole.
        if not source.is_incoming and not os.path.lexists(source.path):
            raise CheckpointError(f"what rank {source.rank} reported in {source.path} is gone: it could not be listed")
        if contents.manifest is not None:
            raise ConfigError(
                f"rank {source.rank} reported {source.path}, a Holdfast checkpoint, while another rank uploaded files "
                "by itself: report both in one way"
            )
        if contents.metadata is not None and METADATA_FILE not in taken:
            storage.put(join(directory, METADATA_FILE), contents.metadata)
            taken.add(METADATA_FILE)
        elif contents.metadata is not None and storage.read(join(directory, METADATA_FILE)) != contents.metadata:
            _LOG.warning(
                "%s: the metadata of rank %d differ from those there, and are left out", directory, source.rank
            )
        for file in contents.files:
            here, path, target = storage, file.source, file.name
            if not source.is_incoming:
                head, path = os.path.split(os.path.realpath(path))
                here = LocalStorage(head)
            if file.name in taken:
                if storage.read(join(directory, file.name)) == here.read(path):
                    continue
                target = suffixed(file.name, source.rank, taken)
                _LOG.warning(
                    "%s: %s of rank %d differs from the file there and is kept as %s; give files that differ between "
                    "ranks distinct names", directory, file.name, source.rank, target,
                )  # fmt: skip
            copy_file(here, path, storage, join(directory, target))
            taken.add(target)
    for source in sources:
        if source.is_incoming:
            remove_incoming(storage, source.path)
        elif source.owned:
            LocalStorage(os.path.dirname(source.path)).delete_tree(os.path.basename(source.path))


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


def say(*lines: str) -> None:
    """Print lines for people."""
    print("\n".join(visible(masked(line)) for line in lines), file=sys.stderr, flush=True)  # noqa: T201 - what a run prints, it prints here


def start_block(
    plan: RunSpec, opened: RunOpened, contents: RunContents, start: Start, *, keep: Keep, use_gpu: bool
) -> list[str]:
    """Return the lines about what a start found and does."""
    attempt = f"(attempt {opened.attempt})"
    if start.kept is not None:
        headline = f"{plan.run_name} resumes from {start.words} at report {start.step} {attempt}"
    elif start.location is not None or start.memory is not None:
        headline = f"{plan.run_name} starts from {start.words} {attempt}"
    else:
        headline = f"{plan.run_name} starts fresh: there is no checkpoint {attempt}"
    least = "" if plan.min_workers is None else f"{plan.min_workers} to "
    group = "" if plan.num_workers == 1 else f", process group {'nccl' if use_gpu else 'gloo'}"
    lines = [
        f"holdfast: {headline}",
        f"  storage   {plan.uri}",
        "  workers   none: train_func runs in this process"
        if plan.inline and plan.num_workers == 1
        else f"  workers   {plan.num_workers} processes that torchrun has started, which restarts them{group}"
        if plan.inline
        else f"  workers   {least}{plan.num_workers} {plan.where}{group}",
        f"  keeps     {_rules(plan, keep)}",
    ]
    return [*lines, *(f"  {note}" for note in _notes(plan, opened, contents, start))]


def _notes(plan: RunSpec, opened: RunOpened, contents: RunContents, start: Start) -> list[str]:
    notes = found_notes(opened, {**opened.quarantined, **dict(contents.skipped)})
    if start.kept is not None and (plan.first_checkpoint is not None or plan.first_memory is not None):
        notes.append("this run has checkpoints of its own: resume_from_checkpoint is not used")
    if opened.finished is not None:
        notes.append(
            f"this run had finished after report {opened.finished.get('step', 0)}: train_func runs again and goes on "
            "from there; give another name for a new run"
        )
    if contents.unvalidated and plan.validates:
        notes.append(f"takes up the validation of {listed(contents.unvalidated)}")
    return notes


def _rules(plan: RunSpec, keep: Keep) -> str:
    if plan.strategy is not None and plan.strategy["num_to_keep"] == 0:
        return "nothing on disk, the newest values in memory"
    rules = rules_of(keep)
    if not rules:
        return "all checkpoints"
    newest = "" if any(rule.keeps_newest for rule in rules) else ", and the newest"
    return ", ".join(rule.long for rule in rules) + newest
