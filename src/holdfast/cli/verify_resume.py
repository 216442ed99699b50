"""``holdfast verify-resume``: is the resume of a script exact?"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from .terminal import message, print_json

if TYPE_CHECKING:
    from holdfast.verify.resume import Examined

__all__ = ["verify_resume"]

_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": False}


@click.command("verify-resume", context_settings=_SETTINGS)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--kills", default=3, show_default=True, help="How many times the script is killed.")
@click.option("--steps", type=int, help="Compare the first so many steps, and end the script there.")
@click.option("--every", default=1, show_default=True, help="Compare the state after every so many steps.")
@click.option("--seed", default=0, show_default=True, help="Of the choice of moments.")
@click.option("--timeout", "timeout_s", default=600.0, show_default=True, help="Seconds for each life of the script.")
@click.option("-o", "--output", "keep_in", type=click.Path(file_okay=False), help="Keep runs, traces and output here.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def verify_resume(
    command: tuple[str, ...],
    kills: int,
    steps: int | None,
    every: int,
    seed: int,
    timeout_s: float,
    keep_in: str | None,
    as_json: bool,
) -> None:
    """Run COMMAND without a break and killed by SIGKILL, and compare both bit by bit.

    COMMAND is any training script with a holdfast.Checkpointer, as it is: holdfast verify-resume -- python train.py.
    Its runs go to a temporary directory. Exit status: 0 the resume is exact, 1 it is not or the script failed, 2 usage.
    """
    from holdfast.verify.lives import LifeFailedError
    from holdfast.verify.resume import examine

    def say(line: str) -> None:
        click.echo(f"holdfast: {message(line)}", err=as_json)

    began = time.monotonic()
    try:
        examined = examine(
            command, kills=kills, steps=steps, every=every, seed=seed, timeout_s=timeout_s, keep_in=keep_in, say=say
        )
    except LifeFailedError as error:
        if as_json:
            print_json({"exact": False, "verdict": "failed", "message": str(error), "command": list(command)})
        click.echo(f"holdfast: {message(str(error))}", err=True)
        raise click.exceptions.Exit(1) from error
    if as_json:
        print_json({"command": list(command), **_document(examined), "seconds": round(time.monotonic() - began, 1)})
    else:
        _print(examined, time.monotonic() - began)
    if examined.difference is not None:
        raise click.exceptions.Exit(1)


def _document(examined: Examined) -> dict[str, Any]:
    report, difference = examined.report, examined.difference
    first = None
    if difference is not None:
        items = [{"item": path, "uninterrupted": left, "resumed": right} for path, left, right in difference.items] + [
            {"item": "batch"}
        ] * difference.batches
        first = {
            "kind": difference.kind, "step": difference.step, "life": difference.life + 1, "rank": difference.rank,
            "resumed": difference.resumed, "saved": examined.why, "items": items,
        }  # fmt: skip
    return {
        "exact": difference is None,
        "verdict": examined.verdict,
        "steps": report.steps,
        "items": report.items,
        "compared": report.compared,
        "kills": [
            {"saved": None if kill.save is None else asdict(kill.save), "killed": asdict(kill.stop), "why": kill.why}
            for kill in examined.kills
        ],
        "lives": [{"began": begun, "killed_after": killed} for begun, killed in report.lives],
        "first_difference": first,
        "causes": examined.causes,
        "notes": list(report.notes),
    }


def _print(examined: Examined, seconds: float) -> None:
    report = examined.report
    click.echo()
    if examined.difference is None:
        click.echo(
            f"EXACT: killed {len(examined.kills)} times and bit by bit as never killed: {report.steps} steps, "
            f"{report.items} items of state, {report.compared} comparisons ({seconds:.0f} s)"
        )
    else:
        click.echo(f"{examined.verdict.upper()} ({seconds:.0f} s): {message(examined.what())}")
        for number, cause in enumerate(examined.causes):
            click.echo(f"\n{'likely cause' if number == 0 else 'or'}: {message(cause)}")
    for note in report.notes:
        click.echo(f"note: {message(note)}")
