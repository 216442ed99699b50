"""`DataSpec` and `Evaluator`: a loader together with how its batches are treated, and how it is evaluated."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from holdfast.errors import ConfigError

from ..arguments import check_function, check_loader
from ..time import When, parse_when

__all__ = ["DEFAULT", "DataSpec", "Evaluator", "as_spec", "check_subset", "evaluators_of"]

DEFAULT: Any = object()
"""Stands for the interval that the trainer has for all evaluators."""


class DataSpec:
    """A loader, and functions of its batches.

    Args:
        dataloader: batches.
        num_samples, num_tokens: of one epoch; taken so that scripts run, and not needed: what came is counted.
        batch_transforms: changes each batch before it goes to the device.
        microbatch_transforms: changes each part of a batch (see ``grad_accum``) on the device.
        split_batch: splits a batch into parts of at most so many samples; tensors in it are split without it.
        get_num_samples_in_batch: counts the samples of a batch, for `Timestamp`.
        get_num_tokens_in_batch: counts its tokens; without, these are the entries of "input_ids".

    Example:
        >>> spec = DataSpec([torch.ones(4, 2)], batch_transforms=lambda batch: batch * 2)
        >>> [spec.batch_transforms(batch).sum().item() for batch in spec.dataloader]
        [16.0]
    """

    def __init__(
        self,
        dataloader: Any,
        num_samples: int | None = None,
        num_tokens: int | None = None,
        batch_transforms: Callable[[Any], Any] | None = None,
        microbatch_transforms: Callable[[Any], Any] | None = None,
        split_batch: Callable[[Any, int], Sequence[Any]] | None = None,
        get_num_samples_in_batch: Callable[[Any], int] | None = None,
        get_num_tokens_in_batch: Callable[[Any], int] | None = None,
    ) -> None:
        self.dataloader = check_loader(dataloader, "DataSpec(dataloader)")
        if dataloader is None or isinstance(dataloader, DataSpec):
            raise ConfigError(
                f"DataSpec(dataloader={dataloader!r}): give a DataLoader, or anything that yields batches"
            )
        self.num_samples, self.num_tokens = num_samples, num_tokens

        def function(value: Any, name: str, *arguments: str) -> Any:
            return check_function(value, f"DataSpec({name})", *arguments)

        self.batch_transforms = function(batch_transforms, "batch_transforms", "batch")
        self.microbatch_transforms = function(microbatch_transforms, "microbatch_transforms", "batch")
        self.split_batch = function(split_batch, "split_batch", "batch", "size")
        self.get_num_samples_in_batch = function(get_num_samples_in_batch, "get_num_samples_in_batch", "batch")
        self.get_num_tokens_in_batch = function(get_num_tokens_in_batch, "get_num_tokens_in_batch", "batch")


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
        evaluator = data if isinstance(data, Evaluator) else _labelled(data, number, what)
        if evaluator.label in found:
            raise ConfigError(f"{what}: two evaluators are called {evaluator.label!r}: give each a label of its own")
        found[evaluator.label] = evaluator
    return found


def _labelled(data: Any, number: int, what: str) -> Evaluator:
    return Evaluator(label=f"eval-{number}" if number else "eval", dataloader=as_spec(data, what))
