"""One rank of two on a machine of its own: ``python network_cases.py RANK ROOT NOTES UNTIL STALE_S TIMEOUT_S [HOLD]``.

Saves each step. With HOLD, rank 1 stands still in the save of that step until ``NOTES/go`` is there. The last line of
its output is JSON: the step it has started from, the error it has ended with, how long it has waited for that.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast as hf
from holdfast.checkpointer import rank_group


class Held:
    """An object of the user's whose state_dict takes its time."""

    def __init__(self, notes: Path, hold: int) -> None:
        self.notes, self.hold, self.step = notes, hold, 0

    def state_dict(self) -> dict[str, int]:
        if dist.get_rank() == 1 and self.step == self.hold:
            (self.notes / "held").touch()
            while not (self.notes / "go").exists():
                time.sleep(0.01)
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def main(rank: int, root: str, notes: Path, until: int, stale_s: float, timeout_s: float, hold: int) -> None:
    rank_group.ANSWER_MARGIN_S = 4.0
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=120))
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"model": model, "optimizer": optimizer, "held": (held := Held(notes, hold)), "mine": hf.PerRank(rank)}
    start, error, begun = -1, None, time.monotonic()
    try:
        with hf.Checkpointer(root, state, every=1, keep=None, timeout_s=timeout_s, silence_s=stale_s) as ck:
            start = ck.global_step
            while ck.global_step < until:
                optimizer.zero_grad()
                model(torch.full((2, 4), float(ck.global_step))).square().mean().backward()
                optimizer.step()
                begun = time.monotonic()
                held.step = ck.global_step + 1
                ck.step()
                ck.wait()
    except hf.HoldfastError as problem:
        error = f"{type(problem).__name__}: {problem}"
    waited_s = time.monotonic() - begun
    print(json.dumps({"start": start, "error": error, "waited_s": waited_s, "weights": model.weight.sum().item()}))


if __name__ == "__main__":
    given = sys.argv[1:]
    step = int(given[6]) if len(given) > 6 else -1
    main(int(given[0]), given[1], Path(given[2]), int(given[3]), float(given[4]), float(given[5]), step)
