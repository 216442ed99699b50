"""The state of the golden checkpoints, and the command that made them.

A released format version gets its own folder, made once with the release that introduced it and never again:
``python tests/data/golden.py 1.0``. It has to load for ever. What was added to a version has a folder, too:
``1.0-other_state`` has what an optimizer keeps under keys that are no parameters; ``1.0-ranks`` what each of two ranks
stores of its own without being asked (``torchrun --nproc-per-node 2 tests/data/golden.py 1.0-ranks``); ``1.0-parts`` a
tensor that wraps others.
"""

from __future__ import annotations

import collections
import datetime
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import holdfast as hf

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "kits"))
from packed_kit import Packed  # noqa: E402


class Tied(torch.nn.Module):
    """Two linear layers over one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.second = torch.nn.Linear(4, 4, bias=True)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.tensor(7))


class Average:
    """An object with a tensor."""

    def __init__(self, total: float = 0.0) -> None:
        self.total = torch.tensor([total])

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


def state(version: str, rank: int = 0) -> dict[str, Any]:
    """Return the same state every time, as far as a version can hold it."""
    model = Tied()
    with torch.no_grad():
        model.first.weight.copy_(torch.arange(16.0).view(4, 4) / 16)
        model.second.bias.copy_(torch.arange(4.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, betas=(0.5, 0.75))
    for number, param in enumerate(model.parameters()):
        optimizer.state[param] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.full_like(param, 0.5 + number),
            "exp_avg_sq": torch.full_like(param, 0.25 + number),
        }
    of_ranks: dict[str, Any] = {}
    if version == "1.0-ranks":
        nested = {"a/b": {1: rank}, "same": "text", "weight": torch.zeros(1)}
        of_ranks = {"position": 10 * rank, "nested": nested, "average": Average(rank + 0.5)}
    elif version == "1.0-other_state":
        optimizer.state.update({"k": 3, ("layer", 4): {"factors": [torch.arange(2.0)]}})
    if version == "1.0-parts":
        of_ranks["packed"] = Packed.of(torch.arange(1.0, 9.0).view(2, 4))
    point = collections.namedtuple("point", ["x", "y"])
    return {
        "model": model,
        "optimizer": optimizer,
        "tensors": {
            "bfloat16": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
            "float8": torch.tensor([0.5, 1.0, -2.0]).to(torch.float8_e4m3fn),
            "complex": torch.tensor([1 + 2j, -3.5j]),
            "bool": torch.tensor([True, False]),
            "scalar": torch.tensor(5, dtype=torch.int64),
            "empty": torch.empty(0, 3),
            "strided": torch.arange(12.0).view(3, 4).t(),
        },
        "arrays": {"big endian": np.arange(3, dtype=">f4"), "dates": np.array(["2026-11-21"], dtype="M8[D]")},
        "plain": {
            "none": None,
            "numbers": [1, 2**80, -0.0, float("inf"), 1 + 2j, True],
            "text": "ä€😀 \ud800",
            "bytes": b"\x00\xff",
            "containers": [(1, (2,)), {3, 4}, frozenset({5}), collections.deque([6], maxlen=2), point(7, 8)],
            "dicts": [{1: "a", (2, 3): "b"}, collections.OrderedDict(z=1, a=2), collections.Counter("aab")],
            "default": collections.defaultdict(list, k=[1]),
            "time": datetime.datetime(2026, 11, 21, 6, 30, tzinfo=datetime.timezone.utc),
            "span": datetime.timedelta(days=1, microseconds=5),
            "path": Path("a/b"),
            "torch": [torch.float32, torch.device("cpu"), torch.Size([1, 2])],
            "numpy": np.float32(0.1),
        },
        "mine": hf.PerRank({"rank": rank, "cache": torch.ones(2)}),
        **of_ranks,
    }


if __name__ == "__main__":
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    number = int(os.environ.get("RANK", "0"))
    hf.save(HERE / sys.argv[1], state(sys.argv[1], number), step=42, metrics={"loss": 0.5, "bad": float("nan")})
