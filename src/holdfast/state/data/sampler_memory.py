"""What a sampler of the user's own remembers from epoch to epoch, and how it is given back to it.

A sampler may shuffle its own list in place, count its epochs, or draw from a generator that it keeps in a list. What a
draw of the order changes of its attributes is its memory: it is kept as it was when the epoch began, and a resume gives
it back before the order is drawn again. Attributes that only the script sets (a curriculum's length) are left alone.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Sampler

from holdfast._log import get_logger

from .seeding import put_generator, take_generator

_MOST = 10_000_000  # elements of an attribute
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_log = get_logger("data")
# Samplers -> digests of what they remembered where passes of this process ended, until the next pass has begun there.
_ends: weakref.WeakKeyDictionary[Any, set[bytes]] = weakref.WeakKeyDictionary()


class SamplerMemory:
    """The memory of the samplers of one epoch.

    Args:
        samplers: those that decide the order, the outer one first.
        given: what `state_dict` returned, of this epoch or of the epoch before.
        is_mid_epoch: ``given`` is of this epoch.
    """

    def __init__(self, samplers: list[Any], *, given: Mapping[str, Any] | None, is_mid_epoch: bool) -> None:
        self._owners = _owners(samplers)
        self._given, self._is_mid_epoch = dict(given or {}), is_mid_epoch
        self._held: dict[str, Any] = {}
        self._changed = set(self._given)

    def begin(self) -> None:
        """Give back what is known, and keep what the samplers hold now: the order is drawn next."""
        if self._is_mid_epoch or not self._goes_on():
            for path, packed in self._given.items():
                owner, _, name = path.rpartition("/")
                if owner in self._owners and hasattr(self._owners[owner], name):
                    now = getattr(self._owners[owner], name)
                    put = _put(now, packed)
                    if put is not now:
                        setattr(self._owners[owner], name, put)
        self._held = self._capture()

    def _goes_on(self) -> bool:
        """Tell whether the last pass of a sampler in this process has ended with what is known: it remembers by itself.

        Each end counts once: who loads it again, in the same process, goes back to it.
        """
        here, known = False, _digest(self._given)
        for owner in self._owners.values():
            ends = _ends.get(owner, set())
            here = here or known in ends
            ends.discard(known)
        return here

    @property
    def has_changed(self) -> bool:
        """Whether a draw has changed something."""
        return bool(self._changed)

    def drawn(self) -> None:
        """Note what the draw has changed so far."""
        now = self._capture()
        self._changed.update(
            path for path in self._held if path in now and _digest(self._held[path]) != _digest(now[path])
        )

    def state_dict(self, *, is_over: bool) -> dict[str, Any]:
        """Return what is to be given back: for the rest of this epoch, or once it is over for the next one."""
        now = self._capture() if is_over and self._changed else self._held
        if not self._held:
            return self._given
        found = {path: now[path] for path in sorted(self._changed) if path in now}
        if is_over:
            for owner in self._owners.values():
                _ends.setdefault(owner, set()).add(_digest(found))
        return found

    def _capture(self) -> dict[str, Any]:
        found = {}
        for prefix, owner in self._owners.items():
            for name, value in vars(owner).items():
                # Generators that are attributes are seeded for each epoch, see `Stream`.
                if isinstance(value, (*_GENERATORS, Sampler)):
                    continue
                try:
                    found[f"{prefix}/{name}"] = _packed(value)
                except _TooLargeError:
                    _log.debug("%s.%s is too large to be kept", type(owner).__name__, name)
                except TypeError:
                    continue  # not plain: a data set, a function
        return found


class _TooLargeError(TypeError):
    """An attribute has more elements than are kept."""


def _owners(samplers: list[Any]) -> dict[str, Any]:
    """Return the samplers by number, with those that they hold; torch's own remember nothing."""
    found: list[Any] = []
    waiting = [sampler for sampler in samplers if sampler is not None]
    while waiting:
        owner = waiting.pop(0)
        if not hasattr(owner, "__dict__") or any(owner is known for known in found):
            continue
        waiting += [value for value in vars(owner).values() if isinstance(value, Sampler)]
        if not type(owner).__module__.startswith("torch.utils.data"):
            found.append(owner)
    return {str(number): owner for number, owner in enumerate(found) if _is_kept(owner)}


def _is_kept(owner: Any) -> bool:
    try:
        weakref.ref(owner)
        hash(owner)
    except TypeError:
        return False
    return True


def _packed(value: Any) -> Any:
    """Return a copy as plain values and arrays.

    Raises:
        TypeError: it is neither plain nor a generator.
    """
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, _GENERATORS):
        return {"kind": "generator", "state": take_generator(value)}
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and not isinstance(value, torch.nn.Parameter):
        return {"kind": "tensor", "value": value.detach().clone()}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {"kind": "array", "value": value.copy()}
    if type(value) not in (list, tuple, deque, dict):
        raise TypeError
    if len(value) > _MOST:
        raise _TooLargeError
    kind = type(value).__name__
    if kind == "dict":
        return {"kind": kind, "keys": _packed(list(value)), "value": _packed(list(value.values()))}
    if value and all(type(item) is int for item in value):
        array = np.asarray(list(value))
        if array.dtype == np.int64:
            small = array.min() >= -(1 << 31) and array.max() < 1 << 31
            return {"kind": kind, "ints": array.astype(np.int32) if small else array}
    return {"kind": kind, "value": [_packed(item) for item in value]}


def _put(now: Any, packed: Any) -> Any:
    """Return what `_packed` was made of, in place where a list or a generator is there."""
    if not isinstance(packed, Mapping):
        return packed
    kind = packed["kind"]
    if kind == "generator":
        put_generator(now, packed["state"])
        return now
    if kind in ("tensor", "array"):
        return packed["value"]
    if kind == "dict":
        keys = _put(None, packed["keys"])
        values = [now.get(key) if isinstance(now, dict) else None for key in keys]
        made = dict(zip(keys, _put(values, packed["value"]), strict=True))
        if isinstance(now, dict):
            now.clear()
            now.update(made)
            return now
        return made
    if "ints" in packed:
        items = np.asarray(packed["ints"]).tolist()
    else:
        held = list(now) if isinstance(now, (list, tuple, deque)) else []
        held += [None] * (len(packed["value"]) - len(held))
        items = [_put(item, packed_item) for item, packed_item in zip(held, packed["value"], strict=False)]
    if kind == "list" and isinstance(now, list):
        now[:] = items
        return now
    return (
        {"list": list, "tuple": tuple}[kind](items) if kind != "deque" else deque(items, getattr(now, "maxlen", None))
    )


def _digest(packed: Any) -> bytes:
    hasher = xxhash.xxh3_128()
    if isinstance(packed, Mapping):
        for key in packed:
            hasher.update(key.encode() + _digest(packed[key]))
    elif isinstance(packed, torch.Tensor):
        hasher.update(str(packed.dtype).encode() + str(tuple(packed.shape)).encode())
        hasher.update(packed.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(packed, np.ndarray):
        hasher.update(f"{packed.dtype}{packed.shape}".encode() + packed.tobytes())
    elif isinstance(packed, (list, tuple)):
        for item in packed:
            hasher.update(_digest(item))
    else:
        hasher.update(repr(packed).encode())
    return hasher.digest()
