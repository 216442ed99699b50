"""How several ranks divided one state among them, so that no checkpoint of half a state commits or loads.

Every rank derives from the structure alone what it writes (`holdfast.state.save.plan`); none asks the others.
What each of them derived travels with its part, and all parts of a checkpoint must say the same. A tensor that is
spread is stored in boxes, which must make up the whole (`flaw`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice, product
from math import prod
from typing import Any, NamedTuple

from holdfast._ranks import rank_list
from holdfast._units import listed

from .digest import bytes_digest

_LIMIT = 1 << 31
_SKETCH = 64  # names of tensors in plain containers that are compared
_NAMED = 5  # ranks or tensors spelled out in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How a state was divided, as one rank derived it.

    Attributes:
        num_ranks: over how many ranks; each of them writes an index, however few tensors it has.
        structure: digest of the names, sizes and ties of what was divided.
        alike: the ranks among which it was divided, where others hold something else; None: all of them. What several
            such groups hold under the same name, each of them stores.
        samples: name -> digest of a few elements, for some tensors that all ranks are taken to hold alike. In the
            summaries of a save only, not in the index.
        names: digest of the names of what was divided, to say how structures differ; in the summaries only.
        loose: names of tensors in plain containers, which a single rank stores: those that come first in `sketch`; in
            the summaries only.
        num_loose: how many such tensors there are.
        alone: as ``samples``, for some tensors, and for hyper-parameters, of which those of one rank are stored for
            all, whatever others hold; in the summaries only.
    """

    num_ranks: int
    structure: str
    alike: tuple[int, ...] | None = None
    samples: Mapping[str, str] = field(default_factory=dict)
    names: str = ""
    loose: tuple[str, ...] = ()
    num_loose: int = 0
    alone: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Describe this division; what is empty is left out."""
        row: dict[str, Any] = {"num_ranks": self.num_ranks, "structure": self.structure}
        if self.alike is not None:
            row["alike"] = self.alike
        if self.samples:
            row["samples"] = dict(self.samples)
        if self.names:
            row["names"] = self.names
        if self.loose:
            row["loose"] = [self.num_loose, *self.loose]
        if self.alone:
            row["alone"] = dict(self.alone)
        return row

    @classmethod
    def from_json(cls, data: Any) -> Division:
        """Rebuild what `to_json` described.

        Raises:
            LookupError, TypeError: ``data`` is not of that form.
        """
        ranks, structure, alike = data["num_ranks"], data["structure"], data.get("alike")
        samples, names = data.get("samples", {}), data.get("names", "")
        num_loose, *loose = data.get("loose", [0])
        alone = data.get("alone", {})
        fine = type(ranks) is int and 0 < ranks < _LIMIT and isinstance(structure, str) and isinstance(names, str)
        fine = fine and isinstance(samples, dict) and isinstance(alone, dict) and type(num_loose) is int
        fine = fine and (
            alike is None or (isinstance(alike, (list, tuple)) and all(type(rank) is int for rank in alike))
        )
        pairs = [*samples.items(), *alone.items()] if fine else []
        texts = [*loose, *(text for pair in pairs for text in pair)] if fine else [None]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("division")
        group = None if alike is None else tuple(alike)
        return cls(
            num_ranks=ranks, structure=structure, alike=group, samples=samples, names=names, loose=tuple(loose),
            num_loose=num_loose, alone=alone,
        )  # fmt: skip


def sketch(names: Iterable[str]) -> tuple[str, ...]:
    """Choose a few names by their digests, so that of two sets the common names are chosen from both."""
    return tuple(nsmallest(_SKETCH, names, key=_order))


def _order(name: str) -> str:
    return bytes_digest(name.encode(errors="surrogatepass"))


def disagreement(divisions: Mapping[int, Division | None]) -> str | None:
    """Return why the parts of these writers do not make up one state, None if they do.

    Args:
        divisions: by writer; None for a writer that wrote all of its state by itself.
    """
    first = next((division for division in divisions.values() if division is not None), None)
    if first is None:
        return None
    alone = sorted(writer for writer, division in divisions.items() if division is None)
    if alone:
        return f"{_ranks(alone)} saved alone, the others as ranks of {first.num_ranks}"
    by_writer = {writer: division for writer, division in divisions.items() if division is not None}
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
    if problem := _wrong_groups(by_writer):
        return problem
    groups: dict[tuple[int, ...] | None, list[int]] = {}
    for writer in sorted(by_writer):
        groups.setdefault(by_writer[writer].alike, []).append(writer)
    for members in groups.values():
        if problem := _unlike(by_writer, members):
            return problem
    return _other_values(by_writer)


def _wrong_groups(by_writer: Mapping[int, Division]) -> str | None:
    """Find ranks that do not agree on who holds the same."""
    for writer, division in sorted(by_writer.items()):
        for member in () if division.alike is None else division.alike:
            other = by_writer.get(member)
            if other is None or other.alike != division.alike:
                return (
                    f"rank {writer} says that it holds the same as {_ranks(list(division.alike or ()))}, rank {member} "
                    f"says {_said(other)}: give alike= on all ranks, the same to those that hold the same"
                )
    alone = [writer for writer, division in by_writer.items() if division.alike is None]
    if alone and len(alone) < len(by_writer):
        return (
            f"by their own account {_ranks(sorted(alone))} hold the same as all ranks, and others hold something else: "
            "give alike= on all ranks"
        )
    return None


def _said(division: Division | None) -> str:
    if division is None:
        return "nothing, for it is no rank of this save"
    return "the same as all ranks" if division.alike is None else f"the same as {_ranks(list(division.alike))}"


def _unlike(by_writer: Mapping[int, Division], members: list[int]) -> str | None:
    """Find differences of structure among ranks that were meant to be alike."""
    first, rest = members[0], members[1:]
    model = by_writer[first]
    others = [writer for writer in rest if _shape(by_writer[writer]) != _shape(model)]
    if others:
        same_names = all(by_writer[writer].names == model.names for writer in others) and bool(model.names)
        why = (
            "the names are the same, so that the ranks were meant to be alike: sizes, dtypes, ties or layouts of "
            "parameters, or which of them are frozen, have to be the same on all of them"
            if same_names
            else "names, sizes or ties of parameters, which of them are frozen, or what optimizers keep for them; if "
            "these ranks are meant to hold different things, such as stages of a pipeline or experts, say which ones "
            "hold the same: alike=mesh['dp'], or alike=[rank] where each holds its own"
        )
        return f"the state of {_ranks(others)} has another structure than that of rank {first} ({why})"
    lost = {writer: _not_in(by_writer[writer], model) for writer in rest}
    if names := sorted({name for missing in lost.values() for name in missing}):
        writers = [writer for writer, missing in lost.items() if missing]
        return (
            f"{_ranks(writers)} hold{'s' if len(writers) == 1 else ''} tensors that rank {first} does not have, "
            f"{listed(map(repr, names), _NAMED)}, and of tensors in plain containers those of rank {first} "
            "alone are stored: put what each rank is to get back, such as a buffer of samples, into "
            "holdfast.PerRank(...); if these ranks are meant to hold different parts of a model, such as stages of a "
            "pipeline, say which ones hold the same: alike=mesh['dp'], or alike=[rank] where each holds its own"
        )
    return None


def _not_in(division: Division, model: Division) -> list[str]:
    """Return names that ``division`` has and ``model`` has not, of those that would have been chosen for its sketch."""
    bound = max(map(_order, model.loose)) if model.num_loose > len(model.loose) else None
    return [name for name in division.loose if name not in model.loose and (bound is None or _order(name) < bound)]


def _other_values(by_writer: Mapping[int, Division]) -> str | None:
    """Find a tensor that ranks hold alike by its name, and not by its values."""
    first, differing = _compared({writer: division.samples for writer, division in by_writer.items()})
    if not differing:
        return None
    names = list(differing)
    model = first[names[0]]
    writers = sorted({writer for name in names for writer in differing[name]})
    other = by_writer[writers[0]].alike
    advice = "" if other is None or model in other else "; what different ranks hold needs different names"
    return (
        f"{_ranks(writers)} and rank {model} hold different values of {listed(map(repr, names), _NAMED)}, "
        f"but parameters and their optimizer state are stored once for all ranks{advice}"
    )


def stored_for_all(divisions: Mapping[int, Division | None]) -> dict[str, list[int]]:
    """Return tensors of which one rank's are stored for all, with the writers that hold other values."""
    by_writer = {writer: division.alone for writer, division in divisions.items() if division is not None}
    return _compared(by_writer)[1]


def _compared(by_writer: Mapping[int, Mapping[str, str]]) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Return the first writer that names each tensor, and for those with several digests the writers with another."""
    first: dict[str, tuple[int, str]] = {}
    differing: dict[str, list[int]] = {}
    for writer in sorted(by_writer):
        for name, digest in by_writer[writer].items():
            if first.setdefault(name, (writer, digest))[1] != digest:
                differing.setdefault(name, []).append(writer)
    return {name: writer for name, (writer, _) in first.items()}, differing


def _shape(division: Division) -> tuple[int, str]:
    return division.num_ranks, division.structure


def _ranks(ranks: list[int], num_ranks: int | None = None) -> str:
    return rank_list(ranks, num_ranks=num_ranks, most=_NAMED)


_MAX_CUT = 8  # dimensions along which one tensor may be cut; every box has 2 ** n corners along them


class Box(NamedTuple):
    """A part of a tensor: its first index and its size, dimension by dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


def overlap(box: Box, other: Box) -> Box | None:
    """Return the box that two boxes share, None if they share no element."""
    start, shape = [], []
    for low, size, first, count in zip(box.start, box.shape, other.start, other.shape, strict=True):
        begin, end = max(low, first), min(low + size, first + count)
        if end <= begin:
            return None
        start.append(begin)
        shape.append(end - begin)
    return Box(tuple(start), tuple(shape))


def flaw(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """Return why boxes do not cover a tensor of this shape, each element once; None if they do.

    Linear in the number of boxes: instead of comparing each with each, their corners are added up, with alternating
    signs. Wherever boxes meet these cancel out; what is left are the corners of the whole, and of nothing else. (The
    mixed difference of a sum of indicator functions determines that sum.)
    """
    filled = [box for box in boxes if all(box.shape)]
    count, whole = sum(prod(box.shape) for box in filled), prod(shape)
    if count != whole:
        state = "are missing" if count < whole else "are stored twice"
        return f"{abs(whole - count)} of its {whole} elements {state}"
    cut = [dim for dim, size in enumerate(shape) if any(box.shape[dim] != size for box in filled)]
    if len(cut) > _MAX_CUT:
        return f"it is cut along {len(cut)} dimensions, more than the {_MAX_CUT} that this version reads"
    left: dict[tuple[int, ...], int] = {}
    signs = [(-1) ** sum(bits) for bits in product((0, 1), repeat=len(cut))]
    for box in filled:
        edges = [(box.start[dim], box.start[dim] + box.shape[dim]) for dim in cut]
        for corner, sign in zip(product(*edges), signs, strict=True):
            left[corner] = left.get(corner, 0) + sign
    corners = product(*[(0, shape[dim]) for dim in cut])
    expected = dict(zip(corners, signs, strict=True)) if whole else {}
    if {corner: sign for corner, sign in left.items() if sign} != expected:
        return "some of its elements are missing and as many are stored twice"
    return None
