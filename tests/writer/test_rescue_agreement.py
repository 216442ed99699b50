"""Which snapshot several ranks rescue, as a pure function of what their writers hold."""

from __future__ import annotations

from holdfast.writer.ranks.agreement import RescueAgreement


def agreed(*held: dict[str, int], committed: int = -1) -> str | None:
    agreement = RescueAgreement(len(held))
    for rank, one in enumerate(held):
        assert not agreement.decide(committed)
        agreement.offered(rank, one)
    assert agreement.decide(committed)
    assert not agreement.decide(committed)  # once
    return agreement.chosen


def test_the_newest_snapshot_that_all_hold_is_chosen() -> None:
    """Rank 1 was killed within the copy of step 7, which rank 0 has sealed: both hold step 6."""
    assert agreed({"a-6": 6, "a-7": 7}, {"a-5": 5, "a-6": 6}) == "a-6"
    assert agreed({"a-6": 6, "a-7": 7}, {"a-6": 6, "a-7": 7}, {"a-7": 7}) == "a-7"


def test_nothing_is_chosen_that_is_old_or_not_held_by_all() -> None:
    """No common step, or one that is no newer than what is committed, or a rank without any."""
    assert agreed({"a-6": 6}, {"a-4": 4}) == ""
    assert agreed({"a-6": 6}, {"a-6": 6}, committed=6) == ""
    assert agreed({"a-6": 6}, {}) == ""


def test_a_rank_that_offers_nothing_ends_it() -> None:
    """Before the choice nothing is chosen; after it the choice stands, and the rank's part is missing if not stored."""
    early = RescueAgreement(2)
    early.offered(0, {"a-6": 6})
    assert early.refuse()
    assert early.chosen == ""
    assert not early.needs(1)
    late = RescueAgreement(2)
    for rank in range(2):
        late.offered(rank, {"a-6": 6})
    late.decide(-1)
    assert not late.stored(0)
    assert not late.refuse()
    assert (late.chosen, late.needs(0), late.needs(1)) == ("a-6", False, True)
    assert late.stored(1)
    assert not late.stored(1)
