"""Holdfast: training checkpoints that cannot be lost.

Importing this package imports no torch: public names load their module on first use (PEP 562).
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from . import errors as _errors
from ._paused_gc import paused_gc
from ._version import __version__ as __version__

if TYPE_CHECKING:
    from types import ModuleType

    from holdfast.trainers.function.config import UserCallback as UserCallback

    from .checkpoint.follow import follow as follow
    from .checkpoint.handle import Checkpoint as Checkpoint
    from .checkpoint.verify import Verification as Verification
    from .checkpointer import RNG as RNG
    from .checkpointer import Checkpointer as Checkpointer
    from .checkpointer import PerRank as PerRank
    from .checkpointer import attrs as attrs
    from .checkpointer.functions import SaveHandle as SaveHandle
    from .checkpointer.functions import load as load
    from .checkpointer.functions import save as save
    from .checkpointer.functions import save_async as save_async
    from .config import Guard as Guard
    from .config import Keep as Keep
    from .config import Mirror as Mirror
    from .errors import *  # noqa: F403
    from .errors import ControllerError as ControllerError
    from .errors import SessionMisuseError as SessionMisuseError
    from .errors import WorkerGroupError as WorkerGroupError
    from .interop.export import Exported as Exported
    from .interop.export import export as export
    from .interop.import_ import Imported as Imported
    from .interop.import_ import import_checkpoint as import_checkpoint
    from .model_files import ModelFiles as ModelFiles
    from .trainers.function.config import CheckpointConfig as CheckpointConfig
    from .trainers.function.config import CheckpointConsistencyMode as CheckpointConsistencyMode
    from .trainers.function.config import CheckpointStrategy as CheckpointStrategy
    from .trainers.function.config import CheckpointUploadMode as CheckpointUploadMode
    from .trainers.function.config import FailureConfig as FailureConfig
    from .trainers.function.config import ReportedCheckpoint as ReportedCheckpoint
    from .trainers.function.config import ReportedCheckpointStatus as ReportedCheckpointStatus
    from .trainers.function.config import RunConfig as RunConfig
    from .trainers.function.config import ScalingConfig as ScalingConfig
    from .trainers.function.config import ValidationConfig as ValidationConfig
    from .trainers.function.config import ValidationFn as ValidationFn
    from .trainers.function.config import ValidationTaskConfig as ValidationTaskConfig
    from .trainers.function.control.result import Result as Result
    from .trainers.function.worker.session import TrainContext as TrainContext
    from .trainers.function.worker.session import get_all_reported_checkpoints as get_all_reported_checkpoints
    from .trainers.function.worker.session import get_checkpoint as get_checkpoint
    from .trainers.function.worker.session import get_context as get_context
    from .trainers.function.worker.session import load_checkpoint as load_checkpoint
    from .trainers.function.worker.session import local_rank as local_rank
    from .trainers.function.worker.session import report as report
    from .trainers.function.worker.session import save_checkpoint as save_checkpoint
    from .trainers.function.worker.session import should_save as should_save
    from .trainers.function.worker.session import world_rank as world_rank
    from .trainers.function.worker.session import world_size as world_size
    from .trainers.loop.trainer import Trainer as Trainer

_NAMES: dict[str, tuple[str, ...]] = {
    "checkpoint.handle": ("Checkpoint",),
    "checkpoint.verify": ("Verification",),
    "checkpoint.follow": ("follow",),
    "checkpointer": ("Checkpointer", "PerRank", "RNG", "attrs"),
    "checkpointer.functions": ("SaveHandle", "load", "save", "save_async"),
    "trainers.function.config": (
        "CheckpointConfig", "CheckpointConsistencyMode", "CheckpointStrategy", "CheckpointUploadMode", "FailureConfig",
        "ReportedCheckpoint", "ReportedCheckpointStatus", "RunConfig", "ScalingConfig", "UserCallback",
        "ValidationConfig", "ValidationFn", "ValidationTaskConfig",
    ),
    "config": ("Guard", "Keep", "Mirror"),
    "model_files": ("ModelFiles",),
    "interop.export": ("Exported", "export"),
    "interop.import_": ("Imported", "import_checkpoint"),
    "trainers.function.control.result": ("Result",),
    "trainers.function.worker.session": (
        "TrainContext", "get_all_reported_checkpoints", "get_checkpoint", "get_context", "load_checkpoint",
        "local_rank", "report", "save_checkpoint", "should_save", "world_rank", "world_size",
    ),
    "trainers.loop.trainer": ("Trainer",),
    "errors": ("ControllerError", "SessionMisuseError", "WorkerGroupError", *_errors.__all__),
}  # fmt: skip
_HOME = {name: home for home, names in _NAMES.items() for name in names}
# Used as `holdfast.torch.TorchTrainer` after a plain `import holdfast`, which is all that a process of Ray does for
# what stands inside the function that it has got.
_MODULES = frozenset({"collective", "ray_tune", "torch"})
__all__ = sorted(_HOME)  # noqa: PLE0605


class _ModulesNotHere:
    """The last finder of modules: answers the import of one that scripts for other trainers know, and we do not have.

    ``import a.b`` does not ask attributes of ``a``, and its own words would be "No module named 'a.b'".
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.startswith("holdfast."):
            from ._not_here import refuse_module

            refuse_module(name)


if not any(getattr(finder, "__name__", "") == _ModulesNotHere.__name__ for finder in sys.meta_path):
    sys.meta_path.append(_ModulesNotHere)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if name in _MODULES:
        return _import(name)
    if home is None:
        from ._not_here import missing

        raise missing(__name__, name)
    value = getattr(_import(home), name)
    globals()[name] = value
    return value


def _import(module: str) -> ModuleType:
    """Import a module of this package; a collection in between would search all of torch (half of the time)."""
    with paused_gc():
        return importlib.import_module(f".{module}", __name__)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
