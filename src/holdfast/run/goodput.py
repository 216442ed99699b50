"""Where the time of a run went: useful steps, steps done again, saving, starting, and nobody there.

A pure function over the result of `RunIndex.read_history`; ``holdfast stats`` and its OpenMetrics show it. The end of a
life that was killed is its last sign (a report, a save): what it trained after that counts as down, not as done again,
and neither is useful.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .costs import Save
from .record import timestamp
from .reports import Attempt, RunHistory

__all__ = ["goodput"]

_IN_ORDER = ("finished", "stopped", "closed")  # these lives have saved their last step


def goodput(history: RunHistory, made: Sequence[Save], *, now: float | None = None) -> dict[str, float] | None:
    """Divide the wall time of a run since its first start, in seconds.

    Args:
        history: of the run.
        made: its saves (`costs.saves`).
        now: seconds since 1970 if the run is being trained; None: it ends with its last sign.

    Returns:
        "wall_s", and its parts "useful_s", "again_s" (trained by a life after the checkpoint that the next one went on
        from), "held_s" and "slowed_s" (by saves: the loop held, and steps slower than usual), "starting_s" (until the
        first step was done) and "down_s"; "ratio" is the useful part. None for a run that has not been trained.

    Example:
        >>> goodput(RunHistory(rows=[], attempts={}, run_id="", notes={}, events=[]), []) is None
        True
    """
    lives = [history.attempts[number] for number in sorted(history.attempts) if history.attempts[number].started]
    if not lives:
        return None
    began = {event.attempt: event.time for event in history.events if event.what == "began"}
    signs = _last_signs(history, made)
    when = {(save.attempt, save.name): save.time for save in made}
    parts = dict.fromkeys(("again_s", "held_s", "slowed_s", "starting_s", "down_s"), 0.0)
    begins = [timestamp(life.started) for life in lives]
    for place, (life, begin) in enumerate(zip(lives, begins, strict=True)):
        following = lives[place + 1] if place + 1 < len(lives) else None
        limit = begins[place + 1] if following is not None else math.inf
        end = max(begin, min(limit, timestamp(life.ended or "") or signs.get(life.attempt, begin)))
        if following is None and now is not None:
            end = max(end, now)
        trains = min(
            end, max(begin, began.get(life.attempt) or _trains(life, begin, end, is_seen=life.attempt in signs))
        )
        kept = end if following is None or life.reason in _IN_ORDER else _kept(life, following, trains, end, when)
        parts["starting_s"] += trains - begin
        parts["again_s"] += end - kept
        parts["down_s"] += 0.0 if following is None else limit - end
        saves = [save for save in made if save.attempt == life.attempt and save.time <= kept]
        slowed = math.fsum(max(0.0, (save.lost_s or 0.0) - (save.held_s or 0.0)) for save in saves)
        # A run of a few steps may have spent all of its time on saves; measured apart, they can come to a little more.
        held = min(kept - trains, math.fsum(save.held_s or 0.0 for save in saves))
        parts["held_s"] += held
        parts["slowed_s"] += min(kept - trains - held, slowed)
    wall = end - begins[0]
    useful = max(0.0, wall - math.fsum(parts.values()))
    return {"wall_s": wall, "useful_s": useful, **parts, "ratio": useful / wall if wall > 0 else 0.0}


def _last_signs(history: RunHistory, made: Sequence[Save]) -> dict[int, float]:
    signs: dict[int, float] = {}
    times = [(row["attempt"], row.get("time")) for row in history.rows]
    times += [
        (event.attempt, event.time) for event in history.events if event.what in ("began", "cost", "skipped", "died")
    ]
    times += [(save.attempt, save.time) for save in made]
    for number, moment in times:
        if isinstance(moment, (int, float)) and math.isfinite(moment):
            signs[number] = max(signs.get(number, 0.0), moment)
    return signs


def _trains(life: Attempt, begin: float, end: float, *, is_seen: bool) -> float:
    """Return when a life began to train of which no event says so: of workers, died before that, or older than it."""
    seconds = (life.details or {}).get("seconds")
    if isinstance(seconds, Mapping):
        phases = (seconds.get(name) for name in ("find", "start", "load"))
        return begin + math.fsum(value for value in phases if isinstance(value, (int, float)) and value > 0)
    return begin if is_seen else end


def _kept(life: Attempt, following: Attempt, trains: float, end: float, when: Mapping[tuple[int, str], float]) -> float:
    """Return until when the steps of a life count: the moment of the checkpoint that the next life went on from."""
    source = following.resumed_from
    if source is None or source.get("attempt") != life.attempt:
        return trains
    return min(end, max(trains, when.get((life.attempt, str(source.get("name"))), end)))
