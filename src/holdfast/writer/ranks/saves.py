"""Saves that all ranks make together: what rank 0's writer knows of them, as a pure object. Events in, actions out.

A save is *begun* by a rank when its writer has the job, *stored* when its part is durable; when all have stored it is
to be committed. Its outcome is the same for all ranks: the commit, or the first thing that went wrong, with the rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from holdfast._ranks import rank_list

__all__ = ["CommitSave", "JointSaves", "SaveOutcome", "SaveVerdict", "named_error"]

_REMEMBERED = 16  # outcomes, for ranks that ask late


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitSave:
    """All parts are there: commit the save."""

    save: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOutcome:
    """Tell how a save ended.

    Attributes:
        save: which one.
        error: why it failed (`error_to_json`), None if it is committed.
        value: what the commit brought.
        discard: whether each writer removes the part it has stored.
        ranks: who is told, None for all.
    """

    save: str
    error: dict[str, Any] | None = None
    value: dict[str, Any] | None = None
    discard: bool = False
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveVerdict:
    """Answer what a rank has asked: the same for all ranks."""

    rank: int
    about: str
    go: bool


Action = CommitSave | SaveOutcome | SaveVerdict


@dataclass(slots=True, kw_only=True)
class _Save:
    place: tuple[str, int | None]  # directory and step, which must be the same for all
    first: int
    deadline: float
    begun: set[int] = field(default_factory=set)
    stored: set[int] = field(default_factory=set)
    committing: bool = False


class JointSaves:
    """Saves under way, by save id. Times are seconds of any one clock.

    Args:
        world_size: number of ranks.
        timeout_s: how long after the first rank the last one may come.
    """

    def __init__(self, world_size: int, *, timeout_s: float) -> None:
        self._world_size, self._timeout_s = world_size, timeout_s
        self._saves: dict[str, _Save] = {}
        self._ended: dict[str, SaveOutcome] = {}
        self._verdicts: dict[str, tuple[bool, set[int]]] = {}  # by question, with the ranks that have not asked yet
        self._last_verdict: tuple[str, bool] | None = None  # the last one that all have asked for
        self._left: dict[int, str] = {}  # ranks that begin no more saves, and why
        self._stopped: set[int] = set()  # ranks whose trainer the system has stopped

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return bool(self._saves)

    @property
    def deadline(self) -> float | None:
        """When `expire` has something to do."""
        return min((one.deadline for one in self._saves.values() if not one.committing), default=None)

    def begun(self, rank: int, save: str, directory: str, step: int | None, now: float) -> list[Action]:
        """A rank's writer has the job of this save."""
        if (ended := self._ended.get(save)) is not None:
            return [_only(ended, rank)]
        one = self._saves.get(save)
        if one is None:
            one = self._saves[save] = _Save(place=(directory, step), first=rank, deadline=now + self._timeout_s)
        one.begun.add(rank)
        if (directory, step) != one.place:
            if self._left:  # the others stop wherever they are when they hear of it: that is what has to be said
                other = min(self._left)
                return self._fail(save, named_error("HoldfastError", _gone(one.place, other, self._left[other])))
            return self._fail(save, named_error("CheckpointError", _disagreement(rank, (directory, step), one)))
        for other, why in self._left.items():
            if other not in one.begun:
                return self._fail(save, named_error("HoldfastError", _gone(one.place, other, why)))
        return []

    def stored(self, rank: int, save: str) -> list[Action]:
        """The part of a rank is durable."""
        if (ended := self._ended.get(save)) is not None:
            return [_only(ended, rank)]
        one = self._saves.get(save)
        if one is None or one.committing:
            return []
        one.begun.add(rank)
        one.stored.add(rank)
        if len(one.stored) < self._world_size:
            return []
        one.committing = True
        return [CommitSave(save=save)]

    def failed(self, rank: int, save: str, error: dict[str, Any]) -> list[Action]:
        """A rank could not store its part; ``error`` as in `error_to_json`. It may be the first that is heard."""
        if (ended := self._ended.get(save)) is not None:
            return [_only(ended, rank)]
        one = self._saves.get(save)
        if one is not None and one.committing:
            return []
        return self._fail(save, {**error, "message": f"rank {rank}: {error['message']}"})

    def committed(self, save: str, *, value: dict[str, Any] | None, error: dict[str, Any] | None) -> list[Action]:
        """The commit has ended, well or not; it removes what it could not commit."""
        self._saves.pop(save, None)
        return [self._end(SaveOutcome(save=save, value=value, error=error))]

    def heard(self, save: str, *, value: dict[str, Any] | None, error: dict[str, Any] | None) -> list[Action]:
        """A rank knows how a save ended: an earlier writer of rank 0 told it before it died."""
        if save in self._ended:
            return []
        under_way = self._saves.pop(save, None) is not None
        outcome = self._end(SaveOutcome(save=save, value=value, error=error))
        return [outcome] if under_way else []

    def left(self, rank: int, why: str) -> list[Action]:
        """A rank begins no more saves: its trainer is done or dead. Those it has begun, its writer finishes."""
        self._left.setdefault(rank, why)
        return self._give_up(rank, why, [save for save, one in self._saves.items() if rank not in one.begun])

    def lost(self, rank: int, why: str) -> list[Action]:
        """Nothing more will come from a rank. Parts it has stored still count."""
        self._left.setdefault(rank, why)
        return self._give_up(rank, why, [save for save, one in self._saves.items() if rank not in one.stored])

    def stopped(self, rank: int, *, on: bool) -> None:
        """Learn whether the system has stopped a rank's trainer (SIGSTOP, a debugger); only said in errors."""
        (self._stopped.add if on else self._stopped.discard)(rank)

    def expire(self, now: float) -> list[Action]:
        """Give up saves whose time is up."""
        actions: list[Action] = []
        for save, one in list(self._saves.items()):
            if not one.committing and now >= one.deadline:
                actions += self._fail(save, named_error("HoldfastError", self._overdue(one)))
        return actions

    def ask(self, rank: int, about: str, *, now: bool) -> list[Action]:
        """Decide something once for all ranks: as it is ``now``, when the first of them asks.

        A rank that is cut off before it hears the answer asks again, and nobody asks for the next thing before it has
        heard of this one: so the last answer that all have asked for is kept, and no other.
        """
        if self._last_verdict is not None and self._last_verdict[0] == about:
            return [SaveVerdict(rank=rank, about=about, go=self._last_verdict[1])]
        go, waiting = self._verdicts.setdefault(about, (now, set(range(self._world_size))))
        waiting.discard(rank)
        if not waiting:  # until then it is kept, however far ahead the others are
            del self._verdicts[about]
            self._last_verdict = (about, go)
        return [SaveVerdict(rank=rank, about=about, go=go)]

    def judged(self, rank: int, about: str, *, go: bool) -> None:
        """A rank knows an answer: an earlier writer of rank 0 gave it before it died."""
        self.ask(rank, about, now=go)

    # -- inside

    def _give_up(self, rank: int, why: str, saves: Iterable[str]) -> list[Action]:
        actions: list[Action] = []
        for save in saves:
            if not self._saves[save].committing:
                actions += self._fail(save, named_error("HoldfastError", _gone(self._saves[save].place, rank, why)))
        return actions

    def _fail(self, save: str, error: dict[str, Any]) -> list[Action]:
        self._saves.pop(save, None)
        return [self._end(SaveOutcome(save=save, error=error, discard=True))]

    def _end(self, outcome: SaveOutcome) -> SaveOutcome:
        self._ended[outcome.save] = outcome
        while len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return outcome

    def _overdue(self, one: _Save) -> str:
        ranks = range(self._world_size)
        parts = []
        never = [rank for rank in ranks if rank not in one.begun]
        if never:
            stopped = [rank for rank in never if rank in self._stopped]
            note = f" (the process of {rank_list(stopped)} is stopped, as by SIGSTOP)" if stopped else ""
            parts.append(f"{rank_list(never)} did not come to it{note}")
        writing = [rank for rank in ranks if rank in one.begun and rank not in one.stored]
        if writing:
            parts.append(f"the part of {rank_list(writing)} is not durable yet")
        return (
            f"{_place(one.place)} was not saved within {self._timeout_s:g} s: {'; '.join(parts)}. Every rank has to "
            "make every save; for one that only some ranks make (`if rank == 0:`) use holdfast.save(ranks='this')"
        )


def named_error(kind: str, message: str) -> dict[str, Any]:
    """Describe an error as `holdfast.writer.messages.error_to_json` does."""
    return {"type": kind, "message": message, "extra": {}}


def _place(place: tuple[str, int | None]) -> str:
    directory, step = place
    return f"{directory!r}" if step is None else f"{directory!r} (step {step})"


def _gone(place: tuple[str, int | None], rank: int, why: str) -> str:
    return f"{_place(place)} was not saved: rank {rank}: {why}; the checkpoint before stays"


def _disagreement(rank: int, place: tuple[str, int | None], one: _Save) -> str:
    return (
        f"the ranks do not save the same: rank {rank} saves {_place(place)} where rank {one.first} saves "
        f"{_place(one.place)}; all ranks have to make the same saves in the same order (ranks='this' saves alone)"
    )


def _only(outcome: SaveOutcome, rank: int) -> SaveOutcome:
    return SaveOutcome(
        save=outcome.save, error=outcome.error, value=outcome.value, discard=outcome.discard, ranks=(rank,)
    )  # fmt: skip
