"""Where metrics go: JSON lines, the console, TensorBoard, a progress bar."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

import torch

from holdfast._log import get_logger
from holdfast._optional import require
from holdfast._outgoing import strict

from .callbacks import Logger, LoggerDestination
from .state import State
from .time import TimeUnit, parse_every

_LOG = get_logger("trainers.loop")
_BLOCK = 1 << 16
_LINE_S = (10.0, 60.0)  # until the first line, and between two of them


class JSONLLogger(LoggerDestination):
    """Appends one JSON object a line: {"step", "time", name: value, ...}.

    NaN and infinities, which JSON lacks, are the texts "NaN", "Infinity" and "-Infinity". A metric that is called
    "step" or "time" itself becomes "metrics/step" or "metrics/time".

    Rows are read from their devices and written every ``buffer`` rows, at the end of each epoch and before each save.

    Args:
        path: the file; ``{run_name}`` is filled in, missing folders are made.
        buffer: rows kept in memory.
    """

    def __init__(self, path: str | os.PathLike[str] = "{run_name}/metrics.jsonl", *, buffer: int = 200) -> None:
        self.path = os.fspath(path)
        self._buffer = buffer
        self._rows: list[tuple[int | None, float, dict[str, Any]]] = []
        self._file: TextIO | None = None
        self._run_name = ""

    def init(self, state: State, logger: Logger) -> None:
        """Learn the name of the run."""
        self._run_name = state.run_name

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep a row."""
        self._rows.append((step, time.time(), {name: _kept(value) for name, value in metrics.items()}))
        if len(self._rows) >= self._buffer:
            self.flush()

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Write a row of its own."""
        self._rows.append((None, time.time(), {"hyperparameters": dict(hyperparameters)}))

    def flush(self) -> None:
        """Write what is kept."""
        if not self._rows:
            return
        if self._file is None:
            path = self.path.format(run_name=self._run_name)
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            cut_torn_line(path)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run lasts
        rows, self._rows = self._rows, []
        for step, when, metrics in rows:
            row: dict[str, Any] = {"step": step, "time": round(when, 3)}
            row.update({f"metrics/{name}" if name in row else name: plain(value) for name, value in metrics.items()})
            self._file.write(json.dumps(strict(row), allow_nan=False, default=str) + "\n")
        self._file.flush()

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Write what is kept; after evaluations and training, too."""
        self.flush()

    eval_after_all = fit_end = epoch_end

    def close(self, state: State, logger: Logger) -> None:
        """Write what is kept and close the file."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None


def cut_torn_line(path: str) -> None:
    """Take off the end of a file what a killed process has left of its last row: the next row begins a line."""
    if not os.path.exists(path):
        return
    with open(path, "rb+") as file:
        end = size = file.seek(0, os.SEEK_END)
        last = b""
        while end and b"\n" not in last:
            begin = max(0, end - _BLOCK)
            file.seek(begin)
            last = file.read(end - begin) + last
            end = begin
        torn = len(last) - (last.rfind(b"\n") + 1)
        if torn:
            _LOG.warning("%s ends in the middle of a row, of a process that was killed: that row is removed", path)
            file.truncate(size - torn)


class TensorBoardLogger(LoggerDestination):
    """Writes scalars for TensorBoard. Needs the package ``tensorboard``.

    Args:
        log_dir: folder; ``{run_name}`` is filled in.
    """

    def __init__(self, log_dir: str | os.PathLike[str] = "{run_name}/tensorboard") -> None:
        self.log_dir = os.fspath(log_dir)
        require("tensorboard", extra="tensorboard", purpose="TensorBoardLogger")
        self._writer: Any = None
        self._run_name = ""

    def init(self, state: State, logger: Logger) -> None:
        """Learn the name of the run."""
        self._run_name = state.run_name

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write scalars; anything else is left out."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # What an earlier life has logged of the batches that come again is hidden.
            self._writer = SummaryWriter(self.log_dir.format(run_name=self._run_name), purge_step=step)
        for name, value in metrics.items():
            number = plain(value)
            if isinstance(number, (int, float)):
                self._writer.add_scalar(name, number, step)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write everything out."""
        if self._writer is not None:
            self._writer.flush()

    def close(self, state: State, logger: Logger) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class ConsoleLogger(LoggerDestination):
    """Prints a line with the metrics of training and evaluation.

    Args:
        log_interval: how often: epochs (1), or "10ba", "1ep".
        stream: where to; standard error by default.
    """

    def __init__(self, log_interval: Any = "1ep", stream: TextIO | None = None) -> None:
        self._every = parse_every(log_interval, "log_interval")
        self._stream = stream
        self._last: dict[str, Any] = {}

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Remember the newest values."""
        self._last.update({name: _kept(value) for name, value in metrics.items()})

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Print when it is time."""
        self._print(state, batch=True)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Print when it is time."""
        self._print(state, batch=False)

    def _print(self, state: State, *, batch: bool) -> None:
        if batch is (self._every.interval.unit.value == "ep") or not self._last:
            return
        if self._every.crossed(state.previous_timestamp, state.timestamp, state.span):
            shown = "  ".join(f"{name} {_short(plain(value))}" for name, value in self._last.items())
            here = f"epoch {int(state.timestamp.epoch)}  batch {int(state.timestamp.batch)}"
            print(f"{here}  {shown}", file=self._stream or sys.stderr, flush=True)
            self._last = {}


def _kept(value: Any) -> Any:
    # It may be added to in place before it is read; reading it now would wait for its device.
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it; reads a device if it lives on one."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if callable(getattr(value, "item", None)):
        return value.item()
    return value


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class ProgressBar(LoggerDestination):
    """One bar for the current epoch, with the newest metrics, drawn a few times a second.

    Where stderr is no terminal (the log of a job) it says a line ten seconds after the start, then one a minute.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._last: dict[str, Any] = {}
        self._says = False  # lines, for want of a terminal
        self._line_at = 0.0
        self._begun = (0.0, 0)  # when, and at which batch

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Remember the newest metrics of evaluations; training's would be read from the device for each batch."""
        self._last.update({name: value for name, value in metrics.items() if name.startswith("metrics/")})

    def fit_start(self, state: State, logger: Logger) -> None:
        """Begin a bar, or lines."""
        if not sys.stderr.isatty():
            now = time.monotonic()
            self._says, self._line_at, self._begun = True, now + _LINE_S[0], (now, int(state.timestamp.batch))
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), refresh_per_second=4)
        self._bar.start()
        if int(state.timestamp.batch_in_epoch):  # the rest of an epoch that an earlier life has begun
            self._begin(state)

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Begin a new bar."""
        self._begin(state)

    def _begin(self, state: State) -> None:
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            done = int(state.timestamp.batch_in_epoch)
            self._task = self._bar.add_task(self._words(state), total=state.num_batches, completed=done)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Move on."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1)
        elif self._says and (now := time.monotonic()) >= self._line_at:
            self._line_at = now + _LINE_S[1]
            self._say(state, now)

    def _say(self, state: State, now: float) -> None:
        batch = int(state.timestamp.batch)
        begun_at, first = self._begun
        pace = (batch - first) / max(now - begun_at, 1e-9)
        done = state.get_elapsed_duration()
        share = 0.0 if done is None else float(done.value)
        if state.max_duration is not None and state.max_duration.unit is TimeUnit.EPOCH and state.num_batches:
            share += int(state.timestamp.batch_in_epoch) / state.num_batches / max(state.max_duration.value, 1e-12)
        left = "" if done is None else f" ({100 * share:.0f} %)"
        loss = state.loss  # read once a line: that waits for the device
        shown = f"  loss {float(loss):.4g}" if getattr(loss, "numel", lambda: 0)() == 1 else ""
        line = f"holdfast: batch {batch}{left}, {pace:.3g} batches/s  {self._words(state)}{shown}"
        print(line, file=sys.stderr, flush=True)  # noqa: T201 - it stands for the bar

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Show the new metrics."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=self._words(state))

    def _words(self, state: State) -> str:
        numbers = {name.removeprefix("metrics/"): plain(value) for name, value in self._last.items()}
        shown = [f"{name} {value:.4g}" for name, value in numbers.items() if isinstance(value, (int, float))]
        return "  ".join([f"epoch {int(state.timestamp.epoch)}", *shown])

    def stop(self) -> None:
        """Leave the bar as it is and give the terminal back; idempotent."""
        self._says = False
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def fit_end(self, state: State, logger: Logger) -> None:
        """Leave the bar as it is."""
        self.stop()

    def close(self, state: State, logger: Logger) -> None:
        """Give the terminal back."""
        self.stop()
