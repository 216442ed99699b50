"""Memory in which a trainer leaves what its writer must know: of its steps, and of rows should it be killed.

`StepMailbox` are five words: how far the trainer is, and at which step all ranks act. `StepMemory` has the steps that
are done, and rows that are not yet sent.

The writer holds the same memory (`Arena`), so what was left is there after SIGKILL, and a step costs no system call, no
message and no fsync. Where both processes die at once (a container, a power cut) it is lost. Layout: the number of
steps (8 bytes), the number of bytes of records (8 bytes), the records. The length is written after the records.

A record is its size (4 bytes), a letter and a body. "N": JSON of the names and the `struct` codes of the rows that
follow. "V": step, epoch, time and those values. "J": JSON of a row whose values are not all numbers.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from typing import Any, Final

from .arena import Arena

__all__ = ["BOARD_BYTES", "KINDS", "NEVER", "WHO_LEFT", "StepMailbox", "StepMemory", "rows_left", "steps_done"]

_SIZE = 256 << 10
_STEPS, _LENGTH, _HEAD, _STAMP = struct.Struct("=q"), struct.Struct("=Q"), struct.Struct("=Ic"), struct.Struct("=qqd")
_ROWS = _STEPS.size + _LENGTH.size
_CODES = {float: "d", int: "q"}
BOARD_BYTES: Final = 4096
NEVER: Final = (1 << 62) - 1
KINDS: Final = ("save", "stop", "settle", "rollback", "keep")
WHO_LEFT: Final = "who left"  # asked of our own writer once the board says that a rank is gone

_DONE, _ACTED, _TARGET, _ARMED, _KIND, _BROKEN = range(6)


class StepMemory:
    """The trainer's side of the memory. For one thread.

    Attributes:
        arena: the memory, for `WriterClient.open_run`; None where the platform cannot share it.
    """

    def __init__(self) -> None:
        self._arena = Arena.create(_SIZE)
        self._owner = os.getpid()  # a forked child does not have that memory
        self._end = _ROWS
        self._kind: tuple[Any, ...] | None = None  # names and codes of the last record "N"
        self._packed = _STAMP
        self.arena = None if self._arena.fd is None else self._arena

    def note_step(self, step: int) -> None:
        """Leave how many steps are done."""
        if self._owner == os.getpid():
            _STEPS.pack_into(self._arena.view, 0, step)

    def add_row(self, step: int, epoch: int, moment: float, metrics: Mapping[str, Any]) -> bool:
        """Leave a row of plain values that is sent later; false if there is no room for it."""
        if self._owner != os.getpid():
            return True
        kind = (*metrics, *map(type, metrics.values()))
        if kind == self._kind or self._name(kind, metrics):
            try:
                return self._add(b"V", self._packed.pack(step, epoch, moment, *metrics.values()))
            except struct.error:  # a number of more than 64 bits
                pass
        row = {"step": step, "epoch": epoch, "time": moment, "metrics": metrics}
        return self._add(b"J", json.dumps(row).encode())

    def _name(self, kind: tuple[Any, ...], metrics: Mapping[str, Any]) -> bool:
        codes = "".join(_CODES.get(type(value), "?") for value in metrics.values())
        if "?" in codes or not self._add(b"N", json.dumps([codes, *metrics]).encode()):
            return False
        self._kind, self._packed = kind, struct.Struct(_STAMP.format + codes)
        return True

    def _add(self, letter: bytes, body: bytes) -> bool:
        start, view = self._end, self._arena.view
        end = start + _HEAD.size + len(body)
        if end > _SIZE:
            return False
        _HEAD.pack_into(view, start, len(body), letter)
        view[start + _HEAD.size : end] = body
        _LENGTH.pack_into(view, _STEPS.size, end - _ROWS)
        self._end = end
        return True

    def clear_rows(self) -> None:
        """Forget the rows: they are sent."""
        if self._end != _ROWS and self._owner == os.getpid():
            _LENGTH.pack_into(self._arena.view, _STEPS.size, 0)
            self._end, self._kind = _ROWS, None

    def close(self) -> None:
        """Give the memory back; idempotent."""
        self._owner = 0
        self._arena.close()


def steps_done(memory: memoryview) -> int:
    """Return how many steps a trainer that has died had done."""
    return int(_STEPS.unpack_from(memory)[0])


def rows_left(memory: memoryview) -> list[dict[str, Any]]:
    """Return the rows that a trainer that has died had not sent; of what is no row, nothing."""
    at, end = _ROWS, min(_ROWS + _LENGTH.unpack_from(memory, _STEPS.size)[0], len(memory))
    names: list[str] = []
    packed = _STAMP
    rows = []
    while at + _HEAD.size <= end:
        size, letter = _HEAD.unpack_from(memory, at)
        body = bytes(memory[at + _HEAD.size : at + _HEAD.size + size])
        at += _HEAD.size + size
        try:
            if letter == b"N":
                codes, *names = json.loads(body)
                packed = struct.Struct(_STAMP.format + codes)
            elif letter == b"V":
                step, epoch, moment, *values = packed.unpack(body)
                metrics = dict(zip(names, values, strict=True))
                rows.append({"step": step, "epoch": epoch, "time": moment, "metrics": metrics})
            else:
                rows.append(dict(json.loads(body)))
        except (ValueError, TypeError, RecursionError, struct.error):
            continue
    return rows


class StepMailbox:
    """The words, seen from either side. Each word has one writer, and reading one costs no more than an index.

    The trainer stores the step it has done and then looks at the target; the writer stores a target and, a moment
    later (`member`), looks at the step. So at least one of them sees what the other has stored.

    Args:
        memory: at least `BOARD_BYTES` of shared memory, all zero at first.

    Example:
        >>> board = StepMailbox(memoryview(bytearray(BOARD_BYTES)))
        >>> board.clear(step=3)
        >>> board.propose(9, "stop")
        >>> (board.target, board.armed, board.kind, board.done)
        (9, False, 'stop', 3)
    """

    __slots__ = ("_words",)

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:BOARD_BYTES].cast("B").cast("q")

    # -- the trainer's words

    def clear(self, *, step: int) -> None:
        """Begin, at ``step``; before the writer knows this board."""
        words = self._words
        words[_DONE], words[_ACTED], words[_TARGET], words[_ARMED] = step, -1, NEVER, -1
        words[_KIND] = words[_BROKEN] = 0

    def calls(self, step: int) -> bool:
        """Publish that ``step`` is done; tell whether all ranks are to act at it."""
        words = self._words
        words[_DONE] = step
        return step >= words[_TARGET] and words[_ACTED] != words[_TARGET]

    def act(self, step: int) -> None:
        """Publish that this rank acts at the agreed ``step``."""
        self._words[_ACTED] = step

    @property
    def done(self) -> int:
        """Steps the trainer has done."""
        return self._words[_DONE]

    @property
    def acted(self) -> int:
        """Last agreed step at which the trainer has acted, -1 before the first."""
        return self._words[_ACTED]

    # -- the writer's words

    def propose(self, step: int, kind: str) -> None:
        """Ask the trainer to stop and look at ``step``."""
        self._words[_KIND] = KINDS.index(kind)
        self._words[_TARGET] = step

    def arm(self, step: int) -> None:
        """Tell the trainer that all ranks have agreed on ``step``."""
        self._words[_ARMED] = step

    def withdraw(self) -> None:
        """Take the proposal back."""
        self._words[_TARGET] = NEVER

    def break_up(self) -> None:
        """Tell the trainer that a rank is gone: nothing can be agreed any more."""
        self._words[_BROKEN] = 1

    @property
    def target(self) -> int:
        """The proposed step, `NEVER` if there is none."""
        return self._words[_TARGET]

    @property
    def armed(self) -> bool:
        """Whether the proposed step is agreed."""
        return self._words[_ARMED] == self._words[_TARGET]

    @property
    def kind(self) -> str:
        """What all ranks are to do at the proposed step."""
        return KINDS[self._words[_KIND]]

    @property
    def broken(self) -> bool:
        """Whether a rank is gone."""
        return bool(self._words[_BROKEN])

    def close(self) -> None:
        """Let go of the memory; idempotent."""
        self._words.release()
