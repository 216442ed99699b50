"""Hugging Face: what `transformers.Trainer` has written and logged, a checkpoint as its model, `Accelerator.prepare`.

`report_finished` reports a directory of the trainer, `say_misaligned` and its like name settings that do not fit.
`model_files` makes the directory of a checkpoint a model: its small files, and the names of its tensors. `objects_of`
and `own_loader` find the live objects in what Accelerate has prepared, and the data in our own order.
"""

from __future__ import annotations

import contextlib
import copy
import glob
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from holdfast._log import get_logger
from holdfast._optional import require
from holdfast._ranks import current_ranks
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpointer.meeting import meet
from holdfast.copying.local import clone_tree
from holdfast.errors import CheckpointNotFoundError, ConfigError, UnsupportedStateError
from holdfast.model_files import ModelFiles
from holdfast.state.data.loaders import keeps_state
from holdfast.state.tree.flatten import flatten
from holdfast.state.tree.objects import unwrap
from holdfast.trainers.function.config import CheckpointUploadMode, ValidationTaskConfig
from holdfast.trainers.function.worker.session import current_session

from .reporting import last_change, new_place, scalars
from .trainer_resume import resumed_otherwise, samplers_of, strategy_name, what_is_not_read, what_is_unsaved

_LOG = get_logger("transformers")
_ACCELERATE_LOG = get_logger("accelerate")
_LOADER = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
           "prefetch_factor", "persistent_workers")  # fmt: skip
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_model.safetensors"
_NOT_METRICS = ("total_flos",)

_TIMEOUT_S = 600.0
_numbers = itertools.count()


def all_written(directory: str, *, shared: bool = False, timeout_s: float = _TIMEOUT_S) -> bool:
    """Wait until every rank has written its files; True on the rank of each directory that hands them over.

    Every rank calls this when its own files are complete. Ranks that share a directory have one of them, the lowest,
    hand it over; a rank with a directory of its own does it itself.

    Args:
        directory: where this rank wrote; it need not exist on a rank that has nothing to write.
        shared: rank 0 is to see what all have written.
        timeout_s: how long ranks wait for one another.

    Raises:
        ConfigError: (``shared``) a rank has written where rank 0 does not see it.
        HoldfastError: a rank did not come.
    """
    info = current_ranks()
    meeting = meet(info, name="written", timeout_s=timeout_s, otherwise="train with one process")

    def place() -> list[Any] | None:
        if not os.path.isdir(directory):
            return None
        found = os.stat(directory)
        names = sorted(os.listdir(directory)) if shared else []
        return [os.path.realpath(directory), found.st_dev, found.st_ino, names]

    def lowest(places: list[Any]) -> list[int]:
        if shared:
            check_shared(directory, places)
        places = [None if entry is None else entry[:3] for entry in places]
        return [rank for rank, entry in enumerate(places) if entry is not None and places.index(entry) == rank]

    return info.rank in meeting.agree("written", place, lowest)


def check_shared(directory: str, places: list[Any]) -> None:
    """Refuse directories (path, device, inode, names in it) of several ranks that differ from that of rank 0.

    Of one directory, devices differ on machines that mount it, and inodes with some file systems; names alone may come
    late to another machine.
    """
    first = places[0] or ["", 0, 0, []]
    for rank, seen in enumerate(places):
        if seen is not None and seen[2] != first[2] and (missing := sorted(set(seen[3]) - set(first[3]))):
            raise ConfigError(
                f"rank {rank} has written {missing[0]} into {directory}, and rank 0 does not see it there: with "
                "several machines output_dir must be on a file system that they share; a checkpoint would lack files"
            )


def report_finished(
    directory: str,
    metrics: Mapping[str, Any],
    *,
    inside: str,
    delete: bool = False,
    validation: bool | Mapping[str, Any] | ValidationTaskConfig = False,
    timeout_s: float = _TIMEOUT_S,
) -> None:
    """Report what a framework has written, from inside the function trainer; every rank calls this, equally often.

    Returns when the framework may do with its directory what it likes. No copy is made on the way: with ``delete`` the
    directory is renamed; else its files are cloned where the file system can share blocks; else this waits until the
    writer has read them.

    Args:
        directory: what this rank (or another, into the same directory) has written.
        metrics: of rank 0 are kept.
        inside: name of the directory within the checkpoint.
        delete: the directory may be taken away.
        validation: as in `holdfast.report`.
        timeout_s: how long ranks wait for one another.

    Raises:
        CheckpointNotFoundError: no rank has written anything.
        SessionError: called outside of train_func.
        HoldfastError: a rank did not come, or the commit failed.
    """
    session = current_session("report")
    if not all_written(directory, timeout_s=timeout_s):
        if session.rank == 0:
            raise CheckpointNotFoundError(
                f"there is no {directory} to report: nothing was written on rank 0, or the framework has deleted it "
                "already (directories of an older run beside it can make it do so: use an empty place)"
            )
        session.report(metrics, validation=validation)
        return
    place = new_place(session, f"finished-{next(_numbers)}-{session.rank}")
    os.makedirs(place)
    target = os.path.join(place, inside)
    safe = _moved(directory, target) if delete else clone_tree(directory, target)
    if not safe:
        os.symlink(os.path.abspath(directory), target)
    try:
        session.report(
            metrics,
            Checkpoint.from_directory(place),
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC if safe else CheckpointUploadMode.SYNC,
            delete_local_checkpoint_after_upload=safe,
            validation=validation,
        )
    except BaseException:
        if safe and delete and os.path.isdir(target) and not os.path.lexists(directory):
            os.rename(target, directory)
        raise
    finally:
        if not safe:
            os.unlink(target)
        with contextlib.suppress(OSError):
            os.rmdir(place)
    if delete and not safe:
        shutil.rmtree(directory, ignore_errors=True)


def _moved(source: str, target: str) -> bool:
    try:
        os.rename(source, target)
    except OSError:
        return False  # another file system
    return True


def saved_metrics(history: Sequence[Mapping[str, Any]], *, step: int, epoch: float | None) -> dict[str, Any]:
    """Return the metrics of the checkpoint of a step: the newest training log, and all that was logged at that step.

    An evaluation of an earlier step judged other weights, so it is left out.

    Args:
        history: ``state.log_history``.
        step: of the checkpoint.
        epoch: of the checkpoint.
    """
    training: Mapping[str, Any] = next((entry for entry in reversed(history) if "loss" in entry), {})
    here = [entry for entry in history if entry.get("step") == step]
    found = scalars(training, *here, {"step": step}, {} if epoch is None else {"epoch": epoch})
    return {name: value for name, value in found.items() if name not in _NOT_METRICS}


def missing_metric(metric: str | None, metrics: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what to log where a checkpoint lacks the metric that ranks checkpoints; None where it has it."""
    if metric is None or metric in metrics:
        return None
    earlier = [int(entry.get("step", 0)) for entry in history if metric in entry]
    last = f"it was last logged at step {earlier[-1]}" if earlier else "it was never logged"
    return (
        f"the checkpoint of step {metrics.get('step')} has no {metric!r}, which ranks checkpoints ({last}), so it "
        f"ranks below all others; there are {sorted(metrics)}. Log or evaluate at the steps that save: make save_steps "
        "a multiple of eval_steps (logging_steps), with the same strategy for both"
    )


def misaligned(args: Any, *, metric: str | None, save_steps: float, eval_steps: float | None) -> list[str]:
    """List what in the settings of a trainer keeps checkpoints from being made, ranked or resumed from.

    Args:
        args: the `TrainingArguments`.
        metric: what ranks checkpoints, if anything does.
        save_steps: as the trainer uses it, a number of steps.
        eval_steps: likewise.
    """
    save, evaluate = strategy_name(args.save_strategy), strategy_name(args.eval_strategy)
    if save == "no":
        return ["save_strategy='no': nothing will ever be saved; use save_strategy='steps' or 'epoch'"]
    found = []
    if getattr(args, "save_only_model", False):
        found.append("save_only_model=True: the checkpoints hold weights only, and training cannot go on from them")
    if metric is None or not metric.startswith("eval_") or save == "best":
        return found
    what = f"checkpoints are ranked by {metric!r}, "
    if evaluate == "no":
        found.append(f"{what}but eval_strategy='no', so it is never there: use eval_strategy={save!r}")
    elif evaluate != save:
        found.append(
            f"{what}but eval_strategy={evaluate!r} and save_strategy={save!r}: not every checkpoint has been "
            "evaluated; use one strategy for both"
        )
    elif save == "steps" and eval_steps and save_steps % eval_steps:
        found.append(
            f"{what}but save_steps={save_steps:g} is no multiple of eval_steps={eval_steps:g}: some checkpoints are "
            "saved without an evaluation and rank below all others"
        )
    return found


def say_inexact(args: Any, state: Any, metric: str | None, parts: Mapping[str, Any]) -> None:
    """Say, once for all ranks, what does not fit in the settings, and what a resume does not bring back.

    See `misaligned` and `trainer_resume`. ``parts`` are the keyword arguments of a callback.
    """
    model, optimizer, loader = map(parts.get, ("model", "optimizer", "train_dataloader"))
    if args.process_index == 0:
        settings = misaligned(args, metric=metric, save_steps=state.save_steps, eval_steps=state.eval_steps)
        saves = strategy_name(args.save_strategy) != "no"
        unsaved = what_is_unsaved(args, state, model, optimizer, loader) if saves else []
        otherwise = [*what_is_not_read(args, state, loader), *resumed_otherwise(args, state, loader)]
        for found in [*settings, *unsaved, *otherwise]:
            _LOG.warning("%s", found)


def say_start(args: Any, state: Any, *, uri: str) -> None:
    """Print, once for all ranks, where training begins."""
    step, last = state.global_step, state.max_steps
    if args.process_index == 0 and not state.is_hyper_param_search:
        lines = [f"holdfast: {f'goes on after step {step}' if step else 'starts fresh'} (of {last}); saves to {uri}"]
        if step >= last and args.max_steps > 0:
            lines.append(
                "  nothing is left to train: give more max_steps, or leave train() out; transformers looks after a "
                "step whether it was the last, and in the middle of an epoch trains one too many"
            )
        print("\n".join(lines), file=sys.stderr, flush=True)  # noqa: T201 - the one thing a run prints


def say_missing(args: Any, state: Any, metric: str | None, metrics: Mapping[str, Any]) -> None:
    """Say, once for all ranks, that a checkpoint lacks the metric that ranks it; see `missing_metric`."""
    say(args, missing_metric(metric, metrics, state.log_history))


def say(args: Any, found: str | None) -> None:
    """Say, once for all ranks, what was found, if anything was."""
    if found is not None and args.process_index == 0:
        _LOG.warning("%s", found)


def written(args: Any, state: Any) -> str:
    """Return the directory in which the trainer has saved the current step; a trial of a search has its own place."""
    name = f"checkpoint-{state.global_step}"
    home = os.path.join(args.output_dir, name)
    if not state.is_hyper_param_search:
        return home
    if state.trial_name:
        return os.path.join(args.output_dir, state.trial_name, name)
    # Nobody tells a callback the number of the trial, but every rank has just written files of its own there.
    found = glob.glob(os.path.join(glob.escape(args.output_dir), "*", name))
    return max(found, key=last_change, default=home)


def trial_of(args: Any, state: Any, directory: str) -> dict[str, Any]:
    """Return, as the metric "trial", the name of the trial that has written a directory; nothing outside a search."""
    if not state.is_hyper_param_search:
        return {}
    return {"trial": os.path.relpath(os.path.dirname(directory), args.output_dir)}


# ---- a checkpoint as a model


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


# ---- what Accelerate has prepared


def objects_of(accelerator: Any) -> dict[str, Any]:
    """Return all that an `Accelerator` has prepared and registered, unwrapped, under the names of its own files.

    Models, optimizers, schedulers, the gradient scaler, and the objects of ``register_for_checkpointing``.

    Raises:
        ConfigError: it is no Accelerator, or nothing is prepared yet.
        UnsupportedStateError: an engine keeps the state to itself.
    """
    if not hasattr(accelerator, "distributed_type"):
        raise ConfigError(f"accelerator={accelerator!r}: give the Accelerator that has prepared the training")
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        raise UnsupportedStateError(
            f"the state of an Accelerator with {kind} is kept by that engine: report the directories of its own "
            "checkpoints (holdfast.deepspeed, holdfast.megatron)"
        )
    if not accelerator._models:
        raise ConfigError(
            "this Accelerator has prepared no model: make the Checkpointer after accelerator.prepare(...)"
        )
    groups = {
        "model": accelerator._models,
        "optimizer": [wrapper.optimizer for wrapper in accelerator._optimizers],
        "scheduler": [wrapper.scheduler for wrapper in accelerator._schedulers],
        "scaler": [] if accelerator.scaler is None else [accelerator.scaler],
    }
    found = {
        name if number == 0 else f"{name}_{number}": item
        for name, group in groups.items()
        for number, item in enumerate(group)
    }
    custom = {
        f"custom_checkpoint_{number}": registered for number, registered in enumerate(accelerator._custom_objects)
    }
    return {**found, **custom}


def say_late(accelerator: Any, found: frozenset[str]) -> frozenset[str]:
    """Return the names of `objects_of` now, and say which came after ``found``, too late to be saved."""
    now = frozenset(objects_of(accelerator))
    if late := sorted(now - found):
        _ACCELERATE_LOG.warning(
            "%s NOT saved: prepared or registered after the Checkpointer was made; make it after accelerator.prepare "
            "and register_for_checkpointing", ", ".join(late),
        )  # fmt: skip
    return now


def check_skips_nothing(loader: Any) -> None:
    """Refuse what ``skip_first_batches`` has made: the position would be counted twice.

    Raises:
        ConfigError: the loader leaves out batches.
    """
    if found := [one for one in (loader, *samplers_of(loader)) if getattr(one, "skip_batches", 0)]:
        raise ConfigError(
            f"this loader leaves out its first {found[0].skip_batches} batches (accelerator.skip_first_batches), and "
            "ck.batches goes on behind the last trained batch by itself: give it the loader that was prepared"
        )


def own_loader(prepared: Any) -> tuple[Any, tuple[int, int] | bool | None]:
    """Return the loader that ``prepared`` was made of, and its part (rank, num_ranks); its order is known.

    The batches of that loader are those of one rank. Its position can be kept exactly and for any number of ranks: the
    order is known, not only how far it has been gone. Where it is not known the part is None, and the loader is
    ``prepared`` if it keeps its own position, else a `PreparedLoader`. torchdata's loader, as Accelerate makes it,
    keeps that of a stream or of a sampler with a state; of a shuffled data set it begins another order.
    """
    inner: Any = getattr(prepared, "base_dataloader", None)
    if inner is None:
        return PreparedLoader(prepared), None
    is_stream = isinstance(inner.dataset, IterableDataset)
    if getattr(prepared, "use_stateful_dataloader", False) and (
        is_stream or any(keeps_state(one) or _is_torchdatas(one) for one in [inner.dataset, *samplers_of(inner)])
    ):
        return prepared, None
    batches: Any = inner.batch_sampler
    size: int | None = getattr(batches, "batch_size", None)
    part: tuple[int, int] | bool = False
    if type(batches).__name__ == "BatchSamplerShard":
        part = batches.process_index, batches.num_processes
        size = batches.batch_size // batches.num_processes if batches.split_batches else batches.batch_size
        batches = batches.batch_sampler
    if type(prepared).__name__ != "DataLoaderShard" or is_stream or type(batches) is not BatchSampler:
        return PreparedLoader(prepared), None
    if type(inner) is not DataLoader and not _is_torchdatas(inner):
        return PreparedLoader(prepared), None
    sampler: Any = batches.sampler
    # Accelerate's own seedable sampler is a RandomSampler that follows the epoch: so do we.
    shuffles = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler._num_samples is None
    loader: DataLoader[Any] = DataLoader(
        inner.dataset,
        batch_size=size,
        sampler=None if shuffles else sampler,
        shuffle=shuffles or None,
        drop_last=batches.drop_last,
        **{name: getattr(inner, name) for name in _LOADER},
    )
    return loader, part


def _is_torchdatas(value: Any) -> bool:
    return type(value).__module__.startswith("torchdata.")


def told_when_last(
    batches: Iterator[Any], prepared: Any, *, left: Callable[[], int | None], to_device: Callable[[Any], Any]
) -> Iterator[Any]:
    """Yield batches on their device; Accelerate, which steps the optimizer at the last batch, hears of it first.

    Args:
        batches: of the loader that ``prepared`` was made of.
        prepared: the loader that Accelerate knows.
        left: number of batches that follow the newest.
        to_device: brings a batch to its device.
    """
    prepared.begin()
    try:
        for batch in batches:
            prepared.end_of_dataloader = left() == 0
            yield to_device(batch)
    finally:
        prepared.end()


class PreparedLoader:
    """A prepared loader of which only the number of batches drawn is known; what is said of it names that one."""

    def __init__(self, prepared: Any) -> None:
        self._prepared = self.named_as = prepared
        self._num_given = 0
        # With dispatch_batches rank 0 gives the others theirs: one rank that begins anew alone would wait for ever.
        self.draws_together = hasattr(prepared, "_fetch_batches")

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the last batch of a pass was given."""
        return bool(getattr(self._prepared, "end_of_dataloader", False))

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass have the order of this epoch."""
        if hasattr(self._prepared, "set_epoch"):
            self._prepared.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._prepared, 1):
            self._num_given = number
            yield batch

    def __len__(self) -> int:
        return self._num_given if self.end_of_dataloader else len(self._prepared)
