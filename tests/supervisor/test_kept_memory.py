"""The memory of a dead life under `holdfast run`: the next one loads from it, else from the storage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from object_kit import BUCKET, moto, s3_environment
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf
from holdfast.callbacks import Callback, CheckpointSaver
from holdfast.checkpointer.run_session import RunSession
from holdfast.format.digest import Digests
from holdfast.format.names import save_id_of
from holdfast.run.life import VARIABLE, LifeReport, read_reports
from holdfast.state.load import restore
from holdfast.supervisor.supervisor import KeptArenas
from holdfast.testing import FaultProxy
from holdfast.writer.arena import Arena

# The first life is killed once the supervisor has its memory; the second one does `between` and shows what it has.
SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch, holdfast as hf
run, home, options, between = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
life = Path(os.environ["HOLDFAST_LIFE"])
kept = json.loads((life / "kept.json").read_bytes())
state = {name: torch.zeros(1 << 20) for name in "abc"}
if (home / "begun").exists():
    lease = home / "run" / "lease.json"  # until the writer has given it back
    while lease.exists() and '"owner": null' not in lease.read_text():
        time.sleep(0.01)
    exec(between)
with hf.Checkpointer(run, state, **options) as ck:
    (home / "seen").write_text(json.dumps([ck.global_step, *(float(value.min()) for value in state.values())]))
    while ck.global_step < 6:
        for number, value in enumerate(state.values(), 1): value += number
        ck.step()
        if ck.global_step == 5 and ck.attempt == 1:
            ck.wait()
            (home / "begun").touch()
            until = time.monotonic() + 20
            while not holds_arenas(os.getppid()) and time.monotonic() < until:
                time.sleep(0.05)
            os.kill(os.getpid(), 9)
    until = time.monotonic() + 20  # it is given back beside the steps after the first
    while any(left := [os.stat(one["path"]).st_size for one in kept]) and time.monotonic() < until:
        time.sleep(0.01)
    (home / "left").write_text(json.dumps(left))
"""
FDS = """
def holds_arenas(pid):
    import os
    places = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            places.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue
    return any("memfd:holdfast-arena" in place for place in places)
"""
SPOIL = """
(path,) = home.glob("run/step_00000005/*.safetensors")
with path.open("r+b") as file:
    file.seek(4096)
    file.write(bytes(path.stat().st_size - 4096))
"""
WIPE = "for one in kept:\n    with open(one['path'], 'r+b') as file: file.write(bytes(one['size']))"
CUT = "for one in kept: os.truncate(one['path'], 0)"


def run(home: Path, where: str, options: str, between: str = "pass", env: dict[str, str] | None = None) -> str:
    """Live both lives; return what they have printed."""
    script = home / "script.py"
    script.write_text(FDS + SCRIPT)
    command = [
        sys.executable,
        "-m",
        "holdfast",
        "run",
        "--no-warm",
        "--",
        sys.executable,
        str(script),
        where,
        str(home),
    ]
    ended = subprocess.run(
        [*command, options, between], env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=150,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert (home / "seen").read_text() == "[5, 5.0, 10.0, 15.0]", ended.stderr
    assert set((home / "left").read_text()) <= set("[0, ]")  # nothing is kept after the first step
    return ended.stderr


def test_a_life_loads_what_the_one_before_has_left_in_memory(tmp_path: Path) -> None:
    """A rescued snapshot whose tensors are all spoilt on the disk is loaded: not a byte came from there."""
    err = run(tmp_path, str(tmp_path / "run"), '{"every": null, "rescue": 1}', SPOIL)
    assert "12.0 MiB were still in memory, 0 B were read" in err


def test_arenas_that_a_process_has_given_up_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new layout replaces the arenas of the one before, and a run that has finished holds none."""
    folder = tmp_path / "life"
    folder.mkdir()
    monkeypatch.setenv(VARIABLE, str(folder))
    kept, report = KeptArenas(), LifeReport(str(folder), {"uri": "run"})

    def held() -> int:
        kept.look(folder)
        links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if name.isdigit()
                 and os.path.exists(f"/proc/self/fd/{name}")]  # fmt: skip
        return sum("memfd:holdfast-arena" in link for link in links)

    with Arena.create(1 << 16) as first, Arena.create(1 << 16) as second:
        others = held()  # those two, and what else this process has
        for arenas, number in (([first], 1), ([first, second], 2), ([second], 1)):
            told = [(arena.fd or -1, arena.size) for arena in arenas]
            report.keeps(told.copy, list)
            assert held() - others == number
        report.end("finished")
        assert held() == others
    kept.close()


@pytest.mark.slow
@pytest.mark.parametrize("between", [WIPE, CUT])
def test_memory_that_is_not_the_checkpoint_is_not_used(tmp_path: Path, between: str) -> None:
    """Digests that differ, or memory that is gone: the storage is read as ever."""
    err = run(tmp_path, str(tmp_path / "run"), '{"every": 5}', between)
    assert "still in memory" not in err


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    with moto() as url, FaultProxy(url) as one:
        yield one


@pytest.mark.slow
def test_a_run_at_a_store_gets_no_tensors_from_it_after_a_crash(tmp_path: Path, proxy: FaultProxy) -> None:
    """No GET of a file with tensors in both lives, and the state is that of the checkpoint."""
    run(tmp_path, f"s3://{BUCKET}/run", '{"every": 5}', env=s3_environment(proxy.url))
    asked = [one for one in proxy.exchanges if one.path.endswith(".safetensors")]
    assert any(one.method == "PUT" for one in asked)
    assert [one.range for one in asked if one.method == "GET"] == []


@pytest.mark.parametrize("spoilt", [False, True])
def test_memory_that_was_compared_is_not_compared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoilt: bool
) -> None:
    """Each byte is hashed once, where it comes from memory; a block that differs there is read, and hashed again."""
    state = {"x": torch.arange(1 << 21)}
    hf.save(tmp_path / "run", state)
    (path,) = (tmp_path / "run").glob("*.safetensors")
    (arena := tmp_path / "arena").write_bytes(path.read_bytes())
    if spoilt:
        with arena.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"?")
    stem, suffix = path.name.split(f"-{save_id_of(path.name)}")
    monkeypatch.setattr(restore, "kept_arenas", lambda: [{"path": str(arena), "files": [(stem, suffix, 0)]}])
    hashed: list[tuple[int, int]] = []
    fit = Digests.fit
    monkeypatch.setattr(Digests, "fit", lambda *args: (hashed.append((args[2], len(args[3]))), fit(*args))[1])
    found = hf.load(tmp_path / "run")
    assert torch.equal(found["x"], state["x"])
    assert sum(size for _, size in set(hashed)) == path.stat().st_size
    assert len(hashed) - len(set(hashed)) == spoilt


def num_arenas() -> int:
    links = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return sum("memfd:holdfast-arena" in link for link in links)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that stands for the memory which the life before has left to a run in "run"."""
    life, memory = tmp_path / "life", tmp_path / "memory"
    life.mkdir()
    memory.write_bytes(bytes(100))
    named = [{"path": str(memory), "size": 100, "uri": str(tmp_path / "run"), "files": []}]
    (life / "kept.json").write_text(json.dumps(named))
    monkeypatch.setenv(VARIABLE, str(life))
    return memory


def test_no_memory_is_taken_before_that_of_the_life_before_is_free(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps go on meanwhile; what a save copies to is made afterwards."""
    gate, truncate = threading.Event(), os.truncate
    monkeypatch.setattr("os.truncate", lambda *args: gate.wait(20) and truncate(*args))
    with hf.Checkpointer(tmp_path / "run", {"w": torch.zeros(1 << 16)}, every=1000) as ck:
        before = num_arenas()
        for _ in range(3):
            ck.step()
        assert (num_arenas(), kept.stat().st_size) == (before, 100)
        gate.set()
        until = time.monotonic() + 20
        while num_arenas() == before and time.monotonic() < until:
            ck.step()
        assert num_arenas() > before
        assert kept.stat().st_size == 0


def test_a_save_at_the_first_step_waits_until_the_memory_is_free(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is held for it, and the step is saved."""
    truncate = os.truncate
    monkeypatch.setattr("os.truncate", lambda *args: (time.sleep(0.3), truncate(*args)))
    with hf.Checkpointer(tmp_path / "run", {"w": torch.zeros(1 << 16)}, every=1) as ck:
        ck.step()
        assert kept.stat().st_size == 0
        ck.wait()
        assert [found.step for found in ck.checkpoints()] == [1]


def test_after_the_last_step_no_more_are_expected(kept: Path, tmp_path: Path) -> None:
    """What is left to write and to upload may take longer than a hang does."""
    seen: list[bool] = []

    def look(_: hf.Checkpoint) -> None:
        seen.extend(report.trains for report in read_reports(tmp_path / "life"))

    with hf.Checkpointer(tmp_path / "run", {"w": torch.zeros(4)}, every=2, on_commit=look) as ck:
        ck.step()
        ck.step()
        ck.wait()
        while not seen:
            time.sleep(0.01)
        ck.step()
    assert seen == [True, False]


def test_the_loop_trainer_tells_its_batches_and_gives_the_memory_back(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch counts, one of an evaluation is a sign of life, and after the last one none is expected."""
    seen: list[tuple[bool, int, float]] = []
    at_end: list[bool] = []
    waiting: list[tuple[bool, ...]] = []
    save_state = RunSession.save_state

    def watched(self: RunSession, *args: Any, **options: Any) -> None:
        waiting.append(tuple(report.waits for report in read_reports(tmp_path / "life")))
        save_state(self, *args, **options)

    monkeypatch.setattr(RunSession, "save_state", watched)

    class Look(Callback):
        def look(self, state: Any, logger: Any) -> None:
            report, other = read_reports(tmp_path / "life")
            assert report.step == other.step
            seen.append((report.trains, report.step, report.moment_s))

        batch_end = eval_batch_end = epoch_start = look

        def fit_end(self, state: Any, logger: Any) -> None:
            at_end.extend(report.trains for report in read_reports(tmp_path / "life"))

    other = CheckpointSaver(folder=str(tmp_path / "other"), save_interval="3ba")
    data = DataLoader(TensorDataset(torch.zeros(8, 2), torch.zeros(8, 2)), batch_size=2)
    hf.Trainer(
        model=torch.nn.Linear(2, 2), loss_fn=torch.nn.functional.mse_loss, train_dataloader=data, eval_dataloader=data,
        max_duration="1ep", save_folder=str(tmp_path / "run"), callbacks=[Look(), other], device="cpu",
    ).fit()  # fmt: skip
    assert [step for _, step, _ in seen] == [0, 1, 2, 3, 4, 4, 4, 4, 4]
    assert all(trains for trains, _, _ in seen)
    moments = [moment for _, _, moment in seen]
    assert moments[5:] == sorted(set(moments[5:]))
    assert kept.stat().st_size == 0
    assert at_end == [False, False]
    assert waiting, "a save holds the loop, and with it each run"
    assert set(waiting) == {(True, True)}
