"""`holdfast attack`: kills land where they are planned, and what follows is counted rightly."""

from __future__ import annotations

import errno
import json
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest

from holdfast.verify.attack import _FIXES, Kill, Trial, ends_of_saves, judge, save_changes, survival_page
from holdfast.verify.lives import Command, run_life
from holdfast.verify.trace import LifePlan, Record
from holdfast.verify.workplace import Aim, Change, ChangeWatch, cut_power, make_durable, sees_power_cuts, unwritten

# ---- the judgement

REFERENCE = Record(rank=0, steps=[{} for _ in range(40)])


def one(what: str, begun: int, size: int = 0, *numbers: int) -> Change:
    """A change after so many steps had been begun."""
    name, finished = what.partition(" ")[2], what.startswith(("closed", "renamed"))
    return Change(
        what=what, name=name, numbers=tuple(map(str, numbers)), begun=begun, size=size, finished=finished
    )  # fmt: skip


def saves(*places: int) -> list[Change]:
    """Files that were complete when so many steps had been begun."""
    return [one("closed out/step-#.pt", place, 1000) for place in places]


def judged(trials: Sequence[tuple[int, int, int | None]], changes: list[Change], said: str = "") -> list[str]:
    """Outcomes of trials: (steps begun at the kill, saves ended before it, step gone on from; -1: refused)."""
    found = judge(
        [Trial(kill=Kill(at=at, began=0, ended=ended, landed=""), life=2, began=None if began == -1 else began,
               refused="status 1" if began == -1 else "", said=said) for at, ended, began in trials],
        command=["python", "train.py"], reference=REFERENCE, changes=changes, kinds=save_changes(changes)[0],
    )  # fmt: skip
    return [trial.outcome for trial in found.trials]


def test_each_outcome_has_its_name():
    """Of a script that waits for its saves, after 10, 20 and 30 steps; a save that has not ended may be lost."""
    changes = saves(10, 20, 30)
    trials = [(20, 1, 20), (20, 1, 10), (20, 2, 10), (21, 2, 0), (10, 0, 0), (21, 2, None), (20, 1, -1)]
    assert judged(trials, changes) == [
        "newest", "newest", "older, silently", "started over", "newest", "torn", "refused",
    ]  # fmt: skip
    assert judged([(21, 2, 10)], changes, said="damaged, taking the previous one") == ["older, said"]


def test_a_save_in_the_background_has_time():
    """Files that end three steps later: only steps that a life went on from count, and six steps after them."""
    changes = saves(13, 23, 33)
    resumed = [(17, 1, 10), (27, 2, 20)]
    assert judged([*resumed, (24, 2, 10), (27, 2, 10), (27, 1, 10)], changes) == [
        "newest", "newest", "newest", "older, silently", "newest",
    ]  # fmt: skip


def test_the_end_of_a_save_is_found_among_its_changes():
    """A log at each step, two files by way of one name, old ones deleted: the last kind that comes once a save."""
    logs = [one("closed log", n, 9) for n in range(1, 40)] + [one("renamed lease", n, 9) for n in (6, 26)]
    kinds = ("made tmp", "written tmp", "closed tmp", "renamed a-#", "made tmp", "closed tmp", "renamed b-#")
    parts = [one(what, n, 500) for n in (10, 20, 30) for what in kinds]
    old = [one(what, n) for n in (20, 30) for what in ("deleted a-#", "deleted b-#", "deleted dir-#", "made trash")]
    changes = sorted([*logs, one("made out", 10), *parts, *old], key=lambda change: change.begun)
    assert save_changes(changes) == (("renamed a-#", "renamed b-#"), 3)
    assert judged([(21, 1, 20), (25, 2, 10)], changes) == ["newest", "older, silently"]


def test_what_comes_as_often_as_the_saves_by_chance_ends_none():
    """A lease is renewed three times, as many as there are saves; a log is flushed once more where a save is late."""

    def save(n: int) -> list[Change]:
        return [one("closed a-#", n, 500), one("renamed latest", n, 9), one("closed log", n, 9)]

    lease = [one("renamed lease", n, 9) for n in (10, 11, 20)]
    changes = sorted([*save(10), *save(20), *save(30), *lease], key=lambda change: change.begun)
    kinds, number = save_changes(changes)
    assert (kinds, number) == (("closed a-#", "renamed latest", "closed log"), 3)
    early = [one("closed log", 6, 9), *save(10)[:1]]
    assert ends_of_saves(early, kinds) == []
    assert ends_of_saves([*early, *save(10)[1:], *lease], kinds) == [10]


OVERLAPPING = sorted(
    [
        change
        for step in range(5, 40, 5)
        for change in (
            one("made out/step-#", step, 0, step),
            one("closed out/step-#/data", step, 900, step),
            one("renamed out/step-#/.metadata", min(step + 7, 40), 9, step),
            one("renamed out/latest", min(step + 7, 40), 9),
        )
    ],
    key=lambda change: change.begun,
)
"""Saves in the background that take seven steps, and one each five."""


def test_saves_that_overlap_end_with_their_last_change():
    """It comes after the large file of the next save: the number in its name tells whose it is; a link follows it."""
    kinds, number = save_changes(OVERLAPPING)
    assert (set(kinds), number) == (
        {"closed out/step-#/data", "renamed out/step-#/.metadata", "renamed out/latest"}, 7,
    )  # fmt: skip
    assert ends_of_saves(OVERLAPPING, kinds) == [12, 17, 22, 27, 32, 37, 40]
    by_chance = [one("renamed lease", n, 9) for n in (6, 7, 8, 9, 21, 31, 33)]
    changes = sorted([*OVERLAPPING, *by_chance], key=lambda change: change.begun)
    assert set(save_changes(changes)[0]) == set(kinds)


def test_a_save_that_overlaps_has_time():
    """Of data files alone each would have ended at once; a save that none went on from is no end of the next one."""
    assert judged([(14, 1, 5), (16, 1, 5)], OVERLAPPING) == ["newest", "newest"]
    assert judged([(20, 2, 10), (40, 6, 15)], OVERLAPPING) == ["newest", "newest"]
    assert judged([(30, 4, 15), (40, 6, 5)], OVERLAPPING) == ["newest", "older, silently"]


def test_the_page_has_a_strip_for_each_kill():
    """What was kept is green, what was lost red, and the text of a line cannot become markup. Each loss has its fix."""
    changes = saves(10, 20, 30)

    def after(at: int, ended: int, began: int | None, refused: str = "") -> Trial:
        return Trial(kill=Kill(at=at, began=0, ended=ended, landed="closed <b>"), life=2, began=began, refused=refused)

    found = judge(
        [after(24, 2, 10), after(24, 2, 20), after(13, 1, None, "status 1: <script>")], command=["python", "train.py"],
        reference=REFERENCE, changes=changes, kinds=save_changes(changes)[0],
    )  # fmt: skip
    assert [line for line in found.lines() if "fix: " in line] == [
        f"  fix: {_FIXES[outcome]}" for outcome in ("older, silently", "refused")
    ]
    page = survival_page(found, 3.0)
    strips = [strip.partition("</div>")[0] for strip in page.split('<div class="strip">')[1:]]
    counts = [[strip.count(f'class="{mark}') for mark in ("same", "bad", "none")] for strip in strips]
    assert counts == [[10, 10, 20], [20, 0, 20], [0, 10, 30]]
    assert [strip.count(" kill") for strip in strips] == [1, 1, 1]
    assert "DOES NOT SURVIVE" in page
    assert "<b>" not in page
    assert "<script>" not in page


# ---- the kill


def test_a_watch_says_when_the_planned_change_comes(tmp_path):
    """The second time that a name is taken, whatever its number; the others are noted too."""
    with ChangeWatch(tmp_path, Aim(what="renamed out/step-#.pt", nth=2)) as watch:
        (tmp_path / "out").mkdir()
        watch.read()
        for step in (5, 10):
            assert watch.due is None
            (tmp_path / "out" / "tmp").write_bytes(b"x" * 10)
            os.replace(tmp_path / "out" / "tmp", tmp_path / "out" / f"step-{step}.pt")
            watch.read()
        assert watch.due is not None
    kinds = {change.what for change in watch.seen}
    assert {"made out", "made out/tmp", "written out/tmp", "closed out/tmp", "renamed out/step-#.pt"} <= kinds
    assert max(change.size for change in watch.seen) == 10


def test_a_change_lies_between_the_steps_where_it_was_made(tmp_path):
    """However short they are, and however late the watch reads: rows and changes come in one order."""
    (tmp_path / "out").mkdir()
    with ChangeWatch(tmp_path / "out", trace=tmp_path / "trace") as watch:
        rows = os.open(tmp_path / "trace" / "life-0.rank-0.pid-1.steps", os.O_WRONLY | os.O_CREAT)
        for step in range(1, 10):
            os.write(rows, b"{}\n")
            os.utime(rows)
            if step % 3 == 0:
                (tmp_path / "out" / f"step-{step}").write_bytes(b"x")
        os.close(rows)
        watch.read()
    assert [(change.begun, change.numbers) for change in watch.seen if change.finished] == [
        (3, ("3",)), (6, ("6",)), (9, ("9",)),
    ]  # fmt: skip


def test_a_file_found_in_a_new_directory_is_closed_once_it_is(tmp_path):
    """A watch sees a new directory when files in it are there already, and one may be half written."""
    with ChangeWatch(tmp_path) as watch:
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "whole").write_bytes(b"x")
        with (tmp_path / "new" / "half").open("wb") as file:
            file.write(b"x")
            file.flush()
            watch.read()
            assert [change.what for change in watch.seen if change.finished] == ["closed new/whole"]
        watch.read()
    assert [change.what for change in watch.seen if change.finished] == ["closed new/whole", "closed new/half"]


def test_files_that_the_watch_came_too_late_for_are_counted(tmp_path):
    """Not those of before the first step, and not those that were seen, whose directory has another name now."""
    (tmp_path / "out").mkdir()
    with ChangeWatch(tmp_path / "out", trace=tmp_path / "trace") as watch:
        for folder in ("before", "late"):
            (tmp_path / "out" / folder).mkdir()
            (tmp_path / "out" / folder / "unseen").write_bytes(b"x")
            watch.read()
            rows = os.open(tmp_path / "trace" / "life-0.rank-0.pid-1.steps", os.O_WRONLY | os.O_CREAT)
            os.utime(rows)
            os.close(rows)
        (tmp_path / "out" / "temporary").mkdir()
        watch.read()
        (tmp_path / "out" / "temporary" / "known").write_bytes(b"x")
        (tmp_path / "out" / "temporary").rename(tmp_path / "out" / "final")
        watch.read()
        assert watch.num_found == 1


def test_a_file_system_that_gives_no_leases_has_no_half_written_files(tmp_path, monkeypatch):
    """NFS and SMB answer as if somebody wrote every file: each one would be waited for to the end."""
    monkeypatch.setattr(
        "holdfast.verify.workplace.fcntl.fcntl", mock.Mock(side_effect=BlockingIOError(errno.EAGAIN, ""))
    )
    (tmp_path / "root").mkdir()
    with ChangeWatch(tmp_path / "root") as watch:
        (tmp_path / "root" / "new").mkdir()
        (tmp_path / "root" / "new" / "whole").write_bytes(b"x")
        watch.read()
    assert [change.what for change in watch.seen if change.finished] == ["closed new/whole"]
    assert os.listdir(tmp_path) == ["root"]


def test_changes_that_the_kernel_lost_are_said(tmp_path):
    """As it tells it: an event of no watch (inotify(7), IN_Q_OVERFLOW)."""
    lost = struct.pack("iIII", -1, 0x4000, 0, 0)
    with ChangeWatch(tmp_path) as watch, mock.patch("os.read", side_effect=[lost, BlockingIOError]):
        assert not watch.missed
        watch.read()
        assert watch.missed


def test_a_kill_reaches_everything_that_was_started(tmp_path):
    """A process in a session of its own, as Holdfast's writer is, dies with the script, where the change is seen."""
    script = tmp_path / "work.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "if sys.argv[1:]:\n"
        "    open('pid', 'w').write(str(os.getpid()))\n"
        "    os.rename('pid', 'pid.ready')\n"
        "    time.sleep(60)\n"
        "subprocess.Popen([sys.executable, __file__, 'child'], start_new_session=True)\n"
        "time.sleep(60)\n"
    )
    plan = LifePlan(trace=str(tmp_path), life=0, signal=str(tmp_path / "signal"))
    command = Command([sys.executable, "-S", str(script)], cwd=tmp_path)
    began = time.monotonic()
    with ChangeWatch(tmp_path, Aim(what="renamed pid.ready", nth=1)) as watch:
        life = run_life(command, plan, timeout_s=30, watch=watch)
    assert life.killed
    assert time.monotonic() - began < 20
    status = Path("/proc", (tmp_path / "pid.ready").read_text(), "stat")
    deadline = time.monotonic() + 5
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < deadline, "the child of another session lives"
        time.sleep(0.01)


def test_a_power_cut_takes_what_is_not_on_the_disk(tmp_path):
    """What was synced stays, what was written since goes: zeros, their second half, or the end of the file."""
    if not sees_power_cuts(tmp_path):
        pytest.skip("this kernel or file system does not say what is on the disk")
    page = os.sysconf("SC_PAGE_SIZE")
    ends = set()
    for seed in range(12):
        (tmp_path / "safe").write_bytes(b"s" * 3 * page)
        (tmp_path / "late").write_bytes(b"a" * 2 * page)
        make_durable(tmp_path)
        with (tmp_path / "late").open("ab") as file:
            file.write(b"b" * 4 * page)
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to("safe")
        pages = unwritten(tmp_path)
        assert list(pages) == [tmp_path / "late"]
        assert pages[tmp_path / "late"] == [2, 3, 4, 5]
        cut_power(pages, random.Random(seed))
        assert (tmp_path / "safe").read_bytes() == b"s" * 3 * page
        late = (tmp_path / "late").read_bytes()
        assert late[: 2 * page] == b"a" * 2 * page
        ends.add(late[2 * page :])
    assert ends == {b"", bytes(4 * page), b"b" * 2 * page + bytes(2 * page)}


# ---- real scripts

BASE = """
import glob, os, time
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters())
step = 0
os.makedirs("out", exist_ok=True)


def state():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


def take(saved):
    global step
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]


def slowly(value, path):
    "Write a file in two parts."
    torch.save(value, path + ".whole")
    with open(path + ".whole", "rb") as source, open(path, "wb") as file:
        data = source.read()
        file.write(data[: len(data) // 2])
        file.flush()
        time.sleep(0.05)
        file.write(data[len(data) // 2 :])
    os.remove(path + ".whole")


SAVING
while step < 24:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
    loss = (model(x) - x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    time.sleep(0.02)
    optimizer.step()
    step += 1
    if step % 4 == 0:
        save()
"""
SAVING = {
    "over": ("refused", """
def save(): slowly(state(), "out/last.pt")
if os.path.exists("out/last.pt"): take(torch.load("out/last.pt"))
"""),
    "replace": ("newest", """
def save():
    slowly(state(), "out/tmp")
    os.replace("out/tmp", "out/last.pt")
if os.path.exists("out/last.pt"): take(torch.load("out/last.pt"))
"""),
    "two files": ("torn", """
def save():
    for name in ("model", "optimizer", "step"):
        slowly(state()[name], "out/tmp")
        os.replace("out/tmp", f"out/{name}.pt")
if os.path.exists("out/step.pt"):
    take({name: torch.load(f"out/{name}.pt", weights_only=False) for name in ("model", "optimizer", "step")})
"""),
    "newest by its name as text": ("older, silently", """
def save():
    slowly(state(), "out/tmp")
    os.replace("out/tmp", f"out/step-{step}.pt")
found = sorted(glob.glob("out/step-*.pt"))
if found: take(torch.load(found[-1]))
"""),
    "any error is no checkpoint": ("started over", """
def save(): slowly(state(), f"out/step-{step:02}.pt")
try:
    take(torch.load(sorted(glob.glob("out/step-*.pt"))[-1]))
except Exception:
    pass
"""),
}  # fmt: skip


WARM_UP = """
for _ in range(2):
    model(torch.ones(8, 64)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
IN_THE_BACKGROUND = """
import threading

def write(state, step):
    os.makedirs(f"out/step-{step}")
    torch.save(state, f"out/step-{step}/data")
    time.sleep(0.12)  # longer than it is to the next save
    torch.save(step, f"out/step-{step}/tmp")
    os.replace(f"out/step-{step}/tmp", f"out/step-{step}/complete")


def save():
    saved = copy.deepcopy(state())
    threading.Thread(target=write, args=(saved, step)).start()


found = sorted(int(path.split("/")[1][5:]) for path in glob.glob("out/step-*/complete"))
if found: take(torch.load(f"out/step-{found[-1]}/data"))
for path in glob.glob("out/step-*"):
    if not os.path.exists(path + "/complete"): shutil.rmtree(path)
"""


def run(tmp_path, saving: str, *options: str, base: str = BASE) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(base.replace("SAVING", saving))
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "attack", "--json", *options, "--", sys.executable, "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVING)
def test_what_follows_the_kills_is_counted(tmp_path, name):
    """Each way to save has its outcome, beside newest ones, and no other; the directory stays as it was."""
    outcome, saving = SAVING[name]
    kills = "10" if outcome != "newest" else "5"
    ended = run(tmp_path, saving, "--kills", kills, "--power-cuts", "0", "--seed", "1")
    document = json.loads(ended.stdout)
    counted = {key for key, count in document["kills"].items() if count}
    assert counted <= {"newest", outcome}, ended.stdout
    assert outcome in counted, ended.stdout
    assert sum(document["kills"].values()) >= int(kills)
    assert ended.returncode == (0 if outcome == "newest" else 1)
    assert document["survives"] == (outcome == "newest")
    assert [entry.name for entry in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replace", "any error is no checkpoint"])
def test_steps_before_it_loads_its_checkpoint_are_none_of_its_state(tmp_path, name):
    """A script that warms up for two steps: a kill in them shows nothing, and what is loaded then counts."""
    outcome, saving = SAVING[name]
    ended = run(tmp_path, WARM_UP + saving, "--kills", "6", "--power-cuts", "0", "--seed", "1")
    document = json.loads(ended.stdout)
    counted = {key for key, count in document.get("kills", {}).items() if count}
    assert outcome in counted, ended.stdout
    assert counted <= {"newest", outcome}, ended.stdout
    resumed = {trial["resumed"] for trial in document["trials"]}
    assert resumed <= {0, 6, 10, 14, 18, 22}, ended.stdout
    assert len(resumed) > 1 or outcome == "started over", ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("saving", [SAVING["replace"][1], IN_THE_BACKGROUND], ids=["short steps", "overlapping saves"])
def test_what_is_hard_to_see_is_not_called_wrong(tmp_path, saving):
    """Steps of a millisecond, and saves in the background that end after the next one has begun."""
    base = BASE.replace("import glob", "import copy, shutil, glob")
    if saving != IN_THE_BACKGROUND:
        base = base.replace("    time.sleep(0.02)\n", "")
    ended = run(tmp_path, saving, "--kills", "12", "--power-cuts", "0", base=base)
    document = json.loads(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert document["kills"]["newest"] >= 12
    assert document["saved"], ended.stdout


@pytest.mark.slow
def test_a_checkpointer_survives_kills_and_power_cuts(tmp_path):
    """Its writer is killed with it; nothing is lost."""
    (tmp_path / "train.py").write_text(CHECKPOINTER)
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "attack", "--kills", "6", "--power-cuts", "3", "--html", "a.html",
         "--", sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "SURVIVES" in ended.stdout
    assert (tmp_path / "a.html").read_text().count('<div class="strip">') >= 6
    assert not (tmp_path / "run").exists()


CHECKPOINTER = """
import time, torch, holdfast

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters())
with holdfast.Checkpointer("run", {"model": model, "optimizer": optimizer}, every=4) as ck:
    while ck.global_step < 24:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(ck.global_step))
        loss = (model(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        ck.step(loss=loss)
"""


@pytest.mark.slow
def test_what_cannot_be_attacked_is_said(tmp_path):
    """A script that does not resume at all is no fault of its saving, and one that saves nothing has none."""
    ended = run(tmp_path, "def save(): slowly(state(), 'out/last.pt')", "--kills", "1")
    assert ended.returncode == 1
    assert "began at step 0" in json.loads(ended.stdout)["message"]
    ended = run(tmp_path, "def save(): pass", "--kills", "1")
    assert "has to save at least once" in json.loads(ended.stdout)["message"]


def attacked(tmp_path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast.cli.main", *arguments]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("command", ["attack", "verify-resume"])
def test_a_script_that_is_not_there_is_said_in_a_sentence(tmp_path, command):
    """Nothing is started for it."""
    ended = attacked(tmp_path, command, "--", sys.executable, "nix.py")
    assert ended.returncode == 2
    assert ended.stderr == f"holdfast: there is no script 'nix.py' in {tmp_path}\n"


def test_an_error_of_the_script_is_shown_without_frames_of_ours(tmp_path):
    """As a fresh interpreter prints it, with the indents of a traceback."""
    (tmp_path / "train.py").write_text("def fail():\n    raise ValueError('bad day')\n\n\nfail()\n")
    ended = attacked(tmp_path, "attack", "--", sys.executable, "train.py")
    assert ended.returncode == 1
    first, head, *frames, last = ended.stderr.splitlines()
    assert first == "holdfast: the script ended with exit status 1; the end of what it printed:"
    assert head == "  Traceback (most recent call last):"
    assert last == "  ValueError: bad day"
    files = [line for line in frames if " File " in line]
    assert len(files) == 2
    assert all(line.startswith('    File "') and "train.py" in line for line in files), frames


def test_a_life_that_is_late_before_it_has_printed_is_said(tmp_path):
    """The bound may be over before its output is there; no option that the command lacks is advised."""
    (tmp_path / "train.py").write_text("import time\ntime.sleep(60)\n")
    ended = attacked(tmp_path, "attack", "--timeout", "0.001", "--", sys.executable, "train.py")
    assert ended.returncode == 1
    assert ended.stderr == "holdfast: the script did not end within 0.001 s, and printed nothing\n"
    ended = attacked(tmp_path, "attack", "--copy-limit", "0", "--", sys.executable, "train.py")
    assert ended.returncode == 2
    assert "--in-place" not in ended.stderr
    (tmp_path / "train.py").chmod(0o644)
    ended = attacked(tmp_path, "attack", "--", "./train.py")
    assert ended.returncode == 2
    assert ended.stderr == (
        "holdfast: './train.py' cannot be started: Permission denied; a script is run as `-- python ./train.py`\n"
    )
