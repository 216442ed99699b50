"""A train function called in this very process, between a session's begin and its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.writer.frames import Channel

from ..transit import takes_config
from ._session import Session
from .main import FLUSH_S, call, fail

__all__ = ["run_here"]


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
        channel.send({"on": "running"})
        arguments = ({} if config is None else config,) if takes_config(function) else ()
        status, left = call(function, arguments)
        session.drain()
        if not status:
            channel.send({"on": "finished", "left": left})
    except BaseException as error:  # noqa: BLE001 - the edge of a worker: the controller decides what it means
        raised, status = error, 1
        fail(channel, session, error)
    channel.flush(FLUSH_S)
    ended(status, raised)
    if session is not None:
        session.close()
    channel.close()
