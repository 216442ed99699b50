"""What the sweeps over intakes, parts and attempts kill, and what they check afterwards. Runs in forked children."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from pathlib import Path
from unittest import mock

from holdfast.checkpoint.verify import read_metadata, verify
from holdfast.config import Keep
from holdfast.errors import HoldfastError
from holdfast.format.commit import PartSummary, commit, read_manifest
from holdfast.format.digest import bytes_digest
from holdfast.format.manifest import FileEntry
from holdfast.run.index import RunIndex
from holdfast.storage import LocalStorage
from holdfast.storage.local import local_io
from holdfast.testing import ArmedOps, FaultyStorage
from holdfast.writer.arena import Arena
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import BlobPlan, FilePlan, IngestJob, IngestSource, PartsJob, SaveJob

KEEP = Keep(last=2).to_json()
NEW = "checkpoint_000002"
FOREIGN = {
    "notes.txt": b"mine",
    "data/part.bin": b"\0\1" * 500,
    "exports/manifest.json": b"{}",
    "checkpoint_model/weights.safetensors": b"not a checkpoint of yours",
    ".hidden/x": b"h",
    ".incoming-mine/x": b"i",
    "logs/attempt-00001/rank-0.log": b"printed",
    f"{NEW}/README.txt": b"in the way, but not of the same name",
}
RANKS = {
    0: {"same.pt": b"s" * 70_000, "differs.pt": b"0" * 9000, "deep/er/only0.bin": b"o"},
    1: {"same.pt": b"s" * 70_000, "differs.pt": b"1" * 9000, "only1.bin": b"", ".metadata.json": b'{"rank": 1}'},
}
MERGED = {
    "same.pt": b"s" * 70_000,
    "differs.pt": b"0" * 9000,
    "differs.rank-1.pt": b"1" * 9000,
    "deep/er/only0.bin": b"o",
    "only1.bin": b"",
}
STATE = {"state-0badc0de-1.json": b'{"a":1}', "model-00000-0badc0de-1.safetensors": b"m" * 70_000, "extra/x": b"x"}
PARTS = {
    f"{name}-{writer:05d}-bbbbbbbb-2.{suffix}": data
    for writer in (0, 1)
    for name, suffix, data in (
        ("model", "safetensors", bytes([writer]) * 10_000),
        ("rank", "json", b'{"r":%d}' % writer),
    )
}
_counter = itertools.count(16)


def write(root, files):
    for name, data in files.items():
        target = Path(root, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return Path(root)


def tree(root):
    """Files with their bytes; empty directories with "/" at the end; not the link to the newest checkpoint."""
    found = {}
    for path in sorted(Path(root).rglob("*")):
        if path.is_symlink():
            assert (path / "manifest.json").is_file(), f"{path} leads to no checkpoint"
            continue
        name = path.relative_to(root).as_posix()
        if path.is_file():
            found[name] = path.read_bytes()
        elif not any(path.iterdir()):
            found[f"{name}/"] = b""
    return found


def open_run(client, storage, start_id):
    return client.open_run(storage, owner={"start_id": start_id}, keep=KEEP).result(60)


def fields(opened, start_id, step, **more):
    return {
        "run_id": opened.run_id,
        "attempt": opened.attempt,
        "step": step,
        "checkpoint_id": f"{start_id}-{step}",
        **more,
    }


def intake(opened, start_id, step, directory, sources, **options):
    return IngestJob(
        directory=directory,
        save_id=f"{start_id}-{step:x}",
        sources=tuple(IngestSource(rank=rank, path=str(path), **options) for rank, path in sources.items()),
        manifest=fields(opened, start_id, step),
    )


# ---- what there is before a case


def prepare(root):
    """A run with two checkpoints of a life that ended, foreign files, and directories that ranks report."""
    write(root, FOREIGN)
    storage = LocalStorage(Path(root))
    with WriterClient.start(thread=True) as client:
        opened = open_run(client, storage, "aaaaaaaa")
        for step in (0, 1):
            source = write(f"{root}.first", {"w.bin": bytes([step]) * 5000})
            job = intake(opened, "aaaaaaaa", step, f"checkpoint_{step:06d}", {0: source})
            client.ingest(storage, job).result(60)
    shutil.rmtree(f"{root}.first")
    for rank, files in RANKS.items():
        write(Path(f"{root}.user", f"rank{rank}"), files)
        write(Path(root, ".incoming-bbbbbbbb", f"2-{rank}"), files)
    for home in (Path(f"{root}.user", "state"), Path(root, ".incoming-bbbbbbbb/2-9"), Path(root, "placed")):
        write(home, STATE)
        entries = [
            FileEntry(
                path=path, size=len(data), digest=bytes_digest(data), role="state" if path[0] == "s" else "tensors"
            )
            for path, data in STATE.items()
            if path != "extra/x"
        ]
        commit(LocalStorage(home.parent), home.name, {}, [PartSummary(writer=0, files=tuple(entries))])


# ---- what is done


def moved(client, storage, opened, root):
    """Two ranks' directories that were taken over: their files are moved in."""
    home = Path(root, ".incoming-bbbbbbbb")
    job = intake(opened, "bbbbbbbb", 2, NEW, {rank: home / f"2-{rank}" for rank in RANKS}, owned=True)
    client.ingest(storage, job).result(60)


def copied(client, storage, opened, root):
    """Two ranks' directories that stay theirs; where the writer is a thread, their few files count as many."""
    home = Path(f"{root}.user")
    job = intake(opened, "bbbbbbbb", 2, NEW, {rank: home / f"rank{rank}" for rank in RANKS})
    with mock.patch.multiple(local_io, _MANY=2, flushes_whole=lambda fd: True):
        client.ingest(storage, job).result(60)


def checkpoint(client, storage, opened, root):
    """A Holdfast checkpoint that was taken over."""
    source = Path(root, ".incoming-bbbbbbbb/2-9")
    client.ingest(storage, intake(opened, "bbbbbbbb", 2, NEW, {9: source}, owned=True)).result(60)


def in_place(client, storage, opened, root):
    """A Holdfast checkpoint that lies in the run already."""
    client.ingest(storage, intake(opened, "bbbbbbbb", 2, "placed", {})).result(60)


def part_job(opened, writer, **more):
    return SaveJob(
        directory=NEW,
        save_id="bbbbbbbb-2",
        writer=writer,
        files=(FilePlan(path=f"model-{writer:05d}-bbbbbbbb-2.safetensors", size=10_000),),
        blobs=(BlobPlan(path=f"rank-{writer:05d}-bbbbbbbb-2.json", role="rank"),),
        manifest=fields(opened, "bbbbbbbb", 2),
        part=True,
        **more,
    )


def parts(client, storage, opened, root):
    """Two writers store their parts, the driver's commits."""
    for writer in (0, 1):
        with Arena.create(12_288) as arena, WriterClient.start(storage) as rank:
            arena.view[:10_000] = bytes([writer]) * 10_000
            rank.submit(storage, part_job(opened, writer), [b'{"r":%d}' % writer], arena).result(60)
    job = PartsJob(directory=NEW, save_id="bbbbbbbb-2", writers=(0, 1), manifest=fields(opened, "bbbbbbbb", 2))
    client.commit_parts(storage, job).result(60)


def commit_only(client, storage, opened, root):
    """The commit of two parts that are stored."""
    with WriterClient.start(thread=True) as rank, Arena.create(12_288) as arena:
        for writer in (0, 1):
            arena.view[:10_000] = bytes([writer]) * 10_000
            job, blobs = part_job(opened, writer), [b'{"r":%d}' % writer]
            rank.submit(LocalStorage(root), job, blobs, arena).result(60)
    job = PartsJob(directory=NEW, save_id="bbbbbbbb-2", writers=(0, 1), manifest=fields(opened, "bbbbbbbb", 2))
    client.commit_parts(storage, job).result(60)


def attempts(client, storage, opened, root):
    """Two more attempts; remains of the first are swept meanwhile."""
    for number in (1, 2):
        client.run_op("next_attempt", reason="died", details={"number": number}).result(60)
        client.run_op("note", key="n", value=number).result(60)


CASES = {
    "moved": (moved, NEW, MERGED),
    "copied": (copied, NEW, MERGED),
    "checkpoint": (checkpoint, NEW, STATE),
    "in_place": (in_place, "placed", STATE),
    "parts": (parts, NEW, PARTS),
    "attempts": (attempts, None, None),
}


def run_case(case, root, promised, crash_after=None):
    """A life that is killed before operation ``crash_after``; the number of operations."""
    storage = FaultyStorage(root, ops=ArmedOps())
    with WriterClient.start(storage) as client:
        opened = open_run(client, storage, "bbbbbbbb")
        storage.ops.arm(crash_after=crash_after)
        CASES[case][0](client, storage, opened, root)
        Path(promised).write_text("done")
    return storage.ops.since


def writer_dies(case, root, promised, marker, crash_at, times=1):
    """A life whose writer process is killed at operation ``crash_at``, once or every time."""
    act = {"parts": commit_only}.get(case, CASES[case][0])
    storage = FaultyStorage(root, crash_at=crash_at, **({"crash_once": marker} if times == 1 else {}))
    error = None
    try:
        with WriterClient.start(storage) as client:
            opened = open_run(client, storage, "bbbbbbbb")
            act(client, storage, opened, root)
            Path(promised).write_text("done")
    except HoldfastError as failure:
        error = str(failure)
    return {"error": error, "died": os.path.exists(marker)}


# ---- what must be true afterwards


def check(case, root, promised, user=None, go_on=True):
    """Start anew: the previous or the new checkpoint, whole; nothing of anybody else touched; no litter."""
    _, name, contents = CASES[case]
    storage = LocalStorage(Path(root))
    with WriterClient.start(thread=True) as client:
        opened = open_run(client, storage, "cccccccc")
        newest = opened.records[0][0]
        if name is None:
            assert newest == "checkpoint_000001"
        else:
            assert newest in ("checkpoint_000001", name), newest
            assert newest == name or not Path(promised).exists(), "it was promised"
        check_tree(root, case, newest, [row[0] for row in opened.records])
        assert "checkpoint_000001" in {row[0] for row in opened.records}, "the one before stays with last=2"
        if case == "attempts":
            check_attempts(root, promised)
        elif newest == name:
            check_contents(storage, name, contents)
        if go_on:
            step = next(_counter)
            source = write(f"{root}.more", {"w.bin": b"more"})
            client.ingest(storage, intake(opened, "cccccccc", step, f"checkpoint_{step:06d}", {0: source})).result(60)
            names = [row[0] for row in client.run_op("records").result(60)]
            assert names[0] == f"checkpoint_{step:06d}"
            check_tree(root, case, newest, names)
    if user is not None:
        assert tree(user) == tree(f"{root}.user"), "a directory that a rank keeps was touched"
    return int(newest == name)


def check_contents(storage, name, contents):
    manifest = read_manifest(storage, name)
    assert verify(storage, name, deep=True).ok
    found = {e.path: storage.read(f"{name}/{e.path}") for e in manifest.files if e.role != "digests"}
    assert found == contents, sorted(found)
    if contents is MERGED:
        assert read_metadata(storage, f"{name}/.metadata.json") == {"rank": 1}
    if contents is STATE:
        assert {e.path: e.role for e in manifest.files if e.role in ("state", "tensors")}.keys() == STATE.keys() - {
            "extra/x"
        }


def check_tree(root, case, newest, names):
    """Foreign files as they were; of ours only what the committed checkpoints list, and the run's own files."""
    there = tree(root)
    for path, data in FOREIGN.items():
        assert there.pop(path) == data, f"foreign file {path} was touched"
    storage = LocalStorage(Path(root))
    if case != "in_place":
        names = [*names, "placed"]  # somebody's checkpoint that is none of ours
    elif newest != "placed":
        names = [*names, "placed"]
    for name in names:
        assert verify(storage, name, deep=True).ok, name
        for path in ("manifest.json", *(one.path for one in read_manifest(storage, name).files)):
            del there[f"{name}/{path}"]
        there.pop(f"{name}/.metadata.json", None)
    there.pop("placed/extra/x", None)
    litter = [path for path in there if path not in ("run.json", "lease.json", ".lease.lock")]
    litter = [path for path in litter if not (path.startswith("reports/") and path.endswith(".jsonl"))]
    assert not litter, f"litter: {litter}"


def check_attempts(root, promised):
    index = RunIndex.load(LocalStorage(Path(root)))
    assert index.damage is None
    numbers = [one.attempt for one in index.attempts]
    assert numbers == sorted(set(numbers))
    assert index.attempts[-1].start_id == "cccccccc"
    ended = [one.details for one in index.attempts if one.details]
    assert ended in ([], [{"number": 1}], [{"number": 1}, {"number": 2}]), ended
    if Path(promised).exists():
        assert len(ended) == 2
        assert index.notes == {"n": 2}
    before = index.attempts[:-1]
    index.rebuild_attempts()
    assert [one.details for one in index.attempts[:-1]] == [one.details for one in before]


def warm_up():
    """Import here, before any fork, what the first life imports."""
    with contextlib.suppress(HoldfastError), WriterClient.start(thread=True) as client:
        client.run_op("records").result(20)


warm_up()
