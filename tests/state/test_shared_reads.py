"""Ranks of one machine that load together read each byte once, and never depend on each other."""

import itertools
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.format.manifest import FileEntry
from holdfast.state.load import restore, shared_reads
from holdfast.state.load.restore import load_state
from holdfast.state.load.selection import Fit
from holdfast.state.load.shared_reads import ChunkNumbers, PeerReadBuffer, SharedReadBuffer, SharedReads
from holdfast.storage import MemoryStorage

_numbers = itertools.count()
MIB = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Let little savings be worth it, and nobody wait long."""
    monkeypatch.setattr(shared_reads, "_WORTH", 1)
    monkeypatch.setattr(shared_reads, "_PATIENCE_S", 2.0)


class Ranks:
    """Threads that play the ranks of one machine."""

    def __init__(self, world):
        self.world = world
        self.values = {}
        self.barrier = threading.Barrier(world)

    def swap(self, rank):
        def give(group, value):
            self.values[group, rank] = value
            self.barrier.wait(20)
            return [self.values[group, one] for one in range(self.world)]

        return give

    def run(self, work):
        """Call ``work(rank, swap)`` on every rank; returns what each gave or raised."""
        outcome = [None] * self.world

        def call(rank):
            try:
                outcome[rank] = work(rank, self.swap(rank))
            except Exception as error:
                outcome[rank] = error

        threads = [threading.Thread(target=call, args=(rank,), name=f"rank {rank}") for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        return outcome


def saved(values):
    """Save a state into memory; returns the storage of its checkpoint."""
    storage = MemoryStorage(f"shared-{next(_numbers)}")
    hf.save(hf.Checkpoint.at(storage, "one"), values)
    return storage.child("one")


def test_replicated_state_is_read_once_for_all_ranks():
    """Four ranks that want everything read each byte once between them, and all have it."""
    values = {f"t{number}": torch.randn(700_001 + number) for number in range(6)}  # 16 MiB, over several turns of slots
    storage = saved({"w": values, "small": torch.arange(5)})

    def load(_, swap):
        live = {"w": {name: torch.zeros_like(one) for name, one in values.items()}, "small": torch.zeros(5, dtype=int)}
        loaded = load_state(storage, live, swap=swap)
        assert all(torch.equal(live["w"][name], one) for name, one in values.items())
        assert torch.equal(live["small"], torch.arange(5))
        return loaded.bytes_read

    read = Ranks(4).run(load)
    total = sum(value.nbytes for value in values.values())
    assert total <= sum(read) <= 1.02 * total, read
    assert max(read) <= 0.5 * total  # the work is divided


def test_columns_are_read_once_for_all_ranks():
    """Ranks that each want some columns of all rows (tensor parallel) read every row once between them."""
    values = torch.randn(2048, 520)  # blocks begin and end within rows
    storage = saved({"w": values})

    def load(rank, swap):
        live = torch.zeros(2048, 520)[:, 130 * rank : 130 * rank + 130]
        from holdfast.format.division import Box
        from holdfast.state.load.reader import read_tensors
        from holdfast.state.load.stored import open_stored
        from holdfast.state.load.targets import spans

        stored = open_stored(storage)
        entry = stored.entry("w")
        box, wanted = Box((0, 0), (2048, 520)), Box((0, 130 * rank), (2048, 130))
        requests = list(spans("w", entry.pieces[0], box, wanted, live, torch.float32))
        digests = stored.digests_of({request.file for request in requests})
        with shared_reads.reading_together(storage, stored.manifest, requests, digests, swap) as shared:
            alone = read_tensors(storage, requests, digests, shared=shared)
        assert torch.equal(live, values[:, 130 * rank : 130 * rank + 130])
        return alone + shared.bytes_read

    read = Ranks(4).run(load)
    assert sum(read) <= 1.05 * values.nbytes, read


def test_ranks_that_want_other_things_read_for_themselves():
    """Where nobody wants the same, nobody waits for anybody: no block is shared."""
    values = {f"t{number}": torch.randn(MIB) for number in range(4)}
    storage = saved(values)

    def load(rank, swap):
        live = {f"t{rank}": torch.zeros(MIB)}
        read = load_state(storage, live, Fit(only=f"t{rank}"), swap=swap).bytes_read
        assert torch.equal(live[f"t{rank}"], values[f"t{rank}"])
        return read

    assert sum(Ranks(4).run(load)) <= 1.05 * 16 * MIB


def test_a_rank_that_cannot_load_does_not_hold_up_the_others():
    """A state that does not fit on one rank is its own error; the others go back with what they have."""
    values = {"w": torch.randn(MIB)}
    storage = saved(values)

    def load(rank, swap):
        live = {"w": torch.zeros(MIB if rank else 5)}
        return load_state(storage, live, swap=swap).restored, bool(live["w"].any())

    wrong, *others = Ranks(3).run(load)
    assert isinstance(wrong, hf.StateMismatchError)
    assert others == [([], False)] * 2


def test_damage_is_found_by_every_rank_that_needs_the_bytes():
    """A flipped bit is found although another rank has read it; ranks that do not need it load."""
    storage = MemoryStorage(f"damaged-{next(_numbers)}")
    values = {"a": torch.randn(MIB), "b": torch.randn(MIB)}
    hf.save(hf.Checkpoint.at(storage, "one"), values)
    home = storage.child("one")
    from holdfast.state.load.stored import open_stored

    piece = open_stored(home).entry("a").pieces[0]
    data = bytearray(home.read(piece.file))
    data[piece.offset + 100_000] ^= 1
    home.put(piece.file, bytes(data))

    def load(rank, swap):
        wanted = ["b"] if rank == 2 else ["a", "b"]
        live = {name: torch.zeros(MIB) for name in wanted}
        load_state(home, live, Fit(only=wanted), swap=swap)
        return all(torch.equal(live[name], values[name]) for name in wanted)

    one, two, three = Ranks(3).run(load)
    assert isinstance(one, hf.CorruptCheckpointError)
    assert isinstance(two, hf.CorruptCheckpointError)
    assert three is True


def test_what_one_rank_reads_wrong_is_read_again_by_the_others(monkeypatch):
    """Bytes that are damaged on the way to one rank are not given to the others, and all of them load."""
    values = {f"t{number}": torch.randn(MIB) for number in range(4)}
    storage = saved(values)
    read_block = SharedReads._read_block

    def flip(reads, reader, block):
        if reads._me == 1 and block.turn == 1:
            inner = reader.read_into
            reader = SimpleNamespace(
                read_into=lambda offset, view: (inner(offset, view), view.__setitem__(5, 1 ^ view[5]))
            )
            flipped.append(block.number)
        read_block(reads, reader, block)

    flipped = []
    monkeypatch.setattr(SharedReads, "_read_block", flip)

    def load(_, swap):
        live = {name: torch.zeros(MIB) for name in values}
        load_state(storage, live, swap=swap)
        return all(torch.equal(live[name], one) for name, one in values.items())

    assert Ranks(3).run(load) == [True] * 3
    assert len(flipped) == 1


@pytest.mark.parametrize("differ", ["checkpoint", "verify"])
def test_ranks_share_only_what_is_the_same_for_both(differ, monkeypatch):
    """Two checkpoints of one shape (a newer one has come in between) are not mixed; neither are checks and none."""
    states = [{"w": torch.randn(2 * MIB)} for _ in range(2)]
    storages = [saved(states[0]), saved(states[1 if differ == "checkpoint" else 0])]
    monkeypatch.setattr(shared_reads, "SharedReads", None)  # nobody comes that far

    def load(rank, swap):
        live = {"w": torch.zeros(2 * MIB)}
        load_state(storages[rank], live, verify=differ != "verify" or rank == 0, swap=swap)
        return torch.equal(live["w"], states[rank if differ == "checkpoint" else 0]["w"])

    assert Ranks(2).run(load) == [True, True]


class Stuck(Exception):
    """A rank that stops in the middle of a load."""


@pytest.mark.parametrize("how", ["leaves", "hangs"])
def test_the_others_go_on_when_a_rank_stops_in_the_middle(how, monkeypatch):
    """A rank that fails or hangs after the ranks have divided the reading costs the others a wait, nothing else."""
    values = {f"t{number}": torch.randn(700_001) for number in range(8)}
    storage = saved(values)
    released = threading.Event()
    ranks = Ranks(3)

    def load(rank, swap):
        live = {name: torch.zeros_like(one) for name, one in values.items()}

        def stop(_):
            if how == "hangs":
                released.wait(30)
            raise Stuck

        try:
            load_state(storage, live, swap=swap, progress=stop if rank == 1 else None)
        finally:
            if rank != 1:
                done.append(rank)
                if len(done) == 2:
                    released.set()
        return all(torch.equal(live[name], one) for name, one in values.items())

    done = []
    monkeypatch.setattr(shared_reads, "_PATIENCE_S", 0.2)
    first, stuck, last = ranks.run(load)
    assert (first, last) == (True, True)
    assert isinstance(stuck, Stuck)


def test_what_a_rank_still_copies_stays_although_it_reads_for_nobody(monkeypatch):
    """A rank whose reading for others has failed goes on copying from them: its slots are not filled anew."""
    values = {f"t{number}": torch.randn(MIB) for number in range(5)}  # 10 blocks
    storage = saved(values)
    monkeypatch.setattr(shared_reads, "_SLOTS", 2)
    read_own, read_block, finished = SharedReads._read_own, SharedReads._read_block, threading.Event()

    def of_all(reads):
        read_own(reads)
        if reads._me == 1:
            finished.set()

    def of_block(reads, *args):
        if reads._me == 0:
            raise hf.StorageError("this rank cannot read for others")
        read_block(reads, *args)

    monkeypatch.setattr(SharedReads, "_read_own", of_all)
    monkeypatch.setattr(SharedReads, "_read_block", of_block)
    waits = iter([0.3])  # as long as the other rank would need to fill its slots anew

    def load(rank, swap):
        live = {name: torch.zeros_like(one) for name, one in values.items()}
        slow = (lambda _: finished.wait(next(waits, 0))) if rank == 0 else None
        load_state(storage, live, verify=False, swap=swap, progress=slow)
        return all(torch.equal(live[name], one) for name, one in values.items())

    assert Ranks(2).run(load) == [True, True]


def test_a_rank_that_cannot_take_part_says_so_at_once(monkeypatch):
    """Where one rank cannot map the desks of the others, these do not wait for it in vain."""
    values = {f"t{number}": torch.randn(700_001) for number in range(4)}
    storage, waits = saved(values), []
    wait, refused, loaded = shared_reads._wait, threading.local(), threading.Semaphore(0)
    monkeypatch.setattr(shared_reads, "_PATIENCE_S", 10.0)

    def noted(ready, sign):
        waits.append(wait(ready, sign))
        return waits[-1]

    def peer_buffer(described):
        if getattr(refused, "here", False):
            raise PermissionError("a sandbox")
        return PeerReadBuffer(described)

    monkeypatch.setattr(shared_reads, "PeerReadBuffer", peer_buffer)
    monkeypatch.setattr(
        shared_reads, "_wait", lambda *args, **named: (waits.append(wait(*args, **named)), waits[-1])[1]
    )

    def load(rank, swap):
        refused.here = rank == 1
        live = {name: torch.zeros_like(one) for name, one in values.items()}
        load_state(storage, live, swap=swap, progress=lambda _: loaded.acquire(timeout=20) if rank == 1 else None)
        loaded.release(100)  # the one that reads alone is slower than all others
        return all(torch.equal(live[name], one) for name, one in values.items())

    assert Ranks(3).run(load) == [True] * 3
    assert all(waits)


def test_a_damaged_table_of_digests_does_not_hold_up_the_others():
    """A rank that cannot read what it checks against says so, and the others go back with what they have."""
    values = {"w": torch.randn(MIB)}
    storage = saved(values)
    damaged = MemoryStorage(f"damaged-table-{next(_numbers)}")
    from holdfast.format.commit import read_manifest

    for info in storage.list(""):
        damaged.put(info.path, storage.read(info.path))
    for entry in read_manifest(storage, "").files:
        if entry.role == "digests":
            damaged.put(entry.path, bytes([storage.read(entry.path)[0] ^ 1]) + storage.read(entry.path)[1:])

    def load(rank, swap):
        live = {"w": torch.zeros(MIB)}
        loaded = load_state(storage if rank else damaged, live, swap=swap)
        return loaded.restored, bool(live["w"].any())

    wrong, *others = Ranks(3).run(load)
    assert isinstance(wrong, hf.CorruptCheckpointError)
    assert others == [([], False)] * 2


class Meets:
    """An object whose ``load_state_dict`` needs all ranks, as that around torch's ``set_state_dict`` does."""

    def __init__(self, ranks, value=0.0):
        self.ranks, self.value = ranks, torch.full((3,), value)

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.ranks.barrier.wait(20)
        self.value = state["value"]


@pytest.mark.parametrize("fails", ["fits not", "cannot read", "nowhere"])
def test_no_object_waits_for_a_rank_that_has_failed(fails, monkeypatch):
    """A state that does not fit on one rank, or damage that one finds: no object begins to wait for the others."""
    ranks = Ranks(3)
    storage = saved({"w": torch.ones(MIB), "meets": Meets(ranks, 1.0)})
    read = restore.read_tensors

    def read_tensors(*args, **options):
        if fails == "cannot read" and threading.current_thread().name == "rank 1":
            raise hf.CorruptCheckpointError("bytes differ")
        return read(*args, **options)

    monkeypatch.setattr(restore, "read_tensors", read_tensors)

    def load(rank, swap):
        live = {"w": torch.zeros(3 if fails == "fits not" and rank == 1 else MIB), "meets": Meets(ranks)}
        restored = load_state(storage, live, swap=swap).restored
        if fails == "fits not":
            assert not live["w"].any()
        return restored if live["meets"].value.any() else []

    first, wrong, last = ranks.run(load)
    if fails == "nowhere":
        assert first == wrong == last == ["w", "meets"]
    else:
        assert isinstance(wrong, hf.StateMismatchError if fails == "fits not" else hf.CorruptCheckpointError)
        assert first == last == []


def test_a_checkpoint_without_tensors_is_loaded_together():
    """Where there is nothing to share the ranks still meet, and load."""
    storage = saved({"n": 1, "text": "abc"})

    def load(_, swap):
        return load_state(storage, {"n": 0, "text": ""}, swap=swap).state["text"]

    assert Ranks(3).run(load) == ["abc"] * 3


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_division_is_even_and_complete(data):
    """Every block that several ranks want has one owner among them, all agree, and the work is even."""
    sizes = {"a": data.draw(st.integers(1, 40 * MIB)), "b": data.draw(st.integers(1, 9 * MIB))}
    numbers = ChunkNumbers(
        [FileEntry(path=path, size=size, digest="xxh3:0", role="tensors") for path, size in sizes.items()]
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    world = data.draw(st.integers(2, 5))
    share = data.draw(st.floats(0.0, 1.0))
    wants = [(torch.rand(numbers.total, generator=generator) < share).to(torch.uint8) for _ in range(world)]
    blocks = numbers.divide(wants)
    assert [block.number for block in blocks] == list(range(len(blocks)))
    turns = [[block.turn for block in blocks if block.owner == rank] for rank in range(world)]
    assert all(row == list(range(len(row))) for row in turns)
    for block in blocks:
        first = numbers.first[block.file] + block.offset // 65536
        rows = [want[first : first + 32] for want in wants]
        assert block.takers == tuple(rank for rank in range(world) if rows[rank].any())
        assert block.owner in block.takers
        assert len(block.takers) > 1
        assert block.chunks == tuple(torch.stack(rows).any(0).nonzero().flatten().tolist())


def test_a_rank_that_dies_is_noticed(tmp_path):
    """The buffer of a process that was killed says so, and what it has published stays readable."""
    script = (
        "import sys, time; from holdfast.state.load.shared_reads import SharedReadBuffer as Buffer; import json;"
        "buffer = Buffer(memoryview(bytearray(b'\\1' * 8)), 1 << 16); buffer.slots[:3] = b'abc'; buffer.publish(1);"
        "print(json.dumps(buffer.describe()), flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ})
    try:
        peer = PeerReadBuffer(json.loads(child.stdout.readline()))
        assert (bytes(peer.wanted), peer.published, peer.gone, peer.has_opened) == (b"\1" * 8, 1, False, False)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert peer.gone
    assert bytes(peer.slots[:3]) == b"abc"
    with pytest.raises(TypeError):
        peer.slots[0] = 1  # for reading only
    peer.close()


def test_two_threads_ask_for_the_same_rank():
    """A rank reads with two threads, and both look whether a neighbour still lives."""
    buffer = SharedReadBuffer(memoryview(bytearray(8)), 4096)
    peer = PeerReadBuffer(buffer.describe())
    begin = threading.Barrier(4)

    def ask() -> bool:
        begin.wait(60)
        return any(peer.gone for _ in range(20_000))

    with ThreadPoolExecutor(4) as threads:
        assert not any(answer.result(60) for answer in [threads.submit(ask) for _ in range(4)])
    peer.close()
    assert peer.gone
    buffer.close()


def test_another_process_in_the_place_of_a_rank_is_refused():
    """A descriptor that is another one by now is not taken for the buffer of a rank."""
    one, other = (SharedReadBuffer(memoryview(bytearray(8)), 4096) for _ in range(2))
    with pytest.raises(ValueError, match="not the buffer"):
        PeerReadBuffer({**one.describe(), "fd": other.describe()["fd"]})
    described = other.describe()
    other.close()
    with pytest.raises((OSError, ValueError)):
        PeerReadBuffer(described)
    one.close()
