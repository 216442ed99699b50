"""``holdfast run``, ``verify-resume`` and ``attack``: commands that start a script, and start it again.

Until it is done; to find out whether its resume is exact; and whether its saving survives being killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import click

from holdfast._ranks import current_ranks
from holdfast.errors import ConfigError

from .targets import span_option
from .terminal import check_output, ends_in_order, json_option, message, print_error, print_json, replace_file


class _Found(Protocol):
    def document(self) -> dict[str, Any]: ...
    def lines(self) -> Iterator[str]: ...


_FoundT = TypeVar("_FoundT", bound=_Found)
_Command = Callable[..., None]
_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": False}


@click.command(context_settings=_SETTINGS)
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


def _outputs(command: _Command) -> _Command:
    for option in (
        json_option,
        click.option("--html", type=click.Path(dir_okay=False), help="Write the report as one HTML page."),
        click.option(
            "-o", "--output", "keep_in", type=click.Path(file_okay=False), help="Keep copies, records and output here."
        ),
        click.option(
            "--copy-limit", default=2.0, show_default=True, help="GiB; a larger working directory is refused."
        ),
    ):
        command = option(command)
    return command


@click.command("verify-resume", context_settings=_SETTINGS)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--resume", metavar="COMMAND", help="Starts the script again after a kill; default: the same command.")
@click.option("--kills", default=3, show_default=True, help="How many times the script is killed.")
@click.option("--steps", type=int, help="Compare the first so many steps, and end the script there.")
@click.option("--term", "terminate", is_flag=True, help="Send SIGTERM and give it 30 s, instead of SIGKILL.")
@click.option("--every", default=1, show_default=True, help="Compare the state after every so many steps.")
@click.option("--seed", default=0, show_default=True, help="Of the choice of moments.")
@click.option("--timeout", "timeout_s", default=600.0, show_default=True, help="Seconds for each life of the script.")
@click.option("--in-place", is_flag=True, help="Run in the working directory itself, not in copies of it.")
@_outputs
def verify_resume(
    command: tuple[str, ...],
    resume: str | None,
    kills: int,
    steps: int | None,
    terminate: bool,
    every: int,
    seed: int,
    timeout_s: float,
    in_place: bool,
    copy_limit: float,
    keep_in: str | None,
    html: str | None,
    as_json: bool,
) -> None:
    """Run COMMAND without a break and killed, compare both step by step, and name what differs and why.

    COMMAND is any training script with torch optimizers, as it is, with or without Holdfast: holdfast verify-resume --
    python train.py. It runs in copies of the working directory. Exit status: 0 the resume is exact, 1 it is not or the
    script failed, 2 usage.
    """
    from holdfast.verify.lives import split_command
    from holdfast.verify.report import page
    from holdfast.verify.scripts import verify_script

    _examine(
        lambda say: verify_script(
            command, kills=kills, resume=None if resume is None else split_command(resume), steps=steps,
            terminate=terminate, every=every, seed=seed, timeout_s=timeout_s, keep_in=keep_in, in_place=in_place,
            copy_limit_bytes=int(copy_limit * (1 << 30)), say=say,
        ),
        command, failed={"exact": False, "verdict": "failed"}, is_good=lambda report: report.exact, page=page,
        html=html, as_json=as_json,
    )  # fmt: skip


@click.command(context_settings=_SETTINGS)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--resume", metavar="COMMAND", help="Starts the script again after a kill; default: the same command.")
@click.option("--kills", default=24, show_default=True, help="How many times the script is killed while it saves.")
@click.option(
    "--power-cuts", default=8, show_default=True, help="Further kills after which what is not on the disk yet is lost."
)
@click.option("--seed", default=0, show_default=True, help="Of the choice of moments.")
@click.option("--timeout", "timeout_s", default=600.0, show_default=True, help="Seconds for each life of the script.")
@click.option("--cold", is_flag=True, help="Start each life in an interpreter of its own, not in a fork of a warm one.")
@_outputs
def attack(
    command: tuple[str, ...],
    resume: str | None,
    kills: int,
    power_cuts: int,
    seed: int,
    timeout_s: float,
    cold: bool,
    copy_limit: float,
    keep_in: str | None,
    html: str | None,
    as_json: bool,
) -> None:
    """Kill COMMAND while it saves, start it again, and count what it goes on from.

    COMMAND is any training script with torch optimizers, with or without Holdfast: holdfast attack -- python train.py.
    It runs in copies of the working directory. Exit status: 0 no kill lost or tore anything, 1 one did or the script
    failed, 2 usage.
    """
    from holdfast.verify.attack import attack_script, survival_page
    from holdfast.verify.lives import split_command

    _examine(
        lambda say: attack_script(
            command, kills=kills, power_cuts=power_cuts, resume=None if resume is None else split_command(resume),
            seed=seed, timeout_s=timeout_s, cold=cold, keep_in=keep_in,
            copy_limit_bytes=int(copy_limit * (1 << 30)), say=say,
        ),
        command, failed={"survives": False}, is_good=lambda found: found.survives, page=survival_page,
        html=html, as_json=as_json,
    )  # fmt: skip


def _examine(
    examine: Callable[[Callable[[str], None]], _FoundT],
    command: Sequence[str],
    *,
    failed: Mapping[str, Any],
    is_good: Callable[[_FoundT], bool],
    page: Callable[[_FoundT, float], str],
    html: str | None,
    as_json: bool,
) -> None:
    """Examine a script and print what was found; ends with status 1 unless that is good.

    Args:
        examine: the examination; it is given what takes a line for each event.
        command: the script.
        failed: begin of the JSON document where a life of the script failed.
        is_good: tells whether what was found is.
        page: makes the page of what was found, and the seconds that it took.
        html: where to write the page, too.
        as_json: standard output is for the document alone.
    """
    from holdfast.verify.lives import LifeFailedError

    if html is not None:
        check_output(html)
    began = time.monotonic()
    try:
        with ends_in_order():
            found = examine(lambda line: click.echo(f"holdfast: {message(line)}", err=as_json))
    except LifeFailedError as error:
        if as_json:
            print_json({**failed, "message": str(error), "command": list(command)})
        print_error(error)
        raise click.exceptions.Exit(1) from error
    seconds = round(time.monotonic() - began, 1)
    if as_json:
        print_json({**found.document(), "seconds": seconds})
    else:
        click.echo()
        for line in found.lines():
            click.echo(message(line))
        click.echo(f"({seconds:.0f} s)")
    if html is not None:
        replace_file(html, page(found, seconds).encode())
    if not is_good(found):
        raise click.exceptions.Exit(1)
