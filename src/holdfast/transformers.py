"""Hugging Face Transformers: checkpoints of a `transformers.Trainer`, inside the function trainer and without it.

Inside `TorchTrainer`, `ReportCallback` reports what it saves; of a plain trainer, `HoldfastCallback` keeps it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ._optional import require
from .config import Keep
from .errors import ConfigError
from .frameworks.huggingface import (
    all_written,
    model_files,
    report_finished,
    saved_metrics,
    say,
    say_inexact,
    say_missing,
    say_start,
    trial_of,
    written,
)  # fmt: skip
from .frameworks.keepers import DirectoryCheckpoints
from .frameworks.trainer_resume import LoadingWatch
from .trainers.function.config import ValidationTaskConfig
from .trainers.function.worker.session import current_session

__all__ = ["HoldfastCallback", "RayTrainReportCallback", "ReportCallback", "model_files", "prepare_trainer"]

_TrainerCallback: Any = require("transformers", extra="transformers", purpose="holdfast.transformers").TrainerCallback


class _Callback(_TrainerCallback):  # type: ignore[misc]
    """Says what a resume will not bring back, as training shows it."""

    def __init__(self) -> None:
        self._loading = LoadingWatch()

    def _says(self, args: Any, state: Any, metric: str | None, parts: Mapping[str, Any]) -> None:
        say_inexact(args, state, metric, parts)
        self._loading.trains(args, state)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say if it is one in which a resume is lost."""
        say(args, self._loading.epoch_begins(kwargs.get("train_dataloader"), step=state.global_step))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say if its batches were loaded in a way that a resume does not repeat."""
        say(args, self._loading.step_begins())


class ReportCallback(_Callback):
    """Reports each checkpoint that a `Trainer` saves in a ``train_func``, as the directory `CHECKPOINT_NAME`.

    Its metrics are those of the newest training log and all that was logged at the step of the save; subclasses may say
    otherwise in `metrics`. `on_save` returns when the trainer may rotate its directory away.

    Args:
        delete_local_checkpoint_after_upload: take the trainer's own ``checkpoint-N`` away, which costs nothing. Else it
            stays, and its files are cloned where the file system can share blocks, or read once, which is waited for.
        validation: as in `holdfast.report`.

    Example:
        >>> trainer = transformers.Trainer(model, args, callbacks=[ReportCallback()])       # doctest: +SKIP
    """

    CHECKPOINT_NAME = "checkpoint"

    def __init__(
        self,
        *,
        delete_local_checkpoint_after_upload: bool = False,
        validation: bool | Mapping[str, Any] | ValidationTaskConfig = False,
    ) -> None:
        super().__init__()
        self.delete, self.validation = delete_local_checkpoint_after_upload, validation

    def metrics(self, state: Any) -> dict[str, Any]:
        """Return what is reported with the checkpoint of ``state.global_step``."""
        return saved_metrics(state.log_history, step=state.global_step, epoch=state.epoch)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say what in the settings does not fit."""
        if self.delete and args.load_best_model_at_end:
            raise ConfigError(
                "load_best_model_at_end=True needs the trainer's own checkpoints on disk, and "
                "delete_local_checkpoint_after_upload=True takes them away: leave one of them out"
            )
        self._says(args, state, current_session("report").score_attribute, kwargs)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report what was just saved; called on every rank."""
        directory = written(args, state)
        metrics = trial_of(args, state, directory) | self.metrics(state)
        say_missing(args, state, current_session("report").score_attribute, metrics)
        report_finished(directory, metrics, inside=self.CHECKPOINT_NAME, delete=self.delete, validation=self.validation)
        say(args, self._loading.saved(kwargs.get("optimizer")))


RayTrainReportCallback = ReportCallback


class HoldfastCallback(_Callback):
    """Keeps the checkpoints of a plain `Trainer` in any storage: in the background, digested, the best never lost.

    The trainer writes its ``checkpoint-N`` as ever and may rotate it away (``save_total_limit=1`` is enough): complete
    ones are brought to ``path`` (in a ``hyperparameter_search`` to a run of the trial, ``path/run-N``) while training
    goes on, also if the process is killed meanwhile.

    Args:
        path: root of the run: a path or a URI.
        keep: which checkpoints stay there; None keeps all.
        timeout_s: bound of every wait.

    Attributes:
        keeper: the `DirectoryCheckpoints` that does it (of a search: the trial's); `close` waits until all is durable.

    Example:
        >>> callback = HoldfastCallback("s3://bucket/run", keep=Keep(last=2))               # doctest: +SKIP
        >>> trainer = transformers.Trainer(model, args, callbacks=[callback])               # doctest: +SKIP
        >>> trainer.train(resume_from_checkpoint=callback.latest())                         # doctest: +SKIP
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: Keep | None = Keep(last=3),  # noqa: B008 - Keep is frozen
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__()
        self._path = path
        self._options: dict[str, Any] = {"keep": keep, "timeout_s": timeout_s}
        self._plain = self.keeper = DirectoryCheckpoints(path, **self._options)
        self.latest, self.best, self.checkpoints = self.keeper.latest, self.keeper.best, self.keeper.checkpoints
        self._metric = keep.metric if keep is not None else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say what in the settings does not fit; an earlier training of this process is another attempt."""
        if self.keeper is not self._plain:  # that of a trial
            self.keeper.close()
            self.keeper = self._plain
        self.keeper.begin(step=state.global_step)
        say_start(args, state, uri=self.keeper.storage.uri)
        self._says(args, state, self._metric, kwargs)
        if args.load_best_model_at_end and state.best_global_step:  # another machine has it only in the run
            kept = self.keeper.directory_of(state.best_global_step, wanted=state.best_model_checkpoint is None)
            state.best_model_checkpoint = state.best_model_checkpoint or kept

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep what was just saved, once every rank has written its files; all into one ``output_dir``."""
        all_written(directory := written(args, state), shared=True, timeout_s=self.keeper.timeout_s)
        metrics = saved_metrics(state.log_history, step=state.global_step, epoch=state.epoch)
        say_missing(args, state, self._metric, metrics)
        if (trial := trial_of(args, state, directory)) and self.keeper is self._plain:
            self.keeper = DirectoryCheckpoints(os.path.join(self._path, trial["trial"]), **self._options)
        self.keeper.add(directory, step=state.global_step, epoch=int(state.epoch or 0), metrics=metrics)
        say(args, self._loading.saved(kwargs.get("optimizer")))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Bind an evaluation after the save, if there is one, to the checkpoint of its step."""
        self.keeper.report(state.global_step, metrics or {})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait until everything is durable, and give the run back."""
        self.keeper.close()


def prepare_trainer(trainer: Any) -> Any:
    """Make sure that a `Trainer` in a ``train_func`` reports its checkpoints; returns it.

    A `ReportCallback` is added unless the trainer has one, or another callback of the user's own with ``on_save``.

    Raises:
        ConfigError: the trainer does not see the ranks that there are. SessionError: outside of train_func.
    """
    context = current_session("prepare_trainer").context
    if trainer.args.world_size != context.get_world_size():
        raise ConfigError(
            f"the Trainer sees {trainer.args.world_size} ranks, the run has {context.get_world_size()}: make "
            "TrainingArguments inside train_func, and let it use distributed training"
        )
    callbacks = trainer.callback_handler.callbacks
    if all(type(callback).on_save.__module__.startswith("transformers.") for callback in callbacks):
        trainer.add_callback(ReportCallback())
    return trainer
