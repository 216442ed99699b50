"""Sources that want to run something, or to read what is not theirs: refused, or read without it; nothing is run."""

from __future__ import annotations

import io
import os
import pickle
import re
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

import holdfast as hf
from holdfast.interop import unpickle
from holdfast.interop.unpickle import read_metadata, read_torch, read_torch_stream

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_WATCHED = (
    "os.system",
    "os.exec",
    "subprocess.Popen",
    "os.posix_spawn",
    "exec",
    "compile",
    "shutil.rmtree",
)
_events: list[str] = []
_watching = False


def _hook(event: str, arguments: tuple) -> None:
    if _watching and (event in _WATCHED or (event == "open" and "canary" in str(arguments[0]))):
        _events.append(f"{event} {arguments}")


sys.addaudithook(_hook)


@pytest.fixture(scope="module", autouse=True)
def everything_imported(tmp_path_factory) -> None:
    """Import what imports need beforehand: that runs code, too."""
    path = tmp_path_factory.mktemp("warm")
    torch.save({"a": torch.ones(1), "b": [_Plain()], "c": np.arange(2)}, path / "a.pt")
    hf.import_checkpoint(path / "a.pt", path / "a")
    hf.import_checkpoint(folder(path), path / "b")


class _Plain:
    pass


@pytest.fixture(autouse=True)
def nothing_runs():
    """An audit hook sees no process, no code and no touched canary while a test imports."""
    global _watching
    _events.clear()
    yield
    _watching = False
    assert _events == []


def watched(call):
    """Run a call under the eyes of the audit hook."""
    global _watching
    _watching = True
    try:
        return call()
    finally:
        _watching = False


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, call=os.system, *arguments) -> None:
        self.call, self.arguments = call, arguments or ("touch canary",)

    def __reduce__(self):
        return self.call, self.arguments


BOMBS = [Bomb(), Bomb(eval, "open('canary', 'w')"), Bomb(exec, "open('canary', 'w')"), Bomb(os.mkdir, "canary")]


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb.call.__name__)
def test_pickle_bombs_in_torch_files(tmp_path, monkeypatch, bomb) -> None:
    """The weights beside a bomb are taken, the bomb is not and is named; a file that is one is refused."""
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"w": torch.ones(2)}, "trap": bomb, "list": [1, bomb]}, tmp_path / "a.pt")
    done = watched(lambda: hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "a"))
    assert [path for path, _ in done.not_taken] == ["['trap']", "['list'][1]"]
    assert hf.load(tmp_path / "a")["model"]["w"].tolist() == [1, 1]
    torch.save(bomb, tmp_path / "b.pt")
    with pytest.raises(hf.UnsupportedStateError, match="--trusted"):
        watched(lambda: hf.import_checkpoint(tmp_path / "b.pt", tmp_path / "b"))
    torch.save({"w": torch.ones(2), "trap": bomb}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(hf.UnsupportedStateError, match="--trusted"):
        watched(lambda: hf.import_checkpoint(tmp_path / "old.pt", tmp_path / "c"))
    assert not (tmp_path / "canary").exists()
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb.call.__name__)
def test_pickle_bombs_where_items_of_dcp_are(tmp_path, monkeypatch, bomb) -> None:
    """A bare pickle, and a file of before torch 1.6 that begins with one, are not run by the reader of items."""
    monkeypatch.chdir(tmp_path)
    old = io.BytesIO()
    torch.save({"trap": bomb}, old, _use_new_zipfile_serialization=False)
    for data in (pickle.dumps(bomb), pickle.dumps(bomb, 2) + old.getvalue()):
        with pytest.raises(hf.CorruptCheckpointError):
            watched(lambda data=data: read_torch_stream(io.BytesIO(data), "item"))
    assert not (tmp_path / "canary").exists()


class Calls:
    """Is pickled as a call, and perhaps a state."""

    def __init__(self, *reduced) -> None:
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


OBJECTS = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)  # and flags that say there are none
GADGETS = {
    "pointers": Calls(np.ndarray, ((1,), "O", b"A" * 8)),
    "fields": Calls(np.dtype, ("V8", False, True), OBJECTS),
    "list of fields": Calls(np.dtype, ([("a", "O")],)),
    "several types": Calls(np.dtype, ("i4,O",)),
    "size": Calls(np.dtype, ("S4", False, True), (3, "|", None, None, None, 1 << 20, 1, 0)),
    "flags": Calls(np.dtype, ("S8", False, True), (3, "|", None, None, None, 8, 1, 63)),
    "scalar": Calls(type(np.float64(1)).__reduce__(np.float64(1))[0], (np.dtype("O"), b"A" * 8)),
}
CRAFTED = {
    "fields": "denies the objects in it",
    "pointers": "without NumPy's own way to read one",
    "scalar": "a scalar of NumPy out of an object",
    "flags": "wrong flags, size or alignment",
}


@pytest.mark.parametrize("gadget", GADGETS)
def test_arrays_that_are_no_arrays(tmp_path, gadget) -> None:
    """Pickles of NumPy that take bytes for pointers, which no loader but NumPy's own believes."""
    torch.save({"w": torch.ones(2), "a": GADGETS[gadget]}, tmp_path / "a.pt")
    with pytest.raises(hf.UnsupportedStateError, match="--trusted"):
        watched(lambda: hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "a"))


@pytest.mark.parametrize("gadget", [*CRAFTED, "version"])
def test_what_a_refusal_says(tmp_path, gadget) -> None:
    """Why a crafted file is refused; the advice to trust it is for files that lack nothing but their classes."""
    version = Calls(torch.torch_version.TorchVersion, ([1] * 3,))
    content = [GADGETS.get(gadget, version), Calls(int, ("9",)), Bomb()]  # torch's own reader must not take it first
    torch.save({"w": torch.ones(2), "a": content}, tmp_path / "a.pt")
    with pytest.raises(hf.UnsupportedStateError, match=CRAFTED.get(gadget, "a version of a list")) as caught:
        watched(lambda: hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "a"))
    assert "if you trust" not in str(caught.value)


def test_what_a_refusal_advises(tmp_path) -> None:
    """A file of which only the classes are unknown may be trusted."""
    torch.save({"it": Bomb(), "counts": Calls(int, ("nine",))}, tmp_path / "b.pt")
    with pytest.raises(hf.UnsupportedStateError, match=r"invalid literal.*'nine'.*if you trust"):
        hf.import_checkpoint(tmp_path / "b.pt", tmp_path / "b")


STRUCTURES = {
    "plain": np.zeros(2, [("a", "i4")]),
    "nested": np.zeros(2, [("a", [("b", "f4", (2,))])]),
    "aligned": np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "objects": np.zeros(2, [("a", "O"), ("b", [("c", "O")])]),
    "records": np.zeros(2, [("a", "i4")]).view(np.recarray),
    "scalar": np.zeros(2, [("a", "i4")])[0],
    "dtype": np.dtype([("a", "i4")]),
    "subarray": np.dtype(("O", (2,))),
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_structured_arrays_alone_are_left_out(tmp_path, kind) -> None:
    """A structured array, also one that is referred to twice, is listed; all else is taken."""
    value = STRUCTURES[kind]
    state = {"v": value, "again": [value], "dtype": getattr(value, "dtype", None), "x": Bomb(), "w": torch.ones(2)}
    torch.save({**state, "array": np.arange(3)}, tmp_path / "a.pt")
    done = watched(lambda: hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "a"))
    assert [path for path, _ in done.not_taken][:2] == ["['v']", "['again'][0]"]
    back = hf.load(tmp_path / "a")
    assert back["w"].tolist() == [1, 1]
    assert back["array"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "allowed",
    [unpickle._get_allowed_globals(), {"collections.OrderedDict": OrderedDict}],
    ids=["this torch", "as torch 2.4"],
)
def test_arrays_that_are(tmp_path, monkeypatch, allowed) -> None:
    """Arrays and scalars of NumPy, bytes and sets come along, also from a file that only the careful reader reads."""
    monkeypatch.setattr(unpickle, "_get_allowed_globals", lambda: allowed)
    monkeypatch.setattr(unpickle, "_plain_globals", unpickle._plain_globals.__wrapped__)
    kinds = ["?", "i1", ">i4", "f2", ">f8", "c8", "M8[ns]", "m8[s]", "S3", "U4"]
    values = {kind: np.arange(4).reshape(2, 2).astype("i8" if kind[0] in "mM" else kind).astype(kind) for kind in kinds}
    found = {"arrays": values, "scalars": {kind: array[1, 1] for kind, array in values.items()}, "it": Bomb()}
    found["plain"] = [b"\xff", {1}, 1j]
    torch.save(found, tmp_path / "a.pt")
    read = watched(lambda: read_torch(str(tmp_path / "a.pt")))
    for kind, array in values.items():
        assert read["arrays"][kind].dtype == array.dtype.newbyteorder("=")  # as NumPy itself reads them
        assert read["arrays"][kind].tolist() == array.tolist()
        assert read["scalars"][kind] == array[1, 1]
        assert type(read["scalars"][kind]) is type(array[1, 1])
    assert np.dtype("f8").isnative
    assert read["plain"] == found["plain"]


def test_programs(tmp_path) -> None:
    """A program of TorchScript is not loaded, which would run code of it; neither as a file nor from a stream."""

    class Writer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    torch.jit.script(Writer()).save(str(tmp_path / "a.pt"))
    with pytest.raises(hf.UnsupportedStateError, match="is a program of TorchScript: it is not loaded"):
        watched(lambda: hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "a"))
    with pytest.raises(hf.CorruptCheckpointError, match="TorchScript"):
        read_torch_stream(io.BytesIO((tmp_path / "a.pt").read_bytes()), "item")


def test_a_list_that_holds_itself(tmp_path) -> None:
    """Is refused in words, and no checkpoint is made."""
    endless: list = [torch.ones(1)]
    endless.append(endless)
    torch.save({"a": endless}, tmp_path / "a.pt")
    with pytest.raises(hf.HoldfastError):
        hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("is_summed", [True, False], ids=["checksums", "without checksums"])
def test_bits_that_rot_in_a_torch_file_are_found(tmp_path, is_summed) -> None:
    """The checksums that torch.save writes and torch.load does not read are compared; a file may be without them."""
    torch.serialization.set_crc32_options(is_summed)
    try:
        torch.save({"w": torch.arange(100.0)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "sound").checkpoint.verify()
    data = (tmp_path / "a.pt").read_bytes()
    place = data.index(torch.arange(100.0).numpy().tobytes())
    (tmp_path / "a.pt").write_bytes(data[:place] + b"\x01" + data[place + 1 :])
    if is_summed:
        for trusted in (False, True):
            with pytest.raises(hf.CorruptCheckpointError, match="data/0"):
                hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "a", trusted=trusted)


@pytest.mark.parametrize(
    ("name", "data", "error", "words"),
    [
        ("a.pt", b"", hf.CorruptCheckpointError, "is empty"),
        ("a.pt", b"<html>404</html>", hf.UnsupportedStateError, "no file of torch.save: it begins with b'<html>"),
        ("a.pt", pickle.dumps({"a": 1}), hf.UnsupportedStateError, "a pickle that torch.save has not written"),
        ("a.pt", None, hf.CorruptCheckpointError, "cut off"),
        ("a.pt", b"version https://git-lfs.github.com/spec/v1\n", hf.CorruptCheckpointError, "git lfs pull"),
        ("a.safetensors", b"version https://git-lfs.github.com/spec/v1\n", hf.CorruptCheckpointError, "git lfs pull"),
        ("model.safetensors", b"version https://git-lfs.github.com\n", hf.CorruptCheckpointError, "git lfs pull"),
        ("pytorch_model.bin", b"version https://git-lfs.github.com\n", hf.CorruptCheckpointError, "git lfs pull"),
    ],
)
def test_what_is_no_checkpoint_is_said(tmp_path, name, data, error, words) -> None:
    """A file that was not fetched whole, or is another thing, is named for what it is; nobody is told to trust it."""
    if data is None:
        torch.save({"w": torch.arange(100.0)}, tmp_path / "whole.pt")
        data = (tmp_path / "whole.pt").read_bytes()[:-200]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(data)
    source = tmp_path / "in" if name.startswith(("model", "pytorch")) else tmp_path / "in" / name
    for trusted in (False, True):
        with pytest.raises(error, match=words) as raised:
            hf.import_checkpoint(source, tmp_path / "a", trusted=trusted)
        assert "--trusted" not in str(raised.value)


def test_trusted_files_are_read_as_they_are(tmp_path, monkeypatch) -> None:
    """With trusted=True objects are made: whoever asks for it gets it, old files and whole modules too."""
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2), "trap": Bomb(os.mkdir, "canary")}, "a.pt")
    hf.import_checkpoint("a.pt", "a", trusted=True)
    assert Path("canary").exists()
    torch.save({"w": torch.ones(2)}, "old.pt", _use_new_zipfile_serialization=False)
    hf.import_checkpoint("old.pt", "old")
    model = torch.nn.Linear(2, 2)
    torch.save(model, "module.pt")
    with pytest.raises(hf.UnsupportedStateError, match="Linear"):
        hf.import_checkpoint("module.pt", "module")
    hf.import_checkpoint("module.pt", "module", trusted=True)
    assert torch.equal(hf.load("module")["model"]["weight"], model.weight)


def folder(tmp_path) -> Path:
    """A directory of DCP."""
    dcp.save({"model": {"w": torch.arange(6.0).reshape(2, 3)}, "epoch": 3}, checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp"


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb.call.__name__)
def test_pickle_bombs_in_dcp_metadata(tmp_path, monkeypatch, bomb) -> None:
    """.metadata with anything but DCP's own classes is refused, whatever else it holds."""
    monkeypatch.chdir(tmp_path)
    path = folder(tmp_path)
    metadata = read_metadata((path / ".metadata").read_bytes())
    metadata.planner_data = {"x": bomb}
    for data in (pickle.dumps(bomb), pickle.dumps(metadata), pickle.dumps([metadata]), b"", b"\x80\x04garbage"):
        (path / ".metadata").write_bytes(data)
        with pytest.raises(hf.CorruptCheckpointError, match=r"\.metadata"):
            watched(lambda: hf.import_checkpoint(path, tmp_path / "new"))
    assert not (tmp_path / "canary").exists()
    assert not (tmp_path / "new").exists()


def test_bombs_in_dcp_values(tmp_path, monkeypatch) -> None:
    """A plain value of DCP is a pickle, too: an object in it is left out and named."""
    monkeypatch.chdir(tmp_path)
    dcp.save({"model": {"w": torch.ones(2)}, "trap": Bomb(), "epoch": 3}, checkpoint_id=tmp_path / "dcp")
    done = watched(lambda: hf.import_checkpoint(tmp_path / "dcp", tmp_path / "new"))
    ((path, why),) = done.not_taken
    assert path == "trap"
    assert "system" in why
    assert hf.load(tmp_path / "new")["epoch"] == 3
    assert not (tmp_path / "canary").exists()


def _far(metadata) -> None:
    index = next(iter(metadata.storage_data))
    metadata.storage_data[index] = _StorageInfo("__0_0.distcp", 10**9, 5)


def _elsewhere(metadata) -> None:
    index = next(iter(metadata.storage_data))
    metadata.storage_data[index] = _StorageInfo("../secret", 0, 5)


def _absolute(metadata) -> None:
    index = next(iter(metadata.storage_data))
    metadata.storage_data[index] = _StorageInfo("/etc/hostname", 0, 5)


def _negative(metadata) -> None:
    index = next(iter(metadata.storage_data))
    metadata.storage_data[index] = _StorageInfo("__0_0.distcp", -5, 5)


def _large(metadata) -> None:
    entry = metadata.state_dict_metadata["model.w"]
    entry.size = torch.Size([10**6, 10**6])


def _outside(metadata) -> None:
    metadata.state_dict_metadata["model.w"].chunks = [ChunkStorageMetadata(torch.Size([5, 0]), torch.Size([2, 3]))]


def _lost(metadata) -> None:
    metadata.storage_data.pop(MetadataIndex("model.w", torch.Size([0, 0])))


def _dtype(metadata) -> None:
    metadata.state_dict_metadata["model.w"].properties.dtype = torch.float64


def _odd_path(metadata) -> None:
    metadata.planner_data = {"model.w": ("model",), "epoch": ("model", "epoch")}


def _one_path(metadata) -> None:
    metadata.planner_data = {"model.w": ("model", "x"), "epoch": ("model", "x")}


@pytest.mark.parametrize(
    "change", [_far, _elsewhere, _absolute, _negative, _large, _outside, _lost, _dtype, _odd_path, _one_path]
)
def test_dcp_metadata_that_lies(tmp_path, change) -> None:
    """Ranges out of files, paths out of the folder, shapes that do not add up: refused, and no checkpoint is made."""
    (tmp_path / "secret").write_bytes(b"secret")
    path = folder(tmp_path)
    metadata = read_metadata((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(hf.CheckpointError):
        hf.import_checkpoint(path, tmp_path / "new")
    assert not (tmp_path / "new/manifest.json").exists()


def test_dcp_files_that_are_links_or_gone(tmp_path) -> None:
    """A data file that leads out of the folder is not followed."""
    path = folder(tmp_path)
    (path / "__0_0.distcp").rename(tmp_path / "elsewhere")
    with pytest.raises(hf.CorruptCheckpointError, match="is gone"):
        hf.import_checkpoint(path, tmp_path / "new")
    (path / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(hf.CorruptCheckpointError, match="symlink"):
        hf.import_checkpoint(path, tmp_path / "new")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json", "pytorch_model_fsdp_0"])
def test_links_in_foreign_folders(tmp_path, name) -> None:
    """What a folder links to is not part of it: not taken, whether that is a file or a directory elsewhere."""
    home, outside = tmp_path / "folder", folder(tmp_path)
    home.mkdir()
    if not name.endswith("_0"):
        torch.save({"w": torch.ones(2)}, home / "pytorch_model.bin")
    torch.save({"secret": 1}, tmp_path / "optimizer.pt")
    (tmp_path / "trainer_state.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (home / name).symlink_to(outside if name.endswith("_0") else tmp_path / name)
    with pytest.raises(hf.CorruptCheckpointError, match="symlink"):
        hf.import_checkpoint(home, tmp_path / "new")


def test_safetensors_that_lie(tmp_path) -> None:
    """A header that does not fit its file is damage, and an index cannot name files elsewhere."""
    (tmp_path / "a.safetensors").write_bytes((2**40).to_bytes(8, "little") + b"{}")
    with pytest.raises(hf.CorruptCheckpointError):
        hf.import_checkpoint(tmp_path / "a.safetensors", tmp_path / "new")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/model.safetensors.index.json").write_text('{"weight_map": {"w": "../a.safetensors"}}')
    with pytest.raises(hf.CorruptCheckpointError, match="refused the path"):
        hf.import_checkpoint(tmp_path / "hf", tmp_path / "new")


def test_no_torch_file_at_all(tmp_path) -> None:
    """Garbage, an empty file and a zip of something else are said to be no torch files."""
    for number, data in enumerate((b"", b"hello", b"PK\x03\x04 and so on")):
        path = tmp_path / f"{number}.pt"
        path.write_bytes(data)
        with pytest.raises(hf.HoldfastError, match=str(path)):
            hf.import_checkpoint(path, tmp_path / "new")


def test_a_pickle_cannot_change_classes(tmp_path) -> None:
    """Not even attributes of the classes on the allow-list can be set."""
    data = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x03\x00\x00\x00xyzK\x01s\x86b."
    with pytest.raises(hf.CorruptCheckpointError, match="sets the state of a type"):
        read_metadata(data)
    assert not hasattr(Metadata, "xyz")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.metadata", "os"),
        ("torch.distributed.checkpoint.metadata", "dataclass"),
        ("torch.distributed.checkpoint.planner", "io"),
        ("pathlib", "os"),
        ("collections", "namedtuple"),
        ("builtins", "eval"),
    ],
)
def test_metadata_names_nothing_beside_the_list(module, name):
    """A `.metadata` gets the names of the allow-list, no other name of an allowed module, and nothing of it is run."""
    data = b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"."
    with pytest.raises(hf.CorruptCheckpointError, match=rf"asks for {re.escape(module)}\.{name}, which no metadata"):
        read_metadata(data)
