"""`Checkpointer`: a run in your own loop."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, Any

from holdfast._log import get_logger
from holdfast._meant import suggests
from holdfast._ranks import current_ranks
from holdfast._units import IntervalLike
from holdfast.config import Guard, Keep, Mirror, ranking_of
from holdfast.errors import ConfigError, HoldfastError, SessionError
from holdfast.run.data_ring import DataRing
from holdfast.run.life import RolledBack
from holdfast.state.data.loaders import PersistentWorkerSeeds
from holdfast.state.save.snapshot import Snapshotter
from holdfast.state.tree import rng
from holdfast.state.tree.rng import RNG
from holdfast.storage.base import Storage
from holdfast.storage.resolve import resolve

from .boundaries import StepBoundary, watcher
from .console import show_stop
from .meeting import meet
from .metrics import MetricLog, NoLog
from .options import CheckpointerOptions, check_root, check_state, sides
from .pending_saves import Stats
from .progress import RESERVED, Batches, NumberedBatches, Progress
from .run_session import RunSession
from .save_policy import SavePolicy, Schedule
from .signals import StopSignals
from .start import start_run

if TYPE_CHECKING:
    from holdfast.checkpoint.handle import Checkpoint
    from holdfast.model_files import Content, ModelFiles
    from holdfast.run.view import RunView
    from holdfast.state.tree.sharded import Alike

    from .announce import Listener
    from .guard import GuardWatch
    from .resume import ResumeResult

_LOG = get_logger("checkpointer")
_STARTED: weakref.WeakSet[Checkpointer] = weakref.WeakSet()  # by `Checkpointer.start`, and not left


class Checkpointer:
    """Saves a run, keeps what matters of it, and goes on from where it was.

    Use it as a context manager around the training loop. Entering takes the run's lease, resumes, tries one small
    save, and prints one block that says what was restored; leaving saves the final step and waits until it is safe.

    Args:
        path: root of the run: a path (made absolute now) or a URI.
        state: what to save, see docs/state.md. Step, epoch, data position and random generators are always added.
        every: when to save: steps (500 or "500ba"), "2ep", "1000sp", "15min", a timedelta, several of them, or None.
            "auto": as often as loses least, by what saves cost and how often the run fails; see docs/checkpointer.md.
        keep: which checkpoints stay.
        resume: "auto" (newest good one, else a fresh start), "must", "never", or a checkpoint to begin at: started
            again before it is done, the run goes on from what it has saved since.
        when_busy: when the save before is still being written: "wait" or "skip".
        on_full: when the storage is full, or a remote answers nothing for minutes: "skip" (say so and train on), "wait"
            (up to ``timeout_s``) or "raise".
        local_dir: a directory of this machine in front of a remote ``path``: every save is committed there, at the
            speed of the disk, and uploaded in the background. A path, or a `Mirror` with its rules; see
            docs/storage.md.
        max_staging_bytes: bound of the memory a save may use, in bytes or as a text such as "512MiB"; None takes one
            copy of the state.
        deadline: moment or time span after which this process will be gone; saves and stops before it. "slurm": the
            end of the SLURM job, if there is one.
        exit_code_for_requeue: exit status after a signal or the deadline.
        timeout_s: bound of every wait; of a save of several ranks, from the first rank to the last.
        silence_s: a rank that says nothing for so long, or cannot be reached, is given up; see docs/parallel.md.
        seed_samples: make random augmentation in ``__getitem__`` a function of (seed, epoch, index).
        on_commit: functions that rank 0 calls with each committed `Checkpoint`, on a thread of their own: they hold
            nothing up, and what they raise is logged. See `holdfast.trackers`; a text names a tracker that an installed
            package offers (docs/extending.md). Where the ranks share no disk, once it is at the remote.
        strict: refuse any difference between the checkpoint and ``state``; False takes what fits.
        allow_missing: names or globs of ``state`` that the checkpoint need not have.
        skip: names or globs that are not restored; the live value stays.
        rename: glob of stored names -> their names in ``state``.
        unsupported: what becomes of values that cannot be saved: "raise", or "drop" (left out, and said).
        alike: the ranks that hold the same as this one (a DeviceMesh, a process group, or a list of ranks), where
            others hold something else: stages of a pipeline, experts. None: what meshes and process groups in the state
            say, else all ranks. See docs/parallel.md.
        model_files: small files that are committed with each checkpoint, so that its directory is what another library
            loads: ``{name: bytes, text or a function}``, `holdfast.transformers.model_files`, or the name that an
            installed package offers. See docs/model-directory.md.
        rescue: when a snapshot is kept in memory, an interval as ``every``, also "auto"; None: never. It is written
            only if this process dies (or the body raises): its writer lives on and commits it as an ordinary
            checkpoint. Costs one memory copy a snapshot, and memory for two copies of the state; see docs/run.md.
        guard: watches a metric, and takes the run back to a sound checkpoint when it is not finite or jumps; bad data
            are left out and remembered. A `holdfast.Guard`; see docs/run.md.
        on_data_mismatch: what becomes of a loader that, after a resume, gives other batches than the run's ledger of
            what was trained says: "raise" (what is certain is an error: a batch that was trained already comes again,
            batches are left out, other indices; what only looks different is a warning), "warn", or "ignore".

    Attributes:
        state: the mapping given, where the state lives: a resume puts plain values back into it.
        resumed_from: the `Checkpoint` that the run went on from, None after a fresh start.

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

    @suggests(also={"directory": "path", "interval": "every", "save_interval": "every", "autoresume": "resume"})
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
        local_dir: str | os.PathLike[str] | Mirror | None = None,
        max_staging_bytes: int | str | None = None,
        deadline: float | IntervalLike | datetime | None = None,
        exit_code_for_requeue: int = 85,
        timeout_s: float = 600.0,
        silence_s: float = 30.0,
        seed_samples: bool = True,
        on_commit: Listener | str | Sequence[Listener | str] | None = None,
        strict: bool = True,
        allow_missing: str | Sequence[str] | None = (),
        skip: str | Sequence[str] | None = (),
        rename: Mapping[str, str] | None = None,
        unsupported: str = "raise",
        alike: Alike = None,
        model_files: ModelFiles | Mapping[str, Content] | str | None = None,
        on_data_mismatch: str = "raise",
        rescue: IntervalLike | Sequence[IntervalLike] | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._watcher = watcher(path)  # None, unless `holdfast verify-resume` runs this script
        if self._watcher is not None:
            path, every, local_dir, on_commit = self._watcher.arguments(
                path, every=every, local_dir=local_dir, on_commit=on_commit
            )
        beside = None
        if model_files is not None:
            from holdfast.model_files import model_files_of  # not above: few runs have any

            beside = model_files_of(model_files, state or {})
        self.options = CheckpointerOptions.check(
            every=every, keep=keep, resume=resume, when_busy=when_busy, on_full=on_full, local_dir=local_dir,
            max_staging_bytes=max_staging_bytes, deadline=deadline, exit_code_for_requeue=exit_code_for_requeue,
            timeout_s=timeout_s, silence_s=silence_s, seed_samples=seed_samples, on_commit=on_commit, strict=strict,
            allow_missing=allow_missing, skip=skip, rename=rename, unsupported=unsupported,
            alike=alike, model_files=beside, on_data_mismatch=on_data_mismatch,
            rescue=rescue, guard=guard,
        )  # fmt: skip
        self.state = check_state(state)
        # Root of the run, which is the local side of a mirrored run; and its remote side.
        self.storage, self.remote = sides(resolve(path), self.options.mirror)
        self.resumed_from: Checkpoint | None = None
        self.attempt = 0  # while this object holds the run: the number of its attempt
        self._progress = Progress(seed_samples=seed_samples)
        self._signals = StopSignals()
        self._worker_seeds = PersistentWorkerSeeds()
        self._left = self._step_s = 0.0  # when `step` was left, and how long the step before it took
        self._open = self._ended = False
        self._generators: dict[str, Any] | None = None  # as restored, until the first batch is asked for
        self._session: RunSession | None = None
        self._boundary: StepBoundary | None = None

    # -- life

    def __enter__(self) -> Checkpointer:
        if self._open or self._ended:
            raise SessionError("a Checkpointer is entered once; make another one for another run")
        check_root(self.storage)
        options, info = self.options, current_ranks()
        meeting = meet(info, name="run", timeout_s=options.timeout_s, otherwise="call holdfast.save on one rank alone")
        rank, world_size = info.rank, info.world_size
        alike = None
        if world_size > 1:
            from holdfast.state.tree.sharded import ranks_alike

            alike = ranks_alike(options.alike, rank=rank, world_size=world_size)
        self._progress = Progress(
            seed_samples=options.seed_samples, rank=rank, world_size=world_size,
            on_data_mismatch=options.on_data_mismatch,
        )  # fmt: skip
        if options.guard is not None:
            from .guard import Judge  # not above: most runs have no guard

            self._progress.judge = Judge(options.guard)
        self._progress.home, self._progress.given = self.state, frozenset(self.state)
        snapshotter = Snapshotter(
            rank=rank, world_size=world_size, max_staging_bytes=options.max_staging_bytes, timeout_s=options.timeout_s,
            max_file_bytes=min(side.traits.max_file_bytes for side in self._sides), unsupported=options.unsupported,
            alike=alike, model_files=options.model_files, rescues=options.rescues,
        )  # fmt: skip
        session = self._session = RunSession(
            self.storage, remote=self.remote, meeting=meeting, on_full=options.on_full, timeout_s=options.timeout_s,
            silence_s=options.silence_s,
        )  # fmt: skip
        try:
            started = start_run(
                session, snapshotter, self._full_state, self._progress, options=options, home=self.state
            )
            self._begin(session, snapshotter, started)
        except BaseException as error:
            self._signals.remove()
            snapshotter.close()
            session.abandon(f"did not start: {type(error).__name__}")
            raise
        return self

    def start(self) -> Checkpointer:
        """Enter the run without ``with``; end it with `close`. A script that ends without it counts as killed.

        Example:
            >>> import tempfile
            >>> ck = Checkpointer(tempfile.mkdtemp(), {"lr": 0.1}).start()
            >>> ck.step()
            >>> ck.close()
        """
        self.__enter__()
        _STARTED.add(self)
        return self

    def close(self) -> None:
        """Leave a run that `start` entered, as the end of a ``with`` block does: the final step is saved; idempotent.

        Raises:
            HoldfastError: the final step could not be saved.
            SystemExit: a signal came or the deadline is near, or the guard has found a bad step (86).
        """
        self.__exit__(None, None, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._open:
            return
        self._open, self._ended, self.attempt = False, True, 0
        _STARTED.discard(self)
        self._worker_seeds.end()
        session, boundary = self._session, self._boundary
        assert session is not None
        assert boundary is not None
        if os.getpid() != self._owner:
            return  # a forked child leaves the body: the run is the trainer's
        reason = "" if error is None else self._reason(session, error)
        try:
            if kind is None:
                self._leave_in_order(session, boundary)
            if (kind is not None or boundary.left_for) and not self._signals.impatient:
                boundary.end_after(reason, is_silent=isinstance(error, SystemExit) and not error.code)
        finally:
            self._signals.remove()
            boundary.close()
            self._progress.close()
            # What is sealed is committed in any case; after a second Ctrl-C the process does not wait for it.
            limit_s = 0.0 if self._signals.impatient or boundary.rescues_later else self.options.timeout_s
            why = "it has left the run" + (f" ({reason})" if reason else f" after step {self._progress.step}")
            session.close(why, timeout_s=limit_s)
        exit_code = self.options.exit_code
        if boundary.policy.stop_asked and session.leads and not self._signals.impatient:
            is_ours = kind is None or (isinstance(error, SystemExit) and error.code == exit_code)
            left_by = "" if is_ours or kind is None else kind.__name__
            safe = session.stats.last_durable_step
            show_stop(
                boundary.policy.stopped_by, safe, self.storage, exit_code, left_by=left_by,
                anew=self.options.resume == "never",
            )  # fmt: skip
        if kind is None and (boundary.policy.stop_asked or (boundary.left_for and boundary.policy.stop_wished)):
            raise SystemExit(exit_code)
        if kind is None and boundary.left_for:
            raise RolledBack

    def _leave_in_order(self, session: RunSession, boundary: StepBoundary) -> None:
        """Make what is durable of a body that has ended by itself; of one that a guard has stopped nothing."""
        try:
            self._progress.leaves()
            with contextlib.suppress(SystemExit):  # a stop at the last boundary: raised at the very end
                boundary.body_ended()
                boundary.judge_rest(alone=True)
            if boundary.left_for:
                return
            if not boundary.policy.stop_asked:
                self._progress.remind_at_end(was_finished=self._finished_epochs is not None)
                self._remind_of_source()
            self._progress.finish(is_saved=session.saves.last_step == self._progress.step)
            boundary.watch()
            boundary.end()
        except Exception as failed:  # of the final save, say, as another rank has died: the last snapshot counts
            if not self._signals.impatient:
                boundary.end_after(self._reason(session, failed))
            raise

    def _remind_of_source(self) -> None:
        """Say why a run that began at the end of another one has trained nothing."""
        progress = self._progress
        if self._begun_elsewhere and not progress.num_steps:
            _LOG.warning(
                "nothing was trained: the checkpoint that resume= names is at step %d, epoch %d, and these count here. "
                "Ask for more: ck.epochs(%d) for one more epoch. To take weights alone and count from 0, leave resume= "
                "out and call holdfast.load(path, {'model': model}, only='model') before",
                progress.step, progress.epoch, progress.epoch + 1,
            )  # fmt: skip

    def _reason(self, session: RunSession, error: BaseException) -> str:
        """Say why the body was left: a rank that is gone before the error that this is to the others."""
        gone = None if session.rank_group is None or self._signals.impatient else session.rank_group.explain(error)
        if gone is None:
            return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        _LOG.error("%s. What this rank raises follows from that (%s)", gone, type(error).__name__)
        return str(gone)

    # -- the loop

    def step(self, **metrics: Any) -> None:
        """Record one finished optimizer step; saves when due. Costs microseconds otherwise, never reads a device.

        Args:
            **metrics: numbers of this step; tensors are read when they are written out.

        Raises:
            SystemExit: a signal came or the deadline is near, and the step is saved and safe; or the guard has found a
                bad step (86).
            TrainingError: the guard has found a bad step, and the run must not go on.
            HoldfastError: a save in the background failed.
        """
        entered = time.perf_counter()
        if not self._open:
            raise SessionError("ck.step() outside of `with Checkpointer(...) as ck`")
        if os.getpid() != self._owner:
            raise self._in_a_child()
        self._generators = None
        session, progress, boundary = self._session, self._progress, self._boundary
        assert session is not None
        assert boundary is not None
        self._step_s = step_s = entered - self._left - boundary.held_s
        session.costs.stepped(step_s, draining=session.saves.busy)
        progress.stepped()
        session.note_step(progress.step)
        if boundary.guard is not None:
            boundary.guard.stepped(progress.step, progress.place)
        if metrics:
            boundary.log.add(progress.step, progress.epoch, metrics)
        if self._watcher is not None:
            self._watcher.stepped(progress.step, metrics)
        boundary.stepped(step_s)
        boundary.held_s = 0.0
        self._left = time.perf_counter()

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs still to do, up to ``count`` in all.

        Raises:
            ConfigError: ``count`` is no number of epochs.
        """
        if not isinstance(count, Real) or isinstance(count, bool) or (count != math.inf and count % 1 != 0):
            raise ConfigError(f"ck.epochs({count!r}): give the number of epochs in all, a whole one")
        boundary = self._live_boundary()
        # Asked for more, the last epoch comes again without batches: what the body does at its end (a scheduler's step)
        # came after the checkpoint if that was made by the last `step`.
        if self._finished_epochs is not None and count <= self._finished_epochs:
            self._progress.skip_to(self._finished_epochs)
        return self._progress.epochs(count, at_end=boundary.epoch_done)

    def batches(
        self, loader: Any, *, name: str = "train", split: bool | tuple[int, int] = True, ahead: int = 0
    ) -> Iterator[Any]:
        """Iterate over the batches of the current epoch from the position of the last trained step.

        Where the loop comes back for its next batch is the boundary of the step before: what the body did after
        ``ck.step()`` (an evaluation, ``scheduler.step()``, random draws, ``ck.report``) belongs to that step. ``len()``
        is the number of batches of the whole epoch; `batch` is the index of the one being worked on.

        Args:
            loader: a map-style ``DataLoader``, a loader with ``state_dict``, or any iterable (replayed by count).
            name: tells several training loaders of one run apart.
            split: with several ranks each gets its part of a map-style loader, whose ``batch_size`` is that of one
                rank. A sampler that knows its rank (`DistributedSampler`) is left to do it. ``(rank, num_ranks)``
                says it for ranks of a mesh, where tensor-parallel ranks need the same samples; False: all get all.
            ahead: how many batches the loop has drawn beyond the one it trains (a prefetcher, ``next_x = next(it)``):
                they come again after a resume. ``ck.step()`` is the boundary then, and the last line of the body.

        Raises:
            ConfigError: ``ahead`` is no whole number >= 0, or ``name`` no text.
        """
        if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
            raise ConfigError(f"ahead={ahead!r}: give the number of batches that are drawn before they are trained")
        if not isinstance(name, str):
            raise ConfigError(f"name={name!r}: give the name of a loader, as in name='unlabelled'")
        done = self._live_boundary().epoch_done
        found = Batches(self._progress, loader, name, split=split, ahead=ahead, ask=self._ask, epoch_done=done)
        return found if self._watcher is None else self._watcher.batches(found)

    def enumerate(self, loader: Any, *, name: str = "train", split: bool | tuple[int, int] = True) -> NumberedBatches:
        """Iterate over (index in the epoch, batch); after a resume the index goes on where it was. See `batches`."""
        return NumberedBatches(self.batches(loader, name=name, split=split), lambda: self._progress.batch)

    def report(self, **metrics: Any) -> None:
        """Record metrics of the current step and bind them to its checkpoint.

        If ``keep`` ranks by one of them and the step has no checkpoint, it is saved at its boundary (see `batches`).
        """
        self._live_boundary().report(metrics)
        if self._watcher is not None:
            self._watcher.reported(self._progress.step, metrics, self._full_state)

    def save(self, **metrics: Any) -> None:
        """Save the current step (once), with these metrics: in a body over `batches` at its boundary, else now."""
        self._live_boundary().save_now(metrics)

    def wait(self, *, remote: bool = False) -> None:
        """Wait until everything saved and reported so far is durable; raises what failed.

        A save that waits for the boundary of its step (`save`, `report`) is made first.

        Args:
            remote: of a mirrored run (``local_dir``), wait for the remote side too (rank 0 does); else the local disk
                is enough.
        """
        self._live_boundary().wait(remote=remote)

    # -- what there is

    @property
    def global_step(self) -> int:
        """Optimizer steps done, over all lives of the run."""
        self._progress.counted_by_user = True
        return self._progress.step

    @property
    def epoch(self) -> int:
        """Number of the current epoch, counted from 0."""
        self._progress.counted_by_user = True
        return self._progress.epoch

    @property
    def batch(self) -> int:
        """Index in the epoch of the batch being worked on; before the first one, of that which comes first.

        ``tqdm(ck.batches(loader), initial=ck.batch)`` shows the whole epoch and begins where the run is.
        """
        return self._progress.batch

    @property
    def should_stop(self) -> bool:
        """True once a signal came or the deadline is near; poll it in long evaluations, and leave the body.

        A body left after this was True ends as `step` would have ended it: the last finished step is saved, and the
        exit status is ``exit_code_for_requeue``. With several ranks it stays False until all of them stop, in `step`:
        ranks that left at different places would wait for each other.
        """
        boundary = self._boundary
        if boundary is None:
            return self._signals.received is not None
        if not self._open:
            return boundary.policy.stop_asked
        return boundary.policy.poll(step_s=self._step_s, save_s=boundary.save_s)

    @property
    def stats(self) -> Stats:
        """What saving has cost so far."""
        session = self._session
        if session is None:
            return Stats()
        if session.remote_watch is not None:
            session.remote_watch.fill(session.stats)
        return session.stats

    def checkpoints(self) -> list[Checkpoint]:
        """Return the committed checkpoints of the run, newest first; needs no lease, so it works at any time."""
        from holdfast.checkpoint.handle import Checkpoint

        if self.remote is None:
            return [Checkpoint.at(self.storage, name) for name in _view_of(self.storage).names()]
        from holdfast.run.candidates import MirrorView

        sides = MirrorView.join(_view_of(self.storage).records(), _view_of(self.remote).records())
        far = {name for name, place in sides.places.items() if place == "remote"}
        return [
            Checkpoint.at(self.remote if record.name in far else self.storage, record.name) for record in sides.records
        ]

    def latest(self) -> Checkpoint | None:
        """Return the newest committed checkpoint that no guard refuses, None if there is none yet."""
        found = []
        for side in self._sides:
            record = _view_of(side).latest()
            if record is not None:
                found.append((side, record))
                if record.attempt == self.attempt:
                    break  # only this life saves: its disk has the newest, whether the remote answers or not
        if not found:
            return None
        side, record = max(found, key=lambda pair: pair[1].order)  # of two equals the local side
        from holdfast.checkpoint.handle import Checkpoint

        return Checkpoint.at(side, record.name)

    def best(self, metric: str | None = None, *, mode: str | None = None) -> Checkpoint | None:
        """Return the best checkpoint by ``metric`` (default: the one ``keep`` ranks by), None if none has a value.

        Args:
            metric: name of a metric.
            mode: "min" or "max"; default: that of ``keep`` if it ranks by this metric, else "min".

        Raises:
            ConfigError: neither ``metric`` nor ``keep`` names one.
        """
        name, order = ranking_of(self.options.keep, metric, mode, what="ck.best()")
        found = [(side, record) for side in self._sides if (record := _view_of(side).best(name, order)) is not None]
        if not found:
            return None
        from holdfast.checkpoint.handle import Checkpoint
        from holdfast.run.retention import rank

        first = rank([record for _, record in found], name, order)[0].name
        side = next(side for side, record in found if record.name == first)  # of two equals the local side
        return Checkpoint.at(side, first)

    # -- inside

    @property
    def _sides(self) -> list[Storage]:
        return [self.storage] if self.remote is None else [self.storage, self.remote]

    def _ask(self) -> None:
        """Do what is due where the loop asks for its next batch."""
        self._live_boundary().body_ended()
        if self._generators is not None:
            # What the script drew since it entered (a batch to look at, a warm-up) changes nothing.
            generators, self._generators = self._generators, None
            rng.restore(generators)

    def _full_state(self) -> dict[str, Any]:
        return {**self.state, RESERVED: {"progress": self._progress, "rng": RNG}}

    def _begin(self, session: RunSession, snapshotter: Snapshotter, started: ResumeResult) -> None:
        """Set up what the loop needs, once the run is ours and its state is loaded."""
        options, progress = self.options, self._progress
        self.resumed_from, self.attempt = started.checkpoint, session.opened.attempt
        self._finished_epochs = started.finished_epochs
        self._begun_elsewhere = session.leads and started.is_named and not started.is_own
        if self._watcher is not None:
            progress.ledger.tell = self._watcher.mismatched
        place = self.storage.local_root
        run_id = session.opened.run_id
        ring = None if place is None else DataRing(place, session.meeting.rank, run_id=run_id)
        progress.ledger.begin(ring, attempt=self.attempt, step=progress.step, is_own=started.is_own)
        session.announce(options.on_commit, mirror=options.mirror)
        guard = self._watch_metric(session, started) if session.leads else None
        take = None if guard is None else lambda step, metrics: guard.take(step, metrics, progress.place)
        log = MetricLog(session, take) if session.leads else NoLog()
        schedule = Schedule(options.intervals, now=time.monotonic())
        schedule.start(progress)
        policy = SavePolicy(schedule, self._signals, options.deadline, progress)
        if session.rank_group is not None:
            from .rank_group import DistributedSavePolicy  # not above: most runs have one rank

            session.rank_group.mailbox.calls(progress.step)
            policy = DistributedSavePolicy(schedule, self._signals, options.deadline, progress, session.rank_group)
        policy.busy = lambda: snapshotter.would_wait
        if snapshotter.rescues:
            policy.snapshots = Schedule(options.rescue, now=time.monotonic())
            policy.snapshots.start(progress)
        session.life.trains(progress.step, requeue=options.exit_code, wait_s=options.timeout_s)
        self._boundary = StepBoundary(session, snapshotter, log, policy, progress, options, self._full_state)
        if session.leads and (options.auto or options.auto_rescue):
            from .auto_interval import follow_costs  # not above: of every="auto" only

            follow_costs(session, self._boundary, schedule if options.auto else None, rescue=options.auto_rescue)
        self._boundary.watcher, self._boundary.guard = self._watcher, guard
        if options.guard is not None and options.guard.skip == "bad":
            again = (rollback.step - 1 for rollback in started.rollbacks if not rollback.left_out)
            self._boundary.saves_at = frozenset(step for step in again if step > progress.step)
        if started.has_generators:
            self._generators = rng.capture()
        if session.saves.last_step == progress.step:
            snapshotter.remember(self._full_state())  # else nobody asks whether it has changed since
        self._owner = os.getpid()
        self._signals.install()
        self._worker_seeds.begin()
        self._open = True
        if self._watcher is not None:
            source = self.resumed_from
            self._watcher.entered(progress.step, None if source is None else source.step, self._full_state)
        self._left = time.perf_counter()

    def _watch_metric(self, session: RunSession, started: ResumeResult) -> GuardWatch | None:
        """Make the guard of this life, on the rank whose metrics count."""
        guard, progress = self.options.guard, self._progress
        if guard is None or progress.judge is None:
            return None
        from .guard import GuardWatch

        watch = GuardWatch(guard, progress.judge, session, started.rollbacks, step=progress.step, before=started.before)
        manifest = None if started.checkpoint is None else started.checkpoint.manifest
        if manifest is not None and started.is_own and not started.is_named:
            watch.begin(manifest.metrics, progress.place)
        return watch

    def _live_boundary(self) -> StepBoundary:
        if self._boundary is None or not self._open:
            raise SessionError("use it inside of `with Checkpointer(...) as ck`")
        if os.getpid() != self._owner:
            raise self._in_a_child()
        return self._boundary

    def _in_a_child(self) -> SessionError:
        return SessionError(
            f"this process ({os.getpid()}) was forked from the trainer ({self._owner}) of the run {self.storage.uri}, "
            "which alone saves it: call ck there, or holdfast.save(path, state) here"
        )


def _view_of(storage: Storage) -> RunView:
    from holdfast.run.view import RunView  # not above: only those who ask what there is look at a run themselves

    return RunView(storage)


@atexit.register
def _say_not_closed() -> None:
    """Say at the end of the interpreter which runs were entered by `start` and not left."""
    for checkpointer in list(_STARTED):
        boundary, session = checkpointer._boundary, checkpointer._session
        if boundary is None or session is None or not checkpointer._open or os.getpid() != checkpointer._owner:
            continue
        if boundary.policy.snapshots is None:  # else the writer saves the last snapshot
            with contextlib.suppress(HoldfastError):  # a save under way is no loss: the interpreter waits for it anyway
                session.settle()
            boundary.say_left("the script has ended without ck.close()")
