"""What a group of workers starts from, and the first message to its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.run.record import Record

from ..engine import Placed
from .actions import Begin, Resumed
from .known_checkpoints import UnwrittenValues
from .plan import RunSpec

__all__ = ["Start", "choose_start"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a group begins.

    Attributes:
        location: checkpoint to go on from; None: there is none, or it is in memory.
        memory: packed values to go on from.
        step: number of the last report that is part of it.
        kept: the checkpoint, if it is of this run.
        resumed: what the index of the run notes; None for a fresh start.
        words: the same for people.
    """

    location: Mapping[str, Any] | None = None
    memory: bytes | None = None
    step: int = 0
    kept: Record | None = None
    resumed: Resumed | None = None
    words: str = "the beginning"

    def begin(
        self,
        plan: RunSpec,
        rank: int,
        *,
        size: int,
        placed: Placed | None,
        attempt: int,
        start_id: str,
        past: Sequence[str] = (),
    ) -> Begin:
        """Make the first message to a worker.

        Args:
            plan: of the run.
            rank: of the worker.
            size: number of workers.
            placed: where it was started; None: all are on the driver's machine.
            attempt: number of the attempt.
            start_id: id of the attempt.
            past: ids of earlier attempts of the run, which have ended.
        """
        storage = dict(plan.storage)
        header = {
            "do": "begin",
            "rank": rank,
            "world_size": size,
            "local_rank": rank if placed is None else placed.local_rank,
            "local_world_size": size if placed is None else placed.local_size,
            "node_rank": 0 if placed is None else placed.node_rank,
            "apart": placed is not None,  # the driver cannot read what only this node has
            "first_index": self.step + 1,
            "experiment_name": plan.run_name,
            "run_name": plan.run_name,
            "storage": storage,
            "local_dir": plan.local_dir,
            "run_root": {"storage": storage, "uri": plan.uri, "name": ""},
            "attempt": attempt,
            "start_id": start_id,
            "past": list(past),
            "strategy": None if plan.strategy is None else dict(plan.strategy),
            "score": None if plan.score is None else dict(plan.score),
            "report_timeout_s": plan.limits.report_s,
            "all_metrics": plan.has_callbacks,
            "checkpoint": None if self.location is None else dict(self.location),
        }
        return Begin(rank=rank, header=header, memory=self.memory)


def choose_start(plan: RunSpec, kept: Record | None, memory: UnwrittenValues | None) -> Start:
    """Choose the newest of what there is.

    Args:
        plan: of the run; it may name a checkpoint for runs that have none of their own.
        kept: the newest good checkpoint of the run.
        memory: the newest values that were not written.
    """
    if memory is not None and (kept is None or memory.order > kept.order[:2]):
        name = f"{memory.name} (in memory)"
        resumed = Resumed(name=name, step=memory.step, attempt=memory.attempt)
        return Start(memory=memory.values, step=memory.step, resumed=resumed, words=name)
    if kept is not None:
        resumed = Resumed(name=kept.name, step=kept.step, attempt=kept.attempt)
        location = plan.location(kept.name)
        return Start(location=location, step=kept.step, kept=kept, resumed=resumed, words=kept.name)
    first = plan.first_checkpoint
    if first is not None:
        uri = f"{first['uri'].rstrip('/')}/{first['name']}"
        return Start(location=first, resumed=Resumed(name=uri, step=0), words=uri)
    if plan.first_memory is not None:
        return Start(memory=plan.first_memory, words="the values of resume_from_checkpoint")
    return Start()
