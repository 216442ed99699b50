"""The script that the kill tests kill: a tiny MLP, one line on stdout for each life, and its end state in a file."""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf


def main(run, result, writer_file, pause):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(160)
    loader = DataLoader(TensorDataset(ids, torch.randn(160, 4)), batch_size=4, shuffle=True)
    history = Ids()
    state = {"model": model, "optimizer": optimizer, "ids": history}
    with hf.Checkpointer(run, state, every=3, keep=hf.Keep(last=2)) as ck:
        with open(writer_file, "w") as out:
            out.write(f"{ck._session.client.process_id} {ck.global_step}")
        for _ in ck.epochs(2):
            for which, x in ck.batches(loader):
                loss = model(x).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                history.seen += which.tolist()
                time.sleep(pause)
                ck.step(loss=loss)
    hf.save(result, {"model": model, "optimizer": optimizer, "ids": history.seen}, overwrite=True)


class Ids:
    def __init__(self):
        self.seen = []

    def state_dict(self):
        return {"seen": list(self.seen)}

    def load_state_dict(self, state):
        self.seen[:] = state["seen"]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
