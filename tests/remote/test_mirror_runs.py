"""Runs with a local disk in front of s3://: saved here, uploaded in the background, resumed from the newest of both."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import mirror_kit as kit
import pytest
import torch
from catalog_kit import catalog_of, hold, index_of
from mirror_kit import DOWN, be_impatient, puts, running, step_to, steps, train
from object_kit import KEY, SECRET
from process_kit import wait_until

import holdfast as hf
from holdfast.errors import ConfigError, RunBusyError, StorageError
from holdfast.run.reports import read_history
from holdfast.run.retention import decide
from holdfast.storage import LocalStorage, Storage, StorageTraits, resolve
from holdfast.storage.object.client import BucketClient
from holdfast.testing import Fault, FaultProxy
from holdfast.writer.uploads.queue import UploadQueue


def test_both_sides_are_runs_of_their_own(remote, local):
    """What was saved is on the disk and at the remote, each with index, attempts and reports; `keep` is remote."""
    ck = train(remote, local, 4, keep=hf.Keep(last=3))
    disk = LocalStorage(local)
    assert steps(disk) == [4]
    assert steps(remote) == [2, 3, 4]
    assert ck.stats.last_remote_step == 4
    assert ck.stats.remote_behind == 0
    assert ck.stats.seconds_since_remote < 60
    here, there = index_of(disk), index_of(remote)
    assert (here.run_id, here.attempts, here.finished) == (there.run_id, there.attempts, there.finished)
    assert there.attempts[0].reason == "finished"
    assert read_history(remote).rows == read_history(disk).rows
    assert [row["step"] for row in read_history(remote).rows] == [1, 2, 3, 4]
    assert json.loads(remote.read("lease.json"))["released"] is True
    assert not disk.exists("lease.json")
    assert [one.uri for one in ck.checkpoints()] == [
        f"{local}/step_00000004",
        f"{remote.uri}/step_00000003",
        f"{remote.uri}/step_00000002",
    ]
    assert ck.latest().uri == f"{local}/step_00000004"


def test_no_credentials_on_the_local_disk(remote, local, capfd):
    """The local side and what is printed hold no credential of the remote."""
    train(remote, local, 2)
    texts = [path.read_bytes().decode("latin-1") for path in local.rglob("*") if path.is_file()]
    assert len(texts) > 5
    assert not [text[:200] for text in [*texts, *capfd.readouterr()] if SECRET in text or KEY in text]


def test_an_empty_disk_resumes_from_the_remote(remote, local):
    """Another machine: nothing on its disk; the run goes on from the remote, as the next attempt."""
    train(remote, local, 3)
    shutil.rmtree(local)
    ck = train(remote, local, 5)
    assert ck.resumed_from.uri == f"{remote.uri}/step_00000003"
    assert steps(remote) == [1, 2, 3, 4, 5]
    assert [one.attempt for one in index_of(local).attempts] == [1, 2]
    assert index_of(remote).attempts[1].resumed_from == {"name": "step_00000003", "step": 3, "attempt": 1}
    assert [row["step"] for row in read_history(remote).rows] == [1, 2, 3, 4, 5]


def test_the_newest_of_both_sides_is_resumed(remote, local, proxy):
    """A newer checkpoint on the disk alone is resumed, and uploaded; then a newer one of the remote is."""
    _lose_the_remote(proxy, remote, local)
    assert steps(remote) == [1]
    ck = train(remote, local, 3)  # goes on from 3: nothing to train, only to upload
    assert ck.resumed_from.uri == f"{local}/step_00000003"
    assert steps(remote) == [1, 2, 3]
    other = local.with_name("other")
    train(remote, other, 5)
    ck = train(remote, local, 6)
    assert ck.resumed_from.uri == f"{remote.uri}/step_00000005"
    assert steps(remote) == [1, 2, 3, 4, 5, 6]
    attempts = [record.attempt for record in catalog_of(remote).records()]
    assert attempts == [4, 3, 3, 1, 1, 1]


def _lose_the_remote(proxy: FaultProxy, remote: Storage, local: Path) -> None:
    """Train three steps, of which the remote gets one; then the machine goes down."""
    with (
        pytest.raises(StorageError, match="step_00000002, step_00000003"),
        running(remote, local) as (ck, state),
    ):
        step_to(ck, state, 1)
        ck.wait(remote=True)
        proxy.inject(DOWN)
        step_to(ck, state, 3)
        be_impatient(ck, 0.5)
    os.kill(ck._session.client.process_id, signal.SIGKILL)
    proxy.inject()


def test_a_half_written_local_checkpoint_hides_nothing(remote, local):
    """A directory without a manifest on the local disk does not stand before the complete one of the remote."""
    train(remote, local, 3)
    (local / "step_00000003" / "manifest.json").unlink()
    ck = train(remote, local, 4)
    assert ck.resumed_from.uri == f"{remote.uri}/step_00000003"


def test_a_damaged_local_copy_gives_way_to_the_remote_one(remote, local, capfd):
    """Bytes that rotted on the disk are found, said, and the same checkpoint is read from the remote."""
    train(remote, local, 3)
    path = next(local.glob("step_00000003/*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    ck = train(remote, local, 4)
    assert ck.resumed_from.uri == f"{remote.uri}/step_00000003"
    assert "set aside step_00000003" in capfd.readouterr().err
    assert steps(remote) == [1, 2, 3, 4]


def test_a_remote_that_is_down_at_the_start_is_no_fresh_start(remote, local, proxy):
    """Nobody knows what is newest: an error that says so, before anything is trained."""
    train(remote, local, 2)
    for fault in (DOWN, Fault(kind="403"), Fault(kind="500")):
        proxy.inject(fault)
        with pytest.raises(
            StorageError, match="cannot be looked at, so nobody knows which checkpoint is the newest"
        ) as caught:
            train(remote, local, 3)
        assert f"Checkpointer('{local}', ...) without local_dir" in str(caught.value)
    proxy.inject()
    assert not (local / "lease.json").exists()
    alone = train(local, None, 3)  # what the message says
    assert alone.resumed_from.uri == f"{local}/step_00000002"
    ck = train(remote, local, 4)
    assert ck.resumed_from.uri == f"{local}/step_00000003"
    assert steps(remote) == [1, 2, 3, 4]


def test_what_is_complete_is_not_sent_again(remote, local, proxy, monkeypatch):
    """The remote goes away in the middle of an upload and the run ends: the next life sends only what is missing."""
    monkeypatch.setattr(BucketClient, "traits", StorageTraits(num_parallel=16, max_file_bytes=300_000))
    state = {"w": torch.zeros(50_000), **{f"v{number}": torch.full((50_000,), float(number)) for number in range(6)}}
    with pytest.raises(StorageError, match="step_00000001"), running(remote, local, state) as (ck, state):
        proxy.inject(Fault(kind="reset", method="PUT", path=r"/step_.*json"))
        step_to(ck, state, 1)
        assert wait_until(lambda: len({name for name in puts(proxy) if name.endswith(".safetensors")}) >= 7)
        be_impatient(ck, 0.5)
    os.kill(ck._session.client.process_id, signal.SIGKILL)
    before = set(puts(proxy))
    assert not remote.exists("step_00000001/manifest.json")
    proxy.inject()
    proxy.forget()
    train(remote, local, 1, state={**state, "w": torch.zeros(50_000)})
    again = puts(proxy)
    assert {"manifest.json"} < set(again)
    assert not before & set(again)
    assert not [name for name in again if name.endswith(".safetensors")]
    assert steps(remote) == [1]


def test_unchanged_files_are_copied_by_the_server(remote, local, proxy):
    """Parameters that never train are sent once; later checkpoints get them by a request without a body."""
    frozen = torch.nn.Linear(2000, 1000).requires_grad_(False)
    with running(remote, local, {"frozen": frozen, **kit.make_state()}) as (ck, state):
        step_to(ck, state, 1)
        ck.wait(remote=True)
        proxy.forget()
        step_to(ck, state, 2)
        ck.wait(remote=True)
    assert sum(one.sent_bytes for one in proxy.exchanges) < 1_000_000
    assert steps(remote) == [1, 2]


def test_nothing_stays_when_asked(remote, local):
    """With delete_after_upload the local disk keeps the files of the run alone, and the run goes on from the remote."""
    mirror = hf.Mirror(local, delete_after_upload=True, max_behind=9)
    ck = train(remote, mirror, 3, keep=hf.Keep(last=2))
    assert not list(local.glob("step_*"))
    assert sorted(path.name for path in local.iterdir()) == [".ledger", "reports", "run.json"]
    assert steps(remote) == [2, 3]
    assert ck.latest().uri == f"{remote.uri}/step_00000003"
    with running(remote, mirror, keep=hf.Keep(last=2)) as (ck, state):
        step_to(ck, state, 4)
        ck.wait(remote=True)
        ck.report(val=0.25)
    assert ck.resumed_from.uri == f"{remote.uri}/step_00000003"
    assert catalog_of(remote).record("step_00000004").metrics["val"] == 0.25
    assert not list(local.glob("step_*"))
    assert steps(remote) == [3, 4]


def test_late_metrics_and_pins_arrive(remote, local):
    """Metrics reported after the save, and pins, are at the remote, also of checkpoints that left the local disk."""
    with running(remote, local, keep=hf.Keep(best=1, metric="val")) as (ck, state):
        for step, value in enumerate((3.0, 1.0, 2.0, 5.0), start=1):
            step_to(ck, state, step)
            ck.report(val=value)
        ck.wait(remote=True)
        ck.latest().pin()
        step_to(ck, state, 5)
        ck.report(val=9.0)
    found = {record.step: (record.metrics.get("val"), record.pinned) for record in catalog_of(remote).records()}
    assert found == {2: (1.0, False), 4: (5.0, True), 5: (9.0, False)}


def test_the_best_is_not_deleted_before_its_metrics_have_arrived(local, monkeypatch):
    """The local side lets a checkpoint go as soon as it is uploaded; what was said about it goes before the rules."""
    monkeypatch.setattr(UploadQueue, "call_soon", lambda self: None)  # a busy machine: nothing is passed on in between
    remote = resolve("memory://mirror-late-best")
    with running(remote, local, keep=hf.Keep(best=1, metric="val", mode="min")) as (ck, state):
        for step, value in enumerate((3.0, 1.0, 2.0, 5.0), start=1):
            step_to(ck, state, step)
            ck.wait(remote=True)
            ck.report(val=value)
            ck.wait()
        step_to(ck, state, 5)
        ck.wait(remote=True)
        assert not list(local.glob("step_00000002/*")), "it is at the remote only"
    found = {record.step: record.metrics.get("val") for record in catalog_of(remote).records()}
    assert found == {2: 1.0, 5: None}


def test_remote_retention_is_that_of_the_rules(remote, local):
    """What stays at the remote is what the rules say about everything that was uploaded."""
    keep = hf.Keep(last=2, best=1, metric="val", mode="max", every="4ba")
    seen = {}
    with running(remote, hf.Mirror(local, max_behind=9), keep=keep) as (ck, state):
        for step in range(1, 10):
            step_to(ck, state, step)
            ck.report(val=float((step * 7) % 5))
            seen |= {record.name: record for record in catalog_of(local).records()}
    wanted = {verdict.name for verdict in decide(keep, seen.values()) if verdict.keep}
    assert {record.name for record in catalog_of(remote).records()} == wanted


def test_a_remote_taken_over_is_an_error(remote, local, proxy):
    """Another trainer holds the remote now: saves fail loudly and nothing of the other one is overwritten."""
    with pytest.raises(RunBusyError, match=r"was (lost to process|deleted)"), running(remote, local) as (ck, state):
        step_to(ck, state, 1)
        ck.wait(remote=True)
        remote.delete("lease.json")
        other = hold(remote, "feedbeef")
        remote.put("step_00000002/manifest.json", b"of the other one")
        step_to(ck, state, 20)
        ck.wait(remote=True)
    assert remote.read("step_00000002/manifest.json") == b"of the other one"
    assert json.loads(remote.read("lease.json"))["start_id"] == "feedbeef"
    other.release()


def test_a_name_of_another_life_is_not_overwritten(remote, local, proxy, capfd):
    """A checkpoint that only this disk has keeps out of the way of a newer one of the same name at the remote."""
    _lose_the_remote(proxy, remote, local)
    train(remote, local.with_name("other"), 2)  # goes on from 1 elsewhere, with its own step 2
    there = remote.read("step_00000002/manifest.json")
    ck = train(remote, local, 4)
    assert ck.resumed_from.uri == f"{remote.uri}/step_00000002"
    assert remote.read("step_00000002/manifest.json") == there
    assert [record.step for record in catalog_of(remote).records()] == [4, 3, 2, 1]


def test_two_runs_do_not_mix(remote, local):
    """A local directory that holds another run is refused."""
    train(local, None, 1)
    train(remote, local.with_name("other"), 1)
    with pytest.raises(ConfigError, match="holds another run"):
        train(remote, local, 2)


def test_a_new_run_does_not_go_on_from_what_another_one_left_on_the_disk(remote, local):
    """A script with one local_dir for all its runs is refused, also where the new remote is empty yet."""
    train(remote, local, 2)
    new = remote.child("new")
    with pytest.raises(ConfigError, match=f"was brought to {remote.uri} .* is empty.*local_dir of its own"):
        train(new, local, 1)
    assert steps(new) == []
    remote.delete_tree("")
    assert train(remote, local, 3).resumed_from.uri == f"{local}/step_00000002"  # the run's own remote was emptied


def test_local_runs_move_to_a_remote(remote, local):
    """A run that was only local gets a remote: what it has is uploaded, as far as max_behind goes."""
    train(local, None, 3, keep=hf.Keep(last=2))
    ck = train(remote, local, 4)
    assert ck.resumed_from.uri == f"{local}/step_00000003"
    assert steps(remote) == [2, 3, 4]


def test_a_remote_in_memory_is_served_by_a_thread(local):
    """A remote that cannot be described to a process works all the same."""
    ck = train("memory://mirror-thread", local, 3)
    assert ck._session.client.process_id is None
    assert steps(resolve("memory://mirror-thread")) == [1, 2, 3]
    shutil.rmtree(local)
    assert train("memory://mirror-thread", local, 4).resumed_from.uri == "memory://mirror-thread/step_00000003"


def test_arguments_are_checked(tmp_path):
    """What cannot work is refused at once."""
    for wrong in ("s3://bucket/x", "file://scratch/x", "", 5):
        with pytest.raises(ConfigError, match="give a directory of this machine"):
            hf.Checkpointer(tmp_path / "run", {}, local_dir=wrong)
    for inner, outer in (("run", "run"), ("run/local", "run"), ("run", "run/remote")):
        with pytest.raises(ConfigError, match="lie in each other"):
            hf.Checkpointer(tmp_path / outer, {}, local_dir=tmp_path / inner)
    for options, word in (
        ({"max_behind": 0}, "max_behind"),
        ({"when_behind": "never"}, "when_behind"),
        ({"keep": 3}, "keep"),
        ({"warn_after": 10}, "warn_after"),
        ({"delete_after_upload": 1}, "delete_after_upload"),
    ):
        with pytest.raises(ConfigError, match=word):
            hf.Mirror(tmp_path, **options)


def test_an_error_in_the_body_waits_for_uploads(remote, local):
    """A body that ends with an error, or for a signal, leaves nothing on the disk alone."""
    with pytest.raises(ZeroDivisionError), running(remote, local) as (ck, state):
        step_to(ck, state, 3)
        raise ZeroDivisionError
    assert steps(remote) == [1, 2, 3]
    assert index_of(remote).attempts[0].reason == "ZeroDivisionError"


def test_rot_is_not_uploaded(remote, local, proxy, capfd):
    """What has rotted on the disk before its upload is said and left out; what comes later is uploaded."""
    with running(remote, local) as (ck, state):
        step_to(ck, state, 1)
        ck.wait(remote=True)
        proxy.inject(DOWN)
        step_to(ck, state, 2)
        path = next(local.glob("step_00000002/*.safetensors"))
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
        step_to(ck, state, 3)
        proxy.inject()
        ck.wait(remote=True)
    assert steps(remote) == [1, 3]
    assert "step_00000002 is not uploaded" in capfd.readouterr().err


def test_a_last_step_that_cannot_be_uploaded_is_no_good_end(remote, local, proxy):
    """The newest checkpoint rots before its upload: waiting for the remote, and the end, are errors that name it."""
    error = "step_00000002 cannot be brought.*digest differs"
    with pytest.raises(StorageError, match=error), running(remote, local) as (ck, state):
        step_to(ck, state, 1)
        ck.wait(remote=True)
        proxy.inject(DOWN)
        step_to(ck, state, 2)
        path = next(local.glob("step_00000002/*.safetensors"))
        path.write_bytes(path.read_bytes()[:-4] + b"rot!")
        proxy.inject()
        with pytest.raises(StorageError, match=error):
            ck.wait(remote=True)
    assert steps(remote) == [1]


def test_the_end_waits_for_the_remote_and_says_what_is_missing(remote, local, proxy):
    """Leaving the body with the remote down is an error that names the checkpoints; the next start brings them."""
    _lose_the_remote(proxy, remote, local)
    assert steps(LocalStorage(local)) == [2, 3]
    ck = train(remote, local, 3)
    assert steps(remote) == [1, 2, 3]
    assert ck.stats.last_remote_step == 3
