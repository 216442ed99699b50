"""`holdfast watch` beside real trainers that are killed, restarted and delete what they no longer keep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from catalog_kit import begin, catalog_of, save
from test_cli import _arguments, as_json, invoke  # noqa: F401

import holdfast as hf
from holdfast.storage import LocalStorage

SRC = Path(hf.__file__).parents[1]
# Trains step by step, each allowed by a file, so that the test decides who is where.
TRAINER = """
import os, sys, time
import holdfast as hf
folder, last = sys.argv[1], int(sys.argv[2])
state = {"seen": []}
keep = hf.Keep(last=1, best=1, metric="val", mode="max")
with hf.Checkpointer(folder, state, every=1, keep=keep) as ck:
    while ck.global_step < last:
        if ck.global_step == int(os.environ.get("DIE_AT", -1)):
            ck.wait()
            os.kill(os.getpid(), 9)
        state["seen"].append(ck.global_step)
        ck.step()
        ck.wait()
        until = time.monotonic() + 120
        while not os.path.exists(f"{folder}.go/{ck.global_step}") and time.monotonic() < until:
            time.sleep(0.01)
"""


def trainer(run: Path, last: int, **env: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen([sys.executable, "-c", TRAINER, str(run), str(last)], env=environment)


@pytest.mark.slow
def test_an_evaluator_in_another_process_decides_what_is_best(tmp_path) -> None:
    """It follows a run through a SIGKILL and a restart; the trainer keeps what it found best, and deletes the rest."""
    run, go = tmp_path / "run", tmp_path / "run.go"
    go.mkdir()
    # step 2 is the best; each evaluation lets the trainer go on, so that retention meets holds and reports.
    metrics = '{\\"val\\": $((10 - ({step} - 2) * ({step} - 2)))}'
    evaluate = f'test -e {{path}}/manifest.json && touch {go}/{{step}} && echo "{metrics}"'
    command = ["watch", run, "--start", "first", "--exec", evaluate, "--report", "--json", "--timeout", "120s"]
    watcher = subprocess.Popen(
        [sys.executable, "-m", "holdfast", *map(str, command), "--poll", "0.05s"],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer(run, 6, DIE_AT="3").wait(200) == -signal.SIGKILL
    assert trainer(run, 6).wait(200) == 0
    output, _ = watcher.communicate(timeout=200)
    rows = [json.loads(line) for line in output.splitlines()]
    assert watcher.returncode == 0, rows
    assert sorted({row["step"] for row in rows}) == [1, 2, 3, 4, 5, 6]
    assert all(row["status"] == 0 and row["reported"] for row in rows)
    # What the evaluator still held when the last step was saved is deleted by the next who applies the rules.
    assert invoke("prune", run, "--yes", "--now").exit_code == 0
    assert {record.step for record in catalog_of(run).records()} == {2, 3, 6}  # 3: resumed from
    assert invoke("best", run, "--metric", "val", "--mode", "max").stdout.endswith("step_00000002\n")
    assert not (run / ".external").exists()


@pytest.fixture
def run(tmp_path) -> Path:
    """A finished run of three checkpoints, one with a name for shells to stumble over."""
    catalog = begin(LocalStorage(tmp_path / "run"))
    save(catalog, 1)
    save(catalog, 2, name="it's $(touch gone); 2")
    save(catalog, 3)
    catalog.index.finish({})
    catalog.index.end_attempt("finished")
    return tmp_path / "run"


def test_without_a_command_it_prints_paths(run) -> None:
    """One line each, for `while read`; JSON lines on demand."""
    assert invoke("watch", run, "--start", "2").stdout == f"{run}/step_0003\n"
    rows = [json.loads(line) for line in invoke("watch", run, "--start", "first", "--json").stdout.splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]


def test_a_name_reaches_the_shell_as_one_word(run, tmp_path, monkeypatch, capfd) -> None:
    """Whatever a checkpoint is called, the shell runs the user's command and nothing else."""
    monkeypatch.chdir(tmp_path)
    invoke("watch", run, "--start", "first", "--exec", "printf '%s|' {name} {step} ${HOME:+x}")
    assert capfd.readouterr().out == "step_0001|1|x|it's $(touch gone); 2|2|x|step_0003|3|x|"
    assert not (tmp_path / "gone").exists()


def test_a_name_with_braces_of_its_own_stays_one_word(tmp_path, monkeypatch, capfd) -> None:
    """A value that holds `{name}` is not filled in again: inside its quotes that would let the shell run the name."""
    monkeypatch.chdir(tmp_path)
    catalog = begin(LocalStorage(tmp_path / "run"))
    save(catalog, 1, name="a {name}; touch gone #")
    catalog.index.finish({})
    catalog.index.end_attempt("finished")
    invoke("watch", tmp_path / "run", "--start", "first", "--exec", "printf '%s|' {path} {path} {unknown}")
    path = f"{tmp_path}/run/a {{name}}; touch gone #"
    assert capfd.readouterr().out == f"{path}|{path}|{{unknown}}|"
    assert not (tmp_path / "gone").exists()


def test_commands_that_fail_are_said_and_the_next_one_runs(run) -> None:
    """Status 1 at the end; a command that prints no metrics is a failure of --report."""
    said = invoke("watch", run, "--start", "first", "--exec", "test {step} != 2", code=1).stderr
    assert said.count("ended with status 1") == 1
    said = invoke("watch", run, "--exec", "echo fine", "--report", code=1).stderr
    assert "no JSON object" in said
    assert "give --exec" in invoke("watch", run, "--report", code=2).stderr
    assert "--hold soon" in invoke("watch", run, "--exec", "true", "--hold", "soon", code=2).stderr
    assert "no new checkpoint" in invoke("watch", run.parent / "none", "--timeout", "0.01s", code=1).stderr


def test_latest_waits_for_the_first_checkpoint(tmp_path) -> None:
    """`latest --wait` prints the first checkpoint of a run that has not begun yet, and gives up where it is told to."""
    run = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-m", "holdfast", "latest", str(run), "--wait", "--timeout", "120s"],
        env={**os.environ, "PYTHONPATH": str(SRC)}, stdout=subprocess.PIPE, text=True,
    ) as waiting:  # fmt: skip
        trained = trainer(run, 1)
        said, _ = waiting.communicate(timeout=120)
        (tmp_path / "run.go").mkdir()
        (tmp_path / "run.go/1").touch()
        assert trained.wait(120) == 0
    assert (waiting.returncode, said) == (0, f"{run}/step_00000001\n")
    result = invoke("latest", tmp_path / "none", "--wait", "--timeout", "0.1s", code=1)
    assert "no new checkpoint" in result.output
    assert "give --wait" in invoke("latest", run, "--timeout", "1s", code=2).output


def again(run: Path, reason: str | None) -> None:
    """A later attempt of a finished run that was asked for more, and ended before it saved."""
    catalog = begin(LocalStorage(run), "00000002")
    if reason is not None:
        catalog.index.end_attempt(reason)


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("RuntimeError: planted", "RuntimeError: planted"),
        (None, "died"),
        ("finished", "finished"),
        ("closed", "finished"),
    ],
)
def test_a_later_attempt_that_died_leaves_no_finished_run(run, reason, state) -> None:
    """`ls` and `stats` say how that ended, `watch` waits for the next life; with nothing to do it stays finished."""
    again(run, reason)
    assert as_json("ls", run.parent)["runs"][0]["state"] == state
    assert ("finished" in invoke("ls", run).stdout.splitlines()[1]) is (state == "finished")
    assert as_json("stats", run)["state"] == (
        "finished" if state == "finished" else "died" if reason is None else "stopped"
    )
    watching = invoke("watch", run, "--start", "next", "--timeout", "0.01s", "--poll", "0.01s", code=None)
    assert watching.exit_code == (0 if state == "finished" else 1)
    assert ("has not finished" in watching.stderr) is (state != "finished")
