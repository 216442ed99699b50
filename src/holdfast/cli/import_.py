"""``holdfast import``: what other programs have saved, as a checkpoint."""

from __future__ import annotations

import click

from holdfast._progress import sized_progress_bar

from .targets import PATH
from .terminal import console, print_json, printable

__all__ = ["import_"]


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
