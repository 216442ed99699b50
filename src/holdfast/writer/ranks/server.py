"""Rank 0's end of the control channel: one thread, one selector, a connection to the writer of every rank."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from holdfast._log import get_logger

from ..frames import encode
from . import agreement
from .link import ANSWER_BYTES, Inbox, Link, Message, check_word, make_challenge, make_proof, read_answer

_LOG = get_logger("writer.control")
BEAT_S = 5.0
STALE_S = 30.0
ENDED_S = 0.75  # for whoever may come back although its end has been seen (a router that resets connections)
_FLUSH_S = 5.0
_HELLO_S = 10.0
_MORE_STRANGERS = 64  # beside a connection for each rank
_ACCEPTS = 64  # of one turn
_PAUSE_S = 0.2
_NONSENSE = "what its writer process says makes no sense ({}): do all nodes run the same version of holdfast?"


class _Member:
    """What the server knows of one rank."""

    def __init__(self, now: float) -> None:
        self.link: Link | None = None
        self.heard = now
        self.held = False  # by its trainer too: a writer that is started again does not end the connection
        self.gone: str | None = None  # why nothing more is expected of it
        self.nonsense: str | None = None  # what was wrong with its last message, if anything was


@dataclass(slots=True)
class _Stranger:
    """A connection that has not proved yet to belong to the run."""

    until: float
    challenge: bytes


class ControlServer:
    """Carries events of all ranks to `JointSaves` and `StepAgreement`, and their answers back.

    Args:
        listener: bound and listening socket; ours from now on.
        token: what a member has to know (`hello`).
        world_size: number of ranks.
        timeout_s: bound of one save.
        commit: called, on the server's thread, with the id of a save to be committed; must not block.
        newest: returns the newest step that is committed, -1 for none.
        beat_s: seconds between signs of life.
        stale_s: silence after which a rank counts as lost.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        token: str,
        world_size: int,
        timeout_s: float,
        commit: Callable[[str], None],
        newest: Callable[[], int],
        beat_s: float = BEAT_S,
        stale_s: float = STALE_S,
    ) -> None:
        self._listener, self._token, self._world_size, self._commit = listener, token, world_size, commit
        self._newest = newest
        self._beat_s, self._stale_s = beat_s, stale_s
        # A writer that was killed is started again, and joins again, long before this.
        self._rejoin_s = min(stale_s, STALE_S) / 3
        self._ended_s = min(ENDED_S, self._rejoin_s)
        self.saves = agreement.JointSaves(world_size, timeout_s=timeout_s)
        self.steps = agreement.StepAgreement(world_size)
        self.uploads = agreement.JointUploads(world_size)
        self.rescue = agreement.RescueAgreement(world_size)
        self._parts: dict[str, dict[int, Message]] = {}  # of staged saves, until they have ended
        now = time.monotonic()
        self._members = [_Member(now) for _ in range(world_size)]
        # Ranks whose connection broke: when they have to have joined again, and what it means if they have not.
        self._back_by: dict[int, tuple[float, str]] = {}
        self._early: list[tuple[int, str]] = []  # questions of before all ranks had joined
        self._broken: Message | None = None  # which rank is gone first, and why
        self._strangers: dict[Link, _Stranger] = {}  # the oldest first
        self._ranks: dict[Link, int] = {}
        self._selector = selectors.DefaultSelector()
        self._calls: Inbox[Callable[[], None]] = Inbox()
        self._ending: str | None = None
        self._next_beat = now + beat_s
        self._watched = now
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._calls, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="holdfast-control", daemon=True)
        self._thread.start()

    # -- from other threads

    def committed(self, save: str, *, value: dict[str, Any] | None = None, error: dict[str, Any] | None = None) -> None:
        """Tell how a commit ended."""
        self._calls.put(lambda: self._act(self.saves.committed(save, value=value, error=error)))

    def tell(self, message: Message) -> None:
        """Send a message to all ranks that are there."""
        self._calls.put(lambda: self._send_all(message))

    def parts(self, save: str) -> list[Message]:
        """Return the parts of a staged save that is to be committed, as the ranks have described them, by rank."""
        return [part for _, part in sorted(self._parts.get(save, {}).items())]

    def close(self, why: str) -> None:
        """Say farewell, send what is still to be sent, and end; idempotent."""

        def end() -> None:
            self._ending = why

        self._calls.put(end)
        self._thread.join(_FLUSH_S + 5.0)

    # -- the thread

    def _serve(self) -> None:
        try:
            while self._ending is None:
                self._turn()
            self._farewell(self._ending)
        except Exception as error:  # noqa: BLE001 - a thread edge: no save may wait for an answer that never comes
            _LOG.exception("the control channel has failed")
            with contextlib.suppress(OSError):
                self._farewell(f"the control channel has failed in rank 0's writer, whose log says more: {error!r}")
        finally:
            for link in [*self._ranks, *self._strangers]:
                link.close()
            self._listener.close()
            self._calls.close()
            self._selector.close()

    def _turn(self) -> None:
        now = time.monotonic()
        due = [self._next_beat, *([] if self.saves.deadline is None else [self.saves.deadline])]
        due += [back_by for back_by, _ in self._back_by.values()]
        due += [stranger.until for stranger in islice(self._strangers.values(), 1)]
        for key, _ in self._selector.select(max(0.0, min(due) - now)):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._calls:
                for call in self._calls.take():
                    call()
            else:
                self._talk(key.fileobj)  # type: ignore[arg-type]
        self._watch(time.monotonic())

    def _watch(self, now: float) -> None:
        slept, self._watched = now - self._watched, now
        if slept > max(self._stale_s / 2, 2 * self._beat_s):
            for member in self._members:  # we were stopped ourselves, perhaps with all the others (a suspended job)
                member.heard = now
            self._back_by = {rank: (max(by, now + self._rejoin_s), why) for rank, (by, why) in self._back_by.items()}
        self._act(self.saves.expire(now))
        if not self.saves.busy and self.rescue.decide(self._newest()):
            self._send_all({"do": "rescue", "save": self.rescue.chosen})
        while self._strangers and now > (oldest := next(iter(self._strangers.items())))[1].until:
            self._drop(oldest[0])
        for rank, why in [(rank, why) for rank, (back_by, why) in self._back_by.items() if now >= back_by]:
            nonsense = self._members[rank].nonsense
            self._lose(rank, why if nonsense is None else _NONSENSE.format(nonsense))
        if now < self._next_beat:
            return
        self._next_beat = now + self._beat_s
        self._send_all({"do": "beat"})
        for rank, member in enumerate(self._members):
            if member.gone is None and member.link is not None and now - member.heard > self._stale_s:
                self._lose(rank, self._silence)

    @property
    def _silence(self) -> str:
        return f"its writer process gives no sign of life for {self._stale_s:g} s"

    def _lose(self, rank: int, why: str) -> None:
        _LOG.warning("rank %d: %s", rank, why)
        self._members[rank].gone = why
        self._back_by.pop(rank, None)
        self.uploads.gone(rank, why)
        self._act(self.saves.lost(rank, why))
        self._give_up_rescue(rank, why)
        self._break(rank, why)

    def _break(self, rank: int, why: str) -> None:
        self._broken = self._broken or {"do": "broken", "why": f"rank {rank}: {why}"}
        self._post([(to, self._broken if one["do"] == "broken" else one) for to, one in self.steps.broken()])

    # -- connections

    def _accept(self) -> None:
        try:
            for _ in range(_ACCEPTS):
                sock, _ = self._listener.accept()
                self._challenge(sock)
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # out of descriptors: those who wait are accepted later
            _LOG.warning("a writer could not connect: %s", error)
            time.sleep(_PAUSE_S)  # it is asked again at once

    def _challenge(self, sock: socket.socket) -> None:
        # A member answers within a round trip; whoever holds connections open without an answer loses the oldest.
        if len(self._strangers) >= self._world_size + _MORE_STRANGERS:
            self._drop(next(iter(self._strangers)))
        try:
            link = Link(sock, unanswered_s=self._stale_s / 2)
        except OSError:  # it is gone already
            sock.close()
            return
        stranger = _Stranger(time.monotonic() + min(_HELLO_S, self._stale_s), make_challenge())
        self._strangers[link] = stranger
        self._selector.register(link, selectors.EVENT_READ)
        if not link.send_raw(stranger.challenge):
            self._drop(link)

    def _talk(self, link: Link) -> None:
        """Hear one connection; whatever is wrong with what it says ends this connection and nothing else."""
        if link not in self._ranks and link not in self._strangers:
            return  # dropped in this turn
        messages: list[Message] | None = []
        try:
            fine = link.flush() or link.hung_up  # who is gone may have said something before
            if fine and link in self._strangers:
                fine = self._greet(link)
            elif fine:
                messages = link.receive()
                for message in messages or ():
                    check_word(message)
        except Exception as error:  # noqa: BLE001 - the edge of a connection: the others go on
            self._blame(link, str(error))
            fine = False
        # What goes wrong from here on is our own mistake, which no new connection mends: see `_serve`.
        if fine and messages is not None and self._listen(link, messages):
            self._interest(link)
        else:
            self._drop(link)

    def _blame(self, link: Link, what: str) -> None:
        """Log what is wrong with a message, once for each rank that repeats it with every new connection."""
        rank = self._ranks.get(link)
        if rank is None or self._members[rank].nonsense != what:
            _LOG.warning("a message on the control channel makes no sense: %s", what)
        if rank is not None:
            self._members[rank].nonsense = what

    def _greet(self, link: Link) -> bool:
        """Take a stranger's answer to the challenge; False to turn it away."""
        challenge = self._strangers[link].challenge
        answer = link.receive_raw(ANSWER_BYTES)
        if not answer:
            return answer is not None
        rank = read_answer(self._token, challenge, answer)
        if rank is None or rank >= self._world_size:
            _LOG.warning("somebody without the token of this run has connected and is turned away")
            return False
        if not link.send_raw(make_proof(self._token, challenge, answer)):
            return False
        del self._strangers[link]
        self._ranks[link] = rank
        return True

    def _listen(self, link: Link, messages: list[Message]) -> bool:
        """Act on what a member has said; False if it says anything before it has joined."""
        if not messages:
            return True
        rank = self._ranks[link]
        joined = self._members[rank].link is link
        for message in messages:
            # Also of a rank that is gone, so that an answer cannot be sent: its last words say why it has left.
            self._members[rank].heard = time.monotonic()
            if joined:
                self._members[rank].nonsense = None
                getattr(self, f"_on_{message['do']}")(rank, message)
            elif message["do"] == "hello":
                joined = True
                self._join(link, rank, message)
            else:
                return False
        return True

    def _join(self, link: Link, rank: int, message: Message) -> None:
        """The first message of a member says what its trainer is at."""
        member = self._members[rank]
        if member.link is not None:
            self._drop(member.link)
        member.link, member.held = link, False
        self._back_by.pop(rank, None)
        if member.gone is not None:
            self._send(rank, {"do": "bye", "why": f"rank {rank} was given up: {member.gone}"})
            return
        self._send(rank, {"do": "welcome"})
        if (judged := message.get("judged")) is not None:
            self.saves.judged(rank, judged["about"], go=judged["go"])
        if (order := self.uploads.order) is not None:
            self._send(rank, order)
        self._post(self.steps.joined(rank, agreement.RankStanding(**message["standing"])))
        if self._broken is not None:  # it may have been cut off when the others were told
            self._send(rank, self._broken)
        if self.steps.gathered:
            early, self._early = self._early, []
            for asking, about in early:
                self._answer(asking, about)

    def _drop(self, link: Link) -> None:
        rank = self._ranks.pop(link, None)
        self._strangers.pop(link, None)
        try:
            self._selector.unregister(link)
        except KeyError:
            return
        link.close()
        if rank is not None and self._members[rank].link is link:
            member = self._members[rank]
            member.link = None
            if member.gone is None and link.unreachable:
                self._back_by[rank] = max(member.heard + self._stale_s, time.monotonic() + self._ended_s), self._silence
            elif member.gone is None:
                back_s = self._ended_s if link.hung_up and member.held else self._rejoin_s
                self._back_by[rank] = time.monotonic() + back_s, "its writer process has died"

    def _interest(self, link: Link) -> None:
        if link not in self._ranks and link not in self._strangers:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0)
        if self._selector.get_key(link).events != events:
            self._selector.modify(link, events)

    # -- messages of members

    def _on_beat(self, rank: int, message: Message) -> None:
        self.steps.at(rank, message["step"])
        self.saves.stopped(rank, on=message["stopped"])
        for said in self.saves.at(rank, message["step"]):
            _LOG.warning("%s", said)

    def _on_held(self, rank: int, message: Message) -> None:
        self._members[rank].held = True

    def _on_begun(self, rank: int, message: Message) -> None:
        self._act(self.saves.begun(rank, message["save"], message["directory"], message["step"], time.monotonic()))

    def _on_stored(self, rank: int, message: Message) -> None:
        if message.get("part") is not None:
            self._parts.setdefault(message["save"], {})[rank] = message["part"]
        if message["save"] == self.rescue.chosen:
            if self.rescue.stored(rank):
                self._commit(message["save"])
            return
        self._act(self.saves.stored(rank, message["save"]))

    def _on_failed(self, rank: int, message: Message) -> None:
        self._act(self.saves.failed(rank, message["save"], message["error"]))

    def _on_uploaded(self, rank: int, message: Message) -> None:
        self.uploads.uploaded(rank, message["save"], message["error"])

    def _on_heard(self, rank: int, message: Message) -> None:
        self._act(self.saves.heard(message["save"], value=message["value"], error=message["error"]))

    def _on_want(self, rank: int, message: Message) -> None:
        self._post(self.steps.want(message["kind"], rank))

    def _on_ack(self, rank: int, message: Message) -> None:
        self._post(self.steps.acknowledged(rank, message["step"]))

    def _on_nack(self, rank: int, message: Message) -> None:
        self._post(self.steps.passed(rank, message["step"], message["at"]))

    def _on_acted(self, rank: int, message: Message) -> None:
        self._post(self.steps.acted(rank, message["step"]))

    def _on_ask(self, rank: int, message: Message) -> None:
        if self.steps.gathered:
            self._answer(rank, message["about"])
        else:  # another rank may have had an answer from an earlier writer, and tell of it when it joins
            self._early.append((rank, message["about"]))

    def _answer(self, rank: int, about: str) -> None:
        now = self.steps.wants("stop") if about.startswith("stop") else not self.saves.busy
        self._act(self.saves.ask(rank, about, now=now))

    def _on_left(self, rank: int, message: Message) -> None:
        self._act(self.saves.left(rank, message["why"]))
        if not message["offers"]:
            self._give_up_rescue(rank, message["why"])
        # Also of a rank that has left in order: all ranks leave at the same step, and who goes on cannot save any more.
        self._break(rank, message["why"])

    def _on_bye(self, rank: int, message: Message) -> None:
        self._members[rank].gone = message["why"]
        self.uploads.gone(rank, message["why"])
        self._act(self.saves.lost(rank, message["why"]))
        self._give_up_rescue(rank, message["why"])

    def _on_offer(self, rank: int, message: Message) -> None:
        if self.rescue.chosen is not None:
            self._send(rank, {"do": "rescue", "save": self.rescue.chosen})
        else:  # decided in `_watch`, when no save is under way
            self.rescue.offered(rank, message["held"])

    def _give_up_rescue(self, rank: int, why: str) -> None:
        """Rescue nothing: a rank has nothing to offer, or brings no part of what was chosen."""
        if self.rescue.refuse():
            self._send_all({"do": "rescue", "save": ""})
        elif self.rescue.needs(rank) and self.rescue.chosen is not None:
            self._act(self.saves.failed(rank, self.rescue.chosen, agreement.named_error("HoldfastError", why)))

    # -- answers

    def _act(self, actions: Iterable[agreement.CommitSave | agreement.SaveOutcome | agreement.SaveVerdict]) -> None:
        for action in actions:
            if isinstance(action, agreement.CommitSave):
                self._commit(action.save)
            elif isinstance(action, agreement.SaveVerdict):
                self._send(action.rank, {"do": "verdict", "about": action.about, "go": action.go})
            else:
                self._parts.pop(action.save, None)
                message: Message = {"do": "outcome", "save": action.save, "error": action.error}
                message |= {"value": action.value, "discard": action.discard}
                self._send_all(message, action.ranks)
                if action.error is not None and action.ranks is None:
                    # Ranks hear of it at different times; so that they raise it at the same step, they agree on one.
                    self._post(self.steps.want("settle"))

    def _post(self, messages: Iterable[tuple[int | None, Message]]) -> None:
        for rank, message in messages:
            self._send_all(message, None if rank is None else (rank,))

    def _send_all(self, message: Message, ranks: tuple[int, ...] | None = None) -> None:
        data = encode(message)
        for rank in range(self._world_size) if ranks is None else ranks:
            self._send_raw(rank, data)

    def _send(self, rank: int, message: Message) -> None:
        self._send_raw(rank, encode(message))

    def _send_raw(self, rank: int, data: bytes) -> None:
        link = self._members[rank].link
        if link is None:
            return  # it hears what matters when it joins again
        if link.send_raw(data) or link.hung_up:  # dropped in `_talk`, once it has been read to its end
            self._interest(link)
        else:
            self._drop(link)

    def _farewell(self, why: str) -> None:
        self._send_all({"do": "bye", "why": why})
        until = time.monotonic() + _FLUSH_S
        while any(link.unsent for link in self._ranks) and time.monotonic() < until:
            self._selector.select(0.1)
            for link in list(self._ranks):
                if not link.flush():
                    self._drop(link)
