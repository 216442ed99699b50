"""An index comes back as it was, and hostile ones are refused."""

from __future__ import annotations

import json

import pytest

from holdfast.errors import CorruptCheckpointError, FormatVersionError
from holdfast.format.index import Index, Piece, TensorEntry

FILE = "model-00000-{save_id}.safetensors"
REAL = "model-00000-deadbeef-1.safetensors"


def sample():
    tensors = {
        "w": TensorEntry(
            "w", "float32", (4, 2), (Piece(FILE, 4096, 16, (0, 0), (2, 2)), Piece(FILE, 4112, 16, (2, 0), (2, 2)))
        ),
        "s": TensorEntry("s", "int64", (), (Piece(FILE, 4128, 8),)),
        "e": TensorEntry("e", "bfloat16", (0, 3), (Piece(FILE, 4136, 0),)),
        "new": TensorEntry("new", "float3", (3,), (Piece(FILE, 4136, 5),)),
    }
    return Index(writer=3, files=(FILE,), tensors=tensors, aliases={"tied": "w"}, per_rank={"k": 1})


def test_round_trip_puts_the_save_id_in():
    """Everything comes back, with real file names."""
    index = sample()
    back = Index.from_bytes(index.to_bytes(), save_id="deadbeef-1", sizes={REAL: 5000})
    assert back.files == (REAL,)
    assert back.tensors["w"].pieces[1] == Piece(REAL, 4112, 16, (2, 0), (2, 2))
    assert back.tensors["s"] == TensorEntry("s", "int64", (), (Piece(REAL, 4128, 8),))
    assert (back.writer, back.aliases, back.per_rank) == (3, {"tied": "w"}, {"k": 1})
    assert Index.from_bytes(index.to_bytes()) == index


def change(**changes):
    tree = json.loads(sample().to_bytes())
    tree.update({"aliases": {}} if "tensors" in changes else {})  # of tensors that are not there any more
    tree.update(changes)
    return json.dumps(tree).encode()


def row(pieces, shape=(4,), dtype="float32", name="a"):
    return [name, dtype, list(shape), pieces]


HOSTILE = {
    "not an object": b"[]",
    "no tensors": b'{"index":1,"writer":0,"files":[]}',
    "path climbs": change(files=["../x"]),
    "path absolute": change(files=["/etc/passwd"]),
    "path backslash": change(files=["..\\x"]),
    "path number": change(files=[1]),
    "file number": change(tensors=[row([[7, 0, 16]])]),
    "negative file number": change(tensors=[row([[-1, 0, 16]])]),
    "negative offset": change(tensors=[row([[0, -8, 16]])]),
    "float offset": change(tensors=[row([[0, 0.0, 16]])]),
    "bool offset": change(tensors=[row([[0, True, 16]])]),
    "huge": change(tensors=[row([[0, 2**70, 16]])]),
    "beyond the file": change(tensors=[row([[0, 4990, 16]])]),
    "size mismatch": change(tensors=[row([[0, 0, 12]])]),
    "negative shape": change(tensors=[row([[0, 0, 16]], shape=(-2, -2))]),
    "box outside": change(tensors=[row([[0, 0, 8, [3], [2]]])]),
    "box dims": change(tensors=[row([[0, 0, 8, [0, 0], [2, 1]]])]),
    "box half": change(tensors=[row([[0, 0, 8, [0]]])]),
    "box negative": change(tensors=[row([[0, 0, 8, [-1], [2]]])]),
    "listed twice": change(tensors=[row([[0, 0, 16]]), row([[0, 16, 16]])]),
    "overlap": change(tensors=[row([[0, 0, 16]]), row([[0, 8, 16]], name="b")]),
    "overlap in another order": change(
        tensors=[row([[0, 8, 16]]), row([[0, 64, 16]], name="b"), row([[0, 0, 16]], name="c")]
    ),
    "overlap in one": change(tensors=[row([[0, 0, 8, [0], [2]], [0, 4, 8, [2], [2]]])]),
    "short row": change(tensors=[["a", "float32"]]),
    "name is a list": change(tensors=[row([], name=[1])]),
    "pieces are a number": change(tensors=[row(3)]),
    "tie to nowhere": change(aliases={"x": "nowhere"}),
    "tie of a tensor": change(aliases={"w": "s"}),
    "tie to a list": change(aliases={"x": []}),
    "writer": change(writer="0"),
    "many dims": change(tensors=[row([[0, 0, 4]], shape=(1,) * 100)]),
}


def test_what_the_hostile_ones_are_changed_from_is_read():
    """So each of them is refused for what it says, and for nothing else."""
    plain = change(tensors=[row([[0, 0, 8, [0], [2]], [0, 8, 8, [2], [2]]]), row([[0, 16, 16]], name="b")])
    assert len(Index.from_bytes(plain, save_id="deadbeef-1", sizes={REAL: 32}).tensors) == 2
    unordered = change(tensors=[row([[0, 16, 16]]), row([[0, 0, 16]], name="b")])
    assert len(Index.from_bytes(unordered, save_id="deadbeef-1", sizes={REAL: 32}).tensors) == 2


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_indexes_are_refused(data):
    """Each is CorruptCheckpointError naming the index."""
    with pytest.raises(CorruptCheckpointError, match=r"index\.json") as caught:
        Index.from_bytes(data, where="index.json", save_id="deadbeef-1", sizes={REAL: 5000})
    assert caught.value.file is not None


def test_a_file_that_is_not_part_of_the_checkpoint_is_refused():
    """Ranges must lie in files of the manifest."""
    with pytest.raises(CorruptCheckpointError, match="no file of this checkpoint"):
        Index.from_bytes(sample().to_bytes(), sizes={})


def test_a_newer_index_says_what_to_install():
    """A newer kind is told from a damaged one."""
    with pytest.raises(FormatVersionError, match="holdfast is needed: update the checkout"):
        Index.from_bytes(change(index=2))


def test_ten_thousand_tensors_stay_compact():
    """Below 90 bytes a row with names of ordinary length: linear and without repeated file names."""
    tensors = {
        f"model/layers.{i}.weight": TensorEntry(
            f"model/layers.{i}.weight", "float32", (16,), (Piece(FILE, 4096 + 64 * i, 64),)
        )
        for i in range(10_000)
    }
    data = Index(files=(FILE,), tensors=tensors).to_bytes()
    assert len(data) < 90 * 10_000
    assert Index.from_bytes(data).tensors == tensors


@pytest.mark.parametrize("shape", [[0, 2**61, 2**61], [2**61, 0], [2**31, 0, 2**31], [2**61]])
def test_shapes_that_nothing_can_hold_are_damage(shape):
    """Also of a tensor without an element: its strides would not fit, and torch and NumPy say so in their own words."""
    body = {"index": 1, "writer": 0, "files": ["a.safetensors"], "tensors": [["w", "float32", shape, [[0, 0, 0]]]]}
    with pytest.raises(CorruptCheckpointError, match="tensor 'w' has the shape"):
        Index.from_bytes(json.dumps(body).encode())
    body["tensors"][0][2] = [0, 2**20]
    assert Index.from_bytes(json.dumps(body).encode()).tensors["w"].shape == (0, 2**20)
