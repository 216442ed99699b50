"""The parts of a checkpoint say how the state was divided; parts that do not go together are told apart."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import CheckpointError, CorruptCheckpointError
from holdfast.format.commit import PartSummary, commit
from holdfast.format.division import Division, disagreement, sketch, stored_for_all
from holdfast.format.index import Index
from holdfast.storage import MemoryStorage


def one(num_ranks=2, structure="ab", **samples):
    return Division(num_ranks=num_ranks, structure=structure, samples=samples)


def group(*ranks, num_ranks=4, structure="ab", loose=(), names="n", **samples):
    return Division(
        num_ranks=num_ranks, structure=structure, alike=ranks or None, samples=samples, names=names, loose=tuple(loose),
        num_loose=len(loose),
    )  # fmt: skip


def test_round_trip():
    """In the index and in a part's summary it comes back as it was, and takes no place where there is none."""
    for division in (group(0, 2, loose=["a/b", "c"], w="1"), group(names="")):
        assert Division.from_json(json.loads(json.dumps(division.to_json()))) == division
    division = one(w="00ff")
    assert Division.from_json(json.loads(json.dumps(division.to_json()))) == division
    assert Index.from_bytes(Index(writer=1, division=one()).to_bytes()).division == one()
    part = PartSummary(writer=1, division=division)
    assert PartSummary.from_json(part.to_json()) == part
    assert b"division" not in Index().to_bytes()
    assert "division" not in PartSummary(writer=0).to_json()


@pytest.mark.parametrize(
    "told",
    [
        [],
        3,
        {},
        {"num_ranks": 2},
        {"num_ranks": 0, "structure": "ab"},
        {"num_ranks": True, "structure": "ab"},
        {"num_ranks": 2, "structure": None},
        {"num_ranks": 2, "structure": "ab", "samples": []},
        {"num_ranks": 2, "structure": "ab", "samples": {"w": 3}},
        {"num_ranks": 1 << 40, "structure": "ab"},
        {"num_ranks": 2, "structure": "ab", "alike": 3},
        {"num_ranks": 2, "structure": "ab", "alike": ["0"]},
        {"num_ranks": 2, "structure": "ab", "names": 3},
        {"num_ranks": 2, "structure": "ab", "loose": []},
        {"num_ranks": 2, "structure": "ab", "loose": [1, 2]},
    ],
)
def test_what_is_no_division_is_refused(told):
    """A damaged index is CorruptCheckpointError naming it."""
    body = {**json.loads(Index().to_bytes()), "division": told}
    with pytest.raises(CorruptCheckpointError, match=r"index\.json"):
        Index.from_bytes(json.dumps(body).encode(), where="index.json")


def test_parts_that_go_together():
    """All alike, or none divided at all; samples that only one has are no difference."""
    assert disagreement({}) is None
    assert disagreement({0: None, 3: None}) is None
    assert disagreement({1: one(w="1"), 0: one(w="1", v="2")}) is None
    other = {"structure": "cd", "loose": ["z"]}
    assert disagreement({0: group(0, 1), 1: group(0, 1), 2: group(2, 3, **other), 3: group(2, 3, **other)}) is None
    assert disagreement({0: group(loose=["a", "b"], num_ranks=2), 1: group(loose=["b"], num_ranks=2)}) is None


def test_what_one_rank_stores_for_all_may_differ_and_is_named():
    """Never a reason not to commit: who has other values than the first of those that have any is told."""
    lost = {rank: Division(num_ranks=3, structure="", alone=alone) for rank, alone in enumerate(
        ({"a": "1", "b": "1"}, {"a": "1", "b": "2"}, {"b": "2", "c": "3"})
    )}  # fmt: skip
    assert disagreement(lost) is None
    assert stored_for_all({**lost, 3: None}) == {"b": [1, 2]}
    assert {rank: Division.from_json(one.to_json()) for rank, one in lost.items()} == lost


def test_of_many_names_only_those_that_could_have_been_chosen_are_compared():
    """A sketch has few of many names: one that the other side's sketch had no place for says nothing."""
    names = [f"t{number}" for number in range(1000)]
    first, second = (
        Division(num_ranks=2, structure="", loose=sketch(found), num_loose=len(found)) for found in (names, names[::5])
    )
    assert set(second.loose) - set(first.loose)
    assert disagreement({0: first, 1: second}) is None


@given(st.sets(st.text("abc", max_size=6), max_size=200), st.data())
def test_a_rank_with_less_is_never_refused(names, data):
    """However few names are compared: the tensors of a rank that are a part of rank 0's are no difference."""
    some = data.draw(st.sets(st.sampled_from(sorted(names)))) if names else set()
    first, second = (
        Division(num_ranks=2, structure="", loose=sketch(found), num_loose=len(found)) for found in (names, some)
    )
    assert disagreement({0: first, 1: second}) is None
    if more := [f"x{number}" for number in range(200)]:
        second = Division(num_ranks=2, structure="", loose=sketch([*some, *more]), num_loose=len(some) + len(more))
        assert "rank 1 holds tensors that rank 0 does not have" in disagreement({0: first, 1: second})


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({0: one(), 1: None}, "rank 1 saved alone, the others as ranks of 2"),
        ({0: one(5), 3: one(5)}, "divided over 5 ranks, and the part of ranks 1, 2, 4 is missing"),
        ({1: one()}, "part of rank 0 is missing"),
        ({0: one(1 << 30)}, "part of ranks 1, 2, 3, 4, 5 and 1073741818 more is missing"),
        ({0: one(), 1: one(), 2: one()}, "there is a part of rank 2, but"),
        ({0: one(), 1: one(structure="cd")}, "rank 1 has another structure than that of rank 0"),
        ({0: one(), 1: one(3)}, "rank 1 has another structure"),
        (
            {0: group(num_ranks=2), 1: group(num_ranks=2, structure="cd")},
            r"rank 1 has another structure than that of rank 0 \(the names are the same",
        ),
        (
            {0: group(num_ranks=2), 1: group(num_ranks=2, structure="cd", names="m")},
            r"or experts, say which ones hold the same: alike=",
        ),
        ({0: group(0, 1), 1: group(0, 1, structure="x"), 2: group(2), 3: group(3)}, "rank 1 has another structure"),
        (
            {0: group(0, 1), 1: group(1), 2: group(2), 3: group(3)},
            "rank 0 says that it holds the same as ranks 0, 1, r",
        ),
        ({0: group(0, 7, num_ranks=1)}, "rank 7 says nothing, for it is no rank of this save"),
        ({0: group(num_ranks=2), 1: group(1, num_ranks=2)}, "own account rank 0 hold the same as all ranks"),
        (
            {0: group(0, w="1", num_ranks=2), 1: group(1, w="2", num_ranks=2)},
            "rank 1 and rank 0 hold different values of 'w', .*different names",
        ),
        (
            {0: group(num_ranks=2, loose=["a"]), 1: group(num_ranks=2, loose=["m/b"])},
            "rank 1 holds tensors that rank 0 does not have, 'm/b', .*alike=",
        ),
        ({0: one(w="1", v="1"), 1: one(w="2", v="1")}, "rank 1 and rank 0 hold different values of 'w', but"),
    ],
)
def test_parts_that_do_not_go_together(parts, problem):
    """The ranks are named, and nothing is committed."""
    assert re.search(problem, disagreement(parts))
    storage = MemoryStorage()
    with pytest.raises(CheckpointError, match=problem):
        commit(storage, "one", {}, [PartSummary(writer=rank, division=found) for rank, found in parts.items()])
    assert not storage.exists("one/manifest.json")
