"""The control channel over real sockets: who gets in, broken connections, silence, farewell."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.errors import HoldfastError
from holdfast.writer.arena import MAILBOX_BYTES, Arena, StepMailbox
from holdfast.writer.client import WriterClient
from holdfast.writer.distributed import Joint
from holdfast.writer.frames import encode
from holdfast.writer.ranks import link
from holdfast.writer.ranks import member as member_module
from holdfast.writer.ranks.link import (
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    PROOF_BYTES,
    Link,
    make_answer,
    make_challenge,
    make_proof,
)
from holdfast.writer.ranks.member import ControlMember
from holdfast.writer.ranks.server import ControlServer

TOKEN = "t0ken"
LIMIT_S = 60.0
MANY = 600  # ranks


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
        self.mailboxes = [StepMailbox(memoryview(bytearray(MAILBOX_BYTES))) for _ in range(world_size)]
        self.again: list[list[dict[str, Any]]] = [[] for _ in range(world_size)]
        for mailbox in self.mailboxes:
            mailbox.clear(step=0)
        self.members = [self.start_member(rank) for rank in range(world_size if num_members is None else num_members)]

    def start_server(self) -> ControlServer:
        return ControlServer(
            self.listener.dup(),
            token=TOKEN,
            world_size=self.world_size,
            timeout_s=LIMIT_S,
            commit=self.commits.put,
            newest=lambda: -1,
            **self.times,
        )

    def start_member(self, rank: int) -> ControlMember:
        return ControlMember(
            rank=rank,
            addresses=[self.address],
            token=TOKEN,
            mailbox=self.mailboxes[rank],
            hear=self.heard[rank].put,
            again=lambda: self.again[rank],
            stopped=lambda: False,
            hold=lambda fd: False,
            **self.times,
        )

    def save(self, name: str) -> None:
        for member in self.members:
            member.say({"do": "begun", "save": name, "directory": "d", "step": 1})
            member.say({"do": "stored", "save": name})

    def outcome(self, rank: int) -> dict[str, Any]:
        """Return the next answer; not that there is nothing to rescue, which the end of any rank brings."""
        while (message := self.heard[rank].get(timeout=LIMIT_S)) == {"do": "rescue", "save": ""}:
            pass
        return message

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
    """All parts lead to one commit, its outcome to all; a wish of one rank leads to one armed step on all mailboxes."""
    channel.save("s-1")
    assert channel.commits.get(timeout=LIMIT_S) == "s-1"
    channel.server.committed("s-1", value={"deleted": [["step_1", "old"]]})
    for rank in range(3):
        told = channel.outcome(rank)
        assert (told["save"], told["error"]) == ("s-1", None)
        assert told["value"]["deleted"] == [["step_1", "old"]]
    channel.members[2].say({"do": "want", "kind": "stop"})
    until(lambda: all(mailbox.armed for mailbox in channel.mailboxes))
    assert {(mailbox.target, mailbox.kind) for mailbox in channel.mailboxes} == {(2, "stop")}
    channel.members[1].say({"do": "ask", "about": "save 7"})
    assert channel.outcome(1) == {"do": "verdict", "about": "save 7", "go": True}


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := sock.recv(size - len(data))):
        data += more
    return data


def shake_hands(address: tuple[str, int], rank: int, token: str = TOKEN) -> socket.socket:
    """Connect in the way of a member."""
    sock = socket.create_connection(address)
    sock.settimeout(LIMIT_S)
    challenge = _read(sock, CHALLENGE_BYTES)
    answer = make_answer(token, challenge, rank)
    sock.sendall(answer)
    if _read(sock, PROOF_BYTES) != make_proof(token, challenge, answer):
        sock.close()
        raise ConnectionError("no proof")
    return sock


def works(channel: Channel, name: str) -> None:
    """All ranks make a save."""
    channel.save(name)
    assert channel.commits.get(timeout=LIMIT_S) == name
    channel.server.committed(name, value={})
    for rank in range(channel.world_size):
        assert channel.outcome(rank)["save"] == name
    assert channel.server._thread.is_alive()


NESTED = b"[" * 60_000
STRANGE = {
    "an empty object": b"\x00\x00\x00\x02{}",
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "a huge frame": b"\x00\xff\xff\xff",
    "half a list": b"\x00\x00\x00\x01[",
    "a nested frame": len(NESTED).to_bytes(4, "big") + NESTED,
    "noise": bytes(range(256)) * 4096,
}


@pytest.mark.parametrize("what", STRANGE)
def test_strangers_are_turned_away(channel: Channel, what: str) -> None:
    """Whatever somebody without the token says is not parsed; the connection ends, the others go on."""
    with socket.create_connection(channel.address) as sock:
        sock.settimeout(LIMIT_S)
        with contextlib.suppress(OSError):  # it is closed while we are still talking
            sock.sendall(STRANGE[what].ljust(ANSWER_BYTES, b"."))
            assert len(_read(sock, CHALLENGE_BYTES + 1)) == CHALLENGE_BYTES
    works(channel, "s-1")


def test_the_token_never_travels_and_a_recorded_hello_is_worth_nothing(channel: Channel) -> None:
    """Who guesses gets no proof; an answer heard on the wire does not fit the next challenge; rank 7 of 3 is nobody."""
    with pytest.raises(ConnectionError):
        shake_hands(channel.address, 0, "guess")
    for rank in (3, 7):
        with pytest.raises(ConnectionError):
            shake_hands(channel.address, rank)
    with socket.create_connection(channel.address) as sock:
        sock.settimeout(LIMIT_S)
        recorded = make_answer(TOKEN, _read(sock, CHALLENGE_BYTES), 0)
    assert TOKEN.encode() not in recorded
    with socket.create_connection(channel.address) as sock:
        sock.settimeout(LIMIT_S)
        assert len(_read(sock, CHALLENGE_BYTES)) == CHALLENGE_BYTES
        sock.sendall(recorded)
        assert _read(sock, 1) == b""
    works(channel, "s-1")


@pytest.mark.parametrize(
    "frame",
    [
        len(NESTED).to_bytes(4, "big") + NESTED,
        b"\x7f\xff\xff\xff",
        b'\x00\x00\x00\x0d{"do":"nope"}',
        b'\x00\x00\x00\x0d{"do":"beat"}',
        b'\x00\x00\x00\x1b{"do":"hello","standing":0}',
        b'\x00\x00\x00\x28{"do":"beat","step":"1","stopped":false}',
        b"\x00\x00\x00\x04\xff\xfe{}",
    ],
)
def test_a_member_that_talks_nonsense_loses_its_connection_only(channel: Channel, frame: bytes) -> None:
    """It proved its rank first; its own writer joins again, and the channel goes on."""
    until(lambda: len(channel.server._ranks) == 3)
    with shake_hands(channel.address, 1) as sock:
        sock.sendall(frame)
        while sock.recv(1 << 16):  # what came before the end
            pass
    until(lambda: channel.server._members[1].link is not None)
    works(channel, "s-1")


def test_a_mistake_of_the_server_is_not_blamed_on_a_member(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All ranks hear at once why there will be no more saves; the log has the traceback, and accuses no message."""

    def broken(*_: Any) -> None:
        raise KeyError("a mistake")

    until(lambda: all(member.link is not None for member in channel.server._members))
    monkeypatch.setattr(channel.server.saves, "begun", broken)
    channel.members[1].say({"do": "begun", "save": "s-1", "directory": "d", "step": 1})
    for rank in range(3):
        told = channel.outcome(rank)
        assert told["do"] == "lost"
        assert "has failed in rank 0's writer, whose log says more: KeyError('a mistake')" in told["why"]
    assert "makes no sense" not in caplog.text
    assert any(record.exc_info for record in caplog.records)


def is_ended(sock: socket.socket) -> bool:
    """Wait for the end of a connection that said nothing and got nothing but the challenge."""
    sock.settimeout(5.0)
    try:
        return len(_read(sock, CHALLENGE_BYTES + 1)) == CHALLENGE_BYTES
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_connections_without_a_hello_are_few_and_short(channel: Channel) -> None:
    """Two hundred that say nothing: only some are kept, the members are served meanwhile, and all of them end."""
    until(lambda: len(channel.server._ranks) == 3)
    channel.server._stale_s, idle = 1000.0, []
    try:
        for _ in range(200):
            idle.append(socket.create_connection(channel.address))
        channel.members[1]._link._sock.shutdown(socket.SHUT_RDWR)  # has to get in beside them
        works(channel, "s-1")
        for one in idle[:100]:  # for those that came later
            assert is_ended(one)
        for one in idle:
            one.close()
        until(lambda: not channel.server._strangers)
        channel.server._stale_s = 0.5
        idle.append(socket.create_connection(channel.address))
        assert is_ended(idle[-1])
    finally:
        for one in idle:
            one.close()


def test_who_took_over_the_port_is_not_believed() -> None:
    """Rank 0 is gone and another process has its port: a member tells it nothing but its rank, and gives it up."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        impostor.settimeout(LIMIT_S)
        heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        mailbox = StepMailbox(memoryview(bytearray(MAILBOX_BYTES)))
        mailbox.clear(step=0)
        member = ControlMember(
            rank=1,
            addresses=[impostor.getsockname()[:2]],
            token=TOKEN,
            mailbox=mailbox,
            hear=heard.put,
            again=list,
            stopped=lambda: False,
            hold=lambda fd: False,
            beat_s=0.05,
            stale_s=1.0,
        )
        seen = b""
        while heard.empty():
            impostor.settimeout(0.2)
            try:
                sock, _ = impostor.accept()
            except TimeoutError:
                continue
            with sock:
                sock.settimeout(LIMIT_S)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has given up meanwhile
                    sock.sendall(make_challenge())
                    _read(sock, ANSWER_BYTES)
                    sock.sendall(bytes(PROOF_BYTES))
                    seen += _read(sock, 1)
        assert heard.get()["do"] == "lost"
        assert (seen, mailbox.broken) == (b"", True)
        member.close("done")


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
        mailbox = StepMailbox(memoryview(bytearray(MAILBOX_BYTES)))
        mailbox.clear(step=0)
        member = ControlMember(
            rank=1,
            addresses=[deaf.getsockname()[:2]],
            token=TOKEN,
            mailbox=mailbox,
            hear=heard.put,
            again=list,
            stopped=lambda: False,
            hold=lambda fd: False,
            beat_s=0.05,
            stale_s=0.3,
        )
        told = heard.get(timeout=LIMIT_S)
        assert told["do"] == "lost"
        assert "no sign of life for 0.3 s" in told["why"]
        assert mailbox.broken
        member.close("done")


def test_a_silent_member_is_given_up() -> None:
    """No sign of life for too long: its saves fail, with its number."""
    channel = Channel(2, num_members=1, stale_s=1.0)
    dumb = Link(shake_hands(channel.address, 1))
    standing = {"done": 0, "acted": -1, "target": None, "armed": False, "kind": "save"}
    dumb.send({"do": "hello", "standing": standing})
    try:
        channel.members[0].say({"do": "begun", "save": "s-1", "directory": "d", "step": 1})
        while (told := channel.outcome(0))["do"] != "outcome":
            continue
        assert "rank 1: its writer process gives no sign of life for 1 s" in told["error"]["message"]
    finally:
        channel.close()
        dumb.close()


@pytest.mark.parametrize("reset", [False, True])
def test_the_end_of_a_connection_that_two_processes_hold_is_the_end_of_the_rank(reset: bool) -> None:
    """As long as trainer or writer has it open nobody is missing; after that nobody waits for a time to pass."""
    channel = Channel(2, num_members=1, stale_s=3000.0)
    sock = shake_hands(channel.address, 1)
    if reset:  # as of a process that is killed before it has read everything
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer = Link(sock)
    trainer = sock.dup()
    standing = {"done": 0, "acted": -1, "target": None, "armed": False, "kind": "save"}
    writer.send({"do": "hello", "standing": standing})
    writer.send({"do": "held"})
    try:
        channel.members[0].say({"do": "begun", "save": "s-1", "directory": "d", "step": 1})
        until(lambda: channel.server._members[1].held)
        writer.close()
        channel.members[0].say({"do": "ask", "about": "save 1"})  # answered behind whatever comes first
        assert channel.outcome(0)["do"] == "verdict"
        trainer.close()
        told = channel.outcome(0)
        assert "rank 1: its writer process has died" in told["error"]["message"]
    finally:
        channel.close()


@pytest.mark.parametrize("reset", [False, True])
def test_last_words_are_heard_though_nothing_can_be_sent_any_more(reset: bool) -> None:
    """A rank says why it leaves and is gone before the server, busy with others, has read it: the others hear why."""
    channel = Channel(2, num_members=1, stale_s=3000.0)
    busy, on = threading.Event(), threading.Event()
    try:
        sock = shake_hands(channel.address, 1)
        leaver = Link(sock)
        standing = {"done": 0, "acted": -1, "target": None, "armed": False, "kind": "save"}
        leaver.send({"do": "hello", "standing": standing})
        leaver.send({"do": "held"})
        until(lambda: channel.server._members[1].held)

        def send_to_the_dead() -> None:
            busy.set()
            on.wait(LIMIT_S)
            for _ in range(100):  # the first only makes the other side say that nobody is there
                channel.server._send_all({"do": "beat"})
                time.sleep(0.001)

        channel.server._calls.put(send_to_the_dead)
        assert busy.wait(LIMIT_S)
        leaver.send({"do": "left", "why": "ValueError: boom", "offers": False})
        leaver.send({"do": "bye", "why": "ValueError: boom"})
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        leaver.close()
        on.set()
        assert channel.outcome(0) == {"do": "broken", "why": "rank 1: ValueError: boom"}
    finally:
        on.set()
        channel.close()


def test_a_rank_that_leaves_as_rank_0s_writer_is_killed_is_known_to_have_left() -> None:
    """It was said to a writer that never read it: the new one hears it again, and the others stop before the rescue."""
    channel = Channel(2, num_members=1)
    answers: Any = SimpleNamespace(hold=lambda fd: False)
    joint = Joint(answers)
    header = {"rank": 1, "world_size": 2, "timeout_s": LIMIT_S, "pid": os.getpid(), "token": TOKEN}
    joint.join({**header, "addresses": [channel.address], **channel.times}, (), memoryview(bytearray(MAILBOX_BYTES)))
    until(lambda: channel.server.steps.gathered)
    server, (busy, die, said, over) = channel.server, (threading.Event() for _ in range(4))

    def is_killed() -> None:
        busy.set()
        die.wait(LIMIT_S)
        server._talk = server._farewell = lambda _: None  # a death hears and says nothing
        server._ending = "killed"

    def rescue() -> None:
        said.set()
        over.wait(LIMIT_S)

    leaving = threading.Thread(target=lambda: joint.finish("ValueError: boom", dead=False, rescue=rescue))
    try:
        server._calls.put(is_killed)
        assert busy.wait(LIMIT_S)
        leaving.start()
        assert said.wait(LIMIT_S)
        member: Any = joint._member
        until(member._outbox.empty)
        die.set()
        server._thread.join(LIMIT_S)
        channel.server = channel.start_server()
        assert channel.outcome(0) == {"do": "broken", "why": "rank 1: ValueError: boom"}
    finally:
        for event in (die, over):
            event.set()
        leaving.join(LIMIT_S)
        channel.close()


def test_who_was_cut_off_when_a_rank_left_hears_of_it_when_it_joins_again() -> None:
    """It could not be told then: it, too, stops, and does not train on to its next save."""
    channel = Channel(3, num_members=2)
    try:
        channel.members[1].say({"do": "left", "why": "ValueError: boom", "offers": True})
        until(lambda: channel.mailboxes[0].broken)
        channel.members.append(channel.start_member(2))
        assert channel.outcome(2) == {"do": "broken", "why": "rank 1: ValueError: boom"}
        until(lambda: channel.mailboxes[2].broken)
    finally:
        channel.close()


@pytest.mark.parametrize("when", ["with a beat", "with an answer"])
def test_last_words_of_rank_0_are_heard_though_it_cannot_be_answered_any_more(when: str) -> None:
    """Rank 0's writer says how saves ended and why it leaves, and is gone before a member is done with a send."""
    gone, heard = threading.Event(), queue.SimpleQueue[dict[str, Any]]()
    mailbox = StepMailbox(memoryview(bytearray(MAILBOX_BYTES)))
    mailbox.clear(step=0)

    def hear(message: dict[str, Any]) -> None:
        heard.put(message)
        assert gone.wait(LIMIT_S)

    def stopped() -> bool:  # asked for each beat
        assert when == "with an answer" or gone.wait(LIMIT_S)
        return False

    outcomes = [{"do": "outcome", "save": f"s-{n}", "error": None, "value": None, "discard": False} for n in (1, 2)]
    words = [
        outcomes[0],
        {"do": "propose", "step": 5, "kind": "save"},  # which is answered
        outcomes[1],
        {"do": "broken", "why": "rank 2: ValueError: boom"},
        {"do": "bye", "why": "rank 0 has left"},
    ]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        member = ControlMember(
            rank=1,
            addresses=[listener.getsockname()[:2]],
            token=TOKEN,
            mailbox=mailbox,
            hear=hear,
            again=list,
            stopped=stopped,
            hold=lambda fd: False,
            stale_s=3000.0,
        )
        server, _ = listener.accept()
        server.settimeout(LIMIT_S)
        challenge = make_challenge()
        server.sendall(challenge)
        server.sendall(make_proof(TOKEN, challenge, _read(server, ANSWER_BYTES)))
        assert _read(server, 4)  # of its hello
        server.sendall(b"".join(encode(word) for word in words))
        if when == "with an answer":
            assert heard.get(timeout=LIMIT_S) == outcomes.pop(0)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        server.close()
    gone.set()
    for word in (*outcomes, words[3], {"do": "lost", "why": "rank 0 has left"}):
        assert heard.get(timeout=LIMIT_S) == word
    assert mailbox.broken
    member.close("done")


def test_a_connection_that_was_reset_under_way_is_made_anew() -> None:
    """It ended for both sides although both live: who comes back at once is not given up."""
    channel = Channel(2, stale_s=3000.0)
    channel.members[1]._hold = lambda fd: True
    try:
        for turn in range(3):
            until(lambda: all(one.link is not None for one in channel.server._members))
            channel.members[1]._link._sock.shutdown(socket.SHUT_RDWR)
            channel.again[1] = [
                {"do": "begun", "save": f"s-{turn}", "directory": "d", "step": 1},
                {"do": "stored", "save": f"s-{turn}"},
            ]
            for message in channel.again[1]:
                channel.members[0].say(message)
            assert channel.commits.get(timeout=LIMIT_S) == f"s-{turn}"
            channel.server.committed(f"s-{turn}", value={})
            while channel.outcome(0)["save"] != f"s-{turn}":
                continue
        assert not any(member.gone for member in channel.server._members)
    finally:
        channel.close()


def test_a_job_that_was_suspended_goes_on(channel: Channel) -> None:
    """The system had stopped rank 0's writer, as `scontrol suspend` does: silence in that time is nobody's fault."""
    server = channel.server
    until(lambda: all(member.link is not None for member in server._members))

    def wake() -> None:
        server._watched -= 60
        server._next_beat = 0.0  # so that it looks at once for who is silent
        for member in server._members:
            member.heard -= 60

    server._calls.put(wake)
    channel.save("s-1")
    assert channel.commits.get(timeout=LIMIT_S) == "s-1"
    assert not any(member.gone for member in server._members)


def test_a_member_that_was_suspended_goes_on(monkeypatch: pytest.MonkeyPatch, channel: Channel) -> None:
    """For it as for the server: silence while it was stopped itself is nobody's fault."""
    until(lambda: all(link is not None for link in [member.link for member in channel.server._members]))
    gone_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + gone_s, sleep=time.sleep)
    monkeypatch.setattr(member_module, "time", clock)
    quiet = threading.Event()

    def be_quiet() -> None:  # else a beat may come right then, as a sign of life
        channel.server._next_beat = time.monotonic() + LIMIT_S
        quiet.set()

    channel.server._calls.put(be_quiet)
    assert quiet.wait(LIMIT_S)
    beats = [member._heard for member in channel.members]
    gone_s = 60.0
    until(lambda: all(member._heard > before + 30 for member, before in zip(channel.members, beats, strict=True)))
    works(channel, "s-1")
    assert not any(member.lost for member in channel.members)


def test_a_member_that_was_suspended_right_after_its_hello_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it has looked once for silence, that time is nobody's fault either."""
    gone_s, send = 0.0, Link.send

    def then_stop(link: Link, message: dict[str, Any]) -> bool:
        nonlocal gone_s
        sent = send(link, message)
        gone_s += 60.0 * (message["do"] == "hello")
        return sent

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + gone_s, sleep=time.sleep)
    monkeypatch.setattr(member_module, "time", clock)
    monkeypatch.setattr(Link, "send", then_stop)
    channel = Channel(1)
    try:
        works(channel, "s-1")
        assert not channel.members[0].lost
    finally:
        channel.close()


@pytest.mark.parametrize("error", [ConnectionRefusedError, TimeoutError])
def test_a_member_that_was_suspended_while_it_searched_goes_on(
    monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    """Rank 0's writer could not be reached, and then time passed that was nobody's: it is searched for again."""
    gone_s, connect = 0.0, socket.create_connection

    def stop_once(*arguments: Any, **options: Any) -> socket.socket:
        nonlocal gone_s
        if not gone_s:
            gone_s = 60.0
            raise error
        return connect(*arguments, **options)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + gone_s, sleep=time.sleep)
    monkeypatch.setattr(member_module, "time", clock)
    monkeypatch.setattr(socket, "create_connection", stop_once)
    channel = Channel(1)
    try:
        until(lambda: channel.server._members[0].link is not None or channel.members[0].lost)
        works(channel, "s-1")
        assert not channel.members[0].lost
    finally:
        channel.close()


def test_a_step_that_is_done_by_now_is_not_agreed_on() -> None:
    """The server did not know that the trainer was there already: another step is proposed, which it comes to."""
    channel = Channel(1, beat_s=1000.0, stale_s=3000.0)
    until(lambda: channel.server.steps.gathered)
    mailbox = channel.mailboxes[0]
    assert not mailbox.calls(2)
    channel.members[0].say({"do": "want", "kind": "save"})
    until(lambda: mailbox.armed)
    assert mailbox.target > 2
    assert not mailbox.calls(2)
    assert mailbox.calls(mailbox.target)
    channel.close()


def test_an_address_where_nobody_listens_is_given_up_soon() -> None:
    """Rank 0 is gone, trainer and writer: nobody waits as long for it as for a network that does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()[:2]
    heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    mailbox = StepMailbox(memoryview(bytearray(MAILBOX_BYTES)))
    mailbox.clear(step=0)
    member = ControlMember(
        rank=1,
        addresses=[address],
        token=TOKEN,
        mailbox=mailbox,
        hear=heard.put,
        again=list,
        stopped=lambda: False,
        hold=lambda fd: False,
        beat_s=0.05,
        stale_s=3.0,
    )
    assert "cannot be reached" in heard.get(timeout=LIMIT_S)["why"]
    member.close("done")


def test_a_member_that_leaves_as_its_connection_breaks_ends(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not look for rank 0's writer as long as for one that is to come back: its end is known by then."""
    until(lambda: channel.server.steps.gathered)
    send = Link.send

    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("no route")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    monkeypatch.setattr(Link, "send", lambda self, message: message["do"] != "bye" and send(self, message))
    leaving = threading.Thread(target=channel.members[2].close, args=("done", LIMIT_S))
    begun = time.monotonic()
    leaving.start()
    leaving.join(LIMIT_S)
    assert time.monotonic() - begun < channel.times["stale_s"] / 2


@pytest.fixture
def small_client() -> Iterator[WriterClient]:
    """A writer process that was started under a soft limit of fewer files than there are ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3 * MANY:
        pytest.skip(f"the hard limit of open files is {hard}")
    small = len(os.listdir("/proc/self/fd")) + 64
    assert small < MANY
    resource.setrlimit(resource.RLIMIT_NOFILE, (small, hard))
    try:
        client = WriterClient.start(thread=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with client:
        yield client


def test_all_ranks_join_where_the_soft_limit_is_smaller_than_their_number(small_client: WriterClient) -> None:
    """The writer raises its own: nobody waits at the door of rank 0."""
    with socket.create_server(("127.0.0.1", 0), backlog=MANY) as listener:
        arena = Arena.create(MAILBOX_BYTES)
        StepMailbox(arena.view).clear(step=0)
        address = listener.getsockname()[:2]
        small_client.join(
            arena,
            rank=0,
            world_size=MANY,
            addresses=[address],
            token=TOKEN,
            timeout_s=LIMIT_S,
            listener=listener.fileno(),
        )
        links = []
        try:
            for rank in range(1, MANY):
                links.append(shake_hands(address, rank))
        finally:
            small_client.close()
            for link in links:
                link.close()
            arena.close()


def test_every_word_that_the_server_understands_is_let_in() -> None:
    """The table of words and the handlers of the server name the same messages."""
    handlers = {name.removeprefix("_on_") for name in dir(ControlServer) if name.startswith("_on_")}
    assert handlers | {"hello"} == set(link._WORDS)


def test_a_server_that_ends_every_connection_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 refuses what a rank says, as one of another version does: the rank does not come again for ever."""

    def refuse(message: dict[str, Any]) -> None:
        if message["do"] != "hello":
            raise HoldfastError("never heard of that")

    monkeypatch.setattr("holdfast.writer.ranks.server.check_word", refuse)
    channel = Channel(2, beat_s=0.1, stale_s=1.0)
    try:
        until(lambda: channel.members[1].lost is not None)
        # Both sides give up after the same time; whichever is first says why.
        lost = str(channel.members[1].lost)
        assert "ended every connection" in lost or "makes no sense (never heard of that)" in lost
        assert "same version of holdfast" in lost
    finally:
        channel.close()
