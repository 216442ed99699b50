"""Metrics of the trainer: torchmetrics objects as they are, plain functions averaged over samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from holdfast.checkpointer.identity import plain_metrics
from holdfast.errors import ConfigError
from holdfast.state.tree.objects import is_metric

from .ranks import Ranks

if TYPE_CHECKING:
    from ..state import State

__all__ = ["Averaged", "as_metrics", "computed", "metrics_of", "move_metrics"]


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
