"""PyTorch Lightning, under both of its names: reports, exact checkpoints, and Ray Train's strategies.

Importing this module imports no Lightning: an object belongs to the Lightning package that is imported when it is made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ._log import get_logger
from ._optional import Grafted
from .frameworks.lightning_callback import HoldfastCallback, was_a_search, writes_itself
from .frameworks.lightning_plugins import (
    HoldfastCheckpointIO,
    RayDDPStrategy,
    RayDeepSpeedStrategy,
    RayFSDPStrategy,
    RayLightningEnvironment,
    prepare_trainer,
)
from .frameworks.reporting import epochs_between, reporting, scalars
from .state.gradient_order import fix_or_warn, parallel_modules
from .trainers.function.config import CheckpointUploadMode, ValidationTaskConfig
from .trainers.function.worker.session import get_checkpoint, report

__all__ = [
    "HoldfastCallback", "HoldfastCheckpointIO", "RayDDPStrategy", "RayDeepSpeedStrategy", "RayFSDPStrategy",
    "RayLightningEnvironment", "RayTrainReportCallback", "ReportCallback", "prepare_trainer",
]  # fmt: skip

_LOG = get_logger("frameworks")


class ReportCallback(Grafted):
    """Inside the function trainer: reports ``trainer.callback_metrics`` and a Lightning checkpoint.

    Metrics (with "epoch" and "step" added) are reported at the end of every training epoch, and a checkpoint with them
    every ``every_n_epochs``; or both every ``every_n_steps``. While `fit` runs it is the last of the callbacks, and
    comes after the module's own end of the epoch, as a ``ModelCheckpoint`` does. Every rank has it; with DDP rank 0
    stores, with a sharded strategy all ranks do. DDP adds gradients in one order from the first step on
    (docs/parallel.md).
    `fit` goes on from the file ``CHECKPOINT_NAME`` in the directory. For a rhythm of your own, subclass it.

    Args:
        every_n_epochs: epochs from one checkpoint to the next; 1 if neither is given.
        every_n_steps: optimizer steps from one report to the next, as ``trainer.global_step`` counts them.
        checkpoint_upload_mode: ASYNC goes on while the checkpoint is being committed, SYNC waits.
        validation: run the trainer's validation function on each checkpoint; a dict gives it arguments.

    Raises:
        ConfigError: both are given, or a number is not positive.
    """

    BASES = ("lightning.pytorch:Callback", "pytorch_lightning:Callback")
    EXTRA = "lightning"
    CHECKPOINT_NAME = "checkpoint.ckpt"
    _LATE = ("lightning.pytorch.callbacks:Checkpoint", "pytorch_lightning.callbacks:Checkpoint")

    def __init__(
        self,
        *,
        every_n_epochs: int | None = None,
        every_n_steps: int | None = None,
        checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.ASYNC,
        validation: bool | Mapping[str, Any] | ValidationTaskConfig = False,
    ) -> None:
        super().__init__()
        self.every_n_epochs, self.every_n_steps = epochs_between(every_n_epochs, every_n_steps), every_n_steps
        self.checkpoint_upload_mode, self.validation = checkpoint_upload_mode, validation
        self._last_step = 0
        self._before: dict[str, Any] = {}  # metrics when the newest validation began
        self._validated: tuple[int, dict[str, Any]] | None = None  # the step of that, and its metrics
        self._has_said = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Become the last of the callbacks, of the kind that Lightning calls after the module."""
        if stage == "fit":
            # Not earlier: a Trainer with enable_checkpointing=False refuses callbacks of this kind when it is made.
            # Last, since the first of them is trainer.checkpoint_callback.
            self.graft_onto(self._LATE)
            trainer.callbacks = [*(callback for callback in trainer.callbacks if callback is not self), self]

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Be an ordinary callback again, for the next trainer."""
        self.graft_onto()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Do the same."""
        self.graft_onto()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Take note of the metrics that are there."""
        self._before = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Take note of the metrics that are new: they are those of the weights of this step."""
        now, before = trainer.callback_metrics, self._before
        self._validated = trainer.global_step, {name: now[name] for name in now if not _is(now[name], before.get(name))}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take note of the step to go on from, which was reported before, and let DDP add gradients in one order."""
        self._last_step = trainer.global_step
        if trainer.is_global_zero and was_a_search(trainer) and get_checkpoint() is not None:
            _LOG.warning(
                "a finder has searched (%s), after which Lightning resumes nothing but weights: this training is at "
                "step %d; with HoldfastCallback it would not search again", trainer.ckpt_path, trainer.global_step,
            )  # fmt: skip
        for model in parallel_modules(trainer.strategy.model).values():
            fix_or_warn(model, leads=trainer.is_global_zero)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Report with a checkpoint, if steps are counted and it is time."""
        # Batches that are accumulated end with the step of the batch before; several optimizers make several at once.
        before, self._last_step = self._last_step, trainer.global_step
        if self.every_n_steps is not None and self._last_step // self.every_n_steps > before // self.every_n_steps:
            self.report(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Report, with a checkpoint if it is time."""
        if self.every_n_steps is None:
            self.report(trainer, with_checkpoint=(trainer.current_epoch + 1) % self.every_n_epochs == 0)

    def metrics(self, trainer: Any) -> dict[str, Any]:
        """Return what is reported; to be overridden. Of a validation of other weights than these nothing is."""
        found, (step, validated) = dict(trainer.callback_metrics), self._validated or (trainer.global_step, {})
        is_old = step != trainer.global_step
        old = sorted(name for name in found if is_old and _is(found[name], validated.get(name)))
        if old and not self._has_said and trainer.is_global_zero:
            self._has_said = True
            _LOG.warning(
                "%s: last validated at step %d, so the report of step %d has no value, nor have others without a "
                "validation of their own", ", ".join(old), step, trainer.global_step,
            )  # fmt: skip
        fresh = {name: value for name, value in found.items() if name not in old}
        return scalars(fresh, {"epoch": trainer.current_epoch, "step": trainer.global_step})

    def report(self, trainer: Any, *, with_checkpoint: bool = True) -> None:
        """Report now; every rank calls it."""
        if not with_checkpoint:
            report(self.metrics(trainer))
            return
        with reporting(
            self.metrics(trainer),
            sharded=writes_itself(trainer.strategy),
            upload_mode=self.checkpoint_upload_mode,
            validation=self.validation,
        ) as directory:
            trainer.save_checkpoint(os.path.join(directory, self.CHECKPOINT_NAME), weights_only=False)
            # A plugin that writes in the background has to be done before the directory is handed over.
            trainer.strategy.checkpoint_io.teardown()


def _is(value: Any, other: Any) -> bool:
    """Tell whether two metrics are one: Lightning gives another tensor with the same memory each time it is asked."""
    both = isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)
    return value is other or (both and value.data_ptr() == other.data_ptr())


RayTrainReportCallback = ReportCallback
