"""A run from its start to its end: puts storage, run, format, writer and state together.

Start with `run_session`, which holds a run for every front door, and `pending_saves`, which follows its saves; then
`checkpointer` (your own loop), `boundaries`, `start` and `resume`; `functions` are `save`, `save_async` and `load`.
Public: `Checkpointer`, `PerRank`, `attrs`, `RNG`, and those of `functions`. Nothing below this layer
imports it, except `Checkpoint.load`, which reaches up lazily.
"""

from __future__ import annotations

from holdfast.state.tree.rng import RNG
from holdfast.state.tree.values import PerRank, attrs

from .checkpointer import Checkpointer
from .pending_saves import Stats

__all__ = ["RNG", "Checkpointer", "PerRank", "Stats", "attrs"]
