"""The table of situations of the design: for each an exact exception or step, and the line that is printed."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_kit as kit
import torch

import holdfast as hf
from holdfast.testing import FaultyStorage

Prepare = Callable[[Path], dict[str, Any] | None]


def nothing(path: Path) -> None:
    assert not path.exists()


def empty(path: Path) -> None:
    path.mkdir()


def only_incomplete(path: Path) -> None:
    kit.train(path, 2)
    (path / "step_00000002" / "manifest.json").unlink()
    # With these goes the memory of which lives were here: files of an unknown life are not ours to remove.
    (path / "run.json").unlink()
    shutil.rmtree(path / "reports")


def good(path: Path) -> None:
    kit.train(path, 6)


def newest_without_manifest(path: Path) -> None:
    good(path)
    (path / "step_00000006" / "manifest.json").unlink()


def newest_with_damaged_manifest(path: Path) -> None:
    good(path)
    kit.flip(path / "step_00000006", "manifest")


def newest_with_damaged_tensor(path: Path) -> None:
    good(path)
    kit.flip(path / "step_00000006")


def newest_cut(path: Path) -> None:
    good(path)
    file = next((path / "step_00000006").glob("model*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)


def newest_without_index(path: Path) -> None:
    good(path)
    next((path / "step_00000006").glob("index*")).unlink()


def two_newest_bad(path: Path) -> None:
    newest_with_damaged_tensor(path)
    kit.flip(path / "step_00000004", "manifest")


def none_good(path: Path) -> None:
    good(path)
    for step in (2, 4, 6):
        kit.flip(path / f"step_{step:08d}", "safetensors" if step != 4 else "manifest")


def none_with_manifest(path: Path) -> None:
    good(path)
    for step in (2, 4, 6):
        (path / f"step_{step:08d}" / "manifest.json").unlink()


def rng_missing(path: Path) -> dict[str, Any]:
    """A checkpoint whose run saved no generators: resumes by name."""
    state = kit.make_state()
    progress = {"step": 5, "epoch": 1, "samples_before": 3, "seed": 1, "positions": {}}

    class Counters:
        def state_dict(self) -> dict[str, Any]:
            return progress

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    hf.save(path / "other", {**state, "holdfast": {"progress": Counters()}}, step=5)
    return {"resume": path / "other"}


def explicit_missing(path: Path) -> dict[str, Any]:
    good(path)
    return {"resume": path / "step_00000005"}


def explicit_file(path: Path) -> dict[str, Any]:
    good(path)
    return {"resume": path / "run.json"}


def run_is_a_file(path: Path) -> None:
    path.write_text("a file")


def link_to_nowhere(path: Path) -> None:
    path.symlink_to("unmounted")


def run_without_checkpoints(path: Path) -> dict[str, Any]:
    with pytest.raises(ZeroDivisionError), hf.Checkpointer(path.parent / "base", kit.make_state(), every=None):
        raise ZeroDivisionError
    return {"resume": path.parent / "base"}


def folder_of_runs(path: Path) -> dict[str, Any]:
    for name in ("b", "a"):
        kit.train(path.parent / "all" / name, 2)
    return {"resume": path.parent / "all"}


def finished(path: Path) -> None:
    kit.train(path, 6)


def by_spelling(name: str) -> Prepare:
    def prepare(path: Path) -> dict[str, Any]:
        other = path.parent / name
        kit.train(other, 4)
        return {"path": other}

    return prepare


TABLE: list[tuple[Prepare, dict[str, Any], type[Exception] | int, str]] = [
    (nothing, {}, 0, "fresh start: no checkpoint under {path}"),
    (empty, {}, 0, "fresh start: no checkpoint under {path}"),
    (only_incomplete, {}, 0, "never committed, so not usable: step_00000002"),
    (nothing, {"resume": "must"}, hf.CheckpointNotFoundError, "resume='must', but there is no checkpoint under {path}"),
    (empty, {"resume": "must"}, hf.CheckpointNotFoundError, "no checkpoint under {path}"),
    (only_incomplete, {"resume": "must"}, hf.CheckpointNotFoundError, "no checkpoint under {path}"),
    (good, {}, 6, "resumed from {path}/step_00000006 at step 6, epoch 0 (attempt 2)"),
    (good, {"resume": "must"}, 6, "resumed from {path}/step_00000006 at step 6"),
    (good, {"resume": "never"}, 0, "fresh start (resume='never'): 3 checkpoint(s) under {path} are not used"),
    (good, {"resume": "never", "keep": hf.Keep(last=3)}, 0, "keep= REMOVES them as new ones are saved"),
    (newest_without_manifest, {}, 4, "set aside step_00000006, its files are left alone: "),
    (newest_with_damaged_manifest, {}, 4, "set aside step_00000006, its files are left alone: "),
    (newest_with_damaged_tensor, {}, 4, "set aside step_00000006, its files are left alone: "),
    (newest_cut, {}, 4, "set aside step_00000006, its files are left alone: "),
    (newest_without_index, {}, 4, "set aside step_00000006, its files are left alone: "),
    (two_newest_bad, {}, 2, "set aside step_00000004, its files are left alone: "),
    (none_good, {}, hf.CorruptCheckpointError, "3 checkpoint(s) and none of them is good; not starting from zero"),
    (none_good, {"resume": "must"}, hf.CorruptCheckpointError, "step_00000002: "),
    (none_with_manifest, {}, hf.CorruptCheckpointError, "not starting from zero"),
    (none_good, {"resume": "never"}, 0, "fresh start (resume='never')"),
    (rng_missing, {}, 5, "NOT restored  random generators: the checkpoint holds no generator states"),
    (explicit_missing, {}, hf.CheckpointNotFoundError, "{path}/step_00000005"),
    (explicit_file, {}, hf.ConfigError, "{path}/run.json' is a file"),
    (run_is_a_file, {}, hf.ConfigError, "{path} is a file; a run needs a directory"),
    (link_to_nowhere, {}, hf.ConfigError, "{path} is a link to unmounted, which is not there"),
    (run_without_checkpoints, {}, hf.CheckpointNotFoundError, "base is a run without a good checkpoint: `holdfast ls"),
    (folder_of_runs, {}, hf.IncompleteCheckpointError, "all is neither a checkpoint nor a run; it has a, b: give one"),
    (finished, {}, 6, "this run had finished (step 6): nothing to do unless more is asked for"),
    (by_spelling("with space"), {}, 4, "with space/step_00000004 at step 4"),
    (by_spelling("größe-日本"), {}, 4, "größe-日本/step_00000004 at step 4"),
    (by_spelling("lr=0.1,seed=3"), {}, 4, "lr=0.1,seed=3/step_00000004 at step 4"),
    (by_spelling("100%"), {}, 4, "100%/step_00000004 at step 4"),
]


@pytest.mark.parametrize(
    ("prepare", "options", "outcome", "line"), TABLE, ids=[f"{at}-{row[0].__name__}" for at, row in enumerate(TABLE)]
)
def test_a_situation_at_the_start_has_its_exact_outcome(
    prepare: Prepare,
    options: dict[str, Any],
    outcome: type[Exception] | int,
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each row of the table ends in its exception type or step, and says its line; no file of a bad one is touched."""
    root = tmp_path / "run"
    options = {**options, **(prepare(root) or {})}
    path = options.pop("path", root)
    before = _files(path)
    capsys.readouterr()
    state = kit.make_state(seed=5)
    mine = kit.weights(state)
    said = ""
    if isinstance(outcome, int):
        with hf.Checkpointer(path, state, every=None, **{"keep": None, **options}) as ck:
            assert ck.global_step == outcome
    else:
        with pytest.raises(hf.HoldfastError) as caught, hf.Checkpointer(path, state, keep=None, **options):
            pass
        assert type(caught.value) is outcome
        said = str(caught.value)
        if outcome is not hf.CorruptCheckpointError:
            assert all(torch.equal(one, two) for one, two in zip(mine, kit.weights(state), strict=True))
    said += capsys.readouterr().err
    assert line.format(path=root) in said
    after = _files(path)
    assert {name: after.get(name) for name in before} == before


def _files(path: Path) -> dict[str, bytes]:
    """Everything that belongs to checkpoints; what the run keeps about itself may change."""
    own = re.compile(r"run\.json|reports/|\.metrics\.json|lease|\.ledger/")
    found = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    return {name: data for name, data in found.items() if not own.search(name)}


def test_a_bad_checkpoint_stays_set_aside_and_is_said_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was quarantined once is not tried again, also after new checkpoints, and the block goes on saying so."""
    newest_with_damaged_tensor(tmp_path)
    kit.train(tmp_path, 8)
    assert kit.names(tmp_path)[0] == "step_00000008"
    capsys.readouterr()
    ck = kit.train(tmp_path, 8)
    assert ck.resumed_from is not None
    assert ck.resumed_from.step == 8
    assert "set aside step_00000006" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [newest_with_damaged_tensor, newest_without_manifest])
def test_a_name_taken_by_a_bad_checkpoint_does_not_stop_a_save(bad: Prepare, tmp_path: Path) -> None:
    """The step whose directory is quarantined or incomplete is saved under another name, and can be resumed from."""
    bad(tmp_path)
    before = _files(tmp_path)
    kit.train(tmp_path, 6)
    assert kit.names(tmp_path)[0] == "step_00000006-a2"
    assert kit.train(tmp_path, 6).global_step == 6
    assert {name: _files(tmp_path).get(name) for name in before} == before


def test_a_name_taken_by_files_of_somebody_does_not_stop_a_save(tmp_path: Path) -> None:
    """A directory of the user where a checkpoint would go keeps its files to itself."""
    (tmp_path / "step_00000002").mkdir()
    (tmp_path / "step_00000002" / "notes.txt").write_text("mine")
    kit.train(tmp_path, 2)
    assert [file.name for file in (tmp_path / "step_00000002").iterdir()] == ["notes.txt"]
    assert kit.names(tmp_path) == ["step_00000002-a1"]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EPERM])
def test_a_root_that_cannot_be_written_fails_before_the_first_step(code: int, tmp_path: Path) -> None:
    """No permission and a read-only file system are StoragePermissionError on entering, never "no checkpoint"."""
    for operation in ("open", "mkdir"):
        storage = FaultyStorage(tmp_path / operation, fail_on={"open": code, "mkdir": code})
        with pytest.raises(hf.StoragePermissionError, match=operation), hf.Checkpointer(storage, kit.make_state()):
            raise AssertionError("entered")


def _larger(state: dict[str, Any]) -> dict[str, Any]:
    state["model"][0] = torch.nn.Linear(3, 7)
    return state


def _half(state: dict[str, Any]) -> dict[str, Any]:
    state["model"].half()
    return state


MISMATCHES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], list[str]]] = {
    "extra key": (lambda s: {**s, "ema": torch.zeros(2)}, ["ema"]),
    "missing key": (lambda s: {"model": s["model"]}, ["optimizer"]),
    "shape": (_larger, ["model/0.weight", "(7, 3)", "(4, 3)", "model/0.bias"]),
    "dtype": (_half, ["model/0.weight", "float16", "float32", "model/2.bias"]),
    "optimizer": (
        lambda s: {**s, "optimizer": torch.optim.SGD(s["model"].parameters(), lr=1.0)}, ["SGD", "AdamW", "optimizer"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_state_that_does_not_fit_is_refused_untouched(name: str, tmp_path: Path) -> None:
    """StateMismatchError names every offender of both sides, and no tensor of the live state has changed."""
    good(tmp_path)
    change, words = MISMATCHES[name]
    state = change(kit.make_state(seed=9))
    before = kit.weights(state)
    generator = torch.get_rng_state()
    with pytest.raises(hf.StateMismatchError) as caught, hf.Checkpointer(tmp_path, state):
        pass
    for word in words:
        assert word in str(caught.value)
    assert all(torch.equal(one, two) for one, two in zip(before, kit.weights(state), strict=True))
    assert torch.equal(generator, torch.get_rng_state())
    assert kit.train(tmp_path, 6).global_step == 6  # nothing was quarantined for it


def test_more_steps_after_the_end_go_on_from_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finished run asked for more goes on from its last step and is finished again."""
    kit.train(tmp_path, 4)
    ck = kit.train(tmp_path, 6)
    assert ck.resumed_from is not None
    assert (ck.resumed_from.step, ck.global_step) == (4, 6)
    finished = json.loads((tmp_path / "run.json").read_text())["finished"]
    assert (finished["step"], finished["attempt"]) == (6, 2)


def test_a_clock_that_jumps_back_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newest is decided by attempt and step: checkpoints dated years back are resumed from all the same."""
    from datetime import datetime

    from holdfast.checkpointer import pending_saves

    kit.train(tmp_path, 4)

    class Past(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime(2001, 1, 1, tzinfo=tz)

    monkeypatch.setattr(pending_saves, "datetime", Past)
    monkeypatch.setattr("time.time", lambda: 978307200.0)
    kit.train(tmp_path, 6, keep=hf.Keep(last=1))
    monkeypatch.undo()
    assert kit.names(tmp_path)[0] == "step_00000006"
    assert hf.Checkpoint(tmp_path / "step_00000006").created.year == 2001
    assert kit.train(tmp_path, 6).resumed_from.step == 6


def test_a_moved_run_goes_on_at_its_new_place(tmp_path: Path) -> None:
    """Nothing in a run holds its absolute path."""
    kit.train(tmp_path / "old", 4)
    shutil.move(tmp_path / "old", tmp_path / "new")
    kit.train(tmp_path / "new", 6)
    assert kit.steps(tmp_path / "new") == [2, 4, 6]
    assert not (tmp_path / "old").exists()


def test_paths_are_absolute_from_construction_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chdir between construction, entering and saving moves neither the run nor the checkpoint to resume from."""
    monkeypatch.chdir(tmp_path)
    kit.train("base", 2)
    state = kit.make_state()
    ck = hf.Checkpointer("run", state, every=1, keep=None, resume="base/step_00000002")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with ck:
        assert ck.global_step == 2
        ck.step()
    assert kit.steps(tmp_path / "run") == [3]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_umask_of_the_user_decides_who_may_read(tmp_path: Path) -> None:
    """With umask 0002 everything is group-writable, directories included."""
    before = os.umask(0o002)
    try:
        kit.train(tmp_path / "run", 2)
    finally:
        os.umask(before)
    for file in [tmp_path / "run", *(tmp_path / "run").rglob("*")]:
        wanted = 0o775 if file.is_dir() else 0o664
        assert file.stat().st_mode & 0o777 == wanted, file


def test_a_hostile_checkpoint_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    """A manifest that points outside is CorruptCheckpointError; the file it points to is not read or changed."""
    good(tmp_path / "run")
    secret = tmp_path / "secret"
    secret.write_text("outside")
    for step in (2, 4, 6):
        manifest = tmp_path / "run" / f"step_{step:08d}" / "manifest.json"
        manifest.write_text(manifest.read_text().replace("state-", "../../secret"))
    with pytest.raises(hf.CorruptCheckpointError), hf.Checkpointer(tmp_path / "run", kit.make_state()):
        pass
    assert secret.read_text() == "outside"


@pytest.mark.usefixtures("forked")
def test_a_second_trainer_is_told_who_is_there_and_a_dead_one_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While one lives: RunBusyError with its pid and host. After its SIGKILL the same call takes over at once."""
    import platform

    first = kit.start(
        """
        import sys, run_kit as kit, holdfast as hf
        state = kit.make_state()
        with hf.Checkpointer(sys.argv[1], state, every=1, keep=None) as ck:
            for _ in range(3):
                ck.step(loss=kit.train_one(state))
            ck.wait()
            print("ready", flush=True)
            sys.stdin.read()
            import time
            time.sleep(60)
        """,
        tmp_path,
    )
    try:
        kit.wait_for(first, "ready")
        with pytest.raises(hf.RunBusyError) as caught, hf.Checkpointer(tmp_path, kit.make_state()):
            pass
        assert f"trainer {first.pid}" in str(caught.value)
        assert platform.node() in str(caught.value)
    finally:
        first.kill()
        first.communicate()
    ck = kit.train(tmp_path, 4)
    assert ck.resumed_from is not None
    assert ck.resumed_from.step == 3


def test_a_place_that_cannot_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name too long, and a relative path where the current directory is gone, say what to give."""
    with pytest.raises(hf.ConfigError, match="File name too long: give another path"):
        hf.Checkpointer(tmp_path / ("a" * 300), {"n": 0}).start()
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(hf.ConfigError, match="current directory is not there any more: give an absolute path"):
        hf.Checkpointer("run", {"n": 0})
