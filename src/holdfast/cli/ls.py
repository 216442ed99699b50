"""``holdfast ls`` and ``show``: the checkpoints of a run, or the runs of a folder; one checkpoint."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import click

from holdfast._units import format_bytes
from holdfast.checkpoint import summary
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.verify import read_verified
from holdfast.errors import CheckpointError, CheckpointNotFoundError, HoldfastError
from holdfast.format.contents import ContentsReader
from holdfast.format.manifest import MANIFEST_NAME, Manifest
from holdfast.run.catalog import Catalog
from holdfast.run.index import RUN_FILE, RunIndex
from holdfast.run.lease import files_of
from holdfast.run.record import Record, flat_metrics, metric_value, read_sidecar, timestamp, unpack
from holdfast.run.retention import best_of, is_number, rankable
from holdfast.run.view import RunStatus, run_state
from holdfast.storage.base import Storage

from .targets import (
    PATH,
    Choice,
    bad_step_in,
    choose,
    complete_metric,
    find,
    heed_checks,
    look_at,
    pick_options,
    ranking,
)
from .terminal import (
    PlainTable,
    age,
    console,
    counted,
    json_option,
    note,
    number,
    print_columns,
    print_json,
    printable,
    say_left_out,
    table,
)

_RUN_COLOURS = {"training": "green", "finished": "cyan", "died": "red", "unreadable": "red", "silent": "yellow"}

_METRICS_SHOWN = 3
_COLUMNS = ("step", "epoch", "attempt", "age", "size", "new", "verified")
_DROPPABLE = ("new", "epoch", "verified", "attempt", "size", "age")  # where there is no room, the first ones first
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
@json_option
def ls(path: str, metric: str | None, mode: str | None, as_json: bool) -> None:
    """List the checkpoints of the run at PATH, newest first; of a folder of runs, one line for each run.

    Default: the current folder.

    "new" is what a checkpoint added to the disk: files that did not change are shared with the checkpoint before.
    "verified" is how long ago `holdfast verify --deep` found every byte right, or verify alone the sizes.
    """
    storage, checkpoint = find(path)
    if checkpoint is not None:
        _show_checkpoint(checkpoint, tensors=False, as_json=as_json)
        return
    found = look_at(storage)
    if isinstance(found, list):
        _show_runs(storage, found, metric, mode, as_json=as_json)
        return
    document = _document(found, metric, mode)
    if metric is not None:
        _say_unknown(metric, storage.uri, [flat_metrics(row.get("metrics", {})) for row in document["checkpoints"]])
    if as_json:
        print_json(document)
    else:
        _print(document, run_state(found) if found.index.damage is None else None)


def _document(catalog: Catalog, metric: str | None, mode: str | None) -> dict[str, Any]:
    """Describe a run and everything under its root as JSON."""
    storage, index = catalog.storage, catalog.index
    metric, mode = ranking(index.keep, metric, mode)
    listed = {*catalog.names()}
    while (last := catalog.newest()) is not None and not storage.exists(f"{last.name}/{MANIFEST_NAME}"):
        catalog.look_again([last.name])  # the index is believed of the others
    gone = listed - {*catalog.names(), *catalog.corrupt, *catalog.others, *catalog.void}
    good, bad, corrupt, bad_steps = catalog.records(), catalog.bad(), {*catalog.corrupt}, catalog.bad_steps()
    heed_checks(catalog)
    best, newest = best_of(catalog.sound(), metric, mode), catalog.newest_sound()
    rows = [_row(storage, record, "ok", newest=record == newest, best=record == best) for record in good]
    for row in rows:
        if row["name"] in bad_steps:
            row["bad_step"] = bad_steps[row["name"]]
    for name, why in sorted(bad.items()):
        state = "corrupt" if name in corrupt else "quarantined"
        known = catalog.record(name) if name in index.rows else None
        rows.append({**(_row(storage, known, state) if known else _bare(storage, name, state)), "reason": why})
    for record in sorted(catalog.strangers(), key=lambda record: record.created, reverse=True):
        run = catalog.others[record.name].run_id
        original = catalog.guests.get(record.name)
        state = f"copy of {original}" if original else "ok" if not run else f"of run {run[:8]}"
        rows.append({**_row(storage, record, state), "run_id": run})
    rows += [_bare(storage, name, "incomplete") for name in sorted({*catalog.incomplete, *gone})]
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
        "finished": index.finished if index.has_finished else None,
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


def _print(document: dict[str, Any], state: RunStatus | None) -> None:
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
    if state is not None and state.word != "new":
        parts.append(_in_words(state) + (f", {state.text}" if state.is_live else ""))
    if document["index_rebuilt"]:
        parts.append("run.json unusable, rebuilt by scan")
    out.print(Text(printable(" · ".join(parts)), style="dim"))
    out.print()
    known = _metrics(rows, document["metric"])
    metrics, titles = known[:_METRICS_SHOWN], _titles(rows)
    droppable = [title for title in _DROPPABLE if title in titles]
    left_out: list[str] = []
    while not _listing(rows, titles, metrics).print(out, fitting=bool(metrics or droppable)):
        if metrics:
            metrics.pop()
        else:
            left_out.append(droppable.pop(0))
            titles.remove(left_out[-1])
    say_left_out(out, [*left_out, *known[len(metrics) :]])
    for row in rows:
        if (why := row.get("reason") or row.get("bad_step")) is not None:
            out.print(Text(printable(f"{row['name']}: {why}"), style="red"))


def _titles(rows: list[dict[str, Any]]) -> list[str]:
    """Return the columns, without those that would say the same in every row."""
    full = [row for row in rows if "step" in row]
    optional = {
        "epoch": any(row["epoch"] is not None for row in full),
        "attempt": len({row["attempt"] for row in full}) > 1,
        "new": any(row["new_bytes"] != row["size_bytes"] for row in full),
        "verified": any("verified" in row for row in full),
    }
    return [title for title in _COLUMNS if optional.get(title, True)]


def _listing(rows: list[dict[str, Any]], titles: list[str], metrics: list[str]) -> PlainTable:
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
    """Return the metrics to show: the ranking one, then those most checkpoints have; none that is there already."""
    names = (name for row in rows for name in flat_metrics(row.get("metrics", {})))
    count = Counter(name for name in names if name == first or not name.startswith("_"))  # notes of ours, times
    return sorted(count.keys() - _TITLES, key=lambda name: (name != first, -count[name], name))


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
    lines = []
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
        "state": _in_words(state),
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


def _in_words(state: RunStatus) -> str:
    return state.text.partition("\n")[0][:40].rstrip(": ") if state.word == "stopped" else state.word


def _say_unknown(metric: str, where: str, have: Sequence[Mapping[str, Any]]) -> None:
    """Say so on stderr if none of the metrics in ``have`` is a number called ``metric``."""
    if not any(is_number(metrics.get(metric)) for metrics in have):
        known = ", ".join(rankable(have)) or "no metric"
        note(f"nothing in {where} has a number for {metric!r}; there is: {known}")


_FILES_SHOWN = 12
_DATA_SHOWN = 24


@click.command()
@click.argument("path", type=PATH)
@click.option("--tensors", is_flag=True, help="List every tensor with shape and dtype.")
@json_option
@pick_options(whole=False)
def show(path: str, tensors: bool, as_json: bool, pick: Choice) -> None:
    """Show what a checkpoint is and holds, from its small files alone.

    PATH is a checkpoint, or a run: then its newest is shown, or the one that --best or --step names.
    """
    _show_checkpoint(choose(path, pick, warns=False), tensors=tensors, as_json=as_json)


def _show_checkpoint(checkpoint: Checkpoint, *, tensors: bool, as_json: bool) -> None:
    """Print a checkpoint; ends the command with status 1 if it is damaged or incomplete."""
    document = _document_checkpoint(checkpoint, tensors=tensors)
    if as_json:
        print_json(document)
    else:
        _print_checkpoint(printable(document))
    if document["state"] not in ("ok", "foreign"):
        raise click.exceptions.Exit(1)


def _document_checkpoint(checkpoint: Checkpoint, *, tensors: bool) -> dict[str, Any]:
    head = {"checkpoint": checkpoint.uri, "name": checkpoint.name}
    try:
        manifest = checkpoint.manifest
        if manifest is None:
            found = files_of(checkpoint.storage, checkpoint.directory)
            files = [{"path": path, "bytes": info.size, "role": "user"} for path, info in found]
            return {**head, "state": "foreign", "size_bytes": checkpoint.size_bytes, "files": files}
        contents = ContentsReader(checkpoint.storage.child(checkpoint.directory), manifest)
        rows, tree = summary.tensors(contents), summary.state_tree(contents)
    except CheckpointNotFoundError:
        raise
    except CheckpointError as error:
        state = "incomplete" if type(error).__name__ == "IncompleteCheckpointError" else "corrupt"
        return {**head, "state": state, "reason": str(error)}
    index = RunIndex.load(checkpoint.storage) if manifest.run_id or manifest.parent else None
    bad = None if index is None else index.quarantined.get(checkpoint.directory)
    late = read_sidecar(checkpoint.storage, checkpoint.directory)  # once: on a remote each look is a request
    in_run = index is not None and index.damage != "missing"
    verified = read_verified(checkpoint.storage).get(checkpoint.directory) if in_run else None
    bad_step = None if index is None else bad_step_in(checkpoint, index)
    document: dict[str, Any] = {
        **head,
        "state": "ok" if bad is None else "quarantined",
        **({} if bad is None else {"reason": f"{bad} (it is never resumed from; its files are as they were saved)"}),
        **({} if bad_step is None else {"bad_step": bad_step}),
        "run_id": manifest.run_id,
        "checkpoint_id": manifest.checkpoint_id,
        "parent": _parent(index, manifest),
        "attempt": manifest.attempt,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "created": manifest.created,
        "metrics": {**manifest.metrics, **late.metrics},
        "pinned": late.pinned,
        **({} if verified is None else {"verified": verified.describe(checkpoint.storage, checkpoint.directory)}),
        "world_size": manifest.world_size,
        "writers": manifest.writers,
        "versions": manifest.versions,
        "size_bytes": manifest.total_bytes,
        "reused_bytes": manifest.reused_bytes,
        "metadata": checkpoint.get_metadata(),
        "extra": dict(manifest.extra),
        "items": [
            {"name": i.name, "tensors": i.tensors, "numel": i.numel, "bytes": i.nbytes, "dtypes": list(i.dtypes)}
            for i in summary.items(rows)
        ],
        "files": [
            {"path": f.path, "bytes": f.size, "role": f.role, "digest": f.digest, "reused_from": f.reused_from}
            for f in manifest.files
        ],
        "keys": summary.top_names(tree),
        "data": dict(summary.plain_names(tree)),
    }
    if tensors:
        document["tensors"] = [
            {"name": r.name, "dtype": r.dtype, "shape": list(r.shape), "bytes": r.nbytes, "tied_to": r.tied_to}
            for r in rows
        ]
    return document


def _parent(index: RunIndex | None, manifest: Manifest) -> dict[str, Any] | None:
    """Return the checkpoint it descends from: always its id, and its name while the run still has it."""
    if not manifest.parent:
        return None
    records = map(unpack, index.rows.values() if index is not None else ())
    name = next((r.name for r in records if manifest.parent in (r.checkpoint_id, r.name)), None)
    return {"checkpoint_id": manifest.parent, "name": name}


def _print_checkpoint(document: dict[str, Any]) -> None:
    from rich.text import Text

    out = console()
    state, known = document["state"], document.get("verified")
    if state == "ok" and known is not None and not known["ok"] and known["unchanged"]:
        state = "damaged"  # what `holdfast verify` found; the small files that are read here are well
    title = Text(document["checkpoint"], style="bold")
    out.print(title + Text(f"  {state}", style="green" if state == "ok" else "yellow"))
    if "reason" in document:
        out.print(Text(document["reason"], style="red"))
    if "bad_step" in document:
        out.print(Text(f"no start takes it: {document['bad_step']}", style="red"))
    if "size_bytes" not in document:
        return
    facts = table([("", "left"), ("", "left")], header=False)
    facts.columns[1].no_wrap = False
    for name, value in _facts(document):
        facts.add_row(Text(name, style="dim"), value)
    out.print(facts)
    if document.get("items"):
        made = table(
            [("item", "left"), ("tensors", "right"), ("elements", "right"), ("size", "right"), ("dtype", "left")]
        )
        for item in document["items"]:
            dtypes = ", ".join(item["dtypes"])
            made.add_row(
                item["name"], f"{item['tensors']:,}", _count(item["numel"]), format_bytes(item["bytes"]), dtypes
            )
        out.print()
        out.print(made)
    _print_files(out, document["files"])
    if document.get("data"):
        made = table([("plain data", "left"), ("value", "left")])
        for name, value in list(document["data"].items())[:_DATA_SHOWN]:
            made.add_row(name, value)
        out.print()
        out.print(made)
        _more(out, len(document["data"]) - _DATA_SHOWN)
    if document.get("tensors") is not None:
        out.print()
        _print_tree(out, document["tensors"])


def _facts(document: dict[str, Any]) -> list[tuple[str, str]]:
    facts = []
    if "run_id" in document:
        facts.append(("run", f"{document['run_id'] or '-'}, attempt {document['attempt']}"))
        epoch = "" if document["epoch"] is None else f", epoch {number(document['epoch'])}"
        facts.append(("step", f"{number(document['step'])}{epoch}"))
        created = document["created"]
        facts.append(("created", f"{created[:19].replace('T', ' ')} UTC ({age(timestamp(created))} ago)"))
        parent = document["parent"]
        if parent is not None:
            facts.append(("parent", parent["name"] or f"{parent['checkpoint_id']} (no longer there)"))
        metrics = ", ".join(f"{name} {number(value)}" for name, value in document["metrics"].items())
        facts += [("metrics", metrics)] if metrics else []
        facts += [("pinned", "yes")] if document["pinned"] else []
        facts += [("verified", document["verified"]["words"])] if "verified" in document else []
        versions = ", ".join(f"{name} {value}" for name, value in document["versions"].items())
        facts.append(("written by", f"{versions}; world size {document['world_size']}"))
    count = len(document["files"])
    size = f"{format_bytes(document['size_bytes'])} in {count} file{'s' * (count != 1)}"
    if document.get("reused_bytes"):
        size += f", {format_bytes(document['reused_bytes'])} of it shared with the checkpoint before"
    facts.append(("size", size))
    made = document.get("extra", {}).get("average")
    if isinstance(made, dict) and isinstance(made.get("sources"), list):
        of = ", ".join(f"{number(source.get('share'))} of {source.get('checkpoint')}" for source in made["sources"])
        facts.append((f"average ({made.get('method')})", of))
    facts += [("metadata", str(document["metadata"]))] if document.get("metadata") else []
    return facts


def _print_files(out: Any, files: list[dict[str, Any]]) -> None:
    made = table([("file", "left"), ("size", "right"), ("role", "left"), ("", "left")])
    for file in files[:_FILES_SHOWN]:
        reused = f"shared with {file['reused_from']}" if file.get("reused_from") else ""
        made.add_row(file["path"], format_bytes(file["bytes"]), file["role"], reused)
    out.print()
    out.print(made)
    _more(out, len(files) - _FILES_SHOWN)


def _print_tree(out: Any, rows: list[dict[str, Any]]) -> None:
    """Print names as a tree cut at "/", one tensor a line; plain strings, for there may be 100 000."""
    width = max((len(row["name"].rsplit("/", 1)[-1]) + 2 * row["name"].count("/") for row in rows), default=0)
    before: list[str] = []
    for row in rows:
        *parents, leaf = row["name"].split("/")
        common = next((i for i, (a, b) in enumerate(zip(parents, before, strict=False)) if a != b), len(before))
        for depth in range(min(common, len(parents)), len(parents)):
            click.echo(f"{'  ' * depth}{parents[depth]}")
        before = parents
        shape = "×".join(str(size) for size in row["shape"]) or "scalar"
        tied = f"  = {row['tied_to']}" if row["tied_to"] else f"  {format_bytes(row['bytes'])}"
        indent = "  " * len(parents)
        click.echo(f"{indent}{leaf:<{max(width - len(indent), 1)}}  {row['dtype']:<9} {shape}{tied}")


def _more(out: Any, left: int) -> None:
    if left > 0:
        out.print(f"... and {left} more (--json lists all)", style="dim")


def _count(numel: int) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if numel >= size:
            return f"{numel / (1e3 if unit == 'k' else size):.1f} {unit}"
    return str(numel)
