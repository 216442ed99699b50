"""A digest of a batch as a loader gives it, in some microseconds.

Values decide, not objects: tensors and arrays by dtype, shape and bytes, text and numbers as they are, containers by
what is in them. Of more than 256 KiB only samples are read. A batch that lies on a device is not read at all.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import torch
import xxhash

from .seeding import index_id

NOT_READ = 0
_MOST = 1 << 18  # bytes of a tensor that are read whole: 50 microseconds are not enough for 1 MiB out of cold memory
_BLOCK, _NUM_BLOCKS = 4096, 32
_NUM_ITEMS = 256  # of a long list
_DEPTH = 12
_ON_CPU = 1  # kDLCPU of DLPack
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _NotReadError(Exception):
    """The batch holds something that is on a device, or whose bytes mean nothing in another process."""


def batch_digest(batch: Any) -> int:
    """Return 64 bits that tell this batch from others, `NOT_READ` if it cannot be judged by its bytes."""
    hasher = xxhash.xxh3_64()
    try:
        _add(hasher, batch, _DEPTH)
    except Exception:  # noqa: BLE001 - a batch is the user's own object: whatever it raises, training goes on
        return NOT_READ
    return hasher.intdigest() or 1


def indices_digest(indices: list[Any]) -> int:
    """Return 64 bits that tell the indices of a batch from others."""
    try:
        data = struct.pack(f"<{len(indices)}q", *indices)
    except (struct.error, TypeError):
        data = struct.pack(f"<{len(indices)}Q", *(index_id(index) & ((1 << 64) - 1) for index in indices))
    return xxhash.xxh3_64_intdigest(data) or 1


def _add(hasher: Any, value: Any, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        _add_tensor(hasher, value)
    elif isinstance(value, np.ndarray):
        _add_array(hasher, value, depth)
    elif isinstance(value, str):
        hasher.update(b"s%d:" % len(value))
        _add_bytes(hasher, value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, (bytes, bytearray, memoryview)):
        hasher.update(b"b")
        _add_bytes(hasher, bytes(value))
    elif value is None or isinstance(value, (bool, int, float, complex, np.generic)):
        hasher.update(repr(value).encode())
    elif depth == 0:
        raise _NotReadError
    elif isinstance(value, Mapping):
        hasher.update(b"{%d" % len(value))
        for key in sorted(value, key=repr):  # a dict that was filled from a set has another order in each process
            _add(hasher, key, depth - 1)
            _add(hasher, value[key], depth - 1)
    elif isinstance(value, (list, tuple)):
        hasher.update(b"[%d" % len(value))
        items = value[:: -(-len(value) // _NUM_ITEMS) or 1]
        kinds = set(map(type, items))
        if kinds == {str}:
            _add_bytes(hasher, "\0".join(items).encode("utf-8", "surrogatepass"))
        elif kinds <= {int, float}:
            hasher.update(repr(items).encode())
        else:
            for item in items:
                _add(hasher, item, depth - 1)
    elif isinstance(value, Set):
        for digest in sorted(batch_digest(item) for item in value):
            hasher.update(digest.to_bytes(8, "little"))
    elif hasattr(value, "__array__") and hasattr(value, "__dlpack_device__"):  # of JAX, TensorFlow and others
        if value.__dlpack_device__()[0] != _ON_CPU:
            raise _NotReadError
        _add_array(hasher, np.asarray(value), depth)
    else:
        _add_object(hasher, value, depth)


def _add_object(hasher: Any, value: Any, depth: int) -> None:
    """Add the tensors, arrays and containers of an object; plain attributes may be times or addresses."""
    names = getattr(value, "__dict__", None)
    if names is None:
        names = {name: getattr(value, name) for name in getattr(value, "__slots__", ()) if hasattr(value, name)}
    found = {
        name: held for name, held in names.items() if isinstance(held, (torch.Tensor, np.ndarray, Mapping, list, tuple))
    }
    if not found:
        raise _NotReadError
    hasher.update(type(value).__name__.encode())
    _add(hasher, found, depth - 1)


def _add_tensor(hasher: Any, tensor: torch.Tensor) -> None:
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
        raise _NotReadError
    if tensor.requires_grad:
        tensor = tensor.detach()
    tensor = tensor.resolve_conj().resolve_neg()
    try:
        _add_array(hasher, tensor.numpy(), 0)
    except TypeError:  # bfloat16 and float8, which NumPy does not know
        hasher.update(str(tensor.dtype).encode())
        _add_array(hasher, tensor.view(_SAME_SIZE[tensor.element_size()]).numpy(), 0)


def _add_array(hasher: Any, array: np.ndarray[Any, Any], depth: int) -> None:
    if array.dtype.hasobject:
        _add(hasher, array.reshape(-1).tolist(), depth - 1)
        return
    hasher.update(b"%s%d" % (array.dtype.str.encode(), array.ndim))
    hasher.update(struct.pack(f"<{array.ndim}q", *array.shape))
    if array.nbytes == 0:
        return
    if not array.flags.c_contiguous:
        # As it lies in memory, if that has no gaps: (channels last, transposed).
        array = array.transpose(sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis])))
        if not array.flags.c_contiguous:
            array = _thinned(array)
    if array.nbytes <= _MOST:
        hasher.update(np.ascontiguousarray(array))
    else:
        data: Any = array.reshape(-1).view(np.uint8)
        _add_bytes(hasher, memoryview(data))


def _thinned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Leave elements out at equal distances until the rest is small: a view with gaps is copied to be read."""
    axis = 0
    while array.nbytes > _MOST // 4 and axis < array.ndim:
        step = -(-array.nbytes // (_MOST // 4))
        kept = max(1, -(-array.shape[axis] // step))
        array = array.take(range(0, array.shape[axis], -(-array.shape[axis] // kept)), axis)
        axis += 1
    return array


def _add_bytes(hasher: Any, data: bytes | memoryview) -> None:
    """Add all of it, or blocks at equal distances and the end."""
    size = len(data)
    if size <= _MOST:
        hasher.update(data)
        return
    for start in range(0, size - _BLOCK, size // _NUM_BLOCKS):
        hasher.update(data[start : start + _BLOCK])
    hasher.update(data[size - _BLOCK :])
