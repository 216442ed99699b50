"""``holdfast attack``: does the saving of a script survive being killed?"""

from __future__ import annotations

import shlex

import click

from .verify_resume import examined, show_found

__all__ = ["attack"]


@click.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--resume", metavar="COMMAND", help="Starts the script again after a kill; default: the same command.")
@click.option("--kills", default=24, show_default=True, help="How many times the script is killed while it saves.")
@click.option(
    "--power-cuts", default=8, show_default=True, help="Further kills after which what is not on the disk yet is lost."
)
@click.option("--seed", default=0, show_default=True, help="Of the choice of moments.")
@click.option("--timeout", "timeout_s", default=600.0, show_default=True, help="Seconds for each life of the script.")
@click.option("--cold", is_flag=True, help="Start each life in an interpreter of its own, not in a fork of a warm one.")
@click.option("--copy-limit", default=2.0, show_default=True, help="GiB; a larger working directory is refused.")
@click.option(
    "-o", "--output", "keep_in", type=click.Path(file_okay=False), help="Keep copies, records and output here."
)
@click.option("--html", type=click.Path(dir_okay=False), help="Write the report as one HTML page.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
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
    from holdfast.verify.attack import attack_script
    from holdfast.verify.report import survival_page

    found, seconds = examined(
        lambda say: attack_script(
            command, kills=kills, power_cuts=power_cuts, resume=None if resume is None else shlex.split(resume),
            seed=seed, timeout_s=timeout_s, cold=cold, keep_in=keep_in,
            copy_limit_bytes=int(copy_limit * (1 << 30)), say=say,
        ),
        command, failed={"survives": False}, as_json=as_json,
    )  # fmt: skip
    show_found(
        found.document(), found.lines(), seconds, is_good=found.survives, as_json=as_json, html=html,
        page=lambda: survival_page(found, seconds),
    )  # fmt: skip
