"""The faulty disk does what it says, or no test built on it proves anything."""

import errno
import json
import os
import subprocess
import sys

import pytest

from holdfast.errors import ConfigError, StorageError, StorageFullError
from holdfast.storage import from_description
from holdfast.testing import CRASH_EXIT_CODE, FaultyOps, FaultyStorage, count_operations


def names(ops):
    return [operation.name for operation in ops.log]


def work(storage):
    with storage.create("c/data", 5000) as writer:
        writer.write(memoryview(b"x" * 5000))
    storage.put("c/manifest", b"1")


def test_numbers_are_stable(tmp_path):
    """The same work has the same operations with the same numbers."""
    logs = []
    for run in ("one", "two"):
        ops = FaultyOps(record=True)
        work(FaultyStorage(tmp_path / run, ops=ops))
        logs.append([(operation.number, operation.name, operation.offset) for operation in ops.log])
        assert [operation.number for operation in ops.log] == list(range(ops.count))
    assert logs[0] == logs[1]
    assert count_operations(lambda ops: work(FaultyStorage(tmp_path / "three", ops=ops))) == len(logs[0])


def test_record(tmp_path):
    """The log holds what was written, under one handle for each open file, and the marks."""
    ops = FaultyOps(record=True)
    storage = FaultyStorage(tmp_path, ops=ops)
    storage.put("a", b"12")
    ops.mark("promised")
    assert names(ops) == ["fsync_dir", "open", "pwrite", "fsync", "fsync_dir", "rename", "fsync_dir", "mark"]
    opened, written, synced = ops.log[1:4]
    assert opened.created
    assert (written.data, written.offset) == (b"12", 0)
    assert opened.handle == written.handle == synced.handle
    assert ops.log[5].target == str(tmp_path / "a")
    assert ops.log[-1].target == "promised"


def test_fail_at_fails_once(tmp_path):
    """fail_at breaks one operation; the same work later succeeds. A failed operation is not recorded."""
    ops = FaultyOps(fail_at={2: errno.EIO}, record=True)
    storage = FaultyStorage(tmp_path, ops=ops)
    with pytest.raises(StorageError):
        storage.put("a", b"1")
    assert names(ops) == ["fsync_dir", "open", "unlink"]
    storage.put("a", b"1")
    assert storage.read("a") == b"1"


def test_fail_from_fails_for_ever(tmp_path):
    """fail_from breaks everything from a number on."""
    storage = FaultyStorage(tmp_path, fail_from=(7, errno.ENOSPC))
    storage.put("a", b"1")
    for _ in range(2):
        with pytest.raises(StorageFullError):
            storage.put("a", b"2")
    assert storage.read("a") == b"1"


def test_fail_on_knows_its_operations():
    """A misspelt operation is refused instead of never failing."""
    with pytest.raises(ConfigError, match="fdatasync"):
        FaultyOps(fail_on={"fdatasync": errno.EIO})


def test_disk_bytes_counts_what_is_there(tmp_path):
    """Space is used by growth, given back by the last name of a file, and not used by a second name."""
    storage = FaultyStorage(tmp_path, disk_bytes=10_000)
    storage.put("a", b"1" * 4000)
    assert storage.free_bytes() == 6000
    storage.copy("a", "b")
    storage.put("a", b"2" * 1000)
    assert storage.free_bytes() == 5000
    storage.delete("b")
    assert storage.free_bytes() == 9000
    storage.put("a", b"")
    assert storage.free_bytes() == 10_000


CRASH = """
import json, sys
from holdfast.storage import from_description
from_description(json.loads(sys.argv[1])).put("d/a", b"x" * 10000)
"""


def test_description_breaks_another_process(tmp_path):
    """Another process that rebuilds the storage crashes at the operation asked for, tears the write and traces."""
    trace = tmp_path / "trace"
    storage = FaultyStorage(
        tmp_path / "root", crash_at=6, tear=True, fail_at={99: errno.EIO}, fail_from=(99, errno.EIO), trace=str(trace)
    )
    description = json.dumps(storage.describe())
    done = subprocess.run([sys.executable, "-c", CRASH, description], check=False, timeout=60)
    assert done.returncode == CRASH_EXIT_CODE
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [line["number"] for line in lines] == list(range(7))
    assert lines[-1]["name"] == "pwrite"
    (litter,) = os.listdir(tmp_path / "root/d")
    assert litter.startswith(".tmp-")
    assert os.path.getsize(tmp_path / "root/d" / litter) == 4096


def test_storages_of_one_description_count_together(tmp_path):
    """Rebuilt twice in one process, or seen through a child, a faulty disk is one disk."""
    storage = FaultyStorage(tmp_path)
    for place in (storage.child("x"), from_description(storage.describe()), from_description(storage.describe())):
        before = storage.ops.count
        place.put("a", b"1")
        assert storage.ops.count > before


def test_recording_stays_in_this_process(tmp_path):
    """A storage whose operations are to be seen here does not let itself be rebuilt elsewhere."""
    assert FaultyStorage(tmp_path, record=True).describe() is None
    assert FaultyStorage(tmp_path, ops=FaultyOps()).describe() is None


def test_a_faulty_storage_needs_no_pytest(tmp_path):
    """The writer process rebuilds a faulty storage without importing pytest."""
    code = "import sys; from holdfast.testing import FaultyStorage; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
