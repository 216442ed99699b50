"""Goes through the moments of a training without training: when does an interval save?"""

from __future__ import annotations

from datetime import timedelta

from holdfast.core import Event, Time, Timestamp
from holdfast.trainers.loop.time import Span, finished, parse_every

__all__ = ["run"]


def run(
    interval: object,
    duration: str,
    *,
    num_batches: int,
    sizes: list[int],
    sized: bool = True,
    tokens: int = 10,
    seconds: float = 1.0,
) -> list[str]:
    """Go through a training and note each save as ep-ba, as the saver would: once per batch at most."""
    every, now, saves, last = parse_every(interval, "save_interval"), Timestamp(), [], -1
    span = Span(duration=Time(duration), num_batches=num_batches if sized else None)
    every.check(span)
    while not finished(now, span.duration):
        for number in range(num_batches):
            size = sizes[number % len(sizes)]
            previous, now = now, now.to_next_batch(size, size * tokens, timedelta(seconds=seconds))
            if last != now.count("batch") and every.due(Event.BATCH_CHECKPOINT, previous, now, span):
                saves.append(f"ep{int(now.epoch)}-ba{int(now.batch)}")
                last = now.count("batch")
            if finished(now, span.duration):
                break
        else:
            previous, now = now, now.to_next_epoch()
            if last != now.count("batch") and every.due(Event.EPOCH_CHECKPOINT, previous, now, span):
                saves.append(f"ep{int(now.epoch)}-ba{int(now.batch)}")
                last = now.count("batch")
    return saves
