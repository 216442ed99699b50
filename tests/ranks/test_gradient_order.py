"""DDP with three ranks: the first step after a start adds gradients in the same order as any other step."""

from __future__ import annotations

from pathlib import Path

import pytest

CASES = str(Path(__file__).with_name("gradient_cases.py"))


@pytest.mark.parametrize("kind", ["plain", "view", "small", "frozen", "bfloat16"])
def test_first_and_second_step_are_alike(ranks, kind):
    for one in ranks.checked(f"{CASES}:differing", kind, True, world_size=3):
        assert one == {"fixed": True, "untouched": True, "differ": 0}


def test_they_differ_without_it(ranks):
    """What DDP does by itself; when this fails, PyTorch has changed and `fix_gradient_order` can go."""
    assert all(one["differ"] for one in ranks.checked(f"{CASES}:differing", "plain", False, world_size=3))


def test_models_that_need_nothing(ranks):
    """With ``find_unused_parameters`` DDP never changes its buckets, and two ranks add alike in any order."""
    found = ranks.checked(f"{CASES}:differing", "unused", True, world_size=3)
    found += ranks.checked(f"{CASES}:differing", "plain", True, world_size=2)
    assert all(one["fixed"] and one["differ"] == 0 for one in found)


@pytest.mark.parametrize("kind", ["parameter", "module", "communication"])
def test_hooks_see_no_zeros(ranks, kind):
    assert ranks.checked(f"{CASES}:hooked", kind, world_size=3) == [{"fixed": False, "calls": 0}] * 3


def test_what_cannot_be_fixed_is_left_alone(ranks):
    for one in ranks.checked(f"{CASES}:differing", "static", True, world_size=3):
        assert one["fixed"] is False
        assert one["untouched"]


def test_a_killed_run_of_three_ranks_goes_on_bit_exact(ranks, tmp_path):
    plain = ranks.checked(f"{CASES}:train", str(tmp_path / "plain"), 6, world_size=3)
    died = ranks.ranks(f"{CASES}:train", str(tmp_path / "killed"), 6, crash_at=2, world_size=3)
    assert [one.status for one in died] == [9, 9, 9], died
    again = ranks.checked(f"{CASES}:train", str(tmp_path / "killed"), 6, world_size=3)
    assert [one["begun"] for one in again] == [3, 3, 3]
    assert {one["digest"] for one in again} == {one["digest"] for one in plain}


def test_a_model_that_other_ranks_do_not_save_is_not_waited_for(ranks, tmp_path):
    found = ranks.ranks(f"{CASES}:train", str(tmp_path / "run"), 2, alone=True, world_size=3)
    assert [one.status for one in found] == [0, 0, 0], found
    assert "model: DDP adds its gradients in another order" in found[0].output


def test_a_ddp_that_is_not_seen_at_once_is_fixed_or_said(ranks, tmp_path):
    """That of an object in the state is fixed; ``replicate`` makes its own in the first forward pass, too late."""
    found = ranks.ranks(f"{CASES}:hidden", str(tmp_path / "run"), world_size=3)
    assert [one.checked() for one in found] == [0, 0, 0]
    said = [line.strip() for line in found[0].output.splitlines() if "another order" in line]
    assert [line.partition(":")[0] for line in said] == ["beside"]


@pytest.mark.parametrize("named", [False, True])
def test_what_a_hook_keeps_is_saved_or_said(ranks, tmp_path, named):
    """DDP gives it to no `state_dict()`: rank 0 says so after the first step, unless the state names it."""
    for _ in range(2):
        found = ranks.ranks(f"{CASES}:hook_with_memory", str(tmp_path / "run"), named)
        assert [one.status for one in found] == [0, 0], found
        told = "has changed iter of the SimpleNamespace that the communication hook of model keeps"
        assert [told in one.output for one in found] == [not named, False]
