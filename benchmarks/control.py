"""The control channel of many writers: rank 0's server on loopback with up to 1 000 simulated writers."""

from __future__ import annotations

import select
import selectors
import socket
import threading
import time
from typing import Any

from holdfast.writer.ranks.link import CHALLENGE_BYTES, PROOF_BYTES, Link, make_answer, make_proof
from holdfast.writer.ranks.server import ControlServer

from .bench import Context, Goal, Outcome

__all__ = ["run"]

_TOKEN = "benchmark"
_LIMIT_S = 120.0


class _Writers:
    """All simulated writers in one thread: they join, acknowledge what is proposed, and store what they are told to."""

    def __init__(self, port: int, count: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._links: list[Link] = []
        self.armed, self.ended = 0, 0
        for rank in range(count):
            link = _join(port, rank)
            standing = {"done": 0, "acted": -1, "target": None, "armed": False, "kind": "save"}
            link.send({"do": "hello", "standing": standing})
            self._selector.register(link, selectors.EVENT_READ)
            self._links.append(link)

    def want(self) -> None:
        """Let one of them wish for a save."""
        self._links[0].send({"do": "want", "kind": "save"})

    def say_all(self, **message: Any) -> None:
        for link in self._links:
            link.send(message)

    def until(self, reached: Any, *, wishing: bool = False) -> None:
        """Serve until ``reached()``; with ``wishing`` repeat the wish: one that comes too early counts as the last."""
        deadline = time.monotonic() + _LIMIT_S
        while not reached():
            if time.monotonic() > deadline:
                raise AssertionError("the control channel is stuck")
            ready = self._selector.select(0.1)
            if wishing and not ready:
                self.want()
            for key, _ in ready:
                link: Any = key.fileobj
                for message in link.receive() or ():
                    self._hear(link, message)

    def _hear(self, link: Link, message: dict[str, Any]) -> None:
        if message["do"] == "propose":
            link.send({"do": "ack", "step": message["step"]})
        elif message["do"] == "arm":
            self.armed += 1
            link.send({"do": "acted", "step": message["step"]})
        elif message["do"] == "outcome":
            assert message["error"] is None, message
            self.ended += 1

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._selector.close()


def _join(port: int, rank: int) -> Link:
    """Connect, and prove to belong to the run."""
    link = Link(socket.create_connection(("127.0.0.1", port)))
    challenge = _receive(link, CHALLENGE_BYTES)
    answer = make_answer(_TOKEN, challenge, rank)
    assert answer is not None
    assert link.send_raw(answer)
    assert _receive(link, PROOF_BYTES) == make_proof(_TOKEN, challenge, answer)
    return link


def _receive(link: Link, size: int) -> bytes:
    poll = select.poll()  # select() refuses descriptors above 1023
    poll.register(link, select.POLLIN)
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        poll.poll(100)
        found = link.receive_raw(size)
        assert found is not None, "rank 0's server has hung up"
        if found:
            return found
    raise AssertionError("the control channel is stuck")


def run(context: Context) -> Outcome:
    """Measure, for each number of ranks: joining, agreeing on a step, and a save from the first part to the outcome."""
    outcome = Outcome()
    counts = (4, 16) if context.quick else (10, 100, 1000)
    for count in counts:
        for turn in range(context.repeat + 1):
            found = _measure(count)
            outcome.add(f"{count} writers", first=not turn, **found)
            context.say(f"{count} writers: " + ", ".join(f"{name} {value:.1f} ms" for name, value in found.items()))
    most = f"{counts[-1]} writers"
    for kind, bound in (("join", 5000.0), ("agree", 500.0), ("save", 1000.0)):
        outcome.goals.append(
            Goal(what=f"{kind}, {most}", value=outcome.median(most, kind), unit="ms", at_most=bound)
        )  # fmt: skip
    return outcome


def _measure(count: int) -> dict[str, float]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=count)
    port = listener.getsockname()[1]
    committed = threading.Event()

    def commit(save: str) -> None:
        committed.set()
        server.committed(save, value={})

    server = ControlServer(
        listener,
        token=_TOKEN,
        world_size=count,
        timeout_s=_LIMIT_S,
        commit=commit,
        newest=lambda: -1,
    )
    started = time.perf_counter()
    writers = _Writers(port, count)
    try:
        # A wish is answered when all have joined.
        writers.want()
        writers.until(lambda: writers.armed == count)
        joined = time.perf_counter()
        writers.want()
        writers.until(lambda: writers.armed == 2 * count, wishing=True)
        agreed = time.perf_counter()
        writers.say_all(do="begun", save="s-1", directory="step_1", step=1)
        writers.say_all(do="stored", save="s-1")
        writers.until(lambda: writers.ended == count)
        saved = time.perf_counter()
        assert committed.is_set()
    finally:
        server.close("done")
        writers.close()
    return {"join": (joined - started) * 1e3, "agree": (agreed - joined) * 1e3, "save": (saved - agreed) * 1e3}
