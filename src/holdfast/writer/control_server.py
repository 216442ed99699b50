"""Rank 0's end of the control channel: one thread, one selector, a connection to the writer of every rank."""

from __future__ import annotations

import hmac
import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from holdfast.errors import HoldfastError

from .control_link import MAX_MESSAGE, Link, Message
from .control_saves import Commit, JointSaves, Outcome, Verdict
from .control_steps import Standing, StepAgreement
from .control_uploads import Uploads

__all__ = ["BEAT_S", "STALE_S", "ControlServer"]

_LOG = logging.getLogger("holdfast.writer.control")
BEAT_S = 5.0
STALE_S = 30.0
_HELLO_BYTES = 64 << 10
_FLUSH_S = 5.0
_PAUSE_S = 0.2


class _Member:
    """What the server knows of one rank."""

    def __init__(self, now: float) -> None:
        self.link: Link | None = None
        self.heard = now
        self.cut: float | None = None  # when its connection broke
        self.gone: str | None = None  # why nothing more is expected of it


class ControlServer:
    """Carries events of all ranks to `JointSaves` and `StepAgreement`, and their answers back.

    Args:
        listener: bound and listening socket; ours from now on.
        token: what a member has to show.
        world_size: number of ranks.
        timeout_s: bound of one save.
        commit: called, on the server's thread, with the id of a save to be committed; must not block.
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
        beat_s: float = BEAT_S,
        stale_s: float = STALE_S,
    ) -> None:
        self._listener, self._token, self._world_size, self._commit = listener, token, world_size, commit
        self._beat_s, self._stale_s = beat_s, stale_s
        self._rejoin_s = stale_s / 3  # a writer that was killed is started again, and joins again, long before this
        self.saves = JointSaves(world_size, timeout_s=timeout_s)
        self.steps = StepAgreement(world_size)
        self.uploads = Uploads(world_size)
        self._parts: dict[str, dict[int, Message]] = {}  # of staged saves, until they have ended
        now = time.monotonic()
        self._members = [_Member(now) for _ in range(world_size)]
        self._early: list[tuple[int, str]] = []  # questions of before all ranks had joined
        self._strangers: dict[Link, float] = {}
        self._ranks: dict[Link, int] = {}
        self._selector = selectors.DefaultSelector()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._ending: str | None = None
        self._next_beat = now + beat_s
        self._watched = now
        listener.setblocking(False)
        for one in (self._wake, self._woken):
            one.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="holdfast-control", daemon=True)
        self._thread.start()

    # -- from other threads

    def committed(self, save: str, *, value: dict[str, Any] | None = None, error: dict[str, Any] | None = None) -> None:
        """Tell how a commit ended."""
        self._soon(lambda: self._act(self.saves.committed(save, value=value, error=error)))

    def tell(self, message: Message) -> None:
        """Send a message to all ranks that are there."""
        self._soon(lambda: self._send_all(message))

    def parts(self, save: str) -> list[Message]:
        """Return what all ranks have told of their parts of a staged save that is to be committed, by rank."""
        return [part for _, part in sorted(self._parts.get(save, {}).items())]

    def close(self, why: str) -> None:
        """Say farewell, send what is still to be sent, and end; idempotent."""

        def end() -> None:
            self._ending = why

        self._soon(end)
        self._thread.join(_FLUSH_S + 5.0)

    def _soon(self, call: Callable[[], None]) -> None:
        self._calls.put(call)
        try:
            self._wake.send(b"x")
        except (BlockingIOError, OSError):
            return  # it is awake, or at its end

    # -- the thread

    def _serve(self) -> None:
        try:
            while self._ending is None:
                self._turn()
            self._farewell(self._ending)
        except Exception:  # noqa: BLE001 - a thread edge: members notice the silence
            _LOG.exception("the control channel has failed")
        finally:
            for link in [*self._ranks, *self._strangers]:
                link.close()
            for one in (self._listener, self._wake, self._woken):
                one.close()
            self._selector.close()

    def _turn(self) -> None:
        now = time.monotonic()
        due = [self._next_beat, *([] if self.saves.deadline is None else [self.saves.deadline])]
        due += [
            member.cut + self._rejoin_s for member in self._members if member.cut is not None and member.gone is None
        ]
        for key, _ in self._selector.select(max(0.0, min(due) - now)):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._woken:
                self._drain()
            else:
                self._talk(key.fileobj)  # type: ignore[arg-type]
        self._watch(time.monotonic())

    def _drain(self) -> None:
        try:
            while self._woken.recv(4096):
                pass
        except (BlockingIOError, InterruptedError):
            pass
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            call()

    def _watch(self, now: float) -> None:
        slept, self._watched = now - self._watched, now
        if slept > max(self._stale_s / 2, 2 * self._beat_s):
            for member in self._members:  # we were stopped ourselves, perhaps with all the others (a suspended job)
                member.heard = now
                member.cut = None if member.cut is None else now
        self._act(self.saves.expire(now))
        if now < self._next_beat and not any(member.cut is not None for member in self._members):
            return
        if now >= self._next_beat:
            self._next_beat = now + self._beat_s
            self._send_all({"do": "beat"})
            for link, since in list(self._strangers.items()):
                if now - since > self._stale_s:
                    self._drop(link)
        for rank, member in enumerate(self._members):
            if member.gone is not None:
                continue
            if member.cut is not None and now - member.cut >= self._rejoin_s:
                self._lose(rank, "its writer process has died")
            elif member.link is not None and now - member.heard > self._stale_s:
                self._lose(rank, f"its writer process gives no sign of life for {self._stale_s:g} s")

    def _lose(self, rank: int, why: str) -> None:
        _LOG.warning("rank %d: %s", rank, why)
        self._members[rank].gone = why
        self.uploads.gone(rank, why)
        self._act(self.saves.lost(rank, why))
        self._break(rank, why)

    def _break(self, rank: int, why: str) -> None:
        named = {"why": f"rank {rank}: {why}"}
        self._post([(to, {**one, **named} if one["do"] == "broken" else one) for to, one in self.steps.broken()])

    # -- connections

    def _accept(self) -> None:
        try:
            while True:
                sock, _ = self._listener.accept()
                link = Link(sock, max_message=_HELLO_BYTES)
                self._strangers[link] = time.monotonic()
                self._selector.register(link, selectors.EVENT_READ)
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # out of descriptors: those who wait are accepted later
            _LOG.warning("a writer could not connect: %s", error)
            time.sleep(_PAUSE_S)  # it is asked again at once

    def _talk(self, link: Link) -> None:
        if link not in self._ranks and link not in self._strangers:
            return  # dropped in this turn
        if not link.flush():
            self._drop(link)
            return
        try:
            messages = link.receive()
        except HoldfastError as error:
            _LOG.warning("%s", error)
            messages = None
        if messages is None:
            self._drop(link)
            return
        rank = None
        for message in messages:
            # Also of one that is gone, so that an answer could not be sent: its last words say why it has left.
            rank = self._ranks.get(link, rank)
            if rank is None and link not in self._strangers:
                return
            try:
                if rank is not None:
                    self._members[rank].heard = time.monotonic()
                    getattr(self, f"_on_{message['do']}")(rank, message)
                elif not self._hello(link, message):
                    self._drop(link)
                    return
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                _LOG.warning("a message on the control channel makes no sense: %r", error)
                self._drop(link)
                return
        self._interest(link)

    def _hello(self, link: Link, message: Message) -> bool:
        if not hmac.compare_digest(str(message.get("token", "")).encode(), self._token.encode()):
            _LOG.warning("somebody without the token of this run has connected and is turned away")
            return False
        rank = int(message["rank"])
        if message["do"] != "hello" or not 0 <= rank < self._world_size:
            return False
        member = self._members[rank]
        if member.link is not None:
            self._drop(member.link)
        del self._strangers[link]
        link.max_message = MAX_MESSAGE
        self._ranks[link] = rank
        member.link, member.cut, member.heard = link, None, time.monotonic()
        if member.gone is not None:
            self._send(rank, {"do": "bye", "why": f"rank {rank} was given up: {member.gone}"})
            return True
        self._send(rank, {"do": "welcome"})
        if (judged := message.get("judged")) is not None:
            self.saves.judged(rank, judged["about"], go=judged["go"])
        if (order := self.uploads.order) is not None:
            self._send(rank, order)
        self._post(self.steps.joined(rank, Standing(**message["standing"])))
        if self.steps.gathered:
            early, self._early = self._early, []
            for asking, about in early:
                self._answer(asking, about)
        return True

    def _drop(self, link: Link) -> None:
        rank = self._ranks.pop(link, None)
        self._strangers.pop(link, None)
        try:
            self._selector.unregister(link)
        except KeyError:
            return
        link.close()
        if rank is not None and self._members[rank].link is link:
            self._members[rank].link = None
            if self._members[rank].gone is None:
                self._members[rank].cut = time.monotonic()

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

    def _on_begun(self, rank: int, message: Message) -> None:
        self._act(self.saves.begun(rank, message["save"], message["directory"], message["step"], time.monotonic()))

    def _on_stored(self, rank: int, message: Message) -> None:
        if message.get("part") is not None:
            self._parts.setdefault(message["save"], {})[rank] = message["part"]
        self._act(self.saves.stored(rank, message["save"]))

    def _on_failed(self, rank: int, message: Message) -> None:
        self._act(self.saves.failed(rank, message["save"], message["error"]))

    def _on_uploaded(self, rank: int, message: Message) -> None:
        self.uploads.uploaded(rank, message["save"], message["error"])

    def _on_heard(self, rank: int, message: Message) -> None:
        self._act(self.saves.heard(message["save"], value=message["value"], error=message["error"]))

    def _on_want(self, rank: int, message: Message) -> None:
        self._post(self.steps.want(message["kind"]))

    def _on_ack(self, rank: int, message: Message) -> None:
        self._post(self.steps.acknowledged(rank, message["step"]))

    def _on_nack(self, rank: int, message: Message) -> None:
        self._post(self.steps.passed(rank, message["step"], message["at"]))

    def _on_acted(self, rank: int, message: Message) -> None:
        self._post(self.steps.acted(rank, message["step"]))

    def _on_ask(self, rank: int, message: Message) -> None:
        if self.steps.gathered:
            self._answer(rank, message["about"])
        else:  # another rank may have had an answer from the writer before this one, and tell of it when it joins
            self._early.append((rank, message["about"]))

    def _answer(self, rank: int, about: str) -> None:
        now = self.steps.wants("stop") if about.startswith("stop") else not self.saves.busy
        self._act(self.saves.ask(rank, about, now=now))

    def _on_left(self, rank: int, message: Message) -> None:
        self._act(self.saves.left(rank, message["why"]))
        # Also of one that has left in order: all ranks leave at the same step, and who goes on cannot save any more.
        self._break(rank, message["why"])

    def _on_bye(self, rank: int, message: Message) -> None:
        self._members[rank].gone = message["why"]
        self.uploads.gone(rank, message["why"])
        self._act(self.saves.lost(rank, message["why"]))

    # -- answers

    def _act(self, actions: Iterable[Commit | Outcome | Verdict]) -> None:
        for action in actions:
            if isinstance(action, Commit):
                self._commit(action.save)
            elif isinstance(action, Verdict):
                self._send(action.rank, {"do": "verdict", "about": action.about, "go": action.go})
            else:
                self._parts.pop(action.save, None)
                told: Message = {"do": "outcome", "save": action.save, "error": action.error}
                told |= {"value": action.value, "discard": action.discard}
                self._send_all(told, action.ranks)
                if action.error is not None and action.ranks is None:
                    # Ranks hear of it at different times; so that they raise it at the same step, they agree on one.
                    self._post(self.steps.want("settle"))

    def _post(self, messages: Iterable[tuple[int | None, Message]]) -> None:
        for rank, message in messages:
            self._send_all(message, None if rank is None else (rank,))

    def _send_all(self, message: Message, ranks: tuple[int, ...] | None = None) -> None:
        for rank in range(self._world_size) if ranks is None else ranks:
            self._send(rank, message)

    def _send(self, rank: int, message: Message) -> None:
        link = self._members[rank].link
        if link is None:
            return  # it hears what matters when it joins again
        if link.send(message):
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
