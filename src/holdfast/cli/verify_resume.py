"""``holdfast verify-resume``: is the resume of a script exact?"""

from __future__ import annotations

import shlex
import time

import click

from .terminal import message, print_json

__all__ = ["verify_resume"]

_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": False}


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
@click.option("--copy-limit", default=2.0, show_default=True, help="GiB; a larger working directory is refused.")
@click.option(
    "-o", "--output", "keep_in", type=click.Path(file_okay=False), help="Keep copies, records and output here."
)
@click.option("--html", type=click.Path(dir_okay=False), help="Write the report as one HTML page.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
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
    from holdfast.verify.lives import LifeFailedError
    from holdfast.verify.scripts import verify_script

    def say(line: str) -> None:
        click.echo(f"holdfast: {message(line)}", err=as_json)

    began = time.monotonic()
    try:
        report = verify_script(
            command, kills=kills, resume=None if resume is None else shlex.split(resume), steps=steps,
            terminate=terminate, every=every, seed=seed, timeout_s=timeout_s, keep_in=keep_in, in_place=in_place,
            copy_limit_bytes=int(copy_limit * (1 << 30)), say=say,
        )  # fmt: skip
    except LifeFailedError as error:
        if as_json:
            print_json({"exact": False, "verdict": "failed", "message": str(error), "command": list(command)})
        click.echo(f"holdfast: {message(str(error))}", err=True)
        raise click.exceptions.Exit(1) from error
    seconds = round(time.monotonic() - began, 1)
    if html is not None:
        from pathlib import Path

        from holdfast.verify.page import page

        Path(html).write_text(page(report, seconds), encoding="utf-8")
    if as_json:
        print_json({**report.document(), "seconds": seconds})
    else:
        click.echo()
        for line in report.lines():
            click.echo(message(line))
        click.echo(f"({seconds:.0f} s)")
    if not report.exact:
        raise click.exceptions.Exit(1)
