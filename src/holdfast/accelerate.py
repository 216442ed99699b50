"""Hugging Face Accelerate: a `Checkpointer` bound to an `Accelerator`, and reports of what it writes itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ._log import get_logger
from ._optional import require
from .checkpoint.handle import Checkpoint
from .checkpointer.checkpointer import Checkpointer as _Checkpointer
from .errors import ConfigError
from .frameworks.huggingface import check_skips_nothing, objects_of, own_loader, say_late, told_when_last
from .frameworks.keepers import verified_directory
from .frameworks.reporting import reporting
from .trainers.function.worker.session import get_checkpoint

__all__ = ["Checkpointer", "load_state", "report_model", "report_state"]

_LOG = get_logger("accelerate")
_PURPOSE = "holdfast.accelerate"


class Checkpointer(_Checkpointer):
    """A `holdfast.Checkpointer` of everything that an `Accelerator` has prepared, on any number of ranks.

    Models, optimizers, schedulers and the gradient scaler are found in the accelerator, unwrapped, and so are the
    objects of ``register_for_checkpointing``. Make it after both.

    Args:
        path: root of the run: a path or a URI.
        accelerator: the `Accelerator`.
        state: what else to save; see docs/state.md.
        **options: those of `holdfast.Checkpointer`.

    Raises:
        ConfigError: nothing is prepared, or a name is taken.

    Example:
        >>> with Checkpointer("runs/a", accelerator, every=500) as ck:                      # doctest: +SKIP
        ...     for epoch in ck.epochs(3):
        ...         for batch in ck.batches(loader):
        ...             with accelerator.accumulate(model):
        ...                 train_one(batch)
        ...                 ck.step()
    """

    def __init__(
        self, path: str | os.PathLike[str], accelerator: Any, state: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        found = objects_of(accelerator)
        if taken := sorted(found.keys() & (state or {}).keys()):
            raise ConfigError(
                f"state has {taken}, and so has the accelerator: what it prepared is saved under that name"
            )
        super().__init__(path, {**found, **(state or {})}, **options)
        self.accelerator, self._found = accelerator, frozenset(found)
        self._has_said = False
        self._loaders: dict[int, Any] = {}  # id of a prepared loader -> the loader and its parts

    def step(self, **metrics: Any) -> None:
        """Record one finished optimizer step; does nothing where gradients only gather (``accelerator.accumulate``)."""
        if self.accelerator.sync_gradients:
            self._found = say_late(self.accelerator, self._found)
            super().step(**metrics)

    def save(self, **metrics: Any) -> None:
        """Save as `holdfast.Checkpointer.save` does; where gradients only gather, it is said that this is not exact."""
        if not (self.accelerator.sync_gradients or self._has_said):
            self._has_said = True
            if self.accelerator.is_main_process:
                _LOG.warning(
                    "ck.save() between the batches of an accumulated step (%d): gathered gradients are not saved, so a "
                    "resume trains these batches again, with other random numbers. Save where accelerator."
                    "sync_gradients is True", self._progress.step + 1,
                )  # fmt: skip
        super().save(**metrics)

    def batches(
        self, loader: Any, *, name: str = "train", split: bool | tuple[int, int] = True, ahead: int = 0
    ) -> Iterator[Any]:
        """Yield the batches of a prepared loader, on their device, from the position of the last trained step.

        The batches are as large as Accelerate makes them and split over the ranks as there; their order is that of
        `holdfast.Checkpointer.batches`: a function of the run's seed and the epoch, so that the position is exact, and
        holds for another number of ranks. Of loaders whose order is unknown (an iterable dataset, ``dispatch_batches``,
        custom batch samplers) the position is the number of batches; a loader with ``use_stateful_dataloader`` keeps
        its own.

        Args:
            loader: from ``accelerator.prepare``.
            name: tells several training loaders apart.
            split: as in `holdfast.Checkpointer.batches`, for a loader that was not prepared.
            ahead: as in `holdfast.Checkpointer.batches`.

        Raises:
            ConfigError: the loader is one of ``skip_first_batches``.
        """
        check_skips_nothing(loader)
        if not hasattr(loader, "gradient_state"):
            return super().batches(loader, name=name, split=split, ahead=ahead)
        if (found := self._loaders.get(id(loader))) is None:
            found = self._loaders[id(loader)] = (loader, *own_loader(loader))
        _, plain, part = found
        if part is None:
            return super().batches(plain, name=name, ahead=ahead)
        return told_when_last(
            super().batches(plain, name=name, split=part, ahead=ahead),
            loader,
            left=partial(self._progress.left, name),
            to_device=partial(_to_device, loader),
        )


def report_state(accelerator: Any, metrics: Mapping[str, Any], *, validation: bool = False, **options: Any) -> None:
    """Report what ``accelerator.save_state`` writes, from a ``train_func``; every rank calls it.

    Args:
        accelerator: the `Accelerator`.
        metrics: of rank 0 are kept.
        validation: as in `holdfast.report`.
        **options: of ``save_state``.

    Raises:
        ConfigError: the accelerator names its checkpoints itself.
        SessionError: called outside of train_func.
    """
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise ConfigError(
            "automatic_checkpoint_naming=True makes Accelerate choose (and delete) directories of its own: leave it "
            "out, the run numbers its checkpoints and keeps what CheckpointConfig says"
        )
    with reporting(metrics, sharded=True, validation=validation) as directory:
        accelerator.save_state(directory, **options)


def report_model(
    accelerator: Any, model: Any, metrics: Mapping[str, Any], *, validation: bool = False, **options: Any
) -> None:
    """Report what ``accelerator.save_model`` writes of a prepared model: weights only. Else like `report_state`."""
    with reporting(metrics, sharded=True, validation=validation) as directory:
        accelerator.save_model(model, directory, **options)


def load_state(accelerator: Any, checkpoint: Checkpoint | None = None, **options: Any) -> Checkpoint | None:
    """Load what `report_state` reported, with ``accelerator.load_state``; every rank calls it, after ``prepare``.

    Every byte is checked against its digest first.

    Args:
        accelerator: the `Accelerator`.
        checkpoint: which; default: `holdfast.get_checkpoint`.
        **options: of ``accelerator.load_state``.

    Returns:
        The checkpoint loaded, whose ``metrics`` hold step and epoch; None if there is none.
    """
    checkpoint = checkpoint or get_checkpoint()
    if checkpoint is not None:
        with verified_directory(checkpoint) as directory:
            accelerator.load_state(directory, **options)
    return checkpoint


def _to_device(prepared: Any, batch: Any) -> Any:
    if prepared.device is None:
        return batch
    return require("accelerate.utils", extra="accelerate", purpose=_PURPOSE).send_to_device(batch, prepared.device)
