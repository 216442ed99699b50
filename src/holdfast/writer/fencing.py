"""What the new holder of a lease does before it changes anything else in a run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from holdfast.run.catalog import Catalog
from holdfast.run.heartbeat import Heartbeat
from holdfast.run.reports import Attempt

__all__ = ["draw_fence"]


def draw_fence(
    heartbeat: Heartbeat,
    catalog: Catalog,
    attempt: Attempt,
    *,
    last: Attempt | None,
    more: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Draw the fence if one is needed; afterwards the attempt is known to have been registered under our lease.

    Args:
        heartbeat: the lease, taken before ``catalog`` was read.
        catalog: the checkpoints.
        attempt: of this life, registered by now.
        last: the attempt before, if run.json could tell.
        more: ids by name of checkpoints of earlier attempts that are still to be brought here.

    Raises:
        RunBusyError: somebody else has taken the lease over meanwhile: nothing must be changed any more.
        StorageError: nobody can say whether it still is ours.
    """
    before = heartbeat.lease.predecessor
    # A lease that is gone was given back; or it was deleted, by hand or by a delete that came late, under its owner.
    unended = last is not None and last.ended is None and last.attempt != attempt.attempt
    if before.may_act or (unended and not before.is_known):
        catalog.draw_fence(attempt.attempt, attempt.start_id, more)
        heartbeat.fenced()
        return
    catalog.admit(more, attempt.start_id)
    # A successor counts its attempt from ours only if ours was there before it came.
    heartbeat.verify()
