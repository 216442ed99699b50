"""``holdfast diff``: what two checkpoints differ in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from holdfast._progress import sized_progress_bar
from holdfast._units import format_bytes
from holdfast.checkpoint.handle import Checkpoint

from .targets import PATH, Choice, choose, find, pick_options
from .terminal import console, fits, number, print_json, printable, say, table

if TYPE_CHECKING:
    from holdfast.interop.diff import CheckpointDifference, Missing, TensorChange

__all__ = ["diff"]

_SHOWN = 20
_COLUMNS = (
    ("tensor", "left"), ("differ", "right"), ("of", "right"), ("norm", "right"), ("relative", "right"),
    ("largest", "right"), ("at", "left"), ("A", "right"), ("B", "right"), ("note", "left"),
)  # fmt: skip
_GIVEN_UP = ("B", "A", "at", "of", "relative")  # where a terminal is narrow, in this order
_NOTED = ("step", "epoch", "attempt", "run_id", "created", "world_size")


@click.command()
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option("--only", multiple=True, help='Names or globs ("model", "optimizer/*") to compare; may be repeated.')
@click.option("--skip", multiple=True, help="Names or globs to leave out; may be repeated.")
@click.option("--tolerance", default=0.0, metavar="X", help="Numbers that differ by at most X are the same.")
@click.option("--rtol", default=0.0, metavar="X", help="And by at most X times their size in A.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@pick_options(whole=False)
def diff(
    a: str,
    b: str,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    tolerance: float,
    rtol: float,
    as_json: bool,
    pick: Choice,
) -> None:
    """Compare checkpoints A and B: names, shapes, dtypes, values, plain data; metrics and metadata are shown beside.

    A and B may be runs: then the newest checkpoint is taken, or the one that --best or --step names. Status 1 if the
    states differ. NaN equals NaN. What has equal digests is not read.
    """
    from holdfast.interop.diff import Tolerance, compare

    sides = _sides(a, b, pick)
    limits = Tolerance(absolute=tolerance, relative=rtol)
    with sized_progress_bar("compare") as progress:
        difference = compare(*sides, only=only or None, skip=skip or None, tolerance=limits, progress=progress)
    if as_json:
        print_json({**_document(difference), "tolerance": tolerance, "rtol": rtol})
    else:
        _print(difference)
    if not difference.same:
        raise click.exceptions.Exit(1)


def _sides(a: str, b: str, pick: Choice) -> list[Checkpoint]:
    """Return both checkpoints; --best and --step choose in the runs among them, of which there is at least one."""
    has_run = [find(path)[1] is None for path in (a, b)]
    return [
        choose(path, pick if is_run or not any(has_run) else Choice())
        for path, is_run in zip((a, b), has_run, strict=True)
    ]


def _document(difference: CheckpointDifference) -> dict[str, Any]:
    def rows(changes: Iterable[Any]) -> list[dict[str, Any]]:
        return [asdict(change) for change in changes]

    return {
        "a": difference.a.uri,
        "b": difference.b.uri,
        "same": difference.same,
        "about": {name: list(values) for name, values in difference.about.items()},
        "metrics": rows(difference.metrics),
        "metadata": rows(difference.metadata),
        "only_in_a": rows(difference.only_in_a),
        "only_in_b": rows(difference.only_in_b),
        "kinds": rows(difference.kinds),
        "plain": rows(difference.plain),
        "files": rows(difference.files),
        "tensors": {
            "compared": difference.compared,
            "by_digest": difference.by_digest,
            "within_tolerance": difference.within,
            "different": rows(difference.tensors),
        },
        "bytes_read": difference.bytes_read,
    }


def _print(difference: CheckpointDifference) -> None:
    out = console()
    say(out, f"A  {difference.a.uri}", "bold")
    say(out, f"B  {difference.b.uri}", "bold")
    noted = [(name, *difference.about[name]) for name in _NOTED]
    noted += [(name, *values) for name, values in difference.about.items() if name not in (*_NOTED, "total_bytes")]
    for name, left, right in noted:
        if left != right:
            say(out, f"  {name}: {number(left)} → {number(right)}", "dim")
    _list(out, difference.metrics, lambda change: f"  metric {change.name}: {number(change.a)} → {number(change.b)}")
    _list(out, difference.metadata, lambda change: f"  metadata {change.name}: {number(change.a)} → {number(change.b)}")
    _list(out, difference.only_in_a, lambda entry: f"- only in A: {_missing(entry)}", "red")
    _list(out, difference.only_in_b, lambda entry: f"+ only in B: {_missing(entry)}", "green")
    _list(out, difference.kinds, lambda change: f"! {change.name}: {change.a} → {change.b}", "yellow")
    _list(out, difference.plain, lambda change: f"! {change.name}: {change.a} → {change.b}", "yellow")
    _list(
        out, difference.files, lambda change: f"! file {change.name}: {_file(change.a)} → {_file(change.b)}", "yellow"
    )
    _tensors(out, difference)
    tensors = f"{difference.compared} tensors" + (
        f" ({difference.by_digest} by digest, not read)" if difference.by_digest else ""
    )
    within = f", {len(difference.within)} of them within the tolerance" if difference.within else ""
    if difference.same:
        say(out, f"the same: {tensors}{within}", "green")
        return
    counts = (
        (len(difference.tensors), f"of {tensors}{within}"),
        (len(difference.plain), "values of plain data"),
        (len(difference.only_in_a) + len(difference.only_in_b), "on one side only"),
        (len(difference.kinds), "of another kind"),
        (len(difference.files), "files"),
    )
    read = f"; {format_bytes(difference.bytes_read)} read" if difference.bytes_read else ""
    say(out, f"different: {', '.join(f'{count} {what}' for count, what in counts if count)}{read}", "bold")


def _tensors(out: Any, difference: CheckpointDifference) -> None:
    """Print the tensors that differ, those that differ most at the top."""
    rows = sorted(difference.tensors, key=lambda row: (row.elements is not None, -(row.relative or row.norm or 0.0)))
    if not rows:
        return
    shown = printable([_cells(row) for row in rows[:_SHOWN]])
    columns = [column for column in _COLUMNS if any(cells[column[0]] for cells in shown)]
    given_up = list(_GIVEN_UP)
    while True:
        made = table(columns)
        for cells in shown:
            made.add_row(*(cells[title] for title, _ in columns))
        if fits(out, made) or not given_up:
            break
        dropped = given_up.pop(0)
        columns = [column for column in columns if column[0] != dropped]
    out.print(made)
    if len(rows) > _SHOWN:
        out.print(f"... and {len(rows) - _SHOWN} tensors more (--json lists all)", style="dim")


def _cells(row: TensorChange) -> dict[str, str]:
    """Return what the table says of a tensor, by title."""
    cells = dict.fromkeys((title for title, _ in _COLUMNS), "")
    cells["tensor"] = row.name
    notes = [f"{row.dtype[0]} → {row.dtype[1]}"] if row.dtype[0] != row.dtype[1] else []
    if row.elements is None:
        notes.append(f"shape {_shape(row.shape[0])} → {_shape(row.shape[1])}")
    else:
        notes += [f"{row.not_finite} not finite"] if row.not_finite else []
        cells |= {"differ": str(row.differing), "of": str(row.elements)}
        cells |= {"norm": number(row.norm), "relative": number(row.relative), "largest": number(row.largest)}
    if row.values is not None:
        cells |= {"at": str(list(row.at or ())), "A": number(row.values[0]), "B": number(row.values[1])}
    cells["note"] = ", ".join(notes)
    return cells


def _missing(entry: Missing) -> str:
    return entry.name if entry.entries == 1 else f"{entry.name} ({entry.entries} entries)"


def _shape(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes)) or "scalar"


def _file(digest: str | None) -> str:
    return "not there" if digest is None else digest[:13]


def _list(out: Any, rows: Sequence[Any], text: Callable[[Any], str], style: str = "") -> None:
    for row in rows[:_SHOWN]:
        say(out, text(row), style)
    if len(rows) > _SHOWN:
        say(out, f"  ... and {len(rows) - _SHOWN} more (--json lists all)", "dim")
