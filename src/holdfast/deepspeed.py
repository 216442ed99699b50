"""DeepSpeed: the shards of all ranks as one checkpoint, checked before they are read.

On workers of the function trainer `report` calls ``engine.save_checkpoint`` on every rank and commits what they wrote,
and `load` gives it back to an engine; in a loop of your own under torchrun or the `deepspeed` launcher `Keeper` does.
The files stay DeepSpeed's own, which are pickles; `holdfast.import_checkpoint` puts the float32 weights of all ranks
together without running any of it.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from typing import Any

from ._log import get_logger
from .checkpoint.handle import Checkpoint
from .errors import CheckpointError, ConfigError
from .frameworks.keepers import ShardCheckpoints, verified_directory
from .frameworks.reporting import reporting
from .trainers.function.config import CheckpointUploadMode

__all__ = ["TAG", "Keeper", "load", "report"]

TAG = "deepspeed"  # the folder in which DeepSpeed's files lie; `latest` names it
_LOG = get_logger("deepspeed")


def report(
    metrics: Mapping[str, Any],
    engine: Any,
    *,
    client_state: Mapping[str, Any] | None = None,
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.ASYNC,
    validation: bool | Mapping[str, Any] = False,
    **options: Any,
) -> None:
    """Report metrics and a checkpoint of an engine, from a ``train_func``; every rank calls this.

    Returns when DeepSpeed has written its files and they are taken over, which costs a rename; or, with SYNC, when they
    are committed.

    Args:
        metrics: of rank 0 are kept.
        engine: what ``deepspeed.initialize`` gave.
        client_state: plain values to go with it (step, epoch); `load` returns them.
        checkpoint_upload_mode: ASYNC or SYNC.
        validation: as in `holdfast.report`.
        options: of ``engine.save_checkpoint`` (``exclude_frozen_parameters``).

    Raises:
        ConfigError: the engine's checkpoint engine writes in the background.
        SessionError: not inside of a ``train_func``.
        HoldfastError: a rank failed or did not come; all ranks hear of it.

    Example:
        >>> holdfast.deepspeed.report({"loss": loss}, engine, client_state={"step": step})  # doctest: +SKIP
    """
    _refuse_decoupled(engine)
    with reporting(metrics, sharded=True, upload_mode=checkpoint_upload_mode, validation=validation) as directory:
        _write(engine, directory, client_state, options)


def load(engine: Any, checkpoint: str | os.PathLike[str] | Checkpoint, **options: Any) -> dict[str, Any]:
    """Give an engine what was saved, and return the client's state; every rank calls this.

    Every byte is checked against its digest first: DeepSpeed unpickles its files, and these are the ones that the run
    itself has written. Stage and number of ranks have to be those of the save, as DeepSpeed wants them.

    Args:
        engine: what ``deepspeed.initialize`` gave.
        checkpoint: path, URI or `Checkpoint`; also any directory of DeepSpeed, which is then read as it is.
        options: of ``engine.load_checkpoint`` (``load_module_only``, ``load_optimizer_states``...).

    Raises:
        CorruptCheckpointError: a file is damaged; on all ranks, and before DeepSpeed reads anything.
        CheckpointError: DeepSpeed finds nothing of its own there, or it is of another stage of ZeRO.
    """
    with verified_directory(checkpoint) as directory:
        return _read(engine, directory, checkpoint, options)


class Keeper(ShardCheckpoints):
    """Keeps the checkpoints of an engine, without the function trainer: any storage, in the background, best and last.

    Every rank makes a `Keeper` and makes the same calls, after ``deepspeed.initialize``. Arguments are those of
    `ShardCheckpoints`.

    Example:
        >>> with Keeper("s3://bucket/run", keep=Keep(last=2, best=1, metric="loss")) as keeper:  # doctest: +SKIP
        ...     step = (keeper.load(engine) or {"step": 0})["step"]
        ...     while step < 1000:
        ...         loss, step = train_one(engine), step + 1
        ...         if step % 100 == 0:
        ...             keeper.save(engine, step=step, metrics={"loss": loss}, client_state={"step": step})
    """

    def save(
        self,
        engine: Any,
        *,
        step: int,
        epoch: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        client_state: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Let all ranks write; returns when their files are taken over, and commits in the background. As `report`."""
        _refuse_decoupled(engine)
        with self.writing(step=step, epoch=epoch, metrics=metrics) as directory:
            _write(engine, directory, client_state, options)

    def load(self, engine: Any, **options: Any) -> dict[str, Any] | None:
        """Give an engine the newest sound checkpoint; returns the client's state, None at a fresh start. As `load`."""
        with self.newest() as directory:
            return None if directory is None else _read(engine, directory, directory, options)


def _refuse_decoupled(engine: Any) -> None:
    if getattr(getattr(engine, "checkpoint_engine", None), "is_decoupled", bool)():
        raise ConfigError(
            f"{type(engine.checkpoint_engine).__name__} writes after engine.save_checkpoint has returned (decoupled), "
            "and half a checkpoint would be committed: take the checkpoint writer out of DeepSpeed's configuration "
            '("checkpoint": {"writer": {"decoupled": true}}); the commit is in the background anyway'
        )


def _write(engine: Any, directory: str, client_state: Mapping[str, Any] | None, options: Mapping[str, Any]) -> None:
    _say_what_is_accumulated(engine)
    engine.save_checkpoint(directory, tag=TAG, client_state=dict(client_state or {}), **options)


def _say_what_is_accumulated(engine: Any) -> None:
    """Say which gradients are lost; DeepSpeed saves neither them nor how many micro-batches they are of."""
    managed = getattr(engine, "managed_gradient_accumulation", lambda: True)()  # older versions lack it
    if not managed or getattr(engine, "_is_gradient_accumulation_boundary", None) is not None:
        return  # the script says itself where a step ends
    whole = engine.gradient_accumulation_steps()
    if (done := engine.micro_steps % whole) and engine.global_rank == 0:
        _LOG.warning(
            "saved after %d of the %d micro-batches of an optimizer step: DeepSpeed does not save accumulated "
            "gradients, so a resume from here has lost these; save where engine.micro_steps %% %d == 0",
            done, whole, whole,
        )  # fmt: skip


def _read(engine: Any, directory: str, name: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_other_stage(engine, os.path.join(directory, options.get("tag") or _newest(directory)), name, options)
    path, client_state = engine.load_checkpoint(directory, **options)
    if path is None:
        raise CheckpointError(
            f"{name}: DeepSpeed has loaded nothing. It needs the directory with `latest` in it, as `report` and "
            "engine.save_checkpoint write it; its own log says what is missing"
        )
    return dict(client_state or {})


def _newest(directory: str) -> str:
    try:
        with open(os.path.join(directory, "latest"), encoding="utf-8") as file:
            return file.read().strip()
    except FileNotFoundError:
        return TAG


def _refuse_other_stage(engine: Any, folder: str, name: Any, options: Mapping[str, Any]) -> None:
    """Refuse what DeepSpeed would answer with a bare assertion, or an error from its insides."""
    cut = glob.glob(os.path.join(glob.escape(folder), "zero_pp_rank_*_model_states.pt"))
    moments = glob.glob(os.path.join(glob.escape(folder), "*zero_pp_rank_*_optim_states.pt"))
    if not os.path.isdir(folder) or engine.load_universal_checkpoint():
        return
    stage, saved = engine.zero_optimization_stage(), "3" if cut else "1 or 2" if moments else "0"
    fits = (stage == 3) == bool(cut)
    if options.get("load_optimizer_states", True) and not options.get("load_module_only"):
        # In bfloat16 there may be such files of stage 0, too.
        plain = [one for one in moments if not os.path.basename(one).startswith("bf16_")]
        fits = fits and bool(moments if stage else not plain)
    if not fits:
        raise CheckpointError(
            f"{name} was saved with ZeRO stage {saved}, and this engine has stage {stage}, which DeepSpeed does not "
            "load: take the stage of the save, or convert it first (ds_to_universal --inject_missing_state of "
            "DeepSpeed, or holdfast import for the weights alone)"
        )
