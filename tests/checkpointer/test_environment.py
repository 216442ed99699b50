"""Where runs happen: scripts without a guard, notebooks, forks, launchers; no torch before it is needed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import run_kit as kit
import torch

import holdfast as hf


@pytest.mark.slow
def test_a_plain_script_a_thread_of_it_and_its_forks(tmp_path: Path) -> None:
    """No `if __name__` guard, a run in a thread as in a notebook, a child left in the body: one run.

    The import of the package brings no torch. The forked child leaves the body by sys.exit and waits for nothing.
    """
    code, out, err = kit.finish(
        kit.start(
            """
            import sys
            import holdfast as hf
            assert "torch" not in sys.modules, "torch imported too early"
            from holdfast import Checkpoint, Keep
            assert "torch" not in sys.modules, "torch imported too early"
            import os, threading
            import run_kit as kit

            state = kit.make_state()
            child = None
            with hf.Checkpointer("run", state, every=2, keep=None) as ck:
                for batch in ck.batches(kit.loader()):  # torch itself cannot fork beside loader workers
                    ck.step(loss=kit.train_one(state, batch))
                    if ck.global_step == 2:
                        child = os.fork()
                        if child == 0:
                            sys.exit(3)
            if child == 0:
                raise AssertionError("the child went on")
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
            print("steps", kit.steps("run"))

            source = '''
            state = kit.make_state()
            with hf.Checkpointer("cell", state, every=1, keep=None) as ck:
                while ck.global_step < 2:
                    ck.step(loss=kit.train_one(state))
            '''
            import textwrap
            thread = threading.Thread(target=exec, args=(textwrap.dedent(source), {"kit": kit, "hf": hf}))
            thread.start()
            thread.join()
            print("cell", kit.steps("cell"))
            """,
            cwd=tmp_path,
        )
    )
    assert code == 0, err
    assert "steps [2, 4]" in out
    assert "cell [1, 2]" in out


def test_a_run_in_a_thread_outlives_the_main_thread(tmp_path: Path) -> None:
    """The main thread has returned, and every thread pool with it: big states are saved and loaded all the same."""
    code, out, err = kit.finish(
        kit.start(
            """
            import threading
            import torch
            import holdfast as hf

            def work():
                threading.main_thread().join()
                state = {"weights": torch.ones(12 << 20)}
                with hf.Checkpointer("run", state, every=None) as ck:
                    ck.step()
                print("loaded", float(hf.load(ck.latest().path)["weights"].sum()), flush=True)

            threading.Thread(target=work).start()
            """,
            cwd=tmp_path,
        )
    )
    assert code == 0, err
    assert f"loaded {float(12 << 20)}" in out, err


@pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")])
def test_several_ranks_are_refused_clearly(
    names: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher's two ranks: ConfigError says so before anything is written."""
    monkeypatch.setenv(names[0], "1")
    monkeypatch.setenv(names[1], "2")
    with pytest.raises(hf.ConfigError, match="rank 1 of 2"), hf.Checkpointer(tmp_path / "run", {}):
        pass
    assert not (tmp_path / "run").exists()


def test_a_launcher_with_one_rank_and_no_process_group_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The torchrun --nproc-per-node 1 without init_process_group is one process."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert kit.train(tmp_path, 2).global_step == 2
    assert kit.steps(tmp_path) == [2]


def test_memory_runs_live_in_this_process() -> None:
    """memory:// saves, resumes and ranks like a directory, with a thread as writer."""
    state = kit.make_state()
    first = kit.train("memory://environment/run", 4, state=state)
    assert first._session.client.process_id is None
    fresh = kit.make_state(seed=4)
    with hf.Checkpointer("memory://environment/run", fresh, every=None) as ck:
        assert ck.global_step == 4
        assert all(torch.equal(one, two) for one, two in zip(kit.weights(state), kit.weights(fresh), strict=True))


def test_two_runs_at_once_in_one_process(tmp_path: Path) -> None:
    """Nested bodies (a teacher and a student) save and resume apart from each other."""
    one, two = kit.make_state(1), kit.make_state(2)
    with (
        hf.Checkpointer(tmp_path / "one", one, every=1, keep=None) as a,
        hf.Checkpointer(tmp_path / "two", two, every=2, keep=None) as b,
    ):
        for _ in range(4):
            a.step(loss=kit.train_one(one))
            b.step(loss=kit.train_one(two))
    assert kit.steps(tmp_path / "one") == [1, 2, 3, 4]
    assert kit.steps(tmp_path / "two") == [2, 4]


def test_nothing_is_left_running_or_lying_about(tmp_path: Path) -> None:
    """After the body: no writer process, no thread of ours, no lease, no probe, no temporary file."""
    before = {thread.name for thread in threading.enumerate()}
    ck = kit.train(tmp_path, 3)
    with pytest.raises((ProcessLookupError, TypeError)):
        os.kill(ck._session.client.process_id, 0)
    assert {thread.name for thread in threading.enumerate()} - before == set()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".ledger",
        "latest",
        "reports",
        "run.json",
        "step_00000002",
        "step_00000003",
    ]


def test_the_state_may_be_left_out(tmp_path: Path) -> None:
    """Without a state the run still keeps step, data position and generators."""
    for steps in (2, 4):
        with hf.Checkpointer(tmp_path, every=None) as ck:
            while ck.global_step < steps:
                ck.step()
    assert kit.steps(tmp_path) == [2, 4]
    assert ck.latest().keys() == ["holdfast"]
