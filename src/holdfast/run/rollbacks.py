"""What a run remembers of bad steps: where they were, from which checkpoint it goes on, which batches it leaves out.

The list is a note of the run (`RunIndex.note`), durable before the process that found a bad step ends; what is left out
is in each later checkpoint too (`holdfast.checkpointer.progress`), so a lost index costs one repetition. Nothing is
deleted because of it.

The first time that a step is bad its batches are not blamed: the step is trained again, from a checkpoint with at least
one sound step after it. What was broken by chance (a bit of memory) does not come again. A step that is bad again, with
the same batches, has bad data: these are left out from then on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast._log import get_logger
from holdfast._units import listed

from .data_ring import BatchSpan
from .names import ROLLBACKS, WATCHED
from .record import metric_value

_LOG = get_logger("checkpointer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """A bad step, and what follows from it.

    Attributes:
        attempt: the life that has found it.
        step: the first bad step.
        why: what was bad about it.
        place: its batches; () where the loop does not take them from `Checkpointer.batches`.
        left_out: batches that no later life trains; () the first time, when the step is only trained again.
        after: greatest step of a checkpoint of that life or an earlier one to go on from.
        proven: step of the newest checkpoint that a sound step had come after; 0 where the run had begun afresh and had
            none yet, -1 if that is not known.
        time: seconds since 1970.
        num_ranks: of that life, each of which counts its own batches.
    """

    attempt: int
    step: int
    why: str
    place: tuple[BatchSpan, ...] = ()
    left_out: tuple[BatchSpan, ...] = ()
    after: int
    proven: int = -1
    time: float = 0.0
    num_ranks: int = 1

    def to_json(self) -> dict[str, Any]:
        """Describe as JSON."""
        values = {
            name: getattr(self, name) for name in ("attempt", "step", "why", "after", "proven", "time", "num_ranks")
        }
        spans = {"place": self.place, "left_out": self.left_out}
        return {**values, **{name: [list(span) for span in found] for name, found in spans.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Rollback:
        """Rebuild what `to_json` described; raises ValueError, TypeError or KeyError for anything else."""
        return cls(
            attempt=int(data["attempt"]),
            step=int(data["step"]),
            why=str(data["why"]),
            place=tuple(map(BatchSpan.from_json, data["place"])),
            left_out=tuple(map(BatchSpan.from_json, data["left_out"])),
            after=int(data["after"]),
            proven=int(data["proven"]),
            time=float(data["time"]),
            num_ranks=int(data["num_ranks"]),
        )

    def in_words(self) -> str:
        """Say what was bad and what follows, for people."""
        what = f"{self.why} ({in_words(self.place)})" if self.place else self.why
        if self.left_out:
            return f"{what}, once more: left out from now on: {in_words(self.left_out)}"
        if not self.place:  # the loop does not take its batches from `ck.batches`
            return f"{what}: it is trained again, once"
        return f"{what}: it is trained again; if it is bad once more, its batches are left out"

    @property
    def key(self) -> tuple[Any, ...]:
        """What two rollbacks because of the same bad step have in common."""
        return self.place or (self.step,)


def read_rollbacks(notes: Mapping[str, Any]) -> list[Rollback]:
    """Return the rollbacks of a run, oldest first; what is none is logged and left out."""
    found = []
    rows = notes.get(ROLLBACKS, ())
    for row in rows if isinstance(rows, Sequence) else ():
        try:
            found.append(Rollback.from_json(row))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            _LOG.warning("a rollback that this run has noted cannot be read: %r", error)
    return found


def left_out_by(rollbacks: Iterable[Rollback], *, num_ranks: int) -> list[BatchSpan]:
    """Return the batches that are not trained any more, as so many ranks count them."""
    return [span for rollback in rollbacks if rollback.num_ranks == num_ranks for span in rollback.left_out]


def watched_metric(notes: Mapping[str, Any]) -> str | None:
    """Return the metric by which the guard of a run refuses checkpoints; None without one."""
    metric = notes.get(WATCHED)
    return metric if isinstance(metric, str) else None


def choose(
    rows: Iterable[Sequence[Any]], rollbacks: Sequence[Rollback], *, metric: str | None = None
) -> tuple[dict[str, str], list[str]]:
    """Divide checkpoints by what is known of bad steps.

    Args:
        rows: name, attempt and step of each checkpoint; its metrics, if one is watched.
        rollbacks: of the run.
        metric: what the guard watches: a checkpoint in which it is not finite holds a bad step.

    Returns:
        Why a checkpoint holds the damage of a bad step, by name; and the names of those that may hold it, because no
        sound step came after them: they are taken if there are no others.

    Example:
        >>> bad = Rollback(attempt=1, step=7, why="loss is nan", after=5)
        >>> choose([("a", 1, 8), ("b", 1, 6), ("c", 1, 4), ("d", 2, 8)], [bad])
        ({'a': 'it holds step 7 of attempt 1, where loss is nan'}, ['b'])
    """
    bad: dict[str, str] = {}
    doubtful = []
    for name, attempt, step, *metrics in rows:
        known = [rollback for rollback in rollbacks if attempt <= rollback.attempt and step > rollback.after]
        broken = next((rollback for rollback in known if step >= rollback.step), None)
        if broken is not None:
            bad[name] = f"it holds step {broken.step} of attempt {broken.attempt}, where {broken.why}"
        elif metric is not None and not _is_sound(value := metric_value(metrics[0], metric)):
            bad[name] = f"its {metric} is {value}"
        elif known:
            doubtful.append(name)
    return bad, doubtful


def order_to_try(
    rows: Sequence[Sequence[Any]], rollbacks: Sequence[Rollback], *, metric: str | None, are_all_known: bool = True
) -> tuple[list[str], dict[str, str]]:
    """Return the checkpoints that a start may try, in its order, and why others hold a bad step.

    Args:
        rows: as for `choose`, newest first.
        rollbacks: of the run.
        metric: that the guard watches.
        are_all_known: there are no checkpoints beside these.

    Returns:
        Nothing at all if the run had begun afresh, and no checkpoint of it was ever seen to be sound: it begins anew.
    """
    bad, doubtful = choose(rows, rollbacks, metric=metric)
    is_fresh = bool(rows and rollbacks) and rollbacks[-1].proven == 0 and {*bad, *doubtful} == {row[0] for row in rows}
    if is_fresh and are_all_known:
        return [], {}
    return [*(row[0] for row in rows if row[0] not in doubtful), *doubtful], bad


def notes_of(rollbacks: Sequence[Rollback], unsound: Mapping[str, str], *, step: int, num_ranks: int) -> list[str]:
    """Say what the guard has found in earlier lives.

    Args:
        rollbacks: of the run.
        unsound: why checkpoints are not taken, by name.
        step: that this life begins with.
        num_ranks: of this life.
    """
    notes = [f"not taken, its files are left alone: {name}: {why}" for name, why in list(unsound.items())[:3]]
    if len(unsound) > len(notes):
        notes.append(f"not taken for such reasons: {len(unsound) - len(notes)} more")
    if rollbacks and step < rollbacks[-1].step and not rollbacks[-1].left_out:
        notes.append(f"rolled back from step {rollbacks[-1].step}: {rollbacks[-1].in_words()}")
    if left_out := left_out_by(rollbacks, num_ranks=num_ranks):
        notes.append(f"left out, as the guard has found: {in_words(left_out)}")
    for others in {rollback.num_ranks for rollback in rollbacks if rollback.left_out} - {num_ranks}:
        notes.append(
            f"NOT left out, as {num_ranks} rank(s) count batches otherwise than {others}: "
            f"{in_words(left_out_by(rollbacks, num_ranks=others))}"
        )
    return notes


def bad_steps(rows: Iterable[Sequence[Any]], notes: Mapping[str, Any]) -> dict[str, str]:
    """Return why checkpoints of a run hold a bad step, by name; ``rows`` as for `choose`, with metrics."""
    rollbacks, metric = read_rollbacks(notes), watched_metric(notes)
    return choose(rows, rollbacks, metric=metric)[0] if rollbacks or metric else {}


def in_words(spans: Sequence[BatchSpan]) -> str:
    """Name batches for people.

    Example:
        >>> in_words([BatchSpan("train", 0, 56, 57), BatchSpan("train", 1, 0, 4)])
        'batch 56 of epoch 0, batches 0 to 3 of epoch 1'
    """
    texts = []
    for name, epoch, first, end in spans:
        which = f"batch {first}" if end == first + 1 else f"batches {first} to {end - 1}"
        texts.append(f"{which} of epoch {epoch}" + (f" of {name!r}" if name != "train" else ""))
    return listed(texts)


def _is_sound(value: Any) -> bool:
    """Tell whether a metric of a checkpoint speaks for it: a finite number, or none at all."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return not is_number or math.isfinite(value)
