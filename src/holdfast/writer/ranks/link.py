"""A connection of the control channel: how it begins, what may be said on it, and how many a process may have.

A member proves that it belongs to the run before anything it sends is parsed. All messages of this hello have a fixed
size, and nothing secret travels: both sides know the token of the run and show it by an HMAC over random numbers of
both (challenge and response; the labels keep one side's proof from being the other's). What follows on the connection
is neither encrypted nor authenticated: SECURITY.md says what that means.

    server -> member   challenge: magic, 32 random bytes
    member -> server   answer:    magic, rank (4 bytes, big endian), 32 random bytes, HMAC(token, "member" + all before)
    server -> member   proof:     HMAC(token, "server" + challenge + answer)

Then frames (`frames`) go both ways, over a socket that never blocks. The fields of what a member says are checked
before anything acts on them: what goes wrong behind that check is a mistake of ours, not of the member.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import queue
import resource
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from holdfast.errors import ConfigError, HoldfastError

from ..arena import KINDS
from ..frames import FrameDecoder, encode

_MAGIC = b"holdfast control 2\n"
_NONCE_BYTES = 32
_RANK = struct.Struct(">I")
PROOF_BYTES = 32
CHALLENGE_BYTES = len(_MAGIC) + _NONCE_BYTES
ANSWER_BYTES = len(_MAGIC) + _RANK.size + _NONCE_BYTES + PROOF_BYTES
_Kinds = tuple[type, ...]
_INT, _STR, _BOOL, _DICT = (int,), (str,), (bool,), (dict,)
_INT_OR_NONE, _DICT_OR_NONE = (int, type(None)), (dict, type(None))

_WORDS: dict[str, dict[str, _Kinds]] = {
    "hello": {"standing": _DICT, "judged": _DICT_OR_NONE},
    "beat": {"step": _INT, "stopped": _BOOL},
    "begun": {"save": _STR, "directory": _STR, "step": _INT_OR_NONE},
    "stored": {"save": _STR, "part": _DICT_OR_NONE},
    "failed": {"save": _STR, "error": _DICT},
    "uploaded": {"save": _STR, "error": _DICT_OR_NONE},
    "heard": {"save": _STR, "value": _DICT_OR_NONE, "error": _DICT_OR_NONE},
    "want": {"kind": _STR},
    "ack": {"step": _INT},
    "nack": {"step": _INT, "at": _INT},
    "acted": {"step": _INT},
    "ask": {"about": _STR},
    "left": {"why": _STR, "offers": _BOOL},
    "offer": {"held": _DICT},
    "bye": {"why": _STR},
    "held": {},
}
_STANDING = {"done": _INT, "acted": _INT, "target": _INT_OR_NONE, "armed": _BOOL, "kind": _STR}
_JUDGED = {"about": _STR, "go": _BOOL}
_OTHER_FILES = 64  # files of a save, shared memory, logs, connections that have not proved yet who they are
MAX_MESSAGE = 64 << 20
_CHUNK = 1 << 18
_NO_NETWORK = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
_TURN_BYTES = 8 << 20  # what one connection may say before the others are heard

Message = dict[str, Any]
_T = TypeVar("_T")


def make_challenge() -> bytes:
    """Make what the server says first, to each connection another."""
    return _MAGIC + os.urandom(_NONCE_BYTES)


def make_answer(token: str, challenge: bytes, rank: int) -> bytes | None:
    """Make the member's answer; None if what has come is no challenge of this version."""
    if len(challenge) != CHALLENGE_BYTES or not challenge.startswith(_MAGIC):
        return None
    body = _MAGIC + _RANK.pack(rank) + os.urandom(_NONCE_BYTES)
    return body + _sign(token, b"member", challenge + body)


def read_answer(token: str, challenge: bytes, answer: bytes) -> int | None:
    """Return the rank that a member has proved to be; None for one without the token."""
    body, signature = answer[:-PROOF_BYTES], answer[-PROOF_BYTES:]
    # The signature first: until it is right, nothing of the answer means anything.
    if not hmac.compare_digest(signature, _sign(token, b"member", challenge + body)) or not body.startswith(_MAGIC):
        return None
    rank: int = _RANK.unpack_from(body, len(_MAGIC))[0]
    return rank


def make_proof(token: str, challenge: bytes, answer: bytes) -> bytes:
    """Make the server's proof that it has the token too; a member compares it with its own."""
    return _sign(token, b"server", challenge + answer)


def _sign(token: str, label: bytes, data: bytes) -> bytes:
    return hmac.digest(token.encode(), label + b"\0" + data, "sha256")


def check_word(message: dict[str, Any]) -> None:
    """Refuse a message that no member sends.

    Raises:
        HoldfastError: naming what is wrong with it.
    """
    what = message["do"]
    fields = _WORDS.get(what)
    if fields is None:
        raise HoldfastError(f"a message on the control channel is of an unknown kind, {what[:40]!a}")
    _check(what, message, fields)
    if what == "hello":
        _check("standing", message["standing"], _STANDING)
        if message["standing"].keys() - _STANDING:
            raise HoldfastError("a 'standing' on the control channel has unknown fields")
        if message.get("judged") is not None:
            _check("judged", message["judged"], _JUDGED)
    if what == "offer" and not all(type(step) is int for step in message["held"].values()):
        raise HoldfastError("an 'offer' on the control channel holds something else than steps")
    wish = message["standing"]["kind"] if what == "hello" else message.get("kind", "save")
    if wish not in KINDS:
        raise HoldfastError(f"a {what!r} on the control channel wants {wish[:40]!a}")


def _check(what: str, message: dict[str, Any], fields: Mapping[str, _Kinds]) -> None:
    for name, kinds in fields.items():
        value = message.get(name)
        if type(value) not in kinds:
            raise HoldfastError(f"a {what!r} on the control channel has no good {name!r}")


class Inbox(queue.SimpleQueue[_T]):
    """What other threads put for a thread that waits for sockets: a selector waits for it as for one of them."""

    def __init__(self) -> None:
        super().__init__()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)

    def fileno(self) -> int:
        """Return what to wait for."""
        return self._woken.fileno()

    def put(self, item: _T, block: bool = True, timeout: float | None = None) -> None:
        """Add an item; never waits."""
        super().put(item)
        with contextlib.suppress(OSError):  # it is awake, or at its end
            self._wake.send(b"x")

    def take(self) -> Iterator[_T]:
        """Iterate over what is there, which is taken out."""
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while self._woken.recv(4096):
                pass
        with contextlib.suppress(queue.Empty):
            while True:
                yield self.get_nowait()

    def close(self) -> None:
        """Let nobody wait for it any more; idempotent."""
        self._wake.close()
        self._woken.close()


class Link:
    """Belongs to one thread, which waits for the socket with a selector.

    Args:
        sock: connected (or connecting).
        unanswered_s: the system ends the connection when the other machine has not answered for so long. It tries again
            ever more rarely: after a minute without a network the next attempt may be another minute away, while a new
            connection is made within seconds.

    Attributes:
        hung_up: the system of the other side has closed the connection, in order or not; False as long as it may be
            the network that fails.
        unreachable: the system has given the other machine up: there is no network, or not for now.
    """

    def __init__(self, sock: socket.socket, *, unanswered_s: float | None = None) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if unanswered_s is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * unanswered_s))
        self._sock = sock
        self._hello = bytearray()
        self._decoder = FrameDecoder(
            "a rank on the control channel", max_header_bytes=MAX_MESSAGE, max_attached_bytes=0
        )
        self._outgoing = bytearray()
        self.hung_up = self.unreachable = False

    def fileno(self) -> int:
        """Descriptor, for a selector."""
        return self._sock.fileno()

    @property
    def unsent(self) -> bool:
        """True while something waits for the socket to take it."""
        return bool(self._outgoing)

    def send(self, message: Message) -> bool:
        """Send, or keep for `flush`; False when the other side is gone, or takes nothing any more."""
        return self.send_raw(encode(message))

    def send_raw(self, data: bytes) -> bool:
        """Send bytes of the hello (`hello`), or an encoded message, in the manner of `send`."""
        if len(self._outgoing) > 2 * MAX_MESSAGE:
            return False
        self._outgoing += data
        return self.flush()

    def receive_raw(self, size: int) -> bytes | None:
        """Return ``size`` bytes of the hello, b"" while there are not so many; None once the other side is gone.

        Nothing beyond them is read: whoever has not proved to belong to the run has no more memory here.
        """
        try:
            while missing := size - len(self._hello):
                data = self._sock.recv(missing)
                if not data:
                    self.hung_up = True
                    return None
                self._hello += data
        except (BlockingIOError, InterruptedError):
            return b""
        except OSError as error:
            self._fail(error)
            return None
        found = bytes(self._hello)
        self._hello.clear()
        return found

    def flush(self) -> bool:
        """Send what the socket takes; False when the other side is gone."""
        while self._outgoing:
            try:
                sent = self._sock.send(self._outgoing)
            except (BlockingIOError, InterruptedError):
                return True
            except OSError as error:
                self._fail(error)
                return False
            del self._outgoing[:sent]
        return True

    def receive(self) -> list[Message] | None:
        """Return the messages that have come; None once the other side is gone and there are no more of them.

        Raises:
            HoldfastError: it speaks another language.
        """
        ended, taken = False, 0
        found: list[Message] = []
        try:
            while data := self._sock.recv(_CHUNK):
                found += [_checked(frame.header) for frame in self._decoder.feed(data)]
                taken += len(data)
                if len(data) < _CHUNK or taken >= _TURN_BYTES:
                    break
            else:
                ended = self.hung_up = True
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._fail(error)
            ended = True
        return None if ended and not found else found

    def _fail(self, error: OSError) -> None:
        self.hung_up = self.hung_up or isinstance(error, ConnectionResetError | BrokenPipeError)
        self.unreachable = self.unreachable or error.errno in _NO_NETWORK

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._sock.close()


def _checked(message: Message) -> Message:
    if not isinstance(message.get("do"), str):
        raise HoldfastError("what came over the control channel is no message: it does not say what to do")
    return message


# ---- how many files a process may have open: rank 0's writer has a connection to the writer of every rank


def check_connections(num_ranks: int) -> None:
    """Refuse more ranks than a process may have connections; for the trainer, which can still refuse a run.

    The soft limit is 1 024 on most systems, for the sake of programs that call ``select``; the hard one counts.

    Raises:
        ConfigError: not even the hard limit is enough.
    """
    needed = num_ranks + _OTHER_FILES
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not _enough(hard, needed):
        raise ConfigError(
            f"{num_ranks} ranks need {needed} open files in rank 0's writer, which has a connection to each, and a "
            f"process may have {hard} (hard limit): raise it (`ulimit -Hn`, LimitNOFILE= of the service, --ulimit "
            "nofile= of the container), or train with fewer ranks"
        )


def allow_connections(num_ranks: int) -> None:
    """Raise our soft limit to the hard one if it is not enough for so many ranks; for rank 0's writer."""
    needed = num_ranks + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not _enough(soft, needed):
        # Without a hard limit some systems still refuse an unlimited soft one.
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))


def _enough(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed
