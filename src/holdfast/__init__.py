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
    from .config import Keep as Keep
    from .errors import *  # noqa: F403

__version__ = "0.1.0"

_HOME = {
    "Checkpoint": "checkpoint.handle",
    "Verification": "checkpoint.handle",
    "Checkpointer": "checkpointer",
    "Keep": "config",
    "PerRank": "checkpointer",
    "RNG": "checkpointer",
    "SaveHandle": "checkpointer",
    "load": "checkpointer",
    "save": "checkpointer",
    "save_async": "checkpointer",
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
