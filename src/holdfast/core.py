"""Names of the loop trainer that scripts use beside `holdfast.Trainer`: its state, its time, its events."""

from __future__ import annotations

from holdfast.trainers.loop.training import Precision

from .trainers.loop.callbacks import EMA, Algorithm, Callback, LabelSmoothing
from .trainers.loop.data import DataSpec
from .trainers.loop.evaluator import Evaluator
from .trainers.loop.state import State
from .trainers.loop.time import Event, Time, Timestamp, TimeUnit
from .trainers.loop.trainer import Trainer

__path__: list[str] = []  # an import of one of Composer's inner modules is answered with where it is
__all__ = [
    "EMA", "Algorithm", "Callback", "DataSpec", "Evaluator", "Event", "LabelSmoothing", "Precision", "State", "Time",
    "TimeUnit", "Timestamp", "Trainer",
]  # fmt: skip
