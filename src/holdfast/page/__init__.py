"""A run, or several runs, as a single HTML file that needs no server and no network.

`collect` describes them as JSON: what a page shows, also a curve for every metric, in the order in which a reader
looks, and bounded. Only what is named here gets in: no notes, no configuration, no environment. `render` puts the JSON,
the style sheet and the scripts into one file; in the browser `chart.js` draws charts, `page.js` all else. No torch, no
lease: a page only reads.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from importlib import resources
from typing import Any

from holdfast.checkpoint.summary import items, tensors
from holdfast.checkpoint.verify import read_verified, verify
from holdfast.config import rules_of, stored_keep
from holdfast.errors import CheckpointError, CheckpointNotFoundError, HoldfastError, StorageError
from holdfast.format.commit import read_manifest
from holdfast.format.contents import ContentsReader
from holdfast.format.manifest import Manifest
from holdfast.run.candidates import copies_shown
from holdfast.run.catalog import Catalog
from holdfast.run.costs import Deletion, Save, attempt_rows, deletions, goodput, saves, stats
from holdfast.run.index import RUN_FILE
from holdfast.run.record import Record, flat_metrics, to_plain
from holdfast.run.reports import lineage, live_rows
from holdfast.run.retention import best_of, decide, is_number
from holdfast.run.rollbacks import read_rollbacks
from holdfast.run.view import refuse_checkpoint, run_state, runs_below
from holdfast.storage.base import Storage
from holdfast.storage.together import together

__all__ = [
    "MOST_POINTS", "clock", "collect", "collect_all", "curves", "folder_facts", "grouped", "render", "run_facts",
    "thin",
]  # fmt: skip

_CURVE_OF_RUN = 400  # points of one run's curve where several are compared
_DETAILED = 300  # newest checkpoints on a disk whose small files are read
_DETAILED_AWAY = 20  # elsewhere each is several requests
_GONE = "deleted"
MOST_POINTS = 2000  # of one curve
Point = tuple[float, float]

_TOGETHER = 12  # so few metrics are not divided into groups
_LOSS = re.compile(r"loss|nll|perplexity|(^|[/._])ppl", re.IGNORECASE)


def collect(storage: Storage) -> dict[str, Any]:
    """Describe the run at ``storage``, or the runs one level below it.

    Raises:
        CheckpointNotFoundError: there is neither.
    """
    if storage.exists(RUN_FILE):
        return run_facts(storage)
    runs = runs_below(storage)
    if runs:
        return folder_facts(runs, title=_title(storage), uri=storage.uri)
    facts = run_facts(storage)  # a run whose run.json was lost still has its manifests
    if not facts["checkpoints"] and not facts["metrics"]:
        raise _no_run(storage)
    return facts


def collect_all(storages: Sequence[Storage]) -> dict[str, Any]:
    """Describe one run like `collect`, or several, wherever each is; of a folder of runs each run.

    Raises:
        CheckpointNotFoundError: there is no run at one of them, and none directly below it.
    """
    if len(storages) == 1:
        return collect(storages[0])
    found: list[Storage] = []
    for storage in storages:
        below = [] if storage.exists(RUN_FILE) else [run for _, run in runs_below(storage)]
        if not below and not storage.exists(RUN_FILE) and not Catalog(storage).records():
            raise _no_run(storage)
        found += below or [storage]
    once = list({storage.uri: storage for storage in found}.values())
    names = _short_names([storage.uri for storage in once])
    return folder_facts(
        list(zip(names, once, strict=True)), title=f"{len(once)} runs", uri=", ".join(one.uri for one in storages)
    )


def _no_run(storage: Storage) -> CheckpointNotFoundError:
    refuse_checkpoint(storage, CheckpointNotFoundError)
    return CheckpointNotFoundError(f"there is no run at {storage.uri}, and none directly below it: check the path")


def _title(storage: Storage) -> str:
    return storage.uri.rstrip("/").rpartition("/")[2] or storage.uri


def _short_names(uris: Sequence[str]) -> list[str]:
    """Name each by as many of its last parts as tell it from the others."""
    parts = [uri.rstrip("/").split("/") for uri in uris]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-length:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return list(uris)


def run_facts(storage: Storage) -> dict[str, Any]:
    """Describe one run.

    Returns:
        JSON with ``metrics`` (curves of at most `MOST_POINTS` points [step, value]), ``checkpoints`` (newest
        first), ``attempts``, ``warnings``, ``state`` and ``live`` (whether it is being trained now).
    """
    catalog = Catalog(storage)
    history = catalog.index.read_history()
    live = live_rows(history.rows, history.attempts)
    drawn, warnings = curves(live)
    ticks, began = clock(live)
    ranking = _ranking(catalog.index.keep)
    records = catalog.records()
    made = saves(history.events, records)
    is_remote = storage.local_root is None
    sums = stats(history, records, is_remote=is_remote)
    state = run_state(catalog)
    return {
        "kind": "run",
        "title": _title(storage),
        "uri": storage.uri,
        "written": time.time(),
        "live": state.is_live,
        "state": {"word": state.word, "text": state.text},
        "run_id": catalog.index.run_id,
        "keep": ", ".join(rule.long for rule in rules_of(stored_keep(catalog.index.keep))) or "all",
        "ranking": ranking,
        "reports": len(live),
        "metrics": grouped(drawn, ranking.get("metric")),
        "clock": ticks,
        "began": began,
        "checkpoints": _checkpoints(catalog, records, live, made, deletions(history.events, is_remote=is_remote)),
        "size_bytes": sum(record.size for record in records),
        "new_bytes": sum(record.size - record.reused for record in records),
        "attempts": _attempts(
            sums.pop("attempts"),
            lineage(history.attempts, {row["attempt"] for row in history.rows} | {save.attempt for save in made}),
        ),
        "saving": {**sums, "curves": _saving_curves(made)},
        "newest": _newest(storage, records),
        "goodput": goodput(history, made, now=time.time() if state.is_live else None),
        "warnings": [*_warnings(catalog), *warnings],
    }


def folder_facts(found: Sequence[tuple[str, Storage]], *, title: str, uri: str) -> dict[str, Any]:
    """Describe several runs, each with the name it is shown by, so that they can be compared."""
    runs, drawn, clocks, warnings = [], defaultdict(list), {}, []
    rankings: set[str] = set()
    overviews = together(found[0][1], [partial(_overview, storage, name) for name, storage in found])
    for (name, _), run in zip(found, overviews, strict=True):
        if isinstance(run, str):
            warnings.append(f"{name} cannot be read: {run}")
            continue
        for curve in run.pop("curves"):
            drawn[curve["name"]].append({"run": name, "points": curve["points"], "count": curve["count"]})
        clocks[name] = run.pop("clock")
        rankings |= {run.pop("ranking")} - {""}
        said = run.pop("said")
        runs.append({**run, "warnings": len(said)})
        warnings += [f"{name}: {text}" for text in said]
    metrics = [{"name": name, "curves": shown} for name, shown in drawn.items()]
    return {
        "kind": "folder",
        "title": title,
        "uri": uri,
        "written": time.time(),
        "live": any(run["state"]["word"] == "training" for run in runs),
        "runs": runs,
        "metrics": grouped(metrics, rankings.pop() if len(rankings) == 1 else None),
        "clocks": clocks,
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
    live = live_rows(history.rows, history.attempts)
    drawn, said = curves(live, _CURVE_OF_RUN)
    records = catalog.records()
    ranking = _ranking(catalog.index.keep)
    best = best_of(catalog.sound(), ranking.get("metric"), ranking.get("mode", "min"))
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
        "metrics": {curve["name"]: curve["points"][-1][1] for curve in drawn},
        "curves": drawn,
        "clock": clock(live, _CURVE_OF_RUN)[0],
        "ranking": ranking.get("metric", ""),
        "said": [*_warnings(catalog), *said],
    }


# ---- what saving took


def _saving_curves(made: Sequence[Save]) -> dict[str, list[tuple[float, float]]]:
    """Return what each save took, in seconds and bytes, over the steps; empty where nothing was recorded."""
    found: dict[str, list[tuple[Any, Any]]] = {
        name: [(save.step, getattr(save, name)) for save in made] for name in ("durable_s", "held_s", "lost_s")
    }
    found["written_bytes"] = [(save.step, _new_bytes(save)) for save in made]
    found["reused_bytes"] = [(save.step, save.reused) for save in made]
    known = {name: sorted(point for point in points if point[1] is not None) for name, points in found.items()}
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
    best = best_of(catalog.sound(), ranking.get("metric"), ranking.get("mode", "min"))
    why = {verdict.name: verdict.why for verdict in decide(stored_keep(keep), good)}
    details = _details(catalog.storage, good)
    for name, verified in read_verified(catalog.storage, catalog.found()).items():
        if name in details:
            details[name]["verified"] = verified.describe(catalog.storage, name)["words"]
    newest, bad_steps = catalog.newest_sound(), catalog.bad_steps()
    rows = []
    for record in good:
        marks = {"newest": record == newest, "best": record == best, "pinned": record.pinned}
        marks |= {"resumed from": record.resumed_from, "bad step": record.name in bad_steps}
        names = [name for name, on in marks.items() if on]
        about = {"state": "ok", "why": why.get(record.name, ""), "marks": names, "details": details.get(record.name)}
        rows.append({**_row(record), **about})
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


def _details(storage: Storage, good: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Return for the newest checkpoints what their small files say: parent, items, and whether the files are there."""
    is_local = storage.local_root is not None
    chosen = good[: _DETAILED if is_local else _DETAILED_AWAY]
    names = {record.checkpoint_id: record.name for record in good if record.checkpoint_id}
    calls = [partial(_details_of, storage, record.name, names, is_local=is_local) for record in chosen]
    return dict(zip((record.name for record in chosen), together(storage, calls), strict=True))


def _details_of(storage: Storage, name: str, names: Mapping[str, str], *, is_local: bool) -> dict[str, Any]:
    try:
        manifest = read_manifest(storage, name)
        rows = items(tensors(ContentsReader(storage.child(name), manifest)))
        problems = verify(storage, name, deep=False).problems if is_local else ()
    except (CheckpointError, StorageError) as error:
        return {"checked": f"cannot be read: {error}"}
    sound = "manifest and sizes of all files are right; contents were not read" if is_local else "manifest alone"
    return {
        "every_s": _every_s(manifest),
        "parent": names.get(manifest.parent, f"{manifest.parent} (no longer there)") if manifest.parent else None,
        "items": [
            {"name": i.name, "tensors": i.tensors, "numel": i.numel, "bytes": i.nbytes, "dtypes": list(i.dtypes)}
            for i in rows
        ],
        "checked": "; ".join(problems) or sound,
    }


def _every_s(manifest: Manifest) -> float | None:
    """Return the interval that ``every="auto"`` had chosen when the checkpoint was saved."""
    chosen = manifest.extra.get("every_s")
    return float(chosen) if isinstance(chosen, (int, float)) and 0 < chosen < math.inf else None


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


def _ranking(keep: Mapping[str, Any] | None) -> dict[str, str]:
    rules = stored_keep(keep)
    return {} if rules.metric is None else {"metric": rules.metric, "mode": rules.mode}


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


def _attempts(rows: Sequence[dict[str, Any]], on_path: Collection[int]) -> list[dict[str, Any]]:
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
    for rollback in read_rollbacks(catalog.index.notes):
        warnings.append(f"the guard, step {rollback.step} of attempt {rollback.attempt}: {rollback.in_words()}")
    if catalog.rebuilt:
        warnings.append("run.json could not be used; what is shown was read from the checkpoints themselves")
    if strangers := sorted(catalog.others.keys() - catalog.guests.keys()):
        warnings.append(f"checkpoints of other runs lie here too, not shown: {', '.join(strangers)}")
    if catalog.guests:
        warnings.append(f"copies lie here too, not counted and never deleted: {copies_shown(catalog.guests)}")
    if catalog.void:
        warnings.append(f"committed by an owner that had been taken over, do not count: {', '.join(catalog.void)}")
    return warnings


def curves(live: Iterable[Mapping[str, Any]], most: int = MOST_POINTS) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a curve for each metric that has numbers at steps, and sentences about values that cannot be drawn."""
    points: dict[str, list[Point]] = defaultdict(list)
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
    found = [
        {"name": name, "points": thin(sorted(known), most), "count": len(known), "odd": odd[name]}
        for name, known in points.items()
    ]
    return found, [f"{name}: {count} of its values are NaN or infinite and not drawn" for name, count in odd.items()]


def grouped(metrics: Iterable[dict[str, Any]], ranking: str | None) -> list[dict[str, Any]]:
    """Order metrics and give each its group: the ranking metric, losses, then the rest by the first part of its name.

    The first two, and the rest where there are few in all, are of the group "", which the page shows open.
    """
    known = list(metrics)
    heads = Counter(_head(metric["name"]) for metric in known)
    few = len(known) <= _TOGETHER
    rows = []
    for metric in known:
        name = metric["name"]
        place = 0 if name == ranking else 1 if _LOSS.search(name) else 2
        head = _head(name)
        group = "" if few or place < 2 else head if head and heads[head] > 1 else "other metrics"
        rows.append(((place, group == "other metrics", group, name), {**metric, "group": group}))
    return [metric for _, metric in sorted(rows, key=lambda row: row[0])]


def _head(name: str) -> str:
    head, mark, _ = re.sub(r"[.]", "/", name).partition("/")
    return head if mark else ""


def clock(live: Iterable[Mapping[str, Any]], most: int = MOST_POINTS) -> tuple[list[list[float | None]], float | None]:
    """Return rows [step, seconds, epoch] in order of steps, and the time that the seconds count from.

    Where a step has no row, a reader takes what lies between its neighbours: of an epoch only its first row is kept, so
    that it runs evenly from one whole number to the next.
    """
    rows = sorted(
        (row["step"], row["time"], row.get("epoch"))
        for row in ({**row, "epoch": row.get("epoch") if is_number(row.get("epoch")) else None} for row in live)
        if is_number(row.get("step")) and is_number(row.get("time"))
    )
    if not rows:
        return [], None
    began = min(moment for _, moment, _ in rows)
    every = math.ceil(len(rows) / most)
    kept = [row for at, row in enumerate(rows) if at % every == 0 or at == len(rows) - 1]
    starts: list[tuple[float, float]] = []
    for step, _, epoch in rows:
        if epoch is not None and (not starts or epoch > starts[-1][1]):
            starts.append((step, epoch))
    return [[step, round(moment - began, 3), _epoch_at(starts, step)] for step, moment, _ in kept], began


def _epoch_at(starts: Sequence[Point], step: float) -> float | None:
    """Return the epoch at a step, with the part that is done: as long as that before, where it has not ended."""
    before = [at for at, (first, _) in enumerate(starts) if first <= step]
    if not before:
        return None
    at = before[-1]
    first, epoch = starts[at]
    others = starts[at : at + 2] if at + 1 < len(starts) else starts[at - 1 : at + 1] if at else []
    if len(others) < 2:
        return epoch
    length = (others[1][0] - others[0][0]) / (others[1][1] - others[0][1])
    return round(epoch + (step - first) / length, 4)


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


# ---- the file


# The browser itself forbids every request, every frame, and every script and style but the two with these digests.
_POLICY = "default-src 'none'; script-src '{script}'; style-src '{style}'; base-uri 'none'; form-action 'none'"
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="holdfast">
<title>{title} · Holdfast</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#checkpoints">Skip to the table</a>
<main id="page" class="{kind}">
<noscript>This page draws itself with JavaScript, which is switched off here.</noscript>
</main>
<script id="facts" type="application/json">{facts}</script>
<script>{script}</script>
</body>
</html>
"""


def render(facts: Mapping[str, Any], *, reload_s: float | None = None) -> str:
    """Write the page of what `collect` found.

    Args:
        facts: JSON; every text in it may come from strangers and is shown as text.
        reload_s: the page loads itself again after this many seconds, while the run lives.
    """
    embedded = {**to_plain(facts), "reload_s": reload_s}
    style, script = _asset("page.css"), _asset("chart.js") + _asset("page.js")
    return _PAGE.format(
        policy=_POLICY.format(script=_digest(script), style=_digest(style)),
        title=html.escape(str(facts.get("title", ""))),
        kind="runs" if facts.get("kind") == "folder" else "run",
        style=style,
        facts=_embed(embedded),
        script=script,
    )


def _embed(value: Any) -> str:
    """Return JSON that cannot end the script element that holds it."""
    text = json.dumps(value, separators=(",", ":"), default=str, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
