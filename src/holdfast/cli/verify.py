"""``holdfast verify`` and ``doctor``: is what is on storage what was written, and what do storage and machine keep?"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast._progress import progress_bar
from holdfast._units import format_bytes, parse_bytes
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.verify import Verification, Verified, fingerprint, note_verified, read_verified
from holdfast.checkpoint.verify import verify as verify_checkpoint
from holdfast.errors import ConfigError, StorageError, StoragePermissionError
from holdfast.format.manifest import MANIFEST_NAME
from holdfast.run.catalog import Catalog
from holdfast.run.fence import damaged_fences
from holdfast.run.index import RUN_FILE, RunIndex
from holdfast.run.lease import is_claim
from holdfast.run.names import LOGS, REPORTS
from holdfast.run.remains import is_remains
from holdfast.run.reports import read_history
from holdfast.storage.base import Storage

from .targets import PATH, Choice, choose, find, pick_options, reach, refuse_file
from .terminal import console, ends_in_order, json_option, print_json, printable

if TYPE_CHECKING:
    from .probes import Finding

_QUIET_S = 0.5
_LOST = (
    "its manifest.json is gone, though the index of the run has the checkpoint: no start takes it. Bring it back from "
    "a copy, or delete what is left with `holdfast rm`"
)
_LEVELS = 3  # of folders within folders: save_folder of many runs, with file names that lead into sub-folders


@click.command()
@click.argument("path", type=PATH)
@click.option(
    "--deep/--no-deep", default=None, help="Read every byte [default: deep for one checkpoint, not for a run]."
)
@json_option
@pick_options(whole=True)
def verify(path: str, deep: bool | None, as_json: bool, pick: Choice) -> None:
    """Check one checkpoint, or all checkpoints of a run (or of several runs in a folder), at PATH.

    Without --deep: manifests and the sizes of all files. With --deep: every byte against its digest.
    """
    storage, checkpoint = find(path)
    if pick.is_given:
        checkpoint = choose(path, pick, heeds=False)
    if checkpoint is not None:
        deep = True if deep is None else deep
        bad = RunIndex.load(checkpoint.storage).quarantined.get(checkpoint.directory)
        rows = [{**_checked(checkpoint, deep), "quarantined": bad}]
    else:
        deep = bool(deep)
        rows = list(_run(storage, deep))
    # Of a path that is wrong nothing is checked, which must not pass for a success.
    is_there = any(_is_checked(row) for row in rows) or storage.exists(RUN_FILE)
    ok = is_there and all(row["ok"] for row in rows)
    if as_json:
        print_json({"path": storage.uri, "ok": ok, "deep": deep, "checkpoints": rows})
    else:
        _print(printable(rows), deep)
    if not ok:
        raise click.exceptions.Exit(1)


def _checked(checkpoint: Checkpoint, deep: bool) -> dict[str, Any]:
    if checkpoint.storage.exists(checkpoint.directory):
        found = checkpoint.verify()
    else:
        total = (
            checkpoint.size_bytes if deep and checkpoint.storage.exists(f"{checkpoint.directory}/manifest.json") else 0
        )
        noted: dict[str, Verified] = {}
        with progress_bar(f"verify {checkpoint.name}", total, after_s=_QUIET_S) as progress:
            found = _verified(checkpoint.storage, checkpoint.directory, deep, progress, noted)
        known = read_verified(checkpoint.storage)
        note_verified(checkpoint.storage, noted, present=known)
    return _row(checkpoint.uri, checkpoint.name, found, ok=found.ok)


def _run(storage: Storage, deep: bool) -> Iterator[dict[str, Any]]:
    """Check every checkpoint below ``storage``, those in sub-folders too.

    What never was a checkpoint is listed and is no problem.
    """
    try:
        catalog = Catalog(storage)
    except StoragePermissionError:  # of a directory in it
        if storage.exists(RUN_FILE):
            raise
        yield from _readable(storage, deep)
        return
    yield from _folder(catalog, deep)
    if catalog.index.damage != "missing" or catalog.index.rows:  # else there is no run
        yield from _about_run(catalog)
    for name in catalog.foreign:
        below = _below(storage, name, deep)
        yield from below or [_unchecked(storage, name, "foreign")]
    if catalog.index.damage == "missing":  # no run, so these are no folders of its own
        for info in storage.list("", recursive=False):
            if info.path in (f"{LOGS}/", f"{REPORTS}/"):
                yield from _below(storage, info.path[:-1], deep)


def _readable(storage: Storage, deep: bool) -> Iterator[dict[str, Any]]:
    """Check all that may be read in a folder that is no run, and list the rest."""
    for info in storage.list("", recursive=False):
        name = info.path[:-1]
        if not info.path.endswith("/") or name[0] == ".":
            continue
        rows = _below(storage, name, deep)
        if not rows and storage.exists(f"{name}/{MANIFEST_NAME}"):
            rows = [_checked(Checkpoint(_uri(storage, name)), deep)]
        yield from rows


def _about_run(catalog: Catalog) -> Iterator[dict[str, Any]]:
    """Check what the run says about itself; list what is damaged, which costs no checkpoint."""
    storage, problems = catalog.storage, dict[str, str]()
    if catalog.index.damage not in (None, "missing"):
        problems[RUN_FILE] = f"{catalog.index.damage}: the next start makes it anew from the checkpoints"
    for path, number in read_history(storage).damaged.items():
        problems[path] = f"{number} lines are damaged: these reports are left out"
    for path, why in damaged_fences(storage).items():
        problems[path] = f"{why}: checkpoints that an owner which had been taken over committed may count"
    for path, problem in problems.items():
        found = Verification(ok=False, problems=(problem,), state="corrupt")
        yield _row(_uri(storage, path), path, found, ok=False)


def _folder(catalog: Catalog, deep: bool) -> Iterator[dict[str, Any]]:
    """Check what lies in one folder and is, or was to be, a checkpoint."""
    storage = catalog.storage
    records = {record.name: record.size for record in catalog.records()}
    names = [*records, *sorted((catalog.bad().keys() | catalog.others.keys()) - records.keys())]
    noted: dict[str, Verified] = {}
    label = f"verify {storage.uri.rstrip('/').rpartition('/')[2]}"
    with progress_bar(
        label, sum(records.values()) if deep else len(names), after_s=_QUIET_S, counts=not deep
    ) as progress:
        for name in names:
            found = _verified(storage, name, deep, progress if deep else None, noted)
            if not deep:
                progress(1)
            if found.state == "missing" and not _is_emptied(storage, name):
                continue  # retention, or somebody else, has deleted it since the names were listed
            if found.state in ("incomplete", "missing"):
                if name in RunIndex.load(storage).rows:  # read anew: an owner that deletes takes the row out first
                    lost = replace(found, problems=(_LOST,), state="incomplete")
                    yield _row(_uri(storage, name), name, lost, ok=False)
                elif found.state == "incomplete":
                    yield _unchecked(storage, name, "incomplete")
                continue
            row = _row(_uri(storage, name), name, found, ok=found.ok)
            yield {**row, "quarantined": catalog.index.quarantined.get(name)}
    note_verified(storage, noted, present=names)
    for name in catalog.incomplete:
        yield _unchecked(storage, name, "incomplete")


def _verified(
    storage: Storage, name: str, deep: bool, progress: Callable[[int], None] | None, noted: dict[str, Verified]
) -> Verification:
    """Check a checkpoint, and put what the run is to remember of it into ``noted``."""
    before = fingerprint(storage, name)
    found = verify_checkpoint(storage, name, deep=deep, progress=progress)
    if found.state in ("ok", "corrupt") and before and fingerprint(storage, name) == before:
        problem = found.problems[0] if found.problems else ""
        noted[name] = Verified(time=time.time(), deep=deep, ok=found.ok, problem=problem, files=before)
    return found


def _is_emptied(storage: Storage, name: str) -> bool:
    """Tell whether the folder of a checkpoint is still there: whoever deletes a checkpoint deletes that too."""
    root = storage.local_root
    return root is not None and os.path.isdir(root / name)


def _below(storage: Storage, name: str, deep: bool) -> list[dict[str, Any]]:
    """Check what lies in a folder that is no checkpoint; empty if there is nothing to check."""
    folders: list[str] = []
    _look(storage, name, _LEVELS, folders)
    rows = []
    for path in sorted(folders):
        try:
            found = list(_folder(Catalog(storage.child(path)), deep))
        except StorageError as error:
            if not _is_closed(error):
                raise
            # It may hold checkpoints, and nothing is known of them.
            denied = Verification(ok=False, problems=(str(error),), state="unreadable")
            rows.append(_row(_uri(storage, path), path, denied, ok=False))
        else:
            rows += [{**row, "name": f"{path}/{row['name']}"} for row in found]
    return rows


def _look(storage: Storage, path: str, levels: int, folders: list[str]) -> bool:
    """Find runs and folders of checkpoints, with one listing for each folder: most hold no checkpoints.

    Args:
        storage: where to look.
        path: from where on.
        levels: how much deeper to look.
        folders: gets what is found, and what may not be read.

    Returns:
        Whether the folder looks like a checkpoint itself.
    """
    try:
        names = [info.path[len(path) + 1 :] for info in storage.list(path, recursive=False)]
    except StorageError as error:
        if not _is_closed(error):
            raise
        folders.append(path)
        return False
    is_run = RUN_FILE in names
    if not is_run and is_remains(name for name in names if not is_claim(name)):
        return True
    inner = {name[:-1] for name in names if name.endswith("/") and name[0] != "."} if levels else set()
    inner -= {LOGS, REPORTS} if is_run else set()
    looks = [_look(storage, f"{path}/{name}", levels - 1, folders) for name in inner]
    if is_run or any(looks):
        folders.append(path)
    return MANIFEST_NAME in names


def _is_closed(error: StorageError) -> bool:
    """Tell whether one folder may not be listed, or cannot, for names in it that are no paths."""
    return isinstance(error, StoragePermissionError) or error.errno == errno.EILSEQ


def _unchecked(storage: Storage, name: str, state: str) -> dict[str, Any]:
    return _row(_uri(storage, name), name, Verification(ok=True, state=state), ok=True)


def _uri(storage: Storage, name: str) -> str:
    return f"{storage.uri.rstrip('/')}/{name}"


def _row(uri: str, name: str, found: Verification, *, ok: bool) -> dict[str, Any]:
    return {
        "name": name,
        "uri": uri,
        "ok": ok,
        "state": found.state,
        "problems": list(found.problems),
        "files": found.files,
        "bytes_read": found.bytes_read,
    }


def _is_checked(row: dict[str, Any]) -> bool:
    return row["state"] not in ("foreign", "incomplete") or not row["ok"]


def _print(rows: list[dict[str, Any]], deep: bool) -> None:
    from rich.text import Text

    out = console()
    if not any(map(_is_checked, rows)):
        out.print("no checkpoints")
    if not rows:
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        style = "green" if row["state"] == "ok" else "red" if not row["ok"] else "dim"
        detail = f"{row['files']} files"
        detail += f", {format_bytes(row['bytes_read'])} match their digests" if deep else ", sizes match"
        line = Text(f"{row['name']:<{width}}  ") + Text(row["state"], style=style)
        out.print(line + Text(f"  {detail}", style="dim") if row["state"] == "ok" else line)
        if row.get("quarantined") and row["ok"]:
            out.print(Text(f"  quarantined: {row['quarantined']}", style="yellow"))
        for problem in row["problems"]:
            out.print(Text(f"  {problem}", style="red"))
    bad = sum(not row["ok"] for row in rows)
    checked = sum(map(_is_checked, rows))
    if len(rows) > 1:
        how = "every byte" if deep else "manifests and sizes; --deep reads every byte"
        out.print(Text(f"{checked} checked ({how}), {bad or 'no'} problem{'s' * (bad != 1)}", style="bold"))


# ---- doctor


_COLOURS = {"ok": "green", "warn": "yellow", "bad": "red"}


@click.command()
@click.argument("path", type=PATH)
@click.option("--bytes", "max_bytes", default="128MiB", show_default=True, help="To write and read for speed; 0: none.")
@click.option("--seconds", default=20.0, show_default=True, help="No transfer for speed begins after so long.")
@json_option
def doctor(path: str, max_bytes: str, seconds: float, as_json: bool) -> None:
    """Probe the storage at PATH and this machine, and say what was found, what it means and what to do.

    Writes to a folder of its own and removes it again; no existing file is touched. Status 1 if something has to be
    mended before training; warnings do not count.
    """
    from .probes import ProbeDeadline, probe_disk, probe_machine, probe_store

    size = parse_bytes(max_bytes)
    if size is None:
        raise ConfigError(f"--bytes {max_bytes}: give a size such as 128MiB or 1GB, or 0")
    storage = reach(path)
    refuse_file(storage)
    deadline = ProbeDeadline(seconds)
    rows: list[tuple[str, Finding]] = []
    out = None if as_json else console()
    root = storage.local_root
    uri = storage.uri
    with progress_bar("speed", 4 * size if root is not None else None, after_s=1.0) as progress:
        probes: dict[str, Generator[Finding]] = {
            "storage": (
                probe_store(storage, size, deadline, progress)
                if root is None
                else probe_disk(Path(root), size, deadline, progress)
            ),
            "machine": probe_machine(),
        }
        for part, findings in probes.items():
            with contextlib.closing(findings), ends_in_order():
                rows += [(part, finding) for finding in findings]
    counts = {level: sum(finding.level == level for _, finding in rows) for level in _COLOURS}
    if out is None:
        listed = [{"part": part, **finding.to_json()} for part, finding in rows]
        print_json({"path": uri, "ok": not counts["bad"], "findings": listed})
    else:
        _print_findings(uri, rows)
        summary = f"{counts['ok']} fine, {counts['warn']} to know, {counts['bad']} to mend"
        out.print(summary, style="bold")
    if counts["bad"]:
        raise click.exceptions.Exit(1)


def _print_findings(uri: str, rows: list[tuple[str, Finding]]) -> None:
    from rich.text import Text

    out = console()
    width = max(len(finding.name) for _, finding in rows)
    shown = ""
    for part, finding in rows:
        if part != shown:
            shown = part
            title = printable(uri) if part == "storage" else "this machine"
            out.print(Text(f"{title}", style="bold"))
        line = Text(f"  {finding.level:<5}", style=_COLOURS[finding.level]) + Text(f"{finding.name:<{width}}  ")
        line += Text(printable(finding.found))
        line += Text(printable(f"; {finding.means}") if finding.means else "", style="dim")
        out.print(line)
        if finding.todo:
            out.print(Text(f"{'':7}{'':{width}}  to do: {printable(finding.todo)}", style="yellow"))
