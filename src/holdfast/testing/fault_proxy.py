"""A proxy between a client and a real HTTP server that counts requests and makes some of them fail.

Use its `FaultProxy.url` in place of the address of the server: an S3 endpoint, a WebDAV server, anything that
speaks plain HTTP/1.1. It runs in a thread of its own and stores no content.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import urlsplit

from holdfast.errors import ConfigError

_PIECE = 64 << 10

_Kind = Literal["500", "503", "403", "expired", "reset", "silence", "truncated", "short", "slow", "call"]
_ANSWERS = {
    "500": ("500 Internal Server Error", "InternalError"),
    "503": ("503 Slow Down", "SlowDown"),
    "403": ("403 Forbidden", "AccessDenied"),
    "expired": ("400 Bad Request", "ExpiredToken"),  # S3's answer after a session has ended
}
_HOP = ("connection", "keep-alive", "proxy-connection", "expect")  # between two machines only: never passed on
_TURNS = 5  # of the event loop: more than accepting or closing a connection takes


@dataclass(slots=True, kw_only=True)
class Exchange:
    """A request and its outcome.

    Attributes:
        number: from 0, in the order of arrival.
        method: "GET", "PUT", ...
        path: with the bucket, as sent.
        query: what follows the "?".
        range: the header of ranged reads, "" without.
        sent_bytes: body of the request.
        received_bytes: body of the answer, as far as the client got it.
        status: of the answer to the client; 0 before it.
        fault: kind of the fault, "" without.
        arrived: when it came, by `time.monotonic`.
    """

    number: int
    method: str
    path: str
    query: str = ""
    range: str = ""
    sent_bytes: int = 0
    received_bytes: int = 0
    status: int = 0
    fault: str = ""
    arrived: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong, with which requests. Without ``share``, ``every`` and ``at``: with each request that matches.

    Attributes:
        kind: "500"; "503" (S3's SlowDown); "403"; "expired" (S3's ExpiredToken); "reset", the connection breaks;
            "silence", no answer for ``seconds``; "truncated", the connection closes in the middle of the answer;
            "short", the answer is shorter than the object and does not say so; "slow", ``seconds`` pass before
            the request goes on and ``bytes_per_s`` is the limit then; "call", ``call`` is called.
        share: fraction of the requests, by chance.
        seed: of the chance.
        every: each n-th request: ``every=3`` hits requests 2, 5, 8, ... of those that match.
        at: number of the single request that is hit, from 0 among those that match.
        method: only requests with this method.
        path: only requests whose path and query match this regular expression somewhere.
        times: no more than this often.
        carried_out: the server does its work first; only then things go wrong.
        seconds: see ``kind``.
        bytes_per_s: see ``kind``; 0 is no limit.
        call: gets the `Exchange` in the thread of the proxy; if it returns True the connection breaks, otherwise the
            request goes on.
    """

    kind: _Kind
    share: float | None = None
    seed: int = 0
    every: int | None = None
    at: int | None = None
    method: str = ""
    path: str = ""
    times: int | None = None
    carried_out: bool = False
    seconds: float = 60.0
    bytes_per_s: int = 0
    call: Callable[[Exchange], object] | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(_Kind):
            raise ConfigError(f"Fault(kind={self.kind!r}): use one of {sorted(get_args(_Kind))}")
        if sum(rule is not None for rule in (self.share, self.every, self.at)) > 1:
            raise ConfigError("Fault(share=, every=, at=): give one of them, or none for every request")
        if (self.kind == "call") != (self.call is not None):
            raise ConfigError("Fault(kind='call', call=fn): the two go together")


class _Armed:
    """A fault with its counters."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self._seen, self._hits = fault, 0, 0
        self._chance, self._path = random.Random(fault.seed), re.compile(fault.path)

    def hits(self, exchange: Exchange) -> bool:
        """Count a request, and tell whether it is hit."""
        fault = self.fault
        if fault.method not in ("", exchange.method) or not self._path.search(f"{exchange.path}?{exchange.query}"):
            return False
        number, self._seen = self._seen, self._seen + 1
        hit = (
            (fault.share is None or self._chance.random() < fault.share)
            and (fault.every is None or number % fault.every == fault.every - 1)
            and (fault.at is None or number == fault.at)
            and (fault.times is None or self._hits < fault.times)
        )
        self._hits += hit
        return hit


class FaultProxy:
    """Stands between a client and a server; a context manager.

    Args:
        server: "http://host:port" of the real server; no TLS.

    Attributes:
        url: the address that clients use instead.

    Example:
        >>> with FaultProxy("http://127.0.0.1:9000") as proxy:                          # doctest: +SKIP
        ...     proxy.inject(Fault(kind="503", share=0.2), Fault(kind="reset", every=7, carried_out=True))
        ...     storage = ObjectStorage("s3://bucket/run", {"endpoint": proxy.url, ...})
        ...     ...
        ...     [exchange.path for exchange in proxy.exchanges if exchange.fault]
    """

    def __init__(self, server: str) -> None:
        parts = urlsplit(server)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"FaultProxy({server!r}): give an address such as 'http://127.0.0.1:9000'")
        self._server = (parts.hostname, parts.port or 80)
        self._lock, self._closing = threading.Lock(), threading.Lock()
        self._log: list[Exchange] = []
        self._armed: list[_Armed] = []
        # The loop itself holds tasks weakly: a task that waits long could be collected.
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._listener = self._loop.run_until_complete(asyncio.start_server(self._begin, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, name="holdfast-fault-proxy", daemon=True)
        self._thread.start()

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All requests since the start, or since the last `forget`, in the order of arrival."""
        with self._lock:
            return tuple(self._log)

    def inject(self, *faults: Fault) -> None:
        """Replace the rules; their counters begin anew. The first rule that hits a request decides about it."""
        armed = [_Armed(fault) for fault in faults]
        with self._lock:
            self._armed = armed

    def forget(self) -> None:
        """Empty the log; numbers begin at 0 again."""
        with self._lock:
            self._log = []

    def close(self) -> None:
        """End the proxy and break all connections; idempotent."""
        with self._closing:
            if self._loop.is_closed():
                return
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(30)
            self._loop.close()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- in the thread

    async def _end(self) -> None:
        # Closing the listener at once would leave just accepted sockets open: asyncio makes no connection of them then.
        for listening in self._listener.sockets:
            self._loop.remove_reader(listening.fileno())
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        self._listener.close()
        while running := [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        for _ in range(_TURNS):  # transports close their sockets a turn later
            await asyncio.sleep(0)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer))
        self._connections.add(task)

        def end(_: object) -> None:  # of the task, also if it was cancelled before its first step
            self._connections.discard(task)
            writer.transport.abort()

        task.add_done_callback(end)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection of a client: its requests in order, until one side closes."""
        try:
            while (head := await _read_head(reader)) is not None:
                exchange, fault = self._note(head)
                if head.get("expect"):
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                if not await self._exchange(exchange, fault, head, reader, writer):
                    break
        except (OSError, asyncio.LimitOverrunError, ValueError, asyncio.CancelledError):
            pass  # one side went away, or this proxy ends

    def _note(self, head: _Head) -> tuple[Exchange, Fault | None]:
        method, target, _ = head.first.split(" ", 2)
        path, _, query = target.partition("?")
        with self._lock:
            exchange = Exchange(
                number=len(self._log),
                method=method,
                path=path,
                query=query,
                range=head.get("range"),
                arrived=time.monotonic(),
            )
            self._log.append(exchange)
            hit = [armed.fault for armed in self._armed if armed.hits(exchange)]
        exchange.fault = hit[0].kind if hit else ""
        return exchange, hit[0] if hit else None

    async def _exchange(
        self,
        exchange: Exchange,
        fault: Fault | None,
        head: _Head,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Carry out a request or make it fail; False if the connection is over."""
        kind = fault.kind if fault is not None else ""
        body = self._counted(exchange, _body_of(reader, head, to_its_end=False))
        if fault is None or kind in ("truncated", "short"):
            return await self._forward(exchange, head, body, writer, cut=kind)
        if kind == "slow":
            await asyncio.sleep(fault.seconds)
            return await self._forward(exchange, head, _paced(body, fault), writer, pace=fault)
        if kind == "call" and not fault.carried_out:
            return not fault.call(exchange) and await self._forward(exchange, head, body, writer)  # type: ignore[misc]
        if fault.carried_out:
            await self._forward(exchange, head, body, None)
        else:
            async for _ in body:
                pass
        if kind == "silence":
            await asyncio.sleep(fault.seconds)
        elif fault.call is not None:
            fault.call(exchange)
        if kind not in _ANSWERS:
            return False
        status, code = _ANSWERS[kind]
        exchange.status = int(status[:3])
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>by the fault proxy</Message></Error>".encode()
        headers = (("Content-Type", "application/xml"), ("Content-Length", str(len(text))))
        writer.write(_Head(f"HTTP/1.1 {status}", headers).to_bytes() + (b"" if exchange.method == "HEAD" else text))
        await writer.drain()
        return True

    async def _counted(self, exchange: Exchange, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for piece in body:
            exchange.sent_bytes += len(piece)
            yield piece

    async def _forward(
        self,
        exchange: Exchange,
        head: _Head,
        body: AsyncIterator[bytes],
        writer: asyncio.StreamWriter | None,
        *,
        cut: str = "",
        pace: Fault | None = None,
    ) -> bool:
        """Pass the request to the server, and its answer to ``writer``, if given."""
        answers, asks = await asyncio.open_connection(*self._server)
        try:
            asks.write(head.to_bytes(without=_HOP, add=(("Connection", "close"),)))
            async for piece in body:
                asks.write(piece)
                await asks.drain()
            answer = await _read_head(answers)
            while answer is not None and 100 <= answer.status < 200:
                answer = await _read_head(answers)
            if answer is None:
                return False
            empty = exchange.method == "HEAD" or answer.status in (204, 304)
            pieces = _nothing() if empty else _body_of(answers, answer, to_its_end=True)
            if writer is None:
                async for _ in pieces:
                    pass
                return False
            exchange.status = answer.status
            length = None if empty else answer.length
            left = (length or 0) // 2 if cut and length else None
            writer.write(_cut_head(answer, left if cut == "short" else None).to_bytes(without=_HOP))
            async for piece in pieces if pace is None else _paced(pieces, pace):
                passed_on = piece if left is None else piece[:left]
                left = None if left is None else left - len(passed_on)
                writer.write(passed_on)
                exchange.received_bytes += len(passed_on)
                await writer.drain()
                if left == 0:
                    break
            ended_by_closing = not empty and length is None and not answer.get("transfer-encoding")
            return cut != "truncated" and not ended_by_closing
        finally:
            asks.transport.abort()


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


async def _paced(pieces: AsyncIterator[bytes], fault: Fault) -> AsyncIterator[bytes]:
    async for piece in pieces:
        if fault.bytes_per_s:
            await asyncio.sleep(len(piece) / fault.bytes_per_s)
        yield piece


def _cut_head(answer: _Head, length: int | None) -> _Head:
    """Return the head with a smaller Content-Length, as from a server that lost the rest."""
    if length is None:
        return answer
    pairs = ((key, str(length) if key.lower() == "content-length" else value) for key, value in answer.headers)
    return _Head(answer.first, tuple(pairs))


@dataclass(frozen=True, slots=True)
class _Head:
    """First line and headers of a request or an answer.

    Attributes:
        first: first line, without its end.
        headers: (name, value) as they were sent.
    """

    first: str
    headers: tuple[tuple[str, str], ...]

    def get(self, name: str) -> str:
        """Return the first header of this name, "" without one."""
        return next((value for key, value in self.headers if key.lower() == name), "")

    def to_bytes(self, *, without: tuple[str, ...] = (), add: tuple[tuple[str, str], ...] = ()) -> bytes:
        """Return the head for the wire, with some headers left out and others added."""
        kept = [pair for pair in self.headers if pair[0].lower() not in without]
        lines = [self.first, *(f"{key}: {value}" for key, value in (*kept, *add))]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    @property
    def length(self) -> int | None:
        """The value of Content-Length, None without."""
        text = self.get("content-length")
        return int(text) if text.isdigit() else None

    @property
    def status(self) -> int:
        """Status of an answer."""
        return int(self.first.split(" ", 2)[1])


async def _read_head(reader: asyncio.StreamReader) -> _Head | None:
    """Read a head; None if the other side has closed the connection."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = raw.decode("latin-1")[:-4].split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return _Head(first, tuple((key.strip(), value.strip()) for key, _, value in pairs))


async def _body_of(reader: asyncio.StreamReader, head: _Head, *, to_its_end: bool) -> AsyncIterator[bytes]:
    """Yield the body that follows a head, chunk marks included.

    Args:
        reader: the stream of the message.
        head: of the message.
        to_its_end: whether a body without a length ends with the connection (answers), or is none (requests).

    Raises:
        ConnectionError: the body broke off.
    """
    if head.get("transfer-encoding").lower() == "chunked":
        left = 1
        while left:
            line = await reader.readline()
            if not line:
                raise ConnectionResetError("a body broke off")
            left = int(line.partition(b";")[0], 16)
            yield line
            async for piece in _exactly(reader, left + 2):
                yield piece
    elif head.length is not None:
        async for piece in _exactly(reader, head.length):
            yield piece
    elif to_its_end:
        while piece := await reader.read(_PIECE):
            yield piece


async def _exactly(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    while size:
        piece = await reader.read(min(_PIECE, size))
        if not piece:
            raise ConnectionResetError("a body broke off")
        size -= len(piece)
        yield piece
