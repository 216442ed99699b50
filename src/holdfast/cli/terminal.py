"""Printing: tables, ages, JSON, files; and an end in order. rich is imported on use, for --json does without it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import stat
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast._outgoing import brief, masked, on_one_line, strict
from holdfast._units import listed
from holdfast.errors import ConfigError
from holdfast.storage.base import translate

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


Row = tuple[Mapping[str, str], str, str]

_PIPE_WIDTH = 160
_LONG = 1000
_NAMED = 20
_HEAD = 1 << 12
_GENERATOR = b'<meta name="generator" content="holdfast">'
_FIGURES = (b"# TYPE holdfast_", b"# EOF")
_CODES = {"red": "31", "green": "32", "yellow": "33", "cyan": "36", "dim": "2"}


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def console() -> Console:
    """A console on stdout; tables are wide where it is no terminal, and no line of text is broken: paths stay whole."""
    from rich.console import Console

    is_tty = sys.stdout.isatty()
    return Console(width=None if is_tty else _PIPE_WIDTH, highlight=False, soft_wrap=True, emoji=False, markup=False)


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


def counted(count: int, noun: str) -> str:
    """Say how many: "1 run", "2 runs"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def print_columns(out: Console, columns: Mapping[str, str], rows: Sequence[Row], *, droppable: Sequence[str]) -> None:
    """Print a table whole: where a line has no room, columns are left out, and named; nothing is cut.

    Args:
        out: where.
        columns: title -> "left" or "right", in order; the last one is coloured.
        rows: cells by title, the style of the row, and that of its last cell.
        droppable: titles that may be left out, the first ones first.
    """
    left_out: list[str] = []
    while True:
        shown = [title for title in columns if title not in left_out]
        made = PlainTable([(title, columns[title]) for title in shown])
        for cells, style, last in rows:
            made.add([cells[title] for title in shown], style=style, last=last)
        rest = [title for title in droppable if title not in left_out]
        if made.print(out, fitting=bool(rest)):
            break
        left_out.append(rest[0])
    say_left_out(out, [title for title in columns if title in left_out])


def say_left_out(out: Console, names: Sequence[str]) -> None:
    """Name the columns that a table has left out, if any."""
    for line in textwrap.wrap(no_room_for(names, "--json has all"), out.width) if names else ():
        out.file.write(painted(out, line, "dim") + "\n")


def no_room_for(names: Sequence[str], instead: str) -> str:
    """Say which columns are left out, and what shows them."""
    return f"no room for: {listed(printable(names), _NAMED)} ({instead})"


class PlainTable:
    """A plain table for thousands of rows, which those of rich take seconds for.

    Args:
        columns: (title, "left" | "right").
    """

    def __init__(self, columns: Sequence[tuple[str, str]]) -> None:
        self._sides = [side for _, side in columns]
        self._rows: list[tuple[Sequence[str], str, str]] = []
        self.add([title for title, _ in columns], style="dim", last="dim")

    def add(self, cells: Sequence[str], *, style: str = "", last: str = "") -> None:
        """Add a row: texts, the style of all cells, and that of the last cell."""
        self._rows.append(([cell if cell.isprintable() else printable(cell) for cell in cells], style, last))

    def print(self, out: Console, *, fitting: bool = False) -> bool:
        """Print all rows.

        Args:
            out: where.
            fitting: print nothing, and return False, where the lines would be too long for it.
        """
        from rich.cells import cell_len

        wide = [[len(cell) if cell.isascii() else cell_len(cell) for cell in cells] for cells, _, _ in self._rows]
        widths = [max(column) for column in zip(*wide, strict=True)]
        if fitting and sum(widths) + 2 * (len(widths) - 1) > out.width:
            return False
        lines = []
        for (cells, style, last), sizes in zip(self._rows, wide, strict=True):
            padded = [
                " " * (width - size) + cell if side == "right" else cell + " " * (width - size)
                for cell, size, width, side in zip(cells, sizes, widths, self._sides, strict=True)
            ]
            line, end = "  ".join(padded[:-1]) + "  ", padded[-1].rstrip()
            lines.append((painted(out, line, style) + painted(out, end, last or style)).rstrip())
        out.file.write("\n".join(lines) + "\n")
        return True


def painted(out: Console, text: str, style: str) -> str:
    """Give a printable text a colour, or "dim", where ``out`` shows that: in a tenth of the time of rich."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if style and text and out.is_terminal and not out.no_color else text


def say(out: Console, text: str, style: str = "") -> None:
    """Print a text that may hold what strangers have written; a pipe gets it as one line."""
    from rich.text import Text

    out.print(Text(printable(text), style=style))


def print_line(row: Mapping[str, Any]) -> None:
    """Print a row of JSON lines."""
    click.echo(json.dumps(strict(row), allow_nan=False, default=str))


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document, indented unless it is very long."""
    is_long = any(isinstance(value, list) and len(value) > _LONG for value in document.values())
    click.echo(json.dumps(strict(document), indent=None if is_long else 2, allow_nan=False, default=str))


def printable(value: Any) -> Any:
    """Put escapes for control characters and line breaks into all texts, and take credentials out of them.

    Names come from files: a terminal would obey escape codes, and a line break would make a line that is not ours.
    """
    if isinstance(value, str):
        return on_one_line(masked(value) if "://" in value else value)
    if isinstance(value, Mapping):
        return {printable(key): printable(inner) for key, inner in value.items()}
    return [printable(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def message(text: str) -> str:
    """Return a text of several lines for a terminal: the later ones are indented, so that none passes for ours."""
    first, *more = masked(text).split("\n")
    return "\n".join([on_one_line(first), *(on_one_line(line if line[:2] == "  " else f"  {line}") for line in more)])


def note(text: str) -> None:
    """Print a line of ours on stderr; what strangers have put into it stays within the line."""
    click.echo(printable(f"holdfast: {text}"), err=True)


def print_error(error: object) -> None:
    """Print an error on stderr, of one line or of several."""
    click.echo(f"holdfast: {message(str(error))}", err=True)


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
    return "-" if value is None else brief(value, _LONG)


@contextlib.contextmanager
def handling(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals while the body runs; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        numbers = ()
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, known in before.items():
            signal.signal(number, known)


@contextlib.contextmanager
def ends_in_order() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the body as Ctrl-C does: what it has made or started is removed and ended."""

    def leave(number: int, _: object) -> None:
        for other in default:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    default = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    with handling(leave, *default):
        yield


def check_output(target: str) -> None:
    """Make sure, before any work, that `replace_file` may write ``target``: a new file, or its own earlier output.

    Raises:
        ConfigError: it is something that Holdfast did not write, or no name of a file.
        StorageError: it cannot be written, or not be looked at.
    """
    path = Path(target)
    if not path.name:
        raise ConfigError(f"{target!r} is no name of a file: give one")
    try:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            os.stat(path.parent)
            return
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        head = b"?"  # of a pipe or a device, which is not read
        if stat.S_ISREG(mode):
            with path.open("rb") as file:
                head = file.read(_HEAD)
    except OSError as error:
        raise translate(error, "write", target) from error
    is_page = head.startswith(b"<!doctype html>") and _GENERATOR in head
    if head and not is_page and not head.startswith(_FIGURES):
        raise ConfigError(f"{target} was not written by `holdfast`, and stays: give another name, or delete it first")


def replace_file(target: str, text: str) -> int:
    """Replace a local file of our own in one step, so that no collector and no browser reads half of it.

    Returns:
        how many bytes it has.

    Raises:
        ConfigError: as `check_output`.
        StorageError: it cannot be written.
    """
    check_output(target)
    data = text.encode("utf-8", "replace")  # a file name that is no UTF-8 has surrogates in it, which none can write
    path = Path(target)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fresh.write_bytes(data)
        fresh.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise translate(error, "write", target) from error
    return len(data)
