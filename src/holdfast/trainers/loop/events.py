"""The moments of training at which callbacks and algorithms are asked."""

from __future__ import annotations

from enum import Enum

__all__ = ["Event"]


class Event(str, Enum):
    """One moment; the value is the name of the method of a `Callback` that is called.

    In the order of a run::

        init, before_load, after_load, fit_start
            epoch_start
                before_dataloader, after_dataloader, batch_start, before_train_batch
                    before_forward, after_forward, before_loss, after_loss, before_backward, after_backward
                after_train_batch, batch_end
                    eval_before_all, eval_start
                        eval_batch_start, eval_before_forward, eval_after_forward, eval_batch_end
                    eval_end, eval_after_all
                batch_checkpoint
            epoch_end, (evaluation), epoch_checkpoint
        fit_end

    ``Trainer.eval()`` is framed by eval_standalone_start and eval_standalone_end.
    """

    INIT = "init"
    BEFORE_LOAD = "before_load"
    AFTER_LOAD = "after_load"
    FIT_START = "fit_start"
    EPOCH_START = "epoch_start"
    BEFORE_DATALOADER = "before_dataloader"
    AFTER_DATALOADER = "after_dataloader"
    BATCH_START = "batch_start"
    BEFORE_TRAIN_BATCH = "before_train_batch"
    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    BEFORE_LOSS = "before_loss"
    AFTER_LOSS = "after_loss"
    BEFORE_BACKWARD = "before_backward"
    AFTER_BACKWARD = "after_backward"
    AFTER_TRAIN_BATCH = "after_train_batch"
    BATCH_END = "batch_end"
    BATCH_CHECKPOINT = "batch_checkpoint"
    EPOCH_END = "epoch_end"
    EPOCH_CHECKPOINT = "epoch_checkpoint"
    FIT_END = "fit_end"
    EVAL_BEFORE_ALL = "eval_before_all"
    EVAL_START = "eval_start"
    EVAL_BATCH_START = "eval_batch_start"
    EVAL_BEFORE_FORWARD = "eval_before_forward"
    EVAL_AFTER_FORWARD = "eval_after_forward"
    EVAL_BATCH_END = "eval_batch_end"
    EVAL_END = "eval_end"
    EVAL_AFTER_ALL = "eval_after_all"
    EVAL_STANDALONE_START = "eval_standalone_start"
    EVAL_STANDALONE_END = "eval_standalone_end"

    @classmethod
    def of(cls, value: str | Event) -> Event:
        """Find an event by name in any case ("BEFORE_LOAD", "before_load").

        Raises:
            ValueError: there is no such event.
        """
        return value if isinstance(value, Event) else cls(value.lower())
