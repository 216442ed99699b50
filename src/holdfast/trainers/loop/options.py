"""Arguments of a `Trainer`, brought into the form that it uses; wrong values are refused here."""

from __future__ import annotations

import os
import secrets
import time
import uuid
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch

from holdfast._ranks import current_ranks
from holdfast.errors import ConfigError
from holdfast.state.accelerator import accelerator, default_device
from holdfast.state.data.seeding import seed_all

from .arguments import check_path, several
from .training.evaluator import Evaluator
from .training.metrics import as_metrics
from .training.parallel import check_optimizers, default_optimizer, is_sharded, move_plain
from .training.ranks import Ranks
from .training.steps import LossOfEvaluation

__all__ = [
    "check_clip",
    "choose_device",
    "choose_optimizers",
    "choose_run_name",
    "eval_metric_sets",
    "place_model",
    "seed_ranks",
]


def check_clip(norm: Any) -> float | None:
    """Return the bound of gradients as a number, be it one of NumPy or torch.

    Raises:
        ConfigError: it is no positive number.
    """
    if norm is None:
        return None
    try:
        bound = 0.0 if isinstance(norm, (bool, str, bytes)) else float(norm)
    except (TypeError, ValueError, RuntimeError):
        bound = 0.0
    if not bound > 0:
        raise ConfigError(f"grad_clip_norm={norm!r}: give a positive number, or None")
    return bound


def choose_device(device: Any) -> torch.device:
    """Return the device to train on: a GPU where there is one.

    Raises:
        ConfigError: torch knows no such device, or cannot use it.
    """
    if device is None:
        return _own(default_device(0).type)
    try:
        chosen = (
            device
            if isinstance(device, torch.device)
            else _own((accelerator() or "cuda") if device == "gpu" else device)
        )
        torch.empty(0, device=chosen)  # fails for a missing device, and for a kind that this torch was built without
        return chosen
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ConfigError(f"device={device!r}: {str(error).splitlines()[0]}") from error


def _own(device: Any) -> torch.device:
    """Return the GPU of this process where several on this machine have one each."""
    found, ranks = torch.device(device), current_ranks()
    if found.type == default_device(0).type != "cpu" and found.index is None and ranks.world_size > 1:
        return default_device(ranks.local_rank)
    return found


def place_model(model: torch.nn.Module, device: torch.device) -> None:
    """Bring a model to its device; of a sharded model only the parameters and buffers that are not sharded."""
    if is_sharded(model):
        move_plain(model, device)
    else:
        model.to(device)


def choose_optimizers(
    given: Any, model: torch.nn.Module, device: torch.device, *, trains: bool, scaled: bool
) -> list[torch.optim.Optimizer]:
    """Return the optimizers given, else an AdamW if there is something to train.

    Raises:
        ConfigError: an entry is no optimizer, or cannot be used on the device or with scaled gradients.
    """
    found = several(given, "optimizers")
    if not found and trains and any(True for _ in model.parameters()):
        found = [default_optimizer(model)]
    check_optimizers(found, device, scaled=scaled)
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


def seed_ranks(seed: int | None, ranks: Ranks) -> int:
    """Seed this process, each rank differently, and return the seed of rank 0; without a seed, torch's own decides.

    Raises:
        ConfigError: it is no seed.
    """
    if seed is not None and (isinstance(seed, bool) or not hasattr(seed, "__index__") or not 0 <= int(seed) < 1 << 62):
        raise ConfigError(f"seed={seed!r}: give a whole number from 0 to 2**62, or None")
    common = int(ranks.agree("seed", lambda: torch.initial_seed() % (1 << 62) if seed is None else seed))
    if seed is not None or ranks.rank > 0:
        seed_all(common + ranks.rank)
        torch.manual_seed(common + ranks.rank)
    return common


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
