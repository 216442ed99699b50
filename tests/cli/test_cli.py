"""The command line: exit status, JSON, what people read, and that it starts without torch."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from catalog_kit import catalog_of, hold
from checkpoint_kit import Shape, build, small
from command_kit import invoke

import holdfast
from holdfast.cli.main import _GROUPS, cli
from holdfast.config import Keep
from holdfast.errors import StoragePermissionError
from holdfast.storage import LocalStorage, MemoryStorage


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with two good checkpoints, one quarantined, one never committed, and a directory of the user."""
    storage = LocalStorage(tmp_path / "run")
    catalog = catalog_of(storage)
    catalog.index.register_attempt("aaaaaaaa", host="h", pid=1)
    parent = None
    for step, loss in ((10, 0.5), (20, math.nan), (30, 0.7)):
        name = f"step_{step}"
        fields = {"run_id": catalog.index.run_id, "attempt": 1, "step": step, "epoch": 1, "parent": parent}
        manifest = build(storage, name, metrics={"val": loss}, reused=step > 10, **fields)
        parent = manifest.checkpoint_id
        catalog.add(name, manifest)
        catalog.prune(Keep(last=5, best=1, metric="val"))
    catalog.pin("step_20")
    catalog.index.quarantine("step_30", "bytes differ")
    build(storage, "step_40", finish=False)
    storage.put("notes/a.txt", b"x")
    return tmp_path / "run"


def as_json(*arguments: object, code: int = 0) -> dict:
    """Run with --json; stdout must be one strict JSON document."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    sys.argv = ["holdfast", "--json"]
    return json.loads(invoke(*arguments, "--json", code=code).stdout, parse_constant=refuse)


@pytest.fixture(autouse=True)
def _arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["holdfast"])


def flip(run: Path, name: str, item: str = "model") -> None:
    (path,) = (run / name).glob(f"{item}-*")
    body = bytearray(path.read_bytes())
    body[4100] ^= 1
    path.write_bytes(body)


def test_ls_names_each_checkpoint_with_its_state_and_marks(run) -> None:
    """Good, quarantined, uncommitted and foreign ones are all there, newest first, with the reason."""
    found = {row["name"]: row for row in as_json("ls", run)["checkpoints"]}
    assert list(found) == ["step_20", "step_10", "step_30", "step_40", "notes"]
    assert [row["state"] for row in found.values()] == ["ok", "ok", "quarantined", "incomplete", "foreign"]
    assert (found["step_20"]["marks"], found["step_10"]["marks"]) == (["newest", "pinned"], ["best"])
    assert found["step_20"]["metrics"] == {"val": "NaN"}
    assert found["step_30"]["reason"] == "bytes differ"
    assert found["step_20"]["new_bytes"] < found["step_20"]["size_bytes"]
    assert found["step_20"]["uri"] == str(run / "step_20")


def test_ls_is_readable_in_a_hundred_columns(run, monkeypatch) -> None:
    """In a narrow terminal metric columns give way, never the names."""
    storage = LocalStorage(run)
    catalog = catalog_of(storage)
    metrics = {f"a_rather_long_metric_name_{number}": 0.123456 for number in range(9)}
    fields = {"run_id": catalog.index.run_id, "attempt": 2, "step": 12345678, "epoch": 3}
    catalog.add("step_0012345678", small(storage, "step_0012345678", metrics=metrics, **fields))
    catalog.index.save()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("holdfast.cli.terminal._PIPE_WIDTH", 100)
    lines = invoke("ls", run).stdout.splitlines()
    assert max(map(len, lines)) <= 100
    row = next(line for line in lines if line.startswith("step_0012345678"))
    assert "12345678" in row.split()[1]
    assert "newest" in row
    assert any("val" in line.split() for line in lines)


def test_ls_of_a_folder_of_runs_has_one_line_for_each(run) -> None:
    """What is worth knowing of each run, and nothing of folders that have nothing to do with us."""
    for name in (".cache/a", "plots/a"):
        (run.parent / name).parent.mkdir()
        (run.parent / name).write_bytes(b"x")
    other = catalog_of(run.parent / "other")
    other.index.register_attempt("bbbbbbbb", host="h", pid=1)
    other.index.finish({})
    lease = hold(run)
    rows = {row["name"]: row for row in as_json("ls", run.parent)["runs"]}
    assert list(rows) == ["run", "other"]
    row = rows["run"]
    assert (row["state"], row["step"], row["checkpoints"], row["bad"]) == ("training", 20, 2, 1)
    assert row["best"] == {"name": "step_10", "step": 10, "value": 0.5}
    assert rows["other"]["state"] == "finished"
    lines = invoke("ls", run.parent).stdout.splitlines()
    assert f"process {os.getpid()} on" in next(line for line in lines if "training" in line)
    assert not any("plots" in line for line in lines)
    lease.release()
    assert as_json("ls", run.parent)["runs"][0]["state"] == "died"


def test_a_metric_that_nobody_has_is_said_and_no_column_comes_twice(run) -> None:
    """A misspelt --metric is no empty column, and a metric called step is no second column of that name."""
    catalog = catalog_of(run)
    catalog.set_metrics("step_10", {"step": 10, "epoch": 1})
    for path in (run, run.parent):
        said = invoke("ls", path, "--metric", "vla")
        assert "has a number for 'vla'; there is: epoch, step, val" in said.stderr
    head = next(line for line in invoke("ls", run).stdout.splitlines() if line.startswith("checkpoint"))
    assert len(head.split()) == len(set(head.split()))
    assert "has a number" not in invoke("ls", run, "--metric", "val").stderr


def test_ls_shows_checkpoints_saved_on_their_own(tmp_path) -> None:
    """A directory of plain saves lists them, though they are of no run."""
    small(LocalStorage(tmp_path), "mine", step=3)
    (row,) = as_json("ls", tmp_path)["checkpoints"]
    assert (row["name"], row["state"], row["step"]) == ("mine", "ok", 3)
    assert "mine" in invoke("ls", tmp_path).stdout


def test_show_tells_what_is_inside(run) -> None:
    """Items with totals, ties, plain data, files and parent come from the small files."""
    found = as_json("show", run / "step_20", "--tensors")
    assert found["parent"]["name"] == "step_10"
    assert found["keys"] == ["model", "optimizer", "note", "holdfast"]
    model = next(item for item in found["items"] if item["name"] == "model")
    assert (model["tensors"], model["numel"], model["dtypes"]) == (3, 40_032, ["float32"])
    tied = {row["name"]: row["tied_to"] for row in found["tensors"] if row["tied_to"]}
    assert tied == {"model/embedding.weight": "model/head.weight"}
    assert found["data"]["optimizer/lr"] == "0.001"
    assert found["data"]["optimizer/betas/1"] == "0.95"
    assert (found["metrics"], found["pinned"]) == ({"val": "NaN"}, True)
    text = invoke("show", run / "step_20", "--tensors").stdout
    for part in ("step_10", "val nan", "40.0 k", "200×200", "= model/head.weight", "shared with", "torch 2.13.0"):
        assert part in text


def test_show_of_foreign_incomplete_and_damaged(run) -> None:
    """Foreign is fine (0), uncommitted and damaged are a problem (1), a folder of runs is a wrong argument (2)."""
    assert as_json("show", run / "notes")["state"] == "foreign"
    assert as_json("show", run / "step_40", code=1)["state"] == "incomplete"
    (run / "step_10" / "manifest.json").write_bytes(b"rot")
    assert as_json("show", run / "step_10", code=1)["state"] == "corrupt"
    assert "holdfast ls" in invoke("show", run.parent, code=2).stderr
    invoke("show", run / "notes")


def test_verify_reads_every_byte_of_one_checkpoint(run) -> None:
    """A flipped bit is found and the tensor named, with status 1; --no-deep compares sizes only."""
    assert as_json("verify", run / "step_10")["checkpoints"][0]["bytes_read"] > 160_000
    flip(run, "step_10")
    found = as_json("verify", run / "step_10", code=1)
    assert (found["ok"], found["deep"], found["checkpoints"][0]["state"]) == (False, True, "corrupt")
    assert "model/head.weight" in found["checkpoints"][0]["problems"][0]
    invoke("verify", run / "step_10", "--no-deep")
    assert "model/head.weight" in invoke("verify", run / "step_10", code=1).stdout


def test_verify_looks_into_sub_folders(run, tmp_path) -> None:
    """Runs in a folder, and checkpoints whose file names lead into sub-folders, are checked; nothing is said to be."""
    above = tmp_path / "all"
    (above / "team").mkdir(parents=True)
    run.rename(above / "team" / "run")
    run = above / "team" / "run"
    small(LocalStorage(above / "mine"), "ep1", run_id="", step=1)
    found = {row["name"]: row["state"] for row in as_json("verify", above)["checkpoints"]}
    assert found["mine/ep1"] == found["team/run/step_10"] == "ok"
    assert found["team/run/step_40"] == "incomplete"
    assert not [name for name, state in found.items() if state == "foreign"]
    flip(run, "step_10")
    assert "1 problem" in invoke("verify", above, "--deep", code=1).stdout
    (tmp_path / "empty").mkdir()
    assert invoke("verify", tmp_path / "empty", code=1).stdout == "no checkpoints\n"


def test_what_a_sub_folder_has_lost_is_a_problem(run, tmp_path) -> None:
    """A checkpoint that its run knows, and of which only files of the user are left, is no folder of somebody else."""
    lost = run / "step_10"
    shutil.rmtree(lost)
    lost.mkdir()
    (lost / "weights.bin").write_bytes(b"x")
    (tmp_path / "logs").mkdir()
    for path, name in ((run, "step_10"), (tmp_path, "run/step_10")):
        found = as_json("verify", path, code=1)["checkpoints"]
        assert [row["name"] for row in found if not row["ok"]] == [name]
    run.rename(tmp_path / "logs" / "run")  # the name of a run's own folder: here there is no run
    assert "logs/run/step_10" in invoke("verify", tmp_path, code=1).stdout


def test_a_checkpoint_of_which_only_the_folder_is_left_is_a_problem(run) -> None:
    """The index of its run still has it: `verify` names it, and `rm` deletes it, as is said there."""
    for path in (run / "step_10").iterdir():
        path.unlink()
    (run / "empty").mkdir()
    found = as_json("verify", run, code=1)["checkpoints"]
    assert [row["name"] for row in found if not row["ok"]] == ["step_10"]
    assert "`holdfast rm`" in found[[row["name"] for row in found].index("step_10")]["problems"][0]
    invoke("rm", run / "empty", code=2)
    invoke("rm", run / "step_10", "--yes")
    assert not (run / "step_10").exists()
    assert "step_10" not in [row["name"] for row in as_json("verify", run, code=None)["checkpoints"]]


def test_a_sub_folder_that_may_not_be_read_is_a_problem(monkeypatch) -> None:
    """It is named, for it may hold checkpoints; what lies beside it is checked."""
    storage = MemoryStorage("verify-denied")
    small(storage, "team/run/ep1", run_id="", step=1)
    storage.put("team/private/file", b"")
    list_of = MemoryStorage.list

    def refuse(self, prefix="", **how):
        if prefix.rstrip("/") == "team/private":
            raise StoragePermissionError("cannot list team/private")
        return list_of(self, prefix, **how)

    monkeypatch.setattr(MemoryStorage, "list", refuse)
    found = as_json("verify", storage.uri, code=1)["checkpoints"]
    assert {row["name"]: row["state"] for row in found} == {"team/private": "unreadable", "team/run/ep1": "ok"}


def test_folders_of_others_cost_verify_one_listing_each(monkeypatch) -> None:
    """A folder of runs may hold data sets too, with thousands of folders, at a request each."""
    storage = MemoryStorage("verify-counts")
    for number in range(27):
        storage.put(f"data/{number // 9}/{number // 3}/{number}/image", b"")
    small(storage, "team/run/ep1", run_id="", step=1)
    asked: list[str] = []
    list_of, open_of = MemoryStorage.list, MemoryStorage.open
    monkeypatch.setattr(MemoryStorage, "list", lambda self, *args, **kw: asked.append("") or list_of(self, *args, **kw))
    monkeypatch.setattr(MemoryStorage, "open", lambda self, path: asked.append(path) or open_of(self, path))
    assert [row["name"] for row in as_json("verify", storage.uri)["checkpoints"]] == ["data", "team/run/ep1"]
    assert len(asked) <= 40 + 25, asked


def test_verify_of_a_run_checks_all_of_them(run) -> None:
    """Sizes by default, digests on demand; what never was a checkpoint is named and is no problem."""
    found = as_json("verify", run)
    assert {row["name"]: row["state"] for row in found["checkpoints"]} == {
        "step_10": "ok", "step_20": "ok", "step_30": "ok", "step_40": "incomplete", "notes": "foreign",
    }  # fmt: skip
    flip(run, "step_10", "optimizer")
    assert as_json("verify", run)["ok"]
    assert [row["name"] for row in as_json("verify", run, "--deep", code=1)["checkpoints"] if not row["ok"]] == [
        "step_10"
    ]
    (path,) = (run / "step_20").glob("model-*")
    os.truncate(path, 100)
    text = invoke("verify", run, code=1).stdout
    assert "100 bytes" in text
    assert "1 problem" in text


def test_a_quarantined_checkpoint_is_never_ok_without_a_word(run) -> None:
    """Its bytes may be whole; why it must not be used is said wherever it is looked at."""
    shown = as_json("show", run / "step_30", code=1)
    assert (shown["state"], shown["step"]) == ("quarantined", 30)
    out = invoke("show", run / "step_30", code=1).stdout
    assert "bytes differ (it is never resumed from" in out
    assert "world size" in out
    assert "quarantined: bytes differ" in invoke("verify", run / "step_30").stdout


def test_the_help_has_each_command_once_in_a_sentence() -> None:
    """Grouped; the first sentence of each command is not cut."""
    assert sorted(name for names in _GROUPS.values() for name in names) == sorted(cli.commands)
    out = invoke("--help").stdout
    assert "..." not in out.replace("[ARGS]...", "")
    assert all(f"\n{title}:\n" in out for title in _GROUPS)
    assert all(f"\n  {name} " in out for name in cli.commands)


def test_colours_are_off_with_no_color_and_where_nobody_looks(run, monkeypatch) -> None:
    """No escape sequence reaches a pipe, nor a terminal whose user asked for none."""
    for forced in ({}, {"NO_COLOR": "1", "FORCE_COLOR": "1", "TERM": "xterm"}):
        for name, value in forced.items():
            monkeypatch.setenv(name, value)
        for command in (("ls", run), ("show", run), ("verify", run), ("ls", run.parent)):
            assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", invoke(*command).stdout), command


def test_the_shell_completes_commands_and_options() -> None:
    """As docs/cli.md says to switch it on."""
    environment = {**os.environ, "_HOLDFAST_COMPLETE": "bash_source"}
    done = subprocess.run(
        [sys.executable, "-m", "holdfast"], env=environment, capture_output=True, text=True, check=False
    )
    assert "complete -o nosort -F" in done.stdout


def test_errors_are_one_line(tmp_path) -> None:
    """A wrong path, a wrong scheme and a missing argument: status 2, one clear line, JSON where asked for."""
    result = invoke("ls", tmp_path / "none", code=2)
    assert result.stderr.splitlines() == [f"holdfast: there is nothing at {tmp_path / 'none'}: check the path"]
    assert as_json("verify", tmp_path / "none", code=2)["error"] == "CheckpointNotFoundError"
    assert len(invoke("ls", "zz://a/b", code=2).stderr.splitlines()) == 1
    invoke("show", code=2)
    assert "no checkpoints" in invoke("ls", tmp_path).stdout


def test_a_hostile_name_does_not_control_the_terminal(tmp_path) -> None:
    """Markup and escape codes in names and metrics are printed as what they are, or not at all."""
    storage = LocalStorage(tmp_path)
    small(storage, "[red]x", step=1, metrics={"\x1b[2J": 1.0})
    text = invoke("ls", tmp_path).stdout
    assert "[red]x" in text
    assert "\x1b" not in text + invoke("show", tmp_path / "[red]x").stdout + invoke("verify", tmp_path).stdout


def command(*arguments: object) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(Path(holdfast.__file__).parents[1])}
    code = (
        "import sys; from holdfast.cli.main import main; sys.argv[0] = 'holdfast'\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, env=environment, check=False
    )


def test_nothing_imports_torch(run) -> None:
    """No command loads torch or numpy; with --json not even rich."""
    more = (["ls", run.parent], ["prune", run, "--keep", "last=1"])
    for arguments in (["ls", run], ["show", run / "step_10", "--tensors"], ["verify", run], *more):
        assert command(*arguments).stderr.splitlines()[-1] == "['rich']"
        found = command(*arguments, "--json")
        assert found.stderr.splitlines()[-1] == "[]"
        json.loads(found.stdout)
    missing = command("ls", run / "none", "--json")
    assert missing.returncode == 2
    assert json.loads(missing.stdout)["error"] == "CheckpointNotFoundError"


def test_a_large_checkpoint_is_looked_at_without_reading_it(tmp_path) -> None:
    """Listing and showing 5 GB read the small files alone: their time does not depend on the size."""
    storage = LocalStorage(tmp_path)
    big = tuple(Shape(f"model/layers.{number}.weight", (1024, 12_800)) for number in range(100))
    assert build(storage, "big", tensors=big, sparse=True, step=1).total_bytes > 5e9

    opened = []
    real = LocalStorage.open

    def watch(self, path):
        opened.append(path)
        return real(self, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStorage, "open", watch)
        times = []
        for _ in range(3):  # the best: threads that other tests have left may work at times
            opened.clear()
            begun = time.process_time()
            assert as_json("show", tmp_path / "big", "--tensors")["size_bytes"] > 5e9
            as_json("ls", tmp_path)
            as_json("verify", tmp_path)
            times.append(time.process_time() - begun)
            if times[-1] < 1:
                break
        assert min(times) < 1
    read = [path for path in opened if path.endswith(".safetensors")]
    assert len(read) <= 1  # verify opens it for its size
