"""Dictionaries of dictionaries of tensors, as optimizers keep them: half of the tensors of a state, or more.

They are taken apart in one loop with hardly a call in it: training waits for that at every save.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from holdfast.format.scalars import is_text

from .arrays import all_dense

__all__ = ["RowTensors", "take_rows"]

_TEXT, _TENSOR = frozenset({str}), frozenset({torch.Tensor})


class RowTensors(NamedTuple):
    """What was found: nodes of the tree by key, names of the tensors, and the tensors."""

    tree: dict[str, Any]
    names: list[str]
    tensors: list[torch.Tensor]


def take_rows(value: Mapping[str, Any], prefix: str) -> RowTensors | None:
    """Take a dictionary apart all of whose values are dictionaries of plain tensors; None if there is more to it.

    Args:
        value: the dictionary.
        prefix: what the names of its tensors begin with.
    """
    found = RowTensors({}, [], [])
    for key, row in value.items():
        if type(row) is not dict or not row or not _TENSOR.issuperset(map(type, row.values())):
            return None
        if not _TEXT.issuperset(map(type, row)) or not is_text("".join(row)):
            return None
        at, keys = f"{prefix}{key}/", list(row)
        found.names.extend([at + one for one in keys])
        found.tensors.extend(row.values())
        found.tree[key] = {"$": "tensors", "at": at, "k": keys, "o": 0}
    whole = all_dense(found.tensors) and len(set(found.names)) == len(found.names)
    return found if whole else None
