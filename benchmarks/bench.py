"""What every benchmark shares: settings, scratch folders, samples, goals."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Context", "Goal", "Outcome", "busy_core", "drop_cache", "fsync_tree", "median", "remove", "timed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One measured number beside what it should be.

    Attributes:
        what: the number, in words.
        value: measured; None when it could not be measured.
        unit: unit of ``value`` ("x" for ratios).
        at_most: the goal as an upper bound, or None.
        at_least: the goal as a lower bound, or None.
        note: what a reader has to know.
    """

    what: str
    value: float | None
    unit: str = "x"
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; None for numbers without a goal."""
        if self.at_most is None and self.at_least is None:
            return None
        if self.value is None or math.isnan(self.value):
            return False
        low = self.at_least is None or self.value >= self.at_least
        return low and (self.at_most is None or self.value <= self.at_most)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "reached": self.reached}


@dataclass(slots=True)
class Outcome:
    """What a benchmark found.

    Attributes:
        limits: what the machine can do, measured in the same run.
        samples: raw seconds (or other units, as named) by method.
        first: the first, cold sample of each method; never part of ``samples``.
        ratios: derived numbers.
        goals: what the table shows.
        notes: settings of peers, what was left out and why.
    """

    limits: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    first: dict[str, dict[str, float]] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, method: str, *, first: bool = False, **values: float) -> None:
        """Record one sample of each named value."""
        if first:
            self.first.setdefault(method, {}).update(values)
            return
        into = self.samples.setdefault(method, {})
        for name, value in values.items():
            into.setdefault(name, []).append(value)

    def median(self, method: str, name: str) -> float:
        """Return the median of a value; nan when the method was not measured."""
        return median(self.samples.get(method, {}).get(name, ()))

    def speedup(self, peer: str, ours: str, name: str) -> float:
        """Return how many times faster ``ours`` is than ``peer``."""
        return self.median(peer, name) / self.median(ours, name)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "goals": [goal.to_json() for goal in self.goals]}


@dataclass(slots=True, kw_only=True)
class Context:
    """Settings of one run of the benchmarks.

    Attributes:
        scratch: folder for everything that is written; on the disk to be measured.
        quick: a tiny run that only proves that everything works.
        scale: factor on the bytes of the states.
        repeat: samples per method, after the first.
        say: prints progress.
    """

    scratch: Path
    quick: bool = False
    scale: float = 1.0
    repeat: int = 5
    say: Callable[[str], None] = lambda text: None
    _number: int = 0

    def folder(self, name: str) -> Path:
        """Return a path in the scratch folder that does not exist yet."""
        self._number += 1
        return self.scratch / f"{name}-{self._number}"


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def timed(function: Callable[..., Any], *args: Any) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def fsync_tree(path: Path) -> None:
    """Make files and directories durable, as a peer that does not fsync would have to."""
    todo = [path]
    if path.is_dir():
        todo += sorted(path.rglob("*"))
    for one in [*todo, path.parent]:
        fd = os.open(one, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def drop_cache(path: Path) -> None:
    """Take the (clean) files under ``path`` out of the page cache."""
    for one in [path] if path.is_file() else path.rglob("*"):
        if one.is_file():
            fd = os.open(one, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def remove(path: Path) -> None:
    """Remove a file or folder and let the file system settle, so that the next sample does not pay for it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    os.sync()


class busy_core:  # noqa: N801 - used like a function
    """Keep one core busy by another process for as long as the block lasts."""

    def __enter__(self) -> None:
        import subprocess
        import sys

        self._process = subprocess.Popen([sys.executable, "-I", "-S", "-c", "while True: pass"])
        time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
