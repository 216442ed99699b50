"""Files are ordinary safetensors; headers of others are believed in nothing."""

from __future__ import annotations

import json
import random

import pytest

from holdfast.errors import CorruptCheckpointError
from holdfast.format.tensor_file import BLOCK, DTYPES, item_size, lay_out, read_header, split_by_size
from holdfast.storage import MemoryStorage


def reader_of(data):
    storage = MemoryStorage(f"layout-{random.random()}")
    storage.put("f", data)
    return storage.open("f")


def raw(header, size=64):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def test_safetensors_opens_what_we_write(tmp_path):
    """Every dtype of torch, 0-dim and empty tensors too: the library gives back the same bits (bytes where it must)."""
    torch = pytest.importorskip("torch")
    load_file = pytest.importorskip("safetensors.torch").load_file
    shapes = [(), (0,), (3, 2), (2, 0, 3)]
    names = [*DTYPES, "complex64", "complex128", "float8_e4m3fnuz"]
    tensors = {
        f"{name}.{number}": torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(getattr(torch, name))
        for name in names
        for number, shape in enumerate(shapes)
    }
    rows, bodies = [], []
    for name, tensor in tensors.items():
        body = tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        rows.append((name, str(tensor.dtype)[6:], tuple(tensor.shape), len(body)))
        bodies.append(body)
    file = lay_out(rows)
    header, data = file.header, b"".join(bodies[one] for one in file.order)
    names = [rows[one][0] for one in file.order]
    assert len(header) % BLOCK == 0
    assert file.size == len(header) + len(data)
    path = tmp_path / "x.safetensors"
    path.write_bytes(header + data)
    loaded = load_file(path)
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype)[6:]
        if dtype in DTYPES:
            assert loaded[name].dtype == tensor.dtype
            assert loaded[name].shape == tensor.shape
        assert loaded[name].flatten().view(torch.uint8).tolist() == tensor.flatten().view(torch.uint8).tolist()
        assert item_size(dtype) == tensor.element_size()
    start, entries, _ = read_header(reader_of(header + data))
    assert start == len(header)
    assert list(entries) == names
    for name, _, _, nbytes in rows:
        assert entries[name].nbytes == nbytes
        width = item_size(str(tensors[name].dtype)[6:])
        assert entries[name].offset % width == 0
        assert entries[name].offset == file.offsets[list(tensors).index(name)]


def test_small_tensors_do_not_move_large_ones_off_the_cache_lines():
    """Adam's step counts lie behind its moments, whatever the order of the state and the width of their elements."""
    rows = []
    for layer in range(3):
        rows += [(f"{layer}.step", "float64", (), 8), (f"{layer}.exp_avg", "float32", (5, 16), 320)]
        rows += [(f"{layer}.half", "float16", (64,), 128), (f"{layer}.odd", "float32", (3,), 12)]
    file = lay_out(rows)
    large = [file.offsets[number] for number, (*_, nbytes) in enumerate(rows) if nbytes % 64 == 0]
    assert [offset % 64 for offset in large] == [0] * 6
    assert max(large) < min(set(file.offsets) - {*large})
    assert all(file.offsets[number] % item_size(dtype) == 0 for number, (_, dtype, *_) in enumerate(rows))


def test_reads_what_safetensors_writes(tmp_path):
    """The reader takes files of the library itself."""
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(2, 2)}, tmp_path / "x", {"k": "v"})
    data = (tmp_path / "x").read_bytes()
    entries = read_header(reader_of(data)).entries
    assert {name: (entry.dtype, entry.shape) for name, entry in entries.items()} == {
        "a": ("BF16", (3,)),
        "b": ("F32", (2, 2)),
    }
    assert data[entries["b"].offset :][:16] == torch.ones(4).numpy().tobytes()


def test_names_that_safetensors_cannot_have_are_bent(tmp_path):
    """The metadata key, surrogates and the collisions this makes still give a file that opens."""
    load_file = pytest.importorskip("safetensors.torch").load_file
    rows = [(name, "uint8", (1,), 1) for name in ("__metadata__", "\udc80", "\\udc80", "é")]
    path = tmp_path / "x"
    path.write_bytes(lay_out(rows).header + b"1234")
    assert set(load_file(path)) == {"__metadata__~", "\\udc80", "\\udc80~", "é"}


def entry(dtype="F32", shape=(4,), offsets=(0, 16), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


HOSTILE = {
    "no header": b"123",
    "giant length": (2**63).to_bytes(8, "little") + bytes(100),
    "length beyond the file": (1000).to_bytes(8, "little") + bytes(100),
    "not JSON": raw(b"{", 0),
    "an array": raw([], 0),
    "duplicate": raw(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{}}', 1),
    "deep": raw(b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    "NaN size": raw(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,16]}}', 16),
    "float size": raw({"a": entry(shape=(4.0,))}, 16),
    "bool size": raw({"a": entry(shape=(True, 4))}, 16),
    "negative": raw({"a": entry(shape=(-4,), offsets=(16, 0))}, 16),
    "negative shape": raw({"a": entry(shape=(-2, -2))}, 16),
    "reversed": raw({"a": entry(offsets=(16, 0))}, 16),
    "shape mismatch": raw({"a": entry(shape=(5,))}, 16),
    "overflow": raw({"a": entry(shape=(2**32, 2**32, 2**32))}, 16),
    "out of range": raw({"a": entry(offsets=(0, 16))}, 8),
    "hole": raw({"a": entry(offsets=(8, 24))}, 24),
    "hole beyond the end": raw({"a": entry(offsets=(8, 24))}, 16),
    "overlap": raw({"a": entry(), "b": entry(offsets=(8, 24))}, 24),
    "tail": raw({"a": entry()}, 17),
    "three offsets": raw({"a": entry(offsets=(0, 8, 16))}, 16),
    "list as dtype": raw({"a": entry(dtype=["F32"])}, 16),
    "missing shape": raw({"a": {"dtype": "F32", "data_offsets": [0, 16]}}, 16),
    "not an object": raw({"a": 3}, 16),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_headers_are_refused(data):
    """Each is CorruptCheckpointError naming the file, and nothing large is allocated for it."""
    with pytest.raises(CorruptCheckpointError, match=r"x\.safetensors") as caught:
        read_header(reader_of(data), "x.safetensors")
    assert caught.value.file == "x.safetensors"


def test_a_row_that_contradicts_itself_is_not_written():
    """Bytes that do not make the shape would be found only on load."""
    with pytest.raises(ValueError, match="'a'"):
        lay_out([("a", "float32", (3,), 13)])


def test_tensors_are_divided_over_files_by_their_bytes():
    """Each file holds what fits, in order; a tensor beyond the limit is alone, and no limit means one file."""
    assert list(split_by_size([3, 3, 3, 9, 1, 2], 6)) == [[0, 1], [2], [3], [4, 5]]
    assert list(split_by_size([3, 9], None)) == [[0, 1]]
    assert list(split_by_size([], 6)) == []
