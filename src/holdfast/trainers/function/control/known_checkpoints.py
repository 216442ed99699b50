"""The checkpoints of the run as the controller knows them: which exist, the name of the next, which is the newest."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.errors import ConfigError
from holdfast.run.names import LATEST, RUN_NAMES, is_checkpoint_name
from holdfast.run.record import Record, metric_value
from holdfast.storage.base import check_path

__all__ = ["VALIDATED", "KnownCheckpoints", "UnwrittenValues", "without_marks"]

VALIDATED = "_validated"
"""Late metric that says how a validation ended: true, "failed" or "timeout"."""

_NUMBERED = re.compile(r"checkpoint_(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnwrittenValues:
    """The newest values of `save_checkpoint` that were not written."""

    attempt: int
    step: int
    name: str
    values: bytes

    @property
    def order(self) -> tuple[int, int]:
        """The highest is the newest."""
        return (self.attempt, self.step)


class KnownCheckpoints:
    """Names and order of checkpoints.

    Args:
        first_number: number of the first directory of a run.

    Attributes:
        kept: committed checkpoints by name.
        memory: what is kept in memory only.
        number: the highest number a checkpoint of this run ever had; below ``first_number`` if none had.
    """

    def __init__(self, first_number: int = 0) -> None:
        self.kept: dict[str, Record] = {}
        self.memory: UnwrittenValues | None = None
        self.number = first_number - 1
        self._taken: set[str] = set()
        self._set_aside: frozenset[str] = frozenset()
        self._pending: dict[str, Any] = {}

    def refresh(self, kept: Iterable[Record], *, taken: Iterable[str] = (), set_aside: Iterable[str] = ()) -> None:
        """Take over what was found under the run: checkpoints, all names, and names of damaged checkpoints."""
        self.kept = {record.name: record for record in kept}
        self._set_aside = frozenset(set_aside)
        self._taken = {*taken, *self.kept, *self._set_aside}
        numbers = (int(match[1]) for name in self._taken if (match := _NUMBERED.fullmatch(name)))
        self.number = max(self.number, *numbers, -1)

    def allocate(self, name: str | None = None, *, score: Any = None, uploaded: bool = False) -> str:
        """Return the directory of a new checkpoint, and reserve it.

        Args:
            name: what the user chose; None numbers it. The name of a checkpoint that was set aside gets a number added.
            score: of a dict checkpoint on its way to the disk.
            uploaded: the directory is there already.

        Raises:
            ConfigError: the name is taken, or not allowed.
        """
        if name is None:
            self.number += 1
            name = f"checkpoint_{self.number:06d}"
        elif name in self._set_aside and not uploaded:
            others = (f"{name}-{number}" for number in itertools.count(2))
            name = next(other for other in others if other not in self._taken and other not in self._pending)
        else:
            self._check(name, uploaded=uploaded)
        self._pending[name] = score
        return name

    def skip(self) -> str:
        """Return the name of a checkpoint that is not written: it takes a number all the same."""
        self.number += 1
        return f"checkpoint_{self.number:06d}"

    def _check(self, name: str, *, uploaded: bool) -> None:
        if not is_checkpoint_name(check_path(name)):
            raise ConfigError(
                f"checkpoint_dir_name={name!r}: it becomes the name of a directory of the run; give a plain name "
                f"that does not begin with a dot and is none of {', '.join((*RUN_NAMES, LATEST))}"
            )
        if name in self.kept or name in self._pending or (name in self._taken and not uploaded):
            raise ConfigError(
                f"checkpoint_dir_name={name!r} is taken in this run: every checkpoint needs a name of its own; put the "
                "epoch or step into it, or leave it out to have them numbered"
            )

    def committed(self, record: Record, deleted: Sequence[str] = ()) -> None:
        """Enter a checkpoint and forget those that retention deleted for it."""
        self._pending.pop(record.name, None)
        self._taken.add(record.name)
        self.kept[record.name] = record
        for name in deleted:
            self.kept.pop(name, None)

    def failed(self, name: str) -> None:
        """Note that a checkpoint was not saved: its name is free again."""
        self._pending.pop(name, None)

    def add_metrics(self, name: str, metrics: Mapping[str, Any]) -> None:
        """Add late metrics."""
        if name in self.kept:
            self.kept[name] = replace(self.kept[name], metrics={**self.kept[name].metrics, **metrics})

    def newest(self) -> Record | None:
        """Return the newest committed checkpoint; None if there is none."""
        return max(self.kept.values(), key=lambda record: record.order, default=None)

    def in_order(self) -> list[Record]:
        """Return all committed checkpoints, oldest first."""
        return sorted(self.kept.values(), key=lambda record: record.order)

    def scores(self, attribute: str) -> list[Any]:
        """Return the scores of checkpoints on the disk and on their way to it."""
        return [*(metric_value(record.metrics, attribute) for record in self.kept.values()), *self._pending.values()]


def without_marks(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics without what Holdfast notes among them for itself."""
    return {name: value for name, value in metrics.items() if name != VALIDATED}
