"""Indexes that are read together are what they are alone, and what is refused alone is refused."""

import random
from itertools import pairwise

import pytest

from holdfast.errors import CorruptCheckpointError, HoldfastError
from holdfast.format import index_group
from holdfast.format.division import Division
from holdfast.format.index import FileNumbers, Index, IndexFile, Piece, TensorEntry
from holdfast.format.index_group import IndexGroup, PieceTable, read_indexes

WORLD = 7
NAMES = ["model/layers.0.weight", 'model/layers.1."b"', "schlüssel/12/\u0007", "model/layers.10.weight", "w5\ud800"]


def file_of(rank, kind="model"):
    return f"{kind}-{rank:05d}-{{save_id}}.safetensors"


def index_of(rank, *, names=NAMES, num_boxes=2, dtype="float32", shift=0):
    """Describe rows of every tensor, in boxes that interleave with those of other ranks, and columns of the last."""
    files = (file_of(rank), file_of(rank, "optimizer"))
    tensors, ends = {}, dict.fromkeys(files, 8192 + shift)
    for number, name in enumerate(names):
        shape = (WORLD * num_boxes * 3, 4)
        pieces = []
        for turn in range(num_boxes):
            start, size = ((turn * WORLD + rank) * 3, 0), (3, 4)
            if number == len(names) - 1:
                shape, start, size = (5, WORLD * num_boxes * 2), (0, (turn * WORLD + rank) * 2), (5, 2)
            file, nbytes = files[number % 2], size[0] * size[1] * 4
            pieces.append(Piece(file, ends[file], nbytes, start, size))
            ends[file] += nbytes + rank
        tensors[name] = TensorEntry(name, dtype, shape, tuple(pieces))
    division = Division(num_ranks=WORLD, structure="8edfb3903f8")
    return Index(writer=rank, files=files, tensors=tensors, aliases={"tied 1": names[0]}, division=division)


def stored(rank, data=None, **options):
    return IndexFile(f"index-{rank}", "abcd0000-1", index_of(rank, **options).to_bytes() if data is None else data)


def alone(index, sizes=None):
    return Index.from_bytes(index.data, where=index.where, save_id=index.save_id, sizes=sizes)


def listed(indexes, files):
    """Return (name, dtype, shape, piece) of everything in single indexes and groups, in an order of its own."""
    rows, table = [], PieceTable(files)
    for one in indexes:
        if isinstance(one, IndexGroup):
            for entry, block in one.blocks():
                pieces = table.pieces([block], len(entry.shape))
                assert [pieces[at] for at in range(len(pieces))] == list(pieces)
                rows += [(entry.name, entry.dtype, entry.shape, piece) for piece in pieces]
        else:
            rows += [(name, e.dtype, e.shape, piece) for name, e in one.tensors.items() for piece in e.pieces]
    return sorted(rows, key=repr)


def compare(indexes, sizes=None):
    """Read them together and one by one."""
    files = FileNumbers()
    problems = {why(one, sizes) for one in indexes} - {""}
    if problems:
        with pytest.raises(HoldfastError) as raised:
            read_indexes(indexes, files, sizes=sizes)
        assert str(raised.value) in problems
        return None
    expected = listed([alone(one, sizes) for one in indexes], FileNumbers())
    found = read_indexes(indexes, files, sizes=sizes)
    assert listed(found, files) == expected
    writers = [w for one in found for w in (one.writers if isinstance(one, IndexGroup) else (one.writer,))]
    assert sorted(writers) == sorted(alone(one).writer for one in indexes)
    return found


def why(index, sizes):
    try:
        alone(index, sizes)
    except HoldfastError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("num_boxes", [1, 3])
@pytest.mark.parametrize("names", [NAMES[:1], NAMES[:4]])
def test_a_group_holds_what_its_indexes_hold(names, num_boxes, monkeypatch):
    """All writers become one group, read in several batches, with the pieces of each."""
    monkeypatch.setattr(index_group, "_BATCH", 1500)
    found = compare([stored(rank, names=names, num_boxes=num_boxes, shift=10**rank) for rank in range(WORLD)])
    assert [type(one) for one in found] == [IndexGroup]
    assert found[0].first.aliases == {"tied 1": names[0]}


def test_names_that_differ_in_digits_make_groups_of_their_own():
    """Half of the ranks hold other layers, the text differing in digits alone: two groups, whatever comes first."""
    for first in ("a", "w0"):
        names = [[first, "w2", "w4"], [first, "w3", "w5"], [first, "w2", "w05"]]
        found = compare([stored(rank, names=names[rank % 3]) for rank in range(WORLD)])
        assert sorted(len(one.writers) for one in found) == [2, 2, 3]


def test_what_is_not_alike_stays_alone():
    """Whole tensors, unknown dtypes, lone surrogates and indexes of ranks that hold different things."""
    found = compare([stored(rank) for rank in range(WORLD)])
    assert not any(isinstance(one, IndexGroup) for one in found)  # its last name is no Unicode
    whole = TensorEntry("w", "float32", (3,), (Piece("f", 0, 12),))
    texts = [Index(writer=rank, files=("f",), tensors={"w": whole}).to_bytes() for rank in range(3)]
    assert len(compare([stored(rank, data) for rank, data in enumerate(texts)])) == 3
    assert len(compare([stored(rank, names=NAMES[:2], dtype="int3") for rank in range(3)])) == 1
    assert compare([]) == []


def test_files_that_are_not_listed_are_refused():
    """A range beyond the end of a file, and a file that the manifest does not list, on a rank that is not the first."""
    texts = [stored(rank, names=NAMES[:2]) for rank in range(WORLD)]
    good = {path: 9000 for one in texts for path in alone(one).files}
    assert len(compare(texts, good)) == 1
    last = alone(texts[-1]).files[0]
    with pytest.raises(CorruptCheckpointError, match="has 8200 bytes"):
        read_indexes(texts, FileNumbers(), sizes={**good, last: 8200})
    del good[last]
    with pytest.raises(CorruptCheckpointError, match=r"index-6 .*(?:no file of|does not list)|index-6: .*no file"):
        read_indexes(texts, FileNumbers(), sizes=good)


PARTS = [
    b"0",
    b"00",
    b"7",
    b"-1",
    b"1.5",
    b"1e3",
    b"99999999999999999999",
    b"4611686018427387904",
    b" ",
    b",",
    b"]",
    b"[",
]
PARTS += [b"12", b"1" * 19, b'"', b"true", b"\xff", b'"tensors":[', b'"writer":1,', b'"per_rank":null,', b"}", b"}1"]


def broken(data, chance):
    """Change a few bytes of a text: mostly numbers, sometimes anything."""
    data = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(data))
        kind = chance.randrange(5)
        if kind < 3:  # another digit where there is one
            at = chance.choice([place for place, one in enumerate(data) if chr(one).isdigit()])
            data[at : at + 1] = chance.choice([b"0", b"1", b"8", b"", b"10", b"99"])
        elif kind == 3:
            data[at : at + chance.randrange(3)] = chance.choice(PARTS)
        else:
            data[at:at] = chance.choice(PARTS)
    return bytes(data)


@pytest.mark.parametrize("seed", range(8))
def test_changed_texts_are_what_they_are_alone(seed):
    """One index of several is changed at random: together it is accepted, refused and understood as it is alone."""
    chance = random.Random(seed)
    texts = [stored(rank, names=NAMES[:3], num_boxes=1 + seed % 2) for rank in range(4)]
    sizes = {path: 9000 for one in texts for path in alone(one).files}
    outcomes = set()
    for _ in range(250):
        changed = list(texts)
        at = chance.randrange(4)
        changed[at] = texts[at]._replace(data=broken(texts[at].data, chance))
        outcomes.add(compare(changed, sizes) is None)
    assert outcomes == {True, False}


def test_pieces_are_a_sequence():
    """Rows of numbers, and pieces that are objects, look the same."""
    files = FileNumbers()
    (group,) = read_indexes([stored(rank, names=NAMES[:1]) for rank in range(3)], files)
    ((entry, block),) = group.blocks()
    more = alone(stored(5, names=NAMES[:1])).tensors[NAMES[0]].pieces
    table = PieceTable(files)
    pieces = table.pieces([block, more], 2)
    assert len(pieces) == 8
    assert pieces[-1] == more[-1]
    assert pieces[6:] == tuple(more)
    assert pieces == tuple(pieces)
    assert hash(pieces) == hash(tuple(pieces))
    assert table.pieces([block], 2).boxes is table.pieces([block.copy()], 2).boxes
    assert all(one.offset < other.offset for one, other in pairwise(pieces[:2]))
    assert entry.name == NAMES[0]


@pytest.mark.parametrize(
    "second", ['"files":["nope"]', '"per_rank":3,"files":["a"]', '"files":["a"],"tensors":1,"x":[]']
)
def test_a_batch_of_which_none_is_of_the_kind(second: str) -> None:
    """All that wait are read one by one then: accepted, or refused in words, as each is alone."""
    first = '{"index":1,"writer":0,"files":["a"],"tensors":[["w","float32",[4],[[0,0,8,[0],[2]]]]]}'
    other = '{"index":1,"writer":1,' + second + ',"tensors":[["w","float32",[4],[[0,0,8,[2],[2]]]]]}'
    files = [IndexFile(f"index {n}", None, text.encode()) for n, text in enumerate((first, other))]
    sizes, refused = {"a": 8, "b": 8}, []
    for file in files:
        try:
            alone(file, sizes)
        except CorruptCheckpointError as error:
            refused.append(str(error))
    if refused:
        with pytest.raises(CorruptCheckpointError) as found:
            read_indexes(files, FileNumbers(), sizes=sizes)
        assert str(found.value) in refused
    else:
        assert len(read_indexes(files, FileNumbers(), sizes=sizes)) == 2
