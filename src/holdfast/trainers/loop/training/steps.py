"""One batch of training, and one evaluation, in the precision that the trainer was given."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from holdfast.errors import ConfigError
from holdfast.state.data.batches import batch_length
from holdfast.state.data.loaders import clone_of
from holdfast.state.data.order import knows_its_rank
from holdfast.state.data.seeding import generators_kept, seed_all
from holdfast.state.tree import rng

from ..callbacks import EventEngine, Logger
from ..state import State
from ..time import Event, Timestamp
from .data import microbatches, on_device
from .metrics import Averaged, computed
from .parallel import Parallel, clip_gradients, is_sharded
from .ranks import Ranks
from .save_policy import StopPolicy

__all__ = ["Evaluation", "EvaluationShare", "Precision", "TrainStep", "check_precision", "make_scaler", "targets_of"]


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
        return model(batch if self._loss_fn is None else inputs_of(batch))

    def loss(self, outputs: Any, batch: Any) -> Any:
        if self._loss_fn is None:
            return self._state.model.loss(outputs, batch)  # type: ignore[operator]
        return self._loss_fn(outputs, targets_of(batch))


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
                update_metrics(state, state.train_metrics)
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
        update_metrics(state, metrics)
        length = batch_length(batch)
        state.eval_timestamp = state.eval_timestamp.to_next_batch(length)
        engine.run(Event.EVAL_BATCH_END)
        return length

    def _forward(self, batch: Any) -> Any:
        model = self._state.model
        if callable(getattr(model, "eval_forward", None)):
            return model.eval_forward(batch)  # type: ignore[operator]
        return model(batch) if self._loss_fn is None else model(inputs_of(batch))

    def _add_loss(self, metrics: Mapping[str, Any]) -> None:
        """Average the loss as well, where it is known how it is made."""
        kept = metrics.get("loss")
        if self._loss_fn is not None and isinstance(kept, LossOfEvaluation):
            targets = targets_of(self._state.batch)
            kept.add(_total(self._loss_fn(self._state.outputs, targets)), batch_length(self._state.batch))


class LossOfEvaluation(Averaged):
    """The mean loss of an evaluation; filled by `Evaluation`, not by outputs and targets."""

    def __init__(self) -> None:
        super().__init__(lambda outputs, targets: 0.0)

    def update(self, outputs: Any, targets: Any) -> None:
        """Do nothing: the loss was added already."""


def update_metrics(state: State, metrics: Mapping[str, Any]) -> None:
    """Show the current batch to every metric, the model's own way if it has one."""
    own = getattr(state.model, "update_metric", None)
    for metric in metrics.values():
        if callable(own):
            own(state.batch, state.outputs, metric)
        else:
            metric.update(state.outputs, targets_of(state.batch))


def _total(loss: Any) -> Any:
    """Return what is minimised: the loss, its "total", or the sum of its parts."""
    if isinstance(loss, Mapping):
        return loss["total"] if "total" in loss else sum(loss.values())
    return sum(loss) if isinstance(loss, (list, tuple)) else loss


def inputs_of(batch: Any) -> Any:
    """Return what the model takes: the first part of a pair, the whole of anything else."""
    return batch[0] if isinstance(batch, (list, tuple)) and len(batch) == 2 else batch


def targets_of(batch: Any) -> Any:
    """Return what outputs are compared with: the second part of a pair, "labels" or "targets" of a dictionary."""
    if isinstance(batch, (list, tuple)) and len(batch) == 2:
        return batch[1]
    if isinstance(batch, Mapping):
        for name in ("labels", "targets", "target", "label"):
            if name in batch:
                return batch[name]
    return batch


class EvaluationShare:
    """The batches of one evaluation on this rank.

    Yields (batch, whether it counts). Where there are fewer batches left than ranks, those that have none get None, or,
    with ``together``, a batch of others that does not count.

    Args:
        loader: batches; a loader that splits itself over the ranks, or that cannot be split, is used as it is.
        ranks: the processes that evaluate.
        together: all ranks have to go through the model equally often.

    Attributes:
        even: all ranks make equally many rounds.

    Example:
        >>> [batch.tolist() for batch, _ in Share(DataLoader(range(5), batch_size=2), Ranks(), together=False)]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(self, loader: Any, ranks: Ranks, *, together: bool) -> None:
        self._loader, self._ranks, self._together = loader, ranks, together
        self._dealt = ranks.world_size > 1 and _can_be_dealt(loader)
        self.even = self._dealt or ranks.world_size == 1

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        if not self._dealt:
            for batch in self._loader:
                yield batch, True
            return
        loader, feed = clone_of(self._loader, seeded=False)
        with generators_kept():
            seed_all(0)  # whatever is drawn for the order is the same on all ranks
            every = list(loader_keys(self._loader))
        size, mine = self._ranks.world_size, self._ranks.rank
        rounds = -(-len(every) // size)
        numbers = [mine + size * number for number in range(rounds)]
        filled = [number % len(every) for number in numbers if number < len(every) or self._together]
        feed.source = (every[number] for number in filled)
        for number, batch in itertools.zip_longest(numbers, loader):
            yield batch, number < len(every)


def loader_keys(loader: DataLoader[Any]) -> Any:
    """Return the sampler that says what a loader draws: batches, or samples where nothing batches."""
    return loader.batch_sampler if loader.batch_sampler is not None else loader.sampler


def _can_be_dealt(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
        and not callable(getattr(loader, "state_dict", None))
        and not knows_its_rank(loader.sampler, loader.batch_sampler)
    )


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
