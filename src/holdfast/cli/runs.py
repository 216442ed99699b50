"""``holdfast ls`` of a folder of runs: one line for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from holdfast._units import format_bytes
from holdfast.errors import HoldfastError
from holdfast.run.catalog import Catalog
from holdfast.run.record import flat_metrics, metric_value
from holdfast.run.retention import best_of, is_number
from holdfast.run.status import run_state
from holdfast.storage.base import Storage

from .targets import ranking
from .terminal import Row, age, console, counted, number, print_columns, print_json, printable

__all__ = ["run_row", "say_unknown", "show_runs"]

_COLOURS = {"training": "green", "finished": "cyan", "died": "red", "unreadable": "red", "silent": "yellow"}


def show_runs(
    storage: Storage, runs: Sequence[tuple[str, Storage]], metric: str | None, mode: str | None, *, as_json: bool
) -> None:
    """Print one line for each run, that with the newest checkpoint at the top."""
    rows = [run_row(run, name, metric, mode) for name, run in runs]
    rows.sort(key=lambda row: row.get("created") or 0.0, reverse=True)
    if metric is not None:
        say_unknown(metric, storage.uri, [row["metrics"] for row in rows])
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
        lines.append((cells, "", _COLOURS.get(row["state"], "dim")))
    print_columns(out, columns, lines, droppable=["where", "attempt", "checkpoints", "best", "size", "age"])
    for row in printable(rows):
        if row.get("reason"):
            out.print(Text(f"{row['name']}: {row['reason']}", style="red"))


def run_row(storage: Storage, name: str, metric: str | None = None, mode: str | None = None) -> dict[str, Any]:
    """Describe a run in one row of JSON: its state, its newest and its best checkpoint, who trains it and where."""
    head: dict[str, Any] = {"name": name, "uri": storage.uri}
    try:
        catalog = Catalog(storage)
        state = run_state(catalog)
    except HoldfastError as error:
        return {**head, "state": "unreadable", "reason": str(error), "metrics": {}}
    index, records = catalog.index, catalog.records()
    metric, mode = ranking(index.keep, metric, mode)
    best = best_of(records, metric, mode)
    newest = records[0] if records else None
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


def say_unknown(metric: str, where: str, have: Sequence[Mapping[str, Any]]) -> None:
    """Say so on stderr if none of the metrics in ``have`` is a number called ``metric``."""
    if not any(is_number(metrics.get(metric)) for metrics in have):
        known = sorted({name for metrics in have for name in metrics if not name.startswith("_")})
        text = f"holdfast: nothing in {where} has a number for {metric!r}; there is: {', '.join(known) or 'no metric'}"
        click.echo(printable(text), err=True)
