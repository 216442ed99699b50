"""The mirrored trainer that the kill tests kill: its end is a function of every step and of the generators."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time

import torch

import holdfast as hf


def main(remote: str, local: str, steps: int, pause: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    state = {"w": torch.zeros(100_000), "frozen": torch.arange(50_000.0), "seen": Seen()}
    mirror = hf.Mirror(local, keep=hf.Keep(last=2), max_behind=9)
    # A file of one name in all saves, of one size, and never of the same contents.
    files = {"config.json": lambda: json.dumps({"drawn": os.urandom(8).hex()})}
    with hf.Checkpointer(remote, state, every=1, keep=hf.Keep(last=3), local_dir=mirror, model_files=files) as ck:
        source = ck.resumed_from.uri if ck.resumed_from is not None else "nothing"
        print("at", ck.global_step, ck._session.client.process_id, source, flush=True)
        while ck.global_step < steps:
            state["w"].mul_(0.9).add_(torch.rand(100_000))
            state["seen"].values.append(float(state["w"][0]))
            ck.step()
            ck.wait()
            print("saved", ck.global_step, flush=True)
            time.sleep(pause)
    told = state["w"].numpy().tobytes() + repr(state["seen"].values).encode()
    print("end", hashlib.sha256(told).hexdigest(), flush=True)


class Seen:
    def __init__(self) -> None:
        self.values: list[float] = []

    def state_dict(self) -> dict[str, list[float]]:
        return {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.values[:] = state["values"]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
