"""Runs that go on with another number of ranks: every sample once, the state bit for bit, all else said."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from resplit_cases import BATCH, EPOCHS, SAMPLES

CASES = str(Path(__file__).parent / "resplit_cases.py")


def live(ranks, root: Path, chain: list[tuple[int, int | None]], *, name: str = "run", **options: Any):
    """Run one life after the other, (ranks, step to be killed after); returns what rank 0 printed in each."""
    printed = []
    for life, (world, stop) in enumerate(chain):
        outcomes = ranks.ranks(
            f"{CASES}:train", str(root / name), str(root), life=f"{name}{life}", stop=stop, world_size=world, **options
        )
        expected = 0 if stop is None else -9
        for rank, one in enumerate(outcomes):
            assert one.status == expected, f"life {life}, rank {rank}: {one.status}\n{one.output}\n{one.error}"
        printed.append(outcomes[0].output)
    return printed


def rows(root: Path, name: str = "run") -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(root.glob(f"{name}*.jsonl")) for line in path.read_text().splitlines()]


def samples(found: list[dict[str, Any]], epoch: int) -> list[int]:
    steps = (row for row in found if row["event"] == "step" and row["epoch"] == epoch)
    return sorted(one for row in steps for one in row["samples"])


@pytest.mark.parametrize(("loader", "parallel"), [
    ("plain", "ddp"),
    pytest.param("distributed", "ddp", marks=pytest.mark.long),
    ("plain", "fsdp2"),
    pytest.param("stream", "ddp", marks=pytest.mark.slow),
])  # fmt: skip
def test_four_two_three_ranks_see_every_sample_once(ranks, tmp_path, loader, parallel) -> None:
    """Killed in mid-epoch and started with other ranks: each epoch is whole, what was saved is restored bit for bit."""
    chain = [(4, 2), (2, 4), (3, None)]
    printed = live(ranks, tmp_path, chain, loader=loader, parallel=parallel)
    found = rows(tmp_path)
    for epoch in range(EPOCHS):
        assert samples(found, epoch) == list(range(SAMPLES))
    saved = {row["step"]: row["state"] for row in found if row["event"] == "step"}
    starts = [row for row in found if row["event"] == "start"]
    assert [row["life"] for row in starts] == ["run1"] * 2 + ["run2"] * 3
    assert all(row["state"] == saved[row["step"]] for row in starts)
    for life, ((before, _), (now, _)) in enumerate(itertools.pairwise(chain), start=1):
        # Nobody draws what somebody else does, or did when it was saved.
        drawn = {tuple(row["rng"]) for row in starts if row["life"] == f"run{life}"}
        assert len(drawn) == now
        assert not drawn & {tuple(row["rng"]) for row in found if row["life"] == f"run{life - 1}"}
        assert f"random generators: derived for {now} rank(s) (the checkpoint has {before})" in printed[life]
        told = "cannot be split again" if loader == "stream" else f"is split over {now} rank(s), was {before}"
        assert told in printed[life]


@pytest.mark.parametrize("chain", [
    pytest.param([(1, 3), (3, None)], id="1-3"),
    pytest.param([(2, 3), (1, None)], id="2-1", marks=pytest.mark.long),
])  # fmt: skip
def test_one_process_and_several_share_a_run(ranks, tmp_path, chain) -> None:
    """A run of one process goes on with three and one of two with one."""
    live(ranks, tmp_path, chain)
    filled = -(SAMPLES - 3 * BATCH * chain[0][0]) % chain[1][0]
    for epoch in range(EPOCHS):
        seen = samples(rows(tmp_path), epoch)
        assert set(seen) == set(range(SAMPLES))
        assert len(seen) == SAMPLES + (filled if epoch == 0 else 0)


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp2", marks=pytest.mark.long)])
def test_two_ranks_killed_in_mid_epoch_are_their_twin(ranks, tmp_path, parallel) -> None:
    """With as many ranks as before every sample, weight and random number is that of the run that was never killed."""
    live(ranks, tmp_path, [(2, None)], name="whole", parallel=parallel)
    live(ranks, tmp_path, [(2, 4), (2, 15), (2, None)], name="broken", parallel=parallel)
    twin = {(row["step"], row["rank"]): row for row in rows(tmp_path, "whole")}
    broken = rows(tmp_path, "broken")
    assert {(row["step"], row["rank"]) for row in broken} == twin.keys()
    assert len(twin) == 2 * EPOCHS * SAMPLES // (2 * BATCH)
    for row in broken:
        there = twin[row["step"], row["rank"]]
        for item in ("state", "rng", *(("samples", "epoch") if row["event"] == "step" else ())):
            assert row[item] == there[item], f"{row['event']} {row['step']} of rank {row['rank']}: {item}"


def test_a_loader_with_its_own_state_begins_the_epoch_anew(ranks, tmp_path) -> None:
    """Its state is stored for each rank; the same ranks go on with it, other ones do not, and that is said."""
    printed = live(ranks, tmp_path, [(2, 3), (2, 6), (3, None)], loader="stateful")
    found = rows(tmp_path)
    first = [row for row in found if row["life"] in ("run0", "run1")]
    assert len(samples(first, 0)) == len(set(samples(first, 0))) == 6 * 2 * BATCH
    assert samples([row for row in found if row["life"] == "run2"], 0) == list(range(SAMPLES))
    assert "begins anew" not in printed[1]
    assert "one for each of 2 rank(s), which cannot be split again over 3: epoch 0 begins anew" in printed[2]
