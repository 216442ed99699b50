"""`holdfast doctor` says what a storage keeps, changes nothing there and leaves nothing, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_cli import as_json, invoke

from holdfast.cli.probes import LEFT, ProbeDeadline, probe_disk, probe_store, skew_of
from holdfast.errors import StorageError, StoragePermissionError
from holdfast.storage import MemoryStorage, StorageTraits


def snapshot(folder: Path) -> dict:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_ino) for path in [folder, *folder.rglob("*")]}


def levels(found: dict) -> dict[str, str]:
    return {one["name"]: one["level"] for one in found["findings"]}


def test_a_disk(tmp_path) -> None:
    """Every promise has a line; what was there is as it was."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_bytes(b"x")
    before = snapshot(tmp_path / "mine")
    found = as_json("doctor", tmp_path / "mine", "--bytes", "16MiB")
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]
    after = snapshot(tmp_path / "mine")
    assert after.pop(str(tmp_path / "mine"))
    before.pop(str(tmp_path / "mine"))
    assert after == before
    seen = levels(found)
    assert {"file system", "free space", "conditional writes", "locks", "O_DIRECT", "hard links", "reflinks"} <= set(
        seen
    )
    assert {"clock", "fsync and rename", "write speed", "read speed", "memory", "memfd", "writer"} <= set(seen)
    assert (found["ok"], seen["conditional writes"], seen["writer"]) == (True, "ok", "ok")
    assert all(one["found"] and set(one) == {"part", "name", "level", "found", "means", "do", "values"}
               for one in found["findings"])  # fmt: skip
    rates = {one["name"]: one["values"] for one in found["findings"]}
    assert rates["write speed"]["bytes"] == rates["read speed"]["bytes"] == 16 << 20


def test_a_path_that_is_not_there_is_not_made(tmp_path) -> None:
    """The nearest directory above is probed; it says so."""
    text = invoke("doctor", tmp_path / "a" / "b", "--bytes", "0").stdout
    assert "not there yet" in text
    assert "speed" not in text
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_to_be_mended() -> None:
    """Status 1, with what to do."""
    found = as_json("doctor", "/proc", code=1)
    assert (found["ok"], levels(found)["write"]) == (False, "bad")
    bad = [one for one in found["findings"] if one["level"] == "bad"]
    assert bad
    assert all(one["do"] and one["means"] for one in bad)
    assert "to do: " in invoke("doctor", "/proc", code=1).stdout
    assert "128MiB" in invoke("doctor", "/proc", "--bytes", "lots", code=2).stderr


def test_what_a_killed_one_left_is_removed(tmp_path) -> None:
    """Not that of one that may still be at work."""
    for name, age in (("old", 3600.0), ("new", 0.0)):
        (tmp_path / f"{LEFT}{name}").mkdir()
        (tmp_path / f"{LEFT}{name}" / "file").write_bytes(b"x")
        os.utime(tmp_path / f"{LEFT}{name}", (time.time() - age,) * 2)
    list(probe_disk(tmp_path, 0, ProbeDeadline(5), lambda done: None))
    assert [path.name for path in tmp_path.iterdir()] == [f"{LEFT}new"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_by_one_that_is_ended(tmp_path, number) -> None:
    """In the middle of a transfer."""
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "doctor", str(tmp_path), "--bytes", "2GiB", "--seconds", "100"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    while not list(tmp_path.glob(f"{LEFT}*/raw")):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_clocks() -> None:
    """Two seconds are said; what makes a living lease look stale is to be mended."""
    assert [skew_of(skew, "it").level for skew in (0.5, -1.9, 5.0, -20.0, 40.0)] == ["ok", "ok", "warn", "warn", "bad"]


class Loose(MemoryStorage):
    """Takes conditions and ignores them, is 100 s ahead, and deletes nothing."""

    def put(self, path, data, *, if_absent=False, if_match=None):
        return super().put(path, data)

    traits = StorageTraits(copies_itself=False)

    def stat(self, path):
        found = super().stat(path)
        return type(found)(path=found.path, size=found.size, etag=found.etag, modified=time.time() + 100)

    def delete(self, path):
        raise StoragePermissionError("delete is not allowed")


def test_a_store_that_keeps_less() -> None:
    """Each promise that is broken is named, with what it means."""
    found = {one.name: one for one in probe_store(Loose("loose"), 0, ProbeDeadline(5), lambda done: None)}
    assert found["conditional writes"].level == "warn"
    assert "if absent, if unchanged" in found["conditional writes"].found
    assert found["clock"].level == "bad"
    assert "sent again" in found["copies"].means
    assert found["delete"].level == "bad"
    assert "holdfast-doctor-" in found["delete"].found


class Away(MemoryStorage):
    """Answers nothing."""

    def put(self, path, data, *, if_absent=False, if_match=None):
        raise StorageError("\x1b[31mconnection refused")


def test_a_store_that_is_away() -> None:
    """One line says what is wrong, and nothing more is tried."""
    found = list(probe_store(Away("away"), 1 << 20, ProbeDeadline(5), lambda done: None))
    assert [(one.name, one.level) for one in found] == [("access", "bad")]


def test_a_store_keeps_nothing_of_the_probe() -> None:
    """All promises kept, and it is empty again."""
    found = as_json("doctor", "memory://doctor/run", "--bytes", "1MiB")
    assert {one["level"] for one in found["findings"] if one["part"] == "storage"} == {"ok"}
    assert levels(found)["delete"] == "ok"
    assert list(MemoryStorage("doctor").list()) == []
