"""Memory is looked at before a copy of the state is made: own group, all above it, and the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast.state.save import snapshot
from holdfast.state.save.windows import look_for_memory
from holdfast.writer.free_memory import FreeMemory, free_memory

MIB = 1 << 20
MEMINFO = "MemTotal: 4000 kB\nMemFree: 1 kB\nMemAvailable: 3000 kB\n"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
V2_MOUNT = "41 31 0:38 {root} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
OTHERS = "36 31 0:33 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices\n31 23 0:28 / / rw - ext4 /dev/vda rw\n"


def machine(tmp_path, *, own: str, mounts: str, groups: dict[str, tuple[str, int, str]]) -> Path:
    """Build proc and sys: groups by their folder below sys/fs/cgroup, each (limit, used, lines of memory.stat)."""
    for path, text in (("proc/meminfo", MEMINFO), ("proc/self/cgroup", own), ("proc/self/mountinfo", OTHERS + mounts)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if "- cgroup cgroup rw,memory" in mounts else (
        "memory.max", "memory.current"
    )  # fmt: skip
    for folder, (limit, used, stat) in groups.items():
        home = tmp_path / "sys/fs/cgroup" / folder
        home.mkdir(parents=True, exist_ok=True)
        for name, value in zip((*names, "memory.stat"), (limit, used, stat), strict=True):
            (home / name).write_text(f"{value}".rstrip() + "\n")
    return tmp_path


def test_the_machine_alone(tmp_path):
    """Without control groups it is what the kernel calls available; without anything nobody knows."""
    root = machine(tmp_path, own="0::/\n", mounts="", groups={})
    assert free_memory(root) == FreeMemory(3000 * 1024, "the machine")
    assert free_memory(tmp_path / "nothing") is None


def test_the_limit_of_the_process(tmp_path):
    """A limit on address space (`ulimit -v`) bounds the copy too; what a step took is told."""
    root = machine(tmp_path, own="0::/\n", mounts="", groups={})
    (root / "proc/self/status").write_text("Name:\tpython\nVmSize:\t  700 kB\nVmHWM:\t  90 kB\nVmRSS:\t  20 kB\n")
    limits = "Limit             Soft Limit           Hard Limit           Units\nMax address space {}  bytes\n"
    (root / "proc/self/limits").write_text(limits.format("1024000              unlimited"))
    assert free_memory(root) == FreeMemory(300 * 1024, "`ulimit -v`", 70 * 1024)
    (root / "proc/self/limits").write_text(limits.format("unlimited            unlimited"))
    assert free_memory(root).bound == "the machine"


def test_version_2_and_all_above(tmp_path):
    """The tightest of the own group and those above it; cached files count as free unless they wait to be written."""
    stat = "anon 5\nactive_file 100\ninactive_file 200\nfile_dirty 30\nfile_writeback 20\nshmem 999\n"
    groups = {"a": ("2000000", 1_900_000, stat), "a/b": ("max", 5, stat), "": ("9000000", 0, stat)}
    root = machine(tmp_path, own="0::/a/b\n", mounts=V2_MOUNT.format(root="/"), groups=groups)
    assert free_memory(root) == FreeMemory(100_250, "the control group /sys/fs/cgroup/a")
    (root / "sys/fs/cgroup/a/b/memory.high").write_text("55\n")
    assert free_memory(root).bytes == 300, "a group is slowed down at memory.high"


def test_version_1_and_all_above(tmp_path):
    """The same in the first version, where 2^63 means none."""
    stat = "cache 1\ntotal_active_file 100\ntotal_inactive_file 200\ntotal_dirty 300\ntotal_writeback 300\n"
    none = str((1 << 63) - 4096)
    groups = {"memory": (none, 5, stat), "memory/a": ("1000", 400, stat), "memory/a/b": (none, 1, stat)}
    own = "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/\n"
    root = machine(tmp_path, own=own, mounts=V1_MOUNT.format(root="/"), groups=groups)
    assert free_memory(root) == FreeMemory(600, "the control group /sys/fs/cgroup/memory/a")


@pytest.mark.parametrize(
    ("own", "mounted"), [("/docker/1f", "/docker/1f"), ("/../other", "/"), ("/elsewhere", "/docker/1f")]
)
def test_a_container_sees_its_own_group_as_the_topmost(tmp_path, own, mounted):
    """The group that is mounted is that of the container, or the nearest that is visible."""
    groups = {"": ("700000", 600_000, "active_file 0\n")}
    root = machine(tmp_path, own=f"0::{own}\n", mounts=V2_MOUNT.format(root=mounted), groups=groups)
    assert free_memory(root) == FreeMemory(100_000, "the control group /sys/fs/cgroup")


def test_where_memory_is_short_saves_go_through_windows(tmp_path, monkeypatch, capfd):
    """Nobody asked for it, so the start says it, with what it costs; every save is whole."""
    monkeypatch.setattr("holdfast.writer.free_memory.free_memory", lambda: FreeMemory(150 * MIB, "a test"))
    state = {"w": torch.arange(6 * MIB, dtype=torch.float32)}
    with hf.Checkpointer(tmp_path / "run", state, every=1) as ck:
        for _ in range(2):
            state["w"] += 1
            ck.step()
    told = capfd.readouterr().err
    assert "memory is short: a copy of the state takes 24.0 MiB, and of the 150.0 MiB that are free (a test)" in told
    assert told.count("memory is short") == 1
    assert bool((hf.load(tmp_path / "run" / "step_00000002")["w"] == state["w"]).all())
    monkeypatch.setattr("holdfast.writer.free_memory.free_memory", lambda: FreeMemory(2000 * MIB, "a test"))
    with hf.Checkpointer(tmp_path / "roomy", state, every=1) as ck:
        ck.step()
    assert "memory is short" not in capfd.readouterr().err


def test_memory_for_gradients_is_left_alone():
    """What the next backward takes is no room for the copy."""
    model = torch.nn.Linear(1024, 8 * 1024)  # 32 MiB
    found = []
    for gradients in (False, True):
        if gradients:
            model(torch.ones(1, 1024)).sum().backward()
        snapshotter = snapshot.Snapshotter()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("holdfast.writer.free_memory.free_memory", lambda: FreeMemory((128 + 50) * MIB, "a test"))
            found.append(snapshotter.look_at_memory({"model": model}) is None)
        snapshotter.close()
    assert found == [False, True]


def test_what_a_step_takes_for_a_moment_is_left_alone(monkeypatch):
    """The optimizer's temporaries are gone when a step is saved, and come again: a copy in their place would kill."""
    state, found = {"w": torch.ones(30, 1 << 18)}, []
    for now_and_then in (0, 30 * MIB):
        free = FreeMemory((128 + 50) * MIB, "a test", now_and_then)
        monkeypatch.setattr("holdfast.writer.free_memory.free_memory", lambda free=free: free)
        found.append(look_for_memory(state, 30 * MIB, rescues=False, reserve=0).shortage is None)
    assert found == [True, False]


SCRIPT = """
import sys, torch, holdfast as hf
tensors = [torch.full((1 << 22,), 1.0) for _ in range(24)]
model = torch.nn.ParameterList([torch.nn.Parameter(tensor, requires_grad=False) for tensor in tensors])
if sys.argv[1] == "run":
    with hf.Checkpointer(sys.argv[2], {"model": model}, every=1) as ck:
        ck.step(); ck.step()
else:
    hf.save_async(sys.argv[2], {"model": model}).result(100)
print("alive")
"""


@pytest.fixture
def memory_group():
    """A memory group of version 1 or 2 below the root, which takes who writes himself into it."""
    for home in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        group = home / f"holdfast-test-{os.getpid()}"
        limit = "memory.limit_in_bytes" if home.name == "memory" else "memory.max"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / limit).exists():
            break
        group.rmdir()
    else:
        pytest.skip("needs the right to make a memory control group")
    yield group, group / limit
    for _ in range(50):  # the writer of a killed process ends a moment later
        try:
            group.rmdir()
            break
        except OSError:
            subprocess.run(["sleep", "0.1"], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["run", "async"])
def test_a_group_that_is_too_small_for_a_copy_kills_nobody(memory_group, tmp_path, way):
    """A state of 384 MiB in a real control group of 900 MiB, where 384 MiB more are not to be had."""
    group, limit = memory_group
    limit.write_text(str(900 * MIB))
    enter = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')\n"
    ended = subprocess.run(
        [sys.executable, "-c", enter + SCRIPT, way, str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "alive\n"), ended.stderr[-2000:]
    assert "memory is short" in ended.stderr
    home = tmp_path / "out" / "step_00000002" if way == "run" else tmp_path / "out"
    assert hf.Checkpoint(home).verify().ok
