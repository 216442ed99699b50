"""Files in torch's own format: every value and dtype comes back, from a file written in one pass."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.errors import CorruptCheckpointError, UnsupportedStateError
from holdfast.format.tensor_file import DTYPES
from holdfast.state.save import torch_file
from holdfast.state.save.torch_file import MARK, TorchFileWriter, from_plain, tensor_bytes, to_plain
from holdfast.testing import assert_state_equal

Point = namedtuple("Point", "x y")


def written(value, **options) -> bytes:
    file = io.BytesIO()
    writer = TorchFileWriter(value, **options)
    writer.write(file.write)
    assert len(file.getvalue()) == writer.size
    return file.getvalue()


NAMES = [*DTYPES, "complex32", "complex64", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_every_dtype_comes_back_mapped_too(name, tmp_path) -> None:
    """The bits of every dtype survive, with and without mmap."""
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    data = torch.arange(48, dtype=torch.uint8)
    value = {"a": data % 2 == 1 if dtype is torch.bool else data.view(dtype)}
    path = tmp_path / "one.pt"
    path.write_bytes(written(value))
    for mmap in (False, True):
        assert_state_equal(torch.load(path, weights_only=True, mmap=mmap), value)


def test_plain_values_and_odd_tensors_come_back(tmp_path) -> None:
    """Containers, numbers, views, ties, parameters, conjugates and empty tensors are what they were."""
    weight = torch.randn(100, 70)
    value = {
        "numbers": [
            1,
            -1,
            2**1000,
            0.5,
            -0.0,
            float("nan"),
            True,
            None,
            1 + 2j,
            "é\ud800",
            b"\x00\xff",
            bytearray(b"q"),
        ],
        "kinds": (
            torch.Size([1, 2]),
            torch.bfloat16,
            torch.device("cpu"),
            OrderedDict(b=1, a=2),
            Counter("abba"),
            {1, 2},
        ),
        5: {None: 1, (1, "a"): 2, 0.5: 3, True: 4},
        "turned": weight.t(),
        "conjugate": torch.complex(weight, weight).conj(),
        "stretched": torch.ones(1).expand(4),
        "part": weight[3:5, ::7],
        "number": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(3), requires_grad=False),
        "weight": weight,
        "tied": [weight, weight.view(100, 70)],
    }
    path = tmp_path / "one.pt"
    path.write_bytes(written(value))
    for mmap in (False, True):
        found = torch.load(path, weights_only=True, mmap=mmap)
        assert_state_equal(found, value)
        assert found["weight"].data_ptr() == found["tied"][0].data_ptr() == found["tied"][1].data_ptr()
        assert type(found["parameter"]) is torch.nn.Parameter
        assert not found["parameter"].requires_grad
        assert found["weight"].data_ptr() % 64 == 0


def test_the_file_is_a_sound_zip_with_further_records() -> None:
    """Checksums are right, records of our own are there, in their order and behind all tensors."""
    value = {"weight": torch.arange(1000.0)}
    records = {"note": b"{}", "digest": b"late"}
    data = written(value, records=records)
    assert data.index(value["weight"].numpy().tobytes()) < data.index(b"archive/note") < data.index(b"archive/digest")
    archive = zipfile.ZipFile(io.BytesIO(data))
    assert archive.testzip() is None
    assert (archive.read("archive/note"), archive.read("archive/digest")) == (b"{}", b"late")
    assert_state_equal(torch.load(io.BytesIO(data), weights_only=True), value)
    assert data[TorchFileWriter(value, records=records).place_of("digest") :].startswith(b"late")


@pytest.mark.parametrize("big", [False, True])
def test_a_file_laid_out_in_memory(monkeypatch, big) -> None:
    """With the bytes of its tensors and the checksums, which others fill in, it is the file that `write` gives."""
    if big:
        monkeypatch.setattr(torch_file, "_BIG", 1000)
    value = {"a": torch.arange(1000.0), "b": [torch.ones(3), torch.zeros(0)], "c": torch.arange(7, dtype=torch.uint8)}
    expected = written(value, records={"note": b"{}"})
    writer = TorchFileWriter(value, records={"note": b"{}"})
    memory = bytearray(b"\xaa" * (writer.size + 100))
    rows = writer.lay_out(memoryview(memory))
    for tensor, offset in zip(writer.tensors, writer.offsets, strict=True):
        memory[offset : offset + tensor.nbytes] = tensor.numpy().tobytes()
    assert len(rows) == 24 * writer.num_records
    for start, size, entry in struct.iter_unpack("<QQQ", rows):
        checksum = struct.pack("<I", zlib.crc32(memory[start : start + size]))
        assert memory[entry : entry + 4] == bytes(4)
        memory[entry : entry + 4] = memory[start + size + 4 : start + size + 8] = checksum
    assert bytes(memory) == expected + b"\xaa" * 100


def test_bytes_may_come_from_elsewhere() -> None:
    """The structure needs stand-ins only: tensors on the meta device, whose bytes are handed in."""
    stand_in = torch.empty(2, 3, dtype=torch.float32, device="meta")
    writer = TorchFileWriter({"a": stand_in, "again": stand_in, "p": torch.nn.Parameter(stand_in)})
    assert len(writer.tensors) == 1
    file = io.BytesIO()
    data = np.arange(6, dtype=np.float32).tobytes()
    writer.write(file.write, [[data[:8], data[8:]]])
    found = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert torch.equal(found["a"], torch.arange(6.0).reshape(2, 3))
    assert found["a"].data_ptr() == found["again"].data_ptr() == found["p"].data_ptr()
    with pytest.raises(ValueError, match="got 3 bytes, 24 were announced"):
        writer.write(io.BytesIO().write, [[b"123"]])


def test_equal_states_make_equal_files() -> None:
    """Nothing of time or chance is in a file."""
    data = written({"a": torch.ones(3), "b": [1]})
    assert data == written({"a": torch.ones(3), "b": [1]})
    dates = {entry.date_time for entry in zipfile.ZipFile(io.BytesIO(data)).infolist()}
    assert dates == {(1980, 1, 1, 0, 0, 0)}


def test_large_files_use_wide_fields(monkeypatch) -> None:
    """Sizes and offsets beyond the limit of 32 bits (here lowered) are written so that readers find everything."""
    monkeypatch.setattr(torch_file, "_BIG", 1000)
    monkeypatch.setattr(torch_file.struct, "pack", _with_marks(struct.pack))
    value = {"small": torch.ones(3), "big": torch.arange(1000.0), "after": torch.zeros(2)}
    data = written(value)
    archive = zipfile.ZipFile(io.BytesIO(data))
    assert archive.testzip() is None
    assert_state_equal(torch.load(io.BytesIO(data), weights_only=True), value)


def _with_marks(pack):
    """Write the lowered limit as the real one, which tells readers to look for the wide field."""

    def packed(layout: str, *values):
        return pack(layout, *(0xFFFFFFFF if value == 1000 and "Q" not in layout else value for value in values))

    return packed


def test_windows_of_strided_tensors(monkeypatch) -> None:
    """A tensor without plain memory is copied a few rows at a time, however wide its rows are."""
    monkeypatch.setattr(torch_file, "_WINDOW", 64)
    for tensor in (torch.arange(600.0).reshape(10, 60).t(), torch.arange(600.0).reshape(2, 3, 100).transpose(0, 2)):
        parts = [bytes(part) for part in tensor_bytes(tensor)]
        assert max(map(len, parts)) <= 64
        assert b"".join(parts) == tensor.contiguous().numpy().tobytes()


def test_what_the_reader_would_refuse_is_refused() -> None:
    """Functions, classes and objects do not get into a file, nor do tensors without plain memory."""
    for bad, name in ((print, "print"), (Path("x"), "PosixPath"), (frozenset([1]), "frozenset"), (Path, "Path")):
        with pytest.raises(UnsupportedStateError, match=name):
            TorchFileWriter({"a": [bad]})
    with pytest.raises(UnsupportedStateError, match="sparse"):
        TorchFileWriter(torch.eye(2).to_sparse())


def test_plain_forms_turn_back() -> None:
    """What torch's reader has no class for is typed JSON in the file, with its tensors beside it."""
    shared = torch.arange(4.0)
    value = {
        "queue": deque([1, shared, {"x": shared}], maxlen=5),
        "default": defaultdict(list, {"a": [shared, 1]}),
        "named": Point(shared, 2),
        "frozen": frozenset([1, 2]),
        "path": Path("x"),
        "array": np.arange(5, dtype=">i4"),
        "no_elements": np.zeros((0, 3)),
        "scalar": np.float32(3),
        "big": 2**5000,
        MARK: 3,
        "odd_keys": {frozenset([1]): shared, b"k": 1},
        "rng": random.getstate(),
        "nested": [{"a": deque([np.arange(3)])}],
        "dollar": {"$": 1},
    }
    found = from_plain(torch.load(io.BytesIO(written(to_plain(value))), weights_only=True))
    assert_state_equal(found, value)
    assert (type(found["queue"]), found["queue"].maxlen, type(found["default"])) == (deque, 5, defaultdict)
    assert found["queue"][1].data_ptr() == found["named"].x.data_ptr()
    generator = torch.Generator().manual_seed(3)
    again = from_plain(to_plain({"g": generator}))["g"]
    assert torch.equal(again.get_state(), generator.get_state())


def test_bad_nodes_are_damage() -> None:
    """A malformed stand-in for a value is an error that says so, not a wrong value."""
    for node in ({"$": "array"}, {"$": "unheard of"}, {"$": "deque", "v": 3}):
        with pytest.raises(CorruptCheckpointError):
            from_plain({MARK: node})
    with pytest.raises(UnsupportedStateError, match=r"state\['a'\]\[1\]"):
        to_plain({"a": [1, object()]})
