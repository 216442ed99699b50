"""What ranks of the loop trainer have to do alike, shown in one process."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from loop_kit import Crash, names, plain
from torch.utils.data import DataLoader, Sampler

from holdfast.checkpointer.signals import StopSignals
from holdfast.storage import LocalStorage
from holdfast.trainers.loop import stop_policy
from holdfast.trainers.loop.evaluator import EvaluationShare
from holdfast.trainers.loop.parallel import TIMEOUT_S, Ranks
from holdfast.trainers.loop.saving.folder import SaveFolder
from holdfast.trainers.loop.saving.load import LoadOptions, load_from
from holdfast.trainers.loop.saving.saver_group import StartingPoint


def test_the_clock_of_an_evaluation_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds that are owed when ranks meet inside an evaluation are counted at the next batch, once."""
    kinds = iter(["settle", None, "settle", "settle"])
    monkeypatch.setattr(stop_policy, "agreed", lambda rank_group, moment: next(kinds))
    rank_group: Any = SimpleNamespace(mailbox=SimpleNamespace(calls=lambda moment: None), trouble=lambda: None)
    ranks: Any = SimpleNamespace(leads=False, agree=lambda topic, give: give())
    pace = stop_policy.DistributedStopPolicy(StopSignals(), ranks, rank_group, intervals_s=[], settle=lambda: None)
    pace._owed = 800.0
    for _ in range(3):
        pace.look()
    assert 800.0 <= pace.lap() < 1600.0
    assert pace._owed == 0.0


class Agreements:
    """Notes what ranks agree on; the single process is all of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.work_s: dict[str, float] = {}
        self.under_way = ""
        inner = Ranks.agree

        def agree(ranks: Ranks, topic: str, *args: Any, work_s: float = 0.0) -> Any:
            self.work_s[topic], self.under_way = work_s, topic
            try:
                return inner(ranks, topic, *args, work_s=work_s)
            finally:
                self.under_way = ""

        monkeypatch.setattr(Ranks, "agree", agree)


def test_rank_0_does_nothing_that_can_fail_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting a checkpoint aside, and looking at what cannot be used, is told to all ranks if it fails."""
    agreements, within = Agreements(monkeypatch), []
    quarantine, not_usable = SaveFolder.quarantine, StartingPoint._not_usable
    monkeypatch.setattr(
        SaveFolder, "quarantine", lambda *args: (within.append(agreements.under_way), quarantine(*args))[1]
    )
    monkeypatch.setattr(
        StartingPoint, "_not_usable", lambda *args: (within.append(agreements.under_way), not_usable(*args))[1]
    )
    first = plain(tmp_path / "one", save_filename="ba{batch}.pt", autoresume=True)
    first.fit()
    first.close()
    assert within == ["not usable"]
    newest = tmp_path / "one" / "ba12.pt"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 0x40
    newest.write_bytes(data)
    again = plain(tmp_path / "one", save_filename="ba{batch}.pt", autoresume=True)
    assert int(again.state.timestamp.batch) == 6
    again.close()
    assert within == ["not usable", "aside"]


def test_ranks_wait_for_saves_as_long_as_these_may_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single files are saved by rank 0 alone, one saver after another: the others allow for it."""
    agreements = Agreements(monkeypatch)
    with plain(tmp_path / "one", save_filename="ba{batch}.pt", max_duration="1ba") as trainer:
        trainer.fit()
        trainer.save_checkpoint(str(tmp_path / "other.pt"))
    assert agreements.work_s["saved"] > TIMEOUT_S
    assert agreements.work_s["save"] > TIMEOUT_S


def test_an_error_outside_of_training_is_not_kept_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be that of one rank alone, so nothing is agreed on; what was being saved is durable all the same."""
    agreements = Agreements(monkeypatch)
    with pytest.raises(Crash), plain(tmp_path) as trainer:
        trainer.save_checkpoint_to_save_folder()
        raise Crash
    assert "saved" not in agreements.work_s
    assert names(tmp_path) == ["ep0-ba0"]
    trainer.close()  # it is closed already
    with plain(tmp_path, save_overwrite=True) as trainer:
        trainer.save_checkpoint_to_save_folder()
    assert "saved" in agreements.work_s


def test_a_function_that_changes_what_is_loaded_leaves_each_rank_its_own(tmp_path: Path) -> None:
    """Where another number of ranks loads, a new rank gets generators of its own, not those of rank 0."""
    with plain(tmp_path, save_filename="ba{batch}", max_duration="1ba", save_interval="1ba") as trainer:
        trainer.fit()
    found = []
    for rank, world_size in ((0, 1), (0, 2), (1, 2)):
        fresh = plain(None)
        fresh.state.ranks = SimpleNamespace(rank=rank, world_size=world_size, leads=rank == 0)
        options = LoadOptions(ignore_keys=lambda found: None)
        report = load_from(LocalStorage(str(tmp_path)), "ba1", fresh.state, options=options)
        assert report.generators is not None
        found.append(bytes(report.generators["torch"].numpy()))
        derived = f"random generators: derived for {world_size} rank(s) (the checkpoint has 1)"
        assert (derived in report.notes) is (world_size == 2)
    assert len(set(found)) == 3


class Drawn(Sampler[int]):
    """An order of the generators of python and NumPy."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        order = [int(one) for one in np.random.permutation(12)]
        random.shuffle(order)
        return iter(order)


def test_an_evaluation_has_one_order_whatever_draws_it() -> None:
    """Each rank takes its part of the same order, so that every sample counts once; generators stay as they were."""
    seen: list[int] = []
    for rank in range(2):
        random.seed(rank)
        np.random.seed(rank)
        before = random.getstate(), np.random.get_state()[1].tolist()
        ranks: Any = SimpleNamespace(world_size=2, rank=rank)
        share = EvaluationShare(DataLoader(list(range(12)), batch_size=2, sampler=Drawn()), ranks, together=False)
        seen += [int(one) for batch, _ in share for one in batch]
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert sorted(seen) == list(range(12))
