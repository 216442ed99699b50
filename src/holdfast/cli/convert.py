"""``holdfast export``, ``import``, ``average`` and ``diff``: what `interop` does with checkpoints.

To the formats of others and back, many checkpoints as one, and what two of them differ in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from holdfast._progress import sized_progress_bar
from holdfast._units import format_bytes, listed
from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import CheckpointError, ConfigError
from holdfast.run.catalog import Catalog
from holdfast.run.reports import live_rows

from .targets import PATH, Choice, choose, find, pick_options, run_at
from .terminal import console, fits, json_option, number, print_json, printable, say, table

if TYPE_CHECKING:
    from holdfast.interop.arithmetic import AverageResult
    from holdfast.interop.diff import CheckpointDifference, Missing, TensorChange


@click.command()
@click.argument("path", type=PATH)
@click.argument("destination", type=PATH)
@click.option(
    "--to", "kind", type=click.Choice(["safetensors", "torch", "dcp", "hf"]), required=True, help="What to write."
)
@click.option("--only", multiple=True, help='Names or globs ("model", "optimizer/*") to write; may be repeated.')
@click.option("--item", help='For safetensors and hf: the item whose tensors are written [default: "model"].')
@click.option("--dtype", help="Convert floating tensors, for example to bfloat16.")
@click.option("--max-shard-size", help="For safetensors and hf: larger files are split, for example 5GB.")
@click.option("--overwrite", is_flag=True, help="Replace what is there.")
@json_option
@pick_options(whole=False)
def export(
    path: str,
    destination: str,
    kind: str,
    only: tuple[str, ...],
    item: str | None,
    dtype: str | None,
    max_shard_size: str | None,
    overwrite: bool,
    as_json: bool,
    pick: Choice,
) -> None:
    """Write the checkpoint at PATH to DESTINATION in another format, tensor by tensor.

    PATH may be a run: then its newest checkpoint is taken, or the one that --best or --step names.

    safetensors, hf: the weights. torch: everything, in one file for torch.load. dcp: everything, as a directory of
    torch.distributed.checkpoint. Checkpoints of many ranks are put together.
    """
    from holdfast.interop.export import watched_export

    source = choose(path, pick)
    with sized_progress_bar(f"export {source.name}") as progress:
        done = watched_export(
            source,
            destination,
            to=kind,
            only=only or None,
            item=item,
            dtype=dtype,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            progress=progress,
        )
    if as_json:
        files = [{"path": name, "bytes": size} for name, size in done.files]
        left_out = [{"path": where, "why": why} for where, why in done.left_out]
        print_json(
            {
                "checkpoint": source.uri,
                "destination": done.destination,
                "format": done.format,
                "tensors": done.num_tensors,
                "total_bytes": done.total_bytes,
                "files": files,
                "left_out": left_out,
                "too_large": list(done.too_large),
            }
        )
        return
    out = console()
    out.print(printable(f"{done.destination}  {done.num_tensors} tensors, {format_bytes(done.total_bytes)}"))
    for name, size in done.files:
        out.print(printable(f"  {name}  {format_bytes(size)}"))
    for where, why in done.left_out:
        out.print(printable(f"  left out: {where} ({why})"), style="dim")
    for name in done.too_large:
        out.print(printable(f"  {name} has values beyond the range of {dtype}"), style="yellow")


@click.command("import")
@click.argument("source", type=PATH)
@click.argument("destination", type=PATH)
@click.option(
    "--from",
    "kind",
    type=click.Choice(["auto", "safetensors", "torch", "dcp", "hf", "lightning", "deepspeed"]),
    default="auto",
    show_default=True,
    help="What SOURCE is; hf: a folder of Transformers or Accelerate.",
)
@click.option("--trusted", is_flag=True, help="Make objects of any class in torch files. This RUNS what they say.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint at DESTINATION.")
@json_option
def import_(source: str, destination: str, kind: str, trusted: bool, overwrite: bool, as_json: bool) -> None:
    """Make a checkpoint at DESTINATION of what another program has saved at SOURCE, tensor by tensor.

    Says what was taken over and what was not. Nothing in a pickle is run, unless --trusted says so.
    """
    from holdfast.interop.import_ import watched_import

    with sized_progress_bar("import") as progress:
        done = watched_import(source, destination, format=kind, trusted=trusted, overwrite=overwrite, progress=progress)
    if as_json:
        print_json(
            {
                "source": done.source,
                "checkpoint": done.checkpoint.uri,
                "format": done.format,
                "taken": [{"name": name, "what": what} for name, what in done.taken],
                "not_taken": [{"path": path, "why": why} for path, why in done.not_taken],
            }
        )
        return
    out = console()
    out.print(printable(f"{done.checkpoint.uri}  from {done.format}"))
    for name, what in done.taken:
        out.print(printable(f"  {name}: {what}"))
    for path, why in done.not_taken:
        out.print(printable(f"  not taken: {path} ({why})"), style="yellow")


@click.command()
@click.argument("paths", type=PATH, nargs=-1, required=True)
@click.option("-o", "--output", required=True, help="The new checkpoint: a path or URI.")
@click.option("--weights", metavar="W,W,...", help="Share of each, in their order; divided by their sum.")
@click.option("--ema", type=float, metavar="DECAY", help="An exponential moving average of them, the oldest first.")
@click.option("--last", type=click.IntRange(min=2), metavar="N", help="Of a single run: its last N checkpoints.")
@click.option(
    "--only", multiple=True, help="Names or globs to average and write [default: the model]; may be repeated."
)
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint at OUTPUT.")
@json_option
@pick_options(whole=False)
def average(
    paths: tuple[str, ...],
    output: str,
    weights: str | None,
    ema: float | None,
    last: int | None,
    only: tuple[str, ...],
    overwrite: bool,
    as_json: bool,
    pick: Choice,
) -> None:
    """Average the weights of several checkpoints into a new one, all alike unless --weights or --ema says otherwise.

    PATHS are checkpoints or runs, of which each gives a checkpoint; or a single run, with --last N or --ema: then its
    checkpoints in the order of their steps. Floating tensors of the model are averaged, integers and plain data come
    from the last one, optimizers are left out.
    """
    if weights is not None and ema is not None:
        raise ConfigError("--weights and --ema both say how much each counts: give one of them")
    sources = _sources(paths, last, ema, pick)
    shares = None if weights is None else _numbers(weights)
    from holdfast.interop import arithmetic as interop

    if ema is not None:
        shares = interop.ema_weights(ema, len(sources))
    with sized_progress_bar("average") as progress:
        done = interop.average(
            sources,
            Checkpoint(output),
            weights=shares,
            only=only or None,
            overwrite=overwrite,
            method=None if ema is None else f"ema {ema:g}",
            progress=progress,
        )
    if as_json:
        print_json(
            {
                "checkpoint": done.checkpoint.uri,
                "sources": [{"checkpoint": of.uri, "step": step, "share": share} for of, step, share in done.sources],
                "averaged": list(done.averaged),
                "from_last": list(done.from_last),
                "unlike": list(done.unlike),
                "not_finite": list(done.not_finite),
                "left_out": list(done.left_out),
            }
        )
    else:
        _print(done)


def _sources(paths: Sequence[str], last: int | None, ema: float | None, pick: Choice) -> list[Checkpoint]:
    if len(paths) == 1:
        storage, checkpoint = find(paths[0])
        if checkpoint is not None or (last is None and ema is None):
            raise ConfigError(
                f"{paths[0]} is one {'run' if checkpoint is None else 'checkpoint'}: give several checkpoints, or a "
                "run with --last N or --ema DECAY"
            )
        if pick.is_given:
            raise ConfigError("--best and --step choose one checkpoint of a run: --last N takes several")
        return _of_run(run_at(storage, paths[0]), last)
    if last is not None:
        raise ConfigError(f"--last {last} takes the last checkpoints of one run: give one PATH")
    return [choose(path, pick) for path in paths]


def _of_run(catalog: Catalog, last: int | None) -> list[Checkpoint]:
    """Return the checkpoints of a run in the order of their steps, without those that a resume went back behind."""
    rows = [
        {"attempt": record.attempt, "step": record.step, "name": record.name} for record in reversed(catalog.records())
    ]
    attempts = {attempt.attempt: attempt for attempt in catalog.index.attempts}
    names = [row["name"] for row in sorted(live_rows(rows, attempts), key=lambda row: row["step"] or 0)]
    names = names if last is None else names[-last:]
    if len(names) < (last or 2):
        raise CheckpointError(
            f"the run {catalog.storage.uri} has {len(names)} good checkpoints in the line of its newest one, "
            f"{last or 2} are needed: Keep(last=...) decides how many stay"
        )
    return [Checkpoint.at(catalog.storage, name) for name in names]


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--weights {text!r}: give numbers separated by commas, such as 0.5,0.3,0.2") from None


def _print(done: AverageResult) -> None:
    out = console()
    say(out, f"{done.checkpoint.uri}  average of {len(done.sources)} checkpoints", "bold")
    for source, step, share in done.sources:
        say(out, f"  {number(share):>8}  {source.uri}" + ("" if step is None else f"  step {step}"))
    say(out, f"{len(done.averaged)} tensors averaged, {len(done.from_last)} others taken from the last one")
    for names, what in (
        (done.unlike, "not the same in all, and taken from the last one"),
        (done.not_finite, "has NaN or infinities in the average"),
    ):
        if names:
            say(out, f"  {what}: {listed(names)}", "yellow")
    if done.left_out:
        say(out, f"  left out: {', '.join(done.left_out)}", "dim")


# ---- diff


_LISTED = 20
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
@json_option
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
        print_json({**_describe(difference), "tolerance": tolerance, "rtol": rtol})
    else:
        _print_difference(difference)
    if not difference.same:
        raise click.exceptions.Exit(1)


def _sides(a: str, b: str, pick: Choice) -> list[Checkpoint]:
    """Return both checkpoints; --best and --step choose in the runs among them, of which there is at least one."""
    has_run = [find(path)[1] is None for path in (a, b)]
    return [
        choose(path, pick if is_run or not any(has_run) else Choice())
        for path, is_run in zip((a, b), has_run, strict=True)
    ]


def _describe(difference: CheckpointDifference) -> dict[str, Any]:
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


def _print_difference(difference: CheckpointDifference) -> None:
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
        (len(difference.plain), f"value{'s' * (len(difference.plain) != 1)} of plain data"),
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
    shown = printable([_cells(row) for row in rows[:_LISTED]])
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
    if len(rows) > _LISTED:
        out.print(f"... and {len(rows) - _LISTED} tensors more (--json lists all)", style="dim")


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
    for row in rows[:_LISTED]:
        say(out, text(row), style)
    if len(rows) > _LISTED:
        say(out, f"  ... and {len(rows) - _LISTED} more (--json lists all)", "dim")
