"""The local storage keeps its promises through every modelled power cut, and the model notices when one is broken."""

import os

import pytest

from holdfast.errors import ConfigError
from holdfast.storage import LocalStorage
from holdfast.testing import FaultyOps, FaultyStorage, power_cut_states, snapshot

DATA = bytes(range(256)) * 40
PAYLOAD = DATA[:9000]


def save(root, ops):
    """Do what a save does: big files, a nested one, the manifest last; then replace, link and delete."""
    storage = FaultyStorage(os.path.join(root, "runs/gpt"), ops=ops)
    for name in ("one/data", "one/sub/more"):
        with storage.create(name, len(PAYLOAD)) as writer:
            writer.write(memoryview(DATA[:8192]))
            writer.write(memoryview(DATA[8192:9000]))
    storage.put("one/manifest", b"one", if_absent=True)
    ops.mark("one")
    storage.put("run.json", b"1")
    ops.mark("index 1")
    storage.put("run.json", b"22")
    ops.mark("index 2")
    storage.copy("one/data", "two/data")
    storage.put("two/manifest", b"two")
    ops.mark("two")
    storage.delete("one/manifest")
    storage.delete_tree("one")
    ops.mark("one deleted")


def broken_promises(state):
    """Return what a reader of the state would complain about."""
    files = {path.removeprefix("runs/gpt/"): data for path, data in state.files.items()}
    bad = []
    for name, needed in (("one", ("one/data", "one/sub/more")), ("two", ("two/data",))):
        manifest = files.get(f"{name}/manifest")
        if manifest is not None and (manifest != name.encode() or any(files.get(path) != PAYLOAD for path in needed)):
            bad.append(f"{name}: committed but damaged")
        if name in state.marks and manifest is None and not (name == "one" and "two" in state.marks):
            bad.append(f"{name}: lost")
    if "one deleted" in state.marks and "one/manifest" in files:
        bad.append("one: came back")
    allowed = {b"22"} if "index 2" in state.marks else {b"1", b"22"} if "index 1" in state.marks else {None, b"1"}
    # Between two marks the next content may be there already.
    if files.get("run.json") not in allowed | (
        {b"1"} if "one" in state.marks and "index 1" not in state.marks else set()
    ):
        bad.append(f"run.json: {files.get('run.json')!r}")
    return bad


def states(tmp_path, ops, **options):
    before = snapshot(tmp_path)
    save(str(tmp_path), ops)
    return list(power_cut_states(ops.log, before, **options))


def test_every_state_keeps_every_promise(tmp_path):
    """After any power cut a manifest has all its bytes, nothing promised is lost, nothing deleted comes back."""
    found = states(tmp_path, FaultyOps(record=True))
    assert len(found) > 40
    assert [bad for state in found for bad in broken_promises(state)] == []
    assert {state.complete for state in found} == {False, True}


class Forgetful(FaultyOps):
    """Leaves out one kind of durability."""

    def __init__(self, what):
        super().__init__(record=True)
        self._what = what

    def fsync(self, fd):
        if self._what != "fsync":
            super().fsync(fd)

    def fsync_dir(self, path):
        if self._what != "fsync_dir" and not (self._what == "parents" and path.endswith("runs")):
            super().fsync_dir(path)


@pytest.mark.parametrize("what", ["fsync", "fsync_dir", "parents"])
def test_the_model_notices(tmp_path, what):
    """Without fsync of files, of directories, or of the parent of a new directory alone, a promise breaks."""
    assert any(broken_promises(state) for state in states(tmp_path, Forgetful(what)))


def test_unsynced_bytes_take_every_form(tmp_path):
    """Bytes before their fsync may be there, missing, cut in the middle, zeros, or the last without the first."""
    before, ops = snapshot(tmp_path), FaultyOps(record=True)
    fd = ops.open(str(tmp_path / "a"), os.O_WRONLY | os.O_CREAT)
    ops.pwrite(fd, memoryview(b"12"), 0)
    ops.pwrite(fd, memoryview(b"34"), 2)
    ops.close(fd)
    found = {state.files.get("a") for state in power_cut_states(ops.log, before) if state.complete}
    assert found == {None, b"", b"1234", b"12", b"\0\0\0\0", b"\0\x0034"}


def test_changes_of_directories_are_independent(tmp_path):
    """Two renames before an fsync of the directory: both, either or none may have happened."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.new").write_bytes(b"new")
        (tmp_path / name).write_bytes(b"old")
    before, ops = snapshot(tmp_path), FaultyOps(record=True)
    for name in ("a", "b"):
        ops.rename(str(tmp_path / f"{name}.new"), str(tmp_path / name))
    found = {(s.files["a"], s.files["b"]) for s in power_cut_states(ops.log, before) if s.complete}
    assert found == {(a, b) for a in (b"old", b"new") for b in (b"old", b"new")}
    ops.fsync_dir(str(tmp_path))
    found = {(s.files["a"], s.files["b"]) for s in power_cut_states(ops.log, before) if s.complete}
    assert found == {(b"new", b"new")}


def test_materialise(tmp_path):
    """A state can be put on a disk and read by the ordinary storage."""
    (tmp_path / "disk").mkdir()
    final = states(tmp_path / "disk", FaultyOps(record=True))[-1]
    assert final.marks[-1] == "one deleted"
    root = final.materialise(tmp_path / "after")
    storage = LocalStorage(root / "runs/gpt")
    assert {info.path: storage.read(info.path) for info in storage.list()} == {
        path.removeprefix("runs/gpt/"): data for path, data in final.files.items()
    }
    assert storage.read("two/data") == PAYLOAD
    with pytest.raises(ConfigError, match="not empty"):
        final.materialise(root)


def test_max_states(tmp_path):
    """The number of states can be bounded, and the choice repeats for one seed."""
    before, ops = snapshot(tmp_path), FaultyOps(record=True)
    save(str(tmp_path), ops)
    few = list(power_cut_states(ops.log, before, max_states=len(ops.log) + 1, seed=3))
    assert len(few) <= len(ops.log) + 1
    assert few == list(power_cut_states(ops.log, before, max_states=len(ops.log) + 1, seed=3))


def test_few_states_of_a_long_log_lose_something(tmp_path):
    """Fewer than there are moments: some moments, each with what may be lost then, and never more states than asked."""
    before, ops = snapshot(tmp_path), FaultyOps(record=True)
    save(str(tmp_path), ops)
    few = list(power_cut_states(ops.log, before, max_states=len(ops.log) // 2))
    assert len(ops.log) // 5 <= len(few) <= len(ops.log) // 2
    assert few[-1].num_done == sum(operation.name != "mark" for operation in ops.log)
    done = [one.num_done for one in few]
    assert len(done) > len(set(done)), "one state of a moment is that where everything arrived"


def test_a_tree_changed_behind_the_log(tmp_path):
    """A file that the log does not know is an error, not a wrong model."""
    before, ops = snapshot(tmp_path), FaultyOps(record=True)
    (tmp_path / "a").write_bytes(b"")
    ops.rename(str(tmp_path / "a"), str(tmp_path / "b"))
    with pytest.raises(ConfigError, match="not known"):
        list(power_cut_states(ops.log, before))
