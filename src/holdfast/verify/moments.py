"""Choose when a run is saved and killed: a pure function of the rows of an uninterrupted life."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from .plan import Moment, Row

__all__ = ["Kill", "choose", "epoch_of"]

_LATER = 2  # rows from the save to the kill, at most: the steps in between are trained again


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A planned kill.

    Attributes:
        save: the save before it, which the next life goes on from; None: the script decides what it saves.
        stop: when the processes are killed.
        why: what is special about the moment of the save.
    """

    save: Moment | None
    stop: Moment
    why: str = ""


def choose(rows: Sequence[Row], count: int, *, seed: int = 0) -> list[Kill]:
    """Choose ``count`` kills, ascending: after a report, in the middle of an epoch, at an epoch's end, then anywhere.

    Args:
        rows: of a single rank of an uninterrupted life, in order.
        count: number of kills; fewer where the run is too short.
        seed: of the random choices.
    """
    chance = random.Random(seed)
    steps = [row for row in rows if row["event"] == "boundary" and row["step"] > 0]
    kinds = _kinds(steps, {(row["run"], row["step"]) for row in rows if row["event"] == "report"})
    last = len(steps) - 1
    chosen: dict[int, str] = {}  # index of the save -> why

    def take(why: str, among: Sequence[int]) -> None:
        # Two lives may not be killed in the same step; and each should train some steps of its own.
        free = [index for index in among if index < last and all(abs(index - other) > 1 for other in chosen)]
        if free and len(chosen) < count:
            chosen[chance.choice(free)] = why

    for why in ("after a report", "in the middle of an epoch", "at the end of an epoch"):
        take(why, kinds.get(why, ()))
    while len(chosen) < count:
        before = len(chosen)
        take("anywhere", range(last))
        if len(chosen) == before:
            break
    if not chosen and count and len(steps) > 1:
        chosen[0] = "anywhere"
    kills = []
    order = sorted(chosen)
    for place, index in enumerate(order):
        end = order[place + 1] - 1 if place + 1 < len(order) else last
        stop = min(index + chance.randint(1, _LATER), max(end, index + 1), last)
        kills.append(Kill(save=_moment(steps[index]), stop=_moment(steps[stop]), why=chosen[index]))
    return kills


def epoch_of(row: Row) -> int | None:
    """Return the number of the epoch a row was written in."""
    text = row.get("items", {}).get("holdfast/progress/epoch", "")
    return int(text.split()[1]) if text.startswith("int ") else None


def _kinds(steps: Sequence[Row], reported: set[tuple[str, int]]) -> dict[str, list[int]]:
    """Return the boundaries (by index) by what is special about them."""
    kinds: dict[str, list[int]] = {}
    for index, row in enumerate(steps):
        after = steps[index + 1] if index + 1 < len(steps) else None
        if after is None:
            continue
        is_last_here = (after["run"], after["step"]) != (row["run"], row["step"])  # its epoch may end with it
        ends = after["run"] != row["run"] or epoch_of(after) != epoch_of(row)
        if (row["run"], row["step"]) in reported and is_last_here:
            kinds.setdefault("after a report", []).append(index)
        elif ends or not is_last_here:
            kinds.setdefault("at the end of an epoch", []).append(index)
        elif index and row["nth"] == 0 and epoch_of(steps[index - 1]) == epoch_of(row):
            kinds.setdefault("in the middle of an epoch", []).append(index)
    return kinds


def _moment(row: Row) -> Moment:
    return Moment(step=row["step"], event=row["event"], nth=row["nth"], run=row["run"])
