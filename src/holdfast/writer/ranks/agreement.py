"""What ranks agree on, as rank 0's writer sees it: pure objects, events in, actions and messages out.

On saves that they make, upload or rescue together: a save is *begun* by a rank when its writer has the job, and
*stored* when its part is durable. When all ranks have stored it, it is committed. All ranks get the same outcome: the
commit, or the first error with the rank it came from.

On a step, without waiting for each other: a proposal names a step S that nobody has done yet. Each rank shows it to its
trainer and acknowledges, unless the trainer was at S already; then another S is tried, further away. When all have
acknowledged, S is armed. A trainer that comes to S before that waits for the word: so no rank acts at a step that
another one has passed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast._ranks import rank_list
from holdfast.copying.sending import TransferStopped
from holdfast.errors import CheckpointError, StorageError

from ..messages import error_from_json
from .link import Message

_REMEMBERED = 16  # outcomes, for ranks that ask late
_LOOK_S = 0.2  # for the end of uploads, which nobody announces


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitSave:
    """All parts are there: commit the save."""

    save: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOutcome:
    """The outcome of a save, to be sent to ranks.

    Attributes:
        save: id of the save.
        error: why it failed (`error_to_json`), None if it is committed.
        value: result of the commit: "deleted" and "warnings".
        discard: whether each writer removes the part it has stored.
        ranks: those it is sent to, None for all.
    """

    save: str
    error: dict[str, Any] | None = None
    value: dict[str, Any] | None = None
    discard: bool = False
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveVerdict:
    """The answer to a question of a rank; all ranks get the same."""

    rank: int
    about: str
    go: bool


Action = CommitSave | SaveOutcome | SaveVerdict
_ALL_MAKE_IT = (
    "Every rank has to make every save, in the same order, and to call ck.report() too, which saves a step for a "
    "metric that keep= ranks by; for a save that only some ranks make (`if rank == 0:`) use holdfast.save(ranks='this')"
)
_ALL_COUNT_ALIKE = (
    "Where some ranks have more batches than others (Join, a split of one's own), let all stop after as many: "
    "ck.batches(loader) deals out equally many"
)


@dataclass(slots=True, kw_only=True)
class _Save:
    place: tuple[str, int | None]  # directory and step, which must be the same for all
    first: int
    deadline: float
    mark: int | None = None  # steps that `first` had done, at the latest, when it began
    ahead: dict[int, int] = field(default_factory=dict)  # rank that has gone on without this save -> times seen so
    told: bool = False
    begun: set[int] = field(default_factory=set)
    stored: set[int] = field(default_factory=set)
    committing: bool = False


class JointSaves:
    """Saves under way, by save id. Times are seconds of any one clock.

    Args:
        world_size: number of ranks.
        timeout_s: seconds from the first rank that begins a save until it is given up.
    """

    def __init__(self, world_size: int, *, timeout_s: float) -> None:
        self._world_size, self._timeout_s = world_size, timeout_s
        self._saves: dict[str, _Save] = {}
        self._ended: dict[str, SaveOutcome] = {}
        self._verdicts: dict[str, tuple[bool, set[int]]] = {}  # by question, with the ranks that have not asked yet
        self._last_verdict: tuple[str, bool] | None = None  # the last that all ranks have asked for
        self._left: dict[int, str] = {}  # ranks that begin no more saves, and why
        self._stopped: set[int] = set()  # ranks whose trainer the system has stopped

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return bool(self._saves)

    @property
    def deadline(self) -> float | None:
        """When `expire` has something to do."""
        return min((state.deadline for state in self._saves.values() if not state.committing), default=None)

    def begun(self, rank: int, save: str, directory: str, step: int | None, now: float) -> list[Action]:
        """Note that a rank's writer has the job of this save."""
        if (ended := self._ended.get(save)) is not None:
            return [_only(ended, rank)]
        state = self._saves.get(save)
        if state is None:
            state = self._saves[save] = _Save(place=(directory, step), first=rank, deadline=now + self._timeout_s)
        state.begun.add(rank)
        if (directory, step) != state.place:
            if self._left:  # the others stop at different steps because a rank has left: that is the cause to report
                other = min(self._left)
                return self._fail(save, named_error("HoldfastError", _gone(state.place, other, self._left[other])))
            return self._fail(save, named_error("CheckpointError", _disagreement(rank, (directory, step), state)))
        for other, why in self._left.items():
            if other not in state.begun:
                return self._fail(save, named_error("HoldfastError", _gone(state.place, other, why)))
        return []

    def stored(self, rank: int, save: str) -> list[Action]:
        """Note that the part of a rank is durable."""
        if (ended := self._ended.get(save)) is not None:
            return [_only(ended, rank)]
        state = self._saves.get(save)
        if state is None or state.committing:
            return []
        state.begun.add(rank)
        state.stored.add(rank)
        if len(state.stored) < self._world_size:
            return []
        state.committing = True
        return [CommitSave(save=save)]

    def failed(self, rank: int, save: str, error: dict[str, Any]) -> list[Action]:
        """Note that a rank could not store its part, perhaps before any has begun; ``error`` as in `error_to_json`."""
        if (ended := self._ended.get(save)) is not None:
            return [_only(ended, rank)]
        state = self._saves.get(save)
        if state is not None and state.committing:
            return []
        return self._fail(save, {**error, "message": f"rank {rank}: {error['message']}"})

    def committed(self, save: str, *, value: dict[str, Any] | None, error: dict[str, Any] | None) -> list[Action]:
        """Note that the commit has ended, with or without an error; it has removed what it could not commit."""
        self._saves.pop(save, None)
        return [self._end(SaveOutcome(save=save, value=value, error=error))]

    def heard(self, save: str, *, value: dict[str, Any] | None, error: dict[str, Any] | None) -> list[Action]:
        """Note an outcome that a rank got from an earlier writer of rank 0, which has died."""
        if save in self._ended:
            return []
        under_way = self._saves.pop(save, None) is not None
        outcome = self._end(SaveOutcome(save=save, value=value, error=error))
        return [outcome] if under_way else []

    def left(self, rank: int, why: str) -> list[Action]:
        """Note that a rank begins no more saves: its trainer is done or dead. Its writer finishes those begun."""
        self._left.setdefault(rank, why)
        return self._give_up(rank, why, [save for save, state in self._saves.items() if rank not in state.begun])

    def lost(self, rank: int, why: str) -> list[Action]:
        """Note that nothing more will come from a rank. Parts that it has stored still count."""
        self._left.setdefault(rank, why)
        return self._give_up(rank, why, [save for save, state in self._saves.items() if rank not in state.stored])

    def stopped(self, rank: int, *, on: bool) -> None:
        """Note whether the system has stopped a rank's trainer (SIGSTOP, a debugger); used in error messages only."""
        (self._stopped.add if on else self._stopped.discard)(rank)

    def at(self, rank: int, done: int) -> list[str]:
        """Note how many steps a rank has done, of which all ranks do the same; return what to say, once for each save.

        A rank that has done more than the first one had when it began a save, and does not begin it from one sign of
        life to the next, has not left out the call by being slow.
        """
        said = []
        for state in self._saves.values():
            if rank == state.first:
                state.mark = done if state.mark is None else state.mark
            elif rank not in state.begun and state.mark is not None and done > state.mark:
                state.ahead[rank] = state.ahead.get(rank, 0) + 1
                if state.ahead[rank] == 2 and not state.told:
                    state.told = True
                    said.append(
                        f"rank {rank} has gone on without {_place(state.place)}, which rank {state.first} saves: it is "
                        f"waited for, {self._timeout_s:g} s at most. {_ALL_MAKE_IT}"
                    )
        return said

    def expire(self, now: float) -> list[Action]:
        """Give up saves whose time is up."""
        actions: list[Action] = []
        for save, state in list(self._saves.items()):
            if not state.committing and now >= state.deadline:
                actions += self._fail(save, named_error("HoldfastError", self._overdue(state)))
        return actions

    def ask(self, rank: int, about: str, *, now: bool) -> list[Action]:
        """Answer a question once for all ranks: with ``now``, when the first of them asks.

        A rank whose connection breaks before the answer arrives asks again, and a rank asks its next question after the
        answer to the one before. So the last answer that all ranks have asked for is kept, and none before it.
        """
        if self._last_verdict is not None and self._last_verdict[0] == about:
            return [SaveVerdict(rank=rank, about=about, go=self._last_verdict[1])]
        go, waiting = self._verdicts.setdefault(about, (now, set(range(self._world_size))))
        waiting.discard(rank)
        if not waiting:  # until then the answer is kept, however far ahead the others are
            del self._verdicts[about]
            self._last_verdict = (about, go)
        return [SaveVerdict(rank=rank, about=about, go=go)]

    def judged(self, rank: int, about: str, *, go: bool) -> None:
        """Note an answer that a rank got from an earlier writer of rank 0, which has died."""
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

    def _overdue(self, state: _Save) -> str:
        ranks = range(self._world_size)
        parts = []
        never = [rank for rank in ranks if rank not in state.begun]
        if never:
            stopped = [rank for rank in never if rank in self._stopped]
            note = f" (the process of {rank_list(stopped)} is stopped, as by SIGSTOP)" if stopped else ""
            parts.append(f"{rank_list(never)} did not come to it{note}")
        writing = [rank for rank in ranks if rank in state.begun and rank not in state.stored]
        if writing:
            parts.append(f"the part of {rank_list(writing)} is not durable yet")
        return f"{_place(state.place)} was not saved within {self._timeout_s:g} s: {'; '.join(parts)}. {_ALL_MAKE_IT}"


class JointUploads:
    """One save that all ranks bring to the remote, each its own part.

    The thread of the control channel reports events here; the thread that uploads waits for them.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._changed = threading.Condition()
        self._order: Message | None = None
        self._save = ""
        self._missing: set[int] = set()
        self._errors: dict[int, Message] = {}
        self._gone: dict[int, str] = {}
        self._world_size = world_size

    @property
    def order(self) -> Message | None:
        """What a rank that has joined again is to do; None for nothing."""
        return self._order

    @property
    def lacks_ranks(self) -> bool:
        """Whether a rank is gone, and with it what it has not brought; its disk may have it still."""
        return bool(self._gone)

    def uploaded(self, rank: int, save: str, error: Message | None) -> None:
        """A rank's part is at the remote, or cannot get there now."""
        with self._changed:
            if save == self._save:
                if error is None:
                    self._missing.discard(rank)
                    self._errors.pop(rank, None)
                else:
                    self._errors[rank] = error
                self._changed.notify_all()

    def gone(self, rank: int, why: str) -> None:
        """Nothing more will come from a rank."""
        with self._changed:
            self._gone.setdefault(rank, why)
            self._changed.notify_all()

    def bring(self, order: Message, send: Callable[[Message], None], stop: Callable[[], bool]) -> None:
        """Let all ranks bring their parts, and wait until they have.

        Ranks that have done so for the same save, when it was tried before, are done with it.

        Args:
            order: tells them which save.
            send: gives it to all that are there.
            stop: asked now and then; true ends the waiting.

        Raises:
            TransferStopped: ``stop`` said so.
            CheckpointError: a part is damaged, or a rank that has not brought its own is gone (`lacks_ranks`).
            StorageError: a rank could not bring its part now.
        """
        with self._changed:
            if order["save"] != self._save:
                self._save, self._missing = order["save"], set(range(self._world_size))
            self._errors.clear()
            self._order = order
        try:
            send(order)
            with self._changed:
                while not self._ended(order["directory"]):
                    if stop():
                        raise TransferStopped
                    self._changed.wait(_LOOK_S)
        finally:
            self._order = None

    def _ended(self, directory: str) -> bool:
        """Tell whether all have brought theirs; raise what keeps them from it."""
        lost = {rank: why for rank, why in self._gone.items() if rank in self._missing}
        if lost:
            rank, why = min(lost.items())
            raise CheckpointError(
                f"{directory} cannot be completed: the part of {rank_list(lost)} is on the disk of its own machine "
                f"alone, and rank {rank}: {why}"
            )
        for rank, described in sorted(self._errors.items()):
            error = error_from_json(described)
            kind = type(error) if isinstance(error, (CheckpointError, StorageError)) else StorageError
            raise kind(f"rank {rank}: {error}")
        return not self._missing


class RescueAgreement:
    """Which snapshot is rescued where several ranks save together; one choice in the life of a group of ranks.

    A writer whose trainer has died, or has left its body with an error, *offers* the snapshots that it holds, sealed:
    the trainer changes none of them any more. Once all ranks have offered, the newest one that all of them hold is
    chosen; each stores its part, as of any save, and then it is committed. Ranks that train together are at most one
    step apart, and each holds its newest two: so all hold the newest one of the rank that is behind.

    Args:
        world_size: number of ranks.

    Attributes:
        chosen: id of the save that all ranks store; "" if none is; None before that is decided.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._offers: dict[int, Mapping[str, int]] = {}
        self._stored: set[int] = set()
        self.chosen: str | None = None

    def offered(self, rank: int, held: Mapping[str, int]) -> None:
        """Note the steps of the snapshots that a rank holds, by the ids of their saves."""
        self._offers[rank] = held

    def decide(self, committed: int) -> bool:
        """Choose, if all ranks have offered; True if that was decided just now.

        Args:
            committed: newest step that is committed; nothing older is chosen.
        """
        if self.chosen is not None or len(self._offers) < self._world_size:
            return False
        first, *others = self._offers.values()
        common = {save: step for save, step in first.items() if all(other.get(save) == step for other in others)}
        save = max(common, key=common.__getitem__, default="")
        self.chosen = save if save and common[save] > committed else ""
        return True

    def refuse(self) -> bool:
        """Note that a rank offers nothing; True if it was not decided before."""
        undecided = self.chosen is None
        self.chosen = self.chosen or ""
        return undecided

    def stored(self, rank: int) -> bool:
        """Note that a rank has stored its part; True when that was the last one."""
        before = len(self._stored)
        self._stored.add(rank)
        return before < len(self._stored) == self._world_size

    def needs(self, rank: int) -> bool:
        """Tell whether the part of a rank is still to come."""
        return bool(self.chosen) and rank not in self._stored


def named_error(kind: str, message: str) -> dict[str, Any]:
    """Describe an error as `holdfast.writer.messages.error_to_json` does."""
    return {"type": kind, "message": message, "extra": {}}


def _place(place: tuple[str, int | None]) -> str:
    directory, step = place
    return f"{directory!r}" if step is None else f"{directory!r} (step {step})"


def _gone(place: tuple[str, int | None], rank: int, why: str) -> str:
    return f"{_place(place)} was not saved: rank {rank}: {why}; the checkpoint before stays"


def _disagreement(rank: int, place: tuple[str, int | None], state: _Save) -> str:
    counts = "" if place[1] == state.place[1] else f" {_ALL_COUNT_ALIKE}"
    return (
        f"the ranks do not save the same: rank {rank} saves {_place(place)} where rank {state.first} saves "
        f"{_place(state.place)}. {_ALL_MAKE_IT}{counts}"
    )


def _only(outcome: SaveOutcome, rank: int) -> SaveOutcome:
    return SaveOutcome(
        save=outcome.save, error=outcome.error, value=outcome.value, discard=outcome.discard, ranks=(rank,)
    )  # fmt: skip


Sent = tuple[int | None, dict[str, Any]]  # (rank, or None for all; message)
# From "settle" on each does what those before it do, but for the last, which leaves a state that is not to be saved.
# A snapshot waits for nothing: where it is left out for something else, it is asked for again.
_URGENCY = {"keep": 0, "settle": 1, "save": 2, "stop": 3, "rollback": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStanding:
    """Where one rank is, by what its mailbox says.

    Attributes:
        done: steps its trainer has done.
        acted: last agreed step it has acted at.
        target: step it has been shown, None for none.
        armed: whether that step is armed there.
        kind: what for.
    """

    done: int
    acted: int = -1
    target: int | None = None
    armed: bool = False
    kind: str = "save"


class StepAgreement:
    """Proposes steps, one at a time; what is wanted meanwhile comes next.

    Every message about a step that is not the current one is old and counts for nothing.

    Args:
        world_size: number of ranks.

    Attributes:
        step: the step proposed or armed, None while there is none.
        kind: what all ranks do at it: "save", "stop" (save and leave), "settle" (raise what failed), "keep" (a
            snapshot in memory), "rollback" (leave).
        armed: whether all ranks know.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        # How far beyond the last known step a proposal is: in step with each other, ranks are at most one step apart.
        self._margin = 2
        self.step: int | None = None
        self.kind = "save"
        self.armed = False
        self._standing: dict[int, RankStanding] = {}  # as they joined, until all have
        self._gathered = False
        self._done = dict.fromkeys(range(world_size), -1)
        self._waiting: set[int] = set()  # ranks that have not acknowledged; once armed: not acted
        self._next: str | None = None
        self._highest = -1
        self._broken = False

    @property
    def gathered(self) -> bool:
        """Whether all ranks have joined (this writer of rank 0) once."""
        return self._gathered

    def wants(self, kind: str) -> bool:
        """Tell whether a wish of this kind waits, or is being carried out."""
        return self._next == kind or (self.step is not None and self.kind == kind)

    def want(self, kind: str, rank: int | None = None) -> list[Sent]:
        """A rank, or the server itself (None), wants all ranks to do ``kind`` at a step.

        Wishes of a kind that is on its way count once. A rank that has acted at the armed step means another one: the
        others may be on their way to it still. What the server wants may be news to those who have acted, so it counts
        as a wish for another step as well.
        """
        if self._broken:
            return []
        if self.step is None and self._gathered:
            return self._propose(kind)
        if self.step is not None and not self.armed and _URGENCY[kind] > _URGENCY[self.kind]:
            return self._propose(kind)
        is_under_way = self.step is not None and (not self.armed or rank in self._waiting)
        known = [other for other in (self.kind if is_under_way else None, self._next) if other is not None]
        if all(_URGENCY[kind] > _URGENCY[other] for other in known):
            self._next = kind
        return []

    def joined(self, rank: int, standing: RankStanding) -> list[Sent]:
        """A rank has joined, or joined again after it was cut off."""
        self._done[rank] = max(self._done[rank], standing.done)
        if not self._gathered:
            self._standing[rank] = standing
            return self._gather() if len(self._standing) == self._world_size else []
        if self.step is None:
            return [(rank, {"do": "withdraw"})] if standing.target is not None else []
        if standing.acted >= self.step:
            return self.acted(rank, self.step)
        if standing.target != self.step:
            return [(rank, self._proposal())]
        if not self.armed:
            return self.acknowledged(rank, self.step)
        return [] if standing.armed else [(rank, {"do": "arm", "step": self.step})]

    def acknowledged(self, rank: int, step: int) -> list[Sent]:
        """A rank has shown the proposal to its trainer in time."""
        if step != self.step:
            return []
        if self.armed:  # it was cut off, and has seen the armed proposal again
            return [(rank, {"do": "arm", "step": step})]
        self._waiting.discard(rank)
        if self._waiting:
            return []
        self.armed = True
        self._waiting = set(range(self._world_size))
        return [(None, {"do": "arm", "step": step})]

    def passed(self, rank: int, step: int, done: int) -> list[Sent]:
        """A rank's trainer had done the proposed step already: try one further away."""
        self._done[rank] = max(self._done[rank], done)
        if step != self.step or self.armed:
            return []
        self._margin *= 2
        return self._propose(self.kind)

    def acted(self, rank: int, step: int) -> list[Sent]:
        """A rank has come to the armed step and acts."""
        self._done[rank] = max(self._done[rank], step)
        if step != self.step or not self.armed:
            return []
        self._waiting.discard(rank)
        if self._waiting:
            return []
        self.step, self.armed = None, False
        kind, self._next = self._next, None
        return [] if kind is None else self._propose(kind)

    def at(self, rank: int, done: int) -> None:
        """Learn how far a rank is; any message may tell."""
        self._done[rank] = max(self._done[rank], done)

    def broken(self) -> list[Sent]:
        """A rank is gone for good: an open proposal is taken back, an armed one stands, nothing new is proposed."""
        if self._broken:
            return []
        self._broken = True
        self._next = None
        out: list[Sent] = []
        if self.step is not None and not self.armed:
            self.step = None
            out.append((None, {"do": "withdraw"}))
        return [*out, (None, {"do": "broken"})]

    def _gather(self) -> list[Sent]:
        """All ranks are there for the first time (of this writer): take over what an earlier one had armed."""
        self._gathered = True
        standings, self._standing = self._standing, {}
        self._highest = max(
            (standing.target for standing in standings.values() if standing.target is not None), default=-1
        )
        armed = {
            standing.target: standing.kind
            for standing in standings.values()
            if standing.armed and standing.target is not None
        }
        open_ = {step for step in armed if any(standing.acted < step for standing in standings.values())}
        if open_:
            self.step = max(open_)
            self.kind, self.armed = armed[self.step], True
            self._waiting = {rank for rank, one in standings.items() if one.acted < self.step}
            return [(rank, {"do": "arm", "step": self.step}) for rank in sorted(self._waiting)]
        out: list[Sent] = [(rank, {"do": "withdraw"}) for rank, one in standings.items() if one.target is not None]
        kind, self._next = self._next, None
        return out if kind is None else [*out, *self._propose(kind)]

    def _propose(self, kind: str) -> list[Sent]:
        self.kind, self.armed = kind, False
        # Never a step that was proposed before: words about it may still be on their way.
        self.step = self._highest = max(max(self._done.values()) + self._margin, self._highest + 1)
        self._waiting = set(range(self._world_size))
        return [(None, self._proposal())]

    def _proposal(self) -> dict[str, Any]:
        return {"do": "propose", "step": self.step, "kind": self.kind}
