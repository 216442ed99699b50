"""L5: the deep module that puts storage, format, writer and state together.

Public: `Checkpointer` (your own loop), `save`, `save_async`, `load`, `SaveHandle`, `PerRank`, `attrs`, `RNG`. Nothing
below this layer imports it, except `Checkpoint.load`, which reaches up lazily.
"""

from __future__ import annotations

from holdfast.state.tree.rng import RNG
from holdfast.state.tree.values import PerRank, attrs

from .checkpointer import Checkpointer
from .functions import SaveHandle, load, save, save_async
from .stats import Stats

__all__ = ["RNG", "Checkpointer", "PerRank", "SaveHandle", "Stats", "attrs", "load", "save", "save_async"]
