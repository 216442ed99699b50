"""Reading finds every damaged byte and says where it is."""

from __future__ import annotations

import itertools
import shutil
import threading
import time

import pytest
import torch
from actors_kit import at_every_line
from hypothesis import given, settings
from hypothesis import strategies as st
from process_kit import Background
from state_kit import assert_same, net

import holdfast as hf
from holdfast import Checkpoint
from holdfast.format.digest import Digests, chunk_digests
from holdfast.state.load import reader as reader_module
from holdfast.state.load.reader import BLOCK, BlockFeed, is_direct, read_tensors, split
from holdfast.state.load.stored import open_stored
from holdfast.state.load.targets import Pick, ReadRequest, can_pick, extent
from holdfast.storage import FileReader, MemoryStorage

_numbers = itertools.count()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Save tensors that span blocks, share chunks and lie at the edges of the file."""
    place = tmp_path_factory.mktemp("original") / "one"
    torch.manual_seed(0)
    state = {"model": {"big": torch.randn(700_000), "mid": torch.randn(40_000), "tiny": torch.randn(5)}}
    state["model"]["tail"] = torch.arange(300, dtype=torch.uint8)
    hf.save(place, state)
    return place, state


@pytest.fixture
def copy(original, tmp_path):
    """Give a copy of the checkpoint that a test may damage."""
    shutil.copytree(original[0], tmp_path / "copy")
    return tmp_path / "copy"


def damage(path, position):
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 0x40]))


def test_every_damaged_tensor_byte_is_found_and_named(original, copy):
    """One flipped bit anywhere in the data is a CorruptCheckpointError that names file, chunk and tensor."""
    checkpoint = Checkpoint(copy)
    entries = open_stored(checkpoint.storage.child(checkpoint.directory)).entries
    for name, entry in entries.items():
        (piece,) = entry.pieces
        for share in (0, 0.3, 0.5, 0.77, 1):
            position = piece.offset + int(share * (piece.nbytes - 1))
            damage(copy / piece.file, position)
            with pytest.raises(hf.CorruptCheckpointError) as caught:
                hf.load(copy)
            named = entries[caught.value.tensor].pieces[0]
            chunk = position // 65536
            assert named.offset < (chunk + 1) * 65536
            assert named.offset + named.nbytes > chunk * 65536
            assert (caught.value.file, caught.value.chunk) == (piece.file, chunk)
            if piece.nbytes > 200_000 and share == 0.5:
                assert caught.value.tensor == name
            damage(copy / piece.file, position)
    assert_same(hf.load(copy), original[1])


def test_damage_outside_of_what_is_loaded_does_no_harm(original, copy):
    """A part whose chunks are whole loads although another part is damaged."""
    checkpoint = Checkpoint(copy)
    piece = open_stored(checkpoint.storage.child(checkpoint.directory)).entries["model/big"].pieces[0]
    damage(copy / piece.file, piece.offset + 1_000_000)
    assert_same(hf.load(copy, only="model/tail")["model"]["tail"], original[1]["model"]["tail"])
    with pytest.raises(hf.CorruptCheckpointError):
        hf.load(copy, only="model/big")


def test_verify_false_reads_what_is_there(copy):
    """Without verification damaged data loads; the caller asked for that."""
    checkpoint = Checkpoint(copy)
    piece = open_stored(checkpoint.storage.child(checkpoint.directory)).entries["model/big"].pieces[0]
    damage(copy / piece.file, piece.offset + 1_000_000)
    assert hf.load(copy, verify=False)["model"]["big"].shape == (700_000,)


@pytest.mark.parametrize("role", ["index-*", "state-*.json", "digests-*", "manifest.json"])
def test_damaged_small_files_are_found(copy, role):
    """A flipped bit in any part of index, structure, digests or manifest is found before anything is read."""
    (path,) = copy.glob(role)
    size = path.stat().st_size
    for position in {0, size // 3, size // 2, size - 2}:
        damage(path, position)
        with pytest.raises((hf.CorruptCheckpointError, hf.FormatVersionError)):
            hf.load(copy)
        damage(path, position)
    hf.load(copy)


@pytest.mark.parametrize("role", ["model-*", "index-*", "state-*.json", "digests-*"])
@pytest.mark.parametrize("how", ["cut", "gone", "empty"])
def test_files_that_are_short_or_gone(copy, role, how):
    """A truncated or missing file is a damaged checkpoint that names the file, not some other error."""
    (path,) = copy.glob(role)
    if how == "gone":
        path.unlink()
    else:
        with path.open("r+b") as file:
            file.truncate(0 if how == "empty" else path.stat().st_size // 2)
    with pytest.raises(hf.CorruptCheckpointError, match=path.name) as caught:
        hf.load(copy)
    assert caught.value.file == path.name
    if role == "model-*":
        assert caught.value.tensor in ("model/big", "model/mid", "model/tiny", "model/tail")


def test_damage_reaches_the_caller_from_a_load_into_live_tensors(copy):
    """The error also comes when tensors are read in place, with strides and with a cast."""
    checkpoint = Checkpoint(copy)
    piece = open_stored(checkpoint.storage.child(checkpoint.directory)).entries["model/big"].pieces[0]
    damage(copy / piece.file, piece.offset + 2_000_000)
    for live in (torch.zeros(700_000), torch.zeros(1_400_000)[::2], torch.zeros(700_000, dtype=torch.float64)):
        with pytest.raises(hf.CorruptCheckpointError, match="model/big"):
            hf.load(copy, {"model": {"big": live}}, only="model/big", dtype=torch.float64)


def blob(size):
    """Return a storage with one file of ``size`` bytes, and the bytes."""
    storage = MemoryStorage(f"reader-{next(_numbers)}")
    data = torch.randint(0, 255, (size,), dtype=torch.uint8)
    storage.put("f", data.numpy().tobytes())
    return storage, data


def request(offset, target, nbytes=None):
    return ReadRequest(
        name=f"t{offset}", file="f", offset=offset, nbytes=nbytes or target.numel(), dtype=torch.uint8, target=target
    )


@pytest.mark.parametrize("size", [100, 3 << 20])
def test_a_tensor_that_ends_behind_the_file(size):
    """Also without digests: what is not there is never left as it was in the target, without a word."""
    storage, _ = blob(size)
    with pytest.raises(hf.CorruptCheckpointError, match="cut short"):
        read_tensors(storage, [request(size // 2, torch.zeros(size // 2 + 1, dtype=torch.uint8))], None)


def test_any_ranges_in_any_order():
    """Ranges of all sizes, adjacent, apart, in any order and wanted twice are all filled."""
    storage, data = blob(9_000_000)
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        cuts = torch.randint(0, 9_000_000, (12,), generator=generator).sort().values.tolist()
        rows = [
            request(start, torch.zeros(stop - start, dtype=torch.uint8))
            for start, stop in itertools.pairwise(cuts)
            if stop > start
        ]
        rows += [request(row.offset, torch.zeros_like(row.target)) for row in rows[::3]]
        rows += [request(row.offset, torch.zeros(2 * row.nbytes, dtype=torch.uint8)[::2]) for row in rows[::4]]
        rows.reverse()
        read_tensors(storage, rows, None)
        assert all(torch.equal(row.target, data[row.offset : row.offset + row.nbytes]) for row in rows)


def test_progress_counts_every_byte_read():
    """The bytes told to ``progress`` add up to what the call returns, which covers what was asked."""
    storage, _ = blob(3_000_000)
    seen = []
    total = read_tensors(storage, [request(0, torch.zeros(3_000_000, dtype=torch.uint8))], None, progress=seen.append)
    assert sum(seen) == total >= 3_000_000


def test_a_load_reads_each_byte_once(tmp_path):
    """Loading a model reads its tensors once: not per tensor, not per thread."""
    from holdfast.state.load.restore import load_state
    from holdfast.storage import LocalStorage

    model = net(0, width=400)
    hf.save(tmp_path / "one", {"model": model})
    loaded = load_state(LocalStorage(tmp_path / "one"), {"model": net(1, width=400)})
    size = next((tmp_path / "one").glob("model-*")).stat().st_size
    assert loaded.bytes_read <= size + 65536


def test_no_byte_is_written_beyond_the_memory_of_a_tensor():
    """A tensor whose storage was freed or is smaller than the bytes that are to come is refused, untouched."""
    storage, _ = blob(1_000_000)
    freed = torch.zeros(500_000, dtype=torch.uint8)
    freed.untyped_storage().resize_(0)
    cut = torch.zeros(500_000, dtype=torch.uint8)
    cut.untyped_storage().resize_(100_000)
    columns = torch.zeros((1000, 600), dtype=torch.uint8)[:, :500]
    columns.untyped_storage().resize_(599_999 - 100)
    for target in (freed, cut, columns):
        with pytest.raises(hf.StateMismatchError, match="freed or resized"):
            read_tensors(storage, [request(0, target, 500_000)], None)
    with pytest.raises(hf.StateMismatchError, match=r"needs 599900 bytes from its beginning.* ends after 599899"):
        read_tensors(storage, [request(0, columns, 500_000)], None)
    small = torch.zeros(10, dtype=torch.uint8)
    with pytest.raises(hf.StateMismatchError, match="500000 bytes are to be read into a tensor of 10"):
        read_tensors(storage, [request(0, small, 500_000)], None)
    assert not small.any()


@pytest.mark.parametrize("left", [0, 400, 799])
def test_a_load_writes_nothing_beyond_the_memory_of_a_tensor(tmp_path, left):
    """What is seen when a read is planned counts: a tensor whose storage was cut is named, whatever lies behind it."""
    hf.save(tmp_path / "one", {"weights": {"second": torch.ones(100), "other": torch.ones(100)}})
    both, other = torch.zeros(200), torch.zeros(100)
    second = both[100:]
    both.untyped_storage().resize_(left)
    with pytest.raises(hf.StateMismatchError, match=r"second: .* freed or resized"):
        hf.load(tmp_path / "one", into={"weights": {"second": second, "other": other}})


class Wrapping(torch.Tensor):
    """Has the shape and strides of another tensor, which holds the elements: no memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return operation(*(one.inner if isinstance(one, cls) else one for one in args), **(kwargs or {}))


@pytest.mark.parametrize("step", [1, 3], ids=["contiguous", "gaps"])
def test_a_tensor_that_wraps_another_is_filled_by_a_copy(step):
    """Its address is 0: nothing is written there, the tensor that it wraps gets the elements."""
    storage, data = blob(80)
    inner = torch.zeros((10, 8 * step), dtype=torch.uint8)[:, :8]
    assert not is_direct(Wrapping(inner), torch.uint8)
    assert not can_pick(Wrapping(inner), torch.uint8)
    read_tensors(storage, [request(0, Wrapping(inner))], None)
    assert torch.equal(inner, data.view(10, 8))


def test_a_tensor_without_memory_is_not_saved(tmp_path):
    """A tensor whose storage was freed is named, instead of a copy from nowhere."""
    freed = torch.zeros(500)
    freed.untyped_storage().resize_(0)
    with pytest.raises(hf.UnsupportedStateError, match=r"'w', a tensor of shape \[500\], has no memory"):
        hf.save(tmp_path / "one", {"w": freed})
    with pytest.raises(hf.UnsupportedStateError, match="has no memory"):
        hf.save(tmp_path / "one", {"m": [torch.nn.Parameter(freed)], "n": torch.ones(2)})


def test_an_interrupt_waits_for_the_other_thread():
    """When a Ctrl-C ends a read, nothing is written to the targets any more by the time the caller hears of it."""
    storage, _ = blob(40_000_000)
    target = torch.zeros(40_000_000, dtype=torch.uint8)
    main, others = threading.current_thread(), set(threading.enumerate())

    def interrupt(_):
        if threading.current_thread() is main:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_tensors(storage, [request(0, target)], None, progress=interrupt)
    before = target.clone()
    assert not [one for one in set(threading.enumerate()) - others if one.name == "holdfast-read"]
    assert torch.equal(target, before)


def test_no_interrupt_is_too_many_for_the_other_thread():
    """However often Ctrl-C comes: when the caller hears of it, the other thread is done with the targets."""
    storage, _ = blob(40_000_000)
    other, target = Background(), torch.zeros(40_000_000, dtype=torch.uint8)
    with other.interrupts():
        with pytest.raises(KeyboardInterrupt):
            read_tensors(storage, [request(0, target)], None, progress=lambda _: other.work())
        assert other.over.is_set()


MIB = 1 << 20


class Reader(FileReader):
    """Writes down the hints."""

    ahead_bytes = 64 * MIB

    def __init__(self) -> None:
        self.size = 0
        self.hints: list[tuple[int, int]] = []

    def read_into(self, offset: int, view: memoryview) -> None:
        raise AssertionError("nothing is read here")

    def will_read(self, offset: int, size: int) -> None:
        self.hints.append((offset, size))

    def close(self) -> None:
        pass


def test_hints_cover_every_block_once_in_ranges_of_one_request() -> None:
    """No hint is larger than the 8 MiB that a storage asks for at once, else each would cost a second, small one."""
    blocks: list[tuple[int, int, int]] = []
    place = 0
    for owner, nbytes in enumerate([3 * MIB + 512, 40 * MIB + 4096, 100, BLOCK, 7 * MIB]):
        split(place, place + nbytes, owner, blocks)
        place += nbytes
    reader = Reader()
    feed = BlockFeed(blocks, reader)
    taken = []
    while (block := feed.take()) is not None:
        taken.append(block)
        assert sum(size for _, size in reader.hints) >= min(place, block[0] + reader.ahead_bytes)
    assert taken == blocks
    assert max(size for _, size in reader.hints) <= 8 * MIB
    ends = [0, *(offset + size for offset, size in reader.hints)]
    assert [offset for offset, _ in reader.hints] == ends[:-1]
    assert ends[-1] == place


def test_hints_leave_gaps_out() -> None:
    """What nobody wants is not announced."""
    blocks: list[tuple[int, int, int]] = []
    split(0, MIB, 0, blocks)
    split(10 * MIB, 11 * MIB, 1, blocks)
    reader = Reader()
    BlockFeed(blocks, reader).take()
    assert reader.hints == [(0, MIB), (10 * MIB, MIB)]


DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.complex64)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_part_is_picked_from_pieces_in_any_order(data):
    """Whatever the box, the dtype, the gaps of the target and the pieces: the part is there, and nothing else is."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    wanted = tuple(
        slice(start, data.draw(st.integers(start + 1, size))) for start, size in zip(starts, shape, strict=True)
    )
    dtype = data.draw(st.sampled_from(DTYPES))
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    stored = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    gaps = data.draw(st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape)))
    around = torch.zeros([one.stop - one.start + gap for one, gap in zip(wanted, gaps, strict=True)], dtype=dtype)
    inside = tuple(slice(0, one.stop - one.start) for one in wanted)
    assert can_pick(around[inside], dtype)
    pick = Pick(around[inside], tuple(shape), wanted)
    edges = sorted({0, nbytes, *data.draw(st.lists(st.integers(0, nbytes), max_size=6))})
    pieces = data.draw(st.permutations(list(itertools.pairwise(edges))))
    for low, high in pieces:
        pick.take(low, stored.data_ptr() + low, high - low)
    expected = torch.zeros_like(around)
    expected[inside] = stored.view(dtype).view(shape)[wanted]
    assert torch.equal(around.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(4, 1).expand(4, 3),
        torch.zeros(3, 4).T,
        torch.zeros(8)[::2],
        torch.zeros(12).as_strided((3, 4), (2, 1)),
        torch.zeros((4, 3), dtype=torch.float64),
        torch.zeros((4, 3), device="meta"),
        torch.zeros(()),
        torch.zeros(4, 3).to_sparse(),  # has no address, and raises if it is asked for it
    ],
    ids=["expanded", "transposed", "strided", "overlapping", "dtype", "device", "scalar", "sparse"],
)
def test_targets_that_bytes_cannot_be_copied_into(target):
    """Where rows share memory, have holes or another order, where a cast is needed or no row is, torch has to do it."""
    assert not can_pick(target, torch.float32)


def test_where_the_memory_of_a_tensor_ends():
    """The extent goes to the end of the last element, gaps included."""
    assert extent(torch.zeros(4, 6)[:, :2]) == (3 * 6 + 2) * 4
    assert extent(torch.zeros(0, 6)) == 0
    assert extent(torch.zeros(())) == 4


class TwoThreads(FileReader):
    """Zeros, of which the second thread's are damaged; the first thread waits until the second has read some."""

    num_blocks = 24
    size, ahead_bytes = num_blocks * BLOCK, 0

    def __init__(self, first):
        self.first, self.second_has_read, self.num_reads = first, threading.Event(), 0

    def read_into(self, offset, view):
        self.num_reads += 1
        view[:] = bytes(len(view))
        if threading.get_ident() == self.first:
            self.second_has_read.wait(30)
            time.sleep(0.02)  # as a disk takes, so that the other thread comes to say what it has found
        else:
            view[5] ^= 1
            self.second_has_read.set()

    def will_read(self, offset, nbytes):
        pass

    def close(self):
        pass


class OneFile(MemoryStorage):
    """Has one file for two threads."""

    def open(self, path):
        self.reader = TwoThreads(threading.get_ident())
        return self.reader


def test_damage_that_the_second_thread_finds_is_an_error():
    """Whichever thread reads a block, nobody gets the bytes; the other one does not read the rest in vain."""
    storage = OneFile(f"threads-{next(_numbers)}")
    target = torch.empty(TwoThreads.size, dtype=torch.uint8)
    request = ReadRequest("w", "f", 0, TwoThreads.size, torch.uint8, target)
    digests = Digests({"f": chunk_digests(bytes(TwoThreads.size))})
    with pytest.raises(hf.CorruptCheckpointError, match="'w'"):
        read_tensors(storage, [request], digests)
    assert storage.reader.num_reads < TwoThreads.num_blocks


class Hints:
    """Takes hints."""

    ahead_bytes = 3

    def will_read(self, offset, nbytes):
        pass


def test_each_block_is_handed_out_once():
    """Though another thread asks between any two lines of the handing out."""
    blocks = [(number, 1, -1) for number in range(8)]
    taken = []

    def between(feed):
        thread = threading.Thread(target=lambda: taken.append(feed.take()))
        thread.start()
        thread.join(0.01)  # it may have to wait until we are done
        taken.append(thread)

    for feed, own in at_every_line((reader_module,), lambda: BlockFeed(blocks, Hints()), BlockFeed.take, between):
        for thread in [one for one in taken if isinstance(one, threading.Thread)]:
            thread.join(30)
        found = [own, *(one for one in taken if isinstance(one, tuple))]
        while (block := feed.take()) is not None:
            found.append(block)
        assert sorted(found) == blocks
        taken.clear()
