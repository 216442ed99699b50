"""What cannot be read now: a store that has not found a file, a disk with a bad sector."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_kit as kit
import torch

import holdfast as hf
from holdfast.format.commit import remove
from holdfast.run.catalog import Catalog
from holdfast.storage import FileReader, MemoryStorage, StorageTraits
from holdfast.storage.wrapped import WrappedStorage


class Lagging(WrappedStorage):
    """A store of which a replica does not find a file a few times.

    Attributes:
        part: of the path of that file.
        times: how often it is not found.
    """

    def __init__(self, below: MemoryStorage) -> None:
        super().__init__(below)
        self.part, self.times = "", 0

    @property
    def traits(self) -> StorageTraits:
        return StorageTraits(num_parallel=4)

    def open(self, path: str) -> FileReader:
        if self.part and self.part in path and self.times:
            self.times -= 1
            return self.below.open("nothing")
        return super().open(path)


@pytest.mark.parametrize("part", ["step_00000002/state-00000", "step_00000002/index", "step_00000002/manifest"])
def test_a_file_that_a_store_does_not_find_once_is_asked_for_again(part: str, tmp_path: Path) -> None:
    """The newest checkpoint is whole: one answer does not set it aside."""
    store = Lagging(MemoryStorage(tmp_path.name))
    kit.train(store, 2)
    store.part, store.times = part, 1
    assert kit.train(store, 0).global_step == 2
    assert store.times == 0
    assert not Catalog(store).index.quarantined


@pytest.mark.parametrize("reads", ["state-00000", "index"])
def test_a_checkpoint_that_is_deleted_while_it_is_loaded_is_not_called_damaged(reads: str, tmp_path: Path) -> None:
    """Retention takes the manifest first: that tells a deletion from a loss."""

    class Retained(MemoryStorage):
        def open(self, path: str) -> FileReader:
            if reads in path:
                remove(self, "step_00000001")
            return super().open(path)

    store = Retained(tmp_path.name)
    hf.save(hf.Checkpoint.at(store, "step_00000001"), {"w": torch.zeros(10)})
    with pytest.raises(hf.CheckpointNotFoundError, match="deleted while it was read"):
        hf.load(hf.Checkpoint.at(store, "step_00000001"))


@pytest.fixture
def bad_sector(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a disk unable to read the weights of those checkpoints whose path contains a text; "" mends it."""
    real, bad = os.preadv, [""]

    def preadv(fd: int, *arguments: Any) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if bad[0] and bad[0] in path and path.endswith(".safetensors"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, *arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    return lambda part: bad.__setitem__(0, part)


def test_a_bad_sector_costs_one_checkpoint(tmp_path: Path, bad_sector: Callable[[str], None], capsys: Any) -> None:
    """The older checkpoint is used, which is said; the newest is not given up: it counts when it can be read again."""
    kit.train(tmp_path / "run", 3)
    bad_sector("step_00000003")
    assert kit.train(tmp_path / "run", 0).global_step == 2
    assert "step_00000003" in (said := capsys.readouterr().err)
    assert "later starts try it again" in said
    bad_sector("")
    assert kit.train(tmp_path / "run", 0).global_step == 3


def test_a_bad_sector_of_a_mirrored_run_costs_nothing(tmp_path: Path, bad_sector: Callable[[str], None]) -> None:
    """The same checkpoint is read from the remote."""
    kit.train(tmp_path / "far", 3, local_dir=tmp_path / "near")
    bad_sector("near/step_00000003")
    ck = kit.train(tmp_path / "far", 0, local_dir=tmp_path / "near")
    assert ck.resumed_from.uri == f"{tmp_path}/far/step_00000003"


def test_what_lies_behind_a_bad_sector_is_uploaded(tmp_path: Path, bad_sector: Callable[[str], None]) -> None:
    """A checkpoint that the disk cannot read does not hold up the next ones; the last one cannot be left out."""
    remote = MemoryStorage(tmp_path.name)
    state = {"w": torch.zeros(1000)}
    bad_sector("step_00000002")
    mirror = hf.Mirror(tmp_path / "near", max_behind=9)
    with hf.Checkpointer(remote, state, every=1, keep=None, local_dir=mirror, timeout_s=10) as ck:
        for _ in range(3):
            ck.step()
            ck.wait()
        ck.wait(remote=True)
    assert [record.step for record in Catalog(remote).records()] == [3, 1]
