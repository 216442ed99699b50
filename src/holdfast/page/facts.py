"""What a page shows, as plain JSON. Only what is named here gets in: no notes, no configuration, no environment."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.history import Attempt, live_rows, read_reports
from holdfast.checkpoint.record import Record, flat_metrics, timestamp
from holdfast.checkpoint.retention import best_of, decide, is_number
from holdfast.checkpoint.run_state import run_state
from holdfast.checkpoint.runindex import RUN_FILE
from holdfast.config import Keep
from holdfast.errors import CheckpointError, CheckpointNotFoundError, ConfigError, HoldfastError, StorageError
from holdfast.format.commit import read_manifest
from holdfast.storage.base import Storage

from .thinning import thin

__all__ = ["collect", "folder_facts", "run_facts"]

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
        JSON with ``metrics`` (curves of at most `thinning.MOST_POINTS` points [step, value]), ``checkpoints`` (newest
        first), ``attempts``, ``warnings``, ``state`` and ``live`` (whether somebody trains now).
    """
    catalog = Catalog(storage)
    rows, told, _ = read_reports(storage)
    attempts = {**told, **{one.attempt: one for one in catalog.index.attempts}}
    live = live_rows(rows, attempts)
    curves, warnings = _curves(live)
    records = catalog.records()
    checkpoints = _checkpoints(catalog, records, live)
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
        "checkpoints": checkpoints,
        "size_bytes": sum(record.size for record in records),
        "new_bytes": sum(record.size - record.reused for record in records),
        "attempts": _attempts(attempts, rows),
        "newest": _newest(storage, records),
        "warnings": [*_warnings(catalog), *warnings],
    }


def folder_facts(storage: Storage, names: Sequence[str]) -> dict[str, Any]:
    """Describe several runs, the children ``names`` of ``storage``, so that they can be compared."""
    runs, curves, warnings = [], defaultdict(list), []
    for name in names:
        try:
            facts = run_facts(storage.child(name))
        except HoldfastError as error:
            warnings.append(f"{name} cannot be read: {error}")
            continue
        for curve in facts["metrics"]:
            points = thin(curve["points"], _CURVE_OF_RUN)
            curves[curve["name"]].append({"run": name, "points": points, "count": curve["count"]})
        good = [row for row in facts["checkpoints"] if row["state"] == "ok"]
        best = next((row for row in good if "best" in row["marks"]), None)
        runs.append(
            {
                "name": name,
                "uri": facts["uri"],
                "state": facts["state"],
                "step": max((row["step"] for row in good), default=None),
                "created": max((row["created"] for row in good), default=None),
                "count": len(good),
                "size_bytes": facts["size_bytes"],
                "attempts": len(facts["attempts"]),
                "best": None if best is None else best["name"],
                "metrics": {curve["name"]: curve["points"][-1][1] for curve in facts["metrics"]},
                "warnings": len(facts["warnings"]),
            }
        )
        warnings += [f"{name}: {text}" for text in facts["warnings"]]
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


# ---- curves


def _curves(live: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """One curve for each metric that has numbers at steps, those with most points first; and what was left out."""
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
        {"name": name, "points": thin(sorted(points[name])), "count": len(points[name]), "odd": odd[name]}
        for name in shown[:_MOST_CURVES]
    ]
    warnings = [f"{name}: {count} of its values are NaN or infinite and not drawn" for name, count in odd.items()]
    if len(shown) > _MOST_CURVES:
        warnings.append(f"{len(shown) - _MOST_CURVES} more metrics are not drawn: {', '.join(shown[_MOST_CURVES:])}")
    return curves, warnings


# ---- checkpoints


def _checkpoints(catalog: Catalog, good: Sequence[Record], live: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All that are or were there, newest first: good ones with why they are kept, bad ones, and those deleted since."""
    keep = catalog.index.keep
    ranking = _ranking(keep)
    best = best_of(good, ranking.get("metric"), ranking.get("mode", "min"))
    why = {one.name: one.why for one in decide(_rules(keep), good)}
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
    there = {row["name"] for row in rows}
    for row in live:
        name = str(row.get("checkpoint") or "")
        if name and name not in there:
            there.add(name)
            metrics = {**flat_metrics(row["metrics"])}
            gone = {"step": row.get("step"), "epoch": row.get("epoch"), "created": row.get("time"), "metrics": metrics}
            rows.append({**_bare(name), **gone, "state": _GONE, "why": "", "marks": []})
    return sorted(rows, key=lambda row: (-(row["attempt"] or 0), -(row["step"] or 0), row["name"]))


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
    return {"name": name, **dict.fromkeys(columns), "metrics": {}}


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
    """What the newest checkpoint says about how it was made."""
    if not records:
        return None
    try:
        manifest = read_manifest(storage, records[0].name)
    except (CheckpointError, StorageError):
        return None
    versions = {name: str(version) for name, version in manifest.versions.items()}
    return {"name": records[0].name, "world_size": manifest.world_size, "versions": versions}


# ---- attempts


def _attempts(attempts: Mapping[int, Attempt], rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each start of the run, and how many of its steps a later start had to do again."""
    last: dict[int, float] = {}
    for row in rows:
        if is_number(row.get("step")):
            last[row["attempt"]] = max(last.get(row["attempt"], -math.inf), row["step"])
    found: list[dict[str, Any]] = []
    for number in sorted(attempts):
        one, source = attempts[number], attempts[number].resumed_from
        found.append(
            {
                "attempt": number,
                "started": timestamp(one.started) or None,
                "ended": timestamp(one.ended or "") or None,
                "reason": one.reason,
                "host": one.host,
                "pid": one.pid,
                "from_name": None if source is None else str(source["name"]),
                "from_attempt": None if source is None else source.get("attempt"),
                "first_step": 0 if source is None else source["step"],
                "last_step": last.get(number),
                "lost_steps": 0,
            }
        )
    by_number = {row["attempt"]: row for row in found}
    for row in found:
        before = by_number.get(row["from_attempt"] or row["attempt"] - 1)
        if before is not None and row is not before and before["last_step"] is not None:
            before["lost_steps"] = max(before["lost_steps"], before["last_step"] - row["first_step"] + 1, 0)
    return found


def _warnings(catalog: Catalog) -> list[str]:
    warnings = [f"{name}: {reason}" for name, reason in catalog.bad().items()]
    if catalog.rebuilt:
        warnings.append("run.json could not be used; what is shown was read from the checkpoints themselves")
    if catalog.others:
        warnings.append(f"checkpoints of other runs lie here too, not shown: {', '.join(sorted(catalog.others))}")
    if catalog.void:
        warnings.append(f"committed by an owner that had been taken over, do not count: {', '.join(catalog.void)}")
    return warnings
