"""Names of the loop trainer that scripts use beside `holdfast.Trainer`: its state, its time, its events."""

from __future__ import annotations

from holdfast.trainers.loop.training.steps import Precision

from .trainers.loop.algorithms import EMA, Algorithm, LabelSmoothing
from .trainers.loop.callbacks import Callback
from .trainers.loop.state import State
from .trainers.loop.time import Event, Time, Timestamp, TimeUnit
from .trainers.loop.trainer import Trainer
from .trainers.loop.training.evaluator import DataSpec, Evaluator

__path__: list[str] = []  # an import of one of Composer's inner modules is answered with where it is
__all__ = [
    "EMA", "Algorithm", "Callback", "DataSpec", "Evaluator", "Event", "LabelSmoothing", "Precision", "State", "Time",
    "TimeUnit", "Timestamp", "Trainer",
]  # fmt: skip
