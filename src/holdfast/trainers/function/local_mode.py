"""Local mode: train_func runs in this process, alone or as one of those that torchrun has started.

Processes that torchrun has started as the workers of one run meet at `fit`, and rank 0 drives.

Ray Train calls this its local mode under torchrun: ``ScalingConfig(num_workers=0)`` in a script that torchrun starts.
Each process calls train_func itself. Those of other ranks than 0 talk to rank 0 over a socket in a folder that nobody
else can enter; who restarts a group after a failure is torchrun.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import cloudpickle
import torch.distributed as dist

from holdfast._ranks import RankInfo, current_ranks
from holdfast.checkpointer.meeting import meet, same_for_all
from holdfast.errors import ConfigError, HoldfastError, TrainingFailedError
from holdfast.writer.frames import Channel

from .control.actions import End
from .control.drive import Driver, say
from .engine import Event, Exited, GroupSpec, Received, Started, TaskEnded, Woken
from .transit import error_from_wire, error_to_wire
from .worker.main import leave_launched_group, run_here

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MEET_S = 300.0
_LONGEST = 90  # of the path of a folder: that of a socket in it has to fit into 107 bytes


class InlineEngine:
    """Implements `holdfast.trainers.function.engine.Engine` for a group of one worker, or of those of a launcher.

    The controller runs in a thread of its own and calls `start`; the owner of this engine waits for that in
    `next_call`, runs the function, and reports its end with `ended`. A call cannot be killed: its connection is
    closed, so that its next report raises.

    Args:
        others: our ends of the conversations with workers that are calls in other processes, rank 1 first. A group with
            them is started once.
    """

    def __init__(self, others: Sequence[Channel] = ()) -> None:
        self._others = tuple(others)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[Channel | None] = queue.SimpleQueue()
        self._channels: dict[int, Channel] = {}
        self._status = 0
        self._tasks = 0

    # ---- for the thread that calls the function

    def next_call(self) -> Channel | None:
        """Wait for the next start; return the worker's end of the channel, None when the run is over."""
        return self._calls.get()

    def ended(self, status: int) -> None:
        """Note how the call ended, before its end of the channel is closed."""
        self._status = status

    # ---- for the controller

    def start(self, spec: GroupSpec) -> None:
        """Start the worker."""
        ours, theirs = socket.socketpair()
        self._channels = dict(enumerate((Channel(ours), *self._others)))
        for rank, channel in self._channels.items():
            self._events.put(Started(rank=rank, pid=os.getpid()))
            threading.Thread(target=self._read, args=(rank, channel), name="holdfast-inline", daemon=True).start()
        self._calls.put(Channel(theirs))

    def send(self, rank: int, header: dict[str, Any], attachments: Sequence[bytes] = ()) -> None:
        """Send a message to the worker; dropped when it has ended."""
        with contextlib.suppress(OSError, KeyError):
            self._channels[rank].send(header, attachments)

    def events(self, timeout_s: float | None) -> list[Event]:
        """Wait for events; an empty list after ``timeout_s``. None waits until there is one."""
        try:
            found = [self._events.get(timeout=timeout_s)]
        except queue.Empty:
            return []
        while not self._events.empty():
            found.append(self._events.get())
        return found

    def kill(self, ranks: Iterable[int] | None = None, grace_s: float = 0.0) -> None:
        """Close the connection: the function ends with an error at its next report."""
        for channel in self._channels.values():
            channel.close()

    def wake(self) -> None:
        """Make `events` return; callable from any thread and from signal handlers."""
        self._events.put(Woken())

    def close(self) -> None:
        """Let `next_call` return None; idempotent."""
        self._calls.put(None)

    # ---- tasks

    def run_task(self, blob: bytes, *, name: str = "task", log_file: Path | None = None) -> int:
        """Run a pickled function without arguments in a thread; its end is a `TaskEnded`."""
        self._tasks += 1
        threading.Thread(target=self._run_task, args=(self._tasks, blob), name=f"holdfast-{name}", daemon=True).start()
        return self._tasks

    def kill_task(self, task: int, grace_s: float = 0.0) -> None:
        """End the waiting for a task; the thread itself cannot be ended."""
        self._events.put(TaskEnded(task=task, result=None, error=HoldfastError("it was stopped")))

    def _run_task(self, task: int, blob: bytes) -> None:
        try:
            result = cloudpickle.dumps(cloudpickle.loads(blob)())
        except BaseException as error:  # noqa: BLE001 - a thread edge: the controller decides what it means
            self._events.put(TaskEnded(task=task, result=None, error=error))
        else:
            self._events.put(TaskEnded(task=task, result=result, error=None))

    def _read(self, rank: int, channel: Channel) -> None:
        finished = False
        try:
            while (message := channel.receive()) is not None:
                finished = finished or message.header.get("on") == "finished"
                self._events.put(Received(rank=rank, message=message))
        finally:  # whatever ends the reading: the controller waits for this event
            channel.close()
            # Of a process of the launcher only that is known.
            status = self._status if rank == 0 else 0 if finished else None
            self._events.put(Exited(rank=rank, exit_code=status, signal=None))


def ranks_of_launcher() -> RankInfo | None:
    """Return who we are among the processes that torchrun has started; None if it has not, or only this one.

    Raises:
        ConfigError: they are on several machines.
    """
    if any(name not in os.environ for name in _VARIABLES) and not (dist.is_available() and dist.is_initialized()):
        return None
    info = current_ranks()
    if info.world_size == 1:
        return None
    if info.local_world_size != info.world_size:
        raise ConfigError(
            f"ScalingConfig(num_workers=0) under a launcher of {info.world_size} processes, {info.local_world_size} of "
            "them on this machine: local mode is for one machine; on several use ScalingConfig(engine='ray'), or a "
            "loop of your own with holdfast.Checkpointer"
        )
    return info


class Launched:
    """This process among those of one launch, from `meet` on.

    Attributes:
        info: who we are.
        name: of the run: rank 0's, which may be made up.
        workers: rank 0's ends of the conversations with the workers of the other ranks, rank 1 first.
        worker: the worker's end of that, on the other ranks.
    """

    def __init__(self, info: RankInfo, name: str, ends: list[Channel], workers: list[Channel]) -> None:
        self.info, self.name, self._ends = info, name, ends
        self.workers = workers if info.rank == 0 else []
        self.worker = None if info.rank == 0 else workers[0]

    @classmethod
    def meet(cls, info: RankInfo, *, name: str, named: bool, place: str) -> Launched:
        """Meet the other ranks; all of them call this.

        Args:
            info: who we are.
            name: of the run here.
            named: whether the user gave it: then it has to be the same on all ranks.
            place: URI of the folder of runs.

        Raises:
            ConfigError: the ranks are asked for different runs.
            HoldfastError: a rank did not come.
        """
        meeting = meet(info, name="fit", timeout_s=_MEET_S, otherwise="give ScalingConfig(num_workers=...)")

        def same(values: list[dict[str, Any]]) -> dict[str, Any]:
            same_for_all([value["asked"] for value in values], "the run (name, storage_path) of TorchTrainer")
            return values[0]

        asked = [name if named else None, place]
        with contextlib.ExitStack() as stack:
            listener, path = stack.enter_context(_listener()) if info.rank == 0 else (None, "")
            found = meeting.agree("run", lambda: {"asked": asked, "name": name, "path": path}, same)
            if listener is None:
                channels = [_connect(found["path"], info.rank, what) for what in ("end", "worker")]
                return cls(info, found["name"], channels[:1], channels[1:])
            ends, workers = _accept_all(listener, info.world_size)
        return cls(info, found["name"], ends, workers)

    def tell_end(self, error: BaseException | None, value: bytes) -> None:
        """On rank 0: tell the others how the run has ended, and what train_func returned here."""
        description, data = ("", b"") if error is None else error_to_wire(error)
        for channel in self._ends:
            with contextlib.suppress(OSError):  # that process is gone
                channel.send({"on": "end", "error": description}, [data, value])
                channel.flush(_MEET_S)

    def wait_for_end(self) -> bytes:
        """On another rank: wait until the run has ended on rank 0; return what train_func returned there, packed.

        Raises:
            TrainingFailedError: the run has failed, or rank 0 is gone.
        """
        try:
            message = self._ends[0].receive()
        except HoldfastError:
            message = None
        if message is None:
            raise TrainingFailedError("training failed: rank 0, which drives the run, has ended", failures={})
        if message.attachments[0]:
            raise error_from_wire(message.header["error"], message.attachments[0])
        return message.attachments[1]

    def close(self) -> None:
        """End the conversations; idempotent."""
        for channel in (*self._ends, *self.workers):
            channel.close()


@contextlib.contextmanager
def _listener() -> Iterator[tuple[socket.socket, str]]:
    """Listen in a folder that only this user can enter, and that is gone when all have come."""
    above = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="holdfast-fit-", dir=above if len(above) < _LONGEST - 30 else "/tmp")
    path = os.path.join(folder, "socket")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(128)
            listener.settimeout(_MEET_S)
            yield listener, path
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _connect(path: str, rank: int, what: str) -> Channel:
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.connect(path)
    channel = Channel(ours)
    channel.send({"hello": rank, "what": what})
    return channel


def _accept_all(listener: socket.socket, world_size: int) -> tuple[list[Channel], list[Channel]]:
    found: dict[tuple[str, int], Channel] = {}
    while len(found) < 2 * (world_size - 1):
        try:
            theirs, _ = listener.accept()
        except TimeoutError:
            here = sorted({rank for _, rank in found})
            raise HoldfastError(f"of {world_size} ranks only 0 and {here} came to fit() in {_MEET_S:g} s") from None
        channel = Channel(theirs)
        hello = channel.receive()
        if hello is not None:
            found[hello.header["what"], hello.header["hello"]] = channel
    ends, workers = ([found[what, rank] for rank in range(1, world_size)] for what in ("end", "worker"))
    return ends, workers


def drive_here(driver: Driver, engine: InlineEngine, function: Callable[..., Any], config: Any) -> Any:
    """Drive the run in a thread, and call the train function here each time it is to start.

    Args:
        driver: of the run; closed at the end.
        engine: it drives.
        function: the train function.
        config: what it gets.

    Returns:
        What the function returned.

    Raises:
        BaseException: why the run has ended, if not well.
    """
    outcome: Future[End] = Future()
    raised: list[BaseException] = []
    returned: list[Any] = [None]

    def drive() -> None:
        try:
            outcome.set_result(driver.run())
        except BaseException as error:  # noqa: BLE001 - a thread edge: raised below
            outcome.set_exception(error)
        engine.close()

    def ended(status: int, error: BaseException | None) -> None:
        raised[:] = [] if error is None else [error]
        engine.ended(status)

    @functools.wraps(function)
    def called(*arguments: Any) -> None:
        try:
            returned[0] = function(*arguments)
        except KeyboardInterrupt:
            driver.stop("SIGINT")  # before the controller hears of a failure, which it would recover from
            raise

    driving = threading.Thread(target=drive, name="holdfast-drive")
    driving.start()
    try:
        while (channel := engine.next_call()) is not None:
            run_here(channel, called, config, ended=ended)
    except BaseException:
        driver.stop("an error")
        raise
    finally:
        driving.join()
        driver.close()
    say(driver.last_words())
    if raised and isinstance(raised[0], KeyboardInterrupt):
        raise raised[0]
    end = outcome.result()
    if end.error is not None:
        raise end.error from (raised[0] if raised else end.error.__cause__)
    return returned[0]


def work_here(launched: Launched, function: Callable[..., Any], config: Mapping[str, Any] | None) -> bytes:
    """Call the train function once, as a worker of the run that rank 0 drives; wait for the end of the run.

    Args:
        launched: we are another rank than 0.
        function: the train function.
        config: what it gets.

    Returns:
        What the function returned on rank 0, packed.

    Raises:
        TrainingFailedError: the function failed here, or the run has failed elsewhere.
    """
    raised: list[BaseException] = []

    def ended(status: int, error: BaseException | None) -> None:
        if error is not None:
            raised.append(error)

    assert launched.worker is not None
    run_here(launched.worker, function, config, ended=ended)
    if raised:
        # Now, not with the run: rank 0 may wait for us in a collective.
        leave_launched_group()
        if isinstance(raised[0], (KeyboardInterrupt, SystemExit)):
            raise raised[0]
        rank = launched.info.rank
        raise TrainingFailedError(
            f"training failed: train_func raised on rank {rank}: {type(raised[0]).__name__}: {raised[0]}",
            failures={rank: raised[0]},
        ) from raised[0]
    return launched.wait_for_end()
