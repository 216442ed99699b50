"""``holdfast ls``: the checkpoints of a run, or the runs of a folder."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import click

from holdfast._units import format_bytes
from holdfast.errors import HoldfastError
from holdfast.run.catalog import Catalog
from holdfast.run.index import RUN_FILE
from holdfast.run.record import Record, flat_metrics, metric_value
from holdfast.run.retention import best_of, is_number
from holdfast.run.status import run_state, runs_below
from holdfast.run.verified import read_verified
from holdfast.storage.base import Storage

from .show import show_checkpoint
from .targets import PATH, complete_metric, find, ranking
from .terminal import PlainTable, Row, age, console, counted, number, print_columns, print_json, printable

__all__ = ["ls"]

_RUN_COLOURS = {"training": "green", "finished": "cyan", "died": "red", "unreadable": "red", "silent": "yellow"}

_METRICS_SHOWN = 3
_COLUMNS = ("step", "epoch", "attempt", "age", "size", "new", "verified")
_TITLES = {"checkpoint", *_COLUMNS, "state"}
_COLOURS = {"ok": "green", "incomplete": "yellow"} | dict.fromkeys(
    ("quarantined", "corrupt", "damaged", "bad step"), "red"
)


@click.command()
@click.argument("path", type=PATH, default=".")
@click.option(
    "--metric", shell_complete=complete_metric, help="Metric that marks the best; default: that of the run's Keep."
)
@click.option("--mode", type=click.Choice(["min", "max"]), help="Whether smaller or larger is better.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def ls(path: str, metric: str | None, mode: str | None, as_json: bool) -> None:
    """List the checkpoints of the run at PATH, newest first; of a folder of runs, one line for each run.

    Default: the current folder.

    "new" is what a checkpoint added to the disk: files that did not change are shared with the checkpoint before.
    "verified" is how long ago `holdfast verify --deep` found every byte right, or verify alone the sizes.
    """
    storage, checkpoint = find(path)
    if checkpoint is not None:
        show_checkpoint(checkpoint, tensors=False, as_json=as_json)
        return
    catalog = Catalog(storage)
    runs = runs_below(storage, catalog.foreign) if catalog.index.damage == "missing" and not catalog.records() else []
    if runs:
        _show_runs(storage, runs, metric, mode, as_json=as_json)
        return
    document = _document(catalog, metric, mode)
    if metric is not None:
        _say_unknown(metric, storage.uri, [flat_metrics(row.get("metrics", {})) for row in document["checkpoints"]])
    if as_json:
        print_json(document)
    else:
        _print(document)


def _document(catalog: Catalog, metric: str | None, mode: str | None) -> dict[str, Any]:
    """Describe a run and everything under its root as JSON."""
    storage, index = catalog.storage, catalog.index
    metric, mode = ranking(index.keep, metric, mode)
    good = catalog.records()
    best, newest, bad_steps = best_of(catalog.sound(), metric, mode), catalog.newest_sound(), catalog.bad_steps()
    rows = [_row(storage, record, "ok", newest=record == newest, best=record == best) for record in good]
    for row in rows:
        if row["name"] in bad_steps:
            row["bad_step"] = bad_steps[row["name"]]
    for name, why in sorted(catalog.bad().items()):
        state = "corrupt" if name in catalog.corrupt else "quarantined"
        known = catalog.record(name) if name in index.rows else None
        rows.append({**(_row(storage, known, state) if known else _bare(storage, name, state)), "reason": why})
    for record in sorted(catalog.strangers(), key=lambda record: record.created, reverse=True):
        run = catalog.others[record.name].run_id
        original = catalog.guests.get(record.name)
        state = f"copy of {original}" if original else "ok" if not run else f"of run {run[:8]}"
        rows.append({**_row(storage, record, state), "run_id": run})
    rows += [_bare(storage, name, "incomplete") for name in catalog.incomplete]
    for name in catalog.foreign:
        # A directory of runs: say which of its children can be looked into.
        rows.append(_bare(storage, name, "run" if storage.exists(f"{name}/{RUN_FILE}") else "foreign"))
    verified = read_verified(storage, catalog.found())
    for row in rows:
        if row["name"] in verified:
            row["verified"] = verified[row["name"]].describe(storage, row["name"])
    counted = [row for row in rows if "size_bytes" in row]
    return {
        "path": storage.uri,
        "run_id": index.run_id,
        "attempts": [attempt.to_json() for attempt in index.attempts],
        "finished": index.finished,
        "keep": index.keep,
        "metric": metric,
        "mode": mode,
        "index_rebuilt": catalog.rebuilt,
        "size_bytes": sum(row["size_bytes"] for row in counted),
        "new_bytes": sum(row["new_bytes"] for row in counted),
        "checkpoints": rows,
    }


def _row(storage: Storage, record: Record, state: str, *, newest: bool = False, best: bool = False) -> dict[str, Any]:
    marks = {"newest": newest, "best": best, "pinned": record.pinned, "resumed from": record.resumed_from}
    return {
        **_bare(storage, record.name, state),
        "checkpoint_id": record.checkpoint_id,
        "attempt": record.attempt,
        "step": record.step,
        "epoch": record.epoch,
        "created": record.created,
        "size_bytes": record.size,
        "new_bytes": record.size - record.reused,
        "metrics": dict(record.metrics),
        "marks": [name for name, on in marks.items() if on],
    }


def _bare(storage: Storage, name: str, state: str) -> dict[str, Any]:
    return {"name": name, "uri": f"{storage.uri.rstrip('/')}/{name}", "state": state}


def _print(document: dict[str, Any]) -> None:
    from rich.text import Text

    out = console()
    rows = document["checkpoints"]
    good = sum("step" in row and "reason" not in row for row in rows)
    out.print(Text(printable(document["path"]), style="bold"))
    if not rows:
        out.print("no checkpoints")
        return
    parts = [f"run {document['run_id']}"] if document["run_id"] else []
    if document["attempts"]:
        parts.append(f"attempt {document['attempts'][-1]['attempt']}")
    many = f"{good} checkpoint{'s' * (good != 1)}, {format_bytes(document['size_bytes'])}"
    parts.append(many if good else "no checkpoints at this level")
    if document["new_bytes"] != document["size_bytes"]:
        parts[-1] += f" ({format_bytes(document['new_bytes'])} on disk)"
    if document["finished"]:
        parts.append("finished")
    if document["index_rebuilt"]:
        parts.append("run.json unusable, rebuilt by scan")
    out.print(Text(printable(" · ".join(parts)), style="dim"))
    out.print()
    metrics = _metrics(rows, document["metric"])
    while not _listing(rows, metrics).print(out, fitting=bool(metrics)):
        metrics.pop()
    for row in rows:
        if (why := row.get("reason") or row.get("bad_step")) is not None:
            out.print(Text(printable(f"{row['name']}: {why}"), style="red"))


def _listing(rows: list[dict[str, Any]], metrics: list[str]) -> PlainTable:
    """Make the table, without the columns that would say the same in every row."""
    full = [row for row in rows if "step" in row]
    optional = {
        "epoch": any(row["epoch"] is not None for row in full),
        "attempt": len({row["attempt"] for row in full}) > 1,
        "new": any(row["new_bytes"] != row["size_bytes"] for row in full),
        "verified": any("verified" in row for row in full),
    }
    titles = [title for title in _COLUMNS if optional.get(title, True)]
    made = PlainTable([("checkpoint", "left"), *((title, "right") for title in (*titles, *metrics)), ("state", "left")])
    now = time.time()
    for row in rows:
        cells = [""] * (len(titles) + len(metrics))
        if "step" in row:
            texts = {
                "step": number(row["step"]),
                "epoch": number(row["epoch"]),
                "attempt": number(row["attempt"] or None),
                "age": age(row["created"], now),
                "size": format_bytes(row["size_bytes"]),
                "new": format_bytes(row["new_bytes"]),
                "verified": _verified(row.get("verified"), now),
            }
            cells = [texts[title] for title in titles] + [
                number(metric_value(row["metrics"], name)) for name in metrics
            ]
        damaged = row["state"] == "ok" and _verified(row.get("verified"), now) == "damaged"
        state = "damaged" if damaged else row["state"]  # as `holdfast verify` found; the listing reads small files
        state = "bad step" if state == "ok" and "bad_step" in row else state
        found = [state] if state != row["state"] else []
        marks = ", ".join([*row.get("marks", []), *found]) if row["state"] == "ok" else ""
        made.add(
            [row["name"], *cells, marks or state],
            style="" if state == "ok" else "dim",
            last=_COLOURS.get(state, "dim"),
        )
    return made


def _verified(known: dict[str, Any] | None, now: float) -> str:
    """Say in a few letters what `holdfast verify` found: the age of a look at every byte, or at sizes alone."""
    if known is None:
        return ""
    found = age(known["time"], now) if known["deep"] else f"sizes {age(known['time'], now)}"
    return "changed since" if not known["unchanged"] else found if known["ok"] else "damaged"


def _metrics(rows: list[dict[str, Any]], first: str | None) -> list[str]:
    """Choose the columns that fit: the ranking metric, then those most checkpoints have; none that is there already."""
    names = (name for row in rows for name in flat_metrics(row.get("metrics", {})))
    count = Counter(name for name in names if name == first or not name.startswith("_"))  # notes of ours, times
    return sorted(count.keys() - _TITLES, key=lambda name: (name != first, -count[name], name))[:_METRICS_SHOWN]


def _show_runs(
    storage: Storage, runs: Sequence[tuple[str, Storage]], metric: str | None, mode: str | None, *, as_json: bool
) -> None:
    """Print one line for each run, that with the newest checkpoint at the top."""
    rows = [_run_row(run, name, metric, mode) for name, run in runs]
    rows.sort(key=lambda row: row.get("created") or 0.0, reverse=True)
    if metric is not None:
        _say_unknown(metric, storage.uri, [row["metrics"] for row in rows])
    if as_json:
        print_json({"path": storage.uri, "kind": "folder", "runs": rows})
        return
    from rich.text import Text

    out = console()
    out.print(Text(printable(storage.uri), style="bold") + Text(f"  {counted(len(rows), 'run')}", style="dim"))
    out.print()
    sides = dict.fromkeys(("attempt", "checkpoints", "step", "age", "size"), "right")
    columns = {"run": "left", **sides, "best": "left", "where": "left", "state": "left"}
    lines: list[Row] = []
    for row in printable(rows):
        cells = dict.fromkeys(columns, "") | {"run": row["name"], "state": row["state"]}
        if row["state"] != "unreadable":
            best = row["best"]
            cells |= {
                "attempt": number(row["attempt"]),
                "checkpoints": str(row["checkpoints"]) + (f" +{row['bad']} bad" if row["bad"] else ""),
                "step": number(row["step"]),
                "age": age(row["created"]) if row["created"] else "-",
                "size": format_bytes(row["size_bytes"]),
                "best": f"{row['metric']} {number(best['value'])} at {best['step']}" if best else "-",
                "where": row["where"] or "",
            }
        lines.append((cells, "", _RUN_COLOURS.get(row["state"], "dim")))
    print_columns(out, columns, lines, droppable=["where", "attempt", "checkpoints", "best", "size", "age"])
    for row in printable(rows):
        if row.get("reason"):
            out.print(Text(f"{row['name']}: {row['reason']}", style="red"))


def _run_row(storage: Storage, name: str, metric: str | None = None, mode: str | None = None) -> dict[str, Any]:
    """Describe a run in one row of JSON: its state, its newest and its best checkpoint, who trains it and where."""
    head: dict[str, Any] = {"name": name, "uri": storage.uri}
    try:
        catalog = Catalog(storage)
        state = run_state(catalog)
    except HoldfastError as error:
        return {**head, "state": "unreadable", "reason": str(error), "metrics": {}}
    index, records = catalog.index, catalog.records()
    metric, mode = ranking(index.keep, metric, mode)
    best = best_of(catalog.sound(), metric, mode)
    newest = catalog.newest_sound()
    current = index.current
    where = state.text if state.is_live else None
    if state.word == "silent" and state.heard is not None:
        where = f"{state.text}, last heard of {age(state.heard)} ago"
    metrics: dict[str, Any] = {}
    for record in records:
        metrics |= {key: value for key, value in flat_metrics(record.metrics).items() if is_number(value)}
    return {
        **head,
        "state": state.text.partition("\n")[0][:40] if state.word == "stopped" else state.word,
        "attempt": None if current is None else current.attempt,
        "checkpoints": len(records),
        "bad": len(catalog.bad()),
        "newest": None if newest is None else newest.name,
        "step": None if newest is None else newest.step,
        "created": None if newest is None else newest.created,
        "size_bytes": sum(record.size - record.reused for record in records),
        "metric": metric,
        "mode": mode,
        "best": best
        and {"name": best.name, "step": best.step, "value": metric_value(best.metrics, metric) if metric else None},
        "metrics": metrics,
        "owner": state.owner and {key: state.owner.get(key) for key in ("host", "trainer_pid", "started", "alive")},
        "where": where,
    }


def _say_unknown(metric: str, where: str, have: Sequence[Mapping[str, Any]]) -> None:
    """Say so on stderr if none of the metrics in ``have`` is a number called ``metric``."""
    if not any(is_number(metrics.get(metric)) for metrics in have):
        known = sorted({name for metrics in have for name in metrics if not name.startswith("_")})
        text = f"holdfast: nothing in {where} has a number for {metric!r}; there is: {', '.join(known) or 'no metric'}"
        click.echo(printable(text), err=True)
