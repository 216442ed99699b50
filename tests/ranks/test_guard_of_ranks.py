"""The guard with several ranks: rank 0 finds a bad step, all end at the same boundary, all leave out the same batch."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

CASES = str(Path(__file__).parent / "guard_cases.py")


def test_all_ranks_go_back_at_the_same_step(ranks, tmp_path) -> None:
    """A bad batch of rank 1 alone, in the mean of the losses: both ranks end with 86, and nothing is saved."""
    ended = ranks.ranks(f"{CASES}:train", str(tmp_path / "run"), 9)
    assert [one.status for one in ended] == [86, 86], [one.error or one.output for one in ended]
    assert "rolled back at step 10: loss is nan (batch 9 of epoch 0)" in ended[0].output
    assert ended[1].output == ""


@pytest.mark.slow
@pytest.mark.parametrize("where", [9, 23, 0])
def test_all_ranks_leave_out_the_same_batch(ranks, tmp_path, where) -> None:
    """The end is that of ranks that never had it. After the last step there is none to agree on: rank 0 ends alone."""
    for number in range(2):
        ended = ranks.ranks(f"{CASES}:train", str(tmp_path / "run"), where)
        assert [one.status for one in ended] == ([86, 0] if where == 23 else [86, 86]), ended[0].output
        assert ("left out from now on" in ended[0].output) == (number == 1)
    end = ranks.checked(f"{CASES}:train", str(tmp_path / "run"), where)
    assert end == ranks.checked(f"{CASES}:train", str(tmp_path / "twin"), -1, where)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_are_killed_beside_a_bad_batch_end_as_those_that_never_had_it(ranks, tmp_path, seed) -> None:
    """With snapshots: what is rescued, what is left out and what is trained again fit together, bitwise."""
    chance = random.Random(seed)
    bad, rescue = chance.randrange(1, 23), chance.choice([1, 3])
    kills = [{str(chance.randrange(2)): chance.randrange(2, 24)} for _ in range(3)]
    kills[chance.randrange(3)] = {"0": bad + 1, "1": bad + 1}  # the bad step itself, before anybody has judged it
    ends = []
    while not ends or ends[-1] != [0, 0]:
        kill = kills[len(ends)] if len(ends) < len(kills) else None
        ended = ranks.ranks(f"{CASES}:train", str(tmp_path / "run"), bad, rescue=rescue, kill_at=kill)
        ends.append([one.status for one in ended])
        assert len(ends) < 9, (ends, [one.error or one.output for one in ended])
    twin = ranks.checked(f"{CASES}:train", str(tmp_path / "twin"), -1, bad)
    assert [one.value for one in ended] == twin, ends


@pytest.mark.slow
def test_a_signal_in_a_bad_step_ends_all_ranks_with_the_requeue_status(ranks, tmp_path) -> None:
    """SIGTERM to all, as of a scheduler, which queues the job again for 85; the next start goes back all the same."""
    run, both = str(tmp_path / "run"), {"0": 10, "1": 10}
    ended = ranks.ranks(f"{CASES}:train", run, 9, kill_at=both, kill_how=int(signal.SIGTERM))
    assert [one.status for one in ended] == [85, 85], [one.error or one.output for one in ended]
    ended = ranks.ranks(f"{CASES}:train", run, 9)
    assert "left out from now on" in ended[0].output


@pytest.mark.slow
def test_stop_ends_all_ranks(ranks, tmp_path) -> None:
    """Rank 0 raises the reason, the others leave at the same step."""
    ended = ranks.ranks(f"{CASES}:train", str(tmp_path / "run"), 9, action="stop")
    assert [one.status for one in ended] == [1, 86]
    assert "action='stop'" in ended[0].error


@pytest.mark.parametrize("guarded", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_loss_that_every_rank_has_as_a_whole_is_read_by_rank_0_alone(ranks, tmp_path, guarded) -> None:
    """A replicated DTensor: nothing is communicated, so nobody waits for ranks that do not read."""
    ended = ranks.ranks(f"{CASES}:spread_loss", str(tmp_path / "run"), "replicate", guarded, timeout_s=60)
    statuses = [one.status for one in ended]
    assert statuses == ([86, 86] if guarded else [0, 0]), [one.error or one.output for one in ended]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["partial", "shard"])
def test_a_loss_of_which_each_rank_has_a_part_is_refused(ranks, tmp_path, kind) -> None:
    """To read it is a call of all ranks: rank 0 says so instead of waiting for them."""
    ended = ranks.ranks(f"{CASES}:spread_loss", str(tmp_path / "run"), kind, timeout_s=60)
    assert "step 1: metric 'loss' is a DTensor of which each rank holds a part" in ended[0].error
    assert "loss=value.full_tensor(), called on all ranks" in ended[0].error


@pytest.mark.slow
@pytest.mark.parametrize("option", [{"guard": True}, {"rescue": 1}])
def test_what_rank_0_alone_is_given_is_an_error_of_all(ranks, tmp_path, option) -> None:
    """``guard=... if rank == 0 else None``: all ranks save before a step that was bad, and keep the same snapshots."""
    ended = ranks.ranks(f"{CASES}:differ", str(tmp_path / "run"), **option, timeout_s=60)
    for one in ended:
        assert "the arguments of Checkpointer must be the same on all ranks" in one.error, one.output
