"""The worker's main with a session that stands in for the real one: it records, and reports through the channel."""

from __future__ import annotations

from typing import Any

from holdfast.trainers.function.worker import main as worker
from holdfast.writer.frames import Channel

CURRENT: list[StandIn] = []


class StandIn:
    def __init__(self, channel: Channel, begin: dict[str, Any], memory: bytes | None) -> None:
        self.channel, self.begin, self.memory = channel, begin, memory
        CURRENT.append(self)

    def tell(self, **values: Any) -> None:
        self.channel.send({"on": "told", **values})

    def drain(self) -> None:
        self.channel.send({"on": "drained"})

    def abandon(self, timeout_s: float = 10.0) -> None:
        self.channel.send({"on": "abandoned"})


def tell(**values: Any) -> None:
    """What a train function of these tests calls instead of `report`."""
    CURRENT[0].tell(**values)


def run(channel: Channel, **options: Any) -> int:
    return worker.run(channel, make_session=StandIn, **options)
