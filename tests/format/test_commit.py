"""The manifest is the commit: what is there before, between and after."""

from __future__ import annotations

import dataclasses
import json
import os
import threading

import pytest
from actors_kit import at_every_line

from holdfast.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    HoldfastError,
    IncompleteCheckpointError,
)
from holdfast.format import commit as commit_module
from holdfast.format.commit import PartSummary, commit, look_before, read_manifest, remove, sweep
from holdfast.format.digest import bytes_digest
from holdfast.format.manifest import FileEntry
from holdfast.format.names import save_id_of, start_id_of
from holdfast.storage import LocalStorage, MemoryStorage, StorageTraits

_names = iter(range(10**6))


class Far(MemoryStorage):
    """Memory that takes requests side by side, as a store does."""

    traits = StorageTraits(num_parallel=16, deletes_at_once=1000)


@pytest.fixture(params=["memory", "far", "local"])
def storage(request, tmp_path):
    kinds = {"memory": MemoryStorage, "far": Far}
    return kinds[request.param](f"commit-{next(_names)}") if request.param in kinds else LocalStorage(tmp_path)


def part(storage, directory, save_id, writer=0, **user):
    """Write the files of one save and describe them."""
    contents = {f"model-{writer:05d}-{save_id}.safetensors": b"t" * 100, **user}
    if writer == 0:
        contents[f"state-{save_id}.json"] = b"{}"
    for path, data in contents.items():
        storage.put(f"{directory}/{path}" if directory else path, data)
    entries = [
        FileEntry(
            path=path,
            size=len(data),
            digest=bytes_digest(data),
            writer=writer,
            role="user" if path in user else "state",
        )
        for path, data in contents.items()
    ]
    return PartSummary(writer=writer, files=tuple(entries))


def paths(storage):
    return sorted(info.path for info in storage.list())


@pytest.mark.parametrize("directory", ["step_1", "a/b", ""])
def test_committed_means_readable(storage, directory):
    """Before: incomplete. After: a manifest with totals, the files, and the fields that were given."""
    one, two = part(storage, directory, "deadbeef-1"), part(storage, directory, "deadbeef-1", writer=1)
    with pytest.raises(IncompleteCheckpointError, match=r"^\S*[^/] has files"):
        read_manifest(storage, directory)
    two = PartSummary.from_json(json.loads(json.dumps(two.to_json())))
    done = commit(storage, directory, {"step": 7, "metrics": {"a": 1.5}, "odd": 1}, [two, one])
    back = read_manifest(storage, directory, check_sizes=True)
    assert back == done
    assert (back.step, back.metrics, back.extra, back.writers) == (7, {"a": 1.5}, {"odd": 1}, (0, 1))
    assert back.total_bytes == 202
    assert back.created


def test_nothing_there_is_not_found(storage):
    """Different from incomplete."""
    with pytest.raises(CheckpointNotFoundError):
        read_manifest(storage, "step_1")


def test_missing_and_doubled_parts_do_not_commit(storage):
    """The error names the ranks; no manifest appears."""
    one = part(storage, "s", "deadbeef-1")
    with pytest.raises(CheckpointError, match=r"those of \[1, 3\] are missing"):
        commit(storage, "s", {"writers": [0, 1, 3]}, [one])
    again = part(storage, "s", "deadbeef-2")
    for parts in ([], [one, one], [one, again], [one, PartSummary(writer=1, files=one.files)]):
        with pytest.raises(CheckpointError):
            commit(storage, "s", {}, parts)
    assert not storage.exists("s/manifest.json")


def test_a_committed_checkpoint_is_not_replaced_without_overwrite(storage):
    """CheckpointExistsError, and the first one stays whole."""
    first = commit(storage, "s", {"step": 1}, [part(storage, "s", "deadbeef-1")])
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        commit(storage, "s", {"step": 2}, [part(storage, "s", "deadbeef-2")])
    assert read_manifest(storage, "s", check_sizes=True) == first


def test_a_store_that_refuses_its_own_retry_is_forgiven():
    """A put that succeeded and was sent again says "exists"; the manifest there is ours, so the commit stands."""

    class Retrying(MemoryStorage):
        def put(self, path, data, *, if_absent=False, if_match=None):
            super().put(path, data, if_absent=if_absent, if_match=if_match)
            if path.endswith("manifest.json"):
                return super().put(path, data, if_absent=if_absent, if_match=if_match)
            return None

    storage = Retrying(f"commit-{next(_names)}")
    assert commit(storage, "s", {"step": 1}, [part(storage, "s", "deadbeef-1")]) == read_manifest(storage, "s")


def test_a_manifest_that_counts_for_nothing_is_replaced(storage):
    """One that an owner which was taken over has left gives way; a sound one does not, and nothing else changes."""
    commit(storage, "s", {"step": 1}, [part(storage, "s", "deadbeef-1")])
    new = part(storage, "s", "deadbeef-2")
    with pytest.raises(CheckpointExistsError):
        commit(storage, "s", {"step": 2}, [new], void=lambda manifest: manifest.step != 1)
    assert read_manifest(storage, "s").step == 1
    commit(storage, "s", {"step": 2}, [new], void=lambda manifest: manifest.step == 1)
    assert read_manifest(storage, "s", check_sizes=True).step == 2


def test_overwriting_nothing(storage):
    """As a first save; if another process has saved there meanwhile, its checkpoint stays."""
    before = look_before(storage, "s")
    commit(storage, "s", {"step": 1}, [part(storage, "s", "deadbeef-1")], overwrite=before)
    with pytest.raises(CheckpointError, match="at the same time"):
        commit(storage, "s", {"step": 2}, [part(storage, "s", "deadbeef-2")], overwrite=before)
    assert read_manifest(storage, "s", check_sizes=True).step == 1


def test_a_file_whose_name_stays_is_not_removed(storage):
    """Files of the user's keep their names: of an old and a new one of the same name there is one, the new one."""
    commit(storage, "s", {"step": 1}, [part(storage, "s", "deadbeef-1", **{"config.json": b"{}"})])
    before = look_before(storage, "s")
    commit(storage, "s", {"step": 2}, [part(storage, "s", "deadbeef-2", **{"config.json": b"[]"})], overwrite=before)
    assert read_manifest(storage, "s", check_sizes=True).step == 2
    assert storage.read("s/config.json") == b"[]"


class Unconditional(MemoryStorage):
    """A store without etags and conditional writes, as some that fsspec opens; ``log`` says who used the manifest."""

    traits = StorageTraits(conditional=False)

    def __init__(self, name):
        super().__init__(name)
        self.log = []

    def put(self, path, data, *, if_absent=False, if_match=None):
        if path.endswith("manifest.json"):
            self.log.append(json.loads(bytes(data))["step"])
        super().put(path, data)

    def stat(self, path):
        return dataclasses.replace(super().stat(path), etag=None)

    def open(self, path):
        self.log += ["look"] * path.endswith("manifest.json")
        return super().open(path)


def two_overwrites(storage):
    """Prepare two overwrites of one checkpoint; the second finds files of the first, which may be remains."""
    commit(storage, "s", {"step": 0}, [part(storage, "s", "00000000-1")])
    first = look_before(storage, "s"), [part(storage, "s", "aaaaaaaa-1")]
    second = look_before(storage, "s"), [part(storage, "s", "bbbbbbbb-1")]
    return storage, first, second


def overwrite(storage, step, prepared):
    """Return whether this overwrite was acknowledged."""
    try:
        commit(storage, "s", {"step": step}, prepared[1], overwrite=prepared[0])
    except CheckpointError:
        return False
    return True


@pytest.mark.parametrize("slow", [1, 2])
def test_an_overwrite_between_any_two_lines_of_another(slow):
    """What is there afterwards was acknowledged, and is whole."""
    acknowledged = set()
    for (storage, *_), done in at_every_line(
        (commit_module,),
        lambda: two_overwrites(MemoryStorage(f"commit-{next(_names)}")),
        lambda made: overwrite(made[0], slow, made[slow]),
        lambda made: overwrite(made[0], 3 - slow, made[3 - slow]),
    ):
        step = read_manifest(storage, "s", check_sizes=True).step
        assert step == slow or not done
        acknowledged.add(step)
    assert acknowledged == {1, 2}


def test_who_was_overwritten_at_a_store_without_conditions_cleans_nothing_up():
    """The second writes its manifest, then the first does: the files of the first are no remains any more."""
    overtaken = 0
    for (storage, *_), _ in at_every_line(
        (commit_module,),
        lambda: two_overwrites(Unconditional(f"commit-{next(_names)}")),
        lambda made: overwrite(made[0], 2, made[2]),
        lambda made: overwrite(made[0], 1, made[1]),
    ):
        ours, theirs = storage.log.index(2), storage.log.index(1)
        if ours < theirs and "look" not in storage.log[ours:theirs]:  # what comes after that look, nobody can see
            overtaken += 1
            assert read_manifest(storage, "s", check_sizes=True).step == 1
    assert overtaken


def test_overwriting_removes_the_old_files_and_nothing_of_others(storage):
    """Old files, remains and sidecars go; a file that somebody put there stays."""
    commit(storage, "s", {"step": 1}, [part(storage, "s", "deadbeef-1", **{"sub/user.txt": b"x"})])
    storage.put("s/.metrics.json", b"{}")
    storage.put("s/notes.txt", b"mine")
    storage.put("s/model-00000-0badf00d-3.safetensors", b"remains of a dead life")
    before = look_before(storage, "s")
    new = part(storage, "s", "deadbeef-2")
    commit(storage, "s", {"step": 2}, [new], overwrite=before)
    assert paths(storage) == sorted(["s/manifest.json", "s/notes.txt", *(f"s/{entry.path}" for entry in new.files)])
    assert read_manifest(storage, "s").step == 2


def test_two_overwrites_at_once_never_commit_what_the_other_removed(storage):
    """Every rank overwrites one name: the one whose files were taken for remains fails, the other one is whole."""
    commit(storage, "s", {"step": 1}, [part(storage, "s", "deadbeef-1")])
    before = look_before(storage, "s")
    slow, fast = part(storage, "s", "aaaaaaaa-1"), part(storage, "s", "bbbbbbbb-1")
    commit(storage, "s", {"step": 3}, [fast], overwrite=before)
    with pytest.raises(CheckpointError, match="another process has overwritten"):
        commit(storage, "s", {"step": 2}, [slow], overwrite=before)
    assert read_manifest(storage, "s", check_sizes=True).step == 3


def test_names_taken_by_incomplete_or_damaged_ones_can_be_used(storage):
    """Remains are no obstacle; a damaged manifest gives way to overwrite."""
    part(storage, "s", "0badf00d-1")
    commit(storage, "s", {"step": 1}, [part(storage, "s", "deadbeef-1")])
    storage.put("s/manifest.json", b"damaged")
    with pytest.raises(CorruptCheckpointError):
        read_manifest(storage, "s")
    before = look_before(storage, "s")
    new = part(storage, "s", "deadbeef-2")
    commit(storage, "s", {"step": 2}, [new], overwrite=before)
    assert paths(storage) == sorted(["s/manifest.json", *(f"s/{entry.path}" for entry in new.files)])


def test_sizes_are_compared_on_request(storage):
    """A cut or missing file is named."""
    done = commit(storage, "s", {}, [part(storage, "s", "deadbeef-1")])
    storage.put(f"s/{done.files[0].path}", b"short")
    with pytest.raises(CorruptCheckpointError, match="has 5 bytes") as caught:
        read_manifest(storage, "s", check_sizes=True)
    assert caught.value.file == done.files[0].path
    storage.delete(f"s/{done.files[0].path}")
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        read_manifest(storage, "s", check_sizes=True)


class Dying:
    """Forwards to a storage and fails before the n-th change, as a killed process would."""

    def __init__(self, inner, changes):
        self.inner, self.left = inner, changes

    def delete_many(self, paths):
        for path in sorted(paths, key=hash):  # in no particular order
            self.delete(path)

    def __getattr__(self, name):
        value = getattr(self.inner, name)
        if name not in ("put", "delete"):
            return value

        def change(*args, **kwargs):
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            return value(*args, **kwargs)

        return change


def test_a_removal_killed_anywhere_is_whole_or_swept_clean(storage):
    """At every step: either the checkpoint is complete, or sweep leaves nothing but the user's own file."""
    changes = 0
    while True:
        commit(storage, "s", {}, [part(storage, "s", "deadbeef-1", **{"model.pt": b"x", "d/e.txt": b"y"})])
        storage.put("s/.metrics.json", b"{}")
        storage.put("s/notes.txt", b"mine")
        try:
            remove(Dying(storage, changes), "s")
            finished = True
        except KeyboardInterrupt:
            finished = False
        try:
            read_manifest(storage, "s", check_sizes=True)
            remove(storage, "s")
        except IncompleteCheckpointError:
            sweep(storage, "s")
        assert paths(storage) == ["s/notes.txt"]
        if finished:
            break
        changes += 1
    assert changes >= 7


def test_an_overwrite_killed_anywhere_leaves_the_old_or_the_new(storage):
    """At every step one of them is whole, and one more sweep leaves no remains."""
    changes = 0
    while True:
        storage.delete_tree("s")
        commit(storage, "s", {"step": 1}, [part(storage, "s", "deadbeef-1")])
        before = look_before(storage, "s")
        new = part(storage, "s", "feedbeef-1")
        try:
            commit(Dying(storage, changes), "s", {"step": 2}, [new], overwrite=before)
            finished = True
        except KeyboardInterrupt:
            finished = False
        manifest = read_manifest(storage, "s", check_sizes=True)
        assert manifest.step == (1 if changes == 0 else 2)
        sweep(storage, "s")
        assert paths(storage) == sorted(["s/manifest.json", *(f"s/{entry.path}" for entry in manifest.files)])
        if finished:
            break
        changes += 1
    assert changes >= 3


def test_sweep_keeps_the_present_life_the_committed_and_the_foreign(storage):
    """Only remains of other lives go; under a damaged manifest nothing does."""
    live, dead = part(storage, "s", "deadbeef-1"), part(storage, "s", "0badf00d-1")
    storage.put("s/my-model-1.json", b"foreign")
    assert sweep(storage, "s", "deadbeef") == sorted(entry.path for entry in dead.files)
    commit(storage, "s", {}, [live])
    part(storage, "s", "0badf00d-2")
    assert len(sweep(storage, "s", None)) == 2
    read_manifest(storage, "s", check_sizes=True)
    assert storage.exists("s/my-model-1.json")
    part(storage, "s", "0badf00d-3")
    storage.put("s/manifest.json", b"damaged")
    assert sweep(storage, "s") == []
    assert sweep(storage, "nowhere") == []


def test_names_of_files_tell_who_wrote_them():
    """Every name a save gives is recognised; names of users are not."""
    for path in (
        "state-deadbeef-1.json",
        "model-00000-deadbeef-1.safetensors",
        "a.b-00012.part03-deadbeef-1.safetensors",
        "index-00000-deadbeef-1.json",
        "digests-00000-deadbeef-1.bin",
        "rank-00007-deadbeef-1.json",
    ):
        assert (start_id_of(path), save_id_of(path)) == ("deadbeef", "deadbeef-1")
    for path in (
        "manifest.json",
        "model.pt",
        "my-model-1.json",
        "state-1.json",
        "x/state-deadbeef-1.json",
        "a-b-c.bin",
    ):
        assert start_id_of(path) is None


def test_symlinks_in_a_checkpoint_are_refused(tmp_path):
    """A link to a file, or through a directory, wherever it leads."""
    storage = LocalStorage(tmp_path / "root")
    (tmp_path / "secret").write_bytes(b"t" * 100)
    done = commit(storage, "s", {}, [part(storage, "s", "deadbeef-1", **{"d/f": b"1", "g": b"1"})])
    inside = tmp_path / "root" / "s"
    os.unlink(inside / "g")
    os.symlink("d/f", inside / "g")
    with pytest.raises(CorruptCheckpointError, match=r"/g is a symlink"):
        read_manifest(storage, "s")
    os.unlink(inside / "g")
    (inside / "g").write_bytes(b"1")
    assert read_manifest(storage, "s") == done
    victim = inside / done.files[0].path
    os.unlink(victim)
    os.symlink(tmp_path / "secret", victim)
    with pytest.raises(CorruptCheckpointError, match="is a symlink"):
        read_manifest(storage, "s")
    os.unlink(victim)
    victim.write_bytes(b"t" * 100)
    read_manifest(storage, "s")
    os.rename(inside / "d", tmp_path / "d")
    os.symlink(tmp_path / "d", inside / "d")
    with pytest.raises(CorruptCheckpointError, match="d/f is a symlink"):
        read_manifest(storage, "s")


def test_a_manifest_too_large_is_not_read(tmp_path):
    """The bound is checked before memory is taken."""
    storage = LocalStorage(tmp_path)
    with open(tmp_path / "manifest.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptCheckpointError, match="refused"):
        read_manifest(storage, "")


def test_two_writers_of_one_name_make_one_checkpoint(storage):
    """With if-absent exactly one commit wins, and what is there is the winner's."""
    parts = [part(storage, "s", f"deadbee{number}-1") for number in range(4)]
    results = [None] * 4
    barrier = threading.Barrier(4)

    def work(number):
        barrier.wait()
        try:
            results[number] = commit(storage, "s", {"step": number}, [parts[number]])
        except HoldfastError as error:
            results[number] = error

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [one for one in results if not isinstance(one, Exception)]
    assert len(won) == 1
    assert all(isinstance(one, CheckpointExistsError) for one in results if isinstance(one, Exception))
    assert read_manifest(storage, "s", check_sizes=True) == won[0]
