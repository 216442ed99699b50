"""The driver's side of the connections to agents: accepting them, messages, and when an agent counts as gone."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from holdfast._log import get_logger
from holdfast.errors import HoldfastError
from holdfast.writer.frames import Channel
from holdfast.writer.ranks.link import ANSWER_BYTES, make_challenge, make_proof, read_answer

from ..local.child import Inbox
from .agent import connect

__all__ = ["AgentLink", "AgentListener"]

_LOG = get_logger("trainers.function")
_HELLO_S = 10.0
_PAUSE_S = 0.1
_STRANGERS = 256
_KEEP = 8
_LARGE = 64 << 10


class AgentLink:
    """An agent, as long as it is connected.

    Attributes:
        node: where it runs.
        number: of the agent.
        heard: when it last sent something, as of `time.monotonic`.
        facts: what it reported about its node; None before.
        ready: it sees the storage and may run workers.
    """

    def __init__(self, node: str, number: int, sock: socket.socket) -> None:
        self.node, self.number = node, number
        self.sock = sock
        self.inbox = Inbox(sock)
        self._channel = Channel(sock)
        self._kept: OrderedDict[str, None] = OrderedDict()
        self.heard = time.monotonic()
        self.facts: dict[str, Any] | None = None
        self.ready = False

    def fileno(self) -> int:
        """Descriptor for a selector."""
        return self._channel.fileno()

    def tell(self, header: dict[str, Any], attachments: Sequence[bytes] = ()) -> None:
        """Send without blocking; dropped if the agent is gone, which the reading side notices."""
        try:
            self._channel.send(header, attachments)
        except OSError as error:
            _LOG.debug("the agent on %s takes nothing: %s", self.node, error)

    def pass_on(self, child: int, header: dict[str, Any], attachments: Sequence[bytes]) -> None:
        """Send a message to a process of this agent; a large attachment that several processes get travels once."""
        parts: list[str | None] = []
        rest: list[bytes] = []
        for item in attachments:
            key = xxhash.xxh3_128_hexdigest(item) if len(item) >= _LARGE else None
            parts.append(key)
            if key is None:
                rest.append(item)
            elif key not in self._kept:
                self.tell({"do": "keep", "key": key}, [item])
                self._kept[key] = None
                if len(self._kept) > _KEEP:
                    self._kept.popitem(last=False)
        self.tell({"do": "send", "child": child, "header": header, "parts": parts}, rest)

    def close(self) -> None:
        """Close the connection: the agent ends. Idempotent."""
        self._channel.close()


class AgentListener:
    """Listens for agents and accepts those that know the token.

    Args:
        host: address to listen on.
        token: of this run.
        welcome: takes the number of an agent and its socket; called on another thread.
    """

    def __init__(self, host: str, token: str, welcome: Callable[[int, socket.socket], None]) -> None:
        self._token, self._welcome = token, welcome
        self._closed = False
        self._room = threading.BoundedSemaphore(_STRANGERS)
        try:
            self._listener = socket.create_server((host, 0), backlog=1024)
        except OSError as error:
            raise HoldfastError(f"cannot listen on {host} for the nodes of the cluster: {error}") from error
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="holdfast-agents", daemon=True).start()

    def close(self) -> None:
        """Accept no more agents. Idempotent."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                _LOG.warning("an agent could not connect: %s", error)  # out of descriptors, say: it comes again
                time.sleep(_PAUSE_S)
                continue
            if not self._room.acquire(blocking=False):
                sock.close()  # more than so many unproven connections are not agents
                continue
            threading.Thread(target=self._greet, args=(sock,), name="holdfast-hello", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        """Check that the other side knows the token. Nothing is parsed before that."""
        deadline = time.monotonic() + _HELLO_S
        try:
            sock.settimeout(_HELLO_S)
            challenge = make_challenge()
            sock.sendall(challenge)
            answer = b""
            while len(answer) < ANSWER_BYTES and time.monotonic() < deadline:
                more = sock.recv(ANSWER_BYTES - len(answer))
                if not more:
                    break
                answer += more
            number = read_answer(self._token, challenge, answer) if len(answer) == ANSWER_BYTES else None
            if number is None or self._closed:
                sock.close()
                return
            sock.sendall(make_proof(self._token, challenge, answer))
            self._welcome(number, connect(sock))
        except OSError:
            sock.close()
        finally:
            self._room.release()
