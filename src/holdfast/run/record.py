"""What a run remembers about one of its checkpoints, and how that is written down."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError, CorruptCheckpointError

if TYPE_CHECKING:
    from holdfast.format.manifest import Manifest

__all__ = [
    "COLUMNS",
    "Record",
    "flat_metrics",
    "from_plain",
    "metric_value",
    "pack",
    "plain_metrics",
    "record_from_manifest",
    "record_from_row",
    "timestamp",
    "to_plain",
    "unpack",
]

# Order of the values of a row. New columns go to the end: rows of an older writer are then shorter.
COLUMNS = ("name", "attempt", "step", "epoch", "created", "size", "reused", "pinned", "metrics", "checkpoint_id")

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One committed checkpoint of a run.

    Attributes:
        name: directory name under the run.
        created: seconds since 1970 by the clock of the host that saved; informative, never used for order.
        metrics: metrics of the manifest with late ones merged over them.
        resumed_from: the current attempt started from this one.
        size: bytes a reader sees.
        reused: bytes of these that are shared with the checkpoint before.
    """

    name: str
    attempt: int
    step: int
    epoch: float | None = None
    created: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    pinned: bool = False
    resumed_from: bool = False
    size: int = 0
    reused: int = 0
    checkpoint_id: str = ""

    @property
    def order(self) -> tuple[int, int, str]:
        """Sort key: the highest is the newest. Clocks play no part in it."""
        return (self.attempt, self.step, self.name)

    def row(self) -> list[Any]:
        """The values in the order of `COLUMNS`, as JSON."""
        values = [getattr(self, column) for column in COLUMNS]
        values[COLUMNS.index("metrics")] = to_plain(self.metrics)
        return values


def record_from_row(row: Sequence[Any]) -> Record:
    """Rebuild a record from its row.

    Raises:
        CorruptCheckpointError: the row is not one that `Record.row` wrote.
    """
    try:
        values = dict(zip(COLUMNS, row, strict=False))
        if values["metrics"]:
            values["metrics"] = from_plain(values["metrics"])
        record = Record(**values)
        numbers = (record.attempt, record.step, record.size, record.reused)
        others = (record.created, *(() if record.epoch is None else (record.epoch,)))
        if not (
            all(type(number) is int for number in numbers)
            and all(type(number) in (int, float) for number in others)
            and isinstance(record.name, str)
            and isinstance(record.checkpoint_id, str)
            and isinstance(record.metrics, Mapping)
            and type(record.pinned) is bool
        ):
            raise TypeError
        return record
    except (TypeError, ValueError, AttributeError, KeyError, RecursionError) as error:
        raise CorruptCheckpointError(f"not a checkpoint row: {str(row)[:80]!a}", file="run.json") from error


def pack(record: Record) -> list[Any]:
    """The row of run.json: what orders checkpoints, and the rest as text, which is parsed only when asked for.

    A run of ten thousand checkpoints opens in a third of the time that way.
    """
    row = record.row()
    return [*row[:3], json.dumps(row[3:], separators=(",", ":"), default=str)]


def unpack(row: Sequence[Any]) -> Record:
    """Undo `pack`.

    Raises:
        CorruptCheckpointError: the row is not one that `pack` wrote.
    """
    try:
        rest = json.loads(row[3])
        if type(rest) is not list:
            raise TypeError
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        raise CorruptCheckpointError(f"not a checkpoint row: {str(row)[:80]!a}", file="run.json") from error
    return record_from_row([*row[:3], *rest])


def record_from_manifest(name: str, manifest: Manifest, *, metrics: Mapping[str, Any], pinned: bool) -> Record:
    """Build a record from the truth: the manifest and what its sidecar adds."""
    return Record(
        name=name,
        attempt=manifest.attempt,
        step=manifest.step or 0,
        epoch=manifest.epoch,
        created=timestamp(manifest.created),
        metrics={**manifest.metrics, **metrics},
        pinned=pinned,
        size=manifest.total_bytes,
        reused=manifest.reused_bytes,
        checkpoint_id=manifest.checkpoint_id,
    )


def timestamp(created: str) -> float:
    """Turn the ISO time of a manifest into seconds since 1970; 0.0 where it cannot be read."""
    try:
        # Python 3.10 does not read the suffix "Z".
        moment = datetime.fromisoformat(created.replace("Z", "+00:00"))
    except ValueError:
        return 0.0
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def metric_value(metrics: Mapping[str, Any], name: str) -> Any:
    """Look up one metric; None if there is none.

    The exact name first (a mapping is no metric), then ``/`` leads into nested mappings.

    Example:
        >>> metric_value({"val": {"acc": 0.5}}, "val/acc"), metric_value({"val/acc": 0.7}, "val/acc")
        (0.5, 0.7)
    """
    if name in metrics and not isinstance(metrics[name], Mapping):
        return metrics[name]
    cut = name.find("/")
    while cut >= 0:
        inner = metrics.get(name[:cut])
        if isinstance(inner, Mapping) and (value := metric_value(inner, name[cut + 1 :])) is not None:
            return value
        cut = name.find("/", cut + 1)
    return None


def flat_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Spread nested metrics out: each under the name that `metric_value` finds it by.

    Example:
        >>> flat_metrics({"loss": 1, "val": {"acc": 0.5}})
        {'loss': 1, 'val/acc': 0.5}
    """
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            for inner, item in flat_metrics(value).items():
                flat.setdefault(f"{name}/{inner}", item)
        else:
            flat[name] = value
    return flat


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as JSON values; tensors and arrays of one element become numbers.

    Raises:
        ConfigError: a value is none of these.
    """
    read = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
    for name, value in read.items():
        try:
            json.dumps(to_plain({name: value}), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"metric {name!r} is {value!r}: give a number or text") from error
    return read


def to_plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Make metrics strict JSON: NaN and infinities become strings that `from_plain` knows."""
    return {name: _plain(value) for name, value in metrics.items()}


def from_plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `to_plain`."""
    return {name: _unplain(value) for name, value in metrics.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _unplain(value: Any) -> Any:
    kind = type(value)
    if kind is str:
        return _SPECIAL.get(value, value)
    if kind is dict:
        return {name: _unplain(item) for name, item in value.items()}
    return [_unplain(item) for item in value] if kind is list else value
