"""One rank fails at some moment of a save: all ranks end alike, in bounded time, and nothing is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from catalog_kit import steps_of

import holdfast as hf

CASES = str(Path(__file__).with_name("fault_cases.py"))
WEIGHTS_AT_5 = -1.0050358772277832  # of five steps without interruption
SAVED, DEAD = None, r"rank {rank}: its trainer process has died( \(killed by SIGKILL\))?"
LATE = r"rank {rank} did not come to it \(the process of rank {rank} is stopped, as by SIGSTOP\)"
SILENT = r"rank {rank}('s|: its) writer.* gives no sign of life"
# phase, what, what all ranks raise (SAVED: nothing; the save is finished without the trainer, or again by a new writer)
TABLE = [
    ("before copy", "exception", r"rank {rank}: .*boom"),
    ("before copy", "SIGKILL trainer", DEAD),
    ("before copy", "SIGKILL writer", SAVED),
    ("before copy", "SIGSTOP trainer", LATE),
    ("before copy", "SIGSTOP writer", SILENT),
    ("while writing", "EIO", r"rank {rank}: .*Input/output error"),
    ("while writing", "SIGKILL trainer", SAVED),
    ("while writing", "SIGKILL writer", SAVED),
    ("while writing", "SIGSTOP trainer", SAVED),
    ("while writing", "SIGSTOP writer", SILENT),
    ("while writing", "ESTALE", r"rank {rank}: .*Stale file handle"),  # the shared directory is gone
    ("part", "EIO", r"rank {rank}: .*Input/output error"),
    ("part", "SIGKILL trainer", SAVED),
    ("part", "SIGKILL writer", SAVED),
    ("part", "SIGSTOP trainer", SAVED),
    ("part", "SIGSTOP writer", SILENT),
    # Not EIO, the word of bucket mounts for "no hard links": the manifest then takes its name by a rename.
    ("commit", "ESTALE", r"rank 0: .*Stale file handle"),
    ("commit", "SIGKILL trainer", SAVED),
    ("commit", "SIGKILL writer", SAVED),
    ("commit", "SIGSTOP trainer", SAVED),
    ("commit", "SIGSTOP writer", SILENT),
    ("between saves", "exception", r"rank {rank}: it has left the run \(ValueError: boom\)"),
    ("between saves", "SIGKILL trainer", DEAD),
    ("between saves", "SIGKILL writer", SAVED),
    ("between saves", "SIGSTOP trainer", LATE),
    ("between saves", "SIGSTOP writer", SILENT),
]
NOTHING_TO_DO = {("commit", "ESTALE", 1), ("commit", "SIGSTOP writer", 1)}  # rank 0 alone works then
QUICK = {
    (0, "before copy", "exception"),
    (1, "before copy", "SIGKILL trainer"),
    (1, "while writing", "EIO"),
    (1, "while writing", "SIGKILL writer"),
    (0, "commit", "ESTALE"),
    (0, "commit", "SIGKILL writer"),
    (1, "between saves", "SIGSTOP trainer"),
}


def cases():
    for phase, what, expected in TABLE:
        for rank in (0, 1):
            if (phase, what, rank) in NOTHING_TO_DO:
                continue
            marks = () if (rank, phase, what) in QUICK else pytest.mark.long
            yield pytest.param(rank, phase, what, expected, marks=marks, id=f"{rank}-{phase}-{what}".replace(" ", "_"))


@pytest.mark.parametrize(("rank", "phase", "what", "expected"), list(cases()))
def test_a_fault_on_one_rank(ranks, tmp_path, rank, phase, what, expected):
    """All that live raise the same error, which names the rank, or go on; the newest good checkpoint is resumed."""
    root, notes = tmp_path / "run", tmp_path / "notes"
    notes.mkdir()
    fault = {"rank": rank, "phase": phase, "what": what}
    try:
        ended = ranks.ranks(f"{CASES}:run", str(root), str(notes), fault, timeout_s=100.0)
    finally:
        for name in notes.glob("writer-*"):
            with suppress(ProcessLookupError):
                os.kill(int(name.read_text()), signal.SIGCONT)
    victim_gone, own = what.endswith("trainer"), (phase, what) == ("between saves", "exception")
    assert ended[1 - rank].status == 0, ended[1 - rank]
    told = [one.checked() for number, one in enumerate(ended) if not (victim_gone and number == rank)]
    if victim_gone:
        assert ended[rank].status == -signal.SIGKILL, ended[rank]
    elif expected is not SAVED and what != "SIGSTOP writer" and not own:
        assert told[0]["error"] == told[1]["error"]
    for number, one in enumerate(told):
        if expected is not SAVED:
            # Whose own writer says nothing learns no more than that.
            mute = what == "SIGSTOP writer" and number == rank
            said = "boom" if own and number == rank else expected.format(rank=rank)
            assert re.search("is not durable after" if mute else said, one["error"]), one
            assert one["durable"] == 2
        elif not victim_gone:
            assert one["error"] is None, one
    found = steps_of(root)
    assert found[:1] == [2]
    may_commit = {expected is SAVED}
    if (what, rank) == ("SIGSTOP writer", 0):  # let go on, it may commit what nobody waits for any more
        may_commit = {True, False}
    assert (4 in found) in may_commit, found
    again = ranks.checked(f"{CASES}:run", str(root), str(notes), None, 7)
    assert [one["error"] for one in again] == [None, None]
    assert again[0]["start"] == again[1]["start"]
    assert again[0]["start"] in ({max(found), 4} if len(may_commit) == 2 else {max(found)})
    kept = [one for one in map(hf.Checkpoint, root.glob("step_*")) if one.manifest]
    assert kept
    assert all(one.verify(deep=True).ok for one in kept)
    assert not list(root.rglob("part-*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_end_of_a_rank_and_its_writer_is_known_by_itself(ranks, tmp_path, rank):
    """Both are killed in mid-save, with all times at a quarter of an hour: the other rank need not wait for any.

    A forked child of the trainer that lives on does not hide it.
    """
    fault = {"rank": rank, "phase": "before copy", "what": "SIGKILL both"}
    ended = ranks.ranks(f"{CASES}:run", str(tmp_path / "run"), str(tmp_path), fault, timeout_s=100.0)
    assert ended[rank].status == -signal.SIGKILL
    # Between the kills the trainer may have started another writer, which then says that the trainer is dead.
    said = ["rank 0's writer cannot be reached", "rank 1: its writer process has died"][rank]
    assert re.search(f"{said}|rank {rank}: its trainer process has died", ended[1 - rank].checked()["error"])


@pytest.fixture(scope="session")
def operations(ranks, tmp_path_factory):
    """For each rank the numbers of its writer's disk operations in the save of step 4."""
    root, notes = tmp_path_factory.mktemp("dry"), tmp_path_factory.mktemp("notes")
    ranks.checked(f"{CASES}:run", str(root), str(notes), {"rank": 0, "phase": "trace"}, 4)
    found = {}
    for rank in (0, 1):
        lines = [json.loads(line) for line in (notes / f"trace-{rank}").read_text().splitlines()]
        pid = lines[-1]["pid"]
        numbers = [one["number"] for one in lines if one["pid"] == pid and "step_00000004" in one["path"]]
        found[rank] = range(numbers[0], numbers[-1] + (4 if rank == 0 else 1))
    return found


@pytest.mark.parametrize("what", ["rank", "writer"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stride", [pytest.param(9, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)])
def test_a_death_before_any_operation_of_a_save(ranks, operations, tmp_path, rank, what, stride):
    """One rank, or its writer alone, is killed before operation k: the old or the new checkpoint, bit-exact, no litter.

    A writer that dies alone is started again, and the save succeeds on all ranks. Which rank makes a directory, and
    whose fsync serves whom, is a race: now and then operation k is one of the save before, which then may be missing.
    """
    assert len(operations[rank]) > 8
    for at in operations[rank][(rank + (what == "rank")) % stride :: stride]:
        root, notes = tmp_path / f"{at}", tmp_path / f"notes-{at}"
        notes.mkdir()
        fault = {"rank": rank, "phase": "crash", "what": what, "at": at}
        ended = ranks.ranks(f"{CASES}:run", str(root), str(notes), fault, 4, timeout_s=100.0)
        found = steps_of(root)
        if what == "writer":
            assert [one.checked()["error"] for one in ended] == [None, None], (at, ended)
            assert found == [2, 4], at
        else:
            durable = ended[1 - rank].checked().get("durable", 4)  # without an error it has come to the end
            assert found in [steps for steps in ([], [2], [2, 4]) if durable in (-1, *steps)], (at, durable)
        again = ranks.checked(f"{CASES}:run", str(root), str(notes), None, 5)
        assert [(one["start"], one["error"]) for one in again] == [(max(found, default=0), None)] * 2, at
        assert again[0]["weights"] == again[1]["weights"] == pytest.approx(WEIGHTS_AT_5, rel=1e-6), at
        assert all(hf.Checkpoint(one).verify(deep=True).ok for one in root.glob("step_*")), at
        assert not list(root.rglob("part-*")), at
        shutil.rmtree(root)
