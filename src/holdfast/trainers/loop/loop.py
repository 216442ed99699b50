"""The loop of training itself: epochs and batches, and the events between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

from ...errors import ConfigError
from ...state.data import ResumableBatches
from .data import num_tokens, to_device
from .engine import Engine
from .events import Event
from .intervals import Every
from .loggers import Logger
from .metrics import computed
from .pace import Pace
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
        pace: keeps the clock, and says when the loop is left after the current batch.
        saves: tells whether a saver is due at an event.
    """

    def __init__(
        self, state: State, engine: Engine, logger: Logger, step: TrainStep, evaluation: Evaluation, pace: Pace, *,
        eval_every: Every, schedule_by_batch: bool, saves: Callable[[Event], bool],
    ) -> None:  # fmt: skip
        self._state, self._engine, self._logger = state, engine, logger
        self._step, self._evaluation, self._pace = step, evaluation, pace
        self._eval_every, self._schedule_by_batch, self._saves = eval_every, schedule_by_batch, saves
        self._evaluated_at = -1

    def run(self) -> bool:
        """Train; False if it was left early because it was asked to stop."""
        state = self._state
        stage, state.dataset_state.stage = state.dataset_state.stage, ""
        state.model.train()
        if state.timestamp.count("batch"):  # torch warns of a scheduler that steps before the optimizer ever has
            for optimizer in state.optimizers:
                optimizer._opt_called = True  # type: ignore[attr-defined]
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
        source = iter(batches)
        self._pace.begin()
        while True:
            engine.run(Event.BEFORE_DATALOADER)
            batch = self._next(source, batches)
            if batch is _END:
                break
            state.batch = to_device(batch, state.device)
            engine.run(Event.AFTER_DATALOADER)
            engine.run(Event.BATCH_START)
            self._step.run()
            if self._schedule_by_batch:
                self._step_schedulers()
            samples, tokens = self._counts(batches, batches.samples - before)
            before = batches.samples
            state.previous_timestamp = state.timestamp
            state.timestamp = state.timestamp.to_next_batch(samples, tokens, timedelta(seconds=self._pace.lap()))
            self._logger.log_metrics({"loss/train/total": state.loss})
            engine.run(Event.BATCH_END)
            if self._eval_due(Event.BATCH_CHECKPOINT) and not self._evaluated("batch_eval"):
                return False
            if not self._after_batch():
                return False
            if state.is_finished:
                return True
        if state.timestamp.count("batch_in_epoch") == 0:
            raise ConfigError(
                f"the training data gave no batch in epoch {epoch}: training would never end (a generator can be gone "
                "through once: give a DataLoader, or an object with __iter__)"
            )
        return self._end_epoch()

    def _next(self, source: Iterator[Any], batches: ResumableBatches) -> Any:
        """Draw a batch; all ranks have one, or none."""
        batch, ranks = next(source, _END), self._state.ranks
        if ranks.world_size > 1 and batches.kind != "map":
            (count,) = ranks.sum([float(batch is not _END)])
            if 0 < count < ranks.world_size:
                raise ConfigError(
                    f"the training data of {ranks.world_size - count:.0f} rank(s) have ended, {count:.0f} have more: "
                    "ranks train in step, so their loaders have to give equally many batches"
                )
        return batch

    def _counts(self, batches: ResumableBatches, samples: int) -> tuple[int, int]:
        """Return samples and tokens of the batch of all ranks."""
        tokens, ranks = num_tokens(self._state.batch), self._state.ranks
        if ranks.world_size > 1 and (tokens or batches.kind != "map"):
            found = ranks.sum([samples / ranks.world_size, tokens])
            samples, tokens = samples if batches.kind == "map" else round(found[0]), round(found[1])
        return samples, tokens

    def _end_epoch(self) -> bool:
        state, engine = self._state, self._engine
        if not self._schedule_by_batch:
            self._step_schedulers()
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_epoch()
        if state.train_metrics:
            state.train_metric_values = computed(state.train_metrics, state.ranks)
            values = {f"metrics/train/{name}": value for name, value in state.train_metric_values.items()}
            self._logger.log_metrics(values)
        engine.run(Event.EPOCH_END)
        if self._eval_due(Event.EPOCH_CHECKPOINT) and not self._evaluated("epoch_eval"):
            return False
        return self._after_epoch()

    def _after_batch(self) -> bool:
        self._engine.run(Event.BATCH_CHECKPOINT)
        return not self._pace.stopping

    def _after_epoch(self) -> bool:
        self._engine.run(Event.EPOCH_CHECKPOINT)
        return not self._pace.stopping

    def _eval_due(self, event: Event) -> bool:
        """Tell whether to evaluate: when a multiple was crossed, always at the end, and once for one batch."""
        state, every = self._state, self._eval_every
        if not state.eval_dataloaders or self._evaluated_at == state.timestamp.count("batch"):
            return False
        if every.due(event, state.previous_timestamp, state.timestamp, state.span):
            return True
        return event is Event.BATCH_CHECKPOINT and self._saves(event) and self._eval_follows()

    def _eval_follows(self) -> bool:
        """Tell whether this epoch has ended and is evaluated next: what is saved now should have those metrics."""
        state, now, every = self._state, self._state.timestamp, self._eval_every
        if state.num_batches != now.count("batch_in_epoch"):
            return False
        after = now.to_next_epoch()
        return every.due(Event.EPOCH_CHECKPOINT, now, after, state.span)

    def _evaluated(self, stage: str) -> bool:
        """Evaluate; False, and noted in the state, if it was left: then the next life has to do it again."""
        if not self._pace.stopping and self._evaluation.run():
            self._evaluated_at = self._state.timestamp.count("batch")
            return True
        self._state.dataset_state.stage = stage
        return False

    def _step_schedulers(self) -> None:
        for scheduler in self._state.schedulers:
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                raise ConfigError("ReduceLROnPlateau needs a metric: step it in a callback at eval_end, not here")
            scheduler.step()


_END: Any = object()
