"""The loop of training: epochs and batches, the events between them, one step and one evaluation in a precision."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from enum import Enum
from typing import Any

import torch

from holdfast._log import get_logger
from holdfast.errors import ConfigError
from holdfast.state.data.batches import ResumableBatches, batch_length
from holdfast.state.tree import rng

from .callbacks import EventEngine, Logger
from .data import counts_tokens, microbatches, num_batches, num_tokens, on_device
from .evaluator import DEFAULT, EvaluationShare, LossOfEvaluation, computed
from .parallel import Parallel, clip_gradients, is_sharded
from .state import State
from .stop_policy import StopPolicy
from .time import Event, Every, Timestamp, TimeUnit, When

_LOG = get_logger("trainers.loop")
_END: Any = object()
_EVAL_EVENTS = {"batch_eval": Event.BATCH_CHECKPOINT, "epoch_eval": Event.EPOCH_CHECKPOINT}


class TrainingLoop:
    """Trains from where the state is until ``state.max_duration``.

    Args:
        state: what trains.
        engine: hears of every event.
        logger: gets the metrics.
        step: trains on one batch.
        evaluation: evaluates.
        eval_every: how often; evaluators may have an interval of their own.
        schedule_by_batch: schedulers step after each batch instead of each epoch.
        logs_metrics: metrics of training are logged after each batch, too; the same on all ranks.
        pace: keeps the clock, and says when the loop is left after the current batch.
        saves: tells whether a saver is due at an event.

    Attributes:
        checks: called once after the first batch that is trained; what they give is logged.
    """

    def __init__(
        self,
        state: State,
        engine: EventEngine,
        logger: Logger,
        step: TrainStep,
        evaluation: Evaluation,
        pace: StopPolicy,
        *,
        eval_every: When,
        schedule_by_batch: bool,
        logs_metrics: bool,
        saves: Callable[[Event], bool],
    ) -> None:
        self._state, self._engine, self._logger = state, engine, logger
        self._step, self._evaluation, self._pace = step, evaluation, pace
        self._eval_every, self._schedule_by_batch, self._saves = eval_every, schedule_by_batch, saves
        self._logs_metrics = logs_metrics
        self.checks: list[Callable[[], str]] = []
        self._counted = True  # all ranks know beforehand how many batches an epoch has
        self._before = 0  # samples of the epoch before the batch drawn last
        self._batches: ResumableBatches | None = None  # of the epoch that is trained

    def run(self) -> bool:
        """Train; False if it was left early because it was asked to stop."""
        state = self._state
        state.model.train()
        self._pace.begin()
        if state.timestamp.count("batch"):  # torch warns of a scheduler that steps before the optimizer ever has
            for optimizer in state.optimizers:
                optimizer._opt_called = True  # type: ignore[attr-defined]
        while True:
            try:
                if not self._from_here():
                    return False
                break
            except _ElsewhereError:
                self._batches = None
        ended = [label for label, when in self._whens() if callable(when) and when(state, Event.FIT_END)]
        return not ended or self._evaluated("fit_end", ended)

    def _from_here(self) -> bool:
        """Train from the moment that the state is at to the end; False if asked to stop.

        Raises:
            _ElsewhereError: a callback has loaded another moment.
        """
        state = self._state
        stage, state.dataset_state.stage = state.dataset_state.stage, ""
        if stage in _EVAL_EVENTS:
            event = _EVAL_EVENTS[stage]
            again = self._due(event) or list(state.eval_dataloaders)
            if not (self._evaluated(stage, again) and self._after(event)):
                return False
        while not state.is_finished or (stage and state.is_epoch_over):
            if not self._epoch():
                return False
        return True

    def _tell(self, event: Event) -> None:
        """Run an event between two batches; what a callback loads there is where training goes on.

        Raises:
            _ElsewhereError: a callback has loaded another moment.
        """
        self._engine.run(event)
        if self._has_moved:
            raise _ElsewhereError

    @property
    def _has_moved(self) -> bool:
        return self._batches is not None and not self._state.dataset_state.is_in(self._batches)

    def _epoch(self) -> bool:
        """Train the rest of the current epoch; False if asked to stop."""
        state = self._state
        if state.timestamp.count("batch_in_epoch") == 0:
            for metric in state.train_metrics.values():
                metric.reset()
            self._engine.run(Event.EPOCH_START)
            if self._has_moved and (state.timestamp.count("batch_in_epoch") or state.dataset_state.stage):
                raise _ElsewhereError  # else this epoch begins here, and whoever loads at each begin has done so
        epoch = state.timestamp.count("epoch")
        batches = self._batches = state.dataset_state.open(
            state.train_dataloader, seed=state.rank_zero_seed, epoch=epoch
        )
        self._check_even(batches, epoch)
        source = iter(batches)
        while True:
            self._tell(Event.BEFORE_DATALOADER)
            batch = self._next(source, batches)
            if batch is _END:
                break
            state.batch = on_device(batch, state.train_spec, state.device)
            self._tell(Event.AFTER_DATALOADER)
            self._tell(Event.BATCH_START)
            self._step.run()
            while self.checks:
                if found := self.checks.pop(0)():
                    _LOG.warning(found)
            if self._has_moved:
                raise _refusal("a batch is trained")
            if self._schedule_by_batch:
                self._step_schedulers()
            samples, tokens = self._counts(batches, batches.samples - self._before)
            if not tokens and state.max_duration is not None and state.max_duration.unit is TimeUnit.TOKEN:
                self._check_tokens()
            state.previous_timestamp = state.timestamp
            state.timestamp = state.timestamp.to_next_batch(samples, tokens, timedelta(seconds=self._pace.lap()))
            state.dataset_state.trained()
            state.dataset_state.evaluated.clear()
            self._logger.log_metrics({f"loss/train/{name}": loss for name, loss in self._step.losses.items()})
            if self._logs_metrics and state.train_metrics:
                now = computed(state.train_metrics, state.ranks)
                self._logger.log_metrics({f"metrics/train/{name}": value for name, value in now.items()})
            self._pace.logged()
            self._tell(Event.BATCH_END)
            if (due := self._due(Event.BATCH_CHECKPOINT)) and not self._evaluated("batch_eval", due):
                return False
            if not self._after(Event.BATCH_CHECKPOINT):
                return False
            if state.is_finished:
                if not state.is_epoch_over:
                    return True
                self._next(source, batches)  # this was its last batch; a loader with a state of its own learns of it
                break
        if state.timestamp.count("batch_in_epoch") == 0 and not state.dataset_state.num_left_out:
            raise ConfigError(
                f"the training data gave no batch in epoch {epoch}: training would never end (a generator can be gone "
                "through once: give a DataLoader, or an object with __iter__)"
            )
        return self._end_epoch()

    def _next(self, source: Iterator[Any], batches: ResumableBatches) -> Any:
        """Draw a batch that is to be trained; all ranks have one, or none."""
        ranks, position = self._state.ranks, self._state.dataset_state
        batch, self._before = position.draw(batches, source, _END)
        if ranks.world_size > 1 and not self._counted:
            (count,) = ranks.sum([float(batch is not _END)])
            if 0 < count < ranks.world_size:
                ranks.agree("ended", lambda: batch is _END, _refuse_ended)
        return batch

    def _check_even(self, batches: ResumableBatches, epoch: int) -> None:
        """Refuse an epoch of which ranks have unequal numbers of batches: gradients are exchanged with each of them."""
        ranks, left = self._state.ranks, num_batches(batches) if batches.kind == "map" else None
        if ranks.world_size == 1:
            return
        known, total, squares = ranks.sum([left is not None, left or 0, (left or 0) ** 2])
        self._counted = known == ranks.world_size
        if self._counted and squares * ranks.world_size == total * total:
            return
        if self._counted:
            ranks.agree("batches", lambda: left, lambda counts: _refuse_uneven(counts, epoch))

    def _counts(self, batches: ResumableBatches, samples: int) -> tuple[int, int]:
        """Return samples and tokens of the batch of all ranks."""
        batch, spec, ranks = self._state.batch, self._state.train_spec, self._state.ranks
        counted = spec is not None and spec.get_num_tokens_in_batch is not None
        tokens = int(spec.get_num_tokens_in_batch(batch)) if counted else num_tokens(batch)  # type: ignore[union-attr]
        own, exact = samples / ranks.world_size, batches.kind == "map"
        if spec is not None and spec.get_num_samples_in_batch is not None:
            own, exact = float(spec.get_num_samples_in_batch(batch)), False
        if ranks.world_size > 1 and (tokens or counted or not exact):
            found = ranks.sum([own, tokens])
            return samples if exact else round(found[0]), round(found[1])
        return samples if exact else round(own), tokens

    def _check_tokens(self) -> None:
        """Refuse to train until so many tokens if none are counted: it would never end."""
        if counts_tokens(self._state.batch, self._state.train_spec):
            return
        raise ConfigError(
            f"max_duration={str(self._state.max_duration)!r}, and this batch has no tokens that are counted (the "
            'entries of "input_ids" in a dictionary): training would never end. Give DataSpec(loader, '
            "get_num_tokens_in_batch=...) as train_dataloader, or a duration in batches or samples"
        )

    def _end_epoch(self) -> bool:
        state = self._state
        if not self._schedule_by_batch:
            self._step_schedulers()
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_epoch()
        if state.train_metrics:
            state.train_metric_values = computed(state.train_metrics, state.ranks)
            values = {f"metrics/train/{name}": value for name, value in state.train_metric_values.items()}
            self._logger.log_metrics(values)
        self._tell(Event.EPOCH_END)
        if (due := self._due(Event.EPOCH_CHECKPOINT)) and not self._evaluated("epoch_eval", due):
            return False
        return self._after(Event.EPOCH_CHECKPOINT)

    def _after(self, event: Event) -> bool:
        """Let savers have their turn; False if training has to be left now."""
        self._tell(event)
        if not self._pace.stopping:
            return True
        if self._state.is_finished:  # what comes after the last batch is left to the next life
            self._state.dataset_state.stage = "fit_end"
        return False

    def _whens(self) -> Iterator[tuple[str, When]]:
        for label in self._state.eval_dataloaders:
            of = self._state.evaluators.get(label)
            yield label, self._eval_every if of is None or of.every is DEFAULT else of.every

    def _due(self, event: Event) -> list[str]:
        """Return what to evaluate on: when a multiple was crossed, always at the end, and once for one batch."""
        done = self._state.dataset_state.evaluated
        rest = [(label, when) for label, when in self._whens() if label not in done]
        return [label for label, when in rest if when is not None and self._is_due(when, event)]

    def _is_due(self, when: Every | Callable[[State, Event], bool], event: Event) -> bool:
        state = self._state
        if not isinstance(when, Every):
            return bool(when(state, Event.BATCH_END if event is Event.BATCH_CHECKPOINT else Event.EPOCH_END))
        if when.due(event, state.previous_timestamp, state.timestamp, state.span):
            return True
        return event is Event.BATCH_CHECKPOINT and self._saves(event) and self._eval_follows(when)

    def _eval_follows(self, every: Every) -> bool:
        """Tell whether this epoch has ended and is evaluated next: what is saved now should have those metrics."""
        state, now = self._state, self._state.timestamp
        if not state.is_epoch_over:
            return False
        after = now.to_next_epoch()
        return every.due(Event.EPOCH_CHECKPOINT, now, after, state.span)

    def _evaluated(self, stage: str, labels: Sequence[str]) -> bool:
        """Evaluate; False if it was left.

        That it is still to be done is noted in the state: who goes on from what is saved meanwhile, or from where it
        was left, does it again.
        """
        state = self._state
        state.dataset_state.stage = stage
        if self._pace.stopping or not self._evaluation.run(labels):
            return False
        if self._has_moved:
            raise _refusal("an evaluation goes on")
        state.dataset_state.stage = ""
        state.dataset_state.evaluated.update({label: state.eval_metric_values[label] for label in labels})
        return True

    def _step_schedulers(self) -> None:
        for scheduler in self._state.schedulers:
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                raise ConfigError("ReduceLROnPlateau needs a metric: step it in a callback at eval_end, not here")
            scheduler.step()


class _ElsewhereError(Exception):
    """A callback has loaded another moment, with its place in the data: training goes on from there."""


def _refusal(meanwhile: str) -> ConfigError:
    return ConfigError(
        f"a callback has loaded a whole checkpoint while {meanwhile}, which would mix two moments of training: load it "
        "at BATCH_END, BATCH_CHECKPOINT, EPOCH_START, EPOCH_END or EPOCH_CHECKPOINT, and training goes on from the "
        "moment that was loaded; or load weights alone (load_weights_only=True)"
    )


def _refuse_uneven(counts: list[int], epoch: int) -> None:
    listed = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
    raise ConfigError(
        f"the training data of epoch {epoch} give ranks unequal numbers of batches ({listed}): ranks train in step, so "
        "give all of them equally many (the same data set and batch size on every rank, drop_last alike)"
    )


def _refuse_ended(ended: list[bool]) -> None:
    gone = ", ".join(str(rank) for rank, has_ended in enumerate(ended) if has_ended)
    more = ", ".join(str(rank) for rank, has_ended in enumerate(ended) if not has_ended)
    raise ConfigError(
        f"the training data of rank {gone} have ended, rank {more} has more: ranks train in step, so their loaders "
        "have to give equally many batches"
    )


class _Model:
    """How outputs and loss come out of a model: by its own ``loss``, or by ``loss_fn``."""

    def __init__(self, state: State, loss_fn: Callable[..., Any] | None, parallel: Parallel) -> None:
        self._state, self._loss_fn, self._parallel = state, loss_fn, parallel
        if loss_fn is None and not callable(getattr(state.model, "loss", None)):
            raise ConfigError(
                f"{type(state.model).__name__} has no method loss(outputs, batch): write one, or pass "
                "loss_fn=function(outputs, targets)"
            )

    def forward(self, batch: Any) -> Any:
        model = self._parallel.callable(self._state.model)
        return model(batch if self._loss_fn is None else _inputs_of(batch))

    def loss(self, outputs: Any, batch: Any) -> Any:
        if self._loss_fn is None:
            return self._state.model.loss(outputs, batch)  # type: ignore[operator]
        return self._loss_fn(outputs, _targets_of(batch))


class TrainStep:
    """Everything between a batch and changed weights.

    Attributes:
        losses: of the last batch, over all ranks: "total", and the others of a model whose loss is a dictionary.
    """

    def __init__(
        self,
        state: State,
        engine: EventEngine,
        parallel: Parallel,
        *,
        loss_fn: Callable[..., Any] | None,
        grad_clip_norm: float | None,
    ) -> None:
        self._state, self._engine, self._clip = state, engine, grad_clip_norm
        self._model, self._parallel = _Model(state, loss_fn, parallel), parallel
        self._parts: dict[Any, Any] = {}
        self.losses: dict[str, Any] = {}

    def run(self) -> None:
        """Train on ``state.batch``: the optimizers step once, however many parts the batch is split into."""
        state, engine = self._state, self._engine
        engine.run(Event.BEFORE_TRAIN_BATCH)
        for optimizer in state.optimizers:
            optimizer.zero_grad()
        whole, spec = state.batch, state.train_spec
        total: Any = None
        self._parts = {}
        parts = microbatches(whole, state.grad_accum, None if spec is None else spec.split_batch)
        for number, (part, share) in enumerate(parts, 1):
            state.batch = (
                part if spec is None or spec.microbatch_transforms is None else spec.microbatch_transforms(part)
            )
            with self._parallel.gathering(last=number == len(parts)):
                loss = self._forward_backward(share)
            total = loss if total is None else total + loss
        state.batch, mean = whole, state.ranks.mean(total)
        self._step()
        self._parallel.settle(state.model)
        state.loss = mean()
        self.losses = {"total": state.loss}
        for name, value in sorted(self._parts.items()):
            self.losses.setdefault(str(name), state.ranks.mean(value)())
        engine.run(Event.AFTER_TRAIN_BATCH)

    def _forward_backward(self, share: float) -> Any:
        """Run forward and backward of one part; returns its share of the loss, detached."""
        state, engine, scaler = self._state, self._engine, self._state.scaler
        with _autocast(state.precision, state.device):
            engine.run(Event.BEFORE_FORWARD)
            state.outputs = self._model.forward(state.batch)
            engine.run(Event.AFTER_FORWARD)
            engine.run(Event.BEFORE_LOSS)
            state.loss = self._model.loss(state.outputs, state.batch)
            engine.run(Event.AFTER_LOSS)
        engine.run(Event.BEFORE_BACKWARD)
        loss = _total(state.loss)
        if isinstance(state.loss, Mapping):
            for name, value in state.loss.items():
                if isinstance(value, torch.Tensor):
                    self._parts[name] = self._parts.get(name, 0.0) + value.detach() * share
        loss = loss if share == 1.0 else loss * share
        (loss if scaler is None else scaler.scale(loss)).backward()
        engine.run(Event.AFTER_BACKWARD)
        if state.train_metrics:
            with torch.no_grad():
                _update_metrics(state, state.train_metrics)
        return loss.detach()

    def _step(self) -> None:
        state, scaler = self._state, self._state.scaler
        self._parallel.average()
        if self._clip is not None:
            if scaler is not None:
                for optimizer in state.optimizers:
                    scaler.unscale_(optimizer)
            clip_gradients(state.model, self._clip)
        for optimizer in state.optimizers:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()


class Evaluation:
    """Goes through the evaluation data. Leaves all generators, and the mode of the model, as they were."""

    def __init__(
        self,
        state: State,
        engine: EventEngine,
        logger: Logger,
        pace: StopPolicy,
        *,
        loss_fn: Callable[..., Any] | None,
        subset: int | None = None,
    ) -> None:
        self._state, self._engine, self._logger, self._pace = state, engine, logger, pace
        self._loss_fn, self._subset = loss_fn, subset

    def run(self, labels: Sequence[str] | None = None) -> bool:
        """Evaluate on the loaders of these labels, or on all; False if it was left because training has to stop."""
        state = self._state
        kept = (state.batch, state.outputs, state.dataloader_label)
        training, generators = state.model.training, rng.capture()
        state.model.eval()
        try:
            with torch.no_grad(), self._other_weights(generators):
                done = all(
                    self._evaluate_on(label, loader)
                    for label, loader in state.eval_dataloaders.items()
                    if labels is None or label in labels
                )
        finally:
            rng.restore(generators)
            state.model.train(training)
            state.batch, state.outputs, state.dataloader_label = kept
        return done

    @contextlib.contextmanager
    def _other_weights(self, generators: Mapping[str, Any]) -> Iterator[None]:
        """Let algorithms exchange the weights; a save meanwhile finds those of training, and its ``generators``."""
        state, engine, before = self._state, self._engine, self._state.as_in_training

        @contextlib.contextmanager
        def as_in_training() -> Iterator[None]:
            now = rng.capture()
            engine.run_algorithms(Event.EVAL_AFTER_ALL)
            rng.restore(generators)
            try:
                yield
            finally:
                engine.run_algorithms(Event.EVAL_BEFORE_ALL)
                rng.restore(now)

        state.as_in_training = as_in_training
        try:
            engine.run(Event.EVAL_BEFORE_ALL)
        except BaseException:
            engine.run_algorithms(Event.EVAL_AFTER_ALL)
            state.as_in_training = before
            raise
        try:
            yield
        finally:
            state.as_in_training = before
            engine.run(Event.EVAL_AFTER_ALL)

    def _evaluate_on(self, label: str, loader: Any) -> bool:
        state, engine = self._state, self._engine
        metrics = state.eval_metrics.get(label, {})
        state.dataloader_label = label
        for metric in metrics.values():
            metric.reset()
        state.eval_timestamp = Timestamp()
        engine.run(Event.EVAL_START)
        share, samples = EvaluationShare(loader, state.ranks, together=is_sharded(state.model)), 0
        prepare = self._preparation(label)
        for batch, counts in itertools.islice(share, self._limit(label)):
            if share.even:
                self._pace.look()
            if self._pace.stopping:
                return False
            if counts:
                samples += self._batch(prepare(batch), metrics)
            elif batch is not None:  # the other ranks go through the model now, and need ours
                self._forward(prepare(batch))
        values = computed(metrics, state.ranks, samples=samples)
        state.eval_metric_values[label], state.evaluated_at[label] = values, state.timestamp.count("batch")
        self._logger.log_metrics({f"metrics/{label}/{name}": value for name, value in values.items()})
        engine.run(Event.EVAL_END)
        return True

    def _limit(self, label: str) -> int | None:
        of = self._state.evaluators.get(label)
        limit = of.subset_num_batches if of is not None and of.subset_num_batches is not None else self._subset
        return None if limit == -1 else limit

    def _preparation(self, label: str) -> Callable[[Any], Any]:
        """Return what is done to a batch before the model gets it."""
        of, device = self._state.evaluators.get(label), self._state.device
        spec = None if of is None else of.spec
        return lambda batch: on_device(batch, spec, device, part=True)

    def _batch(self, batch: Any, metrics: Mapping[str, Any]) -> int:
        """Evaluate on one batch; returns how many samples it has."""
        state, engine = self._state, self._engine
        state.batch = batch
        engine.run(Event.EVAL_BATCH_START)
        with _autocast(state.precision, state.device):
            engine.run(Event.EVAL_BEFORE_FORWARD)
            state.outputs = self._forward(batch)
            engine.run(Event.EVAL_AFTER_FORWARD)
            self._add_loss(metrics)
        _update_metrics(state, metrics)
        length = batch_length(batch)
        state.eval_timestamp = state.eval_timestamp.to_next_batch(length)
        engine.run(Event.EVAL_BATCH_END)
        return length

    def _forward(self, batch: Any) -> Any:
        model = self._state.model
        if callable(getattr(model, "eval_forward", None)):
            return model.eval_forward(batch)  # type: ignore[operator]
        return model(batch) if self._loss_fn is None else model(_inputs_of(batch))

    def _add_loss(self, metrics: Mapping[str, Any]) -> None:
        """Average the loss as well, where it is known how it is made."""
        kept = metrics.get("loss")
        if self._loss_fn is not None and isinstance(kept, LossOfEvaluation):
            targets = _targets_of(self._state.batch)
            kept.add(_total(self._loss_fn(self._state.outputs, targets)), batch_length(self._state.batch))


def _update_metrics(state: State, metrics: Mapping[str, Any]) -> None:
    """Show the current batch to every metric, the model's own way if it has one."""
    own = getattr(state.model, "update_metric", None)
    for metric in metrics.values():
        if callable(own):
            own(state.batch, state.outputs, metric)
        else:
            metric.update(state.outputs, _targets_of(state.batch))


def _total(loss: Any) -> Any:
    """Return what is minimised: the loss, its "total", or the sum of its parts."""
    if isinstance(loss, Mapping):
        return loss["total"] if "total" in loss else sum(loss.values())
    return sum(loss) if isinstance(loss, (list, tuple)) else loss


def _inputs_of(batch: Any) -> Any:
    """Return what the model takes: the first part of a pair, the whole of anything else."""
    return batch[0] if isinstance(batch, (list, tuple)) and len(batch) == 2 else batch


def _targets_of(batch: Any) -> Any:
    """Return what outputs are compared with: the second part of a pair, "labels" or "targets" of a dictionary."""
    if isinstance(batch, (list, tuple)) and len(batch) == 2:
        return batch[1]
    if isinstance(batch, Mapping):
        for name in ("labels", "targets", "target", "label"):
            if name in batch:
                return batch[name]
    return batch


class Precision(str, Enum):
    """How forward and loss are computed; the value is what ``precision`` of a trainer takes, too."""

    FP32 = "fp32"
    AMP_BF16 = "amp_bf16"
    AMP_FP16 = "amp_fp16"


_DTYPES = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}
_ALIASES = {None: "fp32", "amp": "amp_fp16", "bf16": "amp_bf16", "fp16": "amp_fp16"}


def check_precision(precision: Any) -> str:
    """Return the name of a precision.

    Raises:
        ConfigError: it is unknown.
    """
    value = getattr(precision, "value", precision)
    name = _ALIASES.get(value, value) if value is None or isinstance(value, str) else ""
    if name != "fp32" and name not in _DTYPES:
        raise ConfigError(f"precision={precision!r}: use 'fp32', 'amp_bf16' or 'amp_fp16'")
    return str(name)


def _autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context that forward and loss run in."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=_DTYPES[precision])


def make_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """Return a scaler of gradients where they would underflow (float16)."""
    return torch.amp.GradScaler(device.type) if precision == "amp_fp16" else None
