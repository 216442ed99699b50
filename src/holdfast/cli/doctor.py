"""``holdfast doctor``: what a storage and this machine promise and keep."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast._progress import progress_bar
from holdfast._units import parse_bytes
from holdfast.errors import ConfigError

from .targets import PATH, reach
from .terminal import console, print_json, printable

if TYPE_CHECKING:
    from .probes import Finding

__all__ = ["doctor"]

_LEVELS = {"ok": "green", "warn": "yellow", "bad": "red"}


@click.command()
@click.argument("path", type=PATH)
@click.option("--bytes", "max_bytes", default="128MiB", show_default=True, help="To write and read for speed; 0: none.")
@click.option("--seconds", default=20.0, show_default=True, help="No transfer for speed begins after so long.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def doctor(path: str, max_bytes: str, seconds: float, as_json: bool) -> None:
    """Probe the storage at PATH and this machine, and say what was found, what it means and what to do.

    Writes to a folder of its own and removes it again; no existing file is touched. Status 1 if something has to be
    mended before training; warnings do not count.
    """
    from .probe_storage import ended_by_sigterm, probe_disk, probe_store  # here: no other command needs them
    from .probes import ProbeDeadline, probe_machine

    size = parse_bytes(max_bytes)
    if size is None:
        raise ConfigError(f"--bytes {max_bytes}: give a size such as 128MiB or 1GB, or 0")
    storage = reach(path)
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
            with contextlib.closing(findings), ended_by_sigterm():
                rows += [(part, finding) for finding in findings]
    counts = {level: sum(finding.level == level for _, finding in rows) for level in _LEVELS}
    if out is None:
        listed = [{"part": part, **finding.to_json()} for part, finding in rows]
        print_json({"path": uri, "ok": not counts["bad"], "findings": listed})
    else:
        _print(uri, rows)
        summary = f"{counts['ok']} fine, {counts['warn']} to know, {counts['bad']} to mend"
        out.print(summary, style="bold")
    if counts["bad"]:
        raise click.exceptions.Exit(1)


def _print(uri: str, rows: list[tuple[str, Finding]]) -> None:
    from rich.text import Text

    out = console()
    width = max(len(finding.name) for _, finding in rows)
    shown = ""
    for part, finding in rows:
        if part != shown:
            shown = part
            title = printable(uri) if part == "storage" else "this machine"
            out.print(Text(f"{title}", style="bold"), soft_wrap=True)
        line = Text(f"  {finding.level:<5}", style=_LEVELS[finding.level]) + Text(f"{finding.name:<{width}}  ")
        line += Text(printable(finding.found))
        line += Text(printable(f"; {finding.means}") if finding.means else "", style="dim")
        out.print(line, soft_wrap=True)
        if finding.todo:
            out.print(Text(f"{'':7}{'':{width}}  to do: {printable(finding.todo)}", style="yellow"), soft_wrap=True)
