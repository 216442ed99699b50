"""``holdfast page``: a run as a single HTML file."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import click

from holdfast._units import format_bytes
from holdfast.errors import ConfigError, StorageError
from holdfast.page import collect_all, render
from holdfast.storage.resolve import resolve

from .targets import PATH, poll_option
from .terminal import check_output, message, print_json, printable, replace_file

__all__ = ["page"]


@click.command()
@click.argument("runs", type=PATH, metavar="[RUN]...", nargs=-1)
@click.option(
    "-o", "--output", default="run.html", show_default=True, help="The file to write; an earlier page is replaced."
)
@click.option("--watch", is_flag=True, help="Write it again as things happen, until the run has ended.")
@click.option("--poll", default="5s", show_default=True, metavar="SPAN", help="With --watch: time between looks.")
@click.option("--json", "as_json", is_flag=True, help="Print the facts as one JSON document and write no file.")
def page(runs: tuple[str, ...], output: str, watch: bool, poll: str, as_json: bool) -> None:
    """Draw a run, or several, as a single HTML file that needs no server and no network.

    Of one run: metric curves with the checkpoints on them, the attempts and what they cost, a table of checkpoints with
    why each is kept. Of several, or of a folder of runs: a table of the runs, and their curves over each other.
    Default: the current folder.
    """
    storages = [resolve(run) for run in runs or (".",)]
    collect = partial(collect_all, storages)
    if as_json:
        if watch:
            raise ConfigError("--json prints once: leave --watch out")
        print_json(collect())
        return
    every = poll_option(poll)
    check_output(output)
    facts = collect()
    data = render(facts, reload_s=every if watch else None).encode()
    replace_file(output, data)
    click.echo(f"{printable(output)}: {format_bytes(len(data))}")
    while watch and facts["live"]:
        time.sleep(every)
        try:
            fresh = collect()
        except StorageError as error:  # the next look may succeed
            click.echo(message(f"holdfast: {error}"), err=True)
            continue
        if _essence(fresh) != _essence(facts):
            replace_file(output, render(fresh, reload_s=every).encode())
        facts = fresh


def _essence(facts: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in facts.items() if name not in ("written", "goodput")
    }  # they move by themselves
