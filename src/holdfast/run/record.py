"""What a run stores about its checkpoints: records, their rows, their metrics, and values set after the commit.

Late metrics and the pin are in ``.metrics.json`` beside the manifest (`Sidecar`). That file is the truth, ``run.json``
caches it.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from holdfast._log import get_logger
from holdfast._outgoing import brief
from holdfast.errors import (
    ConfigError,
    CorruptCheckpointError,
    StorageConflictError,
    StorageExistsError,
    StorageNotFoundError,
)
from holdfast.format.digest import check_object, close_object
from holdfast.format.names import check_links, join
from holdfast.format.strict_json import check_length
from holdfast.storage.base import Storage

if TYPE_CHECKING:
    from holdfast.format.manifest import Manifest

# Order of the values of a row. New columns go to the end: rows of an older writer are then shorter.
COLUMNS = ("name", "attempt", "step", "epoch", "created", "size", "reused", "pinned", "metrics", "checkpoint_id")

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_TRIES = 32
_SHORT = frozenset({float, str, bool, type(None)})
_PLAIN = _SHORT | {int}
_USUAL = 1 << 63
_MAX_DEPTH = 32  # of metrics

METRICS_FILE = ".metrics.json"
_EARLY = {"metrics", "pinned"}  # the keys of versions that wrote no digest
_MAX_BYTES = 16 << 20
_said: set[str] = set()  # damage that this process has warned of
_log = get_logger("catalog")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One committed checkpoint of a run.

    Attributes:
        name: directory name under the run.
        created: seconds since 1970 by the clock of the host that saved; informative, never used for order.
        metrics: metrics of the manifest with late metrics merged over them.
        resumed_from: the current attempt started from this checkpoint.
        size: bytes a reader sees.
        reused: bytes of these that are shared with the checkpoint before it.
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


def pack(record: Record) -> list[Any]:
    """Return the row for run.json: the columns that order checkpoints, and the others as text, parsed only when needed.

    A run of ten thousand checkpoints opens in a third of the time that way.

    Raises:
        ConfigError: a metric is an integer of so many digits that it cannot be written.
    """
    row = [getattr(record, column) for column in COLUMNS]
    row[COLUMNS.index("metrics")] = to_plain(record.metrics)
    try:
        return [*row[:3], json.dumps(row[3:], separators=(",", ":"), default=str)]
    except ValueError as error:
        raise ConfigError(
            f"checkpoint {record.name!r}: a metric is an integer of so many digits that Python does not write it: give "
            "a float (its logarithm), or put it into the state"
        ) from error


def unpack(row: Sequence[Any]) -> Record:
    """Undo `pack`.

    Raises:
        CorruptCheckpointError: `pack` did not write this row.
    """
    try:
        rest = json.loads(row[3])
        if type(rest) is not list:
            raise TypeError
        row = [*row[:3], *rest]
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
    except (TypeError, ValueError, AttributeError, LookupError, RecursionError) as error:
        raise CorruptCheckpointError(f"not a checkpoint row: {brief(row, 80)!a}", file="run.json") from error


def record_from_manifest(name: str, manifest: Manifest, sidecar: Sidecar) -> Record:
    """Build a record from the manifest and the sidecar.

    With a damaged sidecar nobody knows the metrics that count, so the record has none and ranks below all others.
    """
    metrics = {} if sidecar.damage else {**manifest.metrics, **sidecar.metrics}
    return Record(
        name=name,
        attempt=manifest.attempt,
        step=manifest.step or 0,
        epoch=manifest.epoch,
        created=timestamp(manifest.created),
        metrics=metrics,
        pinned=sidecar.pinned,
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


class RecordTable(dict[str, list[Any]]):
    """Packed rows (`record.pack`) by checkpoint name; watchers see which names were touched, and look at those alone.

    Example:
        >>> rows = RecordTable([["a", 1, 7, "[]"], ["b", 1, 9, "[]"]])
        >>> touched = rows.watch()
        >>> del rows["a"]
        >>> list(rows.newest_first()), touched
        (['b'], {'a'})
    """

    def __init__(self, rows: Iterable[list[Any]] = ()) -> None:
        super().__init__((row[0], row) for row in rows)
        self._order: list[tuple[int, int, str]] | None = None  # oldest first; made when first asked for
        self._watches: list[set[str]] = []

    def watch(self) -> set[str]:
        """Return a set to which every name touched from now on is added; the caller may clear it."""
        touched: set[str] = set()
        self._watches.append(touched)
        return touched

    def newest_first(self) -> Iterator[str]:
        """Iterate over all names, the highest (attempt, step, name) first; stop before anything is changed."""
        if self._order is None:
            self._order = sorted((row[1], row[2], name) for name, row in self.items())
        for _, _, name in reversed(self._order):
            yield name

    def __setitem__(self, name: str, row: list[Any]) -> None:
        self._leave(name)
        super().__setitem__(name, row)
        if self._order is not None:
            insort(self._order, (row[1], row[2], name))

    def __delitem__(self, name: str) -> None:
        self._leave(name)
        super().__delitem__(name)

    def pop(self, name: str, default: Any = None) -> Any:
        """Remove a row and return it, ``default`` if it does not exist."""
        row = self.get(name, default)
        if name in self:
            del self[name]
        return row

    def update(self, rows: Mapping[str, list[Any]]) -> None:  # type: ignore[override]  # only this form is used
        """Set many rows."""
        if self._order is not None:
            for name, row in rows.items():
                self[name] = row
            return
        for touched in self._watches:
            touched.update(rows)
        super().update(rows)

    def clear(self) -> None:
        """Remove all rows."""
        for touched in self._watches:
            touched.update(self)
        super().clear()
        self._order = None

    def _leave(self, name: str) -> None:
        """Take a name out of the order, before its row changes."""
        for touched in self._watches:
            touched.add(name)
        if self._order is not None and (row := self.get(name)) is not None:
            del self._order[bisect_left(self._order, (row[1], row[2], name))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """Metrics and pin of a checkpoint, which may change after its commit.

    Attributes:
        damage: why the metrics that were there are lost; "" if they are not. It stays until somebody sets or removes
            the pin.
    """

    metrics: Mapping[str, Any] = field(default_factory=dict)
    pinned: bool = False
    damage: str = ""

    def with_metrics(self, metrics: Mapping[str, Any]) -> Sidecar:
        """Merge later metrics over the present ones."""
        return replace(self, metrics={**self.metrics, **metrics})

    def with_pin(self, on: bool) -> Sidecar:
        """Set or remove the pin."""
        return replace(self, pinned=on, damage="")


def read_sidecar(storage: Storage, name: str) -> Sidecar:
    """Read the sidecar of checkpoint ``name``; without the file, an empty sidecar.

    A damaged sidecar is logged and counts as a pin: what cannot be known is not deleted.
    """
    path = join(name, METRICS_FILE)
    try:
        check_links(storage, name, (METRICS_FILE,))
        with storage.open(path) as reader:
            data = bytearray(min(reader.size, _MAX_BYTES))
            reader.read_into(0, memoryview(data))
        sidecar = _parsed(bytes(data))
    except StorageNotFoundError:
        return Sidecar()
    except CorruptCheckpointError as error:  # a link that leads out of the checkpoint
        sidecar = Sidecar(pinned=True, damage=str(error))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        sidecar = Sidecar(pinned=True, damage=str(error))
    if sidecar.damage and (said := f"{storage.uri}/{path} {sidecar.damage}") not in _said:  # read again with each save
        _said.add(said)
        _log.warning(
            "%s/%s is damaged (%s): the checkpoint counts as pinned and is not ranked, until `holdfast unpin` or "
            "`holdfast pin` sets it right",
            storage.uri, path, sidecar.damage,
        )  # fmt: skip
    return sidecar


def _parsed(data: bytes) -> Sidecar:
    closed = check_object(data)
    if closed is False:
        raise ValueError("it differs from its digest")
    body = dict(json.loads(data))
    metrics, pinned, damage = body.get("metrics") or {}, body.get("pinned", False), body.get("damage", "")
    if closed is None and not body.keys() <= _EARLY:
        raise ValueError("it has no digest")
    if type(metrics) is not dict or type(pinned) is not bool or type(damage) is not str:
        raise TypeError("it is not what was written")
    return Sidecar(metrics=from_plain(metrics), pinned=pinned, damage=damage)


def write_sidecar(storage: Storage, name: str, sidecar: Sidecar) -> None:
    """Replace the sidecar atomically; durable on return."""
    storage.put(join(name, METRICS_FILE), _body(sidecar))


def change_sidecar(storage: Storage, name: str, how: Callable[[Sidecar], Sidecar]) -> Sidecar:
    """Replace the sidecar by ``how(sidecar)``; if another process changes it meanwhile, read it and try again.

    So the owner of a run and a process that evaluates its checkpoints do not lose each other's values.

    Raises:
        StorageConflictError: others change it faster than this process.
    """
    path = join(name, METRICS_FILE)
    for last in range(_TRIES):
        try:
            etag = storage.stat(path).etag
            is_there = True
        except StorageNotFoundError:
            etag, is_there = None, False
        made = how(read_sidecar(storage, name))
        try:
            storage.put(path, _body(made), if_absent=not is_there, if_match=etag)
            return made
        except (StorageConflictError, StorageExistsError):
            if last == _TRIES - 1:
                raise
    raise AssertionError("unreachable")


def _body(sidecar: Sidecar) -> bytes:
    body = {"metrics": to_plain(sidecar.metrics), "pinned": sidecar.pinned}
    if sidecar.damage:
        body["damage"] = sidecar.damage
    return close_object(json.dumps(body, allow_nan=False).encode())


def metric_value(metrics: Mapping[str, Any], name: str) -> Any:
    """Look up one metric; None if it does not exist.

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
    """Flatten nested metrics: each gets the name under which `metric_value` finds it.

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
    """Return a copy of metrics in which everything is JSON: nested dicts and lists, one-element tensors as numbers.

    A tensor on an accelerator is read here, which waits for its device.

    Raises:
        ConfigError: a value is no metric; the message names the first.
    """
    if type(metrics) is dict:
        for key, value in metrics.items():
            kind = type(value)
            if kind not in _SHORT and not (kind is int and -_USUAL < value < _USUAL):  # counts, at each report
                break
            if type(key) is not str:
                break
        else:
            return metrics.copy()
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"report(metrics={brief(metrics, 60)}): metrics are a dict such as {{'loss': 0.3}}, not "
            f"{kind_name(metrics)}"
        )
    return _plain_mapping(metrics, "", 0)


def _plain_mapping(metrics: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
    if depth > _MAX_DEPTH:
        raise ConfigError(f"metric {path!r} is nested more than {_MAX_DEPTH} deep: does it contain itself?")
    plain = {}
    for key, value in metrics.items():
        if not isinstance(key, (str, int)):
            raise ConfigError(f"metrics{f' below {path!r}' if path else ''} have the key {brief(key, 60)}: use strings")
        plain[str(key)] = _plain(value, f"{path}/{key}" if path else str(key), depth)
    return plain


def _plain(value: Any, path: str, depth: int) -> Any:
    check_length(value, path)
    if type(value) in _PLAIN:
        return value
    for kind in (int, float, str):  # subclasses (an enum, numpy.float64) become what they are
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return _plain_mapping(value, path, depth + 1)
    if isinstance(value, (list, tuple)):
        if depth >= _MAX_DEPTH:
            raise ConfigError(f"metric {path!r} is nested more than {_MAX_DEPTH} deep: does it contain itself?")
        return [_plain(item, f"{path}/{number}", depth + 1) for number, item in enumerate(value)]
    shape = getattr(value, "shape", None)
    if shape is not None and callable(getattr(value, "item", None)):  # torch, NumPy, JAX
        if math.prod(shape) != 1:
            raise ConfigError(
                f"metric {path!r} is a {type(value).__name__} of shape {tuple(shape)}: report one number "
                "(.mean(), .item()), or .tolist() if you want them all; tensors to keep go into state= or a checkpoint"
            )
        return _plain(value.item(), path, depth + 1)
    number = number_of(value)
    if number is None:
        raise ConfigError(
            f"metric {path!r} is {brief(value, 60)} ({kind_name(value)}): metrics are numbers, strings, None, and "
            "dicts and lists of these; put anything else into state= or the checkpoint"
        )
    return number


def number_of(value: Any) -> float | None:
    """Convert what has a number's value: a one-element tensor, a Decimal, an average meter; None for the rest."""
    if isinstance(value, (int, float)):
        return value
    shape = getattr(value, "shape", None)
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__") or (shape and math.prod(shape) != 1):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def kind_name(value: Any) -> str:
    """Name the class of a value for a message."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def to_plain(value: Any) -> Any:
    """Make metrics, or one value of theirs, strict JSON: NaN and infinities become strings that `from_plain` knows."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: to_plain(item) for name, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def from_plain(value: Any) -> Any:
    """Undo `to_plain`."""
    kind = type(value)
    if kind is str:
        return _SPECIAL.get(value, value)
    if kind is dict:
        return {name: from_plain(item) for name, item in value.items()}
    return [from_plain(item) for item in value] if kind is list else value
