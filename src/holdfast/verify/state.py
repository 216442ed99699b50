"""Take a state apart into leaves and compare two states bit by bit.

Independent of the code that saves: a value that this code forgets must show here. `leaves` names each leaf by its path
("optimizer/state/0/exp_avg"), `digests` makes them short enough for a log, `differences` tells which differ, and how.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch

from holdfast.state.tree import rng
from holdfast.state.tree.values import PerRank, RngSentinel

_SHOWN = 10


def assert_state_equal(a: Any, b: Any) -> None:
    """Check that two states hold the same bits: tensors, plain data, their types, and the keys.

    Objects with ``state_dict`` are compared by it, so a live model may be compared with what `holdfast.load` returned.
    NaNs with the same bits are equal, 0.0 and -0.0 are not; 1, 1.0 and True are three different values.

    Raises:
        AssertionError: they differ; the message names the first differing items, each with both values.

    Example:
        >>> assert_state_equal({"w": torch.zeros(2)}, {"w": torch.zeros(2)})
        >>> assert_state_equal({"w": torch.zeros(2), "n": 1}, {"w": torch.ones(2), "n": 1})
        Traceback (most recent call last):
        AssertionError: the states differ in 1 item:
          w: 2 of 2 elements differ, first at [0]: 0.0 != 1.0
    """
    items = list(differences(a, b))
    if items:
        rows = "\n".join(f"  {path}: {text}" for path, text in items[:_SHOWN])
        more = f"\n  and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
        raise AssertionError(f"the states differ in {len(items)} item{'s' * (len(items) > 1)}:\n{rows}{more}")


def differences(a: Any, b: Any) -> Iterator[tuple[str, str]]:
    """Yield (path, text about the difference) in the order of ``a``, then for leaves that only ``b`` has."""
    left, right = _by_path(a), _by_path(b)
    for path, value in left.items():
        if path not in right:
            yield path or "(the state)", f"{_short(value)} is missing on the other side"
        elif _digest(value) != _digest(right[path]):
            yield path or "(the state)", _difference(value, right[path])
    for path, value in right.items():
        if path not in left:
            yield path or "(the state)", f"{_short(value)} is on one side only"


def digests(state: Any) -> dict[str, str]:
    """Describe each leaf in a short line: dtype, shape and digest of a tensor, the text of a plain value."""
    return {path: _digest(value) for path, value in _by_path(state).items()}


def _by_path(state: Any) -> dict[str, Any]:
    """Key the leaves of a state by path; of several with one path ("a/b", and b in a) none is lost."""
    found: dict[str, Any] = {}
    for path, value in leaves(state):
        label, number = path, 1
        while label in found:
            number += 1
            label = f"{path}~{number}"
        found[label] = value
    return found


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) of everything in a state, objects by their ``state_dict``; empty containers are leaves."""
    value = _opened(value)
    if isinstance(value, Mapping):
        keys = [key if isinstance(key, str) else repr(key) for key in value]
        # The keys 1 and "1" are two.
        keys = keys if len(set(keys)) == len(keys) else list(map(repr, value))
        children = list(zip(keys, value.values(), strict=True))
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        children = [(str(number), child) for number, child in enumerate(value)]
    elif isinstance(value, Set):
        children = [(f"{{{text}}}", text) for text in sorted(map(repr, value))]
    else:
        yield path, value
        return
    if not children:
        yield path, value
    for key, child in children:
        yield from leaves(child, f"{path}/{key}" if path else key)


def _opened(value: Any) -> Any:
    """Replace an object that stands for data by its data."""
    if isinstance(value, RngSentinel):
        return generators()
    if isinstance(value, PerRank):
        return value.value
    if isinstance(value, torch.Generator):
        return value.get_state()
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, Mapping):
        return value.state_dict()
    return value


def generators() -> dict[str, Any]:
    """Return the states of the random generators of host and accelerator, as the libraries give them."""
    numpy = sys.modules.get("numpy")
    states: dict[str, Any] = {"python": _Whole(random.getstate())}
    if numpy is not None:
        state = numpy.random.get_state()
        states["numpy"] = _Whole((state[0], state[1].tolist(), *state[2:]))
    states["torch"] = torch.get_rng_state()
    states.update(rng.capture().get("devices", {}))
    return states


class _Whole:
    """Data that counts as a single leaf, such as the 624 words of a generator."""

    def __init__(self, value: Any) -> None:
        self._text = hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()

    def __repr__(self) -> str:
        return f"state {self._text}"


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


def _digest(value: Any) -> str:
    if isinstance(value, torch.Tensor) and hasattr(value, "to_local"):  # a DTensor: the shard of this rank
        return _digest(value.to_local())
    if isinstance(value, torch.Tensor):
        short = hashlib.blake2b(_bytes(value), digest_size=8).hexdigest()
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} {short}"
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # NumPy arrays and scalars
        short = hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest()
        return f"numpy {value.dtype}{list(value.shape)} {short}"
    kind = type(value)
    text = value.hex() if kind is float else repr(value)
    return f"{kind.__qualname__} {text}"


def _short(value: Any) -> str:
    text = _digest(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _difference(a: Any, b: Any) -> str:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{_short(a).rpartition(' ')[0]} != {_short(b).rpartition(' ')[0]}"
        size = a.element_size()
        left, right = (torch.frombuffer(bytearray(_bytes(x)), dtype=torch.uint8).reshape(-1, size) for x in (a, b))
        wrong = (left != right).any(dim=1).nonzero().flatten().tolist()
        first = wrong[0]
        values = [x.detach().cpu().contiguous().reshape(-1)[first].item() for x in (a, b)]
        index = [int(i) for i in torch.unravel_index(torch.tensor(first, device="cpu"), a.shape)] if a.dim() else []
        return f"{len(wrong)} of {a.numel()} elements differ, first at {index}: {values[0]!r} != {values[1]!r}"
    return f"{_short(a)} != {_short(b)}"
