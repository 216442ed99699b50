"""Hugging Face Transformers: checkpoints of a `transformers.Trainer`, inside the function trainer and without it.

Inside `TorchTrainer`, `ReportCallback` reports what it saves; of a plain trainer, `HoldfastCallback` keeps it.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ._optional import require
from .config import Keep, ValidationTaskConfig
from .errors import ConfigError
from .frameworks import DirectoryCheckpoints
from .frameworks.finished import (
    all_written,
    report_finished,
    saved_metrics,
    say_misaligned,
    say_missing,
    say_start,
    trial_of,
    written,
)
from .model_files import ModelFiles
from .state.tree.flatten import flatten
from .state.tree.names import unwrap
from .trainers.function.worker._session import current_session

__all__ = ["HoldfastCallback", "RayTrainReportCallback", "ReportCallback", "model_files", "prepare_trainer"]

_TrainerCallback: Any = require("transformers", extra="transformers", purpose="holdfast.transformers").TrainerCallback
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_model.safetensors"


class ReportCallback(_TrainerCallback):  # type: ignore[misc]
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
        say_misaligned(args, state, current_session("report").score_attribute)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report what was just saved; called on every rank."""
        directory = written(args, state)
        metrics = trial_of(args, state, directory) | self.metrics(state)
        say_missing(args, state, current_session("report").score_attribute, metrics)
        report_finished(directory, metrics, inside=self.CHECKPOINT_NAME, delete=self.delete, validation=self.validation)


RayTrainReportCallback = ReportCallback


class HoldfastCallback(_TrainerCallback):  # type: ignore[misc]
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
        self._path = path
        self._options: dict[str, Any] = {"keep": keep, "timeout_s": timeout_s}
        self._plain = self.keeper = DirectoryCheckpoints(path, **self._options)
        self.latest, self.best, self.checkpoints = self.keeper.latest, self.keeper.best, self.keeper.checkpoints
        self._metric = keep.metric if keep is not None else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say what in the settings does not fit; what an earlier training of this process added is taken in."""
        if self.keeper is not self._plain:  # that of a trial
            self.keeper.close()
            self.keeper = self._plain
        self.keeper.begin()
        say_start(args, state, self._metric, uri=self.keeper.storage.uri)
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


def model_files(model: Any, tokenizer: Any = None, *, item: str = "model", folder: str = "") -> ModelFiles:
    """Make the small files with which the directory of a checkpoint is a model: give them to ``model_files=``.

    ``AutoModel.from_pretrained(checkpoint.path)`` then loads it as it lies there: ``model.safetensors.index.json``
    names the files of the checkpoint, and no tensor is written twice. Of a PEFT model the adapter is written to
    ``adapter_model.safetensors``, for ``PeftModel.from_pretrained(base, checkpoint.path)``. Weights have the type that
    they are trained in, which ``config.json`` says (``dtype``).

    Args:
        model: what is saved in the state under ``item``, wrapped (DDP, ``torch.compile``) or not.
        tokenizer: a tokenizer, processor or whatever has ``save_pretrained`` and belongs to the model.
        item: key of the model in the state.
        folder: where in the checkpoint these files lie, for several models in one: "encoder".

    Returns:
        The files, as they are now: make them anew if the configuration changes.

    Raises:
        ConfigError: it is no model of transformers or PEFT.

    Example:
        >>> files = model_files(model, tokenizer)                                           # doctest: +SKIP
        >>> with holdfast.Checkpointer("runs/a", {"model": model}, model_files=files) as ck:  # doctest: +SKIP
        ...     ...
    """
    module = unwrap(model)
    prefix = f"{folder}/" if folder else ""
    with tempfile.TemporaryDirectory(prefix="holdfast-model-") as made:
        if hasattr(module, "peft_config"):
            named = {f"{prefix}{_ADAPTER}": _adapter(module, item, made)}
            indexes = {}
        elif hasattr(module, "config") and hasattr(module.config, "save_pretrained"):
            named, indexes = {}, {f"{prefix}{_INDEX}": item}
            _write_config(module, made)
        else:
            raise ConfigError(
                f"model_files: {type(module).__name__} is no model of transformers or PEFT (it has no config that "
                "can be saved): for another library give model_files={name: bytes} yourself"
            )
        if tokenizer is not None:
            tokenizer.save_pretrained(made)
        files = {
            prefix + path.relative_to(made).as_posix(): path.read_bytes()
            for path in sorted(Path(made).rglob("*"))
            if path.is_file()
        }
    return ModelFiles(files=files, indexes=indexes, named=named)


def _write_config(model: Any, folder: str) -> None:
    """Write the configurations as the model's own ``save_pretrained`` does, which would write the weights as well."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(_dtype_of(model)).removeprefix("torch.")
    config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None and model.can_generate():
        generation.save_pretrained(folder)


def _dtype_of(model: Any) -> torch.dtype:
    """Return the type that the stored weights have, which a reader gets by default."""
    floating = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    return floating[0] if floating else torch.get_default_dtype()


def _adapter(model: Any, item: str, folder: str) -> Mapping[str, str]:
    """Write the configuration of the active adapter; returns the tensors of its file: path in the state -> name."""
    peft = require("peft", extra="transformers", purpose="model_files of a PEFT model")
    active = model.active_adapter
    if not isinstance(active, str):
        raise ConfigError(f"model_files: {active!r} are active, and one directory holds one adapter: use set_adapter")
    config = copy.deepcopy(model.peft_config[active])
    config.inference_mode = True
    base = model.get_base_model()
    config.base_model_name_or_path = config.base_model_name_or_path or getattr(base, "name_or_path", None)
    config.save_pretrained(folder)
    flat = flatten({item: model})
    paths: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in zip(flat.names, flat.tensors, strict=True):
        paths.setdefault((tensor.data_ptr(), tensor.shape), name)  # a tied tensor is stored under its first name
    stored = peft.get_peft_model_state_dict(model, adapter_name=active, save_embedding_layers=False)
    tensors: dict[str, str] = {}
    for name, tensor in stored.items():
        path = paths.get((tensor.data_ptr(), tensor.shape))
        if path is None:
            raise ConfigError(
                f"model_files: {type(config).__name__} stores {name!r}, which is computed and no parameter of the "
                "model: save such an adapter with its own save_pretrained"
            )
        if path in tensors:
            raise ConfigError(
                f"model_files: {type(config).__name__} stores {tensors[path]!r} and {name!r}, one tensor, and "
                "it is written once: save such an adapter with its own save_pretrained"
            )
        tensors[path] = name
    return tensors
