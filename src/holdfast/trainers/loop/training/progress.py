"""The progress bar of the trainer; a line now and then where there is no terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from ..callbacks import Logger, LoggerDestination
from ..times.time import TimeUnit

if TYPE_CHECKING:
    from ..state import State

__all__ = ["ProgressBar"]

_LINE_S = (10.0, 60.0)  # until the first line, and between two of them


class ProgressBar(LoggerDestination):
    """One bar for the current epoch, with the newest metrics, drawn a few times a second.

    Where stderr is no terminal (the log of a job) it says a line ten seconds after the begin, then one a minute.
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
        from ..loggers import plain

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
