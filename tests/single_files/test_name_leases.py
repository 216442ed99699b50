"""The leases of file names that a writer holds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import RunBusyError, StorageUnavailableError
from holdfast.run.lease import Lease
from holdfast.storage import LocalStorage
from holdfast.storage.base import TEMPORARY
from holdfast.writer.single_file import NameLeases

pytestmark = pytest.mark.usefixtures("forked")
OF = "0123abcd"


def take(leases: NameLeases, storage: LocalStorage) -> None:
    leases.take(storage, OF, {"start_id": "ab12", "trainer_pid": 1}, wait_s=0.0, pause=lambda _: None)


def test_a_storage_that_did_not_answer_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that was started again takes the lease with the next file, if it could not at its start."""
    storage, leases, original = LocalStorage(tmp_path), NameLeases(), Lease.acquire
    answers = iter([StorageUnavailableError("no answer"), StorageUnavailableError("no answer"), None])

    def acquire(*arguments: Any, **options: Any) -> Lease:
        error = next(answers)
        if error is not None:
            raise error
        return original(*arguments, **options)

    monkeypatch.setattr(Lease, "acquire", acquire)
    with pytest.raises(StorageUnavailableError):
        take(leases, storage)
    with pytest.raises(StorageUnavailableError):
        leases.held(storage, OF)
    held = leases.held(storage, OF)
    assert held is not None
    assert next(answers, "all given") == "all given"  # another acquisition would find none, and fail
    assert leases.held(storage, OF) is held
    leases.close()


def test_a_name_that_somebody_else_has_is_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are theirs to write from now on."""
    calls: list[int] = []

    def acquire(*_: Any, **__: Any) -> Lease:
        calls.append(1)
        raise RunBusyError("theirs")

    storage, leases = LocalStorage(tmp_path), NameLeases()
    monkeypatch.setattr(Lease, "acquire", acquire)
    with pytest.raises(RunBusyError):
        take(leases, storage)
    for _ in range(2):
        with pytest.raises(RunBusyError, match="theirs"):
            leases.held(storage, OF)
    assert len(calls) == 1


WRITES = """
import mmap, sys, time
import fsspec
from holdfast.storage import LocalStorage
from holdfast.storage.adapters.fsspec import FsspecStorage

root, path, kind = sys.argv[1:]
storage = LocalStorage(root) if kind == "local" else FsspecStorage(fsspec.filesystem("file"), root)
writer = storage.replace(path, 16 << 20)
writer.write(memoryview(mmap.mmap(-1, 8 << 20)))
print("writing", flush=True)
time.sleep(300)
"""


def begin_to_write(root: Path, path: str, kind: str) -> subprocess.Popen[bytes]:
    """A process that is in the middle of a big file: on a local disk, or where no lock tells who lives."""
    process = subprocess.Popen([sys.executable, "-c", WRITES, str(root), path, kind], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"writing\n"
    return process


def unfinished(root: Path) -> set[str]:
    return {str(path.parent.relative_to(root)) for path in root.rglob(f"{TEMPORARY}*")}


def test_the_first_file_of_a_folder_sweeps_what_a_killed_writer_left(tmp_path: Path) -> None:
    """SIGKILL leaves a big file under a temporary name; the next owner of the name removes it once nobody can live.

    In the folder of the file that is written, and once; what another trainer is writing there stays.
    """
    fsspec = pytest.importorskip("fsspec")
    from holdfast.storage.adapters.fsspec import FsspecStorage

    for path in ("ba1.pt", "ep0/ba1.pt"):
        killed = begin_to_write(tmp_path, path, "far")
        with killed:
            killed.kill()
    for left in tmp_path.rglob(f"{TEMPORARY}*"):
        assert left.stat().st_size >= 8 << 20
        os.utime(left, (0, time.time() - 2 * 86400))
    storage, leases = FsspecStorage(fsspec.filesystem("file"), str(tmp_path)), NameLeases()
    leases.take(storage, OF, {"start_id": "ab12", "trainer_pid": os.getpid()}, wait_s=0.0, pause=time.sleep)
    assert unfinished(tmp_path) == {".", "ep0"}
    alive = begin_to_write(tmp_path, "other.pt", "far")
    with alive:
        assert leases.begin(OF, storage, "ep0/ba2.pt") is not None
        assert unfinished(tmp_path) == {"."}
        leases.begin(OF, storage, "ba3.pt")
        assert len(list(tmp_path.glob(f"{TEMPORARY}*"))) == 1
        for living in tmp_path.glob(f"{TEMPORARY}*"):
            os.utime(living, (0, time.time() - 2 * 86400))
        leases.begin(OF, storage, "ba4.pt")
        assert unfinished(tmp_path) == {"."}, "a folder is swept once in the life of a writer"
        alive.kill()
    assert leases.begin(None, storage, "ba5.pt") is None
    leases.close()


def test_a_local_folder_is_swept_at_its_first_file(tmp_path: Path) -> None:
    """A killed writer's file goes at once there, for it has no lock any more; one of a living writer stays."""
    pytest.importorskip("fsspec")
    killed = begin_to_write(tmp_path, "killed/ba1.pt", "local")
    alive = begin_to_write(tmp_path, "alive/ba1.pt", "local")
    with killed, alive:
        killed.kill()
        killed.wait()
        storage = LocalStorage(tmp_path)
        for folder in ("killed", "alive"):
            storage.put(f"{folder}/ba2.safetensors", b"next")
        assert unfinished(tmp_path) == {"alive"}
        alive.kill()
