"""The curves of a page: a curve for every metric, in the order in which a reader looks, and bounded."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.run.record import flat_metrics
from holdfast.run.retention import is_number

__all__ = ["MOST_POINTS", "clock", "curves", "grouped", "thin"]

MOST_POINTS = 2000  # of one curve
Point = tuple[float, float]

_TOGETHER = 12  # so few metrics are not divided into groups
_LOSS = re.compile(r"loss|nll|perplexity|(^|[/._])ppl", re.IGNORECASE)


def curves(live: Iterable[Mapping[str, Any]], most: int = MOST_POINTS) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a curve for each metric that has numbers at steps, and sentences about values that cannot be drawn."""
    points: dict[str, list[Point]] = defaultdict(list)
    odd: Counter[str] = Counter()
    for row in live:
        step: Any = row.get("step")
        if not is_number(step):
            continue
        for name, value in flat_metrics(row["metrics"]).items():
            if name.startswith("_") or isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if math.isfinite(value):
                points[name].append((step, value))
            else:
                odd[name] += 1
    found = [
        {"name": name, "points": thin(sorted(known), most), "count": len(known), "odd": odd[name]}
        for name, known in points.items()
    ]
    return found, [f"{name}: {count} of its values are NaN or infinite and not drawn" for name, count in odd.items()]


def grouped(metrics: Iterable[dict[str, Any]], ranking: str | None) -> list[dict[str, Any]]:
    """Order metrics and give each its group: the ranking metric, losses, then the rest by the first part of its name.

    The first two, and the rest where there are few in all, are of the group "", which the page shows open.
    """
    known = list(metrics)
    heads = Counter(_head(metric["name"]) for metric in known)
    few = len(known) <= _TOGETHER
    rows = []
    for metric in known:
        name = metric["name"]
        place = 0 if name == ranking else 1 if _LOSS.search(name) else 2
        head = _head(name)
        group = "" if few or place < 2 else head if head and heads[head] > 1 else "other metrics"
        rows.append(((place, group == "other metrics", group, name), {**metric, "group": group}))
    return [metric for _, metric in sorted(rows, key=lambda row: row[0])]


def _head(name: str) -> str:
    head, mark, _ = re.sub(r"[.]", "/", name).partition("/")
    return head if mark else ""


def clock(live: Iterable[Mapping[str, Any]], most: int = MOST_POINTS) -> tuple[list[list[float | None]], float | None]:
    """Return rows [step, seconds, epoch] in order of steps, and the time that the seconds count from.

    Where a step has no row, a reader takes what lies between its neighbours: of an epoch only its first row is kept, so
    that it runs evenly from one whole number to the next.
    """
    rows = sorted(
        (row["step"], row["time"], row.get("epoch"))
        for row in ({**row, "epoch": row.get("epoch") if is_number(row.get("epoch")) else None} for row in live)
        if is_number(row.get("step")) and is_number(row.get("time"))
    )
    if not rows:
        return [], None
    began = min(moment for _, moment, _ in rows)
    every = math.ceil(len(rows) / most)
    kept = [row for at, row in enumerate(rows) if at % every == 0 or at == len(rows) - 1]
    starts: list[tuple[float, float]] = []
    for step, _, epoch in rows:
        if epoch is not None and (not starts or epoch > starts[-1][1]):
            starts.append((step, epoch))
    return [[step, round(moment - began, 3), _epoch_at(starts, step)] for step, moment, _ in kept], began


def _epoch_at(starts: Sequence[Point], step: float) -> float | None:
    """Return the epoch at a step, with the part that is done: as long as that before, where it has not ended."""
    before = [at for at, (first, _) in enumerate(starts) if first <= step]
    if not before:
        return None
    at = before[-1]
    first, epoch = starts[at]
    others = starts[at : at + 2] if at + 1 < len(starts) else starts[at - 1 : at + 1] if at else []
    if len(others) < 2:
        return epoch
    length = (others[1][0] - others[0][0]) / (others[1][1] - others[0][1])
    return round(epoch + (step - first) / length, 4)


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Reduce a curve to at most ``most`` points: the lowest and the highest of each of ``most // 2`` equal ranges of x.

    So no spike disappears, and drawn at up to ``most // 2`` pixels the picture is that of all points. (Known as min-max
    decimation.)

    Args:
        points: (x, y) with finite numbers, in ascending order of x.
        most: bound, at least 4.
    """
    if len(points) <= most:
        return list(points)
    ranges = most // 2 - 1  # the two ends are points of their own
    first, last = points[0][0], points[-1][0]
    width = (last - first) / ranges or 1.0
    kept = [points[0]]
    begin = 0
    for number in range(ranges):
        end = begin
        limit = first + (number + 1) * width
        while end < len(points) and (points[end][0] <= limit or number == ranges - 1):
            end += 1
        if begin < end:
            # By position, not by value: one point that is both is kept once.
            low = min(range(begin, end), key=lambda at: points[at][1])
            high = max(range(begin, end), key=lambda at: points[at][1])
            kept += [points[at] for at in sorted({low, high})]
        begin = end
    kept.append(points[-1])
    # The ends may be extremes of their ranges as well.
    return [point for at, point in enumerate(kept) if at == 0 or point != kept[at - 1]]
