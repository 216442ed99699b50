"""How many requests a run on a store waits for, one after another: counted with answers that take a while.

Two requests that arrive closer to each other than an answer takes do not wait for each other. On a busy machine some
that could go side by side come later, so the least of a few tries counts.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from functools import partial

import pytest
import torch
from object_kit import BUCKET, KEY, SECRET

import holdfast as hf
from holdfast.format.commit import PartSummary
from holdfast.format.digest import bytes_digest
from holdfast.format.manifest import FileEntry
from holdfast.format.parts import put_part
from holdfast.state.load import restore
from holdfast.storage import StorageTraits
from holdfast.storage.object.client import BucketClient
from holdfast.storage.object.object_storage import ObjectStorage
from holdfast.storage.together import together
from holdfast.testing import Fault
from holdfast.writer.messages import PartsJob
from holdfast.writer.save import commit_parts

DELAY_S = 0.12
TRIES = 6
_numbers = itertools.count()


def place(url, prefix):
    return ObjectStorage(
        f"s3://{BUCKET}/{prefix}", {"endpoint": url, "access_key_id": KEY, "secret_access_key": SECRET}
    )


@pytest.fixture
def storage(proxy):
    return place(proxy.url, f"trips/{next(_numbers)}")


def rounds(exchanges):
    """How many answers were waited for one after another."""
    count, begun = 0, float("-inf")
    for at in sorted(one.arrived for one in exchanges):
        if at >= begun + DELAY_S:
            count, begun = count + 1, at
    return count


class Counted:
    """Counts the requests of a block, and how many of them were made one after another."""

    def __init__(self, proxy):
        self._proxy = proxy

    def __enter__(self):
        self._proxy.inject(Fault(kind="slow", seconds=DELAY_S))
        self._proxy.forget()
        return self

    def __exit__(self, *_):
        self._proxy.inject()
        self.log = [f"{one.method} {one.path}?{one.query}" for one in self._proxy.exchanges]
        self.requests, self.rounds = len(self.log), rounds(self._proxy.exchanges)


def least(work):
    """Do it a few times, as long as it does not get by with what is asked for."""
    for number in range(TRIES):
        counted, at_most = work(number)
        if counted.rounds <= at_most:
            break
    assert counted.rounds <= at_most, counted.log
    return counted


def state():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def life(storage, saves=0, **options):
    with contextlib.redirect_stderr(io.StringIO()), hf.Checkpointer(storage, state(), every=None, **options) as ck:
        for _ in range(saves):
            ck.step(loss=1.0)
            ck.save()
            ck.wait()


@pytest.fixture(autouse=True)
def unknown(monkeypatch):
    """Every process finds out anew what a store can do; here all writers are this one's children."""
    from holdfast.storage.object import client as conditions
    from holdfast.storage.object import object_storage

    monkeypatch.setattr(conditions, "_known", {})
    monkeypatch.setattr(object_storage, "_have_none", set())


def test_entering_a_run(proxy, storage):
    """Lease, listing, resume, probe: twelve waits, and 25 requests of whatever number of checkpoints."""
    life(storage, saves=2)

    def work(_):
        with contextlib.redirect_stderr(io.StringIO()), Counted(proxy) as counted:
            ck = hf.Checkpointer(storage, state(), every=None).__enter__()
        ck.__exit__(None, None, None)
        return counted, 12

    assert least(work).requests <= 28


def test_a_save(proxy, storage):
    """All data together, the manifest, then the lease and the index together."""
    with contextlib.redirect_stderr(io.StringIO()), hf.Checkpointer(storage, state(), every=None) as ck:

        def work(_):
            with Counted(proxy) as counted:
                ck.step(loss=1.0)
                torch.nn.init.normal_(ck.state["model"].weight)
                ck.save()
                ck.wait()
            return counted, 3

        counted = least(work)
    assert counted.requests <= 10, counted.log
    names = [one.split("?")[0].rpartition("/")[2] for one in counted.log]
    assert names.index("manifest.json") == counted.requests - 3, names
    assert sorted(names[-2:]) == ["lease.json", "run.json"]


def test_saving_and_deleting_with_each_save(proxy, storage):
    """Retention costs a look, what is announced, a look at who holds it, the index, and two deletions."""
    options = {"every": None, "keep": hf.Keep(last=1)}
    with contextlib.redirect_stderr(io.StringIO()), hf.Checkpointer(storage, state(), **options) as ck:
        ck.step()
        ck.save()
        ck.wait()

        def work(_):
            with Counted(proxy) as counted:
                ck.step()
                torch.nn.init.normal_(ck.state["model"].weight)
                ck.save()
                ck.wait()
            return counted, 8

        counted = least(work)
    assert counted.requests <= 16, counted.log
    left = {info.path.partition("/")[0] for info in storage.list() if info.path.startswith("step_")}
    assert len(left) == 1


def test_a_save_on_its_own(proxy, storage):
    """A look at what is there, the lease of the name, the data, the manifest."""

    def work(number):
        with Counted(proxy) as counted:
            hf.save(hf.Checkpoint.at(storage, f"one-{number}"), state())
        return counted, 12

    least(work)


@pytest.mark.parametrize("refused", [False, True])
def test_keeping_fewer(proxy, storage, refused, caplog):
    """Many are deleted by few requests; a store that has no request for many is asked once, and loses nothing."""
    life(storage, saves=6)
    if refused:
        proxy.inject(Fault(kind="expired", method="POST", path="delete"))  # a 400
    proxy.forget()
    life(storage, saves=1, keep=hf.Keep(last=1))
    log = [one for one in proxy.exchanges if one.method == "POST" and one.query.startswith("delete")]
    assert len(log) == (1 if refused else 3), log
    left = {info.path.partition("/")[0] for info in storage.list() if info.path.startswith("step_")}
    assert left == {"step_00000006", "step_00000007"}, "and what it went on from"
    hf.load(hf.Checkpoint.at(storage, "step_00000007"), into=state(), skip="holdfast")


def test_many_ranks(proxy, storage):
    """Parts of ranks are collected, and taken away, side by side."""

    def parts(directory, save):
        def one(rank):
            path = f"model-{rank:05d}-{save}.safetensors"
            with storage.create(f"{directory}/{path}", 4) as file:
                file.write(memoryview(b"1234"))
            entry = FileEntry(path=path, size=4, digest=bytes_digest(b"1234"), role="model", writer=rank)
            put_part(storage, directory, save, PartSummary(writer=rank, files=(entry,)))

        together(storage, [partial(one, rank) for rank in range(32)])

    def work(number):
        save, directory = f"0badc0de-{number:x}", f"many-{number}"
        parts(directory, save)
        job = PartsJob(directory=directory, save_id=save, writers=tuple(range(32)), manifest={"checkpoint_id": save})
        with Counted(proxy) as counted:
            commit_parts(storage, job, None, again=False)
        return counted, 5

    assert least(work).requests <= 32 + 3
    left = [info.path for info in storage.list() if "/part-" in info.path]
    assert not left


def test_loading_what_many_files_hold(proxy, storage, monkeypatch):
    """Small files of a checkpoint are read side by side, tensors as well."""
    monkeypatch.setattr(BucketClient, "traits", StorageTraits(num_parallel=16, max_file_bytes=200))
    made = {f"w{number}": torch.full((40,), float(number)) for number in range(6)}
    saved = hf.save(hf.Checkpoint.at(storage, "one"), made)
    assert sum(one.path.endswith(".safetensors") for one in saved.manifest.files) == 6

    def work(_):
        with Counted(proxy) as counted:
            loaded = restore.load_state(storage.child("one"))
        assert all(torch.equal(loaded.state[name], value) for name, value in made.items())
        return counted, 3

    least(work)
