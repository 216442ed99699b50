"""``holdfast latest`` and ``holdfast best``: one path or URI, for scripts."""

from __future__ import annotations

import click

from holdfast.checkpoint.follow import follow
from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import CheckpointError, ConfigError, HoldfastError

from .targets import PATH, Choice, choose, complete_metric, find, ranking, run_at, span_option
from .terminal import print_json, printable

__all__ = ["best", "latest"]


@click.command()
@click.argument("run", type=PATH)
@click.option("--wait", is_flag=True, help="If there is none yet, wait for the first, until the run has ended.")
@click.option("--timeout", metavar="SPAN", help="With --wait: give up after this time, with status 1.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def latest(run: str, wait: bool, timeout: str | None, as_json: bool) -> None:
    """Print the path or URI of the newest good checkpoint of RUN, one line for a script.

    Status 1 if there is none, or none yet.
    """
    if timeout is not None and not wait:
        raise ConfigError("--timeout says how long --wait waits: give --wait too")
    if wait:
        limit_s = None if timeout is None else span_option("--timeout", timeout)
        try:
            next(follow(run, timeout_s=limit_s), None)
        except TimeoutError as error:
            if isinstance(error, HoldfastError):
                raise
            raise CheckpointError(str(error)) from error
    _answer(run, Choice(newest=True), as_json)


@click.command()
@click.argument("run", type=PATH)
@click.option(
    "--metric", shell_complete=complete_metric, help="The metric that ranks; default: that of the run's Keep."
)
@click.option("--mode", type=click.Choice(["min", "max"]), help="Whether smaller or larger is better.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def best(run: str, metric: str | None, mode: str | None, as_json: bool) -> None:
    """Print the path or URI of the checkpoint of RUN that is best by a metric, one line for a script.

    Without --mode, smaller is better, unless the run's Keep says otherwise about this metric.
    """
    name, order = metric, mode
    if name is None:
        storage, checkpoint = find(run)
        keep = None if checkpoint is not None else run_at(storage, run).index.keep
        name, order = ranking(keep, None, mode)
        if name is None:
            raise ConfigError(f"{run} ranks by no metric (its Keep names none): give --metric NAME")
    _answer(run, Choice(best=name, mode=order), as_json)


def _answer(run: str, pick: Choice, as_json: bool) -> None:
    checkpoint: Checkpoint = choose(run, pick)
    if as_json:
        print_json(
            {
                "checkpoint": checkpoint.uri,
                "name": checkpoint.name,
                "step": checkpoint.step,
                "metrics": checkpoint.metrics,
            }
        )
    else:
        click.echo(printable(checkpoint.uri))
