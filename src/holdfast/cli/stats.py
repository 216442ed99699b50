"""``holdfast stats`` and ``page``: what saving and failures have cost a run, in figures; and a run as an HTML file."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import click

from holdfast._units import format_bytes, format_duration
from holdfast.errors import ConfigError, HoldfastError, StorageError
from holdfast.page import collect_all, render
from holdfast.run.catalog import Catalog
from holdfast.run.costs import goodput, saves
from holdfast.run.costs import stats as sum_up
from holdfast.run.view import run_state, runs_below
from holdfast.storage.base import Storage
from holdfast.storage.resolve import resolve

from .targets import PATH, poll_option, run_at
from .terminal import (
    check_output,
    console,
    counted,
    json_option,
    print_columns,
    print_error,
    print_json,
    printable,
    replace_file,
)

# Name (its end is the unit), kind, help text.
_FAMILIES = (
    ("holdfast_step", "gauge", "Step of the newest checkpoint."),
    ("holdfast_last_durable_timestamp_seconds", "gauge", "When the newest checkpoint was committed."),
    ("holdfast_training", "gauge", "1 while a process trains the run."),
    ("holdfast_checkpoints", "gauge", "Checkpoints that are there."),
    ("holdfast_size_bytes", "gauge", "Bytes that the checkpoints take."),
    ("holdfast_free_bytes", "gauge", "Free space of the storage."),
    ("holdfast_durable_seconds", "summary", "From the start of a save to its commit."),
    ("holdfast_saves", "counter", "Checkpoints that were committed."),
    ("holdfast_lost_saves", "counter", "Saves that failed."),
    ("holdfast_skipped_saves", "counter", "Saves that were due and left out."),
    ("holdfast_deleted_checkpoints", "counter", "Checkpoints that were deleted."),
    ("holdfast_held_seconds", "counter", "Time that saves held the training loop."),
    ("holdfast_lost_seconds", "counter", "Held time, and what steps took longer while saves were written."),
    ("holdfast_written_bytes", "counter", "Bytes that saves wrote."),
    ("holdfast_reused_bytes", "counter", "Bytes that checkpoints share with the one before."),
    ("holdfast_attempts", "counter", "Starts of the run."),
    ("holdfast_failures", "counter", "Starts that ended in a failure."),
    ("holdfast_lost_steps", "counter", "Steps that had to be done again."),
    ("holdfast_goodput_ratio", "gauge", "Useful part of the time since the first start."),
    ("holdfast_wall_seconds", "gauge", "Time since the first start of the run; what follows are its parts."),
    ("holdfast_useful_seconds", "gauge", "Time of steps that count."),
    ("holdfast_again_seconds", "gauge", "Time of steps that had to be done again."),
    ("holdfast_saving_held_seconds", "gauge", "Time that saves and snapshots held the loop, of steps that count."),
    ("holdfast_saving_slowed_seconds", "gauge", "Time that steps took longer while saves were written."),
    ("holdfast_starting_seconds", "gauge", "From each start to the first step done."),
    ("holdfast_down_seconds", "gauge", "From the end of a life to the next start."),
)
_UNITS = ("seconds", "bytes", "ratio")
_QUANTILES = (("0.5", "p50"), ("0.95", "p95"))

_TIMES = (("durable_s", "until durable"), ("held_s", "training held"), ("lost_s", "training lost"))
_PARTS = (
    ("useful_s", "useful steps"),
    ("again_s", "steps done again"),
    ("held_s", "held by saves"),
    ("slowed_s", "slowed by saves"),
    ("starting_s", "starting"),
    ("down_s", "down"),
)
_WORST = 5


@click.command()
@click.argument("run", type=PATH, default=".")
@click.option(
    "--openmetrics", "target", metavar="FILE", help="Write FILE for Prometheus instead; *.prom: for node_exporter."
)
@click.option("--watch", is_flag=True, help="With --openmetrics: write it again and again until no run is trained.")
@click.option("--poll", default="15s", show_default=True, metavar="SPAN", help="With --watch: time between looks.")
@json_option
def stats(run: str, target: str | None, watch: bool, poll: str, as_json: bool) -> None:
    """Say what checkpointing has cost RUN, or each run of a folder: time, bytes, deletions, failures.

    "held" is the time that saves held the training loop, "lost" adds what steps took longer while a save was being
    written. What a run did before it kept a journal is known in part only.
    """
    storage = resolve(run)
    if watch and target is None:
        raise ConfigError("--watch writes a file again and again: name it with --openmetrics FILE")
    every = poll_option(poll)
    if target is not None:
        if as_json:
            raise ConfigError("--openmetrics writes a file and --json prints: give one of them")
        check_output(target)
        _export(storage, run, target, every if watch else None)
        return
    summaries = _look(storage, run)
    if len(summaries) == 1 and summaries[0]["name"] is None:
        print_json(summaries[0]) if as_json else _show(printable(summaries[0]))
    elif as_json:
        print_json({"path": storage.uri, "kind": "folder", "runs": summaries})
    else:
        _show_folder(printable(storage.uri), printable(summaries))


def _look(storage: Storage, path: str) -> list[dict[str, Any]]:
    """Describe the run at a path, or the runs in a folder; those have names."""
    catalog = Catalog(storage)
    runs = runs_below(storage, catalog.foreign) if catalog.index.damage == "missing" and not catalog.records() else []
    if not runs:
        return [_describe(run_at(storage, path), None)]
    summaries = []
    for name, run in runs:
        try:
            summaries.append(_describe(Catalog(run), name))
        except HoldfastError as error:
            print_error(f"{name} cannot be read: {error}")
    return summaries


def _describe(catalog: Catalog, name: str | None) -> dict[str, Any]:
    storage, state = catalog.storage, run_state(catalog)
    records = catalog.records()
    newest = records[0] if records else None
    history = catalog.index.read_history()
    now = time.time() if state.word == "training" else None
    return {
        "path": storage.uri,
        "name": name,
        "run_id": catalog.index.run_id,
        "state": state.word,
        "live": state.is_live,
        "checkpoints": len(records),
        "newest_step": None if newest is None else newest.step,
        "newest_time": None if newest is None or not newest.created else newest.created,
        "size_bytes": sum(record.size - record.reused for record in records),
        "free_bytes": storage.free_bytes(),
        **sum_up(history, records, is_remote=storage.local_root is None),
        "goodput": goodput(history, saves(history.events, records), now=now),
    }


def _show(summary: Mapping[str, Any]) -> None:
    from rich.text import Text

    out = console()
    out.print(Text(summary["path"], style="bold") + Text(f"  {summary['state']}", style="dim"))
    failed = f", {summary['lost_saves']} lost" if summary["lost_saves"] else ""
    skipped = summary["skipped_saves"]
    left_out = f", {skipped} skipped while an earlier save was being written" if skipped else ""
    there = summary["checkpoints"]
    out.print(
        f"{counted(summary['saves'], 'save')}{failed}{left_out}; {counted(there, 'checkpoint')} "
        f"{'is' if there == 1 else 'are'} there"
    )
    written, reused = format_bytes(summary["bytes_written"]), format_bytes(summary["bytes_reused"])
    out.print(f"{written} written, {reused} shared with the checkpoint before instead")
    out.print()
    columns = {"seconds": "left", **dict.fromkeys(("saves", "in all", "mean", "p50", "p95", "max"), "right")}
    lines = []
    for name, title in _TIMES:
        spread = summary[name]
        if spread["count"]:
            figures = [f"{spread[key]:.3g}" for key in ("mean", "p50", "p95", "max")]
            told = [title, str(spread["count"]), f"{spread['sum']:.4g}", *figures]
            lines.append((dict(zip(columns, told, strict=True)), "", ""))
    if lines:
        print_columns(out, columns, lines, droppable=["p95", "saves", "mean", "in all", "p50"])
        out.print()
    for why, times in list(summary["lost_why"].items())[:_WORST]:
        out.print(Text(f"lost {times} x: {why}", style="red"))
    for why, times in summary["deleted_by"].items():
        out.print(f"{times} deleted: {why}")
    out.print(_failures(summary))
    for why, times in list(summary["died_why"].items())[:_WORST]:
        out.print(Text(f"died {times} x: {why}"))
    if summary["goodput"] is not None:
        out.print(_goodput(summary["goodput"]))


def _goodput(parts: Mapping[str, float]) -> str:
    wall = parts["wall_s"]
    shares = ", ".join(
        f"{parts[name] / wall if wall else 0.0:.1%} {title}"
        for name, title in _PARTS
        if parts[name] or name == "useful_s"
    )
    return f"of {format_duration(wall)} since the first start: {shares}"


def _failures(summary: Mapping[str, Any]) -> str:
    said = f"{counted(len(summary['attempts']), 'start')}, {summary['failures']} ended in a failure"
    if summary["lost_steps"]:
        said += (
            f": {counted(summary['lost_steps'], 'step')} ({format_duration(summary['failure_s'])}) had to be done again"
        )
    if summary["down_s"]:
        said += f", {format_duration(summary['down_s'])} between the end of an attempt and the next start"
    return said


def _show_folder(uri: str, summaries: list[dict[str, Any]]) -> None:
    from rich.text import Text

    out = console()
    out.print(Text(uri, style="bold") + Text(f"  {counted(len(summaries), 'run')}", style="dim"))
    out.print()
    titles = ("saves", "lost", "held s", "lost s", "durable p50 s", "written", "deleted", "failures", "steps again")
    columns = {"run": "left", **dict.fromkeys(titles, "right"), "state": "left"}
    lines = []
    for summary in summaries:
        p50 = summary["durable_s"]["p50"]
        figures = [f"{summary[name]['sum']:.3g}" if summary[name]["count"] else "-" for name in ("held_s", "lost_s")]
        cells = {
            "run": summary["name"],
            "saves": str(summary["saves"]),
            "lost": str(summary["lost_saves"]),
            "held s": figures[0],
            "lost s": figures[1],
            "durable p50 s": "-" if p50 is None else f"{p50:.3g}",
            "written": format_bytes(summary["bytes_written"]),
            "deleted": str(summary["deleted"]),
            "failures": str(summary["failures"]),
            "steps again": f"{summary['lost_steps']:g}",
            "state": summary["state"],
        }
        lines.append((cells, "", ""))
    print_columns(
        out, columns, lines, droppable=["deleted", "durable p50 s", "held s", "lost", "failures", "written", "lost s"]
    )


def _export(storage: Storage, path: str, target: str, every: float | None) -> None:
    while True:
        try:
            summaries = _look(storage, path)
        except StorageError as error:
            if every is None:
                raise
            print_error(error)  # the next look may succeed
        else:
            figures = [_figures(summary) for summary in summaries]
            replace_file(target, openmetrics(figures, is_classic=target.endswith(".prom")).encode())
            if every is None or not any(summary["live"] for summary in summaries):
                return
        time.sleep(every or 0)


def _figures(summary: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return labels and figures of a run, as `openmetrics` takes them."""
    name = summary["name"] or summary["path"].rstrip("/").rpartition("/")[2] or summary["path"]
    parts, names = summary["goodput"] or {}, {"held_s": "saving_held", "slowed_s": "saving_slowed"}
    return {"run": name, "run_id": summary["run_id"]}, {
        "step": summary["newest_step"],
        "last_durable_timestamp_seconds": summary["newest_time"],
        "training": int(summary["state"] == "training"),
        "checkpoints": summary["checkpoints"],
        "size_bytes": summary["size_bytes"],
        "free_bytes": summary["free_bytes"],
        "durable_seconds": summary["durable_s"],
        "saves": summary["saves"],
        "lost_saves": summary["lost_saves"],
        "skipped_saves": summary["skipped_saves"],
        "deleted_checkpoints": summary["deleted"],
        "held_seconds": summary["held_s"]["sum"],
        "lost_seconds": summary["lost_s"]["sum"],
        "written_bytes": summary["bytes_written"],
        "reused_bytes": summary["bytes_reused"],
        "attempts": len(summary["attempts"]),
        "failures": summary["failures"],
        "lost_steps": summary["lost_steps"],
        "goodput_ratio": parts.get("ratio"),
        "wall_seconds": parts.get("wall_s"),
        **{f"{names.get(part, part.removesuffix('_s'))}_seconds": parts.get(part) for part, _ in _PARTS},
    }


def openmetrics(runs: Iterable[tuple[Mapping[str, str], Mapping[str, Any]]], *, is_classic: bool = False) -> str:
    """Write the figures of runs as OpenMetrics text (version 1.0.0 of that format), which ends in ``# EOF``.

    Args:
        runs: labels and figures of each; the names of the figures are those of the families above without
            ``holdfast_``, ``durable_seconds`` is a summary (`costs.summary`). A figure that is None is left out.
        is_classic: in the text format of Prometheus (0.0.4) instead, all that the textfile collector of node_exporter
            reads: a counter is declared under the name of its samples, and there are neither units nor an end.

    Example:
        >>> print(openmetrics([({"run": "gpt"}, {"step": 7})]))
        # TYPE holdfast_step gauge
        # HELP holdfast_step Step of the newest checkpoint.
        holdfast_step{run="gpt"} 7
        # EOF
        <BLANKLINE>
    """
    listed = list(runs)
    lines = []
    for name, kind, text in _FAMILIES:
        samples = [line for labels, figures in listed for line in _samples(name, kind, labels, figures)]
        if samples:
            unit = name.rpartition("_")[2] if not is_classic else ""
            shown = f"{name}_total" if is_classic and kind == "counter" else name
            lines += [f"# TYPE {shown} {kind}", *([f"# UNIT {name} {unit}"] if unit in _UNITS else [])]
            lines += [f"# HELP {shown} {text}", *samples]
    return "\n".join([*lines, *([] if is_classic else ["# EOF"]), ""])


def _samples(name: str, kind: str, labels: Mapping[str, str], figures: Mapping[str, Any]) -> list[str]:
    value = figures.get(name.removeprefix("holdfast_"))
    if value is None:
        return []
    if kind != "summary":
        return [_line(name + ("_total" if kind == "counter" else ""), labels, value)]
    quantiles = [
        _line(name, {**labels, "quantile": place}, value[key]) for place, key in _QUANTILES if value[key] is not None
    ]
    return [*quantiles, _line(f"{name}_count", labels, value["count"]), _line(f"{name}_sum", labels, value["sum"])]


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{shown}}} {_number(value)}"


def _escaped(text: str) -> str:
    # A file name that is no UTF-8 has surrogates in it, which cannot be written.
    whole = text.encode("utf-8", "replace").decode()
    return whole.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(value)


# ---- page


@click.command()
@click.argument("runs", type=PATH, metavar="[RUN]...", nargs=-1)
@click.option(
    "-o", "--output", default="run.html", show_default=True, help="The file to write; an earlier page is replaced."
)
@click.option("--watch", is_flag=True, help="Write it again as things happen, until the run has ended.")
@click.option("--poll", default="5s", show_default=True, metavar="SPAN", help="With --watch: time between looks.")
@click.option("--json", "as_json", is_flag=True, help="Print the facts as one JSON document and write no file.")
def page(runs: tuple[str, ...], output: str, watch: bool, poll: str, as_json: bool) -> None:
    """Draw a run, or several, as a single HTML file that needs no server and no network.

    Of one run: metric curves with the checkpoints on them, the attempts and what they cost, a table of checkpoints with
    why each is kept. Of several, or of a folder of runs: a table of the runs, and their curves over each other.
    Default: the current folder.
    """
    storages = [resolve(run) for run in runs or (".",)]
    collect = partial(collect_all, storages)
    if as_json:
        if watch:
            raise ConfigError("--json prints once: leave --watch out")
        print_json(collect())
        return
    every = poll_option(poll)
    check_output(output)
    facts = collect()
    data = render(facts, reload_s=every if watch else None).encode()
    replace_file(output, data)
    click.echo(f"{printable(output)}: {format_bytes(len(data))}")
    while watch and facts["live"]:
        time.sleep(every)
        try:
            fresh = collect()
        except StorageError as error:  # the next look may succeed
            print_error(error)
            continue
        if _essence(fresh) != _essence(facts):
            replace_file(output, render(fresh, reload_s=every).encode())
        facts = fresh


def _essence(facts: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in facts.items() if name not in ("written", "goodput")
    }  # they move by themselves
