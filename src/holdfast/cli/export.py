"""``holdfast export``: a checkpoint in another program's format."""

from __future__ import annotations

import click

from holdfast._progress import sized_progress_bar
from holdfast._units import format_bytes

from .targets import PATH, Choice, choose, pick_options
from .terminal import console, print_json, printable

__all__ = ["export"]


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
