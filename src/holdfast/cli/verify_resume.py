"""``holdfast verify-resume``: is the resume of a script exact?"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import click

from .terminal import message, print_json, replace_file

__all__ = ["examined", "show_found", "verify_resume"]

_FoundT = TypeVar("_FoundT")
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
    from holdfast.verify.report import page
    from holdfast.verify.scripts import verify_script

    report, seconds = examined(
        lambda say: verify_script(
            command, kills=kills, resume=None if resume is None else shlex.split(resume), steps=steps,
            terminate=terminate, every=every, seed=seed, timeout_s=timeout_s, keep_in=keep_in, in_place=in_place,
            copy_limit_bytes=int(copy_limit * (1 << 30)), say=say,
        ),
        command, failed={"exact": False, "verdict": "failed"}, as_json=as_json,
    )  # fmt: skip
    show_found(
        report.document(), report.lines(), seconds, is_good=report.exact, as_json=as_json, html=html,
        page=lambda: page(report, seconds),
    )  # fmt: skip


def examined(
    examine: Callable[[Callable[[str], None]], _FoundT],
    command: Sequence[str],
    *,
    failed: Mapping[str, Any],
    as_json: bool,
) -> tuple[_FoundT, float]:
    """Run an examination of a script; return what it found, and the seconds that it took.

    Args:
        examine: the examination; it is given what takes a line for each event.
        command: the script.
        failed: begin of the JSON document where a life of the script failed, which ends the command with status 1.
        as_json: standard output is for the document alone.
    """
    from holdfast.verify.lives import LifeFailedError

    began = time.monotonic()
    try:
        found = examine(lambda line: click.echo(f"holdfast: {message(line)}", err=as_json))
    except LifeFailedError as error:
        if as_json:
            print_json({**failed, "message": str(error), "command": list(command)})
        click.echo(f"holdfast: {message(str(error))}", err=True)
        raise click.exceptions.Exit(1) from error
    return found, round(time.monotonic() - began, 1)


def show_found(
    document: Mapping[str, Any],
    lines: Iterable[str],
    seconds: float,
    *,
    is_good: bool,
    as_json: bool,
    html: str | None,
    page: Callable[[], str],
) -> None:
    """Print what an examination found, as a document or as lines; ends with status 1 unless it is good.

    Args:
        document: the JSON document.
        lines: the report for people.
        seconds: that it took.
        is_good: of the exit status.
        as_json: print the document.
        html: where to write the page, too.
        page: makes it.

    Raises:
        StorageError: the page cannot be written.
    """
    if as_json:
        print_json({**document, "seconds": seconds})
    else:
        click.echo()
        for line in lines:
            click.echo(message(line))
        click.echo(f"({seconds:.0f} s)")
    if html is not None:
        replace_file(html, page().encode())
    if not is_good:
        raise click.exceptions.Exit(1)
