"""The differences of two checkpoints as values: the result of `diff.compare`, which the command prints. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import ConfigError

__all__ = ["Change", "CheckpointDifference", "Missing", "TensorChange", "Tolerance"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far numbers may lie apart and count as the same: |a - b| <= absolute + relative * |a|."""

    absolute: float = 0.0
    relative: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.absolute < math.inf and 0 <= self.relative < math.inf):
            raise ConfigError(f"tolerance {self.absolute}, {self.relative}: give numbers that are not negative")

    def allows(self, a: float, b: float) -> bool:
        """Tell whether two numbers count as the same; NaN and NaN do."""
        if a == b or (math.isnan(a) and math.isnan(b)):
            return True
        return abs(a - b) <= self.absolute + self.relative * abs(a) and math.isfinite(a - b)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An entry of both checkpoints that differs: its name, and its value in A and in B."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Entries that one side lacks: the path nearest to the root below which it has none, and their number."""

    name: str
    entries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """A tensor that differs.

    Attributes:
        name: its path.
        dtype: in A and in B.
        shape: in A and in B.
        elements: number of elements; None where the shapes differ, as are all fields below.
        differing: number of elements that are not the same.
        norm: L2 norm of the difference, over elements where it is finite.
        relative: ``norm`` by the L2 norm of A; None if that is 0.
        largest: largest finite absolute difference.
        at: index of its first occurrence.
        values: the element there in A and in B.
        not_finite: elements that differ by no finite number: NaN or an infinity on one side alone.
    """

    name: str
    dtype: tuple[str, str]
    shape: tuple[tuple[int, ...], tuple[int, ...]]
    elements: int | None = None
    differing: int | None = None
    norm: float | None = None
    relative: float | None = None
    largest: float | None = None
    at: tuple[int, ...] | None = None
    values: tuple[Any, Any] | None = None
    not_finite: int | None = None


@dataclass(slots=True, kw_only=True)
class CheckpointDifference:
    """The result of `compare`.

    Attributes:
        a: first checkpoint.
        b: second checkpoint.
        about: fields of the manifests: (value in A, value in B). They do not count for `same`.
        metrics: metrics that differ; they do not count.
        metadata: metadata of the user that differs; it does not count.
        only_in_a: entries that B lacks.
        only_in_b: entries that A lacks.
        kinds: paths with values of different kinds.
        plain: plain data that differs.
        tensors: tensors that differ.
        files: files of the user that differ, by path: digests in A and B, None for a missing file.
        compared: number of tensors that both have.
        by_digest: how many of these are the same by their digests alone.
        within: tensors whose elements differ, but none by more than the tolerance.
        bytes_read: bytes of tensors that were read.
    """

    a: Checkpoint
    b: Checkpoint
    about: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    metrics: list[Change] = field(default_factory=list)
    metadata: list[Change] = field(default_factory=list)
    only_in_a: list[Missing] = field(default_factory=list)
    only_in_b: list[Missing] = field(default_factory=list)
    kinds: list[Change] = field(default_factory=list)
    plain: list[Change] = field(default_factory=list)
    tensors: list[TensorChange] = field(default_factory=list)
    files: list[Change] = field(default_factory=list)
    compared: int = 0
    by_digest: int = 0
    within: list[str] = field(default_factory=list)
    bytes_read: int = 0

    @property
    def same(self) -> bool:
        """Whether the states (and files of the user) are the same; manifests, metrics and metadata do not count."""
        return not (self.only_in_a or self.only_in_b or self.kinds or self.plain or self.tensors or self.files)
