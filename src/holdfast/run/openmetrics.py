"""The figures of runs as OpenMetrics text, which Prometheus and others collect (version 1.0.0 of that format)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["openmetrics"]

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
    ("holdfast_saving_held_seconds", "gauge", "Time that saves held the training loop, of steps that count."),
    ("holdfast_saving_slowed_seconds", "gauge", "Time that steps took longer while saves were written."),
    ("holdfast_starting_seconds", "gauge", "From each start to the first step done."),
    ("holdfast_down_seconds", "gauge", "From the last sign of a life to the next start."),
)
_UNITS = ("seconds", "bytes", "ratio")
_QUANTILES = (("0.5", "p50"), ("0.95", "p95"))


def openmetrics(runs: Iterable[tuple[Mapping[str, str], Mapping[str, Any]]], *, is_classic: bool = False) -> str:
    """Write the figures of runs as text that ends in ``# EOF``.

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
