"""Tensors of several checkpoints, computed window by window: their average, and how two of them differ.

`average` writes the average of the weights as a new checkpoint; `compare_values` is the part of `diff.compare` that has
to read values: counts, norms, places.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from holdfast._units import listed
from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import ConfigError, StateMismatchError, StoragePermissionError
from holdfast.format.codec import OUTER
from holdfast.run.names import check_free
from holdfast.state.load.selection import Selection
from holdfast.state.tree import arrays

from .blobs import WINDOW, Blob, BoxReader, Row, check_parts, fill, windows, write_alone
from .diff import CheckpointContents, CheckpointDifference, Leaf, TensorChange, Tolerance, read_contents
from .gathered import tensor_names
from .source import OpenedCheckpoint

MOST = 200
"""The most checkpoints that one average takes."""
_AT_ONCE = WINDOW // 8  # elements of a float64 window
_COMPARED = 1 << 18  # elements: their differences fit into the cache of a core
_Array = Any  # np.ndarray of one dimension
_NUMBERS = "biufc"
_ODD = ("float8_e8m0fnu", "float4_e2m1fn_x2")  # scales that are powers of two, two numbers in a byte
_MODELS = ("model", "state/model")
_TENSORS = ("tensor", "array")
_Stored = tuple[CheckpointContents, OpenedCheckpoint, str]  # where a tensor is stored, and its name there


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageResult:
    """The result of `average`.

    Attributes:
        checkpoint: the committed checkpoint.
        sources: (checkpoint, its step, its share) of each source, in the given order.
        averaged: names of the tensors that were averaged.
        from_last: names of tensors taken from the last source, because they hold no floating numbers.
        unlike: of these, the tensors of more than one element that differ between sources, such as quantised weights.
        not_finite: averaged tensors with NaN or infinities in them.
        left_out: items of the last source that the new checkpoint does not have.
    """

    checkpoint: Checkpoint
    sources: tuple[tuple[Checkpoint, int | None, float], ...]
    averaged: tuple[str, ...]
    from_last: tuple[str, ...]
    unlike: tuple[str, ...]
    not_finite: tuple[str, ...]
    left_out: tuple[str, ...]


def ema_weights(decay: float, count: int) -> list[float]:
    """Return the share of each of ``count`` checkpoints in their exponential moving average, the oldest first.

    The average begins as the oldest checkpoint; each further checkpoint x makes it
    ``decay * average + (1 - decay) * x``.

    Raises:
        ConfigError: ``decay`` is below 0, or not below 1.

    Example:
        >>> ema_weights(0.5, 3)
        [0.25, 0.25, 0.5]
    """
    if not 0 <= decay < 1:
        raise ConfigError(f"decay {decay}: give a number from 0 (the last checkpoint alone) to below 1, such as 0.9")
    return [(1.0 if at == 0 else 1 - decay) * decay ** (count - 1 - at) for at in range(count)]


def average(
    sources: Sequence[Checkpoint],
    destination: Checkpoint,
    *,
    weights: Sequence[float] | None = None,
    only: Sequence[str] | None = None,
    overwrite: bool = False,
    method: str | None = None,
    progress: Callable[[int | None, int], object] = lambda total, done: None,
) -> AverageResult:
    """Write a checkpoint with the average of the models of several. On return it is durable and committed.

    Floating tensors are summed in float64 and rounded to their own dtype once; other tensors and plain data come from
    the last source. Optimizers and the rest of a state are left out: an average of them means nothing. It works window
    by window: the memory (about 150 MB) depends neither on the size of the checkpoints nor on their number. After an
    error the destination is as before.

    Args:
        sources: 2 to `MOST` checkpoints of any layouts and numbers of ranks.
        destination: the new checkpoint; local or on an object store.
        weights: share of each source, 0 or more; divided by their sum. None gives all the same.
        only: names or globs of the tensors to write; None takes the modules, or "model".
        overwrite: replace a committed checkpoint at the destination.
        method: how the weights were chosen, for the manifest.
        progress: called once with (bytes to be read, 0), then with (None, bytes just read).

    Raises:
        ConfigError: the arguments contradict each other, or the state does not show which part is the model.
        StateMismatchError: names or shapes of the sources do not match.
        CheckpointExistsError: there is a checkpoint at the destination.
        CorruptCheckpointError: stored bytes are damaged.
    """
    shares = _shares(sources, weights)
    check_free(destination.storage, destination.directory, overwrite=overwrite, where=" (--overwrite)")
    with contextlib.ExitStack() as stack:
        for source in sources:
            with contextlib.suppress(StoragePermissionError):  # a storage that is read-only deletes nothing either
                stack.enter_context(source.hold())
        contents = [read_contents(source) for source in sources]
        last = contents[-1]
        tree, left_out = _selected(last, only)
        path_of = {leaf.value: path for path, leaf in last.leaves.items() if leaf.kind in _TENSORS}
        paths: dict[str, str] = {}  # stored name of each tensor -> the first path it is chosen by
        for name in tensor_names(tree):
            paths.setdefault(last.original(name), path_of[name])
        names = list(paths)
        if not names:
            raise ConfigError(f"{sources[-1].uri}: what is chosen holds no tensors: choose with only=... (--only)")
        _check_alike(contents, {path_of[name] for name in tensor_names(tree)}, only)
        opened = [
            stack.enter_context(OpenedCheckpoint(source.storage.child(source.directory), share=len(sources)))
            for source in sources
        ]
        floating = dict.fromkeys(name for name in names if _is_averaged(last, name))
        aliases = {name: target for name in tensor_names(tree) if (target := last.original(name)) != name}
        ties = [(path_of[name], paths[target]) for name, target in aliases.items() if target in floating]
        _check_ties(contents, opened, ties)
        stored: dict[str, list[_Stored]] = {
            name: [(side, source, side.leaves[path].value) for side, source in zip(contents, opened, strict=True)]
            for name, path in paths.items()
        }
        progress(sum(side.nbytes(its) for name in floating for side, _, its in stored[name]), 0)
        not_finite: dict[str, None] = {}
        rows = []
        for name in names:
            blob = opened[-1].named(name)
            if name in floating:
                parts = partial(_mean, name, blob, stored[name], shares, not_finite, lambda done: progress(None, done))
                blob = Blob(name, blob.dtype, blob.shape, parts, blob.itemsize)
            rows.append(Row(name, blob, blob.shape))
        own = [name for name in names if name not in floating]
        many = [name for name in own if math.prod(last.tensor(name).shape) > 1]  # one number is a counter
        unlike = [name for name in many if not all(_same(one, stored[name][-1]) for one in stored[name][:-1])]
        described = [
            {
                "checkpoint": side.checkpoint.uri,
                "id": side.manifest.checkpoint_id,
                "step": side.manifest.step,
                "share": share,
            }
            for side, share in zip(contents, shares, strict=True)
        ]
        write_alone(
            destination,
            rows,
            aliases,
            tree,
            step=last.manifest.step,
            epoch=last.manifest.epoch,
            extra={"average": {"method": method or ("weighted" if weights else "uniform"), "sources": described}},
            overwrite=overwrite,
        )
    return AverageResult(
        checkpoint=destination,
        sources=tuple(
            (source, side.manifest.step, share) for source, side, share in zip(sources, contents, shares, strict=True)
        ),
        averaged=tuple(floating),
        from_last=tuple(own),
        unlike=tuple(unlike),
        not_finite=tuple(not_finite),
        left_out=tuple(left_out),
    )


def _shares(sources: Sequence[Checkpoint], weights: Sequence[float] | None) -> list[float]:
    if not 2 <= len(sources) <= MOST:
        raise ConfigError(f"an average of {len(sources)} checkpoints: give 2 to {MOST}")
    given = [1.0] * len(sources) if weights is None else [float(weight) for weight in weights]
    if len(given) != len(sources):
        raise ConfigError(f"{len(given)} weights for {len(sources)} checkpoints: give one for each, in their order")
    if not all(0 <= weight < math.inf for weight in given) or not 0 < sum(given) < math.inf:
        raise ConfigError(
            f"weights {', '.join(f'{weight:g}' for weight in given)}: give numbers from 0 on, not all of them 0"
        )
    return [weight / math.fsum(given) for weight in given]


def _mean(
    name: str,
    like: Blob,
    sources: Sequence[_Stored],
    shares: Sequence[float],
    not_finite: dict[str, None],
    progress: Callable[[int], object],
) -> Iterator[memoryview]:
    """Yield the bytes of the average of one tensor."""
    stored: list[tuple[list[BoxReader], str, int, float]] = []
    for (_, source, its), share in zip(sources, shares, strict=True):
        blob = source.named(its)
        boxes = source.boxes(its)
        check_parts(name, blob.shape, boxes)
        stored.append((boxes, blob.dtype, blob.itemsize, share))
    dtype = arrays.dtype_of(like.dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    if not math.prod(like.shape):
        return
    buffer = bytearray(min(math.prod(like.shape), _AT_ONCE) * max(size for _, _, size, _ in stored))
    for window in windows(like.shape, _AT_ONCE):
        count = math.prod(window.shape)
        total = torch.zeros(count, dtype=wide, device="cpu")
        for boxes, kind, size, share in stored:
            view = memoryview(buffer)[: count * size]
            if share:  # 0 times NaN is NaN
                for part in boxes:
                    fill(view, window, part, size)
                values = torch.frombuffer(view, dtype=torch.uint8).view(arrays.dtype_of(kind))
                total.add_(values.to(wide), alpha=share)
            progress(len(view))
        if not bool(torch.isfinite(total).all()):
            not_finite[name] = None
        yield memoryview(total.to(dtype).view(torch.uint8).numpy().data)


def _same(one: _Stored, other: _Stored) -> bool:
    """Tell whether two tensors of one shape have the same dtype and bytes; reads them only if digests do not say."""
    left, right = (source.named(name) for _, source, name in (one, other))
    if left.dtype != right.dtype:
        return False
    is_known = one[0].is_same(one[2], other[0], other[2])
    return is_known or all(a == b for a, b in zip(left.parts(), right.parts(), strict=True))


def _is_averaged(contents: CheckpointContents, name: str) -> bool:
    stored = contents.tensor(name).dtype
    dtype = arrays.dtype_of(stored)
    return stored not in _ODD and (dtype.is_floating_point or dtype.is_complex)


def _selected(contents: CheckpointContents, only: Sequence[str] | None) -> tuple[Any, list[str]]:
    """Return the chosen part of the structure, and the top-level items of which nothing is chosen."""
    if contents.tree is None:
        raise ConfigError(f"{contents.checkpoint.uri} holds files of a user and no state: there is nothing to average")
    chosen = list(only) if only is not None else _models(contents)
    selection = Selection(chosen)
    selection.check(contents.leaves)
    if outer := [path for path in contents.leaves if f"/{OUTER}" in path and selection.takes(path)]:
        raise ConfigError(
            f"{contents.checkpoint.uri}: {outer[0].partition(f'/{OUTER}')[0]} is stored in parts (codes and scales of "
            "quantized weights), and the average of each is none of the whole: choose without it (only=, --only)"
        )
    tree = _pruned(contents.tree, "", selection)
    kept = {path.partition("/")[0] for path in contents.leaves if selection.takes(path)}
    items = dict.fromkeys(path.partition("/")[0] for path in contents.leaves)
    return tree if tree is not None else {}, [item for item in items if item not in kept]


def _models(contents: CheckpointContents) -> list[str]:
    """Find the model: the modules, else an item called "model", else the whole state if it holds only tensors."""
    modules = list(_modules(contents.tree, ""))
    if modules:
        return modules
    for name in _MODELS:
        if any(path.startswith(f"{name}/") for path in contents.leaves):
            return [name]
    if all(leaf.kind == "tensor" for leaf in contents.leaves.values()):
        return list(dict.fromkeys(path.partition("/")[0] for path in contents.leaves))
    items = ", ".join(dict.fromkeys(path.partition("/")[0] for path in contents.leaves))
    raise ConfigError(f"{contents.checkpoint.uri} has no model (it has {items}): choose with only=... (--only)")


def _modules(node: Any, path: str) -> Iterator[str]:
    if isinstance(node, dict):
        tag = node.get("$")
        if tag == "object":
            if node["kind"] == "module":
                yield path
            else:
                yield from _modules(node["state"], path)
            return
        pairs = node.items() if tag is None else node["v"] if tag in ("dict", "odict", "ddict") else ()
        for key, child in pairs:
            yield from _modules(child, f"{path}/{key}" if path else str(key))


def _pruned(node: Any, path: str, selection: Selection) -> Any:
    """Return the chosen part of typed JSON; None if nothing is chosen."""
    tag = node.get("$") if isinstance(node, dict) else None
    if tag == "tensors":
        keys = [key for key in node["k"] if selection.takes(f"{path}/{key}" if path else key)]
        return {**node, "k": keys} if keys else None
    if tag == "object":
        inner = _pruned(node["state"], path, selection)
        if inner is None or node["kind"] == "module" or selection.takes(path):
            return None if inner is None else {**node, "state": inner}
        return inner  # a part of an object is no object
    if tag in ("rng", "per_rank"):
        return None
    if isinstance(node, dict) and (tag is None or tag in ("dict", "odict", "ddict")):
        pairs = list(node.items()) if tag is None else node["v"]
        kept = []
        for key, child in pairs:
            inner = _pruned(child, f"{path}/{key}" if path else str(key), selection)
            if inner is not None:
                kept.append([key, inner])
        if not kept and (pairs or not selection.takes(path)):
            return None
        return dict(kept) if tag is None else {**node, "v": kept}
    return node if node is not None and path and selection.takes(path) else None


def _check_alike(contents: Sequence[CheckpointContents], chosen: set[str], only: Sequence[str] | None) -> None:
    """Refuse sources whose tensors do not have the paths and shapes of the ``chosen`` ones of the last source."""
    last = contents[-1]
    selection = Selection(list(only) if only is not None else _models(last))
    problems: dict[str, list[str]] = {}
    for side in contents[:-1]:
        tensors = {path for path, leaf in side.leaves.items() if leaf.kind in _TENSORS}
        mine = {path for path in tensors if path in chosen or selection.takes(path)}
        flaws = [f"{name} is missing" for name in sorted(chosen - mine)]
        flaws += [f"{name} is there, and not in the last checkpoint" for name in sorted(mine - chosen)]
        for path in sorted(chosen & mine):
            before, after = side.tensor(side.leaves[path].value), last.tensor(last.leaves[path].value)
            if before.shape != after.shape:
                flaws.append(f"{path} has the shape {list(before.shape)}, not {list(after.shape)}")
            elif _is_averaged(side, before.name) != _is_averaged(last, after.name):
                flaws.append(f"{path} is {before.dtype}, not {after.dtype}")
        problems.setdefault(side.checkpoint.uri, []).extend(flaws)
    _refuse(problems, last)


def _check_ties(
    contents: Sequence[CheckpointContents], opened: Sequence[OpenedCheckpoint], ties: Sequence[tuple[str, str]]
) -> None:
    """Refuse sources in which two tensors differ that are one in the last source: no average is right for both."""
    problems: dict[str, list[str]] = {}
    for side, source in zip(contents[:-1], opened, strict=False):
        pairs = [(path, other, side.leaves[path].value, side.leaves[other].value) for path, other in ties]
        problems.setdefault(side.checkpoint.uri, []).extend(
            f"{path} and {other} differ, and are tied in the last checkpoint"
            for path, other, mine, its in pairs
            if side.original(mine) != side.original(its) and not _same((side, source, mine), (side, source, its))
        )
    _refuse(problems, contents[-1])


def _refuse(problems: dict[str, list[str]], last: CheckpointContents) -> None:
    """Raise StateMismatchError for the problems of each source, if there are any."""
    lines = []
    for uri, flaws in problems.items():
        lines += [f"  {uri}: {listed(flaws, between='; ')}"] if flaws else []
    if lines:
        raise StateMismatchError(
            f"these checkpoints cannot be averaged, for their tensors do not match those of {last.checkpoint.uri}:\n"
            + "\n".join(lines)
            + "\n  what to do: average checkpoints of one model; only=... (--only) chooses a part that all have, and "
            "`holdfast diff A B` shows what differs",
            problems=tuple(f"{uri}: {text}" for uri, flaws in problems.items() for text in flaws),
        )


# ---- how two differ


def compare_values(
    difference: CheckpointDifference,
    contents_a: CheckpointContents,
    contents_b: CheckpointContents,
    pairs: Sequence[tuple[str, Leaf, Leaf]],
    tolerance: Tolerance,
    progress: Callable[[int], object],
) -> None:
    """Read tensors of equal shape from both checkpoints, and add the differences to ``difference``.

    Args:
        difference: receives the changes, and the number of bytes read.
        contents_a: first checkpoint.
        contents_b: second checkpoint.
        pairs: path, and the leaf in each checkpoint.
        tolerance: how far numbers may lie apart.
        progress: called with the bytes of ``contents_a`` just compared.

    Raises:
        CorruptCheckpointError: bytes differ from their digests.
    """
    places = (side.checkpoint.storage.child(side.checkpoint.directory) for side in (contents_a, contents_b))
    left_storage, right_storage = places
    with OpenedCheckpoint(left_storage) as left, OpenedCheckpoint(right_storage) as right:
        for path, before, after in pairs:
            sides = left.named(before.value), right.named(after.value)
            kinds = (before.dtype, after.dtype)
            tally = _Tally(tolerance)
            for values_a, values_b, nbytes in _windows(*sides, kinds):
                tally.add(values_a, values_b)
                progress(nbytes)
            difference.bytes_read += sides[0].nbytes + sides[1].nbytes
            dtypes = (before.dtype or sides[0].dtype, after.dtype or sides[1].dtype)
            if tally.differing or dtypes[0] != dtypes[1]:
                difference.tensors.append(tally.change(path, dtypes, sides[0].shape))
            elif tally.close:
                difference.within.append(path)


class _Tally:
    """Sums up the differences of one tensor."""

    def __init__(self, tolerance: Tolerance) -> None:
        self.tolerance = tolerance
        self.seen = self.differing = self.not_finite = self.close = 0
        self.squares = self.before = 0.0
        self.largest = -1.0
        self.place: int | None = None
        self.values: tuple[Any, Any] | None = None

    def add(self, a: _Array, b: _Array) -> None:
        """Count the next elements of both sides."""
        start, self.seen = self.seen, self.seen + len(a)
        with np.errstate(all="ignore"):
            self.before += _squares(_magnitude(a))
            unequal = a != b
            if a.dtype.kind in "fc" or b.dtype.kind in "fc":
                unequal &= ~(np.isnan(a) & np.isnan(b))
            if not unequal.any():
                return
            apart = np.where(unequal, _distance(a, b), 0.0)
            finite = np.isfinite(apart)
            allowed = self.tolerance.absolute + self.tolerance.relative * _magnitude(a)
            differs = unequal & ~(finite & (apart <= allowed)) if self.tolerance != Tolerance() else unequal
        self.close += int(np.count_nonzero(unequal))
        self.differing += int(np.count_nonzero(differs))
        if not finite.all():
            self.not_finite += int(np.count_nonzero(~finite))
            if self.values is None:
                self._at(int(np.argmin(finite)), start, a, b)
            apart = np.where(finite, apart, 0.0)
        self.squares += _squares(apart)
        most = int(np.argmax(apart))
        if apart[most] > max(self.largest, 0.0) or (self.values is None and apart[most] == 0.0):
            # Integers beyond 2 ** 53 may differ where their difference as floats is 0.
            most = most if apart[most] else int(np.argmax(unequal))
            self.largest = float(apart[most])
            self._at(most, start, a, b)

    def _at(self, number: int, start: int, a: _Array, b: _Array) -> None:
        self.place, self.values = start + number, (a[number].item(), b[number].item())

    def change(self, path: str, dtypes: tuple[str, str], shape: tuple[int, ...]) -> TensorChange:
        """Return the sums as a `TensorChange`."""
        elements = math.prod(shape)
        norm, before = math.sqrt(self.squares), math.sqrt(self.before)
        place = self.place
        if place is not None and elements and self.seen != elements:
            place = place * elements // self.seen  # counted in bytes
        return TensorChange(
            name=path,
            dtype=dtypes,
            shape=(shape, shape),
            elements=elements,
            differing=min(self.differing, elements),
            norm=norm,
            relative=norm / before if before and math.isfinite(before) else None,
            largest=max(self.largest, 0.0),
            at=None if place is None else tuple(map(int, np.unravel_index(place, shape))) if shape else (),
            values=self.values,
            not_finite=self.not_finite,
        )


def _squares(values: _Array) -> float:
    finite = values if np.isfinite(values).all() else np.where(np.isfinite(values), values, 0.0)
    return float(finite @ finite)


def _magnitude(values: _Array) -> _Array:
    return np.abs(values if values.dtype.kind == "c" else values.astype(np.float64))


def _distance(a: _Array, b: _Array) -> _Array:
    """Return |a - b| as float64; of integers without overflow."""
    if a.dtype == b.dtype and a.dtype.kind in "iu":
        unsigned = np.dtype(f"u{a.dtype.itemsize}")
        above = np.maximum(a, b).view(unsigned) - np.minimum(a, b).view(unsigned)
        return above.astype(np.float64)
    wide = np.complex128 if "c" in a.dtype.kind + b.dtype.kind else np.float64
    return np.abs(a.astype(wide) - b.astype(wide))


def _windows(blob_a: Blob, blob_b: Blob, kinds: tuple[str | None, str | None]) -> Iterator[tuple[_Array, _Array, int]]:
    """Yield equally many elements of both sides as NumPy arrays, and how many bytes of the first these are."""
    sides = [_Elements(blob, kind) for blob, kind in zip((blob_a, blob_b), kinds, strict=True)]
    if sides[0].is_bytes != sides[1].is_bytes:  # NumPy can compute with only one of the dtypes
        sides = [_Elements(blob, None, as_bytes=True) for blob in (blob_a, blob_b)]
    while not (sides[0].is_over() or sides[1].is_over()):
        count = min(side.left for side in sides)
        first, second = (side.take(count) for side in sides)
        yield first, second, count * sides[0].width


class _Elements:
    """Elements of a tensor in the order of rows, a few at a time, in a dtype that NumPy computes with."""

    def __init__(self, blob: Blob, array_dtype: str | None, *, as_bytes: bool = False) -> None:
        self._parts = blob.parts()
        self._view = memoryview(b"")
        self._at = 0
        self._torch: torch.dtype | None = None
        self.is_bytes = as_bytes
        dtype = None if array_dtype is None else np.dtype(array_dtype)
        if as_bytes:
            dtype = np.dtype(np.uint8)
        elif dtype is not None:
            if dtype.kind in "mM":
                dtype = np.dtype(f"{dtype.byteorder.replace('|', '=')}i8")
            self.is_bytes = dtype.kind not in _NUMBERS
        else:
            dtype, self._torch = _numpy_of(blob.dtype)
            self.is_bytes = dtype is None
        self._dtype = np.dtype(np.uint8) if dtype is None or self.is_bytes else dtype
        self.width = self._torch.itemsize if self._torch is not None else self._dtype.itemsize

    @property
    def left(self) -> int:
        """The most elements that `take` can return at once."""
        return min(_COMPARED, (len(self._view) - self._at) // self.width)

    def is_over(self) -> bool:
        """Tell whether there are no more."""
        while self._at >= len(self._view):
            view = next(self._parts, None)
            if view is None:
                return True
            self._view, self._at = view, 0
        return False

    def take(self, count: int) -> _Array:
        """Return the next elements; valid until the next call."""
        view = self._view[self._at : self._at + count * self.width]
        self._at += len(view)
        if self._torch is not None:
            wide = torch.complex64 if self._torch.is_complex else torch.float32
            return torch.frombuffer(view, dtype=torch.uint8).view(self._torch).to(wide).numpy()
        values = np.frombuffer(view, self._dtype)
        return values if self._dtype.isnative else values.astype(self._dtype.newbyteorder("="))


def _numpy_of(name: str) -> tuple[Any, torch.dtype | None]:
    """Return the dtype NumPy computes with, and torch's dtype if torch has to convert; (None, None) if neither can."""
    if name in ("float16", "float32", "float64", "complex64", "complex128", "bool") or "int" in name[:4]:
        try:
            return np.dtype(name), None
        except TypeError:
            return None, None
    dtype = arrays.dtype_of(name)
    wide = torch.complex64 if dtype.is_complex else torch.float32
    try:
        torch.zeros(dtype.itemsize, dtype=torch.uint8, device="cpu").view(dtype).to(wide)
    except (RuntimeError, TypeError):
        return None, None
    return np.dtype(np.complex64 if dtype.is_complex else np.float32), dtype
