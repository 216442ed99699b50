"""Several overwrites of one checkpoint at once: one of them wins whole, or all fail."""

from __future__ import annotations

import threading
import time
from itertools import count
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast.errors import CheckpointError
from holdfast.format.commit import PartSummary, commit, look_before, read_manifest
from holdfast.format.digest import bytes_digest
from holdfast.format.manifest import FileEntry
from holdfast.storage import LocalStorage, MemoryStorage, Storage
from holdfast.testing import ForkServer

_names = count()
ROUNDS = 12


def write(storage: Storage, start: str) -> PartSummary:
    """Write the one file of a save."""
    path = f"state-{start}-1.json"
    storage.put(f"s/{path}", start.encode())
    entry = FileEntry(path=path, size=len(start), digest=bytes_digest(start.encode()), role="state")
    return PartSummary(writer=0, files=(entry,))


@pytest.mark.parametrize("kind", ["local", "memory"])
@pytest.mark.parametrize("order", ["lwLW", "lLwW", "wlLW", "lwWL", "wWlL"])
def test_every_order_of_two(kind: str, order: str, tmp_path: Path) -> None:
    """Small letters look and write files, capitals commit: whoever commits on what it has seen wins, and is whole."""
    storage: Storage = LocalStorage(tmp_path) if kind == "local" else MemoryStorage(f"overwrites-{next(_names)}")
    commit(storage, "s", {"step": 0}, [write(storage, "00000000")])
    begun, done = {}, []
    for letter in order:
        if letter.islower():
            before = look_before(storage, "s")
            begun[letter.upper()] = before, write(storage, {"l": "aaaaaaaa", "w": "bbbbbbbb"}[letter])
            continue
        before, part = begun[letter]
        try:
            commit(storage, "s", {"step": ord(letter)}, [part], overwrite=before)
        except CheckpointError:
            continue
        done.append(letter)
    assert done
    assert read_manifest(storage, "s", check_sizes=True).step == ord(done[-1])
    assert len(done) == (2 if order in ("lLwW", "wWlL") else 1)


def test_threads_of_two_writers(tmp_path: Path) -> None:
    """Real saves, round after round: what was acknowledged last is there, and loads."""
    storages = [LocalStorage(tmp_path), LocalStorage(tmp_path)]
    hf.save(tmp_path / "c", {"w": torch.zeros(1000)})
    for number in range(ROUNDS):
        gate, said = threading.Barrier(2), {}

        def overwrite(who: int, number: int = number, gate: threading.Barrier = gate, said: dict = said) -> None:
            gate.wait()
            before = look_before(storages[who], "c")
            part = write_into(storages[who], f"{number:04x}{who:04x}")
            try:
                commit(storages[who], "c", {"step": who + 1}, [part], overwrite=before)
                said[who] = True
            except CheckpointError:
                said[who] = False

        threads = [threading.Thread(target=overwrite, args=(who,)) for who in (0, 1)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(30)
        assert any(said.values()), "one of them wins"
        winner = read_manifest(storages[0], "c", check_sizes=True)
        assert said[winner.step - 1], "what is there was acknowledged"


def write_into(storage: Storage, start: str) -> PartSummary:
    """Write a file big enough to take a moment."""
    path, data = f"state-{start}-1.json", start.encode() * 4000
    storage.put(f"c/{path}", data)
    return PartSummary(writer=0, files=(FileEntry(path=path, size=len(data), digest=bytes_digest(data), role="state"),))


FILE = str(Path(__file__))


def save_over(path: str, value: int, start: float) -> bool:
    """Overwrite a checkpoint at an agreed time; False if that was refused."""
    time.sleep(max(0.0, start - time.time()))
    try:
        hf.save(path, {"w": torch.full((1000,), float(value))}, overwrite=True)
    except CheckpointError:
        return False
    return True


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """`hf.save(overwrite=True)` in two processes at once: what loads afterwards was acknowledged to one of them."""
    path = str(tmp_path / "c")
    hf.save(path, {"w": torch.zeros(1000)})
    with (
        ForkServer(preload=("torch", "holdfast.checkpointer", FILE)) as one,
        ForkServer(preload=("torch", "holdfast.checkpointer", FILE)) as other,
    ):
        for number in range(1, 60):
            said: dict[int, bool] = {}
            start = time.time() + 0.15

            def run(server: ForkServer, value: int, said: dict = said, start: float = start) -> None:
                said[value] = server.run(f"{FILE}:save_over", path, value, start).checked()

            threads = [
                threading.Thread(target=run, args=(server, 2 * number + who)) for who, server in enumerate((one, other))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            found = int(hf.load(path)["w"][0])
            assert said.get(found) is True, (number, found, said)
