"""Runs directly on s3:// through the fault proxy: a fifth, or every n-th, of the requests goes wrong."""

import itertools
import time

import pytest
import torch
from catalog_kit import catalog_of
from object_kit import BUCKET, KEY, SECRET

import holdfast as hf
from holdfast.errors import StoragePermissionError, StorageUnavailableError
from holdfast.storage.object.object_storage import ObjectStorage
from holdfast.testing import Fault

# What passes: the run goes on and loses nothing.
PASSING = {
    "500": {"kind": "500"},
    "500-done": {"kind": "500", "carried_out": True},
    "503": {"kind": "503"},
    "reset": {"kind": "reset"},
    "reset-done": {"kind": "reset", "carried_out": True},
    "silence": {"kind": "silence", "seconds": 30.0},
    "silence-done": {"kind": "silence", "seconds": 30.0, "carried_out": True},
    "truncated": {"kind": "truncated"},
    "short": {"kind": "short"},
    "slow": {"kind": "slow", "seconds": 0.05, "bytes_per_s": 20_000_000},
}
QUICK = ["503", "reset-done", "truncated"]
_names = itertools.count()


@pytest.fixture
def storage(proxy):
    """Give a root of the test's own."""
    options = {"endpoint": proxy.url, "access_key_id": KEY, "secret_access_key": SECRET}
    return ObjectStorage(f"s3://{BUCKET}/faults/{next(_names)}", options)


def changed(storage, **options):
    """Give the same place to a client with other options."""
    return ObjectStorage(storage.uri, {**storage._place.options, **options}, secrets=storage.secrets())


def for_fault(storage, name):
    """Where a server keeps silent, and only there, it is not waited for long: a busy machine is slow as well."""
    return changed(storage, timeout_s=0.3) if "silence" in name else storage


def state_at(step):
    torch.manual_seed(0)
    return {
        "w": torch.full((300_000,), float(step)),  # over several ranges of a reader
        "frozen": torch.nn.Linear(200, 200).requires_grad_(False),
        "note": f"step {step}",
    }


def advance(state, step):
    state["w"].fill_(step)
    state["note"] = f"step {step}"


def life(storage, upto, before=lambda step: None):
    """Train until step ``upto``, with a save, a late metric and retention in each step; give the stats."""
    state = state_at(0)
    with hf.Checkpointer(storage, state, every=1, keep=hf.Keep(last=2)) as ck:
        first = ck.global_step
        assert torch.equal(state["w"], state_at(first)["w"])
        for step in range(first + 1, upto + 1):
            before(step)
            advance(state, step)
            ck.step(loss=float(step))
            ck.wait()
            ck.report(late=step + 0.5)
        return ck.stats


def check(storage, upto, attempts):
    """Everything is there that has to be, bit for bit, and nothing else."""
    catalog = catalog_of(storage)
    found = {record.step: record for record in catalog.records()}
    assert set(found) >= {upto - 1, upto}
    for step in (upto - 1, upto):
        checkpoint = hf.Checkpoint.at(storage, found[step].name)
        assert checkpoint.verify().ok
        loaded = checkpoint.load()
        assert torch.equal(loaded["w"], state_at(step)["w"])
        assert loaded["note"] == f"step {step}"
        assert checkpoint.metrics == {"loss": float(step), "late": step + 0.5}
    rows = [row for row in catalog.index.history() if "loss" in row["metrics"]]
    assert [row["step"] for row in rows] == list(range(1, upto + 1))
    assert len(catalog.index.attempts) == attempts


def a_fifth(proxy, storage, name):
    """A life of three saves and one that goes on from them; give how many requests went wrong."""
    storage = for_fault(storage, name)
    proxy.inject(Fault(share=0.2, seed=5, **PASSING[name]))
    life(storage, 3)
    life(storage, 4)
    proxy.inject()
    check(storage, 4, attempts=2)
    return sum(bool(one.fault) for one in proxy.exchanges)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_fifth_goes_wrong(proxy, storage, name):
    """Saves, retention, late metrics and a resume work, and nothing is lost."""
    assert a_fifth(proxy, storage, name) >= 10


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(PASSING) - set(QUICK)))
def test_a_fifth_goes_wrong_in_other_ways(proxy, storage, name):
    """The same for the other faults."""
    assert a_fifth(proxy, storage, name) >= 10


@pytest.mark.long
@pytest.mark.parametrize("name", ["500-done", "reset-done", "short", "silence-done", "truncated"])
def test_every_nth_goes_wrong(proxy, storage, name):
    """The same when each seventh, sixth, ... second request is hit, another n at each save."""
    storage, hits = for_fault(storage, name), []

    def before(step):
        hits.append(sum(bool(one.fault) for one in proxy.exchanges))
        proxy.inject(Fault(every=8 - step, **PASSING[name]))

    proxy.inject(Fault(every=7, **PASSING[name]))
    life(storage, 6, before)
    proxy.inject()
    check(storage, 6, attempts=1)
    assert len(set(hits)) == 6, "each n hits something"


def test_steps_do_not_wait_for_a_writer_that_tries_again(proxy, storage):
    """While the server answers nothing, steps go on; what was being saved is committed when it does again."""
    storage, state = for_fault(storage, "silence"), state_at(0)
    with hf.Checkpointer(storage, state, every=None) as ck:
        proxy.forget()
        proxy.inject(Fault(kind="silence", seconds=1000, path="step_00000001"))
        ck.step(loss=1.0)
        ck.save()
        wait_for(lambda: sum(bool(one.fault) for one in proxy.exchanges) >= 4)
        for _ in range(200):
            ck.step(loss=1.0)
        assert ck.stats.last_durable_step < 1
        assert not any(one.status for one in proxy.exchanges if "step_00000001" in one.path)
        proxy.inject()
        ck.wait()
        assert ck.stats.last_durable_step == 1
    assert hf.Checkpoint.at(storage, "step_00000001").verify().ok


def test_a_remote_that_is_down_for_long_costs_saves_alone(proxy, storage, caplog):
    """Without a local disk, too: what cannot be saved until the deadline is left out and said, training goes on."""
    place = changed(storage, max_retries=0)
    state = state_at(0)
    with hf.Checkpointer(place, state, every=1, keep=None) as ck:
        for step in range(1, 5):
            proxy.inject(*([Fault(kind="503")] if step in (2, 3) else []))
            advance(state, step)
            ck.step(loss=float(step))
            ck.wait()
            assert ck.stats.last_durable_step == (step if step in (1, 4) else 1)
        assert ck.stats.skipped == 2
    assert "step 2 was NOT saved, the storage does not answer" in caplog.text
    assert [record.step for record in catalog_of(place).records()] == [4, 1]
    with (
        pytest.raises(StorageUnavailableError, match="the final step 6 was NOT saved"),
        hf.Checkpointer(place, state, every=1, keep=None) as ck,
    ):
        advance(state, 5)
        ck.step()
        ck.wait()
        proxy.inject(Fault(kind="503", path="/step_00000006"))
        advance(state, 6)
        ck.step()


def wait_for(condition):
    """Look for what another process does."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("kind", "words"), [("403", "access was refused"), ("expired", "have expired")])
def test_refusals_are_said(proxy, storage, kind, words):
    """Rights that were taken away and credentials that expire stop the run with what to do; what there was stays."""
    state = state_at(0)
    with (
        pytest.raises(StoragePermissionError, match=words) as caught,
        hf.Checkpointer(storage, state, every=1) as ck,
    ):
        advance(state, 1)
        ck.step(loss=1.0)
        ck.wait()
        proxy.forget()
        proxy.inject(Fault(kind=kind, method="PUT"))
        advance(state, 2)
        ck.step(loss=2.0)
        ck.wait()
    assert SECRET not in str(caught.value)
    refused = [one for one in proxy.exchanges if one.fault and "/step_00000002/" in one.path]
    assert refused
    assert len(refused) == len({one.path for one in refused}), "a refusal is not tried again"
    proxy.inject()
    assert torch.equal(hf.Checkpoint.at(storage, "step_00000001").load()["w"], state_at(1)["w"])
    assert life(storage, 2).last_durable_step == 2
