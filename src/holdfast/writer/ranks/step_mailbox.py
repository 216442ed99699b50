"""Five words of memory that a trainer shares with its writer: how far it is, and at which step all ranks act."""

from __future__ import annotations

from typing import Final

__all__ = ["BOARD_BYTES", "KINDS", "NEVER", "WHO_LEFT", "StepMailbox"]

BOARD_BYTES: Final = 4096
NEVER: Final = (1 << 62) - 1
KINDS: Final = ("save", "stop", "settle", "rollback")
WHO_LEFT: Final = "who left"  # asked of our own writer once the board says that a rank is gone

_DONE, _ACTED, _TARGET, _ARMED, _KIND, _BROKEN = range(6)


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
