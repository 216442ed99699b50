"""How a member of the control channel proves that it belongs to the run, before anything it sends is parsed.

All messages of the hello have a fixed size, and nothing secret travels: both sides know the token of the run and show
it by an HMAC over random numbers of both (challenge and response; the labels keep one side's proof from being the
other's). What follows on the connection is neither encrypted nor authenticated: SECURITY.md says what that means.

    server -> member   challenge: magic, 32 random bytes
    member -> server   answer:    magic, rank (4 bytes, big endian), 32 random bytes, HMAC(token, "member" + all before)
    server -> member   proof:     HMAC(token, "server" + challenge + answer)
"""

from __future__ import annotations

import hmac
import os
import struct

__all__ = [
    "ANSWER_BYTES",
    "CHALLENGE_BYTES",
    "PROOF_BYTES",
    "make_answer",
    "make_challenge",
    "make_proof",
    "read_answer",
]

_MAGIC = b"holdfast control 2\n"
_NONCE_BYTES = 32
_RANK = struct.Struct(">I")
PROOF_BYTES = 32
CHALLENGE_BYTES = len(_MAGIC) + _NONCE_BYTES
ANSWER_BYTES = len(_MAGIC) + _RANK.size + _NONCE_BYTES + PROOF_BYTES


def make_challenge() -> bytes:
    """Make what the server says first, to each connection another."""
    return _MAGIC + os.urandom(_NONCE_BYTES)


def make_answer(token: str, challenge: bytes, rank: int) -> bytes | None:
    """Make the member's answer; None if what has come is no challenge of this version."""
    if len(challenge) != CHALLENGE_BYTES or not challenge.startswith(_MAGIC):
        return None
    told = _MAGIC + _RANK.pack(rank) + os.urandom(_NONCE_BYTES)
    return told + _sign(token, b"member", challenge + told)


def read_answer(token: str, challenge: bytes, answer: bytes) -> int | None:
    """Return the rank that a member has proved to be; None for one without the token."""
    told, signature = answer[:-PROOF_BYTES], answer[-PROOF_BYTES:]
    # The signature first: until it is right, nothing of the answer means anything.
    if not hmac.compare_digest(signature, _sign(token, b"member", challenge + told)) or not told.startswith(_MAGIC):
        return None
    rank: int = _RANK.unpack_from(told, len(_MAGIC))[0]
    return rank


def make_proof(token: str, challenge: bytes, answer: bytes) -> bytes:
    """Make the server's proof that it has the token too; a member compares it with its own."""
    return _sign(token, b"server", challenge + answer)


def _sign(token: str, label: bytes, data: bytes) -> bytes:
    return hmac.digest(token.encode(), label + b"\0" + data, "sha256")
