"""Many files of a local disk are removed with one fsync for each directory."""

from __future__ import annotations

import os

import pytest

from holdfast.errors import StorageError
from holdfast.storage.local import local_storage
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.testing import FaultyOps, FaultyStorage


def fill(root, *paths):
    for path in paths:
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"x")


@pytest.mark.parametrize("by_each", [1, 64], ids=["threads", "alone"])
def test_it_is_as_if_each_was_deleted(tmp_path, monkeypatch, by_each):
    """Those that are not there are fine, a directory and what lies behind a link stay, empty directories go."""
    monkeypatch.setattr(local_storage, "_DELETED_BY_EACH", by_each)
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    fill(root, "a/1", "a/2", "a/b/3", "c/4", "c/5", "top", "d/deep/6")
    fill(elsewhere, "theirs")
    (root / "c/link").symlink_to(elsewhere / "theirs")
    (root / "e").symlink_to(elsewhere)
    LocalStorage(root).delete_many(["a/1", "a/2", "a/b/3", "c/4", "c/link", "c/none", "none/1", "top", "d", "e/theirs"])
    left = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
    assert left == ["c", "c/5", "d", "d/deep", "d/deep/6", "e"]
    assert (elsewhere / "theirs").exists()
    LocalStorage(root).delete_many([])


def test_a_thousand_files_cost_one_fsync(tmp_path):
    """Removing a checkpoint of many ranks is a name each, not a wait for the disk each."""
    names = [f"{number:04d}" for number in range(1000)]
    fill(tmp_path, *(f"a/{name}" for name in names), "a/stays")
    ops = FaultyOps(record=True)
    FaultyStorage(tmp_path, ops=ops).delete_many([f"a/{name}" for name in names])
    done = [operation.name for operation in ops.log]
    assert (done.count("unlink"), done.count("fsync_dir"), len(done)) == (1000, 1, 1001)
    assert os.listdir(tmp_path / "a") == ["stays"]


@pytest.mark.parametrize("by_each", [1, 64], ids=["threads", "alone"])
def test_an_error_names_the_file(tmp_path, monkeypatch, by_each):
    """One of them cannot be removed: the error says which, and no thread is left behind."""
    monkeypatch.setattr(local_storage, "_DELETED_BY_EACH", by_each)
    paths = [f"a/{number}" for number in range(20)]
    fill(tmp_path, *paths)
    with pytest.raises(StorageError, match=r"cannot delete .*a/7: "):
        FaultyStorage(tmp_path, events={"unlink:a/7": "EIO"}).delete_many(paths)
    assert (tmp_path / "a/7").exists()
