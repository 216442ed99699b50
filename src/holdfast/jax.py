"""JAX: a pytree of arrays as one value of a state.

`Pytree` goes wherever a state goes: `holdfast.save`, `save_async`, `Checkpointer`, ``report(state=...)``. Arrays on the
CPU are not copied on their way to the writer; bfloat16 and the float8 types are stored as such, which torch reads too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ._log import get_logger
from ._optional import require
from .checkpoint.handle import Checkpoint
from .checkpointer.functions import load as _load
from .errors import StateMismatchError, UnsupportedStateError
from .state.tree.arrays import array_of, tensor_of

__all__ = ["Pytree", "load"]

_LOG = get_logger("jax")
_USUAL_KEY = "threefry2x32"
_NUMBERS = (bool, int, float, complex)


class Pytree:
    """A pytree that can be saved and restored.

    JAX's arrays never change, so a load makes new ones: read `value` afterwards. They have the sharding (and so the
    devices), the dtype and the weak type of those they replace; a cast that may lose something is logged. Every leaf
    is an array, a NumPy array, a key of `jax.random`, or plain data; a number becomes an array where one was stored.
    With several processes each of them has a whole copy of every array.

    Args:
        value: dicts, lists, tuples, dataclasses... of arrays, as in ``{"params": params, "opt": optimizer_state}``.

    Raises:
        MissingExtraError: JAX is not installed.

    Example:
        >>> tree = Pytree({"params": params, "opt": opt_state})  # doctest: +SKIP
        >>> holdfast.save("runs/first", {"train": tree, "step": 3})  # doctest: +SKIP
        >>> holdfast.load("runs/first", {"train": tree})["step"]  # doctest: +SKIP
        3
        >>> params = tree.value["params"]  # doctest: +SKIP
    """

    def __init__(self, value: Any) -> None:
        self._jax = require("jax", extra="jax", purpose="holdfast.jax")
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """Return the leaves by their path ("params/dense/kernel"); arrays as tensors over the same memory.

        A key of `jax.random` is the array of its data; one of another kind than JAX's usual one has its name beside it.

        Raises:
            UnsupportedStateError: an array is cut over processes, or two leaves have the same path.
        """
        found: dict[str, Any] = {}
        for name, leaf in self._leaves():
            if name in found:
                raise UnsupportedStateError(f"two leaves of a pytree are called {name!r}: rename a key")
            found[name] = self._stored(name, leaf)
        return found

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Make `value` anew of stored leaves.

        Raises:
            StateMismatchError: leaves, shapes or kinds of keys are others than those of `value`, which stays as it is.
        """
        live = dict(self._leaves())
        problems = [f"missing: {name}" for name in live if name not in saved]
        problems += [f"unexpected: {name}" for name in saved if name not in live]
        for name, leaf in live.items():
            own, stored = self._stored(name, leaf), saved.get(name)
            have, want = _shape(stored), _shape(own)
            if isinstance(own, dict) and not isinstance(stored, Mapping) and have == _shape(own["data"]):
                continue  # of an early version, or of bare key data: nobody knows for which implementation
            if "()" in (have, want) and isinstance(own if have == "()" else stored, _NUMBERS):
                continue  # a count that begins as 0 is an array from the first jitted step on
            if name in saved and have != want:
                problems.append(f"{name}: {have or 'no array'} stored, {want or 'no array'} in the pytree")
        if problems:
            what = f"{len(problems)} leaves of the pytree do not fit the checkpoint: "
            raise StateMismatchError(what + "; ".join(sorted(problems)[:20]))
        self._say_what_is_cast(live, saved)
        made = [self._made(leaf, saved[name]) for name, leaf in live.items()]
        self.value = self._jax.tree_util.tree_unflatten(self._jax.tree_util.tree_structure(self.value), made)

    def _say_what_is_cast(self, live: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        cast = []
        for name, leaf in live.items():
            stored = saved[name]
            if not isinstance(stored, (torch.Tensor, np.ndarray)) or isinstance(leaf, _NUMBERS) or self._is_key(leaf):
                continue
            have = array_of(stored).dtype if isinstance(stored, torch.Tensor) else stored.dtype
            if not np.can_cast(have, leaf.dtype, "safe"):
                cast.append(f"{name} from {have} to {leaf.dtype}")
        if cast:
            _LOG.warning(
                "%d leaves are cast to what the pytree has, which may lose some of what the checkpoint has: %s; if "
                "that is not meant, give them the stored dtype (64 bits: jax.config.update('jax_enable_x64', True))",
                len(cast), "; ".join(cast[:20]),
            )  # fmt: skip

    def _leaves(self) -> list[tuple[str, Any]]:
        tree_util = self._jax.tree_util
        rows = tree_util.tree_flatten_with_path(self.value)[0]
        return [(tree_util.keystr(path, simple=True, separator="/") or "value", leaf) for path, leaf in rows]

    def _is_key(self, leaf: Any) -> bool:
        jax = self._jax
        return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)

    def _stored(self, name: str, leaf: Any) -> Any:
        if not isinstance(leaf, self._jax.Array):
            return leaf
        if self._is_key(leaf):
            impl, data = str(self._jax.random.key_impl(leaf)), self._stored(name, self._jax.random.key_data(leaf))
            # Data of the others are of one shape, so they say which one it is.
            return data if impl == _USUAL_KEY else {"impl": impl, "data": data}
        if not leaf.is_fully_addressable:
            if not leaf.is_fully_replicated:
                raise UnsupportedStateError(
                    f"{name}: this array is cut over processes, and this one cannot read all of it: gather it first "
                    "(jax.experimental.multihost_utils.process_allgather), or use Orbax"
                )
            leaf = leaf.addressable_data(0)  # data-parallel training: every process has all of it
        return tensor_of(leaf)

    def _made(self, leaf: Any, stored: Any) -> Any:
        if isinstance(leaf, _NUMBERS) and isinstance(stored, torch.Tensor):
            made, weak = self._jax.numpy.asarray(array_of(stored)), self._jax.numpy.asarray(stored.item())
            return weak if made.dtype == weak.dtype else made  # it yields to other dtypes, as the number would have
        if not isinstance(leaf, (self._jax.Array, self._jax.ShapeDtypeStruct, np.ndarray)):
            return stored
        stored = np.asarray(stored) if isinstance(stored, _NUMBERS) else stored
        stored = stored["data"] if isinstance(stored, Mapping) else stored
        array = array_of(stored) if isinstance(stored, torch.Tensor) else stored
        if isinstance(leaf, np.ndarray):
            return array.astype(leaf.dtype, copy=False)
        if self._is_key(leaf):
            data = self._placed(array, self._jax.random.key_data(leaf))
            return self._jax.random.wrap_key_data(data, impl=self._jax.random.key_impl(leaf))
        return self._placed(array, leaf)

    def _placed(self, array: Any, like: Any) -> Any:
        jax, sharding = self._jax, like.sharding  # that of a shape of jax.eval_shape may be None
        array = array.astype(like.dtype, copy=False)
        if sharding is None or sharding.is_fully_addressable:
            made = jax.device_put(array, sharding)
        else:
            made = jax.make_array_from_callback(like.shape, sharding, lambda index: array[index])
        if not like.weak_type:
            return made
        # A number that came from Python yields to the dtype of the other operand; a new array would not.
        is_shape = isinstance(like, jax.ShapeDtypeStruct)
        weak = jax.numpy.full(like.shape, like.dtype.type(0).item(), device=sharding) if is_shape else like
        weak = weak.at[...].set(made)
        return weak if sharding in (None, weak.sharding) else jax.device_put(weak, sharding)


def _shape(value: Any) -> str | None:
    if isinstance(value, Mapping):
        return f"{_shape(value.get('data'))} of a key for {value.get('impl')!r}"
    shape = None if isinstance(value, np.generic) else getattr(value, "shape", None)
    return None if shape is None else str(tuple(shape))


def load(source: str | os.PathLike[str] | Checkpoint, like: Any, *, item: str) -> Any:
    """Return a pytree like ``like`` with the arrays of a checkpoint.

    Args:
        source: path, URI or `Checkpoint`.
        like: a pytree of the same structure, which stays as it is; shapes of ``jax.eval_shape`` will do for arrays.
        item: the name that the `Pytree` had in the state.

    Raises:
        StateMismatchError: the stored pytree has another structure.
        CheckpointNotFoundError: there is no checkpoint at ``source``.
    """
    tree = Pytree(like)
    _load(source, {item: tree}, only=[item])
    return tree.value
