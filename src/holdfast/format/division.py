"""How several ranks divided one state among them, so that no checkpoint of half a state commits or loads.

Every rank derives from the structure alone what it writes (`holdfast.state.share`); none asks the others. What each
of them derived travels with its part, and all parts of a checkpoint must say the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

__all__ = ["Division", "disagreement"]

_LIMIT = 1 << 31
_NAMED = 5  # ranks or tensors spelled out in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """One rank's word on how a state was divided.

    Attributes:
        num_ranks: over how many ranks; each of them writes an index, of however few tensors.
        structure: digest of the names, sizes and ties of what was divided.
        samples: name -> digest of a few elements, for some tensors that all ranks are taken to hold alike. Part of
            the summaries of a save, not of the index.
    """

    num_ranks: int
    structure: str
    samples: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Describe this division; what is empty is left out."""
        told: dict[str, Any] = {"num_ranks": self.num_ranks, "structure": self.structure}
        if self.samples:
            told["samples"] = dict(self.samples)
        return told

    @classmethod
    def from_json(cls, data: Any) -> Division:
        """Rebuild what `to_json` described.

        Raises:
            TypeError: it did not.
        """
        ranks, structure, samples = data["num_ranks"], data["structure"], data.get("samples", {})
        fine = type(ranks) is int and 0 < ranks < _LIMIT and isinstance(structure, str) and isinstance(samples, dict)
        if not fine or not all(isinstance(text, str) for pair in samples.items() for text in pair):
            raise TypeError("division")
        return cls(num_ranks=ranks, structure=structure, samples=samples)


def disagreement(divisions: Mapping[int, Division | None]) -> str | None:
    """Return why the parts of these writers do not make up one state, None if they do.

    Args:
        divisions: by writer; None for one that wrote all of its state by itself.
    """
    first = next((one for one in divisions.values() if one is not None), None)
    if first is None:
        return None
    alone = sorted(writer for writer, one in divisions.items() if one is None)
    if alone:
        return f"{_ranks(alone)} saved alone, the others as ranks of {first.num_ranks}"
    by_writer = {writer: one for writer, one in divisions.items() if one is not None}
    strangers = sorted(writer for writer in by_writer if writer >= first.num_ranks)
    if strangers:
        return f"there is a part of {_ranks(strangers)}, but the state was divided over {first.num_ranks} ranks"
    if num_missing := first.num_ranks - len(by_writer):
        # Not listed in full: the number may come from a file that somebody made up.
        missing = list(islice((rank for rank in range(first.num_ranks) if rank not in by_writer), _NAMED))
        return (
            f"the state was divided over {first.num_ranks} ranks, and the part of {_ranks(missing, num_missing)} is "
            "missing"
        )
    model = by_writer[0]
    others = sorted(writer for writer, one in by_writer.items() if _shape(one) != _shape(model))
    if others:
        return (
            f"the state of {_ranks(others)} has another structure than that of rank 0 (names, sizes or ties of "
            "parameters, which of them are frozen, or what optimizers keep for them)"
        )
    differing = {
        name: sorted(writer for writer, one in by_writer.items() if one.samples.get(name, digest) != digest)
        for name, digest in model.samples.items()
    }
    names = [name for name, writers in differing.items() if writers]
    if names:
        writers = sorted({writer for name in names for writer in differing[name]})
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return (
            f"{_ranks(writers)} and rank 0 hold different values of {', '.join(map(repr, names[:_NAMED]))}{more}, but "
            "parameters and their optimizer state are stored once for all ranks"
        )
    return None


def _shape(one: Division) -> tuple[int, str]:
    return one.num_ranks, one.structure


def _ranks(ranks: list[int], num_ranks: int | None = None) -> str:
    total = len(ranks) if num_ranks is None else num_ranks
    named = ", ".join(map(str, ranks[:_NAMED]))
    more = f" and {total - _NAMED} more" if total > _NAMED else ""
    return f"rank{'s' if total > 1 else ''} {named}{more}"
