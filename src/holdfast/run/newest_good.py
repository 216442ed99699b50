"""The newest checkpoint that is good: bad ones are passed over, and never silently to the beginning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from holdfast.errors import CorruptCheckpointError

__all__ = ["GONE", "newest_good"]

GONE = "gone meanwhile"

Candidate = TypeVar("Candidate")


def newest_good(
    candidates: Iterable[tuple[str, Candidate]],
    check: Callable[[Candidate], str | None],
    *,
    bad: Mapping[str, str],
    where: str,
    advice: str,
) -> tuple[Candidate | None, list[tuple[str, str]]]:
    """Return the first candidate that is good, and (name, reason) of those before it that are not.

    Args:
        candidates: (name, what ``check`` gets), newest first.
        check: returns None for a good candidate, else the reason why it is bad, having set it aside; `GONE` for one
            that is no candidate any more.
        bad: reasons against candidates that earlier starts have set aside, by name; these are not checked again.
        where: the run, for the error.
        advice: what the user may do if none is good, beside repairing one.

    Raises:
        CorruptCheckpointError: there are checkpoints and none of them is good.
    """
    found: list[tuple[str, str]] = []
    for name, candidate in candidates:
        if name in bad:
            continue
        reason = check(candidate)
        if reason is None:
            return candidate, found
        if reason is not GONE:
            found.append((name, reason or "no reason is known"))
    every = {**bad, **dict(found)}
    if every:
        rows = "\n".join(f"  {one}: {reason}" for one, reason in every.items())
        raise CorruptCheckpointError(
            f"{where} has {len(every)} checkpoint(s) and none of them is good; not starting from zero:\n{rows}\n"
            f"what to do: repair or copy one back, {advice}"
        )
    return None, found
