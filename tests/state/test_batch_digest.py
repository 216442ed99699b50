"""The digest of a batch: equal for equal values in every process, another one for others, none for what is not read."""

from __future__ import annotations

import subprocess
import sys
from collections import UserDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.state.data.digest import NOT_READ, batch_digest, indices_digest


class _ArrayOfAnother:
    """An array of JAX or TensorFlow, as others see it."""

    def __init__(self, value: float, device: int = 1) -> None:
        self._value, self._device = value, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        assert self._device == 1, "it lies on an accelerator"
        return np.full(3, self._value)


PAIRS: list[tuple[Any, Any]] = [
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
    (torch.zeros(2, 3), torch.zeros(3, 2)),
    (torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
    (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)),
    (torch.ones(3).bool(), torch.zeros(3).bool()),
    (torch.ones(2) * 1j, torch.ones(2) * 2j),
    (torch.tensor(1), torch.tensor(2)),
    (torch.arange(6).reshape(2, 3).T, torch.arange(1, 7).reshape(2, 3).T),
    (np.arange(3), np.arange(1, 4)),
    (np.array(["a", "b"]), np.array(["a", "c"])),
    (np.array([{"a": 1}], dtype=object), np.array([{"a": 2}], dtype=object)),
    (_ArrayOfAnother(1.0), _ArrayOfAnother(2.0)),
    (["a", "bc"], ["ab", "c"]),
    ([1, 2.0], [1, 3.0]),
    ([1, 2], ["1", "2"]),
    ({"x": torch.ones(1), "y": [("a", 1)]}, {"x": torch.ones(1), "y": [("a", 2)]}),
    (UserDict(x=torch.ones(1)), UserDict(x=torch.zeros(1))),
    ({"a", "b"}, {"a", "c"}),
    (b"one", b"two"),
    (SimpleNamespace(x=torch.ones(1)), SimpleNamespace(x=torch.zeros(1))),
    (torch.ones(1 << 20), torch.zeros(1 << 20)),
    (torch.zeros(1 << 20), torch.tensor([0.0] * ((1 << 20) - 1) + [1.0])),
    (torch.ones(600, 600).T[:, ::2], torch.zeros(600, 600).T[:, ::2]),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: type(pair[0]).__name__)
def test_values_decide(pair: tuple[Any, Any]) -> None:
    """Another value is another digest, a copy is the same; no value has the digest of what was not read."""
    left, right = map(batch_digest, pair)
    assert NOT_READ not in (left, right)
    assert left != right
    if isinstance(pair[0], (torch.Tensor, np.ndarray)):
        copy = pair[0].clone() if isinstance(pair[0], torch.Tensor) else pair[0].copy()
        assert batch_digest(copy) == batch_digest(pair[0].clone() if isinstance(copy, torch.Tensor) else copy)


def test_the_order_of_a_dict_does_not_matter() -> None:
    """A dict that was filled from a set has another order in each process."""
    assert batch_digest({"a": 1, "b": 2}) == batch_digest({"b": 2, "a": 1})


class _Hostile:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not now")


@pytest.mark.parametrize(
    "batch",
    [torch.ones(2, device="meta"), [torch.ones(2), torch.ones(2, device="meta")], torch.eye(2).to_sparse(), object(),
     lambda: 0, _Hostile(), SimpleNamespace(when=1.0), _ArrayOfAnother(1.0, device=2)],
    ids=["meta", "mixed", "sparse", "object", "function", "hostile", "no tensor", "accelerator"],
)  # fmt: skip
def test_what_cannot_be_judged_is_not_read(batch: Any) -> None:
    """A device is not asked, an address or a time of an object is not taken for its value, errors stay inside."""
    assert batch_digest(batch) == NOT_READ


def test_lists_that_hold_themselves_end() -> None:
    """A batch without end is not read."""
    endless: list[Any] = []
    endless.append(endless)
    assert batch_digest(endless) == NOT_READ


def test_digests_are_the_same_in_every_process() -> None:
    """Nothing depends on the seed of hashes."""
    code = (
        "from holdfast.state.data.digest import batch_digest as d; print(d([{'a', 'b', 'c'}, {'k': (1, 'x', None)}]))"
    )
    environment = {"PYTHONHASHSEED": "77", "PYTHONPATH": ":".join(sys.path)}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert int(out.stdout) == batch_digest([{"a", "b", "c"}, {"k": (1, "x", None)}])


def test_indices_of_any_kind() -> None:
    """Numbers, names and tuples as indices of samples have digests."""
    assert len({indices_digest(found) for found in ([1, 2], [2, 1], ["a"], [(1, 2)], [-1], [1 << 70])}) == 6
