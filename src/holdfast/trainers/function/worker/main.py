"""The main of a worker: take the function, join the default process group, run it, and say how it ended.

`run` does that in a process of its own, `run_here` in that of the driver, without a process group.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import cloudpickle

from holdfast._fork import after_fork_in_child
from holdfast._log import get_logger
from holdfast._ranks import RankInfo
from holdfast.errors import ConfigError, HoldfastError, ReportMismatchError, TrainingError
from holdfast.run.life import RolledBack
from holdfast.writer.frames import Channel, Message

from ..transit import error_to_wire, learn_secrets, pack_result, takes_config, unpack_call
from .session import Session, current_session

_LOG = get_logger("trainers.function")
_FLUSH_S = 30.0
_JOIN_S = 600.0  # as long as the controller waits for a group to begin
_POLL_S = 0.05
_ALONE_S = 60.0
_current: Group | None = None
_joined = False  # `launched_group` has made the process group


def run(
    channel: Channel, *, listen_fd: int = -1, use_gpu: bool = False, make_session: Callable[..., Any] = Session
) -> int:
    """Run a train function as the controller asks; return the exit status of this process.

    ``sys.exit(0)`` in the function is its end like any other; another status becomes that of this process, after
    everything reported has been stored.

    Args:
        channel: to the controller, which sends "begin" first.
        listen_fd: a socket that listens on MASTER_PORT, for rank 0.
        use_gpu: talk over NCCL.
        make_session: stands in for `holdfast.trainers.function.worker.session.Session`.
    """
    begin = _receive(channel, "begin")
    session: Session | None = None
    try:
        # Storages that the session and the function open may need them.
        learn_secrets(*begin.attachments[2:3] or (b"",))
        # Before the function is loaded: the session notices the end of the driver.
        session = make_session(channel, begin.header, *(begin.attachments[1:2] or (None,)))
        function, config = unpack_call(begin.attachments[0])
        arguments = _arguments(function, config)
        rank, world_size = begin.header["rank"], begin.header["world_size"]
        with process_group(rank, world_size, listen_fd=listen_fd, use_gpu=use_gpu) as group:
            status = _call(channel, session, function, arguments, returns=rank == 0)
            if not status:
                group.leave(min(_ALONE_S, begin.header.get("report_timeout_s", _ALONE_S)))
    except BaseException as error:  # noqa: BLE001 - the edge of the process: the controller decides what it means
        _fail(channel, session, error)
        status = 1
    channel.flush(_FLUSH_S)
    return status


def run_task(channel: Channel, *, listen_fd: int = -1, use_gpu: bool = False) -> int:
    """Call a function and send back what it returns or raises; return the exit status of this process."""
    del listen_fd, use_gpu  # for workers only
    message = _receive(channel, "task")
    try:
        result = cloudpickle.dumps(cloudpickle.loads(message.attachments[0])())
    except BaseException as error:  # noqa: BLE001 - as above
        _fail(channel, None, error)
        result = None
    else:
        channel.send({"on": "result"}, [result])
    channel.flush(_FLUSH_S)
    return 0 if result is not None else 1


def _receive(channel: Channel, what: str) -> Message:
    # Processes that we fork (loader workers) must not keep this conversation open when we are gone.
    after_fork_in_child(channel.forget_in_child)
    message = channel.receive()
    if message is None:  # the driver is gone
        os._exit(1)
    if message.header.get("do") != what:
        raise HoldfastError(f"a worker received {message.header.get('do')!r} before {what!r}")
    return message


def _arguments(function: Callable[..., Any], config: Any) -> tuple[Any, ...]:
    if not takes_config(function):
        return ()
    return ({} if config is None else config,)


def _call(
    channel: Channel, session: Session, function: Callable[..., Any], arguments: tuple[Any, ...], *, returns: bool
) -> int:
    """Call the function, wait until what it reported is safe, say how it ended; return the status that it wants.

    Args:
        channel: to the controller.
        session: of this worker.
        function: the train function.
        arguments: of it.
        returns: the controller gets what it returns.
    """
    channel.send({"on": "running"})
    status, left, rolled_back, value = 0, False, False, None
    try:
        value = function(*arguments)
    except SystemExit as leaving:
        left, rolled_back = True, isinstance(leaving, RolledBack)
        if leaving.code is None or isinstance(leaving.code, int):
            status = leaving.code or 0
        else:
            print(leaving.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
            status, rolled_back = 1, False
    session.drain()
    if status:
        # Ahead of the end of the group, at which others in a collective fail: the end itself takes longer.
        channel.send({"on": "leaving", "rolled_back": rolled_back})
    else:
        packed = pack_result(value) if returns else None
        channel.send({"on": "finished", "left": left}, [] if packed is None else [packed])
    channel.flush(_FLUSH_S)
    return status


def _fail(channel: Channel, session: Session | None, error: BaseException) -> None:
    """Send the controller an error, after all earlier reports."""
    _begin_at_user(error)
    traceback.print_exception(error)
    if session is not None:
        session.abandon()
    description, data = error_to_wire(error)
    # A missing package may be installed on other nodes: a cluster can leave this node out.
    module = {"module": error.name or ""} if isinstance(error, ModuleNotFoundError) else {}
    with contextlib.suppress(OSError):  # the driver is gone
        channel.send({"on": "failed", "error": description, **module}, [data])


def _begin_at_user(error: BaseException) -> None:
    """Cut our own frames off the front of a traceback."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") == __name__ and frames.tb_next is not None:
        frames = frames.tb_next
    error.__traceback__ = frames


def run_here(
    channel: Channel,
    function: Callable[..., Any],
    config: Mapping[str, Any] | None,
    *,
    ended: Callable[[int, BaseException | None], None],
) -> None:
    """Run a train function as the controller at the other end of ``channel`` asks.

    Nothing is pickled: breakpoints, closures and globals are those of the caller.

    Args:
        channel: to the controller; closed at the end.
        function: the train function.
        config: what it gets.
        ended: called before the channel is closed, with the status that a worker process would have ended with and what
            the function raised.
    """
    begin = channel.receive()
    if begin is None:
        ended(1, None)
        channel.close()
        return
    session: Session | None = None
    raised: BaseException | None = None
    try:
        memory = (*begin.attachments[1:2], None)[0]
        session = Session(channel, begin.header, memory, on_gone=lambda: None)
        status = _call(channel, session, function, _arguments(function, config), returns=False)
    except BaseException as error:  # noqa: BLE001 - the edge of a worker: the controller decides what it means
        raised, status = error, 1
        _fail(channel, session, error)
    channel.flush(_FLUSH_S)
    ended(status, raised)
    if session is not None:
        session.close()
    channel.close()


class Group:
    """The ranks of the default process group, which wait for one another before it is used and before it is destroyed.

    A rank that leaves closes its connections. A rank that is still connecting to others then fails, so no rank begins
    before all are connected; and a rank that still trains may make another group, for which it needs rank 0's store.
    """

    def __init__(self, store: Any, world_size: int, rank: int = 0) -> None:
        self._store, self._size, self._rank = store, world_size, rank
        self._meetings = 0

    def joined(self, timeout_s: float = _JOIN_S) -> None:
        """Wait until every rank has joined.

        Raises:
            TrainingError: some ranks have not joined within ``timeout_s``.
        """
        if self._store is None or self._size == 1:
            return
        try:
            self._store.wait([self._arrive("joined")], timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise TrainingError(f"not all {self._size} ranks joined the process group: {error}") from error

    def leave(self, alone_s: float = _ALONE_S) -> None:
        """Wait until the train function has returned on every rank.

        No time limits this: others may train on for as long as they like. If one of them fails, the controller ends
        this process too; if the store is gone, rank 0 has left and the group is not needed any more.

        Args:
            alone_s: after this long the connections of gloo are closed: ranks that wait for this rank in a collective
                get an error then, and not after half an hour. NCCL has a watchdog of its own.
        """
        if self._store is None or self._size == 1:
            return
        pause, until = 0.001, time.monotonic() + alone_s
        try:
            done = self._arrive("done")
            # Polled rather than one long wait: signal handlers of the user have to run meanwhile.
            while not self._store.check([done]):
                time.sleep(pause)
                pause = min(_POLL_S, pause * 2)
                if time.monotonic() > until:
                    until = math.inf
                    self._disconnect(alone_s)
        except RuntimeError as error:
            _LOG.debug("the store of the process group is gone: %s", error)

    def _disconnect(self, alone_s: float) -> None:
        import torch.distributed as dist

        if dist.is_initialized() and dist.get_backend() == "gloo":
            _LOG.warning(
                "train_func ended on rank %d %.0f s ago and others go on: it leaves the process group, and a "
                "collective that waits for it fails", self._rank, alone_s,
            )  # fmt: skip
            dist.destroy_process_group()

    def meet(self, data: bytes, timeout_s: float, what: str) -> bytes:
        """Wait until every rank has called this, and return the data of rank 0.

        Args:
            data: of this rank; that of rank 0 counts.
            timeout_s: how long to wait.
            what: the function that was called, for the message.

        Raises:
            ReportMismatchError: ranks did not call it in time; names them.
        """
        if self._store is None or self._size == 1:
            return data
        self._meetings += 1
        place = f"meeting-{self._meetings}"
        if self._rank == 0:
            self._store.set(_key(place, "data"), data)
        self._store.set(_key(place, str(self._rank)), b"1")
        names = [_key(place, str(rank)) for rank in range(self._size)]
        deadline, pause = time.monotonic() + timeout_s, 0.001
        while not self._store.check(names):
            if time.monotonic() > deadline:
                absent = [str(rank) for rank, name in enumerate(names) if not self._store.check([name])]
                raise ReportMismatchError(
                    f"{what}() number {self._meetings} was not called by rank {', '.join(absent)} within "
                    f"{timeout_s:g} s (HOLDFAST_REPORT_TIMEOUT_S); every rank must call it equally often"
                )
            time.sleep(pause)
            pause = min(_POLL_S, pause * 2)
        return bytes(self._store.get(_key(place, "data")))

    def _arrive(self, what: str) -> str:
        """Count this rank in; return the key that is there once all have come."""
        everybody = _key(what, "all")
        if int(self._store.add(_key(what, "count"), 1)) == self._size:
            self._store.set(everybody, b"1")
        return everybody


def barrier() -> None:
    """Wait until every worker has called this.

    Raises:
        ReportMismatchError: a rank did not call it within the limit of reports; names it.
        SessionError: called outside of train_func.
    """
    _meet(b"", "barrier")


def broadcast_from_rank_zero(data: Any) -> Any:
    """Return the data of rank 0; every worker calls it. For small values (settings, names): it travels by pickle.

    Raises:
        ReportMismatchError: a rank did not call it within the limit of reports; names it.
        SessionError: called outside of train_func.

    Example:
        >>> name = hf.collective.broadcast_from_rank_zero(make_name())                      # doctest: +SKIP
    """
    return pickle.loads(_meet(cloudpickle.dumps(data), "broadcast_from_rank_zero"))


def _meet(data: bytes, function: str) -> bytes:
    session = current_session(f"collective.{function}")
    return data if _current is None else _current.meet(data, session.report_timeout_s, function)


@contextmanager
def process_group(rank: int, world_size: int, *, listen_fd: int, use_gpu: bool) -> Iterator[Group]:
    """Join the group at MASTER_ADDR:MASTER_PORT for the time of the block: gloo, or NCCL with ``use_gpu``.

    The block begins when all ranks have joined. After an exception the group is left to the end of the process:
    tearing NCCL down waits for ranks that may be dead.

    Args:
        rank: of this worker.
        world_size: number of workers.
        listen_fd: rank 0's socket that listens on MASTER_PORT; it is taken over.
        use_gpu: there is a device for each worker.

    Raises:
        ConfigError: there are fewer devices than workers.
        TrainingError: other ranks did not join.
    """
    import torch.distributed as dist

    kind, backend = _choose_device(use_gpu=use_gpu)
    # For Accelerate, which otherwise takes any GPU that it sees.
    os.environ.setdefault("ACCELERATE_TORCH_DEVICE", f"{kind}:{os.environ['LOCAL_RANK']}" if use_gpu else "cpu")
    if not dist.is_available():
        yield Group(None, world_size)
        return
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=rank == 0,
        wait_for_workers=False,
        master_listen_fd=listen_fd if rank == 0 and listen_fd >= 0 else None,
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    global _current
    _current = group = Group(store, world_size, rank)
    group.joined()
    yield group
    if dist.is_initialized():  # the function may have done it itself
        try:
            dist.destroy_process_group()
        except RuntimeError as error:
            _LOG.warning("the process group was not torn down cleanly: %s", error)


@contextmanager
def launched_group(info: RankInfo, *, use_gpu: bool) -> Iterator[None]:
    """Join the group of the processes that torchrun has started, for the time of the block, unless there is one.

    Args:
        info: who we are.
        use_gpu: talk over NCCL, each rank with a device of its own.

    Raises:
        ConfigError: there are fewer devices than workers, or no store to meet through.
    """
    import torch.distributed as dist

    from holdfast.checkpointer.rendezvous import find_store, store_of_this_life

    global _current, _joined
    _, backend = _choose_device(use_gpu=use_gpu)
    found = find_store(info, "give ScalingConfig(num_workers=...)")
    store = store_of_this_life(found, info, timeout_s=_JOIN_S)
    if not dist.is_initialized():
        # In that part of the store: gloo would take addresses of an earlier life for those of the ranks (torch 2.13).
        dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size)
        _joined = True
    _current = group = Group(store, info.world_size, info.rank)
    group.joined()
    yield
    leave_launched_group()


def leave_launched_group() -> None:
    """Leave the group that `launched_group` has made; whoever waits for us in a collective gets an error."""
    import torch.distributed as dist

    global _current, _joined
    _current = None
    if _joined and dist.is_initialized():
        dist.destroy_process_group()
    _joined = False


def _key(what: str, part: str) -> str:
    return f"holdfast/{what}/{part}"


def _choose_device(*, use_gpu: bool) -> tuple[str, str]:
    """Return the kind of accelerator and the group's backend; with ``use_gpu`` LOCAL_RANK's device is the current one.

    All workers see all devices, as under torchrun: NCCL needs them.
    """
    import torch

    from holdfast.state.accelerator import accelerator, group_backend, make_current

    kind = accelerator() or "cuda"
    if not use_gpu:
        return kind, "gloo"
    count = torch.get_device_module(kind).device_count()
    workers, place = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    if count < workers:
        raise ConfigError(
            f"use_gpu=True with {workers} workers on this machine, but torch sees {count} {kind.upper()} devices "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}): one for each worker is needed; "
            f"lower num_workers or leave use_gpu out"
        )
    make_current(torch.device(kind, place))
    return kind, group_backend(kind)
