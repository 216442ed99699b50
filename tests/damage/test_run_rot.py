"""Every damaged bit of what a run keeps beside its checkpoints' files is said, and costs no checkpoint."""

from __future__ import annotations

import json
import logging
import random
import shutil

import pytest
import torch
from catalog_kit import catalog_of, index_of
from command_kit import invoke

import holdfast as hf
from holdfast.errors import CorruptCheckpointError
from holdfast.run.fence import Fence, damaged_fences, write_fence
from holdfast.run.record import METRICS_FILE, Sidecar, read_sidecar, write_sidecar
from holdfast.run.reports import read_history
from holdfast.storage import LocalStorage, MemoryStorage

BEST = "step_00000002"
METADATA = ".metadata.json"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three checkpoints; the second is the best by a late metric, pinned, and has metadata."""
    home = tmp_path_factory.mktemp("rot") / "run"
    with hf.Checkpointer(home, {"model": torch.nn.Linear(2, 2)}, every=1) as ck:
        for _ in range(3):
            ck.step(loss=0.5)
    best = hf.Checkpoint(home / BEST)
    best.report(val=0.25)
    best.pin()
    best.set_metadata({"note": "the first that speaks"})
    catalog_of(home).index.save()
    write_fence(LocalStorage(home), Fence(below=1, known={BEST: "*"}), "5f3a9c02")
    return home


def seen_by(run, path: str):
    """Return a function that tells whether damage of a file is seen where the file is used."""
    storage = MemoryStorage("run-rot")
    where = "reports/00001-5f3a9c02-000000.jsonl" if path.startswith("reports/") else path

    def is_seen(data: bytes) -> bool:
        storage.put(where, data)
        try:
            if path == "run.json":
                return index_of(storage).damage is not None
            if path.startswith("reports/"):
                return bool(read_history(storage).damaged)
            if path.startswith("fence-"):
                return bool(damaged_fences(storage))
            if path.endswith(METRICS_FILE):
                found = read_sidecar(storage, BEST)
                return bool(found.damage) and found.pinned and not found.metrics
            try:
                hf.Checkpoint(BEST, storage).get_metadata()
            except CorruptCheckpointError:
                return True
            return False
        finally:
            storage.delete(where)

    return is_seen


def files_of(run):
    return sorted(
        path.relative_to(run).as_posix()
        for path in run.rglob("*")
        if path.is_file() and (path.parent == run or path.parent.name == "reports" or path.name[0] == ".")
    )


def silent(run, count, caplog):
    """Return the flips that nobody saw."""
    caplog.set_level(logging.CRITICAL, "holdfast")
    unseen = []
    files = files_of(run)
    for path in files:
        data, is_seen = (run / path).read_bytes(), seen_by(run, path)
        assert not is_seen(data), path
        every = [(at, bit) for at in range(len(data)) for bit in range(8)]
        for at, bit in every if count is None else random.Random(7).sample(every, min(count, len(every))):
            if not is_seen(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]):
                unseen.append((path, at, bit, data[max(0, at - 20) : at + 20]))
    kinds = {path.rsplit("/", 1)[-1].split("-")[0].lstrip(".") for path in files}
    assert {"run.json", "metrics.json", "metadata.json", "fence", "00001"} <= kinds, files
    return unseen


def test_flipped_bits_are_seen(run, caplog):
    """A hundred bits of each file that a run keeps beside the files of its checkpoints: none is silent.

    (The white space between the keys of a fence means nothing, and its digest is that of what it means.)
    """
    assert silent(run, 100, caplog) == []


@pytest.mark.slow
def test_every_flipped_bit_is_seen(run, caplog):
    """The same, all of them."""
    assert silent(run, None, caplog) == []


def test_verify_reports_each(run, tmp_path):
    """`holdfast verify` of a run names every such file with a flipped bit, and ends with 1."""
    shutil.copytree(run, tmp_path / "sound")  # `verify` leaves there what it has found
    invoke("verify", tmp_path / "sound")
    for path in files_of(run):
        home = tmp_path / "copy"
        shutil.copytree(run, home)
        data = bytearray((home / path).read_bytes())
        data[len(data) // 2] ^= 4
        (home / path).write_bytes(data)
        told = invoke("verify", "--json", home, code=None)
        document = json.loads(told.stdout)
        problems = [problem for row in document["checkpoints"] for problem in [row["name"], *row["problems"]]]
        assert (told.exit_code, any(path.rsplit("/", 1)[-1] in problem for problem in problems)) == (1, True), path
        shutil.rmtree(home)


def test_a_damaged_late_metric_costs_no_checkpoint(tmp_path, capfd):
    """The best by a late metric of which one bit flipped: it stays, as pinned, ranks below all, and that is said."""
    home = tmp_path / "run"
    state = {"model": torch.nn.Linear(2, 2)}
    with hf.Checkpointer(home, state, every=1, keep=hf.Keep(last=1, best=1, metric="val")) as ck:
        ck.step()
        ck.wait()
        hf.Checkpoint(home / "step_00000001").report(val=0.25)
    sidecar = home / "step_00000001" / METRICS_FILE
    sidecar.write_bytes(sidecar.read_bytes().replace(b"0.25", b"9.25"))
    with hf.Checkpointer(home, state, every=1, keep=hf.Keep(last=1, best=1, metric="val")) as ck:
        for value in (0.5, 0.75, 0.875):
            ck.step(val=value)
            ck.wait()
    assert sorted(path.name for path in home.glob("step_*")) == ["step_00000001", "step_00000002", "step_00000004"]
    catalog = catalog_of(home)
    assert catalog.record("step_00000001").pinned
    assert catalog.best("val").name == "step_00000002"
    assert capfd.readouterr().err.count("step_00000001/.metrics.json is damaged") in (1, 2), "once in each process"
    checkpoint = hf.Checkpoint(home / "step_00000001")
    assert not checkpoint.verify().ok
    checkpoint.report(val=0.25)
    assert not checkpoint.verify().ok, "what else was in it stays lost"
    checkpoint.unpin()
    assert checkpoint.verify().ok
    assert not checkpoint.is_pinned


def test_damage_beside_a_checkpoint_stops_no_resume(run, tmp_path):
    """Neither does it keep a start from the checkpoint, nor a reader from its state."""
    home = tmp_path / "copy"
    shutil.copytree(run, home)
    newest = home / "step_00000003"
    (newest / METRICS_FILE).write_bytes(b"{")
    (newest / METADATA).write_bytes(b"{")
    with hf.Checkpointer(home, {"model": torch.nn.Linear(2, 2)}, every=100) as ck:
        assert ck.global_step == 3
    assert hf.load(newest)


def test_files_of_earlier_versions_and_of_others_are_read(tmp_path):
    """What has no digest is read as ever: metrics and reports of earlier versions, metadata of another tool."""
    storage = LocalStorage(tmp_path)
    storage.put(f"a/{METRICS_FILE}", b'{"metrics": {"val": "NaN", "loss": 0.5}, "pinned": true}')
    found = read_sidecar(storage, "a")
    assert (found.metrics["loss"], found.pinned, found.damage) == (0.5, True, "")
    row = b'{"attempt":1,"step":5,"epoch":0,"time":1.5,"metrics":{"loss":0.25},"checkpoint":null}'
    storage.put("reports/00001-5f3a9c02-000000.jsonl", row + b"\n")
    history = read_history(storage)
    assert ([one["metrics"] for one in history.rows], history.damaged) == ([{"loss": 0.25}], {})
    for text in ('{"a": 1}', '{"a": 1}\n', '{\n "a": 1\n}\n\n', ' {"a": 1} '):
        storage.put(f"a/{METADATA}", text.encode())
        assert hf.Checkpoint(tmp_path / "a").get_metadata() == {"a": 1}


def test_other_readers_see_the_same_json(tmp_path):
    """A digest changes nothing for those who know none: metadata has no key more, and its reader may write it anew."""
    (tmp_path / "a").mkdir()
    checkpoint = hf.Checkpoint(tmp_path / "a")
    checkpoint.set_metadata({"a": 1})
    path = tmp_path / "a" / METADATA
    body = json.loads(path.read_text())
    assert body == {"a": 1}
    path.write_text(json.dumps({**body, "b": 2}))
    assert checkpoint.get_metadata() == {"a": 1, "b": 2}
    write_sidecar(LocalStorage(tmp_path), "a", Sidecar(metrics={"val": 0.5}, pinned=True))
    assert (
        json.loads((tmp_path / "a" / METRICS_FILE).read_text()).items()
        >= {"metrics": {"val": 0.5}, "pinned": True}.items()
    )


def test_a_copy_made_again_does_not_hide_damage_of_its_target(run, tmp_path):
    """`holdfast cp` merges late metrics into a damaged sidecar; that the others are lost is still said after it."""
    there = tmp_path / "there"
    invoke("cp", run, there)
    sidecar = there / BEST / METRICS_FILE
    sidecar.write_bytes(b"x" + sidecar.read_bytes()[1:])
    invoke("cp", run, there)
    found = read_sidecar(LocalStorage(there), BEST)
    assert found.damage
    assert found.metrics == {"val": 0.25}
    assert not hf.Checkpoint(there / BEST).verify().ok
    hf.Checkpoint(there / BEST).pin()
    assert hf.Checkpoint(there / BEST).verify().ok
