"""Lightning: `HoldfastCheckpointIO`, the plugin through which a plain `Trainer` saves and loads its checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpointer.functions import load
from holdfast.errors import CheckpointError, ConfigError
from holdfast.model_files import Content, ModelFiles

from .grafted import Grafted
from .reporting import scalars
from .saves import Saves

__all__ = ["HoldfastCheckpointIO"]

_ADVICE = "save_hyperparameters(ignore=[name]) leaves a value out; unsupported='drop' all that cannot be stored"


class HoldfastCheckpointIO(Grafted):
    """For a plain ``Trainer(plugins=[HoldfastCheckpointIO()])``: checkpoints are copied aside, and written meanwhile.

    Each is a directory, committed atomically and checked when it is loaded, without pickle, under the path that
    Lightning gives it. What ``ModelCheckpoint`` removes goes when what replaces it is durable.

    Args:
        root: where all checkpoints go, under the last part of their paths, which markers keep taken: a directory or a
            URI such as ``s3://bucket/run``. None: to the paths themselves.
        unsupported: what to do with values that cannot be stored without pickle, such as an ``nn.Module`` among the
            hyper-parameters: "raise", or "drop" to leave them out and name them in the log.
        timeout_s: bound of every wait.
        model_files: small files committed with each checkpoint, so that its directory is what another library loads:
            ``{name: bytes, text or a function}``, ``holdfast.transformers.model_files(module.lm,
            item="state_dict/lm")``, or the name under which an installed package makes them of what Lightning saves
            (a dict with "state_dict"). Then every checkpoint needs a name of its own. See docs/model-directory.md.
    """

    BASES = ("lightning.fabric.plugins:CheckpointIO", "lightning_fabric.plugins:CheckpointIO")
    EXTRA = "lightning"

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        unsupported: str = "raise",
        timeout_s: float = 600.0,
        model_files: ModelFiles | Mapping[str, Content] | str | None = None,
    ) -> None:
        super().__init__()
        self._saves = Saves(
            root, unsupported=unsupported, timeout_s=timeout_s, advice=_ADVICE, model_files=model_files
        )  # fmt: skip

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Copy the checkpoint aside and write it in the background; raises what failed before. Rank 0 calls it."""
        if storage_options is not None:
            raise ConfigError("HoldfastCheckpointIO takes no storage_options: say where with root=, or in the path")
        self._saves.save(path, checkpoint, step=checkpoint.get("global_step"), metrics=_monitored(checkpoint, path))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint, checked; torch's weights-only reader reads files that Lightning itself wrote."""
        device = None if callable(map_location) or isinstance(map_location, dict) else map_location
        return self._saves.load(path, device=device, trusted=weights_only is False)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, once every save started before is durable."""
        self._saves.remove(path)

    def latest(self, directory: str | os.PathLike[str] | None = None) -> str | None:
        """Return the newest sound checkpoint in ``directory`` (default: ``root``), None if there is none; see docs.

        What was saved with ``save_weights_only=True`` is passed over: `fit` cannot go on from it.
        """
        return self._saves.latest(directory, is_part=_is_weights_only)

    def teardown(self) -> None:
        """Wait until everything is durable; Lightning calls it at the end."""
        self._saves.wait()


def _is_weights_only(checkpoint: Checkpoint) -> bool:
    """Tell whether a `Trainer` has saved this without the state of its training, which has an entry for schedulers."""
    try:
        return _has(checkpoint, "pytorch-lightning_version") and not _has(checkpoint, "lr_schedulers")
    except CheckpointError:
        return False  # found out where every byte is read


def _has(checkpoint: Checkpoint, name: str) -> bool:
    try:
        load(checkpoint, only=name)
    except ConfigError:
        return False
    return True


def _monitored(checkpoint: Mapping[str, Any], path: Any) -> dict[str, Any]:
    """What ``ModelCheckpoint`` ranks this very path by; its ``current_score`` may be that of an older checkpoint."""
    callbacks = checkpoint.get("callbacks", {}).values()
    states = [state for state in callbacks if isinstance(state, Mapping) and "monitor" in state]
    return scalars(*({state["monitor"]: state.get("best_k_models", {}).get(os.fspath(path))} for state in states))
