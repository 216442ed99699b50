"""`Checkpointer` with several ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from catalog_kit import catalog_of, steps_of

import holdfast as hf

CASES = str(Path(__file__).with_name("joint_cases.py"))


def test_a_killed_run_goes_on_bit_exact(ranks, tmp_path):
    """DDP with BatchNorm and AdamW, killed after step 4: resumed it ends as one that was never interrupted."""
    plain = ranks.checked(f"{CASES}:train", str(tmp_path / "plain"), 7)
    died = ranks.ranks(f"{CASES}:train", str(tmp_path / "killed"), 7, crash_at=5)
    assert [one.status for one in died] == [9, 9], died
    again = ranks.checked(f"{CASES}:train", str(tmp_path / "killed"), 7)
    assert [one["start"] for one in again] == [4, 4]
    for rank in range(2):
        assert again[rank]["tensors"] == plain[rank]["tensors"]
        assert again[rank]["random"] == plain[rank]["random"]
    assert plain[0]["random"] != plain[1]["random"]
    assert steps_of(tmp_path / "plain") == [2, 4, 6, 7]
    checkpoint = hf.Checkpoint(tmp_path / "plain" / "step_00000006")
    assert checkpoint.verify(deep=True).ok
    assert checkpoint.manifest.writers == (0, 1)


def test_ranks_that_begin_at_a_named_checkpoint_go_on_from_their_own_saves(ranks, tmp_path):
    """Killed after step 7 of a run that began at step 4 of another one: the same start goes on at 6, on all ranks."""
    ranks.checked(f"{CASES}:train", str(tmp_path / "base"), 4)
    options = {"resume": str(tmp_path / "base" / "step_00000004")}
    died = ranks.ranks(f"{CASES}:train", str(tmp_path / "run"), 9, crash_at=7, **options)
    assert [one.status for one in died] == [9, 9], died
    again = ranks.checked(f"{CASES}:train", str(tmp_path / "run"), 9, **options)
    assert [one["start"] for one in again] == [6, 6]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_saves_by_time_are_made_at_the_same_steps(ranks, tmp_path, world_size):
    """Ranks of uneven speed that never wait for each other: all save at the steps that rank 0 has proposed."""
    found = ranks.checked(f"{CASES}:jitter", str(tmp_path), 250, 1, world_size=world_size)
    assert all(one["saved"] == found[0]["saved"] for one in found), found
    assert len(found[0]["saved"]) >= 2
    assert [step for step in steps_of(tmp_path) if step > 1] == found[0]["saved"]


def test_saves_by_samples_are_made_at_the_same_steps(ranks, tmp_path):
    """Ranks that count samples differently, because their batches do: rank 0's count decides for all."""
    found = ranks.checked(f"{CASES}:uneven", str(tmp_path), 60, world_size=2)
    assert found[0]["saved"] == found[1]["saved"], found
    assert len(found[0]["saved"]) >= 2


@pytest.mark.parametrize(
    ("which", "sign"),
    [
        (1, signal.SIGTERM),
        *(pytest.param(*one, marks=pytest.mark.long) for one in ((0, signal.SIGTERM), (1, signal.SIGUSR1), (0, 0))),
    ],
)
def test_a_signal_to_one_rank_stops_all(ranks, tmp_path, which, sign):
    """All save the same step and leave with status 85, whoever got the signal; the same for rank 0's deadline."""
    ended = ranks.ranks(f"{CASES}:stop_one", str(tmp_path), which, int(sign))
    assert [one.status for one in ended] == [85, 85], ended
    why = "the deadline" if not sign else "a signal to another rank" if which else sign.name
    assert f"stopped by {why}: step " in ended[0].output
    (step,) = steps_of(tmp_path)
    assert hf.Checkpoint(tmp_path / f"step_{step:08d}").verify(deep=True).ok
    assert step >= (4 if sign else 1), "a slow machine may have spent the deadline on its start"
    assert step < 100_000, "it ran to the end instead"


def test_a_signal_is_heard_while_a_full_disk_holds_all_ranks(ranks, tmp_path):
    """``on_full="wait"``: the rank that got it and the others leave together, long before the time is up."""
    ended = ranks.ranks(f"{CASES}:full_and_signal", str(tmp_path), timeout_s=30.0)
    assert [one.status for one in ended] == [85, 85], ended


def test_nothing_is_collective_between_start_and_end(ranks, tmp_path):
    """Saves by steps, time and hand, metrics, `save` beside the run, a sharded tensor: no collective, no key stored."""
    found = ranks.checked(f"{CASES}:count_collectives", str(tmp_path))
    for one in found:
        assert one["calls"] == []
        assert one["sequence"] == 0
        assert one["keys"] == 0
        assert one["saves"] >= 5
        assert one["seen"], "a barrier afterwards is counted in both ways"


def test_a_rank_that_waits_alone_in_a_body_of_several_steps_saves_none_of_its_own(ranks, tmp_path):
    """The others save at the end of the body: so does this one, whatever is due where it waits."""
    found = ranks.checked(f"{CASES}:two_steps_a_batch", str(tmp_path))
    assert [one["steps"] for one in found] == [12, 12]
    assert steps_of(tmp_path) == [4, 6, 10, 12]
    assert os.readlink(tmp_path / "latest") == "step_00000012"
    assert all(hf.load(path)["w"][0] == step // 2 for step in (4, 6, 10, 12) for path in tmp_path.glob(f"*{step:08d}"))


def test_a_busy_writer_makes_all_ranks_skip_the_same(ranks, tmp_path):
    """``when_busy="skip"``: rank 0's writer says which saves are left out, though only one rank is slow."""
    found = ranks.checked(f"{CASES}:busy", str(tmp_path))
    assert found[0] == found[1]
    assert found[0]["skipped"] > 0
    assert steps_of(tmp_path) == found[0]["saved"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("own disks", "ConfigError: rank 1 cannot see what rank 0 writes to"),
        ("options", "ConfigError: the arguments of Checkpointer must be the same on all ranks"),
        ("unsupported", "UnsupportedStateError: rank 1: state['x']: object"),
        ("mismatch", "StateMismatchError: rank 1: the checkpoint"),
    ],
)
def test_a_start_that_fails_on_one_rank_fails_on_all(ranks, tmp_path, how, said):
    """The same error on all ranks, before the first step, and the next start is not held up."""
    if how == "mismatch":
        ranks.checked(f"{CASES}:start_fails", str(tmp_path), "fine")
    first, second = ranks.checked(f"{CASES}:start_fails", str(tmp_path), how)
    assert first == second
    assert first.startswith(said), first
    if how == "own disks":
        assert f"but rank 1 was given another path ({tmp_path / '1'})" in first
    else:
        assert ranks.checked(f"{CASES}:start_fails", str(tmp_path), "fine") == ["fine", "fine"]
        assert not list(tmp_path.glob(".probe*"))


def test_what_is_bad_for_one_rank_is_bad_for_all(ranks, tmp_path):
    """Rank 1 cannot read the newest checkpoint: all fall back to the one before, which is set aside once."""
    ranks.checked(f"{CASES}:plain_run", str(tmp_path), 4)
    found = ranks.checked(f"{CASES}:resume_with_damage", str(tmp_path))
    assert [one["start"] for one in found] == [2, 2]
    assert found[0]["from"] == "step_00000002"
    assert "rank 1: bytes differ" in catalog_of(tmp_path).index.quarantined["step_00000004"]


def test_what_changes_after_the_last_save_of_several_ranks_is_said(ranks, tmp_path):
    """They save a step once, for no rank knows whether the others have changed something: rank 0 says it, once.

    No object is asked for its state: its ``state_dict`` may use collectives, and wait for ranks that have left.
    """
    first, other = ranks.checked(f"{CASES}:change_after_the_last_save", str(tmp_path))
    assert [text.partition(" (")[0] for text in first] == ["holdfast: model, spread changed after step 2 was saved"]
    assert other == []
    assert [steps_of(tmp_path / life) for life in ("weights", "nothing", "wrapped")] == [[2]] * 3
