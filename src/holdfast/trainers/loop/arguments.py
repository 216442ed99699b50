"""Arguments that are refused: those of Composer that have no place here, and values of a wrong kind."""

from __future__ import annotations

import inspect
import os
import secrets
import time
import uuid
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from holdfast._meant import answering
from holdfast._optional import tracker
from holdfast.errors import ConfigError

_SHARD = "shard the model yourself with torch.distributed.fsdp.fully_shard, and pass it as model"
_CONSOLE = "give a holdfast.loggers.ConsoleLogger(log_interval, stream) among the loggers"
_SCHEDULE = "give the schedulers their lengths yourself"
_LIBRARY = "set it up in torch before the Trainer is made"
# What to do instead, by the name of the argument: answered by `holdfast._meant.removed`.
OF_TRAINER = {
    "accumulate_train_batch_on_tokens": "parts of a batch weigh by their samples; weigh them by tokens in the loss",
    "algorithm_passes": "algorithms run in the order they are given",
    "auto_log_hparams": "call trainer.logger.log_hyperparameters({...})",
    "compile_config": "pass torch.compile(model); names in checkpoints stay the same",
    "console_log_interval": _CONSOLE,
    "console_stream": _CONSOLE,
    "ddp_sync_strategy": "pass a DistributedDataParallel as model",
    "deepspeed_config": "there is holdfast.deepspeed for DeepSpeed's own engine, leave it out",
    "deterministic_mode": "call torch.use_deterministic_algorithms(True)",
    "device_train_microbatch_size": "give grad_accum, the number of parts of each batch",
    "dist_timeout": "call torch.distributed.init_process_group(timeout=...) before the Trainer is made",
    "fsdp_auto_wrap": _SHARD,
    "fsdp_config": _SHARD,
    "load_chunk_size": "what is read at once is chosen for each storage, leave it out",
    "load_exclude_algorithms": "algorithms of a checkpoint are never made by themselves, leave it out",
    "load_fsdp_monolith_rank0_only": "each rank reads what it needs, leave it out",
    "log_to_console": _CONSOLE,
    "log_traces": "give a callback with run_event(event, state, logger)",
    "parallelism_config": _SHARD,
    "precision_config": _LIBRARY,
    "profiler": "use torch.profiler around fit()",
    "python_log_level": 'call logging.getLogger("holdfast").setLevel(...)',
    "save_artifact_name": "it is called save_remote_file_name",
    "save_compression": "there is no container for it, leave it out",
    "save_latest_artifact_name": "it is CheckpointSaver(latest_remote_file_name=...)",
    "scale_schedule_ratio": _SCHEDULE,
    "spin_dataloaders": "positions in the data are found without going through it, leave it out",
    "train_dataloader_label": "the label is always 'train', leave it out",
    "train_subset_num_batches": "give max_duration in batches, such as '100ba'",
}
_AT_ONCE = "give it to the Trainer, and make another one to change it"
_OF_FIT = {
    "device_train_microbatch_size": "give grad_accum to the Trainer, the number of parts of each batch",
    "eval_dataloader": _AT_ONCE,
    "eval_interval": _AT_ONCE,
    "eval_subset_num_batches": _AT_ONCE,
    "precision": _AT_ONCE,
    "reset_time": "make another Trainer, with load_path=... and load_weights_only=True for the weights of this one",
    "scale_schedule_ratio": _SCHEDULE,
    "schedulers": _AT_ONCE,
    "spin_dataloaders": OF_TRAINER["spin_dataloaders"],
    "step_schedulers_every_batch": _AT_ONCE,
    "train_dataloader": _AT_ONCE,
    "train_dataloader_label": OF_TRAINER["train_dataloader_label"],
    "train_subset_num_batches": "give duration in batches, such as '100ba'",
}
of_fit = answering("Trainer.fit", _OF_FIT)
OF_SAVER = {
    "artifact_name": "it is called remote_file_name",
    "latest_artifact_name": "it is called latest_remote_file_name",
    "num_concurrent_uploads": "give it to the RemoteUploaderDownloader; a save_folder that is a URI needs none",
    "upload_timeout_in_seconds": "an upload may take as long as it makes progress, leave it out",
}
OF_UPLOADER = {
    "upload_staging_folder": "what is saved is read from save_folder, leave it out",
    "use_procs": "uploads are made by a process of their own, leave it out",
}


def check_flags(**flags: Any) -> None:
    """Refuse what is not True or False (or 1 or 0): a word such as "no" would count as true.

    Raises:
        ConfigError: naming the argument.
    """
    for name, value in flags.items():
        if not isinstance(value, np.bool_) and not (isinstance(value, Integral) and value in (0, 1)):
            raise ConfigError(f"{name}={value!r}: give True or False")


def check_loader(value: Any, what: str) -> Any:
    """Return data that a loop can go through, or None.

    Raises:
        ConfigError: it is none: a number, say, or a generator function that was not called.
    """
    known = value is None or any(hasattr(value, name) for name in ("__iter__", "__getitem__"))
    if not known or isinstance(value, (str, bytes)):
        raise ConfigError(
            f"{what}={value!r} is a {type(value).__name__}: give a DataLoader, or anything else that yields batches"
        )
    return value


def check_function(value: Any, what: str, *arguments: str) -> Any:
    """Return a function that takes these arguments, or None.

    Raises:
        ConfigError: it is none, or takes others.
    """
    if value is None:
        return None
    shape = f"fn({', '.join(arguments)})"
    if not callable(value) or isinstance(value, type):
        raise ConfigError(f"{what}={value!r} is a {type(value).__name__}: give a function {shape}")
    try:
        inspect.signature(value).bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{what}={value!r} cannot be called so ({error}): give a function {shape}") from None
    except ValueError:  # of some built-in ones nobody can tell
        pass
    return value


def check_path(value: Any, what: str) -> str:
    """Return a path or a name as text.

    Raises:
        ConfigError: it is neither, or holds what no name can hold.
    """
    try:
        text = os.fspath(value)
    except TypeError:
        raise ConfigError(f"{what}={value!r} is a {type(value).__name__}: give a str or a pathlib.Path") from None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{what}={value!r}: give a str, with something in it but zero bytes")
    return text


_KINDS = {
    "algorithms": (("match", "apply"), "a holdfast.core.Algorithm"),
    "callbacks": (("run_event",), "a holdfast.callbacks.Callback, or a list of them"),
    "loggers": (("log_metrics",), "a holdfast.loggers.LoggerDestination"),
    "optimizers": (("step", "zero_grad", "state_dict"), "a torch.optim.Optimizer"),
    "schedulers": (
        ("step", "state_dict"),
        "a scheduler of torch.optim.lr_scheduler or holdfast.optim",
    ),
}


def check_schedule(value: Any, what: str) -> None:
    """Refuse a function that is no schedule: of (state), or of (state, ssr).

    Raises:
        ConfigError: naming the argument.
    """
    try:
        check_function(value, what, "state", "ssr")
    except ConfigError:
        check_function(value, what, "state")


def several(value: Any, what: str) -> list[Any]:
    """Return a value, several of them or None as a list.

    Raises:
        ConfigError: something in it cannot be one of ``what``: a class, say, instead of what it makes.
    """
    if value is None:
        return []
    found = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if what == "callbacks":
        found = [tracker(each, what=what) for each in found]
    methods, kind = _KINDS[what]
    for number, given in enumerate(found):
        if isinstance(given, type):
            raise ConfigError(
                f"{what}[{number}] is the class {given.__name__}: give what it makes, {given.__name__}(...)"
            )
        if what == "schedulers" and callable(given) and not hasattr(given, "step"):
            check_schedule(given, f"{what}[{number}]")
            continue
        plain = isinstance(given, (str, bytes, int, float, dict, set, torch.Tensor))
        if plain or not all(callable(getattr(given, name, None)) for name in methods):
            raise ConfigError(f"{what}[{number}] is a {type(given).__name__}: give {kind}")
    return found


def choose_run_name(run_name: Any, *, needed: bool) -> str:
    """Return the name of the run: the argument, COMPOSER_RUN_NAME, RUN_NAME, or a new one.

    Raises:
        ConfigError: it is no text (a number or a UUID will do), or has to be the same at every start and is not given.
    """
    if isinstance(run_name, (Integral, uuid.UUID)) and not isinstance(run_name, bool):
        run_name = str(run_name)
    given = run_name or os.environ.get("COMPOSER_RUN_NAME") or os.environ.get("RUN_NAME")
    if given:
        return check_path(given, "run_name")
    if needed:
        raise ConfigError(
            "autoresume=True finds the run of an earlier start by its name: pass run_name=..., or set RUN_NAME, or "
            "leave {run_name} out of the names it saves and uploads to (save_folder, save_filename, "
            "save_remote_file_name)"
        )
    return f"{int(time.time())}-{secrets.token_hex(3)}"
