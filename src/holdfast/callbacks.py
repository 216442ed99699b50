"""Callbacks of the loop trainer."""

from __future__ import annotations

from .trainers.loop.callbacks import Callback, EarlyStopper, EarlyStopping, ThresholdStopper
from .trainers.loop.saving.load import LoadCheckpoint
from .trainers.loop.saving.saver import CheckpointSaver

__path__: list[str] = []  # an import of one of Composer's inner modules is answered with where it is
__all__ = ["Callback", "CheckpointSaver", "EarlyStopper", "EarlyStopping", "LoadCheckpoint", "ThresholdStopper"]
