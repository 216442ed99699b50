"""Copies of checkpoints between storages: whole, resumed, checked, bounded."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from checkpoint_kit import MODEL, Shape, build, small

from holdfast.checkpoint.handle import Checkpoint
from holdfast.copying import sending as sending_module
from holdfast.copying.sending import WINDOW, TransferStopped, Windows, num_windows
from holdfast.copying.transfer import (
    Copied,
    copy_checkpoint,
    copy_file,
    planned,
    send_entries,
)
from holdfast.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
)
from holdfast.format.digest import bytes_digest
from holdfast.format.manifest import FileEntry
from holdfast.format.parts import sweep_given_up
from holdfast.run.record import Sidecar, read_sidecar, write_sidecar
from holdfast.run.remains import sweep_names
from holdfast.storage import FileReader, LocalStorage, MemoryStorage

# Three files of 10 MB and more: more than one window each.
BIG = tuple(Shape(f"{item}/w", (3, 1_000_000)) for item in ("model", "ema", "optimizer"))


@pytest.fixture(params=["local", "memory"])
def target(request, tmp_path):
    return LocalStorage(tmp_path / "target") if request.param == "local" else MemoryStorage(f"t-{tmp_path.name}")


@pytest.fixture
def source(tmp_path):
    return MemoryStorage(f"s-{tmp_path.name}")


def content(storage, name: str) -> dict[str, bytes]:
    return {info.path[len(name) + 1 :]: storage.read(info.path) for info in storage.list(name)}


class Recorded:
    """Replaces methods of a storage by ones that note their paths, and fail or act on demand."""

    def __init__(self, monkeypatch, storage, *names: str) -> None:
        self.paths: list[str] = []
        self.before = lambda path: None
        for name in names:
            monkeypatch.setattr(storage, name, self._noting(getattr(storage, name)))

    def _noting(self, real):
        def noted(path, *args, **options):
            self.before(path)
            self.paths.append(path)
            return real(path, *args, **options)

        return noted


def test_a_copy_is_the_source_byte_for_byte(source, target) -> None:
    """All files arrive, what was put there by hand too, remains of other saves not; progress adds up to all bytes."""
    made = build(source, "c", tensors=(*MODEL, *BIG), user={"sub/x.bin": b"123", "empty": b""}, step=3)
    source.put("c/notes.txt", b"by hand")
    source.put("c/model-00000-deadbeef-0.safetensors", b"of a save that died")
    write_sidecar(source, "c", Sidecar(metrics={"loss": float("nan")}, pinned=True))
    seen: list[int] = []
    found = copy_checkpoint(source, "c", target, "runs/x", progress=seen.append)
    expected = content(source, "c")
    del expected["model-00000-deadbeef-0.safetensors"]
    assert content(target, "runs/x") == expected
    assert Checkpoint.at(target, "runs/x").verify().ok
    total = made.total_bytes + len(b"by hand")
    assert found == Copied(bytes_sent=total, files=len(made.files) + 1)
    assert sum(seen) == total


def test_a_copy_that_was_stopped_goes_on_where_it_was(source, target) -> None:
    """What was complete is not sent again, and until the end there is no checkpoint."""
    made = build(source, "c", tensors=BIG)
    windows = 0

    def stop() -> bool:
        nonlocal windows
        windows += 1
        return windows > 5

    with pytest.raises(TransferStopped):
        copy_checkpoint(source, "c", target, "c", stop=stop, num_threads=1)
    assert not target.exists("c/manifest.json")
    there = {path for path, data in content(target, "c").items() if len(data) == made.file(path).size}
    assert there
    again = copy_checkpoint(source, "c", target, "c")
    assert again.bytes_there == sum(made.file(path).size for path in there)
    assert again.bytes_sent == made.total_bytes - again.bytes_there > 0
    assert copy_checkpoint(source, "c", target, "c") == Copied(bytes_there=made.total_bytes, files=len(made.files))
    assert Checkpoint.at(target, "c").verify().ok


def test_a_file_that_only_looks_complete_is_sent_again(source, tmp_path) -> None:
    """A disk that lost power keeps the size and not the bytes: on a local target the digest is asked, not the size."""
    made = build(source, "c", tensors=BIG)
    target = LocalStorage(tmp_path)
    for entry in made.files:
        target.put(f"c/{entry.path}", bytes(entry.size - 1) + b"?")
    assert copy_checkpoint(source, "c", target, "c").bytes_sent == made.total_bytes
    assert Checkpoint.at(target, "c").verify().ok


def test_files_that_are_gone_from_a_committed_copy_are_sent_again(source, target) -> None:
    """Copying anew heals a copy from which somebody deleted a file."""
    made = build(source, "c", tensors=BIG)
    copy_checkpoint(source, "c", target, "c")
    target.delete(f"c/{made.files[0].path}")
    assert copy_checkpoint(source, "c", target, "c").bytes_sent == made.files[0].size
    assert Checkpoint.at(target, "c").verify().ok


def test_a_source_that_rotted_gives_no_checkpoint(source, target) -> None:
    """A flipped byte, a short file and a missing one are found while they are read, and the file is named."""
    made = build(source, "c", tensors=BIG)
    victim = made.files[1].path
    whole = source.read(f"c/{victim}")
    for bad in (whole[:-1] + b"?", whole[:-1], None):
        source.put(f"c/{victim}", bad) if bad is not None else source.delete(f"c/{victim}")
        with pytest.raises(CorruptCheckpointError, match=victim) as caught:
            copy_checkpoint(source, "c", target, "c")
        assert caught.value.file == victim
        assert not target.exists("c/manifest.json")
        assert not target.exists(f"c/{victim}")
    source.put("c/manifest.json", source.read("c/manifest.json")[:-40])
    with pytest.raises(CorruptCheckpointError, match="manifest"):
        copy_checkpoint(source, "c", target, "c")


def test_a_source_that_is_deleted_meanwhile_is_not_found(source, target) -> None:
    """Retention of a living run may be faster than a copy: that is no damage."""
    build(source, "c", tensors=BIG)
    with pytest.raises(CheckpointNotFoundError, match="was deleted while"):
        copy_checkpoint(source, "c", target, "c", progress=lambda _: source.delete_tree("c"), num_threads=1)
    assert not target.exists("c/manifest.json")


def test_what_is_no_checkpoint_is_refused(source, target) -> None:
    """Nothing, and the remains of a save, cannot be copied."""
    with pytest.raises(CheckpointNotFoundError):
        copy_checkpoint(source, "none", target, "c")
    build(source, "c", finish=False)
    with pytest.raises(IncompleteCheckpointError):
        copy_checkpoint(source, "c", target, "c")
    assert not list(target.list())


def test_another_checkpoint_is_replaced_only_on_demand(source, target) -> None:
    """Then the old one stays whole until the new one commits, and its files and sidecars go afterwards."""
    build(source, "old", step=1)
    build(source, "new", step=2)
    write_sidecar(source, "old", Sidecar(pinned=True))
    copy_checkpoint(source, "old", target, "c")
    with pytest.raises(CheckpointExistsError):
        copy_checkpoint(source, "new", target, "c")
    states = []
    copy_checkpoint(
        source, "new", target, "c", overwrite=True, progress=lambda _: states.append(Checkpoint.at(target, "c").step)
    )
    assert set(states) == {1}
    assert content(target, "c") == content(source, "new")


def test_of_two_that_replace_one_checkpoint_at_once_one_wins_whole(source, target, monkeypatch) -> None:
    """What was committed there after a copy had looked stays, with all of its files; the copy says so."""
    for step, name in enumerate(("old", "new", "other"), 1):
        build(source, name, step=step)
    copy_checkpoint(source, "old", target, "c")
    puts = Recorded(monkeypatch, target, "put")

    def another(path: str) -> None:
        if path.endswith("manifest.json"):
            puts.before = lambda path: None
            copy_checkpoint(source, "other", target, "c", overwrite=True)

    puts.before = another
    with pytest.raises(CheckpointExistsError, match="meanwhile"):
        copy_checkpoint(source, "new", target, "c", overwrite=True)
    assert Checkpoint.at(target, "c").step == 3
    assert Checkpoint.at(target, "c").verify(deep=True).ok


def test_a_checkpoint_whose_files_would_change_goes_first(source, target, monkeypatch) -> None:
    """A user's files keep their names: the old manifest must not vouch for new bytes, so it is removed before."""
    small(source, "old", user={"weights.bin": b"1"})
    small(source, "new", user={"weights.bin": b"2"})
    copy_checkpoint(source, "old", target, "c")
    created = Recorded(monkeypatch, target, "create")
    manifests = []
    created.before = lambda path: manifests.append(target.exists("c/manifest.json"))
    copy_checkpoint(source, "new", target, "c", overwrite=True)
    assert not any(manifests)
    assert content(target, "c") == content(source, "new")


def test_unchanged_files_are_repeated_at_the_target(source, target) -> None:
    """With a previous checkpoint there, big files of the same digest are copied on that side; a user's never are.

    On a disk, where they would share their bytes from then on, only if they do at the source.
    """
    frozen = b"7" * 4_000_000
    one = build(source, "a", tensors=(Shape("model/w", (1_000_000,), frozen),), user={"u.bin": b"x" * 2_000_000})
    same = (Shape("model/w", (1_000_000,), frozen),)
    build(source, "b", tensors=same, user={"u.bin": b"x" * 2_000_000}, reused=True)
    build(source, "d", tensors=same)
    copy_checkpoint(source, "a", target, "a")
    assert (copy_checkpoint(source, "d", target, "d", previous="a").bytes_copied == 0) == (
        target.local_root is not None
    )
    found = copy_checkpoint(source, "b", target, "b", previous="a")
    assert found.bytes_copied == sum(entry.size for entry in one.files if entry.role == "tensors")
    assert found.total_bytes == one.total_bytes
    assert content(target, "b") == content(source, "b")
    if target.local_root is not None:
        user = [(target.local_root / name / "u.bin").stat().st_nlink for name in "ab"]
        assert user == [1, 1]
    target.delete_tree("b")
    assert copy_checkpoint(source, "b", target, "b", previous="gone").bytes_copied == 0


def test_a_previous_one_that_goes_away_costs_only_time(source, target, monkeypatch) -> None:
    """Retention at the target may remove it in the middle of the copy."""
    build(source, "a", tensors=BIG)
    build(source, "b", tensors=BIG)
    copy_checkpoint(source, "a", target, "a")
    if target.local_root is not None:
        pytest.skip("nothing is shared on a disk that was not at the source")
    copies = Recorded(monkeypatch, target, "copy")
    copies.before = lambda path: target.delete_tree("a")
    assert copy_checkpoint(source, "b", target, "b", previous="a").bytes_copied == 0
    assert Checkpoint.at(target, "b").verify().ok


def test_late_metrics_and_pins_of_both_sides_are_kept(source, target) -> None:
    """Copying again brings what was said since; what was said at the target stays."""
    small(source, "c", step=1)
    copy_checkpoint(source, "c", target, "c")
    write_sidecar(target, "c", Sidecar(metrics={"theirs": 1, "both": 1}, pinned=True))
    write_sidecar(source, "c", Sidecar(metrics={"ours": 2, "both": 2}))
    Checkpoint.at(source, "c").set_metadata({"note": "late"})
    copy_checkpoint(source, "c", target, "c")
    assert read_sidecar(target, "c") == Sidecar(metrics={"theirs": 1, "both": 2, "ours": 2}, pinned=True)
    assert Checkpoint.at(target, "c").get_metadata() == {"note": "late"}
    assert Checkpoint.at(target, "c").verify().ok


def test_a_kill_while_a_checkpoint_is_replaced_mixes_nothing(source, tmp_path) -> None:
    """Whatever change at the target is the last: no checkpoint has late metrics or a pin of the other one."""
    small(source, "old", step=1)
    small(source, "new", step=2)
    for name in ("old", "new"):
        write_sidecar(source, name, Sidecar(metrics={"of": name}, pinned=True))
        Checkpoint.at(source, name).set_metadata({"of": name})
    seen = set()
    for number in range(100):
        target = MemoryStorage(f"t{number}-{tmp_path.name}")
        copy_checkpoint(source, "old", target, "c")
        changes = iter(range(number))

        def change(path: str, changes: Iterator[int] = changes) -> None:
            if next(changes, None) is None:
                raise StorageError("killed")

        with pytest.MonkeyPatch.context() as patch:
            Recorded(patch, target, "put", "create", "delete", "copy").before = change
            with contextlib.suppress(StorageError):
                copy_checkpoint(source, "new", target, "c", overwrite=True)
        here = Checkpoint.at(target, "c")
        of = {1: "old", 2: "new"}[here.manifest.step]
        said = read_sidecar(target, "c"), here.get_metadata()
        assert said[0] in (Sidecar(), Sidecar(metrics={"of": of}, pinned=True)), number
        assert said[1] in ({}, {"of": of}), number
        seen.add(of)
        copy_checkpoint(source, "new", target, "c", overwrite=True)
        assert (read_sidecar(target, "c").metrics, here.get_metadata()) == ({"of": "new"}, {"of": "new"})
        if next(changes, None) is not None:
            break
    assert seen == {"old", "new"}
    assert number > 5


def test_a_file_that_is_alone_gets_all_windows() -> None:
    """The windows are nobody's own: files under way have equal shares, the last one reads ahead into all of them."""

    class Asked(FileReader):
        def __init__(self, size: int) -> None:
            self.size, self.offsets = size, []

        def read_into(self, offset: int, view: memoryview) -> None:
            self.offsets.append(offset)

        def close(self) -> None:
            pass

    small, big = Asked(1000), Asked(20 * WINDOW)
    with ThreadPoolExecutor(4) as readers:
        windows = Windows(readers.submit, 4)
        with contextlib.closing(windows.read(small)) as first, contextlib.closing(windows.read(big)) as views:
            next(first)
            next(views)
            assert next(first, None) is None
            next(views)
    assert sorted(big.offsets) == [number * WINDOW for number in range(5)]


def test_a_foreign_directory_is_copied_as_it_is(source, target) -> None:
    """No manifest, no digests: all files, subdirectories included, each time."""
    source.put("c/a/b.bin", b"1")
    source.put("c/d.bin", b"")
    assert copy_checkpoint(source, "c", target, "c") == Copied(bytes_sent=1, files=2, is_foreign=True)
    assert content(target, "c") == {"a/b.bin": b"1", "d.bin": b""}
    small(source, "ours")
    copy_checkpoint(source, "ours", target, "x")
    with pytest.raises(CheckpointExistsError):
        copy_checkpoint(source, "c", target, "x")
    copy_checkpoint(source, "c", target, "x", overwrite=True)
    assert Checkpoint.at(target, "x").verify().state == "foreign"


def test_files_of_others_are_not_replaced_without_being_asked(source, target) -> None:
    """Foreign files of the same names: nothing is changed, and the error names them; what is the same is left."""
    source.put("c/model.pt", b"worse")
    source.put("c/extra/log.txt", b"same")
    target.put("c/model.pt", b"the best")
    target.put("c/extra/log.txt", b"same")
    before = content(target, "c")
    with pytest.raises(CheckpointExistsError, match=r"nothing was changed: model\.pt\. .*overwrite"):
        copy_checkpoint(source, "c", target, "c")
    assert content(target, "c") == before
    assert copy_checkpoint(source, "c", target, "c", overwrite=True).bytes_sent == 9
    assert content(target, "c") == content(source, "c")
    assert copy_checkpoint(source, "c", target, "c") == Copied(bytes_there=9, files=2, is_foreign=True)


def test_a_checkpoint_of_ours_does_not_go_over_files_of_others(source, target) -> None:
    """Names of its own files are new anywhere; those that a user gave, and what was said of a directory, are not."""
    small(source, "c", user={"model.pt": b"worse"}, step=1)
    target.put("c/model.pt", b"the best")
    with pytest.raises(CheckpointExistsError, match=r"model\.pt"):
        copy_checkpoint(source, "c", target, "c")
    assert content(target, "c") == {"model.pt": b"the best"}
    target.put("d/weights.bin", b"1")
    Checkpoint.at(target, "d").set_metadata({"mine": 1})
    with pytest.raises(CheckpointExistsError, match=r"\.metadata\.json"):
        copy_checkpoint(source, "c", target, "d")
    assert Checkpoint.at(target, "d").get_metadata() == {"mine": 1}
    target.put("e/model.pt", b"wo")  # of a copy that was killed
    copy_checkpoint(source, "c", target, "e")
    assert Checkpoint.at(target, "e").verify().ok


def test_notes_that_were_put_into_a_checkpoint_by_hand_are_each_sides_own(source, target) -> None:
    """A copy brings them; what was written into them there since stays, and is named."""
    small(source, "c", step=1)
    source.put("c/notes.txt", b"by hand")
    copy_checkpoint(source, "c", target, "c")
    assert copy_checkpoint(source, "c", target, "c").bytes_sent == 0
    target.put("c/notes.txt", b"three weeks of notes")
    with pytest.raises(CheckpointExistsError, match=r"notes\.txt"):
        copy_checkpoint(source, "c", target, "c")
    assert target.read("c/notes.txt") == b"three weeks of notes"


def test_a_copy_that_was_planned_goes_over_what_an_earlier_one_has_left(source, target) -> None:
    """Uploads say first which names will be theirs: a later save of the same step may find other bytes there."""
    made = small(source, "c", user={"model.pt": b"later"}, step=1)
    target.put("c/model.pt", b"early")
    with planned(target, "c", made.files):
        copy_checkpoint(source, "c", target, "c")
    assert Checkpoint.at(target, "c").verify().ok


def test_a_file_that_was_changed_since_it_was_committed_is_seen_on_a_disk(source, tmp_path) -> None:
    """Of the same size: brought again where that is asked for, and an error where it is not."""
    target = LocalStorage(tmp_path)
    made = build(source, "c", tensors=BIG)
    copy_checkpoint(source, "c", target, "c")
    victim = tmp_path / "c" / made.files[0].path
    whole = victim.read_bytes()
    with victim.open("r+b") as file:
        file.write(b"tuned")
    with pytest.raises(CheckpointExistsError, match=made.files[0].path):
        copy_checkpoint(source, "c", target, "c")
    assert victim.read_bytes() != whole
    assert copy_checkpoint(source, "c", target, "c", overwrite=True).bytes_sent == made.files[0].size
    assert victim.read_bytes() == whole


def test_a_file_that_cannot_be_brought_again_stays_as_it_was(source, tmp_path) -> None:
    """A write that fails in the middle: the user's only file is still there."""
    target = LocalStorage(tmp_path)
    source.put("c/model.pt", bytes(3 * WINDOW))
    target.put("c/model.pt", b"mine")
    asked = itertools.count()
    with pytest.raises(TransferStopped):
        copy_checkpoint(source, "c", target, "c", overwrite=True, stop=lambda: next(asked) >= 3)
    assert content(target, "c") == {"model.pt": b"mine"}


def test_an_error_of_the_target_ends_all_threads_and_is_the_one_raised(source, target, monkeypatch) -> None:
    """One file that cannot be written stops the others, and its error comes out, not theirs."""
    build(source, "c", tensors=BIG)
    created = Recorded(monkeypatch, target, "create")

    def fail(path: str) -> None:
        if "ema" in path:
            raise StorageError("no more")

    created.before = fail
    before = set(threading.enumerate())
    with pytest.raises(StorageError, match="no more"):
        copy_checkpoint(source, "c", target, "c")
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith(("holdfast-send", "holdfast-read"))]


def test_buffers_are_bounded(source, target, monkeypatch) -> None:
    """However many threads are asked for, all windows of a copy together are 128 MiB, 32 MiB where a client uploads."""
    build(source, "c", tensors=tuple(Shape(f"m{number}/w", (2_200_000,)) for number in range(10)))
    made = []
    real = sending_module.mmap.mmap
    monkeypatch.setattr(sending_module.mmap, "mmap", lambda *args: made.append(args[1]) or real(*args))
    copy_checkpoint(source, "c", target, "c", num_threads=100)
    assert 0 < sum(made) <= num_windows(source, target) * WINDOW
    assert num_windows(source, target) * WINDOW == (32 << 20 if target.local_root is None else 128 << 20)


def test_links_out_of_the_checkpoint_are_not_followed(tmp_path, target) -> None:
    """A hostile checkpoint cannot make a copy send other files of this machine."""
    source = LocalStorage(tmp_path / "s")
    small(source, "c")
    (tmp_path / "secret").write_text("key")
    (tmp_path / "s" / "c" / ".metadata.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CorruptCheckpointError, match="symlink"):
        copy_checkpoint(source, "c", target, "c")


@pytest.mark.parametrize("name", ["tokenizer", ".tmp-parts", ".tmp-notes.txt"])
def test_what_a_listing_leaves_out_of_a_foreign_directory_is_said(tmp_path, target, name) -> None:
    """A linked sub-directory, and names that no storage has: the copy would lack them, so there is none."""
    source, mine = LocalStorage(tmp_path / "s"), tmp_path / "s" / "mine"
    (tmp_path / "s" / "shared").mkdir(parents=True)
    (tmp_path / "s" / "shared" / "vocab.json").write_text("{}")
    (mine / "sub").mkdir(parents=True)
    (mine / "model.pt").write_text("m")
    if name == "tokenizer":
        (mine / "sub" / name).symlink_to("../../shared")
    elif name == ".tmp-parts":
        (mine / "sub" / name).mkdir()
    else:
        (mine / "sub" / name).write_text("1")
    with pytest.raises(CheckpointError, match=name):
        copy_checkpoint(source, "mine", target, "c")
    with pytest.raises(CheckpointError, match=name):
        Checkpoint(mine).to_directory(tmp_path / "out")
    (mine / "sub" / ".tmp-1-0123456789ab").write_text("of a writer that died")
    (mine / "sub" / ".tmp-lock").write_text("")
    (mine / "sub" / name).rename(tmp_path / "away")
    assert copy_checkpoint(source, "mine", target, "c").files == 1


def as_entry(path: str, data: bytes) -> FileEntry:
    return FileEntry(path=path, size=len(data), digest=bytes_digest(data))


def test_a_file_of_one_name_in_all_saves_is_sent_whatever_lies_there(source, target) -> None:
    """A dead save has left one of the same size: a name with a save's id would be believed at a store, this one not."""
    new = {"config.json": b"{1}", "state-0a1b2c3d-1.json": b"new"}
    for path, data in new.items():
        source.put(f"c/{path}", data)
    target.put("c/config.json", b"{0}")
    brought = send_entries(source, target, "c", [as_entry(path, data) for path, data in new.items()])
    assert brought == dict.fromkeys(new, "sent")
    assert content(target, "c") == new
    path = "state-0a1b2c3d-1.json"
    assert send_entries(source, target, "c", [as_entry(path, b"new")]) == {path: "there"}


def test_files_of_one_name_in_all_saves_are_planned_until_the_commit(target) -> None:
    """A copy that dies leaves a list of them, by which the next start or whoever gives it up removes them."""
    entries = [as_entry("config.json", b"{1}"), as_entry("state-0a1b2c3d-1.json", b"new")]

    def bring(*, dies: bool) -> None:
        with planned(target, "c", entries):
            for entry in entries:
                target.put(f"c/{entry.path}", b"123")
            if dies:
                raise TransferStopped

    for sweeps in (lambda: sweep_names(target, ["0a1b2c3d"], incomplete=["c"]), lambda: sweep_given_up(target, "c")):
        with pytest.raises(TransferStopped):
            bring(dies=True)
        sweeps()
        assert content(target, "c") == {}
    bring(dies=False)
    assert set(content(target, "c")) == {entry.path for entry in entries}
    with planned(target, "d", entries[1:]):
        assert content(target, "d") == {}


@pytest.mark.parametrize("how", ["stopped", "refused"])
def test_a_file_that_is_replaced_stays_until_its_copy_is_whole(source, target, how) -> None:
    """Of one that is stopped on its way, or refused at its end, the target shows nothing: the older file is there."""
    source.put("new", bytes(3 * WINDOW))
    target.put("d/model.pt", b"old")
    asked = itertools.count()

    def refuse() -> None:
        raise KeyError("the name is another trainer's by now")

    end = {"stop": lambda: next(asked) >= 3} if how == "stopped" else {"last": refuse}
    with pytest.raises(TransferStopped if how == "stopped" else KeyError):
        copy_file(source, "new", target, "d/model.pt", **end)
    assert {info.path: target.read(info.path) for info in target.list()} == {"d/model.pt": b"old"}
    copy_file(source, "new", target, "d/model.pt")
    assert target.read("d/model.pt") == bytes(3 * WINDOW)
