"""``memmove`` in two bindings, for the copies into an arena and out of a read buffer."""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["move", "move_small"]


def _bind(library: Any) -> Any:
    function = library.memmove
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = None
    return function


move = _bind(ctypes.CDLL(None))
"""``move(target, source, size)``; other threads run meanwhile."""

move_small = _bind(ctypes.PyDLL(None))
"""The same with the GIL kept: giving it up for every kilobyte costs more than the copy."""
