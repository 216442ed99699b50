"""A checkpoint of many ranks that is committed and removed, on a disk where its process dies."""

from __future__ import annotations

from pathlib import Path

from holdfast.errors import IncompleteCheckpointError
from holdfast.format.commit import PartSummary, read_manifest, remove, sweep
from holdfast.format.digest import bytes_digest
from holdfast.format.manifest import FileEntry
from holdfast.format.parts import put_part, sweep_passing
from holdfast.storage import LocalStorage
from holdfast.storage.local import local_storage
from holdfast.testing import FaultyStorage
from holdfast.writer.messages import PartsJob
from holdfast.writer.save import commit_parts

NUM_RANKS = 16
SAVE = "deadbeef-1"
DIRECTORY = "step_00000001"
MANIFEST = {"run_id": None, "checkpoint_id": "one", "attempt": 1, "step": 1, "world_size": NUM_RANKS}


def store_parts(root):
    """Every rank has stored its part."""
    storage = LocalStorage(root)
    for rank in range(NUM_RANKS):
        name, data = f"rank-{rank:05d}-{SAVE}.json", b"%d" % rank
        storage.put(f"{DIRECTORY}/{name}", data)
        entry = FileEntry(path=name, size=len(data), digest=bytes_digest(data), role="rank", writer=rank)
        put_part(storage, DIRECTORY, SAVE, PartSummary(writer=rank, files=(entry,)))
    Path(root, DIRECTORY, "notes.txt").write_text("mine")


def job():
    return PartsJob(
        directory=DIRECTORY,
        save_id=SAVE,
        writers=tuple(range(NUM_RANKS)),
        manifest=MANIFEST,
        wait_s=0.0,
        run=False,
        stored=True,
    )


def commit_and_remove(root, at=None, *, storage=None):
    """Commit, then remove, with sixteen threads; die before operation ``at``. Returns how many there were."""
    local_storage._DELETED_BY_EACH = 1
    storage = storage or FaultyStorage(root, crash_at=at)
    commit_parts(storage, job(), None, again=False)
    remove(storage, DIRECTORY)
    return storage.ops.count


def check(root):
    """It is whole or nothing, and a sweep leaves the user's file alone; whether there is one."""
    storage = LocalStorage(root)
    try:
        manifest = read_manifest(storage, DIRECTORY, check_sizes=True)
    except IncompleteCheckpointError:
        manifest = None
        sweep(storage, DIRECTORY)
    else:
        sweep_passing(storage, DIRECTORY, ["deadbeef"])
    storage.tidy(DIRECTORY)
    left = {path.name for path in Path(root, DIRECTORY).iterdir()} - {"notes.txt"}
    expected = {"manifest.json", *(entry.path for entry in manifest.files)} if manifest else set()
    assert left == expected, (left, expected)
    assert Path(root, DIRECTORY, "notes.txt").read_text() == "mine"
    return manifest is not None
