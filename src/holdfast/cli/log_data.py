"""``holdfast log --data``: the batches that a run was trained on last, from the rings of its ranks."""

from __future__ import annotations

import json
from typing import Any

import click

from holdfast.errors import ConfigError
from holdfast.run.catalog import Catalog
from holdfast.run.data_ring import FOLDER, read_rings

from .terminal import console, number, print_json, printable, table

__all__ = ["print_ledger"]

_TAIL = 30


def print_ledger(catalog: Catalog, tail: int | None, *, as_json: bool, as_lines: bool) -> None:
    """Print the last batches that each rank was given, oldest first.

    Args:
        catalog: of the run.
        tail: how many of each rank; 0: all, None: 30 of a table, else all.
        as_json: print one JSON document.
        as_lines: print one line of JSON for each batch.

    Raises:
        ConfigError: the run has no directory on this machine.
    """
    root = catalog.storage.local_root
    if root is None:
        raise ConfigError(
            f"{catalog.storage.uri} is no directory of this machine: the ring of batches lies in a local run only. A "
            "checkpoint at a store holds the batches since the one before, as holdfast/progress/ledger"
        )
    rows = _rows(catalog)
    if tail or (tail is None and not (as_json or as_lines)):
        ranks = sorted({row["rank"] for row in rows})
        rows = [row for rank in ranks for row in [row for row in rows if row["rank"] == rank][-(tail or _TAIL) :]]
    if as_json:
        print_json({"path": catalog.storage.uri, "batches": rows})
    elif as_lines:
        for row in rows:
            click.echo(json.dumps(row))
    elif not rows:
        click.echo(f"no batch is noted under {root}/{FOLDER}: the run took none from ck.batches")
    else:
        names = ("rank", "attempt", "for step", "epoch", "batch", "samples")
        made = table([*((name, "right") for name in names), ("loader", "left"), ("digest", "left"), ("state", "left")])
        for row in printable(rows):
            cells = (number(row[key]) for key in ("rank", "attempt", "step", "epoch", "batch", "samples"))
            made.add_row(*cells, row["loader"], row["digest"], row["state"])
        console().print(made)


def _rows(catalog: Catalog) -> list[dict[str, Any]]:
    root = catalog.storage.local_root
    assert root is not None
    saved = max((record.step for record in catalog.records() if record.step is not None), default=-1)
    rows = []
    for rank, (names, entries) in read_rings(root).items():
        known = {number_: name for name, number_ in names.items()}
        newest = {entry.attempt: entry.step for entry in entries}  # the last one of each life
        for entry in entries:
            # A batch that was given when so many steps were done is trained once a later one was given.
            is_trained = entry.step < max(newest[entry.attempt], saved if entry.attempt == max(newest) else -1)
            rows.append(
                {
                    "rank": rank,
                    "attempt": entry.attempt,
                    "step": entry.step + 1,
                    "epoch": entry.epoch,
                    "batch": entry.index,
                    "samples": entry.num_samples,
                    "loader": known.get(entry.name, f"{entry.name:08x}"),
                    "digest": f"{entry.content or entry.indices:016x}",
                    "state": "trained" if is_trained else "given",
                }
            )
    return rows
