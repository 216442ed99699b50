"""Drives a run: hands events to the controller and its actions to the executor, until the controller ends.

This thread waits only in `Engine.events`, and never longer than until the controller's next deadline.
Everything that takes time goes on elsewhere and comes back as an event.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

from holdfast._log import get_logger
from holdfast.checkpointer.run_session import RunSession
from holdfast.errors import HoldfastError
from holdfast.storage.base import Storage

from ..engine import TaskEnded, Woken
from .actions import Action, Call, End, Input, RunState, StartGroup, StopRequested, Tick
from .controller import Controller
from .execute import Executor, ExecutorOptions, LocalWorkers
from .messages import end_line, say, start_block
from .plan import RunSpec

__all__ = ["Driver", "ExecutorOptions", "Stops"]

_LOG = get_logger("trainers.function")
_OP_S = 120.0  # most time of the writer for an operation
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ENOUGH = 3


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

    def __init__(self, plan: RunSpec, options: ExecutorOptions, storage: Storage, engine: LocalWorkers) -> None:
        self._plan, self._options, self._engine, self.storage = plan, options, engine, storage
        self.controller = Controller(plan)
        self._inputs: deque[Input] = deque()
        self._session = RunSession(storage, timeout_s=_OP_S, timeout_name="")
        self._executor = Executor(plan, options, engine, self._session, self._post)
        self._end: End | None = None
        self._announced = False
        self._begun = time.monotonic()

    def stop(self, why: str) -> None:
        """Ask for the end of the run; callable from any thread and from signal handlers."""
        self._post(StopRequested(why=why))

    def run(self) -> End:
        """Go on until the run has ended; say how."""
        self._carry_out(self.controller.start(time.monotonic()))
        while self._end is None:
            for event in self._engine.events(self._patience()):
                if isinstance(event, TaskEnded):
                    self._executor.task_ended(event)
                elif not isinstance(event, Woken):
                    self._take(event)
            while self._inputs:
                self._take(self._inputs.popleft())
            self._take(Tick())
            self._session.note_step(self.num_reports)
        return self._end

    def close(self) -> None:
        """End all workers, note the end of the run, give the lease back. Idempotent, bounded."""
        self._engine.close()
        self._executor.close()
        session = self._session
        if session.is_open and not session.client.closed:
            end = self._end or End(state=RunState.ERRORED, reason="the driver failed")
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
        """Say how the run ended."""
        controller, end = self.controller, self._end
        return end_line(
            self._plan,
            controller.state,
            end.reason if end is not None else "",
            reports=self.num_reports,
            restarts=controller.restarts,
            names=[record.name for record in controller.commits.known.in_order()],
            seconds=time.monotonic() - self._begun,
        )

    def _post(self, given: Input) -> None:
        self._inputs.append(given)
        self._engine.wake()

    def _patience(self) -> float | None:
        if self._inputs:
            return 0.0
        deadline = self.controller.deadline()
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _take(self, given: Input) -> None:
        self._carry_out(self.controller.handle(given, time.monotonic()))

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, End):
                self._end = action
                if self._announced:
                    self._executor.do(Call(hook="after_run", arguments={}))
                continue
            if isinstance(action, StartGroup) and not self._announced:
                self._announce()
            self._executor.do(action)

    def _announce(self) -> None:
        session, contents = self._session, self._executor.contents
        self._announced = True
        if session.is_open and contents is not None:
            keep, use_gpu = self._options.keep, self._options.use_gpu
            say(*start_block(self._plan, session.opened, contents, self.controller.first, keep=keep, use_gpu=use_gpu))
        self._executor.do(Call(hook="before_run", arguments={}))


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
