"""A run of the function trainer that goes on with another number of workers: every sample once, weights bit for bit."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fit_kit import make

import holdfast as hf

SAMPLES, BATCH, EPOCHS = 48, 2, 2


def learn(config: dict[str, Any]) -> None:
    """Train a small model with DDP; write down the samples of each step, and the weights at start and at each save."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from holdfast.torch import prepare_data_loader, prepare_model
    from holdfast.verify.state import digests

    context = hf.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(rank)  # other random numbers on each rank; DDP starts from the weights of rank 0
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.arange(float(SAMPLES)).reshape(-1, 1))
    loader = prepare_data_loader(DataLoader(data, batch_size=BATCH, shuffle=True), seed=1)
    state = {"model": model, "optimizer": optimizer, "data": loader, "rng": hf.RNG, "step": 0}
    log = Path(config["log"], f"{config['life']}-{rank}.jsonl")

    def note(event: str, samples: list[int] | None = None) -> None:
        whole = digests({"model": getattr(model, "module", model), "optimizer": optimizer})
        drawn = torch.get_rng_state().sum().item()
        row = {"event": event, "epoch": loader.epoch, "step": state["step"], "samples": samples, "state": whole}
        with log.open("a") as file:
            file.write(json.dumps({**row, "rng": drawn, "life": config["life"]}) + "\n")

    if (checkpoint := hf.get_checkpoint()) is not None:
        state["step"] = checkpoint.load(into=state)["step"]
        note("start")
    while loader.epoch < EPOCHS:
        for (x,) in loader:
            loss = model(x / SAMPLES).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state["step"] += 1
            note("step", x.view(-1).int().tolist())
            hf.report({"loss": loss.item()}, state=state)
            if state["step"] == config["stop"]:
                hf.get_all_reported_checkpoints()  # what was reported is committed by now
                if config["how"] == "return":
                    return
                if rank == world - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                torch.distributed.barrier() if world > 1 else signal.pause()


def live(root: Path, life: int, workers: int, stop: int | None, *, how: str = "kill", name: str = "run") -> hf.Result:
    config = {"log": str(root), "life": f"{name}{life}", "stop": stop, "how": how}
    trainer = make(root, learn, workers=workers, name=name, train_loop_config=config)
    if stop is None or how == "return":
        return trainer.fit()
    with pytest.raises(hf.TrainingFailedError):
        trainer.fit()
    return hf.Result.from_path(root / name)


def rows(root: Path, name: str = "run") -> list[dict[str, Any]]:
    return [
        {**json.loads(line), "rank": int(path.stem.rsplit("-", 1)[1])}
        for path in sorted(root.glob(f"{name}[0-9]*-*.jsonl"))
        for line in path.read_text().splitlines()
    ]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("chain", [
    pytest.param([(2, 5), (1, None)], id="2-1", marks=pytest.mark.slow),
    pytest.param([(4, 2), (2, 4), (3, None)], id="4-2-3", marks=pytest.mark.long),
])  # fmt: skip
def test_every_sample_once_over_other_numbers_of_workers(tmp_path: Path, chain, capfd) -> None:
    """Killed in mid-epoch, started with other workers: an epoch holds each sample once, the weights are the saved."""
    for life, (workers, stop) in enumerate(chain):
        result = live(tmp_path, life, workers, stop)
    found = rows(tmp_path)
    for epoch in range(EPOCHS):
        seen = [one for row in found if row["event"] == "step" and row["epoch"] == epoch for one in row["samples"]]
        assert sorted(seen) == list(range(SAMPLES))
    saved = {row["step"]: row["state"] for row in found if row["event"] == "step"}
    starts = [row for row in found if row["event"] == "start"]
    assert len(starts) == sum(workers for workers, _ in chain[1:])
    for row in starts:
        assert row["state"] == saved[row["step"]]
    # No two ranks go on with the same random numbers, and nobody with those of a rank that saved.
    for life, (workers, _) in enumerate(chain[1:], start=1):
        drawn = {row["rng"] for row in starts if row["life"] == f"run{life}"}
        before = {row["rng"] for row in found if row["life"] == f"run{life - 1}"}
        assert len(drawn) == workers
        assert not drawn & before
    assert list(result.metrics_dataframe["step"]) == list(range(1, max(saved) + 1))
    said = capfd.readouterr().err
    for (before, _), (now, _) in itertools.pairwise(chain):
        assert f"random generators: derived for {now} rank(s) (the checkpoint has {before})" in said
        assert f"samples is split over {now} rank(s), was {before}" in said


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_same_number_of_workers_is_the_run_that_was_never_killed(tmp_path: Path) -> None:
    """Two workers, killed twice in mid-epoch with dropout and DDP: every step is that of the twin, bit for bit."""
    live(tmp_path, 0, 2, None, name="whole")
    for life, stop in enumerate((4, 15, None)):
        live(tmp_path, life, 2, stop, name="broken")
    twin = {(row["step"], row["rank"]): row for row in rows(tmp_path, "whole")}
    assert len(twin) == 2 * EPOCHS * SAMPLES // (2 * BATCH)
    broken = rows(tmp_path, "broken")
    assert {(row["step"], row["rank"]) for row in broken} == twin.keys()
    for row in broken:
        there = twin[row["step"], row["rank"]]
        # A start is compared too: right after the load everything is as it was at that step.
        for item in ("state", "rng", *(("samples", "epoch") if row["event"] == "step" else ())):
            assert row[item] == there[item], f"{row['event']} {row['step']} of rank {row['rank']}: {item}"
