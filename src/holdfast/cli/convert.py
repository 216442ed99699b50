"""``holdfast export``, ``import`` and ``average``: to the formats of others and back, and many checkpoints as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from holdfast._progress import sized_progress_bar
from holdfast._units import format_bytes
from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import CheckpointError, ConfigError
from holdfast.run.catalog import Catalog
from holdfast.run.reports import live_rows

from .targets import PATH, Choice, choose, find, pick_options, run_at
from .terminal import console, number, print_json, printable, say

if TYPE_CHECKING:
    from holdfast.interop.arithmetic import AverageResult

__all__ = ["average", "export", "import_"]


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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
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


_SHOWN = 8


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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
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
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            say(out, f"  {what}: {', '.join(names[:_SHOWN])}{more}", "yellow")
    if done.left_out:
        say(out, f"  left out: {', '.join(done.left_out)}", "dim")
