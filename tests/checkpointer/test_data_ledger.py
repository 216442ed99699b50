"""The ledger of batches: loaders that resume wrongly are said before a step is trained, and healthy ones never are."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

import holdfast as hf
from holdfast.run.data_ring import NUM_ENTRIES, DataRing, RingEntry, read_rings

Make = Callable[[int], Any]  # a life (0, 1, ...) -> its loader


class Killed(BaseException):
    """Ends a life without the save that leaving makes."""


def life(path: Path, loader: Any, *, until: int, save_at: int = 0, epochs: int = 4, **options: Any) -> list[Any]:
    """Train on the loader until a step, and fall over; return the batches that were trained."""
    model = torch.nn.Linear(1, 1)
    trained: list[Any] = []
    options.setdefault("every", None)
    try:
        with hf.Checkpointer(path, {"model": model}, **options) as ck:
            for _ in ck.epochs(epochs):
                for batch in ck.batches(loader):
                    trained.append(batch)
                    ck.step()
                    if ck.global_step == save_at:
                        ck.save()
                    if ck.global_step == until == save_at:
                        return trained  # in order: everything is saved, and nothing is known of what comes next
                    if ck.global_step == until:
                        raise Killed
    except Killed:
        pass
    return trained


class Stateful:
    """Gives batches of a list, and tells its position, as a StatefulDataLoader does."""

    def __init__(self, count: int = 24, *, start: int = 0) -> None:
        self.count, self.start = count, start
        self.at = 0

    def batch(self, number: int) -> Any:
        return torch.arange(4) + 4 * number + self.start

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.count:
            self.at += 1
            yield self.batch(self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Restarts(Stateful):
    """Its state is not used: every life begins at sample 0."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class RestartsSecond(Stateful):
    """As `datasets` 5.0.0: right once, and what it says after that resume is the beginning."""

    resumed = False

    def state_dict(self) -> dict[str, Any]:
        return {"at": 0 if self.resumed else self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.resumed = state["at"], True


class Prefetched(Stateful):
    """Its workers have prefetched three batches before the state is set."""

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice((self.batch(number) for number in range(3)), 3 if self.at else 0)
        yield from super().__iter__()


class Ahead(Stateful):
    """Its state counts what workers have fetched: batches are left out."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at + 2}


class Behind(Stateful):
    """Its state is that of three batches ago."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": max(0, self.at - 3)}


class Skips(Stateful):
    """After a resume it says that the epoch is over."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = self.count


class Reordered(Stateful):
    """After a resume its order is another one."""

    order = range(24)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.order = list(reversed(range(24)))

    def batch(self, number: int) -> Any:
        return super().batch(self.order[number])


class Other(Stateful):
    """Another data set of the same size in the second life."""


class Own(Dataset[int]):
    """Twenty-four samples."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        return index


SHARED = random.Random(0)


class Hidden(Sampler[int]):
    """Draws from a generator of the module, which nobody can see."""

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        order = list(range(24))
        SHARED.shuffle(order)
        return iter(order)


class HiddenBatches(Sampler[list[int]]):
    """Batches of buckets in an order that a generator of the module decides."""

    def __iter__(self) -> Iterator[list[int]]:
        buckets = [list(range(start, start + 4)) for start in range(0, 24, 4)]
        SHARED.shuffle(buckets)
        return iter(buckets)

    def __len__(self) -> int:
        return 6


class Unrepeatable(IterableDataset[int]):
    """A stream that is shuffled otherwise whenever it is read."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(24))
        SHARED.shuffle(order)
        return iter(order)


WRONG: dict[str, tuple[Make, str]] = {
    "restarts at sample 0": (lambda life: Restarts(), "gave batch 0 of this epoch again"),
    "restarts at the second resume": (lambda life: RestartsSecond(), "gave batch 0 of this epoch again"),
    "workers prefetched before the state was set": (lambda life: Prefetched(), "gave batch 0 of this epoch again"),
    "leaves out what was fetched": (lambda life: Ahead(), "would be left out"),
    "stale state": (lambda life: Behind(), "of this epoch again"),
    "skips the epoch": (lambda life: Skips(), "says that the epoch is over"),
    "another order": (lambda life: Reordered(), "gave another one"),
    "another data set": (lambda life: Other(start=1000 * life), "gave another one"),
    "a sampler with a hidden generator": (
        lambda life: DataLoader(Own(), 4, sampler=Hidden()), "order"),
    "a batch sampler with a hidden generator": (
        lambda life: DataLoader(Own(), batch_sampler=HiddenBatches()), "order"),
    "a stream that is not repeatable": (lambda life: DataLoader(Unrepeatable(), 4), "gave another one"),
    "other contents of the same samples": (
        lambda life: DataLoader([torch.tensor([i + 100.0 * life]) for i in range(24)], 4, shuffle=True),  # type: ignore[arg-type]
        "other contents"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_loader_that_resumes_wrongly_is_said_at_its_first_batch(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What is certain stops before the step, what only looks different is a warning; neither comes a batch late."""
    make, text = WRONG[name]
    SHARED.seed(0)
    run = tmp_path / "run"
    second = name == "restarts at the second resume"
    life(run, make(0), until=9, save_at=3)
    if second:
        life(run, make(1), until=9, save_at=4)
    assert not caplog.records
    said = ""
    with caplog.at_level(logging.WARNING, "holdfast"):
        try:
            trained = life(run, make(2), until=5 if second else 4)
        except hf.StateMismatchError as error:
            said, trained = str(error), []
    warned = [record.getMessage() for record in caplog.records]
    assert text in (said or "".join(warned)), (said, warned)
    assert bool(said) != bool(trained)
    if said:
        assert f"step {5 if second else 4}, epoch 0" in said


class Growing(Stateful):
    """An endless stream whose data begin anew after seven batches."""

    def batch(self, number: int) -> Any:
        return super().batch(number % 7)


class Constant(Stateful):
    """The same batch all the time, as in a benchmark."""

    def batch(self, number: int) -> Any:
        return torch.zeros(4, 4)


class Lines(IterableDataset[str]):
    """Lines of text, of which many are equal."""

    def __iter__(self) -> Iterator[str]:
        return iter(["", "to be", "or", "not", "to be", "", "that", "is", "", "the question"] * 3)


class Numbers(IterableDataset[int]):
    """A plain stream."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


class Augmented(Dataset[torch.Tensor]):
    """Random augmentation by torch's own generator."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3) + index


class OwnGenerator(Augmented):
    """Random augmentation by generators of the data set."""

    def __init__(self) -> None:
        self.dice, self.generator = random.Random(0), torch.Generator().manual_seed(0)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3, generator=self.generator) + index + self.dice.random()


class InPlace(Sampler[int]):
    """Shuffles its own list in place, as MPerClassSampler does, and counts its epochs."""

    def __init__(self) -> None:
        self.order, self.passes, self.dice = list(range(24)), 0, [random.Random(7)]

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        self.dice[0].shuffle(self.order)
        self.order.append(self.order.pop(self.passes % 24))
        return iter(list(self.order))


class InPlaceBatches(Sampler[list[int]]):
    """Batches of buckets that are shuffled in place."""

    def __init__(self) -> None:
        self.buckets = [list(range(start, start + 4)) for start in range(0, 24, 4)]

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        random.shuffle(self.buckets)
        yield from list(self.buckets)


def noisy(samples: list[Any]) -> Any:
    return torch.as_tensor(samples) + torch.rand(len(samples))


def table(kind: str) -> list[Any]:
    samples: dict[str, Any] = {
        "dict": [{"x": torch.full((2,), float(i)), "y": i} for i in range(24)],
        "tuple": [(torch.full((2,), float(i)), i) for i in range(24)],
        "text": [f"line {i}" for i in range(24)],
        "nested": [{"a": [{"b": torch.tensor(i)}], "c": str(i)} for i in range(24)],
    }
    return samples[kind]  # type: ignore[no-any-return]


HEALTHY: dict[str, Make] = {
    "in order": lambda life: DataLoader(Own(), 4),
    "shuffled": lambda life: DataLoader(Own(), 4, shuffle=True),
    "drop_last": lambda life: DataLoader(Own(), 5, shuffle=True, drop_last=True),
    "a short last batch": lambda life: DataLoader(Own(), 5, shuffle=True),
    "one sample a batch": lambda life: DataLoader(Own(), 1, shuffle=True),
    "no batches": lambda life: DataLoader(Own(), batch_size=None),
    "with replacement": lambda life: DataLoader(
        Own(), 4, sampler=torch.utils.data.RandomSampler(Own(), replacement=True)),
    "weighted": lambda life: DataLoader(Own(), 4, sampler=torch.utils.data.WeightedRandomSampler([1.0] * 24, 24)),
    "subset": lambda life: DataLoader(Own(), 4, sampler=torch.utils.data.SubsetRandomSampler(range(20))),
    "batch sampler": lambda life: DataLoader(Own(), batch_sampler=BatchSampler(range(24), 4, drop_last=False)),
    "augmented": lambda life: DataLoader(Augmented(), 4, shuffle=True),
    "augmented, other number of workers": lambda life: DataLoader(Augmented(), 4, shuffle=True, num_workers=life % 2),
    "own generators": lambda life: DataLoader(OwnGenerator(), 4, shuffle=True),
    "random collate": lambda life: DataLoader(Own(), 4, shuffle=True, collate_fn=noisy),
    "shuffled in place": lambda life: DataLoader(Own(), 4, sampler=InPlace()),
    "batches shuffled in place": lambda life: DataLoader(Own(), batch_sampler=InPlaceBatches()),
    "dict": lambda life: DataLoader(table("dict"), 4, shuffle=True),
    "tuple": lambda life: DataLoader(table("tuple"), 4, shuffle=True),
    "text": lambda life: DataLoader(table("text"), 4, shuffle=True),
    "nested": lambda life: DataLoader(table("nested"), 4, shuffle=True),
    "a batch sampler of another batch size": lambda life: DataLoader(
        Own(), batch_sampler=BatchSampler(range(24), (2, 3, 4, 4, 4)[life], drop_last=False)),
    "weighted, with other batch sizes": lambda life: DataLoader(
        Own(), (1, 2, 4, 4, 4)[life], sampler=torch.utils.data.WeightedRandomSampler([1.0] * 24, 24)),
    "drop_last from the second life on": lambda life: DataLoader(Own(), 5, shuffle=True, drop_last=life > 0),
    "another batch size": lambda life: DataLoader(Own(), 4 if life else 2, shuffle=True),
    "loader with a state": lambda life: Stateful(),
    "endless data": lambda life: Growing(),
    "the same batch all the time": lambda life: Constant(),
    "a list": lambda life: [torch.arange(3) + i for i in range(8)],
    "a list of equal batches": lambda life: [torch.ones(3)] * 8,
    "text with equal lines": lambda life: DataLoader(Lines(), 1),
    "stream": lambda life: DataLoader(Numbers(), 4),
    "stream of single samples": lambda life: DataLoader(Numbers(), batch_size=None),
    "arrays": lambda life: [torch.arange(6).reshape(2, 3).numpy() + i for i in range(9)],
    "bfloat16": lambda life: [(torch.ones(3, dtype=torch.bfloat16) * i, 1j) for i in range(9)],
    "objects": lambda life: [type("Point", (), {"x": i})() for i in range(9)],
}  # fmt: skip
_REPLAYED = ("has no state_dict", "persistent_workers")


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loader_is_never_complained_about(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed, killed again, stopped in order and gone on with, over the end of an epoch: nothing is said."""
    make, run = HEALTHY[name], tmp_path / "run"
    with caplog.at_level(logging.WARNING, "holdfast"):
        life(run, make(0), until=5, save_at=2)
        life(run, make(1), until=5, save_at=4)
        life(run, make(2), until=6, save_at=6)
        life(run, make(3), until=13, save_at=9)
        life(run, make(4), until=15, save_at=10)
    said = [record.getMessage() for record in caplog.records]
    assert [text for text in said if not any(known in text for known in _REPLAYED)] == []


def test_warn_and_ignore_go_on_with_what_the_loader_gives(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``on_data_mismatch`` decides whether what is certain is an error, one warning, or nothing."""
    with caplog.at_level(logging.WARNING, "holdfast"):
        for choice, num_said in (("ignore", 0), ("warn", 1)):
            life(tmp_path / choice, Restarts(), until=9, save_at=3)
            assert len(life(tmp_path / choice, Restarts(), until=6, on_data_mismatch=choice)) == 3
            assert len(caplog.records) == num_said
    with pytest.raises(hf.ConfigError, match="on_data_mismatch='no'"):
        hf.Checkpointer(tmp_path, {}, on_data_mismatch="no")


def test_a_stop_in_order_leaves_a_restart_to_be_told_by_what_was_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where no life has drawn what should come, an older batch is an error, and the first one a warning."""
    life(tmp_path / "stale", Behind(), until=6, save_at=6)
    with pytest.raises(hf.StateMismatchError, match="gave batch 3 of this epoch again, which was trained already"):
        life(tmp_path / "stale", Behind(), until=9)
    life(tmp_path / "restart", Restarts(), until=6, save_at=6)
    with caplog.at_level(logging.WARNING, "holdfast"):
        life(tmp_path / "restart", Restarts(), until=9)
    assert ["gave batch 0 of this epoch again" in record.message for record in caplog.records] == [True]


def test_another_run_and_a_fresh_start_have_nothing_to_be_compared_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that begins from a checkpoint of another one, or afresh in the same place, may train on other data."""
    life(tmp_path / "a", Stateful(), until=9, save_at=3)
    checkpoint = hf.Checkpoint(tmp_path / "a" / "step_00000003")
    with caplog.at_level(logging.WARNING, "holdfast"):
        life(tmp_path / "b", Other(start=500), until=6, resume=checkpoint)
        life(tmp_path / "a", Other(start=900), until=6, resume="never")
    assert not caplog.records


def test_a_branch_from_an_older_step_is_compared_with_the_life_that_it_leaves(tmp_path: Path) -> None:
    """Going back to an older checkpoint, what that life trained afterwards must come again."""
    life(tmp_path, Stateful(), until=12, save_at=3)
    life(tmp_path, Stateful(), until=14, save_at=10)
    life(tmp_path, Stateful(), until=8, resume=tmp_path / "step_00000003")
    with pytest.raises(hf.StateMismatchError, match="batch 3 of 'train' should come"):
        life(tmp_path, Restarts(), until=8, resume=tmp_path / "step_00000003")


@pytest.mark.parametrize("damage", ["torn", "gone", "empty", "garbage", "a directory", "cut"])
def test_a_damaged_ring_never_stops_a_resume(tmp_path: Path, damage: str) -> None:
    """Whatever lies at the place of the ring, the run goes on."""
    life(tmp_path, Stateful(), until=9, save_at=3)
    path = tmp_path / ".ledger" / "rank-00000"
    data = path.read_bytes()
    assert len(data) <= 4096 + 64 * NUM_ENTRIES
    path.unlink()
    if damage == "a directory":
        path.mkdir()
    elif damage != "gone":
        content = {"torn": data[:4100] + bytes(64) + data[4164:], "empty": b"", "garbage": b"\xff" * 9000}
        path.write_bytes(content.get(damage, data[:4200]))
    assert [int(batch[0]) // 4 for batch in life(tmp_path, Stateful(), until=6)] == [3, 4, 5]


def test_a_batch_size_that_was_only_tried_binds_nobody(tmp_path: Path) -> None:
    """A life with other batches that dies before its first save does not forbid the loader that was there before."""
    data = torch.arange(96)

    def loader(batch_size: int) -> DataLoader[Any]:
        return DataLoader(data, batch_size=batch_size, shuffle=True)  # type: ignore[arg-type]

    first = life(tmp_path, loader(4), until=9, save_at=3)
    for options in ({}, {"on_data_mismatch": "ignore"}):
        life(tmp_path, loader(8), until=6, **options)
    again = life(tmp_path, loader(4), until=9)
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in first[3:]]


def test_a_run_made_anew_in_the_same_folder_is_not_compared_with_the_old_one(tmp_path: Path) -> None:
    """`rm -rf RUN/*` leaves the ledger; the attempts of the next run have the same numbers, its batches differ."""
    life(tmp_path, Stateful(), until=9, save_at=3)
    for path in tmp_path.glob("[!.]*"):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    life(tmp_path, Stateful(start=1000), until=4, save_at=3)
    (_, entries) = read_rings(tmp_path)[0]
    assert len(entries) == 4
    assert [int(batch[0]) for batch in life(tmp_path, Stateful(start=1000), until=6)] == [1012, 1016, 1020]


def test_the_header_of_a_ring_says_whose_it_is_whatever_names_loaders_have(tmp_path: Path) -> None:
    """Names that do not fit are left out, and the ring is read again all the same."""
    ring = DataRing(tmp_path, 0, run_id="a")
    for number in range(10):
        ring.add((1, 0, 1, 0, 0, number, 0, number, 4), f"{number}" * 1000)
    ring.close()
    again = DataRing(tmp_path, 0, run_id="a")
    again.close()
    assert len(again.entries) == 10


def test_a_ring_goes_on_when_a_full_disk_has_room_again(tmp_path: Path, monkeypatch, caplog) -> None:
    """What came in between is missing, and was said once; any other error ends the ring."""
    ring, write = DataRing(tmp_path, 0, run_id="a"), os.pwrite
    for number in range(8):
        full = number in (0, 1, 4, 5)  # the header of the first one, too
        refuse = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        monkeypatch.setattr(os, "pwrite", refuse if full else write)
        ring.add((1, 0, 1, 0, 0, number, 0, number, 4), "train")
    assert caplog.text.count("no room for the ledger") == 2
    monkeypatch.setattr(os, "pwrite", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    ring.add((1, 0, 1, 0, 0, 8, 0, 8, 4), "train")
    monkeypatch.setattr(os, "pwrite", write)
    ring.add((1, 0, 1, 0, 0, 9, 0, 9, 4), "train")
    again = DataRing(tmp_path, 0, run_id="a")
    again.close()
    assert [entry.index for entry in again.entries] == [2, 3, 6, 7]


def test_the_ring_keeps_the_last_entries_and_tells_torn_ones(tmp_path: Path) -> None:
    """Of more entries than there is room for the newest are there; one with a flipped bit is not."""
    ring = DataRing(tmp_path, 0, run_id="")
    for number in range(NUM_ENTRIES + 10):
        ring.add((number + 1, 0, 1, 0, 0, number, 0, number, 4), "train")
    ring.close()
    names, entries = read_rings(tmp_path)[0]
    assert list(names) == ["train"]
    assert [entry.seq for entry in entries] == list(range(10, NUM_ENTRIES + 10))
    at = 4096 + 64 * (entries[0].seq % NUM_ENTRIES)
    packed = bytearray((tmp_path / ".ledger/rank-00000").read_bytes()[at : at + 64])
    assert RingEntry.unpack(bytes(packed)) == entries[0]
    for bit in range(len(packed) * 8):
        packed[bit // 8] ^= 1 << bit % 8
        assert RingEntry.unpack(bytes(packed)) is None
        packed[bit // 8] ^= 1 << bit % 8


def test_a_checkpoint_holds_the_batches_since_the_one_before(tmp_path: Path) -> None:
    """The ledger of a checkpoint stays small when every step is saved: under 1 KB a step."""
    life(tmp_path, Stateful(), until=20, save_at=20, every=1, keep=None)
    own = hf.load(tmp_path / "step_00000018")["holdfast"]["progress"]["ledger"]
    assert len(own["recent"]) <= 3 * 28
    assert own["at"] == {"train": [0, 18]}


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
import test_data_ledger as kit, torch, holdfast
with holdfast.Checkpointer(sys.argv[1], {"model": torch.nn.Linear(1, 1)}, every=3) as ck:
    for batch in ck.batches(kit.Stateful()):
        ck.step()
        if ck.global_step == 3:
            ck.wait()
        if ck.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("forked")
def test_what_a_killed_process_was_given_is_known(tmp_path: Path) -> None:
    """The ring survives SIGKILL, which no cleaning up follows: a loader that leaves a batch out is an error."""
    here = Path(__file__).parent
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run"), str(here)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, capture_output=True, env=environment, check=False).returncode == -signal.SIGKILL

    class LeavesOut(Stateful):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at = state["at"] + 1

    with pytest.raises(hf.StateMismatchError, match="what comes from batch 3 to 3 would be left out"):
        life(tmp_path / "run", LeavesOut(), until=5)
    assert len(life(tmp_path / "run", Stateful(), until=5)) == 2
