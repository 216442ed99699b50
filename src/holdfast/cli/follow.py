"""``holdfast latest``, ``best`` and ``watch``: which checkpoint a run has now, and a command for each that comes."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

import click

from holdfast.checkpoint.follow import follow
from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import CheckpointError, ConfigError, HoldfastError
from holdfast.run.index import RUN_FILE
from holdfast.run.status import refuse_checkpoint

from .targets import PATH, Choice, choose, complete_metric, find, ranking, reach, run_at, span_option
from .terminal import print_json, print_line, printable

__all__ = ["best", "latest", "watch"]


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
        _say_waiting(run)
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


_FIELD = re.compile(r"\{(path|uri|name|step)\}")


@click.command()
@click.argument("run", type=PATH)
@click.option("--exec", "command", metavar="COMMAND", help="Run for each; {path}, {uri}, {name}, {step} are filled in.")
@click.option("--report", is_flag=True, help="The last line COMMAND prints is a JSON object of metrics: report them.")
@click.option("--every", metavar="INTERVAL", help="Only the first at or after each multiple: 1000ba, 2ep, 1h.")
@click.option("--start", default="newest", show_default=True, help="newest, first, next, or those after a step.")
@click.option("--only-newest", is_flag=True, help="Leave out those that a newer checkpoint has overtaken.")
@click.option("--verify", is_flag=True, help="Read every byte before; leave out what is damaged.")
@click.option("--hold", default="1h", show_default=True, help="How long retention waits for COMMAND at most.")
@click.option("--poll", metavar="SPAN", help="Time between looks [default: 0.5s on a disk, 5s elsewhere].")
@click.option("--timeout", metavar="SPAN", help="Give up, with status 1, when nothing has come for so long.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document a line, one for each checkpoint.")
def watch(
    run: str,
    command: str | None,
    report: bool,
    every: str | None,
    start: str,
    only_newest: bool,
    verify: bool,
    hold: str,
    poll: str | None,
    timeout: str | None,
    as_json: bool,
) -> None:
    """Follow RUN: run a command for each checkpoint as it is committed, or print its path.

    Ends when the run has finished, and goes on through its restarts. Retention leaves a checkpoint alone while COMMAND
    works on it. {path} of a remote checkpoint is a local copy, removed afterwards. Status 1 if a COMMAND failed.
    """
    if report and command is None:
        raise ConfigError("--report reports what a command prints: give --exec COMMAND too")
    checkpoints = follow(
        run,
        int(every) if every is not None and every.isdigit() else every,
        int(start) if start.isdigit() else cast("Any", start),
        only_newest=only_newest,
        verify=verify,
        hold_s=span_option("--hold", hold) if command is not None else None,
        poll_s=None if poll is None else span_option("--poll", poll),
        timeout_s=None if timeout is None else span_option("--timeout", timeout),
    )
    _say_waiting(run)
    has_failed = False
    try:
        for checkpoint in checkpoints:
            row: dict[str, Any] = {"checkpoint": checkpoint.uri, "name": checkpoint.name, "step": checkpoint.step}
            if command is not None:
                row |= _run(command, checkpoint, report=report, aside=as_json)
                has_failed = has_failed or row["status"] != 0 or row["problem"] is not None
            if as_json:
                print_line(row)
            elif command is None:
                click.echo(printable(checkpoint.uri))
            elif row["problem"] is not None:
                click.echo(f"holdfast: {printable(checkpoint.uri)}: {printable(row['problem'])}", err=True)
            sys.stdout.flush()
    except TimeoutError as error:
        if isinstance(error, HoldfastError):
            raise
        raise CheckpointError(str(error)) from error
    if has_failed:
        raise click.exceptions.Exit(1)


def _say_waiting(run: str) -> None:
    """Say so if the run has not begun: a path that is mistyped looks just like that.

    Raises:
        ConfigError: it is a checkpoint.
    """
    storage = reach(run)
    if not storage.exists(RUN_FILE):
        refuse_checkpoint(storage, ConfigError)
        click.echo(printable(f"holdfast: there is no run at {storage.uri} yet: waiting for it"), err=True)


def _run(command: str, checkpoint: Checkpoint, *, report: bool, aside: bool) -> dict[str, Any]:
    """Run the command for a checkpoint; return its status, the metrics reported and what went wrong."""
    with contextlib.ExitStack() as stack:
        values: dict[str, Callable[[], str]] = {
            "path": lambda: stack.enter_context(checkpoint.as_directory()),
            "uri": lambda: checkpoint.uri,
            "name": lambda: checkpoint.name,
            "step": lambda: str(checkpoint.step),
        }
        # Names come from a storage that others may write to: the shell gets each as a word, and braces in a value stay.
        words = {field: shlex.quote(values[field]()) for field in dict.fromkeys(_FIELD.findall(command))}
        filled = _FIELD.sub(lambda match: words[match[1]], command)
        sys.stdout.flush()
        output = subprocess.PIPE if report else sys.stderr.fileno() if aside else None
        done = subprocess.run(["/bin/sh", "-c", filled], stdout=output, check=False)
    row: dict[str, Any] = {"status": done.returncode, "reported": None, "problem": None}
    if done.returncode != 0:
        row["problem"] = f"the command ended with status {done.returncode}"
    if report:
        text = done.stdout.decode(errors="replace")
        click.echo(text, nl=False, err=aside)
        if done.returncode == 0:
            row["reported"], row["problem"] = _report(text, checkpoint)
    return row


def _report(text: str, checkpoint: Checkpoint) -> tuple[dict[str, Any] | None, str | None]:
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    try:
        metrics = json.loads(last)
    except ValueError:
        metrics = None
    if not isinstance(metrics, dict):
        return None, f'the last line the command printed is no JSON object, such as {{"val_loss": 0.5}}: {last[:80]!r}'
    try:
        checkpoint.report(metrics)
    except CheckpointError as error:
        return None, str(error)
    return metrics, None
