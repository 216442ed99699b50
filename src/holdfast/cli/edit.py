"""``holdfast pin``, ``unpin``, ``rm`` and ``prune``: what stays of a run, and what goes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import click

from holdfast._units import format_bytes
from holdfast.checkpoint.handle import Checkpoint
from holdfast.config import KEEP_TEXT, Keep, keep_from_text
from holdfast.errors import CheckpointError, ConfigError
from holdfast.format.commit import read_manifest
from holdfast.run.catalog import Catalog, upkeep
from holdfast.run.external import holders
from holdfast.run.index import RunIndex
from holdfast.run.retention import Verdict, decide
from holdfast.run.trash import Trash
from holdfast.storage.base import Storage
from holdfast.storage.resolve import resolve

from .targets import PATH, Choice, choose, find, heed_checks, pick_options, reach, run_at
from .terminal import console, counted, json_option, painted, print_json, printable


@click.command()
@click.argument("path", type=PATH)
@json_option
@pick_options(whole=False)
def pin(path: str, as_json: bool, pick: Choice) -> None:
    """Keep a checkpoint whatever the retention of its run says, also while the run trains."""
    _pin(path, pick, as_json, on=True)


@click.command()
@click.argument("path", type=PATH)
@json_option
@pick_options(whole=False)
def unpin(path: str, as_json: bool, pick: Choice) -> None:
    """Leave a checkpoint to the retention of its run again."""
    _pin(path, pick, as_json, on=False)


def _pin(path: str, pick: Choice, as_json: bool, *, on: bool) -> None:
    checkpoint = choose(path, pick)
    checkpoint.pin() if on else checkpoint.unpin()
    if as_json:
        print_json({"checkpoint": checkpoint.uri, "name": checkpoint.name, "pinned": on})
    else:
        click.echo(f"{printable(checkpoint.uri)}  {'pinned' if on else 'not pinned'}")


@click.command()
@click.argument("paths", type=PATH, nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Delete. Without it, only what would go is said.")
@click.option("--force", is_flag=True, help="Also a checkpoint that is pinned, held, or the newest of its run.")
@click.option("--now", is_flag=True, help="Delete for good, without a stay in the trash.")
@click.option("--undo", is_flag=True, help="Bring PATHS back from the trash of their run.")
@json_option
def rm(paths: tuple[str, ...], yes: bool, force: bool, now: bool, undo: bool, as_json: bool) -> None:
    """Delete checkpoints. Whole runs are not deleted.

    On a disk they go to the trash of their run (.trash) for a week: they take room there, and --undo brings them back.
    After it the next rm or prune that deletes, or the next start, deletes them for good; rm and prune name them. In an
    object store there is no trash. The run must not be training: its own retention deletes then. Without --yes nothing
    is deleted.
    """
    if undo:
        if yes or force or now:
            raise ConfigError("--undo brings back what was deleted: leave --yes, --force and --now out")
        _undo([Checkpoint(path) for path in paths], as_json=as_json)
        return
    chosen = [_checkpoint_at(path) for path in paths]
    rows = [_removal(checkpoint, force=force, now=now) for checkpoint in chosen]
    refused = [row for row in rows if row["refused"]]
    runs = {checkpoint.storage.uri: checkpoint.storage for checkpoint in chosen}
    emptied = [] if refused else _outdated(runs.values())
    if yes and not refused:
        for checkpoint, row in zip(chosen, rows, strict=True):
            _remove(checkpoint, force=force, to_trash=row["trash"])
            row["state"] = "in the trash" if row["trash"] else "deleted"
    _show_removed(rows, emptied, done=yes and not refused, asked=yes, as_json=as_json)
    if refused:
        raise click.exceptions.Exit(1)


def _outdated(runs: Iterable[Storage]) -> list[str]:
    """Return what would go for good by an `rm` or `prune` besides that which it deletes: their week is over."""
    return [f"{run.uri.rstrip('/')}/{name}" for run in runs for name in Trash(run).outdated()]


def _checkpoint_at(path: str) -> Checkpoint:
    storage, checkpoint = find(path)
    if checkpoint is not None:
        return checkpoint
    emptied = Checkpoint(path)  # of one that its run has, nothing but the folder may be left
    if next(storage.list(""), None) is None and emptied.directory in RunIndex.load(emptied.storage).rows:
        return emptied
    raise ConfigError(f"{storage.uri} is no checkpoint: rm deletes checkpoints, `holdfast ls {path}` lists them")


def _undo(checkpoints: Sequence[Checkpoint], *, as_json: bool) -> None:
    for checkpoint in checkpoints:
        storage, name = checkpoint.storage, checkpoint.directory
        trash = Trash(storage)
        if not trash.exists:
            raise ConfigError(
                f"{checkpoint.uri}: a run in an object store has no trash, what was deleted there is gone"
            )
        with upkeep(storage) as catalog:
            trash.restore(name)
            with contextlib.suppress(CheckpointError):  # damaged, as it was
                # A start since then may have drawn a fence that does not know it.
                catalog.admit({name: read_manifest(storage, name).checkpoint_id}, os.urandom(4).hex())
            catalog.refresh()
            if name not in {*catalog.index.rows, *catalog.bad(), *catalog.others}:
                trash.take(name)
                raise CheckpointError(
                    f"{checkpoint.uri} stays in the trash: a newer start of the run has left it behind for good"
                )
            catalog.index.save()
    if as_json:
        print_json({"restored": [checkpoint.uri for checkpoint in checkpoints]})
        return
    for checkpoint in checkpoints:
        click.echo(printable(f"{checkpoint.uri}  is back"))


_FOREIGN = "it is no checkpoint of Holdfast"  # the one reason that --force does not overrule


def _removal(checkpoint: Checkpoint, *, force: bool, now: bool) -> dict[str, Any]:
    """Say what deleting a checkpoint would mean."""
    catalog = Catalog(checkpoint.storage)
    last = catalog.newest()
    heed_checks(catalog)
    newest = catalog.latest() or last  # where none is good, the last may be repaired
    holding = holders(checkpoint.storage).get(checkpoint.directory)
    reasons = [f"held by {', '.join(holding)}"] if holding else []
    with contextlib.suppress(CheckpointError):
        reasons += ["pinned"] if checkpoint.is_pinned else []
    reasons += ["the newest of its run"] if newest is not None and newest.name == checkpoint.directory else []
    of_run = {*catalog.index.rows, *catalog.bad(), *catalog.others}
    foreign = checkpoint.directory not in {*of_run, *catalog.incomplete}
    reasons += [_FOREIGN] if foreign else []
    has_trash = catalog.index.damage != "missing" and checkpoint.directory in of_run and Trash(catalog.storage).exists
    return {
        "checkpoint": checkpoint.uri,
        "name": checkpoint.name,
        "bytes": _bytes(checkpoint),
        "state": "kept",
        "trash": not now and has_trash,
        "refused": None if force and not foreign else ", ".join(reasons) or None,
    }


def _bytes(checkpoint: Checkpoint) -> int:
    try:
        return checkpoint.size_bytes
    except CheckpointError:
        return 0


def _remove(checkpoint: Checkpoint, *, force: bool, to_trash: bool) -> None:
    storage, name = checkpoint.storage, checkpoint.directory
    if Catalog(storage).index.damage == "missing":
        checkpoint.delete()
        return
    with upkeep(storage) as catalog:
        trash = Trash(storage)
        trash.empty()
        catalog.trash = trash if to_trash else None
        if name in catalog.index.rows:
            catalog.discard([name], "holdfast rm")
        if name in catalog.index.rows and not force:
            raise CheckpointError(f"{checkpoint.uri} stays: another process has begun to use it")
        if next(storage.list(name), None) is not None:  # quarantined, damaged, held, or more than the checkpoint itself
            trash.take(name) if to_trash else checkpoint.delete()
            catalog.refresh()
            catalog.index.save()


@click.command()
@click.argument("run", type=PATH)
@click.option(
    "--keep", "rules", metavar="RULES", help=f"What stays; {KEEP_TEXT}. Default: the rules of the run itself."
)
@click.option("--yes", is_flag=True, help="Delete. Without it, only what would go is said.")
@click.option("--now", is_flag=True, help="Delete for good, without a stay in the trash.")
@json_option
def prune(run: str, rules: str | None, yes: bool, now: bool, as_json: bool) -> None:
    """Delete the checkpoints of RUN that no rule keeps: the same rules as `Keep` of the run itself.

    On a disk they go to the trash of the run, as with `holdfast rm`. The newest, pinned ones, that resumed from and
    those that another process holds always stay. What `holdfast verify` found damaged counts as none of them, and stays
    too. The run must not be training: its own retention deletes then. Without --yes nothing is deleted.
    """
    storage = reach(run)
    catalog = run_at(storage, run)
    if rules is not None:
        keep = keep_from_text(rules, option="--keep")
    elif catalog.index.keep is not None:
        keep = Keep.from_json(catalog.index.keep)
    else:
        raise ConfigError(f"{storage.uri} has no rules of its own (it keeps everything): --keep RULES, {KEEP_TEXT}")
    records = {record.name: record for record in catalog.records()}
    damaged = heed_checks(catalog)
    verdicts = _verdicts(catalog, keep)
    for name in sorted(records.keys() - {verdict.name for verdict in verdicts}, key=list(records).index):
        if next(storage.list(name), None) is not None:
            why = damaged.get(name) or catalog.corrupt.get(name, "its manifest is gone")
            verdicts.append(Verdict(name=name, keep=True, why=f"damaged, and no rule counts it: {why}"))
    holding = holders(storage)
    held = {verdict.name: holding.get(verdict.name) for verdict in verdicts if not verdict.keep}
    rows: list[dict[str, Any]] = [
        {
            "name": verdict.name,
            "checkpoint": f"{storage.uri.rstrip('/')}/{verdict.name}",
            "step": records[verdict.name].step,
            "bytes": records[verdict.name].size - records[verdict.name].reused,
            "state": "kept" if verdict.keep or held[verdict.name] else "would go",
            "why": f"held by {', '.join(who)}" if (who := held.get(verdict.name)) else verdict.why,
        }
        for verdict in verdicts
    ]
    emptied = _outdated([storage]) if any(row["state"] == "would go" for row in rows) else []
    if yes and any(row["state"] == "would go" for row in rows):
        gone, binned = _prune(run, keep, now=now)
        went = "in the trash" if binned else "deleted"
        for row in rows:
            row["state"] = went if row["name"] in gone else "kept" if row["state"] == "would go" else row["state"]
    if as_json:
        head = {"path": storage.uri, "keep": keep.to_json(), "dry_run": not yes}
        print_json({**head, "checkpoints": rows, "emptied": emptied})
        return
    out = console()
    for row in rows:
        line = printable(f"{row['name']}  {row['state']}, {row['why']}  {format_bytes(row['bytes'])}")
        out.file.write(painted(out, line, "red" if row["state"] != "kept" else "") + "\n")
    _sum([row for row in rows if row["state"] != "kept"], len(rows), done=yes)
    _say_trash(sum(row["state"] == "in the trash" for row in rows), emptied, done=yes)


def _verdicts(catalog: Catalog, keep: Keep) -> list[Verdict]:
    """Decide what stays, once all of that was found there: a row of the index alone keeps no place."""
    looked: set[str] = set()
    while True:
        verdicts = decide(keep, catalog.records())
        staying = [verdict.name for verdict in verdicts if verdict.keep and verdict.name not in looked]
        if not staying:
            return verdicts
        catalog.look_again(staying)
        looked.update(staying)


def _prune(run: str, keep: Keep, *, now: bool) -> tuple[set[str], bool]:
    """Delete what the rules do not keep; return the names, and whether they are in the trash."""
    gone: set[str] = set()
    with upkeep(resolve(run)) as catalog:
        trash = Trash(catalog.storage)
        trash.empty()
        catalog.trash = trash if trash.exists and not now else None
        heed_checks(catalog)
        _verdicts(catalog, keep)
        kept_rules = catalog.index.keep
        while fresh := {record.name for record in catalog.prune(keep)}:
            gone |= fresh
        catalog.index.keep = kept_rules  # it shows what the run itself goes by
        catalog.index.save()
        return gone, catalog.trash is not None


def _show_removed(
    rows: Sequence[dict[str, Any]], emptied: Sequence[str], *, done: bool, asked: bool, as_json: bool
) -> None:
    for row in rows:
        row["state"] = row["state"] if done else "refused" if row["refused"] else "would go"
    if as_json:
        print_json({"dry_run": not done, "checkpoints": list(rows), "emptied": emptied})
        return
    out = console()
    for row in printable(list(rows)):
        why = row["refused"]
        more = f": {why}" + ("" if _FOREIGN in why else " (--force deletes it all the same)") if why else ""
        out.print(f"{row['checkpoint']}  {row['state']}{more}  {format_bytes(row['bytes'])}")
    going = [row for row in rows if row["state"] != "refused"]
    _sum(going, len(rows), done=done, why_not="where one is refused" if asked else "without --yes")
    binned = sum(row["trash"] for row in going)
    _say_trash(binned if done else 0, emptied, done=done)
    if binned and not done:
        click.echo("they would go to the trash of the run, where --undo finds them (--now: delete at once)")
    if binned < len(going) and not done:
        click.echo(f"{len(going) - binned} of them would be gone for good")


def _say_trash(number: int, emptied: Sequence[str], *, done: bool) -> None:
    if emptied:
        names = ", ".join(uri.rpartition("/")[2] for uri in emptied)
        click.echo(printable(f"{'gone' if done else 'would go'} for good: {names}, in the trash for over a week"))
    if number:
        click.echo(
            "in the trash of the run they take the same room for a week, and until the next `holdfast rm`, `prune` or "
            "start after it: `holdfast rm --undo PATH` brings one back, --now deletes at once, and so does deleting "
            "the folder .trash of the run"
        )


def _sum(rows: Sequence[dict[str, Any]], among: int, *, done: bool, why_not: str = "without --yes") -> None:
    size = format_bytes(sum(row["bytes"] for row in rows))
    said = f"{len(rows)} of {counted(among, 'checkpoint')}, {size}, "
    click.echo(said + ("deleted" if done else f"would be deleted: nothing is, {why_not}"))
