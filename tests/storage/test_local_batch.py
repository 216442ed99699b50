"""Many small files at once: few operations for each, durable together, and before whatever is put afterwards."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import StorageError, StorageFullError
from holdfast.storage import LocalStorage
from holdfast.storage.local import local_io
from holdfast.storage.together import SerialExecutor
from holdfast.testing import FaultyOps, FaultyStorage, power_cut_states, snapshot
from holdfast.writer.ingest.intake import Intake
from holdfast.writer.messages import IngestJob, IngestSource

FILES = {f"d{number % 3}/{number % 2}/f{number}": bytes([number]) * (number * 700) for number in range(12)}


@pytest.fixture(params=["whole", "each"])
def way(request, monkeypatch):
    """By one flush of the file system, or file by file."""
    monkeypatch.setattr(local_io, "_MANY", 2)
    monkeypatch.setattr(local_io, "flushes_whole", lambda fd: request.param == "whole")
    return request.param


def names(ops):
    return [operation.name for operation in ops.log]


def fill(storage, ops=None):
    with storage.batch(len(FILES)) as batch:
        for path, data in sorted(FILES.items()):
            batch.add(path, data)
    storage.put("manifest", b"all")
    if ops is not None:
        ops.mark("all")


def test_operations_for_each_file(tmp_path, way) -> None:
    """Opened and written; with a flush of the whole, nothing else but for the directories."""
    ops = FaultyOps(record=True)
    fill(FaultyStorage(tmp_path / "run", ops=ops))
    found = names(ops)
    first = found[: found.index("rename")]
    assert first.count("open") == len(FILES) + 1
    assert first.count("pwrite") == len([data for data in FILES.values() if data]) + 1
    assert first.count("syncfs") == (way == "whole")
    assert first.count("fsync") == (1 if way == "whole" else len(FILES) + 1)
    assert first.count("fsync_dir") <= (6 if way == "whole" else 18)


@pytest.mark.parametrize("broken", [False, True])
def test_power_cuts(tmp_path, way, broken, monkeypatch) -> None:
    """Whenever the manifest is there, every file is whole; without the flush the model notices."""
    before, ops = snapshot(tmp_path), FaultyOps(record=True)
    if broken:
        monkeypatch.setattr(FaultyOps, "syncfs", lambda self, path, fd: None)
        monkeypatch.setattr(FaultyOps, "fsync", lambda self, fd: None)
    fill(FaultyStorage(tmp_path / "run", ops=ops), ops)
    bad = seen = 0
    for state in power_cut_states(ops.log, before, max_states=400):
        files = {path.removeprefix("run/"): data for path, data in state.files.items()}
        if files.get("manifest") == b"all":
            seen += 1
            bad += any(files.get(path) != data for path, data in FILES.items())
        else:
            bad += "all" in state.marks
    assert seen >= 2
    assert (bad > 0) == broken


def test_errors(tmp_path, way) -> None:
    """A disk that cannot keep it says so before the batch ends well; a file that did not fit is not left in part."""
    call = "syncfs" if way == "whole" else "fsync_dir"
    storage = FaultyStorage(tmp_path / "one", ops=FaultyOps())
    batch = storage.batch(9)
    batch.add("d/a", b"1" * 5000)
    storage.ops._fail_on[call] = errno.EIO
    with pytest.raises(StorageError, match="device reported an error"):
        batch.close()
    storage = FaultyStorage(tmp_path / "two", ops=FaultyOps(disk_bytes=8192))
    with pytest.raises(StorageFullError), storage.batch(9) as batch:
        batch.add("a", b"1" * 6000)
        batch.add("b", b"2" * 6000)
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["a"]


def test_no_link_is_followed_and_no_twin_is_changed(tmp_path, way) -> None:
    """A link in the way is replaced or refused, and a hard link of an older file keeps its bytes."""
    root, outside = tmp_path / "run", tmp_path / "outside"
    (root / "d").mkdir(parents=True)
    outside.mkdir()
    (outside / "x").write_bytes(b"theirs")
    (root / "link").symlink_to(outside)
    (root / "d" / "x").symlink_to(outside / "x")
    (root / "d" / "y").write_bytes(b"older")
    os.link(root / "d" / "y", root / "twin")
    storage = LocalStorage(root)
    with storage.batch(9) as batch:
        batch.add("d/x", b"ours")
        batch.add("d/y", b"new")
    assert ((root / "d" / "x").read_bytes(), (root / "twin").read_bytes()) == (b"ours", b"older")
    assert (outside / "x").read_bytes() == b"theirs"
    with pytest.raises(StorageError, match="symbolic link"), storage.batch(9) as batch:
        batch.add("link/x", b"ours")


def test_a_directory_that_somebody_prunes_meanwhile(tmp_path, way) -> None:
    """Another process removes an empty directory just made: it is made again."""
    storage = LocalStorage(tmp_path)
    with storage.batch(9) as batch:
        batch.add("d/e/a", b"1")
        storage.delete("d/e/a")
        batch.add("d/e/b", b"2")
    assert storage.read("d/e/b") == b"2"


def test_a_disk_that_is_mounted_below(tmp_path, monkeypatch) -> None:
    """A flush of the root's file system does not reach it, so there each file and directory has its fsync."""
    monkeypatch.setattr(local_io, "_MANY", 2)
    monkeypatch.setattr(local_io, "flushes_whole", lambda fd: True)
    ops = FaultyOps(record=True)
    storage = FaultyStorage(tmp_path, ops=ops)
    storage.put("mounted/x", b"1")
    real, inode = local_io._device, (tmp_path / "mounted").stat().st_ino
    monkeypatch.setattr(local_io, "_device", lambda fd: -1 if os.fstat(fd).st_ino == inode else real(fd))
    ops.log.clear()
    with storage.batch(9) as batch:
        batch.add("mounted/a", b"1")
        batch.add("here/a", b"1")
        batch.add("mounted/b", b"1")
    assert [names(ops).count(one) for one in ("fsync", "syncfs")] == [2, 1]
    assert names(ops)[-2:] == ["syncfs", "fsync_dir"]
    assert ops.log[-1].path.endswith("/mounted")


def test_what_is_known_of_this_machine() -> None:
    """The answer is one of the two, for any directory, and no for one that is no local disk."""
    for path, expected in (("/proc", False), (".", None)):
        fd = os.open(path, os.O_RDONLY)
        try:
            found = local_io.flushes_whole(fd)
        finally:
            os.close(fd)
        assert found in (True, False) if expected is None else found is expected


@pytest.fixture
def many(tmp_path) -> Path:
    source = tmp_path / "source"
    for number in range(300):
        (source / f"d{number % 10}").mkdir(parents=True, exist_ok=True)
        (source / f"d{number % 10}" / f"f{number}").write_bytes(b"x" * number)
    return source


def test_operations_of_a_reported_directory(tmp_path, many, monkeypatch) -> None:
    """300 small files are committed, and copied out again, by two changes of the disk each and one flush for all."""
    monkeypatch.setattr(local_io, "flushes_whole", lambda fd: True)
    ops = FaultyOps(record=True)
    storage = FaultyStorage(tmp_path / "run", ops=ops)
    source = IngestSource(rank=0, path=str(many))
    fields = {"checkpoint_id": "x", "attempt": 1, "step": 1}
    job = IngestJob(directory="ck", save_id="aaaaaaaa-1", manifest=fields, sources=(source,))
    side = SerialExecutor()
    Intake(storage, job, side).take(None, again=False)
    side.close()
    assert ops.count <= 2 * 300 + 60
    assert names(ops).count("syncfs") == 1
    assert names(ops).index("syncfs") < len(names(ops)) - names(ops)[::-1].index("link")
    out = Checkpoint.at(storage, "ck").to_directory(tmp_path / "out")
    assert {path.name: path.read_bytes() for path in Path(out).glob("d*/*")} == {
        path.name: path.read_bytes() for path in many.glob("d*/*")
    }


@pytest.mark.skipif(sys.platform != "linux", reason="counts system calls with strace")
def test_system_calls_for_each_file(tmp_path, many) -> None:
    """With all reads, a file takes ten system calls at most, coming in and going out."""
    strace = "/usr/bin/strace"
    if not os.path.exists(strace):
        pytest.skip("no strace")
    program = f"""
import sys
from holdfast.checkpoint.handle import Checkpoint
from holdfast.storage import LocalStorage; from holdfast.storage.local import local_io as _local_batch
from holdfast.writer.ingest.intake import Intake
from holdfast.writer.messages import IngestJob, IngestSource
from holdfast.storage.together import SerialExecutor as Side
if sys.argv[1] == "all":
    job = IngestJob(directory="ck", save_id="aaaaaaaa-1", sources=(IngestSource(rank=0, path={str(many)!r}),),
                    manifest={{"checkpoint_id": "x", "attempt": 1, "step": 1}})
    Intake(LocalStorage({str(tmp_path / "run")!r}), job, Side()).take(None, again=False)
    Checkpoint({str(tmp_path / "run/ck")!r}).to_directory({str(tmp_path / "out")!r})
"""

    def count(what: str) -> int:
        counted = tmp_path / f"{what}.strace"
        command = [
            strace,
            "-f",
            "-qq",
            "-o",
            str(counted),
            "-e",
            "trace=%file,%desc",
            sys.executable,
            "-c",
            program,
            what,
        ]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"strace does not work here: {done.stderr[-200:]!r}")
        return len(counted.read_bytes().splitlines())

    assert (count("all") - count("none")) / 300 <= 2 * 10 + 4
