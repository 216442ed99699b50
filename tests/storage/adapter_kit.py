"""What the tests of all three adapters do with a storage: checkpoints, from end to end."""

from __future__ import annotations

import torch

import holdfast as hf
from holdfast import Checkpoint, Checkpointer, Keep
from holdfast.run.catalog import Catalog
from holdfast.storage import Storage


def save_load_resume(storage: Storage) -> None:
    """Save and load one checkpoint, then train, stop and resume a run with retention, all in ``storage``."""
    state = {"w": torch.arange(600_000, dtype=torch.float32), "note": "seven"}
    saved = hf.save(Checkpoint.at(storage, "single/first"), state, step=7)
    loaded = hf.load(saved)
    assert torch.equal(loaded["w"], state["w"])
    assert loaded["note"] == "seven"
    hf.save(saved, {"w": torch.zeros(3)}, overwrite=True)
    assert torch.equal(hf.load(saved)["w"], torch.zeros(3))

    run = storage.child("runs/a")
    assert _train(run, 5) == (0, 5)
    assert _train(run, 9) == (5, 9)
    steps = {record.step for record in Catalog(run).records()}
    assert steps >= {8, 9}
    assert not steps & {2, 4, 6}
    kept = {record.name for record in Catalog(run).records()}
    found = {info.path.rstrip("/") for info in run.list(recursive=False) if info.path.startswith("step")}
    assert found == kept


def _train(run: Storage, steps: int) -> tuple[int, int]:
    """Train up to ``steps``; return the steps found at the start and reached at the end."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with Checkpointer(run, {"model": model, "optimizer": optimizer}, every=2, keep=Keep(last=2)) as ck:
        before = ck.global_step
        while ck.global_step < steps:
            optimizer.zero_grad()
            loss = model(torch.randn(3, 4)).square().sum()
            loss.backward()
            optimizer.step()
            ck.step(loss=loss)
    return before, ck.stats.last_durable_step
