"""The loop trainer as a type checker sees it; checked by mypy, never run."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import assert_type

import holdfast as hf
from holdfast.callbacks import Callback, CheckpointSaver, EarlyStopping
from holdfast.core import EMA, Event, State, Time, Timestamp
from holdfast.loggers import JSONLLogger, Logger


class Mine(Callback):
    """Overrides one event."""

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log something."""
        assert_type(state.timestamp, Timestamp)
        logger.log_metrics({"mine": 1.0})


def due(state: State, event: Event) -> bool:
    """Decide by hand."""
    return event is Event.EPOCH_CHECKPOINT


def use(model: torch.nn.Module, data: Any) -> None:
    """Call everything once."""
    saver = CheckpointSaver("runs", "ep{epoch}", save_interval=due, keep=hf.Keep(last=2))
    with hf.Trainer(
        model=model, train_dataloader=data, max_duration=Time(2, "ep"), algorithms=EMA(0.9),
        callbacks=[Mine(), saver, EarlyStopping("loss")], loggers=JSONLLogger("x.jsonl"), save_folder="runs",
        autoresume=True,
    ) as trainer:  # fmt: skip
        trainer.fit("1ep")
        assert_type(trainer.saved_checkpoints, list[str])
        assert_type(trainer.state, State)
        assert_type(trainer.eval(), dict[str, dict[str, Any]])
        assert_type(Time("3ep") + 1, Time)
