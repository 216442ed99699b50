"""How a training is measured: on which data (`Evaluator`), each rank's share of it, and by which metrics.

Metrics are torchmetrics objects as they are, or plain functions, averaged over samples.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from holdfast.checkpointer.metrics import plain_metrics
from holdfast.errors import ConfigError
from holdfast.state.data.loaders import clone_of, is_map_loader
from holdfast.state.data.order import knows_its_rank
from holdfast.state.data.seeding import generators_kept, seed_all
from holdfast.state.tree.objects import is_metric

from .arguments import check_loader
from .data import DataSpec
from .parallel import Ranks
from .time import When, parse_when

if TYPE_CHECKING:
    from .state import State

DEFAULT: Any = object()
"""Stands for the interval that the trainer has for all evaluators."""


class Evaluator:
    """Data to evaluate on, under a label, with an interval and a choice of metrics of their own.

    Args:
        label: of the metrics: "metrics/{label}/accuracy".
        dataloader: batches, or a `DataSpec`.
        metric_names: which of the model's metrics (``get_metrics(is_train=False)``) or of ``eval_metrics``; each is a
            regular expression that a name has to begin with.
        subset_num_batches: evaluate on the first so many batches (of each rank); -1: on all; None: as the trainer
            says.
        eval_interval: as the argument of the trainer, which decides where this is None.
        device_eval_microbatch_size: not here; evaluations take whole batches.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(
        self,
        *,
        label: str,
        dataloader: Any,
        metric_names: Sequence[str] | None = None,
        subset_num_batches: int | None = None,
        eval_interval: Any = None,
        device_eval_microbatch_size: None = None,
    ) -> None:
        if not isinstance(label, str) or not label or label == "train":
            raise ConfigError(f"Evaluator(label={label!r}): give a name, other than 'train'")
        if device_eval_microbatch_size is not None:
            raise ConfigError(
                f"Evaluator(device_eval_microbatch_size={device_eval_microbatch_size!r}): evaluations take whole "
                "batches; give the loader a smaller batch_size"
            )
        if metric_names is not None and (
            isinstance(metric_names, str) or not all(isinstance(name, str) for name in metric_names)
        ):
            raise ConfigError(f"Evaluator(metric_names={metric_names!r}): give a list of names")
        self.label = label
        self.spec = as_spec(dataloader, f"Evaluator({label!r}, dataloader)")
        self.metric_names = None if metric_names is None else list(metric_names)
        self.subset_num_batches = check_subset(subset_num_batches, "Evaluator(subset_num_batches)")
        what = f"Evaluator({label!r}, eval_interval)"
        self.every: When = DEFAULT if eval_interval is None else parse_when(eval_interval, what)

    @property
    def dataloader(self) -> Any:
        """The batches."""
        return self.spec.dataloader

    def chosen(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of ``metrics`` that this evaluator has.

        Raises:
            ConfigError: no metric has any of the names.
        """
        if self.metric_names is None:
            return dict(metrics)
        for wanted in self.metric_names:
            if not any(re.match(wanted, name) for name in metrics):
                raise ConfigError(
                    f"Evaluator({self.label!r}, metric_names): no metric is called {wanted!r}; there are "
                    f"{', '.join(sorted(metrics)) or 'none'}"
                )
        return {
            name: metric for name, metric in metrics.items() if any(re.match(kept, name) for kept in self.metric_names)
        }


def check_subset(value: Any, what: str) -> int | None:
    """Return how many batches of an evaluation are taken; -1 for all.

    Raises:
        ConfigError: it is no such number.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value == 0 or value < -1):
        raise ConfigError(f"{what}={value!r}: give a number of batches, or -1 for all")
    return value


def as_spec(given: Any, what: str) -> DataSpec:
    """Return data as a `DataSpec`.

    Raises:
        ConfigError: it is no data, or several loaders.
    """
    if isinstance(given, DataSpec):
        return given
    if isinstance(given, Mapping) and "dataloader" in given:
        try:
            return DataSpec(**given)
        except TypeError as error:
            raise ConfigError(f"{what}: {error}") from None
    if isinstance(given, Evaluator) or _are_loaders(given):
        raise ConfigError(f"{what} is a {type(given).__name__} of loaders: give one of them")
    return DataSpec(check_loader(given, what))


def _is_loader(value: Any) -> bool:
    """Tell a loader from a batch: neither a tensor nor a plain container."""
    if isinstance(value, (torch.Tensor, Mapping, list, tuple, str, bytes, int, float)) or hasattr(value, "__array__"):
        return False
    return isinstance(value, (DataLoader, DataSpec, Evaluator)) or hasattr(value, "__iter__")


def _are_loaders(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and any(map(_is_loader, given))


def evaluators_of(given: Any) -> dict[str, Evaluator]:
    """Return the evaluation data by label: a single loader is "eval", further ones "eval-1", ...

    Raises:
        ConfigError: an entry is no data; two entries have the same label.
    """
    if given is None:
        return {}
    what = "eval_dataloader"
    if isinstance(given, Mapping) and "dataloader" not in given:
        labelled = {
            label: data
            if isinstance(data, Evaluator)
            else Evaluator(label=label, dataloader=as_spec(data, f"{what}[{label!r}]"))
            for label, data in given.items()
        }
        return {evaluator.label: evaluator for evaluator in labelled.values()}
    if isinstance(given, tuple) and given and not any(map(_is_loader, given)):
        raise ConfigError(f"{what} is a tuple of {type(given[0]).__name__}: give a loader, or several of them")
    found: dict[str, Evaluator] = {}
    for number, data in enumerate(given if _are_loaders(given) else [given]):
        if _are_loaders(given) and not _is_loader(data):
            raise ConfigError(f"{what}[{number}] is a {type(data).__name__}: give a loader, as the others are")
        evaluator = data
        if not isinstance(data, Evaluator):
            label = f"eval-{number}" if number else "eval"
            evaluator = Evaluator(label=label, dataloader=as_spec(data, what))
        if evaluator.label in found:
            raise ConfigError(f"{what}: two evaluators are called {evaluator.label!r}: give each a label of its own")
        found[evaluator.label] = evaluator
    return found


class Averaged:
    """The mean over all samples of a function of (outputs, targets)."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self.function = function
        self.total: Any = 0.0
        self.samples = 0

    def update(self, outputs: Any, targets: Any) -> None:
        """Add one batch."""
        value = self.function(outputs, targets)
        self.add(value, len(targets) if hasattr(targets, "__len__") else 1)

    def add(self, value: Any, samples: int) -> None:
        """Add a mean over ``samples``; tensors stay on their device."""
        value = value.detach().double() if isinstance(value, torch.Tensor) else float(value)
        self.total = self.total + value * samples
        self.samples += samples

    def compute(self) -> Any:
        """Return the mean so far; nan without samples."""
        return self.total / self.samples if self.samples else float("nan")

    def reset(self) -> None:
        """Forget everything."""
        self.total, self.samples = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return sum and count."""
        return {"total": self.total, "samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the sum and count of an earlier life."""
        self.total, self.samples = state["total"], state["samples"]


def as_metrics(given: Any, what: str) -> dict[str, Any]:
    """Turn what users pass (one metric, a list, a mapping) into named metric objects.

    Raises:
        ConfigError: something is neither a metric nor a function.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        named = dict(given)
    else:
        every = list(given) if isinstance(given, Sequence) else [given]
        named = {}
        for metric in every:
            name = base = getattr(metric, "__name__", type(metric).__name__)
            number = 1
            while name in named:
                name, number = f"{base}-{number}", number + 1
            named[name] = metric
    return {str(name): _as_metric(metric, f"{what}[{name!r}]") for name, metric in named.items()}


def _as_metric(given: Any, what: str) -> Any:
    if all(callable(getattr(given, name, None)) for name in ("update", "compute", "reset")):
        return given
    if callable(given):
        return Averaged(given)
    raise ConfigError(
        f"{what} is a {type(given).__name__}: give a torchmetrics metric or a function (outputs, targets)"
    )


def computed(metrics: Mapping[str, Any], ranks: Ranks, *, samples: int = 1) -> dict[str, Any]:
    """Return the current value of each metric over all ranks; a collection gives one for each of its own.

    Args:
        metrics: by name. Those of torchmetrics ask the other ranks themselves.
        ranks: the processes that train.
        samples: how many this rank has shown to them: the weight of a value of a kind that nobody knows.
    """
    values: dict[str, Any] = {}
    for name, metric in metrics.items():
        value = metric.compute()
        if ranks.world_size > 1 and not is_metric(metric):
            value = _over_ranks(metric, value, ranks, samples)
        if isinstance(value, Mapping):
            values.update({str(inner): number for inner, number in value.items()})
        else:
            values[name] = value
    return values


def _over_ranks(metric: Any, value: Any, ranks: Ranks, samples: int) -> Any:
    if isinstance(metric, Averaged):
        total, count = ranks.sum([float(metric.total), metric.samples])
        return total / count if count else float("nan")
    own = dict(value) if isinstance(value, Mapping) else {"": value}
    numbers = {name: float(entry) for name, entry in own.items() if _is_number(entry)}
    weighted = [number * samples if samples else 0.0 for number in numbers.values()]
    *sums, whole = ranks.sum([*weighted, samples])
    if whole:
        own.update(zip(numbers, (total / whole for total in sums), strict=True))
    return own if isinstance(value, Mapping) else own[""]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def move_metrics(metrics: Mapping[str, Any], device: torch.device) -> None:
    """Put the metrics that live on a device onto ``device``."""
    for metric in metrics.values():
        if callable(getattr(metric, "to", None)):
            metric.to(device)


def metrics_of(state: State) -> dict[str, Any]:
    """Return the metrics that a checkpoint records, as plain numbers; of an evaluation only those of these weights."""
    now = state.timestamp.count("batch")
    evaluated = {label: values for label, values in state.eval_metric_values.items() if values}
    found: dict[str, Any] = {
        label: values for label, values in evaluated.items() if state.evaluated_at.get(label) == now
    }
    if state.train_metric_values:
        found["train"] = state.train_metric_values
    if state.loss is not None and not isinstance(state.loss, (list, tuple)):
        found["loss"] = state.loss
    return plain_metrics(found)


class LossOfEvaluation(Averaged):
    """The mean loss of an evaluation; filled by `Evaluation`, not by outputs and targets."""

    def __init__(self) -> None:
        super().__init__(lambda outputs, targets: 0.0)

    def update(self, outputs: Any, targets: Any) -> None:
        """Do nothing: the loss was added already."""


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
        >>> loader = DataLoader(range(5), batch_size=2)
        >>> [batch.tolist() for batch, _ in EvaluationShare(loader, Ranks(), together=False)]
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
        clone = clone_of(self._loader, seeded=False)
        with generators_kept():
            seed_all(0)  # whatever is drawn for the order is the same on all ranks
            keys = self._loader.batch_sampler  # samples where nothing batches
            every = list(keys if keys is not None else self._loader.sampler)
        size, mine = self._ranks.world_size, self._ranks.rank
        rounds = -(-len(every) // size)
        numbers = [mine + size * number for number in range(rounds)]
        filled = [number % len(every) for number in numbers if number < len(every) or self._together]
        clone.feed.source = (every[number] for number in filled)
        for number, batch in itertools.zip_longest(numbers, clone.loader):
            yield batch, number < len(every)


def _can_be_dealt(loader: Any) -> bool:
    return (
        is_map_loader(loader)
        and not callable(getattr(loader, "state_dict", None))
        and not knows_its_rank(loader.sampler, loader.batch_sampler)
    )


def eval_metric_sets(
    given: Any, model: Any, evaluators: Mapping[str, Evaluator], *, with_loss: bool
) -> dict[str, dict[str, Any]]:
    """Return a set of metrics for each evaluator.

    Args:
        given: metrics for all of them, or by label.
        model: asked for its own where none are given (``get_metrics(is_train=False)``).
        evaluators: by label.
        with_loss: average the loss, too.
    """
    import copy

    if given is None and callable(getattr(model, "get_metrics", None)):
        given = model.get_metrics(is_train=False)
    by_label = isinstance(given, Mapping) and bool(given) and set(given) <= set(evaluators)
    found: dict[str, dict[str, Any]] = {}
    for number, (label, evaluator) in enumerate(evaluators.items()):
        own = evaluator.chosen(as_metrics(given.get(label) if by_label else given, "eval_metrics"))
        # One object cannot gather for two loaders.
        own = own if number == 0 or by_label else copy.deepcopy(own)
        found[label] = {"loss": LossOfEvaluation(), **own} if with_loss and "loss" not in own else own
    return found
