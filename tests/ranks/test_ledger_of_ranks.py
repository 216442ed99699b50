"""The ledger of batches with several ranks: no false alarm, and a wrong loader on one of them ends all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

CASES = str(Path(__file__).parent / "ledger_cases.py")
# What is said of a loader as such, in every life or of a change of ranks that the script made.
KNOWN = (
    "has no state_dict", "begins anew", "is split over", "cannot be split again", "every rank gets the same samples",
    "splits epoch",
)  # fmt: skip


def live(ranks, root: Path, kind: str, lives: list[tuple[int, int, int, str, str]]) -> list[str]:
    """Run one life after the other, (ranks, until, save at, how it ends, resume); returns what was said, less KNOWN."""
    for number, (world, until, save_at, how, resume) in enumerate(lives):
        outcomes = ranks.ranks(f"{CASES}:train", str(root), kind, number, until, save_at, how, resume, world_size=world)
        for rank, one in enumerate(outcomes):
            error = one.error or ""
            if how == "end":
                assert one.status == 0, (number, rank, error, one.output)
            elif how == "all" or rank == 1:
                assert one.status == -9, (number, rank, error, one.output)
            else:
                assert one.status != 0
                assert "StateMismatchError" not in error, error
    lines = [line for path in sorted(root.glob("said-*")) for line in path.read_text().splitlines()]
    return [line for line in lines if "batch" in line and not any(known in line for known in KNOWN)]


SAME = [(2, 7, 3, "all", ""), (2, 8, 5, "end", "")]
OTHER = [(2, 7, 3, "all", ""), (3, 6, 5, "all", ""), (2, 8, 6, "all", ""), (2, 8, 7, "end", "")]
OLDER = [
    (2, 9, 3, "one", ""), (2, 9, 7, "all", ""), (2, 6, 5, "all", "step_00000003"), (2, 9, 6, "end", "step_00000005"),
    (2, 16, 14, "all", ""), (3, 17, 16, "end", "step_00000007"), (3, 18, 18, "end", ""),
]  # fmt: skip
SOUND = [
    "split by us", "distributed", "stateful", "stateful, shuffled alike", "stateful stream", "stream",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["distributed", "stateful"])
def test_ranks_that_go_on_after_a_kill_are_not_complained_about(ranks, tmp_path, kind) -> None:
    """Each rank has a ring of its own, and the samples of one are not compared with those of another."""
    assert live(ranks, tmp_path, kind, SAME) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOUND)
@pytest.mark.parametrize("lives", [OTHER, OLDER], ids=["other ranks", "older steps"])
def test_other_ranks_and_older_steps_are_not_complained_about(ranks, tmp_path, kind, lives) -> None:
    """Killed at once or one of them alone, gone on with by other ranks and from older steps: nothing is said."""
    assert live(ranks, tmp_path, kind, lives) == []


def test_a_wrong_loader_on_one_rank_is_said_and_all_ranks_end(ranks, tmp_path) -> None:
    """The rank whose loader restarts says so before the step; the others do not wait for it for ever."""
    live(ranks, tmp_path, "stateful stream", [(2, 7, 3, "all", "")])
    first, second = ranks.ranks(
        f"{CASES}:train", str(tmp_path), "restarts on one rank", 1, 8, 0, "end", "", world_size=2, timeout_s=60.0
    )
    assert "StateMismatchError" in second.error
    assert "says that it has given 0 batches of it, and this run was given 3" in second.error
    assert first.status not in (0, -9), first.output
