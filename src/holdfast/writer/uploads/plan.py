"""What a mirrored run decides: pure functions of what lies at its two sides."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.config import Mirror
from holdfast.run.record import Record

__all__ = ["MirrorLimits", "await_upload", "done_with", "given_up", "limits_of", "pause_s"]

_PAUSE_S = 1.0
_MAX_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorLimits:
    """How far the remote side may be behind, and what happens then.

    Attributes:
        max_behind: checkpoints that may wait for their upload.
        when_behind: "skip", "wait" or "raise"; the trainer does the latter two.
        delete_after_upload: the local side keeps nothing that the remote has.
        warn_after_s: seconds without an arrival, while something waits, after which that is said.
    """

    max_behind: int = 2
    when_behind: str = "skip"
    delete_after_upload: bool = False
    warn_after_s: float = 1800.0

    def to_json(self) -> dict[str, Any]:
        """Describe this value for the wire."""
        return {name: getattr(self, name) for name in self.__slots__}


def limits_of(mirror: Mirror) -> MirrorLimits:
    """Give the limits that a user's `Mirror` asks for."""
    return MirrorLimits(
        max_behind=mirror.max_behind,
        when_behind=mirror.when_behind,
        delete_after_upload=mirror.delete_after_upload,
        warn_after_s=mirror.warn_after_s,
    )


def await_upload(local: Iterable[Record], remote: Iterable[Record]) -> list[Record]:
    """List the local checkpoints that the remote has yet to get, oldest first.

    Those are the ones newer than anything the remote has: what is older was left out on purpose, by a policy or
    because another life went on from elsewhere.
    """
    newest = max((record.order for record in remote), default=(-1, -1, ""))
    return sorted((record for record in local if record.order > newest), key=lambda record: record.order)


def given_up(waiting: Sequence[str], limits: MirrorLimits, in_flight: Collection[str] = ()) -> list[str]:
    """List what is left out when too many wait: the oldest ones, but neither the newest nor what is under way."""
    if limits.when_behind != "skip":
        return []
    spare = [name for name in waiting[:-1] if name not in in_flight]
    return spare[: max(0, len(waiting) - limits.max_behind)]


def done_with(local: Collection[str], uploaded: Collection[str], limits: MirrorLimits) -> list[str]:
    """List the local checkpoints that need not stay now that the remote has them."""
    return sorted(set(local) & set(uploaded)) if limits.delete_after_upload else []


def pause_s(failures: int, chance: float) -> float:
    """Give the seconds before the next try after ``failures`` of them in a row; ``chance`` is random in [0, 1)."""
    longest = min(_MAX_PAUSE_S, _PAUSE_S * 2.0 ** min(failures - 1, 16))
    return longest * (0.5 + chance / 2)
