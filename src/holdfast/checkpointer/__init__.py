"""A run from its start to its end: puts storage, run, format, writer and state together.

Start with `run_session`, which holds a run for every front door, and `pending_saves`, which follows its saves; then
`checkpointer` (your own loop), `boundaries`, `start` and `resume`; `functions` are `save`, `save_async` and `load`.
Public: `Checkpointer`, `save`, `save_async`, `load`, `SaveHandle`, `PerRank`, `attrs`, `RNG`. Nothing below this layer
imports it, except `Checkpoint.load`, which reaches up lazily.
"""

from __future__ import annotations

from holdfast.state.tree.rng import RNG
from holdfast.state.tree.values import PerRank, attrs

from .checkpointer import Checkpointer
from .functions import SaveHandle, load, save, save_async
from .stats import Stats

__all__ = ["RNG", "Checkpointer", "PerRank", "SaveHandle", "Stats", "attrs", "load", "save", "save_async"]
