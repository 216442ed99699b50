"""What people type and read: no figure is cut, nothing clear has to be typed, and rows come as they are made."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_kit import as_anybody, invoke

import holdfast as hf


def holdfast(*arguments: object) -> str:
    return invoke(*arguments).output


def train(root: Path, until: int) -> None:
    with hf.Checkpointer(root, {"w": torch.zeros(4)}, every=5, keep=hf.Keep(last=2)) as ck:
        while ck.global_step < until:
            ck.report(val_loss=1 / (ck.global_step + 1))
            ck.step()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("people") / "runs"
    for name in ("one", "another-run-with-a-rather-long-name-of-43-chars"):
        train(root / name, 12)
    return root


def in_terminal(*arguments: object, width: int, cwd: Path) -> str:
    """What a terminal of this width shows."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "holdfast", *map(str, arguments)]
    env = {**os.environ, "COLUMNS": str(width), "TERM": "xterm", "NO_COLOR": "1"}
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, cwd=cwd, env=env) as process:
        os.close(theirs)
        found = b""
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            found += part
        assert process.wait(60) == 0
    os.close(ours)
    return re.sub(r"\x1b\[[0-9;]*m", "", found.decode()).replace("\r\n", "\n")


@pytest.mark.parametrize("command", ["ls", "stats"])
def test_80_columns(runs: Path, command: str) -> None:
    """Where there is no room columns are left out and named; nothing is cut. A pipe has them all."""
    narrow = in_terminal(command, runs, width=80, cwd=runs)
    assert "…" not in narrow
    assert max(map(len, narrow.splitlines()[2:])) <= 80
    assert "another-run-with-a-rather-long-name-of-43-chars" in narrow
    assert "no room for: " in narrow
    whole = holdfast(command, runs)
    assert "no room for" not in whole
    assert "2 runs" in whole


def test_40_columns(runs: Path) -> None:
    """Of a run, too, columns are left out and named until a line fits."""
    narrow = in_terminal("ls", runs / "one", width=40, cwd=runs).splitlines()
    table = narrow[narrow.index("") + 1 :]
    assert max(map(len, table)) <= 40
    assert table[0].split()[:2] == ["checkpoint", "step"]
    assert " ".join(table).endswith(" (--json has all)")


def test_the_current_folder(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, `holdfast` lists what is here, as `holdfast ls` does; stats, log and page look here too."""
    monkeypatch.chdir(runs / "one")
    alone = holdfast()
    assert "step_00000012" in alone
    assert "--help" in alone
    assert "step_00000012" in holdfast("ls")
    assert "starts" in holdfast("stats") or "1 start," in holdfast("stats")
    assert "val_loss" in holdfast("log")


def test_one_is_not_many(runs: Path, tmp_path: Path) -> None:
    """1 run, 1 checkpoint, 1 start."""
    train(tmp_path / "only" / "run", 1)
    assert "1 run" in holdfast("ls", tmp_path / "only")
    assert "1 runs" not in holdfast("ls", tmp_path / "only")
    said = holdfast("stats", tmp_path / "only" / "run")
    assert "1 save;" in said
    assert "1 checkpoint is there" in said
    assert "1 start," in said


def test_a_run_behind_a_link(runs: Path, tmp_path: Path) -> None:
    """A folder of links to runs on other disks is a folder of runs; inside of a run no link is followed."""
    (tmp_path / "scratch").symlink_to(runs / "one", target_is_directory=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for command in ("ls", "stats"):
        assert "scratch" in holdfast(command, tmp_path)
    assert '"scratch"' in holdfast("page", tmp_path, "--json")
    (runs / "one" / "link").symlink_to(runs / "one" / "step_00000012", target_is_directory=True)
    assert "link" not in holdfast("ls", runs / "one")


def test_following_the_log(tmp_path: Path) -> None:
    """`log -f` prints rows while the run is trained, each once, and ends with it."""
    command = [sys.executable, "-m", "holdfast", "log", str(tmp_path / "run"), "-f", "--poll", "0.05s"]
    ck = hf.Checkpointer(tmp_path / "run", {"w": torch.zeros(2)}).start()
    ck.report(loss=0.5)
    ck.step()
    ck.save()
    ck.wait()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "loss 0.5" in process.stdout.readline()
        ck.report(loss=0.25)
        ck.step()
        ck.save()
        ck.wait()
        lines = [process.stdout.readline()]
        ck.close()
        lines += process.stdout.readlines()
        assert process.wait(60) == 0
    text = "".join(lines)
    assert "loss 0.25" in text
    assert "loss 0.5" not in text


def test_the_text_of_node_exporter(runs: Path, tmp_path: Path) -> None:
    """A file *.prom is what its textfile collector reads: counters are declared by the name of their samples."""
    holdfast("stats", runs / "one", "--openmetrics", tmp_path / "run.prom")
    classic = (tmp_path / "run.prom").read_text()
    declared = set(re.findall(r"^# TYPE (\S+)", classic, re.MULTILINE))
    sampled = {re.sub(r"_(count|sum)$", "", name) for name in re.findall(r"^(\w+)\{", classic, re.MULTILINE)}
    assert sampled == declared
    assert "# EOF" not in classic
    assert "# UNIT" not in classic
    holdfast("stats", runs / "one", "--openmetrics", tmp_path / "run.txt")
    assert (tmp_path / "run.txt").read_text().endswith("# EOF\n")


@pytest.mark.parametrize(
    ("words", "wanted"), [("holdfast ls ", "dir"), ("holdfast log ONE --metric v", "val_loss"), ("holdfast s", "show")]
)
def test_completion(runs: Path, words: str, wanted: str) -> None:
    """The shell completes commands, paths and the metrics of the run."""
    line = words.replace("ONE", str(runs / "one"))
    env = {**os.environ, "_HOLDFAST_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    code = "from holdfast.cli.main import cli; cli(prog_name='holdfast')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert wanted in done.stdout or (wanted == "dir" and "file" in done.stdout), done


def test_no_line_of_text_is_broken_and_metrics_that_are_not_shown_are_named(tmp_path: Path) -> None:
    """A long path is copied whole out of a pipe; of many metrics `ls` names those that it has no room for."""
    root = tmp_path.joinpath(*["a-rather-long-name-of-a-folder"] * 6, "run")
    with hf.Checkpointer(root, {"w": torch.zeros(4)}, every=1) as ck:
        ck.step(**dict.fromkeys("abcde", 1.0))
    said = holdfast("ls", root)
    assert f"{root}\n" in said
    assert "\nno room for: d, e (--json has all)\n" in said
    assert said.splitlines()[1].endswith(" · finished")
    with hf.Checkpointer(root, {"w": torch.zeros(4)}, every=1) as ck:
        ck.step()
        assert f" · training, process {os.getpid()} on " in holdfast("ls", root)
    (root / "step_00000001/manifest.json").write_text("{")
    found = invoke("verify", root, code=1).stdout
    assert f"  {root}/step_00000001/manifest.json: it does not end as a manifest does" in found


@pytest.mark.skipif(sys.platform != "linux", reason="the modes of files hold for root, too, without a capability")
def test_what_may_not_be_read_hides_nothing_else(runs: Path, tmp_path: Path) -> None:
    """A folder of runs lists the others and names it; a path below it is denied in words."""
    shutil.copytree(runs / "one", tmp_path / "mine")
    shutil.copytree(runs / "one", tmp_path / "private" / "run")
    hf.save(tmp_path / "loose", {"w": torch.zeros(4)})
    (tmp_path / "private").chmod(0)
    try:
        with as_anybody():
            said = invoke("ls", tmp_path).stdout
            assert re.search(r"^mine .*finished\n.*^private +unreadable\n", said, re.MULTILINE | re.DOTALL)
            assert "private: cannot read " in said
            assert "private cannot be read" in invoke("stats", tmp_path).stderr
            checked = json.loads(invoke("verify", tmp_path, "--json", code=1).stdout)["checkpoints"]
            states = {row["name"]: row["state"] for row in checked}
            assert {states.pop("private"), *states.values()} == {"unreadable", "ok"}
            assert {name.split("/")[0] for name in states} == {"mine", "loose"}
            invoke("page", tmp_path, "-o", tmp_path / "run.html")
            for command in ("ls", "show", "latest", "verify"):
                assert "Permission denied; give this user" in invoke(command, tmp_path / "private/run", code=1).stderr
    finally:
        (tmp_path / "private").chmod(0o700)
