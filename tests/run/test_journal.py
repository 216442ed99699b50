"""The journal of a run: what rides on what, what bounds it, and that nothing depends on it."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time

import pytest
import torch
from catalog_kit import Far, begin
from checkpoint_kit import small
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.config import Keep
from holdfast.errors import StorageError
from holdfast.run.catalog import Catalog, upkeep
from holdfast.run.index import RUN_FILE, RunIndex
from holdfast.run.journal import Journal, JournalEvent, events_from
from holdfast.run.reports import SEGMENT_BYTES, read_history
from holdfast.run.view import run_state
from holdfast.storage import LocalStorage, resolve
from holdfast.testing import FaultyOps, FaultyStorage

pytestmark = pytest.mark.usefixtures("forked")

VALUES = st.sampled_from([None, True, 0, -1, 2**70, 0.5, float("nan"), float("inf"), "", "saved", "x" * 999, [], {}])
NAMES = st.sampled_from([*JournalEvent.__slots__, "unknown"])
GOOD = {"what": "saved", "time": 1.0, "name": "x" * 999, "why": "y" * 999, "kind": "z" * 999}
NEARLY = st.dictionaries(NAMES, VALUES, max_size=2).map(lambda odd: {**GOOD, **odd})
STORED = st.lists(st.dictionaries(NAMES, VALUES, max_size=6) | VALUES | NEARLY, max_size=6)


def train(root, steps, *, keep=None, **more):
    """Train and save each step; the state is one tensor."""
    state = {"w": torch.zeros(64)}
    with hf.Checkpointer(root, state, every="1ba", keep=keep, **more) as ck:
        while ck.global_step < steps:
            state["w"] += 1
            ck.step()


def told(root):
    return Catalog(resolve(root)).index.read_history()


def of(events, what):
    return [one for one in events if one.what == what]


def test_snapshots_wait_as_one_event():
    """Each event has the sum, so the last one stays; one that is being written, or of another life, is left alone."""
    journal = Journal()
    for step, held_s in ((1, 0.5), (2, 1.0)):
        journal.take([{"what": "snapshots", "time": float(step), "attempt": 1, "step": step, "held_s": held_s}])
    assert [(event["step"], event["held_s"]) for event in journal.waiting()] == [(2, 1.0)]
    _, number = journal.take_out()
    journal.take([{"what": "snapshots", "time": 3.0, "attempt": 1, "step": 3, "held_s": 1.5}])
    journal.take([{"what": "snapshots", "time": 4.0, "attempt": 2, "step": 3, "held_s": 0.5}])
    assert [event["step"] for event in journal.waiting()] == [2, 3, 3]
    journal.written(number)
    assert [event["attempt"] for event in journal.waiting()] == [1, 2]


def test_it_costs_no_request():
    """Events are in the puts that happen anyway: run.json of a save, the segment of a report."""
    storage = Far("journal-requests")
    index = begin(storage, "aaaaaaaa").index
    storage.log.clear()
    index.journal.add("saved", name="step_1", step=1, bytes=10)
    index.save()
    assert storage.log == ["put run.json"]
    assert [one.name for one in RunIndex.load(storage).read_history().events] == ["step_1"]
    storage.log.clear()
    index.report([{"step": 1, "metrics": {"loss": 1.0}}])
    assert [one.split("/")[0] for one in storage.log] == ["put reports"]
    index.save()
    assert "events" not in storage.read(RUN_FILE).decode(), "it is in a segment for good"
    assert [one.name for one in RunIndex.load(storage).read_history().events] == ["step_1"], "and counts once"


def test_saves_put_as_often_as_before(tmp_path, monkeypatch):
    """A life with saves and deletions puts no more objects than its commits, run.json and reports need."""
    puts = []
    put = LocalStorage.put

    def counted(self, path, data, **conditions):
        puts.append(path)
        return put(self, path, data, **conditions)

    monkeypatch.setattr(LocalStorage, "put", counted)
    storage = LocalStorage(tmp_path / "run")
    catalog = begin(storage, "aaaaaaaa")
    puts.clear()
    for step in range(1, 13):
        manifest = small(storage, f"step_{step}", run_id=catalog.index.run_id, attempt=1, step=step, start="aaaaaaaa")
        catalog.index.journal.add("saved", name=f"step_{step}", step=step, attempt=1)
        catalog.add(f"step_{step}", manifest, is_new=True)
        catalog.prune(Keep(last=2))
    assert sum(path == RUN_FILE for path in puts) == 12
    assert not any(path.startswith("reports") for path in puts)
    events = Catalog(storage).index.read_history().events
    assert len(of(events, "saved")) == 12
    assert [one.step for one in of(events, "deleted")] == list(range(1, 10)), "the last one waits for the next save"


def test_nothing_is_forgotten_before_it_is_written(tmp_path, monkeypatch):
    """A put that fails leaves the events waiting; the next one brings them, once."""
    storage = LocalStorage(tmp_path)
    index = RunIndex(storage)
    index.register_attempt("aaaaaaaa", host="h", pid=1)
    index.journal.add("deleted", name="step_1", why="not among last 3")

    def refuse(self, path, data, **conditions):
        raise StorageError("no")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "put", refuse)
        with pytest.raises(StorageError):
            index.flush_journal()
    index.flush_journal()
    index.flush_journal()
    assert [one.name for one in read_history(storage).events] == ["step_1"]


def test_it_is_bounded():
    """While nothing can be written the newest 500 stay; the same failure again is counted, not repeated."""
    journal = Journal()
    for number in range(2000):
        journal.add("deleted", name=f"step_{number}")
    waiting = journal.waiting()
    assert len(waiting) == 500
    assert waiting[-1]["name"] == "step_1999"
    assert journal.is_full
    for _ in range(1000):
        journal.add("lost", name="step_1", why="StorageFullError: no space")
    assert len(journal.waiting()) == 500
    assert journal.waiting()[-1]["times"] == 1000
    journal.add("lost", name="step_1", why="x" * 5000)
    assert len(json.dumps(journal.waiting()[-1])) < 500


def test_many_saves_without_a_report_fill_segments(tmp_path):
    """Where nobody reports, a segment is written once in some fifty saves, and run.json stays small."""
    index = RunIndex(LocalStorage(tmp_path))
    index.register_attempt("aaaaaaaa", host="h", pid=1)
    flushed = 0
    for step in range(1000):
        index.journal.add("saved", name=f"step_{step:08d}", step=step, attempt=1, kind="state", bytes=10**9, reused=0)
        if index.journal.is_full:
            index.flush_journal()
            flushed += 1
        assert len(json.dumps(index.journal.waiting())) < 20_000
    assert 5 < flushed < 30
    events = index.read_history().events
    assert [one.step for one in events] == list(range(1000))
    assert all(path.stat().st_size < 2 * SEGMENT_BYTES for path in (tmp_path / "reports").iterdir())


def test_older_versions_read_past_it(tmp_path):
    """In a segment each line of events is a line of notes that notes nothing; run.json has one more field."""
    train(tmp_path / "run", 4, keep=hf.Keep(last=1))
    lines = [
        json.loads(line) for path in (tmp_path / "run/reports").iterdir() for line in path.read_text().splitlines()
    ]
    assert all("started" in line or line.get("notes") == {} or "attempt" in line for line in lines)


@settings(max_examples=60, deadline=None)
@given(STORED)
def test_strange_events_are_left_out(stored):
    """Whatever a file says: what is read is bounded and of the right kinds, and nothing raises."""
    found = events_from([*stored, GOOD])
    assert len(found) >= 1, "what is good beside it is read"
    for event in found:
        assert event.what in ("saved", "cost", "lost", "skipped", "deleted")
        assert JournalEvent.from_json(event.to_json()) == event
        assert all(len(text) <= 300 for text in (event.name, event.why, event.kind))


def test_a_run_does_not_need_it(tmp_path, caplog):
    """Nonsense for events, in segments and in run.json: rows, attempts and checkpoints are what they were."""
    train(tmp_path / "run", 3)
    storage = resolve(tmp_path / "run")
    before = [record.name for record in Catalog(storage).records()]
    first = next((tmp_path / "run/reports").iterdir())
    strange = ['"x"', '[1, null, {"what": "saved"}]', '{"a": 1}', '[{"what": "deleted", "time": 1e999}]']
    with first.open("a") as file:
        file.writelines(f'{{"notes": {{}}, "events": {events}}}\n' for events in strange)
    with caplog.at_level(logging.WARNING):
        catalog = Catalog(storage)
        events = catalog.index.read_history().events
    assert [record.name for record in catalog.records()] == before
    assert len(of(events, "saved")) == 3
    assert "damaged" not in caplog.text
    index = RunIndex.load(storage)
    for events in strange:
        fresh = RunIndex(storage)
        fresh.journal.take(json.loads(events))
        assert fresh.journal.waiting() == []
    assert index.damage is None
    train(tmp_path / "run", 5)
    assert Catalog(storage).newest().step == 5


def test_a_lost_journal_is_no_loss(tmp_path):
    """Without reports/ and with a damaged run.json the checkpoints are listed, and a start goes on."""
    import shutil

    train(tmp_path / "run", 3)
    shutil.rmtree(tmp_path / "run/reports")
    (tmp_path / "run/run.json").write_text("{")
    assert [record.step for record in Catalog(resolve(tmp_path / "run")).records()] == [3, 2, 1]
    train(tmp_path / "run", 4)
    assert {one.step for one in of(told(tmp_path / "run").events, "saved")} == {4}


def test_a_life_tells_everything(tmp_path):
    """Each save with its size and what it cost, each deletion with its rule, and how the life ended."""
    train(tmp_path / "run", 6, keep=hf.Keep(last=2))
    found = told(tmp_path / "run")
    saved, cost, gone = (of(found.events, what) for what in ("saved", "cost", "deleted"))
    assert [one.step for one in saved] == [1, 2, 3, 4, 5, 6] == [one.step for one in cost]
    assert all(one.bytes > 0 and one.kind == "state" and one.durable_s > 0 for one in saved)
    assert all(0 <= one.held_s <= one.lost_s and one.durable_s > 0 for one in cost)
    assert [(one.step, one.why) for one in gone] == [(step, "not among last 2") for step in (1, 2, 3, 4)]
    assert found.attempts[1].details["last_step"] == 6
    assert [one.time for one in found.events] == sorted(one.time for one in found.events)


def test_a_killed_trainer_loses_no_event(tmp_path):
    """The writer outlives its trainer and writes what waits, with the end of the attempt."""
    script = f"""
import os, signal, torch, holdfast as hf
with hf.Checkpointer({str(tmp_path / "run")!r}, {{"w": torch.zeros(8)}}, every="1ba", keep=hf.Keep(last=1)) as ck:
    for _ in range(3):
        ck.step()
    ck.wait()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    until = time.monotonic() + 60
    while run_state(catalog := Catalog(resolve(tmp_path / "run"))).is_live and time.monotonic() < until:
        time.sleep(0.05)
    events = catalog.index.read_history().events
    assert [one.step for one in of(events, "saved")] == [1, 2, 3]
    assert [one.step for one in of(events, "deleted")] == [1, 2]


def test_a_save_that_is_lost(tmp_path):
    """What failed and why; training goes on, and the next save brings the news to the disk."""
    storage = FaultyStorage(tmp_path / "run", ops=FaultyOps(disk_bytes=64 << 20))
    state = {"w": torch.zeros(1 << 18)}
    with hf.Checkpointer(storage, state, every="1ba") as ck:
        ck.step()
        ck.wait()
        used, storage.ops.used_bytes = storage.ops.used_bytes, (64 << 20) - (1 << 16)
        state["w"] += 1
        ck.step()
        ck.wait()
        storage.ops.used_bytes = used
        ck.step()
        ck.wait()
    events = told(tmp_path / "run").events
    assert [(one.step, one.name) for one in of(events, "lost")] == [(2, "step_00000002")]
    assert "StorageFullError" in of(events, "lost")[0].why
    assert [one.step for one in of(events, "saved")] == [1, 3]


def test_deleted_by_hand(tmp_path):
    """A deletion with the lease, as `holdfast rm` does it, is in the journal of the run."""
    train(tmp_path / "run", 3)
    with upkeep(resolve(tmp_path / "run")) as catalog:
        catalog.discard(["step_00000001"], "holdfast rm")
    assert [(one.step, one.why) for one in of(told(tmp_path / "run").events, "deleted")] == [(1, "holdfast rm")]
    train(tmp_path / "run", 5)
    events = told(tmp_path / "run").events
    assert len(of(events, "deleted")) == 1
    assert [one.step for one in of(events, "saved")] == [1, 2, 3, 4, 5]


def test_the_loop_trainer_tells_too(tmp_path):
    """Checkpoint directories of `Trainer`: seconds until durable, seconds held, and what its retention deleted."""
    from torch.utils.data import DataLoader, TensorDataset

    model = torch.nn.Linear(3, 1)
    trainer = hf.Trainer(
        model=model,
        train_dataloader=DataLoader(TensorDataset(torch.ones(4, 3), torch.ones(4, 1)), batch_size=4),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=torch.nn.functional.mse_loss,
        max_duration="4ep",
        progress_bar=False,
        save_folder=str(tmp_path / "run"),
        save_num_checkpoints_to_keep=2,
    )
    trainer.fit()
    trainer.close()
    events = told(tmp_path / "run").events
    assert [one.step for one in of(events, "saved")] == [1, 2, 3, 4] == [one.step for one in of(events, "cost")]
    assert all(one.held_s > 0 and one.durable_s > 0 for one in of(events, "cost"))
    assert [one.step for one in of(events, "deleted")] == [1, 2]


@pytest.mark.slow
def test_the_function_trainer_tells_too(tmp_path):
    """State and directories that workers report."""
    from holdfast.torch import TorchTrainer

    def train_func():
        import tempfile
        from pathlib import Path

        import torch

        import holdfast as hf

        for number in range(2):
            hf.report({"loss": 1.0 / (number + 1)}, state={"w": torch.ones(100)})
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "notes.txt").write_text("mine")
            hf.report({"loss": 0.1}, checkpoint=hf.Checkpoint.from_directory(folder))

    config = hf.RunConfig(storage_path=str(tmp_path), name="fit", checkpoint_config=hf.CheckpointConfig(num_to_keep=2))
    TorchTrainer(train_func, scaling_config=hf.ScalingConfig(num_workers=1), run_config=config).fit()
    events = told(tmp_path / "fit").events
    assert sorted((one.step, one.kind) for one in of(events, "saved")) == [(1, "ranks"), (2, "ranks"), (3, "files")]
    assert [(one.step, one.why) for one in of(events, "deleted")] == [(1, "not among last 2")]


def test_what_comes_while_events_are_written_waits_for_the_next_time() -> None:
    """Those handed out are forgotten when they are written, and nothing that was noted since, though it be alike."""
    journal = Journal()
    journal.add("lost", name="a", why="no space")
    handed, number = journal.take_out()
    journal.add("lost", name="b", why="no space")
    journal.add("lost", name="c", why="no space")
    assert [event["name"] for event in handed] == ["a"]
    journal.written(number)
    assert [(event["name"], event.get("times", 1)) for event in journal.waiting()] == [("b", 2)]
    journal.written(number)
    assert len(journal.waiting()) == 1, "written counts once"


def test_changes_without_room_for_the_lease(tmp_path) -> None:
    """Who frees space, by rm or prune, is told to begin by hand: the advice to free space says nothing to them."""
    storage = FaultyStorage(tmp_path, disk_bytes=0)
    with pytest.raises(hf.StorageFullError, match=r"no room for the lease.* by hand"), upkeep(storage):
        raise AssertionError("entered")
