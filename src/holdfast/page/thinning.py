"""Curves with a bounded number of points that still show every extreme."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MOST_POINTS", "thin"]

MOST_POINTS = 2000

Point = tuple[float, float]


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
