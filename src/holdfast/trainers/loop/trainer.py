"""`Trainer`: a training from its parts, with everything it takes to go on after whatever ended it."""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from holdfast._log import get_logger
from holdfast._meant import removed
from holdfast.checkpointer.first_step import first_step_checks
from holdfast.checkpointer.meeting import same_for_all
from holdfast.checkpointer.signals import StopSignals
from holdfast.config import Guard
from holdfast.errors import ConfigError, SessionError
from holdfast.model_files import Content, ModelFiles
from holdfast.run.life import REQUEUE_STATUS
from holdfast.state.data.seeding import generators_kept
from holdfast.state.tree import rng

from .arguments import OF_TRAINER, check_flags, check_function, check_path, choose_run_name, of_fit, several
from .callbacks import Callback, EventEngine, Logger, LoggerDestination
from .evaluator import Evaluator, as_metrics, as_spec, check_subset, eval_metric_sets, evaluators_of, move_metrics
from .loggers import ProgressBar
from .parallel import Parallel, Ranks, bare, check_clip, choose_device, choose_optimizers, place_model, seed_ranks
from .saving.load import save_checkpoint
from .saving.saver import CheckpointSaver, check_guard, default_saver, rescue_with
from .saving.saver_group import SaverGroup, StartingPoint
from .saving.uploads import RemoteUploaderDownloader
from .schedulers import compiled, refresh
from .state import State
from .stop_policy import StopPolicy, TrainerGuard, make_pace, uncounted
from .time import Event, Every, Time, When, parse_duration, parse_when
from .training import Evaluation, TrainingLoop, TrainStep, check_precision, make_scaler

_LOG = get_logger("trainers.loop")


@removed(**OF_TRAINER)
class Trainer:
    """Trains a model and saves it so that nothing is lost.

    ``load_path`` and ``autoresume`` are applied here, in the constructor. Under torchrun, or in the function trainer,
    every rank makes the same trainer and the same calls, and has its part of the data; see docs/loop-trainer.md.

    Args:
        model: a module with ``loss(outputs, batch)``, or any module together with ``loss_fn``. It may have
            ``eval_forward(batch)``, ``update_metric(batch, outputs, metric)`` and ``get_metrics(is_train)``. Several
            ranks train it with DistributedDataParallel, unless it is sharded already.
        train_dataloader: batches: (inputs, targets), a dictionary, or whatever the model takes.
        max_duration: when training ends, counted from its very beginning: "10ep", "1000ba", "1e9tok", "8h".
        optimizers: one or several; AdamW with a rate of 1e-3 without any.
        schedulers: one or several, of torch or `holdfast.optim`, or functions of the state that return a factor.
        step_schedulers_every_batch: they step after each batch; by default if one of them is not torch's, else after
            each epoch.
        eval_dataloader: data to evaluate on, or several: by label, as a list, or as `Evaluator` objects.
        eval_interval: how often: a time, 0 for never, or ``fn(state, event)``, asked at BATCH_END, EPOCH_END, FIT_END.
        eval_subset_num_batches: evaluate on the first so many batches.
        loss_fn: loss of (outputs, targets).
        train_metrics, eval_metrics: torchmetrics objects or functions of (outputs, targets).
        algorithms: see `holdfast.core.Algorithm`.
        callbacks: see `holdfast.callbacks.Callback`; savers (`CheckpointSaver`) among them work beside ``save_*``.
        loggers: where metrics go, see `holdfast.loggers`.
        run_name: name of the run; default RUN_NAME of the environment, or a new one.
        seed: seeds python, NumPy and torch, and decides the order of the data; without, torch's seed decides.
        device: "cpu", "cuda", ...; default a GPU where there is one.
        precision: "fp32", "amp_bf16" or "amp_fp16" (with scaled gradients).
        grad_accum: parts each batch is split into, one after another; the optimizer still steps once a batch.
        grad_clip_norm: bound of the norm of all gradients.
        progress_bar: draw one; where stderr is no terminal, say a line after 10 s and then one a minute.
        save_folder: where checkpoints go: a directory or a URI; None saves nothing.
        save_filename: name of each; without suffix a Holdfast directory, ".pt" one file for ``torch.load``,
            ".safetensors" the weights alone.
        save_latest_filename: link to the newest; None for none.
        save_remote_file_name: name at the destination of a `RemoteUploaderDownloader`; by default ``save_filename`` in
            ``save_folder``, or in "{run_name}/checkpoints/" where that is an absolute path.
        save_overwrite: replace checkpoints of later moments than this run is at, instead of refusing to start.
        save_interval: how often: epochs, "500ba", "1e6tok", "0.1dur", "30min", or ``fn(state, event)``.
        save_weights_only: nothing but the weights.
        save_ignore_keys: globs over "/"-joined paths that are not saved.
        save_num_checkpoints_to_keep: how many stay in ``save_folder``; -1: all; 0: none after their upload.
        save_metrics: save what metrics have gathered.
        model_files: small files committed with each checkpoint in ``save_folder``, so that its directory is what
            another library loads: ``{name: bytes, text or a function}``, `holdfast.transformers.model_files`, or the
            name under which an installed package makes them.
        rescue: how often a snapshot is kept in memory, as ``save_interval``; None: never. It is written only if this
            process dies, or training raises: as the checkpoint that ``save_folder`` would have got then. Directories
            only; see docs/run.md.
        guard: a `holdfast.Guard` of a metric that is logged ("loss" is the loss of each batch): where it breaks the
            process ends (86), and the next start goes on from before that and leaves bad batches out. Directories
            only, with ``autoresume``; see docs/run.md.
        load_path: checkpoint to start from.
        load_object_store: where ``load_path`` lies, if that is no path and no URI.
        load_weights_only: take its weights alone.
        load_strict_model_weights: refuse weights that are missing, left over or of another shape.
        load_ignore_keys: globs over "/"-joined paths that are not loaded, or a function that changes the dictionary.
        load_progress_bar: show how far loading is, on a terminal.
        load_strict: another name of ``load_strict_model_weights``.
        autoresume: go on from the newest good checkpoint of ``save_folder`` if there is one.

    Raises:
        ConfigError: an argument is wrong.
        CheckpointError: ``load_path`` or what autoresume found cannot be loaded.

    Example:
        >>> import tempfile, torch
        >>> data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
        >>> trainer = Trainer(
        ...     model=torch.nn.Linear(2, 1), loss_fn=torch.nn.functional.mse_loss, max_duration="2ep",
        ...     train_dataloader=torch.utils.data.DataLoader(data, batch_size=4),
        ...     save_folder=tempfile.mkdtemp(), save_filename="ep{epoch}",
        ... )
        >>> trainer.fit()
        >>> [path.rsplit("/", 1)[-1] for path in trainer.saved_checkpoints]
        ['ep1', 'ep2']
    """

    def __init__(
        self,
        model: torch.nn.Module,
        train_dataloader: Any = None,
        *,
        max_duration: Any = None,
        optimizers: Any = None,
        schedulers: Any = None,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: Any = None,
        eval_interval: Any = "1ep",
        eval_subset_num_batches: int | None = None,
        loss_fn: Callable[..., Any] | None = None,
        train_metrics: Any = None,
        eval_metrics: Any = None,
        algorithms: Any = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        loggers: LoggerDestination | Sequence[LoggerDestination] | None = None,
        run_name: Any = None,
        seed: int | None = None,
        device: Any = None,
        precision: Any = None,
        grad_accum: int = 1,
        grad_clip_norm: float | None = None,
        progress_bar: bool = True,
        save_folder: str | os.PathLike[str] | None = None,
        save_filename: str = "ep{epoch}-ba{batch}-rank{rank}",
        save_latest_filename: str | None = "latest-rank{rank}",
        save_remote_file_name: str | None = None,
        save_overwrite: bool = False,
        save_interval: Any = "1ep",
        save_weights_only: bool = False,
        save_ignore_keys: Any = None,
        save_num_checkpoints_to_keep: int = -1,
        save_metrics: bool = True,
        load_path: str | os.PathLike[str] | None = None,
        load_object_store: Any = None,
        load_weights_only: bool = False,
        load_strict_model_weights: bool = True,
        load_ignore_keys: Any = None,
        load_progress_bar: bool = True,
        load_strict: bool | None = None,
        autoresume: bool = False,
        model_files: ModelFiles | Mapping[str, Content] | str | None = None,
        rescue: Any = None,
        guard: Guard | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model is a {type(model).__name__}: give a torch.nn.Module")
        if isinstance(grad_accum, bool) or not isinstance(grad_accum, int) or grad_accum < 1:
            raise ConfigError(f"grad_accum={grad_accum!r}: give a whole number of at least 1")
        grad_clip_norm = check_clip(grad_clip_norm)
        strict = load_strict_model_weights if load_strict is None else load_strict
        load_from = None if load_path is None else check_path(load_path, "load_path")
        check_flags(
            step_schedulers_every_batch=step_schedulers_every_batch or False, progress_bar=progress_bar,
            save_overwrite=save_overwrite, save_weights_only=save_weights_only, save_metrics=save_metrics,
            load_weights_only=load_weights_only, load_strict_model_weights=load_strict_model_weights,
            load_strict=strict, load_progress_bar=load_progress_bar, autoresume=autoresume,
        )  # fmt: skip
        precision, chosen = check_precision(precision), choose_device(device)
        ranks = Ranks.join(chosen)
        self._parallel, model = Parallel(model, ranks), bare(model)
        mine = default_saver(
            save_folder, filename=save_filename, latest_filename=save_latest_filename,
            remote_file_name=save_remote_file_name, overwrite=save_overwrite, save_interval=save_interval,
            weights_only=save_weights_only, ignore_keys=save_ignore_keys,
            num_checkpoints_to_keep=save_num_checkpoints_to_keep, model_files=model_files,
        )  # fmt: skip
        given, destinations = several(callbacks, "callbacks"), several(loggers, "loggers")
        savers = [
            *([mine] if mine is not None else []),
            *(callback for callback in given if isinstance(callback, CheckpointSaver)),
        ]
        first = next((saver for saver in savers if saver.is_full), None)  # the saver that autoresume goes by
        if rescue is not None:
            rescue_with(first, rescue)
        if guard is not None:
            check_guard(guard, first, autoresumes=autoresume)
        ranks.agree("alike", lambda: repr([rescue, guard]), lambda given: same_for_all(given, "rescue= and guard="))
        needed = autoresume and first is not None and first.is_named_by_run(destinations)
        name = ranks.agree("run_name", lambda: choose_run_name(run_name, needed=needed))
        seed = seed_ranks(seed, ranks)
        place_model(model, chosen)
        found = choose_optimizers(
            optimizers, model, chosen, trains=train_dataloader is not None, scaled=precision == "amp_fp16"
        )
        spec = None if train_dataloader is None else as_spec(train_dataloader, "train_dataloader")
        self.state = state = State(
            model=model, optimizers=found, run_name=name,
            rank_zero_seed=seed, device=chosen, ranks=ranks,
            precision=precision, scaler=make_scaler(precision, chosen), max_duration=parse_duration(max_duration),
            train_dataloader=None if spec is None else spec.dataloader, train_spec=spec,
            evaluators=evaluators_of(eval_dataloader), grad_accum=grad_accum, save_metrics=save_metrics,
        )  # fmt: skip
        schedules = several(schedulers, "schedulers")
        state.schedulers = compiled(schedules, state)
        self._measure(train_metrics, eval_metrics, with_loss=loss_fn is not None)
        state.algorithms = several(algorithms, "algorithms")
        others = [callback for callback in given if not isinstance(callback, CheckpointSaver)]
        state.callbacks = [*others, *savers]
        self._savers = tuple(savers)
        self._guard = None if guard is None else TrainerGuard(guard, state)
        self._signals = StopSignals()
        self._pace = StopPolicy(self._signals)
        self._left_for: str | None = None  # the signal that ended the last `fit`
        self._num_fits = 0  # calls of fit(duration) in this life
        self._listen(others, destinations, progress_bar=progress_bar)
        self._loss_fn = check_function(loss_fn, "loss_fn", "outputs", "targets")
        self._grad_clip_norm = grad_clip_norm
        self._eval_every = parse_when(eval_interval, "eval_interval")
        self._eval_subset = check_subset(eval_subset_num_batches, "eval_subset_num_batches")
        if step_schedulers_every_batch is None:
            step_schedulers_every_batch = any(not hasattr(scheduler, "step") for scheduler in schedules)
        self._schedule_by_batch = bool(step_schedulers_every_batch)
        self._closed = False
        self._finalizer = weakref.finalize(self, _give_up, self._group, self._engine, os.getpid())
        start = StartingPoint(
            self._group, path=load_from, object_store=load_object_store, weights_only=load_weights_only,
            strict=strict, ignore_keys=load_ignore_keys, autoresume=autoresume, progress_bar=load_progress_bar,
        )  # fmt: skip
        self._generators: Mapping[str, Any] | None = self._load(start)
        self._sets_rates = start.lacks_rates  # until training begins
        self._saved = start.saved
        self._has_stepped = False

    def _measure(self, train_metrics: Any, eval_metrics: Any, *, with_loss: bool) -> None:
        """Choose the metrics: those given, else the model's own."""
        state = self.state
        if train_metrics is None and callable(getattr(state.model, "get_metrics", None)):
            train_metrics = state.model.get_metrics(is_train=True)  # type: ignore[operator]
        state.train_metrics = as_metrics(train_metrics, "train_metrics")
        state.eval_metrics = eval_metric_sets(eval_metrics, state.model, state.evaluators, with_loss=with_loss)
        self._eval_metrics = eval_metrics if not set(state.eval_metrics) & set(_keys(eval_metrics)) else None
        for metrics in (state.train_metrics, *state.eval_metrics.values()):
            move_metrics(metrics, state.device)

    def _listen(self, callbacks: Sequence[Callback], destinations: Sequence[Any], *, progress_bar: bool) -> None:
        """Connect everybody who hears of events: callbacks, loggers (on rank 0), savers, in this order."""
        state = self.state
        self._bar = ProgressBar()
        self._group = SaverGroup(state, self._savers, destinations, guard=self._guard)
        shown = [*destinations, *([self._bar] if progress_bar else []), self._group.history]
        self.logger = Logger(state, shown if state.ranks.leads else [])
        self._logs_metrics = any(not isinstance(logger, RemoteUploaderDownloader) for logger in destinations)
        others = [] if state.ranks.leads else [self._group.history]  # hears of events, not of metrics
        self._engine = EventEngine(state, self.logger)
        self._engine.listen([*callbacks, *self.logger.destinations, *others, *self._savers])

    def _load(self, start: StartingPoint) -> Mapping[str, Any] | None:
        """Load what training goes on from; returns the random numbers of that moment, if it had any."""
        try:
            self._engine.run(Event.INIT)
            self._engine.run(Event.BEFORE_LOAD)
            with generators_kept():  # what is loaded before training begins must not move its random numbers
                generators = start.run()
            self._engine.run(Event.AFTER_LOAD)
        except BaseException as error:
            self._group.abandon(error)
            raise
        return generators

    # -- training

    @of_fit
    def fit(self, duration: Any = None) -> None:
        """Train until ``max_duration``; everything saved is durable on return.

        Args:
            duration: train so much longer than now, instead. In a further life of the same run (``autoresume``) the
                n-th call goes on with the n-th of the earlier lives: it counts from where that one began.

        Raises:
            CheckpointExistsError: checkpoints of later moments are in the way; nothing was trained.
            SystemExit: a signal came (SIGTERM, SIGUSR1, SIGINT); the state was saved.
            HoldfastError: a save failed.
        """
        state = self.state
        if self._closed:
            raise SessionError("this trainer is closed: make another one")
        self._check_not_left()
        state.take_late()
        if state.train_dataloader is None:
            raise ConfigError("fit() needs train_dataloader")
        is_last = True
        if (more := parse_duration(duration, "duration")) is not None:
            is_last = self._set_end(more)
        if state.max_duration is None:
            raise ConfigError("fit() needs to know when to end: give max_duration to the Trainer, or fit(duration)")
        if state.is_finished and (state.dataset_state.stage == "" or not is_last):
            if state.ranks.leads:
                _LOG.warning(
                    "training has lasted for %s already, %s", state.max_duration,
                    "and was stopped then (state.stop_training): nothing to do. Set state.max_duration to train on"
                    if state.stopped
                    else "as long as it should: nothing to do. Give a longer max_duration to train on",
                )  # fmt: skip
            if is_last:
                self._complete()
            self._num_fits += more is not None
            return
        state.show_own_metrics()
        if next(state.model.parameters(), None) is None:
            raise ConfigError(
                f"fit() of a {type(state.model).__name__} without parameters: there is nothing to train; assign layers "
                "to attributes of the module (those in a plain list are not seen), or call eval()"
            )
        if self._sets_rates or not state.timestamp.count("batch"):
            refresh(state)
        for every in self._evals:
            if isinstance(every, Every):
                every.check(state.span)
        self._group.open()
        if more is not None:
            self._num_fits += 1
            if self._num_fits > len(state.fit_starts):
                state.fit_starts.append(state.timestamp)
        self._sets_rates = False
        self._left_for, self._signals = None, StopSignals()
        if any(saver.is_full for saver in self._savers):  # otherwise there is nothing to do before leaving
            self._signals.install()
        try:
            self._train()
        finally:
            self._signals.remove()
            self._bar.stop()
        if self._left_for is not None:
            raise SystemExit(REQUEUE_STATUS)

    def _set_end(self, more: Time) -> bool:
        """Let training end ``more`` after this `fit` began, in whichever life; False if another one began after it."""
        state, starts = self.state, self.state.fit_starts
        if self._num_fits >= len(starts):
            state.max_duration = state.timestamp.get(more.unit) + more
        elif not state.stopped:
            state.max_duration = starts[self._num_fits].get(more.unit) + more
        return self._num_fits >= len(starts) - 1

    def _complete(self) -> None:
        """Save and send what the life that finished this training was cut off from."""
        if not self._group.context.resumed:
            return
        try:
            self._group.open(check=False)
            self._go_on()
            self._group.finish("finished")
        except BaseException as error:
            self._group.end_after(error, patient=True)
            raise

    def _train(self) -> None:
        state, engine = self.state, self._engine
        try:
            pace = self._pace = make_pace(self._signals, state, self._group, self._evals)
            self._parallel.ready(state.model, state.device)
            step = TrainStep(state, engine, self._parallel, loss_fn=self._loss_fn, grad_clip_norm=self._grad_clip_norm)
            loop = TrainingLoop(
                state, engine, self.logger, step, self._evaluation(pace), pace, eval_every=self._eval_every,
                schedule_by_batch=self._schedule_by_batch, logs_metrics=self._logs_metrics, saves=self._group.is_due,
            )  # fmt: skip
            engine.run(Event.FIT_START)
            self._go_on()
            if state.ranks.leads and not self._has_stepped:
                live = {"state": {"model": state.model, "optimizers": state.optimizers}}
                loop.checks = first_step_checks(live, *(self._saved or ()))
                loop.checks.append(partial(uncounted, state, self._group, self._evals))
            self._has_stepped, self._saved = True, None
            was_left = state.is_finished and state.dataset_state.stage == "fit_end"
            complete = loop.run()
            if not complete:
                self._left_for = self._signals.received or "another rank"
                if self._guard is not None:
                    self._guard.stop(REQUEUE_STATUS)
                self._group.save_all()
            else:
                if self._guard is not None:
                    self._guard.judge_rest()
                if was_left:  # no other checkpoint says that this is done now
                    self._group.save_all()
                self._group.history.leave()  # what callbacks do at the end takes as long as it takes
                engine.run(Event.FIT_END)
            self._group.finish("finished" if complete else "stopped")
        except BaseException as error:
            if self._group.is_forked:
                raise
            left = self._guard is not None and self._guard.left_for  # for a bad batch, whoever has gone before
            reason = None if left else self._pace.explain(error)
            self._group.end_after(reason or error, patient=not self._signals.impatient)
            if reason is not None:
                raise reason from error
            raise

    def _check_not_left(self) -> None:
        if self._guard is not None and self._guard.left_for:
            raise SessionError(
                f"the guard has ended this training ({self._guard.left_for}): make another Trainer with "
                "autoresume=True, which goes on from before that"
            )

    def _go_on(self) -> None:
        """Be where the checkpoint was saved, with the random numbers of that moment; save what was left out there."""
        if self._generators is not None:
            rng.restore(self._generators)
            self._generators = None
        self._group.make_up()

    @property
    def _evals(self) -> list[When]:
        return [self._eval_every, *(evaluator.every for evaluator in self.state.evaluators.values())]

    def _evaluation(self, pace: StopPolicy, *, subset: int | None = None) -> Evaluation:
        subset = self._eval_subset if subset is None else subset
        return Evaluation(self.state, self._engine, self.logger, pace, loss_fn=self._loss_fn, subset=subset)

    def eval(self, eval_dataloader: Any = None, subset_num_batches: int | None = None) -> dict[str, dict[str, Any]]:
        """Evaluate now; returns the metrics of each loader.

        Args:
            eval_dataloader: other data than the trainer has, which keeps its own.
            subset_num_batches: evaluate on the first so many batches; -1: on all.
        """
        state, other = self.state, evaluators_of(eval_dataloader)
        subset = check_subset(subset_num_batches, "subset_num_batches")
        if not other and not state.eval_dataloaders:
            raise ConfigError("eval() needs eval_dataloader")
        state.show_own_metrics()
        with self._evaluating(other) if other else contextlib.nullcontext():
            labels = list(state.eval_dataloaders)
            self._engine.run(Event.EVAL_STANDALONE_START)
            self._evaluation(StopPolicy(StopSignals()), subset=subset).run()
            self._engine.run(Event.EVAL_STANDALONE_END)
        return {label: state.eval_metric_values[label] for label in labels}

    @contextlib.contextmanager
    def _evaluating(self, other: Mapping[str, Evaluator]) -> Iterator[None]:
        """Have other data for one evaluation, with metrics like those that the trainer has; they stay to be read."""
        state = self.state
        kept = (state.evaluators, state.eval_dataloaders, dict(state.evaluated_at))
        metrics = {
            label: copy.deepcopy(metric_set) for label, metric_set in state.eval_metrics.items() if label in other
        }
        new = {label: evaluator for label, evaluator in other.items() if label not in metrics}
        given = self._eval_metrics if new else None
        metrics.update(eval_metric_sets(copy.deepcopy(given), state.model, new, with_loss=self._loss_fn is not None))
        for metric_set in metrics.values():
            move_metrics(metric_set, state.device)
        state.own_eval_metrics, state.eval_metrics = state.eval_metrics, {**state.eval_metrics, **metrics}
        state.evaluators = dict(other)
        state.eval_dataloaders = {label: evaluator.dataloader for label, evaluator in other.items()}
        try:
            yield
        finally:
            state.evaluators, state.eval_dataloaders, state.evaluated_at = kept
            for label in other:  # a checkpoint of this moment must not record what came of other data
                state.evaluated_at.pop(label, None)

    # -- checkpoints

    @property
    def saved_checkpoints(self) -> list[str]:
        """Paths of the checkpoints there are, in the order they were saved, as the folder was spelt."""
        return [path for saver in self._savers for path in saver.saved_checkpoints]

    def save_checkpoint(self, name: str = "ep{epoch}-ba{batch}-rank{rank}", *, weights_only: bool = False) -> str:
        """Save now, at any path; durable on return. Returns the path."""
        return save_checkpoint(self.state, name, weights_only=weights_only)

    def save_checkpoint_to_save_folder(self) -> None:
        """Save now with the first saver, once for one batch; durable on return.

        Raises:
            ConfigError: there is no saver.
            HoldfastError: the save failed.
        """
        if not self._savers:
            raise ConfigError("save_checkpoint_to_save_folder() needs save_folder, or a CheckpointSaver in callbacks")
        self._check_not_left()
        self._group.open()
        self._group.save_first()

    def close(self) -> None:
        """Finish what is being saved, give everything back; idempotent."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._group.leave(error)
        finally:
            self._finalizer.detach()
            self._group.abandon()
            self._engine.close()


def _give_up(group: SaverGroup, engine: EventEngine, process: int) -> None:
    """Close what a trainer had that nobody closed before it was gone, or before the process ended."""
    group.abandon()
    for uploader in group.context.uploaders:
        uploader.abandon()
    if os.getpid() == process:  # what a forked child has of loggers is its parent's to write
        engine.close()


def _keys(given: Any) -> Iterable[Any]:
    return given if isinstance(given, Mapping) else ()
