"""An idle `Checkpointer.step`: what saving costs when nothing is due."""

from __future__ import annotations

import time

import torch

import holdfast as hf

from .bench import Context, Goal, Outcome, remove

__all__ = ["run"]


def run(context: Context) -> Outcome:
    """Time blocks of steps with a tensor as metric, with a float, and without."""
    outcome = Outcome()
    block = 200 if context.quick else 2000
    root = context.folder("step")
    loss = torch.tensor(0.5)
    with hf.Checkpointer(root, {"model": torch.nn.Linear(4, 4)}, every="1h", keep=None) as ck:
        ck.step(loss=loss)
        for turn in range(4 * context.repeat + 1):
            for name, metrics in (("tensor", {"loss": loss}), ("float", {"loss": 0.5}), ("none", {})):
                start = time.perf_counter()
                for _ in range(block):
                    ck.step(**metrics)
                outcome.add(name, first=not turn, microseconds=(time.perf_counter() - start) / block * 1e6)
    remove(root)
    value = outcome.median("tensor", "microseconds")
    outcome.goals.append(Goal(what="idle ck.step(loss=tensor)", value=value, unit="us", at_most=20.0))
    return outcome
