"""Arrays of other frameworks as tensors of torch, and back: bfloat16 and the float8 types keep their names."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from holdfast.errors import UnsupportedStateError
from holdfast.format.tensor_file import item_size
from holdfast.state.tree.arrays import dtype_name

__all__ = ["array_of", "tensor_of"]


def tensor_of(array: Any) -> torch.Tensor:
    """Return a tensor over an array's memory if that can be, else a copy on the CPU. Nobody may write to it.

    Args:
        array: of NumPy, or anything that DLPack or NumPy reads.

    Raises:
        UnsupportedStateError: torch has no such dtype.
    """
    if not isinstance(array, np.ndarray):
        try:
            found: torch.Tensor = torch.from_dlpack(array)  # type: ignore[attr-defined]
            return found
        except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):
            pass  # a dtype or a layout that DLPack lacks
    values = np.asarray(array)
    if not values.flags.writeable or not values.flags.c_contiguous:
        values = np.array(values, order="C")
    if values.dtype.isbuiltin == 1:
        return torch.from_numpy(values)
    dtype = getattr(torch, values.dtype.name, None)
    if not isinstance(dtype, torch.dtype) or item_size(values.dtype.name) != values.itemsize:
        raise UnsupportedStateError(
            f"an array of {values.dtype.name} cannot be saved: torch has no such dtype; cast it"
        )
    return torch.from_numpy(values.reshape(-1).view(np.uint8)).view(dtype).reshape(values.shape)


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a NumPy array over a tensor of the CPU; dtypes that NumPy lacks are those of the package ml_dtypes."""
    try:
        return tensor.numpy()
    except TypeError:
        dtype = np.dtype(getattr(importlib.import_module("ml_dtypes"), dtype_name(tensor.dtype)))
        flat: np.ndarray[Any, Any] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        found: np.ndarray[Any, Any] = flat.view(dtype)
        return found.reshape(tensor.shape)
