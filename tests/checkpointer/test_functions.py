"""`save`, `save_async` and `load` as a user meets them."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.checkpointer import functions
from holdfast.checkpointer.functions import SaveTarget
from holdfast.state.save import snapshot
from holdfast.storage import MemoryStorage
from holdfast.testing import FaultyStorage, assert_state_equal
from holdfast.writer.arena import Arena


class Gate(MemoryStorage):
    """A storage whose manifests wait for the test: a save is under way for as long as it takes."""

    def __init__(self, name):
        super().__init__(name)
        self.open_gate, self.reached = threading.Event(), threading.Event()
        self.error = None

    def put(self, path, data, **arguments):
        """Wait before a manifest becomes visible."""
        if path.endswith("manifest.json"):
            self.reached.set()
            assert self.open_gate.wait(60)
            if self.error:
                raise self.error
        return super().put(path, data, **arguments)


@pytest.fixture
def gate(request):
    one = Gate(f"gate-{request.node.name}")
    yield one
    one.open_gate.set()


def state_of(value):
    return {
        "cpu": torch.full((100,), value),
        "large": torch.full((300_000,), value),
        "strided": torch.full((40, 40), value).t()[::2],
        "parameter": nn.Parameter(torch.full((3,), value)),
        "model": nn.Linear(2, 2),
        "array": torch.full((3,), value).numpy(),
        "plain": [value, {"n": int(value)}],
    }


def test_save_then_load(tmp_path):
    """A save is durable on return, says where it is, and records step and metrics."""
    checkpoint = hf.save(tmp_path / "a", {"w": torch.ones(2)}, step=7, metrics={"loss": torch.tensor(0.5)})
    assert (tmp_path / "a" / "manifest.json").exists()
    assert checkpoint == hf.Checkpoint(tmp_path / "a")
    assert (checkpoint.step, checkpoint.metrics) == (7, {"loss": 0.5})
    assert hf.load(checkpoint)["w"].tolist() == hf.load(str(tmp_path / "a"))["w"].tolist() == [1, 1]
    assert checkpoint.verify().ok
    assert checkpoint.keys() == ["w"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**30, 3])
def test_any_number_is_a_metric(tmp_path, value):
    """Metrics that JSON has no number for do not break a save."""
    checkpoint = hf.save(tmp_path / "a", {"n": 1}, metrics={"loss": value})
    assert str(checkpoint.metrics["loss"]) == str(value)


@pytest.mark.parametrize("name", ["with space", "ümläut-步", "a=b,c", "deep/er/still", "%41#?"])
def test_paths(tmp_path, name):
    """Paths with spaces, letters of any script and signs name just that directory, as str and as Path."""
    hf.save(tmp_path / name, {"n": 1})
    assert (tmp_path / name / "manifest.json").exists()
    assert hf.load(str(tmp_path / name)) == {"n": 1}


def test_relative_path_is_that_of_the_call(tmp_path, monkeypatch):
    """A relative path means the directory at the time of the call."""
    monkeypatch.chdir(tmp_path)
    handle = hf.save_async("runs/one", {"n": 1})
    monkeypatch.chdir("/")
    assert handle.result(60).path == str(tmp_path / "runs" / "one")


def test_a_name_of_a_file_is_said_to_be_a_directory(tmp_path, caplog, monkeypatch):
    """Whoever comes from torch.save expects a file under `model.pt`: it is said once that it is none."""
    monkeypatch.setattr(functions, "_directory_said", False)
    with caplog.at_level(logging.WARNING, "holdfast.state"):
        hf.save(tmp_path / "v1.5", {"n": 1})
        assert not caplog.messages
        hf.save(tmp_path / "model.pt", {"n": 1})
        hf.save_async(tmp_path / "other.PT", {"n": 1}).result()
    assert len(caplog.messages) == 1
    assert re.search(r"model\.pt is a directory, .* NAME\.pt --to torch", caplog.messages[0])


def test_existing_checkpoint_is_kept(tmp_path):
    """A committed checkpoint is not overwritten unless asked, and what is there is untouched."""
    hf.save(tmp_path / "a", {"n": 1})
    with pytest.raises(hf.CheckpointExistsError, match="overwrite=True"):
        hf.save(tmp_path / "a", {"n": 2})
    with pytest.raises(FileExistsError):
        hf.save_async(tmp_path / "a", {"n": 2})
    assert hf.load(tmp_path / "a") == {"n": 1}


def test_overwrite_replaces_everything(tmp_path):
    """After an overwrite only files of the new checkpoint are left, and it is whole."""
    hf.save(tmp_path / "a", {"model": nn.Linear(300, 300), "other": torch.ones(1 << 19)})
    checkpoint = hf.save(tmp_path / "a", {"n": torch.ones(2)}, overwrite=True)
    assert hf.load(tmp_path / "a")["n"].tolist() == [1, 1]
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    listed = {entry["path"] if isinstance(entry, dict) else entry for entry in manifest["files"]}
    assert {path.name for path in (tmp_path / "a").iterdir()} == listed | {"manifest.json"}
    assert checkpoint.verify().ok


def test_overwrite_replaces_at_the_commit(gate):
    """Until the new checkpoint commits, the old one loads; afterwards the new one does."""
    gate.open_gate.set()
    target = hf.Checkpoint("run/one", filesystem=gate)
    hf.save(target, {"n": 1, "w": torch.ones(3)})
    gate.open_gate.clear()
    gate.reached.clear()
    handle = hf.save_async(target, {"n": 2, "w": torch.zeros(3)}, overwrite=True)
    assert gate.reached.wait(60)
    assert hf.load(target)["n"] == 1
    assert hf.load(target)["w"].tolist() == [1, 1, 1]
    gate.open_gate.set()
    handle.result(60)
    assert hf.load(target)["n"] == 2


def test_a_failed_overwrite_leaves_the_old_one(gate):
    """A save that fails at its very end leaves the checkpoint it was to replace as it was."""
    gate.open_gate.set()
    target = hf.Checkpoint("run/one", filesystem=gate)
    hf.save(target, {"n": 1, "w": torch.ones(3)})
    gate.error = hf.StoragePermissionError("no more")
    with pytest.raises(hf.StoragePermissionError):
        hf.save(target, {"n": 2, "w": torch.zeros(3)}, overwrite=True)
    assert hf.load(target)["n"] == 1
    assert target.verify().ok


def test_async_stores_the_values_of_the_call(gate):
    """Everything may be changed the moment save_async returns: what is stored is what was there at the call."""
    state = state_of(1.0)
    weight = state["model"].weight.detach().clone()
    handle = hf.save_async(hf.Checkpoint("run/one", filesystem=gate), state)
    for key in ("cpu", "large", "strided"):
        state[key].fill_(9)
    state["array"][:] = 9
    state["plain"][1]["n"] = 9
    state["plain"].append(9)
    with torch.no_grad():
        state["parameter"].fill_(9)
        state["model"].weight.fill_(9)
    state["late"] = 9
    gate.open_gate.set()
    expected = state_of(1.0)
    found = hf.load(handle.result(60))
    assert torch.equal(found["model"]["weight"], weight)
    del found["model"], expected["model"]
    assert_state_equal(found, expected)


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_back_to_back_saves_keep_apart(tmp_path, where):
    """Saves in a row, each from tensors changed since the last, all hold their own values; one arena serves them."""
    state = state_of(0.0)
    handles = []
    for number in range(6):
        state["cpu"].fill_(number)
        state["large"].fill_(number)
        target = tmp_path / str(number) if where == "disk" else f"memory://back/{tmp_path.name}/{number}"
        handles.append(hf.save_async(target, state))
        state["large"].fill_(-1)
    for number, handle in enumerate(handles):
        found = hf.load(handle.result(60))
        assert found["cpu"].unique().tolist() == found["large"].unique().tolist() == [number]


def test_handle(gate):
    """A handle says whether the save has ended, waits as long as told, and gives the error or None."""
    handle = hf.save_async(hf.Checkpoint("run/one", filesystem=gate), {"w": torch.ones(1)})
    assert not handle.done()
    with pytest.raises(TimeoutError, match=r"one is not durable after 0\.01 s; the save goes on"):
        handle.result(timeout_s=0.01)
    gate.open_gate.set()
    assert handle.exception() is None
    assert handle.done()
    assert handle.result() == hf.Checkpoint("run/one", filesystem=gate)
    assert handle.held_s > 0
    assert handle.dropped == ()


def test_errors_of_the_writing_come_out_of_the_handle(tmp_path):
    """A full disk is reported by result() and exception(), nothing half-written is visible, the next save works."""
    storage = FaultyStorage(tmp_path, disk_bytes=200_000)
    target = hf.Checkpoint("one", filesystem=storage)
    handle = hf.save_async(target, {"w": torch.ones(1_000_000)})
    assert isinstance(handle.exception(), hf.StorageFullError)
    with pytest.raises(OSError, match="one"):
        handle.result()
    with pytest.raises((hf.CheckpointNotFoundError, hf.IncompleteCheckpointError)):
        hf.load(tmp_path / "one")
    hf.save_async(tmp_path / "two", {"w": torch.ones(3)}).result(60)
    assert hf.load(tmp_path / "two")["w"].tolist() == [1, 1, 1]


def test_one_writer_and_one_arena_serve_many_saves(tmp_path, monkeypatch):
    """Saves of one process share one writer; asynchronous ones of one structure share one arena."""
    from holdfast.checkpointer import functions
    from holdfast.state.save import snapshot

    functions.save(tmp_path / "first", {"w": torch.ones(4)})
    hf.save_async(tmp_path / "warm", {"w": torch.ones(4)}).result(60)
    started, arenas = [], []
    create, start = snapshot.Arena.create, functions.WriterClient.start
    monkeypatch.setattr(snapshot.Arena, "create", lambda size: arenas.append(size) or create(size))
    monkeypatch.setattr(functions.WriterClient, "start", lambda *args: started.append(1) or start(*args))
    for number in range(4):
        hf.save_async(tmp_path / f"a{number}", {"w": torch.full((4,), float(number))}).result(60)
    assert (started, arenas) == ([], [])


def test_saves_of_one_structure_share_their_windows(tmp_path, monkeypatch, caplog):
    """The memory of a `save` serves the next one, unless that one failed; what is left out is said each time."""
    from holdfast.state.save import snapshot

    monkeypatch.setattr(functions, "_SYNC_STAGING", 2 << 20)
    functions._idle.clear()
    arenas, create = [], snapshot.Arena.create
    monkeypatch.setattr(snapshot.Arena, "create", lambda size: arenas.append(size) or create(size))
    for number in range(3):
        value = torch.full((5 << 20,), number, dtype=torch.uint8)
        hf.save(tmp_path / str(number), {"w": value, "bad": object()}, unsupported="drop")
    assert arenas == [2 << 20]
    assert caplog.text.count("state['bad']") == 3
    for number in range(3):
        assert hf.load(tmp_path / str(number))["w"].unique().tolist() == [number]
    with pytest.raises(hf.CheckpointExistsError):
        hf.save(tmp_path / "2", {"w": torch.zeros(5 << 20, dtype=torch.uint8)})
    assert not functions._idle, "what an error has interrupted may still be read"
    hf.save(tmp_path / "3", {"w": torch.ones(5 << 20, dtype=torch.uint8)})
    assert arenas == [2 << 20] * 2
    for one in functions._idle.values():  # of two windows of 1 MiB: not for other tests
        one.close()
    functions._idle.clear()


def test_saves_from_many_threads(tmp_path):
    """Threads that save at the same time do not mix their states."""

    def work(number):
        call = hf.save if number % 2 else lambda *args: hf.save_async(*args).result(60)
        call(tmp_path / str(number), {"w": torch.full((5000,), float(number))})

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(8):
        assert hf.load(tmp_path / str(number))["w"].unique().tolist() == [number]


def test_several_ranks_that_cannot_meet_are_refused(tmp_path, monkeypatch):
    """With RANK and WORLD_SIZE set and no process group, "all" is a ConfigError that names ways out; "this" saves."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for call in (hf.save, hf.save_async):
        with pytest.raises(hf.ConfigError, match=r"rank 0 of 2.*ranks='this'"):
            call(tmp_path / "a", {"n": 1})
    assert not (tmp_path / "a").exists()
    hf.save(tmp_path / "a", {"n": 1}, ranks="this")
    assert hf.load(tmp_path / "a") == {"n": 1}


@pytest.mark.parametrize("arguments", [{"ranks": "some"}, {"unsupported": "ignore"}])
def test_wrong_words_are_refused(tmp_path, arguments):
    """A word that is no choice is a ConfigError that lists the choices."""
    with pytest.raises(hf.ConfigError, match=r"'this'|'drop'"):
        hf.save(tmp_path / "a", {"n": 1}, **arguments)


@pytest.mark.parametrize("step", [-1, 2.0, True, "5", 1 << 62])
@pytest.mark.parametrize("call", [hf.save, hf.save_async])
def test_a_step_that_no_manifest_can_have_is_refused(tmp_path, call, step):
    """Before anything is written: the checkpoint that it would replace is there still (it became unreadable)."""
    hf.save(tmp_path / "a", {"n": 1}, step=1)
    with pytest.raises(hf.ConfigError, match=r"step=.*whole number of at least 0"):
        call(tmp_path / "a", {"n": 2}, step=step, overwrite=True)
    assert hf.load(tmp_path / "a") == {"n": 1}


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7)])
def test_a_step_of_numpy_or_torch_is_its_number(tmp_path, step):
    """A count as libraries give it is recorded."""
    assert hf.save(tmp_path / "a", {"n": 1}, step=step).step == 7


def test_weights_are_not_cast_to_whole_numbers(tmp_path):
    """A dtype that would truncate every weight, or is none, is refused before anything is read."""
    hf.save(tmp_path / "a", {"w": torch.tensor([0.4])})
    for dtype in (torch.int8, torch.bool, "float16"):
        with pytest.raises(hf.ConfigError, match=r"give a floating dtype"):
            hf.load(tmp_path / "a", dtype=dtype)
    for device in ("gpu", {"cuda:0": "cpu"}):
        with pytest.raises(hf.ConfigError, match=r"map_location=.*give a device"):
            hf.load(tmp_path / "a", map_location=device)
    assert hf.load(tmp_path / "a", dtype=torch.bfloat16)["w"].dtype is torch.bfloat16


def test_names_from_a_generator_are_taken(tmp_path):
    """A generator gives its names once, and they count: also for a run, whose newest checkpoint is looked for first."""
    with hf.Checkpointer(tmp_path / "run", {"w": torch.ones(1), "b": torch.ones(1)}, every=1) as ck:
        ck.step()
    live = {"w": torch.zeros(1)}
    hf.load(tmp_path / "run", live, only=(name for name in ["w"]))
    assert live["w"].item() == 1
    live = {"w": torch.zeros(1), "b": torch.zeros(1)}
    hf.load(tmp_path / "run", live, skip=(name for name in ["w"]))
    assert (live["w"].item(), live["b"].item()) == (0, 1)


@pytest.mark.parametrize("name", ["only", "skip", "allow_missing", "rename"])
@pytest.mark.parametrize("value", [5, [5], True, {5: "x"}])
def test_what_are_no_names_is_refused(tmp_path, name, value):
    """A number where names belong is a ConfigError that names the argument, for `load` and for a run."""
    hf.save(tmp_path / "a", {"n": 1})
    with pytest.raises(hf.ConfigError, match=name):
        hf.load(tmp_path / "a", **{name: value})
    if name != "only":
        with pytest.raises(hf.ConfigError, match=name):
            hf.Checkpointer(tmp_path / "run", {"n": 1}, **{name: value})


def test_metrics_are_a_mapping(tmp_path):
    """A list of metrics is refused with what to give."""
    with pytest.raises(hf.ConfigError, match=r"mapping \{name: number\}"):
        hf.save(tmp_path / "a", {"n": 1}, metrics=[("loss", 1.0)])


@pytest.mark.parametrize("call", [hf.save, hf.save_async])
def test_unsupported_values_write_nothing(tmp_path, call):
    """A value that cannot be saved is refused by the call itself, before anything is on the disk."""
    with pytest.raises(hf.UnsupportedStateError, match=r"state\['callbacks'\]\[0\]: object "):
        call(tmp_path / "a", {"w": torch.ones(2), "callbacks": [object()]})
    assert not (tmp_path / "a").exists()
    hf.save(tmp_path / "a", {"n": 1})


def test_drop_warns_on_every_save(tmp_path, caplog):
    """unsupported='drop' saves the rest and logs what is not saved."""
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        hf.save(tmp_path / "a", {"n": 1, "bad": object()}, unsupported="drop")
    assert "state['bad']" in caplog.text
    assert hf.load(tmp_path / "a") == {"n": 1}


def test_checkpoint_load_is_the_same_door(tmp_path):
    """`Checkpoint.load` takes the arguments of `load`."""
    checkpoint = hf.save(tmp_path / "a", {"a": torch.ones(2), "b": 1})
    live = torch.zeros(2)
    checkpoint.load({"a": live}, only="a")
    assert live.tolist() == [1, 1]
    assert checkpoint.load(only="b") == {"b": 1}


def test_what_load_does_not_restore_is_said(tmp_path, caplog):
    """One warning lists what was not restored, also where nothing was refused; a load of everything says nothing."""
    model = torch.nn.Linear(2, 2)
    hf.save(tmp_path / "a", {"model": model, "plain": 3})
    hf.load(tmp_path / "a", {"model": model, "plain": 0})
    assert caplog.text == ""
    hf.load(tmp_path / "a", {"model": model, "plain": hf.PerRank(7), "rng": hf.RNG})
    (said,) = (record.getMessage() for record in caplog.records)
    assert "NOT restored: plain (the checkpoint has no part for this rank)" in said
    assert "rng (" in said
    caplog.clear()
    many = torch.nn.ModuleDict({f"layer{number}": torch.nn.Linear(1, 1) for number in range(9)})
    hf.load(tmp_path / "a", {"model": many, "plain": 0}, strict=False)
    (said,) = (record.getMessage() for record in caplog.records)
    assert "NOT restored: model/layer" in said
    assert said.endswith("and 12 more")


@pytest.mark.usefixtures("forked")
def test_a_forked_child_can_save(tmp_path):
    """A child of fork has writers of its own: both processes save, and neither disturbs the other."""
    script = f"""
import os, torch, holdfast as hf
hf.save_async({str(tmp_path / "first")!r}, {{"w": torch.ones(2)}}).result()
child = os.fork()
if child == 0:
    hf.save_async({str(tmp_path / "child")!r}, {{"w": torch.ones(2) * 2}}).result()
    hf.save({str(tmp_path / "child2")!r}, {{"w": torch.ones(2) * 2}})
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
hf.save_async({str(tmp_path / "parent")!r}, {{"w": torch.ones(2) * 3}}).result()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(hf.__file__).parents[1])])}
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=120, env=environment)
    assert [hf.load(tmp_path / name)["w"][0].item() for name in ("first", "child", "child2", "parent")] == [1, 2, 2, 3]


def test_a_program_that_ends_right_after_save_async_loses_nothing(tmp_path):
    """A save handed over is committed although the program ends without waiting."""
    script = f"import torch, holdfast as hf; hf.save_async({str(tmp_path / 'a')!r}, {{'w': torch.ones(500_000)}})"
    environment = {**os.environ, "PYTHONPATH": str(Path(hf.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, env=environment)
    assert hf.load(tmp_path / "a")["w"].sum().item() == 500_000


@pytest.mark.usefixtures("forked")
def test_save_async_in_a_signal_handler_does_not_wait_for_itself(tmp_path):
    """A handler that saves, in the middle of `save_async`: refused instead of a deadlock; `save` works there."""
    script = f"""
import os, signal, threading, time, torch, holdfast as hf
from holdfast.checkpointer import functions
from holdfast.state.save import snapshot
from holdfast.storage import MemoryStorage

class Gate(MemoryStorage):
    go_on = threading.Event()
    def put(self, path, data, **arguments):
        assert not path.endswith("manifest.json") or self.go_on.wait(60)
        return super().put(path, data, **arguments)

gate, state = Gate("gate"), {{"w": torch.ones(2)}}

def handler(*_):
    hf.save({str(tmp_path / "here")!r}, state)
    try:
        hf.save_async(hf.Checkpoint("three", filesystem=gate), state)
    except hf.SessionError as error:
        print(error)
    gate.go_on.set()

def interrupt():
    while functions._lock.acquire(blocking=False):
        functions._lock.release()
    time.sleep(0.2)  # by now it waits
    os.kill(os.getpid(), signal.SIGUSR1)

signal.signal(signal.SIGUSR1, handler)
hf.save_async(hf.Checkpoint("one", filesystem=gate), state)
threading.Thread(target=interrupt).start()
handle = hf.save_async(hf.Checkpoint("two", filesystem=gate), state)  # waits for the one before, in the lock
print("saved", handle.result(60).name)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(hf.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment, check=True
    )
    assert "interrupted by a signal handler" in done.stdout
    assert "saved two" in done.stdout
    assert hf.load(tmp_path / "here")["w"].tolist() == [1, 1]


@pytest.fixture
def aside(monkeypatch):
    """A first save of 2 MiB counts as big; every test of it begins without an arena."""
    monkeypatch.setattr(snapshot, "_ASIDE", 2 << 20)
    monkeypatch.setattr(functions, "_async", {})
    monkeypatch.setattr(functions, "_pending", {})
    yield
    for one in functions._async.values():
        one.close()


def big_state(value: float) -> dict:
    tied = torch.full((1 << 18,), value)
    return {"large": torch.full((1 << 20, 3), value), "strided": torch.full((500, 6), value).T, "a": tied, "b": tied}


def test_a_big_first_save_is_copied_aside(tmp_path, aside):
    """It may be changed at once like any other; it streams on meanwhile, and those after it find the arena ready."""
    state = big_state(1.0)
    first = hf.save_async(tmp_path / "one", state)
    for tensor in state.values():
        tensor.fill_(2.0)
    second = hf.save_async(tmp_path / "two", state)
    for tensor in state.values():
        tensor.fill_(3.0)
    for number, handle in enumerate((first, second), start=1):
        found = hf.load(handle.result(60))
        assert_state_equal(found, big_state(float(number)))
        assert found["a"].data_ptr() == found["b"].data_ptr()
        assert handle.result().verify().ok
    (snapshotter,) = functions._async.values()
    assert snapshotter.arena is not None
    assert snapshotter.arena.size == snapshotter.layout.arena_bytes


def test_a_big_first_save_that_fails(tmp_path, aside):
    """Its handle has the error, and the next one works; a plain `save` meanwhile is not disturbed."""
    storage = FaultyStorage(tmp_path / "full", disk_bytes=200_000)
    handle = hf.save_async(hf.Checkpoint("one", filesystem=storage), big_state(1.0))
    assert hf.save(tmp_path / "other", {"n": 1}).keys() == ["n"]
    assert isinstance(handle.exception(), hf.StorageFullError)
    again = hf.save_async(tmp_path / "again", big_state(2.0))
    assert_state_equal(hf.load(again.result(60)), big_state(2.0))


@pytest.mark.parametrize("what", ["memory", "thread"])
def test_a_big_first_save_without_memory_or_thread(tmp_path, aside, monkeypatch, what):
    """It raises, the writer does not wait for windows that never come, and the next save works."""

    def refuse(*arguments, **options):
        raise RuntimeError("can't start new thread") if what == "thread" else hf.HoldfastError("cannot get memory")

    with monkeypatch.context() as patch:
        if what == "thread":
            original = threading.Thread.start
            patch.setattr(
                threading.Thread,
                "start",
                lambda one: refuse() if one.name == "holdfast-first-save" else original(one),
            )
        else:
            patch.setattr(Arena, "private", refuse)
        with pytest.raises((RuntimeError, hf.HoldfastError), match=r"cannot get memory|new thread"):
            hf.save_async(tmp_path / "one", big_state(1.0))
    assert_state_equal(hf.load(hf.save_async(tmp_path / "two", big_state(2.0)).result(60)), big_state(2.0))
    assert not (tmp_path / "one" / "manifest.json").exists()


@pytest.mark.usefixtures("forked")
def test_a_big_first_save_outlives_the_script(tmp_path):
    """A script that ends right after it leaves a whole checkpoint."""
    code = (
        "import sys, torch, holdfast as hf\n"
        "from holdfast.state.save import snapshot\n"
        "snapshot._ASIDE = 2 << 20\n"
        "hf.save_async(sys.argv[1], {'w': torch.ones(1 << 22)})\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "one")], check=True, timeout=60)
    assert hf.load(tmp_path / "one")["w"].sum().item() == 1 << 22


def test_the_arena_of_a_save_that_is_stuck_is_not_waited_for_without_end(tmp_path, monkeypatch) -> None:
    """One of several ranks whose writer stands still raises; the others hear of it, as of any error of a save."""
    monkeypatch.setattr(functions, "ANSWER_MARGIN_S", 0.01)
    rank_group: Any = SimpleNamespace(rank=1, timeout_s=0.02)
    client: Any = None
    stuck: Future[Any] = Future()
    one = SaveTarget(checkpoint=hf.Checkpoint(tmp_path / "a"), client=client, save_id="s-1", rank_group=rank_group)
    with pytest.raises(hf.HoldfastError, match="rank 1: the save before this one, whose memory is needed, is not dura"):
        one.wait(stuck, "the save before this one, whose memory is needed,")
    stuck.set_exception(OSError("its own handle tells of it"))
    one.wait(stuck, "the save before this one")


def test_what_the_state_has_no_place_for_is_refused_alone_too(tmp_path: Path) -> None:
    """Nothing is missing and nothing is wrong: an entry that would be dropped is reason enough."""
    hf.save(tmp_path / "one", {"w": torch.ones(2), "more": torch.ones(2)})
    state = {"w": torch.zeros(2)}
    with pytest.raises(hf.StateMismatchError, match="1 in the checkpoint but not in the state"):
        hf.load(tmp_path / "one", state)
    assert state["w"].sum() == 0
    hf.load(tmp_path / "one", state, strict=False)
    assert state["w"].sum() == 2
