"""``holdfast log``, ``latest``, ``best`` and ``watch``: what a run has reported, and which checkpoint it has.

Now, and as it comes: as a table, CSV, JSON lines or a plot in the terminal; and a command for each checkpoint.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import click

from holdfast.checkpoint.follow import follow
from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import CheckpointError, ConfigError, HoldfastError, UnknownMetricError
from holdfast.run.catalog import Catalog
from holdfast.run.data_ring import FOLDER, read_rings
from holdfast.run.index import RUN_FILE
from holdfast.run.record import flat_metrics
from holdfast.run.retention import is_number
from holdfast.run.view import refuse_checkpoint, run_state
from holdfast.storage.base import Storage

from .targets import PATH, Choice, choose, complete_metric, find, ranking, reach, refuse_file, run_at, span_option
from .terminal import (
    PlainTable,
    console,
    json_option,
    no_room_for,
    note,
    number,
    print_json,
    print_line,
    printable,
    table,
)

_TAIL = 30

_HEIGHT, _WIDEST = 14, 100


@click.command()
@click.argument("run", type=PATH, default=".")
@click.option(
    "--metric", "metrics", multiple=True, shell_complete=complete_metric, help="Only this metric; may be repeated."
)
@click.option("--format", "kind", type=click.Choice(["table", "csv", "jsonl"]), default="table", show_default=True)
@click.option("--tail", type=click.IntRange(min=0), help="Only the last N rows; 0: all [default: 30 of a table].")
@click.option("--follow", "-f", is_flag=True, help="Go on printing rows as they come, until the run has ended.")
@click.option("--poll", default="2s", show_default=True, metavar="SPAN", help="With --follow: time between looks.")
@click.option(
    "--plot", metavar="METRIC", shell_complete=complete_metric, help="Draw this metric over the steps in the terminal."
)
@click.option("--data", "of_data", is_flag=True, help="Print the ledger: the batches that were trained on last.")
@json_option
def log(
    run: str,
    metrics: tuple[str, ...],
    kind: str,
    tail: int | None,
    follow: bool,
    poll: str,
    plot: str | None,
    of_data: bool,
    as_json: bool,
) -> None:
    """Print the metrics that RUN has reported, oldest first, those of checkpoints included.

    Rows of attempts that a resume went back behind are left out.
    """
    if plot is not None and (metrics or kind != "table" or as_json):
        raise ConfigError("--plot METRIC draws that metric alone: leave out --metric, --format and --json")
    if follow and (plot is not None or as_json):
        raise ConfigError("--follow prints row by row: leave --plot and --json out (--format jsonl gives JSON lines)")
    pause_s = span_option("--poll", poll)
    catalog = run_at(reach(run), run)
    if of_data:
        if plot is not None or metrics or follow or kind == "csv":
            raise ConfigError(
                "--data prints the ledger of batches: leave out --metric, --plot, --follow and --format csv"
            )
        _print_ledger(catalog, tail, as_json=as_json, as_lines=kind == "jsonl")
        return
    rows = _rows(catalog)
    count = Counter(name for row in rows for name in row["metrics"])
    for name in (*metrics, *([plot] if plot is not None else [])):
        if name not in count:
            known = ", ".join(sorted(count)) or "no metric"
            raise UnknownMetricError(f"{catalog.storage.uri} has never reported {name!r}; there is: {known}")
    names = list(metrics) or sorted(count, key=lambda name: (-count[name], name))
    rows = [row for row in rows if any(name in row["metrics"] for name in names)]
    if plot is not None:
        _plot(rows, plot)
        return
    is_bounded = tail is None and (follow or (kind == "table" and not as_json))
    shown = rows[-tail:] if tail else rows[-_TAIL:] if is_bounded else rows
    if follow:
        _follow(catalog.storage, run, rows, shown, names, kind=kind, only=bool(metrics), pause_s=pause_s)
        return
    if as_json:
        picked = [_picked(row, names) for row in shown]
        about = {"path": catalog.storage.uri, "metrics": names, "rows": picked}
        print_json({**about, "deaths": _events(catalog, "died"), "guard": _events(catalog, "guard")})
    elif kind == "jsonl":
        for row in shown:
            print_line(_picked(row, names))
    elif kind == "csv":
        _csv(shown, names)
    else:
        if shown:
            _table(shown, names, len(rows))
        else:
            note(f"{catalog.storage.uri} has reported no metrics")
        for found in _events(catalog, "guard"):
            click.echo(printable(f"attempt {found['attempt']}, step {found['step']}: the guard: {found['why']}"))
        for death in _events(catalog, "died"):
            where = "" if death["step"] is None else f" at step {death['step']}"
            click.echo(printable(f"attempt {death['attempt']} died{where}: {death['why']}"))
            for line in death["stacks"].splitlines():
                click.echo(f"  {printable(line)}")


def _follow(
    storage: Storage, path: str, known: Sequence[dict[str, Any]], shown: Sequence[dict[str, Any]], names: list[str],
    *, kind: str, only: bool, pause_s: float,
) -> None:  # fmt: skip
    """Print rows and then those that come, until the run has ended; a row again that has got more metrics."""
    printed = {_key(row) for row in known}
    fresh = list(shown)
    if kind == "csv":
        _csv([], names)
    while True:
        for row in fresh:
            picked = _picked(row, names) if only or kind == "csv" else row
            if kind == "jsonl":
                print_line(picked)
            elif kind == "csv":
                _csv([row], names, header=False)
            elif picked["metrics"]:
                said = "  ".join(f"{name} {number(value)}" for name, value in picked["metrics"].items())
                click.echo(printable(f"step {number(row['step']):>7}  {said}  {row['checkpoint'] or ''}".rstrip()))
        sys.stdout.flush()
        is_live = run_state(Catalog(storage)).is_live  # before the rows: what came before the end is printed
        fresh = [row for row in _rows(run_at(storage, path)) if _key(row) not in printed]
        printed |= {_key(row) for row in fresh}
        if not fresh:
            if not is_live:
                return
            time.sleep(pause_s)


def _events(catalog: Catalog, what: str) -> list[dict[str, Any]]:
    """Return the events of a kind, in order of time: ends of attempts ("died"), or what a guard has found ("guard")."""
    events = [event for event in catalog.index.read_history().events if event.what == what]
    names = ("attempt", "time", "step", "why", "stacks")
    return [{name: getattr(event, name) for name in names} for event in events]


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["attempt"], row["step"], row["checkpoint"], frozenset(row["metrics"])


def _rows(catalog: Catalog) -> list[dict[str, Any]]:
    """Return a row for each step, with what was reported and the metrics of its checkpoint, in the order of steps."""
    rows: dict[Any, dict[str, Any]] = {}
    for number_, row in enumerate(catalog.index.history()):
        step = row.get("step")
        rows[(number_,) if step is None else step] = {
            "step": step,
            "epoch": row.get("epoch"),
            "time": row.get("time"),
            "attempt": row.get("attempt"),
            "checkpoint": row.get("checkpoint"),
            "metrics": flat_metrics(row.get("metrics") or {}),
        }
    for record in reversed(catalog.records()):  # of two checkpoints of a step the newer counts
        fresh = {"step": record.step, "epoch": record.epoch, "time": record.created, "attempt": record.attempt}
        row = rows.setdefault(record.step, {**fresh, "checkpoint": record.name, "metrics": {}})
        row["checkpoint"] = record.name
        row["metrics"] = {**row["metrics"], **flat_metrics(record.metrics)}
    at = -math.inf
    order = []
    for place, row in enumerate(rows.values()):
        at = row["step"] if row["step"] is not None else at
        order.append((at, place, row))
    return [row for _, _, row in sorted(order, key=lambda item: item[:2])]


def _picked(row: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {**row, "metrics": {name: row["metrics"][name] for name in names if name in row["metrics"]}}


def _csv(rows: Sequence[dict[str, Any]], names: Sequence[str], *, header: bool = True) -> None:
    text = io.StringIO()
    rows, names = printable(list(rows)), printable(list(names))
    writer = csv.writer(text, lineterminator="\n")
    if header:
        writer.writerow(["step", "epoch", "time", "attempt", "checkpoint", *names])
    for row in rows:
        fixed = [row[key] for key in ("step", "epoch", "time", "attempt", "checkpoint")]
        writer.writerow([*fixed, *(row["metrics"].get(name) for name in names)])
    click.echo(text.getvalue(), nl=False)


def _table(rows: Sequence[dict[str, Any]], names: list[str], among: int) -> None:
    from rich.cells import cell_len

    out = console()
    rows, names = printable(list(rows)), printable(names)
    steps = ["step", *(number(row["step"]) for row in rows)]
    checkpoints = ["checkpoint", *(row["checkpoint"] or "" for row in rows)]
    room = out.width - sum(max(map(cell_len, cells)) for cells in (steps, checkpoints)) - 2
    columns: list[list[str]] = []
    for name in names:
        column = [name, *(number(row["metrics"][name]) if name in row["metrics"] else "" for row in rows)]
        room -= max(map(cell_len, column)) + 2
        if room < 0 and columns:
            break
        columns.append(column)
    left_out = names[len(columns) :]
    (*titles, last), *lines = zip(steps, *columns, checkpoints, strict=True)
    made = PlainTable([*((title, "right") for title in titles), (last, "left")])
    for line in lines:
        made.add(line)
    if among > len(rows):
        click.echo(f"the last {len(rows)} of {among} rows (--tail 0 prints all)")
    made.print(out)
    if left_out:
        click.echo(no_room_for(left_out, "--metric chooses"), err=True)


def _plot(rows: Sequence[dict[str, Any]], metric: str) -> None:
    """Draw each column from the least to the greatest value of the rows that fall into it: none is left out."""
    have = [row for row in rows if metric in row["metrics"] and row["step"] is not None]
    points = [
        (int(row["step"]), float(row["metrics"][metric]))
        for row in have
        if is_number(row["metrics"][metric]) and math.isfinite(row["metrics"][metric])
    ]
    if not points:
        raise UnknownMetricError(f"{metric!r} has no finite number to draw")
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    labels = (number(float(high)), number(float(low)))
    margin = max(map(len, labels))
    width = max(10, min(_WIDEST, shutil.get_terminal_size().columns - margin - 3))
    columns: list[tuple[float, float] | None] = [None] * width
    for step, value in points:
        place = (step - first) * (width - 1) // max(1, last - first)
        known = columns[place]
        columns[place] = (value, value) if known is None else (min(known[0], value), max(known[1], value))

    def level(value: float) -> int:
        return round((value - low) / (high - low) * (_HEIGHT - 1)) if high > low else 0

    click.echo(printable(metric))
    for line in range(_HEIGHT - 1, -1, -1):
        label = labels[0] if line == _HEIGHT - 1 else labels[1] if line == 0 else ""
        cells = ("•" if span is not None and level(span[0]) <= line <= level(span[1]) else " " for span in columns)
        click.echo(f"{label:>{margin}} ┤{''.join(cells)}".rstrip())
    click.echo(f"{'':>{margin}} └{'─' * width}")
    click.echo(f"{'':>{margin}}  step {first}{f'step {last}':>{max(1, width - len(f'step {first}'))}}")
    if len(points) < len(have):
        click.echo(f"{len(have) - len(points)} values are no finite numbers and are not drawn")


def _print_ledger(catalog: Catalog, tail: int | None, *, as_json: bool, as_lines: bool) -> None:
    """Print the last batches that each rank was given, oldest first.

    Args:
        catalog: of the run.
        tail: how many of each rank; 0: all, None: 30 of a table, else all.
        as_json: print one JSON document.
        as_lines: print one line of JSON for each batch.

    Raises:
        ConfigError: the run has no directory on this machine.
    """
    root = catalog.storage.local_root
    if root is None:
        raise ConfigError(
            f"{catalog.storage.uri} is no directory of this machine: the ring of batches lies in a local run only. A "
            "checkpoint at a store holds the batches since the one before, as holdfast/progress/ledger"
        )
    rows = _trained_rows(catalog)
    if tail or (tail is None and not (as_json or as_lines)):
        ranks = sorted({row["rank"] for row in rows})
        rows = [row for rank in ranks for row in [row for row in rows if row["rank"] == rank][-(tail or _TAIL) :]]
    if as_json:
        print_json({"path": catalog.storage.uri, "batches": rows})
    elif as_lines:
        for row in rows:
            print_line(row)
    elif not rows:
        click.echo(f"no batch is noted under {root}/{FOLDER}: the run took none from ck.batches")
    else:
        names = ("rank", "attempt", "for step", "epoch", "batch", "samples")
        made = table([*((name, "right") for name in names), ("loader", "left"), ("digest", "left"), ("state", "left")])
        for row in printable(rows):
            cells = (number(row[key]) for key in ("rank", "attempt", "step", "epoch", "batch", "samples"))
            made.add_row(*cells, row["loader"], row["digest"], row["state"])
        console().print(made)


def _trained_rows(catalog: Catalog) -> list[dict[str, Any]]:
    root = catalog.storage.local_root
    assert root is not None
    saved = max((record.step for record in catalog.records() if record.step is not None), default=-1)
    rows = []
    for rank, (names, entries) in read_rings(root).items():
        known = {number_: name for name, number_ in names.items()}
        newest = {entry.attempt: entry.step for entry in entries}  # the last one of each life
        for entry in entries:
            # A batch that was given when so many steps were done is trained once a later one was given.
            is_trained = entry.step < max(newest[entry.attempt], saved if entry.attempt == max(newest) else -1)
            rows.append(
                {
                    "rank": rank,
                    "attempt": entry.attempt,
                    "step": entry.step + 1,
                    "epoch": entry.epoch,
                    "batch": entry.index,
                    "samples": entry.num_samples,
                    "loader": known.get(entry.name, f"{entry.name:08x}"),
                    "digest": f"{entry.content or entry.indices:016x}",
                    "state": "trained" if is_trained else "given",
                }
            )
    return rows


# ---- latest, best, watch


@click.command()
@click.argument("run", type=PATH)
@click.option("--wait", is_flag=True, help="If there is none yet, wait for the first, until the run has ended.")
@click.option("--timeout", metavar="SPAN", help="With --wait: give up after this time, with status 1.")
@json_option
def latest(run: str, wait: bool, timeout: str | None, as_json: bool) -> None:
    """Print the path or URI of the newest good checkpoint of RUN, one line for a script.

    Status 1 if there is none, or none yet.
    """
    if timeout is not None and not wait:
        raise ConfigError("--timeout says how long --wait waits: give --wait too")
    if wait:
        _say_waiting(run)
        limit_s = None if timeout is None else span_option("--timeout", timeout)
        with _told_of_lateness():
            next(follow(run, timeout_s=limit_s), None)
    _answer(run, Choice(newest=True), as_json)


@click.command()
@click.argument("run", type=PATH)
@click.option(
    "--metric", shell_complete=complete_metric, help="The metric that ranks; default: that of the run's Keep."
)
@click.option("--mode", type=click.Choice(["min", "max"]), help="Whether smaller or larger is better.")
@json_option
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


@contextlib.contextmanager
def _told_of_lateness() -> Iterator[None]:
    """Let the end of a wait end the command with its message, and status 1."""
    try:
        yield
    except TimeoutError as error:
        if isinstance(error, HoldfastError):
            raise
        raise CheckpointError(str(error)) from error


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
        return
    is_for_script = not sys.stdout.isatty() and "://" not in checkpoint.uri  # the path, whatever it is called
    click.echo(os.fsencode(checkpoint.uri) if is_for_script else printable(checkpoint.uri))


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
    with _told_of_lateness():
        for checkpoint in checkpoints:
            row: dict[str, Any] = {"checkpoint": checkpoint.uri, "name": checkpoint.name, "step": checkpoint.step}
            if command is not None:
                row |= _run_command(command, checkpoint, report=report, aside=as_json)
                has_failed = has_failed or row["status"] != 0 or row["problem"] is not None
            if as_json:
                print_line(row)
            elif command is None:
                click.echo(printable(checkpoint.uri))
            elif row["problem"] is not None:
                note(f"{checkpoint.uri}: {row['problem']}")
            sys.stdout.flush()
    if has_failed:
        raise click.exceptions.Exit(1)


def _say_waiting(run: str) -> None:
    """Say so if the run has not begun: a path that is mistyped looks just like that.

    Raises:
        ConfigError: it is a checkpoint, or a file.
    """
    storage = reach(run)
    refuse_file(storage)
    if not storage.exists(RUN_FILE):
        refuse_checkpoint(storage, ConfigError)
        note(f"there is no run at {storage.uri} yet: waiting for it")


def _run_command(command: str, checkpoint: Checkpoint, *, report: bool, aside: bool) -> dict[str, Any]:
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
