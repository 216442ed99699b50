"""`checkpoint.filesystem` and `result.filesystem`: what scripts for Ray Train do with them through pyarrow."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from object_kit import BUCKET, KEY, moto, s3_environment

import holdfast as hf
from holdfast.errors import StorageUnavailableError
from holdfast.storage import FileWriter, MemoryStorage
from holdfast.storage.resolve import resolve
from holdfast.storage.wrapped import WrappedStorage
from holdfast.trainers.function.worker.session import StorageContext

fs = pytest.importorskip("pyarrow.fs")
as_pyarrow = pytest.importorskip("holdfast.storage.adapters.for_pyarrow").as_pyarrow

STATE = {"step": 3, "values": list(range(100))}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with moto() as url:
        yield url


@pytest.fixture(params=["local", "s3", "s3 of pyarrow", "memory", "fsspec"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> hf.Checkpoint:
    """A checkpoint in a run, wherever scripts keep them."""
    name = request.node.name.replace("[", "-").replace("]", "").replace(" ", "-")
    if not request.param.startswith("s3"):
        place = {"local": f"{tmp_path}/{name}", "memory": f"memory://{name}", "fsspec": f"fsspec+memory://{name}"}
        return hf.save(f"{place[request.param]}/run/ck", STATE)
    endpoint = request.getfixturevalue("endpoint")
    for variable, value in s3_environment(endpoint).items():
        monkeypatch.setenv(variable, value)
    if request.param == "s3":
        return hf.save(f"s3://{BUCKET}/{name}/run/ck", STATE)
    host = endpoint.removeprefix("http://")
    client = fs.S3FileSystem(access_key=KEY, secret_key=KEY, endpoint_override=host, scheme="http", region="us-east-1")
    return hf.save(hf.Checkpoint(f"{BUCKET}/{name}/run/ck", client), STATE)


def test_checkpoints_are_copied_out_and_in(checkpoint: hf.Checkpoint, tmp_path: Path) -> None:
    """The copies of Ray's guide: to a local directory, to another place beside it, and from a local one."""
    here, there = tmp_path / "here", checkpoint.filesystem
    notes = b"n" * (1000 if "s3://" in checkpoint.uri else 9 << 20)  # more than is stored at once, where that is quick
    here.mkdir()
    fs.copy_files(checkpoint.path, str(here), source_filesystem=there)
    assert hf.load(here) == STATE
    (here / "deeper").mkdir()
    (here / "deeper" / "notes.txt").write_bytes(notes)
    beside = checkpoint.path.removesuffix("ck")
    there.create_dir(f"{beside}again/deeper")
    fs.copy_files(str(here), f"{beside}again", destination_filesystem=there)
    there.create_dir(f"{beside}third/deeper")
    fs.copy_files(f"{beside}again", f"{beside}third", source_filesystem=there, destination_filesystem=there)
    for name in ("again", "third"):
        copy = hf.Checkpoint(f"{beside}{name}", there)
        assert hf.load(copy) == STATE
        assert copy.open("deeper/notes.txt").read() == notes
    assert hf.Checkpoint(checkpoint.path, there) == checkpoint


def test_files_are_found_read_and_removed(checkpoint: hf.Checkpoint) -> None:
    """Listings with and without levels, ranges of a file, what is not there, deletions."""
    there, path = checkpoint.filesystem, checkpoint.path
    assert there.get_file_info(path).type == fs.FileType.Directory
    assert there.get_file_info(f"{path}/nothing").type == fs.FileType.NotFound
    assert there.get_file_info(os.path.dirname(os.path.dirname(path))).type == fs.FileType.Directory
    run = os.path.dirname(path)
    names = {os.path.basename(one.path) for one in there.get_file_info(fs.FileSelector(run, recursive=True))}
    assert {"ck", "manifest.json"} <= names
    assert [one.path for one in there.get_file_info(fs.FileSelector(run))] == [path]
    assert there.get_file_info(fs.FileSelector(f"{run}/nothing", allow_not_found=True)) == []
    with pytest.raises(OSError):
        there.get_file_info(fs.FileSelector(f"{run}/nothing"))
    with there.open_input_file(f"{path}/manifest.json") as file:
        assert file.size() == there.get_file_info(f"{path}/manifest.json").size
        whole = file.read()
        assert file.read_at(8, 3) == whole[3:11]
    with there.open_output_stream(f"{path}/mine") as stream:
        stream.write(b"abc")
    there.move(f"{path}/mine", f"{path}/yours")
    there.copy_file(f"{path}/yours", f"{path}/theirs")
    with there.open_input_stream(f"{path}/theirs") as stream:
        assert stream.read() == b"abc"
    there.delete_file(f"{path}/yours")
    assert there.get_file_info(f"{path}/yours").type == fs.FileType.NotFound
    there.delete_dir(path)
    assert not list(checkpoint.storage.list(checkpoint.directory))


def test_it_travels_and_stays_inside(checkpoint: hf.Checkpoint) -> None:
    """Pickled to a worker it is the same; of ours nothing outside of the run is shown, nor emptied as a whole."""
    there = checkpoint.filesystem
    if checkpoint.storage.uri.startswith("memory") is False:
        assert pickle.loads(pickle.dumps(there)) == there
    if type(there) is fs.PyFileSystem:
        with pytest.raises(hf.ConfigError, match="is outside of"):
            there.get_file_info("elsewhere/file")
        with pytest.raises(hf.ConfigError, match="not deleting everything"):
            there.delete_dir_contents(os.path.dirname(checkpoint.path))


def test_a_stream_that_is_given_up_stores_nothing() -> None:
    """What nobody closes is no file."""
    checkpoint = hf.save("memory://given-up/run/ck", STATE)
    stream = checkpoint.filesystem.open_output_stream(f"{checkpoint.path}/half")
    stream.write(b"half of it")
    del stream
    assert not checkpoint.storage.exists("ck/half")


def test_results_and_the_context_of_a_worker_have_one_too(tmp_path: Path) -> None:
    """`result.path` in `result.filesystem`, `experiment_fs_path` in `storage_filesystem`."""
    uri = "memory://results/run"
    with hf.Checkpointer(uri, {"n": 0}, every=1) as ck:
        ck.step()
    result = hf.Result.from_path(uri)
    assert hf.Checkpoint(f"{result.path}/{ck.latest().name}", result.filesystem) == result.checkpoint
    fs.copy_files(result.path, str(tmp_path), source_filesystem=result.filesystem)
    assert hf.load(tmp_path / ck.latest().name)["n"] == 0
    place = StorageContext(uri=uri, storage=resolve(uri), experiment_dir_name="run", experiment_fs_path="results/run")
    assert place.storage_filesystem.get_file_info(place.build_checkpoint_path_from_name(ck.latest().name)).type == 3


def test_without_pyarrow_it_is_the_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else changes for those who do not have it."""
    found: Any = hf.save("memory://bare/run/ck", STATE)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert found.filesystem is found.storage
    assert hf.Checkpoint(found.path, found.filesystem) == found


class _Away(WrappedStorage):
    """A store that can be read and takes nothing."""

    def create(self, path: str, size: int) -> FileWriter:
        raise StorageUnavailableError("503")

    def copy(self, source: str, target: str) -> None:
        raise StorageUnavailableError("503")


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_a_file_that_cannot_be_replaced_stays(kind: str, tmp_path: Path) -> None:
    """A copy or a move onto a file replaces it in one step, and if that fails nothing has changed."""
    below = MemoryStorage(tmp_path.name) if kind == "memory" else resolve(tmp_path)
    below.put("new", b"new")
    below.put("best", b"best")
    away, there = as_pyarrow(_Away(below)), as_pyarrow(below)
    root = below.uri.partition("://")[2] or below.uri
    for act in (away.copy_file, away.move) if kind == "memory" else ():
        with pytest.raises(OSError, match="503"):
            act(f"{root}/new", f"{root}/best")
        assert (below.read("best"), below.read("new")) == (b"best", b"new")
    there.copy_file(f"{root}/new", f"{root}/best")
    assert below.read("best") == b"new"
    below.put("new", b"newer")
    there.move(f"{root}/new", f"{root}/best")
    assert below.read("best") == b"newer"
    assert [info.path for info in below.list()] == ["best"]
