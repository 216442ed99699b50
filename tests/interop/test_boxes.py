"""Tensors are put together from any boxes they are stored in, a window at a time, and every byte is checked."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.errors import CorruptCheckpointError
from holdfast.format.codec import dumps
from holdfast.format.commit import PartSummary, commit
from holdfast.format.digest import CHUNK
from holdfast.format.division import Box
from holdfast.interop import blobs
from holdfast.interop.blobs import Blob, BoxReader, DirectPartWriter, Row, assemble
from holdfast.interop.source import OpenedCheckpoint
from holdfast.storage import LocalStorage, MemoryStorage, StorageTraits


def cuts(shape: tuple[int, ...], data: st.DataObject) -> list[Box]:
    """Cut a shape into boxes: along random planes, box by box."""
    found = [Box((0,) * len(shape), shape)]
    for _ in range(data.draw(st.integers(0, 4)) if shape else 0):
        one = found.pop(data.draw(st.integers(0, len(found) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(0, one.shape[dim]))
        for low, size in ((0, at), (at, one.shape[dim] - at)):
            start = tuple(s + low * (d == dim) for d, s in enumerate(one.start))
            found.append(Box(start, tuple(size if d == dim else n for d, n in enumerate(one.shape))))
    return found


def part_of(array: np.ndarray, box: Box) -> bytes:
    return array[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))].tobytes()


def read_from(data: bytes, offset: int, view: memoryview) -> None:
    view[:] = data[offset : offset + len(view)]


@given(shape=st.lists(st.integers(0, 6), max_size=4), data=st.data(), window=st.integers(1, 64))
@settings(max_examples=200, deadline=None)
def test_any_boxes_in_any_windows_make_the_tensor(shape, data, window) -> None:
    """Whatever the shape, the cuts and the size of the window, the bytes are those of the whole array."""
    array = np.arange(int(np.prod(shape)), dtype=np.int16).reshape(shape)
    parts = [BoxReader(box, partial(read_from, part_of(array, box))) for box in cuts(tuple(shape), data)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blobs, "WINDOW", window)
        views = [bytes(view) for view in assemble("t", tuple(shape), 2, parts)]
    assert b"".join(views) == array.tobytes()
    assert all(len(view) <= max(2, window) for view in views)


def test_missing_and_doubled_boxes_are_damage() -> None:
    """A hole or an overlap is an error that names the tensor."""
    half = BoxReader(Box((0, 0), (1, 4)), partial(read_from, b"abcd"))
    for parts in ([half], [half, half], []):
        with pytest.raises(CorruptCheckpointError, match="weight"):
            list(assemble("weight", (2, 4), 1, parts))


def save_parts(storage, tensors: dict[str, tuple[np.ndarray, list[list[Box]]]]) -> None:
    """Commit a checkpoint of several ranks: for each tensor the boxes that each rank writes."""
    num_ranks = len(next(iter(tensors.values()))[1])
    summaries = []
    for rank in range(num_ranks):
        rows = []
        for name, (array, by_rank) in tensors.items():
            for box in by_rank[rank]:
                data = part_of(array, box)
                blob = Blob(name, str(array.dtype), box.shape, partial(iter, [memoryview(data)]), array.itemsize)
                rows.append(Row(name, blob, array.shape, box))
        writer = DirectPartWriter(storage, "ck", f"aaaaaaa{rank}-1", rank=rank)
        summary = writer.write(rows, {})
        if rank == 0:
            keys = [name.partition("/")[2] for name in tensors]
            tree = dumps({"model": {"$": "tensors", "at": "model/", "k": keys, "o": 1}})
            summary = PartSummary(writer=0, files=(*summary.files, writer.state(tree)))
        summaries.append(summary)
    commit(storage, "ck", {"checkpoint_id": "x", "world_size": num_ranks}, summaries)


@given(data=st.data(), num_ranks=st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_checkpoints_of_many_ranks_are_consolidated(data, num_ranks) -> None:
    """Boxes that several ranks have written come out whole, through files, digests and windows."""
    storage = MemoryStorage(f"boxes-{data.draw(st.uuids())}")
    tensors = {}
    for number in range(3):
        shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
        array = np.random.default_rng(number).integers(-99, 99, shape).astype(np.float32)
        pieces = [box for box in cuts(shape, data) if all(box.shape)]
        homes = [data.draw(st.integers(0, num_ranks - 1)) for _ in pieces]
        by_rank = [[box for box, home in zip(pieces, homes, strict=True) if home == rank] for rank in range(num_ranks)]
        tensors[f"model/{number}"] = (array, by_rank)
    try:
        save_parts(storage, tensors)
        with OpenedCheckpoint(storage.child("ck")) as source:
            for name, (array, _) in tensors.items():
                assert b"".join(bytes(view) for view in source.named(name).parts()) == array.tobytes()
    finally:
        storage.delete_tree("")


def test_digests_are_those_of_the_file_whatever_the_lengths_of_its_parts() -> None:
    """A tensor comes in parts of any length; what is stored is all of it, and fits its digests."""
    rng = random.Random(7)
    content = rng.randbytes((5 << 20) + 99)
    parts, at = [], 0
    while at < len(content):
        step = rng.choice((0, 1, 4096, CHUNK - 1, CHUNK, CHUNK + 1, 1 << 20, (2 << 20) + 1))
        parts.append(memoryview(content)[at : at + step])
        at += step
    storage = MemoryStorage("parts-of-any-length")
    blob = Blob("w", "uint8", (len(content),), partial(iter, parts), 1)
    writer = DirectPartWriter(storage, "ck", "aaaaaaaa-1")
    summary = writer.write([Row("w", blob, blob.shape)], {})
    files = (*summary.files, writer.state(dumps({"w": {"$": "tensor", "n": "w"}})))
    commit(storage, "ck", {"checkpoint_id": "x"}, [PartSummary(writer=0, files=files)])
    assert hf.Checkpoint.at(storage, "ck").verify().ok
    assert hf.load(hf.Checkpoint.at(storage, "ck"))["w"].numpy().tobytes() == content


def test_a_flipped_bit_is_found_and_named(tmp_path) -> None:
    """Export checks what it reads: a rotten tensor is an error, and nothing is left at the destination."""
    torch.manual_seed(0)
    hf.save(tmp_path / "ck", {"model": {"a": torch.randn(300, 100), "b": torch.randn(300, 100)}})
    (path,) = (tmp_path / "ck").glob("model-*")
    body = bytearray(path.read_bytes())
    body[-1000] ^= 4
    path.write_bytes(body)
    for to, name in (("torch", "x.pt"), ("safetensors", "x.safetensors"), ("dcp", "folder")):
        with pytest.raises(CorruptCheckpointError, match="'model/b'"):
            hf.export(tmp_path / "ck", tmp_path / name, to=to)
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]
    assert hf.export(tmp_path / "ck", tmp_path / "x.pt", to="torch", only="model/a").num_tensors == 1
    assert hf.export(tmp_path / "ck", tmp_path / "y.pt", to="torch", verify=False).num_tensors == 2


def test_a_lost_file_is_named(tmp_path) -> None:
    """Without its file a tensor cannot be exported, and the error says which."""
    hf.save(tmp_path / "ck", {"model": {"a": torch.ones(3)}})
    (path,) = (tmp_path / "ck").glob("model-*")
    path.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"is gone.*model/a|model/a.*is gone"):
        hf.export(tmp_path / "ck", tmp_path / "x.pt", to="torch")


def test_parts_are_split_at_the_size_of_the_storage(tmp_path, monkeypatch) -> None:
    """Files do not grow beyond what the storage wants; every tensor is found again."""
    monkeypatch.setattr(LocalStorage, "traits", StorageTraits(max_file_bytes=100))
    storage = LocalStorage(tmp_path)
    arrays = {f"model/{number}": np.full(20, number, np.float32) for number in range(4)}
    save_parts(storage, {name: (array, [[Box((0,), (20,))]]) for name, array in arrays.items()})
    assert len(list((tmp_path / "ck").glob("model-*"))) == 4
    found = hf.load(tmp_path / "ck")["model"]
    assert all(np.array_equal(found[name.partition("/")[2]], array) for name, array in arrays.items())
