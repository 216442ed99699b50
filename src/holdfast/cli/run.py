"""``holdfast run``: run a script until it is done."""

from __future__ import annotations

import click

from holdfast._ranks import current_ranks
from holdfast.errors import ConfigError

from .targets import span_option

__all__ = ["run"]


@click.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--hang", metavar="SPAN", help="Time without the end of a step after which the script hangs; off [default: 10 of "
    "its longest steps, 5min at least, 30min before the first].",
)  # fmt: skip
@click.option(
    "--nproc", type=click.IntRange(min=1), metavar="N", help="Start N processes, with the environment of torchrun."
)
@click.option("--no-warm", is_flag=True, help="Keep no spare interpreter, which imports ahead what a restart imports.")
def run(command: tuple[str, ...], hang: str | None, nproc: int | None, no_warm: bool) -> None:
    """Run COMMAND, and again when it dies, until it is done: holdfast run -- python train.py.

    It is started again when it ends with any status but 0 and the requeue status (85), without a limit as long as the
    newest durable step advances; three lives in a row that end at the same step, or with the same error before their
    first step, end it. Signals are passed on to the script, and its exit status is passed on. See docs/run.md.
    """
    from holdfast.supervisor import hold
    from holdfast.supervisor.supervisor import Supervisor

    hang_s = None
    if hang is not None:
        hang_s = 0.0 if hang.strip().lower() == "off" else span_option("--hang", hang)
        if hang_s == 0.0 and hang.strip().lower() != "off":
            raise ConfigError(f"--hang {hang}: give a time such as 10min, or off")
    ranks = current_ranks().world_size
    if nproc is not None and ranks > 1:
        raise ConfigError(
            f"--nproc {nproc} starts the ranks itself, and this process is one of {ranks} that another launcher has "
            "started: leave --nproc out"
        )
    status = Supervisor(command, hold(), num_ranks=nproc, hang_s=hang_s, is_one_of=ranks, warm=not no_warm).run()
    raise click.exceptions.Exit(status)
