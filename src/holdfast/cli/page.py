"""``holdfast page``: a run as a single HTML file."""

from __future__ import annotations

import time
from typing import Any

import click

from holdfast._units import format_bytes
from holdfast.errors import ConfigError, StorageError
from holdfast.page.document import render
from holdfast.page.facts import collect
from holdfast.storage.resolve import resolve

from .output import replace_file
from .terminal import message, print_json, printable

__all__ = ["page"]


@click.command()
@click.argument("run")
@click.option("-o", "--output", default="run.html", show_default=True, help="The file to write; replaced as a whole.")
@click.option("--watch", is_flag=True, help="Write it again as things happen, until the run has ended.")
@click.option("--every", default=5.0, show_default=True, help="With --watch: seconds between looks and reloads.")
@click.option("--json", "as_json", is_flag=True, help="Print the facts as one JSON document and write no file.")
def page(run: str, output: str, watch: bool, every: float, as_json: bool) -> None:
    """Draw RUN, or a folder of runs, as a single HTML file that needs no server and no network.

    Metric curves with the checkpoints on them, the attempts and what they cost, a table of checkpoints with why each is
    kept. Needs vl-convert-python: pip install 'holdfast[page]'.
    """
    storage = resolve(run)
    if as_json:
        if watch:
            raise ConfigError("--json prints once: leave --watch out")
        print_json(collect(storage))
        return
    if every < 1:
        raise ConfigError(f"--every {every:g}: give at least one second")
    facts = collect(storage)
    size = _write(output, facts, every if watch else None)
    click.echo(f"{printable(output)}: {format_bytes(size)}")
    while watch and facts["live"]:
        time.sleep(every)
        try:
            fresh = collect(storage)
        except StorageError as error:  # the next look may succeed
            click.echo(message(f"holdfast: {error}"), err=True)
            continue
        if _essence(fresh) != _essence(facts):
            _write(output, fresh, every)
        facts = fresh


def _essence(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name != "written"}


def _write(output: str, facts: dict[str, Any], reload_s: float | None) -> int:
    data = render(facts, reload_s=reload_s).encode()
    replace_file(output, data)
    return len(data)
