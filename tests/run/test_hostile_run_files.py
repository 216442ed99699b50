"""What lease.json, fences, run.json and names of reports say may be anybody's: a start copes, or says what it is."""

from __future__ import annotations

import json

import pytest

from holdfast.errors import CorruptCheckpointError
from holdfast.format.commit import PartSummary, commit, read_manifest
from holdfast.format.digest import bytes_digest
from holdfast.format.manifest import FileEntry
from holdfast.run import lease as lease_module
from holdfast.run.catalog import Catalog
from holdfast.run.external import External, holders
from holdfast.run.fence import _digest
from holdfast.run.lease import Lease, make_owner
from holdfast.run.record import read_sidecar
from holdfast.storage import LocalStorage

HERE = lease_module.machine()
OWNER = {"host": "elsewhere", "boot": "x", "pid": 5, "trainer_pid": 5, "start_id": "aaaaaaaa", "trainer_alive": True}
DEEP = "[" * 200_000
HOLE = 20 << 30


def fence(**told):
    return json.dumps({"format": "holdfast-fence", "digest": _digest(told), "fence": told})


def save(storage, run_id, attempt, step):
    """Commit a checkpoint of one file."""
    name = f"step_{step:08d}"
    entry = FileEntry(path="notes.txt", size=1, digest=bytes_digest(b"x"), role="user")
    storage.put(f"{name}/notes.txt", b"x")
    fields = {"run_id": run_id, "checkpoint_id": f"id-{step}", "step": step, "attempt": attempt}
    commit(storage, name, fields, [PartSummary(writer=0, files=(entry,))])
    return name


@pytest.fixture
def run(tmp_path):
    storage = LocalStorage(tmp_path / "run")
    catalog = Catalog(storage)
    attempt = catalog.index.register_attempt("bbbbbbbb", host="h", pid=1)
    name = save(storage, catalog.index.run_id, attempt.attempt, 1)
    catalog.add(name, read_manifest(storage, name))
    catalog.index.save()
    return storage


def plant(storage, name, content):
    path = storage.local_root / name
    path.parent.mkdir(exist_ok=True)
    if isinstance(content, int):
        with path.open("wb") as file:
            file.truncate(content)  # a hole: it takes no room
    else:
        path.write_text(content)


def begin(catalog):
    """Number an attempt as a writer does."""
    above = 0 if catalog.fence is None else catalog.fence.below
    return catalog.index.register_attempt("cccccccc", host="h", pid=1, above=above)


def start(storage):
    """Do what every start does; give the steps that count, and save one more, which must be readable."""
    lease = Lease.acquire(storage, make_owner("cccccccc"), stale_s=0.05, wait_s=20.0)
    try:
        catalog = Catalog(storage, doomed=lease.predecessor.doomed)
        attempt = begin(catalog)
        if lease.predecessor.may_act:
            catalog.draw_fence(attempt.attempt, attempt.start_id)
        catalog.sweep()
        found = [record.step for record in catalog.records()]
        name = save(storage, catalog.index.run_id, attempt.attempt, 2)
    finally:
        lease.release()
    assert read_manifest(storage, name).attempt == attempt.attempt
    assert Catalog(storage).latest().name == name
    return found


LEASES = {
    "deep": DEEP,
    "a hole": HOLE,
    "an endless number": json.dumps({**OWNER, "pid": float("inf")}),
    "no process": json.dumps({**OWNER, **HERE, "pid": -1, "trainer_pid": -1}),
    "a number of no process": json.dumps({**OWNER, **HERE, "pid": 10**30}),
    "a trainer of another kind": json.dumps({**OWNER, **HERE, "trainer_pid": {"a": [1]}}),
    "a start of another kind": json.dumps({**OWNER, "start_id": {"a": [1]}}),
    "deletions elsewhere": json.dumps({**OWNER, "doomed": ["../run", "..", "", "/etc", "a/../../b", "\ud800", 7]}),
    "a million deletions": json.dumps({**OWNER, "doomed": [f"step_{n:08d}" for n in range(2, 400_000)]}),
}


@pytest.mark.parametrize("what", LEASES)
def test_a_lease_of_anybody(run, what):
    """It is read in bounds, taken over, and what is there stays."""
    plant(run, "lease.json", LEASES[what])
    assert start(run) == [1]


KNOWN = {"step_00000001": "*"}
FENCES = {
    "deep": ("fence-00009-aa.json", DEEP),
    "a hole": ("fence-00009-aa.json", HOLE),
    "an endless number": ("fence-00009-aa.json", fence(below=float("inf"), known={}, dead=[])),
    "another number than its name": ("fence-00009-aa.json", fence(below=12, known={}, dead=[])),
    "a number of no attempt": (f"fence-{10**26}-aa.json", fence(below=10**26, known={}, dead=[])),
    "names of no checkpoints": ("fence-00009-aa.json", fence(below=9, known=KNOWN, dead=["../x", "\ud800", "a\0"])),
}


@pytest.mark.parametrize("what", FENCES)
def test_a_fence_of_anybody(run, what):
    """One that no owner draws is passed over; what is saved afterwards can be read."""
    plant(run, *FENCES[what])
    assert start(run) == [1]


@pytest.mark.parametrize("name", ["fence-999999999-aa.json", "reports/999999999-aaaaaaaa-000001.jsonl"])
def test_a_number_that_leaves_none_above_it(run, name):
    """It is said; before anything is saved under an attempt that no reader takes."""
    plant(run, name, fence(below=999_999_999, known=KNOWN, dead=[]) if "fence" in name else "")
    with pytest.raises(CorruptCheckpointError, match="attempt 999999999, which no run reaches"):
        begin(Catalog(run))


def test_an_index_with_a_hole(run):
    """It is rebuilt."""
    plant(run, "run.json", HOLE)
    assert start(run) == [1]


@pytest.mark.parametrize(
    "what", [DEEP, HOLE, "[1]", "7", json.dumps({"pid": [], "host": 3, "at_most_s": float("nan")})]
)
def test_a_hold_of_anybody(run, what):
    """It counts as a hold that says nothing, or is passed over; nobody fails on it."""
    plant(run, ".external/hold-step_00000001-0123456789abcdef.json", what)
    external = External(run)
    external.look()
    assert external.spared <= {"step_00000001"}
    assert holders(run).keys() <= {"step_00000001"}
    assert start(run) == [1]


def test_a_sidecar_that_nests_deep(run):
    """Its checkpoint counts as pinned until it goes."""
    plant(run, "step_00000001/.metrics.json", DEEP)
    assert read_sidecar(run, "step_00000001").pinned
    assert start(run) == [1]
