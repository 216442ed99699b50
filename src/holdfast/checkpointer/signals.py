"""Signals that ask a run to stop: a flag now, a save at the next step boundary."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import ctypes
import mmap
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from holdfast._fork import after_fork_in_child
from holdfast._log import get_logger

_LOG = get_logger("signals")
_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")
# Sent at the death of torchrun's agent; a process without a handler ignores it, unlike those above.
_AGENT_DIED = getattr(signal, "SIGURG", None)
_SET_PDEATHSIG, _GET_PDEATHSIG = 1, 2  # of prctl(2)
_HOLD_S = 20.0  # for which a loader worker waits until its trainer has received a SIGTERM too
_TRAINS, _STOPS, _IS_OVER = 0, 1, 2  # state of a trainer, for its loader workers
_INSTALLED: weakref.WeakSet[StopSignals] = weakref.WeakSet()


class StopSignals:
    """Catches SIGTERM, SIGUSR1 and SIGINT between `install` and `remove`; earlier handlers are called too.

    What an earlier handler raises (most often it exits) is said and goes no further: the run stops once it has saved.

    A rank of torchrun also gets a signal when its agent dies (Linux), which is a request to stop like any other:
    without it the rank would train on for ever, unnoticed.

    Only the main thread may set handlers; anywhere else this does nothing and logs it.

    Attributes:
        received: name of the first signal, or None.
        impatient: True once SIGINT came for the second time.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.impatient = False
        self._interrupts = 0
        self._before: dict[int, Any] = {}
        self._removed = False
        self._agent: int | None = None
        self._word: mmap.mmap | None = None  # shared with forked children

    def install(self) -> bool:
        """Take the signals over; False if this is not the main thread."""
        if threading.current_thread() is not threading.main_thread():
            _LOG.info("not in the main thread: SIGTERM, SIGUSR1 and SIGINT are left alone")
            return False
        self._word = mmap.mmap(-1, 1)
        atexit.unregister(_before_exit)
        atexit.register(_before_exit)  # before those of all that was imported earlier
        for name in _SIGNALS:
            number = getattr(signal, name)
            self._before[number] = signal.signal(number, self._on_signal)
        if "TORCHELASTIC_RUN_ID" in os.environ and _AGENT_DIED is not None and _tell_of_parent(_AGENT_DIED):
            self._agent = os.getppid()
            self._before[_AGENT_DIED] = signal.signal(_AGENT_DIED, self._on_signal)
        _INSTALLED.add(self)
        return True

    def remove(self) -> None:
        """Give the signals back; idempotent."""
        _INSTALLED.discard(self)
        self._removed = True
        self._tell(_IS_OVER)
        if threading.current_thread() is not threading.main_thread():
            return
        if self._agent is not None:
            self._agent = None
            _tell_of_parent(0)
        for number, handler in self._before.items():
            # A handler that was set after ours stays: it may call ours, which then passes the signal on.
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, _settable(_below(handler, number)))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        before = _below(self._before.get(number), number)
        if self._removed:
            _pass_on(number, before, frame)
            return
        name = signal.Signals(number).name
        if number == _AGENT_DIED:
            if os.getppid() == self._agent:
                return  # that is data on a socket, or the end of one of the agent's threads
            name = f"torchrun's agent (process {self._agent}) has died"
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                # The user does not want to wait.
                self.impatient = True
                self.remove()
                raise KeyboardInterrupt
        if self.received is None:
            self.received = name
            self._tell(_STOPS)
            again = "; once more to stop at once" if number == signal.SIGINT else ""
            _say(f"{name}: saving at the next step, then stopping{again}")
        if callable(before) and before is not signal.default_int_handler:
            try:
                before(number, frame)
            except BaseException as error:
                if isinstance(getattr(before, "__self__", None), StopSignals):
                    raise  # of a run around this one: a second Ctrl-C
                # A handler that exits would leave the body here, before the step is saved.
                _say(
                    f"{name}: the handler that was set before raises {type(error).__name__}, which is left aside: the "
                    "step is saved first, and the exit status is that of the run"
                )

    def _tell(self, word: int) -> None:
        if self._word is not None:
            self._word[0] = word

    def _forget_in_child(self) -> None:
        """Leave to the trainer what is meant for it.

        Ctrl-C reaches the whole process group, and batch systems signal every process of a job: a loader worker that
        died of that would take the trainer down before it could save.
        """
        before, self._before = self._before, {}
        self._removed = True
        for number, handler in before.items():
            if number == signal.SIGINT:
                signal.signal(number, _FirstInTrainer(handler))
            elif number == signal.SIGUSR1 and handler in (signal.SIG_DFL, None):
                signal.signal(number, signal.SIG_IGN)
            else:
                signal.signal(number, _settable(handler))
        torch_workers: Any = sys.modules.get("torch.utils.data._utils.signal_handling")
        set_handlers = getattr(torch_workers, "_set_worker_signal_handlers", None)
        if before and self._word is not None and set_handlers is not None:
            torch_workers._set_worker_signal_handlers = _HeldByWorker(self._word, set_handlers).install


class _FirstInTrainer:
    """SIGINT in a forked child: the trainer handles the first, the second goes to the handler before."""

    def __init__(self, before: Any) -> None:
        self._before, self._trainer, self._pid = before, os.getppid(), os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, _settable(self._before))
        if os.getppid() != self._trainer or os.getpid() != self._pid:
            _pass_on(number, self._before, frame)


class _HeldByWorker:
    """SIGTERM in a forked worker of a `DataLoader`: the first is held while the trainer trains.

    The worker then ends when its trainer asks for no more batches. If the trainer has received no such signal
    after a while, the signal was meant for the worker alone, which obeys.

    Args:
        word: state of the trainer, in shared memory.
        set_handlers: sets the handlers of torch for a worker, one for SIGTERM among them.
    """

    def __init__(self, word: mmap.mmap, set_handlers: Callable[[], None]) -> None:
        self._word, self._set_handlers, self._trainer = word, set_handlers, os.getppid()

    def install(self) -> None:
        """Stand in for torch's function of this name: the worker calls it at its start."""
        self._set_handlers()
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._set_handlers()  # the second signal is obeyed
        if os.getppid() != self._trainer or self._word[0] == _IS_OVER:
            os.kill(os.getpid(), number)
        elif self._word[0] == _TRAINS:
            _thread.start_new_thread(self._obey_later, (number,))  # takes no lock, which a handler must not

    def _obey_later(self, number: int) -> None:
        until = time.monotonic() + _HOLD_S
        while self._word[0] == _TRAINS and time.monotonic() < until:
            time.sleep(0.1)
        if self._word[0] != _STOPS:
            os.kill(os.getpid(), number)


def _tell_of_parent(number: int) -> bool:
    """Have the kernel send this signal when our parent dies, 0 for none; False if it cannot, or another is set."""
    if not sys.platform.startswith("linux"):
        return False
    with contextlib.suppress(OSError, AttributeError):
        prctl = ctypes.CDLL(None).prctl
        known = ctypes.c_int()
        prctl(_GET_PDEATHSIG, ctypes.byref(known), 0, 0, 0)
        if number and known.value:
            return False
        return bool(prctl(_SET_PDEATHSIG, number, 0, 0, 0) == 0)
    return False


def _below(handler: Any, number: int) -> Any:
    """The handler that is meant under ours.

    A session may end while another's handler lies over its own, which then cannot be taken out of the chain. It stands
    aside: were it called, it would do what the signal does by default, and end the process that the other is to save.
    """
    while isinstance(owner := getattr(handler, "__self__", None), StopSignals) and owner._removed:
        handler = owner._before.get(number)
    return handler


def _pass_on(number: int, handler: Any, frame: FrameType | None) -> None:
    """Do what would have happened without us."""
    if callable(handler):
        handler(number, frame)
    elif handler != signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _say(text: str) -> None:
    """Print a line from within a handler: nothing that takes a lock may be used there."""
    # The same signal may have ended the reader of our standard error (`| tee log`): no reason not to save.
    with contextlib.suppress(OSError):
        os.write(2, f"holdfast: {text}\n".encode())


def _settable(handler: Any) -> Any:
    # None stands for a handler that was not set from Python; it cannot be put back.
    return signal.SIG_DFL if handler is None else handler


def _before_exit() -> None:
    # After this `multiprocessing` ends workers by SIGTERM, and waits for them.
    for signals in list(_INSTALLED):
        signals._tell(_IS_OVER)


@after_fork_in_child
def _after_fork_in_child() -> None:
    for signals in list(_INSTALLED):
        signals._forget_in_child()
