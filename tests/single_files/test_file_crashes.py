"""Single files go through the writer process: what a kill of the trainer or of the writer leaves of them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import file_kit as kit
import pytest
import torch
from process_kit import wait_gone

from holdfast.errors import RunBusyError, StorageError
from holdfast.storage import LocalStorage
from holdfast.testing import CRASH_EXIT_CODE, FaultyStorage, ForkServer
from holdfast.trainers.loop.parallel import Ranks
from holdfast.trainers.loop.saving.files import read_note
from holdfast.trainers.loop.saving.folder import FileLeases

FILE = Path(kit.__file__)
SUFFIXES = [".pt", ".safetensors"]

KILLED = """
import os, signal, sys
from loop_kit import plain
folder, suffix = sys.argv[1:]
trainer = plain(folder, save_filename="ba{batch}" + suffix, save_weights_only=suffix != ".pt", max_duration="1ba")
trainer.save_checkpoint_to_save_folder()
saver = trainer._savers[0]
writer = saver.place.claims._client.process_id
os.kill(writer, signal.SIGSTOP)
trainer.state.model.weight.data.fill_(7.0)
saver._last = None
saver.save_now()
os.write(1, f"{writer} {saver.claim}\\n".encode())
os.kill(os.getpid(), signal.SIGKILL)
"""


def weight_of(path: Path) -> torch.Tensor:
    if path.suffix == ".pt":
        found: torch.Tensor = torch.load(path, weights_only=True)["state"]["model"]["weight"]
        return found
    from safetensors.torch import load_file

    return load_file(path)["weight"]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_trainer_killed_right_after_the_seal(tmp_path: Path, suffix: str) -> None:
    """SIGKILL of the trainer while its writer stands still: the file is completed, and the next start waits for it."""
    path = tmp_path / f"ba0{suffix}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FILE.parent), *sys.path])}
    command = [sys.executable, "-c", KILLED, str(tmp_path), suffix]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        writer, claim = trainer.stdout.readline().split()
        assert trainer.wait(60) == -signal.SIGKILL
    next_start = FileLeases(LocalStorage(tmp_path), Ranks())
    waiting = threading.Thread(target=next_start.take, args=(claim,))
    try:
        assert not (weight_of(path) == 7.0).all(), "the writer stands still"
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive(), "the name is not free before the file is there"
    finally:
        os.kill(int(writer), signal.SIGCONT)
    waiting.join(60)
    assert (weight_of(path) == 7.0).all()
    assert read_note(LocalStorage(tmp_path), path.name, verify=True) is not None
    assert wait_gone(int(writer), 60.0), "it ends by itself"
    next_start.release(patient=True)
    assert {one.name for one in tmp_path.iterdir()} == {path.name, "latest-rank0"}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("operation", ["open", "pwrite", "ftruncate", "fsync", "rename"])
def test_a_disk_that_fails(tmp_path: Path, suffix: str, operation: str) -> None:
    """Whichever operation on the file fails, the save raises what the disk said, and the file before is whole."""
    kit.prepare(str(tmp_path), suffix)
    disk = FaultyStorage(tmp_path, record=True)
    claims, made = FileLeases(disk, Ranks()), kit.image(2, suffix)
    claims.take(kit.SHAPE)
    disk.ops._fail_on = {operation: errno.EIO}
    with pytest.raises(StorageError, match=f"a1{suffix}: .*the device reported an error"):
        claims.submit(kit.SHAPE, f"a1{suffix}", made).result(60)
    disk.ops._fail_on = {}
    claims.submit(kit.SHAPE, f"a2{suffix}", made).result(60)  # the next one has the disk back
    assert kit.loaded(tmp_path / f"a2{suffix}") == 2
    (tmp_path / f"a2{suffix}").unlink()
    claims.release(patient=True)
    made.close()
    assert kit.look(str(tmp_path), suffix) == 1


def test_a_writer_whose_name_was_taken_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies, and another machine has the name before the next writer asks for it: saves fail and say who has it."""
    monkeypatch.setattr("holdfast.trainers.loop.saving.folder.LEASE_S", 0.3)
    claims = FileLeases(LocalStorage(tmp_path), Ranks())
    claims.take(kit.SHAPE)
    client = claims._client
    assert client is not None
    assert client.process_id is not None
    (lease,) = tmp_path.glob("lease-*.json")
    (lock,) = tmp_path.glob(".lease-*.lock")
    os.kill(client.process_id, signal.SIGSTOP)
    theirs = {**json.loads(lease.read_text()), "host": "elsewhere", "boot": "other", "start_id": "ffff"}
    lease.write_text(json.dumps(theirs))
    made = kit.image(1, ".pt")
    future = claims.submit(kit.SHAPE, "a1.pt", made)
    os.kill(client.process_id, signal.SIGKILL)
    with pytest.raises(RunBusyError, match="on elsewhere"):
        future.result(120)
    claims.release(patient=True)
    made.close()
    assert {path.name for path in tmp_path.iterdir()} <= {lease.name, lock.name}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("times", ["once", "always"])
def test_a_writer_killed_in_the_middle_of_a_file(tmp_path: Path, suffix: str, times: str) -> None:
    """Killed once, the next writer stores the file; killed each time, the file before is whole, and no litter stays."""
    marker = tmp_path.parent / f"{tmp_path.name}.marker"
    kit.prepare(str(tmp_path), suffix)
    operations = count(tmp_path, suffix)
    names = [name for name, _ in operations]
    at = names.index("ftruncate") - 1  # writing the file; its lease, before and after it, has no end to cut off
    assert names[at] == "pwrite"
    told = kit.writer_dies(str(tmp_path), suffix, at, str(marker) if times == "once" else None)
    if times == "once":
        assert marker.exists()
        assert told["error"] is None
        assert kit.look(str(tmp_path), suffix) == 2
    else:
        assert "for the second time in short" in told["error"]
        assert any(path.name.startswith(".tmp-") for path in tmp_path.iterdir()), "it died in the middle of the file"
        assert kit.look(str(tmp_path), suffix) == 1


def count(root: Path, suffix: str) -> list[tuple[str, str]]:
    """Return what a writer process does to the disk in a life that replaces the file."""
    copy, trace = root.parent / f"{root.name}-dry", root.parent / f"{root.name}-trace"
    shutil.copytree(root, copy)
    kit.store(FaultyStorage(copy, trace=str(trace)), 2, suffix)
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    return [(row["name"], row["path"]) for row in rows]


@pytest.fixture(scope="module")
def server() -> Any:
    with ForkServer(preload=("torch", "holdfast.core", "safetensors.torch", str(FILE)), path=[FILE.parent]) as one:
        yield one


@pytest.mark.slow
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_operation_of_a_file(server: ForkServer, tmp_path: Path, suffix: str) -> None:
    """Trainer and writer killed before operation k, for every k: the old file or the new one, and no litter."""
    base = tmp_path / "base"
    server.run(f"{FILE}:prepare", str(base), suffix).checked()
    seen: list[int] = []
    for at in range(200):
        root = tmp_path / f"at-{at}"
        shutil.copytree(base, root)
        died = server.run(f"{FILE}:replace_it", str(root), suffix, at)
        assert died.status in (CRASH_EXIT_CODE, 0), (at, died)
        seen.append(server.run(f"{FILE}:look", str(root), suffix).checked())
        shutil.rmtree(root)
        if died.status == 0:
            break
    assert len(seen) > 15
    assert seen == sorted(seen), "once the new file is there it stays"
    assert set(seen) == {1, 2}, "the sweep must see both sides of the commit"


@pytest.mark.slow
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("times", ["once", "always"])
def test_every_operation_of_the_writer(server: ForkServer, tmp_path: Path, suffix: str, times: str) -> None:
    """The writer process killed at operation k, for every k: repaired by the next writer, or one clean error."""
    base = tmp_path / "base"
    server.run(f"{FILE}:prepare", str(base), suffix).checked()
    total, errors = len(count(base, suffix)), 0
    assert total > 15
    for at in range(total):
        root, marker = tmp_path / f"at-{at}", tmp_path / f"marker-{at}"
        shutil.copytree(base, root)
        told = server.run(
            f"{FILE}:writer_dies", str(root), suffix, at, str(marker) if times == "once" else None
        ).checked()
        found = server.run(f"{FILE}:look", str(root), suffix).checked()
        if times == "once":
            assert (told["error"], found) == (None, 2), at
        else:
            errors += told["error"] is not None
            assert found == 2 if told["error"] is None else found in (1, 2), at
        shutil.rmtree(root)
    assert errors == 0 if times == "once" else errors > 10
