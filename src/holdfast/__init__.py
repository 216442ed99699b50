"""Holdfast: training checkpoints that cannot be lost.

Importing this package imports no torch: public names load their module on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import errors as _errors

if TYPE_CHECKING:
    from .checkpoint.handle import Checkpoint as Checkpoint
    from .checkpoint.handle import Verification as Verification
    from .checkpointer import RNG as RNG
    from .checkpointer import Checkpointer as Checkpointer
    from .checkpointer import PerRank as PerRank
    from .checkpointer import SaveHandle as SaveHandle
    from .checkpointer import load as load
    from .checkpointer import save as save
    from .checkpointer import save_async as save_async
    from .config import CheckpointConfig as CheckpointConfig
    from .config import CheckpointStrategy as CheckpointStrategy
    from .config import FailureConfig as FailureConfig
    from .config import Keep as Keep
    from .config import Mirror as Mirror
    from .config import RunConfig as RunConfig
    from .config import ScalingConfig as ScalingConfig
    from .errors import *  # noqa: F403
    from .interop.export import Exported as Exported
    from .interop.export import export as export
    from .interop.import_ import Imported as Imported
    from .interop.import_ import import_checkpoint as import_checkpoint
    from .runtime.control.result import Result as Result
    from .runtime.types import CheckpointUploadMode as CheckpointUploadMode
    from .runtime.types import ReportedCheckpoint as ReportedCheckpoint
    from .runtime.types import ReportedCheckpointStatus as ReportedCheckpointStatus
    from .runtime.worker.session import get_all_reported_checkpoints as get_all_reported_checkpoints
    from .runtime.worker.session import get_checkpoint as get_checkpoint
    from .runtime.worker.session import get_context as get_context
    from .runtime.worker.session import load_checkpoint as load_checkpoint
    from .runtime.worker.session import report as report
    from .runtime.worker.session import save_checkpoint as save_checkpoint
    from .trainers.loop.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HOME = {
    "Checkpoint": "checkpoint.handle",
    "Verification": "checkpoint.handle",
    "Checkpointer": "checkpointer",
    "PerRank": "checkpointer",
    "RNG": "checkpointer",
    "SaveHandle": "checkpointer",
    "load": "checkpointer",
    "save": "checkpointer",
    "save_async": "checkpointer",
    "CheckpointConfig": "config",
    "CheckpointStrategy": "config",
    "FailureConfig": "config",
    "Keep": "config",
    "Mirror": "config",
    "RunConfig": "config",
    "ScalingConfig": "config",
    "Exported": "interop.export",
    "export": "interop.export",
    "Imported": "interop.import_",
    "import_checkpoint": "interop.import_",
    "Result": "runtime.control.result",
    "get_all_reported_checkpoints": "runtime.worker.session",
    "get_checkpoint": "runtime.worker.session",
    "get_context": "runtime.worker.session",
    "load_checkpoint": "runtime.worker.session",
    "report": "runtime.worker.session",
    "save_checkpoint": "runtime.worker.session",
    "CheckpointUploadMode": "runtime.types",
    "ReportedCheckpoint": "runtime.types",
    "ReportedCheckpointStatus": "runtime.types",
    "Trainer": "trainers.loop.trainer",
    **dict.fromkeys(_errors.__all__, "errors"),
}
__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
