"""The trainer that the tests of `follow` watch, kill and start again: it saves each step into a bucket."""

from __future__ import annotations

import sys
import time

import torch

import holdfast as hf


def main(remote: str, steps: int, keep: int, pause: float) -> None:
    torch.set_num_threads(1)
    state = {"w": torch.zeros(20_000)}
    with hf.Checkpointer(remote, state, every=1, keep=hf.Keep(last=keep)) as ck:
        print("at", ck.global_step, ck._session.client.process_id, "-", flush=True)
        while ck.global_step < steps:
            state["w"] += 1
            ck.step()
            ck.wait()
            print("saved", ck.global_step, flush=True)
            time.sleep(pause)
    print("end", steps, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
