"""A writer's end of the control channel: connects to rank 0, keeps its trainer's mailbox, passes other messages on."""

from __future__ import annotations

import hmac
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from holdfast._log import get_logger
from holdfast.errors import HoldfastError

from ..arena import NEVER, StepMailbox
from .link import CHALLENGE_BYTES, PROOF_BYTES, Inbox, Link, Message, make_answer, make_proof
from .server import BEAT_S, ENDED_S, STALE_S

_LOG = get_logger("writer.control")
_CONNECT_S = 5.0
_PAUSE_S = (0.02, 0.5)
# After this long the word of this process is what the trainer reads, whatever core it runs on: only then is the
# trainer's word read. Without it each side could miss what the other has just stored.
_SETTLE_S = 0.001


class ControlMember:
    """A thread with a connection to rank 0's writer, which is made anew when it breaks.

    Args:
        rank: ours.
        addresses: (host, port) of rank 0's writer, to be tried in turn.
        token: proves that we belong to this run.
        mailbox: shared with the trainer.
        hear: called on the thread with each "outcome", "verdict", "upload", "clear", "rescue", and once with
            {"do": "lost", "why"} when there is nothing more to come.
        again: returns the messages to be repeated after a new connection.
        stopped: returns whether the system has stopped the trainer.
        hold: has the trainer keep a connection open too (`WriterLoop.hold`).
        beat_s: seconds between signs of life.
        stale_s: silence after which rank 0's writer counts as lost, and time to find it again.
    """

    def __init__(
        self,
        *,
        rank: int,
        addresses: Sequence[tuple[str, int]],
        token: str,
        mailbox: StepMailbox,
        hear: Callable[[Message], None],
        again: Callable[[], list[Message]],
        stopped: Callable[[], bool],
        hold: Callable[[int], bool],
        beat_s: float = BEAT_S,
        stale_s: float = STALE_S,
    ) -> None:
        self._rank, self._addresses, self._token, self._mailbox = rank, list(addresses), token, mailbox
        self._hear, self._again, self._stopped, self._hold = hear, again, stopped, hold
        self._beat_s, self._stale_s = beat_s, stale_s
        self._outbox: Inbox[Message | None] = Inbox()
        self._link: Link | None = None
        self._judged: Message | None = None  # the last verdict
        self._heard = time.monotonic()
        self._cut_off = False  # by the network: the time since rank 0's writer was heard counts
        self._closing: float | None = None
        self.lost: str | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-member", daemon=True)
        self._thread.start()

    # -- from other threads

    def say(self, message: Message) -> None:
        """Send a message; a message that is lost with its connection is repeated by ``again``."""
        self._outbox.put(message)

    def close(self, why: str, timeout_s: float = 5.0) -> None:
        """Say farewell and end; idempotent."""
        self._closing = time.monotonic()
        self._outbox.put({"do": "bye", "why": why})
        self._outbox.put(None)
        self._thread.join(timeout_s)

    # -- the thread

    def _run(self) -> None:
        try:
            short_since: float | None = None
            while self.lost is None and self._connect():
                begun = time.monotonic()
                if self._talk():
                    break
                now = time.monotonic()
                short_since = None if now - begun >= self._beat_s else short_since or begun
                if short_since is not None and now - short_since > self._stale_s:
                    self.lost = (
                        f"rank 0's writer has ended every connection of the last {self._stale_s:g} s right after it "
                        "was made: see what it logs, and whether all nodes run the same version of holdfast"
                    )
                    break
                time.sleep(_PAUSE_S[0])  # a server that ends connections at once is not asked without pause
        except Exception as error:  # noqa: BLE001 - a thread edge: saves that wait must not wait for ever
            _LOG.exception("the connection to rank 0's writer has failed")
            self.lost = f"the connection to rank 0's writer has failed: {error!r}"
        finally:
            for end in (self._link, self._outbox):
                if end is not None:
                    end.close()
            if self.lost is not None:
                self._mailbox.break_up()
                self._mailbox.withdraw()
                self._hear({"do": "lost", "why": self.lost})

    def _connect(self) -> bool:
        """Connect, and try again within `stale_s`; False after that (`lost`), or when this member was closed."""
        begun = self._heard if self._cut_off else time.monotonic()
        before = time.monotonic()
        refused_since: float | None = None
        pause_s = _PAUSE_S[0]
        problem = ""
        stopped_s = max(self._stale_s / 2, 2 * self._beat_s, 2 * _CONNECT_S * len(self._addresses))

        def look() -> float:
            nonlocal begun, before, refused_since
            now = time.monotonic()
            if now - before > stopped_s:  # as in `_is_silent`
                begun, refused_since = now, None
                self._heard = now
            before = now
            return now

        while True:
            look()
            refused = True
            for address in self._addresses:
                try:
                    sock = socket.create_connection(address, timeout=_CONNECT_S)
                except OSError as error:
                    problem = f"{address[0]}:{address[1]}: {error}"
                    refused = refused and isinstance(error, ConnectionRefusedError)
                    continue
                self._link = Link(sock, unanswered_s=self._stale_s / 2)
                return True
            # Rank 0's trainer holds the listening socket for a writer that is started again: if nobody holds it, both
            # are gone.
            now = look()
            refused_since = (refused_since or now) if refused else None
            ended = refused_since is not None and now - refused_since > min(ENDED_S, self._stale_s / 3)
            if ended or now - begun > self._stale_s:
                self.lost = (
                    f"rank 0's writer cannot be reached ({problem}): it has died, or the network does not let us"
                )
                return False
            _ready([self._outbox], [], pause_s)
            if None in self._outbox.take():  # the end; whatever else is to be said waits in `again`
                return False
            pause_s = min(2 * pause_s, _PAUSE_S[1])

    def _talk(self) -> bool:
        """Talk until the connection breaks (False) or all is said (True)."""
        link = self._link
        assert link is not None
        ended = self._shake_hands(link)
        if ended is not None:
            link.close()
            return ended
        before = self._heard  # not later: we may be stopped before the first look
        fine = link.send({"do": "hello", "standing": self._standing(), "judged": self._judged})
        next_beat = 0.0
        while fine:
            if self._is_silent(before, now := time.monotonic()):
                return True
            before = now
            if now >= next_beat:
                next_beat = now + self._beat_s
                fine = link.send({"do": "beat", "step": self._mailbox.done, "stopped": self._stopped()})
            ready = _ready([link, self._outbox], [link] if link.unsent else [], max(0.0, next_beat - now))
            ended = self._say_all(link)
            if ended:
                return True
            fine = fine and ended is None and link.flush() and (link not in ready or self._listen(link))
            if self.lost is not None:
                return True
        while messages := self._receive(link):  # what rank 0 said before the end is there though nothing can be sent
            for message in messages:
                self._take(link, message)
        link.close()
        if self.lost is not None:
            return True
        self._cut_off = link.unreachable
        if not self._cut_off:
            self._heard = time.monotonic()  # the search for it begins
        return False

    def _is_silent(self, before: float, now: float) -> bool:
        """Note that nothing was heard for too long, ``before`` being the last look."""
        if now - before > max(self._stale_s / 2, 2 * self._beat_s):
            self._heard = now  # we were stopped ourselves, perhaps with all the others (a suspended job)
        if now - self._heard <= self._stale_s:
            return False
        self.lost = f"rank 0's writer gives no sign of life for {self._stale_s:g} s"
        return True

    def _shake_hands(self, link: Link) -> bool | None:
        """Prove who we are, and have it proved who is there: None if so; else what `_talk` returns.

        Until that is proved nothing is a sign of life: another process may have the port by now.
        """
        answer = challenge = b""
        before = time.monotonic()
        while True:
            if self._is_silent(before, now := time.monotonic()):
                return True
            before = now
            if self._closing is not None and now - self._closing > _CONNECT_S:
                return True  # `close` waits no longer
            # What is to be said waits in the outbox; it is not looked at before we may speak.
            ready = _ready([link], [link] if link.unsent else [], self._beat_s)
            if not link.flush():
                return False
            if link not in ready:
                continue
            received = link.receive_raw(PROOF_BYTES if answer else CHALLENGE_BYTES)
            if received is None:
                return False
            if received and answer:
                if hmac.compare_digest(received, make_proof(self._token, challenge, answer)):
                    self._heard = time.monotonic()
                    return None
                _LOG.warning("what answers at the address of rank 0's writer does not belong to this run")
                time.sleep(_PAUSE_S[1])
                return False
            if received:
                challenge, answer = received, make_answer(self._token, received, self._rank) or b""
                if not answer or not link.send_raw(answer):
                    return False

    def _say_all(self, link: Link) -> bool | None:
        """Send what waits; True at the end, False when the other side is gone."""
        for message in self._outbox.take():
            if message is None:
                self._flush(link)
                return True
            if not link.send(message):
                return False
        return None

    def _flush(self, link: Link) -> None:
        until = time.monotonic() + _CONNECT_S
        while link.unsent and time.monotonic() < until:
            _ready([], [link], 0.2)
            if not link.flush():
                return

    def _listen(self, link: Link) -> bool:
        messages = self._receive(link)
        # All are taken, those behind one whose answer cannot be sent as well.
        answered = [self._take(link, message) for message in messages or ()]
        return messages is not None and all(answered)

    def _receive(self, link: Link) -> list[Message] | None:
        """Return what has come; None once there is no more, or it cannot be understood."""
        try:
            messages = link.receive()
        except HoldfastError as error:
            _LOG.warning("%s", error)
            link.close()
            return None
        if messages is not None:
            self._heard = time.monotonic()
        return messages

    def _take(self, link: Link, message: Message) -> bool:
        """Act on a message; False if its answer cannot be sent."""
        kind = message["do"]
        mailbox = self._mailbox
        if kind in ("outcome", "verdict", "upload", "clear", "keep", "rescue"):
            if kind == "verdict":
                self._judged = {"about": message["about"], "go": message["go"]}
            self._hear(message)
        elif kind == "welcome":
            # The trainer closes its copy of the connection before only now, when rank 0 knows of this one.
            held: list[Message] = [{"do": "held"}] if self._hold(link.fileno()) else []
            return all(link.send(again) for again in (*held, *self._again()))
        elif kind == "propose":
            return link.send(self._show(message["step"], message["kind"]))
        elif kind == "arm":
            mailbox.arm(message["step"])
        elif kind == "withdraw":
            mailbox.withdraw()
        elif kind == "broken":
            self._hear(message)
            mailbox.break_up()
        elif kind == "bye":
            self.lost = message["why"]
        return True

    def _show(self, step: int, kind: str) -> Message:
        """Show a proposal to the trainer; acknowledge it if that was in time."""
        mailbox = self._mailbox
        mailbox.propose(step, kind)
        time.sleep(_SETTLE_S)
        done = mailbox.done
        if done < step:
            return {"do": "ack", "step": step}
        mailbox.withdraw()
        return {"do": "nack", "step": step, "at": done}

    def _standing(self) -> dict[str, Any]:
        mailbox = self._mailbox
        target = mailbox.target
        standing = {"done": mailbox.done, "acted": mailbox.acted, "armed": mailbox.armed, "kind": mailbox.kind}
        return {**standing, "target": None if target in (NEVER, 0) else target}


def _ready(reading: Sequence[Link | Inbox[Any]], writing: Sequence[Link], timeout_s: float) -> list[Any]:
    """Wait, and return what can be read; unlike `select.select` also where a thousand files are open."""
    with selectors.DefaultSelector() as selector:
        for end in dict.fromkeys([*reading, *writing]):
            events = (selectors.EVENT_READ if end in reading else 0) | (selectors.EVENT_WRITE if end in writing else 0)
            selector.register(end, events)
        return [key.fileobj for key, events in selector.select(timeout_s) if events & selectors.EVENT_READ]
