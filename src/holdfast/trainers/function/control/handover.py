"""A save that all ranks agree on before they are ended for another reason than a failure, and what follows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .actions import Action, Send
from .policy import Cause

__all__ = ["Handover"]


@dataclass(slots=True)
class Handover:
    """From the wish to move until a checkpoint is committed.

    Attributes:
        cause: a preemption, or another size.
        why: for people.
        size: number of ranks.
        calls: how often each rank has called `should_save`, as they answer.
        tries: agreed saves that may be made in all before it is given up.
        is_sent: all have answered and know the call to save at.
    """

    cause: Cause
    why: str
    size: int
    tries: int = 1
    calls: dict[int, int] = field(default_factory=dict)
    is_sent: bool = False

    def begin(self, out: list[Action]) -> None:
        """Ask every rank where it is."""
        for rank in range(self.size):
            out.append(Send(rank=rank, header={"do": "save_soon"}))

    def at(self, rank: int, calls: int, out: list[Action]) -> None:
        """Take the answer of one rank; the last one settles the call."""
        self.calls[rank] = calls
        if len(self.calls) == self.size and not self.is_sent:
            self.is_sent = True
            for each in range(self.size):
                out.append(Send(rank=each, header={"do": "save_at", "call": max(self.calls.values()) + 1}))

    def is_served(self, *, agreed: bool) -> bool:
        """Whether a commit is what was waited for: the agreed one, or any where nobody calls `should_save`."""
        return agreed or (self.is_sent and not any(self.calls.values()))
