"""Retention: the decision against an independent model, and the cases people ask about."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.config import Keep
from holdfast.run.record import Record, pack
from holdfast.run.retention import decide, rank


def record(step: int, *, attempt: int = 1, **fields) -> Record:
    fields.setdefault("created", float(step))
    return Record(name=f"a{attempt}s{step}", attempt=attempt, step=step, **fields)


def kept(keep: Keep, records, protect=frozenset()) -> set[str]:
    return {verdict.name for verdict in decide(keep, records, protect) if verdict.keep}


def model(keep: Keep, history: list[Record], protect: frozenset[str]) -> set[str]:
    """What must stay, written as plainly as it can be said; ``history`` is oldest first."""
    if keep.last is None and keep.best is None and keep.every is None:
        return {r.name for r in history}
    stay = {r.name for r in history if r.pinned or r.resumed_from or r.name in protect}
    stay |= {r.name for r in history[-(keep.last or 1) :]}
    if keep.best:
        worst_to_best = []
        for r in history:  # insertion sort: a later one goes in front of all that are not strictly better
            value = r.metrics.get(keep.metric)
            value = None if value is None or math.isnan(value) else value if keep.mode == "max" else -value
            place = len(worst_to_best)
            while place and worst_to_best[place - 1][0] is not None and (
                value is None or worst_to_best[place - 1][0] > value
            ):  # fmt: skip
                place -= 1
            worst_to_best.insert(place, (value, r.name))
        stay |= {name for _, name in worst_to_best[-keep.best :]}
    if keep.interval is not None:
        size, unit = keep.interval.value, keep.interval.unit
        for number, r in enumerate(history):
            at = {"ba": r.step, "ep": r.epoch, "sec": r.created}[unit]
            if at is None or (unit != "sec" and at < size):
                continue
            place = {"ba": lambda o: o.step, "ep": lambda o: o.epoch, "sec": lambda o: o.created}[unit]
            same = [o for o in history[:number] if place(o) is not None and place(o) // size == at // size]
            # Nothing before it on its own branch: what is before belongs to a branch left behind.
            if unit == "sec" and not same:
                stay.add(r.name)
            if unit != "sec" and all(o.attempt < r.attempt and o.step >= r.step for o in same):
                stay.add(r.name)
    return stay


SPECIAL = [None, None, math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0]


def a_history(length: int, seed: int) -> list[Record]:
    """A run as it happens: saves, kills, resumes from any earlier step, pins, metrics of all kinds, clock jumps."""
    chance = random.Random(seed)  # hypothesis takes ten times as long to draw each of these
    records: list[Record] = []
    attempt, step, clock = 1, 0, 1000.0
    for _ in range(length):
        if records and chance.random() < 1 / 6:
            attempt += 1
            step = chance.choice(records).step
        step += chance.randint(1, 6)
        clock += chance.randint(-5, 20)
        value = chance.choice(SPECIAL) if chance.random() < 0.7 else chance.uniform(-3, 3)
        epoch = chance.choice([None, step // 7, step // 7])
        records.append(
            record(
                step,
                attempt=attempt,
                epoch=epoch,
                created=clock,
                metrics={} if value is None else {"loss": value},
                pinned=chance.random() < 1 / 10,
                resumed_from=chance.random() < 1 / 15,
            )
        )
    return records


histories = st.builds(a_history, st.integers(1, 25), st.integers(0, 2**32))
keeps = st.builds(
    lambda last, best, mode, every: Keep(last=last, best=best, metric="loss", mode=mode, every=every),
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 4),
    st.sampled_from(["min", "max"]),
    st.sampled_from([None, "5ba", "10ba", "1ep", "2ep", "30s"]),
)


@settings(max_examples=400, deadline=None)
@given(histories, keeps, st.integers(0, 2**32))
def test_decisions_equal_the_model(history: list[Record], keep: Keep, seed: int) -> None:
    """Whatever happened to a run, exactly what the model keeps is kept, in whatever order records come."""
    chance = random.Random(seed)
    protect = frozenset(r.name for r in history if chance.random() < 0.05)
    shuffled = chance.sample(history, len(history))
    assert kept(keep, shuffled, protect) == model(keep, history, protect)


@settings(max_examples=200, deadline=None)
@given(histories, keeps)
def test_deleting_step_by_step_never_loses_more(history: list[Record], keep: Keep) -> None:
    """Applied after every save, retention never empties a run, never takes the newest, and milestones stay."""
    alive: list[Record] = []
    milestones: set[str] = set()
    for new in history:
        alive.append(new)
        verdicts = decide(keep, alive)
        milestones |= {v.name for v in verdicts if v.why.startswith("milestone")}
        names = {v.name for v in verdicts if v.keep}
        alive = [r for r in alive if r.name in names]
        assert new in alive
        assert milestones <= names


def test_keep_without_a_rule_keeps_everything() -> None:
    """`Keep()` deletes nothing."""
    assert kept(Keep(), [record(s) for s in range(5)]) == {f"a1s{s}" for s in range(5)}


def test_nothing_to_decide() -> None:
    """An empty run gives no verdicts."""
    assert decide(Keep(last=1), []) == []


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_and_missing_rank_equal_below_everything(mode: str) -> None:
    """In both modes NaN, a missing metric and a text come after infinities; among them the newer is better."""
    records = [
        record(1, metrics={"m": math.nan}),
        record(2),
        record(3, metrics={"m": math.inf}),
        record(4, metrics={"m": -math.inf}),
        record(5, metrics={"m": "high"}),
    ]
    order = [r.step for r in rank(records, "m", mode)]
    assert order == ([4, 3] if mode == "min" else [3, 4]) + [5, 2, 1]


def test_among_equals_the_newer_wins_and_the_worthless_fill_up() -> None:
    """Of equal values the newer is kept; with fewer numbers than places, newest without a number fill them."""
    equal = [record(s, metrics={"m": 1.0}) for s in (1, 2, 3)] + [record(9)]
    assert kept(Keep(best=2, metric="m"), equal) == {"a1s3", "a1s2", "a1s9"}
    assert kept(Keep(best=2, metric="m"), [record(1), record(2), record(3, metrics={"m": 5}), record(4)]) == {
        "a1s3",
        "a1s4",
    }


def test_a_record_with_an_integer_that_cannot_be_written_is_named() -> None:
    """A manifest may have one; the row of the index is text."""
    with pytest.raises(hf.ConfigError, match="checkpoint 'step_7': a metric is an integer of so many digits"):
        pack(Record(name="step_7", attempt=1, step=7, metrics={"big": 10**5000}))


def test_a_huge_integer_metric_is_a_number_like_others() -> None:
    """Integers beyond the range of floats compare exactly instead of failing."""
    records = [record(1, metrics={"m": 10**400}), record(2, metrics={"m": 1.0}), record(3, metrics={"m": 10**400 + 1})]
    assert [r.step for r in rank(records, "m", "max")] == [3, 1, 2]


def test_newest_is_by_attempt_then_step_not_by_clock() -> None:
    """A clock that jumped back and a resume from an older step do not change what is newest."""
    records = [record(30, created=9000.0), record(20, attempt=2, created=10.0)]
    assert kept(Keep(last=1), records) == {"a2s20"}


def test_reasons_are_said_in_a_few_words() -> None:
    """Each verdict names the rule that keeps, or the rules that do not."""
    records = [
        record(1, pinned=True),
        record(2, metrics={"val_loss": 0.31}),
        record(3, resumed_from=True),
        record(4),
        record(10),
        record(11),
        record(12),
    ]
    keep = Keep(last=2, best=1, metric="val_loss", every="10ba")
    why = {v.name: (v.keep, v.why) for v in decide(keep, records, frozenset())}
    assert why == {
        "a1s12": (True, "newest"),
        "a1s11": (True, "last 2"),
        "a1s10": (True, "milestone 10ba"),
        "a1s4": (False, "not among last 2, best 1 by val_loss, every 10ba"),
        "a1s3": (True, "resumed from"),
        "a1s2": (True, "best 1 by val_loss (rank 1: 0.31)"),
        "a1s1": (True, "pinned"),
    }
    assert kept(keep, records, frozenset({"a1s4"})) == {r.name for r in records}


def test_milestones_are_the_first_at_or_after_each_multiple() -> None:
    """Saves that miss the multiple itself still leave one milestone for it; step 0 is none."""
    records = [record(s) for s in (0, 3, 9, 12, 15, 20, 29, 31, 50)]
    assert kept(Keep(every="10ba"), records) == {"a1s12", "a1s20", "a1s31", "a1s50"}
