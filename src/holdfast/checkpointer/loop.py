"""`Checkpointer`: a run in your own loop."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any

from .._units import IntervalLike
from ..checkpoint.handle import Checkpoint
from ..config import Keep
from ..errors import HoldfastError, SessionError
from ..state.rng import RNG
from ..state.snapshot import Snapshotter
from ..storage.resolve import resolve
from ..writer.client import WriterClient
from .functions import check_ranks
from .identity import new_start_id
from .listing import Listing
from .metrics import MetricLog
from .options import RESERVED, Options, check_root, check_state
from .progress import Progress
from .saver import Saver
from .schedule import Schedule
from .signals import StopSignals
from .start import Started, start_run
from .stats import Stats

__all__ = ["Checkpointer"]

_FULL_RETRY_S = 5.0


class Checkpointer(Listing):
    """Saves a run, keeps what matters of it, and goes on from where it was.

    Use it as a context manager around the training loop. Entering takes the run's lease, resumes, tries one small
    save, and prints one block that says what was restored; leaving saves the final step and waits until it is safe.

    Args:
        path: root of the run: a path (made absolute now) or a URI.
        state: what to save, see docs/state.md. Step, epoch, data position and random generators are always added.
        every: when to save: steps (500 or "500ba"), "2ep", "1000sp", "15min", a timedelta, several of them, or None.
        keep: which checkpoints stay.
        resume: "auto" (newest good one, else a fresh start), "must", "never", or a checkpoint.
        when_busy: when the save before is still being written: "wait" or "skip".
        on_full: when the storage is full: "skip" (say so and train on), "wait" (up to ``timeout_s``) or "raise".
        local_dir: reserved for mirrored remote storage.
        max_staging_bytes: bound of the memory a save may use; None takes one copy of the state.
        deadline: moment or time span after which this process will be gone; saves and stops before it.
        exit_code_for_requeue: exit status after a signal or the deadline.
        timeout_s: bound of every wait.
        seed_samples: make random augmentation in ``__getitem__`` a function of (seed, epoch, index).

    Raises:
        ConfigError: an argument is wrong.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> with Checkpointer(tempfile.mkdtemp(), {"model": model}, every=2) as ck:
        ...     while ck.global_step < 3:
        ...         ck.step(loss=0.5)
        >>> ck.stats.last_durable_step
        3
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, Any] | None = None,
        *,
        every: IntervalLike | Sequence[IntervalLike] | None = "10min",
        keep: Keep | None = Keep(last=3),  # noqa: B008 - Keep is frozen
        resume: str | os.PathLike[str] | Checkpoint = "auto",
        when_busy: str = "wait",
        on_full: str = "skip",
        local_dir: str | os.PathLike[str] | None = None,
        max_staging_bytes: int | None = None,
        deadline: float | IntervalLike | datetime | None = None,
        exit_code_for_requeue: int = 85,
        timeout_s: float = 600.0,
        seed_samples: bool = True,
    ) -> None:
        self.options = Options.check(
            every=every, keep=keep, resume=resume, when_busy=when_busy, on_full=on_full, local_dir=local_dir,
            max_staging_bytes=max_staging_bytes, deadline=deadline, exit_code_for_requeue=exit_code_for_requeue,
            timeout_s=timeout_s, seed_samples=seed_samples,
        )  # fmt: skip
        self.state = check_state(state)
        self.storage = resolve(path)
        self.resumed_from: Checkpoint | None = None
        self._progress = Progress(seed_samples=seed_samples)
        self._signals = StopSignals()
        self._deadline = self.options.deadline
        self._left = self._step_s = 0.0  # when `step` was left, and how long the step before it took
        self._open = self._ended = False
        self._stopping = False  # the body was, or is to be, left for a signal or the deadline
        self._client: WriterClient | None = None
        self._saver: Saver | None = None

    # -- life

    def __enter__(self) -> Checkpointer:
        if self._open or self._ended:
            raise SessionError("a Checkpointer is entered once; make another one for another run")
        check_ranks("all")
        check_root(self.storage)
        self._progress = Progress(seed_samples=(options := self.options).seed_samples)
        snapshotter = Snapshotter(max_staging_bytes=options.max_staging_bytes, timeout_s=options.timeout_s)
        snapshotter.max_file_bytes = self.storage.max_file_bytes
        self._client = WriterClient.start(self.storage)
        try:
            started = start_run(
                self.storage, self._client, snapshotter, self._full_state, self._progress,
                options=options, start_id=new_start_id(),
            )  # fmt: skip
            self._begin(self._client, snapshotter, started)
        except BaseException as error:
            self._signals.remove()
            snapshotter.close()
            with contextlib.suppress(HoldfastError):
                self._client.run_op("close_run", reason=f"did not start: {type(error).__name__}")
            self._client.close(options.timeout_s)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._open:
            return
        self._open, self._ended = False, True
        saver, client = self._saver, self._client
        assert saver is not None
        assert client is not None
        if os.getpid() != self._owner:
            return  # a forked child leaves the body: the run is the trainer's
        try:
            if kind is None:
                self._end(saver, client)
            elif not self._signals.impatient:
                self._end_after(f"{kind.__name__}: {error}", saver, client)
        finally:
            self._signals.remove()
            saver.snapshotter.close()
            # What is sealed is committed in any case; somebody who pressed Ctrl-C twice does not wait for it.
            client.close(0.0 if self._signals.impatient else self.options.timeout_s)
        if kind is None and self._stop_asked():
            raise SystemExit(self.options.exit_code)

    # -- the loop

    def step(self, **metrics: Any) -> None:
        """Record one finished optimizer step; saves when due. Costs microseconds otherwise, never reads a device.

        Args:
            **metrics: numbers of this step; tensors are read when they are written out.

        Raises:
            SystemExit: a signal came or the deadline is near; the step is saved and safe.
            HoldfastError: a save in the background failed.
        """
        entered = time.perf_counter()
        if not self._open:
            raise SessionError("ck.step() outside of `with Checkpointer(...) as ck`")
        saver, progress = self._saver, self._progress
        assert saver is not None
        self._step_s = entered - self._left
        saver.clock.step(self._step_s, draining=saver.busy)
        progress.stepped()
        if metrics:
            self._log.add(progress.step, progress.epoch, metrics)
        saver.fence()
        now = time.monotonic()
        if (
            self._signals.received is not None
            or not self._warm
            or saver.wants_retry
            or self._due(now)
            or self._deadline.near(now=now, step_s=self._step_s, save_s=saver.save_s)
        ):
            self._attend(saver, now)
        elif saver.unsettled:
            saver.settle()
        self._left = time.perf_counter()

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs still to do, up to ``count`` in all."""
        # Asked for more, the last epoch comes again without batches: what the body does at its end (a scheduler's step)
        # came after the checkpoint if that was made by the last `step`.
        if self._finished_epochs is not None and count <= self._finished_epochs:
            self._progress.skip_to(self._finished_epochs)
        return self._progress.epochs(count, at_end=self._epoch_done)

    def batches(self, loader: Any, *, name: str = "train") -> Iterator[Any]:
        """Yield the batches of the current epoch from the position of the last trained step.

        Args:
            loader: a map-style ``DataLoader``, a loader with ``state_dict``, or any iterable (replayed by count).
            name: tells several training loaders of one run apart.
        """
        return self._progress.batches(loader, name, at_end=self._epoch_done)

    def report(self, **metrics: Any) -> None:
        """Record metrics of the current step and bind them to its checkpoint.

        If ``keep`` ranks by one of them and the step has no checkpoint, it is saved.
        """
        saver = self._live_saver()
        progress = self._progress
        self._log.add(progress.step, progress.epoch, metrics)
        keep = self.options.keep
        ranked = keep is not None and keep.best is not None and keep.metric in metrics
        if saver.last_step != progress.step and ranked:
            self._save(saver, force=True)
        elif saver.last_step == progress.step:
            self._log.bind(saver, metrics)
        self._log.flush(progress, saver)

    def save(self, **metrics: Any) -> None:
        """Save now (once for one step), with these metrics."""
        saver = self._live_saver()
        if metrics:
            self._log.add(self._progress.step, self._progress.epoch, metrics)
        if saver.last_step != self._progress.step:
            self._save(saver, force=True)
        elif metrics:
            self._log.bind(saver, metrics)

    def wait(self) -> None:
        """Wait until everything saved and reported so far is durable; raises what failed."""
        saver = self._live_saver()
        self._log.flush(self._progress, saver)
        saver.finish()

    # -- what there is

    @property
    def global_step(self) -> int:
        """Optimizer steps done, over all lives of the run."""
        return self._progress.step

    @property
    def epoch(self) -> int:
        """Number of the current epoch, counted from 0."""
        return self._progress.epoch

    @property
    def should_stop(self) -> bool:
        """True once a signal came or the deadline is near; poll it in long evaluations, and leave the body.

        A body left after this was True ends as `step` would have ended it: the last finished step is saved, and the
        exit status is ``exit_code_for_requeue``.
        """
        saver = self._saver
        if not self._stopping and self._open and saver is not None:
            self._stopping = self._deadline.near(now=time.monotonic(), step_s=self._step_s, save_s=saver.save_s)
        return self._stop_asked()

    @property
    def stats(self) -> Stats:
        """What saving has cost so far."""
        return self._saver.stats if self._saver is not None else Stats()

    # -- inside

    def _full_state(self) -> dict[str, Any]:
        return {**self.state, RESERVED: {"progress": self._progress, "rng": RNG}}

    def _begin(self, client: WriterClient, snapshotter: Snapshotter, started: Started) -> None:
        """Set up what the loop needs, once the run is ours and its state is loaded."""
        options, progress = self.options, self._progress
        self.resumed_from = started.checkpoint
        self._finished_epochs = started.finished_epochs
        self._saver = saver = Saver(
            self.storage, client, started.opened, snapshotter, self._full_state, names=started.names,
            when_busy=options.when_busy, on_full=options.on_full, timeout_s=options.timeout_s,
        )  # fmt: skip
        saver.parent = started.parent
        if self.resumed_from is not None and started.in_this_run:
            # The step resumed from is safe already; saving it again would only make a copy.
            saver.last_step, saver.last_name = progress.step, self.resumed_from.name
            saver.stats.last_durable_step = progress.step
        self._log = MetricLog(client, attempt=started.opened.attempt, follow=saver.on_the_side)
        self._schedule = Schedule(options.intervals, now=time.monotonic())
        self._schedule.start(step=progress.step, samples=progress.samples)
        self._warm = False
        self._owner = os.getpid()
        self._signals.install()
        self._open = True
        self._left = time.perf_counter()

    def _live_saver(self) -> Saver:
        if self._saver is None or not self._open:
            raise SessionError("use it inside of `with Checkpointer(...) as ck`")
        return self._saver

    def _stop_asked(self) -> bool:
        return self._stopping or self._signals.received is not None

    def _due(self, now: float) -> bool:
        schedule = self._schedule
        samples = self._progress.samples if schedule.counts_samples else 0
        return schedule.due(step=self._progress.step, samples=samples, now=now)

    def _attend(self, saver: Saver, now: float) -> None:
        """Do what the current step calls for: stop, save, retry, or warm up."""
        if not self._warm:
            # Optimizer state exists from the first step on: now the arena's size is known, and its pages are
            # faulted in the background, long before the first save is due.
            self._warm = True
            saver.snapshotter.prepare(self._full_state(), saver.client)
        if self._signals.received is not None or self._deadline.near(now=now, step_s=self._step_s, save_s=saver.save_s):
            self._stop(saver)
        if saver.unsettled:
            saver.settle()
        if saver.wants_retry:
            self._save_when_space(saver)
        elif self._due(now):
            self._save(saver)

    def _save(self, saver: Saver, *, force: bool = False) -> None:
        begun = time.perf_counter()
        progress = self._progress
        saved = saver.last_step == progress.step or saver.save(
            step=progress.step, epoch=progress.epoch, metrics=self._log.of_step(progress.step), force=force,
            announce=lambda name: self._log.flush(progress, saver, name=name),
        )  # fmt: skip
        # One that is left out because the writer is busy is over as well: the next multiple is the next chance.
        self._schedule.saved(step=progress.step, samples=progress.samples, now=time.monotonic())
        if saved:
            self._log.flush(progress, saver)  # nothing, unless the step was saved before
        self._left += time.perf_counter() - begun  # the time a save holds is not the time of a step

    def _save_when_space(self, saver: Saver) -> None:
        """``on_full="wait"``: hold training and try again until there is space or the time is up."""
        until = time.monotonic() + self.options.timeout_s
        while saver.wants_retry:
            self._save(saver, force=True)
            saver.settle(wait_for_it=True)
            if not saver.wants_retry:
                return
            if self._stop_asked():
                self._stop(saver)
            if time.monotonic() + _FULL_RETRY_S > until:
                saver.on_full = "raise"
            time.sleep(_FULL_RETRY_S)

    def _stop(self, saver: Saver) -> None:
        self._stopping = True
        self._save(saver, force=True)
        self._log.flush(self._progress, saver)
        saver.finish()
        raise SystemExit(self.options.exit_code)

    def _end(self, saver: Saver, client: WriterClient) -> None:
        """Leave the body in order: the final step is saved, everything is durable, errors raise."""
        step = self._progress.step
        saver.settle(wait_for_it=True)
        if step > 0 and saver.last_step != step:
            self._save(saver, force=True)
            saver.settle(wait_for_it=True)
            if saver.wants_retry:
                self._save_when_space(saver)
        self._log.flush(self._progress, saver)
        saver.finish()
        saver.say_lost()
        if step > 0 and saver.last_step != step:
            raise saver.final_is_missing(step)
        stopped = self._stop_asked()
        if not stopped:
            saver.on_the_side(client.run_op("finished", info={"step": step, "epoch": self._progress.epoch}))
        saver.on_the_side(client.run_op("close_run", reason="stopped" if stopped else "finished"))
        saver.finish()

    def _end_after(self, reason: str, saver: Saver, client: WriterClient) -> None:
        """Leave the body after an error (or a stop): what is under way finishes; the body's error is the one to see."""

        def close() -> None:
            saver.on_the_side(client.run_op("close_run", reason="stopped" if self._stopping else reason))

        def flush() -> None:
            self._log.flush(self._progress, saver)

        # Each on its own: a failed save must not keep the reports from the disk.
        for act in (flush, saver.finish, saver.say_lost, close, saver.finish):
            try:
                act()
            except Exception as late:  # noqa: BLE001 - recorded: raising would hide the error of the body
                self._log.complain(late)

    def _epoch_done(self, epochs: int) -> None:
        saver = self._live_saver()
        if self._schedule.epoch_due(epochs) and saver.last_step != self._progress.step:
            self._save(saver)
