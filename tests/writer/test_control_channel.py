"""The control channel over real sockets: who gets in, broken connections, silence, farewell."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.writer.board import BOARD_BYTES, Board
from holdfast.writer.control_link import Link
from holdfast.writer.control_member import ControlMember
from holdfast.writer.control_server import ControlServer

TOKEN = "t0ken"
LIMIT_S = 60.0


class Channel:
    """A server and members of it in this process."""

    def __init__(self, world_size: int, *, num_members: int | None = None, **times: float) -> None:
        self.times = {"beat_s": 0.05, "stale_s": 10.0, **times}
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()[:2]
        self.commits: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.world_size = world_size
        self.server = self.start_server()
        self.heard: list[queue.SimpleQueue[dict[str, Any]]] = [queue.SimpleQueue() for _ in range(world_size)]
        self.boards = [Board(memoryview(bytearray(BOARD_BYTES))) for _ in range(world_size)]
        self.again: list[list[dict[str, Any]]] = [[] for _ in range(world_size)]
        for board in self.boards:
            board.clear(step=0)
        self.members = [self.start_member(rank) for rank in range(world_size if num_members is None else num_members)]

    def start_server(self) -> ControlServer:
        return ControlServer(
            self.listener.dup(),
            token=TOKEN,
            world_size=self.world_size,
            timeout_s=LIMIT_S,
            commit=self.commits.put,
            **self.times,
        )

    def start_member(self, rank: int) -> ControlMember:
        return ControlMember(
            rank=rank,
            addresses=[self.address],
            token=TOKEN,
            board=self.boards[rank],
            hear=self.heard[rank].put,
            again=lambda: self.again[rank],
            stopped=lambda: False,
            **self.times,
        )

    def save(self, name: str) -> None:
        for member in self.members:
            member.say({"do": "begun", "save": name, "directory": "d", "step": 1})
            member.say({"do": "stored", "save": name})

    def outcome(self, rank: int) -> dict[str, Any]:
        return self.heard[rank].get(timeout=LIMIT_S)

    def close(self) -> None:
        for member in self.members:
            member.close("done")
        self.server.close("done")
        self.listener.close()


@pytest.fixture
def channel() -> Iterator[Channel]:
    one = Channel(3)
    yield one
    one.close()


def until(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        threading.Event().wait(0.002)


def test_a_save_and_a_step_go_around(channel: Channel) -> None:
    """All parts lead to one commit, its outcome to all; a wish of one rank leads to one armed step on all boards."""
    channel.save("s-1")
    assert channel.commits.get(timeout=LIMIT_S) == "s-1"
    channel.server.committed("s-1", value={"deleted": [["step_1", "old"]]})
    for rank in range(3):
        told = channel.outcome(rank)
        assert (told["save"], told["error"]) == ("s-1", None)
        assert told["value"]["deleted"] == [["step_1", "old"]]
    channel.members[2].say({"do": "want", "kind": "stop"})
    until(lambda: all(board.armed for board in channel.boards))
    assert {(board.target, board.kind) for board in channel.boards} == {(2, "stop")}
    channel.members[1].say({"do": "ask", "about": "save 7"})
    assert channel.outcome(1) == {"do": "verdict", "about": "save 7", "go": True}


def test_strangers_are_turned_away(channel: Channel) -> None:
    """Without the token, with nonsense, or with a huge message nobody gets in, and the others go on."""
    for data in (
        b"\x00\x00\x00\x02{}",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\xff\xff\xff",
        b"\x00\x00\x00\x01[",
    ):
        with socket.create_connection(channel.address) as sock:
            sock.settimeout(LIMIT_S)
            sock.sendall(data)
            assert sock.recv(1) == b""
    stranger = Link(socket.create_connection(channel.address))
    standing = {"done": 0, "acted": -1, "target": None, "armed": False, "kind": "save"}
    stranger.send({"do": "hello", "token": "guess", "rank": 0, "standing": standing})
    until(lambda: stranger.receive() is None)
    stranger.close()
    channel.save("s-1")
    assert channel.commits.get(timeout=LIMIT_S) == "s-1"


def test_a_member_that_is_cut_off_joins_again_and_repeats_what_it_has(channel: Channel) -> None:
    """What was on its way is lost with a connection, and said again; nobody else notices."""
    for rank in range(3):
        channel.again[rank] = [
            {"do": "begun", "save": "s-1", "directory": "d", "step": 1},
            {"do": "stored", "save": "s-1"},
        ]
    until(lambda: len(channel.server._ranks) == 3)
    channel.members[1]._link._sock.shutdown(socket.SHUT_RDWR)
    for rank in (0, 2):
        for message in channel.again[rank]:
            channel.members[rank].say(message)
    assert channel.commits.get(timeout=LIMIT_S) == "s-1"
    assert channel.members[1].lost is None


def test_a_new_server_at_the_old_address_goes_on(channel: Channel) -> None:
    """Rank 0's writer is killed and started again: all join the new one, and a save that was half told is finished."""
    for rank in range(3):
        channel.again[rank] = [{"do": "begun", "save": "s-1", "directory": "d", "step": 1}]
    until(lambda: len(channel.server._ranks) == 3)
    channel.server._farewell = lambda why: None  # a death says nothing
    channel.server.close("killed")
    channel.server = channel.start_server()
    for member, again in zip(channel.members, channel.again, strict=True):
        again.append({"do": "stored", "save": "s-1"})
        member.say(again[-1])
    assert channel.commits.get(timeout=LIMIT_S) == "s-1"


def test_an_answer_outlives_the_writer_that_gave_it(channel: Channel) -> None:
    """It was lost on its way to one rank, and rank 0's writer was killed: that rank is told what the others were."""
    until(lambda: channel.server.steps.gathered)
    channel.members[0].say({"do": "begun", "save": "s-1", "directory": "d", "step": 1})
    channel.members[0].say({"do": "ask", "about": "save 7"})
    assert channel.outcome(0) == {"do": "verdict", "about": "save 7", "go": False}
    channel.server._farewell = lambda why: None  # a death says nothing
    channel.server.close("killed")
    # Of the save under way the new one never hears: asked now, it would say something else.
    channel.again[1] = [{"do": "ask", "about": "save 7"}]
    channel.server = channel.start_server()
    assert channel.outcome(1) == {"do": "verdict", "about": "save 7", "go": False}


def test_who_leaves_is_not_waited_for(channel: Channel) -> None:
    """A rank that has said farewell fails the next save at once, with its reason."""
    channel.members[1].close("it has left the run (ValueError: boom)")
    channel.members[0].say({"do": "begun", "save": "s-1", "directory": "d", "step": 1})
    assert "rank 1: it has left the run (ValueError: boom)" in channel.outcome(0)["error"]["message"]


def test_a_silent_server_is_given_up() -> None:
    """Its members stop waiting, and their trainers see it."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        board = Board(memoryview(bytearray(BOARD_BYTES)))
        board.clear(step=0)
        member = ControlMember(
            rank=1,
            addresses=[deaf.getsockname()[:2]],
            token=TOKEN,
            board=board,
            hear=heard.put,
            again=list,
            stopped=lambda: False,
            beat_s=0.05,
            stale_s=0.3,
        )
        told = heard.get(timeout=LIMIT_S)
        assert told["do"] == "lost"
        assert "no sign of life for 0.3 s" in told["why"]
        assert board.broken
        member.close("done")


def test_a_silent_member_is_given_up() -> None:
    """No sign of life for too long: its saves fail, with its number."""
    channel = Channel(2, num_members=1, stale_s=1.0)
    dumb = Link(socket.create_connection(channel.address))
    standing = {"done": 0, "acted": -1, "target": None, "armed": False, "kind": "save"}
    dumb.send({"do": "hello", "token": TOKEN, "rank": 1, "standing": standing})
    try:
        channel.members[0].say({"do": "begun", "save": "s-1", "directory": "d", "step": 1})
        while (told := channel.outcome(0))["do"] != "outcome":
            continue
        assert "rank 1: its writer process gives no sign of life for 1 s" in told["error"]["message"]
    finally:
        channel.close()
        dumb.close()


def test_a_job_that_was_suspended_goes_on(channel: Channel) -> None:
    """The system had stopped rank 0's writer, as `scontrol suspend` does: silence in that time is nobody's fault."""
    server = channel.server
    until(lambda: all(member.link is not None for member in server._members))

    def wake() -> None:
        server._watched -= 60
        for member in server._members:
            member.heard -= 60

    server._soon(wake)
    channel.save("s-1")
    assert channel.commits.get(timeout=LIMIT_S) == "s-1"
    assert not any(member.gone for member in server._members)


def test_an_address_where_nobody_listens_is_given_up_soon() -> None:
    """Rank 0 is gone, trainer and writer: nobody waits as long for it as for a network that does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()[:2]
    heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    board = Board(memoryview(bytearray(BOARD_BYTES)))
    board.clear(step=0)
    member = ControlMember(
        rank=1,
        addresses=[address],
        token=TOKEN,
        board=board,
        hear=heard.put,
        again=list,
        stopped=lambda: False,
        beat_s=0.05,
        stale_s=3.0,
    )
    assert "cannot be reached" in heard.get(timeout=LIMIT_S)["why"]
    member.close("done")
