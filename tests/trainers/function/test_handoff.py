"""Taking over the caller's directory: what is moved, cloned or left alone, and what is refused."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from session_kit import START_ID

import holdfast as hf
from holdfast.copying import local
from holdfast.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from holdfast.storage import LocalStorage, MemoryStorage
from holdfast.trainers.function import handoff
from holdfast.trainers.function.control import drive
from holdfast.trainers.function.control.drive import bring_beside
from holdfast.trainers.function.handoff import HandoffArea, name_in_run, take
from holdfast.writer.ingest.sources import put_incoming, scan
from holdfast.writer.messages import IngestSource


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "results" / "run"
    path.mkdir(parents=True)
    return path


def place_of(root, rank=1):
    return HandoffArea(root=LocalStorage(root), uri=str(root), start_id=START_ID, rank=rank)


@pytest.fixture
def place(root):
    return place_of(root)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "mine"
    (path / "sub").mkdir(parents=True)
    (path / "model.pt").write_bytes(b"weights")
    (path / "sub" / "more.bin").write_bytes(b"more")
    return path


@pytest.fixture
def other_disk(tmp_path):
    """A directory on another file system than the tests' own."""
    places = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    others = [place for place in places if place.is_dir() and place.stat().st_dev != tmp_path.stat().st_dev]
    if not others:
        pytest.skip("there is no second file system")
    with tempfile.TemporaryDirectory(dir=others[0]) as path:
        yield Path(path)


@pytest.fixture
def cloning(monkeypatch):
    """Pretend that the file system can clone files; a copy behaves the same way."""

    def clone(source, target):
        found = os.stat(source)
        assert os.path.isfile(source), found
        shutil.copyfile(source, target)

    monkeypatch.setattr(local, "clone_file", clone)


def tree(path):
    """Names and contents below a directory."""
    path = Path(path)
    files = {str(one.relative_to(path)): one.read_bytes() for one in sorted(path.rglob("*")) if one.is_file()}
    # Metadata carry their digest as blanks behind them.
    return {name: data.rstrip() if name.endswith(".metadata.json") else data for name, data in files.items()}


def stamps(path):
    """What would change if anybody touched a directory: inodes, times, numbers of links."""
    found = {}
    for one in sorted(Path(path).rglob("*")):
        about = one.lstat()
        found[one] = (about.st_ino, about.st_mtime_ns, about.st_ctime_ns, about.st_nlink, about.st_mode)
    return found


CONTENT = {"model.pt": b"weights", "sub/more.bin": b"more"}


def of(path):
    return hf.Checkpoint.from_directory(path)


def test_a_directory_to_be_deleted_is_renamed_into_the_run(source, place, root):
    """No byte moves: the very inode is in the run afterwards, and the caller's path is free."""
    inode = (source / "model.pt").stat().st_ino
    taken = take(of(source), place, 7, delete=True, asynchronous=True)
    assert taken.path == str(root / f".incoming-{START_ID}" / "7-1")
    assert taken.owned
    assert taken.safe
    assert tree(taken.path) == CONTENT
    assert (Path(taken.path) / "model.pt").stat().st_ino == inode
    assert not source.exists()


def test_async_deletes_by_default_and_sync_does_not(source, place):
    """Ray's rule: None means True for ASYNC and False for SYNC."""
    taken = take(of(source), place, 1, delete=None, asynchronous=False)
    assert (taken.path, taken.owned, taken.safe) == (str(source), False, False)
    assert source.exists()
    assert take(of(source), place, 1, delete=None, asynchronous=True).owned
    assert not source.exists()


def test_sync_without_deletion_touches_nothing(source, place, root):
    """Not one inode, time or link count of the caller's directory changes, and nothing appears in the run."""
    before = stamps(source)
    taken = take(of(source), place, 1, delete=None, asynchronous=False)
    taken.committed()
    assert stamps(source) == before
    assert list(root.iterdir()) == []


def test_another_file_system_renames_beside(other_disk, place):
    """The hidden sibling is on the caller's own file system, so that is as cheap."""
    source = other_disk / "mine"
    source.mkdir()
    (source / "model.pt").write_bytes(b"weights")
    inode = (source / "model.pt").stat().st_ino
    taken = take(of(source), place, 31, delete=True, asynchronous=True)
    assert taken.path == str(other_disk / f".holdfast-{START_ID}-1f-1")
    assert taken.owned
    assert taken.safe
    assert (Path(taken.path) / "model.pt").stat().st_ino == inode
    assert not source.exists()


def test_what_an_earlier_attempt_took_over_is_swept(other_disk, root, caplog):
    """Of attempts of this run that have ended, once for each folder, and said; nothing of anybody else."""
    ended, living = "0123456789abcdef", "fedcba9876543210"
    for name in (f".holdfast-{ended}-1f-1", f".holdfast-{living}-1-0", ".holdfast-mine", f"{ended}-1-1"):
        (other_disk / name).mkdir()
        (other_disk / name / "model.pt").write_bytes(b"x")
    place = HandoffArea(root=LocalStorage(root), uri=str(root), start_id=START_ID, rank=1, past=frozenset({ended}))
    for index in (1, 2):
        source = other_disk / "mine"
        source.mkdir()
        take(of(source), place, index, delete=True, asynchronous=True)
        assert caplog.text.count("rank 1 of an earlier start has reported it (report 31)") == 1
    assert sorted(path.name for path in other_disk.iterdir()) == sorted(
        [f".holdfast-{living}-1-0", ".holdfast-mine", f"{ended}-1-1", *(f".holdfast-{START_ID}-{n}-1" for n in (1, 2))]
    )


def test_what_is_swept_is_never_seen_in_part(other_disk, root, monkeypatch):
    """The driver may still copy what it was told of: it finds all of it or nothing, and commits no part of it."""
    ended = "0123456789abcdef"
    old = other_disk / f".holdfast-{ended}-1f-1"
    report = IngestSource(rank=1, path=str(old), owned=True)
    storage = LocalStorage(root)
    place = HandoffArea(root=storage, uri=str(root), start_id=START_ID, rank=1, past=frozenset({ended}))
    (old / "sub").mkdir(parents=True)
    for name in ("a.bin", "sub/b.bin"):
        (old / name).write_bytes(b"x")
    removed = []

    def remove(path):
        removed.append(path)
        os.unlink(os.path.join(path, "a.bin"))
        assert not old.exists()
        with pytest.raises(CheckpointError, match="rank 1 reported"):
            bring_beside(storage, "checkpoint_000001", [report])

    monkeypatch.setattr(handoff, "remove_local", remove)
    place.sweep_siblings(str(other_disk / "mine"))
    assert removed == [f"{old}.doomed"]
    monkeypatch.undo()
    place.swept.clear()  # as another start, for the sweep was cut short
    place.sweep_siblings(str(other_disk / "mine"))
    assert list(other_disk.iterdir()) == []

    old.mkdir()
    (old / "sub").mkdir()
    for name in ("a.bin", "sub/b.bin"):
        (old / name).write_bytes(b"x")

    def listed(source):
        """The sweep comes when some of it is listed."""
        found = scan(source)
        place.swept.clear()
        place.sweep_siblings(str(other_disk / "mine"))
        return found

    monkeypatch.setattr(drive, "scan", listed)
    with pytest.raises(CheckpointError, match="could not be listed"):
        bring_beside(storage, "checkpoint_000001", [report])
    assert list(storage.list("")) == []


@pytest.mark.parametrize("how", ["local", "incoming"])
def test_a_directory_comes_beside_what_was_uploaded(root, tmp_path, how):
    """Equal files once, differing ones both, links as what they lead to, metadata too; what was taken over goes."""
    storage, mine = LocalStorage(root), tmp_path / "mine"
    (mine / "sub").mkdir(parents=True)
    (tmp_path / "elsewhere").write_bytes(b"linked")
    (mine / "sub" / "link").symlink_to(tmp_path / "elsewhere")
    for name, data in (("same", b"1"), ("other", b"2"), (".metadata.json", b"{}")):
        (mine / name).write_bytes(data)
    for name, data in (("same", b"1"), ("other", b"3")):
        storage.put(f"up/{name}", data)
    source = IngestSource(rank=1, path=str(mine), owned=True)
    if how == "incoming":
        put_incoming(storage, f".incoming-{START_ID}/1-1", source)
        source = IngestSource(rank=1, path=f".incoming-{START_ID}/1-1", owned=True)
    bring_beside(storage, "up", [source])
    found = {info.path: storage.read(info.path) for info in storage.list("")}
    assert found == {
        "up/same": b"1", "up/other": b"3", "up/other.rank-1": b"2", "up/sub/link": b"linked", "up/.metadata.json": b"{}"
    }  # fmt: skip
    assert mine.exists() is (how == "incoming")
    made = hf.Checkpoint.from_dict({"a": 1}).to_directory(tmp_path / "made")
    with pytest.raises(ConfigError, match="report both in one way"):
        bring_beside(storage, "up", [IngestSource(rank=1, path=str(made))])


def test_a_run_without_a_directory_renames_beside(source):
    """The storage may be anything: what the writer reads is local."""
    place = HandoffArea(root=None, uri="memory://x/run", start_id=START_ID, rank=0)
    taken = take(of(source), place, 1, delete=True, asynchronous=True)
    assert Path(taken.path).parent == source.parent
    assert tree(taken.path) == CONTENT


def test_where_nothing_can_be_renamed_the_caller_waits_and_then_it_is_deleted(source, place, monkeypatch):
    """A mount point cannot be renamed at all: it is copied from where it is, and deleted after the commit."""

    def refuse(*_):
        raise OSError(errno.EBUSY, "a mount point")

    monkeypatch.setattr(handoff.os, "rename", refuse)
    taken = take(of(source), place, 1, delete=True, asynchronous=True)
    assert (taken.path, taken.owned, taken.safe) == (str(source), False, False)
    assert tree(source) == CONTENT
    taken.committed()
    assert not source.exists()


def test_async_without_deletion_clones(source, place, root, cloning):
    """Where blocks can be shared the caller goes on at once and may write his files again."""
    before = stamps(source)
    taken = take(of(source), place, 2, delete=False, asynchronous=True)
    assert taken.path == str(root / f".incoming-{START_ID}" / "2-1")
    assert taken.owned
    assert taken.safe
    assert stamps(source) == before
    (source / "model.pt").write_bytes(b"other")
    assert tree(taken.path) == CONTENT


def test_async_without_deletion_waits_where_nothing_can_be_cloned(source, place, root, monkeypatch):
    """Then the writer copies while the caller waits; half a clone leaves nothing behind."""
    calls = []

    def second_fails(old, new):
        calls.append(old)
        if len(calls) > 1:
            raise OSError(errno.EOPNOTSUPP, "no reflinks here")
        shutil.copyfile(old, new)

    monkeypatch.setattr(local, "clone_file", second_fails)
    before = stamps(source)
    taken = take(of(source), place, 2, delete=False, asynchronous=True)
    assert len(calls) == 2
    assert (taken.path, taken.owned, taken.safe) == (str(source), False, False)
    assert stamps(source) == before
    assert tree(root) == {}


def test_nothing_is_ever_hard_linked(source, place, cloning):
    """`torch.save` truncates the file it writes: a link would make the checkpoint follow."""
    for number, (delete, asynchronous) in enumerate([(False, False), (False, True), (None, False)]):
        take(of(source), place, number, delete=delete, asynchronous=asynchronous)
        assert {one.stat().st_nlink for one in source.rglob("*") if one.is_file()} == {1}


def test_linked_files_are_cloned_and_linked_directories_are_left_to_the_writer(source, place, cloning, tmp_path):
    """A clone holds what links lead to; a linked directory could be anything, and waits for the writer."""
    (tmp_path / "elsewhere.bin").write_bytes(b"elsewhere")
    (source / "link.bin").symlink_to(tmp_path / "elsewhere.bin")
    taken = take(of(source), place, 1, delete=False, asynchronous=True)
    assert tree(taken.path) == {**CONTENT, "link.bin": b"elsewhere"}
    (source / "folder").symlink_to(tmp_path)
    assert not take(of(source), place, 2, delete=False, asynchronous=True).safe


def test_a_directory_with_links_stays_until_the_commit(source, place):
    """From another place a link may lead nowhere, and its file may be written again: the caller waits."""
    (source / "latest").symlink_to(source / "model.pt")
    before = stamps(source)
    taken = take(of(source), place, 1, delete=True, asynchronous=True)
    assert (taken.path, taken.owned, taken.safe) == (str(source), False, False)
    assert stamps(source) == before
    taken.committed()
    assert not source.exists()


def test_a_real_clone_or_a_clear_no(source, tmp_path):
    """On this very file system: either the kernel clones, or nothing is left behind."""
    os.mkfifo(tmp_path / "pipe")
    assert not local.clone_tree(str(tmp_path / "pipe"), str(tmp_path / "never"))
    target = tmp_path / "clone"
    if local.clone_tree(str(source), str(target)):
        assert tree(target) == CONTENT
    else:
        assert not target.exists()


def test_a_file_is_taken_with_its_metadata(tmp_path, place):
    """One file becomes a directory that holds it under its own name."""
    path = tmp_path / "model.pt"
    path.write_bytes(b"weights")
    of(path).set_metadata({"note": "mine"})
    metadata = tmp_path / ".model.pt.metadata.json"
    assert metadata.exists()
    taken = take(of(path), place, 1, delete=True, asynchronous=True)
    assert tree(taken.path) == {"model.pt": b"weights", ".metadata.json": b'{"note": "mine"}'}
    assert not path.exists()
    assert not metadata.exists()


def test_a_file_without_deletion_stays(tmp_path, place, cloning):
    """SYNC reads it where it is; ASYNC clones it."""
    path = tmp_path / "model.pt"
    path.write_bytes(b"weights")
    of(path).set_metadata({"note": "mine"})
    assert take(of(path), place, 1, delete=None, asynchronous=False).path == str(path)
    taken = take(of(path), place, 2, delete=False, asynchronous=True)
    assert tree(taken.path) == {"model.pt": b"weights", ".metadata.json": b'{"note": "mine"}'}
    assert path.exists()


def test_a_file_on_another_disk(other_disk, place):
    """It moves into a hidden directory beside itself."""
    path = other_disk / "model.pt"
    path.write_bytes(b"weights")
    taken = take(of(path), place, 1, delete=True, asynchronous=True)
    assert tree(taken.path) == {"model.pt": b"weights"}
    assert Path(taken.path).parent == other_disk
    assert not path.exists()


@pytest.mark.parametrize("name", ["manifest.json", "a\\b", ".tmp-x", "sub/.tmp-y", ".metrics.json"])
def test_what_no_checkpoint_can_hold_is_refused_where_it_is(source, place, root, name):
    """Before the directory is taken away: its files stay where they are, and the message names the user's own path."""
    (source / name).write_bytes(b"mine")
    with pytest.raises(ConfigError, match=re.escape(str(source))):
        take(of(source), place, 1, delete=None, asynchronous=True)
    assert (source / name).read_bytes() == b"mine"
    assert not any(root.iterdir())


def test_what_was_moved_comes_back_when_the_report_fails(source, place, root):
    """Deletion was asked for after the upload: without one there is none."""
    taken = take(of(source), place, 1, delete=True, asynchronous=False)
    assert not source.exists()
    taken.failed()
    assert tree(source) == CONTENT
    file = source / "model.pt"
    of(file).set_metadata({"a": 1})
    taken = take(of(file), place, 2, delete=True, asynchronous=False)
    taken.failed()
    assert of(file).get_metadata() == {"a": 1}


def test_what_came_into_the_old_place_is_not_overwritten(source, place):
    """The caller may have made a new directory of the same name meanwhile."""
    taken = take(of(source), place, 1, delete=True, asynchronous=False)
    source.mkdir()
    taken.failed()
    assert tree(source) == {}
    assert tree(taken.path) == CONTENT


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_missing_directory_names_the_rank(tmp_path, place, asynchronous):
    """The likely cause is said, too: two ranks with one directory."""
    path = tmp_path / "gone"
    path.mkdir()
    checkpoint = of(path)
    path.rmdir()
    with pytest.raises(CheckpointNotFoundError, match=r"rank 1: there is no .*gone.*two ranks share one directory"):
        take(checkpoint, place, 1, delete=None, asynchronous=asynchronous)


@pytest.mark.parametrize("delete", [True, False, None])
def test_a_directory_that_holds_the_run_is_refused(root, place, delete):
    """The run itself, its parent, a link to it: a checkpoint of it would hold all others, and deleting it the run."""
    link = root.parent.parent / "link"
    link.symlink_to(root.parent)
    for path in (root, root.parent, link):
        with pytest.raises(ConfigError, match="holds the run itself"):
            take(of(path), place, 1, delete=delete, asynchronous=True)
    assert root.is_dir()


def test_a_neighbour_with_a_longer_name_is_no_parent(root, place):
    """`/results/ru` does not hold `/results/run`."""
    near = root.parent / "ru"
    near.mkdir()
    assert take(of(near), place, 1, delete=None, asynchronous=False).path == str(near)


def test_a_checkpoint_of_the_run_is_never_taken_away(root, place, cloning):
    """Reporting it again by ASYNC, where deletion is the default, leaves it alone; asking for deletion is an error."""
    hf.save(root / "checkpoint_000000", {"a": 1})
    (root / "checkpoint_000000" / "sub").mkdir()
    for path in (root / "checkpoint_000000", root / "checkpoint_000000" / "sub"):
        taken = take(of(path), place, len(str(path)), delete=None, asynchronous=True)
        assert taken.path != str(path)
        assert path.exists()
        with pytest.raises(ConfigError, match="belongs to a checkpoint of this run"):
            take(of(path), place, 1, delete=True, asynchronous=True)
    assert hf.load(root / "checkpoint_000000") == {"a": 1}


def test_where_uploads_may_lie(root, place, tmp_path):
    """Right below the run, links and dots resolved; anywhere else is refused."""
    (root / "mine").mkdir()
    (tmp_path / "link").symlink_to(root)
    assert name_in_run(of(root / "mine"), place) == "mine"
    assert name_in_run(of(tmp_path / "link" / "mine"), place) == "mine"
    (root / "mine" / "deep").mkdir()
    (root / "logs").mkdir()
    (root / ".hidden").mkdir()
    for path in (tmp_path, root / "mine" / "deep", root / "logs", root / ".hidden", root):
        with pytest.raises(ConfigError, match="is no place in this run"):
            name_in_run(of(path), place)


def test_where_uploads_may_lie_in_other_storages():
    """The URI decides."""
    storage = MemoryStorage("takeover-uploads")
    place = HandoffArea(root=storage.child("run"), uri="memory://takeover-uploads/run", start_id=START_ID, rank=0)
    assert name_in_run(hf.Checkpoint("memory://takeover-uploads/run/mine"), place) == "mine"
    for uri in ("memory://takeover-uploads/runs/mine", "memory://other/run/mine", "memory://takeover-uploads/run/a/b"):
        with pytest.raises(ConfigError):
            name_in_run(hf.Checkpoint(uri), place)
