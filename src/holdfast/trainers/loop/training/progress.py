"""The progress bar of the trainer; nothing where nobody looks at a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ..callbacks import Logger, LoggerDestination

if TYPE_CHECKING:
    from ..state import State

__all__ = ["ProgressBar"]


class ProgressBar(LoggerDestination):
    """One bar for the current epoch, with the newest metrics. Drawn a few times a second, on a terminal only."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._last: dict[str, Any] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Remember the newest metrics of evaluations; training's would be read from the device for each batch."""
        self._last.update({name: value for name, value in metrics.items() if name.startswith("metrics/")})

    def fit_start(self, state: State, logger: Logger) -> None:
        """Begin, if there is a terminal."""
        if not sys.stderr.isatty():
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
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def fit_end(self, state: State, logger: Logger) -> None:
        """Leave the bar as it is."""
        self.stop()

    def close(self, state: State, logger: Logger) -> None:
        """Give the terminal back."""
        self.stop()
