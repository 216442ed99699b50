"""The main of a worker: take the function, join the process group, run it, and say how it ended.

`run` does that in a process of its own, `run_here` in that of the driver, without a process group.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

from holdfast._fork import after_fork_in_child
from holdfast.errors import HoldfastError
from holdfast.run.life import RolledBack
from holdfast.writer.frames import Channel, Message

from ..transit import error_to_wire, learn_secrets, pack_result, takes_config, unpack_call
from .group import ALONE_S, process_group
from .session import Session

__all__ = ["run", "run_here", "run_task"]

_FLUSH_S = 30.0


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
                group.leave(min(ALONE_S, begin.header.get("report_timeout_s", ALONE_S)))
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
