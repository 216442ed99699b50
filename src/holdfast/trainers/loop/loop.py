"""The loop of training itself: epochs and batches, and the events between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from ...errors import ConfigError
from .data import num_tokens, to_device
from .engine import Engine
from .events import Event
from .intervals import Every
from .loggers import Logger
from .metrics import computed
from .state import State
from .steps import Evaluation, TrainStep

__all__ = ["TrainingLoop"]


class TrainingLoop:
    """Trains from where the state is until ``state.max_duration``.

    Args:
        state: what trains.
        engine: hears of every event.
        logger: gets the metrics.
        step: trains on one batch.
        evaluation: evaluates.
        eval_every: how often.
        schedule_by_batch: schedulers step after each batch instead of each epoch.
        should_stop: asked between batches; True leaves the loop after the current one.
    """

    def __init__(
        self, state: State, engine: Engine, logger: Logger, step: TrainStep, evaluation: Evaluation, *,
        eval_every: Every, schedule_by_batch: bool, should_stop: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._state, self._engine, self._logger = state, engine, logger
        self._step, self._evaluation = step, evaluation
        self._eval_every, self._schedule_by_batch, self._should_stop = eval_every, schedule_by_batch, should_stop

    def run(self) -> bool:
        """Train; False if it was left early because it was asked to stop."""
        state = self._state
        stage, state.dataset_state.stage = state.dataset_state.stage, ""
        state.model.train()
        if stage == "batch_eval" and not (self._evaluated("batch_eval") and self._after_batch()):
            return False
        if stage == "epoch_eval" and not (self._evaluated("epoch_eval") and self._after_epoch()):
            return False
        while not state.is_finished:
            if not self._epoch():
                return False
        return True

    def _epoch(self) -> bool:
        """Train the rest of the current epoch; False if asked to stop."""
        state, engine = self._state, self._engine
        epoch = state.timestamp.count("epoch")
        if state.timestamp.count("batch_in_epoch") == 0:
            for metric in state.train_metrics.values():
                metric.reset()
            engine.run(Event.EPOCH_START)
        batches = state.dataset_state.open(state.train_dataloader, seed=state.rank_zero_seed, epoch=epoch)
        before = batches.samples
        begun = time.perf_counter()
        source = iter(batches)
        while True:
            engine.run(Event.BEFORE_DATALOADER)
            batch = next(source, _END)
            if batch is _END:
                break
            state.batch = to_device(batch, state.device)
            engine.run(Event.AFTER_DATALOADER)
            engine.run(Event.BATCH_START)
            self._step.run()
            if self._schedule_by_batch:
                self._step_schedulers()
            now = time.perf_counter()
            state.previous_timestamp = state.timestamp
            state.timestamp = state.timestamp.to_next_batch(
                batches.samples - before, num_tokens(state.batch), timedelta(seconds=now - begun)
            )
            before, begun = batches.samples, now
            self._logger.log_metrics({"loss/train/total": state.loss})
            engine.run(Event.BATCH_END)
            if self._eval_due(Event.BATCH_CHECKPOINT) and not self._evaluated("batch_eval"):
                return False
            if not self._after_batch():
                return False
            if state.is_finished:
                return True
        if state.timestamp.count("batch_in_epoch") == 0:
            raise ConfigError(f"the training data gave no batch in epoch {epoch}: training would never end")
        return self._end_epoch()

    def _end_epoch(self) -> bool:
        state, engine = self._state, self._engine
        if not self._schedule_by_batch:
            self._step_schedulers()
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_epoch()
        if state.train_metrics:
            state.train_metric_values = computed(state.train_metrics)
            values = {f"metrics/train/{name}": value for name, value in state.train_metric_values.items()}
            self._logger.log_metrics(values)
        engine.run(Event.EPOCH_END)
        if self._eval_due(Event.EPOCH_CHECKPOINT) and not self._evaluated("epoch_eval"):
            return False
        return self._after_epoch()

    def _after_batch(self) -> bool:
        self._engine.run(Event.BATCH_CHECKPOINT)
        return not self._should_stop()

    def _after_epoch(self) -> bool:
        self._engine.run(Event.EPOCH_CHECKPOINT)
        return not self._should_stop()

    def _eval_due(self, event: Event) -> bool:
        state, every = self._state, self._eval_every
        if not state.eval_dataloaders:
            return False
        return event is every.event and every.crossed(state.previous_timestamp, state.timestamp, state.span)

    def _evaluated(self, stage: str) -> bool:
        """Evaluate; False, and noted in the state, if it was left: then the next life has to do it again."""
        if not self._should_stop() and self._evaluation.run():
            return True
        self._state.dataset_state.stage = stage
        return False

    def _step_schedulers(self) -> None:
        for scheduler in self._state.schedulers:
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                raise ConfigError("ReduceLROnPlateau needs a metric: step it in a callback at eval_end, not here")
            scheduler.step()


_END: Any = object()
