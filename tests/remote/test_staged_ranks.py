"""Ranks whose machines share no disk, but a remote: straight to it, or staged on the disk of each machine first."""

from __future__ import annotations

import errno
import json
import re
import shutil
import signal
from pathlib import Path

import pytest
from catalog_kit import catalog_of, steps_of
from object_kit import BUCKET, client, moto, s3_environment

import holdfast as hf
from holdfast.format.names import save_id_of
from holdfast.testing import FaultProxy

CASES = str(Path(__file__).with_name("staged_rank_cases.py"))
# Where a writer is killed and nobody is waited for in vain: it starts slowly where the machine is busy.
PATIENT = {"stale_s": 30.0, "patience_s": 100.0}


def left(disks: Path) -> list[str]:
    """What lies on the disks of the machines when all processes have ended, but for the ledger of the next life."""
    found = (path.relative_to(disks) for path in disks.glob("node*/**/*"))
    return sorted(str(path) for path in found if ".ledger" not in path.parts)


def is_good(root: Path) -> bool:
    """All checkpoints are whole, of two ranks each, and nothing else of ours lies beside them."""
    found = [hf.Checkpoint(path) for path in sorted(root.glob("step_*"))]
    inside = {one: {path.name for path in Path(one.path).iterdir()} for one in found}
    listed = {name for names in inside.values() for name in names if save_id_of(name) or name == "config.json"}
    named = {entry.path for one in found for entry in one.manifest.files}
    assert all("config.json" in names for names in inside.values()), inside
    return all(one.verify(deep=True).ok for one in found) and listed == named


def test_saves_are_staged_on_each_machine_and_committed_at_the_remote(ranks, tmp_path):
    """The remote has whole checkpoints, no disk has one, and another start with empty disks goes on from there."""
    remote, disks = tmp_path / "remote", tmp_path / "disks"
    first = ranks.checked(f"{CASES}:train", str(remote), str(disks), 5)
    assert [one["error"] for one in first] == [None, None]
    assert [one["start"] for one in first] == [0, 0]
    assert first[0]["remote"] == 5
    arrived = [[f"step_{step:08d}", True, {"loss": 0.5}] for step in (2, 4, 5)]
    assert [[list(one) for one in rank["told"]] for rank in first] == [arrived, []], "on_commit: whole at the remote"
    assert steps_of(remote) == [2, 4, 5]
    assert is_good(remote)
    assert hf.Checkpoint(remote / "step_00000004").manifest.writers == (0, 1)
    assert not list(disks.rglob("manifest.json"))
    assert left(disks) == [], "what has arrived is gone from the disks"
    ledgers = [str(path.relative_to(disks)) for path in sorted(disks.glob("*/.ledger/*"))]
    assert ledgers == ["node0/.ledger/rank-00000", "node1/.ledger/rank-00001"]
    assert catalog_of(remote).record("step_00000004").metrics == {"loss": 0.5, "late": 1.5}
    shutil.rmtree(disks)
    again = ranks.checked(f"{CASES}:train", str(remote), str(disks), 7)
    plain = ranks.checked(f"{CASES}:train", str(tmp_path / "plain"), str(disks), 7)
    assert [one["start"] for one in again] == [5, 5]
    assert [one["weights"] for one in again] == [one["weights"] for one in plain]


@pytest.mark.slow
def test_without_a_disk_in_front_of_it(ranks, tmp_path):
    """Straight to the remote: nothing is shared but that."""
    remote, disks = tmp_path / "remote", tmp_path / "disks"
    first = ranks.checked(f"{CASES}:train", str(remote), str(disks), 3, bare=True)
    again = ranks.checked(f"{CASES}:train", str(remote), str(disks), 5, bare=True)
    assert [one["error"] for one in first + again] == [None] * 4
    assert [one["start"] for one in again] == [3, 3]
    assert steps_of(remote) == [2, 3, 4, 5]
    assert not list(disks.rglob("*.*"))


@pytest.mark.parametrize("swapped", [False, True])
def test_what_was_staged_everywhere_is_brought_by_the_next_start(ranks, tmp_path, swapped):
    """All processes of all machines are killed before a save could get to the remote: it is not lost with them.

    The machines may come back in another order, as after a requeue of SLURM: each brings the part that it has.
    One machine's disk alone never makes a checkpoint: with the other one lost, the run goes on from the remote's.
    """
    remote, disks = tmp_path / "remote", tmp_path / "disks"
    ranks.checked(f"{CASES}:train", str(remote), str(disks), 2)
    broken = {"rank": 1, "fail_on": {"pwrite": errno.EIO}}
    died = ranks.ranks(f"{CASES}:train", str(remote), str(disks), 9, broken=broken, fault={"step": 4, "what": "all"})
    assert [one.status for one in died] == [-signal.SIGKILL] * 2, died
    assert steps_of(remote) == [2]
    shutil.copytree(tmp_path, tmp_path / "twin")
    if swapped:
        for name, other in (("node0", "x"), ("node1", "node0"), ("x", "node1")):
            (disks / name).rename(disks / other)
    again = ranks.checked(f"{CASES}:train", str(remote), str(disks), 6)
    assert [one["start"] for one in again] == [4, 4]
    assert steps_of(remote) == [2, 4, 6]
    assert is_good(remote)
    assert left(disks) == []
    if swapped:
        return
    shutil.rmtree(tmp_path / "twin" / "disks" / "node1")
    again = ranks.checked(f"{CASES}:train", str(tmp_path / "twin" / "remote"), str(tmp_path / "twin" / "disks"), 6)
    assert [one["start"] for one in again] == [2, 2]
    assert is_good(tmp_path / "twin" / "remote")
    assert left(tmp_path / "twin" / "disks") == [], "what nobody can complete is swept"


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "what"), [
    (1, "trainer"), (1, "both"), *(pytest.param(*one, marks=pytest.mark.long) for one in ((0, "trainer"), (0, "both"))),
])  # fmt: skip
def test_a_rank_or_its_machine_dies(ranks, tmp_path, rank, what):
    """The others get an error that names it at the next save; what the remote has is whole, and the run goes on."""
    remote, disks = tmp_path / "remote", tmp_path / "disks"
    fault = {"rank": rank, "step": 4, "what": what}
    ended = ranks.ranks(f"{CASES}:train", str(remote), str(disks), 9, fault=fault)
    assert ended[rank].status == -signal.SIGKILL, ended[rank]
    assert re.search(f"rank {rank}('s|: its) (trainer|writer).* (died|reached)", ended[1 - rank].checked()["error"])
    found = steps_of(remote)
    assert 2 in found
    assert what == "both" or is_good(remote)
    if what == "trainer":
        assert 4 in found, "its writer was still there to bring its part"
    if what == "both":
        shutil.rmtree(disks / f"node{rank}")
    again = ranks.checked(f"{CASES}:train", str(remote), str(disks), 6)
    assert again[0]["start"] == again[1]["start"] >= max(found)
    assert steps_of(remote)[-1] == 6
    assert is_good(remote)
    assert left(disks) == []


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_a_writer_is_killed_in_the_middle_of_an_upload(ranks, tmp_path, rank):
    """It is started again and goes on: every save arrives."""
    remote, disks = tmp_path / "remote", tmp_path / "disks"
    broken = {"rank": rank, "events": {f"open:remote/step_00000004/state-0000{rank}": f"SIGKILL:{disks}/writer-{rank}"}}
    broken["crash_once"] = str(tmp_path / "happened")
    ended = ranks.checked(f"{CASES}:train", str(remote), str(disks), 6, broken=broken, **PATIENT)
    assert [one["error"] for one in ended] == [None, None]
    assert (tmp_path / "happened").exists()
    assert steps_of(remote) == [2, 4, 6]
    assert is_good(remote)
    assert left(disks) == []
    if rank:
        assert catalog_of(remote).record("step_00000004").metrics["late"] == 1.5, "said before it arrived"


@pytest.fixture(scope="module")
def operations(ranks, tmp_path_factory):
    """For each rank the numbers of what its writer does at the remote for the save of step 4."""
    home = tmp_path_factory.mktemp("dry")
    found = {}
    for rank in (0, 1):
        broken = {"rank": rank, "trace": str(home / f"trace-{rank}")}
        ranks.checked(f"{CASES}:train", str(home / f"remote-{rank}"), str(home / f"disks-{rank}"), 4, broken=broken)
        lines = [json.loads(line) for line in (home / f"trace-{rank}").read_text().splitlines()]
        numbers = [one["number"] for one in lines if "step_00000004" in one["path"]]
        found[rank] = range(numbers[0], numbers[-1] + 1)
    return found


@pytest.mark.parametrize("what", ["rank", "writer"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stride", [pytest.param(16, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)])
def test_a_death_before_any_operation_at_the_remote(ranks, operations, tmp_path, rank, what, stride):
    """What is staged everywhere is never lost, whoever dies while it is brought; nothing half-done stays anywhere.

    Several threads work, and either rank may be the one that makes a directory: a number may be that of another
    operation than in the dry run, even one for step 2. The disks say what was staged everywhere.
    """
    assert len(operations[rank]) > 8
    met = set()
    for at in operations[rank][4 * (rank + 2 * (what == "rank")) % stride :: stride]:
        home = tmp_path / f"{at}"
        remote, disks = home / "remote", home / "disks"
        home.mkdir()
        broken, patience = {"rank": rank, "crash_at": at, "crash_once": str(home / "happened")}, PATIENT
        if what == "rank":
            broken["crash_with"], patience = str(disks / f"trainer-{rank}"), {}
        ended = ranks.ranks(f"{CASES}:train", str(remote), str(disks), 4, broken=broken, **patience)
        assert ended[1 - rank].status == 0, (at, ended[1 - rank])
        found = steps_of(remote)
        if what == "writer":
            assert [one.checked()["error"] for one in ended] == [None, None], (at, ended)
            assert found == [2, 4], at
        newest = max([*found, *(int(path.parent.name[5:]) for path in disks.glob("node0/step_*/staged-*"))])
        met.add(newest)
        again = ranks.checked(f"{CASES}:train", str(remote), str(disks), 5)
        assert [(one["start"], one["error"]) for one in again] == [(newest, None)] * 2, at
        assert is_good(remote), at
        assert left(disks) == [], at
        shutil.rmtree(home)
    assert 4 in met


def test_ranks_that_differ_are_refused_when_they_save(ranks, tmp_path):
    """Not when the checkpoint gets to the remote, which nobody waits for."""
    told = ranks.checked(f"{CASES}:train", str(tmp_path / "remote"), str(tmp_path / "disks"), 5, seed=1)
    assert told[0]["error"] == told[1]["error"]
    assert "rank 1 and rank 0 hold different values of" in told[0]["error"]
    assert steps_of(tmp_path / "remote") == []


@pytest.mark.slow
def test_a_run_of_one_machine_goes_on_on_two(ranks, tmp_path):
    """A checkpoint that rank 0's disk has whole, and the remote has not, is brought there first."""
    remote, disks = tmp_path / "remote", tmp_path / "disks"
    ranks.checked(f"{CASES}:train", str(remote), str(disks), 4, per_node=2)
    assert steps_of(disks / "node0") == [4]
    shutil.rmtree(remote / "step_00000004")
    again = ranks.checked(f"{CASES}:train", str(remote), str(disks), 6)
    assert [one["start"] for one in again] == [4, 4]
    assert steps_of(remote) == [2, 4, 6]
    assert is_good(remote)


@pytest.mark.slow
@pytest.mark.parametrize("bare", [True, False])
def test_on_an_object_store(ranks, tmp_path, bare):
    """Four ranks on two machines, and S3: straight to it, and with the disks of the machines in front of it."""
    with moto() as endpoint:
        run, environment = f"s3://{BUCKET}/nodes", s3_environment(endpoint)
        more = {"per_node": 2, "bare": bare, "environment": environment, "world_size": 4}
        first = ranks.checked(f"{CASES}:train", run, str(tmp_path), 3, **more)
        again = ranks.checked(f"{CASES}:train", run, str(tmp_path), 5, **more)
        assert [one["error"] for one in first + again] == [None] * 8
        assert [one["start"] for one in again] == [3] * 4
        keys = [one["Key"] for one in client(endpoint).list_objects_v2(Bucket=BUCKET, Prefix="nodes/step_")["Contents"]]
    assert sorted(key for key in keys if key.endswith("manifest.json")) == [
        f"nodes/step_{step:08d}/manifest.json" for step in (2, 3, 4, 5)
    ]
    assert not [key for key in keys if "/part-" in key]
    assert left(tmp_path) == []


@pytest.mark.slow
def test_what_did_not_change_goes_over_the_network_once(ranks, tmp_path):
    """Parameters that never train: the store repeats them for later saves, by requests without a body."""
    with moto() as endpoint, FaultProxy(endpoint) as proxy:
        run, environment = f"s3://{BUCKET}/frozen", s3_environment(proxy.url)
        more = {"frozen": 1_000_000, "environment": environment, "mirror": {"max_behind": 9}}
        told = ranks.checked(f"{CASES}:train", run, str(tmp_path), 6, **more)
        assert [one["error"] for one in told] == [None, None]
        keys = client(endpoint).list_objects_v2(Bucket=BUCKET, Prefix="frozen/step_")["Contents"]
        exchanges = proxy.exchanges
    large = {one["Key"]: one["Size"] for one in keys if one["Size"] >= 4_000_000}
    assert [key.split("/")[1] for key in sorted(large)] == [f"step_{step:08d}" for step in (2, 4, 6)]
    puts = [one for one in exchanges if one.method == "PUT" and one.path.endswith(tuple(large))]
    assert [one.sent_bytes > 4_000_000 for one in puts] == [True, False, False]
    assert [one.sent_bytes for one in puts[1:]] == [0, 0]
    assert sum(one.sent_bytes for one in exchanges) < 4_500_000
