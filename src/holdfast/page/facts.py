"""What a page shows, as plain JSON. Only what is named here gets in: no notes, no configuration, no environment."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from holdfast.config import Keep
from holdfast.errors import CheckpointError, CheckpointNotFoundError, ConfigError, HoldfastError, StorageError
from holdfast.format.commit import read_manifest
from holdfast.run.candidates import copies_shown
from holdfast.run.catalog import Catalog
from holdfast.run.costs import Deletion, Save, attempt_rows, deletions, saves, stats
from holdfast.run.index import RUN_FILE
from holdfast.run.record import Record, flat_metrics
from holdfast.run.reports import live_attempts, live_rows
from holdfast.run.retention import best_of, decide, is_number
from holdfast.run.status import run_state
from holdfast.storage.base import Storage
from holdfast.storage.together import together

__all__ = ["MOST_POINTS", "collect", "folder_facts", "run_facts", "thin"]

MOST_POINTS = 2000  # of one curve
Point = tuple[float, float]

_MOST_CURVES = 60
_CURVE_OF_RUN = 400  # points of one run's curve where several are compared
_GONE = "deleted"


def collect(storage: Storage) -> dict[str, Any]:
    """Describe the run at ``storage``, or the runs one level below it.

    Raises:
        CheckpointNotFoundError: there is neither.
    """
    if storage.exists(RUN_FILE):
        return run_facts(storage)
    children = sorted(info.path.rstrip("/") for info in storage.list("", recursive=False) if info.path.endswith("/"))
    runs = [name for name in children if storage.exists(f"{name}/{RUN_FILE}")]
    if runs:
        return folder_facts(storage, runs)
    facts = run_facts(storage)  # a run whose run.json was lost still has its manifests
    if not facts["checkpoints"] and not facts["metrics"]:
        raise CheckpointNotFoundError(f"there is no run at {storage.uri}, and none directly below it: check the path")
    return facts


def run_facts(storage: Storage) -> dict[str, Any]:
    """Describe one run.

    Returns:
        JSON with ``metrics`` (curves of at most `MOST_POINTS` points [step, value]), ``checkpoints`` (newest
        first), ``attempts``, ``warnings``, ``state`` and ``live`` (whether it is being trained now).
    """
    catalog = Catalog(storage)
    history = catalog.index.read_history()
    live = live_rows(history.rows, history.attempts)
    curves, warnings = _curves(live)
    records = catalog.records()
    made = saves(history.events, records)
    is_remote = storage.local_root is None
    sums = stats(history, records, is_remote=is_remote)
    state = run_state(catalog)
    return {
        "kind": "run",
        "title": storage.uri.rstrip("/").rpartition("/")[2] or storage.uri,
        "uri": storage.uri,
        "written": time.time(),
        "live": state.is_live,
        "state": {"word": state.word, "text": state.text},
        "run_id": catalog.index.run_id,
        "keep": _keep_words(catalog.index.keep),
        "ranking": _ranking(catalog.index.keep),
        "reports": len(live),
        "metrics": curves,
        "checkpoints": _checkpoints(catalog, records, live, made, deletions(history.events, is_remote=is_remote)),
        "size_bytes": sum(record.size for record in records),
        "new_bytes": sum(record.size - record.reused for record in records),
        "attempts": _attempts(
            sums.pop("attempts"),
            live_attempts(history.attempts, {row["attempt"] for row in history.rows} | {save.attempt for save in made}),
        ),
        "saving": {**sums, "curves": _saving_curves(made)},
        "newest": _newest(storage, records),
        "warnings": [*_warnings(catalog), *warnings],
    }


def folder_facts(storage: Storage, names: Sequence[str]) -> dict[str, Any]:
    """Describe several runs, the children ``names`` of ``storage``, so that they can be compared."""
    runs, curves, warnings = [], defaultdict(list), []
    found = together(storage, [partial(_overview, storage.child(name), name) for name in names])
    for name, run in zip(names, found, strict=True):
        if isinstance(run, str):
            warnings.append(f"{name} cannot be read: {run}")
            continue
        for curve in run.pop("curves"):
            curves[curve["name"]].append({"run": name, "points": curve["points"], "count": curve["count"]})
        said = run.pop("said")
        runs.append({**run, "warnings": len(said)})
        warnings += [f"{name}: {text}" for text in said]
    shared = sorted(curves.items(), key=lambda item: (-len(item[1]), item[0]))[:_MOST_CURVES]
    return {
        "kind": "folder",
        "title": storage.uri.rstrip("/").rpartition("/")[2] or storage.uri,
        "uri": storage.uri,
        "written": time.time(),
        "live": any(run["state"]["word"] == "training" for run in runs),
        "runs": runs,
        "metrics": [{"name": name, "curves": found} for name, found in shared],
        "warnings": warnings,
    }


def _overview(storage: Storage, name: str) -> dict[str, Any] | str:
    """Describe one run among others, no more of it than is shown; return why if it cannot be read."""
    try:
        catalog = Catalog(storage)
        history = catalog.index.read_history()
        state = run_state(catalog)
    except HoldfastError as error:
        return str(error)
    curves, said = _curves(live_rows(history.rows, history.attempts), _CURVE_OF_RUN)
    records = catalog.records()
    ranking = _ranking(catalog.index.keep)
    best = best_of(records, ranking.get("metric"), ranking.get("mode", "min"))
    made = saves(history.events, records)
    attempts = attempt_rows(history, made)
    source = attempts[0]["from_name"] if attempts else None
    return {
        "name": name,
        "uri": storage.uri,
        "state": {"word": state.word, "text": state.text},
        "step": max((record.step for record in records), default=None),
        "created": max((record.created for record in records), default=None),
        "count": len(records),
        "size_bytes": sum(record.size for record in records),
        "attempts": len(attempts),
        "from": source,
        "saves": len(made),
        "lost_s": math.fsum(save.lost_s or 0.0 for save in made) if any(save.lost_s for save in made) else None,
        "lost_steps": sum(row["lost_steps"] for row in attempts),
        "best": None if best is None else best.name,
        "metrics": {curve["name"]: curve["points"][-1][1] for curve in curves},
        "curves": curves,
        "said": [*_warnings(catalog), *said],
    }


# ---- curves


def _curves(live: Iterable[Mapping[str, Any]], most: int = MOST_POINTS) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a curve for each metric that has numbers at steps, those with most points first; and what was left out."""
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
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
    shown = sorted(points, key=lambda name: (-len(points[name]), name))
    curves = [
        {"name": name, "points": thin(sorted(points[name]), most), "count": len(points[name]), "odd": odd[name]}
        for name in shown[:_MOST_CURVES]
    ]
    warnings = [f"{name}: {count} of its values are NaN or infinite and not drawn" for name, count in odd.items()]
    if len(shown) > _MOST_CURVES:
        warnings.append(f"{len(shown) - _MOST_CURVES} more metrics are not drawn: {', '.join(shown[_MOST_CURVES:])}")
    return curves, warnings


def _saving_curves(made: Sequence[Save]) -> dict[str, list[tuple[float, float]]]:
    """Return what each save took, in seconds and bytes, over the steps; empty where nothing was recorded."""
    curves: dict[str, list[tuple[Any, Any]]] = {
        name: [(save.step, getattr(save, name)) for save in made] for name in ("durable_s", "held_s", "lost_s")
    }
    curves["written_bytes"] = [(save.step, _new_bytes(save)) for save in made]
    curves["reused_bytes"] = [(save.step, save.reused) for save in made]
    known = {name: sorted(point for point in points if point[1] is not None) for name, points in curves.items()}
    return {name: thin(points) for name, points in known.items()}


def _new_bytes(save: Save) -> int | None:
    return None if save.size is None else save.size - (save.reused or 0)


# ---- checkpoints


def _checkpoints(
    catalog: Catalog,
    good: Sequence[Record],
    live: Iterable[Mapping[str, Any]],
    made: Iterable[Save],
    gone: Mapping[tuple[int, str], Deletion],
) -> list[dict[str, Any]]:
    """Describe all checkpoints, newest first: good ones with why they are kept, bad ones, and deleted ones."""
    keep = catalog.index.keep
    ranking = _ranking(keep)
    best = best_of(good, ranking.get("metric"), ranking.get("mode", "min"))
    why = {verdict.name: verdict.why for verdict in decide(_rules(keep), good)}
    rows = []
    for number, record in enumerate(good):
        marks = {"newest": not number, "best": record is best, "pinned": record.pinned}
        marks["resumed from"] = record.resumed_from
        names = [name for name, on in marks.items() if on]
        rows.append({**_row(record), "state": "ok", "why": why.get(record.name, ""), "marks": names})
    for name, reason in catalog.bad().items():
        state = "corrupt" if name in catalog.corrupt else "quarantined"
        known = catalog.record(name) if name in catalog.index.rows else None
        rows.append({**(_row(known) if known else _bare(name)), "state": state, "why": reason, "marks": []})
    rows += [
        {**_bare(name), "state": "incomplete", "why": "a save that never ended", "marks": []}
        for name in catalog.incomplete
    ]
    rows += _deleted({row["name"] for row in rows}, live, made, gone)
    return sorted(rows, key=lambda row: (-(row["attempt"] or 0), -(row["step"] or 0), row["name"]))


def _deleted(
    present: set[str],
    live: Iterable[Mapping[str, Any]],
    made: Iterable[Save],
    gone: Mapping[tuple[int, str], Deletion],
) -> list[dict[str, Any]]:
    """Describe deleted checkpoints, as far as the journal or a report names them; ``present`` are left out."""
    rows: dict[str, dict[str, Any]] = {}
    for save in made:
        if save.name not in present:
            sizes = {"size_bytes": save.size, "new_bytes": _new_bytes(save)}
            origin = {"attempt": save.attempt, "step": save.step, "created": save.time}
            rows[save.name] = {**_bare(save.name), **origin, **sizes}
    for (attempt, name), end in gone.items():
        if name not in present:
            known = rows.setdefault(name, {**_bare(name), "attempt": attempt or None, "step": end.step})
            known |= {"why": end.why, "deleted": end.time}
    for row in live:
        name = str(row.get("checkpoint") or "")
        if name and name not in present:
            known = rows.setdefault(name, {**_bare(name), "step": row.get("step"), "created": row.get("time")})
            known |= {"epoch": row.get("epoch"), "metrics": {**known["metrics"], **flat_metrics(row["metrics"])}}
    return [{"why": "", **row, "state": _GONE, "marks": []} for row in rows.values()]


def _row(record: Record) -> dict[str, Any]:
    return {
        **_bare(record.name),
        "attempt": record.attempt,
        "step": record.step,
        "epoch": record.epoch,
        "created": record.created or None,
        "size_bytes": record.size,
        "new_bytes": record.size - record.reused,
        "metrics": {name: value for name, value in flat_metrics(record.metrics).items() if not name.startswith("_")},
    }


def _bare(name: str) -> dict[str, Any]:
    columns = ("attempt", "step", "epoch", "created", "size_bytes", "new_bytes")
    return {"name": name, **dict.fromkeys(columns), "metrics": {}, "deleted": None}


def _rules(keep: Mapping[str, Any] | None) -> Keep:
    try:
        return Keep.from_json(dict(keep or {}))
    except (ConfigError, TypeError, ValueError):  # rules of a newer version
        return Keep()


def _ranking(keep: Mapping[str, Any] | None) -> dict[str, str]:
    rules = _rules(keep)
    return {} if rules.metric is None else {"metric": rules.metric, "mode": rules.mode}


def _keep_words(keep: Mapping[str, Any] | None) -> str:
    rules = _rules(keep)
    parts = [f"the last {rules.last}"] if rules.last is not None else []
    if rules.best is not None:
        parts.append(f"the best {rules.best} by {rules.metric} ({rules.mode})")
    if rules.every is not None:
        parts.append(f"one every {rules.every}")
    return ", ".join(parts) or "all"


def _newest(storage: Storage, records: Sequence[Record]) -> dict[str, Any] | None:
    """Return what the newest checkpoint says about how it was made; None if its manifest cannot be read."""
    if not records:
        return None
    try:
        manifest = read_manifest(storage, records[0].name)
    except (CheckpointError, StorageError):
        return None
    versions = {name: str(version) for name, version in manifest.versions.items()}
    return {"name": records[0].name, "world_size": manifest.world_size, "versions": versions}


# ---- attempts


def _attempts(rows: Sequence[dict[str, Any]], on_path: set[int]) -> list[dict[str, Any]]:
    """Describe each start of the run: what its end has cost, and where it stands in the lineage.

    "line" is "fresh", "resumed" (from a checkpoint of this run) or "another run"; "is_live" is False for a branch that
    a later start went back behind.
    """
    found = []
    for row in rows:
        outside = row["from_name"] is not None and row["from_attempt"] is None
        line = "fresh" if row["from_name"] is None else "another run" if outside else "resumed"
        found.append({**row, "line": line, "is_live": row["attempt"] in on_path})
    return found


def _warnings(catalog: Catalog) -> list[str]:
    warnings = [f"{name}: {reason}" for name, reason in catalog.bad().items()]
    if catalog.rebuilt:
        warnings.append("run.json could not be used; what is shown was read from the checkpoints themselves")
    if strangers := sorted(catalog.others.keys() - catalog.guests.keys()):
        warnings.append(f"checkpoints of other runs lie here too, not shown: {', '.join(strangers)}")
    if catalog.guests:
        warnings.append(f"copies lie here too, not counted and never deleted: {copies_shown(catalog.guests)}")
    if catalog.void:
        warnings.append(f"committed by an owner that had been taken over, do not count: {', '.join(catalog.void)}")
    return warnings


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
