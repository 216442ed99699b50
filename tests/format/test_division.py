"""The parts of a checkpoint say how the state was divided; parts that do not go together are told apart."""

import json

import pytest

from holdfast.errors import CheckpointError, CorruptCheckpointError
from holdfast.format.commit import PartSummary, commit
from holdfast.format.division import Division, disagreement
from holdfast.format.index import Index
from holdfast.storage.memory import MemoryStorage


def one(num_ranks=2, structure="ab", **samples):
    return Division(num_ranks=num_ranks, structure=structure, samples=samples)


def test_round_trip():
    """In the index and in a part's summary it comes back as it was, and takes no place where there is none."""
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
        ({0: one(w="1", v="1"), 1: one(w="2", v="1")}, "rank 1 and rank 0 hold different values of 'w', but"),
    ],
)
def test_parts_that_do_not_go_together(parts, problem):
    """The ranks are named, and nothing is committed."""
    assert problem in disagreement(parts)
    storage = MemoryStorage()
    with pytest.raises(CheckpointError, match=problem):
        commit(storage, "one", {}, [PartSummary(writer=rank, division=found) for rank, found in parts.items()])
    assert not storage.exists("one/manifest.json")
