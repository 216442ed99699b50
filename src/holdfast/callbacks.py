"""Callbacks of the loop trainer."""

from __future__ import annotations

from .trainers.loop.callbacks import Callback, EarlyStopper, EarlyStopping, LoadCheckpoint, ThresholdStopper
from .trainers.loop.saver import CheckpointSaver

__all__ = ["Callback", "CheckpointSaver", "EarlyStopper", "EarlyStopping", "LoadCheckpoint", "ThresholdStopper"]
