"""``holdfast show``: one checkpoint."""

from __future__ import annotations

from typing import Any

import click

from holdfast._units import format_bytes
from holdfast.checkpoint import summary
from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import CheckpointError, CheckpointNotFoundError
from holdfast.format.contents import ContentsReader
from holdfast.format.manifest import Manifest
from holdfast.run.index import RunIndex
from holdfast.run.lease import files_of
from holdfast.run.record import read_sidecar, timestamp, unpack
from holdfast.run.verified import read_verified

from .targets import PATH, Choice, bad_step_in, choose, pick_options
from .terminal import age, console, number, print_json, printable, table

__all__ = ["show", "show_checkpoint"]

_FILES_SHOWN = 12
_DATA_SHOWN = 24


@click.command()
@click.argument("path", type=PATH)
@click.option("--tensors", is_flag=True, help="List every tensor with shape and dtype.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@pick_options(whole=False)
def show(path: str, tensors: bool, as_json: bool, pick: Choice) -> None:
    """Show what a checkpoint is and holds, from its small files alone.

    PATH is a checkpoint, or a run: then its newest is shown, or the one that --best or --step names.
    """
    show_checkpoint(choose(path, pick, warns=False), tensors=tensors, as_json=as_json)


def show_checkpoint(checkpoint: Checkpoint, *, tensors: bool, as_json: bool) -> None:
    """Print a checkpoint; ends the command with status 1 if it is damaged or incomplete."""
    document = _document(checkpoint, tensors=tensors)
    if as_json:
        print_json(document)
    else:
        _print(printable(document))
    if document["state"] not in ("ok", "foreign"):
        raise click.exceptions.Exit(1)


def _document(checkpoint: Checkpoint, *, tensors: bool) -> dict[str, Any]:
    head = {"checkpoint": checkpoint.uri, "name": checkpoint.name}
    try:
        manifest = checkpoint.manifest
        if manifest is None:
            return {**head, "state": "foreign", "size_bytes": checkpoint.size_bytes, "files": _foreign(checkpoint)}
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


def _foreign(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    files = files_of(checkpoint.storage, checkpoint.directory)
    return [{"path": path, "bytes": info.size, "role": "user"} for path, info in files]


def _parent(index: RunIndex | None, manifest: Manifest) -> dict[str, Any] | None:
    """Return the checkpoint it descends from: always its id, and its name while the run still has it."""
    if not manifest.parent:
        return None
    records = map(unpack, index.rows.values() if index is not None else ())
    name = next((r.name for r in records if manifest.parent in (r.checkpoint_id, r.name)), None)
    return {"checkpoint_id": manifest.parent, "name": name}


def _print(document: dict[str, Any]) -> None:
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
