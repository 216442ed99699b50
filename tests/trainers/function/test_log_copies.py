"""Logs of runs on storages that are no local disk."""

import itertools
import logging

import pytest

from holdfast.errors import StorageError
from holdfast.storage import MemoryStorage
from holdfast.trainers.function.control import drive
from holdfast.trainers.function.control.drive import LogCopies

_names = itertools.count()


class Recording(MemoryStorage):
    """Says what was put, or fails while it is told to."""

    def __init__(self):
        super().__init__(f"log-copies-{next(_names)}")
        self.puts, self.broken = [], False

    def put(self, path, data, **conditions):
        if self.broken:
            raise StorageError("cannot write: out of reach")
        self.puts.append(path)
        return super().put(path, data, **conditions)


@pytest.fixture
def storage():
    return Recording()


def write(copies, name, data):
    path = copies.folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    with path.open("ab") as file:
        file.write(data)


def test_what_has_grown_is_copied(storage):
    """Each round copies what is new, the last one everything; the folder goes."""
    copies = LogCopies(storage, every_s=1000)
    write(copies, "attempt-00001/rank-0.log", b"one\n")
    write(copies, "attempt-00001/rank-1.log", b"two\n")
    copies._round()
    write(copies, "attempt-00001/rank-1.log", b"more\n")
    copies.close()
    copies.close()
    assert storage.read("logs/attempt-00001/rank-1.log") == b"two\nmore\n"
    assert storage.puts == [f"logs/attempt-00001/rank-{rank}.log" for rank in (0, 1, 1)]
    assert not copies.folder.exists()


def test_big_logs_are_cut_in_the_middle(storage, monkeypatch):
    """Beginning and end of a long log are kept, with a word about the rest."""
    monkeypatch.setattr(drive, "_HEAD_BYTES", 4)
    monkeypatch.setattr(drive, "_TAIL_BYTES", 4)
    copies = LogCopies(storage, every_s=1000)
    write(copies, "a.log", b"abcd012345wxyz")
    copies.close()
    assert storage.read("logs/a.log") == b"abcd\n[... 6 bytes are left out here ...]\nwxyz"


def test_a_storage_that_fails(storage, caplog):
    """It is said once, tried again, and at the end the logs stay where they are."""
    copies = LogCopies(storage, every_s=1000)
    write(copies, "a.log", b"x")
    storage.broken = True
    copies._round()
    copies._round()
    assert caplog.text.count("trying again") == 1
    storage.broken = False
    copies._round()
    assert storage.read("logs/a.log") == b"x"
    write(copies, "a.log", b"y")
    storage.broken = True
    caplog.set_level(logging.WARNING)
    copies.close()
    assert str(copies.folder) in caplog.text
    assert (copies.folder / "a.log").read_bytes() == b"xy"
