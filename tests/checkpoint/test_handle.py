"""`Checkpoint`: locations, files, and what it says about itself."""

from __future__ import annotations

import copy
import json
import os
import pickle
import tempfile
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch
from catalog_kit import catalog_of
from checkpoint_kit import MODEL, TREE, build, small

import holdfast as hf
from holdfast.checkpoint import handle as handle_module
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.verify import verify
from holdfast.cli.verify import _folder
from holdfast.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageNotFoundError,
)
from holdfast.storage import LocalStorage, MemoryStorage, PrefixStorage


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path):
    return LocalStorage(tmp_path / "run") if request.param == "local" else MemoryStorage(f"handle-{tmp_path.name}")


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Keep downloads of the tests to themselves."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_location_is_fixed_when_it_is_made(tmp_path, monkeypatch) -> None:
    """Relative paths, "~", file URIs and links mean what they meant at construction; equality is by location."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a b=ü").mkdir()
    (tmp_path / "latest").symlink_to("a b=ü")
    expected = str(tmp_path / "a b=ü")
    made = [Checkpoint(p) for p in ("a b=ü", Path("a b=ü"), "~/a b=ü", f"file://{expected}", "latest", "a b=ü/")]
    monkeypatch.chdir("/")
    assert {checkpoint.path for checkpoint in made} == {expected}
    assert len(set(made)) == 1
    assert made[0] != Checkpoint(tmp_path)
    assert made[0].name == "a b=ü"
    assert repr(made[0]) == f"Checkpoint({expected!r})"
    assert os.fspath(made[0]) == expected


def test_path_and_filesystem_name_it_again(storage) -> None:
    """`Checkpoint(c.path, c.filesystem)`, `from_uri(c.uri)`, copies and pickles are equal to c."""
    small(storage, "deep/er/step_1", step=1)
    checkpoint = Checkpoint("deep/er/step_1", storage)
    for other in (
        Checkpoint(checkpoint.path, checkpoint.filesystem),
        Checkpoint(checkpoint.path, storage),
        Checkpoint.from_uri(checkpoint.uri),
        Checkpoint.at(storage, "deep/er/step_1"),
        copy.deepcopy(checkpoint),
        pickle.loads(pickle.dumps(checkpoint)),
    ):
        assert other == checkpoint
        assert hash(other) == hash(checkpoint)
        assert other.step == 1
        assert other.name == "step_1"


@pytest.mark.parametrize(("path", "filesystem"), [("", None), ("/", None), (3, None), ("memory://only", None),
                                                  ("zz://a/b", None), ("a/../b", MemoryStorage("x")),
                                                  ("/outside", LocalStorage("/inside")), ("a", object())])  # fmt: skip
def test_what_is_no_location_is_refused(path, filesystem) -> None:
    """Roots, unknown schemes, ways out of a storage and file systems of others are configuration errors."""
    with pytest.raises(ConfigError):
        Checkpoint(path, filesystem)


def test_it_tells_what_the_manifest_says(storage) -> None:
    """Step, metrics with late ones, time, size and the names in its state come from the small files."""
    build(storage, "c", step=7, epoch=1.5, metrics={"loss": 1.0, "val": 3.0}, created="2026-01-02T03:04:05.000+00:00")
    checkpoint = Checkpoint.at(storage, "c")
    storage.put("c/.metrics.json", json.dumps({"metrics": {"val": 2.0}, "pinned": False}).encode())
    assert (checkpoint.step, checkpoint.metrics) == (7, {"loss": 1.0, "val": 2.0})
    assert checkpoint.created == datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    assert checkpoint.keys() == list(TREE)
    assert checkpoint.size_bytes == checkpoint.manifest.total_bytes > sum(tensor.nbytes for tensor in MODEL)


def test_what_is_no_metric_is_refused_by_name(storage) -> None:
    """A tensor of several elements is a `ConfigError` that says where it is, as in `report` of a worker."""
    build(storage, "c", step=7)
    checkpoint = Checkpoint.at(storage, "c")
    checkpoint.report({"val": {"acc": torch.tensor(0.5)}})
    with pytest.raises(ConfigError, match=r"'val/logits' is a Tensor of shape \(2,\)"):
        checkpoint.report(val={"logits": torch.zeros(2)})
    assert checkpoint.metrics["val"] == {"acc": 0.5}


def test_a_foreign_directory_is_usable_and_said_to_be_foreign(storage) -> None:
    """Without a manifest there is no step and no metrics, files are there, and verify says what it is."""
    storage.put("f/sub/weights.bin", b"12345")
    checkpoint = Checkpoint.at(storage, "f")
    assert (checkpoint.manifest, checkpoint.step, checkpoint.metrics, checkpoint.created) == (None, None, {}, None)
    assert (checkpoint.size_bytes, checkpoint.keys()) == (5, [])
    found = checkpoint.verify()
    assert not found
    assert found.state == "foreign"
    with pytest.raises(CheckpointNotFoundError, match="retention"):
        checkpoint.pin()
    with checkpoint.open("sub/weights.bin") as file:
        assert (file.read(2), file.seek(-1, os.SEEK_END), file.read()) == (b"12", 4, b"5")
    checkpoint.delete()
    assert list(storage.list()) == []


def test_incomplete_missing_and_damaged_are_told_apart(storage) -> None:
    """An uncommitted save, nothing at all and a rotten manifest are three different errors."""
    build(storage, "half", finish=False)
    with pytest.raises(IncompleteCheckpointError):
        Checkpoint.at(storage, "half").manifest  # noqa: B018
    with pytest.raises(CheckpointNotFoundError):
        Checkpoint.at(storage, "none").manifest  # noqa: B018
    storage.put("rot/manifest.json", b"{}")
    with pytest.raises(CorruptCheckpointError):
        Checkpoint.at(storage, "rot").manifest  # noqa: B018
    states = [Checkpoint.at(storage, name).verify().state for name in ("half", "none", "rot")]
    assert states == ["incomplete", "missing", "corrupt"]
    for name in ("none",):
        for act in (Checkpoint.delete, Checkpoint.to_directory, Checkpoint.size_bytes.fget):
            with pytest.raises(CheckpointNotFoundError):
                act(Checkpoint.at(storage, name))


def test_verify_names_the_damaged_tensor(storage) -> None:
    """One flipped bit is found by the deep check, with file and tensor; sizes are found by the shallow one."""
    build(storage, "c")
    checkpoint = Checkpoint.at(storage, "c")
    sound = checkpoint.verify()
    assert sound
    assert sound.bytes_read >= sum(tensor.nbytes for tensor in MODEL)
    path = next(info.path for info in storage.list("c") if "model-" in info.path)
    body = bytearray(storage.read(path))
    body[4100] ^= 1
    storage.put(path, bytes(body))
    assert checkpoint.verify(deep=False).ok
    (problem, *_) = checkpoint.verify().problems
    assert "model-00000" in problem
    assert "model/head.weight" in problem
    storage.put(path, bytes(body[:-1]))
    assert not checkpoint.verify(deep=False)


def test_to_directory_copies_with_the_manifest_last(storage, tmp_path, monkeypatch) -> None:
    """A copy equals its source, and one that dies on the way over another checkpoint leaves that one whole."""
    build(storage, "c", user={"sub/x.bin": b"123", "empty": b""}, step=3)
    target = tmp_path / "copy"
    assert Checkpoint.at(storage, "c").to_directory(target) == str(target)
    assert Checkpoint(target).verify().ok
    assert (target / "sub" / "x.bin").read_bytes() == b"123"
    assert Checkpoint(Checkpoint.at(storage, "c").to_directory()).step == 3

    def fail(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    build(storage, "other", step=4)
    monkeypatch.setattr("holdfast.copying.transfer._Copy.commit", fail)
    with pytest.raises(KeyboardInterrupt):
        Checkpoint.at(storage, "other").to_directory(target)
    assert (Checkpoint(target).verify().ok, Checkpoint(target).step) == (True, 3)
    with pytest.raises(KeyboardInterrupt):
        Checkpoint.at(storage, "c").to_directory(tmp_path / "new")
    assert Checkpoint(tmp_path / "new").verify().state == "incomplete"


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_to_directory_onto_itself_writes_nothing(tmp_path, monkeypatch, kind) -> None:
    """What a script "downloads" into its cache may lie there already, also by another path."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "model.pt").write_bytes(b"mine")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    here = Checkpoint(tmp_path / "real" if kind == "directory" else tmp_path / "real" / "model.pt")
    inode = (tmp_path / "real" / "model.pt").stat().st_ino
    assert here.to_directory(tmp_path / "link") == str(tmp_path / "link")
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["model.pt"]
    assert (tmp_path / "real" / "model.pt").stat().st_ino == inode


def test_as_directory_of_a_local_one_is_the_real_path(tmp_path) -> None:
    """Nothing is copied on the same machine."""
    small(LocalStorage(tmp_path), "c")
    with Checkpoint(tmp_path / "c").as_directory() as path:
        assert path == str(tmp_path / "c")
    with pytest.raises(CheckpointNotFoundError), Checkpoint(tmp_path / "none").as_directory():
        pass


def test_a_file_is_a_one_file_checkpoint(tmp_path) -> None:
    """`as_directory` and `to_directory` give a directory with the file under its own name; metadata go beside it."""
    file = tmp_path / "epoch_3.pt"
    file.write_bytes(b"weights")
    checkpoint = Checkpoint.from_directory(file)
    with checkpoint.as_directory() as path:
        assert os.listdir(path) == ["epoch_3.pt"]
        assert (Path(path) / "epoch_3.pt").read_bytes() == b"weights"
    assert not os.path.exists(path)
    assert os.listdir(checkpoint.to_directory()) == ["epoch_3.pt"]
    checkpoint.update_metadata({"a": 1})
    assert checkpoint.get_metadata() == {"a": 1}
    assert (checkpoint.manifest, checkpoint.size_bytes, checkpoint.verify().state) == (None, 7, "foreign")
    with checkpoint.open("epoch_3.pt") as stream:
        assert stream.read() == b"weights"
    checkpoint.delete()
    assert not list(tmp_path.glob("*epoch_3*"))
    with pytest.raises(CheckpointNotFoundError):
        Checkpoint.from_directory(file).to_directory()


def test_metadata_are_replaced_whole_and_merged(storage) -> None:
    """Absent metadata are {}, an update merges, what is not JSON is refused, damage is said."""
    small(storage, "c")
    checkpoint = Checkpoint.at(storage, "c")
    assert checkpoint.get_metadata() == {}
    checkpoint.set_metadata({"a": 1, "b": [1, None]})
    checkpoint.update_metadata({"a": 2})
    assert Checkpoint.from_uri(checkpoint.uri).get_metadata() == {"a": 2, "b": [1, None]}
    assert checkpoint.verify().ok
    with pytest.raises(ConfigError):
        checkpoint.set_metadata({"a": object()})
    for change in (checkpoint.set_metadata, checkpoint.update_metadata, Checkpoint.from_dict):
        with pytest.raises(ConfigError, match="give a dictionary"):
            change("note")
    with pytest.raises(ConfigError, match="give a path"):
        Checkpoint.from_directory(None)
    storage.put("c/.metadata.json", b"[")
    with pytest.raises(CorruptCheckpointError):
        checkpoint.get_metadata()


def test_open_stays_inside(storage) -> None:
    """A name that leaves the checkpoint is refused, an absent one not found."""
    small(storage, "c")
    with pytest.raises(ConfigError):
        Checkpoint.at(storage, "c").open("../other")
    with pytest.raises(StorageNotFoundError):
        Checkpoint.at(storage, "c").open("nothing")


def test_delete_leaves_neighbours_alone(storage) -> None:
    """Deleting takes the whole directory, files added by the user too, and nothing else."""
    small(storage, "c1")
    small(storage, "c11")
    storage.put("c1/mine.txt", b"x")
    Checkpoint.at(storage, "c1").delete()
    assert {info.path.split("/")[0] for info in storage.list()} == {"c11"}


def test_a_run_is_not_deleted_as_a_checkpoint(storage) -> None:
    """Nor what holds checkpoints or runs, whose parts are all there afterwards; files of others are no reason."""
    small(storage, "runs/one/step_1")
    small(storage, "runs/saved/a")
    storage.put("runs/one/run.json", b"{}")
    storage.put("foreign/site/manifest.json", b"{}")
    before = {info.path for info in storage.list()}
    cases = {"runs/one": "is a run,", "runs": "with the run one", "runs/saved": "with the checkpoint a"}
    for name, says in cases.items():
        with pytest.raises(CheckpointNotFoundError, match=f"{says}.*nothing was deleted"):
            Checkpoint.at(storage, name).delete()
    assert {info.path for info in storage.list()} == before
    Checkpoint.at(storage, "foreign").delete()
    Checkpoint.at(storage, "runs/one/step_1").delete()
    assert {info.path.split("/")[1] for info in storage.list()} == {"one", "saved"}


# -- dictionaries ------------------------------------------------------------------------------------------------------


class Tensorish:
    """Looks like a tensor to what must not import torch."""

    dtype = "float32"
    shape = (1,)


def test_a_uniform_module_prefix_is_stripped() -> None:
    """State dicts of wrapped models lose the prefix, keep their type; mixed names and plain data do not change."""
    from collections import OrderedDict

    tensor = Tensorish()
    given = {
        "model": OrderedDict([("module.a", tensor), ("module.b", tensor)]),
        "mixed": {"module.a": tensor, "b": tensor},
        "plain": {"module.a": 1},
        "deep": {"inner": {"module.w": tensor}},
    }
    stripped = handle_module.without_prefix(given)
    assert stripped == {**given, "model": OrderedDict(a=tensor, b=tensor), "deep": {"inner": {"w": tensor}}}
    assert type(stripped["model"]) is OrderedDict


def test_the_memory_of_a_dictionary_goes_with_its_last_handle() -> None:
    """The store behind `from_dict` empties itself when neither the handle nor a copy of it is left."""
    store = handle_module.DictStore("test")
    storage = MemoryStorage("holdfast-dict-test")
    small(storage, "checkpoint")
    first = Checkpoint(f"{store.uri}/checkpoint")
    second = pickle.loads(pickle.dumps(first))
    del store, first
    assert list(storage.list())
    del second
    assert not list(storage.list())


def test_folders_without_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory is given back as it is, an empty one too; a tilde in the target is the home directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "full" / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "full" / "a.txt").write_text("a")
    (tmp_path / "empty").mkdir()
    there = Path(Checkpoint.from_directory(tmp_path / "full").to_directory("~/copy"))
    assert there == tmp_path / "copy"
    assert (there / "sub" / "deep").is_dir()
    assert (there / "a.txt").read_text() == "a"
    assert os.listdir(Checkpoint.from_directory(tmp_path / "empty").to_directory(tmp_path / "other")) == []
    with pytest.raises(CheckpointNotFoundError):
        Checkpoint.from_directory(tmp_path / "none").to_directory()


class DeletedMeanwhile(PrefixStorage):
    """A run whose retention deletes the checkpoint while somebody reads its files."""

    def open(self, path):
        if path.endswith(".safetensors"):
            self.below.delete_tree("run/step_1")
        return super().open(path)


def test_verify_of_what_retention_deletes(tmp_path):
    """A checkpoint that goes while it is looked at is gone, not damaged; for a run that is no problem."""
    hf.save(tmp_path / "run" / "step_1", {"w": torch.ones(3)})
    hf.save(tmp_path / "run" / "step_2", {"w": torch.ones(3)})
    storage = DeletedMeanwhile(LocalStorage(tmp_path), "run")
    assert verify(storage, "step_1", deep=True).state == "missing"
    hf.save(tmp_path / "run" / "step_1", {"w": torch.ones(3)})
    rows = list(_folder(catalog_of(storage), deep=False))
    assert [(row["name"], row["ok"]) for row in rows] == [("step_2", True)]
