"""Printing: tables, ages, JSON. rich is imported on use, for --json does without it."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["age", "console", "fits", "number", "print_json", "printable", "strict", "table"]

_PIPE_WIDTH = 160


def console() -> Console:
    """A console on stdout; wide where nobody looks at it, so that a pipe gets whole lines."""
    from rich.console import Console

    is_tty = sys.stdout.isatty()
    return Console(width=None if is_tty else _PIPE_WIDTH, highlight=False, soft_wrap=False, emoji=False, markup=False)


def table(columns: Iterable[tuple[str, str]], *, header: bool = True) -> Table:
    """A plain table; columns are (title, "left" | "right")."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_header=header)
    for title, side in columns:
        made.add_column(title, justify="right" if side == "right" else "left", no_wrap=True, overflow="ellipsis")
    return made


def fits(out: Console, made: Table) -> bool:
    """Whether a table can be printed without cutting anything."""
    from rich.measure import Measurement

    return Measurement.get(out, out.options.update(max_width=10_000), made).maximum <= out.width


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(strict(document), indent=2, allow_nan=False, default=str))


def strict(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): strict(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [strict(inner) for inner in value]
    return value


def printable(value: Any) -> Any:
    """Replace control characters in all texts: names come from files, and a terminal obeys escape codes."""
    if isinstance(value, str):
        return value if value.isprintable() else "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in value)
    if isinstance(value, Mapping):
        return {printable(key): printable(inner) for key, inner in value.items()}
    return [printable(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def age(created: float, now: float | None = None) -> str:
    """Say how long ago a time was, in its largest unit."""
    if not created:
        return "?"
    seconds = (time.time() if now is None else now) - created
    if seconds < 0:
        return "ahead of clock"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def number(value: Any) -> str:
    """Print a metric or a count compactly."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return "-" if value is None else str(value)
