"""Names of the loop trainer that scripts use beside `holdfast.Trainer`: its state, its time, its events."""

from __future__ import annotations

from .trainers.loop.algorithms import EMA, Algorithm, LabelSmoothing
from .trainers.loop.callbacks import Callback
from .trainers.loop.evaluator import DataSpec, Evaluator
from .trainers.loop.events import Event
from .trainers.loop.precision import Precision
from .trainers.loop.state import State
from .trainers.loop.time import Time, TimeUnit
from .trainers.loop.timestamp import Timestamp
from .trainers.loop.trainer import Trainer

__all__ = [
    "EMA",
    "Algorithm",
    "Callback",
    "DataSpec",
    "Evaluator",
    "Event",
    "LabelSmoothing",
    "Precision",
    "State",
    "Time",
    "TimeUnit",
    "Timestamp",
    "Trainer",
]
